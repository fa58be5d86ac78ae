//! Tests in which a resource runs out: descriptors, memory or inotify instances. A daemon reports
//! this when it starts, runs or applies a change, and it can still stop. Connects are not affected.
//! When the resource is available again, everything continues without an operator.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};

use rustix::process::{Resource, Rlimit, Signal, setrlimit};
use stage::fixture::{Fixture, SERVICE};
use stage::sys::link_ids;
use stage::{Cgroup, Daemon, Probe, eventually, within};

/// A process that connects without pause.
fn busy(fixture: &Fixture) -> Probe {
    let mut probe = fixture.probe();
    probe.start_dialling(SERVICE);
    probe
}

/// Stops dialling, and asserts that all connects reached a backend.
#[track_caller]
fn all_reached(mut probe: Probe) {
    let counts = probe.stop_dialling();
    assert!(!counts.is_empty() && counts.keys().all(|name| name.starts_with('b')), "{counts:?}");
}

/// The exit code and the output of `status`.
fn status(fixture: &Fixture) -> (Option<i32>, String) {
    let output = fixture.setup.run(&["status"]);
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

fn addresses(fixture: &Fixture) -> Vec<String> {
    let backends = fixture.setup.backends("web", "users");
    let used = backends.iter().filter(|backend| backend.share_wanted > 0.0);
    let mut addresses: Vec<String> = used.map(|backend| backend.address.to_string()).collect();
    addresses.sort();
    addresses
}

/// Adds a client to the configuration, and signals the daemon to reload.
fn add_client(fixture: &Fixture, cgroup: &Cgroup) {
    let path = fixture.setup.folder.join("socklb.toml");
    let text = std::fs::read_to_string(&path).expect("read it");
    let client = format!("[[client]]\njob = \"second\"\ncgroup = \"{}\"\n", cgroup.relative().display());
    stage::replace(&path, &(client + &text));
    fixture.daemon().signal(Signal::HUP);
}

#[test]
fn without_descriptors_changes_wait_and_the_daemon_stops_cleanly() {
    let mut fixture = Fixture::new();
    let probe = busy(&fixture);
    let links = link_ids(&fixture.setup.pins_of("web"));
    let second = Cgroup::new();
    fixture.daemon().leave_descriptors(Some(0));
    fixture.write_endpoints(&[("127.0.0.1:8002", ""), ("127.0.0.1:8003", "")]);
    add_client(&fixture, &second);
    eventually("the daemon reports a fault", || status(&fixture), |(code, _)| *code == Some(3));
    fixture.daemon().leave_descriptors(None);
    let wanted = ["127.0.0.1:8002", "127.0.0.1:8003"];
    eventually("the daemon applies the list by itself", || addresses(&fixture), |found| *found == wanted);
    eventually(
        "the daemon adds the client by itself",
        || status(&fixture),
        |(code, text)| *code == Some(0) && text.contains("client second"),
    );
    assert_eq!(Probe::start(&second).dial_many(SERVICE, 20).len(), 2);
    fixture.daemon().leave_descriptors(Some(0));
    fixture.stop();
    fixture.start();
    eventually("status reports no fault", || status(&fixture), |(code, _)| *code == Some(0));
    assert_eq!(link_ids(&fixture.setup.pins_of("web")), links);
    all_reached(probe);
    eventually("every flow has ended", || fixture.setup.active(), |active| *active == 0);
}

/// Whether a daemon has ended because of a failed allocation. Rust aborts a program if an
/// allocation fails; the daemon that is started next continues the work with the pinned maps.
fn is_out_of_memory(ending: ExitStatus, log: &str) -> bool {
    let words = ["memory allocation of ", "Cannot allocate memory", "Resource temporarily unavailable"];
    (ending.signal() == Some(Signal::ABORT.as_raw()) || ending.code() == Some(1))
        && words.iter().any(|words| log.contains(words))
}

fn start_again_after_want_of_memory(fixture: &mut Fixture) {
    let mut daemon = fixture.daemon.take().expect("a daemon runs");
    match daemon.ending() {
        None => fixture.daemon = Some(daemon),
        Some(ending) => {
            assert!(is_out_of_memory(ending, &daemon.log()), "{ending}\n{}", daemon.log());
            fixture.start();
        }
    }
}

#[test]
fn connects_succeed_while_the_daemon_lacks_memory() {
    let mut fixture = Fixture::new();
    let mut probe = busy(&fixture);
    let links = link_ids(&fixture.setup.pins_of("web"));
    for free in [0, 64 << 10, 1 << 20, 16 << 20] {
        let second = Cgroup::new();
        let before = std::fs::read_to_string(fixture.setup.folder.join("socklb.toml")).expect("read it");
        fixture.daemon().leave_memory(Some(free));
        fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", "")]);
        add_client(&fixture, &second);
        let look = || (fixture.daemon.as_mut().expect("a daemon runs").ending().is_some(), status(&fixture));
        // The remaining memory may suffice for the change, too.
        eventually("the daemon reports a fault or ends", look, |(ended, (code, text))| {
            *ended || *code == Some(3) || *code == Some(0) && text.contains("client second")
        });
        fixture.daemon().leave_memory(None);
        // The daemon may also have ended while it applied the change. A daemon retries a failed
        // start of a client every ten seconds.
        let look = || {
            start_again_after_want_of_memory(&mut fixture);
            status(&fixture)
        };
        let well = within(3 * stage::patience(), look, |(code, text)| {
            *code == Some(0) && text.contains("client second")
        });
        assert!(well.is_ok(), "{well:?}\n{}", fixture.daemon().log());
        stage::replace(&fixture.setup.folder.join("socklb.toml"), &before);
        fixture.daemon().signal(Signal::HUP);
        eventually(
            "the client is removed",
            || status(&fixture),
            |(code, text)| *code == Some(0) && !text.contains("client second"),
        );
    }
    assert_eq!(link_ids(&fixture.setup.pins_of("web")), links);
    let counts = probe.stop_dialling();
    assert!(counts.keys().all(|name| name.starts_with('b')), "{counts:?}");
}

/// Limits a resource of a command.
fn limit(command: &mut Command, resource: Resource, amount: u64) {
    let limit = Rlimit { current: Some(amount), maximum: Some(amount) };
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(move || Ok(setrlimit(resource, limit)?)) };
}

/// Starts a daemon with this amount of a resource, while programs are attached. Returns whether the
/// daemon works. If it does not, it must end with a message that contains the missing resource.
#[track_caller]
fn starts_or_reports(fixture: &Fixture, resource: Resource, amount: u64, words: &[&str]) -> bool {
    let before = std::fs::read_to_string(fixture.setup.folder.join("log")).map_or(0, |log| log.len());
    let mut daemon = Daemon::spawn_with(&fixture.setup, |command| {
        limit(command, resource, amount);
        // If an allocation fails while the standard library writes a backtrace, the library begins
        // another backtrace, and waits forever for its own lock.
        command.env_remove("RUST_BACKTRACE");
    });
    let socket = fixture.setup.folder.join("run/socklb.sock");
    let mut look = || (daemon.ending(), std::os::unix::net::UnixStream::connect(&socket).is_ok());
    let (ending, _) =
        eventually("the daemon runs or ends", &mut look, |(ending, answers)| ending.is_some() || *answers);
    let code = match ending {
        Some(ending) => {
            assert!(!ending.success(), "the start must fail with {amount} of {resource:?}: {ending}");
            ending.code()
        }
        // The daemon may still fail after it has answered.
        None => daemon.stop(),
    };
    if code == Some(0) {
        return true;
    }
    let log = stage::daemon::read(&fixture.setup.folder.join("log")).split_off(before);
    // The dynamic loader and Rust's start-up code report a lack of memory with other texts.
    assert!(!log.trim().is_empty(), "the log is empty with {amount} of {resource:?}: {code:?}");
    assert!(
        words.iter().any(|word| log.contains(word)) || code == Some(127),
        "the log has no error for {amount} of {resource:?}: {code:?}\n{log}"
    );
    false
}

#[test]
fn a_start_with_too_few_descriptors_or_too_little_memory_reports_it_and_changes_nothing() {
    let mut fixture = Fixture::new();
    let probe = busy(&fixture);
    fixture.stop();
    let links = link_ids(&fixture.setup.pins_of("web"));
    // If the kernel refuses a program, it does not always report whether memory or descriptors are
    // missing. Then the daemon names both.
    let words = ["open files", "out of memory or file descriptors"];
    let amounts = (6..64).step_by(3).chain([96, 128, 256, 1024]);
    let ran: Vec<u64> =
        amounts.filter(|amount| starts_or_reports(&fixture, Resource::Nofile, *amount, &words)).collect();
    assert!(ran.contains(&1024), "{ran:?}");
    assert_eq!(link_ids(&fixture.setup.pins_of("web")), links);
    // If the memory is too small for `socklb --version`, the kernel does not even start the
    // program.
    let amounts: Vec<u64> = (1..=16).map(|number| (number * 12) << 20).collect();
    let starts = |amount: &&u64| {
        let mut command = fixture.setup.socklb(&["--version"]);
        limit(&mut command, Resource::As, **amount);
        stage::daemon::finish(&mut command).status.success()
    };
    let enough: Vec<u64> = amounts.iter().skip_while(|amount| !starts(amount)).copied().collect();
    assert!(!enough.is_empty(), "{amounts:?}");
    for amount in enough {
        starts_or_reports(&fixture, Resource::As, amount, &["emory", "temporarily unavailable"]);
    }
    assert_eq!(link_ids(&fixture.setup.pins_of("web")), links);
    fixture.start();
    eventually("status reports no fault", || status(&fixture), |(code, _)| *code == Some(0));
    all_reached(probe);
}

/// Without inotify watches, the daemon checks files and cgroups once per second.
#[test]
fn a_daemon_without_inotify_polls_once_per_second() {
    let fixture = Fixture::without_daemon();
    let daemon = Daemon::spawn_with(&fixture.setup, |command| {
        stage::daemon::refuse(command, libc::SYS_inotify_init1, libc::EMFILE);
    });
    eventually(
        "status reports no fault",
        || (status(&fixture), daemon.log()),
        |((code, _), _)| *code == Some(0),
    );
    assert!(daemon.log().contains("cannot watch directories (inotify)"), "{}", daemon.log());
    fixture.write_endpoints(&[("127.0.0.1:8002", "")]);
    eventually("the daemon applies the list", || addresses(&fixture), |found| *found == ["127.0.0.1:8002"]);
    fixture.cgroup.remove();
    fixture.cgroup.create();
    let attached = || fixture.setup.client().cgroup_id;
    eventually("the new cgroup is attached", attached, |id| *id == Some(fixture.cgroup.id()));
    assert_eq!(Probe::start(&fixture.cgroup).dial(SERVICE).name, "b2");
    assert_eq!(daemon.stop(), Some(0));
}
