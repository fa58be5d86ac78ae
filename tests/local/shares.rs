//! Shares are exact: a CPU's cursor that goes once round a table gives every backend exactly its
//! entries.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use lb_view::explanation::{Explanation, SubsetMember};

use stage::fixture::{Fixture, SERVICE};

fn explanation(fixture: &Fixture) -> Explanation {
    fixture.setup.document::<Vec<_>>(&["explain", "users"]).remove(0)
}

/// The entries of each backend in the table, according to `explain`.
fn entries(fixture: &Fixture) -> BTreeMap<String, u32> {
    let members = explanation(fixture).members;
    let name = |address: SocketAddr| {
        let backend = fixture.backends.iter().find(|backend| backend.address() == address);
        backend.expect("a backend of the test").name().to_owned()
    };
    let entry = |member: &SubsetMember| (name(member.address), member.entries);
    members.iter().map(entry).collect()
}

#[test]
fn weighted_shares_are_exact_over_a_table() {
    let mut fixture = Fixture::without_daemon();
    fixture.write_endpoints(&[
        ("127.0.0.1:8001", "weight = 1"),
        ("127.0.0.1:8002", "weight = 3"),
        ("127.0.0.1:8003", "weight = 4"),
    ]);
    fixture.start();
    let expected = entries(&fixture);
    assert_eq!(
        expected,
        [("b1", 128), ("b2", 384), ("b3", 512)].map(|(name, n)| (name.to_owned(), n)).into()
    );
    let mut probe = fixture.probe();
    // Wherever the cursor starts, 1,024 picks are the whole table.
    assert_eq!(probe.dial_many(SERVICE, 1024), expected);
    // The cursor continues from its position: an eighth of the table is an eighth of each share.
    let eighth: BTreeMap<_, _> = expected.iter().map(|(name, count)| (name.clone(), count / 8)).collect();
    assert_eq!(probe.dial_many(SERVICE, 128), eighth);
}

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
