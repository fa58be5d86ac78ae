//! Scripts of reports, while daemons and agents start and stop. Other tests complement these
//! scripts: the tests of `lb_report` show which datagrams are accepted, and the local tests `xdp`
//! show that the kernel's receiver program follows the same rules.

mod announcements;
mod load;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;

use lb_common::net::socket_addr;
use lb_core::health::Health;
use lb_kernel::Kernel as _;
use lb_report::wire::Readiness;

use super::stage::{BACKENDS, PINS, SECOND, SEED, SERVICE, Stage, address, cgroup_path, list_of, script};
use crate::controller::{BackgroundWork, Event};
use crate::output::status;

pub const REPORTS: &str =
    "health = { probe = \"report\", interval = \"1s\", idle_interval = \"1s\" }\n[reports]\nkey = \"1\"";

impl Stage {
    fn are_ready(&mut self, backends: &[&str]) {
        for backend in backends {
            self.announce(backend, Readiness::Ready);
        }
    }

    fn announce_lame(&mut self, backend: &str) {
        self.announce(backend, Readiness::LameDuck);
    }

    /// The backends that are registered in the kernel for reports.
    fn registered(&self) -> BTreeSet<SocketAddr> {
        let maps = self.kernel.host_maps(Path::new(PINS)).expect("faults are off");
        let senders = maps.senders().expect("faults are off").into_iter();
        senders.map(|(name, _)| socket_addr(name.address, name.port)).collect()
    }

    fn reported(&self, backend: &str) -> String {
        let views = self.controller().probe_views(self.task());
        views[&("users".to_owned(), address(backend))].state.clone()
    }
}

#[test]
fn a_lame_duck_gets_no_connects_until_it_is_ready_again() {
    script(REPORTS, |stage| {
        stage.are_ready(&BACKENDS);
        stage.pass(3 * SECOND);
        stage.settle();
        assert_eq!(stage.dialled(60).len(), 3);
        stage.announce_lame(BACKENDS[0]);
        stage.pass(3 * SECOND);
        assert!(!stage.dialled(60).contains(&address(BACKENDS[0])));
        stage.settle();
        assert_eq!(stage.reported(BACKENDS[0]), "lame-duck");
        stage.are_ready(&BACKENDS);
        stage.pass(3 * SECOND);
        stage.settle();
        assert_eq!(stage.dialled(60).len(), 3);
    });
}

/// The kernel stores the report. The next daemon adopts it, even if the agent does not answer.
#[test]
fn a_lame_duck_outlives_agent_and_daemon_until_its_time_ends() {
    script(REPORTS, |stage| {
        stage.are_ready(&BACKENDS);
        stage.announce_lame(BACKENDS[0]);
        stage.stop_faults();
        BACKENDS.iter().for_each(|backend| stage.report(backend, |agent| agent.is_silent = true));
        stage.kill();
        stage.pass(20 * SECOND);
        assert!(!stage.dialled(60).contains(&address(BACKENDS[0])), "no daemon runs");
        stage.try_to_start(1);
        assert!(stage.controller().is_open(), "a pinned client does not wait for a first answer");
        stage.pass(5 * SECOND);
        assert!(!stage.dialled(60).contains(&address(BACKENDS[0])), "another daemon runs");
        // The report declared the backend a lame duck for one minute.
        stage.pass(60 * SECOND);
        stage.settle();
        assert_eq!(stage.dialled(60).len(), 3);
    });
}

#[test]
fn a_lame_duck_is_chosen_before_backends_at_their_limit() {
    let lines = format!("active_limit = 2\n{REPORTS}");
    script(&lines, |stage| {
        stage.are_ready(&BACKENDS);
        stage.announce_lame(BACKENDS[0]);
        stage.stop_faults();
        let mut next = || stage.connect().expect("all backends accept connects");
        for _ in 0..4 {
            assert_ne!(next(), address(BACKENDS[0]), "the other backends get two connects each");
        }
        for _ in 0..2 {
            assert_eq!(
                next(),
                address(BACKENDS[0]),
                "the lame duck serves, because the others are at their limit"
            );
        }
        // When all backends are at their limit, a backend that is not a lame duck is chosen above
        // its limit.
        assert_ne!(next(), address(BACKENDS[0]));
    });
}

#[test]
fn an_ejected_lame_duck_has_no_trial_before_it_is_ready() {
    let lines = format!("ejection = {{ base = \"1s\", max = \"2s\" }}\n{REPORTS}");
    script(&lines, |stage| {
        stage.are_ready(&BACKENDS);
        stage.stop_faults();
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        stage.announce_lame(BACKENDS[0]);
        stage.pass(10 * SECOND);
        assert_eq!(stage.dial(60), 0);
        stage.dead.clear();
        stage.are_ready(&BACKENDS[..1]);
        stage.pass(10 * SECOND);
        assert_eq!(stage.dialled(60).len(), 3);
    });
}

/// The programs of all clients read the same word of the verdict array.
#[test]
fn all_clients_of_a_host_obey_a_report() {
    script(REPORTS, |stage| {
        let other = stage.kernel.make_cgroup(&cgroup_path("batch"));
        stage.write_clients(&[("web", "web"), ("batch", "batch")]);
        stage.dispatch(Event::Hangup);
        stage.are_ready(&BACKENDS);
        stage.announce_lame(BACKENDS[0]);
        stage.stop_faults();
        for place in [stage.place, other] {
            let reached: BTreeSet<_> = (0..30).filter_map(|_| stage.reached(place, SERVICE)).collect();
            assert_eq!(reached, [address(BACKENDS[1]), address(BACKENDS[2])].into());
        }
    });
}

/// If the report id of a backend were assigned to another backend too early, the leaving client's
/// connects to the old backend would follow the reports of the other backend.
#[test]
fn backends_of_a_leaving_client_stay_registered() {
    script(REPORTS, |stage| {
        stage.are_ready(&BACKENDS);
        stage.stop_faults();
        // A backend that is no longer listed may return, so its entry remains for a minute.
        stage.list(&BACKENDS[1..]);
        stage.pass(30 * SECOND);
        assert_eq!(stage.registered(), BACKENDS.map(address).into());
        stage.list(&BACKENDS);
        stage.hangs = |work| matches!(work, BackgroundWork::Open(_));
        stage.write_clients(&[("heir", "web")]);
        // The first attempt to open the new client fails, and the second hangs.
        stage.kernel.faults().fail_some(1_000, SEED);
        stage.dispatch(Event::Hangup);
        stage.kernel.faults().stop();
        stage.pass(90 * SECOND);
        assert!(stage.reached(stage.place, SERVICE).is_some(), "the old client still balances connects");
        assert_eq!(stage.registered(), BACKENDS.map(address).into());
        // Once no map `backends` can contain the ids of the backends that are no longer listed,
        // their entries are removed.
        stage.write_list(&BACKENDS[1..]);
        stage.finish_hung();
        stage.pass(90 * SECOND);
        assert_eq!(stage.registered(), [address(BACKENDS[1]), address(BACKENDS[2])].into());
    });
}

#[test]
fn all_lame_ducks_serve_if_there_is_no_better_backend() {
    script(REPORTS, |stage| {
        BACKENDS.iter().for_each(|backend| stage.announce_lame(backend));
        stage.pass(3 * SECOND);
        stage.settle();
        assert_eq!(stage.dialled(60).len(), 3);
        // If the agent of a backend has never answered, the backend is preferred to a lame duck.
        let new = "10.0.0.4:80";
        stage.list(&[BACKENDS[0], BACKENDS[1], new]);
        stage.settle();
        stage.pass(3 * SECOND);
        assert_eq!(stage.dialled(60), [address(new)].into());
        assert_eq!(stage.reported(new), "unheard");
    });
}

#[test]
fn a_silent_backend_is_shown_and_stays_available() {
    script(REPORTS, |stage| {
        stage.are_ready(&BACKENDS);
        stage.pass(3 * SECOND);
        stage.report(BACKENDS[0], |agent| agent.is_silent = true);
        stage.pass(30 * SECOND);
        assert_eq!(stage.reported(BACKENDS[0]), "silent");
        assert_eq!(stage.dialled(60).len(), 3);
    });
}

/// Unlike an ejection, a report of *down* is certain, so the backend is chosen last.
#[test]
fn a_backend_that_reports_down_is_chosen_last() {
    script(REPORTS, |stage| {
        stage.are_ready(&BACKENDS);
        stage.announce(BACKENDS[0], Readiness::Down);
        stage.announce_lame(BACKENDS[1]);
        stage.pass(3 * SECOND);
        stage.settle();
        assert_eq!(stage.dialled(60), [address(BACKENDS[2])].into());
        stage.list(&BACKENDS[..2]);
        stage.settle();
        stage.pass(3 * SECOND);
        assert_eq!(stage.dialled(60), [address(BACKENDS[1])].into());
        stage.list(&BACKENDS[..1]);
        stage.settle();
        stage.pass(3 * SECOND);
        assert_eq!(stage.dialled(60), [address(BACKENDS[0])].into());
        assert_eq!(status::found(&stage.slot(address(BACKENDS[0]))).0, Health::Refusing);
    });
}

/// First the daemon gets the new key in addition to the old key, then agents get the new key, then
/// the old key is removed.
#[test]
fn a_key_is_replaced_without_a_gap() {
    script(REPORTS, |stage| {
        stage.are_ready(&BACKENDS);
        stage.announce_lame(BACKENDS[0]);
        stage.pass(3 * SECOND);
        stage.settle();
        for (file, agents) in [("1-2", 1), ("2-1", 1), ("2-1", 2), ("2", 2)] {
            stage.configure(&REPORTS.replace("\"1\"", &format!("\"{file}\"")));
            BACKENDS.iter().for_each(|backend| stage.report(backend, |agent| agent.key = agents));
            for _ in 0..5 {
                stage.pass(SECOND);
                assert!(
                    !stage.dialled(12).contains(&address(BACKENDS[0])),
                    "keys {file}, agents with key {agents}"
                );
            }
            assert_eq!(stage.reported(BACKENDS[1]), "ready", "keys {file}, agents with key {agents}");
        }
        // An agent that has only the old key is no longer accepted.
        stage.report(BACKENDS[0], |agent| (agent.key, agent.readiness) = (1, Readiness::Ready));
        stage.pass(5 * SECOND);
        assert!(!stage.dialled(12).contains(&address(BACKENDS[0])));
    });
}

/// If other keys were accepted, a process with the key of one service and write access to its list
/// could report for a backend of another service.
#[test]
fn a_service_believes_only_reports_with_its_own_key() {
    let (more, list) = ("10.96.0.11:80", "/lists/more.toml");
    script(REPORTS, |stage| {
        // The backend has a slot for each service, so the counts of each backend do not match.
        stage.is_counted = false;
        let alone = stage.config_text();
        let with_more = |stage: &mut Stage, lines: &str| {
            let service = format!(
                "name = \"more\"\naddress = \"{more}\"\nbackends = {{ file = \"{list}\" }}\n{lines}\n"
            );
            stage.write_text(&alone.replace("[reports]", &format!("[[service]]\n{service}[reports]")));
            stage.dispatch(Event::Hangup);
            stage.pass(5 * SECOND);
            stage.stop_faults();
            stage.faults()
        };
        stage.disk.write(list, list_of(&BACKENDS[..1]));
        stage.are_ready(&BACKENDS);
        stage.announce_lame(BACKENDS[0]);
        // This service requests no reports, so only its list determines the backend's health, even
        // if another service of the client has a report.
        assert_eq!(with_more(stage, ""), [""; 0]);
        assert_eq!(stage.reached(stage.place, more), Some(address(BACKENDS[0])));
        assert!(!stage.dialled(60).contains(&address(BACKENDS[0])));
        let faults = with_more(stage, "health = { probe = \"report\", interval = \"1s\", key = \"2\" }");
        let expected = format!(
            "services have different keys for {}: the daemon does not poll such a backend",
            BACKENDS[0]
        );
        assert!(faults.len() == 1 && faults[0].contains(&expected), "{faults:?}");
        stage.disk.write(list, list_of(&BACKENDS[..1]) + "agent = \"127.0.0.1:9\"\n");
        let faults = with_more(stage, "health = { probe = \"report\", interval = \"1s\" }");
        let expected = format!("have different agents for {}: the daemon polls the first agent", BACKENDS[0]);
        assert!(faults.len() == 1 && faults[0].contains(&expected), "{faults:?}");
        assert_eq!(with_more(stage, ""), [""; 0]);
        assert_eq!(stage.reported(BACKENDS[0]), "lame-duck");
    });
}

#[test]
fn missing_keys_and_a_port_in_use_are_faults_and_reports_stay_valid() {
    script(REPORTS, |stage| {
        stage.are_ready(&BACKENDS);
        stage.stop_faults();
        stage.write_config(&REPORTS.replace("\"1\"", "\"none\""));
        stage.dispatch(Event::Hangup);
        stage.announce_lame(BACKENDS[1]);
        stage.pass(3 * SECOND);
        let faults = stage.faults();
        assert!(faults.len() == 1 && faults[0].contains("none: there is no such file"), "{faults:?}");
        assert_eq!(stage.reported(BACKENDS[1]), "lame-duck", "the daemon polls with the earlier key");
        stage.write_config(REPORTS);
        stage.wire.take_port(true);
        stage.try_to_start(1);
        stage.pass(3 * SECOND);
        let faults = stage.faults();
        assert!(faults.len() == 1 && faults[0].contains("reports cannot be received at"), "{faults:?}");
        assert_eq!(stage.dialled(60), [address(BACKENDS[0]), address(BACKENDS[2])].into());
        stage.wire.take_port(false);
        stage.pass(3 * SECOND);
        assert_eq!((stage.faults(), stage.reported(BACKENDS[0])), (vec![], "ready".to_owned()));
    });
}

/// The agent has lost its disk, and its clock was ahead before. So its new numbers are lower than
/// those of the reports that were accepted.
#[test]
fn a_restarted_agent_with_lower_numbers_is_believed() {
    script(REPORTS, |stage| {
        stage.are_ready(&BACKENDS);
        stage.report(BACKENDS[0], |agent| (agent.incarnation, agent.counter) = (1_000_000, 50));
        stage.pass(3 * SECOND);
        stage.report(BACKENDS[0], |agent| {
            (agent.incarnation, agent.counter, agent.readiness) = (5, 1, Readiness::LameDuck);
        });
        stage.pass(5 * SECOND);
        stage.settle();
        assert!(!stage.dialled(60).contains(&address(BACKENDS[0])));
    });
}

#[test]
fn a_restarted_agent_makes_the_next_connect_the_trial() {
    let lines = format!("ejection = {{ base = \"1h\", max = \"1h\" }}\n{REPORTS}");
    script(&lines, |stage| {
        stage.are_ready(&BACKENDS);
        stage.pass(3 * SECOND);
        stage.settle();
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        stage.dead.clear();
        stage.pass(10 * SECOND);
        assert_eq!(stage.dialled(60).len(), 2, "the backend is ejected for an hour");
        stage.report(BACKENDS[0], |agent| (agent.incarnation, agent.counter) = (2, 1));
        stage.stop_faults();
        assert_eq!(stage.dialled(60).len(), 3);
        // If an agent restarts again and again, its backend gets at most one such trial within the
        // duration of a first ejection.
        stage.dead.insert(address(BACKENDS[0]));
        assert_eq!(stage.dial(60), 5);
        stage.report(BACKENDS[0], |agent| (agent.incarnation, agent.counter) = (3, 1));
        stage.stop_faults();
        assert_eq!(stage.dial(60), 0);
    });
}

/// A fast failure must not look like low load: reported errors count as open flows.
#[test]
fn a_backend_that_reports_errors_does_not_look_idle() {
    let lines = format!("policy = \"least-loaded\"\n{REPORTS}");
    script(&lines, |stage| {
        stage.are_ready(&BACKENDS);
        stage.report(BACKENDS[0], |agent| agent.load = [100_000, 100_000, 1]);
        stage.stop_faults();
        let mut sent = 0;
        for _ in 0..20 {
            let before = stage.sent.get(&address(BACKENDS[0])).copied().unwrap_or(0);
            // The other backends retain their connections.
            for _ in 0..6 {
                stage.connect().expect("all backends accept connects");
            }
            let (ends, retained) = std::mem::take(&mut stage.open)
                .into_iter()
                .partition(|flow| flow.backend == address(BACKENDS[0]));
            stage.open = ends;
            let held: Vec<_> = retained;
            stage.close_all();
            stage.open = held;
            sent += stage.sent.get(&address(BACKENDS[0])).copied().unwrap_or(0) - before;
            stage.tick();
        }
        assert!((1..=60).contains(&sent), "{sent} of 120 connects");
    });
}
