//! Which backends of a service are lost, so that their open connections are closed
//! (`on_backend_loss`).
//!
//! A backend is missing if the list does not contain it, or if it is refusing and does not accept
//! connections (tier 5). A backend that leaves only the task's subset is not missing. A backend is
//! lost when it has been missing for [`CONFIRMED_AFTER`]: lists and probes may be wrong for a short
//! time, and a closed connection does not come back. No backend is lost in panic, or while more
//! than a third of the backends would be: then the list or the probes are more likely wrong than
//! the backends.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Add;
use std::time::{Duration, Instant};

/// What happens to the open connections of a lost backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBackendLoss {
    /// They stay.
    #[default]
    Keep,
    /// Idle TCP connections are closed.
    CloseIdle,
    /// All connections, and all connected UDP sockets, are closed.
    Close,
}

impl OnBackendLoss {
    /// All values, in the order of the documentation.
    pub const ALL: [Self; 3] = [Self::Keep, Self::CloseIdle, Self::Close];

    /// Its name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::CloseIdle => "close-idle",
            Self::Close => "close",
        }
    }
}

/// The time for which a backend must be missing.
pub const CONFIRMED_AFTER: Duration = Duration::from_mins(1);
/// Each host starts at a time of its own within this time, so that the clients of a fleet do not
/// dial again all at once.
pub const SPREAD: Duration = Duration::from_secs(10);
/// The part of [`SPREAD`] by which a host waits longer before it closes connections to a backend of
/// a service.
pub fn delay(host: &str, service: &str, backend: SocketAddr) -> Duration {
    let hash = xxhash_rust::xxh64::xxh64(format!("{host}/{service}/{backend}").as_bytes(), 0);
    let spread = u64::try_from(SPREAD.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(hash % spread)
}

/// The time between two jobs that close the connections of one backend.
const RETRY: Duration = Duration::from_secs(30);

/// The backends of a service at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Presence {
    /// The backends with a slot that are missing.
    pub missing: BTreeSet<SocketAddr>,
    /// The number of missing backends, and of those that are in the table or replaced.
    pub all: usize,
    /// Whether the service is in panic.
    pub is_panic: bool,
}

/// The missing backends of one service. `T` is a time of any clock.
#[derive(Clone, Debug)]
pub struct MissingBackends<T = Instant> {
    missing: BTreeMap<SocketAddr, Missing<T>>,
    /// The numbers of lost backends and of all backends, while too many are lost.
    withheld: Option<(usize, usize)>,
}

#[derive(Clone, Copy, Debug)]
struct Missing<T> {
    since: T,
    /// When connections may be closed again.
    next: Option<T>,
}

impl<T> Default for MissingBackends<T> {
    fn default() -> Self {
        Self { missing: BTreeMap::new(), withheld: None }
    }
}

impl<T: Copy + Ord + Add<Duration, Output = T>> MissingBackends<T> {
    /// Notes the present state. In panic the times of all backends start again.
    pub fn note(&mut self, now: T, presence: &Presence) {
        let Presence { missing, all, is_panic } = presence;
        self.missing.retain(|address, _| missing.contains(address) && !is_panic);
        if !is_panic {
            for address in missing {
                self.missing.entry(*address).or_insert(Missing { since: now, next: None });
            }
        }
        let lost = self.missing.values().filter(|missing| missing.since + CONFIRMED_AFTER <= now).count();
        self.withheld = (lost * 3 > *all).then_some((lost, *all));
    }

    /// The numbers of lost backends and of all backends if so many are lost that no connection is
    /// closed; `None` otherwise.
    pub fn withheld(&self) -> Option<(usize, usize)> {
        self.withheld
    }

    /// A lost backend whose connections are to be closed now; `None` if there is none. `delay`
    /// returns the part of [`SPREAD`] by which this host waits longer for a backend, and
    /// `has_flows` whether a backend has open flows. The same backend is not returned again within
    /// 30 s, unless [`MissingBackends::continue_with`] is called.
    pub fn take_due(
        &mut self,
        now: T,
        delay: impl Fn(SocketAddr) -> Duration,
        has_flows: impl Fn(SocketAddr) -> bool,
    ) -> Option<SocketAddr> {
        if self.withheld.is_some() {
            return None;
        }
        let is_due = |(address, missing): &(&SocketAddr, &mut Missing<T>)| {
            let first = || missing.since + CONFIRMED_AFTER + delay(**address);
            missing.next.unwrap_or_else(first) <= now && has_flows(**address)
        };
        let (address, missing) = self.missing.iter_mut().find(is_due)?;
        missing.next = Some(now + RETRY);
        Some(*address)
    }

    /// Lets [`MissingBackends::take_due`] return a backend at once: its last job ended before it
    /// had closed all connections.
    pub fn continue_with(&mut self, address: SocketAddr, now: T) {
        if let Some(missing) = self.missing.get_mut(&address) {
            missing.next = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(host: u8) -> SocketAddr {
        ([10, 0, 0, host], 80).into()
    }

    fn missing(hosts: impl IntoIterator<Item = u8>, all: usize) -> Presence {
        Presence { missing: hosts.into_iter().map(address).collect(), all, is_panic: false }
    }

    /// Notes one presence each second of `seconds`, and returns what was due, and when.
    fn run(
        backends: &mut MissingBackends<Duration>,
        seconds: std::ops::RangeInclusive<u64>,
        presence: &Presence,
    ) -> Vec<(u64, SocketAddr)> {
        let mut due = Vec::new();
        for second in seconds {
            let now = Duration::from_secs(second);
            backends.note(now, presence);
            due.extend(backends.take_due(now, |_| Duration::from_secs(4), |_| true).map(|one| (second, one)));
        }
        due
    }

    #[test]
    fn a_backend_is_lost_after_a_minute_and_the_delay_of_the_host() {
        let mut backends = MissingBackends::default();
        let due = run(&mut backends, 0..=130, &missing([1], 3));
        assert_eq!(due, [(64, address(1)), (94, address(1)), (124, address(1))]);
        backends.continue_with(address(1), Duration::from_secs(131));
        assert_eq!(run(&mut backends, 131..=132, &missing([1], 3)), [(131, address(1))]);
    }

    #[test]
    fn a_backend_that_returns_and_leaves_again_waits_again() {
        let mut backends = MissingBackends::default();
        assert_eq!(run(&mut backends, 0..=59, &missing([1], 3)), []);
        assert_eq!(run(&mut backends, 60..=60, &missing([], 3)), []);
        assert_eq!(run(&mut backends, 61..=125, &missing([1], 3)), [(125, address(1))]);
    }

    #[test]
    fn panic_starts_all_times_again() {
        let mut backends = MissingBackends::default();
        let panic = Presence { is_panic: true, ..missing([1], 3) };
        assert_eq!(run(&mut backends, 0..=63, &missing([1], 3)), []);
        assert_eq!(run(&mut backends, 64..=300, &panic), []);
        assert_eq!(run(&mut backends, 301..=365, &missing([1], 3)), [(365, address(1))]);
    }

    #[test]
    fn more_than_a_third_keep_their_connections() {
        let mut backends = MissingBackends::default();
        assert_eq!(run(&mut backends, 0..=100, &missing([1, 2], 5)), []);
        assert_eq!(backends.withheld(), Some((2, 5)));
        // One of them returns.
        assert_eq!(run(&mut backends, 101..=101, &missing([1], 5)), [(101, address(1))]);
        assert_eq!(backends.withheld(), None);
        let mut third = MissingBackends::default();
        assert_eq!(run(&mut third, 0..=65, &missing([1, 2], 6)), [(64, address(1)), (65, address(2))]);
    }

    #[test]
    fn backends_that_are_not_lost_yet_withhold_nothing() {
        let mut backends = MissingBackends::default();
        assert_eq!(run(&mut backends, 0..=50, &missing([1], 4)), []);
        assert_eq!(run(&mut backends, 51..=64, &missing([1, 2], 4)), [(64, address(1))]);
        assert_eq!(run(&mut backends, 65..=200, &missing([1, 2], 4)), [(94, address(1))]);
    }

    #[test]
    fn hosts_wait_for_different_times_within_the_spread() {
        let delays: Vec<Duration> =
            (0..100).map(|host| delay(&format!("host-{host}"), "users", address(1))).collect();
        assert!(delays.iter().all(|delay| *delay < SPREAD));
        for second in 0..10 {
            let within = delays.iter().filter(|delay| delay.as_secs() == second).count();
            assert!((3..=20).contains(&within), "{within} of 100 hosts wait {second} s");
        }
    }

    #[test]
    fn a_backend_without_flows_is_not_due() {
        let mut backends = MissingBackends::default();
        for second in 0..=100 {
            let now = Duration::from_secs(second);
            backends.note(now, &missing([1, 2], 6));
            let due = backends.take_due(now, |_| Duration::ZERO, |one| one == address(2));
            assert_eq!(due, (second == 60 || second == 90).then(|| address(2)), "at {second} s");
        }
    }
}
