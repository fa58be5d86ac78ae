//! The commands as an operator uses them: their output and their exit codes. Commands that need no
//! daemon have their tests in `lb-user`.

use lb_common::abi::{BackendState, DaemonState, HealthReason, Usable};
use lb_view::explanation::Explanation;
use lb_view::overrides::{Overridden, OverridesDocument};
use lb_view::status::StatusDocument;
use rustix::process::Signal;
use serde_json::Value;
use stage::daemon::failure;
use stage::{eventually, look};

use stage::fixture::{Fixture, SERVICE};

/// If the configuration names directories, no option has to repeat them. A command-line option
/// takes precedence over the configuration.
#[test]
fn every_command_reads_its_directories_from_the_configuration() {
    let fixture = Fixture::without_daemon();
    let setup = fixture.setup.clone();
    let path = setup.folder.join("socklb.toml");
    let text = std::fs::read_to_string(&path).expect("read");
    let paths = format!("[paths]\npins = \"{}\"\nrun = \"run\"\nstate = \"state\"\n", setup.pins.display());
    setup.write("socklb.toml", &(text + &paths));
    let socklb = |arguments: &[&str]| {
        let mut command = std::process::Command::new(stage::program("socklb"));
        command.args(arguments);
        command
    };
    let file = path.to_str().expect("the path is UTF-8");
    let run = |arguments: &[&str]| stage::daemon::finish(socklb(arguments).args(["--config", file]));
    let by_variable =
        |arguments: &[&str]| stage::daemon::finish(socklb(arguments).env("SOCKLB_CONFIG", file));
    // The daemon's path of the configuration is relative.
    let mut daemon = socklb(&["run", "-c", "socklb.toml"]);
    let log = setup.folder.join("log");
    daemon.current_dir(&setup.folder).stderr(std::fs::File::create(&log).expect("open the log"));
    let _daemon = stage::daemon::ChildGuard::of(daemon.spawn().expect("start the daemon"));
    let socket = setup.folder.join("run/socklb.sock");
    eventually("the daemon answers", || socket.exists(), |answers| *answers);
    // Read-only commands use the configured directories even if another section of the
    // configuration has a fault.
    let good = std::fs::read_to_string(&path).expect("read");
    setup.write("socklb.toml", &(good.clone() + "[metrics]\nlisten = 1\n"));
    for output in [run(&["status"]), by_variable(&["status"])] {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("client web") && text.contains("(pid"), "{text}");
    }
    setup.write("socklb.toml", &good);
    let checked = run(&["check"]);
    assert_eq!(failure(&checked), (Some(0), String::new()));
    assert_eq!(String::from_utf8_lossy(&checked.stdout), format!("{file}: ok\n"), "the cgroup exists");
    let mut probe = fixture.probe();
    probe.dial(SERVICE);
    assert_eq!(String::from_utf8_lossy(&run(&["flows"]).stdout).lines().count(), 2);
    fixture.write_endpoints(&[("127.0.0.1:8002", "")]);
    let answering = || probe.dial_many(SERVICE, 64).into_keys().collect::<Vec<_>>();
    eventually("the changed list is followed", answering, |names| *names == ["b2"]);
    let watched = stage::daemon::read(&log);
    assert!(!watched.contains("cannot watch"), "{watched}");
    let (code, text) = failure(&by_variable(&["wait", "cron"]));
    assert!(code == Some(1) && text.contains("not configured; clients here are: web"), "{text}");
    let doctor = String::from_utf8_lossy(&run(&["doctor"]).stdout).into_owned();
    assert!(doctor.contains("daemon         running (pid"), "{doctor}");
    // Without a configuration, the doctor uses the configuration of the running daemon.
    let doctor = stage::daemon::finish(socklb(&["doctor", "--run"]).arg(setup.folder.join("run")));
    let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(doctor.contains(&format!("configuration  {file}: 1 client")), "{doctor}");
    let elsewhere = setup.pins.join("elsewhere").display().to_string();
    let output = by_variable(&["status", "--json", "--pins", &elsewhere]);
    let status: StatusDocument = serde_json::from_slice(&output.stdout).expect("the text is JSON");
    assert_eq!((output.status.code(), status.clients.len()), (Some(3), 0));
    let message = stage::faults_of(&status).join("\n");
    assert!(message.contains(&format!("has its pins in {}", setup.pins.display())), "{message}");
    assert!(message.contains(&format!("showing the pins in {elsewhere}")), "{message}");
    let (code, text) =
        failure(&stage::daemon::finish(&mut socklb(&["status", "-c", "/nowhere/socklb.toml"])));
    assert!(code == Some(1) && text.contains("read /nowhere/socklb.toml"), "{text}");
    probe.kill();
    drop(_daemon);
    let (code, text) = failure(&run(&["detach", "--all"]));
    assert_eq!((code, text.as_str()), (Some(0), ""));
    assert!(!setup.pins.exists());
}

/// Backends of the service.
const FIRST: &str = "127.0.0.1:8001";
const SECOND: &str = "127.0.0.1:8002";

/// A TCP and a UDP service share the address. Three connections are open meanwhile.
#[test]
fn requests_show_what_they_name_and_impossible_ones_name_what_exists_and_change_nothing() {
    let mut fixture = Fixture::without_daemon();
    let path = fixture.setup.folder.join("socklb.toml");
    let text = std::fs::read_to_string(&path).expect("read");
    let udp = "[[service]]\nname = \"datagrams\"\naddress = \"10.96.0.10:80\"\nprotocol = \"udp\"\n\
               backends = { static = [\"127.0.0.1:8001\"] }\n";
    std::fs::write(&path, text + udp).expect("write");
    fixture.start();
    status_and_explain_show_each_service(&fixture);
    let mut probe = fixture.probe();
    for _ in 0..3 {
        probe.dial(SERVICE);
    }
    names_that_do_not_exist_are_reported_with_those_that_do(&fixture);
    overrides_that_change_nothing_are_reported(&fixture);
    // No command has closed a connection.
    fixture.setup.active_becomes(3);
}

#[track_caller]
fn status_and_explain_show_each_service(fixture: &Fixture) {
    let text = String::from_utf8_lossy(&fixture.setup.run(&["status"]).stdout).into_owned();
    for part in [
        "client web",
        "service users 10.96.0.10:80/tcp",
        "service datagrams 10.96.0.10:80/udp",
        "backend",
        "wanted",
        "flows/s",
        "127.0.0.1:8003",
        "healthy",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    assert!(!text.contains('\x1b'), "no escape sequences in a pipe");
    look(|| fixture.setup.status())
        .has(|status| (status.schema, status.faults.len()), (lb_view::status::SCHEMA, 0));
    let protocols: Vec<String> =
        fixture.setup.client().services.into_iter().map(|service| service.protocol).collect();
    assert_eq!(protocols, ["tcp", "udp"]);
    let sorted: StatusDocument =
        fixture.setup.document(&["status", "web", "-s", "users", "--sort", "address"]);
    let addresses = sorted.clients[0].services[0].backends.iter().map(|backend| backend.address.to_string());
    assert!(addresses.eq(["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"]));
    let explained: Vec<Explanation> = fixture.setup.document(&["explain", "datagrams"]);
    assert_eq!(explained[0].members[0].address.to_string(), "127.0.0.1:8001");
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3, "the TCP service uses its own list");
}

#[track_caller]
fn names_that_do_not_exist_are_reported_with_those_that_do(fixture: &Fixture) {
    let backends = "backends here are: 127.0.0.1:8001, 127.0.0.1:8002, 127.0.0.1:8003";
    let no_user =
        "no client here dials a service \"user\"; did you mean users? services here are: datagrams, users";
    let ambiguous = "127.0.0.1 is ambiguous: service users has 127.0.0.1:8001 (index 0)";
    // Some of these names contain characters with a meaning in the path of a request.
    for (arguments, code, expected) in [
        (&["status", "cron"][..], 1, "socklb: there is no client \"cron\" here; clients here are: web"),
        (&["status", "--service", "user"], 1, no_user),
        (
            &["status", "--backend", "127.0.0.1:9"],
            1,
            "there is no backend 127.0.0.1:9; backends here are: 127.0.0.1:8001, ",
        ),
        (
            &["explain", "a b/?%26"],
            1,
            "no client here dials a service \"a b/?%26\"; services here are: datagrams, users",
        ),
        (
            &["explain", "users", "--client", "a&client=web"],
            1,
            "there is no client \"a&client=web\" here; clients here are: web",
        ),
        (&["drain", "users", "127.0.0.1:1"], 1, FIRST),
        (&["drain", "users", "9"], 1, FIRST),
        (&["drain", "users", "127.0.0.1"], 1, "ambiguous"),
        (&["drain", "orders", FIRST], 1, "orders"),
        (&["drain", "users", FIRST, "--client", "batch"], 1, "batch"),
        (&["weight", "users", "127.0.0.1:1", "50%"], 1, FIRST),
        (&["overrides", "--service", "user"], 1, "services here are: datagrams, users"),
        (&["close", "user", FIRST], 1, no_user),
        (&["close", "users", "127.0.0.1:9"], 1, backends),
        (&["close", "users", FIRST, "--client", "batch"], 1, "there is no client \"batch\" here"),
        (&["close", "users", "127.0.0.1"], 1, ambiguous),
        (&["close", "users", FIRST, "--rate", "0/s"], 2, "from 1/s to 10000/s"),
        (&["close", "users", FIRST, "--idle", "0s"], 2, "from 100ms to 24h"),
    ] {
        refused(fixture, arguments, code, expected);
    }
    let refused: Overridden = fixture.setup.document(&["drain", "users", "9"]);
    assert!(refused.refused.is_some() && refused.changed.is_empty(), "{refused:?}");
    let refused: Value = fixture.setup.document(&["close", "users", "9"]);
    let why = refused["refused"].as_str().expect("a reason");
    assert!(why.starts_with("service users has no backend 9: it has 127.0.0.1:8001"), "{why}");
}

/// Runs a command that must fail with this code and this text.
#[track_caller]
fn refused(fixture: &Fixture, arguments: &[&str], code: i32, expected: &str) {
    let (seen, text) = failure(&fixture.setup.run(arguments));
    assert!(seen == Some(code) && text.contains(expected), "{arguments:?}: exit code {seen:?}: {text}");
}

#[track_caller]
fn overrides_that_change_nothing_are_reported(fixture: &Fixture) {
    let good = |arguments: &[&str]| {
        let output = fixture.setup.run(arguments);
        assert_eq!(failure(&output), (Some(0), String::new()), "{arguments:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let nothing = "no overrides of service users on this host\n";
    assert_eq!(good(&["overrides", "--service", "users"]), nothing);
    let text = good(&["drain", "users", FIRST, "--dry-run"]);
    assert_eq!(text, "dry run: drain would change 127.0.0.1:8001 of service users on this host only\n");
    assert!(good(&["undrain", "users", FIRST]).starts_with("no change"));
    assert_eq!(fixture.setup.document::<OverridesDocument>(&["overrides"]).overrides, []);
    good(&["drain", "users", FIRST]);
    assert!(good(&["drain", "users", FIRST]).contains(", as before"));
}

/// Three connections are open meanwhile.
#[test]
fn a_hung_or_absent_daemon_is_reported_with_what_may_have_changed() {
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    for _ in 0..3 {
        probe.dial(SERVICE);
    }
    assert!(fixture.setup.run(&["drain", "users", FIRST]).status.success());
    fixture.daemon().signal(Signal::STOP);
    // The command first checks that the daemon can drain and close, and sends no change to a daemon
    // that does not answer.
    let drain = ["drain", "users", SECOND, "--close", "all", "--wait"];
    let (code, text) = failure(&fixture.setup.run(&drain));
    let expected = "does not answer: nothing was changed";
    assert!(code == Some(1) && text.ends_with(expected), "exit code {code:?}: {text}");
    let expected = "does not answer: the daemon may still make the change when it continues";
    refused(&fixture, &["undrain", "users", FIRST], 1, expected);
    let expected = "does not answer: nothing was closed, because this is a dry run";
    refused(&fixture, &["close", "users", FIRST, "--dry-run"], 1, expected);
    fixture.daemon().signal(Signal::CONT);
    let daemon = || fixture.setup.status().daemon;
    eventually("the daemon has answered the earlier requests", daemon, Option::is_some);
    let all = fixture.setup.document::<OverridesDocument>(&["overrides"]).overrides;
    assert!(all.iter().all(|one| one.of.scope.backend != stage::address(SECOND)), "{all:?}");
    fixture.stop();
    refused(&fixture, &["close", "users", FIRST], 1, "the daemon is not running, so nothing was closed");
    // No command has closed a connection.
    fixture.setup.active_becomes(3);
}

/// bpftool shows the content of the maps, without socklb.
#[test]
fn bpftool_shows_named_fields() {
    let mut fixture = Fixture::without_daemon();
    // The maps are small, because bpftool makes two calls per entry. The names of fields do not
    // depend on the size of a map.
    let text = std::fs::read_to_string(fixture.setup.folder.join("socklb.toml")).expect("read");
    let small = "[limits]\nflow_records = 64\nslots = 64\nschedule_entries = 1024\n";
    fixture.setup.write("socklb.toml", &(text + small));
    fixture.start();
    let mut probe = fixture.probe();
    probe.dial(SERVICE);
    let dump = |name: &str| -> Value {
        let output = std::process::Command::new("/usr/sbin/bpftool")
            .args(["--json", "map", "dump", "pinned"])
            .arg(fixture.setup.map("web", name))
            .output()
            .expect("bpftool is installed by `cargo xtask setup`");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{name}: {error}: {output:?}"))
    };
    for name in lb_common::abi::map::ALL {
        let dump = dump(name);
        if let Some(first) = dump.as_array().and_then(|entries| entries.first()) {
            assert!(first["formatted"].is_object(), "{name} has no names: {first}");
        }
    }
    let port = u64::from(8001u16.to_be());
    let backends = dump("backends").as_array().expect("entries").clone();
    let mut values = backends.iter().map(|entry| &entry["formatted"]["value"]);
    let backend = values.clone().find(|value| value["endpoint"]["port"]["be"] == port);
    let backend = backend.expect("the first endpoint has a slot");
    assert_eq!(backend["endpoint"]["weight"], 1, "{backend}");
    let half = |value: &Value| {
        let number =
            |field: &str| value["state"][field].as_u64().and_then(|number| u8::try_from(number).ok());
        DaemonState {
            usable: number("usable").expect("the field is a byte"),
            state: number("state").expect("the field is a byte"),
        }
    };
    let expected =
        DaemonState::new(Usable::UnlessEjected, BackendState::Member).with_reason(HealthReason::Healthy);
    let usable = values.by_ref().filter(|value| half(value) == expected);
    assert_eq!(usable.count(), 3, "all three endpoints are usable");
}
