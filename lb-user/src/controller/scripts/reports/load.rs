//! Scripts of weights that follow load: reports of agents, switches of operators, and the state
//! that a later daemon adopts.

use lb_core::control::Switch;
use lb_http::peer::PeerCredentials;
use lb_view::load::{MemberLoadStatus, ServiceLoadStatus, Switched};

use crate::api::{ControllerQuery, Reply};
use crate::controller::scripts::stage::{
    BACKENDS, SECOND, SEED, Stage, address, cgroup_path, list_of, script, script_except,
};
use crate::controller::{BackgroundWork, Event};

const FILE: &str = "/var/lib/socklb/load/factors.json";

/// The lines of a service with these load settings.
fn lines(load: &str) -> String {
    format!(
        "{load}\npolicy = \"weighted-round-robin\"\nhealth = {{ probe = \"report\", interval = \"1s\" }}\n[reports]\nkey = \"1\""
    )
}

const FEEDBACK: &str = "load = { control = \"feedback\" }";

impl Stage {
    /// Makes the agents of the three backends report these utilizations, in thousandths, and 100
    /// requests per second.
    fn utilize(&mut self, thousandths: [u32; 3]) {
        for (backend, utilization) in BACKENDS.iter().zip(thousandths) {
            self.report(backend, |agent| agent.load = [100_000, 0, utilization]);
        }
    }

    /// Lets seconds pass, with some connects in each second.
    fn use_for(&mut self, seconds: u32) {
        for _ in 0..seconds {
            self.pass(SECOND);
            self.dial(6);
        }
    }

    fn load(&self) -> ServiceLoadStatus {
        self.task().loads().remove("users").expect("the service has a load")
    }

    fn member(&self, at: usize) -> MemberLoadStatus {
        let members = self.load().members;
        members
            .into_iter()
            .find(|member| member.address == address(BACKENDS[at]))
            .expect("the backend is a member")
    }

    /// The share of each backend in the table.
    fn shares(&self) -> [f64; 3] {
        let position = self.task().position("users").expect("the service exists");
        let balancer = self.task().balancer();
        let (_, table) = balancer.schedule(position).expect("the service has a table");
        let part = |count: usize| f64::from(u32::try_from(count).expect("a count fits into 32 bits"));
        BACKENDS.map(|backend| {
            let slot = balancer.slot(position, address(backend)).map(|at| at.slot);
            part(table.iter().filter(|entry| Some(**entry) == slot).count()) / part(table.len())
        })
    }

    /// Sets the switch of the service's control law, as an operator does.
    fn switch(&mut self, switch: Switch) -> Switched {
        let reply = self.switch_of(None, switch);
        assert_eq!(reply.clients.len(), 1);
        reply
    }

    /// Sets the switch for `client`, or for all clients if it is `None`.
    fn switch_of(&mut self, client: Option<&str>, switch: Switch) -> Switched {
        let (answer, mut reply) = Reply::new();
        let client = client.map(str::to_owned);
        let (service, who) = ("users".to_owned(), PeerCredentials { user: 0, groups: vec![0], process: 1 });
        self.dispatch(Event::Query(ControllerQuery::SwitchLoad { service, switch, client, who, answer }));
        reply.try_recv().expect("the controller answers at once")
    }
}

#[test]
fn a_busy_backend_loses_share_until_an_operator_switches() {
    script(&lines(FEEDBACK), |stage| {
        stage.utilize([900, 300, 300]);
        stage.use_for(60);
        let [busy, one, other] = [0, 1, 2].map(|at| stage.member(at).factor);
        assert!(busy < 0.7 && one > 1.05 && other > 1.05, "factors {busy} {one} {other}");
        stage.stop_faults();
        assert!(stage.shares()[0] < 0.25, "{:?}", stage.shares());
        // While the switch is `freeze`, weights do not change.
        stage.switch(Switch::Frozen);
        let frozen = stage.shares();
        stage.utilize([100, 300, 300]);
        stage.use_for(60);
        assert_eq!(stage.shares(), frozen);
        assert_eq!(stage.member(0).held_by.as_deref(), Some("operator"));
        stage.switch(Switch::Off);
        stage.use_for(3);
        assert!(stage.shares().iter().all(|share| (share - 1.0 / 3.0).abs() < 0.01), "{:?}", stage.shares());
        stage.switch(Switch::On);
        stage.use_for(90);
        assert!(stage.member(0).factor > 1.1, "{:?}", stage.member(0));
    });
}

#[test]
fn observe_mode_shows_factors_and_changes_nothing() {
    script(&lines("load = { control = \"feedback\", mode = \"observe\" }"), |stage| {
        stage.utilize([900, 300, 300]);
        stage.use_for(60);
        let first = stage.member(0);
        assert!(first.wanted < 0.95 && (first.factor - 1.0).abs() < 1e-9, "{first:?}");
        assert!(stage.shares().iter().all(|share| (share - 1.0 / 3.0).abs() < 0.01));
    });
}

#[test]
fn a58_weights_are_requests_over_utilization() {
    script(&lines("load = { control = \"a58\" }"), |stage| {
        stage.utilize([900, 300, 300]);
        stage.use_for(60);
        stage.stop_faults();
        // 100 requests per second at a utilization of 0.9 give the first backend a weight of 111.
        // The same rate at 0.3 gives each of the two others 333. So the share of the first is 111
        // of 778.
        assert!((stage.shares()[0] - 1.0 / 7.0).abs() < 0.01, "{:?}", stage.shares());
    });
}

#[test]
fn weights_stay_and_a_fault_is_shown_if_fewer_than_half_report() {
    script(&lines(FEEDBACK), |stage| {
        stage.report(BACKENDS[0], |agent| agent.load = [100_000, 0, 900]);
        stage.pass(10 * SECOND);
        stage.stop_faults();
        assert!(stage.load().is_idle && !stage.load().is_blind(), "no client needs reports");
        assert_eq!(stage.degraded(), [""; 0]);
        stage.use_for(60);
        assert_eq!(stage.member(0).held_by.as_deref(), Some("few-reports"));
        assert!((stage.member(0).factor - 1.0).abs() < 1e-9);
        assert_eq!((stage.load().reporting, stage.load().expected), (1, 3));
        let faults = stage.degraded();
        let phrase = "client web, service users: weights should follow load, but only 1 of 3 members report";
        assert!(faults.len() == 1 && faults[0].starts_with(phrase), "{faults:?}");
    });
}

/// Each flow ends before the next tick, so no tick shows an open flow.
#[test]
fn short_flows_after_an_idle_time_make_reports_arrive() {
    let seldom = lines(FEEDBACK).replace("\"1s\"", "\"1s\", idle_interval = \"10m\"");
    script(&seldom, |stage| {
        stage.utilize([300; 3]);
        stage.pass(60 * SECOND);
        stage.stop_faults();
        assert!(stage.load().is_idle);
        for _ in 0..10 {
            stage.connect().expect("all backends accept connects");
            stage.close_all();
            stage.pass(SECOND);
            let load = stage.load();
            assert!(load.is_idle || (load.reporting, load.expected) == (3, 3), "{load:?}");
        }
        assert!(!stage.load().is_idle);
    });
}

/// The third backend receives no connects, because its weight is too small. Agents of an idle
/// service would be polled only every ten minutes.
#[test]
fn all_members_of_an_active_service_are_polled_often() {
    let seldom = lines(FEEDBACK).replace("\"1s\"", "\"1s\", idle_interval = \"10m\"");
    script(&seldom, |stage| {
        stage.utilize([300; 3]);
        let weights = [60_000, 60_000, 1].into_iter().zip(BACKENDS);
        let endpoint = |(weight, backend)| format!("{}weight = {weight}\n", list_of(&[backend]));
        stage.list_text(&weights.map(endpoint).collect::<String>());
        stage.stop_faults();
        let before = stage.sent.get(&address(BACKENDS[2])).copied();
        stage.use_for(60);
        assert_eq!(stage.sent.get(&address(BACKENDS[2])).copied(), before, "the backend gets no connects");
        let load = stage.load();
        assert!(!load.is_idle && (load.reporting, load.expected) == (3, 3), "{load:?}");
        // The backend's next report arrives within an interval, and the daemon's tick applies it at
        // most a second later.
        stage.utilize([300, 300, 700]);
        stage.use_for(3);
        assert_eq!(stage.member(2).utilization, Some(0.7));
    });
}

/// An impossible utilization moves the backend's factor at most to its limit (the clamp). A
/// possible utilization may also reach this limit. The shares of the other backends do not fall.
#[test]
fn an_absurd_report_moves_only_its_own_share_and_no_further_than_the_clamp() {
    // At the clamp, the shares of the other two depend on when the first report arrived.
    script_except(
        &lines(FEEDBACK),
        |line| line.ends_with("entries"),
        |stage| {
            stage.utilize([4_000_000_000, 300, 300]);
            // Bound: the clamp is reached within about two minutes.
            for _ in 0..300 {
                stage.use_for(1);
                if stage.member(0).is_at_clamp {
                    break;
                }
            }
            let [first, one, other] = [0, 1, 2].map(|at| stage.member(at));
            assert!(first.is_at_clamp && first.factor > 0.1 && first.factor < 0.2, "{first:?}");
            assert!(one.share > 0.35 && other.share > 0.35, "{one:?} {other:?}");
            let faults = stage.degraded().join("\n");
            assert!(faults.contains("which is the limit") && faults.contains(BACKENDS[0]), "{faults}");
        },
    );
}

#[test]
fn weights_and_switches_outlive_kills_silence_and_reloads() {
    script(&lines(FEEDBACK), |stage| {
        stage.utilize([900, 300, 300]);
        stage.use_for(90);
        stage.stop_faults();
        let before = stage.shares()[0];
        assert!(before < 0.25, "{before}");
        BACKENDS.iter().for_each(|backend| stage.report(backend, |agent| agent.is_silent = true));
        let is_as_before = |stage: &Stage| (stage.shares()[0] - before).abs() < 0.05;
        for _ in 0..3 {
            stage.try_to_start(1);
            stage.use_for(20);
            assert!(is_as_before(stage), "{:?}", stage.shares());
        }
        stage.configure(&lines(&format!("{FEEDBACK}\nslow_start = \"1m\"")));
        assert!(is_as_before(stage) && stage.load().slow_start_s.is_some(), "{:?}", stage.shares());
        // Another service is inserted before this one in the file.
        let text = stage.config_text();
        let first = "[[service]]\nname = \"first\"\naddress = \"10.96.0.11:80\"\nbackends = { static = [] }\n[[service]]";
        stage.write_text(&text.replacen("[[service]]", first, 1));
        stage.dispatch(Event::Hangup);
        stage.settle();
        assert!(is_as_before(stage), "{:?}", stage.shares());
        stage.switch(Switch::Frozen);
        stage.pass(SECOND);
        stage.try_to_start(1);
        stage.pass(2 * SECOND);
        assert_eq!(stage.load().switch, "freeze");
        // A truncated file is ignored, and renamed.
        let stored = stage.disk.content(FILE).expect("the file is stored");
        stage.disk.write(FILE, &stored[..stored.len() / 2]);
        stage.try_to_start(1);
        stage.use_for(3);
        assert_eq!(stage.load().switch, "on");
        assert!((stage.shares()[0] - 1.0 / 3.0).abs() < 0.01, "{:?}", stage.shares());
        let aside = stage.disk.content(format!("{FILE}.not-understood")).expect("the file is renamed");
        assert_eq!(aside, stored[..stored.len() / 2]);
    });
}

#[test]
fn a_switch_outlives_a_client_that_cannot_be_started() {
    script(&lines(FEEDBACK), |stage| {
        let [web, batch] = ["web", "batch"].map(|name| (name, name));
        stage.kernel.make_cgroup(&cgroup_path("batch"));
        stage.utilize([300; 3]);
        stage.use_for(3);
        stage.write_clients(&[web, batch]);
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        stage.switch_of(Some("web"), Switch::Frozen);
        // `web` is removed and configured again. The first attempt to open it fails, and the second
        // hangs.
        stage.is_counted = false;
        stage.write_clients(&[batch]);
        stage.dispatch(Event::Hangup);
        stage.hangs = |work| matches!(work, BackgroundWork::Open(_));
        stage.write_clients(&[web, batch]);
        stage.kernel.faults().fail_some(1_000, SEED);
        stage.dispatch(Event::Hangup);
        stage.kernel.faults().stop();
        stage.pass(30 * SECOND);
        assert!(stage.controller().clients.task("web").is_none());
        let stored =
            String::from_utf8(stage.disk.content(FILE).expect("the file exists")).expect("the file is text");
        assert!(stored.contains("\"web\"") && stored.contains("\"batch\""), "{stored}");
        stage.finish_hung();
        stage.pass(30 * SECOND);
        let switch = |client| {
            stage.controller().clients.task(client).expect("the client runs").loads()["users"].switch.clone()
        };
        assert_eq!(["web", "batch"].map(switch), ["freeze", "on"]);
    });
}

/// The file with an operator's switch cannot be read, so it is not overwritten.
#[test]
fn a_switch_set_while_the_file_is_unreadable_stays_set() {
    script(&lines(FEEDBACK), |stage| {
        stage.utilize([300; 3]);
        stage.use_for(3);
        assert_eq!(stage.switch(Switch::Frozen).not_kept, None);
        stage.pass(2 * SECOND);
        stage.stop_faults();
        stage.disk.set_broken(FILE, true);
        stage.try_to_start(1);
        stage.pass(30 * SECOND);
        assert_eq!(stage.load().switch, "on");
        stage.disk.set_broken(FILE, false);
        stage.pass(30 * SECOND);
        assert_eq!(stage.load().switch, "freeze", "no operator has set a switch in the meantime");
        let stored = stage.disk.content(FILE).expect("the file is stored");
        assert!(String::from_utf8_lossy(&stored).contains("freeze"));
        stage.disk.set_broken(FILE, true);
        stage.try_to_start(1);
        stage.pass(3 * SECOND);
        assert_eq!(stage.load().switch, "on");
        let not_kept = stage.switch(Switch::Off).not_kept.expect("the switch cannot be stored");
        assert!(not_kept.contains("os error 5"), "{not_kept}");
        stage.pass(30 * SECOND);
        stage.disk.set_broken(FILE, false);
        assert_eq!(
            stage.disk.content(FILE).expect("the file exists"),
            stored,
            "the file was not overwritten"
        );
        stage.pass(30 * SECOND);
        assert_eq!(stage.load().switch, "off", "the last switch is in force");
        let stored =
            String::from_utf8(stage.disk.content(FILE).expect("the file exists")).expect("the file is text");
        assert!(stored.contains("\"off\""), "{stored}");
    });
}

#[test]
fn slow_start_covers_new_and_recovered_backends_and_restarts() {
    let new = "10.0.0.4:80";
    script(&lines("slow_start = \"1m\""), |stage| {
        stage.utilize([300; 3]);
        stage.use_for(3);
        assert!(
            (stage.shares()[0] - 1.0 / 3.0).abs() < 0.01,
            "backends present at the start have their share"
        );
        stage.list(&[BACKENDS[0], BACKENDS[1], BACKENDS[2], new]);
        stage.use_for(2);
        stage.stop_faults();
        // 64 seconds have passed, so the slow start has ended and the backend has its full share.
        assert!(stage.shares().iter().all(|share| (share - 0.25).abs() < 0.02), "{:?}", stage.shares());
        stage.announce(BACKENDS[0], lb_report::wire::Readiness::LameDuck);
        stage.use_for(10);
        stage.announce(BACKENDS[0], lb_report::wire::Readiness::Ready);
        stage.use_for(5);
        let first = stage.shares()[0];
        assert!(first > 0.0 && first < 0.1, "{first}");
        stage.pass(12 * SECOND);
        stage.try_to_start(1);
        stage.use_for(5);
        let later = stage.shares()[0];
        assert!(later > first && later < 0.2, "share {first}, later {later}");
        assert_eq!(stage.member(0).held_by.as_deref(), Some("slow-start"));
        assert_eq!(stage.switch_of(None, Switch::Frozen).clients, [], "no service has a control law");
        stage.use_for(60);
        assert!((stage.shares()[0] - 0.25).abs() < 0.02, "{:?}", stage.shares());
    });
}
