//! The exchange of requests and reports with agents, on a thread of its own.
//!
//! The thread stores each report at once in maps that the kernel programs read at connects,
//! independently of the event loop. If the state of a backend has changed, the thread wakes the
//! event loop, which then reads the change. `lb_report::client` decides which agents to poll and
//! which reports to accept.

mod datagrams;
mod pace;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lb_common::abi::host::{NO_REPORT, Sender, SenderKey, SenderName};
use lb_common::net::Be16;
use lb_core::health::Health;
use lb_core::reports::Name;
use lb_host::wake::Wake;
use lb_kernel::HostMaps;
use lb_report::client::reported::Base;
use lb_report::client::senders::{Refusal, Request, Senders, Target, ToStore};
use lb_report::keys::{BackendKey, Keys};
use lb_report::receive::{Words as _, store_lame_until};
use lb_report::wire::BYTES;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::Notify;
use tracing::warn;

pub use self::datagrams::ReportSocket;
use self::datagrams::{BATCH, ReceivedBatch};
use self::pace::{APART, TokenBucket};

/// Counts of sent and received datagrams.
#[derive(Clone, Debug, Default)]
pub struct ExchangeCounts {
    /// Requests that were sent.
    pub requests: u64,
    /// Requests that could not be sent.
    pub unsent: u64,
    /// Reports that were accepted.
    pub believed: u64,
    /// The number of datagrams that were not accepted, for each reason.
    pub refused: HashMap<Refusal, u64>,
}

/// The exchange with agents, without the socket and the clock. [`Senders`] decides which agents are
/// polled and which answers are accepted, [`ReportStore`] which of these are stored.
pub struct Exchange {
    pub senders: Senders<Duration>,
    pub counts: ExchangeCounts,
    kernel: ReportStore,
    nonce: Box<dyn FnMut() -> u64 + Send>,
}

/// The result of [`Exchange::turn`].
pub struct Turn {
    /// Datagrams to send, each with its destination.
    pub requests: Vec<(SocketAddr, [u8; BYTES])>,
    /// The time until the next request is due, at most an hour.
    pub next: Duration,
    /// Whether the state of a backend has changed.
    pub is_news: bool,
}

impl Exchange {
    /// An exchange that does not poll any backend yet. `nonce` returns numbers that cannot be
    /// guessed and are never 0: in the map, nonce 0 means that no request is open.
    pub fn new(seed: u64, kernel: ReportStore, nonce: Box<dyn FnMut() -> u64 + Send>) -> Self {
        Self { senders: Senders::new(seed), counts: ExchangeCounts::default(), kernel, nonce }
    }

    /// Polls the agents that are due.
    pub fn turn(&mut self, now: Duration) -> Turn {
        const LONGEST: Duration = Duration::from_hours(1);
        let is_news = !self.senders.pass(now).is_empty();
        let requests = self.senders.requests(BATCH, &mut self.nonce, now);
        // The nonces are stored before the requests are sent, because an answer may arrive at once.
        for request in requests.iter().filter(|request| !request.is_again) {
            self.kernel.store_nonce(request.id, request.datagram.nonce);
        }
        let next = self.senders.next_due().map_or(LONGEST, |due| due.saturating_sub(now).min(LONGEST));
        let bytes =
            |request: &Request| request.datagram.bytes().try_into().expect("a datagram has `BYTES` bytes");
        let requests = requests.iter().map(|request| (request.to, bytes(request))).collect();
        Turn { requests, next, is_news }
    }

    /// Handles a received datagram. Returns whether the state of a backend has changed, or its
    /// agent has restarted.
    pub fn take(&mut self, datagram: &[u8], now: Duration) -> bool {
        match self.senders.take(datagram, now) {
            Ok((name, change)) => {
                let is_news = change.is_some() || self.senders.has_restarted();
                self.counts.believed += 1;
                if let Some((target, reported)) = self.senders.get(name) {
                    self.kernel.store_nonce(target.id, reported.nonce());
                }
                if let Some(what) = self.senders.to_store(name) {
                    self.kernel.store(&what);
                }
                is_news
            }
            Err(refusal) => {
                *self.counts.refused.entry(refusal).or_default() += 1;
                false
            }
        }
    }
}

/// The state that the reports thread and the event loop share. Both release the lock at the latest
/// after one batch of datagrams.
pub struct SharedExchange {
    pub exchange: Exchange,
    is_stopping: bool,
}

impl SharedExchange {
    pub fn new(exchange: Exchange) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self { exchange, is_stopping: false }))
    }
}

/// Controls the thread that polls agents and receives reports.
pub struct ReportExchanger {
    shared: Arc<Mutex<SharedExchange>>,
    /// Wakes the thread.
    wake: Wake,
    /// Notified when the state of a backend changes, or its agent has restarted.
    news: Arc<Notify>,
    address: SocketAddr,
    /// Returns the CLOCK_MONOTONIC time. Each method reads the clock itself: a time before the
    /// thread's last reading of the clock could make an expired verdict valid again.
    now: Box<dyn Fn() -> Duration + Send>,
}

impl ReportExchanger {
    /// Controls an exchange without starting a thread: the caller itself calls [`Exchange::turn`]
    /// and [`Exchange::take`] through another reference to `shared`. `now` returns the
    /// CLOCK_MONOTONIC time.
    ///
    /// # Errors
    /// If no file descriptor is free.
    pub fn over(
        shared: Arc<Mutex<SharedExchange>>,
        news: Arc<Notify>,
        address: SocketAddr,
        now: Box<dyn Fn() -> Duration + Send>,
    ) -> io::Result<Self> {
        Ok(Self { shared, wake: Wake::new()?, news, address, now })
    }

    /// Starts the thread that polls agents and receives reports. `news` is notified when the state
    /// of a backend changes, or its agent has restarted.
    ///
    /// # Errors
    /// If the thread cannot be created.
    pub fn start(socket: ReportSocket, news: Arc<Notify>, kernel: ReportStore) -> io::Result<Self> {
        let address = socket.address()?;
        let (random, mut nonces) = (RandomState::new(), 0_u64);
        let seed = random.hash_one("turns");
        let nonce = move || {
            nonces += 1;
            random.hash_one(nonces).max(1)
        };
        let shared = SharedExchange::new(Exchange::new(seed, kernel, Box::new(nonce)));
        let exchanger = Self::over(Arc::clone(&shared), Arc::clone(&news), address, Box::new(now))?;
        let thread = ReportThread { socket, shared, wake: exchanger.wake.clone(), news };
        std::thread::Builder::new().name("reports".to_owned()).spawn(move || thread.run())?;
        Ok(exchanger)
    }

    /// The address that the socket is bound to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the backends that are polled; others are no longer polled. For a backend that was not
    /// polled before, `adopted` returns the last report that an earlier daemon has accepted, and
    /// the time until which the backend is a lame duck.
    pub fn set_targets(
        &self,
        targets: impl IntoIterator<Item = Target>,
        adopted: impl Fn(Name) -> (Option<Base>, Option<Duration>),
    ) {
        let changes = lock(&self.shared).exchange.senders.set_targets(targets, adopted, (self.now)());
        if !changes.is_empty() {
            self.news.notify_one();
        }
        self.wake.wake();
    }

    /// See [`Senders::take_restarted`].
    pub fn take_restarted(&self) -> BTreeSet<Name> {
        lock(&self.shared).exchange.senders.take_restarted()
    }

    /// See [`Senders::poll_first`].
    pub fn poll_first(&self, names: impl IntoIterator<Item = Name>, after: Duration, spacing: Duration) {
        lock(&self.shared).exchange.senders.poll_first(names, after, spacing, (self.now)());
        self.wake.wake();
    }

    /// The backends that are not healthy according to their reports.
    pub fn sick(&self) -> BTreeMap<Name, Health> {
        lock(&self.shared).exchange.senders.sick().clone()
    }

    /// Calls `look` with the present state, and returns its result.
    pub fn look<R>(&self, look: impl FnOnce(&Senders<Duration>, &ExchangeCounts, Duration) -> R) -> R {
        let shared = lock(&self.shared);
        look(&shared.exchange.senders, &shared.exchange.counts, (self.now)())
    }
}

impl Drop for ReportExchanger {
    fn drop(&mut self) {
        lock(&self.shared).is_stopping = true;
        self.wake.wake();
    }
}

fn lock(shared: &Mutex<SharedExchange>) -> MutexGuard<'_, SharedExchange> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The CLOCK_MONOTONIC time. The kernel programs use this clock, too.
fn now() -> Duration {
    Duration::from_nanos(lb_kernel::monotonic_ns())
}

struct ReportThread {
    socket: ReportSocket,
    shared: Arc<Mutex<SharedExchange>>,
    wake: Wake,
    news: Arc<Notify>,
}

impl ReportThread {
    fn run(mut self) {
        let mut received = ReceivedBatch::default();
        let mut has_failed = false;
        let mut pace = TokenBucket::new(now());
        // Bound: the loop ends when the daemon stops.
        loop {
            let has_rested = self.rest(pace.turn(now()));
            let Some(next) = self.poll_agents() else { return };
            // If the thread has paused in `rest` and the next request is due soon, the rate of
            // datagrams is so high that some have arrived during the pause. The thread reads them
            // without a wait.
            let is_busy = has_rested && next < APART && !has_failed;
            let result = if is_busy { Ok(()) } else { self.wait(next, has_failed) };
            let result = result.and_then(|()| self.take(&mut received));
            if let Err(error) = &result
                && !has_failed
            {
                warn!(%error, "cannot receive reports; retrying ten times a second");
            }
            has_failed = result.is_err();
        }
    }

    /// Polls the agents that are due. Returns the time until the next agent is due; `None` if the
    /// daemon is stopping.
    fn poll_agents(&mut self) -> Option<Duration> {
        let Turn { requests, next, is_news } = {
            let mut shared = lock(&self.shared);
            if shared.is_stopping {
                return None;
            }
            shared.exchange.turn(now())
        };
        if is_news {
            self.news.notify_one();
        }
        if !requests.is_empty() {
            let sent = self.socket.send(&requests);
            let counts = &mut lock(&self.shared).exchange.counts;
            counts.requests += sent as u64;
            counts.unsent += (requests.len() - sent) as u64;
        }
        Some(next)
    }

    /// Waits for `time`, while datagrams accumulate. The wait ends early if the event loop wakes
    /// the thread. Returns `false` if `time` is zero.
    fn rest(&self, time: Duration) -> bool {
        if time.is_zero() {
            return false;
        }
        let time = Timespec::try_from(time).ok();
        // An error is ignored, because the next call of `wait` reports it.
        if let Ok(1..) = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], time.as_ref()) {
            self.wake.woken();
        }
        true
    }

    /// Waits until a datagram arrives, the loop wakes the thread, or `next` has passed.
    fn wait(&self, next: Duration, has_failed: bool) -> io::Result<()> {
        // After a read of the socket has failed, the socket is not polled, because poll(2) reports
        // it as ready all the time.
        let limit = if has_failed { next.min(Duration::from_millis(100)) } else { next };
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        let socket = if has_failed { PollFlags::empty() } else { PollFlags::IN };
        let mut waiting = [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.socket, socket)];
        match poll(&mut waiting, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        self.wake.woken();
        Ok(())
    }

    /// Handles the datagrams that have arrived.
    fn take(&mut self, received: &mut ReceivedBatch) -> io::Result<()> {
        // Bound: after this number of batches, the thread polls the agents that are due, even if
        // more datagrams arrive.
        for _ in 0..16 {
            let count = self.socket.receive(received)?;
            if count == 0 {
                break;
            }
            let mut shared = lock(&self.shared);
            let (exchange, now) = (&mut shared.exchange, now());
            let mut is_news = false;
            for at in 0..count {
                is_news |= exchange.take(received.get(at), now);
            }
            drop(shared);
            if is_news {
                self.news.notify_one();
            }
            if count < BATCH {
                break;
            }
        }
        Ok(())
    }
}

/// Stores accepted reports in the kernel's maps. The programs read these maps at connects, and a
/// later daemon adopts the maps.
pub struct ReportStore {
    maps: Arc<HostMaps>,
    /// This lock is held from the read of an entry until its write, because other instances of
    /// `ReportStore` also store reports, and the event loop writes keys.
    storing: Arc<Mutex<()>>,
}

impl ReportStore {
    /// `storing` is the lock that all code holds while it changes an entry of `maps`.
    pub fn new(maps: Arc<HostMaps>, storing: Arc<Mutex<()>>) -> Self {
        Self { maps, storing }
    }

    /// Stores an accepted report. Times are CLOCK_MONOTONIC.
    fn store(&self, what: &ToStore<'_, Duration>) {
        let ToStore { target, base, before, lame_until } = *what;
        if target.id == NO_REPORT {
            return;
        }
        let _storing = self.storing.lock();
        let known = self.maps.sender(&key_of(target.name)).unwrap_or_default();
        // If the keys differ, the event loop has written the keys of another party. This thread
        // does not have the new keys yet, and has accepted a report with an old key. Such a report
        // is not stored.
        if known.as_ref().is_some_and(|known| !share_a_key(known, &sender(target.id, &target.keys))) {
            return;
        }
        let known = self.maps.base(target.id);
        let number = Base::number(Some(base));
        let is_stored = if known == number {
            // If this thread has not stored the report itself (`before`), the receiver program or
            // another listener stored it on arrival. In this case, the report's time limits began
            // on arrival, and this thread must not restart them.
            before == Some(base)
        } else {
            !is_old(base, Base::of(known), before) && self.maps.replace_base(target.id, known, number)
        };
        if is_stored {
            let ns = lame_until.map_or(0, |until| u64::try_from(until.as_nanos()).unwrap_or(u64::MAX));
            store_lame_until(&*self.maps, target.id, number, |_| ns);
        }
    }

    /// Stores the nonce of the open request to the backend with this report id, or 0 once the
    /// backend has answered.
    fn store_nonce(&self, id: u32, nonce: u64) {
        if id != NO_REPORT {
            self.maps.set_nonce(id, nonce);
        }
    }
}

/// The entry of a backend with this report id and these keys.
pub fn sender(id: u32, keys: &Keys<BackendKey>) -> Sender {
    let mut sender: Sender = bytemuck::Zeroable::zeroed();
    sender.id = id;
    for (place, key) in sender.keys.iter_mut().zip(keys.all()) {
        *place = SenderKey { id: key.id, key: key.key.bytes(), ..SenderKey::default() };
    }
    sender
}

/// Whether two entries of a backend have a key in common, and therefore belong to one party.
pub fn share_a_key(one: &Sender, other: &Sender) -> bool {
    one.keys.iter().any(|key| key.id != 0 && other.keys.contains(key))
}

/// Whether `known`, the stored report, is from another listener, and later than `base` in the same
/// incarnation. Reports of different incarnations cannot be ordered, because the agent's clock may
/// have jumped. The result is `false` if this listener itself has stored `known` (that is,
/// `before`): it accepts every answer to its last request, regardless of the answer's number.
fn is_old(base: Base, known: Option<Base>, before: Option<Base>) -> bool {
    let of_another = known.filter(|known| Some(*known) != before);
    of_another.is_some_and(|known| known.incarnation == base.incarnation && known.counter > base.counter)
}

/// The key of a backend's entry in the kernel's map.
pub fn key_of(name: Name) -> SenderName {
    SenderName {
        address: name.address.ip().into(),
        port: Be16::from_host(name.address.port()),
        protocol: name.protocol.number(),
        _reserved: 0,
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};

    use lb_common::net::{Be16, Be32, IPPROTO_TCP};
    use lb_core::service::Protocol;
    use lb_fake::FakeKernel;
    use lb_kernel::Kernel as _;
    use lb_report::keys::{Numbered, ServiceKey};
    use lb_report::wire::{Datagram, Kind, Readiness};

    use super::*;

    fn start() -> (ReportExchanger, Arc<HostMaps>) {
        let kernel = FakeKernel::new().expect("memory is available");
        let maps = Arc::new(kernel.host_maps(Path::new("/")).expect("faults are off"));
        let socket = ReportSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let store = ReportStore::new(Arc::clone(&maps), Arc::default());
        (ReportExchanger::start(socket, Arc::default(), store).expect("the thread starts"), maps)
    }

    fn target(agent: &UdpSocket) -> Target {
        let address = "10.0.0.1:80".parse().unwrap();
        let key = Numbered { id: 1, key: ServiceKey::from_bytes([7; 32]) };
        Target {
            name: Name { protocol: Protocol::Tcp, address },
            agent: agent.local_addr().unwrap(),
            keys: Keys::new(key.of_backend(Protocol::Tcp, address), None),
            interval: Duration::from_millis(100),
            id: 5,
        }
    }

    fn agent() -> UdpSocket {
        let agent = UdpSocket::bind("127.0.0.1:0").unwrap();
        agent.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        agent
    }

    /// Answers the next request.
    fn answer(agent: &UdpSocket, readiness: Readiness) {
        let mut bytes = [0; BYTES];
        let (length, from) = agent.recv_from(&mut bytes).expect("a request arrives");
        let request = Datagram::parse(&bytes[..length]).expect("the request is valid");
        let mut report = request;
        report.kind = Kind::Answer as u8;
        report.readiness = readiness as u8;
        report.counter = Be32::from_host(1);
        report.hold = Be32::from_host(60_000);
        report.valid_for = Be32::from_host(1_000);
        let report = report.sealed(target(agent).keys.current().key.wire());
        agent.send_to(report.bytes(), from).unwrap();
    }

    /// Waits until the loop is woken and `is` returns `true`.
    async fn woken(listener: &ReportExchanger, is: impl Fn() -> bool) {
        let wait = async {
            // Bound: the timeout below.
            loop {
                listener.news.notified().await;
                if is() {
                    break;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(10), wait).await.expect("the loop is woken");
    }

    #[tokio::test]
    async fn a_report_is_stored_at_once_and_wakes_the_loop() {
        let (listener, maps) = start();
        let agent = agent();
        let target = target(&agent);
        listener.set_targets([target.clone()], |_| (None, None));
        answer(&agent, Readiness::LameDuck);
        woken(&listener, || maps.lame_until_ns(target.id) > lb_kernel::monotonic_ns()).await;
        assert_eq!(listener.sick(), BTreeMap::from([(target.name, Health::LameDuck)]));
        answer(&agent, Readiness::Ready);
        woken(&listener, || maps.lame_until_ns(target.id) == 0).await;
        assert!(listener.sick().is_empty());
        listener.look(|senders, counts, _| {
            assert_eq!((senders.len(), counts.believed), (1, 2));
            assert!(counts.requests >= 2 && counts.refused.is_empty());
        });
    }

    #[test]
    fn a_flood_of_datagrams_does_not_stop_requests() {
        let (listener, _) = start();
        let (agent, stranger) = (agent(), agent());
        let (address, is_over) = (listener.address(), Arc::new(AtomicBool::new(false)));
        let flood = std::thread::spawn({
            let is_over = Arc::clone(&is_over);
            move || {
                // Sends as fast as one core can, until `is_over` is set.
                while !is_over.load(Ordering::Relaxed) {
                    let _ = stranger.send_to(&[7; BYTES], address);
                }
            }
        });
        listener.set_targets([target(&agent)], |_| (None, None));
        let requests = [(); 3].map(|()| agent.recv_from(&mut [0; BYTES]).is_ok());
        is_over.store(true, Ordering::Relaxed);
        flood.join().unwrap();
        assert_eq!(requests, [true; 3]);
        assert!(listener.look(|_, counts, _| counts.refused.values().sum::<u64>()) > 0);
    }

    /// The forged datagrams report the backend as a lame duck, with a higher number than all
    /// accepted reports, and without a MAC.
    #[test]
    fn datagrams_of_strangers_are_counted_and_change_nothing() {
        let (listener, maps) = start();
        let (agent, stranger) = (agent(), agent());
        let target = target(&agent);
        listener.set_targets([target.clone()], |_| (None, None));
        answer(&agent, Readiness::Ready);
        let mut forged = Datagram::about(Kind::Push, IPPROTO_TCP, target.name.address);
        forged.readiness = Readiness::LameDuck as u8;
        forged.key_id = Be16::from_host(1);
        forged.counter = Be32::from_host(u32::MAX);
        forged.hold = Be32::from_host(60_000);
        forged.valid_for = Be32::from_host(1_000);
        for _ in 0..50 {
            stranger.send_to(forged.bytes(), listener.address()).unwrap();
        }
        for length in [0, 10, BYTES, BYTES + 1] {
            stranger.send_to(&vec![0; length], listener.address()).unwrap();
        }
        // The socket is one queue, so the thread handles these datagrams before it handles an
        // answer that arrives later.
        let refused = || {
            listener.look(|_, counts, _| {
                let mut sums = BTreeMap::new();
                for (why, count) in &counts.refused {
                    *sums.entry(why.name()).or_insert(0_u64) += count;
                }
                sums
            })
        };
        // Each turn answers one request, and checks whether all datagrams were counted.
        for _ in 0..50 {
            if refused().values().sum::<u64>() == 54 {
                break;
            }
            answer(&agent, Readiness::Ready);
        }
        assert_eq!(refused(), [("forged", 50), ("malformed", 4)].into());
        assert!(listener.sick().is_empty());
        assert_eq!(maps.lame_until_ns(target.id), 0);
    }

    #[test]
    fn entries_with_a_common_key_belong_to_one_party() {
        let numbered = |id, byte| {
            Numbered { id, key: ServiceKey::from_bytes([byte; 32]) }
                .of_backend(Protocol::Tcp, "10.0.0.1:80".parse().unwrap())
        };
        let [old, new, other] = [numbered(1, 7), numbered(2, 8), numbered(1, 9)];
        let entry = |first, second| sender(5, &Keys::new(first, second));
        assert!(share_a_key(&entry(old, None), &entry(new, Some(old))));
        assert!(share_a_key(&entry(new, Some(old)), &entry(new, None)));
        assert!(!share_a_key(&entry(old, None), &entry(new, None)));
        assert!(!share_a_key(&entry(old, None), &entry(other, None)));
    }

    #[test]
    fn a_later_report_of_another_listener_stays() {
        let base = |incarnation, counter| Base { incarnation, counter };
        for (known, before, expected) in [
            (Some(base(7, 9)), None, true),
            (Some(base(7, 9)), Some(base(7, 3)), true),
            // In the other cases, this listener itself has stored the known report, the known
            // report is not later, the two reports cannot be ordered, or there is no known report.
            (Some(base(7, 9)), Some(base(7, 9)), false),
            (Some(base(7, 8)), None, false),
            (Some(base(8, 9)), None, false),
            (None, None, false),
        ] {
            assert_eq!(is_old(base(7, 8), known, before), expected, "{known:?} {before:?}");
        }
    }
}
