//! Slow start: a member that is new, or available again, first gets a part of its share. This part
//! grows with time, so that caches and connection pools fill before the whole load arrives. Slow
//! start works like Envoy's `slow_start_config` with an aggression of 1.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::by_address::ByAddress;

/// The smallest part of its share that a member gets (`min_weight_percent`).
const LEAST: f64 = 0.1;

/// A member that became available less than this time ago is treated as if this time had passed.
const SECOND: Duration = Duration::from_secs(1);

/// When each member of a service became available.
#[derive(Clone, Debug, Default)]
pub struct MemberAvailability {
    /// `None` for unavailable members, and zero for members that were available at the first call
    /// of [`MemberAvailability::look`].
    since: ByAddress<Option<Duration>>,
    has_begun: bool,
    /// Whether a member was added or changed its availability since the last
    /// [`MemberAvailability::take_changed`].
    has_changed: bool,
}

impl MemberAvailability {
    /// Updates the members and their availability. Members that are available at the first call are
    /// treated as if they had been available for long, so that a starting daemon puts no member
    /// into slow start. Returns the members that were added or changed their availability since the
    /// last call.
    pub fn look(&mut self, now: Duration, row: impl Iterator<Item = (SocketAddr, bool)>) -> Vec<SocketAddr> {
        let (mut changed, is_first) = (Vec::new(), !self.has_begun);
        let first = if self.has_begun { now } else { Duration::ZERO };
        let before = std::mem::take(&mut self.since);
        let mut since_now = Vec::new();
        for (address, is_available) in row {
            let since = match before.get(&address) {
                Some(Some(since)) => *since,
                Some(None) => now,
                None => first,
            };
            let since = is_available.then_some(since);
            if !is_first && before.get(&address).is_none_or(|before| before.is_some() != is_available) {
                changed.push(address);
            }
            since_now.push((address, since));
            self.has_begun = true;
        }
        self.since = since_now.into_iter().collect();
        self.has_changed |= !changed.is_empty();
        changed
    }

    /// Whether a member was added or changed its availability since the last call.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.has_changed)
    }

    /// Resumes the unfinished slow starts of an earlier daemon. `starting`: the time for which each
    /// member had been available. This daemon's own observations take precedence.
    pub fn resume(&mut self, starting: &BTreeMap<SocketAddr, Duration>, window: Duration, now: Duration) {
        for (address, ready_for) in starting.iter().filter(|(_, ready_for)| **ready_for < window) {
            if self.since.get(address).is_none_or(|since| *since == Some(Duration::ZERO)) {
                // After a reboot, the clock's value may be smaller than the time for which the
                // member had been available.
                let since = now.saturating_sub(*ready_for).max(Duration::from_nanos(1));
                self.since.insert(*address, Some(since));
            }
        }
    }

    /// The members in slow start, each with the time for which it has been available.
    pub fn starting(&self, window: Duration, now: Duration) -> BTreeMap<SocketAddr, Duration> {
        let ready_for = |since: Duration| (!since.is_zero()).then(|| now.saturating_sub(since));
        let since = self.since.iter().filter_map(|(address, since)| Some((*address, ready_for((*since)?)?)));
        since.filter(|(_, ready_for)| *ready_for < window).collect()
    }

    /// The time since which a member is available; `None` if it is unavailable.
    pub fn since(&self, address: SocketAddr) -> Option<Duration> {
        self.since.get(&address).copied().flatten()
    }

    /// The part of its share that a member gets if slow start lasts `window`. An unavailable member
    /// has the smallest part, so that it begins with this part when it returns.
    pub fn part(&self, address: SocketAddr, window: Duration, now: Duration) -> f64 {
        let Some(since) = self.since(address) else { return LEAST };
        // Zero: the member was available at the first call of `look`.
        if since.is_zero() {
            return 1.0;
        }
        let ready_for = now.saturating_sub(since).max(SECOND);
        (ready_for.as_secs_f64() / window.as_secs_f64()).clamp(LEAST, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: u16) -> SocketAddr {
        ([10, 0, 0, 1], port).into()
    }

    const WINDOW: Duration = Duration::from_secs(20);

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// The part of its share that the member at port 2 gets after these calls of `look`. `None`
    /// means that the member is absent.
    fn part(looks: &[(u64, Option<bool>)], at: u64) -> f64 {
        let mut readiness = MemberAvailability::default();
        for (second, second_is) in looks {
            let others = [(address(1), true)].into_iter();
            let row = others.chain(second_is.map(|is_available| (address(2), is_available)));
            readiness.look(s(*second), row);
        }
        assert!((readiness.part(address(1), WINDOW, s(at)) - 1.0).abs() < 1e-12);
        readiness.part(address(2), WINDOW, s(at))
    }

    #[test]
    fn a_part_grows_with_time_from_one_tenth() {
        let looks = [(100, None), (101, Some(true))];
        for (at, expected) in
            [(101, 0.1), (102, 0.1), (103, 0.1), (104, 0.15), (111, 0.5), (121, 1.0), (999, 1.0)]
        {
            let part = part(&looks, at);
            assert!((part - expected).abs() < 1e-12, "second {at}: part {part}, expected {expected}");
        }
    }

    #[test]
    fn the_next_daemon_resumes_slow_starts() {
        let row = |is_available| [(address(1), true), (address(2), is_available)].into_iter();
        let mut before = MemberAvailability::default();
        before.look(s(100), [(address(1), true)].into_iter());
        before.look(s(101), row(true));
        let starting = before.starting(WINDOW, s(106));
        assert_eq!(starting, BTreeMap::from([(address(2), s(5))]));
        assert_eq!(before.starting(WINDOW, s(121)), BTreeMap::new(), "the slow start is over");
        let part_after = |now, looks: &[(u64, bool)], resumed: u64| {
            let mut after = MemberAvailability::default();
            for (second, is_available) in looks.iter().take_while(|(second, _)| *second < resumed) {
                after.look(s(*second), row(*is_available));
            }
            after.resume(&starting, WINDOW, s(resumed));
            for (second, is_available) in looks.iter().skip_while(|(second, _)| *second < resumed) {
                after.look(s(*second), row(*is_available));
            }
            assert!((after.part(address(1), WINDOW, s(now)) - 1.0).abs() < 1e-12);
            after.part(address(2), WINDOW, s(now))
        };
        let is = |part: f64, expected: f64| assert!((part - expected).abs() < 1e-9, "{part}, not {expected}");
        is(part_after(108, &[(108, true)], 108), 0.25);
        is(part_after(113, &[(108, true)], 108), 0.5);
        is(part_after(113, &[(107, true)], 108), 0.5);
        is(part_after(108, &[(108, false)], 108), 0.1);
        is(part_after(113, &[(105, false), (107, true)], 108), 0.3);
        // A slow start that is over does not begin again on a host that has just booted.
        let mut booted = MemberAvailability::default();
        booted.resume(&BTreeMap::from([(address(2), s(7_200))]), WINDOW, s(1));
        booted.look(s(1), row(true));
        is(booted.part(address(2), WINDOW, s(1)), 1.0);
        // The slow start began before the clock's time zero.
        is(part_after(3, &[(2, true)], 1), 0.15);
    }

    #[test]
    fn first_members_have_full_shares_and_returning_members_start_slowly() {
        let is = |looks: &[(u64, Option<bool>)], at, expected: f64| {
            let part = part(looks, at);
            assert!(
                (part - expected).abs() < 1e-12,
                "{looks:?}, second {at}: part {part}, expected {expected}"
            );
        };
        is(&[(100, Some(true))], 100, 1.0);
        is(&[(100, Some(true)), (200, Some(false))], 200, 0.1);
        is(&[(100, Some(false))], 200, 0.1);
        is(&[(100, Some(false)), (200, Some(true))], 210, 0.5);
        is(&[(100, Some(true)), (200, None), (300, Some(true))], 310, 0.5);
        is(&[(100, Some(true)), (200, Some(true))], 210, 1.0);
    }
}
