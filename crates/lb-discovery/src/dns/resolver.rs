//! Queries DNS servers: chooses the server and the transport, and limits the number of queries at a
//! time and per second. A host has one resolver for each different [`DnsSettings`].
//!
//! The crate `domain` implements messages and transports, and matches the ids of queries and
//! answers. Its TCP transport does not end while a server sends without pause. Therefore each
//! connection has a limit of bytes, and the transport is aborted when its [`ServerConnection`] is
//! dropped.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use domain::net::client::protocol::UdpConnect;
use domain::net::client::request::{
    Error, GetResponse as _, RequestMessage, RequestMessageMulti, SendRequest as _,
};
use domain::net::client::{dgram, stream};
use lb_config::discovery::{DnsSettings, DnsTransport};
use lb_host::regular_file;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::message::{self, Lookup, Question, RecordData, Srv};
use crate::Failure;

/// The largest number of queries that a resolver has in flight.
pub const IN_FLIGHT: usize = 8;

/// The largest number of servers in resolv.conf that are used; the C library has the same limit.
const MAX_SERVERS: usize = 3;

/// The longest resolv.conf, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// The number of bytes that a server may send on one connection: a thousand of the longest answers.
const MAX_CONNECTION_BYTES: u64 = 64 << 20;

/// The longest time until a datagram without an answer is sent again.
const RESEND: Duration = Duration::from_secs(1);

const CLOSED: &str = "the server closed the connection";

/// The limits of a host's DNS queries.
#[derive(Clone, Copy, Debug)]
pub struct QueryLimits {
    /// The longest time for a query, over all servers. The time starts when the query is in flight
    /// ([`IN_FLIGHT`]).
    pub whole: Duration,
    /// The largest number of queries per second, over all resolvers.
    pub per_second: usize,
}

impl Default for QueryLimits {
    fn default() -> Self {
        Self { whole: Duration::from_secs(5), per_second: 50 }
    }
}

/// The resolvers of a host, one for each different [`DnsSettings`].
pub struct Resolvers {
    resolv_conf: PathBuf,
    whole: Duration,
    pace: Arc<RateLimiter>,
    known: Mutex<Vec<(DnsSettings, Weak<Resolver>)>>,
}

impl Default for Resolvers {
    fn default() -> Self {
        Self::new(Path::new("/etc/resolv.conf"), QueryLimits::default())
    }
}

impl Resolvers {
    /// If settings contain no addresses of servers, the addresses are read from the file
    /// `resolv_conf`.
    pub fn new(resolv_conf: &Path, limits: QueryLimits) -> Self {
        let QueryLimits { whole, per_second } = limits;
        let pace = Arc::new(RateLimiter { per_second, last: Mutex::default() });
        Self { resolv_conf: resolv_conf.to_owned(), whole, pace, known: Mutex::default() }
    }

    /// Returns the resolver that all users of equal settings share.
    pub fn get(&self, settings: &DnsSettings) -> Arc<Resolver> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(_, resolver)| resolver.strong_count() > 0);
        let same = known.iter().find(|(of, _)| of == settings);
        if let Some(resolver) = same.and_then(|(_, resolver)| resolver.upgrade()) {
            return resolver;
        }
        let resolver = Arc::new(Resolver {
            settings: settings.clone(),
            resolv_conf: self.resolv_conf.clone(),
            whole: self.whole,
            pace: Arc::clone(&self.pace),
            permits: Semaphore::new(IN_FLIGHT),
            users: AtomicUsize::new(0),
            answered_last: Mutex::new(None),
            link: tokio::sync::Mutex::new(None),
        });
        known.push((settings.clone(), Arc::downgrade(&resolver)));
        resolver
    }
}

/// Queries the servers of one [`DnsSettings`].
pub struct Resolver {
    settings: DnsSettings,
    resolv_conf: PathBuf,
    whole: Duration,
    pace: Arc<RateLimiter>,
    permits: Semaphore,
    /// The number of [`ConnectionGuard`]s. Each query has one.
    users: AtomicUsize,
    /// The server that sent the last usable answer. This server is queried first, so that queries
    /// do not wait for an unreachable server before it in the list.
    answered_last: Mutex<Option<SocketAddr>>,
    /// The connection that all queries use; `None` while there is no query. Servers permit few
    /// connections; BIND permits 150 by default.
    link: tokio::sync::Mutex<Option<Arc<ServerConnection>>>,
}

/// While a guard exists, the resolver does not close its connection.
pub struct ConnectionGuard<R: Deref<Target = Resolver>>(R);

impl<R: Deref<Target = Resolver>> ConnectionGuard<R> {
    /// Creates a guard, so that the connection remains open between consecutive queries.
    pub fn of(resolver: R) -> Self {
        resolver.users.fetch_add(1, Ordering::AcqRel);
        Self(resolver)
    }
}

impl<R: Deref<Target = Resolver>> Drop for ConnectionGuard<R> {
    fn drop(&mut self) {
        if self.0.users.fetch_sub(1, Ordering::AcqRel) == 1 {
            // If another task holds the lock, a new query has begun; the `ConnectionGuard` of that
            // query closes the connection.
            if let Ok(mut link) = self.0.link.try_lock() {
                *link = None;
            }
        }
    }
}

type Connection = stream::Connection<RequestMessage<Vec<u8>>, RequestMessageMulti<Vec<u8>>>;

/// A TCP connection to a server.
struct ServerConnection {
    server: SocketAddr,
    connection: Connection,
    /// The number of bytes that the server has sent.
    received: Arc<AtomicU64>,
    /// A query got no answer on this connection, so no new query uses the connection.
    is_over: AtomicBool,
    transport: AbortHandle,
}

impl Drop for ServerConnection {
    fn drop(&mut self) {
        self.transport.abort();
    }
}

/// The receiving half of a connection. After [`MAX_CONNECTION_BYTES`], it returns the end of the
/// stream.
struct BoundedReader {
    socket: OwnedReadHalf,
    received: Arc<AtomicU64>,
}

impl AsyncRead for BoundedReader {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { socket, received } = self.get_mut();
        if received.load(Ordering::Relaxed) >= MAX_CONNECTION_BYTES {
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let result = Pin::new(socket).poll_read(cx, buffer);
        received.fetch_add((buffer.filled().len() - before) as u64, Ordering::Relaxed);
        result
    }
}

/// A query on a connection. If it is dropped without an answer, because of an error or a timeout,
/// later queries use another connection.
struct PendingQuery {
    link: Arc<ServerConnection>,
    is_answered: bool,
}

impl Drop for PendingQuery {
    fn drop(&mut self) {
        if !self.is_answered {
            self.link.is_over.store(true, Ordering::Relaxed);
        }
    }
}

impl Resolver {
    /// Requests the SRV records of an absolute name.
    ///
    /// # Errors
    /// If no server sends a usable answer. The text of the failure is one line with every server
    /// and its fault.
    pub async fn srv(&self, name: &str) -> Result<Lookup<Srv>, Failure> {
        self.query(&Question::srv(name)?).await
    }

    /// Requests the A records of an absolute name, or with `is_ipv6` its AAAA records.
    ///
    /// # Errors
    /// If no server sends a usable answer. The text of the failure is one line with every server
    /// and its fault.
    pub async fn addresses(&self, name: &str, is_ipv6: bool) -> Result<Lookup<IpAddr>, Failure> {
        self.query(&Question::addresses(name, is_ipv6)?).await
    }

    async fn query<T: RecordData>(&self, question: &Question) -> Result<Lookup<T>, Failure> {
        let _hold = ConnectionGuard::of(self);
        let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
        let servers = self.servers().await.map_err(|failure| of(question, failure))?;
        let count = u32::try_from(servers.len()).unwrap_or(u32::MAX);
        let ends = attempts(self.settings.transport, self.whole, count);
        let start = Instant::now();
        let last = start + self.whole;
        let (mut now, mut waited, mut faults) = (start, Duration::ZERO, Vec::new());
        for (server, end) in servers.iter().cycle().zip(ends) {
            // The wait takes no time from the attempt: a server cannot answer before the query is
            // sent.
            let due = self.pace.due(now);
            waited += due - now;
            if timeout_at(last, sleep_until(due)).await.is_err() {
                faults.push((*server, ServerFault::Failure(self.late())));
                break;
            }
            let end = last.min(start + end + waited);
            let fault = match timeout_at(end, self.exchange(*server, question)).await {
                Ok(answer) => match answer.and_then(|answer| message::read(&answer, question)) {
                    Ok(answer) => {
                        *self.answered_last.lock().unwrap_or_else(PoisonError::into_inner) = Some(*server);
                        return Ok(answer);
                    }
                    Err(failure) => ServerFault::Failure(failure),
                },
                Err(_) => ServerFault::Silence(end - due),
            };
            faults.push((*server, fault));
            now = Instant::now();
        }
        Err(of(question, joined(&faults)))
    }

    /// The failure of an attempt that did not begin, because the pace permitted no query in time.
    fn late(&self) -> Failure {
        let (limit, whole) = (self.pace.per_second, self.whole.as_secs_f64());
        let why = format!("the limit of {limit} queries per second delayed the query beyond {whole:.1} s");
        Failure::Unreachable(why)
    }

    /// The servers, in the order in which they are queried.
    async fn servers(&self) -> Result<Vec<SocketAddr>, Failure> {
        let mut servers = self.settings.servers.clone();
        if servers.is_empty() {
            servers = read_resolv_conf(&self.resolv_conf).await?;
        }
        let last = *self.answered_last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = servers.iter().position(|server| Some(*server) == last) {
            servers.rotate_left(first);
        }
        Ok(servers)
    }

    /// Sends a query, which the pace has permitted, and returns the answer.
    async fn exchange(&self, server: SocketAddr, question: &Question) -> Result<Vec<u8>, Failure> {
        if self.settings.transport == DnsTransport::Tcp {
            return self.over_tcp(server, question).await;
        }
        let mut config = dgram::Config::new();
        config.set_max_retries(0);
        // The timeout of the whole query ends the wait earlier.
        config.set_read_timeout(2 * self.whole);
        let transport = dgram::Connection::with_config(UdpConnect::new(server), config);
        let answer = transport.send_request(question.request()).get_response().await;
        let answer = answer.map_err(|error| failure(&error))?;
        if answer.header().tc() {
            self.pace.wait().await;
            return self.over_tcp(server, question).await;
        }
        Ok(answer.as_slice().to_vec())
    }

    async fn over_tcp(&self, server: SocketAddr, question: &Question) -> Result<Vec<u8>, Failure> {
        let mut attempt = 1;
        loop {
            let mut pending = PendingQuery { link: self.link(server).await?, is_answered: false };
            let connection = &pending.link.connection;
            let error = match connection.get_request(question.request()).get_response().await {
                Ok(answer) => {
                    pending.is_answered = true;
                    return Ok(answer.as_slice().to_vec());
                }
                Err(error) => error,
            };
            // Some servers close a connection after one or more answers, while other queries are in
            // flight on the connection. These queries are sent again. Even if a server answers only
            // one query per connection, the last of `IN_FLIGHT` queries is answered in its last
            // attempt.
            let has_received = pending.link.received.load(Ordering::Relaxed) > 0;
            match failure(&error) {
                Failure::Unreachable(_) if has_received && attempt < IN_FLIGHT => attempt += 1,
                failure => return Err(failure),
            }
            self.pace.wait().await;
        }
    }

    /// Returns the connection to a server. If there is no usable connection, connects.
    async fn link(&self, server: SocketAddr) -> Result<Arc<ServerConnection>, Failure> {
        let mut slot = self.link.lock().await;
        if let Some(link) =
            slot.as_ref().filter(|link| link.server == server && !link.is_over.load(Ordering::Relaxed))
        {
            return Ok(Arc::clone(link));
        }
        let socket = TcpStream::connect(server).await;
        let socket = socket.map_err(|error| Failure::Unreachable(format!("cannot connect: {error}")))?;
        // A query is one small segment, which must not wait for an acknowledgement.
        let _ = socket.set_nodelay(true);
        let (read, write) = socket.into_split();
        let mut config = stream::Config::new();
        config.set_response_timeout(2 * self.whole);
        let received = Arc::<AtomicU64>::default();
        let read = BoundedReader { socket: read, received: Arc::clone(&received) };
        let stream = tokio::io::join(read, write);
        let (connection, transport) = Connection::with_config(stream, config);
        let transport = tokio::spawn(transport.run()).abort_handle();
        let link =
            ServerConnection { server, connection, received, is_over: AtomicBool::new(false), transport };
        Ok(Arc::clone(slot.insert(Arc::new(link))))
    }
}

/// Permits at most `per_second` queries in any second.
struct RateLimiter {
    per_second: usize,
    /// The times at which the last `per_second` queries were due, in order.
    last: Mutex<VecDeque<Instant>>,
}

impl RateLimiter {
    async fn wait(&self) {
        let due = self.due(Instant::now());
        sleep_until(due).await;
    }

    /// Returns the time at which the next query may be sent. The limit includes the query even if
    /// it is never sent.
    fn due(&self, now: Instant) -> Instant {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let first = if last.len() < self.per_second { None } else { last.pop_front() };
        let due = first.map_or(now, |first| now.max(first + Duration::from_secs(1)));
        last.push_back(due);
        due
    }
}

/// When the attempts of a question end, one server after the other, if the pace permits each at
/// once. A datagram can be lost, so each server is queried twice over UDP. The first time is at
/// most [`RESEND`]: otherwise an outage of less than a second would cost half of a question's time.
fn attempts(transport: DnsTransport, whole: Duration, servers: u32) -> Vec<Duration> {
    let share = whole / servers;
    let (rounds, first) = match transport {
        DnsTransport::Tcp => (1, share),
        DnsTransport::Udp => (2, RESEND.min(share / 2)),
    };
    let end = |number: u32| first * number.min(servers) + (share - first) * number.saturating_sub(servers);
    (1..=servers * rounds).map(end).collect()
}

async fn read_resolv_conf(path: &Path) -> Result<Vec<SocketAddr>, Failure> {
    let file = path.to_owned();
    let read = move || regular_file::read(&regular_file::open(&file)?.0, MAX_FILE_BYTES);
    let bytes = tokio::task::spawn_blocking(read).await.unwrap_or_else(|error| Err(io::Error::other(error)));
    let fault = |what: String| Failure::Unreachable(format!("{}: {what}", path.display()));
    let bytes = bytes.map_err(|error| fault(error.to_string()))?;
    let bytes = bytes.ok_or_else(|| fault(format!("longer than {MAX_FILE_BYTES} bytes")))?;
    let servers = parse_resolv_conf(&String::from_utf8_lossy(&bytes));
    if servers.is_empty() {
        Err(fault("no `nameserver` line has a valid address".to_owned()))
    } else {
        Ok(servers)
    }
}

/// Returns the servers in the text of a resolv.conf. Ignores all other lines, and servers with
/// invalid addresses.
fn parse_resolv_conf(text: &str) -> Vec<SocketAddr> {
    let addresses = text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let address: IpAddr =
            words.next().filter(|word| *word == "nameserver").and(words.next())?.parse().ok()?;
        Some(SocketAddr::new(address, 53))
    });
    addresses.take(MAX_SERVERS).collect()
}

/// Converts an error of a transport to a failure.
fn failure(error: &Error) -> Failure {
    let text = match error {
        Error::WrongReplyForQuery => {
            return Failure::Malformed("the answer is to another question".to_owned());
        }
        Error::ShortMessage => return Failure::Malformed("the answer is shorter than a header".to_owned()),
        Error::ConnectionClosed | Error::StreamReceiveError | Error::StreamUnexpectedEndOfData => {
            CLOSED.to_owned()
        }
        Error::StreamReadError(error) | Error::StreamWriteError(error) => match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                CLOSED.to_owned()
            }
            _ => error.to_string(),
        },
        error => error.to_string(),
    };
    Failure::Unreachable(text)
}

/// Why an attempt gave no usable answer.
#[derive(Debug)]
enum ServerFault {
    /// The server sent no answer within this time.
    Silence(Duration),
    Failure(Failure),
}

/// Joins the faults of all attempts into one failure. Equal failures of a server appear once, and
/// its times without an answer as their sum. The result has the kind of the last failure.
fn joined(faults: &[(SocketAddr, ServerFault)]) -> Failure {
    let silence = |of: &SocketAddr| -> Duration {
        let silences = faults.iter().filter(|(server, _)| server == of);
        silences
            .map(|(_, fault)| match fault {
                ServerFault::Silence(time) => *time,
                ServerFault::Failure(_) => Duration::ZERO,
            })
            .sum()
    };
    let mut texts: Vec<String> = Vec::new();
    let mut last = Failure::Unreachable(String::new());
    for (server, fault) in faults {
        last = match fault {
            ServerFault::Silence(_) => {
                Failure::Unreachable(format!("no answer within {:.1} s", silence(server).as_secs_f64()))
            }
            ServerFault::Failure(failure) => failure.clone(),
        };
        let text = format!("{server}: {last}");
        if !texts.contains(&text) {
            texts.push(text);
        }
    }
    last.map(|_| texts.join("; "))
}

fn of(question: &Question, failure: Failure) -> Failure {
    failure.map(|text| format!("dns {question}: {text}"))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn no_second_has_more_than_50_questions_and_a_pause_permits_as_many_at_once() {
        let (pace, start) = (RateLimiter { per_second: 50, last: Mutex::default() }, Instant::now());
        let mut random = fastrand::Rng::with_seed(3);
        let mut at = Vec::new();
        for number in 0..500 {
            let pause = if number % 120 == 0 { 3000 } else { random.u64(0..15) };
            tokio::time::advance(Duration::from_millis(pause)).await;
            pace.wait().await;
            at.push(start.elapsed());
        }
        assert!(at.windows(51).all(|some| some[50] - some[0] >= Duration::from_secs(1)));
        let burst = &at[120..170];
        assert!(burst[49] - burst[0] < Duration::from_millis(750), "{burst:?}");
    }

    #[test]
    fn a_question_over_udp_is_sent_again_after_a_second() {
        let ends = |transport, whole, servers| {
            let ends = attempts(transport, Duration::from_millis(whole), servers).into_iter();
            ends.map(|end| end.as_millis()).collect::<Vec<_>>()
        };
        assert_eq!(ends(DnsTransport::Udp, 5000, 1), [1000, 5000]);
        assert_eq!(ends(DnsTransport::Udp, 5000, 2), [1000, 2000, 3500, 5000]);
        assert_eq!(ends(DnsTransport::Udp, 1200, 3), [200, 400, 600, 800, 1000, 1200]);
        assert_eq!(ends(DnsTransport::Tcp, 5000, 1), [5000]);
        assert_eq!(ends(DnsTransport::Tcp, 6000, 3), [2000, 4000, 6000]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_the_limit_of_questions_takes_no_time_from_the_first_datagram() {
        let cases = [
            (0, 2, "no answer within 5.0 s"),
            (100, 2, "no answer within 3.0 s"),
            (300, 0, "the limit of 50 queries per second delayed the query beyond 5.0 s"),
        ];
        for (earlier, datagrams, fault) in cases {
            let silent = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            silent.set_nonblocking(true).unwrap();
            let (min_ttl, max_ttl, transport) = (Duration::ZERO, Duration::MAX, DnsTransport::Udp);
            let server = silent.local_addr().unwrap();
            let settings = DnsSettings { servers: vec![server], transport, min_ttl, max_ttl };
            let (resolvers, start) = (Resolvers::default(), Instant::now());
            for _ in 0..earlier {
                resolvers.pace.due(start);
            }
            let failure = resolvers.get(&settings).addresses("users.example.com", false).await.unwrap_err();
            let received = std::iter::from_fn(|| silent.recv(&mut [0; 512]).ok()).count();
            assert_eq!(
                (failure.to_string(), start.elapsed().as_secs(), received),
                (format!("dns users.example.com A: {server}: {fault}"), 5, datagrams)
            );
        }
    }

    #[test]
    fn a_failure_contains_the_time_that_each_server_had_for_an_answer() {
        let silent = |ms| ServerFault::Silence(Duration::from_millis(ms));
        let refused = || ServerFault::Failure(Failure::Refused("SERVFAIL".to_owned()));
        let (a, b) = (SocketAddr::from(([10, 0, 0, 1], 53)), SocketAddr::from(([10, 0, 0, 2], 53)));
        let unreachable = |text: &str| Failure::Unreachable(text.to_owned());
        let cases = [
            (
                vec![(a, silent(1000)), (a, refused())],
                Failure::Refused("10.0.0.1:53: no answer within 1.0 s; 10.0.0.1:53: SERVFAIL".to_owned()),
            ),
            (
                vec![(a, refused()), (a, silent(4900))],
                unreachable("10.0.0.1:53: SERVFAIL; 10.0.0.1:53: no answer within 4.9 s"),
            ),
            (
                vec![(a, silent(1000)), (b, silent(1000)), (a, silent(1500)), (b, silent(1200))],
                unreachable("10.0.0.1:53: no answer within 2.5 s; 10.0.0.2:53: no answer within 2.2 s"),
            ),
            (vec![(a, refused()), (a, refused())], Failure::Refused("10.0.0.1:53: SERVFAIL".to_owned())),
        ];
        for (faults, expected) in cases {
            assert_eq!(joined(&faults), expected, "{faults:?}");
        }
    }

    #[test]
    fn only_the_first_three_name_servers_of_a_resolv_conf_are_used() {
        let text = "# 10.0.0.1\nsearch example.com\nnameserver\t10.0.0.2 \n nameserver 10.0.0.3\n\
                    nameserver\nnameserver ns1\nnameservers 10.0.0.4\nnameserver fe80::1%eth0\n\
                    nameserver ::1\noptions use-vc\nnameserver 10.0.0.5";
        let expected = ["10.0.0.2:53", "10.0.0.3:53", "[::1]:53"];
        assert_eq!(parse_resolv_conf(text), expected.map(|server| server.parse().unwrap()));
    }

    #[tokio::test]
    async fn a_changed_resolv_conf_has_effect_with_the_next_question() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("resolv.conf");
        let (min_ttl, max_ttl, transport) = (Duration::ZERO, Duration::MAX, DnsTransport::Tcp);
        let settings = DnsSettings { servers: Vec::new(), transport, min_ttl, max_ttl };
        let resolver = Resolvers::new(&path, QueryLimits::default()).get(&settings);
        let server = |text: &str| vec![text.parse::<SocketAddr>().unwrap()];
        std::fs::write(&path, "nameserver 10.0.0.1").unwrap();
        assert_eq!(resolver.servers().await, Ok(server("10.0.0.1:53")));
        std::fs::write(&path, "nameserver 10.0.0.2").unwrap();
        assert_eq!(resolver.servers().await, Ok(server("10.0.0.2:53")));
        let fault = async || resolver.servers().await.unwrap_err().to_string();
        std::fs::write(&path, "search example.com").unwrap();
        assert!(fault().await.ends_with("resolv.conf: no `nameserver` line has a valid address"));
        std::fs::write(&path, vec![b'\n'; 70_000]).unwrap();
        assert!(fault().await.ends_with("resolv.conf: longer than 65536 bytes"));
        std::fs::remove_file(&path).unwrap();
        assert!(fault().await.contains("No such file"));
    }

    #[test]
    fn equal_settings_share_a_resolver_until_nothing_uses_it() {
        let resolvers = Resolvers::default();
        let (min_ttl, max_ttl, servers) = (Duration::ZERO, Duration::MAX, Vec::new());
        let tcp = DnsSettings { servers, transport: DnsTransport::Tcp, min_ttl, max_ttl };
        let udp = DnsSettings { transport: DnsTransport::Udp, ..tcp.clone() };
        let (first, second) = (resolvers.get(&tcp), resolvers.get(&udp));
        assert!(Arc::ptr_eq(&first, &resolvers.get(&tcp)) && !Arc::ptr_eq(&first, &second));
        drop((first, second));
        let third = resolvers.get(&udp);
        assert_eq!((Arc::strong_count(&third), resolvers.known.lock().unwrap().len()), (1, 1));
    }
}
