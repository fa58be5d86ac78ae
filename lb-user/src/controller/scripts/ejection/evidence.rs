//! Scripts of rare evidence against backends: no route to a backend, missing answers in a burst,
//! and dead backends under each policy. The local tests of `evidence` and `ejection` show one case
//! of each kind in the kernel.

use std::time::Duration;

use lb_common::abi::{Policy, RecentErrors, Service};
use lb_common::ending::Ending;
use lb_common::load::PEAK_FRACTION_BITS;

use crate::controller::scripts::FOR_LONG;
use crate::controller::scripts::stage::{BACKENDS, SECOND, Stage, address, list_of, script};

/// A backend to which this host has no route.
const LOST: &str = "10.0.0.9:80";

impl Stage {
    /// Opens a connection. If this host has no route to the chosen backend, no SYN is sent. Returns
    /// whether the connection is open.
    fn open_without_route_to(&mut self, lost: &[&str]) -> bool {
        let mut flow = self.choose().expect("a backend is chosen");
        if lost.iter().any(|lost| address(lost) == flow.backend) {
            self.kernel.end(flow, Ending::NotSent, 0, 0);
            return false;
        }
        self.kernel.send_syn(&flow);
        self.kernel.establish(&mut flow);
        self.open.push(flow);
        true
    }

    fn cause(&self, backend: &str) -> Option<String> {
        self.backend(backend).ejection.map(|ejection| ejection.cause)
    }

    /// The entry of the service in the map `services`.
    fn row(&self) -> Service {
        let mut row = None;
        self.kernel.change_service(&self.pins(), 0, |service| row = Some(*service));
        row.expect("the service has an entry")
    }

    /// The recent errors of a backend that the programs have stored.
    fn errors(&self, backend: &str) -> RecentErrors {
        let slot = self.slot(address(backend)).at.slot.number() as usize;
        let mut errors = None;
        self.kernel.change_backend(&self.pins(), slot, |row| errors = Some(row.errors));
        errors.expect("the backend has an entry")
    }
}

#[test]
fn no_backend_is_ejected_if_nothing_can_be_sent() {
    script(FOR_LONG, |stage| {
        assert_eq!((0..60).filter(|_| stage.open_without_route_to(&BACKENDS)).count(), 0);
        stage.stop_faults();
        let blamed = BACKENDS.map(|backend| (stage.cause(backend), stage.backend(backend).ejections));
        assert_eq!(blamed, [const { (None, 0) }; 3]);
        // If the other backends can be reached, a failure to send counts against this backend.
        let failed = (0..300).filter(|_| !stage.open_without_route_to(&BACKENDS[2..])).count();
        assert!((5..=12).contains(&failed), "{failed} not sent");
        let causes = BACKENDS.map(|backend| stage.cause(backend));
        assert_eq!(causes, [None, None, Some("not-sent".to_owned())]);
    });
}

#[test]
fn open_connections_elsewhere_do_not_make_an_unreachable_backend_a_sinkhole() {
    for policy in ["p2c", "least-loaded"] {
        script(&format!("policy = \"{policy}\"\n{FOR_LONG}"), |stage| {
            stage.list(&BACKENDS[..1]);
            stage.stop_faults();
            (0..50).for_each(|_| assert!(stage.open_without_route_to(&[])));
            stage.list(&[BACKENDS[0], LOST]);
            stage.stop_faults();
            let failed = (0..100).filter(|_| !stage.open_without_route_to(&[LOST])).count();
            assert!((1..=12).contains(&failed), "{policy}: {failed} failed");
        });
    }
}

/// A backend begins to fail while the others have many open flows, and few connects arrive.
#[test]
fn errors_are_held_at_the_peak_of_the_others_while_no_connect_arrives() {
    for policy in [Policy::P2c, Policy::LeastLoaded] {
        let lines = format!("policy = \"{}\"\nerror_decay = \"1s\"\nejection = \"off\"", policy.name());
        script(&lines, |stage| {
            stage.list(&BACKENDS[1..]);
            stage.stop_faults();
            for _ in 0..100 {
                stage.connect().expect("both backends accept connects");
            }
            stage.pass(2 * SECOND);
            // The mean of the two backends' quotients of open flows and share. With `p2c`, the
            // larger quotient may be a little higher.
            let mean = u64::from(if policy == Policy::P2c { 100_u32 } else { 50 } << PEAK_FRACTION_BITS);
            let known = stage.row().peak_flows;
            assert!((mean..2 * mean).contains(&known), "{policy:?}: peak {known}, mean {mean}");
            stage.dead.insert(address(BACKENDS[0]));
            stage.list(&BACKENDS);
            stage.stop_faults();
            let failed = (0..60).filter(|_| stage.connect().is_err()).count();
            // The backend's share is a third of the connects: 20.
            assert!((1..=24).contains(&failed), "{policy:?}: {failed} failed");
            let before = stage.errors(BACKENDS[0]);
            stage.pass(10 * SECOND);
            let after = stage.errors(BACKENDS[0]);
            let half_life = stage.row().rules.error_half_life;
            assert!(before.count > 0 && half_life > 0, "{before:?}");
            assert_eq!(after.count, before.count, "{policy:?}");
            assert!(after.since.wrapping_sub(before.since) > 2 * half_life, "{before:?} {after:?}");
        });
    }
}

/// A client that opens connections in bursts: answered connections end at once, and unanswered ones
/// end together after a time-out.
#[test]
fn all_missing_answers_of_a_burst_count() {
    script(FOR_LONG, |stage| {
        let hung = "10.0.0.4:80";
        stage.list(&[hung, BACKENDS[0], BACKENDS[1], BACKENDS[2]]);
        stage.stop_faults();
        // The hung backend accepts connections, but never answers. If only one missing answer per
        // burst were counted, the credit for accepted connections would always outweigh it.
        for _ in 0..3 {
            for _ in 0..24 {
                stage.connect().expect("all backends accept connects");
            }
            let (waits, answered): (Vec<_>, Vec<_>) =
                std::mem::take(&mut stage.open).into_iter().partition(|flow| flow.backend == address(hung));
            for flow in answered {
                stage.kernel.end(flow, Ending::Closed, 100, 100);
            }
            stage.pass(Duration::from_millis(700));
            for flow in waits {
                stage.kernel.end(flow, Ending::Closed, 0, 100);
            }
        }
        assert_eq!(stage.cause(hung).as_deref(), Some("no-answer"));
        assert_eq!(BACKENDS.map(|backend| stage.cause(backend)), [const { None }; 3]);
    });
}

#[test]
fn a_dead_backend_costs_five_connects_under_each_policy() {
    let dead = "10.0.0.4:80";
    for policy in Policy::ALL {
        for has_daemon in [true, false] {
            // Errors that count as load would make a dead backend seem busy, so that it is chosen
            // less than five times.
            let lines = format!("policy = \"{}\"\nerror_decay = \"off\"\n{FOR_LONG}", policy.name());
            script(&lines, |stage| {
                stage.list(&[dead, BACKENDS[0], BACKENDS[1], BACKENDS[2]]);
                stage.stop_faults();
                if !has_daemon {
                    stage.kill();
                }
                stage.dead.insert(address(dead));
                let failed = (0..400).filter(|_| stage.connect().is_err()).count();
                assert_eq!(failed, 5, "{policy:?}");
                // The other backends get the connects of the dead one. Samples come from a hash, so
                // they are the same in each run.
                let likely = if policy == Policy::LeastLoaded { 131..=132 } else { 105..=157 };
                let sent = BACKENDS.map(|backend| stage.sent[&address(backend)]);
                assert!(sent.iter().all(|sent| likely.contains(sent)), "{policy:?}: connects {sent:?}");
                if !has_daemon {
                    stage.try_to_start(1);
                }
                let seen = stage.backend(dead);
                let ejection = seen.ejection.expect("the backend is ejected");
                assert_eq!((seen.state.as_str(), seen.usable), ("ejected", false));
                assert_eq!((ejection.failures, ejection.cause.as_str(), ejection.times), (5, "refused", 1));
                let counts = (seen.ejections, seen.trials, seen.readmissions, seen.withheld);
                assert_eq!(counts, (1, 0, 0, 0));
            });
        }
    }
}

/// Only one of three backends is healthy, but it serves. So there is no panic. In panic, connects
/// choose dead backends again.
#[test]
fn two_dead_backends_of_three_cost_five_connects_each_and_cause_no_panic() {
    script(FOR_LONG, |stage| {
        stage.stop_faults();
        stage.dead = [address(BACKENDS[0]), address(BACKENDS[1])].into();
        assert_eq!(stage.dial(100), 10);
        stage.tick();
        assert_eq!(stage.logged("backend health changed"), 2);
        assert_eq!(stage.dial(100), 0);
        stage.tick();
        assert_eq!((stage.dial(100), stage.service().is_panic), (0, false));
    });
}

/// All members die while no daemon runs: each member, including the last one, fails five connects
/// and is then ejected.
#[test]
fn without_a_daemon_a_listed_lame_duck_serves_if_all_members_are_dead() {
    let [lame_duck, first, second] = BACKENDS;
    for policy in ["weighted-round-robin", "p2c", "least-loaded"] {
        script(&format!("policy = \"{policy}\"\n{FOR_LONG}"), |stage| {
            let list = list_of(&[first, second, lame_duck]) + "state = \"lame-duck\"\n";
            stage.list_text(&list);
            stage.stop_faults();
            let shown = stage.backend(lame_duck);
            assert_eq!((shown.state.as_str(), shown.share_wanted), ("lame-duck", 0.0));
            stage.kill();
            stage.dead = [address(first), address(second)].into();
            let before = stage.sent.get(&address(lame_duck)).copied().unwrap_or(0);
            assert_eq!(stage.dial(100), 10, "{policy}");
            assert_eq!(stage.sent[&address(lame_duck)] - before, 90, "{policy}");
            stage.try_to_start(1);
            assert_eq!([first, second].map(|backend| stage.backend(backend).ejections), [1, 1]);
        });
    }
}

#[test]
fn one_trial_readmits_a_recovered_backend_with_its_whole_share() {
    for has_daemon in [true, false] {
        script("ejection = { base = \"1s\", max = \"10s\" }", |stage| {
            stage.stop_faults();
            if !has_daemon {
                stage.kill();
            }
            stage.dead.insert(address(BACKENDS[0]));
            assert_eq!(stage.dial(60), 5);
            stage.pass(2 * SECOND);
            assert_eq!(stage.dial(30), 1, "only the trial fails");
            stage.dead.clear();
            stage.pass(4 * SECOND);
            let before = stage.sent.clone();
            assert_eq!(stage.dial(300), 0);
            let had = BACKENDS.map(|backend| stage.sent[&address(backend)] - before[&address(backend)]);
            assert!(had.iter().all(|had| had.abs_diff(100) <= 2), "{had:?}");
            if !has_daemon {
                stage.try_to_start(1);
            }
            // Each failed connect was one of the first five or a trial.
            let seen = stage.backend(BACKENDS[0]);
            assert_eq!((seen.trials, seen.readmissions, seen.ejections), (2, 1, 2));
            assert_eq!((seen.endings["refused"], stage.service().outcomes["trial"]), (6, 2));
        });
    }
}
