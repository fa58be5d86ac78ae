//! Probes by a connection: whether a backend accepts one, or answers an HTTP request over it.
//!
//! Each backend has a task of its own, so that one that does not answer holds no other up. How many connections are under way at a
//! time is bounded, and so is what is read of an answer.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lb_core::health::probed::Probed;
use lb_core::membership::{Member, Membership};
use lb_kernel::{NamespaceId, NetworkNamespace};
use tokio::net::TcpSocket;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::task::AbortHandle;

use crate::error::chain;

/// How many of those that would stand in next for members are probed.
const NEXT: usize = 4;

/// Whom a client task wants probed, by whatever means: its members and those that would stand in next; and the others of the latter,
/// of which only those that are used are.
pub fn probed(membership: &Membership) -> (impl Iterator<Item = &Member>, &[Member]) {
    let (first, others) = membership.next.split_at(membership.next.len().min(NEXT));
    (membership.members.iter().chain(first), others)
}

/// Connections under way at a time.
pub const MAX_UNDER_WAY: usize = 256;

/// The network namespace that probes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The daemon's.
    Host,
    /// That of a client's processes, which is another one.
    Client(NamespaceId),
}

/// What is probed, and how.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectTarget {
    /// Where from.
    pub origin: Origin,
    /// Where.
    pub at: SocketAddr,
    /// What is asked for by HTTP, if anything.
    pub path: Option<String>,
    /// How often.
    pub interval: Duration,
    /// After how long it has failed.
    pub timeout: Duration,
    /// Successes in a row before it is well again.
    pub rise: u32,
    /// Failures in a row before it is refusing connections.
    pub fall: u32,
}

/// What the probes of a target have found.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Whether it is refusing connections.
    pub probed: Probed,
    /// Why the last probe failed, if it did.
    pub failure: Option<String>,
    /// How long the last probe took.
    pub took: Option<Duration>,
    /// How many there were.
    pub probes: u64,
    /// How many of them failed.
    pub failures: u64,
}

type Shared = Arc<Mutex<BTreeMap<ConnectTarget, Findings>>>;

/// All that are probed.
pub struct Probes {
    tasks: BTreeMap<ConnectTarget, AbortHandle>,
    findings: Shared,
    permits: Arc<Semaphore>,
    news: Arc<Notify>,
    random: RandomState,
}

impl Probes {
    /// Nobody yet. `news` is woken when one has begun or ceased to refuse connections.
    pub fn new(news: Arc<Notify>) -> Self {
        Self {
            tasks: BTreeMap::new(),
            findings: Arc::default(),
            permits: Arc::new(Semaphore::new(MAX_UNDER_WAY)),
            news,
            random: RandomState::new(),
        }
    }

    /// Probes these from now on, and nobody else. What was found of those that stay is kept. `entered` is the way to where a probe
    /// comes from; `None` for the daemon's own namespace.
    pub fn set_targets(
        &mut self,
        targets: impl IntoIterator<Item = ConnectTarget>,
        entered: impl Fn(Origin) -> Option<Arc<NetworkNamespace>>,
    ) {
        let mut before = std::mem::take(&mut self.tasks);
        for target in targets {
            let start = || self.start(target.clone(), entered(target.origin));
            let task = before.remove(&target).unwrap_or_else(start);
            self.tasks.insert(target, task);
        }
        for (target, task) in before {
            task.abort();
            lock(&self.findings).remove(&target);
        }
    }

    fn start(&self, target: ConnectTarget, within: Option<Arc<NetworkNamespace>>) -> AbortHandle {
        lock(&self.findings).insert(target.clone(), Findings::default());
        let probing = Probing {
            target,
            within,
            findings: Arc::clone(&self.findings),
            permits: Arc::clone(&self.permits),
            news: Arc::clone(&self.news),
            random: self.random.clone(),
        };
        tokio::spawn(probing.run()).abort_handle()
    }

    /// What was found of one.
    pub fn findings(&self, target: &ConnectTarget) -> Option<Findings> {
        lock(&self.findings).get(target).cloned()
    }

    /// Whether nobody is probed.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Those that are refusing connections.
    pub fn refusing(&self) -> Vec<ConnectTarget> {
        let findings = lock(&self.findings);
        let refusing = findings.iter().filter(|(_, findings)| findings.probed.is_refusing());
        refusing.map(|(target, _)| target.clone()).collect()
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.tasks.values().for_each(AbortHandle::abort);
    }
}

fn lock(findings: &Shared) -> MutexGuard<'_, BTreeMap<ConnectTarget, Findings>> {
    findings.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Probing {
    target: ConnectTarget,
    /// `None` for the daemon's own namespace.
    within: Option<Arc<NetworkNamespace>>,
    findings: Shared,
    permits: Arc<Semaphore>,
    news: Arc<Notify>,
    random: RandomState,
}

impl Probing {
    async fn run(self) {
        let mut turn = 0_u64;
        // The first comes somewhere in the interval, the others nine to eleven tenths of it after the one before.
        let mut pause = self.target.interval.mul_f64(self.fraction(turn));
        // Until it is not probed any more.
        loop {
            tokio::time::sleep(pause).await;
            turn += 1;
            pause = self.target.interval.mul_f64(0.9 + 0.2 * self.fraction(turn));
            let Ok(_permit) = self.permits.acquire().await else { return };
            let begun = lb_kernel::monotonic_ns();
            let late = || Failure::Backend(format!("no answer in {} ms", self.target.timeout.as_millis()));
            let result =
                tokio::time::timeout(self.target.timeout, probe(&self.target, self.within.as_deref())).await;
            let result = result.unwrap_or_else(|_| Err(late()));
            let took = Duration::from_nanos(lb_kernel::monotonic_ns().saturating_sub(begun));
            self.note(result, took);
        }
    }

    fn fraction(&self, turn: u64) -> f64 {
        let hash = self.random.hash_one((self.target.at, turn));
        #[expect(clippy::cast_precision_loss, reason = "53 bits of chance are enough")]
        let fraction = (hash >> 11) as f64 / (1_u64 << 53) as f64;
        fraction
    }

    fn note(&self, result: Result<(), Failure>, took: Duration) {
        let mut all = lock(&self.findings);
        let Some(findings) = all.get_mut(&self.target) else { return };
        let is_of_backend = !matches!(result, Err(Failure::Host(_)));
        let is_news =
            is_of_backend && findings.probed.take(result.is_ok(), self.target.rise, self.target.fall);
        findings.probes += 1;
        findings.failures += u64::from(result.is_err());
        findings.failure = result.err().map(|failure| match failure {
            Failure::Backend(why) => why,
            Failure::Host(why) => format!("this host cannot probe it: {why}"),
        });
        findings.took = Some(took);
        drop(all);
        if is_news {
            self.news.notify_one();
        }
    }
}

/// Why a probe has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Failure {
    /// By the backend, or on the way to it.
    Backend(String),
    /// By this host, which has no descriptor left, say. That says nothing of the backend, and would say the same of all.
    Host(String),
}

/// One probe.
async fn probe(target: &ConnectTarget, within: Option<&NetworkNamespace>) -> Result<(), Failure> {
    let socket = socket(target.at, within).await.map_err(|error| Failure::Host(error.to_string()))?;
    let stream = socket.connect(target.at).await.map_err(|error| unconnected(&error))?;
    match &target.path {
        Some(path) => {
            let result = lb_http::probe::probe(stream, target.at, path, "socklb").await;
            result.map_err(|error| Failure::Backend(chain(&error)))
        }
        None => Ok(()),
    }
}

/// A socket for a connection to there, which the thread of the namespace makes if it is another one than the daemon's.
async fn socket(to: SocketAddr, within: Option<&NetworkNamespace>) -> io::Result<TcpSocket> {
    let make = move || if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
    let Some(namespace) = within else { return make() };
    let (made, socket) = oneshot::channel();
    namespace.carry_out(move || drop(made.send(make())));
    socket.await.map_err(io::Error::other)?
}

/// What a failed connect says: of the backend, or of this host.
fn unconnected(error: &io::Error) -> Failure {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable, TimedOut};
    match error.kind() {
        ConnectionRefused | ConnectionReset | HostUnreachable | NetworkUnreachable | TimedOut => {
            Failure::Backend(error.to_string())
        }
        _ => Failure::Host(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    fn target(at: SocketAddr, path: Option<&str>) -> ConnectTarget {
        ConnectTarget {
            origin: Origin::Host,
            at,
            path: path.map(str::to_owned),
            interval: Duration::from_millis(20),
            timeout: Duration::from_secs(10),
            rise: 1,
            fall: 2,
        }
    }

    /// A server that gives each connection this answer, after its request.
    async fn server(answer: &'static [u8]) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let mut head = [0; 1024];
                    let _ = stream.read(&mut head).await;
                    let _ = stream.write_all(answer).await;
                });
            }
        });
        at
    }

    #[tokio::test]
    async fn an_answer_is_judged_if_one_is_wanted() {
        let at = server(b"HTTP/1.1 503 Service Unavailable\r\n\r\n").await;
        assert_eq!(probe(&target(at, None), None).await, Ok(()));
        let unwell = Failure::Backend("it answers 503 Service Unavailable".to_owned());
        assert_eq!(probe(&target(at, Some("/healthz")), None).await, Err(unwell));
    }

    #[tokio::test]
    async fn a_host_that_cannot_connect_speaks_against_no_backend() {
        for (errno, is_of_backend) in [
            (libc::ECONNREFUSED, true),
            (libc::EHOSTUNREACH, true),
            (libc::ENETUNREACH, true),
            (libc::ETIMEDOUT, true),
            (libc::EMFILE, false),
            (libc::ENFILE, false),
            (libc::ENOMEM, false),
            (libc::EADDRNOTAVAIL, false),
            (libc::EPERM, false),
        ] {
            let failure = unconnected(&io::Error::from_raw_os_error(errno));
            assert_eq!(matches!(failure, Failure::Backend(_)), is_of_backend, "{failure:?}");
        }
        // Without a scope the kernel does not know which link is meant, and says so before anything is sent.
        let at = "[fe80::1]:9".parse().unwrap();
        let mut probes = Probes::new(Arc::default());
        let target = ConnectTarget { fall: 1, ..target(at, None) };
        probes.set_targets([target.clone()], |_| None);
        // Bound: the test has a time limit as a whole.
        let limit = tokio::time::timeout(Duration::from_secs(10), async {
            while probes.findings(&target).unwrap().probes < 3 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        limit.await.expect("three probes");
        let findings = probes.findings(&target).unwrap();
        assert!(findings.failure.unwrap().starts_with("this host cannot probe it: "));
        assert!(probes.refusing().is_empty());
    }

    #[tokio::test]
    async fn who_does_not_answer_in_time_has_failed_and_holds_nobody_up() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut probes = Probes::new(Arc::default());
        let slow = ConnectTarget {
            timeout: Duration::from_millis(50),
            ..target(silent.local_addr().unwrap(), Some("/"))
        };
        probes.set_targets([slow.clone()], |_| None);
        tokio::time::timeout(Duration::from_secs(10), probes.news.notified()).await.expect("news");
        assert_eq!(probes.refusing(), std::slice::from_ref(&slow));
        assert_eq!(probes.findings(&slow).unwrap().failure.as_deref(), Some("no answer in 50 ms"));
    }

    #[tokio::test]
    async fn who_refuses_connections_is_found_and_so_is_that_it_is_back() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        drop(listener);
        let mut probes = Probes::new(Arc::default());
        let news = Arc::clone(&probes.news);
        let target = target(at, None);
        probes.set_targets([target.clone()], |_| None);
        let limit = Duration::from_secs(10);
        tokio::time::timeout(limit, news.notified()).await.expect("news");
        assert_eq!(probes.refusing(), std::slice::from_ref(&target));
        let _listener = TcpListener::bind(at).await.unwrap();
        tokio::time::timeout(limit, news.notified()).await.expect("news");
        assert!(probes.refusing().is_empty());
        let found = probes.findings(&target).unwrap();
        assert!(found.probes > found.failures && found.failures >= 2 && found.took.is_some());
        probes.set_targets([], |_| None);
        assert!(probes.is_empty() && probes.findings(&target).is_none());
    }
}
