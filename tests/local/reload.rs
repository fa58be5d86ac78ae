//! A new configuration while the daemon runs: services and files change as configured, and flows do
//! not notice.

use rustix::process::Signal;
use stage::{Setup, address, eventually, look, replace};

use stage::fixture::{Fixture, SERVICE, config};

fn second_service() -> String {
    "[[service]]\nname = \"more\"\naddress = \"10.96.0.11:80\"\nbackends = { static = [\"127.0.0.1:8001\"] }\n".to_owned()
}

/// The configuration of the fixture, with lines for its client and more tables.
pub fn text(fixture: &Fixture, client: &str, service: &str, more: &str) -> String {
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, service);
    text.replacen("\n\n", &format!("\n{client}\n\n"), 1) + more
}

pub fn write(setup: &Setup, text: &str) {
    replace(&setup.folder.join("socklb.toml"), text);
}

fn services(setup: &Setup) -> Vec<String> {
    let status = setup.status();
    let services = status.clients.into_iter().next().map_or_else(Vec::new, |client| client.services);
    services.into_iter().map(|service| service.name).collect()
}

/// Every field that may change, one after the other, under a client that connects without pause.
#[test]
fn every_changeable_field_is_applied_without_a_failed_connect() {
    let fixture = Fixture::new();
    let mut held = fixture.probe();
    let open: Vec<_> = (0..6).map(|_| held.dial(SERVICE)).collect();
    let mut busy = fixture.probe();
    busy.start_dialling(SERVICE);
    let explain = || -> serde_json::Value {
        let output = fixture.setup.run(&["explain", "users", "--json"]);
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    };
    let one = "subset = { algorithm = \"rocksteadier\", size = 1 }";
    let steps: [(&str, &str, &str, serde_json::Value); 5] = [
        ("", "subset = { algorithm = \"rocksteadier\", size = 2 }", "/0/inputs/size", 2.into()),
        ("", one, "/0/inputs/size", 1.into()),
        ("index = 1\ncount = 3", one, "/0/inputs/index", 1.into()),
        ("index = 1\ncount = 7", one, "/0/inputs/count", 7.into()),
        ("", "subset = \"all\"", "/0/inputs/algorithm", "all".into()),
    ];
    for (client, service, pointer, expected) in steps {
        write(&fixture.setup, &text(&fixture, client, service, ""));
        let look = || explain().pointer(pointer).cloned();
        eventually(service, look, |found| found.as_ref() == Some(&expected));
        let size = if service.contains("size = 1") {
            1
        } else if service.contains("size = 2") {
            2
        } else {
            3
        };
        // On a CPU of its own: two probes that take turns on one cursor may each get only every
        // second entry.
        let mut probe = fixture.probe();
        probe.pin(1);
        assert_eq!(probe.dial_many(SERVICE, 60).len(), size, "{service}");
    }
    let counts = busy.stop_dialling();
    assert!(counts.keys().all(|name| name.starts_with('b')), "{counts:?}");
    let status = look(|| fixture.setup.status()).now("a connect is counted before it returns");
    assert_eq!(status.clients[0].not_a_service, 0);
    for dialled in open {
        assert_eq!(held.peer(dialled.socket), address(SERVICE));
        held.close(dialled.socket);
    }
    fixture.setup.active_becomes(0);
}

/// A change in several files takes effect at once, with the signal.
#[test]
fn unwatched_files_are_read_only_at_sighup() {
    let mut fixture = Fixture::without_daemon();
    let configured = text(&fixture, "", "", "[daemon]\nwatch = false\nlog_format = \"json\"\n");
    fixture.setup.write("socklb.toml", &configured);
    fixture.start();
    let mut probe = fixture.probe();
    probe.dial_many(SERVICE, 3);
    fixture.write_endpoints(&[("127.0.0.1:8002", "")]);
    write(&fixture.setup, &(configured + &second_service()));
    // Rates are updated at the ticks at which the daemon checks the files that it watches.
    let rate = || {
        let backends = fixture.setup.backends("web", "users").into_iter();
        backends.filter_map(|backend| Some(backend.rates_60s?.started)).sum::<f64>()
    };
    let mut last = 0.0;
    for _ in 0..3 {
        let before = last;
        last = eventually("a tick has passed", rate, |rate| (*rate - before).abs() > 0.0);
    }
    let names = look(|| services(&fixture.setup)).now("three ticks have passed since the change");
    assert_eq!(names, ["users"]);
    assert_eq!(probe.dial_many(SERVICE, 30).len(), 3);
    fixture.daemon().signal(Signal::HUP);
    eventually("both files are read", || services(&fixture.setup).len(), |count| *count == 2);
    assert_eq!(probe.dial_many(SERVICE, 30), [("b2".to_owned(), 30)].into());
    let log = fixture.daemon().log();
    let line = |line: &str| serde_json::from_str::<serde_json::Value>(line).expect("an object");
    let read: Vec<_> = log.lines().map(line).filter(|line| line["message"] == "endpoint list read").collect();
    assert_eq!(read.len(), 2, "{log}");
    let last = read.last().map(|read| (&read["service"], &read["endpoints"], &read["changes"]));
    let changes = "removed: 127.0.0.1:8001, 127.0.0.1:8003; changed: 127.0.0.1:8002 (index 1 -> 0)";
    assert_eq!(last, Some((&"users".into(), &1.into(), &changes.into())));
}
