//! Harmful readers: readers that send a request and do not read, readers that do not finish their
//! request, and too many readers. Other readers still get their page. The daemon's memory does not
//! grow, and the daemon has enough descriptors for its own work.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;

use rustix::process::{Resource, Rlimit, Signal, setrlimit};
use stage::fixture::{Fixture, SERVICE};
use stage::{Daemon, eventually};

use crate::http::{self, Answer, OPEN_METRICS, TEXT};
use crate::page::{LISTEN, listening, with};

/// The maximum number of connections that a listener serves at the same time.
const CONNECTIONS: usize = 64;

/// Number of backends for a page of 10 MB, which exceeds every TCP buffer.
const MANY: usize = 1500;
/// Number of backends for a page that exceeds every buffer of a Unix socket.
const SOME: usize = 200;

/// A fixture with this many backends, and its daemon with a port for metrics.
fn with_backends(count: usize) -> (Fixture, Daemon) {
    let fixture = Fixture::without_daemon();
    let list: Vec<String> = (0..count).map(|n| format!("\"127.1.{}.{}:80\"", n / 250, n % 250 + 1)).collect();
    let text = stage::daemon::read(&fixture.setup.folder.join("socklb.toml"));
    let text = text.replace(
        r#"{ file = "users.toml" }"#,
        &format!("{{ static = [{}] }}\nsubset = \"all\"", list.join(", ")),
    );
    let daemon = Daemon::start(&fixture.setup, &format!("{text}[metrics]\nlisten = \"{LISTEN}\"\n"));
    (fixture, daemon)
}

/// Reads only the beginning of a page.
fn begins(mut stream: impl Read) {
    let mut begin = [0; 12];
    stream.read_exact(&mut begin).expect("the answer begins");
    assert_eq!(&begin, b"HTTP/1.0 200");
}

/// The answer to a reader that sends a request and reads.
#[track_caller]
fn scrape() -> Answer {
    let page = http::get(LISTEN, "/metrics", OPEN_METRICS);
    assert!(page.code == 200 && page.body.ends_with("# EOF\n"), "status {}: {}", page.code, page.head);
    page
}

/// Number of descriptors that a process has open.
fn files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).expect("list the daemon's descriptors").count()
}

/// The peak of a process's own memory, in bytes.
fn peak(pid: u32) -> u64 {
    let status = stage::daemon::read(Path::new(&format!("/proc/{pid}/status")));
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the status has VmHWM");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("the peak is a number") << 10
}

/// Waits for a reaction that follows a time limit of the daemon of about ten seconds.
#[track_caller]
fn until(what: &str, fact: impl FnMut() -> bool) {
    let time = 6 * stage::patience();
    assert!(stage::within(time, fact, |holds| *holds).is_ok(), "not within {time:?}: {what}");
}

/// Whether the daemon has ended the connection.
fn has_ended(stream: &mut (impl Read + Write)) -> bool {
    let mut rest = [0; 1 << 16];
    // The loop is bounded by the content of the buffers, which are small.
    loop {
        match stream.read(&mut rest) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != ErrorKind::WouldBlock,
        }
    }
}

#[test]
fn stalled_readers_do_not_delay_other_readers() {
    let (fixture, daemon) = with_backends(MANY);
    let socket = fixture.setup.folder.join("run/socklb.sock");
    // The maximum number of connections, on the socket and on the port. The test limits the port's
    // receive buffers, because they grow with data that is not read.
    let (mut stopped, mut far) = (Vec::new(), Vec::new());
    for _ in 0..CONNECTIONS {
        let mut stream = UnixStream::connect(&socket).expect("connect to the socket");
        http::request(&mut stream, "GET", "/metrics", TEXT);
        stopped.push(stream);
        let mut stream = TcpStream::connect(LISTEN).expect("connect to the port");
        rustix::net::sockopt::set_socket_recv_buffer_size(&stream, 2048).expect("read little at a time");
        http::request(&mut stream, "GET", "/metrics", TEXT);
        far.push(stream);
    }
    stopped.iter().for_each(begins);
    far.iter().for_each(begins);
    // All connections belong to readers that do not read.
    for _ in 0..5 {
        let page = scrape();
        let backends = page.body.lines().filter(|line| line.starts_with("socklb_flows_active{"));
        assert_eq!(backends.count(), MANY);
    }
    assert_eq!(fixture.setup.daemon().pid, daemon.pid(), "the daemon itself answers");
    assert!(peak(daemon.pid()) < 200 << 20, "peak memory: {} bytes", peak(daemon.pid()));
    // The daemon closes stopped connections even if no other reader waits.
    for mut stream in stopped {
        stream.set_nonblocking(true).expect("make the stream non-blocking");
        until("a reader that stopped is cut off", || has_ended(&mut stream));
    }
}

#[test]
fn a_truncated_page_is_shorter_than_announced() {
    let (fixture, daemon) = with_backends(SOME);
    let socket = fixture.setup.folder.join("run/socklb.sock");
    let mut stream = UnixStream::connect(socket).expect("connect to the socket");
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("send the request");
    let mut text = vec![0; 1 << 12];
    let read = stream.read(&mut text).expect("the answer begins");
    let head = String::from_utf8_lossy(&text[..read]).to_lowercase();
    let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
    let length: usize = length.and_then(|length| length.parse().ok()).unwrap_or_else(|| panic!("{head}"));
    let before = files(daemon.pid());
    until("the reader is cut off", || files(daemon.pid()) < before);
    let mut rest = Vec::new();
    // The connection ends or is reset before all announced bytes arrive.
    let _ = stream.read_to_end(&mut rest);
    assert!(read + rest.len() < length, "received {} bytes of {length}", read + rest.len());
}

#[test]
fn a_page_is_compressed_on_request() {
    let (fixture, _daemon) = with_backends(SOME);
    let plain = scrape().body;
    let mut stream = TcpStream::connect(LISTEN).expect("connect to the port");
    let head = "GET /metrics HTTP/1.0\r\nHost: localhost\r\nAccept-Encoding: deflate, gzip;q=0.8\r\n";
    write!(stream, "{head}Accept: {OPEN_METRICS}\r\n\r\n").expect("send the request");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("read the answer");
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").expect("the answer has a head") + 4;
    let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
    assert!(head.starts_with("http/1.0 200") && head.contains("content-encoding: gzip"), "{head}");
    let file = fixture.setup.folder.join("page.gz");
    std::fs::write(&file, &bytes[end..]).expect("store the page");
    // gzip is part of every Debian.
    let unpacked = std::process::Command::new("gzip").arg("-dc").arg(&file).output().expect("run gzip");
    let unpacked = String::from_utf8(unpacked.stdout).expect("text");
    assert_eq!(unpacked.lines().count(), plain.lines().count());
    assert!(unpacked.ends_with("# EOF\n"));
    let ratio = unpacked.len() / (bytes.len() - end);
    assert!(ratio >= 10, "{} bytes packed to {}", unpacked.len(), bytes.len() - end);
}

/// Requests with heads that never end: the daemon limits each of them in bytes and in time.
#[test]
fn unfinished_requests_take_little_memory_and_are_dropped() {
    let fixture = listening();
    let pid = fixture.daemon().pid();
    let before = peak(pid);
    let mut unfinished: Vec<TcpStream> = Vec::new();
    for _ in 0..1500 {
        let mut stream = TcpStream::connect(LISTEN).expect("connect to the port");
        stream.set_write_timeout(Some(stage::patience())).expect("set the time limit");
        // The daemon refuses a head that exceeds its limit before the whole head is written.
        let head = format!("GET /metrics HTTP/1.1\r\nx: {}", "x".repeat(390_000));
        let _ = stream.write_all(head.as_bytes());
        unfinished.push(stream);
    }
    scrape();
    // 64 connections with heads of up to 8 KiB need half a megabyte.
    assert!(peak(pid) < before + (32 << 20), "peak memory: {before} bytes before, {} bytes after", peak(pid));
    // The daemon drops an unfinished request after a time limit.
    let mut slow = TcpStream::connect(LISTEN).expect("connect to the port");
    write!(slow, "GET /metrics HTTP/1.1\r\n").expect("send the first line of a request");
    slow.set_nonblocking(true).expect("make the stream non-blocking");
    until("the unfinished request is dropped", || has_ended(&mut slow));
}

#[test]
fn a_request_head_beyond_the_limit_is_refused() {
    let fixture = listening();
    let answer = |bytes: usize| {
        let line = "GET /metrics HTTP/1.0\r\nx: ";
        let mut stream = TcpStream::connect(LISTEN).expect("connect to the port");
        let head = format!("{line}{}\r\n\r\n", "x".repeat(bytes - line.len() - 4));
        stream.write_all(head.as_bytes()).expect("send the request");
        let mut begin = [0; 12];
        stream.read_exact(&mut begin).expect("read the start of the answer");
        String::from_utf8_lossy(&begin).into_owned()
    };
    assert_eq!(answer(8191), "HTTP/1.0 200");
    assert!(answer(8193).ends_with(" 431"), "{}", answer(8193));
    let mut stream = TcpStream::connect(LISTEN).expect("connect to the port");
    write!(stream, "GET /metrics HTTP/1.0\r\ncontent-length: 1\r\n\r\nx").expect("send the request");
    let mut begin = [0; 12];
    stream.read_exact(&mut begin).expect("read the start of the answer");
    assert_eq!(&begin, b"HTTP/1.0 413");
    drop(fixture);
}

/// The maximum number of descriptors of a daemon with one client, from docs/reference/limits.md.
fn needed() -> u64 {
    let limits = include_str!("../../docs/reference/limits.md");
    let row = "| together, with one client | ";
    let number = limits.lines().find_map(|line| line.strip_prefix(row)?.strip_suffix(" |"));
    number.expect("the page has the row").replace(',', "").parse().expect("the text is a number")
}

/// If all connections are in use, the daemon closes a silent one to make room for a connection with
/// a request.
#[test]
fn many_silent_connections_exclude_no_reader_and_exhaust_no_descriptors() {
    let mut fixture = Fixture::without_daemon();
    with(&fixture, &format!("[metrics]\nlisten = \"{LISTEN}\"\n"));
    let needed = needed();
    let few = |command: &mut std::process::Command| {
        // SAFETY: the closure makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                let limit = Some(needed);
                Ok(setrlimit(Resource::Nofile, Rlimit { current: Some(64), maximum: limit })?)
            });
        }
    };
    fixture.daemon = Some(Daemon::spawn_with(&fixture.setup, few));
    let socket = fixture.setup.folder.join("run/socklb.sock");
    eventually("the daemon answers", || UnixStream::connect(&socket).is_ok(), |answers| *answers);
    let pid = fixture.daemon().pid();
    let links = || -> BTreeSet<_> {
        let links = std::fs::read_dir(fixture.setup.pins_of("web").join("links")).expect("links");
        links.map(|link| link.expect("read a directory entry").file_name()).collect()
    };
    let before = links();
    let mut silent: Vec<TcpStream> = Vec::new();
    let mut most = 0;
    for round in 0..20 {
        silent.extend((0..30).map(|_| TcpStream::connect(LISTEN).expect("connect to the port")));
        scrape();
        most = most.max(files(pid));
        // The daemon's own work continues: it attaches a cgroup that was created again, and applies
        // a configuration.
        if round % 10 == 5 {
            fixture.cgroup.remove();
            fixture.cgroup.create();
            fixture.daemon().signal(Signal::HUP);
            eventually(
                "status reports no fault",
                || fixture.setup.run(&["status"]).status.code(),
                |code| *code == Some(0),
            );
        }
    }
    assert_eq!(fixture.probe().dial_many(SERVICE, 9).len(), 3);
    assert_eq!(links().len(), before.len(), "no link was lost");
    assert!(most as u64 <= needed, "descriptors open at once: {most}");
    assert!(!fixture.daemon().log().contains("Too many open files"), "{}", fixture.daemon().log());
}
