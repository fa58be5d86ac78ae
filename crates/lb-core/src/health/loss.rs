//! Which backends of a service are lost, so that their open connections are closed
//! (`on_backend_loss`).
//!
//! A backend is missing if the list does not contain it, or if it is refusing and does not accept
//! connections (tier 5). A backend that leaves only the task's subset is not missing. A backend is
//! lost when it has been missing for [`CONFIRMED_AFTER`]: lists and probes may be wrong for a short
//! time, and a closed connection cannot be restored.
//!
//! No backend is lost in panic. If more than a third of the members are lost within a minute of
//! each other, none of these backends is treated as lost: a fault of the list or of the probes is
//! then more likely than so many faults of backends. The members are those that the service had
//! before the loss, so that new endpoints in the same list do not make a loss look small.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Add;
use std::time::{Duration, Instant};

named! {
    /// The treatment of the open connections of a lost backend.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum OnBackendLoss {
        /// Open connections remain open.
        #[default]
        Keep = "keep",
        /// Idle TCP connections are closed.
        CloseIdle = "close-idle",
        /// All connections, and all connected UDP sockets, are closed.
        Close = "close",
    }
}

/// A backend is lost after it has been missing for this time.
pub const CONFIRMED_AFTER: Duration = Duration::from_mins(1);
/// Each host adds its own part of this time to [`CONFIRMED_AFTER`], so that the clients of a fleet
/// do not all dial again at once.
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

/// A missing backend without a slot is forgotten after this time. A backend retains its slot while
/// it has flows, and for a short time after that.
const FORGOTTEN_AFTER: Duration = Duration::from_mins(10);

/// The backends of a service at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Presence {
    /// The backends that are in the table or replaced, and not missing.
    pub members: BTreeSet<SocketAddr>,
    /// The missing backends, and whether each has a slot. Only backends with a slot and the
    /// backends of [`MissingBackends::known`] are included.
    pub missing: BTreeMap<SocketAddr, bool>,
    /// Whether the service is in panic.
    pub is_panic: bool,
}

/// The missing backends of one service. `T` is a time of any clock.
#[derive(Clone, Debug)]
pub struct MissingBackends<T = Instant> {
    /// The members at the last call of [`MissingBackends::note`].
    members: BTreeSet<SocketAddr>,
    missing: BTreeMap<SocketAddr, Missing<T>>,
    /// While too many backends are lost: their number, and the number of members before the loss.
    withheld: Option<(usize, usize)>,
}

#[derive(Clone, Copy, Debug)]
struct Missing<T> {
    since: T,
    /// The number of members before the loss.
    of: usize,
    /// When connections to the backend may be closed again.
    next: Option<T>,
}

impl<T: Copy + Ord + Add<Duration, Output = T>> Missing<T> {
    fn is_lost(&self, now: T) -> bool {
        self.since + CONFIRMED_AFTER <= now
    }
}

impl<T: Copy + Ord + Add<Duration, Output = T>> MissingBackends<T> {
    /// Starts with these members and without missing backends.
    pub fn new(members: BTreeSet<SocketAddr>) -> Self {
        Self { members, missing: BTreeMap::new(), withheld: None }
    }

    /// The members and the missing backends.
    pub fn known(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.members.iter().chain(self.missing.keys()).copied()
    }

    /// Notes the present state. In panic, the time for which each backend has been missing starts
    /// again.
    pub fn note(&mut self, now: T, presence: Presence) {
        let Presence { members, missing, is_panic } = presence;
        if self.members.is_empty() && self.missing.is_empty() {
            // The list of a new service may change before the first call.
            self.members.clone_from(&members);
        }
        self.missing.retain(|address, known| {
            let has_slot = missing.get(address);
            has_slot.is_some_and(|has_slot| *has_slot || now < known.since + FORGOTTEN_AFTER) && !is_panic
        });
        if !is_panic {
            // A backend that was just forgotten is not new: it has no slot and is no member.
            let is_new = |(address, has_slot): &(SocketAddr, bool)| {
                !self.missing.contains_key(address) && (*has_slot || self.members.contains(address))
            };
            let new: BTreeSet<SocketAddr> =
                missing.into_iter().filter(is_new).map(|(address, _)| address).collect();
            let of = self.members.union(&new).count();
            self.missing
                .extend(new.into_iter().map(|address| (address, Missing { since: now, of, next: None })));
        }
        self.members = members;
        let lost = self.missing.values().filter(|one| one.is_lost(now));
        self.withheld = lost.filter_map(|one| self.withheld_with(one, now)).max();
    }

    /// The number of backends that were lost within a minute of `one`, and the number of members
    /// before the loss; `None` if these backends are few enough to close their connections.
    fn withheld_with(&self, one: &Missing<T>, now: T) -> Option<(usize, usize)> {
        let is_near = |other: &&Missing<T>| {
            other.is_lost(now)
                && other.since <= one.since + CONFIRMED_AFTER
                && one.since <= other.since + CONFIRMED_AFTER
        };
        let together = self.missing.values().filter(is_near);
        let (lost, of) = together.fold((0, 0), |(lost, of), other| (lost + 1, other.of.max(of)));
        (lost * 3 > of).then_some((lost, of))
    }

    /// The number of backends that were lost together, and the number of members before the loss;
    /// `None` if so few were lost that their connections are closed.
    pub fn withheld(&self) -> Option<(usize, usize)> {
        self.withheld
    }

    /// A lost backend with connections that should be closed now; `None` if there is no such
    /// backend. `delay` returns the part of [`SPREAD`] by which this host waits longer for a
    /// backend, and `has_flows` whether a backend has open flows. The same backend is not returned
    /// again within 30 s, unless [`MissingBackends::continue_with`] is called.
    pub fn take_due(
        &mut self,
        now: T,
        delay: impl Fn(SocketAddr) -> Duration,
        has_flows: impl Fn(SocketAddr) -> bool,
    ) -> Option<SocketAddr> {
        let is_due = |(address, missing): (&SocketAddr, &Missing<T>)| {
            let first = || missing.since + CONFIRMED_AFTER + delay(*address);
            let is_time = missing.next.unwrap_or_else(first) <= now;
            let is_due = is_time && has_flows(*address) && self.withheld_with(missing, now).is_none();
            is_due.then_some(*address)
        };
        let address = self.missing.iter().find_map(is_due)?;
        self.missing.get_mut(&address)?.next = Some(now + RETRY);
        Some(address)
    }

    /// Makes [`MissingBackends::take_due`] return a backend at once, because its last close job
    /// ended before all connections were closed.
    pub fn continue_with(&mut self, address: SocketAddr, now: T) {
        if let Some(missing) = self.missing.get_mut(&address) {
            missing.next = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Backends = MissingBackends<Duration>;

    fn address(host: u8) -> SocketAddr {
        ([10, 0, 0, host], 80).into()
    }

    fn of(members: u8) -> Backends {
        MissingBackends::new((1..=members).map(address).collect())
    }

    /// `missing`: the hosts that are missing and have slots. `members`: the hosts that are members.
    fn presence(missing: &[u8], members: &[u8]) -> Presence {
        Presence {
            missing: missing.iter().map(|host| (address(*host), true)).collect(),
            members: members.iter().copied().map(address).collect(),
            is_panic: false,
        }
    }

    /// Notes `presence` in each second of `seconds`. Returns the backends that were due, each with
    /// its second.
    fn run(
        backends: &mut Backends,
        seconds: std::ops::RangeInclusive<u64>,
        presence: &Presence,
    ) -> Vec<(u64, SocketAddr)> {
        let mut due = Vec::new();
        for second in seconds {
            let now = Duration::from_secs(second);
            backends.note(now, presence.clone());
            let taken = backends.take_due(now, |_| Duration::from_secs(4), |_| true);
            due.extend(taken.map(|one| (second, one)));
        }
        due
    }

    #[test]
    fn a_backend_is_lost_after_a_minute_and_the_delay_of_the_host() {
        let (mut backends, lost) = (of(3), presence(&[1], &[2, 3]));
        let due = run(&mut backends, 0..=130, &lost);
        assert_eq!(due, [(64, address(1)), (94, address(1)), (124, address(1))]);
        backends.continue_with(address(1), Duration::from_secs(131));
        assert_eq!(run(&mut backends, 131..=132, &lost), [(131, address(1))]);
    }

    #[test]
    fn a_backend_that_returns_and_leaves_is_lost_after_another_minute() {
        let mut backends = of(3);
        assert_eq!(run(&mut backends, 0..=59, &presence(&[1], &[2, 3])), []);
        assert_eq!(run(&mut backends, 60..=60, &presence(&[], &[1, 2, 3])), []);
        assert_eq!(run(&mut backends, 61..=125, &presence(&[1], &[2, 3])), [(125, address(1))]);
    }

    #[test]
    fn a_backend_can_leave_before_the_first_look_at_a_new_service() {
        assert_eq!(run(&mut of(0), 0..=65, &presence(&[1], &[2, 3])), [(64, address(1))]);
    }

    #[test]
    fn panic_restarts_the_time_of_every_missing_backend() {
        let mut backends = of(3);
        let panic = Presence { is_panic: true, ..presence(&[1], &[2, 3]) };
        assert_eq!(run(&mut backends, 0..=63, &presence(&[1], &[2, 3])), []);
        assert_eq!(run(&mut backends, 64..=300, &panic), []);
        assert_eq!(run(&mut backends, 301..=365, &presence(&[1], &[2, 3])), [(365, address(1))]);
    }

    #[test]
    fn no_connection_is_closed_if_more_than_a_third_are_lost() {
        let mut backends = of(5);
        assert_eq!(run(&mut backends, 0..=100, &presence(&[1, 2], &[3, 4, 5])), []);
        assert_eq!(backends.withheld(), Some((2, 5)));
        // One of the lost backends returns.
        assert_eq!(run(&mut backends, 101..=101, &presence(&[1], &[2, 3, 4, 5])), [(101, address(1))]);
        assert_eq!(backends.withheld(), None);
        let due = run(&mut of(6), 0..=65, &presence(&[1, 2], &[3, 4, 5, 6]));
        assert_eq!(due, [(64, address(1)), (65, address(2))]);
    }

    #[test]
    fn a_list_that_replaces_all_backends_closes_nothing() {
        for new in [&[5, 6][..], &[5, 6, 7, 8, 9, 10, 11, 12, 13]] {
            let mut backends = of(2);
            assert_eq!(run(&mut backends, 0..=2_000, &presence(&[1, 2], new)), []);
            assert_eq!(backends.withheld(), Some((2, 2)));
        }
        // Missing backends without flows have no slots, but are counted, too.
        let mut lost = presence(&[1, 2], &[5, 6, 7, 8]);
        lost.missing.extend([(address(3), false), (address(4), false)]);
        let mut backends = of(4);
        assert_eq!(run(&mut backends, 0..=2_000, &lost), []);
    }

    #[test]
    fn a_rolling_update_closes_the_connections_of_each_backend() {
        let mut backends = of(6);
        let mut due = BTreeSet::new();
        for step in 1..=6 {
            let missing: Vec<u8> = (1..=step).collect();
            let members: Vec<u8> = (step + 1..=6).chain(11..=10 + step).collect();
            let from = u64::from(step) * 90;
            let found = run(&mut backends, from..=from + 89, &presence(&missing, &members));
            due.extend(found.into_iter().map(|(_, one)| one));
        }
        assert_eq!(due, (1..=6).map(address).collect());
    }

    #[test]
    fn backends_that_are_not_lost_yet_withhold_nothing() {
        let mut backends = of(4);
        assert_eq!(run(&mut backends, 0..=50, &presence(&[1], &[2, 3, 4])), []);
        let both = presence(&[1, 2], &[3, 4]);
        assert_eq!(run(&mut backends, 51..=64, &both), [(64, address(1))]);
        assert_eq!(run(&mut backends, 65..=200, &both), [(94, address(1))]);
    }

    #[test]
    fn a_lost_backend_without_a_slot_is_forgotten() {
        let mut lost = presence(&[], &[2, 3]);
        lost.missing.insert(address(1), false);
        let mut backends = of(3);
        run(&mut backends, 0..=599, &lost);
        assert!(backends.known().any(|one| one == address(1)));
        run(&mut backends, 600..=601, &lost);
        assert!(!backends.known().any(|one| one == address(1)));
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
        let mut backends = of(6);
        for second in 0..=100 {
            let now = Duration::from_secs(second);
            backends.note(now, presence(&[1, 2], &[3, 4, 5, 6]));
            let due = backends.take_due(now, |_| Duration::ZERO, |one| one == address(2));
            assert_eq!(due, (second == 60 || second == 90).then(|| address(2)), "at {second} s");
        }
    }
}
