//! Connect probes: they test whether a backend accepts a connection, or answers an HTTP request.
//!
//! Each backend has a task of its own, and each service may use only its part of the concurrent
//! connections, so backends that do not answer cannot delay the probes of another service. At most
//! a fixed number of probes begin per second, and only a limited number of bytes of each answer is
//! read.

pub mod cost;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lb_core::health::probed::Probed;
use lb_core::health::{Health, Why};
use lb_core::membership::{Member, Membership};
use tokio::net::TcpSocket;
use tokio::sync::{Notify, Semaphore};
use tokio::task::AbortHandle;

use crate::error::chain;

/// The maximum number of unused endpoints that are probed because they are next to replace members.
/// The same maximum applies to unused lame ducks, which serve if no member serves.
const NEXT: usize = 4;

/// The endpoints that the daemon probes or polls for a client task: members, their substitutes, the
/// endpoints that are next to replace members, and the lame ducks that serve if no member serves.
pub fn probed(
    membership: &Membership,
    is_used: impl Fn(SocketAddr) -> bool + Copy,
) -> impl Iterator<Item = &Member> {
    let others = [&membership.next, &membership.lame_ducks].into_iter().flat_map(move |list| {
        let mut unused = 0;
        list.iter().filter(move |member| {
            let is_used = is_used(member.endpoint.address);
            unused += usize::from(!is_used);
            is_used || unused <= NEXT
        })
    });
    membership.members.iter().chain(others)
}

/// The maximum number of concurrent connections of all services together.
pub const MAX_UNDER_WAY: usize = 256;

/// The minimum time between the starts of two probes: at most a thousand probes start per second.
pub const BETWEEN: Duration = Duration::from_millis(1);

/// A backend to probe, with the settings of its probes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectTarget {
    /// The address that the probe connects to.
    pub at: SocketAddr,
    /// The path of the HTTP request; `None` to connect only.
    pub path: Option<String>,
    pub interval: Duration,
    /// The time after which the probe has failed.
    pub timeout: Duration,
    /// The number of successes in a row after which a refusing backend is healthy again.
    pub rise: u32,
    /// The number of failures in a row after which a backend is refusing connections.
    pub fall: u32,
}

/// The health of a backend according to its probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbedHealth {
    /// Healthy or refusing.
    pub health: Health,
    /// The reason, if the backend is refusing.
    pub why: Why,
    /// Whether the backend is refusing before `fall` probes have been made. A backend that was
    /// healthy becomes refusing only after `fall` failures.
    pub is_unconfirmed: bool,
}

/// The results of the probes of a target.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Whether the backend is refusing.
    pub probed: Probed,
    /// Whether the last failed probe was connected before it failed.
    accepts: bool,
    /// Whether at least `fall` probes have been made.
    is_confirmed: bool,
    /// Why the last probe failed; `None` if it succeeded.
    pub failure: Option<String>,
    /// The duration of the last probe.
    pub took: Option<Duration>,
    /// The number of probes.
    pub probes: u64,
    /// The number of failed probes.
    pub failures: u64,
}

type Shared = Arc<Mutex<BTreeMap<ConnectTarget, Findings>>>;

/// A lock that limits how many probes begin per second: each probe acquires the lock for
/// [`BETWEEN`] before it begins.
type Pace = tokio::sync::Mutex<()>;

/// The places for concurrent connections. Each service has an equal part of all places, and at
/// least one place.
#[derive(Default)]
struct Places {
    /// For each service: the semaphore of its places, and the number of these places.
    services: BTreeMap<String, (Arc<Semaphore>, usize)>,
}

impl Places {
    /// Divides the places for connections among these services.
    fn share(&mut self, services: &BTreeSet<&str>) {
        let each = (MAX_UNDER_WAY / services.len().max(1)).max(1);
        self.services.retain(|service, _| services.contains(&**service));
        for service in services {
            let new = || (Arc::new(Semaphore::new(each)), each);
            let (places, has) = self.services.entry((*service).to_owned()).or_insert_with(new);
            if *has < each {
                places.add_permits(each - *has);
                *has = each;
            } else {
                // A place that is in use cannot be withdrawn now.
                *has -= places.forget_permits(*has - each);
            }
        }
    }
}

pub struct Probes {
    tasks: BTreeMap<ConnectTarget, AbortHandle>,
    findings: Shared,
    places: Places,
    /// The lock that limits how many probes begin per second.
    pace: Arc<Pace>,
    /// Increases whenever targets or results change.
    version: Arc<AtomicU64>,
    news: Arc<Notify>,
    random: RandomState,
}

impl Probes {
    /// Starts without targets. `news` is notified when the result of a target changes.
    pub fn new(news: Arc<Notify>) -> Self {
        Self {
            tasks: BTreeMap::new(),
            findings: Arc::default(),
            places: Places::default(),
            pace: Arc::default(),
            version: Arc::default(),
            news,
            random: RandomState::new(),
        }
    }

    /// Sets the targets, each with its service; other targets are no longer probed. A target that
    /// was probed before retains its findings.
    pub fn set_targets(&mut self, targets: &BTreeMap<ConnectTarget, String>) {
        self.version.fetch_add(1, Ordering::Relaxed);
        self.places.share(&targets.values().map(|service| &**service).collect());
        let mut before = std::mem::take(&mut self.tasks);
        for (target, service) in targets {
            let start = || self.start(target.clone(), service);
            let task = before.remove(target).unwrap_or_else(start);
            self.tasks.insert(target.clone(), task);
        }
        for (target, task) in before {
            task.abort();
            lock(&self.findings).remove(&target);
        }
    }

    fn start(&self, target: ConnectTarget, service: &str) -> AbortHandle {
        lock(&self.findings).insert(target.clone(), Findings::default());
        let probing = ProbeTask {
            target,
            findings: Arc::clone(&self.findings),
            places: Arc::clone(&self.places.services[service].0),
            pace: Arc::clone(&self.pace),
            version: Arc::clone(&self.version),
            news: Arc::clone(&self.news),
            random: self.random.clone(),
        };
        tokio::spawn(probing.run()).abort_handle()
    }

    /// Delays the next probe, and therefore all later probes, by this time. Has no effect while a
    /// probe has the lock.
    pub fn hold_back(&self, time: Duration) {
        if let Ok(pace) = Arc::clone(&self.pace).try_lock_owned() {
            tokio::spawn(async move {
                tokio::time::sleep(time).await;
                drop(pace);
            });
        }
    }

    pub fn findings(&self, target: &ConnectTarget) -> Option<Findings> {
        lock(&self.findings).get(target).cloned()
    }

    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// A number that increases whenever targets or results change.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    pub fn results(&self) -> BTreeMap<ConnectTarget, ProbedHealth> {
        let findings = lock(&self.findings);
        let results =
            findings.iter().filter_map(|(target, findings)| Some((target.clone(), findings.result()?)));
        results.collect()
    }
}

impl Findings {
    /// The health of the backend according to its probes; `None` if the health is not known yet.
    fn result(&self) -> Option<ProbedHealth> {
        let why = if self.accepts { Why::Answer } else { Why::Probe };
        let health = match self.probed.is_refusing() {
            Some(true) => Health::Refusing,
            Some(false) => Health::Healthy,
            // All these probes failed because of this host. They are no evidence against the
            // backend, and the backend is treated as if it were not probed.
            None if self.is_confirmed => Health::Healthy,
            None => return None,
        };
        Some(ProbedHealth { health, why, is_unconfirmed: health == Health::Refusing && !self.is_confirmed })
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

struct ProbeTask {
    target: ConnectTarget,
    findings: Shared,
    places: Arc<Semaphore>,
    pace: Arc<Pace>,
    version: Arc<AtomicU64>,
    news: Arc<Notify>,
    random: RandomState,
}

impl ProbeTask {
    async fn run(self) {
        let mut turn = 0_u64;
        // The first probe begins at once. Each further probe begins 0.9 to 1.1 intervals after the
        // end of the previous probe. The loop ends when the target is removed.
        loop {
            let Ok(place) = self.places.acquire().await else { return };
            let pace = self.pace.lock().await;
            tokio::time::sleep(BETWEEN).await;
            drop(pace);
            let begun = lb_kernel::monotonic_ns();
            let result = probe(&self.target).await;
            let took = Duration::from_nanos(lb_kernel::monotonic_ns().saturating_sub(begun));
            self.note(result, took);
            drop(place);
            turn += 1;
            tokio::time::sleep(self.target.interval.mul_f64(0.9 + 0.2 * self.fraction(turn))).await;
        }
    }

    fn fraction(&self, turn: u64) -> f64 {
        let hash = self.random.hash_one((self.target.at, turn));
        #[expect(clippy::cast_precision_loss, reason = "53 random bits are enough")]
        let fraction = (hash >> 11) as f64 / (1_u64 << 53) as f64;
        fraction
    }

    fn note(&self, result: Result<(), ProbeFailure>, took: Duration) {
        let mut all = lock(&self.findings);
        let Some(findings) = all.get_mut(&self.target) else { return };
        let before = findings.result();
        if !matches!(result, Err(ProbeFailure::Host(_))) {
            findings.probed.take(result.is_ok(), self.target.rise, self.target.fall);
        }
        match result {
            Err(ProbeFailure::Connect(_)) => findings.accepts = false,
            Err(ProbeFailure::Answer(_)) => findings.accepts = true,
            Ok(()) | Err(ProbeFailure::Host(_)) => {}
        }
        findings.probes += 1;
        findings.is_confirmed = findings.probes >= u64::from(self.target.fall);
        findings.failures += u64::from(result.is_err());
        findings.failure = result.err().map(|failure| match failure {
            ProbeFailure::Connect(why) | ProbeFailure::Answer(why) => why,
            ProbeFailure::Host(why) => format!("this host cannot probe the backend: {why}"),
        });
        findings.took = Some(took);
        let is_news = findings.result() != before;
        if is_news {
            self.version.fetch_add(1, Ordering::Relaxed);
        }
        drop(all);
        if is_news {
            self.news.notify_one();
        }
    }
}

/// Why a probe failed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ProbeFailure {
    /// The probe could not connect. The cause is the backend or the path to it.
    Connect(String),
    /// The probe connected, but received no answer or an error.
    Answer(String),
    /// This host could not make the probe, for example because no descriptor was free. Such a
    /// failure affects all backends, and is therefore no evidence of the backend's health.
    Host(String),
}

/// Makes one probe.
async fn probe(target: &ConnectTarget) -> Result<(), ProbeFailure> {
    let is_connected = AtomicBool::new(false);
    let result = tokio::time::timeout(target.timeout, attempt(target, &is_connected)).await;
    result.unwrap_or_else(|_| {
        let late = format!("no answer in {} ms", target.timeout.as_millis());
        Err(if is_connected.into_inner() { ProbeFailure::Answer(late) } else { ProbeFailure::Connect(late) })
    })
}

/// Makes a probe without a timeout. Sets `is_connected` as soon as the probe is connected.
async fn attempt(target: &ConnectTarget, is_connected: &AtomicBool) -> Result<(), ProbeFailure> {
    let socket = if target.at.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
    let socket = socket.map_err(|error| ProbeFailure::Host(error.to_string()))?;
    let stream = socket.connect(target.at).await.map_err(|error| unconnected(&error))?;
    is_connected.store(true, Ordering::Relaxed);
    let Some(path) = &target.path else { return Ok(()) };
    let answer = lb_http::probe::probe(stream, target.at, path, "socklb").await;
    answer.map_err(|error| ProbeFailure::Answer(chain(&error)))
}

/// Classifies a failed connect as a failure of the backend, or as a failure of this host. The
/// errors in `OF_HOST` are failures of this host. All other errors are failures of the backend,
/// because a route to the backend may cause various errors: a blackhole route causes `EINVAL`, a
/// prohibit route `EACCES`.
fn unconnected(error: &io::Error) -> ProbeFailure {
    const OF_HOST: [i32; 8] = [
        libc::EMFILE,
        libc::ENFILE,
        libc::ENOMEM,
        libc::ENOBUFS,
        libc::EADDRNOTAVAIL,
        libc::EAGAIN,
        libc::EPERM,
        libc::EINTR,
    ];
    match error.raw_os_error() {
        Some(errno) if !OF_HOST.contains(&errno) => ProbeFailure::Connect(error.to_string()),
        Some(_) | None => ProbeFailure::Host(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    fn target(at: SocketAddr, path: Option<&str>) -> ConnectTarget {
        ConnectTarget {
            at,
            path: path.map(str::to_owned),
            interval: Duration::from_millis(20),
            timeout: Duration::from_secs(10),
            rise: 1,
            fall: 2,
        }
    }

    fn set(probes: &mut Probes, target: &ConnectTarget) {
        probes.set_targets(&[(target.clone(), "service".to_owned())].into());
    }

    fn refusing(probes: &Probes) -> Vec<(ConnectTarget, Why)> {
        let refusing = probes.results().into_iter().filter(|(_, found)| found.health == Health::Refusing);
        refusing.map(|(target, found)| (target, found.why)).collect()
    }

    /// A server that sends this answer on each connection, after the request.
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
    async fn an_http_probe_judges_the_answer() {
        let at = server(b"HTTP/1.1 503 Service Unavailable\r\n\r\n").await;
        assert_eq!(probe(&target(at, None)).await, Ok(()));
        let unwell = ProbeFailure::Answer("the server answered 503 Service Unavailable".to_owned());
        assert_eq!(probe(&target(at, Some("/healthz"))).await, Err(unwell));
    }

    #[tokio::test]
    async fn a_fault_of_this_host_is_no_evidence_on_a_backend() {
        for (errno, is_of_backend) in [
            (libc::ECONNREFUSED, true),
            (libc::EHOSTUNREACH, true),
            (libc::ENETUNREACH, true),
            (libc::ETIMEDOUT, true),
            // Routes of the kinds blackhole and prohibit.
            (libc::EINVAL, true),
            (libc::EACCES, true),
            (libc::EMFILE, false),
            (libc::ENFILE, false),
            (libc::ENOMEM, false),
            (libc::EADDRNOTAVAIL, false),
            (libc::EPERM, false),
        ] {
            let failure = unconnected(&io::Error::from_raw_os_error(errno));
            assert_eq!(matches!(failure, ProbeFailure::Connect(_)), is_of_backend, "{failure:?}");
        }
    }

    #[test]
    fn services_share_the_connections_and_each_has_at_least_one() {
        let mut places = Places::default();
        let has = |places: &Places, service: &str| places.services[service].0.available_permits();
        places.share(&["a"].into());
        assert_eq!(has(&places, "a"), MAX_UNDER_WAY);
        places.share(&["a", "b"].into());
        assert_eq!((has(&places, "a"), has(&places, "b")), (MAX_UNDER_WAY / 2, MAX_UNDER_WAY / 2));
        places.share(&["b"].into());
        assert_eq!((places.services.len(), has(&places, "b")), (1, MAX_UNDER_WAY));
        let names: Vec<String> = (0..1000).map(|number| number.to_string()).collect();
        places.share(&names.iter().map(|name| &**name).collect());
        assert!(names.iter().all(|name| has(&places, name) == 1));
    }

    /// Probes detect a dead backend of one service, even if another service has more silent
    /// backends than there are places.
    #[tokio::test]
    async fn silent_backends_delay_no_probes_of_another_service() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut probes = Probes::new(Arc::default());
        let at = silent.local_addr().unwrap();
        // The paths differ, so these are several targets on one server.
        let unanswered = (0..2 * MAX_UNDER_WAY).map(|number| target(at, Some(&format!("/{number}"))));
        let mut targets: BTreeMap<ConnectTarget, String> =
            unanswered.map(|target| (target, "silent".to_owned())).collect();
        let dead = target("127.0.0.1:1".parse().unwrap(), None);
        targets.insert(dead.clone(), "other".to_owned());
        probes.set_targets(&targets);
        tokio::time::timeout(Duration::from_secs(5), probes.news.notified()).await.expect("news");
        assert_eq!(
            refusing(&probes),
            [(dead, Why::Probe)],
            "only the dead backend is refusing: no probe of a silent backend has ended"
        );
    }

    #[tokio::test]
    async fn a_slow_backend_fails_its_probe_and_delays_no_other() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut probes = Probes::new(Arc::default());
        let slow = ConnectTarget {
            timeout: Duration::from_millis(50),
            ..target(silent.local_addr().unwrap(), Some("/"))
        };
        set(&mut probes, &slow);
        tokio::time::timeout(Duration::from_secs(10), probes.news.notified()).await.expect("news");
        assert_eq!(
            refusing(&probes),
            [(slow.clone(), Why::Answer)],
            "the backend accepts connections but does not answer"
        );
        assert_eq!(probes.findings(&slow).unwrap().failure.as_deref(), Some("no answer in 50 ms"));
    }

    #[tokio::test]
    async fn probes_find_that_a_backend_refuses_and_that_it_recovers() {
        // This test occupies the port, so that no other test listens at it.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let at = socket.local_addr().unwrap();
        let mut probes = Probes::new(Arc::default());
        let news = Arc::clone(&probes.news);
        let target = target(at, None);
        set(&mut probes, &target);
        let limit = Duration::from_secs(10);
        tokio::time::timeout(limit, news.notified()).await.expect("news");
        assert_eq!(refusing(&probes), [(target.clone(), Why::Probe)]);
        let _listener = socket.listen(16).unwrap();
        tokio::time::timeout(limit, news.notified()).await.expect("news");
        let well = ProbedHealth { health: Health::Healthy, why: Why::Probe, is_unconfirmed: false };
        assert_eq!(probes.results(), [(target.clone(), well)].into());
        let found = probes.findings(&target).unwrap();
        assert!(found.probes > found.failures && found.failures >= 1 && found.took.is_some());
        probes.set_targets(&BTreeMap::new());
        assert!(probes.is_empty() && probes.findings(&target).is_none());
    }
}
