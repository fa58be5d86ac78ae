//! The exchange of requests and reports with agents, on a thread of its own.
//!
//! The thread stores each report at once in maps that the kernel programs read at connects,
//! independently of the event loop. If the state of a backend has changed, the thread wakes the
//! event loop, which then reads the change. [`Exchange`] decides which agents to poll, and which
//! reports to accept and to store; the thread (`thread`) has the socket and the clock, and limits
//! the rate of its turns (`pace`). This file has the event loop's access to the exchange.

mod pace;
mod thread;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lb_core::health::Health;
use lb_core::reports::Name;
use lb_host::wake::Wake;
use lb_report::client::reported::Base;
use lb_report::client::senders::{Senders, Target};
use tokio::sync::Notify;

pub use self::thread::ReportSocket;
use self::thread::{ReportThread, now};
use crate::controller::exchange::{Exchange, ExchangeCounts, ReportStore};

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

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};

    use lb_common::net::{Be16, Be32, IPPROTO_TCP};
    use lb_core::service::Protocol;
    use lb_fake::FakeKernel;
    use lb_kernel::{HostMaps, Kernel as _};
    use lb_report::keys::{Keys, Numbered, ServiceKey};
    use lb_report::receive::Words as _;
    use lb_report::wire::{BYTES, Datagram, Kind, Readiness};

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
        let refused = || {
            listener.look(|_, counts, _| {
                let mut sums = BTreeMap::new();
                for (why, count) in &counts.refused {
                    *sums.entry(why.name()).or_insert(0_u64) += count;
                }
                sums
            })
        };
        // No request is answered meanwhile, because an answer would overwrite the state.
        while refused().values().sum::<u64>() < 54 {
            std::thread::yield_now();
        }
        assert_eq!(refused(), [("forged", 50), ("malformed", 4)].into());
        assert!(listener.sick().is_empty());
        assert_eq!(maps.lame_until_ns(target.id), 0);
    }
}
