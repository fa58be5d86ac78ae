//! Scripts of policies, and of rules that change while flows are open.
//! `tests/local/programs/replay.rs` shows that the kernel programs choose the same backends as the
//! code that these scripts run.

mod choices;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use lb_common::abi::{Policy, RecentErrors};
use lb_common::ending::Ending;
use lb_common::ticks::{TICK_LOG2, tick};

use super::FOR_LONG;
use super::stage::{BACKENDS, Stage, address, list_of, script};

impl Stage {
    fn open_by_backend(&self) -> BTreeMap<SocketAddr, u32> {
        self.open.iter().fold(BTreeMap::new(), |mut counts, flow| {
            *counts.entry(flow.backend).or_default() += 1;
            counts
        })
    }

    fn open_more(&mut self, count: u32) {
        for _ in 0..count {
            self.connect().expect("all backends accept connects");
        }
    }
}

#[test]
fn least_loaded_fills_empty_backends_and_rotates_among_equals() {
    script("policy = \"least-loaded\"", |stage| {
        stage.open_more(60);
        assert_eq!(stage.open_by_backend(), BACKENDS.map(|backend| (address(backend), 20)).into());
        let (mut ends, retained): (Vec<_>, Vec<_>) = std::mem::take(&mut stage.open)
            .into_iter()
            .partition(|flow| flow.backend == address(BACKENDS[1]));
        let rest = ends.split_off(10);
        stage.open = ends;
        stage.close_all();
        stage.open = [retained, rest].concat();
        stage.open_more(10);
        assert_eq!(stage.open_by_backend(), BACKENDS.map(|backend| (address(backend), 20)).into());
        // No connection stays open, so all backends are equal and are chosen in turn.
        stage.close_all();
        let before = stage.sent.clone();
        assert_eq!(stage.dial(300), 0);
        assert!(stage.sent.iter().all(|(backend, sent)| sent - before[backend] == 100), "{:?}", stage.sent);
    });
}

#[test]
fn every_policy_may_be_selected_with_flows_open() {
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
fn round_robin_ignores_weights_and_random_follows_them() {
    script("", |stage| {
        stage.connect().expect("all backends accept connects");
        let weights = ["weight = 1", "weight = 30", "weight = 0"].into_iter().zip(BACKENDS);
        stage.list_text(
            &weights.map(|(line, one)| format!("{}{line}\n", list_of(&[one]))).collect::<String>(),
        );
        stage.stop_faults();
        let got = |stage: &mut Stage, policy: &str| {
            stage.configure(&format!("policy = \"{policy}\""));
            let before = stage.sent.clone();
            assert_eq!(stage.dial(1_024), 0);
            BACKENDS.map(|one| {
                let before = before.get(&address(one)).copied().unwrap_or(0);
                stage.sent.get(&address(one)).copied().unwrap_or(0) - before
            })
        };
        assert_eq!(got(stage, "weighted-round-robin"), [33, 991, 0]);
        assert_eq!(got(stage, "round-robin"), [512, 512, 0]);
        let explained = stage.explained();
        assert!(explained.contains("share = 1 / members: round-robin ignores weights"), "{explained}");
        assert_eq!(got(stage, "weighted-round-robin"), [33, 991, 0]);
        // The samples come from a hash: they are the same in each run, but not in the order of the
        // cursor.
        let [first, second, third] = got(stage, "random");
        assert!(
            (15..=55).contains(&first) && first != 33 && first + second == 1_024 && third == 0,
            "{first} connects to the first backend"
        );
    });
}

/// If a cursor started again with each table, it would send all connects to the backends of the
/// first entries.
#[test]
fn the_cursor_continues_in_a_new_table() {
    script("", |stage| {
        for weight in [2, 1, 2, 1, 2, 1] {
            let endpoint = |one| format!("{}weight = {weight}\n", list_of(&[one]));
            stage.list_text(&BACKENDS.map(endpoint).concat());
            stage.stop_faults();
            assert_eq!(stage.dial(1), 0);
        }
        assert_eq!(stage.sent, BACKENDS.map(|backend| (address(backend), 2)).into());
    });
}

#[test]
fn status_shows_the_actual_shares() {
    script("", |stage| {
        stage.stop_faults();
        assert_eq!(stage.dial(1_024), 0);
        stage.tick();
        let service = stage.service();
        let started: Vec<u64> = service.backends.iter().map(|backend| backend.started).collect();
        assert_eq!(started, [342, 341, 341]);
        for backend in &service.backends {
            let shares = [backend.share, backend.share_60s];
            assert_eq!(shares, [Some(backend.share_wanted); 2], "{backend:?}");
        }
        assert_eq!((service.skew, service.outcomes["forwarded"]), (Some(1.0), 1_024));
    });
}

/// Ticks wrap after 52 days. If decayed errors were not removed, they would count again after the
/// wrap.
#[test]
fn old_errors_are_removed_and_recent_ones_stay() {
    const DAY_NS: u64 = 86_400_000_000_000;
    script("policy = \"p2c\"", |stage| {
        stage.stop_faults();
        let now = tick(lb_kernel::Kernel::now_ns(&stage.kernel));
        let days =
            |days: u64| u32::try_from((days * DAY_NS) >> TICK_LOG2).expect("the time is below 52 days");
        for (slot, age) in [14, 1, 0].into_iter().enumerate() {
            let errors = RecentErrors { count: 2, since: now.wrapping_sub(days(age)) };
            stage.kernel.change_backend(&stage.pins(), slot, |row| row.errors = errors);
        }
        stage.pass(Duration::from_mins(2));
        let counts = [0, 1, 2].map(|slot| {
            let mut count = 0;
            stage.kernel.change_backend(&stage.pins(), slot, |row| count = row.errors.count);
            count
        });
        assert_eq!(counts, [0, 2, 2]);
    });
}

#[test]
fn turning_ejection_off_readmits_all_backends() {
    script(FOR_LONG, |stage| {
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        stage.configure("ejection = \"off\"");
        assert!(!stage.slot(address(BACKENDS[0])).is_ejected);
        assert_eq!(stage.dial(64), 64 / 3 + 1);
        stage.configure(FOR_LONG);
        assert_eq!(stage.dial(60), 5, "ejection works again");
    });
}

#[test]
fn at_the_limit_the_rule_of_the_service_decides_and_is_counted() {
    for policy in Policy::ALL {
        let lines = |rules: &str| format!("policy = \"{}\"\n{rules}", policy.name());
        let each = |count| BACKENDS.map(|backend| (address(backend), count)).into();
        script(&lines("active_limit = 4\noverflow = \"refuse\""), |stage| {
            stage.open_more(12);
            assert_eq!(stage.open_by_backend(), each(4), "{policy:?}");
            assert_eq!(stage.connect(), Err(113), "{policy:?}");
            // The end of one flow makes room, at any backend.
            let flow = stage.open.swap_remove(5);
            stage.kernel.end(flow, Ending::Closed, 100, 100);
            assert_eq!(stage.connect(), Ok(flow.backend), "{policy:?}");
            // A lower limit, without `overflow`, while all flows are open: the flows remain open,
            // and more connects succeed.
            stage.configure(&lines("active_limit = 3"));
            assert_eq!(stage.open_by_backend(), each(4), "{policy:?}");
            stage.open_more(6);
            assert_eq!(stage.open_by_backend(), each(6), "{policy:?}");
            stage.stop_faults();
            let outcomes = stage.service().outcomes;
            let counts = ["limited", "overflowed", "fallback"].map(|outcome| outcomes[outcome]);
            assert_eq!(counts, [1, 6, 0], "{policy:?}");
        });
    }
}
