//! Decides when a change is pushed to subscribers, and how many pushes are sent at a time. A push
//! is sent once and then repeated at most four times within 80 ms, until the subscriber
//! acknowledges it.

use std::array;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The times at which a push is sent until it is acknowledged, counted from the first sending. If a
/// path loses one packet in twenty, it loses all five pushes once in about three million changes;
/// the client then receives the change in the answer to its next request.
const SCHEDULE: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(10),
    Duration::from_millis(20),
    Duration::from_millis(40),
    Duration::from_millis(80),
];

/// The largest number of pushes that an agent sends per second, and therefore also the largest
/// number of clients that receive a change per second. At this rate the agent uses about a tenth of
/// a core. If no push is acknowledged, each client requires five pushes, so at most 10,000 clients
/// per second are served.
pub const PER_SECOND: u32 = 50_000;

/// The largest number of pushes that are sent at once after a time without pushes. Most services
/// have no more clients than this, and a switch can queue this many packets of this size.
const BURST: u32 = 100;

/// The pushes of one backend's last change.
#[derive(Debug)]
pub struct Pushes {
    /// One queue for each number of times that a push has already been sent. A queue contains
    /// subscribers, each with the time of its first push, and is ordered by this time.
    waiting: [VecDeque<(Instant, SocketAddr)>; SCHEDULE.len()],
}

impl Pushes {
    /// Creates queues without pushes.
    pub fn new() -> Self {
        Self { waiting: array::from_fn(|_| VecDeque::new()) }
    }

    /// Starts pushing a change to these addresses. Pushes of the previous change are dropped.
    pub fn begin(&mut self, addresses: impl Iterator<Item = SocketAddr>, now: Instant) {
        *self = Self::new();
        self.waiting[0].extend(addresses.map(|address| (now, address)));
    }

    /// Adds one more address that must receive the change.
    pub fn add(&mut self, address: SocketAddr, now: Instant) {
        self.waiting[0].push_back((now, address));
    }

    /// The next address that must receive a push now. First pushes come before repetitions. Skips
    /// and removes the addresses for which `is_unacknowledged` returns false; pushes to the other
    /// addresses are repeated later.
    pub fn next(
        &mut self,
        now: Instant,
        is_unacknowledged: impl Fn(SocketAddr) -> bool,
    ) -> Option<SocketAddr> {
        for (times, after) in SCHEDULE.iter().enumerate() {
            // Bound: each iteration removes one address.
            while let Some((first, address)) = self.waiting[times].front().copied() {
                if first + *after > now {
                    break;
                }
                self.waiting[times].pop_front();
                if !is_unacknowledged(address) {
                    continue;
                }
                // Times count from the moment at which the first push is sent, because the pace may
                // have delayed it.
                let first = if times == 0 { now } else { first };
                if let Some(next) = self.waiting.get_mut(times + 1) {
                    next.push_back((first, address));
                }
                return Some(address);
            }
        }
        None
    }

    /// When the next push is due.
    pub fn at(&self) -> Option<Instant> {
        let firsts = self.waiting.iter().zip(SCHEDULE);
        firsts.filter_map(|(waiting, after)| Some(waiting.front()?.0 + after)).min()
    }
}

/// Limits the rate of pushes with a token bucket.
#[derive(Debug)]
pub struct Pace {
    /// The saved time: elapsed time minus [`COST`] for each push, at most the time for a burst.
    saved: Duration,
    at: Instant,
}

/// The part of the saved time that one push uses.
const COST: Duration = Duration::from_nanos(1_000_000_000 / PER_SECOND as u64);

impl Pace {
    /// Starts with a full burst.
    pub fn new(now: Instant) -> Self {
        Self { saved: COST * BURST, at: now }
    }

    /// How many pushes may be sent now.
    pub fn allowed(&mut self, now: Instant) -> u32 {
        self.saved = (self.saved + now.saturating_duration_since(self.at)).min(COST * BURST);
        self.at = self.at.max(now);
        u32::try_from(self.saved.as_nanos() / COST.as_nanos()).unwrap_or(BURST)
    }

    /// Records that this many pushes were sent.
    pub fn spend(&mut self, pushes: u32) {
        self.saved = self.saved.saturating_sub(COST * pushes);
    }

    /// When the next push may be sent: now, or in one millisecond. A shorter time is below the
    /// resolution of timers; after a millisecond several pushes may be sent at once.
    pub fn allowed_at(&self, now: Instant) -> Instant {
        if self.saved >= COST { now } else { now + Duration::from_millis(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moment::moment;

    fn address(n: u16) -> SocketAddr {
        SocketAddr::new("192.0.2.1".parse().unwrap(), n)
    }

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_push_is_repeated_at_10_20_40_and_80_ms_until_it_is_acknowledged() {
        let start = moment();
        for (acknowledged, expected) in [(u32::MAX, &[0, 10, 20, 40, 80][..]), (15, &[0, 10]), (0, &[])] {
            let mut pushes = Pushes::new();
            pushes.begin([address(1)].into_iter(), start);
            let mut sent = Vec::new();
            for ms in 0..200 {
                let now = start + MS * ms;
                sent.extend(pushes.next(now, |_| ms < acknowledged).map(|_| ms));
                assert_eq!(pushes.next(now, |_| true), None, "only one push is due");
            }
            assert_eq!(sent, expected);
            assert_eq!(pushes.at(), None);
        }
    }

    #[test]
    fn a_later_change_restarts_the_schedule() {
        let start = moment();
        let mut pushes = Pushes::new();
        pushes.begin([address(1), address(2)].into_iter(), start);
        assert_eq!(pushes.next(start, |_| true), Some(address(1)));
        pushes.begin([address(2)].into_iter(), start + MS);
        assert_eq!(pushes.next(start + MS, |_| true), Some(address(2)));
        assert_eq!(pushes.at(), Some(start + MS * 11));
    }

    /// Pushes a change to this many subscribers; no subscriber acknowledges it. Returns the
    /// millisecond in which the last subscriber gets its first push, and the number of all pushes.
    fn paced(subscribers: u16) -> (u32, u32) {
        let start = moment();
        let (mut pushes, mut pace) = (Pushes::new(), Pace::new(start));
        pushes.begin((0..subscribers).map(address), start);
        let (mut sent, mut last, mut addressed) = (0, 0, std::collections::BTreeSet::new());
        for ms in 0..3_000 {
            let now = start + MS * ms;
            let mut count = 0;
            for _ in 0..pace.allowed(now) {
                let Some(address) = pushes.next(now, |_| true) else { break };
                count += 1;
                if addressed.insert(address) {
                    last = ms;
                }
            }
            assert!(count <= BURST);
            pace.spend(count);
            sent += count;
        }
        (last, sent)
    }

    #[test]
    fn pushes_are_limited_to_50000_per_second() {
        assert_eq!(paced(100), (0, 500));
        assert_eq!(paced(1_000), (18, 5_000));
        assert_eq!(paced(10_000), (198, 50_000));
    }

    #[test]
    fn a_pace_saves_no_more_than_a_burst() {
        let start = moment();
        let mut pace = Pace::new(start);
        assert_eq!(pace.allowed(start + Duration::from_hours(1)), BURST);
        pace.spend(BURST);
        assert_eq!(pace.allowed(start), 0, "no time has passed");
        assert!(pace.allowed_at(start) > start);
        assert_eq!(pace.allowed(start + Duration::from_hours(1) + MS), 50);
    }
}
