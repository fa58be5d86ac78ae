//! Tests of the provider with a real Consul 1.8.7, which `cargo xtask setup` fetches. Every test
//! starts its own server on the loopback interface, with data in memory, and kills the server at
//! the end. Without Consul, the tests are skipped, and print the reason.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lb_config::discovery::{ConsulOrigin, ConsulSettings, Origin};
use lb_discovery::{DiscoveryRequest, Failure, Finding, Latest, ProviderContext, Running, spawn};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

/// The longest time for which a test waits for an expected state. Usually, the wait takes
/// milliseconds, or a few seconds after an outage.
const PATIENCE: Duration = Duration::from_secs(60);

/// The token with all rights.
const MASTER: &str = "11111111-2222-3333-4444-555555555555";

/// Returns the path of Consul. If Consul is missing, prints that the test is skipped, and returns
/// `None`.
fn consul() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
    let cache = cache.unwrap_or_default().join("socklb/consul-1.8.7");
    let program = cache.join("consul");
    if program.exists() {
        return Some(program);
    }
    let why = std::fs::read_to_string(cache.join("missing"));
    let why = why.unwrap_or_else(|_| "`cargo xtask setup` has not fetched Consul 1.8.7".to_owned());
    let thread = std::thread::current();
    let line = format!("skipped: {}: {why}\n", thread.name().unwrap_or("a test"));
    // The drivers of the tests count these lines. The test harness captures the output of `print!`,
    // so this code does not use it.
    std::io::stdout().lock().write_all(line.as_bytes()).expect("the line can be printed");
    None
}

struct Agent {
    program: PathBuf,
    ip: Ipv4Addr,
    /// The ports for HTTP, gossip and RPC.
    ports: [u16; 3],
    folder: TempDir,
    options: &'static [&'static str],
    child: Child,
}

impl Agent {
    async fn start(program: PathBuf, options: &'static [&'static str]) -> Self {
        // A process ID has at most 22 bits, so no other process uses this address. Therefore a port
        // that was free remains free.
        let ip = Ipv4Addr::from_bits(0x7f40_0000 | (std::process::id() & 0x3f_ffff));
        let folder = tempfile::tempdir().expect("a folder can be created");
        let acl = json!({ "enabled": true, "default_policy": "deny", "tokens": { "master": MASTER, "agent": MASTER } });
        std::fs::write(folder.path().join("acl.json"), json!({ "acl": acl }).to_string())
            .expect("the configuration can be written");
        let ports = std::array::from_fn(|_| free_port(ip));
        let child = run(&program, ip, ports, &folder, options).await;
        Self { program, ip, ports, folder, options, child }
    }

    fn address(&self) -> SocketAddr {
        (self.ip, self.ports[0]).into()
    }

    /// Starts the server again, without its data.
    async fn restart(&mut self) {
        self.child = run(&self.program, self.ip, self.ports, &self.folder, self.options).await;
    }

    fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
        let pid = pid.expect("Consul is running");
        kill_process(pid, signal).expect("the signal can be sent");
        if signal == Signal::STOP {
            // The kernel reports the stop after all threads have stopped.
            let status = waitpid(Some(pid), WaitOptions::UNTRACED).expect("Consul stops");
            assert!(status.is_some_and(|(_, status)| status.stopped()), "{status:?}");
        }
    }

    /// Sends a request with the master token. Returns the body of the answer.
    async fn put(&self, path: &str, body: &Value) -> String {
        let body = body.to_string();
        let request = format!(
            "PUT /v1/{path} HTTP/1.0\r\nX-Consul-Token: {MASTER}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = async {
            let mut stream = TcpStream::connect(self.address()).await?;
            stream.write_all(request.as_bytes()).await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.map(|_| answer)
        };
        let answer =
            timeout(PATIENCE, answer).await.expect("Consul answers in time").expect("the answer can be read");
        let (head, body) = answer.split_once("\r\n\r\n").expect("the answer has a head");
        assert!(head.starts_with("HTTP/1.0 200 "), "{path}: {answer}");
        body.to_owned()
    }

    /// Registers an instance of a service, with one passing check of the same name.
    async fn register(&self, service: &str, n: u8, tag: &str) {
        let id = format!("{service}-{n}");
        let instance = json!({
            "ID": id, "Name": service, "Tags": [tag], "Address": format!("10.41.0.{n}"), "Port": 8080,
            "Weights": { "Passing": 10 * u32::from(n), "Warning": 1 },
            "Check": { "CheckID": id, "TTL": "1h", "Status": "passing" },
        });
        self.put("agent/service/register", &instance).await;
    }

    fn provider(&self, service: &str, tag: Option<&str>, token: Option<PathBuf>) -> Running {
        let settings = ConsulSettings { address: self.address(), token, tls: None };
        let origin = ConsulOrigin { service: service.to_owned(), tag: tag.map(str::to_owned), settings };
        let wanted = DiscoveryRequest::List { origin: Origin::Consul(origin), is_ipv6: false };
        spawn(wanted, &Arc::new(ProviderContext::default()), Arc::default())
    }
}

/// Returns a free port of this address that no earlier call has returned.
fn free_port(ip: Ipv4Addr) -> u16 {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut held = Vec::new();
    loop {
        let listener = TcpListener::bind((ip, 0)).expect("a port is free");
        let port = listener.local_addr().expect("the listener has an address").port();
        held.push(listener);
        // Gossip also uses the UDP port with this number.
        if UdpSocket::bind((ip, port)).is_ok() && given.insert(port) {
            return port;
        }
    }
}

/// Starts Consul, and waits until it has a leader and has registered its node. The process is
/// killed when the result is dropped.
async fn run(
    program: &PathBuf,
    ip: Ipv4Addr,
    [http, gossip, rpc]: [u16; 3],
    folder: &TempDir,
    options: &[&str],
) -> Child {
    let mut command = Command::new(program);
    // The option `-dev` stores the data in memory, and elects a leader within milliseconds.
    command.args(["agent", "-dev", "-node", "n1", "-log-level", "info"]);
    command.args(["-dns-port=-1", "-grpc-port=-1", "-serf-wan-port=-1"]);
    command.args([format!("-bind={ip}"), format!("-client={ip}"), format!("-http-port={http}")]);
    command.args([format!("-serf-lan-port={gossip}"), format!("-server-port={rpc}")]);
    command.args(options).current_dir(folder.path());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().expect("Consul can be started");
    let mut log = BufReader::new(child.stdout.take().expect("the output is a pipe")).lines();
    let (ready, is_ready) = oneshot::channel();
    // The log is read until its end, because Consul blocks while the pipe is full.
    tokio::spawn(async move {
        let mut ready = Some(ready);
        while let Ok(Some(line)) = log.next_line().await {
            // The test harness shows this output if the test fails.
            println!("{line}");
            if line.contains("agent: Synced node info") {
                ready.take().map(|ready| ready.send(()));
            }
        }
    });
    timeout(PATIENCE, is_ready).await.expect("Consul starts in time").expect("Consul has ended: see its log");
    child
}

/// Waits until `fits` accepts the state of the provider. Returns this state. After [`PATIENCE`],
/// panics with `what`.
async fn wait(running: &mut Running, what: &str, fits: impl Fn(&Latest) -> bool) -> Latest {
    if let Ok(latest) = timeout(PATIENCE, running.latest.wait_for(fits)).await {
        return latest.expect("the provider is running").clone();
    }
    panic!("{what}: {:?}", running.latest.borrow());
}

/// Waits until the list has these endpoints, each as the last byte of its address, its weight and
/// its state.
async fn wait_for_list(running: &mut Running, expected: &[(u8, u16, &str)]) -> Latest {
    let expected = expected.iter().map(|(n, weight, state)| (*n, (*weight, (*state).to_owned()))).collect();
    wait(running, &format!("{expected:?}"), |latest| list(latest) == Some(&expected).cloned()).await
}

fn list(latest: &Latest) -> Option<BTreeMap<u8, (u16, String)>> {
    let Some(Finding::List(snapshot)) = &latest.finding else { return None };
    assert_eq!(snapshot.notes, [""; 0]);
    let groups: Vec<Value> = serde_json::from_slice(&snapshot.text).expect("the list is an array of groups");
    let endpoint = |group: &Value| {
        let address = group["targets"][0].as_str()?;
        let n = address.strip_prefix("10.41.0.")?.strip_suffix(":8080")?.parse().ok()?;
        let label = |name: &str, default| group["labels"][name].as_str().unwrap_or(default).to_owned();
        Some((n, (label("weight", "1").parse().ok()?, label("state", "healthy"))))
    };
    Some(groups.iter().map(|group| endpoint(group).expect("each group is an endpoint")).collect())
}

fn is_failed(latest: &Latest, part: &str) -> bool {
    matches!(&latest.finding, Some(Finding::Failed(failure)) if failure.to_string().contains(part))
}

fn version(latest: &Latest) -> u64 {
    let Some(Finding::List(snapshot)) = &latest.finding else { panic!("{latest:?}") };
    snapshot.version.parse().expect("the version is an index")
}

#[tokio::test]
async fn registrations_checks_and_maintenance_change_the_list_at_once() {
    let Some(program) = consul() else { return };
    let agent = Agent::start(program, &[]).await;
    let mut all = agent.provider("users", None, None);
    let mut blue = agent.provider("users", Some("blue"), None);
    for running in [&mut all, &mut blue] {
        wait(running, "an empty answer", |latest| matches!(latest.finding, Some(Finding::Empty { .. })))
            .await;
    }
    for n in 1..=10 {
        agent.register("users", n, if n <= 3 { "blue" } else { "green" }).await;
    }
    let mut expected: Vec<(u8, u16, &str)> = (1..=10).map(|n| (n, 10 * u16::from(n), "healthy")).collect();
    wait_for_list(&mut all, &expected).await;
    let first = wait_for_list(&mut blue, &expected[..3]).await;
    agent.put("agent/service/deregister/users-10", &Value::Null).await;
    expected.pop();
    wait_for_list(&mut all, &expected).await;
    agent.put("agent/check/fail/users-1", &Value::Null).await;
    expected[0].2 = "down";
    wait_for_list(&mut all, &expected).await;
    agent.put("agent/check/warn/users-2", &Value::Null).await;
    expected[1].1 = 1;
    wait_for_list(&mut all, &expected).await;
    agent.put("agent/service/maintenance/users-3?enable=true", &Value::Null).await;
    (expected[2].1, expected[2].2) = (0, "down");
    let last = wait_for_list(&mut all, &expected).await;
    let blue = wait_for_list(&mut blue, &expected[..3]).await;
    assert!(version(&blue) > version(&first) && last.failures + blue.failures == 0, "{last:?} {blue:?}");
    agent.put("agent/maintenance?enable=true", &Value::Null).await;
    expected.iter_mut().for_each(|one| (one.1, one.2) = (0, "down"));
    wait_for_list(&mut all, &expected).await;
    agent.put("agent/maintenance?enable=false", &Value::Null).await;
    wait(&mut all, "the end of maintenance", |latest| {
        list(latest).is_some_and(|list| list[&4] == (40, "healthy".to_owned()))
    })
    .await;
}

#[tokio::test]
async fn a_server_that_restarts_without_its_data_is_followed() {
    let Some(program) = consul() else { return };
    let mut agent = Agent::start(program, &[]).await;
    let mut users = agent.provider("users", None, None);
    for n in 1..=10 {
        agent.register("users", n, "blue").await;
    }
    let all: Vec<_> = (1..=10).map(|n| (n, 10 * u16::from(n), "healthy")).collect();
    let before = wait_for_list(&mut users, &all).await;
    agent.signal(Signal::KILL);
    agent.child.wait().await.unwrap();
    let at = agent.address();
    let failed = wait(&mut users, "a failure", |latest| is_failed(latest, "Connection refused")).await;
    assert!(is_failed(&failed, &at.to_string()), "{failed:?}");
    agent.restart().await;
    agent.register("users", 1, "blue").await;
    let after = wait_for_list(&mut users, &all[..1]).await;
    assert!(version(&after) < version(&before), "{after:?} {before:?}");
    agent.register("users", 2, "blue").await;
    wait_for_list(&mut users, &all[..2]).await;
}

#[tokio::test]
async fn a_server_that_stops_for_a_while_is_followed() {
    let Some(program) = consul() else { return };
    let agent = Agent::start(program, &[]).await;
    agent.register("users", 1, "blue").await;
    let mut waiting = agent.provider("users", None, None);
    let one = [(1, 10, "healthy")];
    let before = wait_for_list(&mut waiting, &one).await;
    agent.signal(Signal::STOP);
    let mut asking = agent.provider("users", None, None);
    wait(&mut asking, "a failure", |latest| is_failed(latest, "no answer within 5s")).await;
    let now = waiting.latest.borrow().clone();
    assert_eq!(
        (list(&now), now.failures),
        (list(&before), 0),
        "a query that waits for a change must not fail"
    );
    agent.signal(Signal::CONT);
    agent.register("users", 2, "blue").await;
    let two = [one[0], (2, 20, "healthy")];
    wait_for_list(&mut asking, &two).await;
    wait_for_list(&mut waiting, &two).await;
}

#[tokio::test]
async fn an_unknown_service_is_queried_at_most_once_a_second() {
    let Some(program) = consul() else { return };
    let agent = Agent::start(program, &[]).await;
    let began = Instant::now();
    let mut unknown = agent.provider("unknown", None, None);
    let mut seen = 0;
    // Every change of the catalogue ends the blocking query.
    for n in 1..=4 {
        agent.register("others", n, "blue").await;
        let latest = wait(&mut unknown, "an answer", |latest| latest.answers > seen).await;
        assert!(matches!(latest.finding, Some(Finding::Empty { .. })), "{latest:?}");
        seen = latest.answers;
    }
    // No pause precedes the first two answers. The first pause follows the first answer that equals
    // the answer before it.
    let least = Duration::from_secs(seen.saturating_sub(2));
    assert!(seen >= 4 && began.elapsed() >= least, "{seen} answers in {:?}", began.elapsed());
    agent.register("unknown", 1, "blue").await;
    wait_for_list(&mut unknown, &[(1, 10, "healthy")]).await;
}

#[tokio::test]
async fn a_token_needs_the_right_to_read_services_and_nodes() {
    let Some(program) = consul() else { return };
    let agent = Agent::start(program, &["-config-file=acl.json"]).await;
    agent.register("users", 1, "blue").await;
    let one = [(1, 10, "healthy")];
    let file = agent.folder.path().join("token");
    let rules = [r#"service "users" { policy = "read" }"#, r#"node_prefix "" { policy = "read" }"#];
    let mut tokens = Vec::new();
    for (name, rules) in [("service", rules[0].to_owned()), ("both", rules.join(" "))] {
        agent.put("acl/policy", &json!({ "Name": name, "Rules": rules })).await;
        let token = agent.put("acl/token", &json!({ "Policies": [{ "Name": name }] })).await;
        let token: Value = serde_json::from_str(&token).unwrap();
        tokens.push(token["SecretID"].as_str().unwrap().to_owned());
    }
    std::fs::write(&file, "99999999-2222-3333-4444-555555555555").unwrap();
    let mut users = agent.provider("users", None, Some(file.clone()));
    let refused =
        wait(&mut users, "a refusal", |latest| is_failed(latest, "403 Forbidden: \"ACL not found\"")).await;
    assert!(matches!(refused.finding, Some(Finding::Failed(Failure::Refused(_)))), "{refused:?}");
    std::fs::write(&file, &tokens[1]).unwrap();
    wait_for_list(&mut users, &one).await;
    // Consul omits data that a token may not read.
    std::fs::write(&file, &tokens[0]).unwrap();
    for running in [agent.provider("users", None, None), agent.provider("users", None, Some(file))] {
        let mut running = running;
        let why = "if it has ACLs, the token needs service:read for \"users\" and node:read";
        wait(
            &mut running,
            "an empty answer",
            |latest| matches!(&latest.finding, Some(Finding::Empty { why: text }) if text.contains(why)),
        )
        .await;
    }
}
