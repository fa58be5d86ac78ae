//! Lists from a real Consul 1.8.7 with ACLs. The catalogue is on disk, so that it survives when the
//! server is killed.
//!
//! Connects continue while the server fails in every way: none may fail.

use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, waitpid};
use serde_json::{Value, json};
use stage::daemon::{ChildGuard, signal};
use stage::probe::die_with_us;
use stage::{Backend, eventually, look, pace};

use crate::client::{Client, LARGE};
use crate::http::{ok, request};

/// The server's ports for HTTP, gossip and RPC, in the test's own network namespace.
const PORT: u16 = 8500;
const GOSSIP: u16 = 8301;
const RPC: u16 = 8300;

/// The token with all rights.
const MASTER: &str = "11111111-2222-3333-4444-555555555555";

/// The number of changes of the catalogue in the test with many changes.
const CHANGES: u32 = 500;

/// A Consul, and a process in a balanced cgroup.
struct Scene {
    // The server is dropped first, because `client` removes the folder with the server's files.
    consul: Option<ChildGuard>,
    program: PathBuf,
    client: Client,
}

impl Scene {
    /// A server with three instances of the service, and a daemon with a token that may read them,
    /// and with these further sections in its configuration. `None` if setup could not fetch
    /// Consul.
    fn new(sections: &str) -> Option<Self> {
        let program = crate::cached("consul-1.8.7/consul", "Consul 1.8.7")?;
        let consul = format!("[consul]\naddress = \"127.0.0.1:{PORT}\"\ntoken = \"token\"\n{sections}");
        let client = Client::new("{ consul = \"users\", allow = [\"127.0.0.0/8\"] }", &consul);
        let tokens = json!({ "master": MASTER, "agent": MASTER });
        let configuration = json!({
            "data_dir": client.setup.folder.join("consul"),
            "server": true, "bootstrap_expect": 1, "node_name": "n1",
            "bind_addr": "127.0.0.1", "client_addr": "127.0.0.1",
            "ports": { "http": PORT, "serf_lan": GOSSIP, "server": RPC, "dns": -1, "grpc": -1, "serf_wan": -1 },
            // With this setting, a single server becomes the leader sooner.
            "performance": { "raft_multiplier": 1 },
            "acl": { "enabled": true, "default_policy": "deny", "tokens": tokens },
        });
        client.setup.write("consul.json", &configuration.to_string());
        let mut scene = Self { consul: None, program, client };
        scene.start_consul();
        // A new server refuses changes of tokens for a moment.
        let token = format!("X-Consul-Token: {MASTER}\r\n");
        let policies = || request(PORT, "GET", "/v1/acl/policies", &token, "");
        eventually("Consul has ACLs", policies, |answer| {
            answer.as_ref().is_some_and(|(head, _)| head.contains(" 200 OK"))
        });
        let rules = "service_prefix \"\" { policy = \"read\" } node_prefix \"\" { policy = \"read\" }";
        put("acl/policy", &json!({ "Name": "read", "Rules": rules }));
        scene.write_token(&new_token());
        (1..=3).for_each(|n| register(n, 10));
        scene.client.start_daemon();
        scene.client.expect(&["b1", "b2", "b3"]);
        Some(scene)
    }

    fn start_consul(&mut self) {
        let folder = &self.client.setup.folder;
        let log = File::options().create(true).append(true).open(folder.join("consul.log"));
        let mut command = Command::new(&self.program);
        command.args(["agent", "-config-file", "consul.json"]).current_dir(folder);
        command.stdin(Stdio::null()).stdout(log.expect("open the log")).stderr(Stdio::null());
        die_with_us(&mut command);
        self.consul = Some(ChildGuard::of(command.spawn().expect("start Consul")));
    }

    /// Waits until the server has a leader, and so answers with its whole catalogue.
    fn wait_for_consul(&self) {
        let token = format!("X-Consul-Token: {MASTER}\r\n");
        let answer = || request(PORT, "GET", "/v1/health/service/users", &token, "");
        eventually("Consul has a leader", answer, |answer| {
            let head = answer.as_ref().map(|(head, _)| head.to_ascii_lowercase()).unwrap_or_default();
            head.contains(" 200 ok") && head.contains("x-consul-knownleader: true")
        });
    }

    fn signal(&self, what: Signal) {
        let consul = self.consul.as_ref().expect("Consul runs");
        signal(consul, what);
        if what == Signal::STOP {
            // waitpid(2) returns after all threads have stopped.
            let pid = i32::try_from(consul.id()).ok().and_then(Pid::from_raw);
            let status = waitpid(pid, WaitOptions::UNTRACED).expect("wait for Consul");
            assert!(status.is_some_and(|(_, status)| status.stopped()), "{status:?}");
        }
    }

    fn write_token(&self, token: &str) {
        self.client.setup.write("token", token);
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log =
                std::fs::read_to_string(self.client.setup.folder.join("consul.log")).unwrap_or_default();
            eprintln!("--- the log of Consul ---\n{log}");
        }
    }
}

/// Sends a change with the master token. Returns the answer.
#[track_caller]
fn put(path: &str, body: &Value) -> String {
    let token = format!("X-Consul-Token: {MASTER}\r\n");
    let answer = request(PORT, "PUT", &format!("/v1/{path}"), &token, &body.to_string());
    let (head, body) = answer.expect("Consul answers");
    assert!(head.starts_with("HTTP/1.0 200 "), "{path}: {head}: {body}");
    body
}

/// Makes a token that may read services and nodes.
fn new_token() -> String {
    let token = put("acl/token", &json!({ "Policies": [{ "Name": "read" }] }));
    let token: Value = serde_json::from_str(&token).expect("the answer is JSON");
    token["SecretID"].as_str().expect("the token has a secret").to_owned()
}

/// Registers a backend in the catalogue, on a node without checks.
fn register(n: u16, weight: u32) {
    let service = json!({
        "ID": format!("users-{n}"), "Service": "users", "Address": "127.0.0.1", "Port": 8000 + n,
        "Weights": { "Passing": weight, "Warning": 1 },
    });
    put("catalog/register", &json!({ "Node": "backends", "Address": "127.0.0.1", "Service": service }));
}

/// Registers further instances with these numbers, with an address each and port 8009. A
/// transaction of Consul has at most 64 operations.
fn register_many(numbers: Range<usize>) {
    let set = |n: usize| {
        let service = json!({
            "ID": format!("many-{n}"), "Service": "users", "Port": 8009,
            "Address": format!("127.1.{}.{}", n / 250, n % 250 + 1),
        });
        json!({ "Service": { "Verb": "set", "Node": "backends", "Service": service } })
    };
    let all: Vec<Value> = numbers.map(set).collect();
    all.chunks(64).for_each(|operations| drop(put("txn", &operations.into())));
}

fn deregister(n: u16) {
    put("catalog/deregister", &json!({ "Node": "backends", "ServiceID": format!("users-{n}") }));
}

const ALL: [&str; 3] = ["b1", "b2", "b3"];

#[test]
fn no_connect_fails_while_consul_is_killed_and_it_is_queried_again_at_the_time_in_status() {
    let Some(mut scene) = Scene::new("") else { return };
    scene.client.start_dialling();
    // The test kills the server and immediately starts it again.
    scene.consul = None;
    scene.client.expect_fault("127.0.0.1:8500: Connection refused");
    scene.start_consul();
    scene.wait_for_consul();
    scene.client.expect_recovery();
    // The second outage is longer.
    scene.consul = None;
    scene.client.expect_next_query_in(3);
    scene.start_consul();
    scene.wait_for_consul();
    scene.client.expect_recovery();
    let lists = scene.client.lists();
    register(1, 20);
    scene.client.expect_more_lists(lists);
    scene.client.expect_no_failure(&ALL);
}

#[test]
fn no_connect_fails_while_consul_is_stopped_or_emptied() {
    let Some(mut scene) = Scene::new("") else { return };
    scene.client.start_dialling();
    // The daemon cannot distinguish a stopped server from a server that waits for a change, until
    // the next query fails.
    scene.signal(Signal::STOP);
    scene.client.refresh();
    scene.client.expect_fault("no answer within 5s");
    scene.signal(Signal::CONT);
    scene.client.expect_recovery();
    // A stop that ends before a query fails is not a fault. The list is updated soon after.
    scene.signal(Signal::STOP);
    let stopped = Instant::now();
    scene.client.refresh();
    scene.signal(Signal::CONT);
    let (outage, continued) = (stopped.elapsed(), Instant::now());
    let (lists, failures) = (scene.client.lists(), scene.client.setup.source().failures);
    register(1, 20);
    scene.client.expect_more_lists(lists);
    let took = continued.elapsed();
    if outage < Duration::from_secs(1) {
        assert!(
            took < Duration::from_secs(2) * pace::pace(),
            "recovery took {took:?} after an outage of {outage:?}"
        );
        assert_eq!(scene.client.setup.source().failures, failures);
    }
    // The test removes all instances.
    (1..=3).for_each(deregister);
    scene.client.expect_empty("Consul lists no instance");
    (1..=3).for_each(|n| register(n, 10));
    scene.client.expect_fault("");
    scene.client.expect_no_failure(&ALL);
}

#[test]
fn no_connect_fails_while_another_server_has_consuls_port_or_the_token_expires() {
    let Some(mut scene) = Scene::new("") else { return };
    scene.client.start_dialling();
    scene.consul = None;
    let index = "X-Consul-Index: 9\r\n";
    let shape = json!({ "services": ["127.0.0.1:8001"] }).to_string();
    let cases = [
        (
            ok("Content-Type: text/html\r\n", "<html>It works!</html>"),
            "no X-Consul-Index, so the server is not Consul",
        ),
        (ok(index, "<html>It works!</html>"), "the text is not JSON"),
        (ok(index, &shape), "answer:1:1:"),
        (ok(index, "[]"), "Consul lists no instance"),
    ];
    scene.client.expect_faults_of_impostors(PORT, cases);
    scene.start_consul();
    scene.wait_for_consul();
    scene.client.refresh();
    scene.client.expect_recovery();
    // The token expires. A change of the catalogue completes the pending query.
    let token = std::fs::read_to_string(scene.client.setup.folder.join("token")).expect("read the token");
    let own = request(PORT, "GET", "/v1/acl/token/self", &format!("X-Consul-Token: {token}\r\n"), "");
    let own: Value = serde_json::from_str(&own.expect("Consul answers").1).expect("the answer is JSON");
    let path = format!("/v1/acl/token/{}", own["AccessorID"].as_str().expect("the token has an accessor"));
    let master = format!("X-Consul-Token: {MASTER}\r\n");
    let (head, _) = request(PORT, "DELETE", &path, &master, "").expect("Consul answers");
    assert!(head.contains(" 200 "), "{head}");
    register(1, 20);
    scene.client.expect_fault("403 Forbidden: \"ACL not found\"");
    scene.write_token(&new_token());
    scene.client.expect_recovery();
    scene.client.expect_no_failure(&ALL);
}

#[test]
fn no_connect_fails_during_hundreds_of_changes_and_consul_gets_five_queries_a_second() {
    let Some(mut scene) = Scene::new("") else { return };
    scene.client.start_dialling();
    let (begun, before) = (Instant::now(), scene.client.lists());
    for n in 0..CHANGES {
        register(u16::try_from(n % 3 + 1).expect("a backend's number is small"), n % 100 + 1);
    }
    let seconds = begun.elapsed().as_secs_f64();
    deregister(3);
    scene.client.expect_endpoints(2);
    let (lists, seconds_of_lists) = (scene.client.lists() - before, begun.elapsed().as_secs_f64());
    eprintln!("{CHANGES} changes in {seconds:.1} s, {lists} lists");
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let lists = lists as f64;
    assert!((2.0..=5.0 * seconds_of_lists + 2.0).contains(&lists), "{lists} lists in {seconds_of_lists} s");
    scene.client.expect_no_failure(&ALL);
}

#[test]
fn a_list_of_consul_grows_from_one_to_ten_thousand_instances_and_one_that_is_too_long_changes_nothing() {
    let Some(mut scene) = Scene::new(LARGE) else { return };
    let _all = Backend::start("all", "0.0.0.0:8009");
    deregister(2);
    deregister(3);
    scene.client.expect(&["b1"]);
    scene.client.start_dialling();
    register_many(0..10_000);
    scene.client.expect_endpoints(10_001);
    let backends = || scene.client.setup.service().backends.len();
    eventually("all instances are in the table", backends, |backends| *backends == 10_001);
    // The test registers as many instances as a list may have, and then one more.
    register_many(10_000..12_287);
    eventually("the longest list is in the table", backends, |backends| *backends == 12_288);
    register_many(12_287..12_288);
    scene.client.expect_fault("a list without indexes has at most 12288 endpoints, this is number 12289");
    assert_eq!(look(backends).now("the list was refused"), 12_288);
    put("catalog/deregister", &json!({ "Node": "backends", "ServiceID": "many-12287" }));
    scene.client.expect_fault("");
    assert_eq!(look(backends).now("the list is accepted again"), 12_288);
    scene.client.expect_no_failure(&["all", "b1"]);
}
