//! Tests in which the provider queries servers on the loopback interface. The servers answer
//! correctly, incompletely or with hostile data.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Mutex;

use domain::base::iana::{Rcode, Rtype};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::*;

mod hosts;

/// How a test server reacts to a query.
#[derive(Clone)]
enum Then {
    Answer(Reply),
    /// Answers, then shuts down its sending side. The client may already have written more queries.
    Last(Reply),
    /// Answers with another id. Over UDP, an answer with the right id follows.
    Forged(Reply),
    /// Sends these bytes, and does not close the connection.
    Bytes(Vec<u8>),
    Close,
    Nothing,
    /// Sends answers that belong to no query, without end.
    Flood,
}

/// The time limit of each test.
const DEADLINE: Duration = Duration::from_secs(30);

/// The time limit of a query to a server that does not answer.
const SHORT: Duration = Duration::from_millis(300);

/// A query that a test server has received.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    name: String,
    rtype: Rtype,
    is_tcp: bool,
}

type Script = Arc<dyn Fn(&Seen) -> Then + Send + Sync>;

/// A server. The server's tasks end when this value is dropped.
struct Server {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    /// The number of open connections, and of all connections since the start.
    connections: watch::Receiver<(usize, usize)>,
    _tasks: JoinSet<()>,
}

impl Server {
    async fn start(script: impl Fn(&Seen) -> Then + Send + Sync + 'static) -> Self {
        let (listener, socket) = loop {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            // Another process may use this UDP port.
            if let Ok(socket) = UdpSocket::bind(listener.local_addr().unwrap()).await {
                break (listener, socket);
            }
        };
        let address = listener.local_addr().unwrap();
        let (seen, script): (Arc<Mutex<Vec<Seen>>>, Script) = (Arc::default(), Arc::new(script));
        let (count, connections) = watch::channel((0, 0));
        let mut tasks = JoinSet::new();
        tasks.spawn(answer_datagrams(socket, Arc::clone(&script), Arc::clone(&seen)));
        let log = Arc::clone(&seen);
        tasks.spawn(async move {
            let mut tasks = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (script, log, count) = (Arc::clone(&script), Arc::clone(&log), count.clone());
                count.send_modify(|(open, all)| (*open, *all) = (*open + 1, *all + 1));
                tasks.spawn(async move {
                    // The client may close the connection at any time.
                    let _ = answer_stream(stream, &script, &log).await;
                    count.send_modify(|(open, _)| *open -= 1);
                });
            }
        });
        Self { address, seen, connections, _tasks: tasks }
    }

    async fn answering(then: Then) -> Self {
        Self::start(move |_| then.clone()).await
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

fn see(query: &[u8], is_tcp: bool) -> (u16, Seen) {
    let query = Message::from_octets(query).unwrap();
    let question = query.first_question().unwrap();
    let name = question.qname().to_string();
    (query.header().id(), Seen { name, rtype: question.qtype(), is_tcp })
}

async fn answer_stream(
    mut stream: TcpStream,
    script: &Script,
    log: &Mutex<Vec<Seen>>,
) -> std::io::Result<()> {
    loop {
        let mut query = vec![0; usize::from(stream.read_u16().await?)];
        stream.read_exact(&mut query).await?;
        let (id, seen) = see(&query, true);
        log.lock().unwrap().push(seen.clone());
        match script(&seen) {
            Then::Answer(reply) => stream.write_all(&framed(&Reply { id, ..reply }.bytes())).await?,
            Then::Last(reply) => {
                stream.write_all(&framed(&Reply { id, ..reply }.bytes())).await?;
                stream.shutdown().await?;
                return tokio::io::copy(&mut stream, &mut tokio::io::sink()).await.map(|_| ());
            }
            Then::Forged(reply) => stream.write_all(&framed(&Reply { id: id + 7, ..reply }.bytes())).await?,
            Then::Bytes(bytes) => stream.write_all(&bytes).await?,
            Then::Close => return Ok(()),
            Then::Nothing => {}
            Then::Flood => {
                let much = framed(&Reply { id: 999, ..Reply::to(HOST, Rtype::A, &[]) }.bytes()).repeat(1000);
                loop {
                    stream.write_all(&much).await?;
                }
            }
        }
    }
}

async fn answer_datagrams(socket: UdpSocket, script: Script, log: Arc<Mutex<Vec<Seen>>>) {
    let mut query = vec![0; 2000];
    loop {
        let (length, from) = socket.recv_from(&mut query).await.unwrap();
        let (id, seen) = see(&query[..length], false);
        log.lock().unwrap().push(seen.clone());
        let replies = match script(&seen) {
            Then::Answer(reply) | Then::Last(reply) => vec![Reply { id, ..reply }.bytes()],
            Then::Forged(reply) => {
                let other = Reply { id, ..Reply::to("mail.example.com", Rtype::A, &[]) };
                let forged = Reply { id: id ^ 1, answer: Vec::new(), ..reply.clone() };
                vec![vec![0; 5], forged.bytes(), other.bytes(), Reply { id, ..reply }.bytes()]
            }
            Then::Bytes(bytes) => vec![bytes],
            Then::Close | Then::Nothing | Then::Flood => Vec::new(),
        };
        for reply in replies {
            // The client may have closed its socket.
            let _ = socket.send_to(&reply, from).await;
        }
    }
}

fn framed(message: &[u8]) -> Vec<u8> {
    let length = u16::try_from(message.len()).unwrap();
    [&length.to_be_bytes(), message].concat()
}

/// A provider that shares no state with other providers. `whole` is the time limit of a query.
fn provider(origin: DnsOrigin, servers: &[SocketAddr], transport: DnsTransport, whole: Duration) -> Dns {
    let limits = QueryLimits { whole, ..QueryLimits::default() };
    let shared = ProviderContext { dns: Resolvers::new(Path::new("/nonexistent"), limits) };
    Dns::new(&DnsOrigin { settings: settings(servers, transport), ..origin }, false, &Arc::new(shared))
}

async fn query(provider: &mut Dns) -> Queried {
    tokio::time::timeout(2 * DEADLINE, provider.query()).await.expect("the query ends in time")
}

fn after(queried: &Queried) -> u64 {
    let Again::After(delay) = queried.again else { panic!("{queried:?}") };
    delay.as_secs()
}

fn good() -> Reply {
    Reply::to(HOST, Rtype::A, &["users.example.com 60 A 10.0.0.1", "users.example.com 9 A 10.0.0.2"])
}

const GOOD: [&str; 2] = ["10.0.0.1:8080 1", "10.0.0.2:8080 1"];

/// Queries a new server that reacts to every query with `then`.
async fn query_one(then: Then, whole: Duration) -> (Finding, Server) {
    let server = Server::answering(then).await;
    let queried = query(&mut provider(host(), &[server.address], DnsTransport::Tcp, whole)).await;
    (queried.finding, server)
}

/// Checks that a query over TCP has failed, with a text that begins with the query and the server.
#[track_caller]
fn failed_with((finding, server): (Finding, Server), expected: &str) {
    let Finding::Failed(failure) = finding else { panic!("{finding:?}") };
    assert_eq!(failure.to_string(), format!("dns {HOST} A: {}: {expected}", server.address));
}

#[tokio::test]
async fn a_good_answer_is_a_list_until_its_shortest_ttl() {
    let server = Server::answering(Then::Answer(good())).await;
    let mut provider = provider(host(), &[server.address], DnsTransport::Tcp, DEADLINE);
    let queried = query(&mut provider).await;
    assert_eq!((endpoints(&queried.finding).0, after(&queried)), (GOOD.map(str::to_owned).to_vec(), 9));
    assert_eq!(query(&mut provider).await, queried);
    let queried = Seen { name: HOST.to_owned(), rtype: Rtype::A, is_tcp: true };
    assert_eq!(server.seen(), [queried.clone(), queried]);
}

#[tokio::test]
async fn a_ttl_of_0_and_an_empty_answer_are_queried_again_after_the_least_time() {
    let zero = Reply::to(HOST, Rtype::A, &["users.example.com 0 A 10.0.0.1"]);
    let none = Reply { rcode: Rcode::NXDOMAIN, ..Reply::to(HOST, Rtype::A, &[]) };
    let none = none.with_authority(&["example.com 3600 SOA 7"]);
    for reply in [zero, none] {
        let server = Server::answering(Then::Answer(reply)).await;
        let queried = query(&mut provider(host(), &[server.address], DnsTransport::Tcp, DEADLINE)).await;
        assert!(after(&queried) == 5 && !matches!(queried.finding, Finding::Failed(_)), "{queried:?}");
    }
}

#[tokio::test]
async fn bad_answers_fail_at_once_with_the_reason() {
    let truncated = Then::Answer(Reply { is_truncated: true, ..good() });
    failed_with(query_one(truncated, DEADLINE).await, "the answer is truncated");
    let other = Then::Answer(Reply { question: ("mail.example.com".to_owned(), Rtype::A), ..good() });
    failed_with(query_one(other, DEADLINE).await, "the answer is to another question");
    let servfail = Then::Answer(Reply { rcode: Rcode::SERVFAIL, ..good() });
    failed_with(query_one(servfail, DEADLINE).await, "the server answers SERVFAIL");
    let looped = Reply { answer: vec![format!("{HOST} 60 CNAME {HOST}")], ..good() };
    let refused = "the aliases (CNAME) form a loop, or there are more than 16";
    failed_with(query_one(Then::Answer(looped), DEADLINE).await, refused);
    failed_with(query_one(Then::Close, DEADLINE).await, "the server closed the connection");
    let short = Then::Bytes(framed(b"hello"));
    failed_with(query_one(short, DEADLINE).await, "the answer is shorter than a header");
    // The id of the first query on a connection is 0.
    let mut garbage = vec![0; 70_000];
    fastrand::Rng::with_seed(5).fill(&mut garbage);
    garbage[..4].copy_from_slice(&[0xff, 0xff, 0, 0]);
    let another = "the answer is to another question";
    failed_with(query_one(Then::Bytes(garbage), DEADLINE).await, another);
}

#[tokio::test]
async fn servers_that_do_not_finish_an_answer_cost_the_time_of_a_question() {
    let cut = framed(&good().bytes());
    let cases = [
        Then::Nothing,
        Then::Bytes(cut[..1].to_vec()),
        Then::Bytes(cut[..cut.len() - 1].to_vec()),
        Then::Bytes(framed(&[0xff; 500])),
        Then::Forged(good()),
    ];
    for then in cases {
        failed_with(query_one(then, SHORT).await, "no answer within 0.3 s");
    }
}

#[tokio::test]
async fn a_server_that_sends_without_end_costs_a_question_and_then_nothing() {
    let (finding, mut server) = query_one(Then::Flood, SHORT).await;
    assert!(matches!(finding, Finding::Failed(Failure::Unreachable(_))), "{finding:?}");
    let none_is_open = server.connections.wait_for(|(open, _)| *open == 0);
    tokio::time::timeout(DEADLINE, none_is_open).await.expect("the connection is closed in time").unwrap();
}

/// A port at which nothing listens.
fn closed_port() -> (TcpSocket, SocketAddr) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

#[tokio::test]
async fn a_server_that_fails_is_followed_by_the_next_which_is_then_queried_first() {
    let (_closed, closed) = closed_port();
    let broken = Server::answering(Then::Answer(Reply { rcode: Rcode::SERVFAIL, ..good() })).await;
    let good = Server::answering(Then::Answer(good())).await;
    let servers = [closed, broken.address, good.address];
    let mut provider = provider(host(), &servers, DnsTransport::Tcp, DEADLINE);
    for _ in 0..3 {
        assert_eq!(endpoints(&query(&mut provider).await.finding).0, GOOD);
    }
    assert_eq!((broken.seen().len(), good.seen().len()), (1, 3));
}

#[tokio::test]
async fn a_server_that_is_silent_is_followed_by_the_next() {
    let silent = Server::answering(Then::Nothing).await;
    let good = Server::answering(Then::Answer(good())).await;
    let mut provider = provider(host(), &[silent.address, good.address], DnsTransport::Tcp, 2 * SHORT);
    // On a busy machine, the answer of the second server may also be too late.
    while matches!(query(&mut provider).await.finding, Finding::Failed(_)) {}
    assert!(!silent.seen().is_empty());
}

#[tokio::test]
async fn a_failure_names_every_server_and_its_fault() {
    let (_closed, closed) = closed_port();
    let refusing = Server::answering(Then::Answer(Reply { rcode: Rcode::REFUSED, ..good() })).await;
    let queried =
        query(&mut provider(host(), &[closed, refusing.address], DnsTransport::Tcp, DEADLINE)).await;
    let Finding::Failed(Failure::Refused(text)) = queried.finding else { panic!("{queried:?}") };
    let fault = "cannot connect: Connection refused (os error 111)";
    let expected = format!("{closed}: {fault}; {}: the server answers REFUSED", refusing.address);
    assert_eq!(text, format!("dns {HOST} A: {expected}"));
}

#[tokio::test]
async fn over_udp_forged_datagrams_are_ignored() {
    let server = Server::answering(Then::Forged(good())).await;
    let queried = query(&mut provider(host(), &[server.address], DnsTransport::Udp, DEADLINE)).await;
    assert_eq!(endpoints(&queried.finding).0, GOOD);
    assert_eq!(server.seen(), [Seen { name: HOST.to_owned(), rtype: Rtype::A, is_tcp: false }]);
}

#[tokio::test]
async fn a_truncated_datagram_is_followed_by_a_question_over_tcp() {
    let short = Reply { is_truncated: true, answer: vec![good().answer[0].clone()], ..good() };
    let whole = good();
    let server =
        Server::start(move |seen| Then::Answer(if seen.is_tcp { whole.clone() } else { short.clone() }))
            .await;
    let queried = query(&mut provider(host(), &[server.address], DnsTransport::Udp, DEADLINE)).await;
    assert_eq!(endpoints(&queried.finding).0, GOOD);
    assert_eq!(server.seen().iter().map(|seen| seen.is_tcp).collect::<Vec<_>>(), [false, true]);
}

#[tokio::test]
async fn a_lost_datagram_is_sent_again_once() {
    let count = Mutex::new(0);
    let server = Server::start(move |_| {
        let mut count = count.lock().unwrap();
        *count += 1;
        if *count % 2 == 1 { Then::Nothing } else { Then::Answer(good()) }
    })
    .await;
    let mut provider = provider(host(), &[server.address], DnsTransport::Udp, 2 * SHORT);
    // On a busy machine, the answer to the second datagram may also be too late.
    while matches!(query(&mut provider).await.finding, Finding::Failed(_)) {}
    assert_eq!(server.seen().len() % 2, 0);
}

/// SRV records for targets with these numbers.
fn srv_for(numbers: std::ops::Range<usize>, added: &[&str]) -> Reply {
    let records = numbers.map(|n| format!("{SERVICE} 60 SRV 0 1 80 b{n}.example.com"));
    Reply { answer: records.collect(), ..Reply::srv(&[], added) }
}

/// An answer with the address of the target: 10.0.0.7 for `b7.example.com`.
fn address(seen: &Seen) -> Reply {
    let number = &seen.name[1..seen.name.find('.').unwrap()];
    Reply::to(&seen.name, Rtype::A, &[&format!("{} 30 A 10.0.0.{number}", seen.name)])
}

#[tokio::test]
async fn addresses_that_the_answer_contains_are_not_queried_and_others_once_per_ttl() {
    let server = Server::start(|seen| {
        Then::Answer(match seen.rtype {
            Rtype::SRV => srv_for(0..3, &["b1.example.com 20 A 10.0.0.1"]),
            _ => address(seen),
        })
    })
    .await;
    let mut provider = provider(srv(), &[server.address], DnsTransport::Tcp, DEADLINE);
    let queried = query(&mut provider).await;
    assert_eq!(endpoints(&queried.finding).0, ["10.0.0.0:80 1", "10.0.0.1:80 1", "10.0.0.2:80 1"]);
    assert_eq!(after(&queried), 20);
    assert_eq!(query(&mut provider).await.finding, queried.finding);
    let names: Vec<String> = server.seen().into_iter().map(|seen| seen.name).collect();
    let sorted = {
        let mut names = names[1..3].to_vec();
        names.sort();
        names
    };
    assert_eq!(
        (names[0].as_str(), sorted.as_slice()),
        (SERVICE, &["b0.example.com", "b2.example.com"].map(str::to_owned)[..])
    );
    assert_eq!((names.len(), names[3].as_str()), (4, SERVICE));
    assert_eq!(server.connections.borrow().1, 2, "the second query opens a new connection");
}

#[tokio::test]
async fn a_target_that_loses_its_addresses_retains_them_and_one_that_never_had_any_is_left_out() {
    let rcodes: Arc<Mutex<BTreeMap<&str, Rcode>>> = Arc::default();
    let of = Arc::clone(&rcodes);
    let server = Server::start(move |seen| {
        let rcode = of.lock().unwrap().get(seen.name.as_str()).copied().unwrap_or(Rcode::NOERROR);
        Then::Answer(match (seen.rtype, rcode) {
            (Rtype::SRV, _) => srv_for(0..5, &[]),
            (_, Rcode::NOERROR) => address(seen),
            _ => Reply { rcode, ..Reply::to(&seen.name, Rtype::A, &[]) },
        })
    })
    .await;
    let mut provider = provider(srv(), &[server.address], DnsTransport::Tcp, DEADLINE);
    rcodes.lock().unwrap().insert("b4.example.com", Rcode::SERVFAIL);
    let first = query(&mut provider).await;
    let (list, notes) = endpoints(&first.finding);
    assert_eq!((list.len(), after(&first)), (4, 5), "the next query is early because of the failure");
    assert!(
        notes[0].starts_with("1 target without addresses, left out: b4.example.com (dns b4"),
        "{notes:?}"
    );

    rcodes.lock().unwrap().extend([("b1.example.com", Rcode::NXDOMAIN), ("b2.example.com", Rcode::REFUSED)]);
    provider.known.values_mut().for_each(|known| known.ttl = Duration::ZERO);
    let second = query(&mut provider).await;
    let (same, notes) = endpoints(&second.finding);
    assert_eq!((same, after(&second)), (list, 5));
    assert!(
        notes[1].starts_with("2 targets with earlier addresses: b1.example.com (NXDOMAIN), b2"),
        "{notes:?}"
    );
}

#[tokio::test]
async fn a_server_that_fails_after_the_srv_records_gives_no_list() {
    let server = Server::start(|seen| match seen.rtype {
        Rtype::SRV => {
            Then::Answer(srv_for(0..4, &["b1.example.com 20 A 10.0.0.1", "b2.example.com 20 A 10.0.0.2"]))
        }
        _ => Then::Close,
    })
    .await;
    let queried = query(&mut provider(srv(), &[server.address], DnsTransport::Tcp, DEADLINE)).await;
    let Finding::Failed(failure) = queried.finding else { panic!("{queried:?}") };
    let expected = format!("dns b0.example.com A: {}: the server closed the connection", server.address);
    assert_eq!(failure.to_string(), expected);
}

#[tokio::test]
async fn targets_have_at_most_8_questions_in_flight_on_one_connection() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address_of = listener.local_addr().unwrap();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut waiting = Vec::new();
        // The server answers only when 8 queries are waiting. A client with fewer in flight gets no
        // answer.
        for number in 0..=40 {
            let mut query = vec![0; usize::from(stream.read_u16().await.unwrap())];
            stream.read_exact(&mut query).await.unwrap();
            let (id, seen) = see(&query, true);
            let reply = if number == 0 { srv_for(0..40, &[]) } else { address(&seen) };
            waiting.push(framed(&Reply { id, ..reply }.bytes()));
            if number == 0 || waiting.len() == 8 {
                // A ninth query would be in this stream, or on another connection.
                let mut more = [0; 1];
                assert!(stream.try_read(&mut more).is_err(), "more than 8 queries are in flight");
                // The answers are in the reverse order of the queries.
                waiting.reverse();
                stream.write_all(&waiting.concat()).await.unwrap();
                waiting.clear();
            }
        }
    });
    let queried = query(&mut provider(srv(), &[address_of], DnsTransport::Tcp, DEADLINE)).await;
    assert_eq!(endpoints(&queried.finding).0.len(), 40);
    server.await.unwrap();
}

#[tokio::test]
async fn a_server_that_closes_after_each_answer_gives_a_list() {
    let server = Server::start(|seen| {
        Then::Last(if seen.rtype == Rtype::SRV { srv_for(0..4, &[]) } else { address(seen) })
    })
    .await;
    let queried = query(&mut provider(srv(), &[server.address], DnsTransport::Tcp, DEADLINE)).await;
    assert_eq!(endpoints(&queried.finding).0.len(), 4);
}
