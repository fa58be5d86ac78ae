//! Shares are exact: while a CPU's cursor passes all entries of a table once, each backend gets
//! exactly as many connects as it has entries.

use std::collections::BTreeMap;

use stage::fixture::{Fixture, SERVICE};

#[test]
fn every_cpu_has_its_own_cursor() {
    let mut fixture = Fixture::without_daemon();
    fixture.write_endpoints(&[("127.0.0.1:8001", "weight = 1"), ("127.0.0.1:8002", "weight = 7")]);
    fixture.start();
    let expected = BTreeMap::from([("b1".to_owned(), 128), ("b2".to_owned(), 896)]);
    for cpu in [0, 1] {
        let mut probe = fixture.probe();
        probe.pin(cpu);
        assert_eq!(probe.dial_many(SERVICE, 1024), expected, "CPU {cpu}");
    }
}
