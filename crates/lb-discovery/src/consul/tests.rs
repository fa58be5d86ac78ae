//! Tests of answers over an in-memory stream in virtual time, and of answers of hostile servers on
//! the loopback interface. The answer in `users.json` was recorded from Consul 1.8.7; only its
//! whitespace was removed.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lb_config::discovery::ConsulSettings;
use proptest::prelude::*;
use rustls::version::TLS13;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use super::*;
use crate::tls::tests as tls;

const RECORDED: &str = include_str!("users.json");

fn consul(address: SocketAddr, tag: Option<&str>, token: Option<&Path>) -> Consul {
    let settings = ConsulSettings { address, token: token.map(Path::to_owned), tls: None };
    let tag = tag.map(str::to_owned);
    Consul::new(&ConsulOrigin { service: "users".to_owned(), tag, settings }, false)
}

/// A provider for queries over in-memory streams; the provider never connects to this address.
fn offline() -> Consul {
    consul("10.0.0.9:8500".parse().unwrap(), None, None)
}

fn answer(status: &str, headers: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n{headers}\r\n{body}", body.len()).into_bytes()
}

fn good(index: u64, body: &str) -> Vec<u8> {
    answer("200 OK", &format!("X-Consul-Index: {index}\r\nX-Consul-Knownleader: true\r\n"), body)
}

/// An answer with one instance.
fn instance(service: &str) -> String {
    format!(r#"[{{"Node":{{}},"Service":{{"Service":"users",{service}}}}}]"#)
}

fn at(address: &str) -> String {
    instance(&format!(r#""Address":"{address}","Port":80"#))
}

/// Queries once. The server answers after `delay`. Returns the result and the request.
async fn query_after(consul: &mut Consul, delay: Duration, answer: Vec<u8>) -> (Queried, String) {
    let (client, mut server) = duplex(1 << 10);
    let server = tokio::spawn(async move {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") && server.read_buf(&mut request).await.is_ok_and(|n| n > 0) {}
        sleep(delay).await;
        // The write fails if the client has closed the stream.
        let _ = server.write_all(&answer).await;
        String::from_utf8(request).unwrap()
    });
    let queried = consul.query_over(Box::new(client)).await;
    (queried, server.await.unwrap())
}

async fn query(consul: &mut Consul, answer: Vec<u8>) -> (Queried, String) {
    query_after(consul, Duration::ZERO, answer).await
}

/// The query string in the request line.
fn query_of(request: &str) -> &str {
    request.split(['?', ' ']).nth(2).unwrap()
}

fn expect_list(finding: Finding) -> DiscoveredList {
    let Finding::List(list) = finding else { panic!("{finding:?}") };
    list
}

#[test]
fn a_recorded_answer_becomes_a_list_and_notes() {
    let list = expect_list(finding(RECORDED.as_bytes(), 23, "users", false).unwrap());
    let read: serde_json::Value = serde_json::from_slice(&list.text).unwrap();
    let expected = serde_json::json!([
        { "targets": ["10.41.0.1:8080"], "labels": { "weight": "3", "zone": "a" } },
        { "targets": ["10.41.0.2:8080"], "labels": { "weight": "2", "zone": "a" } },
        { "targets": ["10.41.0.3:8080"], "labels": { "state": "down", "weight": "3", "zone": "b" } },
        { "targets": ["10.41.0.4:8080"], "labels": { "state": "down", "weight": "0", "zone": "b" } },
        { "targets": ["10.41.0.10:8080"], "labels": { "weight": "65535", "zone": "b" } },
        { "targets": ["users.example.com:8080"], "labels": { "weight": "3", "zone": "b" } },
    ]);
    assert_eq!((read, list.endpoints, &*list.version), (expected, 6, "23"));
    let notes = [
        "left out: \"2001:db8::5\" port 8080: an IPv6 address, but the service has an IPv4 address",
        "left out: \"10.41.0.7\" port 65536 and 1 more: not a port from 1 to 65535",
        "left out: \"10.41.0.300\" port 8080: not an IP address or a host name",
        "more than once in the list: 10.41.0.1:8080: only the best entry is used",
    ];
    assert_eq!(list.notes, notes);
    let list = expect_list(finding(RECORDED.as_bytes(), 23, "Users", true).unwrap());
    assert_eq!(list.endpoints, 2, "Consul ignores the case of the name");
}

#[test]
fn the_order_of_instances_does_not_change_the_text() {
    let mut instances: Vec<serde_json::Value> = serde_json::from_str(RECORDED).unwrap();
    let text = |instances: &[serde_json::Value]| {
        expect_list(finding(&serde_json::to_vec(instances).unwrap(), 1, "users", false).unwrap()).text
    };
    let before = text(&instances);
    instances.reverse();
    assert_eq!(text(&instances), before);
}

#[test]
fn an_answer_without_a_usable_instance_is_no_empty_list() {
    let cases = [
        (at("users example.com"), "not an IP address or a host name"),
        (instance(r#""Address":"10.0.0.1","Port":0"#), "not a port from 1 to 65535"),
    ];
    for (body, why) in cases {
        let failure = finding(body.as_bytes(), 1, "users", false).unwrap_err();
        let Failure::Malformed(text) = failure else { panic!("{failure:?}") };
        assert!(text.starts_with("no instance is usable: left out: ") && text.ends_with(why), "{text}");
    }
}

#[test]
fn a_wrong_value_or_another_answer_is_malformed() {
    let weight = |weight: &str| {
        instance(&format!(r#""Address":"10.0.0.1","Port":80,"Weights":{{"Passing":{weight},"Warning":1}}"#))
    };
    let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let cases = [
        (weight("1000000000"), "answer:1:103: invalid value: integer `1000000000`, expected 0 to 65535"),
        (weight("-1"), "answer:1:95: invalid value: integer `-1`, expected 0 to 65535"),
        (
            at("10.0.0.1").replace("users", "orders"),
            "answer:1:2: an instance belongs to service \"orders\", not to \"users\"",
        ),
        (
            r#"[{"ServiceName":"users","ServiceAddress":"10.0.0.1","ServicePort":80}]"#.to_owned(),
            "answer:1:69: missing field `Node`",
        ),
        ("{}".to_owned(), "answer:1:1: the answer must be a list, not an object"),
        ("null".to_owned(), "answer:1:1: the answer must be a list, not null"),
        ("[{}".to_owned(), "answer:1:3: the file ends while parsing a list"),
        ("<html>".to_owned(), "answer:1:1: the text is not JSON: it begins with \"<html>\""),
        (" ".to_owned(), "answer:1:1: the answer has no text"),
        (nested, "answer:1:2: an instance must be an object, not a list"),
    ];
    for (body, expected) in cases {
        let failure = finding(body.as_bytes(), 1, "users", false).unwrap_err();
        assert_eq!(failure, Failure::Malformed(expected.to_owned()), "{body:.200}");
    }
    let failure = finding(b"\xff", 1, "users", false).unwrap_err();
    assert_eq!(failure.to_string(), "answer:1:1: byte 0xff is not UTF-8 text");
}

#[test]
fn the_largest_answers_are_read_or_refused() {
    let instances = |count: u32, zone: &str| {
        let one = |n: u32| {
            let ip = std::net::Ipv4Addr::from_bits(0x0a00_0000 + n);
            format!(
                r#"{{"Node":{{"Address":"{ip}","Meta":{{"zone":"{zone}"}}}},"Service":{{"Service":"users","Port":80}}}}"#
            )
        };
        format!("[{}]", (0..count).map(one).collect::<Vec<_>>().join(","))
    };
    let most = lb_common::abi::MAX_BACKENDS;
    assert_eq!(
        expect_list(finding(instances(most, "a").as_bytes(), 1, "users", false).unwrap()).endpoints,
        most as usize
    );
    let read = |body: &str| finding(body.as_bytes(), 1, "users", false).unwrap_err();
    let failure = read(&instances(most + 1, "a"));
    assert!(
        matches!(&failure, Failure::Malformed(why) if why.contains("more than 16384 elements")),
        "{failure}"
    );
    let failure = read(&instances(most, &"z".repeat(300)));
    assert!(matches!(&failure, Failure::TooLarge(_)), "{failure}");
    for body in ["\n".repeat(http::MOST), format!("[{}{{}}]", "{},".repeat(http::MOST / 3 - 2))] {
        assert!(matches!(read(&body), Failure::Malformed(_)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_question_names_service_and_tag_and_carries_the_token_that_the_file_has_now() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut consul = consul("10.0.0.9:8500".parse().unwrap(), Some("a&b c"), Some(file.path()));
    consul.origin.service = "käse/1".to_owned();
    for token in ["first", "second"] {
        std::fs::write(file.path(), format!("{token}\n")).unwrap();
        let (queried, request) = query(&mut consul, good(5, "[]")).await;
        assert!(matches!(queried.finding, Finding::Empty { .. }), "{queried:?}");
        let index = if token == "first" { 0 } else { 5 };
        let expected = format!(
            "GET /v1/health/service/k%C3%A4se%2F1?index={index}&wait=60s&stale&tag=a%26b%20c HTTP/1.1\r\n\
             host: 10.0.0.9:8500\r\nuser-agent: socklb\r\nconnection: close\r\nx-consul-token: {token}\r\n\r\n"
        );
        assert_eq!(request, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn an_unusable_token_is_a_failure_that_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    let mut consul = consul("10.0.0.9:8500".parse().unwrap(), None, Some(&path));
    let file = path.display();
    let cases = [
        (None, format!("cannot read {file}: No such file or directory (os error 2)")),
        (Some("x".repeat(2 << 20)), format!("{file} is larger than 1048576 bytes")),
        (Some(" \n".to_owned()), format!("{file} has no token")),
        (Some("a\r\nx: y".to_owned()), format!("{file} has no token")),
    ];
    for (content, why) in cases {
        if let Some(content) = content {
            std::fs::write(&path, content).unwrap();
        }
        let (queried, request) = query(&mut consul, good(5, "[]")).await;
        assert_eq!(queried, Failure::Refused(format!("10.0.0.9:8500: {why}")).into());
        assert_eq!(request, "", "nothing was sent");
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_names_the_file_of_the_token() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "wrong").unwrap();
    let mut consul = consul("10.0.0.9:8500".parse().unwrap(), None, Some(file.path()));
    let (queried, _) = query(&mut consul, answer("403 Forbidden", "", "ACL not found")).await;
    let Finding::Failed(failure) = queried.finding else { panic!() };
    let expected = format!("; the token is in {})", file.path().display());
    assert!(failure.to_string().ends_with(&expected), "{failure}");
}

#[tokio::test]
async fn consul_is_queried_over_tls_if_there_are_settings_for_it() {
    let authority = tls::authority();
    let folder = tls::Folder::new();
    let mut origin = offline().origin;
    origin.settings.tls = Some(folder.trust(&authority));
    for (name, is_accepted) in [("10.0.0.9", true), ("10.0.0.8", false)] {
        let mut consul = Consul::new(&origin, false);
        let acceptor = tls::acceptor(&tls::signed(&authority, &[name], 2080), None, &[&TLS13]);
        let (client, server) = duplex(1 << 16);
        let serve = async {
            let Ok(mut stream) = acceptor.accept(server).await else { return };
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await;
            stream.write_all(&good(7, &at("10.0.0.1"))).await.unwrap();
            stream.shutdown().await.unwrap();
        };
        let (queried, ()) = tokio::join!(consul.query_over(Box::new(client)), serve);
        assert!(consul.expires().is_some(), "{queried:?}");
        if is_accepted {
            assert_eq!(expect_list(queried.finding).endpoints, 1);
        } else {
            let Finding::Failed(Failure::Refused(why)) = queried.finding else { panic!("{queried:?}") };
            assert!(why.starts_with("10.0.0.9:8500: TLS: "), "{why}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_question_waits_for_changes_after_the_last_index() {
    let consul = &mut offline();
    // The index of the answer, and the index of the next query.
    let script =
        [(7, 0), (7, 7), (9, 7), (3, 9), (3, 0), (0, 3), (0, 0), (0, 1), (u64::MAX, 1), (4, u64::MAX)];
    for (n, (index, asked_for)) in script.into_iter().enumerate() {
        let (queried, request) = query(consul, good(index, &at(&format!("10.0.0.{n}")))).await;
        assert_eq!(query_of(&request), format!("index={asked_for}&wait=60s&stale"), "{n}");
        assert_eq!(queried.again, Again::AtOnce, "a changed list needs no pause");
        assert_eq!(expect_list(queried.finding).version, index.to_string());
    }
}

#[tokio::test(start_paused = true)]
async fn an_equal_answer_is_followed_by_a_pause() {
    let consul = &mut offline();
    let pause = Again::After(PAUSE_AFTER_EQUAL);
    assert!(PAUSE_AFTER_EQUAL.mul_f64(0.9) >= Duration::from_secs(1), "runner.rs varies the pause by 10 %");
    let (one, two) = (at("10.0.0.1"), at("10.0.0.2"));
    let script = [
        (1, &*one, Again::AtOnce),
        (1, &*one, pause),
        (9, &*one, pause),
        (10, &*two, Again::AtOnce),
        (11, "[]", Again::AtOnce),
        (12, "[]", pause),
        (5, "[]", pause),
        (6, &*two, Again::AtOnce),
    ];
    for (index, body, again) in script {
        assert_eq!(query(consul, good(index, body)).await.0.again, again, "{index}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_server_may_use_its_wait_but_no_more() {
    let consul = &mut offline();
    let longest = Duration::from_millis(68_750);
    let steps = [
        (Duration::from_millis(4999), None),
        (longest - Duration::from_millis(1), None),
        (longest + Duration::from_millis(1), Some("68.75s")),
        // After a failure, the time limit is that of a query that does not wait for a change.
        (Duration::from_millis(5001), Some("5s")),
        (Duration::from_millis(4999), None),
    ];
    for (delay, limit) in steps {
        let began = Instant::now();
        let (queried, _) = query_after(consul, delay, good(7, &at("10.0.0.1"))).await;
        let Some(limit) = limit else {
            assert_eq!(expect_list(queried.finding).endpoints, 1);
            continue;
        };
        let why = format!("10.0.0.9:8500: GET /v1/health/service/users: no answer within {limit}");
        assert_eq!(queried, Failure::Unreachable(why).into());
        assert!(began.elapsed() >= delay, "the server's task must have ended");
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_may_be_old_or_incomplete_is_a_failure() {
    let query = async |status: &str, headers: &str, body: &str| {
        let consul = &mut offline();
        consul.index = 9;
        let (queried, _) = query(consul, answer(status, headers, body)).await;
        assert!(
            !matches!(queried.finding, Finding::Failed(_)) || consul.index == 0,
            "the next query must not wait"
        );
        queried.finding
    };
    let one = at("10.0.0.1");
    let at = "10.0.0.9:8500: GET /v1/health/service/users: ";
    let rights =
        "the token needs service:read for \"users\" and node:read for the nodes of the service's instances";
    let cases = [
        (
            "200 OK",
            "x-consul-index: 9\r\nx-consul-knownleader: false\r\n",
            Failure::Unreachable(format!("{at}Consul has no leader, so this answer may be old")),
        ),
        (
            "200 OK",
            "x-consul-index: 9\r\nx-consul-results-filtered-by-acls: true\r\n",
            Failure::Refused(format!("{at}instances are missing because of ACLs ({rights})")),
        ),
        (
            "200 OK",
            "content-type: text/html\r\n",
            Failure::Malformed(format!("{at}the answer has no X-Consul-Index, so the server is not Consul")),
        ),
        (
            "200 OK",
            "x-consul-index: -1\r\n",
            Failure::Malformed(format!("{at}the answer has no X-Consul-Index, so the server is not Consul")),
        ),
        (
            "403 No",
            "x-consul-index: 9\r\n",
            Failure::Refused(format!(
                "{at}403 Forbidden: \"ACL not found\" ({rights}; no token is configured)"
            )),
        ),
        ("429 No", "", Failure::Unreachable(format!("{at}429 Too Many Requests: \"ACL not found\""))),
        ("500 No", "", Failure::Unreachable(format!("{at}500 Internal Server Error: \"ACL not found\""))),
        ("204 No", "x-consul-index: 9\r\n", Failure::Unreachable(format!("{at}204 No Content"))),
    ];
    for (status, headers, failure) in cases {
        let body = if status.starts_with("200") { &*one } else { "ACL not found" };
        assert_eq!(query(status, headers, body).await, Finding::Failed(failure));
    }
    // Agents that stream changes always report that there is no leader.
    let streaming =
        "x-consul-index: 9\r\nx-consul-knownleader: false\r\nx-consul-query-backend: streaming\r\n";
    assert_eq!(expect_list(query("200 OK", streaming, &one).await).endpoints, 1);
    let Finding::Empty { why } = query("200 OK", "x-consul-index: 9\r\n", "[]").await else { panic!() };
    assert_eq!(why, format!("Consul lists no instance; if it has ACLs, {rights}"));
}

/// A server on the loopback interface that sends the same answer on every connection.
struct Server {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    task: AbortHandle,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn server(answer: Vec<u8>) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&connections);
    let serve = async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            counter.fetch_add(1, Ordering::Relaxed);
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await;
            // The write fails if the client has closed the connection.
            let _ = stream.write_all(&answer).await;
        }
    };
    Server { address, connections, task: tokio::spawn(serve).abort_handle() }
}

#[tokio::test]
async fn nothing_that_a_hostile_server_sends_becomes_a_list() {
    let elsewhere = server(good(1, &at("10.0.0.1"))).await;
    let ok = "HTTP/1.1 200 OK\r\nx-consul-index: 9\r\n";
    let chunk = format!("{:x}\r\n{}\r\n", 1 << 20, " ".repeat(1 << 20));
    let list = at("10.0.0.1");
    let to = format!("location: http://{}/v1/health/service/users\r\n", elsewhere.address);
    let cases: [(&str, Vec<u8>); 12] = [
        ("connection closed before message completed", Vec::new()),
        ("connection closed before message completed", ok.into()),
        (
            "end of file before message length reached",
            format!("{ok}content-length: 999\r\n\r\n{list}").into(),
        ),
        (
            "end of file before message length reached",
            format!("{ok}transfer-encoding: chunked\r\n\r\nfff\r\n{list}").into(),
        ),
        ("the answer exceeds 16777216 bytes", format!("{ok}content-length: 17825792\r\n\r\n").into()),
        (
            "the answer exceeds 16777216 bytes",
            format!("{ok}transfer-encoding: chunked\r\n\r\n{}", chunk.repeat(17)).into(),
        ),
        ("the answer exceeds 16777216 bytes", format!("{ok}\r\n{}", " ".repeat(17 << 20)).into()),
        ("the head of the answer is too large", format!("{ok}x: {}", "y".repeat(1 << 20)).into()),
        ("invalid HTTP version parsed", b"\x16\x03\x01\x02\x00garbage\r\n\r\n".repeat(100)),
        (
            "no X-Consul-Index, so the server is not Consul",
            answer("200 OK", "", "<html><body>It works!</body></html>"),
        ),
        ("302 Found; redirects are not followed", answer("302 Found", &to, "")),
        (
            "answer:1:1: the text is not JSON: it begins with \"<html><body>It works!</body></\"",
            good(9, "<html><body>It works!</body></html>"),
        ),
    ];
    for (why, bytes) in cases {
        let server = server(bytes).await;
        let queried = consul(server.address, None, None).query().await;
        let Finding::Failed(failure) = &queried.finding else { panic!("{why}: {queried:?}") };
        let text = failure.to_string();
        let begin = format!("{}: GET /v1/health/service/users: ", server.address);
        assert!(
            text.starts_with(&begin) && text.ends_with(why) && text.lines().count() == 1,
            "{why}: {text}"
        );
    }
    assert_eq!(elsewhere.connections.load(Ordering::Relaxed), 0, "redirects are not followed");
}

#[tokio::test]
async fn a_server_that_does_not_listen_is_unreachable() {
    // While a socket is bound to the port, no other process can use it.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let queried = consul(address, None, None).query().await;
    assert_eq!(queried, Failure::Unreachable(format!("{address}: Connection refused (os error 111)")).into());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_list_comes_only_from_a_complete_confirmed_answer(
        status in prop::sample::select(vec!["200 OK", "204 No", "304 No", "403 No", "429 No", "503 No"]),
        headers in prop::collection::vec(prop::sample::select(vec![
            "x-consul-index: 3", "x-consul-index: 99999999999999999999", "x-consul-knownleader: false",
            "x-consul-knownleader: true", "x-consul-results-filtered-by-acls: true", "transfer-encoding: gzip",
            "content-length: 3", "x-consul-index: ", "connection: keep-alive", "x: \u{e4}",
        ]), 0..4),
        body in prop_oneof![Just(RECORDED.to_owned()), Just("[]".to_owned()), "\\PC{0,40}"],
        cut in prop_oneof![3 => Just(0_usize), 1 => 0_usize..200],
    ) {
        let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        let mut bytes = answer(status, &headers, &body);
        bytes.truncate(bytes.len() - cut.min(bytes.len()));
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().unwrap();
        let (queried, _) = runtime.block_on(query(&mut offline(), bytes));
        match queried.finding {
            Finding::Failed(failure) => {
                let text = failure.to_string();
                prop_assert!(text.starts_with("10.0.0.9:8500: ") && !text.contains(char::is_control), "{text}");
            }
            Finding::List(_) | Finding::Empty { .. } => {
                prop_assert!(status == "200 OK" && cut == 0 && headers.contains("x-consul-index: 3"));
                prop_assert!(!headers.contains("false") && !headers.contains("acls"));
            }
        }
    }
}
