//! Shares are exact: a CPU's cursor that goes once round a table gives every backend exactly its entries.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use lb_view::explanation::{Explanation, SubsetMember};
use stage::{address, eventually, replace};

use stage::fixture::{Fixture, SERVICE, config};

fn explanation(fixture: &Fixture) -> Explanation {
    fixture.setup.document::<Vec<_>>(&["explain", "users"]).remove(0)
}

/// Connects to each backend in `explain`'s count of entries.
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
    // The cursor goes on where it stands: an eighth of the table is an eighth of each share.
    let eighth: BTreeMap<_, _> = expected.iter().map(|(name, count)| (name.clone(), count / 8)).collect();
    assert_eq!(probe.dial_many(SERVICE, 128), eighth);
}

#[test]
fn round_robin_ignores_weights_and_may_be_switched_to_with_flows_open() {
    let mut fixture = Fixture::without_daemon();
    fixture.write_endpoints(&[
        ("127.0.0.1:8001", "weight = 1"),
        ("127.0.0.1:8002", "weight = 30"),
        ("127.0.0.1:8003", "weight = 0"),
    ]);
    fixture.start();
    let mut probe = fixture.probe();
    let by_weight = probe.dial_many(SERVICE, 1024);
    assert_eq!((by_weight["b1"], by_weight["b2"]), (33, 991));
    let open = probe.dial(SERVICE);
    let path = fixture.setup.folder.join("socklb.toml");
    let policy = |name: &str| {
        let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, &format!("policy = \"{name}\""));
        replace(&path, &text);
        eventually("the policy is another", || explanation(&fixture).inputs.policy, |now| now == name);
    };
    policy("round-robin");
    let expected = BTreeMap::from([("b1".to_owned(), 512), ("b2".to_owned(), 512)]);
    assert_eq!(entries(&fixture), expected);
    eventually("the table is replaced", || probe.dial_many(SERVICE, 1024), |got| *got == expected);
    let text = String::from_utf8_lossy(&fixture.setup.run(&["explain", "users"]).stdout).into_owned();
    assert!(text.contains("share = 1 / members, for round-robin ignores weights"), "{text}");
    policy("weighted-round-robin");
    eventually("the table is replaced", || probe.dial_many(SERVICE, 1024), |got| *got == by_weight);
    assert_eq!(probe.peer(open.socket), address(SERVICE));
    // The flow has not noticed.
    fixture.setup.active_becomes(1);
}

#[test]
fn every_cpu_walks_on_its_own() {
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

#[test]
fn the_cursor_goes_on_over_a_new_table() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    // A cursor that restarted at every table would give the first entries' backends everything.
    let mut total = BTreeMap::new();
    for round in 0..6 {
        let weight = if round % 2 == 0 { "weight = 2" } else { "weight = 1" };
        fixture.write_endpoints(&[
            ("127.0.0.1:8001", weight),
            ("127.0.0.1:8002", weight),
            ("127.0.0.1:8003", weight),
        ]);
        let wanted = if round % 2 == 0 { 2 } else { 1 };
        eventually(
            "the weights are in the kernel",
            || fixture.setup.backends("web", "users"),
            |backends| backends.iter().all(|backend| backend.weight == wanted),
        );
        for (name, count) in probe.dial_many(SERVICE, 1) {
            *total.entry(name).or_insert(0) += count;
        }
    }
    assert_eq!(total, ["b1", "b2", "b3"].map(|name| (name.to_owned(), 2)).into());
}

#[test]
fn status_shows_the_shares_that_were_had() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    probe.dial_many(SERVICE, 1024);
    let backends = fixture.setup.backends("web", "users");
    let connects: Vec<u64> = backends.iter().map(|backend| backend.started).collect();
    assert_eq!(connects, [342, 341, 341]);
    for backend in &backends {
        assert_eq!(backend.share, Some(backend.share_wanted));
        assert_eq!(backend.share_60s, Some(backend.share_wanted));
    }
    let service = fixture.setup.service();
    assert_eq!(service.skew, Some(1.0));
    assert_eq!(service.outcomes["forwarded"], 1024);
}
