//! Policies in the kernel: how `p2c` distributes open flows, and what happens at the active limit.

use std::collections::BTreeMap;

use lb_common::abi::{Overflow, Policy, Service, map};
use stage::maps::array;
use stage::{Probe, SocketId, eventually, replace};

use stage::fixture::{Fixture, SERVICE, config};

/// Starts a daemon. Its service has these lines in the configuration, and endpoints of these
/// weights.
fn start(lines: &str, weights: [u32; 3]) -> Fixture {
    let mut fixture = Fixture::without_daemon();
    weigh(&fixture, weights);
    replace(&fixture.setup.folder.join("socklb.toml"), &text(&fixture, lines));
    fixture.start();
    fixture
}

fn weigh(fixture: &Fixture, weights: [u32; 3]) {
    let lines = weights.map(|weight| format!("weight = {weight}"));
    let [a, b, c] = &lines;
    fixture.write_endpoints(&[("127.0.0.1:8001", a), ("127.0.0.1:8002", b), ("127.0.0.1:8003", c)]);
}

fn text(fixture: &Fixture, lines: &str) -> String {
    // The subset is small enough for a scan. The job has one task, and its subset is all three
    // backends.
    config(&fixture.cgroup, r#"{ file = "users.toml" }"#, &format!("subset = {{ size = 20 }}\n{lines}"))
}

/// Changes the lines of the service while the daemon runs, and waits until the kernel has the
/// policy and the limit.
fn change(fixture: &Fixture, policy: Policy, lines: &str, limit: u32) {
    let lines = format!("policy = \"{}\"\n{lines}", policy.name());
    replace(&fixture.setup.folder.join("socklb.toml"), &text(fixture, &lines));
    let rules = || {
        let services = array::<Service>(&fixture.setup.map("web", map::SERVICES));
        services.get(&0, 0).expect("read the service's row").0.rules
    };
    eventually("the kernel has the rules", rules, |rules| {
        rules.policy == policy as u8 && rules.active_limit == limit
    });
}

/// Opens this many sockets. Returns their ids, each with the name of the backend that it reached.
fn open(probe: &mut Probe, count: usize) -> Vec<(SocketId, String)> {
    (0..count).map(|_| probe.dial(SERVICE)).map(|dialled| (dialled.socket, dialled.name)).collect()
}

fn by_name(sockets: &[(SocketId, String)]) -> BTreeMap<&str, u32> {
    let mut counts = BTreeMap::new();
    for (_, name) in sockets {
        *counts.entry(name.as_str()).or_insert(0) += 1;
    }
    counts
}

fn outcomes(fixture: &Fixture) -> BTreeMap<String, u64> {
    fixture.setup.service().outcomes
}

#[test]
fn connects_at_the_active_limit_follow_the_overflow_rule() {
    let fixture = start("policy = \"round-robin\"", [1, 1, 1]);
    let mut overflowed = 0;
    let mut limited = 0;
    // The three kinds of policies: the first uses consecutive entries, the second samples, the
    // third scans.
    for policy in [Policy::WeightedRoundRobin, Policy::P2c, Policy::LeastLoaded] {
        change(&fixture, policy, "active_limit = 4\noverflow = \"refuse\"", 4);
        let mut probe = fixture.probe();
        let sockets = open(&mut probe, 12);
        assert_eq!(by_name(&sockets), [("b1", 4), ("b2", 4), ("b3", 4)].into(), "{policy:?}");
        let refused = stage::kernel::refusal(libc::EHOSTUNREACH);
        assert_eq!(probe.try_dial(SERVICE).map(|dialled| dialled.name), Err(refused), "{policy:?}");
        limited += 1;
        // After the end of a flow, its backend is below the limit.
        probe.close(sockets[5].0);
        fixture.setup.active_becomes(11);
        assert_eq!(probe.dial(SERVICE).name, sockets[5].1, "{policy:?}");
        let services = array::<Service>(&fixture.setup.map("web", map::SERVICES));
        assert_eq!(
            services.get(&0, 0).expect("read the service's row").0.rules.overflow,
            Overflow::Refuse as u8
        );
        // The opposite change while all flows are open: the flows remain, and more connects
        // succeed.
        change(&fixture, policy, "active_limit = 3", 3);
        fixture.setup.active_becomes(12);
        assert_eq!(by_name(&open(&mut probe, 6)), [("b1", 2), ("b2", 2), ("b3", 2)].into(), "{policy:?}");
        overflowed += 6;
        let outcomes = outcomes(&fixture);
        assert_eq!((outcomes["limited"], outcomes["overflowed"]), (limited, overflowed));
        assert_eq!(outcomes["fallback"], 0);
        probe.kill();
        fixture.setup.active_becomes(0);
    }
}
