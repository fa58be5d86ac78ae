//! `socklb doctor`: reports a healthy host as healthy, and names each problem with its remedy.

use lb_common::abi::{self, map};
use lb_view::diagnosis::{Diagnosis, Finding, Severity};
use lb_view::status::AnomalyCounts;
use stage::maps::{Raw, per_cpu};
use stage::{Cgroup, Daemon, Setup, Stage, look};

use stage::fixture::{Fixture, config};

/// The exit code and the findings of `doctor`.
fn doctor(setup: &Setup) -> (Option<i32>, Vec<Finding>) {
    let config = setup.folder.join("socklb.toml");
    let output = setup.run(&["doctor", "--json", "--config", config.to_str().expect("the path is UTF-8")]);
    let Diagnosis { schema, findings } = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("doctor --json: {error}: {}", String::from_utf8_lossy(&output.stderr));
    });
    assert_eq!(schema, 1);
    (output.status.code(), findings)
}

/// The findings of one check: severity, text and help.
pub fn of<'a>(findings: &'a [Finding], check: &str) -> Vec<(Severity, &'a str, Option<&'a str>)> {
    let of = findings.iter().filter(|finding| finding.check == check);
    of.map(|finding| (finding.state, finding.text.as_str(), finding.help.as_deref())).collect()
}

#[test]
fn the_doctor_finds_no_problem_on_a_healthy_host() {
    let fixture = Fixture::new();
    let (code, findings) = doctor(&fixture.setup);
    assert_eq!(code, Some(0), "{findings:#?}");
    for check in [
        "kernel",
        "cgroup2",
        "bpffs",
        "privileges",
        "programs",
        "features",
        "configuration",
        "memory",
        "open files",
        "daemon",
        "flow records",
        "pins",
        "attachment",
        "other programs",
        "sockets",
        "limits",
    ] {
        let found = of(&findings, check);
        assert!(!found.is_empty(), "no finding of the check {check}");
        assert!(
            found.iter().all(|(state, _, _)| *state == Severity::Ok || *state == Severity::Note),
            "{found:?}"
        );
    }
    let text = fixture.setup.run(&["doctor", "--config", "socklb.toml"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.lines().any(|line| line.starts_with("ok       cgroup2")), "{text}");
}

#[test]
fn every_problem_is_reported_with_its_remedy() {
    let mut fixture = Fixture::new();
    store_anomaly(&fixture.setup);
    the_anomaly_is_noted(&fixture.setup);
    fixture.stop();
    let check = |setup: &Setup, check: &str, state: Severity, text: &str, help: &str| {
        let (code, findings) = doctor(setup);
        let found = of(&findings, check);
        let matches = |(s, t, h): &(Severity, &str, Option<&str>)| {
            *s == state && t.contains(text) && h.unwrap_or_default().contains(help)
        };
        assert!(found.iter().any(matches), "{check}: {text:?} {help:?} is not in {found:?}");
        assert_eq!(code, Some(3));
    };
    check(&fixture.setup, "daemon", Severity::Warning, "no daemon answers", "systemctl start socklb");
    the_anomaly_is_noted(&fixture.setup);
    // A user renames the pin directory: the programs continue with their tables, but no command
    // finds them.
    let version = fixture.setup.pins_of("web").parent().expect("the pins have a parent directory").to_owned();
    std::fs::rename(&version, version.with_file_name("x1")).expect("move the pins");
    let (code, findings) = doctor(&fixture.setup);
    let programs = of(&findings, "other programs");
    let named = programs
        .iter()
        .filter(|(state, text, _)| *state == Severity::Warning && text.contains("socklb_connect4"));
    assert_eq!((code, named.count()), (Some(3), 1), "{programs:?}");
    std::fs::rename(version.with_file_name("x1"), &version).expect("move them back");
    let (_, findings) = doctor(&fixture.setup);
    assert_eq!(of(&findings, "other programs")[0].0, Severity::Ok);
    fixture.setup.write(
        "socklb.toml",
        &config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "")
            .replace("job = \"web\"", "job = \"other\""),
    );
    check(
        &fixture.setup,
        "pins",
        Severity::Warning,
        "client web has pins, but is not configured",
        "socklb detach web",
    );
    check(
        &fixture.setup,
        "attachment",
        Severity::Problem,
        "client other: no programs are attached",
        "start the daemon",
    );
    fixture.setup.write("socklb.toml", "polcy = 1\n");
    check(&fixture.setup, "configuration", Severity::Warning, "socklb.toml:1:", "socklb check");
    fixture.setup.write("socklb.toml", &config(&fixture.cgroup, r#"{ file = "users.toml" }"#, ""));
    std::fs::create_dir_all(fixture.setup.pins.join("v1/web/links"))
        .expect("make the pin directory of another version");
    check(
        &fixture.setup,
        "pins",
        Severity::Warning,
        "client web has pins of ABI version 1",
        "socklb detach web",
    );
    fixture.cgroup.remove();
    check(&fixture.setup, "attachment", Severity::Warning, "does not exist", "");
    let elsewhere = fixture.setup.folder.join("pins");
    fixture.setup.pins = elsewhere;
    check(&fixture.setup, "bpffs", Severity::Problem, "is not on a bpf file system", "mount -t bpf");
}

/// Stores an anomaly in the counters of the programs.
#[track_caller]
fn store_anomaly(setup: &Setup) {
    look(|| setup.client().anomalies).becomes(AnomalyCounts::default());
    let mut counters = per_cpu::<abi::Anomalies>(&setup.map("web", map::ANOMALIES));
    let mut cpus: Vec<Raw<abi::Anomalies>> = counters.get(&0, 0).expect("read the counters").to_vec();
    cpus[0].0.ended_twice = 3;
    let cpus = aya::maps::PerCpuValues::try_from(cpus).expect("there is one value for each CPU");
    counters.set(0, cpus, 0).expect("store the counters");
}

#[track_caller]
fn the_anomaly_is_noted(setup: &Setup) {
    look(|| setup.client().anomalies.ended_twice).becomes(3);
    let (_, findings) = doctor(setup);
    let found = of(&findings, "anomalies");
    let texts: Vec<_> = found.iter().map(|(state, text, _)| (*state, *text)).collect();
    let expected = "client web: 3 flows were ended by two programs at the same time";
    assert_eq!(texts, [(Severity::Note, expected)]);
    let limits = of(&findings, "limits");
    for part in ["client web: 0 of 131072 flow_overflow", "client web: 0 of 131072 datagrams"] {
        assert!(limits.iter().any(|(_, text, _)| text.contains(part)), "{limits:?}");
    }
}

/// Two daemons with separate pins are attached to one cgroup. Each daemon reports the other, even
/// if the kernel does not report the names of programs because CAP_SYS_ADMIN is missing.
#[test]
fn two_daemons_on_one_cgroup_report_each_other() {
    let stage = Stage::new();
    let cgroup = Cgroup::new();
    let text = config(&cgroup, r#"{ static = ["127.0.0.1:8001"] }"#, "");
    let (first, second) = (Setup::new(&stage, "first"), Setup::new(&stage, "second"));
    let _first = Daemon::start(&first, &text);
    second.write("socklb.toml", &text);
    let mut command = crate::daemon::faults::as_nobody(&stage, &second, &["bpf", "net_admin", "perfmon"]);
    command.args(["run", "--config"]).arg(second.folder.join("socklb.toml"));
    let _second = stage::daemon::ChildGuard::of(command.spawn().expect("start it"));
    let faults = |setup: &Setup| {
        let status = setup.status();
        let neighbours = status.clients[0].neighbours.as_ref().map_or(0, Vec::len);
        (status.daemon.is_some(), stage::faults_of(&status).join("\n"), neighbours)
    };
    let here = cgroup.path().display();
    for (setup, order) in [(&first, "runs after this socklb"), (&second, "runs before this socklb")] {
        let expected = format!("client web: another socklb is attached to {here} and {order}");
        stage::eventually(
            "the other daemon is reported",
            || faults(setup),
            |(runs, degraded, neighbours)| *runs && degraded.contains(&expected) && *neighbours == 10,
        );
    }
    // The doctor runs as root, so it can read the programs' names.
    let (code, findings) = doctor(&first);
    let programs = of(&findings, "other programs");
    let ours = |(state, text, help): &&(Severity, &str, Option<&str>)| {
        *state == Severity::Warning
            && text.contains("program socklb_")
            && text.contains("The program belongs to socklb, and no pin below")
            && help.is_some_and(|help| help.contains("socklb detach --all --pins"))
    };
    assert_eq!((code, programs.iter().filter(ours).count()), (Some(3), 10), "{programs:?}");
}

/// The exit code and the findings of `doctor` about one process.
fn doctor_of(setup: &Setup, pid: u32) -> (Option<i32>, Vec<Finding>) {
    let config = setup.folder.join("socklb.toml");
    let (config, pid) = (config.to_str().expect("the path is UTF-8"), pid.to_string());
    let output = setup.run(&["doctor", "--json", "--config", config, "--pid", &pid]);
    let diagnosis: Diagnosis = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("doctor --pid: {error}: {}", String::from_utf8_lossy(&output.stderr));
    });
    (output.status.code(), diagnosis.findings)
}

#[test]
fn the_coverage_of_a_process_is_reported() {
    let mut fixture = Fixture::new();
    let sleep_in = |cgroup: &Cgroup| {
        let mut command = std::process::Command::new("/usr/bin/sleep");
        cgroup.enter(&mut command);
        stage::daemon::ChildGuard::of(command.arg("60").spawn().expect("start a process"))
    };
    let here = fixture.cgroup.path().display().to_string();
    let below = fixture.cgroup.child("below");
    let (inside, further) = (sleep_in(&fixture.cgroup), sleep_in(&below));
    for (process, place) in [(&inside, "its cgroup"), (&further, "a cgroup above it")] {
        let (code, findings) = doctor_of(&fixture.setup, process.id());
        let text = format!("client web covers the process: programs are attached to {place}, {here}");
        assert_eq!(of(&findings, "coverage"), [(Severity::Ok, text.as_str(), None)]);
        assert_eq!((code, of(&findings, "sockets")[0].0), (Some(0), Severity::Ok), "{findings:#?}");
    }
    // No client covers a process in a sibling of the client's cgroup.
    let beside = Cgroup::new();
    let outside = sleep_in(&beside);
    let (code, findings) = doctor_of(&fixture.setup, outside.id());
    let (state, text, help) = of(&findings, "coverage")[0];
    assert_eq!((code, state), (Some(3), Severity::Problem));
    let expected = format!(
        "no client covers {} or a cgroup above it; clients here are: web ({here})",
        beside.path().display()
    );
    assert_eq!(text, expected);
    assert!(help.is_some_and(|help| help.contains("`socklb exec web -- COMMAND`")), "{help:?}");
    // Without a daemon the programs still cover the cgroup, until they are removed.
    fixture.stop();
    assert_eq!(doctor_of(&fixture.setup, inside.id()).0, Some(0));
    assert!(fixture.setup.run(&["detach", "web"]).status.success());
    let (code, findings) = doctor_of(&fixture.setup, inside.id());
    let (state, text, _) = of(&findings, "coverage")[0];
    assert_eq!((code, state), (Some(3), Severity::Problem));
    assert_eq!(text, format!("client web is configured for {here}, but its programs are not attached there"));
    let none = fixture.setup.run(&["doctor", "--pid", "2147483647"]);
    let (code, text) = stage::daemon::failure(&none);
    assert_eq!(
        (code, text.as_str()),
        (Some(1), "socklb: there is no process 2147483647, or this user may not read its files in /proc")
    );
}

/// R10: a daemon in a cgroup namespace must report a cgroup that it cannot see.
#[test]
fn r10_a_cgroup_namespace_is_resolved_or_reported() {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "a");
    let root = Cgroup::new();
    let cgroup = root.child("service");
    let text = config(&cgroup, "{ static = [] }", "");
    setup.write("socklb.toml", &text);
    let inside = |command: &mut std::process::Command| {
        root.enter(command);
        stage::namespace::in_a_cgroup_namespace(command);
    };
    // The configuration has the host's path, which does not exist inside the namespace.
    let daemon = Daemon::spawn_with(&setup, inside);
    let degraded = || stage::faults_of(&setup.status()).join("\n");
    stage::eventually("the fault is reported", degraded, |faults| {
        faults.contains("/service does not exist") && faults.contains("--cgroupns=host")
    });
    assert_eq!(daemon.stop(), Some(0));
    let mut doctor = setup.socklb(&["doctor", "--config"]);
    inside(doctor.arg(setup.folder.join("socklb.toml")));
    let doctor = stage::daemon::finish(&mut doctor);
    assert!(String::from_utf8_lossy(&doctor.stdout).contains("--cgroupns=host"), "{doctor:?}");
    // The configuration has the path inside the namespace, as a service manager in a container sees
    // it.
    setup.write("socklb.toml", &text.replace(&cgroup.relative().display().to_string(), "service"));
    let daemon = Daemon::spawn_with(&setup, inside);
    // All daemons append to the same log.
    let attached = || daemon.log().matches(&format!("id={}", cgroup.id())).count();
    stage::eventually("the daemon attaches", attached, |times| *times == 1);
    assert_eq!(daemon.stop(), Some(0));
    setup.write("socklb.toml", &text);
    // If the host's whole cgroup tree is mounted, the cgroup namespace has no effect.
    let daemon = Daemon::spawn_with(&setup, |command| {
        root.enter(command);
        stage::namespace::in_a_cgroup_namespace_with_the_hosts_tree(command);
    });
    let attached = || daemon.log().matches(&format!("id={}", cgroup.id())).count();
    stage::eventually("the daemon attaches", attached, |times| *times == 2);
    assert_eq!(daemon.stop(), Some(0));
}
