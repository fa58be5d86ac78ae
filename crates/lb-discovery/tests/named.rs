//! Tests of the DNS provider with a real BIND 9. `nsupdate` changes the server's records. Each test
//! starts its own server on the loopback interface.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lb_config::discovery::{DnsOrigin, DnsSettings, DnsTransport, Origin};
use lb_discovery::dns::{QueryLimits, Resolvers};
use lb_discovery::{
    DiscoveredList, DiscoveryRequest, Failure, Finding, Latest, ProviderContext, Running, spawn,
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

const NAMED: &str = "/usr/sbin/named";

/// The time limit of each wait in a test.
const DEADLINE: Duration = Duration::from_secs(60);

/// Returns whether the server is installed. In CI, a missing server is a failure, because only
/// failures are noticed there.
fn is_installed() -> bool {
    let is_installed = Path::new(NAMED).exists();
    if !is_installed {
        assert!(std::env::var_os("CI").is_none(), "{NAMED} is missing: `cargo xtask setup` installs it");
        println!("skipped: {NAMED} is missing; `cargo xtask setup` installs it");
    }
    is_installed
}

/// Ports for servers. They are below the range of ephemeral ports, so that a server can be
/// restarted at its port. Different processes begin at different ports.
fn ports() -> impl Iterator<Item = u16> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = || std::process::id() * 16 + NEXT.fetch_add(1, Ordering::Relaxed);
    std::iter::repeat_with(move || 10_000 + u16::try_from(next() % 20_000).expect("it is below 20,000"))
}

/// A running server. The server is killed when this value is dropped, or when this process is
/// killed.
struct Named {
    folder: TempDir,
    address: SocketAddr,
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Named {
    /// Starts a primary server for `example.com` with at most `records_per_type` records of each
    /// type (0: any number). The server is also a secondary server for `broken.example`, which has
    /// no primary.
    async fn start(records_per_type: u32) -> Self {
        for port in ports() {
            if let Some(named) = Self::start_at(port, records_per_type).await {
                return named;
            }
        }
        unreachable!("there are ports without end")
    }

    /// Returns `None` if another process listens at the port.
    async fn start_at(port: u16, records_per_type: u32) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a folder can be created");
        // AppArmor permits the installed program to read only its own folders, so the test runs a
        // copy. `cp` writes the copy: if this process wrote it, a child of another test could
        // inherit the open descriptor, and the kernel could not execute the copy (ETXTBSY).
        let copied = Command::new("cp").arg(NAMED).arg(folder.path().join("named")).status().await;
        assert!(copied.expect("cp can be started").success(), "cp cannot copy named");
        let config = format!(
            "options {{
               listen-on port {port} {{ 127.0.0.1; }};
               listen-on-v6 {{ none; }};
               recursion no;
               notify no;
               dnssec-validation no;
               pid-file \"named.pid\";
               session-keyfile \"session.key\";
             }};
             controls {{ }};
             zone \"example.com\" {{
               type primary;
               file \"example.com\";
               allow-update {{ 127.0.0.0/8; }};
               max-records-per-type {records_per_type};
             }};
             zone \"broken.example\" {{ type secondary; primaries port 1 {{ 127.0.0.1; }}; }};"
        );
        std::fs::write(folder.path().join("named.conf"), config).expect("the file can be written");
        let zone = "$TTL 60\n@ SOA ns root 1 3600 600 86400 60\n@ NS ns\nns A 127.0.0.1\n";
        std::fs::write(folder.path().join("example.com"), zone).expect("the file can be written");
        let log = Arc::default();
        let child = run(folder.path(), &log).await;
        let named = Self { folder, address: (Ipv4Addr::LOCALHOST, port).into(), child, log };
        let listens = named.text().contains("listening on IPv4 interface");
        let is_taken = named.text().contains("interface ignored");
        (listens && !is_taken).then_some(named)
    }

    /// The log of the server.
    fn text(&self) -> MutexGuard<'_, String> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the server again, after its end.
    async fn start_again(&mut self) {
        self.child = run(self.folder.path(), &self.log).await;
    }

    fn signal(&self, signal: Signal) {
        let pid =
            self.child.id().and_then(|pid| Pid::from_raw(pid.try_into().ok()?)).expect("named is running");
        kill_process(pid, signal).expect("the signal can be sent");
    }

    async fn kill(&mut self) {
        self.child.kill().await.expect("named can be killed");
    }

    /// Changes records. Each line is an update such as `add users 60 A 10.0.0.1`, with a name
    /// relative to `example.com`.
    async fn update(&self, lines: &str) {
        let mut text = format!("server {} {}\n", self.address.ip(), self.address.port());
        for (number, line) in lines.lines().enumerate() {
            // A message has at most 64 KiB.
            if number % 500 == 499 {
                text += "send\n";
            }
            let mut words = line.splitn(3, ' ');
            let [what, name, rest] = [(); 3].map(|()| words.next().unwrap_or_default());
            text += &format!("update {what} {name}.example.com. {rest}\n");
        }
        text += "send\n";
        let mut command = Command::new("nsupdate");
        command.arg("-v").stdin(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("nsupdate can be started");
        child
            .stdin
            .take()
            .expect("the input is a pipe")
            .write_all(text.as_bytes())
            .await
            .expect("nsupdate reads its input");
        let status = timeout(DEADLINE, child.wait())
            .await
            .expect("nsupdate ends in time")
            .expect("nsupdate has a status");
        assert!(status.success(), "nsupdate failed: {lines:.200}");
    }

    /// Starts a provider, which queries five times a second.
    fn provider(&self, name: &str, port: Option<u16>, transport: DnsTransport) -> Running {
        let (min_ttl, max_ttl) = (Duration::from_millis(200), Duration::from_millis(200));
        let settings = DnsSettings { servers: vec![self.address], transport, min_ttl, max_ttl };
        let origin = Origin::Dns(DnsOrigin { name: name.to_owned(), port, settings });
        // The rate of queries is not limited, so that the addresses of 1,000 targets take about a
        // second.
        let limits = QueryLimits { whole: Duration::from_secs(1), per_second: 1_000_000 };
        let shared = Arc::new(ProviderContext { dns: Resolvers::new(Path::new("/nonexistent"), limits) });
        spawn(DiscoveryRequest::List { origin, is_ipv6: false }, &shared, Arc::new(Notify::new()))
    }

    fn srv(&self, transport: DnsTransport) -> Running {
        self.provider("_users._tcp.example.com", None, transport)
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("--- named ---\n{}", self.text());
        }
    }
}

/// Runs the server in its folder, and waits until it answers.
async fn run(folder: &Path, log: &Arc<Mutex<String>>) -> Child {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "./named", "-g", "-n", "1", "-c", "named.conf"]);
    command.current_dir(folder).stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().expect("named can be started");
    let mut lines = BufReader::new(child.stderr.take().expect("the log is a pipe")).lines();
    let log = Arc::clone(log);
    let (ready, is_ready) = oneshot::channel();
    tokio::spawn(async move {
        let mut ready = Some(ready);
        // The log is read until its end, so that the server never blocks on a full pipe.
        while let Ok(Some(line)) = lines.next_line().await {
            if !line.contains("updating zone") {
                let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                log.push_str(&format!("{line}\n"));
            }
            if let Some(ready) = ready.take_if(|_| line.ends_with(" running")) {
                let _ = ready.send(());
            }
        }
    });
    timeout(DEADLINE, is_ready).await.expect("named starts in time").expect("named is ready");
    child
}

/// Waits until `holds` accepts the provider's latest finding, and returns the finding. After
/// [`DEADLINE`], panics with `claim`.
async fn until(running: &mut Running, claim: &str, holds: impl Fn(&Finding) -> bool) -> Finding {
    let is_so = |latest: &Latest| latest.finding.as_ref().is_some_and(&holds);
    let found = timeout(DEADLINE, running.latest.wait_for(is_so)).await.ok();
    let found = found.and_then(|latest| latest.expect("the provider is running").finding.clone());
    found.unwrap_or_else(|| panic!("{claim}: {:?}", running.latest.borrow().finding))
}

async fn until_list_of(running: &mut Running, count: usize) -> DiscoveredList {
    let has = |finding: &Finding| matches!(finding, Finding::List(list) if list.endpoints == count);
    match until(running, &format!("a list of {count}"), has).await {
        Finding::List(list) => list,
        other => unreachable!("{other:?}"),
    }
}

async fn until_unreachable(running: &mut Running, why: &str) {
    let is_so = |finding: &Finding| matches!(finding, Finding::Failed(Failure::Unreachable(text)) if text.contains(why));
    until(running, why, is_so).await;
}

fn addresses(list: &DiscoveredList) -> BTreeSet<String> {
    let groups: serde_json::Value = serde_json::from_slice(&list.text).expect("the list is JSON");
    let target =
        |group: &serde_json::Value| group["targets"][0].as_str().expect("a target exists").to_owned();
    groups.as_array().expect("the list is an array of groups").iter().map(target).collect()
}

/// Updates that create a service with three endpoints.
fn three() -> String {
    let of = |n| format!("add _users._tcp 60 SRV 0 {n} 8080 b{n}.example.com.\nadd b{n} 60 A 10.0.0.{n}\n");
    (1..=3).map(of).collect()
}

#[tokio::test]
async fn updates_of_records_change_the_list_and_their_end_is_an_empty_answer() {
    if !is_installed() {
        return;
    }
    let named = Named::start(100).await;
    let mut users = named.srv(DnsTransport::Tcp);
    until(&mut users, "NXDOMAIN", |finding| *finding == Finding::Empty { why: "NXDOMAIN".to_owned() }).await;
    named.update(&three()).await;
    let list = until_list_of(&mut users, 3).await;
    let expected = ["10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080"].map(str::to_owned);
    assert_eq!((addresses(&list), list.notes.len()), (BTreeSet::from(expected), 0));

    named.update("add _users._tcp 60 SRV 0 1 8080 b4.example.com.\nadd b4 60 A 10.0.0.4").await;
    until_list_of(&mut users, 4).await;

    named.update("delete b4\nadd _users._tcp 60 SRV 1 1 8080 b5.example.com.").await;
    let has_notes = |finding: &Finding| matches!(finding, Finding::List(list) if list.notes.len() == 2);
    until(&mut users, "notes on priorities and a lost address", has_notes).await;
    let list = until_list_of(&mut users, 4).await;
    assert!(list.notes[1].contains("b4.example.com (NXDOMAIN)"), "{:?}", list.notes);

    named.update("delete _users._tcp").await;
    until(&mut users, "empty", |finding| matches!(finding, Finding::Empty { .. })).await;
}

#[tokio::test]
async fn a_thousand_endpoints_are_one_list() {
    if !is_installed() {
        return;
    }
    let named = Named::start(0).await;
    let address = |n: usize| format!("10.0.{}.{}", n / 250, n % 250);
    let lines = |line: &dyn Fn(usize) -> String| (1..=1000).map(line).collect::<Vec<_>>().join("\n");
    named.update(&lines(&|n| format!("add users 60 A {}", address(n)))).await;
    for transport in [DnsTransport::Tcp, DnsTransport::Udp] {
        let mut users = named.provider("users.example.com", Some(8080), transport);
        let list = until_list_of(&mut users, 1000).await;
        assert!(
            addresses(&list).contains(&format!("{}:8080", address(777))),
            "an address is missing over {transport:?}"
        );
    }
    named.update(&lines(&|n| format!("add b{n} 60 A {}", address(n)))).await;
    named.update(&lines(&|n| format!("add _users._tcp 60 SRV 0 1 8080 b{n}.example.com."))).await;
    let list = until_list_of(&mut named.srv(DnsTransport::Tcp), 1000).await;
    assert!(addresses(&list).contains(&format!("{}:8080", address(777))) && list.notes.is_empty());
}

#[tokio::test]
async fn an_answer_that_does_not_fit_into_a_message_is_refused() {
    if !is_installed() {
        return;
    }
    let named = Named::start(0).await;
    // The names of targets are not compressed. The server stores as much record data as fits into a
    // message. In the message, each record also has an owner name.
    let target = |n: usize| format!("a-long-name-for-one-of-the-users-{n:03}.example.com.");
    let records = (0..999).map(|n| format!("add _users._tcp 60 SRV 0 1 8080 {}\n", target(n)));
    named.update(&records.collect::<String>()).await;
    for transport in [DnsTransport::Tcp, DnsTransport::Udp] {
        let is_refused = |finding: &Finding| matches!(finding, Finding::Failed(Failure::Malformed(_)));
        let finding = until(&mut named.srv(transport), "refused", is_refused).await;
        let Finding::Failed(failure) = finding else { unreachable!("`until` returns only refusals") };
        assert!(failure.to_string().ends_with(": the answer is truncated"), "{failure}");
    }
}

#[tokio::test]
async fn a_zone_that_is_not_loaded_is_a_failure_and_a_foreign_name_is_refused() {
    if !is_installed() {
        return;
    }
    let named = Named::start(100).await;
    let mut broken = named.provider("users.broken.example", Some(80), DnsTransport::Tcp);
    until_unreachable(&mut broken, "the server answers SERVFAIL").await;
    let mut foreign = named.provider("users.example.org", Some(80), DnsTransport::Udp);
    let is_refused = |finding: &Finding| matches!(finding, Finding::Failed(Failure::Refused(_)));
    until(&mut foreign, "REFUSED", is_refused).await;
}

#[tokio::test]
async fn a_server_that_is_stopped_or_killed_is_a_failure_until_it_answers_again() {
    if !is_installed() {
        return;
    }
    let mut named = Named::start(100).await;
    named.update(&three()).await;
    let mut tcp = named.srv(DnsTransport::Tcp);
    let mut udp = named.provider("b1.example.com", Some(80), DnsTransport::Udp);
    let list = until_list_of(&mut tcp, 3).await;
    until_list_of(&mut udp, 1).await;

    named.signal(Signal::STOP);
    until_unreachable(&mut tcp, "no answer within 1.0 s").await;
    until_unreachable(&mut udp, "no answer within 1.0 s").await;
    named.signal(Signal::CONT);
    assert_eq!(until_list_of(&mut tcp, 3).await, list);
    until_list_of(&mut udp, 1).await;

    named.kill().await;
    until_unreachable(&mut tcp, "Connection refused").await;
    // An ICMP error for an earlier datagram does not wake the reader of the socket.
    until_unreachable(&mut udp, "no answer within 1.0 s").await;
    named.start_again().await;
    // The restarted server reads its journal, which contains the updates.
    assert_eq!(until_list_of(&mut tcp, 3).await, list);
    until_list_of(&mut udp, 1).await;
}
