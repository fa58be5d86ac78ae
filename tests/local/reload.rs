//! Another configuration while the daemon runs: what may change does, flows do not notice, and what is gone is gone.

use rustix::process::Signal;
use stage::protocol::failure;
use stage::{Cgroup, Daemon, Probe, Setup, address, eventually, replace};

use stage::fixture::{Fixture, SERVICE, config};

const SECOND: &str = "10.96.0.11:80";

fn second_service() -> String {
    format!(
        "[[service]]\nname = \"more\"\naddress = \"{SECOND}\"\nbackends = {{ static = [\"127.0.0.1:8001\"] }}\n"
    )
}

/// The configuration of the fixture, with lines for its client and more tables.
fn text(fixture: &Fixture, client: &str, service: &str, more: &str) -> String {
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, service);
    text.replacen("\n\n", &format!("\n{client}\n\n"), 1) + more
}

fn write(setup: &Setup, text: &str) {
    replace(&setup.folder.join("socklb.toml"), text);
}

fn services(setup: &Setup) -> Vec<String> {
    let status = setup.status();
    let services = status["clients"][0]["services"].as_array().cloned().unwrap_or_default();
    services.iter().map(|service| service["name"].as_str().expect("a name").to_owned()).collect()
}

fn unreachable(probe: &mut Probe, address: &str) -> bool {
    probe.dial_many(address, 1).contains_key(&failure(libc::ENETUNREACH))
}

#[test]
fn a_service_that_is_added_is_balanced_and_one_that_is_removed_leaves_nothing() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let open = probe.dial(SERVICE);
    write(&fixture.setup, &text(&fixture, "", "", &second_service()));
    eventually("it is taken on", || services(&fixture.setup).len(), |count| *count == 2);
    let more = probe.dial(SECOND);
    assert_eq!((more.name.as_str(), more.peer), ("b1", address(SECOND)));
    write(&fixture.setup, &text(&fixture, "", "", ""));
    // Its flow goes on and knows what it dialled; no other begins.
    eventually("it is closed", || unreachable(&mut probe, SECOND), |unreachable| *unreachable);
    assert_eq!(probe.peer(more.socket), address(SECOND));
    probe.close(more.socket);
    eventually("it leaves nothing", || services(&fixture.setup), |names| *names == ["users"]);
    assert_eq!(probe.peer(open.socket), address(SERVICE));
    assert_eq!(fixture.setup.active(), 1, "flows of the other service did not notice");
}

/// Every field that may change, one after the other, under a client that connects without pause.
#[test]
fn what_may_change_does_and_no_connect_fails() {
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
        // On a CPU of its own: two that take turns on one walk may each meet every other entry only.
        let mut probe = fixture.probe();
        probe.pin(1);
        assert_eq!(probe.dial_many(SERVICE, 60).len(), size, "{service}");
    }
    let counts = busy.stop_dialling();
    assert!(counts.keys().all(|name| name.starts_with('b')), "{counts:?}");
    // The errno is the service's, too.
    write(&fixture.setup, &text(&fixture, "", "on_no_backend = \"ECONNREFUSED\"", ""));
    fixture.write_endpoints(&[]);
    let status = fixture.setup.status();
    assert_eq!(status["clients"][0]["not_a_service"], 0);
    for dialled in open {
        assert_eq!(held.peer(dialled.socket), address(SERVICE));
        held.close(dialled.socket);
    }
    assert_eq!(fixture.setup.active(), 0);
}

#[test]
fn clients_are_added_removed_and_moved() {
    let fixture = Fixture::new();
    let other = Cgroup::new();
    let mut first = fixture.probe();
    let open = first.dial(SERVICE);
    let mut second = Probe::start(&other);
    assert_eq!(second.try_dial(SERVICE).map(|d| d.name), Err(libc::ENETUNREACH));
    let client = format!("[[client]]\njob = \"batch\"\ncgroup = \"{}\"\n", other.relative().display());
    write(&fixture.setup, &text(&fixture, "", "", &client));
    let reached = |probe: &mut Probe| probe.dial_many(SERVICE, 3).keys().all(|name| name.starts_with('b'));
    eventually("the new client is attached", || reached(&mut second), |reached| *reached);
    // Without the first client: nothing begins there, its flow goes on, and then nothing of it is left.
    let only = text(&fixture, "", "", "");
    let only = only
        .replace(&fixture.cgroup.relative().display().to_string(), &other.relative().display().to_string());
    let only = only.replace("job = \"web\"", "job = \"batch\"");
    write(&fixture.setup, &only);
    eventually("the first client is gone", || reached(&mut first), |reached| !*reached);
    assert_eq!(first.peer(open.socket), address(SERVICE));
    assert_eq!(fixture.setup.status()["leaving"][0]["open_flows"], 1);
    first.close(open.socket);
    let pins = fixture.setup.pins_of("web");
    eventually("nothing of it is left", || pins.exists(), |exists| !exists);
    assert_eq!(fixture.setup.status()["leaving"].as_array().map(Vec::len), Some(0));
    // The second client moves to the first one's cgroup.
    let moved = only
        .replace(&other.relative().display().to_string(), &fixture.cgroup.relative().display().to_string());
    write(&fixture.setup, &moved);
    eventually("it has moved", || reached(&mut first), |reached| *reached);
    // It is left a moment after it is attached where it is now: in between no connect must go unbalanced.
    eventually("nothing begins where it was", || reached(&mut second), |reached| !*reached);
    assert_eq!(fixture.setup.faults(), Vec::<String>::new());
}

#[test]
fn a_client_that_gets_another_name_is_balanced_all_the_time() {
    let fixture = Fixture::new();
    let mut busy = fixture.probe();
    busy.start_dialling(SERVICE);
    for name in ["other", "web", "third"] {
        write(&fixture.setup, &text(&fixture, &format!("name = \"{name}\""), "", ""));
        let named = || fixture.setup.status()["clients"][0]["name"].clone();
        eventually("it is taken on", named, |found| found == name);
    }
    let counts = busy.stop_dialling();
    assert!(counts.keys().all(|name| name.starts_with('b')), "{counts:?}");
    for name in ["other", "web"] {
        let pins = fixture.setup.pins_of(name);
        eventually("what had the old name is gone", || pins.exists(), |exists| !exists);
    }
}

/// A daemon that dies while a client leaves: the next one goes on with it.
#[test]
fn a_client_that_was_leaving_when_the_daemon_died_still_goes() {
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    let open = probe.dial(SERVICE);
    let other = Cgroup::new();
    let moved = text(&fixture, "name = \"other\"", "", "")
        .replace(&fixture.cgroup.relative().display().to_string(), &other.relative().display().to_string());
    write(&fixture.setup, &moved);
    let leaving = || fixture.setup.status()["leaving"].as_array().map(Vec::len);
    eventually("it leaves", leaving, |count| *count == Some(1));
    fixture.daemon.take().expect("a daemon runs").kill();
    fixture.start();
    assert_eq!(fixture.setup.status()["leaving"][0]["client"], "web");
    assert_eq!(probe.peer(open.socket), address(SERVICE));
    probe.close(open.socket);
    let pins = fixture.setup.pins_of("web");
    eventually("nothing of it is left", || pins.exists(), |exists| !exists);
}

#[test]
fn a_configuration_with_a_fault_changes_nothing_and_is_reported() {
    let fixture = Fixture::new();
    let good = text(&fixture, "", "", "");
    write(&fixture.setup, &text(&fixture, "index = 9", "polcy = \"p2c\"", ""));
    let faults = eventually("it is reported", || fixture.setup.faults(), |faults| !faults.is_empty());
    for part in ["socklb.toml:4:", "index", "socklb.toml:10:", "polcy"] {
        assert!(faults[0].contains(part), "{part:?} is not in {faults:?}");
    }
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(3));
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    // A missing file is one, too.
    std::fs::remove_file(fixture.setup.folder.join("socklb.toml")).expect("remove it");
    eventually("it is reported", || fixture.setup.faults(), |faults| faults[0].contains("No such file"));
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    write(&fixture.setup, &good);
    eventually("it is good again", || fixture.setup.faults(), Vec::is_empty);
}

#[test]
fn what_cannot_change_while_running_is_named_and_the_rest_changes() {
    let fixture = Fixture::new();
    let limits = "[limits]\nflow_records = 64\n[paths]\nrun = \"elsewhere\"\n";
    write(&fixture.setup, &text(&fixture, "", "", &(second_service() + limits)));
    eventually("the rest is taken on", || services(&fixture.setup).len(), |count| *count == 2);
    let faults = fixture.setup.faults();
    // Paths are given on the command line here, which goes before the file.
    let pins = fixture.setup.pins.display();
    assert_eq!(
        faults,
        [format!(
            "limits.flow_records cannot change while running, nor by a restart alone, for the clients' maps outlive it: \
             stop socklb, run `socklb detach web --pins '{pins}'` (connects then go unbalanced), and start it again"
        )]
    );
    assert!(fixture.daemon().log().contains(&faults[0]), "it is in the log as well");
    // Only that is put back: nothing else changes.
    write(&fixture.setup, &text(&fixture, "", "", &second_service()));
    eventually("it is taken back", || fixture.setup.faults(), Vec::is_empty);
}

#[test]
fn an_address_of_metrics_that_changed_is_named_until_a_restart() {
    let mut fixture = Fixture::new();
    let metrics = "[metrics]\nlisten = \"127.0.0.1:9464\"\n";
    write(&fixture.setup, &text(&fixture, "", "", &(second_service() + metrics)));
    eventually("the rest is taken on", || services(&fixture.setup).len(), |count| *count == 2);
    let fault = "metrics.listen cannot change while running; restart socklb to apply it";
    assert_eq!(fixture.setup.faults(), [fault]);
    assert!(fixture.daemon().log().contains(fault), "it is in the log as well");
    fixture.stop();
    fixture.start();
    assert_eq!(fixture.setup.faults(), Vec::<String>::new());
}

/// What the message about limits says to do: for every client.
#[test]
fn limits_change_as_the_message_says() {
    let mut fixture = Fixture::without_daemon();
    let other = Cgroup::new();
    let two = |fixture: &Fixture, more: &str| two_clients(fixture, [&fixture.cgroup, &other], more);
    fixture.setup.write("socklb.toml", &two(&fixture, ""));
    fixture.start();
    write(&fixture.setup, &two(&fixture, "[limits]\nslots = 1024\n"));
    let faults = eventually("it is told", || fixture.setup.faults(), |faults| !faults.is_empty());
    let pins = fixture.setup.pins.display();
    let loop_ = format!("`for client in one two; do socklb detach $client --pins '{pins}'; done`");
    assert!(faults[0].contains(&loop_) && faults[0].starts_with("limits.slots cannot"), "{faults:?}");
    // Whoever restarts all the same is told of every client at once.
    fixture.stop();
    let path = fixture.setup.folder.join("socklb.toml");
    let output = fixture.setup.run(&["run", "--config", path.to_str().expect("UTF-8")]);
    let (code, text) = stage::daemon::failure(&output);
    assert_eq!(code, Some(1), "{text}");
    for part in ["none of 2 clients can be started", "client one: ", "client two: ", "maps/backends", &loop_]
    {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    for client in ["one", "two"] {
        assert!(fixture.setup.run(&["detach", client]).status.success());
    }
    fixture.start();
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    assert_eq!(fixture.setup.faults(), Vec::<String>::new());
}

/// Each SIGHUP is answered in the log, and so is the end of a fault.
#[test]
fn what_becomes_of_a_faulty_configuration_is_said() {
    let fixture = Fixture::new();
    let good = text(&fixture, "", "", "");
    let said = |what: &str| fixture.daemon().log().matches(what).count();
    let bad = || said("the configuration cannot be used");
    write(&fixture.setup, &text(&fixture, "index = 9", "", ""));
    eventually("it is said", bad, |times| *times == 1);
    for times in 2..=3 {
        fixture.daemon().signal(Signal::HUP);
        eventually("whoever asks is answered", bad, |count| *count == times);
    }
    write(&fixture.setup, &good);
    eventually("its end is said", || said("the configuration is good again"), |times| *times == 1);
    assert_eq!(fixture.setup.faults(), Vec::<String>::new());
    assert_eq!(said("configuration taken on"), 0, "nothing has changed");
}

/// Somebody has removed all that a client has in the kernel, under the daemon.
#[test]
fn a_client_whose_pins_were_removed_is_named_and_comes_back_with_a_reload() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let before = probe.dial(SERVICE);
    let said = |what: &str| fixture.daemon().log().matches(what).count();
    for times in 1..=2 {
        // All at once: links that are missing while the directory is still there are made again.
        let gone = fixture.setup.pins.join("gone");
        std::fs::rename(fixture.setup.pins_of("web"), &gone).expect("take the pins away");
        std::fs::remove_dir_all(gone).expect("remove the pins");
        eventually("it is said", || said("its pins were removed"), |count| *count == times);
        let faults = fixture.setup.faults();
        assert!(
            faults[0].starts_with("client web: its pins were removed") && faults[0].contains("SIGHUP"),
            "{faults:?}"
        );
        // Whoever wanted it gone is not overruled by what lets the daemon look: somebody who waits for the client, or a
        // configuration that says the same again.
        let path = fixture.setup.folder.join("socklb.toml");
        replace(&path, &stage::daemon::read(&path));
        assert_eq!(fixture.setup.run(&["wait", "web", "--timeout", "1"]).status.code(), Some(1));
        assert!(!fixture.setup.pins_of("web").exists());
        let unbalanced = || unreachable(&mut probe, SERVICE);
        eventually("connects go where they say", unbalanced, |unbalanced| *unbalanced);
        if times == 1 {
            fixture.daemon().signal(Signal::HUP);
        } else {
            write(&fixture.setup, &text(&fixture, "", "", &second_service()));
        }
        eventually("it is attached again", || fixture.setup.faults(), Vec::is_empty);
        assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    }
    assert_eq!(said("its pins were removed"), 2, "once each");
    assert_eq!(services(&fixture.setup).len(), 2);
    probe.close(before.socket);
    assert_eq!(fixture.setup.active(), 0, "flows of the maps before are not counted in those after");
}

#[test]
fn sighup_reads_everything_anew() {
    let fixture = Fixture::new();
    let taken_on = || fixture.daemon().log().matches("configuration taken on").count();
    let before = taken_on();
    for times in 1..=3 {
        fixture.daemon().signal(Signal::HUP);
        eventually("it is taken on", taken_on, |count| *count == before + times);
    }
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    assert_eq!(fixture.setup.faults(), Vec::<String>::new());
}

/// A file that is bad when the configuration is read anew: the list in force stays, not an older one.
#[test]
fn a_reload_keeps_the_list_in_force_where_the_file_is_bad() {
    let fixture = Fixture::new();
    fixture.write_endpoints(&[("127.0.0.1:8002", "")]);
    let mut probe = fixture.probe();
    let only = || probe.dial_many(SERVICE, 5).into_keys().collect::<Vec<_>>();
    eventually("the list is taken", only, |names| *names == ["b2"]);
    replace(&fixture.file, "[[endpoint]]\naddress = 5\n");
    eventually("it is reported", || fixture.setup.faults().len(), |count| *count == 1);
    write(&fixture.setup, &text(&fixture, "", "", &second_service()));
    eventually("it is taken on", || services(&fixture.setup).len(), |count| *count == 2);
    assert_eq!(fixture.probe().dial_many(SERVICE, 30), [("b2".to_owned(), 30)].into());
    assert_eq!(fixture.setup.faults().len(), 1, "the file is still bad");
}

/// Two clients, each with its job and its cgroup.
fn two_clients(fixture: &Fixture, cgroups: [&Cgroup; 2], more: &str) -> String {
    let client = |job: &str, cgroup: &Cgroup| {
        format!("[[client]]\njob = \"{job}\"\ncgroup = \"{}\"\n", cgroup.relative().display())
    };
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "");
    let service = &text[text.find("[[service]]").expect("a service")..];
    client("one", cgroups[0]) + &client("two", cgroups[1]) + service + more
}

#[test]
fn clients_that_change_places_are_balanced_all_the_time() {
    let mut fixture = Fixture::without_daemon();
    let other = Cgroup::new();
    let there = |fixture: &Fixture| two_clients(fixture, [&fixture.cgroup, &other], "");
    let back = |fixture: &Fixture| two_clients(fixture, [&other, &fixture.cgroup], "");
    fixture.setup.write("socklb.toml", &there(&fixture));
    fixture.start();
    let mut busy = [fixture.probe(), Probe::start(&other)];
    for probe in &mut busy {
        probe.start_dialling(SERVICE);
    }
    for round in 0..6 {
        write(&fixture.setup, &if round % 2 == 0 { back(&fixture) } else { there(&fixture) });
        let first = if round % 2 == 0 { other.id() } else { fixture.cgroup.id() };
        let attached = || fixture.setup.status()["clients"][0]["cgroup_id"].as_u64();
        eventually("they have changed places", attached, |id| *id == Some(first));
    }
    for probe in &mut busy {
        let counts = probe.stop_dialling();
        assert!(counts.keys().all(|name| name.starts_with('b')), "{counts:?}");
    }
}

/// Whoever takes a cgroup over cannot be started: the one before goes on until it can.
#[test]
fn a_client_stays_until_the_one_that_takes_over_is_attached() {
    let fixture = Fixture::new();
    let mut busy = fixture.probe();
    busy.start_dialling(SERVICE);
    let pins = fixture.setup.pins_of("heir").join("maps");
    std::fs::create_dir_all(&pins).expect("the heir's pins");
    let foreign = pins.join("theirs");
    std::fs::hard_link(fixture.setup.map("web", "walks"), &foreign).expect("somebody else's pin");
    write(&fixture.setup, &text(&fixture, "name = \"heir\"", "", ""));
    let faults = eventually("it is told", || fixture.setup.faults(), |faults| faults.len() >= 2);
    assert!(faults.iter().any(|fault| fault.contains("maps/theirs")), "{faults:?}");
    assert!(faults.iter().any(|fault| fault.contains("client web: it is to leave")), "{faults:?}");
    std::fs::remove_file(foreign).expect("remove the pin");
    fixture.daemon().signal(Signal::HUP);
    let names = || fixture.setup.status()["clients"][0]["name"].clone();
    eventually("the heir takes over", names, |name| name == "heir");
    let old = fixture.setup.pins_of("web");
    let counts = busy.stop_dialling();
    assert!(counts.keys().all(|name| name.starts_with('b')), "{counts:?}");
    eventually("the one before is gone", || old.exists(), |exists| !exists);
    assert_eq!(fixture.setup.faults(), Vec::<String>::new());
}

/// A client that an earlier daemon has left attached, and that was not configured for a while.
#[test]
fn a_client_that_comes_back_gets_new_programs() {
    let mut fixture = Fixture::new();
    let whole = text(&fixture, "", "", "");
    fixture.stop();
    let other = Cgroup::new();
    let without = whole.replace(
        &format!("job = \"web\"\ncgroup = \"{}\"", fixture.cgroup.relative().display()),
        &format!("job = \"other\"\ncgroup = \"{}\"", other.relative().display()),
    );
    assert_ne!(without, whole);
    fixture.setup.write("socklb.toml", &without);
    fixture.start();
    assert_eq!(fixture.setup.faults().len(), 1, "web is attached and not configured");
    write(&fixture.setup, &whole);
    let attached = || fixture.daemon().log().contains("client attached client=web");
    eventually("it is taken over", attached, |attached| *attached);
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    eventually("nothing is wrong", || fixture.setup.faults(), Vec::is_empty);
}

/// What a source has gone through is not forgotten with a reload, which reads the same version once more.
#[test]
fn failures_of_a_source_are_counted_on_over_a_reload() {
    let fixture = Fixture::new();
    let failures = || fixture.setup.status()["clients"][0]["services"][0]["source"]["failures"].as_u64();
    replace(&fixture.file, "[[endpoint]]\naddress = 5\n");
    eventually("it is counted", failures, |failures| *failures == Some(1));
    fixture.daemon().signal(Signal::HUP);
    let taken_on = || fixture.daemon().log().contains("configuration taken on");
    eventually("it is taken on", taken_on, |taken_on| *taken_on);
    assert_eq!(failures(), Some(1), "one version of the file");
    replace(&fixture.file, "[[endpoint]]\naddress = 6\n");
    eventually("it is counted on", failures, |failures| *failures == Some(2));
}

/// As many clients at once as a host may have: the daemon answers meanwhile.
#[test]
fn a_reload_that_adds_many_clients_does_not_keep_the_daemon_from_answering() {
    let mut fixture = Fixture::without_daemon();
    let limits = "[limits]\nschedule_entries = 32768\nslots = 1024\nflow_records = 8192\n";
    // A guest loads programs thirty times slower.
    let more = if stage::in_a_guest() { 5 } else { 40 };
    let cgroups: Vec<Cgroup> = (0..more).map(|_| Cgroup::new()).collect();
    let all = |count: usize| -> String {
        let one = text(&fixture, "", "", limits);
        let more = cgroups[..count].iter().enumerate().map(|(number, cgroup)| {
            format!("[[client]]\njob = \"job-{number}\"\ncgroup = \"{}\"\n", cgroup.relative().display())
        });
        more.collect::<String>() + &one
    };
    let (one, many) = (all(0), all(cgroups.len()));
    fixture.setup.write("socklb.toml", &one);
    let manager = stage::Manager::new(fixture.setup.folder.join("notify"));
    // Fed every 100 ms by the loop that takes the clients on.
    let watchdog = std::time::Duration::from_millis(200);
    let daemon = Daemon::spawn_with(&fixture.setup, |command| manager.starts(command, watchdog));
    fixture.daemon = Some(daemon);
    manager.expect("READY=1");
    write(&fixture.setup, &many);
    manager.expect("RELOADING=1");
    let fed = manager.count_until("READY=1", "WATCHDOG=1");
    assert!(fed >= 3, "the loop has turned {fed} times while {more} clients were started");
    let attached = || fixture.setup.status()["clients"].as_array().map(Vec::len);
    eventually("all are there", attached, |count| *count == Some(more + 1));
    assert_eq!(fixture.setup.faults(), Vec::<String>::new());
}

/// Each configuration names a file in another directory.
#[test]
fn directories_of_files_that_are_no_longer_configured_are_not_watched() {
    let fixture = Fixture::new();
    let watched = || {
        let folder = format!("/proc/{}/fdinfo", fixture.daemon().pid());
        let files = std::fs::read_dir(folder).expect("a process").filter_map(Result::ok);
        let text = files.filter_map(|file| std::fs::read_to_string(file.path()).ok());
        text.map(|text| text.matches("inotify wd:").count()).sum::<usize>()
    };
    let before = eventually("directories are watched", watched, |count| *count >= 2);
    let good = stage::daemon::read(&fixture.file);
    for round in 0..5 {
        let folder = fixture.setup.folder.join(round.to_string());
        std::fs::create_dir(&folder).expect("make a directory");
        std::fs::write(folder.join("users.toml"), &good).expect("write");
        let named = format!("\"{round}/users.toml\"");
        write(&fixture.setup, &text(&fixture, "", "", "").replace("\"users.toml\"", &named));
        let taken_on = || fixture.daemon().log().matches("configuration taken on").count();
        eventually("it is taken on", taken_on, |times| *times == round + 1);
    }
    eventually("one more is watched", watched, |count| *count == before + 1);
    let last = fixture.setup.folder.join("4/users.toml");
    replace(&last, &stage::fixture::endpoints(&[("127.0.0.1:8002", "")]));
    let mut probe = fixture.probe();
    let names = || probe.dial_many(SERVICE, 6).into_keys().collect::<Vec<_>>();
    eventually("the last one is followed", names, |names| *names == ["b2"]);
}
