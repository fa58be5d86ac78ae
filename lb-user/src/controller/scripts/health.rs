//! Scripts of connect probes. Their results take effect even before a connect has failed.

use std::time::Duration;

use lb_core::health::Health;
use lb_kernel::Kernel as _;

use super::stage::{BACKENDS, Stage, address, script};
use crate::output::status;

const PROBED: &str = "health = { probe = \"tcp\" }\nejection = \"off\"";
const FOUR: [&str; 4] = [BACKENDS[0], BACKENDS[1], BACKENDS[2], "10.0.0.4:80"];

/// The health of a backend according to its entry in the map `backends`, which outlives the daemon.
fn health(stage: &Stage, backend: &str) -> Health {
    status::found(&stage.slot(address(backend))).0
}

#[test]
fn probes_exclude_a_refusing_backend_before_any_connect_fails() {
    script(PROBED, |stage| {
        stage.find(&BACKENDS, true);
        stage.dead.insert(address(BACKENDS[0]));
        stage.find(&BACKENDS[..1], false);
        stage.settle();
        assert_eq!(stage.dial(60), 0);
        assert_eq!(health(stage, BACKENDS[0]), Health::Refusing);
        stage.dead.clear();
        stage.find(&BACKENDS[..1], true);
        stage.settle();
        assert_eq!(stage.dialled(60).len(), 3);
    });
}

/// Ejection is off. If the results were lost, every connect to the backend would fail until probes
/// found the failure again.
#[test]
fn results_of_probes_outlive_the_daemon() {
    script(PROBED, |stage| {
        stage.find(&BACKENDS[1..], true);
        stage.dead.insert(address(BACKENDS[0]));
        stage.find(&BACKENDS[..1], false);
        stage.settle();
        for _ in 0..3 {
            stage.start(&BACKENDS);
            assert_eq!(stage.dial(60), 0);
            stage.lose_first_probe(&BACKENDS[1..2]);
            stage.settle();
            assert_eq!(stage.dialled(60).len(), 2, "healthy backends stay healthy");
            stage.find(&BACKENDS[1..], true);
            stage.settle();
            assert_eq!(stage.dial(60), 0);
        }
        assert_eq!(health(stage, BACKENDS[0]), Health::Refusing);
    });
}

#[test]
fn a_new_endpoint_gets_no_connect_before_a_probe_succeeds() {
    script(PROBED, |stage| {
        stage.find(&BACKENDS, true);
        stage.settle();
        stage.dead.insert(address(FOUR[3]));
        stage.list(&FOUR);
        stage.settle();
        assert_eq!(stage.dial(80), 0);
        stage.find(&FOUR[3..], false);
        stage.settle();
        assert_eq!(stage.dial(80), 0);
        stage.dead.clear();
        stage.find(&FOUR[3..], true);
        stage.settle();
        assert_eq!(stage.dialled(80).len(), 4);
    });
}

/// Backends that refuse connections are the last resort, but are preferred to no backend.
#[test]
fn all_backends_serve_if_all_refuse_connections() {
    script(PROBED, |stage| {
        stage.find(&BACKENDS, false);
        stage.settle();
        assert_eq!(stage.dialled(60).len(), 3);
        stage.find(&BACKENDS[2..], true);
        stage.settle();
        assert_eq!(stage.dialled(60), [address(BACKENDS[2])].into());
    });
}

#[test]
fn probes_of_another_port_decide_whether_backends_are_healthy() {
    let probed = ["10.0.0.1:9001", "10.0.0.2:9001", "10.0.0.3:9001"];
    script("health = { probe = \"http\", port = 9001, path = \"/healthz\" }\nejection = \"off\"", |stage| {
        stage.find(&probed, false);
        stage.settle();
        assert_eq!((stage.wire.probed(), stage.dialled(60).len()), (probed.map(address).into(), 3));
        stage.find(&probed[1..], true);
        stage.settle();
        assert_eq!(stage.dialled(60), [address(BACKENDS[1]), address(BACKENDS[2])].into());
    });
}

#[test]
fn only_members_and_the_next_endpoints_are_probed() {
    script("health = { probe = \"tcp\" }\nsubset = { algorithm = \"rocksteadier\", size = 2 }", |stage| {
        let ten: Vec<String> = (1..=10).map(|n| format!("10.0.1.{n}:80")).collect();
        let ten: Vec<&str> = ten.iter().map(String::as_str).collect();
        stage.list(&ten);
        stage.settle();
        let probed = stage.wire.probed();
        assert_eq!(probed.len(), 2 + 4, "{probed:?}");
        // If two members stay dead, healthy backends replace them.
        let members = stage.dialled(20);
        stage.find(&ten, true);
        let dead: Vec<String> = members.iter().map(ToString::to_string).collect();
        stage.dead.extend(&members);
        stage.find(&dead.iter().map(String::as_str).collect::<Vec<_>>(), false);
        stage.pass(Duration::from_mins(2));
        assert_eq!(stage.dial(20), 0);
        assert!(stage.dialled(20).is_disjoint(&members));
        stage.list(&ten[..2]);
        stage.settle();
        assert_eq!(stage.wire.probed(), [address(ten[0]), address(ten[1])].into());
        // If a new configuration has no probes, the probes stop, and their results are dropped.
        stage.configure("subset = \"all\"");
        stage.settle();
        assert!(stage.wire.probed().is_empty());
        assert!(stage.states().keys().all(|one| health(stage, &one.to_string()) != Health::Refusing));
    });
}

/// If a client has no pins on this host, its backends are probed once before its connects are
/// balanced.
#[test]
fn a_first_look_precedes_the_first_connect_and_is_short() {
    for answers in [true, false] {
        let mut stage = Stage::new(PROBED);
        stage.write_list(&BACKENDS);
        stage.dead.insert(address(BACKENDS[0]));
        stage.try_to_start(1);
        assert_eq!(stage.connect(), Err(0), "the client is not attached yet");
        stage.pass(Duration::from_millis(100));
        assert_eq!(stage.connect(), Err(0));
        if answers {
            stage.find(&BACKENDS[..1], false);
            assert_eq!(stage.connect(), Err(0), "not all results have arrived");
            stage.find(&BACKENDS[1..], true);
            stage.pass(Duration::from_millis(1));
            assert_eq!(stage.dial(60), 0, "no connect reached the dead backend");
        } else {
            stage.pass(Duration::from_millis(400));
            assert_eq!(stage.dial(60), 20, "no probe has a result");
        }
        // The next daemon makes no first look, because the client has pins.
        stage.try_to_start(1);
        assert!(stage.kernel.is_retired(&stage.pins()).is_ok_and(|is_retired| !is_retired));
        assert!(stage.controller().is_open());
    }
}
