//! The client's service stops and starts: its cgroup is removed and created again, and the new
//! cgroup is covered before the service dials.

use std::os::fd::{AsFd as _, BorrowedFd};

use lb_view::diagnosis::{Diagnosis, Severity};
use stage::{Cgroup, Daemon, Probe, Setup, Stage, eventually, look};

use stage::fixture::{Fixture, SERVICE, config};

fn degraded(setup: &Setup) -> Option<i32> {
    setup.run(&["status"]).status.code()
}

#[test]
fn a_cgroup_created_later_is_attached_at_once_also_with_its_parents() {
    let stage = Stage::new();
    let outer = Cgroup::absent();
    let setup = Setup::new(&stage, "a");
    let _backend = stage::Backend::start("b1", "127.0.0.1:8001");
    let text = config(&outer, r#"{ static = ["127.0.0.1:8001"] }"#, "");
    let inner = outer.relative().join("slice/service");
    let text = text.replace(&outer.relative().display().to_string(), &inner.display().to_string());
    let _daemon = Daemon::start(&setup, &text);
    let fault = format!(
        "client web: cgroup {} does not exist; the daemon attaches the client when the cgroup appears",
        inner.display()
    );
    for _ in 0..2 {
        assert_eq!(degraded(&setup), Some(3), "a client without its cgroup is degraded");
        look(|| setup.faults()).becomes([fault.clone()]);
        outer.create();
        std::fs::create_dir(outer.path().join("slice")).expect("make the slice");
        let service = outer.child("slice/service");
        eventually("the cgroup is attached", || degraded(&setup), |code| *code == Some(0));
        look(|| setup.client().cgroup_id).becomes(Some(service.id()));
        let mut probe = Probe::start(&service);
        assert_eq!(probe.dial(SERVICE).name, "b1");
        drop((probe, service));
        outer.remove();
    }
    assert_eq!(degraded(&setup), Some(3));
}

#[test]
fn wait_returns_when_the_cgroup_is_covered_and_otherwise_reports_why() {
    let mut fixture = Fixture::without_daemon();
    // A service that starts before the daemon waits for the daemon.
    let mut early = fixture.probe();
    early.start_socklb(&fixture.setup, &["wait", "web"]);
    fixture.start();
    assert_eq!(early.finish_socklb(), 0);
    assert_eq!(early.dial_many(SERVICE, 30).len(), 3);
    early.kill();
    // The cgroup was covered before the process was started.
    assert_eq!(fixture.probe().socklb(&fixture.setup, &["wait", "web"]), 0);
    // The cgroup is new: the waiting process is in a cgroup that the daemon has not seen yet.
    for _ in 0..5 {
        fixture.cgroup.remove();
        fixture.cgroup.create();
        let mut probe = fixture.probe();
        assert_eq!(probe.socklb(&fixture.setup, &["wait", "web"]), 0);
        assert_eq!(probe.dial_many(SERVICE, 30).len(), 3);
    }
    // A child of the client's cgroup is covered, too.
    let inside = fixture.cgroup.child("inside");
    assert_eq!(Probe::start(&inside).socklb(&fixture.setup, &["wait", "web"]), 0);
    drop(inside);
    wait_fails_with_the_reason(&mut fixture);
}

fn wait_fails_with_the_reason(fixture: &mut Fixture) {
    let wait = |fixture: &Fixture, arguments: &[&str]| stage::daemon::failure(&fixture.setup.run(arguments));
    let (code, text) = wait(fixture, &["wait", "cron"]);
    assert!(code == Some(1) && text.contains("not configured; clients here are: web"), "{text}");
    // The test itself is in another cgroup.
    let (code, text) = wait(fixture, &["wait", "web"]);
    let path = fixture.cgroup.path().display().to_string();
    assert!(
        code == Some(1) && text.contains(&path) && text.contains("this process is in another cgroup"),
        "{text}"
    );
    fixture.stop();
    let (code, text) = wait(fixture, &["wait", "web", "--timeout", "1"]);
    assert!(code == Some(1) && text.contains("no daemon is running"), "{text}");
    // After the daemon has ended, the attached programs still cover the cgroup.
    assert_eq!(fixture.probe().socklb(&fixture.setup, &["wait", "web", "--timeout", "1"]), 0);
}

/// exec creates the client's cgroup, but no cgroup for a mistyped path while the client is attached
/// to another cgroup.
#[test]
fn exec_starts_a_command_in_a_covered_cgroup() {
    let fixture = Fixture::new();
    // The cgroup is gone, as after a stop of the service, so exec makes it.
    fixture.cgroup.remove();
    let exec = || {
        let mut exec = fixture.setup.socklb(&["exec", "web", "--"]);
        stage::daemon::failure(&stage::daemon::finish(exec.arg(stage::program("socklb")).arg("--version")))
    };
    let (code, text) = exec();
    let path = fixture.cgroup.path().display().to_string();
    assert!(
        code == Some(0) && text.contains(&format!("created cgroup {path}")),
        "exit code {code:?}: {text}"
    );
    assert_eq!(exec(), (Some(0), String::new()));
    // The command's first connect is balanced, although the cgroup is new.
    fixture.cgroup.remove();
    let mut command = fixture.setup.socklb(&["exec", "web", "--"]);
    command.arg(stage::program("probe")).arg(&path);
    let mut probe = Probe::of(&mut command);
    assert_eq!(probe.dial_many(SERVICE, 30).len(), 3);
    assert_eq!(
        look(|| fixture.setup.client().not_a_service).now("a connect is counted before it returns"),
        0
    );
    // A program that cannot be started has the exit code of a shell.
    for (client, program, code, expected) in [
        ("web", "/no/such/program", 127, "/no/such/program"),
        ("web", "/proc/self/status", 126, "/proc/self/status"),
        ("cron", "true", 1, "clients here are: web"),
    ] {
        let (ended, text) = stage::daemon::failure(&fixture.setup.run(&["exec", client, "--", program]));
        assert!(ended == Some(code) && text.contains(expected), "exit code {ended:?}: {text}");
    }
    let wrong = fixture.cgroup.relative().join("wrogn").display().to_string();
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "");
    let right = format!("cgroup = \"{}\"", fixture.cgroup.relative().display());
    fixture.setup.write("socklb.toml", &text.replace(&right, &format!("cgroup = \"{wrong}\"")));
    eventually(
        "the daemon applies the configuration",
        || stage::faults_of(&fixture.setup.status()).join("\n"),
        |faults| faults.contains("wrogn"),
    );
    let (code, text) = exec();
    assert!(
        code == Some(1) && text.contains("wrogn") && text.contains("the client's programs are attached to"),
        "exit code {code:?}: {text}"
    );
    assert!(!fixture.cgroup.path().join("wrogn").exists());
}

/// The cgroup in which a socket was created determines whether the socket is covered, even if
/// another process holds the socket later.
#[test]
fn an_inherited_socket_is_reported_as_uncovered() {
    let fixture = Fixture::new();
    let direct = std::net::TcpStream::connect("127.0.0.1:8001").expect("connect");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
    let datagrams = std::net::UdpSocket::bind("127.0.0.1:0").expect("bind");
    let inherit = |fd: BorrowedFd<'_>| {
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).expect("make the socket inheritable");
    };
    [direct.as_fd(), listener.as_fd(), datagrams.as_fd()].into_iter().for_each(inherit);
    let mut probe = fixture.probe();
    probe.dial(SERVICE);
    let sockets = |arguments: &[&str]| -> Vec<(Severity, String)> {
        let arguments = [&["doctor", "--config", "socklb.toml"], arguments].concat();
        let Diagnosis { findings, .. } = fixture.setup.document(&arguments);
        let sockets = findings.into_iter().filter(|finding| finding.check == "sockets");
        sockets.map(|finding| (finding.state, finding.text)).collect()
    };
    let uncovered = |found: &[(Severity, String)]| -> Vec<String> {
        found.iter().map(|(_, text)| text.clone()).filter(|text| text.contains("not covered")).collect()
    };
    let found = uncovered(&sockets(&[]));
    assert_eq!(found.len(), 2, "the kernel does not list sockets that are not connected: {found:?}");
    assert!(found.iter().any(|text| text.contains("connected to 127.0.0.1:8001")), "{found:?}");
    assert!(found.iter().any(|text| text.contains("it only listens")), "{found:?}");
    assert!(found.iter().all(|text| text.contains("of probe (pid")), "{found:?}");
    // The sockets of one process are read from its descriptors.
    let pid = probe.pid().to_string();
    let of_process = sockets(&["--pid", &pid]);
    for what in ["it is connected to 127.0.0.1:8001", "it sends datagrams"] {
        let is_expected =
            |(state, text): &&(Severity, String)| *state == Severity::Warning && text.ends_with(what);
        assert_eq!(of_process.iter().filter(is_expected).count(), 1, "{what}: {of_process:#?}");
    }
    // If a second process inherits the sockets, the message names both processes.
    let second = fixture.probe();
    let found = uncovered(&sockets(&[]));
    let pids = [probe.pid(), second.pid()].map(|pid| format!("probe (pid {pid})"));
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found.iter().all(|text| pids.iter().all(|pid| text.contains(pid))), "{found:?}");
    drop(second);
    drop(probe);
    drop((direct, listener, datagrams));
    let _probe = fixture.probe();
    let found = sockets(&[]);
    assert!(found.iter().all(|(state, _)| *state == Severity::Ok), "{found:?}");
}
