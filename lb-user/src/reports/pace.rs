//! Limits how often the reports thread takes a turn, in which it polls agents and handles
//! datagrams. The system calls of a turn take more time than one datagram. At thousands of
//! datagrams per second, one turn handles many datagrams together; at low rates, turns are not
//! delayed.

use std::time::Duration;

/// The time between turns if many datagrams arrive, and therefore the longest delay before a
/// reported change is stored. It is less than half of the time after which an agent repeats the
/// report of a change.
pub const APART: Duration = Duration::from_millis(4);

/// The number of turns that may follow each other without a pause. With about 250 backends that are
/// polled every two seconds, the thread never pauses.
const AT_ONCE: u32 = 16;

/// A token bucket of turns. Times are CLOCK_MONOTONIC.
#[derive(Debug)]
pub struct TokenBucket {
    /// The number of turns that may be taken without a pause, times [`APART`].
    saved: Duration,
    at: Duration,
}

impl TokenBucket {
    /// A full bucket.
    pub fn new(now: Duration) -> Self {
        Self { saved: APART * AT_ONCE, at: now }
    }

    /// Takes a turn from the bucket. Returns the time to wait before the turn begins.
    pub fn turn(&mut self, now: Duration) -> Duration {
        self.saved = (self.saved + now.saturating_sub(self.at)).min(APART * AT_ONCE);
        let rest = APART.saturating_sub(self.saved);
        self.saved = self.saved + rest - APART;
        self.at = now + rest;
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_few_turns_begin_without_a_pause() {
        let mut pace = TokenBucket::new(Duration::ZERO);
        for turn in 0..10_000 {
            assert_eq!(pace.turn(APART * turn), Duration::ZERO);
        }
        for turn in 0..AT_ONCE {
            assert_eq!(pace.turn(APART * 15_000), Duration::ZERO, "turn {turn} begins at once");
        }
        assert_eq!(pace.turn(APART * 15_000), APART);
    }

    #[test]
    fn many_turns_are_spaced_evenly() {
        let mut pace = TokenBucket::new(Duration::ZERO);
        let (mut now, mut turns) = (Duration::ZERO, 0);
        while now < MS * 1_000 {
            // Work for the next turn is present 10 µs after each turn has begun.
            now += pace.turn(now) + MS / 100;
            turns += 1;
        }
        assert!((250..=270).contains(&turns), "{turns} turns");
    }
}
