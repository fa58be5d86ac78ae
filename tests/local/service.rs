//! The client's service stops and starts: its cgroup is removed and created again, and the new
//! cgroup is covered before the service dials.

use std::os::fd::AsRawFd;

use lb_view::diagnosis::{Diagnosis, Severity};
use stage::{Cgroup, Daemon, Probe, Setup, Stage, eventually, look};

use stage::fixture::{Fixture, SERVICE, config};

fn degraded(setup: &Setup) -> Option<i32> {
    setup.run(&["status"]).status.code()
}

#[test]
fn a_cgroup_created_later_is_attached_at_once() {
    let stage = Stage::new();
    let cgroup = Cgroup::absent();
    let setup = Setup::new(&stage, "a");
    let _backend = stage::Backend::start("b1", "127.0.0.1:8001");
    let _daemon = Daemon::start(&setup, &config(&cgroup, r#"{ static = ["127.0.0.1:8001"] }"#, ""));
    assert_eq!(degraded(&setup), Some(3));
    let status = setup.status();
    let path = cgroup.relative();
    let fault = format!(
        "client web: cgroup {} does not exist; the daemon attaches the client when the cgroup appears",
        path.display()
    );
    assert_eq!(stage::faults_of(&status), [fault], "the fault is reported once");
    cgroup.create();
    eventually("the cgroup is attached", || degraded(&setup), |code| *code == Some(0));
    look(|| setup.client().cgroup_id).becomes(Some(cgroup.id()));
    assert_eq!(Probe::start(&cgroup).dial(SERVICE).name, "b1");
}

#[test]
fn a_cgroup_created_with_its_parents_is_attached() {
    let stage = Stage::new();
    let outer = Cgroup::absent();
    let setup = Setup::new(&stage, "a");
    let _backend = stage::Backend::start("b1", "127.0.0.1:8001");
    let text = config(&outer, r#"{ static = ["127.0.0.1:8001"] }"#, "");
    let inner = outer.relative().join("slice/service");
    let text = text.replace(&outer.relative().display().to_string(), &inner.display().to_string());
    let _daemon = Daemon::start(&setup, &text);
    for _ in 0..2 {
        outer.create();
        std::fs::create_dir(outer.path().join("slice")).expect("make the slice");
        let service = outer.child("slice/service");
        eventually("the cgroup is attached", || degraded(&setup), |code| *code == Some(0));
        let mut probe = Probe::start(&service);
        assert_eq!(probe.dial(SERVICE).name, "b1");
        drop((probe, service));
        outer.remove();
        assert_eq!(degraded(&setup), Some(3), "a client without its cgroup is degraded");
    }
}

#[test]
fn wait_returns_when_the_cgroup_is_covered() {
    let fixture = Fixture::new();
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
}

#[test]
fn wait_reports_why_it_cannot_succeed() {
    let mut fixture = Fixture::new();
    let wait = |arguments: &[&str]| stage::daemon::failure(&fixture.setup.run(arguments));
    let (code, text) = wait(&["wait", "cron"]);
    assert!(code == Some(1) && text.contains("not configured; clients here are: web"), "{text}");
    // The test itself is in another cgroup.
    let (code, text) = wait(&["wait", "web"]);
    let path = fixture.cgroup.path().display().to_string();
    assert!(
        code == Some(1) && text.contains(&path) && text.contains("this process is in another cgroup"),
        "{text}"
    );
    fixture.stop();
    let (code, text) = stage::daemon::failure(&fixture.setup.run(&["wait", "web", "--timeout", "1"]));
    assert!(code == Some(1) && text.contains("no daemon is running"), "{text}");
    // After the daemon has ended, the attached programs still cover the cgroup.
    assert_eq!(fixture.probe().socklb(&fixture.setup, &["wait", "web", "--timeout", "1"]), 0);
}

/// A service that starts before the daemon waits for the daemon.
#[test]
fn wait_succeeds_once_the_daemon_starts() {
    let mut fixture = Fixture::without_daemon();
    let mut probe = fixture.probe();
    probe.start_socklb(&fixture.setup, &["wait", "web"]);
    fixture.start();
    assert_eq!(probe.finish_socklb(), 0);
    assert_eq!(probe.dial_many(SERVICE, 30).len(), 3);
}

#[test]
fn exec_starts_a_command_in_a_covered_cgroup() {
    let fixture = Fixture::new();
    // The cgroup is gone, as after a stop of the service, so exec makes it.
    fixture.cgroup.remove();
    let probe = stage::program("probe");
    let inner = fixture.cgroup.path().display().to_string();
    let mut command = fixture.setup.socklb(&["exec", "web", "--"]);
    command.arg(probe).arg(&inner);
    let mut probe = Probe::of(&mut command);
    assert_eq!(probe.dial_many(SERVICE, 30).len(), 3);
    assert_eq!(
        look(|| fixture.setup.client().not_a_service).now("a connect is counted before it returns"),
        0
    );
}

#[test]
fn exec_of_an_unstartable_program_exits_like_a_shell() {
    let fixture = Fixture::new();
    for (client, program, code, expected) in [
        ("web", "/no/such/program", 127, "/no/such/program"),
        ("web", "/proc/self/status", 126, "/proc/self/status"),
        ("cron", "true", 1, "clients here are: web"),
    ] {
        let (ended, text) = stage::daemon::failure(&fixture.setup.run(&["exec", client, "--", program]));
        assert!(ended == Some(code) && text.contains(expected), "exit code {ended:?}: {text}");
    }
}

/// A cgroup remains covered while the daemon hangs, and the commands respect their time limit.
#[test]
fn commands_that_do_not_need_the_daemon_succeed_while_it_hangs() {
    let fixture = Fixture::new();
    let mut inside = fixture.probe();
    fixture.daemon().signal(rustix::process::Signal::STOP);
    let mut exec = fixture.setup.socklb(&["exec", "web", "--timeout", "8", "--"]);
    let exec = stage::daemon::finish(exec.arg(stage::program("socklb")).arg("--version"));
    assert_eq!(stage::daemon::failure(&exec), (Some(0), String::new()));
    assert_eq!(inside.socklb(&fixture.setup, &["wait", "web", "--timeout", "8"]), 0);
    // The test itself is in another cgroup.
    let begun = std::time::Instant::now();
    let (code, text) = stage::daemon::failure(&fixture.setup.run(&["wait", "web", "--timeout", "1"]));
    assert!(code == Some(1) && text.contains("within 1 s") && text.contains("does not answer"), "{text}");
    assert!(
        begun.elapsed() < stage::patience(),
        "the time limit also applies to the search for the reason: {:?}",
        begun.elapsed()
    );
    let status = fixture.setup.run(&["status"]);
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(text.contains("service users") && text.contains("does not answer"), "{text}");
    assert_eq!(status.status.code(), Some(3), "{text}");
    let config = fixture.setup.folder.join("socklb.toml");
    let explain =
        fixture.setup.run(&["explain", "users", "--config", config.to_str().expect("the path is UTF-8")]);
    let (code, text) = stage::daemon::failure(&explain);
    assert!(code == Some(0) && text.contains("does not answer"), "{text}");
    let text = String::from_utf8_lossy(&explain.stdout).into_owned();
    assert!(text.contains("from the configuration"), "{text}");
}

/// exec reports that it creates a cgroup, and creates no cgroup for a mistyped path while the
/// client is attached to another cgroup.
#[test]
fn exec_reports_the_cgroup_that_it_creates_and_refuses_a_mistyped_path() {
    let fixture = Fixture::new();
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
    eventually("the cgroup is attached", || degraded(&fixture.setup), |code| *code == Some(0));
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
    for fd in [direct.as_raw_fd(), listener.as_raw_fd()] {
        // SAFETY: the descriptor is open while the test runs.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
        rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty()).expect("make the socket inheritable");
    }
    let mut probe = fixture.probe();
    probe.dial(SERVICE);
    let sockets = || -> Vec<(Severity, String)> {
        let Diagnosis { findings, .. } = fixture.setup.document(&["doctor", "--config", "socklb.toml"]);
        let sockets = findings.into_iter().filter(|finding| finding.check == "sockets");
        sockets.map(|finding| (finding.state, finding.text)).collect()
    };
    let found = sockets();
    let uncovered: Vec<&String> =
        found.iter().map(|(_, text)| text).filter(|t| t.contains("not covered")).collect();
    assert_eq!(uncovered.len(), 2, "{found:?}");
    assert!(uncovered.iter().any(|text| text.contains("connected to 127.0.0.1:8001")), "{found:?}");
    assert!(uncovered.iter().any(|text| text.contains("it only listens")), "{found:?}");
    assert!(uncovered.iter().all(|text| text.contains("of probe (pid")), "{found:?}");
    // If a second process inherits the sockets, the message names both processes.
    let second = fixture.probe();
    let found = sockets();
    let together: Vec<&String> =
        found.iter().map(|(_, text)| text).filter(|t| t.contains("not covered")).collect();
    let pids = [probe.pid(), second.pid()].map(|pid| format!("probe (pid {pid})"));
    assert_eq!(together.len(), 2, "{found:?}");
    assert!(together.iter().all(|text| pids.iter().all(|pid| text.contains(pid))), "{found:?}");
    drop(second);
    drop(probe);
    drop((direct, listener));
    let _probe = fixture.probe();
    let found = sockets();
    assert!(found.iter().all(|(state, _)| *state == Severity::Ok), "{found:?}");
}
