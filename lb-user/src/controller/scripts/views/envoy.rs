//! Scripts of the files that Envoy reads.

use std::collections::BTreeMap;
use std::path::PathBuf;

use lb_report::wire::Readiness;
use serde_json::Value;

use crate::controller::scripts::overrides::drain;
use crate::controller::scripts::stage::{
    BACKENDS, FAULTS_PER_MILLE, SEED, Stage, address, cgroup_path, list_of, script,
};
use crate::controller::{BackgroundWork, Event};
use crate::daemon::Files as _;

const ENVOY: &str = "\n[envoy]\ndirectory = \"/srv/eds\"";
const FILE: &str = "/srv/eds/web/users.json";

/// The weight and health of each endpoint in a file, by the number of the backend.
type Endpoints = BTreeMap<usize, (u64, String)>;

impl Stage {
    fn envoy(&self) -> Option<Endpoints> {
        self.envoy_at(FILE)
    }

    fn envoy_at(&self, path: &str) -> Option<Endpoints> {
        let text: Value = serde_json::from_slice(&self.disk.content(path).ok()?).expect("the file is JSON");
        let assignment = &text["resources"][0];
        assert_eq!(assignment["cluster_name"], "users");
        let endpoints = assignment["endpoints"][0]["lb_endpoints"].as_array().expect("the file has a list");
        let endpoint = |endpoint: &Value| {
            let socket = &endpoint["endpoint"]["address"]["socket_address"];
            let at = format!(
                "{}:{}",
                socket["address"].as_str().expect("an endpoint has an address"),
                socket["port_value"]
            );
            let number =
                BACKENDS.iter().position(|backend| *backend == at).expect("the address is a backend's");
            let health = endpoint["health_status"].as_str().expect("the health is a word");
            (
                number,
                (
                    endpoint["load_balancing_weight"].as_u64().expect("the weight is a number"),
                    health.to_owned(),
                ),
            )
        };
        Some(endpoints.iter().map(endpoint).collect())
    }

    /// Text that changes with each write of the file.
    fn written(&self) -> impl PartialEq + std::fmt::Debug + use<> {
        format!("{:?}", self.disk.stamp(FILE.as_ref()))
    }

    fn list_with(&mut self, lines: [&str; 3]) {
        let endpoint = |(backend, lines)| format!("{}{lines}\n", list_of(&[backend]));
        self.list_text(&BACKENDS.into_iter().zip(lines).map(endpoint).collect::<String>());
        self.settle();
        self.tick();
    }
}

fn endpoints<const N: usize>(all: [(usize, u64, &str); N]) -> Option<Endpoints> {
    Some(all.into_iter().map(|(number, weight, health)| (number, (weight, health.to_owned()))).collect())
}

#[test]
fn envoy_gets_the_backends_in_the_table_with_their_entries_as_weights() {
    script(ENVOY, |stage| {
        stage.list_with(["weight = 3", "", "weight = 0"]);
        let table = endpoints([(0, 768, "HEALTHY"), (1, 256, "HEALTHY")]);
        assert_eq!(stage.envoy(), table, "endpoints of weight 0 are omitted");
        stage.list_with(["weight = 3", "", "state = \"lame-duck\""]);
        assert_eq!(stage.envoy(), endpoints([(0, 768, "HEALTHY"), (1, 256, "HEALTHY"), (2, 1, "DRAINING")]));
        stage.list_with(["weight = 3", "", "state = \"down\""]);
        assert_eq!(stage.envoy(), table);
        stage.list(&BACKENDS[..1]);
        stage.settle();
        stage.tick();
        assert_eq!(stage.envoy(), endpoints([(0, 1024, "HEALTHY")]));
    });
}

#[test]
fn lame_ducks_serve_if_no_better_backend_is_left() {
    script(ENVOY, |stage| {
        stage.list_with(["state = \"lame-duck\"", "state = \"down\"", "state = \"lame-duck\""]);
        assert_eq!(stage.envoy(), endpoints([(0, 512, "HEALTHY"), (2, 512, "HEALTHY")]));
    });
}

#[test]
fn an_ejected_backend_is_unhealthy_for_envoy() {
    script(&format!("ejection = {{ base = \"1h\", max = \"1h\" }}{ENVOY}"), |stage| {
        stage.dead.insert(address(BACKENDS[0]));
        stage.dial(60);
        stage.tick();
        stage.tick();
        let all = stage.envoy().expect("the file exists");
        assert_eq!(
            all.values().map(|(_, health)| &**health).collect::<Vec<_>>(),
            ["UNHEALTHY", "HEALTHY", "HEALTHY"]
        );
        assert_eq!(all.values().map(|(weight, _)| weight).sum::<u64>(), 1024);
    });
}

#[test]
fn a_backend_that_an_operator_has_drained_drains() {
    script(ENVOY, |stage| {
        let _reply = stage.request(drain(&[BACKENDS[1]]));
        for _ in 0..30 {
            stage.tick();
        }
        let all = stage.envoy().expect("the file exists");
        assert_eq!(
            all.values().map(|(_, health)| &**health).collect::<Vec<_>>(),
            ["HEALTHY", "DRAINING", "HEALTHY"]
        );
    });
}

#[test]
fn a_backend_that_reports_to_be_a_lame_duck_drains() {
    let lines = format!("health = {{ probe = \"report\" }}{ENVOY}\n[reports]\nkey = \"1\"");
    script(&lines, |stage| {
        stage.announce(BACKENDS[1], Readiness::LameDuck);
        for _ in 0..30 {
            stage.tick();
        }
        let all = stage.envoy().expect("the file exists");
        assert_eq!(all[&1].1, "DRAINING", "{all:?}");
    });
}

#[test]
fn an_unchanged_file_is_not_written_again() {
    script(ENVOY, |stage| {
        stage.tick();
        let before = stage.written();
        stage.list_with(["", "", ""]);
        stage.dial(60);
        stage.settle();
        assert_eq!(stage.written(), before);
        // Many changes cause only one further write.
        stage.hangs = |work| matches!(work, BackgroundWork::WriteEnvoyFiles(_));
        stage.list_with(["weight = 2", "", ""]);
        stage.list_with(["weight = 3", "", ""]);
        stage.list_with(["weight = 3", "", "weight = 0"]);
        assert_eq!(stage.written(), before);
        stage.finish_hung();
        assert_eq!(stage.envoy(), endpoints([(0, 768, "HEALTHY"), (1, 256, "HEALTHY")]));
    });
}

#[test]
fn a_later_daemon_leaves_the_file_until_the_service_has_a_list() {
    script(ENVOY, |stage| {
        stage.list_with(["weight = 3", "", ""]);
        let before = stage.envoy();
        stage.kill();
        assert_eq!(stage.envoy(), before, "the files stay when the daemon ends");
        stage.disk.remove("/lists/users.toml");
        stage.try_to_start(100);
        stage.tick();
        assert_eq!(stage.envoy(), before);
    });
}

#[test]
fn files_leave_with_their_service_client_or_directory() {
    script(ENVOY, |stage| {
        stage.tick();
        stage.kernel.make_cgroup(&cgroup_path("batch"));
        stage.write_clients(&[("web", "web"), ("batch", "batch")]);
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        let files = |stage: &Stage| stage.disk.below("/srv");
        let [web, batch] = [FILE, "/srv/eds/batch/users.json"].map(PathBuf::from);
        assert_eq!(files(stage), [batch, web.clone()]);
        stage.write_clients(&[("web", "web")]);
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        assert_eq!(files(stage), [web]);
        stage.kernel.faults().fail_some(FAULTS_PER_MILLE, SEED);
        stage.reconfigure("/srv/eds", "/srv/other");
        stage.stop_faults();
        assert_eq!(files(stage), [PathBuf::from("/srv/other/web/users.json")]);
        stage.reconfigure("directory = \"/srv/other\"", "");
        stage.stop_faults();
        assert_eq!(files(stage), Vec::<PathBuf>::new());
    });
}

#[test]
fn a_later_daemon_removes_the_files_that_its_configuration_does_not_need() {
    script(ENVOY, |stage| {
        stage.kernel.make_cgroup(&cgroup_path("batch"));
        stage.write_clients(&[("web", "web"), ("batch", "batch")]);
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        stage.tick();
        stage.kill();
        let [web, batch, foreign] =
            [FILE, "/srv/eds/batch/users.json", "/srv/eds/batch/mail.json"].map(PathBuf::from);
        stage.disk.write(&foreign, "{}");
        assert_eq!(stage.disk.below("/srv"), [foreign.clone(), batch.clone(), web.clone()]);
        stage.write_clients(&[("web", "web")]);
        stage.try_to_start(100);
        stage.stop_faults();
        stage.tick();
        assert_eq!(stage.disk.below("/srv"), [foreign.clone(), web.clone()]);
        // If another program has replaced the file, that program's file remains.
        stage.kill();
        stage.disk.write(&web, "{}");
        let text = stage.config_text();
        stage.write_text(&text.replace("/srv/eds", "/srv/other"));
        stage.try_to_start(100);
        stage.stop_faults();
        stage.tick();
        assert_eq!(stage.disk.below("/srv"), [foreign, web, "/srv/other/web/users.json".into()]);
    });
}

#[test]
fn a_directory_that_cannot_be_written_is_a_fault_that_ends() {
    script(ENVOY, |stage| {
        stage.tick();
        stage.disk.set_broken("/srv/eds", true);
        stage.list_with(["weight = 3", "", "weight = 0"]);
        let fault = |stage: &Stage| stage.faults().into_iter().find(|fault| fault.contains("for Envoy"));
        let text = fault(stage).expect("a fault is reported");
        assert!(
            text.starts_with("cannot update 1 file for Envoy")
                && text.contains("cannot write /srv/eds/web/users.json"),
            "{text}"
        );
        for _ in 0..100 {
            stage.tick();
            assert_eq!(stage.dial(4), 0, "connects are not affected");
        }
        assert_eq!(stage.logged("cannot update the file for Envoy"), 1);
        stage.disk.set_broken("/srv/eds", false);
        stage.stop_faults();
        assert_eq!(
            (fault(stage), stage.envoy()),
            (None, endpoints([(0, 768, "HEALTHY"), (1, 256, "HEALTHY")]))
        );
        // The file system does not answer.
        stage.kernel.faults().fail_some(FAULTS_PER_MILLE, SEED);
        stage.hangs = |work| matches!(work, BackgroundWork::WriteEnvoyFiles(_));
        stage.list_with(["", "", ""]);
        assert_eq!(stage.dial(30), 0);
        stage.finish_hung();
        stage.stop_faults();
        assert_eq!(stage.envoy().expect("the file exists").len(), 3);
    });
}
