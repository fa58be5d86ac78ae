//! Lists from a simulated API server, because a real API server cannot run here. The simulation
//! sends the slices, events and refusals of an API server of version 1.29, with the addresses of
//! the test's backends.
//!
//! Connects continue while the server fails in every way: none may fail.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stage::{Backend, eventually, look};

use crate::client::{Client, LARGE};
use crate::http::{Server, ok, read_request};

/// The server's port, in the test's own network namespace.
const PORT: u16 = 6443;

const LIST: &str = include_str!("../../crates/lb-discovery/src/kubernetes/answers/list-page-1.http");
const EXPIRED_EVENT: &str =
    include_str!("../../crates/lb-discovery/src/kubernetes/answers/watch-expired.http");
const EXPIRED: &str = include_str!("../../crates/lb-discovery/src/kubernetes/answers/expired.http");
const UNAUTHORIZED: &str = include_str!("../../crates/lb-discovery/src/kubernetes/answers/unauthorized.http");

/// Duration of the test with many events, and the time between two events.
const EVENTS: Duration = Duration::from_secs(3);
const EVENT: Duration = Duration::from_millis(10);

/// The state of an API server with the slices of one Service. The state outlives the HTTP server.
#[derive(Default)]
struct Api {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The version of the last change.
    version: u64,
    slices: BTreeMap<String, Value>,
    /// The events so far, each with its version.
    events: Vec<(u64, String)>,
    /// Events up to this version are dropped, so a watch cannot start before it.
    lost: u64,
    token: String,
    /// Number of requests for lists and watches so far.
    lists: u32,
    watches: u32,
    is_up: bool,
}

impl Api {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a slice with these endpoints, or replaces it. Sends the event to all watches.
    fn put(&self, name: &str, addresses: &[String], port: u16) {
        let mut state = self.state();
        state.version += 1;
        let slice = slice(name, state.version, addresses, port);
        let is_new = state.slices.insert(name.to_owned(), slice.clone()).is_none();
        self.send(state, if is_new { "ADDED" } else { "MODIFIED" }, &slice);
    }

    fn delete(&self, name: &str) {
        let mut state = self.state();
        state.version += 1;
        let mut slice = state.slices.remove(name).expect("the slice exists");
        slice["metadata"]["resourceVersion"] = state.version.to_string().into();
        self.send(state, "DELETED", &slice);
    }

    fn send(&self, mut state: MutexGuard<'_, State>, kind: &str, slice: &Value) {
        let version = state.version;
        state.events.push((version, format!("{}\n", json!({ "type": kind, "object": slice }))));
        drop(state);
        self.changed.notify_all();
    }

    /// Adds the slice of a backend.
    fn add_backend(&self, n: u16) {
        self.put(&format!("users-{n}"), &["127.0.0.1".to_owned()], 8000 + n);
    }

    fn delete_backend(&self, n: u16) {
        self.delete(&format!("users-{n}"));
    }

    /// Drops all events, like an API server that restarts or compacts its store. Watches end with
    /// an error event (410).
    fn lose_events(&self) {
        let mut state = self.state();
        state.version += 1;
        state.lost = state.version;
        state.events.clear();
        drop(state);
        self.changed.notify_all();
    }

    fn list(&self) -> String {
        let state = self.state();
        let items: Vec<&Value> = state.slices.values().collect();
        let metadata = json!({ "resourceVersion": state.version.to_string() });
        let list = json!({
            "kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "metadata": metadata, "items": items,
        });
        format!("{}{}0\r\n\r\n", head(LIST), chunk(&list.to_string()))
    }

    fn serve(&self, mut stream: TcpStream) -> Option<()> {
        let request = read_request(&mut stream)?;
        let authorization = format!("authorization: bearer {}", self.state().token);
        if !request.lines().any(|line| line.eq_ignore_ascii_case(&authorization)) {
            return stream.write_all(UNAUTHORIZED.as_bytes()).ok();
        }
        let target = request.split(' ').nth(1)?;
        let value =
            |name: &str| target.split(['?', '&']).find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
        if value("watch").is_none() {
            self.state().lists += 1;
            return stream.write_all(self.list().as_bytes()).ok();
        }
        let mut version: u64 = value("resourceVersion")?.parse().ok()?;
        let mut state = self.state();
        state.watches += 1;
        if version < state.lost {
            drop(state);
            return stream.write_all(EXPIRED.as_bytes()).ok();
        }
        stream.write_all(head(LIST).as_bytes()).ok()?;
        while state.is_up {
            if version < state.lost {
                drop(state);
                let (_, event) = EXPIRED_EVENT.split_once("\r\n\r\n")?;
                return stream.write_all(event.as_bytes()).ok();
            }
            let new = state.events.iter().filter(|(of, _)| *of > version);
            let chunks: String = new.map(|(_, event)| chunk(event)).collect();
            version = state.version;
            if chunks.is_empty() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            drop(state);
            stream.write_all(chunks.as_bytes()).ok()?;
            state = self.state();
        }
        None
    }
}

/// The head of a recorded answer.
fn head(answer: &str) -> &str {
    let end = answer.find("\r\n\r\n").expect("the answer has a head") + 4;
    &answer[..end]
}

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

/// The first recorded slice, with a copy of its first endpoint for each of these addresses.
fn slice(name: &str, version: u64, addresses: &[String], port: u16) -> Value {
    let (begin, end) =
        (LIST.find('{').expect("the text has an object"), LIST.rfind('}').expect("the object ends"));
    let list: Value = serde_json::from_str(&LIST[begin..=end]).expect("the list is JSON");
    let mut slice = list["items"][0].clone();
    slice["metadata"]["name"] = name.into();
    slice["metadata"]["resourceVersion"] = version.to_string().into();
    let endpoint = |address: &String| {
        let mut endpoint = slice["endpoints"][0].clone();
        endpoint["addresses"] = json!([address]);
        endpoint
    };
    slice["endpoints"] = addresses.iter().map(endpoint).collect();
    slice["ports"][0]["port"] = port.into();
    slice
}

/// An API server, and a process in a balanced cgroup.
struct Scene {
    client: Client,
    server: Option<Server>,
    api: Arc<Api>,
}

impl Scene {
    /// A server with three endpoints, and a daemon with these further sections of the
    /// configuration.
    fn new(sections: &str) -> Self {
        let server =
            format!("[kubernetes]\nserver = \"http://127.0.0.1:{PORT}\"\ntoken = \"token\"\n{sections}");
        let backends = "{ kubernetes = \"shop/users\", port = \"http\", allow = [\"127.0.0.0/8\"] }";
        let mut scene = Self { client: Client::new(backends, &server), server: None, api: Arc::default() };
        scene.write_token("first");
        scene.api.state().token = "first".to_owned();
        (1..=3).for_each(|n| scene.api.add_backend(n));
        scene.start_server();
        scene.client.start_daemon();
        scene.client.expect(&ALL);
        scene
    }

    fn start_server(&mut self) {
        self.api.state().is_up = true;
        let api = Arc::clone(&self.api);
        let serve = move |stream| {
            api.serve(stream);
            None
        };
        self.server = Some(Server::start(PORT, serve));
    }

    /// Ends all connections, and refuses new ones.
    fn kill_server(&mut self) {
        self.api.state().is_up = false;
        self.api.changed.notify_all();
        self.server = None;
    }

    fn write_token(&self, token: &str) {
        self.client.setup.write("token", token);
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.kill_server();
    }
}

const ALL: [&str; 3] = ["b1", "b2", "b3"];

#[test]
fn no_connect_fails_while_the_api_server_is_killed_and_a_short_outage_is_over_in_two_seconds() {
    let mut scene = Scene::new("");
    scene.client.start_dialling();
    let killed = Instant::now();
    scene.kill_server();
    scene.client.expect_fault("127.0.0.1:6443: Connection refused");
    let outage = killed..Instant::now();
    scene.start_server();
    scene.client.expect_recovery_after(outage);
    // The second outage is longer, and the slices change during the outage.
    scene.kill_server();
    scene.api.delete_backend(3);
    scene.client.expect_next_query_in(3);
    scene.start_server();
    scene.client.expect_recovery();
    scene.client.expect_endpoints(2);
    scene.client.expect_no_failure(&ALL);
}

#[test]
fn no_connect_fails_while_the_api_server_is_silent_emptied_or_loses_its_events() {
    let mut scene = Scene::new("");
    scene.client.start_dialling();
    scene.kill_server();
    let silent = Server::impostor(PORT, "");
    scene.client.expect_fault("no answer within 5s");
    drop(silent);
    scene.start_server();
    scene.client.expect_recovery();
    (1..=3).for_each(|n| scene.api.delete_backend(n));
    scene.client.expect_empty("service shop/users has no EndpointSlice, or does not exist");
    (1..=3).for_each(|n| scene.api.add_backend(n));
    scene.client.expect_fault("");
    // The watch ends with 410. The slices are listed again within 10 s.
    let lists = scene.api.state().lists;
    scene.api.lose_events();
    scene.api.delete_backend(3);
    scene.client.expect_endpoints(2);
    assert_eq!(scene.api.state().lists, lists + 1);
    scene.client.expect_no_failure(&ALL);
}

#[test]
fn no_connect_fails_while_another_server_has_the_port_or_the_token_expires() {
    let mut scene = Scene::new("");
    scene.client.start_dialling();
    scene.kill_server();
    let list = json!({ "kind": "PodList", "metadata": { "resourceVersion": "9" }, "items": [] });
    let cases = [
        (ok("Content-Type: text/html\r\n", "<html>It works!</html>\n"), "the text is not JSON"),
        (ok("", &list.to_string()), "the answer has the kind \"PodList\", not EndpointSliceList"),
        (ok("", "{}"), "the list: missing field `metadata`"),
    ];
    scene.client.expect_faults_of_impostors(PORT, cases);
    scene.start_server();
    scene.client.refresh();
    scene.client.expect_recovery();
    // The token expires: the server refuses it from the next request on.
    scene.api.state().token = "second".to_owned();
    scene.server.as_ref().expect("the server runs").disconnect();
    scene.client.expect_fault("401 Unauthorized: Unauthorized; the token in ");
    scene.write_token("second");
    scene.client.expect_recovery();
    scene.client.expect_no_failure(&ALL);
}

#[test]
fn no_connect_fails_during_a_hundred_events_a_second_which_make_at_most_five_lists_a_second() {
    let mut scene = Scene::new("");
    scene.client.start_dialling();
    let (begun, before) = (Instant::now(), scene.client.lists());
    let mut events = 0_u32;
    while begun.elapsed() < EVENTS {
        if events.is_multiple_of(2) {
            scene.api.delete_backend(3);
        } else {
            scene.api.add_backend(3);
        }
        events += 1;
        std::thread::park_timeout((begun + EVENT * events).saturating_duration_since(Instant::now()));
    }
    if events.is_multiple_of(2) {
        scene.api.delete_backend(3);
    }
    scene.client.expect_endpoints(2);
    let (lists, seconds) = (scene.client.lists() - before, begun.elapsed().as_secs_f64());
    eprintln!("{events} events in {seconds:.1} s, {lists} lists");
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let lists = lists as f64;
    assert!((1.0..=5.0 * seconds + 2.0).contains(&lists), "{lists} lists in {seconds} s");
    let State { lists, watches, .. } = &*scene.api.state();
    assert_eq!((*lists, *watches), (1, 1), "one watch delivers all events");
    scene.client.expect_no_failure(&ALL);
}

#[test]
fn a_list_grows_from_one_to_ten_thousand_endpoints_and_one_that_is_too_long_changes_nothing() {
    let mut scene = Scene::new(LARGE);
    let _all = Backend::start("all", "0.0.0.0:8009");
    scene.api.delete_backend(2);
    scene.api.delete_backend(3);
    scene.client.expect(&["b1"]);
    scene.client.start_dialling();
    for slice in 0..100 {
        let addresses: Vec<String> = (1..=100).map(|n| format!("127.1.{slice}.{n}")).collect();
        scene.api.put(&format!("many-{slice}"), &addresses, 8009);
    }
    scene.client.expect_endpoints(10_001);
    let backends = || scene.client.setup.service().backends.len();
    eventually("all endpoints are in the table", backends, |backends| *backends == 10_001);
    let more: Vec<String> = (0..2_288).map(|n| format!("127.2.{}.{}", n / 250, n % 250)).collect();
    scene.api.put("more", &more, 8009);
    scene.client.expect_fault("a list without indexes has at most 12288 endpoints, this is number 12289");
    assert_eq!(look(backends).now("the list was refused"), 10_001);
    scene.client.expect_no_failure(&["all", "b1"]);
}
