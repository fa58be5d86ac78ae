//! Scripts of policies, and of rules that change while flows are open. That the programs pick alike is shown by the replay of their choices
//! (`tests/local/replay.rs`).

use std::collections::BTreeMap;
use std::net::SocketAddr;

use lb_common::abi::Policy;

use super::FOR_LONG;
use super::stage::{BACKENDS, Stage, address, script};

impl Stage {
    fn open_by_backend(&self) -> BTreeMap<SocketAddr, u32> {
        self.open.iter().fold(BTreeMap::new(), |mut counts, flow| {
            *counts.entry(flow.backend).or_default() += 1;
            counts
        })
    }

    fn open_more(&mut self, count: u32) {
        for _ in 0..count {
            self.connect().expect("all are well");
        }
    }
}

#[test]
fn least_loaded_fills_what_is_empty_and_goes_round_among_equals() {
    script("policy = \"least-loaded\"", |stage| {
        stage.open_more(60);
        assert_eq!(stage.open_by_backend(), BACKENDS.map(|backend| (address(backend), 20)).into());
        let (mut ends, keep): (Vec<_>, Vec<_>) = std::mem::take(&mut stage.open)
            .into_iter()
            .partition(|flow| flow.backend == address(BACKENDS[1]));
        let rest = ends.split_off(10);
        stage.open = ends;
        stage.close_all();
        stage.open = [keep, rest].concat();
        stage.open_more(10);
        assert_eq!(stage.open_by_backend(), BACKENDS.map(|backend| (address(backend), 20)).into());
        // Nothing stays open: all are equal, and are taken in turn.
        stage.close_all();
        let before = stage.sent.clone();
        assert_eq!(stage.dial(300), 0);
        assert!(stage.sent.iter().all(|(backend, sent)| sent - before[backend] == 100), "{:?}", stage.sent);
    });
}

#[test]
fn every_policy_may_be_switched_to_with_flows_open() {
    script("", |stage| {
        stage.open_more(24);
        let before = stage.open_by_backend();
        for policy in Policy::ALL.into_iter().chain([Policy::WeightedRoundRobin]) {
            stage.configure(&format!("policy = \"{}\"", policy.name()));
            assert_eq!(stage.open_by_backend(), before, "{policy:?}");
            assert_eq!(stage.dial(9), 0, "{policy:?}");
            stage.check();
        }
    });
}

#[test]
fn ejection_that_is_turned_off_takes_everybody_back() {
    script(FOR_LONG, |stage| {
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        stage.configure("ejection = \"off\"");
        assert!(!stage.slot(address(BACKENDS[0])).is_ejected);
        assert_eq!(stage.dial(64), 64 / 3 + 1);
        stage.configure(FOR_LONG);
        assert_eq!(stage.dial(60), 5, "and on again");
    });
}
