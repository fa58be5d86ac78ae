//! Lists from a real DNS server: BIND's named. The tests change its records by dynamic updates (RFC
//! 2136).
//!
//! Connects continue while the server is stopped, killed and emptied: none may fail.

use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use stage::daemon::{ChildGuard, signal};
use stage::fixture::SERVICE;
use stage::probe::die_with_us;
use stage::{Backend, Setup, amount, eventually};

use crate::client::Client;

/// The server's port, in the test's own network namespace.
const PORT: u16 = 5300;

const SRV: &str = "{ dns = \"_users._tcp.example.com\", allow = [\"127.0.0.0/8\"] }";

/// A DNS server, and a process in a balanced cgroup.
struct Scene {
    // The server is dropped first, because `client` removes the folder with the server's files.
    named: Option<ChildGuard>,
    client: Client,
}

impl Scene {
    /// A server with the SRV records of three backends, and no daemon yet. `backends` is the key of
    /// the service.
    fn new(backends: &str) -> Self {
        let dns = format!("[dns]\nservers = [\"127.0.0.1:{PORT}\"]\nmin_ttl = \"1s\"\nmax_ttl = \"1s\"\n");
        let client = Client::new(backends, &dns);
        client.setup.write("named.conf", &named_conf(&client.setup));
        client.setup.write("example.com.zone", &zone());
        let mut scene = Self { named: None, client };
        scene.start_named();
        scene
    }

    /// Starts the server; its zone is the same as when the server ended.
    fn start_named(&mut self) {
        let folder = &self.client.setup.folder;
        let log =
            File::options().create(true).append(true).open(folder.join("named.log")).expect("open the log");
        let mut command = Command::new("/usr/sbin/named");
        command.args(["-g", "-n", "1", "-c"]).arg(folder.join("named.conf")).current_dir(folder);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        die_with_us(&mut command);
        self.named =
            Some(ChildGuard::of(command.spawn().expect("start named: `cargo xtask setup` installs it")));
        let is_up = || std::net::TcpStream::connect(("127.0.0.1", PORT)).is_ok();
        eventually("named listens", is_up, |is_up| *is_up);
    }

    fn signal_named(&self, what: Signal) {
        signal(self.named.as_ref().expect("named runs"), what);
    }

    /// Changes the server's records.
    fn update(&self, lines: &str) {
        let mut command = Command::new("/usr/bin/nsupdate");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        die_with_us(&mut command);
        let mut child = command.spawn().expect("run nsupdate");
        let text = format!("server 127.0.0.1 {PORT}\nzone example.com\n{lines}\nsend\n");
        child
            .stdin
            .take()
            .expect("standard input is a pipe")
            .write_all(text.as_bytes())
            .expect("write to nsupdate");
        let output = child.wait_with_output().expect("nsupdate ends");
        assert!(output.status.success(), "{lines}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.client.setup.folder.join("named.log")).unwrap_or_default();
            eprintln!("--- the log of named ---\n{log}");
        }
    }
}

fn named_conf(setup: &Setup) -> String {
    let folder = setup.folder.display();
    format!(
        "options {{ directory \"{folder}\"; listen-on port {PORT} {{ 127.0.0.1; }}; listen-on-v6 {{ none; }}; recursion no;\n\
         pid-file none; session-keyfile none; max-records-per-type 0; dnssec-validation no; }};\n\
         controls {{ }};\n\
         zone \"example.com\" {{ type primary; file \"{folder}/example.com.zone\"; allow-update {{ 127.0.0.1; }}; }};\n"
    )
}

fn zone() -> String {
    let mut zone = "$TTL 1\n@ SOA ns root 1 60 60 60 1\n@ NS ns\nns A 127.0.0.1\nb A 127.0.0.1\n".to_owned();
    for n in 1..=3 {
        zone += &format!("_users._tcp SRV 0 1 800{n} b\n");
    }
    zone
}

const DELETE: &str = "update delete _users._tcp.example.com SRV";

fn add(backend: u8) -> String {
    format!("update add _users._tcp.example.com 1 SRV 0 1 800{backend} b.example.com")
}

#[test]
fn srv_records_are_balanced_and_followed() {
    let mut scene = Scene::new(SRV);
    scene.client.start_daemon();
    scene.client.expect(&["b1", "b2", "b3"]);
    scene.client.backends.push(Backend::start("b4", "127.0.0.1:8004"));
    scene.update(&add(4));
    scene.client.expect(&["b1", "b2", "b3", "b4"]);
    scene.update(&format!("{DELETE} 0 1 8001 b.example.com"));
    scene.client.expect(&["b2", "b3", "b4"]);
    // This update removes more than half of the endpoints at once, so the daemon waits until the
    // server repeats the answer.
    scene.update(&format!("{DELETE}\n{}", add(1)));
    let pending = || scene.client.setup.source().remote.map_or(0, |remote| remote.pending_removals);
    eventually("the removal is pending", pending, |pending| *pending == 3);
    let faults = scene.client.setup.faults();
    assert!(faults.iter().any(|fault| fault.contains("removes 3 endpoints, more than half")), "{faults:?}");
    scene.client.expect(&["b1"]);
}

#[test]
fn no_connect_fails_while_the_server_is_emptied_or_sends_an_address_that_is_not_allowed() {
    let mut scene = Scene::new(SRV);
    scene.client.start_daemon();
    scene.client.expect(&["b1", "b2", "b3"]);
    scene.client.start_dialling();
    scene.update(DELETE);
    scene.client.expect_fault("empty answer (NXDOMAIN)");
    scene.update("update add _users._tcp.example.com 1 TXT \"no list\"");
    scene.client.expect_fault("empty answer (no SRV records)");
    scene.update(&[add(1), add(2), add(3)].join("\n"));
    scene.client.expect_fault("");
    scene.update("update add b.example.com 1 A 192.0.2.1\nupdate delete b.example.com A 127.0.0.1");
    scene.client.expect_fault("is not allowed");
    scene.update("update add b.example.com 1 A 127.0.0.1\nupdate delete b.example.com A 192.0.2.1");
    scene.client.expect_fault("");
    scene.client.expect_no_failure(&["b1", "b2", "b3"]);
}

#[test]
fn no_connect_fails_during_hundreds_of_changes_and_the_server_is_queried_once_a_second() {
    let mut scene = Scene::new(SRV);
    scene.client.start_daemon();
    scene.client.expect(&["b1", "b2", "b3"]);
    scene.client.start_dialling();
    let change = |n: u32| {
        let (weight, backend) = (n % 100 + 1, n % 3 + 1);
        format!("update add _users._tcp.example.com 1 SRV 0 {weight} 800{backend} b.example.com")
    };
    let (begun, before) = (Instant::now(), scene.client.lists());
    (0..300).for_each(|n| scene.update(&change(n)));
    let lists = u32::try_from(scene.client.lists() - before).expect("the number of lists fits into 32 bits");
    // The time between two queries varies by a tenth. One query may be in flight at the beginning.
    let most = begun.elapsed().div_duration_f64(Duration::from_millis(900)) + 2.0;
    eprintln!("{lists} lists, at most {most:.1}");
    assert!(f64::from(lists) <= most, "{lists} lists, more than {most:.1}");
    scene.update(&format!("{DELETE}\n{}\n{}", add(1), add(2)));
    scene.client.expect_endpoints(2);
    scene.client.expect_no_failure(&["b1", "b2", "b3"]);
}

/// Adds or deletes the addresses with these numbers.
fn change(what: &str, numbers: Range<u32>) -> String {
    let line = |n| format!("update {what} many.example.com 1 A 127.1.{}.{}", n / 250, n % 250 + 1);
    numbers.map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn no_connect_fails_while_a_name_gets_and_loses_a_thousand_addresses_and_its_server_fails() {
    let mut scene = Scene::new("{ dns = \"many.example.com\", port = 8009, allow = [\"127.0.0.0/8\"] }");
    let _all = Backend::start("all", "0.0.0.0:8009");
    scene.update(&change("add", 0..1));
    scene.client.start_daemon();
    scene.client.expect(&["all"]);
    scene.client.start_dialling();
    // An update has at most 64 KiB.
    let thousand = |scene: &Scene, what| {
        (0..4).for_each(|n| scene.update(&change(what, 250 * n + 1..250 * (n + 1) + 1)));
    };
    let expect_backends = |scene: &Scene, count| {
        let backends = || scene.client.setup.service().backends.len();
        eventually("the table", backends, |backends| u32::try_from(*backends) == Ok(count));
    };
    thousand(&scene, "add");
    expect_backends(&scene, 1001);
    // Each question has another answer.
    let changes = amount(25, 100);
    for n in 1..=changes {
        let lists = scene.client.lists();
        scene.update(&change("delete", n..n + 1));
        scene.client.refresh();
        scene.client.expect_more_lists(lists);
    }
    expect_backends(&scene, 1001 - changes);
    let in_force = |scene: &Scene| scene.client.run(&["source", "dump", "users"]);
    let before = in_force(&scene);
    scene.signal_named(Signal::STOP);
    scene.client.refresh();
    scene.client.expect_fault("127.0.0.1:5300: no answer within 5.0 s");
    assert_eq!(in_force(&scene), before);
    scene.signal_named(Signal::CONT);
    scene.client.expect_recovery();
    // The server is killed, and started at once.
    let killed = Instant::now();
    scene.named = None;
    scene.client.refresh();
    scene.client.expect_fault("127.0.0.1:5300: cannot connect: Connection refused");
    let outage = killed..Instant::now();
    scene.start_named();
    scene.client.expect_recovery_after(outage);
    assert_eq!(in_force(&scene), before);
    thousand(&scene, "delete");
    expect_backends(&scene, 1);
    scene.client.expect_no_failure(&["all"]);
}

#[test]
fn a_first_start_waits_for_the_server_and_a_later_one_does_not() {
    let mut scene = Scene::new(SRV);
    scene.named = None;
    scene.client.start_daemon();
    scene.client.expect_fault("no list so far");
    let counts = scene.client.probe.dial_many(SERVICE, 8);
    assert_eq!(counts.keys().collect::<Vec<_>>(), ["errno-113"]);
    scene.start_named();
    scene.client.expect(&["b1", "b2", "b3"]);
    let stored = scene.client.setup.folder.join("state/last-good/users.json");
    eventually("the list is stored", || stored.exists(), |exists| *exists);
    scene.client.daemon.take().expect("the daemon runs").stop();
    scene.named = None;
    scene.client.start_daemon();
    assert_eq!(scene.client.probe.dial_many(SERVICE, 64).into_keys().collect::<Vec<_>>(), ["b1", "b2", "b3"]);
    scene.client.expect_fault("no list so far");
}

#[test]
fn lists_can_be_checked_printed_and_refreshed() {
    let mut scene = Scene::new(SRV);
    let (code, text) = scene.client.run(&["source", "check"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.starts_with("users: dns _users._tcp.example.com (SRV): ok, 3 endpoints in "), "{text}");
    let (_, text) = scene.client.run(&["doctor"]);
    assert!(text.contains("users: dns _users._tcp.example.com (SRV): 3 endpoints in "), "{text}");
    scene.client.start_daemon();
    scene.client.expect(&["b1", "b2", "b3"]);
    let (code, dumped) = scene.client.run(&["source", "dump", "users"]);
    assert_eq!(code, Some(0), "{dumped}");
    // The printed list works as an endpoint file.
    scene.client.setup.write("dumped.json", &dumped);
    let config = scene.client.setup.folder.join("socklb.toml");
    let text = std::fs::read_to_string(&config).expect("read the configuration");
    std::fs::write(&config, text.replace(SRV, "{ file = \"dumped.json\" }")).expect("write");
    let (code, text) = scene.client.run(&["check"]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = scene.client.run(&["source", "refresh", "users"]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = scene.client.run(&["source", "refresh", "mail"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("no client here dials a service \"mail\""), "{text}");
    scene.named = None;
    std::fs::write(
        &config,
        std::fs::read_to_string(&config)
            .expect("read the configuration")
            .replace("{ file = \"dumped.json\" }", SRV),
    )
    .expect("write");
    let (code, text) = scene.client.run(&["source", "check"]);
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains("127.0.0.1:5300"), "{text}");
}

#[test]
fn no_connect_fails_while_host_names_in_a_file_get_other_addresses_or_stop_resolving() {
    let mut scene = Scene::new("{ file = \"users.json\" }");
    // A host name may not have a loopback address.
    for n in 1..=3 {
        let address = format!("10.77.0.{n}/32");
        let status = Command::new("ip").args(["address", "add", &address, "dev", "lo"]).status();
        assert!(status.expect("run ip").success(), "ip fails for {address}");
    }
    let backend = |n| Backend::start(&format!("h{n}"), &format!("10.77.0.{n}:8001"));
    let _named: Vec<Backend> = (1..=3).map(backend).collect();
    scene.update("update add h.example.com 1 A 10.77.0.1\nupdate add h.example.com 1 A 10.77.0.2");
    scene
        .client
        .setup
        .write("users.json", "[\"127.0.0.1:8003\", \"h.example.com:8001\", \"none.example.com:8001\"]");
    let (code, text) = scene.client.run(&["source", "check"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("ok, 3 endpoints in "), "{text}");
    assert!(text.contains("1 of 2 host names resolve: h.example.com: 10.77.0.1 10.77.0.2"), "{text}");
    assert!(text.contains("none.example.com for 0 s (NXDOMAIN; no address so far)"), "{text}");
    scene.client.start_daemon();
    scene.client.expect(&["b3", "h1", "h2"]);
    scene.client.expect_fault("none.example.com");
    scene.client.start_dialling();
    scene.update("update add h.example.com 1 A 10.77.0.3\nupdate delete h.example.com A 10.77.0.1");
    // Without this command, the name is queried again only after 30 s.
    let refreshed = |scene: &Scene| {
        let (code, text) = scene.client.run(&["source", "refresh", "users"]);
        assert_eq!(code, Some(0), "{text}");
    };
    refreshed(&scene);
    let dumped = || scene.client.run(&["source", "dump", "users"]).1;
    let is_new = |text: &String| text.contains("10.77.0.3:8001") && !text.contains("10.77.0.1:8001");
    eventually("the list has the new address", dumped, is_new);
    scene.named = None;
    refreshed(&scene);
    scene.client.expect_fault("h.example.com for");
    scene.client.expect_fault("its addresses remain in use");
    scene.start_named();
    refreshed(&scene);
    scene.client.expect_fault("1 of 2 host names do not resolve: none.example.com");
    scene.client.expect_no_failure(&["b3", "h1", "h2", "h3"]);
    scene.client.expect(&["b3", "h2", "h3"]);
}
