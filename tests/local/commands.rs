//! The commands as an operator uses them: their output and their exit codes.

use lb_common::abi::{BackendState, DaemonState, HealthReason, Usable};
use lb_view::explanation::Explanation;
use lb_view::status::StatusDocument;
use serde_json::Value;
use stage::daemon::failure;
use stage::look;

use stage::fixture::{Fixture, SERVICE, config, endpoints, with_active_accounting};

#[test]
fn check_covers_the_configuration_and_its_files() {
    let fixture = Fixture::without_daemon();
    let path = fixture.setup.folder.join("socklb.toml");
    let path = path.to_str().expect("the path is UTF-8");
    let good = fixture.setup.run(&["check", path]);
    assert_eq!((good.status.code(), String::from_utf8_lossy(&good.stdout).contains("ok")), (Some(0), true));
    std::fs::write(&fixture.file, endpoints(&[("127.0.0.1:8001", "weight = 70000"), ("[::1]:80", "")]))
        .expect("write");
    let (code, text) = failure(&fixture.setup.run(&["check", path]));
    assert_eq!(code, Some(1));
    assert!(
        text.contains("users.toml:3:10") && text.contains("70000") && text.contains("[::1]:80"),
        "{text}"
    );
    // This list exceeds the limits.
    let many: Vec<String> = (1..=65).map(|n| format!("127.0.0.{n}:80")).collect();
    std::fs::write(&fixture.file, endpoints(&many.iter().map(|a| (a.as_str(), "")).collect::<Vec<_>>()))
        .expect("write");
    let text = std::fs::read_to_string(path).expect("read");
    fixture.setup.write("small.toml", &(text + "[limits]\nslots = 64\n"));
    let small = fixture.setup.folder.join("small.toml");
    let (code, text) = failure(&fixture.setup.run(&["check", small.to_str().expect("the path is UTF-8")]));
    assert_eq!(code, Some(1));
    assert!(text.contains("small.toml:8: client web, service users: all 64 slots"), "{text}");
    assert!(text.contains("raise slots in [limits]"), "{text}");
    let (code, text) = failure(&fixture.setup.run(&["check", "/nowhere/socklb.toml"]));
    assert_eq!(code, Some(1));
    assert!(text.contains("/nowhere/socklb.toml"), "{text}");
    assert!(!fixture.setup.pins.exists(), "check changes nothing");
}

/// `check` notes settings that are valid but may not be intended.
#[test]
fn check_notes_settings_without_effect() {
    let fixture = Fixture::without_daemon();
    let path = fixture.setup.folder.join("socklb.toml");
    let check = || {
        let output = fixture.setup.run(&["check", path.to_str().expect("the path is UTF-8")]);
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let ok = format!("{}: ok\n", path.display());
    assert_eq!(check(), (Some(0), ok.clone()));
    std::fs::write(&fixture.file, endpoints(&[("127.0.0.1:8001", "zone = \"a\""), ("127.0.0.1:8002", "")]))
        .expect("write");
    fixture.cgroup.remove();
    let cgroup = fixture.cgroup.relative().display().to_string();
    let notes = format!(
        "note: client web: cgroup {cgroup} does not exist yet; the daemon attaches the client when the cgroup appears\n\
         note: service users: `zone` has no effect yet, but is set for 1 endpoint\n"
    );
    assert_eq!(check(), (Some(0), notes + &ok));
    fixture.cgroup.create();
    fixture.write_endpoints(&[("127.0.0.1:8001", "")]);
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "ejection = {}");
    std::fs::write(&path, with_active_accounting(&text)).expect("write");
    let note = "note: client web, service users: with accounting = \"active\" ejection counts `unanswered` connects and";
    let (code, text) = check();
    assert!(code == Some(0) && text.starts_with(note) && text.ends_with(&ok), "{text}");
}

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
    let _daemon =
        stage::daemon::ChildGuard::of(socklb(&["run", "-c", file]).spawn().expect("start the daemon"));
    let socket = setup.folder.join("run/socklb.sock");
    stage::eventually("the daemon answers", || socket.exists(), |answers| *answers);
    // Read-only commands use the configured directories even if another section of the
    // configuration has a fault.
    let good = std::fs::read_to_string(&path).expect("read");
    setup.write("socklb.toml", &(good.clone() + "[metrics]\nlisten = 1\n"));
    for output in [run(&["status"]), by_variable(&["status"])] {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("client web") && text.contains("(pid"), "{text}");
    }
    setup.write("socklb.toml", &good);
    let (code, text) = failure(&run(&["check"]));
    assert_eq!((code, text.as_str()), (Some(0), ""));
    let mut probe = fixture.probe();
    probe.dial(SERVICE);
    assert_eq!(String::from_utf8_lossy(&run(&["flows"]).stdout).lines().count(), 2);
    let (code, text) = failure(&by_variable(&["wait", "cron"]));
    assert!(code == Some(1) && text.contains("not configured; clients here are: web"), "{text}");
    let doctor = String::from_utf8_lossy(&run(&["doctor"]).stdout).into_owned();
    assert!(doctor.contains("daemon         running (pid"), "{doctor}");
    // Without a configuration, the doctor uses the configuration of the running daemon.
    let doctor = stage::daemon::finish(socklb(&["doctor", "--run"]).arg(setup.folder.join("run")));
    let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(doctor.contains(&format!("configuration  {file}: 1 client")), "{doctor}");
    let elsewhere = by_variable(&["status", "--pins", "/sys/fs/bpf/nowhere"]);
    let text = String::from_utf8_lossy(&elsewhere.stdout).into_owned();
    assert!(text.contains("showing the pins in /sys/fs/bpf/nowhere"), "{text}");
    let (code, text) =
        failure(&stage::daemon::finish(&mut socklb(&["status", "-c", "/nowhere/socklb.toml"])));
    assert!(code == Some(1) && text.contains("read /nowhere/socklb.toml"), "{text}");
    probe.kill();
    drop(_daemon);
    let (code, text) = failure(&run(&["detach", "--all"]));
    assert_eq!((code, text.as_str()), (Some(0), ""));
    assert!(!setup.pins.exists());
}

/// `check` reports all faults at once, so that an operator need not run it once per fault.
#[test]
fn check_reports_all_faults_of_the_configuration_and_its_files_at_once() {
    let fixture = Fixture::without_daemon();
    let path = fixture.setup.folder.join("socklb.toml");
    let path = path.to_str().expect("the path is UTF-8");
    let text = std::fs::read_to_string(path).expect("read");
    let more = "\n[[service]]\nname = \"mail\"\naddress = \"mail:25\"\nbackends = { file = \"gone.toml\" }\n";
    std::fs::write(path, text.clone() + "polcy = 1\n" + more).expect("write");
    std::fs::write(&fixture.file, endpoints(&[("127.0.0.1:0", "weight = 70000")])).expect("write");
    let (code, faults) = failure(&fixture.setup.run(&["check", path]));
    assert_eq!(code, Some(1));
    let line = |needle: &str| {
        (text.clone() + "polcy = 1\n" + more)
            .lines()
            .position(|l| l.contains(needle))
            .expect("a line contains the text")
            + 1
    };
    for part in [
        "unknown key \"polcy\"".to_owned(),
        "address \"mail:25\" is a host name".to_owned(),
        "gone.toml: No such file".to_owned(),
        format!("socklb.toml:{}:21", line("gone.toml")),
        "users.toml:3:10".to_owned(),
        "127.0.0.1:0 cannot be connected to: port 0".to_owned(),
    ] {
        assert!(faults.contains(&part), "{part:?} is not in:\n{faults}");
    }
}

/// A TCP and a UDP service at one address share a file. `check` reports the faults of the file
/// once.
#[test]
fn check_reports_faults_of_a_shared_file_once() {
    let fixture = Fixture::without_daemon();
    let path = fixture.setup.folder.join("socklb.toml");
    let text = std::fs::read_to_string(&path).expect("read");
    let service = &text[text.find("[[service]]").expect("a service")..];
    let second = service.replacen("users", "users-udp", 1) + "protocol = \"udp\"\n";
    std::fs::write(&path, text.clone() + &second).expect("write");
    let path = path.to_str().expect("the path is UTF-8");
    let good = fixture.setup.run(&["check", path]);
    assert_eq!(good.status.code(), Some(0), "{good:?}");
    std::fs::write(&fixture.file, endpoints(&[("127.0.0.1:8001", "weight = 70000")])).expect("write");
    let (code, faults) = failure(&fixture.setup.run(&["check", path]));
    assert_eq!((code, faults.matches("users.toml:3:10").count()), (Some(1), 1), "{faults}");
}

#[test]
fn check_refuses_a_policy_that_the_kernel_cannot_run() {
    let fixture = Fixture::without_daemon();
    let path = fixture.setup.folder.join("socklb.toml");
    let text = std::fs::read_to_string(&path).expect("read");
    std::fs::write(&path, text.clone() + "policy = \"least-loaded\"\n").expect("write");
    let path = path.to_str().expect("the path is UTF-8");
    let (code, faults) = failure(&fixture.setup.run(&["check", path]));
    let expected = "policy \"least-loaded\" examines every backend of the subset, at most 256";
    assert_eq!((code, faults.contains(expected)), (Some(1), true), "{faults}");
    assert!(faults.contains("write subset = { size = N }, N at most 256"), "{faults}");
    std::fs::write(path, text + "policy = \"least-loaded\"\nsubset = { size = 3 }\n").expect("write");
    let good = fixture.setup.run(&["check", path]);
    assert_eq!(good.status.code(), Some(0), "{good:?}");
}

#[test]
fn check_notes_ignored_labels_and_refuses_long_lists_and_readable_keys() {
    let fixture = Fixture::without_daemon();
    let setup = &fixture.setup;
    let path = setup.folder.join("socklb.toml");
    let check = || setup.run(&["check", path.to_str().expect("the path is UTF-8")]);
    let good = std::fs::read_to_string(&path).expect("read");
    setup.write("socklb.toml", &good.replace("users.toml", "users"));
    let list = r#"[{"targets": ["127.0.0.1:8001"], "labels": {"state": "running"}}]"#;
    let file = setup.write("users", list);
    let note =
        "label state is ignored: unknown state \"running\" on line 1; write a label socklb_state instead";
    let output = check();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains(&format!("{}: {note}", file.display())), "{text}");
    setup.write("socklb.toml", &(good.clone() + "[limits]\nschedule_entries = 1024\n"));
    let addresses: Vec<String> = (1..=33).map(|n| format!("127.0.1.{n}:8001")).collect();
    let long: Vec<(&str, &str)> = addresses.iter().map(|address| (address.as_str(), "")).collect();
    fixture.write_endpoints(&long);
    let (code, text) = failure(&check());
    let numbers = "would have 2048 entries, but limits.schedule_entries allows only 1024";
    assert!(code == Some(1) && text.contains(numbers), "{text}");
    fixture.write_endpoints(&[("127.0.0.1:8001", "")]);
    let key = setup.write("service.key", &format!("1 {}\n", "0".repeat(64)));
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .expect("change the mode");
    setup.write("socklb.toml", &(good + "health = { probe = \"report\", key = \"service.key\" }\n"));
    let (code, text) = failure(&check());
    assert!(code == Some(1) && text.contains("is accessible to other users (mode 0644)"), "{text}");
}

#[test]
fn check_refuses_a_pipe_instead_of_waiting_for_it() {
    let fixture = Fixture::without_daemon();
    let pipe = fixture.setup.folder.join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).expect("make a pipe");
    let (code, text) = failure(&fixture.setup.run(&["check", pipe.to_str().expect("the path is UTF-8")]));
    assert!(code == Some(1) && text.contains("it is not a regular file"), "exit code {code:?}: {text}");
}

/// A full disk is an error with a message. A closed pipe is not an error.
#[test]
fn a_full_output_device_is_an_error_and_not_a_panic() {
    let fixture = Fixture::new();
    let config = fixture.setup.folder.join("socklb.toml");
    let config = config.to_str().expect("the path is UTF-8");
    let commands: [&[&str]; 9] = [
        &["status"],
        &["status", "--json"],
        &["status", "--watch"],
        &["flows"],
        &["flows", "--json"],
        &["explain", "users"],
        &["doctor", "--config", config],
        &["doctor", "--json"],
        &["check", config],
    ];
    for arguments in commands {
        let mut command = fixture.setup.socklb(arguments);
        let full = || std::fs::File::options().write(true).open("/dev/full").expect("open /dev/full");
        let output = command.stdout(full()).stderr(std::process::Stdio::piped()).output().expect("start it");
        let (code, text) = failure(&output);
        assert!(
            code == Some(1) && text.starts_with("socklb: write to standard output: "),
            "{arguments:?}: exit code {code:?}: {text}"
        );
        // If standard error is also full, only the exit code shows the failure.
        let code =
            fixture.setup.socklb(arguments).stdout(full()).stderr(full()).status().expect("start it").code();
        assert_eq!(code, Some(1), "{arguments:?}");
    }
}

/// A directory on the command line takes precedence over the directory that the daemon uses.
#[test]
fn the_pins_option_overrides_the_pins_of_the_daemon() {
    let fixture = Fixture::new();
    let run = fixture.setup.folder.join("run");
    let elsewhere = fixture.setup.pins.join("elsewhere");
    let mut command = std::process::Command::new(stage::program("socklb"));
    command.arg("--run").arg(&run).arg("--pins").arg(&elsewhere).args(["status", "--json"]);
    let output = stage::daemon::finish(&mut command);
    let status: StatusDocument = serde_json::from_slice(&output.stdout).expect("the text is JSON");
    assert_eq!((output.status.code(), status.clients.len()), (Some(3), 0));
    let message = stage::faults_of(&status).join("\n");
    assert!(message.contains(&format!("has its pins in {}", fixture.setup.pins.display())), "{message}");
    assert!(message.contains(&format!("showing the pins in {}", elsewhere.display())), "{message}");
}

#[test]
fn explain_shows_inputs_order_and_formula() {
    let mut fixture = Fixture::without_daemon();
    let text = std::fs::read_to_string(fixture.setup.folder.join("socklb.toml")).expect("read");
    let text = text.replace("job = \"web\"", "job = \"web\"\nindex = 3\ncount = 10");
    let subset = "subset = { algorithm = \"rocksteadier\", size = 2 }\n";
    fixture.setup.write("socklb.toml", &(text + subset));
    fixture.write_endpoints(&[
        ("127.0.0.1:8001", "weight = 3"),
        ("127.0.0.1:8002", "state = \"lame-duck\""),
        ("127.0.0.1:8003", ""),
    ]);
    let path = fixture.setup.folder.join("socklb.toml");
    let command = ["explain", "users", "--config", path.to_str().expect("the path is UTF-8")];
    let offline: Vec<Explanation> = fixture.setup.document(&command);
    fixture.start();
    let mut online: Vec<Explanation> = fixture.setup.document(&command);
    assert_eq!((offline[0].from_daemon, online[0].from_daemon), (false, true));
    online[0].from_daemon = false;
    assert_eq!(offline, online, "`explain` prints the same text with and without a daemon");
    let inputs = &online[0].inputs;
    assert_eq!((inputs.index, inputs.count, inputs.backends, inputs.size), (3, 10, 3, Some(2)));
    let members: Vec<String> = online[0].members.iter().map(|member| member.address.to_string()).collect();
    assert_eq!(members.len(), 2);
    assert!(!members.contains(&"127.0.0.1:8002".to_owned()), "a lame duck is not in the table");
    let text = fixture.setup.run(&["explain", "users"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    for part in ["task 3 of 10 in job web", "seed", "quota", "(2j + 1) / 2c", "fallback"] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    assert_eq!(fixture.probe().dial_many(SERVICE, 64).len(), 2);
}

#[test]
fn explain_of_an_unknown_name_lists_the_known_ones() {
    let fixture = Fixture::new();
    for (arguments, expected) in [
        (&["explain", "chat"][..], "no client here dials a service \"chat\"; services here are: users"),
        // These names contain characters with a meaning in the path of a request.
        (&["explain", "a b/?%26"], "no client here dials a service \"a b/?%26\"; services here are: users"),
        (
            &["explain", "users", "--client", "a&client=web"],
            "there is no client \"a&client=web\" here; clients here are: web",
        ),
        (
            &["explain", "users", "--client", "cron"],
            "there is no client \"cron\" here; clients here are: web",
        ),
        (
            &["explain", "user", "--client", "web"],
            "no client here dials a service \"user\"; did you mean users? services here are: users",
        ),
    ] {
        assert_eq!(failure(&fixture.setup.run(arguments)), (Some(1), format!("socklb: {expected}")));
    }
}

#[test]
fn status_prints_a_table_or_json() {
    let fixture = Fixture::new();
    let text = String::from_utf8_lossy(&fixture.setup.run(&["status"]).stdout).into_owned();
    for part in [
        "client web",
        "service users 10.96.0.10:80/tcp",
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
    let (code, text) = failure(&fixture.setup.run(&["status", "cron"]));
    assert_eq!((code, text.contains("no client \"cron\"")), (Some(1), true), "{text}");
}

#[test]
fn status_filters_and_sorts_backends() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let busy = format!("127.0.0.1:800{}", &probe.dial(SERVICE).name[1..]);
    let shown = |arguments: &[&str]| -> Vec<String> {
        let status: StatusDocument = fixture.setup.document(&[&["status"], arguments].concat());
        let services = status.clients.iter().flat_map(|client| &client.services);
        services.flat_map(|service| &service.backends).map(|backend| backend.address.to_string()).collect()
    };
    assert_eq!(shown(&["--backend", "127.0.0.1:8002"]), ["127.0.0.1:8002"]);
    assert_eq!(
        shown(&["web", "-s", "users", "--sort", "address"]),
        ["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"]
    );
    assert_eq!(shown(&["--sort", "active"])[0], busy);
    assert_eq!(shown(&["--failing"]), Vec::<String>::new());
    for (arguments, expected) in [
        (
            &["--service", "user"],
            "no client here dials a service \"user\"; did you mean users? services here are: users",
        ),
        (
            &["--backend", "127.0.0.1:9"],
            "there is no backend 127.0.0.1:9; backends here are: 127.0.0.1:8001, ",
        ),
        (&["cron", "--failing"], "there is no client \"cron\" here; clients here are: web"),
    ] {
        let (code, message) = failure(&fixture.setup.run(&[&["status"][..], arguments].concat()));
        assert!(code == Some(1) && message.contains(expected), "{message}");
    }
    let (code, message) = failure(&fixture.setup.run(&["status", "--sort", "size"]));
    assert!(
        code == Some(2) && message.contains("address, share, flows, active, failed, latency"),
        "{message}"
    );
}

#[test]
fn tcp_and_udp_at_one_address_are_two_services() {
    let mut fixture = Fixture::without_daemon();
    let path = fixture.setup.folder.join("socklb.toml");
    let text = std::fs::read_to_string(&path).expect("read");
    let udp = "[[service]]\nname = \"datagrams\"\naddress = \"10.96.0.10:80\"\nprotocol = \"udp\"\n\
               backends = { static = [\"127.0.0.1:8001\"] }\n";
    std::fs::write(&path, text + udp).expect("write");
    fixture.start();
    let text = String::from_utf8_lossy(&fixture.setup.run(&["status"]).stdout).into_owned();
    for part in ["service users 10.96.0.10:80/tcp", "service datagrams 10.96.0.10:80/udp"] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    let protocols: Vec<String> =
        fixture.setup.client().services.into_iter().map(|service| service.protocol).collect();
    assert_eq!(protocols, ["tcp", "udp"]);
    let explained: Vec<Explanation> = fixture.setup.document(&["explain", "datagrams"]);
    assert_eq!(explained[0].members[0].address.to_string(), "127.0.0.1:8001");
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3, "the TCP service uses its own list");
}

#[test]
fn a_wrong_command_line_exits_with_2() {
    let fixture = Fixture::without_daemon();
    for arguments in [
        &["detach"][..],
        &["frobnicate"],
        &["status", "--json", "--watch"],
        &["detach", "a", "--all"],
        // `--config` is an option of the daemon's commands, and `agent key` would ignore it.
        &["agent", "key", "--config", "agent.toml"],
    ] {
        assert_eq!(fixture.setup.run(arguments).status.code(), Some(2), "{arguments:?}");
    }
    // The variable with the configuration file does not appear in the usage.
    for (arguments, usage) in [
        (&["drain", "users"][..], "drain <SERVICE> <BACKEND>..."),
        (
            &["drain", "users", "0", "--for", "2s", "--close", "all", "--after", "5s"],
            "drain [OPTIONS] <SERVICE> <BACKEND>...",
        ),
    ] {
        let mut command = std::process::Command::new(stage::program("socklb"));
        let output = stage::daemon::finish(command.args(arguments).env("SOCKLB_CONFIG", "/nowhere.toml"));
        let (code, text) = failure(&output);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(&format!("Usage: socklb {usage}\n")), "{text}");
    }
}

/// `overrides` and `status` show the same drains, whatever has become of the file of overrides.
#[test]
fn without_a_daemon_the_overrides_are_the_drains_in_the_tables() {
    const FIRST: &str = "127.0.0.1:8001";
    let mut fixture = Fixture::new();
    let run = |fixture: &Fixture, arguments: &[&str]| {
        let output = fixture.setup.run(arguments);
        let (code, errors) = failure(&output);
        (code, String::from_utf8_lossy(&output.stdout).into_owned(), errors)
    };
    let nothing = "no overrides of service users on this host\n";
    assert_eq!(run(&fixture, &["overrides", "--service", "users"]).1, nothing);
    assert_eq!(run(&fixture, &["drain", "users", FIRST]).0, Some(0));
    fixture.daemon.take().expect("a daemon runs").kill();
    let file = fixture.setup.folder.join("state/overrides/overrides.json");
    let aside = file.with_file_name("overrides.json.not-understood");
    for (to, note) in [
        (&file, "showing the stored overrides"),
        (&aside, "which the next daemon stores"),
        (&file.with_file_name("lost.json"), "which the next daemon ends"),
    ] {
        let from = if file.exists() { &file } else { &aside };
        std::fs::rename(from, to).expect("rename the file");
        let (code, text, errors) = run(&fixture, &["overrides"]);
        assert!(code == Some(3) && text.contains(FIRST) && errors.contains(note), "{text}{errors}");
        let backend = fixture.setup.backend(FIRST).expect("the backend has a slot");
        assert!(backend.is_drained_by_operator(), "{backend:?}");
        let (code, _, errors) = run(&fixture, &["overrides", "--service", "user"]);
        assert!(code == Some(1) && errors.contains("services here are: users"), "{errors}");
    }
    for arguments in [
        &["drain", "users", FIRST, "--json"][..],
        &["undrain", "users", FIRST, "--json"],
        &["weight", "users", FIRST, "50%", "--json"],
        &["close", "users", FIRST, "--json"],
    ] {
        let (code, text, _) = run(&fixture, arguments);
        let document: Value = serde_json::from_str(&text).expect("a document");
        let refused = document["refused"].as_str().unwrap_or_default();
        assert!(code == Some(1) && refused.starts_with("the daemon is not running"), "{text}");
    }
}

#[test]
fn a_signal_ends_the_closing_with_a_message() {
    const OPEN: u64 = 30;
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let _open: Vec<_> = (0..3 * OPEN).map(|_| probe.dial(SERVICE)).collect();
    let open = || fixture.setup.backend("127.0.0.1:8001").map_or(0, |backend| backend.active);
    assert_eq!(open(), OPEN);
    let arguments = ["close", "users", "127.0.0.1:8001", "--rate", "1/s"];
    let mut closes = stage::daemon::Beside::start(&fixture.setup, &arguments);
    stage::eventually("the first connection is closed", open, |open| *open < OPEN);
    stage::daemon::signal(&closes.child, rustix::process::Signal::TERM);
    closes.ends(143);
    let text = closes.text();
    assert!(text.contains("stopped closing; connections that are closed stay closed"), "{text}");
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
