//! Scripts of several clients, of reloads, and of starts.

mod jobs;
mod reloads;
mod starts;

use std::collections::BTreeSet;

use lb_common::ending::Ending;
use lb_fake::{Connect, FakeCgroup, FakeFlow};
use lb_view::coverage::Coverage;

use super::stage::{BACKENDS, CONFIG, SECOND, SERVICE, Stage, address, cgroup_path, pins_of, script};
use crate::api::{ControllerQuery, Reply};
use crate::controller::{BackgroundWork, Event, Notice};

pub const MORE: &str = "10.96.0.11:80";
pub const MORE_BACKEND: &str = "10.0.0.9:80";

impl Stage {
    /// Configures these clients, each with its cgroup, and makes the daemon reload the
    /// configuration.
    fn clients(&mut self, clients: &[(&str, &str)]) {
        self.write_clients(clients);
        self.dispatch(Event::Hangup);
        self.settle();
    }

    /// Adds text to the configuration.
    fn add(&mut self, text: &str) {
        let before = self.config_text();
        self.write_text(&(before + text));
    }

    fn reaches(&mut self, place: FakeCgroup) -> bool {
        self.reached(place, SERVICE).is_some()
    }

    fn open_to_more(&mut self) -> FakeFlow {
        let Connect::Sent(mut flow) = self.kernel.connect(self.place, 1, address(MORE)) else {
            panic!("the connect was not balanced");
        };
        assert_eq!(flow.backend, address(MORE_BACKEND));
        self.kernel.send_syn(&flow);
        self.kernel.establish(&mut flow);
        flow
    }

    /// Checks a flow of the second service after that service was removed. The flow continues, no
    /// new flow begins, and getpeername(2) returns the dialled address. When the flow ends, nothing
    /// is left of the service.
    fn ends_after_more_was_removed(&mut self, flow: FakeFlow) {
        assert_eq!(self.kernel.connect(self.place, 1, address(MORE)), Connect::Unchanged);
        assert_eq!(self.task().datapath().tables().active(self.slot(flow.backend).at.slot), 1);
        let services = self.task().datapath().tables().services();
        let shown = services.into_iter().map(|service| (service.name, service.address, service.open));
        let expected =
            [("users".to_owned(), address(SERVICE), true), ("more".to_owned(), address(MORE), false)];
        assert_eq!(shown.collect::<Vec<_>>(), expected);
        self.kernel.end(flow, Ending::Closed, 100, 100);
        self.stop_faults();
        assert!(!self.states().contains_key(&address(MORE_BACKEND)));
        assert_eq!(self.task().datapath().tables().services().len(), 1);
    }
}

/// Runs a change once for each of its kernel operations, and makes this operation fail. In every
/// run the service must be balanced before and after the failure. Returns the stage of an
/// additional run without failures.
fn balanced_at_each_step(change: impl Fn(&mut Stage)) -> Stage {
    let run = |fails: Option<u64>| {
        let mut stage = Stage::new("");
        stage.start(&BACKENDS);
        let before = stage.kernel.faults().steps();
        if let Some(others) = fails {
            stage.kernel.faults().fail_after(others);
        }
        change(&mut stage);
        for _ in 0..40 {
            assert!(stage.reaches(stage.place), "not balanced; failed operation: {fails:?}");
            stage.pass(SECOND / 4);
        }
        let steps = stage.kernel.faults().steps() - before;
        (steps, stage)
    };
    let (steps, stage) = run(None);
    assert!(steps > 20, "{steps} steps");
    for step in 0..steps {
        run(Some(step));
    }
    stage
}

/// The configuration of another service, with one backend.
fn second_service() -> String {
    format!(
        "[[service]]\nname = \"more\"\naddress = \"{MORE}\"\nbackends = {{ static = [\"{MORE_BACKEND}\"] }}\n"
    )
}

#[test]
fn an_added_service_is_balanced_and_a_removed_one_leaves_nothing() {
    script("", |stage| {
        stage.connect().expect("all backends accept connects");
        stage.add(&second_service());
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        let flow = stage.open_to_more();
        stage.write_config("");
        stage.dispatch(Event::Hangup);
        stage.settle();
        stage.ends_after_more_was_removed(flow);
        assert_eq!(stage.states().len(), 3);
        assert_eq!(stage.dial(30), 0);
    });
}

#[test]
fn a_renamed_service_retains_its_flows_and_serves() {
    script("", |stage| {
        stage.connect().expect("all backends accept connects");
        stage.is_counted = false;
        let text = stage.config_text();
        stage.write_text(&text.replace("name = \"users\"", "name = \"renamed\""));
        stage.dispatch(Event::Hangup);
        for _ in 0..70 {
            stage.pass(SECOND);
            assert!(stage.reaches(stage.place), "the service is always balanced");
        }
        stage.kernel.faults().stop();
        assert_eq!(stage.task().client.services[0].service.name, "renamed");
    });
}

#[test]
fn a_rename_leaves_connects_balanced_at_each_step() {
    let rename = |stage: &mut Stage| {
        let text = stage.config_text();
        stage.write_text(&text.replace("name = \"users\"", "name = \"people\""));
    };
    let names = |stage: &Stage| {
        let services = stage.task().datapath().tables().services().into_iter();
        services.map(|service| service.name).collect::<Vec<_>>()
    };
    let stage = balanced_at_each_step(|stage| {
        rename(stage);
        stage.dispatch(Event::Hangup);
    });
    assert_eq!(names(&stage), ["people"]);
    let stage = balanced_at_each_step(|stage| {
        stage.kill();
        rename(stage);
        stage.try_to_start(1);
    });
    assert_eq!(names(&stage), ["people"]);
    let stage = balanced_at_each_step(|stage| {
        stage.write_clients(&[("other", "web")]);
        stage.dispatch(Event::Hangup);
    });
    assert_eq!(stage.pinned(), ["other"]);
}

#[test]
fn a_faulty_configuration_changes_nothing_and_is_a_fault_until_corrected() {
    script("", |stage| {
        let good = stage.disk.content(CONFIG).expect("the file exists");
        for bad in ["policy = \"best\"", "[[service", "cgroup = 5"] {
            stage.disk.write(CONFIG, [&good, bad.as_bytes()].concat());
            stage.changed(CONFIG);
            stage.tick();
            let faults = stage.faults();
            assert!(faults.iter().any(|fault| fault.contains("socklb.toml:")), "{bad}: {faults:?}");
            assert_eq!(stage.dial(30), 0);
        }
        stage.disk.write(CONFIG, &good);
        stage.changed(CONFIG);
        stage.tick();
        assert!(!stage.faults().iter().any(|fault| fault.contains("socklb.toml")), "{:?}", stage.faults());
        // A file system that does not answer is a fault, but has no other effect.
        stage.disk.set_hung(CONFIG, true);
        stage.changed(CONFIG);
        stage.pass(2 * SECOND);
        stage.list(&BACKENDS[1..]);
        stage.dispatch(Event::Hangup);
        stage.settle();
        let faults = stage.faults();
        assert!(faults.iter().any(|fault| fault.contains("socklb.toml does not answer")), "{faults:?}");
        assert_eq!(stage.dialled(30).len(), 2);
        stage.list(&BACKENDS);
        stage.disk.set_hung(CONFIG, false);
        stage.pass(2 * SECOND);
        assert!(!stage.faults().iter().any(|fault| fault.contains("socklb.toml")), "{:?}", stage.faults());
        // The file is removed, or cannot be read.
        stage.disk.remove(CONFIG);
        stage.changed(CONFIG);
        stage.tick();
        assert!(stage.faults().iter().any(|fault| fault.contains("configuration cannot be used")));
        stage.disk.write(CONFIG, &good);
        stage.disk.set_broken(CONFIG, true);
        stage.changed(CONFIG);
        stage.tick();
        assert!(stage.faults().iter().any(|fault| fault.contains("os error 5")), "{:?}", stage.faults());
        stage.disk.set_broken(CONFIG, false);
        stage.stop_faults();
        assert_eq!(stage.faults(), [""; 0]);
        assert_eq!(stage.dial(30), 0);
    });
}

/// Each fault names the necessary steps. If maps need other sizes, a restart without these steps is
/// refused.
#[test]
fn fixed_settings_are_named_and_all_others_change() {
    script("", |stage| {
        stage.stop_faults();
        let good = stage.config_text();
        let limits = "[limits]\nschedule_entries = 32768\nflow_records = 128\nslots = 512\n";
        let metrics = "[metrics]\nlisten = \"127.0.0.1:9464\"\n";
        let more = format!("{}{limits}{metrics}[paths]\nrun = \"/elsewhere\"\n", second_service());
        stage.add(&more);
        stage.dispatch(Event::Hangup);
        stage.settle();
        let restart = |key: &str| {
            format!("{key} cannot change while the daemon runs; restart socklb to apply the new value")
        };
        let remade = "limits.flow_records cannot change while the daemon runs; a restart is not enough, \
                      because the clients' maps outlive the daemon: stop socklb, run `socklb detach web \
                      --pins '/sys/fs/bpf'` (connects are then not balanced), and start socklb again";
        let expected = [remade.to_owned(), restart("paths.run"), restart("metrics.listen")];
        assert_eq!(stage.faults(), expected);
        assert_eq!(stage.reached(stage.place, MORE), Some(address(MORE_BACKEND)));
        // Only the key that needs new maps is changed back.
        stage.write_text(&(good + &second_service() + metrics));
        stage.dispatch(Event::Hangup);
        stage.settle();
        assert_eq!(stage.faults(), [restart("metrics.listen")]);
        stage.try_to_start(1);
        assert_eq!(stage.faults(), [""; 0]);
        assert_eq!(stage.reached(stage.place, MORE), Some(address(MORE_BACKEND)));
    });
}

/// First the pins of one client belong to another user, then the pins of both clients. A client
/// with such pins is refused.
#[test]
fn an_unstartable_client_is_retried_and_affects_no_other() {
    script("", |stage| {
        let other = stage.kernel.make_cgroup(&cgroup_path("b"));
        stage.clients(&[("web", "web"), ("two", "b")]);
        stage.stop_faults();
        stage.kernel.set_foreign_pins(&pins_of("two"), true);
        stage.try_to_start(1);
        stage.pass(5 * SECOND);
        let faults = stage.faults();
        assert!(faults.len() == 1 && faults[0].contains("two/maps/theirs"), "{faults:?}");
        assert!(stage.reaches(stage.place) && stage.reaches(other), "the earlier programs still balance");
        stage.kernel.set_foreign_pins(&pins_of("two"), false);
        stage.pass(11 * SECOND);
        assert_eq!(stage.faults(), [""; 0]);
        for client in ["two", "web"] {
            stage.kernel.set_foreign_pins(&pins_of(client), true);
        }
        stage.try_to_start(1);
        assert!(stage.controller.is_none());
        for part in ["cannot start any of 2 clients", "client two: ", "client web: ", "theirs"] {
            assert!(stage.refused.contains(part), "{part:?} is not in {}", stage.refused);
        }
        for client in ["two", "web"] {
            stage.kernel.set_foreign_pins(&pins_of(client), false);
        }
        stage.start(&BACKENDS);
    });
}

#[test]
fn directories_of_files_that_are_no_longer_configured_are_not_watched() {
    script("", |stage| {
        for round in 0..5 {
            let file = format!("/lists/{round}/users.toml");
            stage.disk.write(&file, super::stage::list_of(&BACKENDS[..2]));
            stage.configure(&format!("backends = {{ file = \"{file}\" }}"));
            let watched = ["/etc/socklb".to_owned(), format!("/lists/{round}")];
            assert_eq!(stage.watched, watched.map(Into::into).into());
        }
    });
}

#[test]
fn the_status_line_follows_the_state() {
    script("", |stage| {
        stage.stop_faults();
        assert_eq!(stage.state_line, "1 of 1 clients attached");
        stage.kernel.remove_cgroup(&cgroup_path("web"));
        stage.tick();
        assert_eq!(stage.state_line, "0 of 1 clients attached");
        stage.place = stage.kernel.make_cgroup(&cgroup_path("web"));
        stage.tick();
        assert_eq!(stage.state_line, "1 of 1 clients attached");
        stage.disk.remove(super::stage::LIST);
        stage.changed(super::stage::LIST);
        stage.tick();
        assert_eq!(stage.state_line, "1 of 1 clients attached; 1 of 1 endpoint lists cannot be used");
    });
}

/// R29, a bug of another load balancer: after a restart of a client's process, its first connects
/// were not balanced.
#[test]
fn r29_a_recreated_cgroup_is_covered_before_a_waiting_process_continues() {
    script("", |stage| {
        stage.stop_faults();
        let cover = |stage: &mut Stage, cgroups: &[u64]| {
            let (answer, reply) = Reply::new();
            let (client, cgroups) = ("web".to_owned(), cgroups.to_vec());
            stage.dispatch(Event::Query(ControllerQuery::Cover { client, cgroups, answer }));
            reply
        };
        let elsewhere = stage.kernel.make_cgroup(&cgroup_path("b"));
        for _ in 0..5 {
            stage.kernel.remove_cgroup(&cgroup_path("web"));
            assert_eq!(stage.degraded().len(), 1, "a removed cgroup is a fault");
            // The request waits for a cgroup that does not exist yet.
            let mut waiting = cover(stage, &[elsewhere.0]);
            stage.tick();
            assert!(waiting.try_recv().is_err());
            stage.place = stage.kernel.make_cgroup(&cgroup_path("web"));
            // No watch has reported the cgroup: the query itself causes the check.
            let reply = cover(stage, &[stage.place.0]).try_recv();
            assert_eq!(reply.expect("the answer arrives at once"), Coverage::Covered);
            let configured = cgroup_path("web");
            assert_eq!(
                waiting.try_recv().expect("the request is answered"),
                Coverage::Elsewhere { configured }
            );
            assert_eq!((stage.dial(60), stage.client().cgroup_id), (0, Some(stage.place.0)));
        }
        assert_eq!((stage.client().not_a_service, stage.degraded()), (0, vec![]));
    });
}

/// Readiness is reported when the maps of all clients match their plans.
#[test]
fn each_sighup_is_answered_once_all_maps_follow() {
    script("", |stage| {
        stage.notices.clear();
        for times in 1..=3 {
            stage.dispatch(Event::Hangup);
            stage.stop_faults();
            let ready = stage.notices.iter().filter(|notice| matches!(notice, Notice::Ready(_))).count();
            let reloading = stage.notices.iter().filter(|notice| **notice == Notice::Reloading).count();
            assert_eq!((reloading, ready), (times, times));
            assert_eq!(stage.controller().facts(stage.now).reloads.taken_on, times as u64);
        }
        // Two more SIGHUPs during a reload cause only one more reload.
        stage.hangs = |work| matches!(work, BackgroundWork::Load(_));
        (0..3).for_each(|_| stage.dispatch(Event::Hangup));
        stage.pass(5 * SECOND);
        assert_eq!(stage.dial(30), 0);
        stage.finish_hung();
        stage.stop_faults();
        assert_eq!(stage.controller().facts(stage.now).reloads.taken_on, 5);
    });
}

#[test]
fn an_added_client_is_attached_and_a_removed_one_ends_with_its_last_flow() {
    script("", |stage| {
        let other = stage.kernel.make_cgroup(&cgroup_path("batch"));
        assert!(!stage.reaches(other));
        stage.clients(&[("web", "web"), ("batch", "batch")]);
        stage.stop_faults();
        assert!(stage.reaches(other));
        let Connect::Sent(mut flow) = stage.kernel.connect(other, 1, address(SERVICE)) else {
            panic!("the connect was not balanced");
        };
        stage.kernel.establish(&mut flow);
        stage.kernel.faults().fail_some(super::FAULTS_PER_MILLE, super::SEED);
        stage.clients(&[("web", "web")]);
        stage.stop_faults();
        assert!(!stage.reaches(other), "no flow begins");
        assert_eq!(stage.pinned(), ["batch", "web"]);
        // If the daemon dies in the meantime, the next one continues.
        stage.try_to_start(1);
        stage.settle();
        let leaving = &stage.controller().clients.leaving;
        assert_eq!(leaving.iter().map(|leaving| &leaving.pins.client).collect::<Vec<_>>(), ["batch"]);
        stage.kernel.end(flow, Ending::Closed, 100, 100);
        stage.stop_faults();
        assert_eq!((stage.pinned(), stage.faults()), (vec!["web".to_owned()], vec![]));
        assert_eq!(stage.dial(30), 0);
    });
}

#[test]
fn a_renamed_client_is_always_balanced() {
    script("", |stage| {
        // `web` is created again, so its counts start from zero.
        stage.is_counted = false;
        for name in ["other", "third", "web"] {
            stage.write_clients(&[(name, "web")]);
            stage.dispatch(Event::Hangup);
            for _ in 0..70 {
                stage.pass(SECOND / 10);
                assert!(stage.reaches(stage.place));
                stage.pass(SECOND);
                assert!(stage.reaches(stage.place));
            }
        }
        stage.kernel.faults().stop();
        (0..70).for_each(|_| stage.pass(SECOND));
        assert_eq!(stage.pinned(), ["web"]);
    });
}

#[test]
fn clients_that_swap_cgroups_are_always_balanced() {
    script("", |stage| {
        let places = [stage.place, stage.kernel.make_cgroup(&cgroup_path("b"))];
        stage.clients(&[("one", "web"), ("two", "b")]);
        stage.stop_faults();
        stage.kernel.faults().fail_some(super::FAULTS_PER_MILLE, super::SEED);
        for round in 0..6 {
            let (first, second) = if round % 2 == 0 { ("b", "web") } else { ("web", "b") };
            stage.write_clients(&[("one", first), ("two", second)]);
            stage.dispatch(Event::Hangup);
            for _ in 0..40 {
                stage.pass(SECOND);
                assert!(places.iter().all(|place| stage.reaches(*place)), "round {round}");
            }
        }
        stage.kernel.faults().stop();
        (0..70).for_each(|_| stage.pass(SECOND));
        for (name, place) in [("one", places[0]), ("two", places[1])] {
            let task = stage.controller().clients.task(name).expect("the client runs");
            assert_eq!(task.cgroup().map(|cgroup| FakeCgroup(cgroup.id)), Some(place));
        }
        assert_eq!(stage.faults(), [""; 0]);
    });
}

/// Flows of the old cgroup end as usual. Its last links are removed after that.
#[test]
fn a_client_that_moves_leaves_its_old_cgroup() {
    script("", |stage| {
        stage.connect().expect("all backends accept connects");
        let (before, after) = (stage.place, stage.kernel.make_cgroup(&cgroup_path("b")));
        stage.clients(&[("web", "b")]);
        stage.stop_faults();
        stage.place = after;
        assert_eq!(stage.dial(30), 0);
        assert!(!stage.reaches(before));
        assert_eq!(stage.faults(), [""; 0]);
        let links = |stage: &Stage| {
            let kernel = stage.task().datapath().kernel();
            (
                kernel.begins_at().expect("faults are off"),
                kernel.has_old_links(after.0).expect("faults are off"),
            )
        };
        assert_eq!(links(stage), (vec![after.0], true));
        stage.close_all();
        stage.stop_faults();
        assert_eq!(links(stage), (vec![after.0], false));
    });
}

/// While the client that takes over a cgroup cannot be started, the earlier client balances
/// connects there.
#[test]
fn a_client_stays_until_its_successor_is_attached() {
    script("", |stage| {
        stage.stop_faults();
        stage.hangs = |work| matches!(work, BackgroundWork::Open(_));
        stage.write_clients(&[("heir", "web")]);
        // Each attempt to open the new client fails.
        stage.kernel.faults().fail_some(1_000, super::SEED);
        stage.dispatch(Event::Hangup);
        stage.kernel.faults().stop();
        for _ in 0..30 {
            stage.pass(SECOND);
            assert!(stage.reaches(stage.place));
        }
        let faults = stage.faults();
        assert!(faults.iter().any(|fault| fault.contains("the client should leave")), "{faults:?}");
        assert_eq!(stage.pinned(), ["web"]);
        stage.finish_hung();
        (0..70).for_each(|_| stage.pass(SECOND));
        assert_eq!((stage.pinned(), stage.faults()), (vec!["heir".to_owned()], vec![]));
        assert!(stage.reaches(stage.place));
    });
}

/// If it takes long to open a client, the client at first has the configuration and the list that
/// were in force when the opening began.
#[test]
fn a_late_client_follows_changes_made_meanwhile() {
    script("", |stage| {
        let places = ["b", "c"].map(|cgroup| stage.kernel.make_cgroup(&cgroup_path(cgroup)));
        stage.stop_faults();
        // Each attempt to open the other client fails, except for one attempt that hangs.
        let configure = |stage: &mut Stage, cgroup| {
            stage.write_clients(&[("web", "web"), ("other", cgroup)]);
            stage.kernel.faults().fail_some(1_000, super::SEED);
            stage.dispatch(Event::Hangup);
            stage.kernel.faults().stop();
            stage.pass(5 * SECOND);
        };
        stage.hangs = |work| matches!(work, BackgroundWork::Open(_));
        configure(stage, "b");
        stage.list(&BACKENDS[1..]);
        stage.finish_hung();
        stage.pass(5 * SECOND);
        let reached: BTreeSet<_> = (0..30).filter_map(|_| stage.reached(places[0], SERVICE)).collect();
        assert_eq!(reached, [address(BACKENDS[1]), address(BACKENDS[2])].into());
        stage.clients(&[("web", "web")]);
        (0..70).for_each(|_| stage.pass(SECOND));
        stage.hangs = |work| matches!(work, BackgroundWork::Open(_));
        configure(stage, "b");
        configure(stage, "c");
        stage.finish_hung();
        (0..70).for_each(|_| stage.pass(SECOND));
        assert_eq!(places.map(|place| stage.reaches(place)), [false, true]);
        assert_eq!(stage.faults(), [""; 0]);
    });
}

/// An earlier daemon has left a client attached, and for some time the configuration did not
/// contain this client.
#[test]
fn an_unconfigured_client_is_named_and_adopted_when_configured_again() {
    script("", |stage| {
        stage.kernel.make_cgroup(&cgroup_path("b"));
        stage.stop_faults();
        stage.write_clients(&[("other", "b")]);
        stage.try_to_start(1);
        stage.settle();
        let faults = stage.faults();
        assert!(faults.len() == 1 && faults[0].starts_with("attached, but not configured"), "{faults:?}");
        assert!(stage.reaches(stage.place), "the client's connects are still balanced");
        stage.kernel.faults().fail_some(super::FAULTS_PER_MILLE, super::SEED);
        stage.clients(&[("web", "web"), ("other", "b")]);
        (0..70).for_each(|_| stage.pass(SECOND));
        stage.kernel.faults().stop();
        (0..70).for_each(|_| stage.pass(SECOND));
        assert_eq!(stage.faults(), [""; 0]);
        assert_eq!(stage.dialled(30), BACKENDS.map(address).into());
        stage.write_clients(&[("web", "web")]);
        stage.dispatch(Event::Hangup);
        (0..70).for_each(|_| stage.pass(SECOND));
        assert_eq!(stage.pinned(), ["web"]);
    });
}

#[test]
fn links_removed_by_hand_are_created_again() {
    script("", |stage| {
        stage.kernel.unlink(&stage.pins());
        assert_eq!(stage.connect(), Err(0));
        stage.stop_faults();
        assert_eq!(stage.dial(30), 0);
        assert_eq!(stage.faults(), [""; 0]);
    });
}

#[test]
fn a_client_without_a_cgroup_waits_and_delays_no_other() {
    script("", |stage| {
        stage.stop_faults();
        stage.kernel.remove_cgroup(&cgroup_path("web"));
        let other = stage.kernel.make_cgroup(&cgroup_path("b"));
        stage.write_clients(&[("web", "web"), ("two", "b")]);
        stage.try_to_start(1);
        assert!(stage.reaches(other));
        let expected = "cgroup web does not exist; the daemon attaches the client when the cgroup appears";
        assert_eq!(stage.faults(), [expected]);
        stage.place = stage.kernel.make_cgroup(&cgroup_path("web"));
        stage.pass(2 * SECOND);
        assert_eq!((stage.dial(30), stage.faults()), (0, vec![]));
        stage.kernel.remove_cgroup(&cgroup_path("web"));
        stage.stop_faults();
        let faults = stage.faults();
        assert!(faults.len() == 1 && faults[0].starts_with("cgroup web does not exist"), "{faults:?}");
        stage.kernel.faults().fail_some(super::FAULTS_PER_MILLE, super::SEED);
        stage.place = stage.kernel.make_cgroup(&cgroup_path("web"));
        stage.changed(cgroup_path("web"));
        stage.stop_faults();
        assert_eq!((stage.dial(30), stage.faults()), (0, vec![]));
    });
}

/// A daemon starts after the list and the services have changed.
#[test]
fn changes_made_without_a_daemon_are_applied_at_a_start() {
    script("", |stage| {
        stage.connect().expect("all backends accept connects");
        stage.stop_faults();
        stage.kill();
        assert_eq!(stage.dial(30), 0, "connects still succeed");
        stage.write_list(&[BACKENDS[1], "10.0.0.4:80"]);
        stage.add(&second_service());
        stage.try_to_start(1);
        stage.settle();
        assert_eq!(stage.dialled(30), [address(BACKENDS[1]), address("10.0.0.4:80")].into());
        let flow = stage.open_to_more();
        stage.kill();
        stage.write_config("");
        stage.try_to_start(1);
        stage.settle();
        stage.ends_after_more_was_removed(flow);
        stage.close_all();
        stage.stop_faults();
        assert_eq!(stage.states().len(), 2);
    });
}

/// A stage with four clients that are settled. Without a change, no further event follows.
fn with_four_clients() -> Stage {
    let mut stage = Stage::new("");
    let clients = [("a", "a"), ("b", "b"), ("c", "c"), ("d", "d")];
    for (_, cgroup) in clients {
        stage.kernel.make_cgroup(&cgroup_path(cgroup));
    }
    stage.write_clients(&clients);
    stage.write_list(&BACKENDS);
    stage.try_to_start(1);
    stage.pass(3 * SECOND);
    stage.hangs = |work| matches!(work, BackgroundWork::WaitForReaders | BackgroundWork::SearchNamespaces(_));
    stage
}

fn unsettled(stage: &Stage) -> usize {
    stage.controller().clients.tasks.iter().filter(|task| !task.is_settled()).count()
}

/// If one turn settled all clients, then probes, queries and the service manager would have to wait
/// until this turn ends.
#[test]
fn a_change_of_all_clients_settles_one_in_each_turn() {
    let mut stage = with_four_clients();
    stage.write_list(&BACKENDS[1..]);
    stage.dispatch(Event::Changed([super::stage::LIST.into()].into()));
    // The turn that reads the list settles the first client.
    while unsettled(&stage) == 0 {
        let at = stage.controller().next_wakeup(stage.now).expect("a read is due");
        stage.pass_one(at);
    }
    for left in (0..3).rev() {
        assert_eq!(unsettled(&stage), left + 1);
        assert_eq!(
            stage.controller().next_wakeup(stage.now),
            Some(stage.now),
            "the next turn is due at once"
        );
        stage.pass_one(stage.now);
    }
    assert_eq!(unsettled(&stage), 0);
}

/// The service manager is notified of the end of the reload when the last client is settled.
#[test]
fn a_reload_settles_one_client_in_each_turn() {
    let mut stage = with_four_clients();
    stage.notices.clear();
    stage.write_list(&BACKENDS[1..]);
    stage.dispatch(Event::Hangup);
    for left in (0..3).rev() {
        assert_eq!(unsettled(&stage), left + 1);
        assert_eq!(stage.notices, [Notice::Reloading]);
        assert_eq!(
            stage.controller().next_wakeup(stage.now),
            Some(stage.now),
            "the next turn is due at once"
        );
        stage.pass_one(stage.now);
    }
    assert_eq!(unsettled(&stage), 0);
    assert!(matches!(stage.notices[..], [Notice::Reloading, Notice::Ready(_)]), "{:?}", stage.notices);
}

/// In each script with faults, results of work arrive twice and late. Here, the first results
/// arrive late, for a client that no longer exists.
#[test]
fn repeated_and_late_events_change_nothing() {
    script("", |stage| {
        for _ in 0..2 {
            stage.dispatch(Event::Watched);
            stage.dispatch(Event::Wakeup);
            stage.dispatch(Event::HealthChanged);
            stage.dispatch(Event::Changed([cgroup_path("web"), CONFIG.into()].into()));
        }
        // The wait for readers ends after the client has been removed.
        stage.hangs = |work| {
            matches!(
                work,
                BackgroundWork::WaitForReaders | BackgroundWork::Store(_) | BackgroundWork::Compute { .. }
            )
        };
        stage.list(&BACKENDS[1..]);
        stage.pass(10 * SECOND);
        let other = stage.kernel.make_cgroup(&cgroup_path("b"));
        stage.write_clients(&[("web", "web"), ("other", "b")]);
        stage.dispatch(Event::Hangup);
        stage.pass(10 * SECOND);
        stage.write_clients(&[("web", "web")]);
        stage.dispatch(Event::Hangup);
        stage.pass(10 * SECOND);
        assert!(!stage.reaches(other) || stage.kernel.faults().failed() > 0);
        stage.finish_hung();
        stage.stop_faults();
        assert_eq!((stage.pinned(), stage.faults()), (vec!["web".to_owned()], vec![]));
        assert_eq!(stage.dialled(30), [address(BACKENDS[1]), address(BACKENDS[2])].into());
    });
}

/// Checks of the configuration file, reads of stored files and passes over flow records never end.
#[test]
fn works_that_never_end_delay_no_other_work() {
    const LOADS: &str = "/var/lib/socklb/load/factors.json";
    const NEVER_END: [fn(&BackgroundWork) -> bool; 3] = [
        |work| matches!(work, BackgroundWork::LookAtConfig { .. }),
        |work| matches!(work, BackgroundWork::ReadStored(..)),
        |work| matches!(work, BackgroundWork::Reclaim { .. }),
    ];
    script("", |stage| {
        stage.connect().expect("all backends accept connects");
        stage.disk.write(LOADS, "");
        stage.disk.set_broken(LOADS, true);
        stage.start(&BACKENDS);
        stage.hangs = |work| NEVER_END.iter().any(|is_kind| is_kind(work));
        stage.pass(90 * SECOND);
        for is_kind in NEVER_END {
            assert_eq!(stage.hung.iter().filter(|(_, work)| is_kind(work)).count(), 1);
        }
        stage.list(&BACKENDS[1..]);
        stage.configure("policy = \"random\"");
        assert_eq!(stage.controller().facts(stage.now).reloads.taken_on, 1);
        assert_eq!(stage.dialled(30), [address(BACKENDS[1]), address(BACKENDS[2])].into());
        stage.disk.set_broken(LOADS, false);
        stage.finish_hung();
        stage.stop_faults();
        assert_eq!(stage.faults(), [""; 0]);
    });
}

/// The daemon logs one line after each SIGHUP, and one line when the fault ends.
#[test]
fn each_sighup_logs_a_faulty_configuration_and_its_correction() {
    let mut stage = Stage::new("");
    stage.start(&BACKENDS);
    let good = stage.disk.content(CONFIG).expect("the file exists");
    stage.disk.write(CONFIG, [&good, &b"policy = 'best'"[..]].concat());
    stage.changed(CONFIG);
    stage.pass(2 * SECOND);
    let unusable = "the configuration cannot be used";
    assert_eq!(stage.logged(unusable), 1);
    for times in 2..=3 {
        stage.dispatch(Event::Hangup);
        stage.pass(2 * SECOND);
        assert_eq!(stage.logged(unusable), times);
    }
    stage.disk.write(CONFIG, &good);
    stage.changed(CONFIG);
    stage.pass(2 * SECOND);
    let counts = ["the configuration can be used again", unusable, "configuration applied"]
        .map(|what| stage.logged(what));
    assert_eq!(counts, [1, 3, 0]);
}
