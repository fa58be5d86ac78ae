//! Tests with answers of an API server of version 1.29. The files in `answers` contain the bytes
//! that the server sends: heads, framing, order of the fields. The files were not recorded. They
//! were composed by hand from the documentation and the sources of Kubernetes.

use std::collections::{BTreeSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex};

use lb_config::discovery::{KubernetesSettings, TlsSettings};
use lb_config::endpoints::{self, ListContext};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::tls::tests::{Folder, acceptor, authority, signed};

const LIST_1: &[u8] = include_bytes!("answers/list-page-1.http");
const LIST_2: &[u8] = include_bytes!("answers/list-page-2.http");
const LIST_EMPTY: &[u8] = include_bytes!("answers/list-empty.http");
const WATCH: &[u8] = include_bytes!("answers/watch.http");
const WATCH_EXPIRED: &[u8] = include_bytes!("answers/watch-expired.http");
const EXPIRED: &[u8] = include_bytes!("answers/expired.http");
const UNAUTHORIZED: &[u8] = include_bytes!("answers/unauthorized.http");
const FORBIDDEN_LIST: &[u8] = include_bytes!("answers/forbidden-list.http");
const FORBIDDEN_WATCH: &[u8] = include_bytes!("answers/forbidden-watch.http");
const VERSION_TOO_LARGE: &[u8] = include_bytes!("answers/version-too-large.http");

const PATH: &str = "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices";
const SELECTOR: &str = "labelSelector=kubernetes.io%2Fservice-name%3Dusers";
const SERVER: &str = "10.0.0.9:6443";

/// The server's actions on one connection, after it has read the request.
type Script = Vec<Step>;

enum Step {
    Send(Vec<u8>),
    Pause(Duration),
    /// Sends these bytes again and again, without end.
    Flood(Vec<u8>),
    /// Sends nothing more, and does not close the connection.
    Hang,
}

use Step::{Flood, Hang, Pause, Send};

fn answer(bytes: &[u8]) -> Script {
    vec![Send(bytes.to_vec())]
}

fn sized(body: &str) -> Script {
    answer(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).as_bytes())
}

/// The head of a watch, and these lines.
fn watch(lines: &[String]) -> Vec<u8> {
    let mut bytes = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    lines.iter().for_each(|line| bytes.extend(chunk(&format!("{line}\n"))));
    bytes
}

fn chunk(text: &str) -> Vec<u8> {
    format!("{:x}\r\n{text}\r\n", text.len()).into()
}

/// A slice of shop/users with a ready endpoint at each address.
fn slice(name: &str, version: usize, addresses: &[String]) -> Value {
    let endpoints: Vec<Value> =
        addresses.iter().map(|ip| json!({ "addresses": [ip], "conditions": { "ready": true } })).collect();
    json!({
        "metadata": {
            "name": name,
            "namespace": "shop",
            "resourceVersion": version.to_string(),
            "labels": { "kubernetes.io/service-name": "users" },
        },
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{ "name": "http", "port": 8080 }],
    })
}

fn event(kind: &str, object: &Value) -> String {
    json!({ "type": kind, "object": object }).to_string()
}

fn changed(version: usize, address: &str) -> String {
    event("MODIFIED", &slice("a", version, &[address.to_owned()]))
}

fn bookmark(version: usize) -> String {
    event("BOOKMARK", &json!({ "metadata": { "resourceVersion": version.to_string() } }))
}

fn list_of(items: &[Value]) -> Script {
    let metadata = json!({ "resourceVersion": "10" });
    sized(&json!({ "kind": "EndpointSliceList", "metadata": metadata, "items": items }).to_string())
}

/// A list with one endpoint in slice `a`, at version 10.
fn list_one() -> Script {
    list_of(&[slice("a", 10, &["10.0.0.1".to_owned()])])
}

/// The test server. The server accepts connections until this value is dropped.
struct Server {
    scripts: Mutex<VecDeque<Script>>,
    requests: Mutex<Vec<String>>,
    accepting: Mutex<Option<AbortHandle>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.lock().unwrap().take().inspect(AbortHandle::abort);
    }
}

impl Server {
    fn new(scripts: Vec<Script>) -> Arc<Self> {
        let scripts = Mutex::new(scripts.into());
        Arc::new(Self { scripts, requests: Mutex::default(), accepting: Mutex::default() })
    }

    /// Adds the server's actions on the next connections.
    fn then(&self, scripts: Vec<Script>) {
        self.scripts.lock().unwrap().extend(scripts);
    }

    /// The targets of the requests since the last call, without their common prefix.
    fn queries(&self) -> Vec<String> {
        let prefix = format!("GET {PATH}?{SELECTOR}&");
        let requests = std::mem::take(&mut *self.requests.lock().unwrap());
        let first = |request: &String| {
            let line = request.lines().next().unwrap().strip_prefix(&prefix);
            line.and_then(|line| line.strip_suffix(" HTTP/1.1"))
                .expect("the request is for slices")
                .to_owned()
        };
        requests.iter().map(first).collect()
    }

    /// Serves one connection. A connection without a script is closed.
    async fn serve<S: AsyncRead + AsyncWrite + Unpin>(&self, mut stream: S) {
        let Some(script) = self.scripts.lock().unwrap().pop_front() else { return };
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            if !stream.read_buf(&mut request).await.is_ok_and(|count| count > 0) {
                return;
            }
        }
        self.requests.lock().unwrap().push(String::from_utf8(request).unwrap());
        for step in script {
            let sent = match step {
                Send(bytes) => stream.write_all(&bytes).await,
                Pause(time) => {
                    sleep(time).await;
                    Ok(())
                }
                Flood(bytes) => loop {
                    if let Err(error) = stream.write_all(&bytes).await {
                        break Err(error);
                    }
                },
                Hang => std::future::pending().await,
            };
            // The client may close the connection first.
            if sent.is_err() {
                return;
            }
        }
        let _ = stream.shutdown().await;
    }

    /// Returns a provider that connects to this server in memory, for tests in virtual time.
    fn in_memory(self: &Arc<Self>, seed: u64, settings: impl FnOnce(&mut KubernetesOrigin)) -> Kubernetes {
        let mut origin = origin(SERVER);
        settings(&mut origin);
        Kubernetes::of_endpoints(&origin, false, self.accept(), fastrand::Rng::with_seed(seed))
    }

    fn accept(self: &Arc<Self>) -> Connector {
        let (accept, mut connections) = mpsc::unbounded_channel();
        let server = Arc::downgrade(self);
        let accepting = tokio::spawn(async move {
            while let (Some(stream), Some(server)) = (connections.recv().await, server.upgrade()) {
                tokio::spawn(async move { server.serve(stream).await });
            }
        });
        *self.accepting.lock().unwrap() = Some(accepting.abort_handle());
        Connector::Memory(accept)
    }
}

fn origin(server: &str) -> KubernetesOrigin {
    KubernetesOrigin {
        namespace: "shop".to_owned(),
        service: "users".to_owned(),
        port: Some("http".to_owned()),
        settings: KubernetesSettings { server: server.to_owned(), token: None, tls: None },
    }
}

/// A server with these scripts, and a provider that connects to it in memory.
fn provider(scripts: Vec<Script>) -> (Arc<Server>, Kubernetes) {
    let server = Server::new(scripts);
    let kubernetes = server.in_memory(7, |_| {});
    (server, kubernetes)
}

/// Queries once. Returns the addresses of the list, with their states.
async fn addresses(kubernetes: &mut Kubernetes) -> Vec<String> {
    let Queried { finding, again } = kubernetes.query().await;
    assert_eq!(again, Again::AtOnce);
    let Finding::List(snapshot) = finding else { panic!("{finding:?}") };
    let context = ListContext::of(Path::new("users.json"));
    let list = endpoints::parse(&snapshot.text, &context).unwrap().list;
    let mut addresses: Vec<String> = list
        .as_slice()
        .iter()
        .map(|endpoint| match endpoint.state.name() {
            "healthy" => endpoint.address.to_string(),
            state => format!("{} {state}", endpoint.address),
        })
        .collect();
    addresses.sort();
    addresses
}

/// Queries once. Returns the failure.
async fn failure(kubernetes: &mut Kubernetes) -> Failure {
    match kubernetes.query().await.finding {
        Finding::Failed(failure) => failure,
        finding => panic!("{finding:?}"),
    }
}

fn place() -> String {
    format!("{SERVER}: GET {PATH}")
}

/// Splits the query of a watch into its timeout in seconds and the text before the timeout.
fn split_time(query: &str) -> (u64, &str) {
    let (rest, seconds) = query.rsplit_once("&timeoutSeconds=").expect("the query opens a watch");
    (seconds.parse().unwrap(), rest)
}

/// Checks that a query opens a watch from this version.
#[track_caller]
fn is_watch_from(query: &str, version: usize) {
    let (seconds, rest) = split_time(query);
    assert!((270..=330).contains(&seconds), "{query}");
    assert_eq!(rest, format!("watch=1&allowWatchBookmarks=true&resourceVersion={version}"));
}

const LATER: &str = "resourceVersion=10&resourceVersionMatch=NotOlderThan";

#[tokio::test(start_paused = true)]
async fn all_pages_are_read_and_then_all_events() {
    let (server, mut kubernetes) = provider(vec![answer(LIST_1), answer(LIST_2), answer(WATCH)]);
    let listed = ["10.40.1.5:8080", "10.40.2.7:8080 lame-duck", "10.40.3.1:8080"];
    assert_eq!(addresses(&mut kubernetes).await, listed);
    let token = "eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6NDgwMCwic3RhcnQiOiJ1c2Vycy1wOWw3bVx1MDAwMCJ9";
    assert_eq!(
        server.queries(),
        ["limit=500&resourceVersion=0".to_owned(), format!("limit=500&continue={token}"),]
    );
    let changed = ["10.40.1.5:8080", "10.40.1.6:8080", "10.40.2.9:8080", "10.40.3.1:8080"];
    assert_eq!(addresses(&mut kubernetes).await, changed, "all four events are in one answer");
    is_watch_from(&server.queries()[0], 4800);
    // The watch has ended after its time. The next watch continues from the last event.
    server.then(vec![vec![Send(watch(&[])), Hang]]);
    assert_eq!(addresses(&mut kubernetes).await, changed);
    is_watch_from(&server.queries()[0], 4871);
}

#[tokio::test(start_paused = true)]
async fn a_list_has_the_addresses_zones_and_versions_of_its_slices() {
    let (_server, mut kubernetes) = provider(vec![answer(LIST_1), answer(LIST_2)]);
    let Finding::List(snapshot) = kubernetes.query().await.finding else {
        panic!("the finding is not a list")
    };
    let text: Value = serde_json::from_slice(&snapshot.text).unwrap();
    assert_eq!(
        text,
        json!([
            { "targets": ["10.40.1.5:8080"], "labels": { "zone": "eu-a" } },
            { "targets": ["10.40.2.7:8080"], "labels": { "state": "lame-duck", "zone": "eu-b" } },
            { "targets": ["10.40.3.1:8080"], "labels": { "zone": "eu-c" } },
        ])
    );
    assert_eq!((snapshot.endpoints, &*snapshot.version), (3, "4800"));
    assert_eq!(
        snapshot.notes,
        [
            "left out: \"users-v8rtn\": a slice of addressType \"IPv6\", but the service is \"IPv4\"",
            "left out: 10.40.1.6:8080: not ready",
            "more than once in the list: 10.40.1.5:8080: only the best entry is used",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_service_without_endpoints_is_empty_and_not_a_failure() {
    let (server, mut kubernetes) = provider(vec![answer(LIST_EMPTY)]);
    let none =
        Finding::Empty { why: "service shop/users has no EndpointSlice, or does not exist".to_owned() };
    assert_eq!(kubernetes.query().await, Queried { finding: none.clone(), again: Again::AtOnce });
    let gone = event("DELETED", &slice("a", 12, &[]));
    server.then(vec![vec![
        Send(watch(&[changed(11, "10.0.0.1")])),
        Pause(SETTLED),
        Send(chunk(&(gone + "\n"))),
        Hang,
    ]]);
    assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.1:8080"]);
    assert_eq!(kubernetes.query().await.finding, none, "the last slice is deleted");
}

#[tokio::test(start_paused = true)]
async fn a_new_watch_and_each_bookmark_confirm_the_list() {
    let mut steps = vec![Send(watch(&[]))];
    steps.extend(
        (0..3).flat_map(|n| [Pause(Duration::from_secs(60)), Send(chunk(&(bookmark(20 + n) + "\n")))]),
    );
    let (server, mut kubernetes) = provider(vec![list_one(), steps]);
    let first = kubernetes.query().await;
    let began = Instant::now();
    for expected in [1, 60, 120, 180] {
        assert_eq!(kubernetes.query().await, first, "a confirmed list is equal, with its version");
        assert_eq!(began.elapsed().as_secs(), expected);
    }
    // The next watch begins at the version of the last bookmark.
    server.then(vec![vec![Send(watch(&[])), Hang]]);
    assert_eq!(kubernetes.query().await, first);
    is_watch_from(&server.queries()[2], 22);
}

#[tokio::test(start_paused = true)]
async fn a_silent_watch_is_opened_again_within_about_a_minute() {
    let silent = || vec![Send(watch(&[])), Hang];
    let (server, mut kubernetes) = provider(vec![list_one(), silent(), silent(), silent()]);
    let first = kubernetes.query().await;
    let began = Instant::now();
    for seconds in [1, 66, 131] {
        assert_eq!(kubernetes.query().await, first);
        assert_eq!(began.elapsed().as_secs(), seconds);
    }
    // A server that has stopped accepts connections, but does not answer.
    server.then(vec![vec![Hang]]);
    let why = format!("{}: no answer within 5s", place());
    assert_eq!(failure(&mut kubernetes).await, Failure::Unreachable(why));
    assert_eq!(began.elapsed().as_secs(), 200);
    server.then(vec![silent()]);
    assert_eq!(kubernetes.query().await, first, "the slices must not be listed again");
    assert_eq!(server.queries().iter().filter(|query| query.starts_with("watch")).count(), 5);
}

#[tokio::test(start_paused = true)]
async fn the_time_of_a_watch_varies() {
    let mut times = BTreeSet::new();
    for seed in 0..20 {
        let server = Server::new(vec![list_one(), vec![Send(watch(&[])), Hang]]);
        let mut kubernetes = server.in_memory(seed, |_| {});
        kubernetes.query().await;
        kubernetes.query().await;
        times.insert(split_time(&server.queries()[1]).0);
    }
    assert!(times.len() > 10 && times.iter().all(|seconds| (270..=330).contains(seconds)), "{times:?}");
}

#[tokio::test(start_paused = true)]
async fn an_expired_version_is_listed_again_within_ten_seconds() {
    let mut delays = BTreeSet::new();
    for (seed, expired) in [(1, EXPIRED), (2, WATCH_EXPIRED), (3, EXPIRED), (4, WATCH_EXPIRED)] {
        let other = list_of(&[slice("b", 99, &["10.0.0.2".to_owned()])]);
        let server = Server::new(vec![list_one(), answer(expired), other]);
        let mut kubernetes = server.in_memory(seed, |_| {});
        assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.1:8080"]);
        let began = Instant::now();
        assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.2:8080"], "the earlier slices are dropped");
        delays.insert(began.elapsed());
        assert_eq!(server.queries()[2], LATER, "the list may not be older than the one before");
    }
    assert!(delays.len() == 4 && delays.iter().all(|delay| *delay < SPREAD), "{delays:?}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_lost_its_later_versions_is_listed_from_the_start() {
    let scripts = vec![list_one(), answer(EXPIRED), answer(VERSION_TOO_LARGE), list_one()];
    let (server, mut kubernetes) = provider(scripts);
    let first = kubernetes.query().await;
    let why = "504 Gateway Timeout: Timeout: Too large resource version: 4871, current: 900";
    assert_eq!(failure(&mut kubernetes).await, Failure::Unreachable(format!("{}: {why}", place())));
    assert_eq!(kubernetes.query().await, first);
    assert_eq!(server.queries()[2..], [LATER, "limit=500&resourceVersion=0"]);
}

#[tokio::test(start_paused = true)]
async fn the_failure_of_a_redirect_states_that_it_is_not_followed() {
    let redirect = b"HTTP/1.1 302 Found\r\nLocation: https://10.0.0.8/login\r\nContent-Length: 0\r\n\r\n";
    let (_server, mut kubernetes) = provider(vec![answer(redirect)]);
    let why = "302 Found; redirects are not followed";
    assert_eq!(failure(&mut kubernetes).await, Failure::Unreachable(format!("{}: {why}", place())));
}

#[tokio::test(start_paused = true)]
async fn a_missing_right_is_named_with_verb_and_resource() {
    let token = NamedTempFile::new().unwrap();
    std::fs::write(&token, "one").unwrap();
    let server = Server::new(vec![
        answer(UNAUTHORIZED),
        answer(FORBIDDEN_LIST),
        list_one(),
        answer(FORBIDDEN_WATCH),
        answer(UNAUTHORIZED),
        vec![Send(watch(&[])), Hang],
    ]);
    let path = token.path().to_owned();
    let mut kubernetes = server.in_memory(7, |origin| origin.settings.token = Some(path.clone()));
    let unauthorized =
        format!("401 Unauthorized: Unauthorized; the token in {} is not valid", path.display());
    let unauthorized = Failure::Refused(format!("{}: {unauthorized}", place()));
    let forbidden = |verb| {
        Failure::Refused(format!(
            "{}: 403 Forbidden: endpointslices.discovery.k8s.io is forbidden: User \
             \"system:serviceaccount:kube-system:socklb\" cannot {verb} resource \"endpointslices\" in API \
             group \"discovery.k8s.io\" in the namespace \"shop\"; the role needs the verbs `list` and \
             `watch` on endpointslices of discovery.k8s.io in namespace \"shop\" (to {verb})",
            place()
        ))
    };
    assert_eq!(failure(&mut kubernetes).await, unauthorized);
    assert_eq!(failure(&mut kubernetes).await, forbidden("list"));
    let first = kubernetes.query().await;
    assert_eq!(failure(&mut kubernetes).await, forbidden("watch"));
    assert_eq!(failure(&mut kubernetes).await, unauthorized);
    assert_eq!(kubernetes.query().await, first, "the slices are still known");
    is_watch_from(&server.queries()[5], 10);
}

#[tokio::test(start_paused = true)]
async fn the_token_is_read_for_every_request() {
    let token = NamedTempFile::new().unwrap();
    let server = Server::new(vec![list_one(), vec![Send(watch(&[])), Hang]]);
    let path = token.path().to_owned();
    let mut kubernetes = server.in_memory(7, |origin| origin.settings.token = Some(path.clone()));
    let no_token = Failure::Refused(format!("{}: {} has no token", place(), path.display()));
    for wrong in [&b""[..], b"\n", b"\xff", b"two\nlines"] {
        std::fs::write(&path, wrong).unwrap();
        assert_eq!(failure(&mut kubernetes).await, no_token);
    }
    for content in ["first\n", "second"] {
        std::fs::write(&path, content).unwrap();
        kubernetes.query().await;
        let request = server.requests.lock().unwrap().pop().unwrap();
        let header = format!("\r\nauthorization: Bearer {}\r\n", content.trim());
        assert!(
            request.contains(&header) && request.contains("\r\naccept: application/json\r\n"),
            "{request}"
        );
    }
    drop(token);
    let missing =
        failure(&mut server.in_memory(7, |origin| origin.settings.token = Some(path.clone()))).await;
    let why = format!("cannot read {}: No such file or directory (os error 2)", path.display());
    assert_eq!(missing, Failure::Refused(format!("{}: {why}", place())));
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_cut_within_a_line_continues_without_loss() {
    let event = changed(11, "10.0.0.2");
    let mut cut = watch(&[bookmark(10)]);
    cut.extend(chunk(&event[..event.len() / 2]));
    let (server, mut kubernetes) =
        provider(vec![list_one(), vec![Send(cut)], vec![Send(watch(&[event])), Hang]]);
    assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.1:8080"]);
    assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.1:8080"], "a bookmark changes nothing");
    assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.2:8080"]);
    server.queries()[1..].iter().for_each(|query| is_watch_from(query, 10));
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_cut_is_malformed_wherever_it_is_cut() {
    let Send(whole) = list_one().remove(0) else { panic!("the script does not begin with an answer") };
    let head = whole.windows(4).position(|part| part == b"\r\n\r\n").unwrap() + 4;
    let lengths = [head, head + 1, usize::midpoint(head, whole.len()), whole.len() - 1];
    let scripts = lengths.iter().map(|length| answer(&whole[..*length])).chain([list_one()]);
    let (_server, mut kubernetes) = provider(scripts.collect());
    let cut = "error reading a body from connection: end of file before message length reached";
    for length in lengths {
        let expected = Failure::Malformed(format!("{}: {cut}", place()));
        assert_eq!(failure(&mut kubernetes).await, expected, "{length}");
    }
    assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.1:8080"]);
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_always_ends_at_once_is_a_failure() {
    let mut ended = watch(&[]);
    ended.extend(b"0\r\n\r\n");
    let scripts = vec![list_one(), answer(&ended), answer(&watch(&[])), Vec::new(), answer(&ended)];
    let (_server, mut kubernetes) = provider(scripts);
    kubernetes.query().await;
    let ends = "the watch ends as soon as it begins";
    let cut = "error reading a body from connection: unexpected EOF during chunk size line";
    let closed = "connection closed before message completed";
    let (ends, cut, closed) = (
        Failure::Unreachable(format!("{}: {ends}", place())),
        Failure::Malformed(format!("{}: {cut}", place())),
        Failure::Unreachable(format!("{}: {closed}", place())),
    );
    for expected in [ends.clone(), cut, closed, ends] {
        assert_eq!(failure(&mut kubernetes).await, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_line_without_end_is_refused_at_the_limit_and_listed_again() {
    let flood = chunk(&"x".repeat(1 << 16));
    let scripts = vec![list_one(), vec![Send(watch(&[])), Flood(flood)], list_one()];
    let (server, mut kubernetes) = provider(scripts);
    let first = kubernetes.query().await;
    let why = format!("{}: a line exceeds {MAX_SLICE_BYTES} bytes", place());
    assert_eq!(failure(&mut kubernetes).await, Failure::TooLarge(why));
    assert_eq!(kubernetes.query().await, first);
    assert_eq!(server.queries()[2], LATER);
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_events_does_not_hold_a_question() {
    let (_server, mut kubernetes) = provider(vec![
        list_one(),
        vec![Send(watch(&[])), Flood(chunk(&format!("{}\n", changed(11, "10.0.0.2"))))],
    ]);
    kubernetes.query().await;
    for _ in 0..3 {
        assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.2:8080"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_line_is_given_up_and_requested_again() {
    let event = changed(11, "10.0.0.2");
    let mut slow = vec![Send(watch(&[]))];
    slow.extend(
        event
            .bytes()
            .flat_map(|byte| [Pause(Duration::from_secs(1)), Send(chunk(&char::from(byte).to_string()))]),
    );
    let (server, mut kubernetes) = provider(vec![list_one(), slow, vec![Send(watch(&[event])), Hang]]);
    let first = kubernetes.query().await;
    assert_eq!(kubernetes.query().await, first);
    let why = format!("{}: a line of the watch has not ended within 65s", place());
    assert_eq!(failure(&mut kubernetes).await, Failure::Malformed(why));
    assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.2:8080"]);
    is_watch_from(&server.queries()[2], 10);
}

#[tokio::test(start_paused = true)]
async fn garbage_is_malformed_and_then_listed_again() {
    for garbage in ["", "{}", "null", "\u{0}", "{\"type\":\"ADDED\"}", "<html>"] {
        let scripts = vec![list_one(), vec![Send(watch(&[garbage.to_owned()])), Hang], list_one()];
        let (server, mut kubernetes) = provider(scripts);
        let first = kubernetes.query().await;
        let Failure::Malformed(text) = failure(&mut kubernetes).await else { panic!("{garbage}") };
        assert!(text.starts_with(&format!("{}: a line of the watch: ", place())), "{text}");
        assert_eq!(kubernetes.query().await, first);
        assert_eq!(server.queries()[2], LATER);
    }
    for garbage in ["{}", "[]", "", "yes", "{\"kind\":\"Status\",\"metadata\":{},\"code\":200}"] {
        let (_server, mut kubernetes) = provider(vec![sized(garbage), list_one()]);
        let Failure::Malformed(text) = failure(&mut kubernetes).await else { panic!("{garbage}") };
        assert!(text.starts_with(&format!("{}: the list: ", place())), "{text}");
        assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.1:8080"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_is_bounded_in_pages_bytes_and_time() {
    let page = json!({
        "kind": "EndpointSliceList",
        "metadata": { "resourceVersion": "10", "continue": "again" },
        "items": [],
    });
    let (server, mut kubernetes) = provider((0..100).map(|_| sized(&page.to_string())).collect());
    let why = format!("{}: the list has more than {MAX_PAGES} pages", place());
    assert_eq!(failure(&mut kubernetes).await, Failure::TooLarge(why));
    assert_eq!(server.queries().len(), MAX_PAGES);

    let flood = vec![Send(watch(&[])), Flood(chunk(&" ".repeat(1 << 16)))];
    let (_server, mut kubernetes) = provider(vec![flood]);
    let why = format!("{}: the answer exceeds {MOST} bytes", place());
    assert_eq!(failure(&mut kubernetes).await, Failure::TooLarge(why));

    let slow = || {
        let mut script = vec![Pause(Duration::from_secs(4))];
        script.extend(sized(&page.to_string()));
        script
    };
    let (_server, mut kubernetes) = provider((0..10).map(|_| slow()).collect());
    let began = Instant::now();
    let why = format!("{}: the list has not ended within 30s", place());
    assert_eq!(failure(&mut kubernetes).await, Failure::Unreachable(why));
    assert_eq!(began.elapsed(), LIST);
}

#[tokio::test(start_paused = true)]
async fn a_wrong_slice_is_refused_until_it_is_corrected() {
    let wrong = changed(11, "10.0.0.999");
    let right = changed(12, "10.0.0.2") + "\n";
    let scripts = vec![list_one(), vec![Send(watch(&[wrong])), Pause(SETTLED), Send(chunk(&right)), Hang]];
    let (server, mut kubernetes) = provider(scripts);
    kubernetes.query().await;
    let Failure::Malformed(text) = failure(&mut kubernetes).await else {
        panic!("a wrong slice was accepted")
    };
    assert!(text.starts_with(&format!("{}: slice a:1:", place())), "{text}");
    assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.2:8080"]);
    assert_eq!(server.queries().len(), 2, "the watch must continue");
}

/// The addresses of the 100 endpoints of a slice.
fn many(slice: usize) -> Vec<String> {
    (0..100).map(|n| format!("10.0.{slice}.{n}")).collect()
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_endpoints_are_listed_and_change() {
    let items: Vec<Value> = (0..100).map(|n| slice(&format!("s{n}"), 10, &many(n))).collect();
    let gone = event("DELETED", &items[99]);
    let (_server, mut kubernetes) = provider(vec![list_of(&items), vec![Send(watch(&[gone])), Hang]]);
    for expected in [10_000, 9_900] {
        let Finding::List(snapshot) = kubernetes.query().await.finding else {
            panic!("the finding is not a list")
        };
        assert_eq!(snapshot.endpoints, expected);
        assert!(snapshot.text.len() < endpoints::MAX_FILE_BYTES, "{}", snapshot.text.len());
    }
}

#[tokio::test(start_paused = true)]
async fn a_hundred_changes_a_second_need_five_questions_a_second() {
    let mut steps = vec![Send(watch(&[]))];
    steps.extend((0..200).flat_map(|n| {
        let event = changed(11 + n, &format!("10.0.1.{n}")) + "\n";
        [Pause(Duration::from_millis(10)), Send(chunk(&event))]
    }));
    steps.push(Hang);
    let (server, mut kubernetes) = provider(vec![list_one(), steps]);
    kubernetes.query().await;
    let began = Instant::now();
    let mut answers = 0;
    while addresses(&mut kubernetes).await != ["10.0.1.199:8080"] {
        answers += 1;
        // `running` makes the same pause between two queries.
        sleep(Duration::from_millis(200)).await;
    }
    assert!(began.elapsed() < Duration::from_millis(2300), "{:?}", began.elapsed());
    assert!((5..=11).contains(&answers), "{answers}");
    assert_eq!(server.queries().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_change_that_changes_no_endpoint_gives_an_equal_answer() {
    let mut annotated = slice("a", 11, &["10.0.0.1".to_owned()]);
    annotated["metadata"]["annotations"] = json!({ "a": "b" });
    let (_server, mut kubernetes) =
        provider(vec![list_one(), vec![Send(watch(&[event("MODIFIED", &annotated)])), Hang]]);
    let first = kubernetes.query().await;
    assert_eq!(kubernetes.query().await, first);
}

/// Serves TCP connections on the loopback interface, with or without TLS, until the server is
/// dropped.
async fn on_loopback(server: &Arc<Server>, tls: Option<TlsAcceptor>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let weak = Arc::downgrade(server);
    let accepting = tokio::spawn(async move {
        while let (Ok((stream, _)), Some(server)) = (listener.accept().await, weak.upgrade()) {
            let tls = tls.clone();
            tokio::spawn(async move {
                match tls {
                    None => server.serve(stream).await,
                    Some(tls) => {
                        // A client that does not trust the server ends the handshake.
                        if let Ok(stream) = tls.accept(stream).await {
                            server.serve(stream).await;
                        }
                    }
                }
            });
        }
    });
    *server.accepting.lock().unwrap() = Some(accepting.abort_handle());
    address.to_string()
}

#[tokio::test]
async fn a_server_on_loopback_is_listed_watched_and_found_again() {
    let server = Server::new(vec![answer(LIST_1), answer(LIST_2), answer(WATCH)]);
    let address = on_loopback(&server, None).await;
    let mut kubernetes = Kubernetes::new(&origin(&address), false);
    assert_eq!(addresses(&mut kubernetes).await.len(), 3);
    // The events may arrive in several parts.
    while addresses(&mut kubernetes).await.len() != 4 {}
    // The server closes the connection, because it has no more scripts.
    assert!(matches!(failure(&mut kubernetes).await, Failure::Unreachable(_)));
    server.then(vec![answer(WATCH_EXPIRED), answer(LIST_EMPTY)]);
    assert!(matches!(kubernetes.query().await.finding, Finding::Empty { .. }));
    drop(server);
    let failure = failure(&mut kubernetes).await;
    assert!(matches!(&failure, Failure::Unreachable(why) if why.starts_with(&address)), "{failure:?}");
}

#[tokio::test]
async fn a_server_with_tls_is_listed_and_watched_and_must_be_the_right_one() {
    let (ca, other) = (authority(), authority());
    let folder = Folder::new();
    let client = signed(&ca, &["host-7"], 2090);
    let server = Server::new(vec![answer(LIST_1), answer(LIST_2), answer(WATCH)]);
    let versions = &[&rustls::version::TLS13, &rustls::version::TLS12];
    let certificate = signed(&ca, &["127.0.0.1"], 2090);
    let address = on_loopback(&server, Some(acceptor(&certificate, Some(&ca), versions))).await;
    let mut origin = origin(&address);
    let mut settings = folder.trust(&ca);
    settings.client = Some(folder.client(&client));
    origin.settings.tls = Some(settings);
    let mut kubernetes = Kubernetes::new(&origin, false);
    assert_eq!(kubernetes.expires(), None);
    assert_eq!(addresses(&mut kubernetes).await.len(), 3);
    assert!(kubernetes.expires().is_some());
    while addresses(&mut kubernetes).await.len() != 4 {}

    // The files are read again for each connection.
    folder.trust(&other);
    let why = format!(
        "{address}: TLS: unknown CA: no certificate in {} has signed the server's certificate",
        folder.path("ca.pem").display()
    );
    assert_eq!(failure(&mut kubernetes).await, Failure::Refused(why));
    folder.trust(&ca);
    server.then(vec![answer(WATCH_EXPIRED), answer(LIST_EMPTY)]);
    assert!(matches!(kubernetes.query().await.finding, Finding::Empty { .. }));
}

#[tokio::test]
async fn an_expired_client_certificate_fails_and_a_renewed_one_continues_with_the_slices() {
    let ca = authority();
    let folder = Folder::new();
    let server = Server::new(vec![list_one(), vec![Send(watch(&[changed(11, "10.0.0.2")])), Hang]]);
    let certificate = signed(&ca, &["127.0.0.1"], 2090);
    let versions = &[&rustls::version::TLS13];
    let address = on_loopback(&server, Some(acceptor(&certificate, Some(&ca), versions))).await;
    let mut origin = origin(&address);
    let client = Some(folder.client(&signed(&ca, &["host-7"], 2090)));
    origin.settings.tls = Some(TlsSettings { client, ..folder.trust(&ca) });
    let mut kubernetes = Kubernetes::new(&origin, false);
    assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.1:8080"]);

    folder.client(&signed(&ca, &["host-7"], 2021));
    let failure = failure(&mut kubernetes).await;
    let expired = format!(
        "the server refuses the client's certificate in {}: CertificateExpired",
        folder.path("client.pem").display()
    );
    assert!(matches!(&failure, Failure::Refused(why) if why.contains(&expired)), "{failure:?}");
    assert!(kubernetes.expires() < Some(SystemTime::now()), "the expired certificate must be reported");

    folder.client(&signed(&ca, &["host-7"], 2090));
    assert_eq!(addresses(&mut kubernetes).await, ["10.0.0.2:8080"]);
    assert_eq!(server.queries().len(), 2, "the slices are listed once");
}

/// A Service with this `spec`.
fn service(version: usize, spec: &Value) -> Value {
    let metadata = json!({ "name": "users", "namespace": "shop", "resourceVersion": version.to_string() });
    json!({ "metadata": metadata, "spec": spec })
}

#[tokio::test(start_paused = true)]
async fn the_address_of_a_service_is_listed_and_watched() {
    let spec = |ip: &str| json!({ "clusterIPs": [ip], "ports": [{ "name": "http", "port": 80 }] });
    let listed = json!({ "kind": "ServiceList", "metadata": { "resourceVersion": "10" },
        "items": [service(9, &spec("10.96.0.10"))] });
    let deleted = event("DELETED", &service(11, &spec("10.96.0.10")));
    let added = event("ADDED", &service(12, &spec("10.96.0.11")));
    let server = Server::new(vec![
        sized(&listed.to_string()),
        vec![
            Send(watch(&[])),
            Pause(Duration::from_secs(5)),
            Send(chunk(&format!("{deleted}\n"))),
            Pause(Duration::from_secs(5)),
            Send(chunk(&format!("{added}\n"))),
            Hang,
        ],
    ]);
    let KubernetesOrigin { namespace, service, settings, .. } = origin(SERVER);
    let protocol = lb_core::service::Protocol::Tcp;
    let wanted = ClusterIpOrigin { namespace, service, protocol, port: None, family: None, settings };
    let mut kubernetes = Kubernetes::of_service(&wanted, server.accept(), fastrand::Rng::with_seed(7));
    let mut found = Vec::new();
    while found.len() < 3 {
        let text = match kubernetes.query().await.finding {
            Finding::List(snapshot) => String::from_utf8(snapshot.text.to_vec()).unwrap(),
            Finding::Empty { why } => why,
            Finding::Failed(failure) => panic!("{failure}"),
        };
        if found.last() != Some(&text) {
            found.push(text);
        }
    }
    assert_eq!(found, ["10.96.0.10:80", "Service shop/users does not exist", "10.96.0.11:80"]);
    let requests = server.requests.lock().unwrap();
    let prefix = "GET /api/v1/namespaces/shop/services?fieldSelector=metadata.name%3Dusers&";
    assert!(requests[0].starts_with(&format!("{prefix}limit=500&resourceVersion=0 ")), "{}", requests[0]);
    assert!(requests[1].starts_with(&format!("{prefix}watch=1&")), "{}", requests[1]);
}

mod manifest;

#[test]
fn a_servers_host_is_its_address_or_name_without_brackets_and_port() {
    let hosts = ["10.0.0.9:6443", "[2001:db8::9]:6443", "kubernetes.default:443"].map(host);
    assert_eq!(hosts, ["10.0.0.9", "2001:db8::9", "kubernetes.default"]);
}
