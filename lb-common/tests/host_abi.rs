//! The debug output of the host's maps.

use lb_common::abi::host::SenderKey;

#[test]
fn debug_output_hides_the_key_of_a_sender() {
    let key = SenderKey { id: 3, key: [0xab; 16], ..SenderKey::default() };
    assert_eq!(format!("{key:?}"), "SenderKey { id: 3, .. }");
}
