//! Scripts of connects that use a table older than the state of its backends, and of failures that
//! `status` shows to operators.

use lb_common::abi::{BackendState, NO_SLOT, StateWord};
use lb_common::ending::Ending;
use lb_report::wire::Readiness;

use crate::controller::scripts::reports::REPORTS;
use crate::controller::scripts::stage::{BACKENDS, Stage, address, list_of, script};

impl Stage {
    /// Makes the backends in these slots usable and all others unusable, and sets the fallback.
    /// Kills the daemon first, so that it publishes no new table.
    fn leave_with(&mut self, usable: &[u32], fallback: u32) {
        self.kill();
        let pins = self.pins();
        for slot in 0..5 {
            let state = StateWord::new(usable.contains(&slot).into(), BackendState::Member);
            self.kernel.change_backend(&pins, slot as usize, |row| row.state = state);
        }
        self.kernel.change_service(&pins, 0, |row| row.fallback = fallback);
    }
}

#[test]
fn unusable_backends_are_skipped_and_the_fallback_serves_last() {
    let five = [BACKENDS[0], BACKENDS[1], BACKENDS[2], "10.0.0.4:80", "10.0.0.5:80"];
    script("policy = \"round-robin\"", |stage| {
        stage.list(&five);
        stage.stop_faults();
        let slots = five.map(|backend| stage.slot(address(backend)).at.slot.number());
        let of = |numbers: &[usize]| numbers.iter().map(|number| address(five[*number])).collect();
        stage.leave_with(&slots[1..], NO_SLOT);
        assert_eq!(stage.dialled(300), of(&[1, 2, 3, 4]));
        stage.leave_with(&slots, NO_SLOT);
        assert_eq!(stage.dialled(300), of(&[0, 1, 2, 3, 4]), "one store makes the backend usable again");
        // With five equal weights, any five entries in a row contain five different backends. If
        // only one backend is usable, it receives all connects.
        stage.leave_with(&slots[4..], NO_SLOT);
        assert_eq!((stage.dial(200), stage.dialled(200)), (0, of(&[4])));
        stage.leave_with(&[], slots[2]);
        assert_eq!((stage.dial(100), stage.dialled(100)), (0, of(&[2])));
        stage.leave_with(&[], NO_SLOT);
        assert_eq!(stage.connect(), Err(113));
        stage.start(&five);
        let outcomes = stage.service().outcomes;
        assert_eq!((outcomes["fallback"], outcomes["no-backend"]), (200, 1));
    });
}

#[test]
fn a_lame_duck_is_the_fallback_if_no_other_backend_is_usable() {
    script(REPORTS, |stage| {
        stage.announce(BACKENDS[0], Readiness::LameDuck);
        stage.stop_faults();
        let slot = stage.slot(address(BACKENDS[0])).at.slot.number();
        stage.leave_with(&[], slot);
        assert_eq!(stage.dialled(20), [address(BACKENDS[0])].into());
    });
}

#[test]
fn a_backend_is_failing_until_a_connect_succeeds() {
    script("ejection = \"off\"", |stage| {
        stage.stop_faults();
        stage.dead.insert(address(BACKENDS[0]));
        let fail = |stage: &mut Stage, times| {
            let mut failed = 0;
            while failed < times {
                failed += stage.dial(1);
            }
            stage.tick();
            (stage.backend(BACKENDS[0]).failing, stage.degraded())
        };
        assert_eq!(fail(stage, 4), (false, vec![]), "four failures may be chance");
        let fault = format!(
            "client web, service users, backend {}: every connect of the last minute failed (5 in total)",
            BACKENDS[0]
        );
        assert_eq!(fail(stage, 1), (true, vec![fault]));
        assert_eq!([1, 2].map(|at| stage.backend(BACKENDS[at]).failing), [false; 2]);
        stage.dead.clear();
        assert_eq!(stage.dial(3), 0);
        assert_eq!(fail(stage, 0), (false, vec![]), "a backend with one success is not failing");
    });
}

#[test]
fn refusals_at_the_limit_are_reported() {
    script("active_limit = 1\noverflow = \"refuse\"", |stage| {
        stage.stop_faults();
        for _ in BACKENDS {
            stage.connect().expect("the backends are below their limit");
        }
        stage.tick();
        assert_eq!(stage.degraded(), [""; 0]);
        for _ in 0..3 {
            assert_eq!(stage.connect(), Err(113));
        }
        stage.tick();
        let fault = "client web, service users: refused 3 connects in the last minute: every backend was at \
                     its `active_limit`";
        assert_eq!(stage.degraded(), [fault]);
        assert_eq!(stage.service().limited_60s, Some(3));
    });
}

/// R17, a bug of another load balancer: after all backends had been restarted one after another,
/// load stayed uneven for a long time. The first backend to restart retained the load that the
/// others lost in the meantime.
#[test]
fn r17_shares_are_even_right_after_a_rolling_restart() {
    script("ejection = { base = \"1s\", max = \"1s\" }", |stage| {
        let dial_for = |stage: &mut Stage, seconds| {
            for _ in 0..seconds {
                stage.tick();
                stage.dial(30);
            }
        };
        for backend in BACKENDS {
            stage.dead.insert(address(backend));
            dial_for(stage, 4);
            assert!(stage.slot(address(backend)).is_ejected);
            stage.dead.clear();
            dial_for(stage, 4);
            assert!(!stage.slot(address(backend)).is_ejected);
        }
        stage.stop_faults();
        let before = stage.sent.clone();
        assert_eq!(stage.dial(3_000), 0);
        for backend in BACKENDS {
            let since = stage.sent[&address(backend)] - before[&address(backend)];
            assert!((990..=1_010).contains(&since), "{since} connects");
            let shown = stage.backend(backend);
            assert_eq!((shown.state.as_str(), shown.withheld), ("healthy", 0), "{shown:?}");
            assert!(shown.readmissions >= 1, "{shown:?}");
        }
    });
}

/// R18, a bug of another load balancer: in panic, all backends counted as equal, so connects went
/// to hosts that were being drained.
#[test]
fn r18_panic_is_reported_and_chooses_no_lame_ducks_or_drained_backends() {
    const DEAD: [&str; 3] = ["10.0.1.1:80", "10.0.1.2:80", "10.0.1.3:80"];
    let [well, lame, drained] = BACKENDS;
    let with = |backends: &[&str], lines: &str| list_of(backends).trim_end().to_owned() + lines + "\n";
    let (lame_line, drained_line) =
        (with(&[lame], "\nstate = \"lame-duck\""), with(&[drained], "\nweight = 0"));
    script("ejection = { base = \"2s\", max = \"1h\" }", |stage| {
        // The list has four backends with a weight other than 0, and three of them are dead.
        stage.list(&[DEAD[0], DEAD[1], DEAD[2], well]);
        stage.list_text(&(list_of(&[DEAD[0], DEAD[1], DEAD[2], well]) + &lame_line + &drained_line));
        stage.stop_faults();
        stage.dead = DEAD.map(address).into();
        assert_eq!(stage.dial(80), 15);
        let expected = "service users: panic: too few backends are available (3 ejected)";
        let panics = |stage: &Stage| {
            let is_fault = stage.degraded().iter().any(|fault| fault.contains(expected));
            assert_eq!(stage.service().is_panic, is_fault, "{:?}", stage.degraded());
            is_fault
        };
        // While the healthy backend serves, there is no panic. When it has not served for some
        // time, panic begins.
        stage.tick();
        assert!(!panics(stage));
        stage.pass(std::time::Duration::from_mins(2));
        assert!(panics(stage));
        // In panic, failing backends have their shares again; lame ducks and drained backends have
        // none. No daemon is necessary for this.
        stage.kill();
        let before = stage.sent.clone();
        assert_eq!(stage.dial(80), 60);
        assert_eq!(stage.sent[&address(well)] - before[&address(well)], 20);
        stage.try_to_start(1);
        for _ in 0..3 {
            stage.dial(20);
            stage.tick();
        }
        assert!(!panics(stage), "the healthy backend serves");
        // If the list has no ordinary backend, the lame duck serves. If there is no lame duck
        // either, no backend serves, because a drained backend never serves.
        stage.list_text(&(lame_line.clone() + &drained_line));
        stage.stop_faults();
        assert_eq!((stage.dial(20), stage.dialled(20)), (0, [address(lame)].into()));
        stage.list_text(&drained_line);
        stage.stop_faults();
        assert_eq!(stage.connect(), Err(113));
    });
}

/// R15, a bug of another load balancer: counts were stored by position in a table. After a rebuild
/// or a restart, these counts and the open connections were attributed to other backends.
#[test]
fn r15_counts_stay_with_their_backend_through_new_tables_and_restarts() {
    script("", |stage| {
        for _ in 0..9 {
            stage.connect().expect("all backends accept connects");
        }
        let counts = |stage: &Stage| {
            BACKENDS.map(|backend| {
                let shown = stage.backend(backend);
                (shown.started, shown.active)
            })
        };
        stage.stop_faults();
        assert_eq!(counts(stage), [(3, 3); 3]);
        // The order, the weights and the length of the list change, so every position in the table
        // changes.
        let added: Vec<String> = (10..60).map(|n| format!("10.0.1.{n}:80")).collect();
        let added: String = added.iter().map(|one| format!("{}weight = 0\n", list_of(&[one]))).collect();
        let known = [(BACKENDS[2], 5), (BACKENDS[1], 2), (BACKENDS[0], 1)];
        let known = known.map(|(one, weight)| format!("{}weight = {weight}\n", list_of(&[one])));
        stage.list_text(&(added + &known.concat()));
        stage.stop_faults();
        assert_eq!(stage.backend(BACKENDS[2]).weight, 5);
        assert_eq!(counts(stage), [(3, 3); 3]);
        stage.try_to_start(1);
        assert_eq!(counts(stage), [(3, 3); 3]);
        // Flows that end while no daemon runs are also counted for their backend.
        stage.kill();
        let at = stage.open.iter().position(|flow| flow.backend == address(BACKENDS[1]));
        let flow = stage.open.swap_remove(at.expect("a flow is open"));
        stage.kernel.end(flow, Ending::Closed, 100, 100);
        stage.try_to_start(1);
        assert_eq!(counts(stage), [(3, 3), (3, 2), (3, 3)]);
        stage.close_all();
        assert_eq!(counts(stage), [(3, 0); 3]);
    });
}
