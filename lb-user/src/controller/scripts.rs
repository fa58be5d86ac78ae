//! Scripts: tests of a daemon on a simulated kernel, without privileges. They change lists,
//! configurations and cgroups, make connects, and advance the time.
//!
//! Each script runs twice: first without faults, then with a failure of every tenth kernel
//! operation on average, chosen from a fixed seed, and with repeated and late events. In both runs,
//! each step must be safe: connects choose only backends that were not removed, and counts are
//! exact. Once the faults have stopped, the final state must be the same as without faults.

mod stage;

mod ejection;

mod policies;

mod lists;

mod clients;

mod views;

mod health;

mod reports;

mod contract;

mod closes;

mod flows;

mod overrides;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use lb_common::abi::BackendState;
use lb_common::ending::Ending;
use lb_fake::{Connect, FakeCgroup};
use lb_kernel::{DatapathError, Kernel as _};

pub use self::stage::Wire;
use self::stage::{
    BACKENDS, CONFIG, FAULTS_PER_MILLE, SEED, SERVICE, Stage, address, cgroup_path, list_of, script,
};
use super::{BackgroundWork, Event, WorkResult};

const FOR_LONG: &str = "ejection = { base = \"1h\", max = \"1h\" }";
const BRIEFLY: &str = "ejection = { base = \"1s\", max = \"2s\" }\nslow_start = \"off\"";

#[test]
fn connects_are_spread_over_the_backends_of_the_list() {
    script("", |stage| {
        assert_eq!(stage.dial(300), 0);
        // 64 entries cannot be divided equally among three backends.
        assert!(
            stage.sent.len() == 3 && stage.sent.values().all(|sent| (98..=102).contains(sent)),
            "{:?}",
            stage.sent
        );
    });
}

#[test]
fn a_dead_backend_costs_five_connects_with_and_without_a_daemon() {
    for has_daemon in [true, false] {
        script(FOR_LONG, |stage| {
            if !has_daemon {
                stage.kill();
            }
            stage.dead.insert(address(BACKENDS[0]));
            assert_eq!(stage.dial(300), 5);
            stage.tick();
            assert_eq!(stage.dial(300), 0);
        });
    }
}

#[test]
fn a_trial_readmits_an_ejected_backend() {
    script(BRIEFLY, |stage| {
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        assert_eq!(stage.states()[&address(BACKENDS[0])], (BackendState::Member, true));
        // Until the backend is healthy, each trial fails.
        stage.pass(Duration::from_secs(3));
        assert_eq!(stage.dial(60), 1);
        stage.dead.clear();
        stage.pass(Duration::from_secs(3));
        assert_eq!(stage.dial(60), 0);
        assert_eq!(stage.states()[&address(BACKENDS[0])], (BackendState::Member, false));
    });
}

#[test]
fn verdicts_of_the_programs_outlive_lists_policies_and_starts() {
    script(FOR_LONG, |stage| {
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        stage.list(&[BACKENDS[0], BACKENDS[1], BACKENDS[2], "10.0.0.4:80"]);
        stage.settle();
        let weights = BACKENDS.into_iter().zip(["weight = 3\n", "weight = 2\n", ""]);
        stage.list_text(&weights.map(|(backend, weight)| list_of(&[backend]) + weight).collect::<String>());
        stage.settle();
        stage.configure(&format!("policy = \"random\"\n{FOR_LONG}"));
        assert!(stage.states()[&address(BACKENDS[0])].1);
        for _ in 0..3 {
            stage.start(&BACKENDS);
            assert_eq!(stage.dial(60), 0);
            assert!(stage.states()[&address(BACKENDS[0])].1);
        }
    });
}

#[test]
fn a_removed_backend_retains_its_slot_and_counts_until_its_last_flow_ends() {
    script("", |stage| {
        for _ in 0..3 {
            stage.connect().expect("all backends accept connects");
        }
        stage.list(&BACKENDS[1..]);
        stage.stop_faults();
        assert_eq!(stage.states()[&address(BACKENDS[0])].0, BackendState::Leaving);
        assert_eq!(stage.dial(60), 0);
        assert_eq!(stage.sent[&address(BACKENDS[0])], 1, "no new flow goes to the removed backend");
        stage.close_all();
        stage.stop_faults();
        assert_eq!(stage.states().len(), 2);
        stage.kernel.faults().fail_some(FAULTS_PER_MILLE, SEED);
        stage.list(&BACKENDS);
        stage.settle();
        assert_eq!(stage.dial(30), 0);
        stage.stop_faults();
        // `check` compares the backend's count with all flows that were ever sent to it.
        assert_eq!(stage.states()[&address(BACKENDS[0])].0, BackendState::Member);
        assert_eq!(stage.sent[&address(BACKENDS[0])], 11);
    });
}

/// Until a wait for readers succeeds, a program may still read a schedule entry with the slot.
#[test]
fn a_slot_stays_until_a_wait_for_readers_succeeds() {
    script("", |stage| {
        stage.hangs = |work| matches!(work, BackgroundWork::WaitForReaders);
        stage.list(&BACKENDS[1..]);
        stage.settle();
        for _ in 0..3 {
            let source = io::Error::from_raw_os_error(libc::ENOMEM);
            let failed = DatapathError::PinDirectory { path: PathBuf::new(), source };
            stage.end_hung(WorkResult::ReadersGone(Err(failed)));
            stage.pass(Duration::from_secs(3));
            assert_eq!(stage.states().len(), 3);
        }
        stage.finish_hung();
        stage.stop_faults();
        assert_eq!(stage.states().len(), 2);
    });
}

#[test]
fn constantly_changing_lists_lose_no_count_and_no_slot() {
    const SEVEN: [&str; 7] = [
        "10.0.0.1:80",
        "10.0.0.2:80",
        "10.0.0.3:80",
        "10.0.0.4:80",
        "10.0.0.5:80",
        "10.0.0.6:80",
        "10.0.0.7:80",
    ];
    script("", |stage| {
        for turn in 0..60 {
            let (from, to) = (turn % 4, 4 + turn % 3);
            stage.list(&SEVEN[from..=to]);
            stage.tick();
            stage.dial(7);
        }
        stage.list(&SEVEN);
        stage.stop_faults();
        assert_eq!(stage.states().len(), 7);
        let before = stage.sent.clone();
        assert_eq!(stage.dial(70), 0);
        let new = stage.sent.iter().map(|(backend, sent)| sent - before.get(backend).copied().unwrap_or(0));
        assert!(new.eq([10; 7]), "{:?}", stage.sent);
    });
}

#[test]
fn a_recreated_cgroup_is_covered_and_the_old_one_until_its_flows_end() {
    script("", |stage| {
        stage.connect().expect("all backends accept connects");
        let old = stage.place;
        stage.kernel.remove_cgroup(&cgroup_path("web"));
        stage.place = stage.kernel.make_cgroup(&cgroup_path("web"));
        assert_eq!(stage.connect(), Err(0), "no program is attached yet");
        stage.changed(cgroup_path("web"));
        stage.settle();
        stage.stop_faults();
        assert_eq!(stage.dial(3), 0);
        let new = stage.place;
        assert!(stage.task().cgroup().is_some_and(|cgroup| FakeCgroup(cgroup.id) == new));
        let kernel = |stage: &Stage| {
            let kernel = stage.task().datapath().kernel();
            (
                kernel.begins_at().expect("faults are off"),
                kernel.has_old_links(new.0).expect("faults are off"),
            )
        };
        assert_eq!(
            kernel(stage),
            (vec![new.0], true),
            "no flow begins in the old cgroup, and one is still open"
        );
        stage.close_all();
        stage.stop_faults();
        assert_eq!(kernel(stage), (vec![new.0], false));
        assert_eq!(stage.kernel.connect(old, 1, address(SERVICE)), Connect::Unchanged);
    });
}

#[test]
fn a_client_removed_by_an_operator_stays_removed() {
    script("", |stage| {
        stage.stop_faults();
        stage.kernel.detach(&stage.pins()).expect("faults are off");
        assert_eq!(stage.connect(), Err(0));
        stage.changed(cgroup_path("web"));
        for _ in 0..60 {
            stage.tick();
            assert_eq!(stage.connect(), Err(0));
        }
        assert!(stage.task().is_unpinned());
        assert!(stage.faults().iter().any(|fault| fault.starts_with("the client's pins were removed")));
        // If the configuration is written again without a change, the removed client stays removed.
        stage.write_config("");
        stage.changed(CONFIG);
        stage.tick();
        assert_eq!((stage.connect(), stage.pinned()), (Err(0), vec![]));
        // SIGHUP creates the client again. A changed configuration or a restart has the same
        // effect.
        (stage.sent, stage.open) = Default::default();
        stage.kernel.faults().fail_some(FAULTS_PER_MILLE, SEED);
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        assert_eq!((stage.dial(3), stage.faults()), (0, vec![]));
        stage.kernel.detach(&stage.pins()).expect("faults are off");
        stage.changed(cgroup_path("web"));
        stage.tick();
        (stage.sent, stage.open) = Default::default();
        stage.write_config("policy = \"round-robin\"");
        stage.changed(CONFIG);
        stage.stop_faults();
        assert_eq!((stage.dial(3), stage.faults()), (0, vec![]));
    });
}

impl Stage {
    /// Opens `held` connections to each of two backends. Then adds a third backend, which refuses
    /// connects. Each second, calls `each_second` and dials `rate` times. Returns the number of
    /// failed connects.
    fn fail_beside(
        &mut self,
        held: usize,
        seconds: u32,
        rate: u32,
        each_second: impl Fn(&mut Self, u32),
    ) -> u32 {
        self.list(&BACKENDS[1..]);
        self.settle();
        while self.open.len() < 2 * held {
            self.connect().expect("both backends accept connects");
        }
        self.tick();
        self.dead.insert(address(BACKENDS[0]));
        self.list(&BACKENDS);
        self.settle();
        self.dial_each_second(seconds, rate, each_second)
    }

    /// Each second, calls `each_second` and dials `rate` times, and leaves connections open.
    /// Returns the number of failed connects.
    fn dial_each_second(&mut self, seconds: u32, rate: u32, each_second: impl Fn(&mut Self, u32)) -> u32 {
        let mut failed = 0;
        for second in 0..seconds {
            self.tick();
            each_second(self, second);
            failed += self.dial(rate);
        }
        failed
    }
}

#[test]
fn a_failing_backend_gets_at_most_its_share() {
    for policy in ["p2c", "least-loaded"] {
        for (held, rate) in [(0, 5), (20, 1), (100, 5), (100, 40)] {
            let lines = format!("policy = \"{policy}\"\nejection = \"off\"\nerror_decay = \"5s\"");
            script(&lines, |stage| {
                let failed = stage.fail_beside(held, 40, rate, |_, _| {});
                let share = 40 * rate / 3;
                assert!(
                    (1..=share).contains(&failed),
                    "{policy}, {held} held, {rate} connects/s: {failed} failed, share {share}"
                );
            });
        }
    }
}

/// `p2c` compares the failing backend with one other backend at a time. Even if that backend has
/// few open connections and other backends have many, the failing backend must not get more
/// connects than its share.
#[test]
fn unequal_open_flows_give_a_failing_backend_no_more_connects() {
    let list = |first: &str| {
        let weights = [first, "weight = 4", "weight = 4"].into_iter().zip(BACKENDS);
        weights
            .map(|(weight, backend)| format!("[[endpoint]]\naddress = \"{backend}\"\n{weight}\n"))
            .collect::<String>()
    };
    for (held, rate) in [([20, 100], 4), ([100, 20], 20), ([0, 50], 4)] {
        script("policy = \"p2c\"\nejection = \"off\"\nerror_decay = \"5s\"", |stage| {
            stage.list_text(&list("weight = 0"));
            stage.settle();
            while stage.open.len() < 200 {
                stage.connect().expect("both backends accept connects");
            }
            for (backend, held) in BACKENDS[1..].iter().zip(held) {
                let theirs = stage.open.iter().filter(|flow| flow.backend == address(backend)).count();
                for _ in held..theirs {
                    let at = stage.open.iter().position(|flow| flow.backend == address(backend));
                    let flow = stage.open.swap_remove(at.expect("the backend has open flows"));
                    stage.kernel.end(flow, Ending::Closed, 100, 100);
                }
            }
            stage.tick();
            stage.dead.insert(address(BACKENDS[0]));
            stage.list_text(&list("weight = 1"));
            stage.settle();
            let failed = stage.dial_each_second(60, rate, |_, _| {});
            let share = 60 * rate / 9;
            assert!(
                (1..=share).contains(&failed),
                "{held:?} held, {rate} connects/s: {failed} failed, share {share}"
            );
        });
    }
}

/// From time to time, each of the other backends loses a single connection.
#[test]
fn single_errors_of_others_give_a_failing_backend_no_more_connects() {
    for policy in ["p2c", "least-loaded"] {
        for every in [2, 4, 20] {
            let lines = format!("policy = \"{policy}\"\nejection = \"off\"\nerror_decay = \"5s\"");
            script(&lines, |stage| {
                let failed = stage.fail_beside(100, 40, 5, |stage, second| {
                    if second % every == 0 {
                        for backend in &BACKENDS[1..] {
                            let at = stage.open.iter().position(|flow| flow.backend == address(backend));
                            let flow = stage.open.swap_remove(at.expect("the backend has open flows"));
                            stage.kernel.end(flow, Ending::Reset, 100, 100);
                        }
                    }
                });
                assert!(
                    (1..=66).contains(&failed),
                    "{policy}, resets each {every} s: {failed} of 200 failed"
                );
            });
        }
    }
}

#[test]
fn a_recovered_backend_soon_gets_connects() {
    for policy in ["p2c", "least-loaded"] {
        for (rate, seconds) in [(20, 15), (1, 40)] {
            let lines = format!("policy = \"{policy}\"\nejection = \"off\"\nerror_decay = \"5s\"");
            script(&lines, |stage| {
                stage.fail_beside(100, 20, 20, |_, _| {});
                stage.dead.clear();
                stage.close_all();
                let before = stage.sent[&address(BACKENDS[0])];
                stage.dial_each_second(seconds, rate, |_, _| {});
                let got = stage.sent[&address(BACKENDS[0])] - before;
                assert!(got > 0, "{policy}, {rate} connects/s: none reached it in {seconds} s");
            });
        }
    }
}

/// Each operation fails once, in a separate run. The final state must be the same as without the
/// fault, and the next daemon must be able to adopt the maps.
#[test]
fn one_failed_operation_does_not_change_the_final_state() {
    let run = |fails: Option<u64>| {
        let mut stage = Stage::new("");
        if let Some(others) = fails {
            stage.kernel.faults().fail_after(others);
        }
        stage.start(&BACKENDS);
        stage.dial(9);
        stage.connect().expect("all backends accept connects");
        for list in [&BACKENDS[1..], &BACKENDS[..1], &BACKENDS[..2]] {
            stage.list(list);
            stage.tick();
            stage.dial(4);
        }
        stage.close_all();
        stage.list(&BACKENDS);
        let steps = stage.kernel.faults().steps();
        stage.stop_faults();
        assert_eq!(stage.dial(9), 0);
        stage.start(&BACKENDS);
        assert_eq!(stage.dial(9), 0);
        (steps, stage.states())
    };
    let (steps, expected) = run(None);
    assert!(steps > 30, "{steps}");
    for step in 0..steps {
        assert_eq!(run(Some(step)).1, expected, "operation {step} of {steps} failed");
    }
}
