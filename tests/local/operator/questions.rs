//! Requests over the daemon's socket: they do not block the daemon, and a hung daemon does not
//! block the requesters.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use lb_view::status::StatusDocument;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Signal;
use stage::daemon::failure;
use stage::fixture::Fixture;
use stage::{Cgroup, Daemon, Probe, Setup, Stage, eventually};

fn socket(setup: &Setup) -> PathBuf {
    setup.folder.join("run/socklb.sock")
}

/// Sends a request.
fn request(setup: &Setup, path: &str) -> UnixStream {
    let mut stream = UnixStream::connect(socket(setup)).expect("connect to the socket");
    stream.set_read_timeout(Some(6 * stage::patience())).expect("set the time limit");
    write!(stream, "GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n").expect("send the request");
    stream
}

/// The status code and the body of the answer.
fn answer(mut stream: UnixStream) -> (u16, String) {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read the answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("the answer has a head and a body");
    (head[9..12].parse().expect("the answer has a status code"), body.to_owned())
}

/// Clients with the maximum number of services. One backend of each service was replaced, so the
/// slots of a service are between the slots of all other services. The status of these clients
/// takes long to build. The event loop must continue during the build.
#[test]
fn building_a_large_status_does_not_block_the_loop() {
    const SERVICES: usize = 256;
    let stage = Stage::new();
    let setup = Setup::new(&stage, "a");
    let cgroups: Vec<Cgroup> = (0..4).map(|_| Cgroup::new()).collect();
    let text = |second: u8| {
        let mut text =
            String::from("[limits]\nschedule_entries = 524288\nslots = 1024\nflow_records = 1024\n");
        for (number, cgroup) in cgroups.iter().enumerate() {
            let cgroup = cgroup.relative().display().to_string();
            let _ = writeln!(text, "[[client]]\njob = \"job-{number}\"\ncgroup = \"{cgroup}\"");
        }
        for n in 0..SERVICES {
            let _ = writeln!(
                text,
                "[[service]]\nname = \"s{n}\"\naddress = \"10.96.0.{n}:80\"\n\
                 backends = {{ static = [\"127.1.{n}.1:80\", \"127.1.{n}.{second}:80\"] }}"
            );
        }
        text
    };
    let _daemon = Daemon::start(&setup, &text(2));
    stage::replace(&setup.folder.join("socklb.toml"), &text(3));
    let replaced = |status: &StatusDocument| {
        let services = status.clients.iter().flat_map(|client| &client.services);
        let backends = services.flat_map(|service| &service.backends);
        let slots: Vec<u32> = backends.map(|backend| backend.slot).collect();
        slots.len() == 2 * SERVICES * status.clients.len()
            && slots.iter().any(|slot| *slot as usize >= 2 * SERVICES)
    };
    eventually("one backend of each service was replaced", || setup.status(), replaced);
    // Other load on the host may delay some of the answers.
    let held_up: Vec<_> = (0..5).map(|_| held_up_by_a_status(&setup)).collect();
    assert!(
        held_up.iter().any(|(longest, took)| 2 * *longest < *took),
        "the loop was blocked for more than half of the time that the status took (longest answer, status): {held_up:?}"
    );
}

/// The longest response time of the event loop while a status was built, and the time to build the
/// status.
fn held_up_by_a_status(setup: &Setup) -> (Duration, Duration) {
    let status = request(setup, "/v1/status");
    let began = Instant::now();
    let took = std::thread::spawn(move || {
        assert_eq!(answer(status).0, 200);
        began.elapsed()
    });
    let mut longest = Duration::ZERO;
    while !took.is_finished() {
        // The event loop itself answers a request for an unknown client.
        let began = Instant::now();
        assert_eq!(answer(request(setup, "/v1/cover/nobody?cgroups=1")).0, 200);
        longest = longest.max(began.elapsed());
    }
    (longest, took.join().expect("the thread measures the status request"))
}

/// A cgroup remains covered while the daemon hangs, and commands respect their time limit. When the
/// queue of the daemon's socket is full, a blocking connect would never return.
#[test]
fn commands_that_do_not_need_the_daemon_succeed_while_it_hangs_also_with_a_full_queue() {
    let mut fixture = Fixture::without_daemon();
    // This limit belongs to the stage's network namespace.
    std::fs::write("/proc/sys/net/core/somaxconn", "8").expect("make queues short");
    fixture.start();
    let mut inside = fixture.probe();
    fixture.daemon().signal(Signal::STOP);
    let config = fixture.setup.folder.join("socklb.toml");
    let config = config.to_str().expect("the path is UTF-8");
    let check = |inside: &mut Probe, why: &str| {
        let mut exec = fixture.setup.socklb(&["exec", "web", "--timeout", "8", "--"]);
        let exec = stage::daemon::finish(exec.arg(stage::program("socklb")).arg("--version"));
        assert_eq!(failure(&exec), (Some(0), String::new()));
        assert_eq!(inside.socklb(&fixture.setup, &["wait", "web", "--timeout", "8"]), 0);
        // The test itself is in another cgroup.
        let begun = Instant::now();
        let (code, text) = failure(&fixture.setup.run(&["wait", "web", "--timeout", "1"]));
        assert!(code == Some(1) && text.contains("within 1 s") && text.contains(why), "{text}");
        assert!(
            begun.elapsed() < stage::patience(),
            "the time limit also applies to the search for the reason: {:?}",
            begun.elapsed()
        );
        let status = fixture.setup.run(&["status"]);
        let text = String::from_utf8_lossy(&status.stdout).into_owned();
        assert!(text.contains("service users") && text.contains("does not answer"), "{text}");
        assert_eq!(status.status.code(), Some(3), "{text}");
        let doctor = fixture.setup.run(&["doctor", "--config", config]);
        let text = String::from_utf8_lossy(&doctor.stdout).into_owned();
        assert!(text.contains("does not answer") && text.contains("attachment"), "{text}");
        assert_eq!(doctor.status.code(), Some(3), "{text}");
        let explain = fixture.setup.run(&["explain", "users", "--config", config]);
        let (code, text) = failure(&explain);
        assert!(code == Some(0) && text.contains("does not answer"), "{text}");
        let text = String::from_utf8_lossy(&explain.stdout).into_owned();
        assert!(text.contains("from the configuration"), "{text}");
    };
    check(&mut inside, "does not answer");
    let path = SocketAddrUnix::new(socket(&fixture.setup)).expect("the path fits");
    let mut queue = Vec::new();
    let enter = || {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .expect("open a socket");
        let entered = rustix::net::connect(&socket, &path);
        queue.push(socket);
        entered
    };
    let full = eventually("the queue is full", enter, |entered| *entered == Err(Errno::AGAIN));
    assert_eq!(full, Err(Errno::AGAIN));
    check(&mut inside, "Resource temporarily unavailable");
    let (code, text) = failure(&fixture.setup.run(&["run", "--config", config]));
    assert!(
        code == Some(1) && text.contains("another socklb process answers on this socket"),
        "exit code {code:?}: {text}"
    );
    drop(queue);
    fixture.daemon().signal(Signal::CONT);
    eventually("the daemon answers again", || fixture.setup.status(), |status| status.daemon.is_some());
}
