//! The exchange of requests and reports with agents: which agents to poll and when, which datagrams
//! to accept, and which reports to store in the kernel's maps.
//!
//! A thread with a socket executes the decisions (`crate::reports`). It passes the time and the
//! received datagrams, and sends the requests.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lb_common::abi::host::{NO_REPORT, Sender, SenderKey, SenderName};
use lb_common::net::Be16;
use lb_core::reports::Name;
use lb_kernel::HostMaps;
use lb_report::client::reported::Base;
use lb_report::client::senders::{Refusal, Request, Senders, ToStore};
use lb_report::keys::{BackendKey, Keys};
use lb_report::receive::{Words as _, store_lame_until};
use lb_report::wire::BYTES;

/// The maximum number of requests in one turn, and of datagrams per system call.
pub const BATCH: usize = 64;

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

/// The exchange with agents. [`Senders`] decides about each agent, [`ReportStore`] about each
/// accepted report. Times are CLOCK_MONOTONIC.
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
    use std::path::Path;

    use lb_common::net::Be32;
    use lb_core::service::Protocol;
    use lb_fake::FakeKernel;
    use lb_kernel::Kernel as _;
    use lb_report::client::senders::Target;
    use lb_report::keys::{Numbered, ServiceKey};
    use lb_report::wire::{Datagram, Kind, Readiness};

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(2);

    /// A backend with this report id. Its agent is at port 9465.
    fn target(id: u32) -> Target {
        let host = 1 + id.to_be_bytes()[3];
        let address = SocketAddr::from(([10, 0, 0, host], 80));
        let key = Numbered { id: 1, key: ServiceKey::from_bytes([7; 32]) };
        Target {
            name: Name { protocol: Protocol::Tcp, address },
            agent: SocketAddr::from(([10, 0, 0, host], 9465)),
            keys: Keys::new(key.of_backend(Protocol::Tcp, address), None),
            interval: INTERVAL,
            id,
        }
    }

    /// An exchange that polls these backends from time 0 on.
    fn exchange(targets: impl IntoIterator<Item = Target>) -> (Exchange, Arc<HostMaps>) {
        let kernel = FakeKernel::new().expect("memory is available");
        let maps = Arc::new(kernel.host_maps(Path::new("/")).expect("faults are off"));
        let store = ReportStore::new(Arc::clone(&maps), Arc::default());
        let mut nonces = 0;
        let nonce = move || {
            nonces += 1;
            nonces
        };
        let mut exchange = Exchange::new(1, store, Box::new(nonce));
        let changes = exchange.senders.set_targets(targets, |_| (None, None), Duration::ZERO);
        assert_eq!(changes, []);
        (exchange, maps)
    }

    /// The answer of the backend's agent to a request.
    fn answer(request: &[u8], id: u32, readiness: Readiness) -> Datagram {
        let mut report = Datagram::parse(request).expect("the request is valid");
        report.kind = Kind::Answer as u8;
        report.readiness = readiness as u8;
        report.counter = Be32::from_host(1);
        report.hold = Be32::from_host(60_000);
        report.valid_for = Be32::from_host(10_000);
        report.sealed(target(id).keys.current().key.wire())
    }

    #[test]
    fn each_agent_is_polled_once_per_interval() {
        let (mut exchange, _) = exchange([1, 2].map(target));
        let (mut now, mut polls) = (Duration::ZERO, Vec::new());
        // Bound: each turn ends when the next request is due.
        while now < INTERVAL * 4 {
            let turn = exchange.turn(now);
            assert!(!turn.is_news);
            polls.extend(turn.requests.iter().map(|(to, _)| (to.ip().to_string(), now)));
            assert!(turn.next > Duration::ZERO);
            now += turn.next;
        }
        for host in ["10.0.0.2", "10.0.0.3"] {
            let times: Vec<_> = polls.iter().filter(|(to, _)| to == host).map(|(_, at)| *at).collect();
            assert!(times[0] <= INTERVAL, "{times:?}");
            let is_near = |pair: &[Duration]| {
                (INTERVAL.mul_f64(0.9)..=INTERVAL.mul_f64(1.1)).contains(&(pair[1] - pair[0]))
            };
            assert!(times.len() >= 3 && times.windows(2).all(is_near), "{times:?}");
        }
    }

    #[test]
    fn a_turn_polls_one_batch_and_the_next_turn_is_due_at_once() {
        let most = u32::try_from(BATCH).expect("the batch is small");
        let (mut exchange, _) = exchange((1..=most + 3).map(target));
        let turns = [(); 3].map(|()| exchange.turn(INTERVAL)).map(|turn| (turn.requests.len(), turn.next));
        assert_eq!(turns[0], (BATCH, Duration::ZERO));
        assert_eq!(turns[1].0, 3);
        assert_eq!((turns[2].0, turns[2].1), (0, turns[1].1));
        assert!(turns[1].1 >= INTERVAL.mul_f64(0.9), "{turns:?}");
    }

    #[test]
    fn without_backends_a_turn_is_due_within_an_hour() {
        let (mut exchange, _) = exchange([]);
        let Turn { requests, next, is_news } = exchange.turn(INTERVAL);
        assert_eq!((requests.len(), next, is_news), (0, Duration::from_hours(1), false));
    }

    #[test]
    fn an_accepted_report_is_stored_and_the_end_of_its_verdict_is_news() {
        let (mut exchange, maps) = exchange([target(5)]);
        let (_, request) = exchange.turn(INTERVAL).requests[0];
        assert!(exchange.take(answer(&request, 5, Readiness::LameDuck).bytes(), INTERVAL));
        let until = INTERVAL + Duration::from_mins(1);
        assert_eq!(Duration::from_nanos(maps.lame_until_ns(5)), until);
        // The answer has closed its request, so the same answer is not accepted again.
        assert!(!exchange.take(answer(&request, 5, Readiness::LameDuck).bytes(), INTERVAL));
        assert_eq!((exchange.counts.believed, exchange.counts.refused.values().sum::<u64>()), (1, 1));
        let is_news = |now, exchange: &mut Exchange| exchange.turn(now).is_news;
        assert!(!is_news(until - Duration::from_millis(1), &mut exchange));
        assert!(is_news(until, &mut exchange));
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
