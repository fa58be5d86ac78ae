//! Scripts of ejection: the programs' decisions, mostly while no daemon runs. For one case of each
//! kind, the local tests of the same name show that the programs in the kernel decide in the same
//! way.

mod evidence;

use std::collections::BTreeSet;

use lb_common::abi::{BackendState, EjectionRules, NextTrial};
use lb_common::ending::Ending;
use lb_fake::Connect;
use lb_http::peer::PeerCredentials;
use lb_view::readmission::Readmission;

use super::FOR_LONG;
use super::stage::{BACKENDS, LIST, SECOND, SERVICE, Stage, address, script};
use crate::api::{ControllerQuery, Reply};
use crate::controller::Event;
use crate::output::status;

fn many(count: u32) -> Vec<String> {
    (0..count).map(|n| format!("10.1.{}.{}:80", n / 200, 1 + n % 200)).collect()
}

impl Stage {
    /// Lists these backends, and stops the daemon.
    fn leave_alone(&mut self, backends: &[String]) {
        let backends: Vec<&str> = backends.iter().map(String::as_str).collect();
        self.list(&backends);
        self.stop_faults();
        self.kill();
    }

    fn lose(&mut self, backends: &[String]) {
        self.dead.extend(backends.iter().map(|backend| address(backend)));
    }

    /// The number of ejected backends and of withheld ejections, according to the maps.
    fn ejected_and_withheld(&mut self) -> (usize, u64) {
        let tables = self.task().datapath().tables();
        let slots = tables.slots();
        let withheld =
            slots.iter().map(|slot| tables.counts(slot.at.slot).expect("faults are off").sums.withheld);
        (slots.iter().filter(|slot| slot.is_ejected).count(), withheld.sum())
    }
}

#[test]
fn each_failed_trial_doubles_the_next_ejection() {
    script("ejection = { base = \"1s\", max = \"1h\" }", |stage| {
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        for level in 2..=5 {
            // The jitter is a tenth of the duration. So the ejection lasts longer than half of
            // `least`, and less than 1.2 times `least`.
            let least = SECOND * (1 << (level - 2));
            stage.pass(least / 2);
            assert_eq!(stage.dial(30), 0, "level {level}");
            stage.pass(least * 7 / 10);
            assert_eq!(stage.dial(30), 1, "level {level}");
            assert_eq!(stage.slot(address(BACKENDS[0])).ejection.level, level);
        }
    });
}

#[test]
fn all_dead_backends_are_ejected_but_never_the_last() {
    // The numbers of dead backends, healthy backends, and ejected backends.
    for (dead, alive, expected) in [(1, 0, 0), (3, 0, 2), (1, 1, 1), (2, 1, 2), (3, 2, 3)] {
        script(FOR_LONG, |stage| {
            let backends = many(dead + alive);
            let listed: Vec<&str> = backends.iter().map(String::as_str).collect();
            stage.list(&listed);
            stage.stop_faults();
            stage.lose(&backends[..dead as usize]);
            stage.dial(100);
            let (ejected, withheld) = stage.ejected_and_withheld();
            assert_eq!(ejected, expected, "{dead} dead, {alive} alive");
            assert_eq!(
                withheld > 0,
                dead as usize > expected,
                "{dead} dead, {alive} alive: {withheld} withheld"
            );
        });
    }
}

/// If no backend is healthy, the first backend that recovers is found within the shortest ejection
/// time, even if its own ejection was to last longer.
#[test]
fn trials_come_at_the_shortest_time_if_no_backend_is_healthy() {
    script("ejection = { base = \"1s\", max = \"1h\" }", |stage| {
        let backends = many(3);
        stage.leave_alone(&backends);
        stage.lose(&backends[..2]);
        // The ejections of two backends become longer and longer, while the third backend serves.
        for _ in 0..60 {
            stage.pass(2 * SECOND);
            stage.dial(20);
        }
        stage.lose(&backends[2..]);
        stage.dial(20);
        stage.dead.remove(&address(&backends[0]));
        let before = stage.sent.get(&address(&backends[0])).copied();
        for _ in 0..4 {
            stage.pass(SECOND);
            stage.dial(20);
        }
        assert!(stage.sent.get(&address(&backends[0])).copied() > before, "a trial finds the backend");
        assert_eq!(stage.dial(20), 0, "the backend serves");
    });
}

#[test]
fn fifty_adjacent_dead_backends_cost_five_connects_each() {
    script(&format!("policy = \"round-robin\"\nsubset = \"all\"\n{FOR_LONG}"), |stage| {
        let backends = many(100);
        stage.leave_alone(&backends);
        stage.lose(&backends[..50]);
        assert_eq!(stage.dial(1_200), 250);
        assert_eq!(stage.dial(200), 0);
    });
}

#[test]
fn more_dead_backends_than_can_be_listed_are_ejected_and_readmitted() {
    let lines =
        "policy = \"random\"\nsubset = \"all\"\nejection = { failures = 1, base = \"1s\", max = \"1s\" }";
    script(lines, |stage| {
        let backends = many(300);
        stage.leave_alone(&backends);
        let dead: Vec<String> = backends.iter().step_by(30).cloned().collect();
        stage.lose(&dead);
        // Each dead backend is chosen once, and is ejected for a second. After that, the first
        // connect with a sample that selects the backend is its trial.
        stage.dial(6_000);
        assert_eq!(stage.dial(500), 0);
        stage.dead.clear();
        let before = stage.sent.clone();
        for _ in 0..8 {
            stage.pass(2 * SECOND);
            assert_eq!(stage.dial(1_000), 0);
        }
        let back = dead.iter().filter(|backend| stage.sent[&address(backend)] > before[&address(backend)]);
        assert_eq!(back.count(), 10);
    });
}

/// Resets after an answer, or long after the connection was established, are caused by the client
/// or a middlebox.
#[test]
fn a_reset_after_an_answer_does_not_eject() {
    script(FOR_LONG, |stage| {
        for _ in 0..60 {
            stage.connect().expect("all backends accept connects");
            let flow = stage.open.pop().expect("the flow is open");
            let ending = if flow.backend == address(BACKENDS[0]) { Ending::Reset } else { Ending::Closed };
            stage.kernel.end(flow, ending, 100, 100);
        }
        assert_eq!(stage.states()[&address(BACKENDS[0])], (BackendState::Member, false));
        assert!(stage.sent[&address(BACKENDS[0])] >= 19);
    });
}

#[test]
fn a_leaving_backend_is_no_longer_named_for_a_trial() {
    script("ejection = { base = \"1s\", max = \"1s\" }", |stage| {
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        stage.list(&BACKENDS[1..]);
        stage.stop_faults();
        stage.pass(60 * SECOND);
        assert_eq!(stage.dial(60), 0, "there is no trial");
        // Another backend that gets the slot has no failures at first.
        stage.list(&[BACKENDS[1], BACKENDS[2], "10.0.0.4:80"]);
        stage.stop_faults();
        let states = stage.states();
        assert_eq!(states[&address("10.0.0.4:80")], (BackendState::Member, false));
        assert!(!states.contains_key(&address(BACKENDS[0])));
        assert_eq!(stage.dial(60), 0);
    });
}

/// A daemon was killed while it turned ejection off: it has stored the rules, but has not
/// readmitted any backend yet.
#[test]
fn a_backend_still_ejected_after_ejection_was_turned_off_returns() {
    script(FOR_LONG, |stage| {
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        stage.kill();
        stage.kernel.change_service(&stage.pins(), 0, |row| row.ejection = EjectionRules::default());
        stage.write_config("ejection = \"off\"");
        stage.start(&BACKENDS);
        stage.stop_faults();
        assert_eq!(stage.states()[&address(BACKENDS[0])], (BackendState::Member, false));
    });
}

/// The backend in the service's field `next_trial` may have left, and its slot may belong to
/// another service.
#[test]
fn a_trial_never_goes_to_a_backend_of_another_service() {
    script("ejection = { base = \"1s\", max = \"1h\" }", |stage| {
        let (orders, backends) = ("10.96.0.11:80", ["10.0.1.1:80", "10.0.1.2:80"]);
        let text = stage.config_text();
        let other = format!(
            "[[service]]\nname = \"orders\"\naddress = \"{orders}\"\nbackends = {{ static = {backends:?} }}\n"
        );
        stage.write_text(&(text + &other));
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        for _ in 0..20 {
            let Connect::Sent(flow) = stage.kernel.connect(stage.place, 1, address(orders)) else {
                panic!("the connect was not balanced");
            };
            stage.kernel.send_syn(&flow);
            let ending = if flow.backend == address(backends[0]) { Ending::Refused } else { Ending::Closed };
            stage.kernel.end(flow, ending, 0, 0);
        }
        let ejected = stage.slot(address(backends[0]));
        assert!(ejected.is_ejected);
        stage.kill();
        stage.pass(10 * SECOND);
        let trial = NextTrial::of(ejected.at.slot.number(), 0, 0);
        stage.kernel.change_service(&stage.pins(), 0, |row| row.next_trial = trial);
        // If a connect reached the other service's backend, `choose` would panic, because that
        // backend is in no list.
        assert_eq!(stage.dialled(20), BACKENDS.map(address).into());
    });
}

/// The subset has four of ten endpoints. A member that stays ejected is replaced. It still has
/// trials, and returns to its place.
#[test]
fn a_replaced_member_still_has_trials() {
    let lines = "subset = { size = 4 }\nejection = { failures = 2, base = \"1s\", max = \"1s\" }\n\
                 health = { replace_after = \"1s\" }";
    script(lines, |stage| {
        let ten = many(10);
        stage.list(&ten.iter().map(String::as_str).collect::<Vec<_>>());
        stage.reconfigure("[[client]]\n", "[[client]]\nindex = 1\ncount = 3\n");
        stage.stop_faults();
        let members = |stage: &Stage| {
            let backends = stage.service().backends.into_iter();
            backends.filter(|one| one.share_wanted > 0.0).map(|one| one.address).collect::<BTreeSet<_>>()
        };
        let before = members(stage);
        assert_eq!(before.len(), 4);
        let lost = *before.first().expect("the task has four members");
        stage.dead.insert(lost);
        for _ in 0..10 {
            stage.dial(8);
            stage.tick();
        }
        let after = members(stage);
        assert!(after.len() == 4 && !after.contains(&lost), "{after:?}");
        assert_eq!(
            before.difference(&after).collect::<Vec<_>>(),
            [&lost],
            "only the lost member was replaced"
        );
        let faults = stage.degraded().join("\n");
        assert!(faults.contains("ejected: ") && faults.contains(&lost.to_string()), "{faults}");
        let explained = stage.explained();
        let phrase = format!("replaced until available again: {lost} (ejected, witness: kernel)");
        assert!(explained.contains(&phrase), "{explained}");
        let stands_in = after.difference(&before).next().expect("a substitute serves");
        let phrase = format!("substitutes, the next of the order: {stands_in}\n");
        assert!(explained.contains(&phrase), "{explained}");
        // The member is in no table, but trials still test it, even without a daemon, and find that
        // it is healthy again.
        let trials = |stage: &Stage| stage.backend(&lost.to_string()).trials;
        let first = trials(stage);
        stage.pass(3 * SECOND);
        stage.dial(8);
        assert!(trials(stage) > first);
        stage.kill();
        stage.dead.clear();
        stage.pass(3 * SECOND);
        assert!(stage.dialled(8).contains(&lost));
        stage.try_to_start(1);
        assert_eq!(stage.backend(&lost.to_string()).membership, "replaced");
        assert_eq!(members(stage), after, "a new daemon continues with the replacement");
        stage.pass(60 * SECOND);
        stage.dial(8);
        stage.pass(60 * SECOND);
        assert_eq!(members(stage), before, "the member returns to its place");
    });
}

/// An operator readmits the backend. Afterwards the backend has its whole share and no recorded
/// failures.
#[test]
fn a_readmission_ends_an_ejection_early() {
    script(FOR_LONG, |stage| {
        let readmit = |stage: &mut Stage, backend: &str, client: Option<&str>| {
            let (answer, mut reply) = Reply::new();
            let (service, client) = ("users".to_owned(), client.map(str::to_owned));
            let (backend, who) = (address(backend), PeerCredentials { user: 0, groups: vec![0], process: 1 });
            stage.dispatch(Event::Query(ControllerQuery::Readmit { service, backend, client, who, answer }));
            let Readmission { clients, .. } = reply.try_recv().expect("the controller answers at once");
            clients.into_iter().map(|phrase| (phrase.client, phrase.was_ejected)).collect::<Vec<_>>()
        };
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        assert_eq!(readmit(stage, BACKENDS[1], None), [("web".to_owned(), false)]);
        assert_eq!(readmit(stage, "10.0.0.9:80", None), []);
        assert_eq!(readmit(stage, BACKENDS[0], Some("batch")), []);
        assert!(stage.slot(address(BACKENDS[0])).is_ejected, "a failed request changes nothing");
        stage.dead.clear();
        assert_eq!(readmit(stage, BACKENDS[0], Some("web")), [("web".to_owned(), true)]);
        let before = stage.sent[&address(BACKENDS[0])];
        assert_eq!(stage.dial(30), 0);
        assert_eq!(stage.sent[&address(BACKENDS[0])] - before, 10, "the backend has its whole share");
        // Four failures do not eject the backend. The fifth failure ejects it, for the duration of
        // a first ejection.
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        assert_eq!(stage.slot(address(BACKENDS[0])).ejection.level, 1);
    });
}

/// If the connect of a trial never ends, other backends still have their trials.
#[test]
fn an_undecided_trial_delays_no_other_backend() {
    script("ejection = { base = \"1s\", max = \"1s\" }", |stage| {
        let backends = many(5);
        let listed: Vec<&str> = backends.iter().map(String::as_str).collect();
        stage.list(&listed);
        stage.stop_faults();
        stage.lose(&backends[..2]);
        assert_eq!(stage.dial(100), 10);
        stage.pass(2 * SECOND);
        // The first trial sends its SYN, but gets no answer.
        let undecided = (0..40).find_map(|_| {
            let flow = stage.begin().ok()?;
            let is_trial = stage.dead.contains(&flow.backend);
            if !is_trial {
                stage.kernel.end(flow, Ending::Closed, 0, 0);
            }
            is_trial.then_some(flow)
        });
        let undecided = undecided.expect("a trial is due");
        stage.open.push(undecided);
        let mut failed = 0;
        for _ in 0..4 {
            stage.tick();
            failed += stage.dial(20);
        }
        assert!(failed > 0, "the other backend has a trial");
        assert!(status::found(&stage.slot(undecided.backend)).2.is_some());
    });
}

/// A stage whose first backend is ejected, which was logged once.
fn with_logged_ejection() -> Stage {
    let mut stage = Stage::new(FOR_LONG);
    stage.start(&BACKENDS);
    stage.dead.insert(address(BACKENDS[0]));
    assert_eq!(stage.dial(60), 5);
    stage.settle();
    assert_eq!(stage.logged("backend health changed"), 1);
    stage
}

#[test]
fn a_later_daemon_does_not_log_an_old_ejection_again() {
    let mut stage = with_logged_ejection();
    stage.start(&BACKENDS);
    stage.settle();
    assert_eq!((stage.logged("backend health changed"), stage.dial(60)), (1, 0));
}

#[test]
fn a_service_that_moves_in_the_file_does_not_log_an_old_ejection_again() {
    let mut stage = with_logged_ejection();
    let first = "[[service]]\nname = \"first\"\naddress = \"10.96.0.11:80\"\nbackends = { static = [] }\n";
    stage.reconfigure("[[service]]\nname = \"users\"", &format!("{first}[[service]]\nname = \"users\""));
    stage.tick();
    assert_eq!((stage.task().position("users"), stage.logged("backend health changed")), (Some(1), 1));
}

#[test]
fn a_later_daemon_that_gets_its_list_late_does_not_log_an_old_ejection_again() {
    let mut stage = with_logged_ejection();
    stage.kill();
    stage.disk.remove(LIST);
    stage.disk.remove("/var/lib/socklb/last-good/users.toml");
    stage.try_to_start(1);
    stage.settle();
    assert!(stage.task().balancer().row(0).is_none(), "the service has no list");
    stage.list(&BACKENDS);
    stage.settle();
    assert!(stage.task().balancer().row(0).is_some());
    assert_eq!((stage.logged("backend health changed"), stage.dial(60)), (1, 0));
}

/// The new address has new backends, so no backend was readmitted.
#[test]
fn a_service_with_another_address_logs_no_readmission() {
    let mut stage = with_logged_ejection();
    stage.is_counted = false;
    stage.reconfigure(SERVICE, "10.96.0.11:80");
    stage.tick();
    assert!(stage.task().balancer().row(0).is_some());
    assert_eq!(stage.logged("backend health changed"), 1);
}
