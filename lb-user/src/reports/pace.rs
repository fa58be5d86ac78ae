//! How often the thread of reports looks: a turn, with its system calls and its wait, costs more than a datagram. Where thousands come
//! and go in a second they are taken together; where few do, none waits.

use std::time::Duration;

/// How far turns are apart where many datagrams come: a change is stored that much later at most. It is less than half of what an
/// agent waits before it says it again.
pub const APART: Duration = Duration::from_millis(4);

/// Turns that may follow each other at once. Some 250 backends that are asked every two seconds never use them up.
const AT_ONCE: u32 = 16;

/// A bucket of turns, by CLOCK_MONOTONIC.
#[derive(Debug)]
pub struct TokenBucket {
    /// Turns that may be taken at once, in time.
    saved: Duration,
    at: Duration,
}

impl TokenBucket {
    /// All of them may be taken.
    pub fn new(now: Duration) -> Self {
        Self { saved: APART * AT_ONCE, at: now }
    }

    /// A turn is wanted. It may begin after so long.
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
    fn few_turns_are_taken_at_once() {
        let mut pace = TokenBucket::new(Duration::ZERO);
        for turn in 0..10_000 {
            assert_eq!(pace.turn(APART * turn), Duration::ZERO);
        }
        for turn in 0..AT_ONCE {
            assert_eq!(pace.turn(APART * 15_000), Duration::ZERO, "turn {turn} of those that were saved");
        }
        assert_eq!(pace.turn(APART * 15_000), APART);
    }

    #[test]
    fn many_are_as_far_apart_as_is_said() {
        let mut pace = TokenBucket::new(Duration::ZERO);
        let (mut now, mut turns) = (Duration::ZERO, 0);
        while now < MS * 1_000 {
            // Whoever is woken finds something to do at once.
            now += pace.turn(now) + MS / 100;
            turns += 1;
        }
        assert!((250..=270).contains(&turns), "{turns}");
    }
}
