//! The endpoint file while the daemon runs: every way to change it, and every way to get it wrong.

use std::collections::BTreeSet;
use std::fs;

use stage::{Backend, Cgroup, Daemon, Setup, Stage, address, eventually, look, replace};

use stage::fixture::{Fixture, SERVICE, endpoints};

/// Names that answer 64 connects.
fn answering(fixture: &Fixture) -> BTreeSet<String> {
    fixture.probe().dial_many(SERVICE, 64).into_keys().collect()
}

#[track_caller]
fn expect(fixture: &Fixture, names: &[&str]) {
    let names: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
    eventually("the load moves", || answering(fixture), |answering| *answering == names);
}

#[test]
fn a_file_renamed_into_place_is_followed() {
    let fixture = Fixture::new();
    expect(&fixture, &["b1", "b2", "b3"]);
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", "")]);
    expect(&fixture, &["b1", "b2"]);
    let _added = Backend::start("b4", "127.0.0.1:8004");
    fixture.write_endpoints(&[("127.0.0.1:8002", ""), ("127.0.0.1:8004", "")]);
    expect(&fixture, &["b2", "b4"]);
}

#[test]
fn a_file_written_in_place_is_followed() {
    let fixture = Fixture::new();
    fs::write(&fixture.file, endpoints(&[("127.0.0.1:8003", "")])).expect("write in place");
    expect(&fixture, &["b3"]);
}

#[test]
fn a_symbolic_link_that_is_switched_is_followed() {
    let mut fixture = Fixture::without_daemon();
    // The way configuration is delivered to containers: the file is a link through a directory that is replaced.
    let folder = fixture.setup.folder.clone();
    fs::create_dir(folder.join("v1")).expect("a folder");
    fs::create_dir(folder.join("v2")).expect("a folder");
    fs::write(folder.join("v1/users.toml"), endpoints(&[("127.0.0.1:8001", "")])).expect("write");
    fs::write(folder.join("v2/users.toml"), endpoints(&[("127.0.0.1:8002", "")])).expect("write");
    std::os::unix::fs::symlink("v1", folder.join("current")).expect("link");
    fs::remove_file(&fixture.file).expect("remove");
    std::os::unix::fs::symlink("current/users.toml", &fixture.file).expect("link");
    fixture.start();
    expect(&fixture, &["b1"]);
    std::os::unix::fs::symlink("v2", folder.join("next")).expect("link");
    fs::rename(folder.join("next"), folder.join("current")).expect("switch");
    expect(&fixture, &["b2"]);
}

#[test]
fn the_json_of_prometheus_is_read_as_well() {
    let mut fixture = Fixture::without_daemon();
    let text = fs::read_to_string(fixture.setup.folder.join("socklb.toml")).expect("read");
    fixture.setup.write("socklb.toml", &text.replace("users.toml", "users"));
    let group = |labels: &str| {
        format!(r#"[{{"targets": ["127.0.0.1:8001", "127.0.0.1:8003"], "labels": {{{labels}}}}}]"#)
    };
    let file = fixture.setup.write("users", &group(r#""weight": "2", "state": "running", "__meta_x": "y""#));
    fixture.start();
    expect(&fixture, &["b1", "b3"]);
    // What is another program's is told, until it is gone.
    let note = "label state is ignored: unknown state \"running\" on line 1; a label socklb_state is heeded";
    look(|| fixture.setup.source().notes).becomes([note.to_owned()]);
    let check =
        fixture.setup.run(&["check", fixture.setup.folder.join("socklb.toml").to_str().expect("UTF-8")]);
    let said = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(check.status.success() && said.contains(&format!("{}: {note}", file.display())), "{said}");
    replace(&file, &group(r#""socklb_state": "lame-duck", "state": "running""#));
    look(|| fixture.setup.source().notes).becomes([] as [String; 0]);
    look(|| fixture.setup.backend("127.0.0.1:8003").map(|backend| backend.state))
        .becomes(Some("lame-duck".to_owned()));
    // What was kept of it begins as JSON, and serves a start without the file.
    fixture.stop();
    fs::remove_file(&file).expect("remove the file");
    fixture.start();
    expect(&fixture, &["b1", "b3"]);
}

#[test]
fn a_reweighted_endpoint_gets_its_new_share() {
    let fixture = Fixture::new();
    fixture.write_endpoints(&[("127.0.0.1:8001", "weight = 3"), ("127.0.0.1:8002", "")]);
    let wanted = |fixture: &Fixture| -> Vec<f64> {
        let backends = fixture.setup.backends("web", "users");
        backends.iter().map(|backend| backend.share_wanted).collect()
    };
    eventually("the new shares are in the table", || wanted(&fixture), |shares| *shares == [0.75, 0.25]);
}

#[test]
fn a_lame_duck_gets_no_new_connects_and_keeps_its_open_ones() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let open: Vec<_> = (0..30).map(|_| probe.dial(SERVICE)).collect();
    let on_b2 = open.iter().filter(|dialled| dialled.name == "b2").count();
    assert_eq!(on_b2, 10);
    let lame = [("127.0.0.1:8001", ""), ("127.0.0.1:8002", "state = \"lame-duck\""), ("127.0.0.1:8003", "")];
    fixture.write_endpoints(&lame);
    expect(&fixture, &["b1", "b3"]);
    let b2 = fixture.setup.backend("127.0.0.1:8002").expect("it keeps its slot");
    assert_eq!((b2.state.as_str(), b2.usable, b2.active), ("lame-duck", false, 10));
    // Its sockets still report the address they dialled.
    let duck = open.iter().find(|dialled| dialled.name == "b2").expect("one of ten");
    assert_eq!(probe.peer(duck.socket), address(SERVICE));
    // It stays as the backup, which no connect needs.
    look(|| fixture.setup.service().fallback).becomes(Some(address("127.0.0.1:8002")));
    for dialled in open {
        probe.close(dialled.socket);
    }
    let active = || fixture.setup.backend("127.0.0.1:8002").map(|backend| backend.active);
    look(active).becomes(Some(0));
    // With the last connection to another lame duck its slot is freed.
    fixture.write_endpoints(&[lame[0], lame[1], ("127.0.0.1:8003", "state = \"lame-duck\"")]);
    expect(&fixture, &["b1"]);
    let slots = || fixture.setup.backends("web", "users").len();
    eventually("the other lame duck's slot is freed", slots, |slots| *slots == 2);
    // Back in service, it is taken again.
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", ""), ("127.0.0.1:8003", "")]);
    expect(&fixture, &["b1", "b2", "b3"]);
}

#[test]
fn lame_ducks_serve_when_nobody_else_does() {
    let fixture = Fixture::new();
    let duck = "state = \"lame-duck\"";
    fixture.write_endpoints(&[
        ("127.0.0.1:8001", duck),
        ("127.0.0.1:8002", "weight = 0"),
        ("127.0.0.1:8003", duck),
    ]);
    expect(&fixture, &["b1", "b3"]);
}

#[test]
fn who_is_down_serves_only_when_nobody_else_has_a_weight() {
    let fixture = Fixture::new();
    let down = "state = \"down\"";
    fixture.write_endpoints(&[("127.0.0.1:8001", down), ("127.0.0.1:8002", ""), ("127.0.0.1:8003", down)]);
    expect(&fixture, &["b2"]);
    fixture.write_endpoints(&[
        ("127.0.0.1:8001", down),
        ("127.0.0.1:8002", "state = \"lame-duck\""),
        ("127.0.0.1:8003", down),
    ]);
    expect(&fixture, &["b2"]);
    fixture.write_endpoints(&[
        ("127.0.0.1:8001", down),
        ("127.0.0.1:8002", "weight = 0"),
        ("127.0.0.1:8003", down),
    ]);
    expect(&fixture, &["b1", "b3"]);
    look(|| fixture.setup.backend("127.0.0.1:8001").map(|backend| backend.state))
        .becomes(Some("refusing".to_owned()));
}

#[test]
fn a_list_may_change_its_shape_from_one_reading_to_the_next() {
    let fixture = Fixture::new();
    let write = |text: &str| {
        let file = fixture.setup.folder.join("users.toml");
        replace(&file, text);
    };
    let slice = |address: &str| {
        format!(
            "{{\"kind\":\"EndpointSlice\",\"apiVersion\":\"discovery.k8s.io/v1\",\"addressType\":\"IPv4\",\"endpoints\":[\
             {{\"addresses\":[\"{address}\"],\"conditions\":{{\"ready\":true}}}}],\"ports\":[{{\"name\":\"\",\"port\":8002}}]}}"
        )
    };
    write("- targets: [127.0.0.1:8001]\n");
    expect(&fixture, &["b1"]);
    write(&slice("127.0.0.1"));
    expect(&fixture, &["b2"]);
    write(
        "[{\"Node\":{\"Address\":\"127.0.0.1\"},\"Service\":{\"Service\":\"users\",\"Port\":8003},\"Checks\":[]}]",
    );
    expect(&fixture, &["b3"]);
    write("endpoint = [{ address = '127.0.0.1:8001' }]");
    expect(&fixture, &["b1"]);
}

#[test]
fn a_removed_backend_keeps_its_slot_until_its_last_flow_ends() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let open: Vec<_> = (0..3).map(|_| probe.dial(SERVICE)).collect();
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", "")]);
    expect(&fixture, &["b1", "b2"]);
    look(|| fixture.setup.backend("127.0.0.1:8003").expect("it keeps its slot"))
        .matches("it leaves with one flow", |backend| (backend.is_leaving(), backend.active) == (true, 1));
    // Another backend must not get the slot, or the flow would be counted as its own.
    let _added = Backend::start("b4", "127.0.0.1:8004");
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", ""), ("127.0.0.1:8004", "")]);
    expect(&fixture, &["b1", "b2", "b4"]);
    look(|| fixture.setup.backends("web", "users").len()).becomes(4);
    for dialled in open {
        probe.close(dialled.socket);
    }
    eventually("the slot is freed", || fixture.setup.backends("web", "users").len(), |slots| *slots == 3);
}

#[test]
fn a_file_that_cannot_be_used_changes_nothing_and_is_reported() {
    let fixture = Fixture::new();
    let good = endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", ""), ("127.0.0.1:8003", "")]);
    let enormous = "#".repeat(5 << 20);
    let cases: [(&str, &str, &str); 6] = [
        ("empty", "", "no endpoint"),
        ("truncated", &good[..good.len() / 2 + 3], "users.toml:"),
        ("not TOML", "<html>", "users.toml:1:1"),
        ("enormous", &enormous, "is larger than 4 MiB"),
        ("a host name", "[[endpoint]]\naddress = \"db1.example:80\"\n", "users.toml:2:11"),
        ("an unknown key", "[[endpoint]]\naddress = \"127.0.0.1:8001\"\nweigth = 2\n", "weigth"),
    ];
    let mut failures = 0;
    for (what, text, message) in cases {
        replace(&fixture.file, text);
        let source = || fixture.setup.source();
        let source = eventually(what, source, |source| source.failures > failures);
        failures += 1;
        assert_eq!(source.failures, failures, "{what} is counted once");
        let error = source.error.expect("an error");
        assert!(error.contains(message), "{what}: {error}");
        assert_eq!(answering(&fixture).len(), 3, "{what}");
        assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(3), "{what} is degraded");
    }
    // Good again, all is well.
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", "")]);
    expect(&fixture, &["b1", "b2"]);
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(0));
}

#[test]
fn a_file_that_is_missing_changes_nothing_and_is_reported() {
    let fixture = Fixture::new();
    fs::remove_file(&fixture.file).expect("remove the file");
    let error = || fixture.setup.source().error;
    let is_gone = |error: &Option<String>| error.as_ref().is_some_and(|error| error.contains("No such file"));
    eventually("a missing file is reported", error, is_gone);
    assert_eq!(answering(&fixture).len(), 3);
    // Good again, all is well.
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", "")]);
    expect(&fixture, &["b1", "b2"]);
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(0));
}

#[test]
fn a_start_with_a_bad_file_uses_the_last_good_list() {
    let mut fixture = Fixture::new();
    fixture.stop();
    let detached = fixture.setup.run(&["detach", "--all"]);
    assert!(detached.status.success(), "{detached:?}");
    replace(&fixture.file, "nonsense");
    fixture.start();
    expect(&fixture, &["b1", "b2", "b3"]);
    assert!(
        fixture.daemon().log().contains("using the last good endpoint list"),
        "{}",
        fixture.daemon().log()
    );
}

#[test]
fn a_first_start_without_any_list_refuses_connects_and_recovers() {
    let mut fixture = Fixture::without_daemon();
    fs::remove_file(&fixture.file).expect("remove the file");
    fixture.start();
    let refused = fixture.probe().try_dial(SERVICE).map(|dialled| dialled.name);
    assert_eq!(refused, Err(stage::kernel::refusal(libc::EHOSTUNREACH)));
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(3));
    fixture.write_endpoints(&[("127.0.0.1:8001", "")]);
    expect(&fixture, &["b1"]);
}

#[test]
fn a_pipe_in_place_of_the_file_hangs_nobody() {
    let fixture = Fixture::new();
    fs::remove_file(&fixture.file).expect("remove the file");
    let made = std::process::Command::new("mkfifo").arg(&fixture.file).status().expect("mkfifo");
    assert!(made.success());
    let error = || fixture.setup.source().error.unwrap_or_default();
    eventually("it is reported", error, |error| error.contains("not a regular file"));
    assert_eq!(answering(&fixture).len(), 3);
}

#[test]
fn a_list_that_finds_no_slot_is_taken_once_there_is_one() {
    let mut fixture = Fixture::without_daemon();
    let text = fs::read_to_string(fixture.setup.folder.join("socklb.toml")).expect("read");
    fixture.setup.write("socklb.toml", &(text + "[limits]\nslots = 64\n"));
    let old: Vec<String> = (1..=64).map(|n| format!("127.0.0.{n}:8001")).collect();
    let list =
        |addresses: &[String]| endpoints(&addresses.iter().map(|a| (a.as_str(), "")).collect::<Vec<_>>());
    fs::write(&fixture.file, list(&old)).expect("write");
    // Every address of loopback reaches this one.
    fixture.backends.clear();
    let everywhere = Backend::start("everywhere", "0.0.0.0:8001");
    fixture.start();
    let mut probe = fixture.probe();
    let held = probe.dial(SERVICE);
    let slot_of_held =
        |fixture: &Fixture| fixture.setup.backends("web", "users").iter().any(|b| b.active == 1);
    assert!(slot_of_held(&fixture));
    // 64 others at once: there is no slot for them beside the old ones, so the old ones stay.
    let new: Vec<String> = (1..=64).map(|n| format!("127.0.1.{n}:8001")).collect();
    replace(&fixture.file, &list(&new));
    let error = || fixture.setup.source().error.unwrap_or_default();
    eventually("the refusal is reported", error, |error| error.contains("all 64 slots"));
    assert_eq!(probe.dial_many(SERVICE, 10), [("everywhere".to_owned(), 10)].into());
    // Half of them first: the old ones' slots are freed, all but the one that is held.
    replace(&fixture.file, &list(&old[..20]));
    let slots = || fixture.setup.backends("web", "users").len();
    eventually("slots are freed", slots, |slots| *slots <= 21);
    replace(&fixture.file, &list(&new[..40]));
    eventually("the new ones are in", slots, |slots| *slots >= 40);
    probe.close(held.socket);
    drop(everywhere);
}

#[test]
fn a_relative_configuration_path_is_followed_as_fast() {
    let mut fixture = Fixture::without_daemon();
    let mut command = fixture.setup.socklb(&["run", "--config", "socklb.toml"]);
    stage::probe::die_with_us(&mut command);
    let log = fs::File::create(fixture.setup.folder.join("log")).expect("open the log");
    let mut child = command.current_dir(&fixture.setup.folder).stderr(log).spawn().expect("start");
    let status = || fixture.setup.status().daemon.is_some();
    eventually("the daemon answers", status, |answers| *answers);
    let watched = stage::daemon::read(&fixture.setup.folder.join("log"));
    assert!(!watched.contains("cannot watch"), "{watched}");
    fixture.write_endpoints(&[("127.0.0.1:8002", "")]);
    expect(&fixture, &["b2"]);
    stage::daemon::signal(&child, rustix::process::Signal::TERM);
    assert!(child.wait().expect("reap the daemon").success());
    fixture.daemon = None;
}

#[test]
fn a_file_rewritten_all_the_time_is_never_read_half() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    probe.start_dialling(SERVICE);
    // In place, so that a reader can meet the file at any length; long, so that it often does.
    let list: Vec<(String, &str)> =
        (1..=2000).map(|n| (format!("127.0.{}.{}:8001", n / 250, n % 250 + 1), "weight = 0")).collect();
    let mut list: Vec<(&str, &str)> = list.iter().map(|(address, more)| (address.as_str(), *more)).collect();
    list.push(("127.0.0.1:8002", "weight = 1"));
    list.push(("127.0.0.1:8003", "weight = 1"));
    // No two versions are equal, or reading one would change nothing. (Two in turn are not enough: a daemon that reads at
    // every fourth writing would meet the same one for ever.)
    let text = |version: u32| endpoints(&list).replace("weight = 1\n", &format!("weight = {version}\n"));
    let mut version = 0;
    let reads = || fixture.daemon().log().matches("endpoint list read").count();
    eventually(
        "the file is read several times",
        || {
            version += 1;
            fs::write(&fixture.file, text(version)).expect("write in place");
            reads()
        },
        |reads| *reads >= 4,
    );
    let counts = probe.stop_dialling();
    let names: BTreeSet<&str> = counts.keys().map(String::as_str).collect();
    assert!(names.iter().all(|name| ["b1", "b2", "b3"].contains(name)), "{counts:?}");
}

/// What one client task has no room for is no fault of another that took the same list.
#[test]
fn a_list_that_one_client_has_no_slots_for_is_a_fault_of_that_client_alone() {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "a");
    let (op, act) = (Cgroup::new(), Cgroup::new());
    let list = |third: u8| -> String {
        let addresses: Vec<String> = (1..=40).map(|n| format!("127.0.{third}.{n}:80")).collect();
        endpoints(&addresses.iter().map(|address| (address.as_str(), "")).collect::<Vec<_>>())
    };
    setup.write("big.toml", &list(1));
    setup.write("bigger.toml", &list(2));
    let client = |job: &str, cgroup: &Cgroup, services: &str| {
        let cgroup = cgroup.relative().display().to_string();
        format!("[[client]]\njob = \"{job}\"\ncgroup = \"{cgroup}\"\nservices = {services}\n")
    };
    let service = |name: &str, address: &str| {
        format!(
            "[[service]]\nname = \"{name}\"\naddress = \"{address}\"\nsubset = \"all\"\nbackends = {{ file = \
             \"{name}.toml\" }}\n"
        )
    };
    let text = client("op", &op, "[\"big\", \"bigger\"]")
        + &client("act", &act, "[\"bigger\"]")
        + &service("big", "10.96.0.10:80")
        + &service("bigger", "10.96.0.11:80")
        + "[limits]\nslots = 64\n";
    let _daemon = Daemon::start(&setup, &text);
    let faults = || stage::faults_of(&setup.status());
    let told = |faults: &Vec<String>| faults.iter().any(|fault| fault.contains("all 64 slots"));
    let faults = eventually("it is told", faults, told);
    for fault in &faults {
        assert!(fault.starts_with("client op, service big") && !fault.contains("client act"), "{faults:?}");
    }
}

/// Files that are not what they should be, each as long as one may be, of ten services at once.
#[test]
fn ten_faulty_files_at_once_take_little_memory() {
    const LONGEST: usize = 4 << 20;
    let mut fixture = Fixture::without_daemon();
    let mut text =
        format!("[[client]]\njob = \"web\"\ncgroup = \"{}\"\n", fixture.cgroup.relative().display());
    let name =
        |service: usize| format!("s{service}.{}", if service.is_multiple_of(2) { "toml" } else { "json" });
    let json = r#"[{"targets": ["127.0.0.1:8001"]}]"#;
    let good = |service: usize| {
        if service.is_multiple_of(2) { endpoints(&[("127.0.0.1:8001", "")]) } else { json.to_owned() }
    };
    for service in 0..10 {
        text += &format!(
            "[[service]]\nname = \"s{service}\"\naddress = \"10.96.1.{service}:80\"\nbackends = {{ file = \"{}\" }}\n",
            name(service)
        );
        fixture.setup.write(&name(service), &good(service));
    }
    fixture.setup.write("socklb.toml", &text);
    fixture.start();
    let peak = || {
        let status =
            stage::daemon::read(std::path::Path::new(&format!("/proc/{}/status", fixture.daemon().pid())));
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak").to_owned();
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") >> 10
    };
    let before = peak();
    let shapes: [(&str, &str); 5] = [
        ("endpoint=[{address=\"x\"},", "[{\"targets\":[\"x\"]},"),
        ("[", "["),
        ("[[endpoint]]\naddress=\"x\"\n", "[{\"targets\":[],\"labels\":{\"a\":\"b\"}},"),
        ("a=1\n", "{\"a\":1,"),
        ("{a=", "1,"),
    ];
    let failures = |at_least: u64| {
        let status = fixture.setup.status();
        let services = status.clients.iter().flat_map(|client| &client.services);
        let failures = services.filter_map(|service| service.source.as_ref()).map(|source| source.failures);
        failures.filter(|failures| *failures >= at_least).count()
    };
    for (round, (toml, json)) in (1..).zip(shapes) {
        for service in 0..10_usize {
            let (first, more) = if service.is_multiple_of(2) { ("", toml) } else { ("[", json) };
            let whole = first.to_owned() + &more.repeat((LONGEST - 1) / more.len());
            replace(&fixture.setup.folder.join(name(service)), &whole[..whole.len().min(LONGEST)]);
        }
        let all = stage::within(6 * stage::patience(), || failures(round), |count| *count == 10);
        assert_eq!(all, Ok(10), "every file is refused: {toml} {json}");
    }
    let peak = peak();
    assert!(peak < 200, "{peak} MiB, {before} MiB before");
    for service in 0..10 {
        replace(&fixture.setup.folder.join(name(service)), &good(service));
    }
    let code = || fixture.setup.run(&["status"]).status.code();
    eventually("all is well again", code, |code| *code == Some(0));
}
