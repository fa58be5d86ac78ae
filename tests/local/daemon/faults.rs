//! Tests of starts that must fail. Each start reports the problem, its location and the remedy,
//! exits with the right code, and changes nothing.

use std::fs;
use std::process::{Command, Output};

use lb_common::abi::{ABI_VERSION, map};
use lb_view::diagnosis::{Diagnosis, Severity};
use lb_view::status::EjectionMode;
use stage::daemon::failure;
use stage::kernel;
use stage::{Cgroup, Daemon, Setup, Stage, address, look};

use stage::fixture::{Fixture, SERVICE, config, with_active_accounting, with_passes};

fn start(setup: &Setup, text: &str) -> Output {
    let path = setup.write("socklb.toml", text);
    setup.run(&["run", "--config", path.to_str().expect("the path is UTF-8")])
}

#[track_caller]
fn check(output: &Output, code: i32, messages: &[&str]) {
    let (found, text) = failure(output);
    assert_eq!(found, Some(code), "{text}");
    for message in messages {
        assert!(text.contains(message), "{message:?} is not in: {text}");
    }
}

#[test]
fn missing_mounts_are_reported_with_their_commands_and_a_failed_start_attaches_nothing() {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "a");
    let cgroup = Cgroup::new();
    let text = config(&cgroup, "{ static = [] }", "");
    let elsewhere = Setup { pins: setup.folder.join("not-bpffs"), ..setup.clone() };
    check(&start(&elsewhere, &text), 1, &["not-bpffs", "mount -t bpf"]);
    assert!(!elsewhere.pins.exists(), "no pins remain after the failed start");
    // A folder is in the place of the socket.
    let socket = setup.folder.join("run/socklb.sock");
    fs::create_dir_all(&socket).expect("create a folder in place of the socket");
    check(&start(&setup, &text), 1, &["run/socklb.sock", "not a socket"]);
    assert!(!setup.pins_of("web").exists(), "the failed start has attached nothing");
    fs::remove_dir(socket).expect("remove the folder");
    // The mounts of this stage's namespace change, and not those of the host.
    rustix::mount::unmount(stage::cgroup::mount(), rustix::mount::UnmountFlags::DETACH)
        .expect("unmount cgroup2");
    let output = start(&setup, &text);
    rustix::mount::mount("none", "/sys/fs/cgroup", "tmpfs", rustix::mount::MountFlags::empty(), None)
        .expect("create a folder");
    let again = std::path::Path::new("/sys/fs/cgroup/unified");
    fs::create_dir_all(again).expect("create a folder");
    rustix::mount::mount("none", again, "cgroup2", rustix::mount::MountFlags::empty(), None)
        .expect("mount cgroup2 again");
    check(&output, 1, &["no cgroup2", "mount -t cgroup2"]);
    // The command in the message repairs the fault at any mount point.
    let daemon = Daemon::start(&setup, &text);
    assert_eq!(daemon.stop(), Some(0));
    // When `cgroup` is dropped, it removes itself by its old path, which is hidden here.
    let _ = fs::remove_dir(again.join(cgroup.relative()));
}

/// A command that runs socklb as an ordinary user with exactly these capabilities. That user owns
/// the folders of the stage and of the set-up, and the bpffs.
pub fn as_nobody(stage: &Stage, setup: &Setup, capabilities: &[&str]) -> Command {
    for folder in [stage.folder(), &setup.folder, &stage.bpffs()] {
        std::os::unix::fs::chown(folder, Some(65534), Some(65534)).expect("change the folder's owner");
    }
    // The program must be reachable for that user, wherever the repository is.
    let socklb = stage.folder().join("socklb");
    if !socklb.exists() {
        fs::copy(stage::program("socklb"), &socklb).expect("copy the program");
        stage::wait_until_not_written(&socklb);
    }
    let list = |prefix: &str| {
        let plus: String = capabilities.iter().map(|capability| format!(",+{capability}")).collect();
        format!("{prefix}{plus}").trim_start_matches(',').to_owned()
    };
    // setpriv is part of util-linux, which every Debian has.
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    command.args(["--bounding-set", &list("-all")]);
    if !capabilities.is_empty() {
        command.args(["--inh-caps", &list(""), "--ambient-caps", &list("")]);
    }
    command.arg(socklb).args(setup.socklb(&[]).get_args());
    stage::probe::die_with_us(&mut command);
    stage::daemon::lock_any_memory(&mut command);
    command
}

/// If the verifier refuses programs because CAP_PERFMON is missing, the daemon reports it. If the
/// daemon also has CAP_PERFMON, its three capabilities are enough.
#[test]
fn two_capabilities_suffice_and_each_missing_one_is_reported() {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "a");
    let cgroup = Cgroup::new();
    let _backend = stage::Backend::start("b", "127.0.0.1:8001");
    let path = setup.write("socklb.toml", &config(&cgroup, r#"{ static = ["127.0.0.1:8001"] }"#, ""));
    a_start_without_privileges_exits_with_4_and_names_the_capabilities(&stage, &setup);
    let enough = kernel::SPECULATION_BARRIERS.is_here();
    if !enough {
        let mut command = as_nobody(&stage, &setup, &["bpf", "net_admin"]);
        let output = command.args(["run", "--config"]).arg(&path).output().expect("start socklb");
        let (code, text) = failure(&output);
        assert!(
            matches!(code, Some(1 | 4)) && text.contains("only with CAP_PERFMON"),
            "exit code {code:?}: {text}"
        );
    }
    let mut daemon = start_as_nobody(&stage, &setup, |_| {});
    let mut probe = stage::Probe::start(&cgroup);
    let dialled = probe.dial(SERVICE);
    assert_eq!((dialled.name.as_str(), dialled.peer), ("b", address(SERVICE)));
    setup.active_becomes(1);
    probe.close(dialled.socket);
    setup.active_becomes(0);
    // Features that need more capabilities are off, and reported as off.
    let knows_mptcp = !enough && kernel::SKC_TO_MPTCP_SOCK.is_here();
    assert_eq!(setup.daemon().features["knows_mptcp"], knows_mptcp);
    let knows_causes = setup.daemon().features["socket_errors"];
    assert_eq!(knows_causes, !enough, "the daemon knows causes only with CAP_PERFMON");
    let expected = if knows_causes { EjectionMode::On } else { EjectionMode::CausesUnknown };
    look(|| setup.service().ejection).becomes(expected);
    let text = String::from_utf8_lossy(&setup.run(&["status"]).stdout).into_owned();
    assert_eq!(text.contains("ejection off: causes unknown"), !knows_causes, "{text}");
    stage::daemon::signal(&daemon, rustix::process::Signal::TERM);
    assert!(daemon.wait().expect("reap the daemon").success());
}

#[track_caller]
fn a_start_without_privileges_exits_with_4_and_names_the_capabilities(stage: &Stage, setup: &Setup) {
    let path = setup.folder.join("socklb.toml");
    let output =
        as_nobody(stage, setup, &[]).args(["run", "--config"]).arg(&path).output().expect("start socklb");
    check(&output, 4, &["CAP_BPF and CAP_NET_ADMIN"]);
    // The doctor names each missing privilege and the command that grants it.
    let mut command = as_nobody(stage, setup, &[]);
    let output = stage::daemon::finish(command.args(["doctor", "--json", "--config"]).arg(path));
    assert_eq!(output.status.code(), Some(3));
    let Diagnosis { findings, .. } = serde_json::from_slice(&output.stdout).expect("the text is JSON");
    let found = crate::operator::doctor::of(&findings, "privileges");
    let missing = [
        (Severity::Problem, "CAP_BPF"),
        (Severity::Problem, "CAP_NET_ADMIN"),
        (Severity::Note, "CAP_PERFMON"),
    ];
    for (state, capability) in missing {
        let named = found.iter().any(|(s, text, help)| {
            *s == state && text.starts_with(capability) && help.is_some() == (capability == "CAP_PERFMON")
        });
        assert!(named, "{capability} is not in {found:?}");
    }
    // One command grants all missing capabilities. Only an administrator can run it.
    let given = found.iter().find_map(|(_, _, help)| *help).expect("the finding has a help text");
    assert!(given.contains("as root") && given.contains("+bpf,+net_admin,+perfmon"), "{given}");
    assert_eq!(crate::operator::doctor::of(&findings, "programs")[0].0, Severity::Problem);
}

/// Starts the daemon as an ordinary user with the capabilities that this kernel requires, and waits
/// until it answers.
pub fn start_as_nobody(
    stage: &Stage,
    setup: &Setup,
    prepare: impl FnOnce(&mut Command),
) -> stage::daemon::ChildGuard {
    let capabilities: &[&str] = if kernel::SPECULATION_BARRIERS.is_here() {
        &["bpf", "net_admin"]
    } else {
        &["bpf", "net_admin", "perfmon"]
    };
    let mut command = as_nobody(stage, setup, capabilities);
    prepare(&mut command);
    let log = fs::File::create(setup.folder.join("log")).expect("open the log");
    command.args(["run", "--config"]).arg(setup.folder.join("socklb.toml")).stderr(log);
    // A change of user clears the parent-death signal of `die_with_us`.
    let daemon = stage::daemon::ChildGuard::of(command.spawn().expect("start socklb"));
    stage::eventually(
        "the daemon answers",
        || (setup.status().daemon.is_some(), stage::daemon::read(&setup.folder.join("log"))),
        |(answers, _)| *answers,
    );
    daemon
}

/// Older kernels count maps as locked memory.
#[test]
fn a_small_memlock_limit_suffices_or_is_reported() {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "a");
    let cgroup = Cgroup::new();
    let path = setup.write("socklb.toml", &config(&cgroup, "{ static = [] }", ""));
    if kernel::MAPS_ARE_NOT_LOCKED_MEMORY.is_here() {
        let mut daemon = start_as_nobody(&stage, &setup, |command| {
            stage::daemon::lock_little_memory(command, 64 << 10);
        });
        stage::daemon::signal(&daemon, rustix::process::Signal::TERM);
        assert!(daemon.wait().expect("reap the daemon").success());
    } else {
        // The memory of the user's other processes also counts, so the start may fail at any step.
        // If the limit suffices for a small client, the exit code is 1, because a retry may
        // succeed.
        for kibibytes in [0, 4, 8, 12, 16, 24, 32, 64, 1024] {
            let mut command = as_nobody(&stage, &setup, &["bpf", "net_admin", "perfmon"]);
            stage::daemon::lock_little_memory(&mut command, kibibytes << 10);
            let output = stage::daemon::finish(command.args(["run", "--config"]).arg(&path));
            let (code, text) = failure(&output);
            assert!(matches!(code, Some(1 | 4)), "{kibibytes} KiB: {code:?} {text}");
            assert!(text.contains("RLIMIT_MEMLOCK"), "{kibibytes} KiB: {text}");
        }
    }
}

/// The daemon lacks the privilege to enter another network namespace, so it retains the flows
/// there, which it cannot check.
#[test]
fn flows_in_an_inaccessible_namespace_are_retained_and_counted() {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "a");
    let cgroup = Cgroup::new();
    setup.write("socklb.toml", &with_passes(&config(&cgroup, r#"{ static = ["127.0.0.1:8001"] }"#, "")));
    let mut daemon = start_as_nobody(&stage, &setup, |_| {});
    let mut elsewhere = stage::Probe::start_with(&cgroup, stage::namespace::in_a_network_of_its_own);
    assert!(elsewhere.try_dial(SERVICE).is_err(), "nothing listens in this namespace");
    // If the kernel reports that a process holds the socket, the daemon does not need to enter the
    // namespace.
    let is_reported = !kernel::SPECULATION_BARRIERS.is_here();
    let fault = "client web: 1 active flows are in network namespaces that the daemon cannot inspect";
    look(|| setup.status()).has(
        |status| {
            let reclaim = status.clients[0].reclaim.expect("the daemon answers");
            let is_fault = stage::faults_of(status).join("\n").contains(fault);
            (reclaim.passes >= 3, reclaim.kept_elsewhere, is_fault)
        },
        (true, u64::from(!is_reported), !is_reported),
    );
    setup.active_becomes(1);
    drop(elsewhere);
    setup.active_becomes(0);
    stage::daemon::signal(&daemon, rustix::process::Signal::TERM);
    assert!(daemon.wait().expect("reap the daemon").success());
}

/// Without CAP_PERFMON the programs cannot recognise the kernel's own sockets for MPTCP, and no
/// program sees these sockets end. The kernel's lists of sockets show the end.
#[test]
fn unrecognized_mptcp_connections_are_reclaimed() {
    if kernel::SPECULATION_BARRIERS.skips() {
        return;
    }
    let stage = Stage::new();
    let setup = Setup::new(&stage, "a");
    let cgroup = Cgroup::new();
    let _backend = stage::Backend::start("b", "127.0.0.1:8001");
    // With full accounting the program for TCP events would see the end.
    let text = config(&cgroup, r#"{ static = ["127.0.0.1:8001"] }"#, "");
    setup.write("socklb.toml", &with_passes(&with_active_accounting(&text)));
    let mut probe = stage::Probe::start(&cgroup);
    let mut daemon = start_as_nobody(&stage, &setup, |_| {});
    let dialled = probe.dial_mptcp(SERVICE);
    assert_eq!(dialled.name, "b");
    setup.active_becomes(1);
    let passes = || setup.client().reclaim.map(|reclaim| reclaim.passes);
    stage::eventually("a pass has examined the flow", passes, |passes| *passes >= Some(2));
    probe.close(dialled.socket);
    stage::eventually("the flow is no longer active", || setup.active(), |active| *active == 0);
    stage::daemon::signal(&daemon, rustix::process::Signal::TERM);
    assert!(daemon.wait().expect("reap the daemon").success());
}

#[test]
fn foreign_and_missing_pins_and_maps_of_another_shape_are_refused() {
    let mut fixture = Fixture::new();
    fixture.stop();
    let path = fixture.setup.folder.join("socklb.toml");
    let text = fs::read_to_string(&path).expect("read the configuration");
    let maps = fixture.setup.pins_of("web").join("maps");
    // A foreign pin is in a directory of socklb.
    fs::rename(maps.join(map::COUNTS), maps.join("theirs")).expect("rename a pin");
    let output = fixture.setup.run(&["run", "--config", path.to_str().expect("the path is UTF-8")]);
    check(&output, 1, &["maps/theirs", "not one of socklb's"]);
    // A pin of socklb is missing while programs are attached.
    fs::remove_file(maps.join("theirs")).expect("remove the pin");
    let output = fixture.setup.run(&["run", "--config", path.to_str().expect("the path is UTF-8")]);
    check(&output, 1, &["maps/counts", "is missing", "socklb detach web"]);
    // Connects continue after the failed start.
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    // The command in the message repairs the fault.
    assert!(fixture.setup.run(&["detach", "web"]).status.success());
    fixture.start();
    fixture.stop();
    // The maps have another size than the configuration.
    let output = start(&fixture.setup, &(text.clone() + "[limits]\nflow_records = 1024\n"));
    check(&output, 1, &["datagrams", "131072 entries", "1024 entries", "socklb detach web"]);
    // A map of another kind has the name of one of socklb's maps.
    fs::remove_file(maps.join(map::CPU_SERVICES)).expect("remove the pin");
    fs::rename(maps.join(map::ANOMALIES), maps.join(map::CPU_SERVICES))
        .expect("put another map in its place");
    check(
        &start(&fixture.setup, &text),
        1,
        &["maps/cpu_services", &format!("this socklb (ABI {ABI_VERSION}) needs")],
    );
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3, "connects continue");
}
