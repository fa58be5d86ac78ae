//! When a flow record in doubt is over: what passes have seen of it, as one value that is judged.
//!
//! It knows neither maps nor lists of sockets, and no clock: a pass tells it what it has seen and when.

use std::ops::Sub;
use std::time::{Duration, Instant};

use crate::records::{Record, Version};

/// Intervals for which no process may have held a socket whose namespace cannot be looked into: connections that nobody
/// holds are closed by the kernel, which gives up within two minutes.
const WITHOUT_LIST: u32 = 10;

/// What a pass has seen of a record whose socket no list has shown.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Whether a complete list of its namespace misses it; otherwise there was none.
    pub is_missed: bool,
    /// Whether a program has seen its SYN leave: its flow ends with the connection, whoever holds the socket.
    pub is_connection: bool,
    pub held: InUse,
    /// Whether it may be a path of an MPTCP socket: a process holds that, and not its paths.
    pub may_be_mptcp: bool,
}

/// Whether a process holds a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InUse {
    Yes,
    No,
    NeverTold,
    NotNow,
}

/// Since when a record is in doubt, by any clock.
#[derive(Debug)]
pub struct Suspect<T = Instant> {
    /// Of this flow, not of a later one of the same socket.
    pub version: Version,
    /// Since when lists miss it and no process is known to hold it.
    pub missed_since: Option<T>,
    /// Since when no process holds it.
    pub unheld_since: Option<T>,
}

/// What becomes of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its flow is over.
    Gone,
    /// Its flow is over if the next pass sees the same.
    InDoubt,
    /// Its socket is open and not connected.
    Open,
    /// A process holds its socket, which may be connected.
    InUse,
    /// Nothing is known of its socket, or nothing yet.
    Elsewhere,
}

impl Suspect {
    pub fn of(record: &Record) -> Self {
        Self { version: record.version(), missed_since: None, unheld_since: None }
    }
}

impl<T: Copy + Sub<Output = Duration>> Suspect<T> {
    pub fn judge(&mut self, seen: Seen, now: T, interval: Duration) -> Verdict {
        self.unheld_since = match seen.held {
            InUse::No => self.unheld_since.or(Some(now)),
            InUse::NotNow => self.unheld_since,
            InUse::Yes | InUse::NeverTold => None,
        };
        if seen.is_missed {
            match seen.held {
                InUse::Yes if !seen.is_connection => {
                    self.missed_since = None;
                    return Verdict::Open;
                }
                InUse::NotNow if !seen.is_connection => return Verdict::InDoubt,
                // Where it is never told who holds sockets, a list alone decides: such a socket has no connection.
                InUse::Yes | InUse::No | InUse::NeverTold | InUse::NotNow => {}
            }
            let since = *self.missed_since.get_or_insert(now);
            return if now - since >= interval { Verdict::Gone } else { Verdict::InDoubt };
        }
        match (seen.held, self.unheld_since) {
            (InUse::Yes, _) => Verdict::InUse,
            (InUse::No, Some(since)) if !seen.may_be_mptcp && now - since >= WITHOUT_LIST * interval => {
                Verdict::Gone
            }
            _ => Verdict::Elsewhere,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(60);

    /// What becomes of a record that each pass sees so, a pass a minute.
    fn verdicts<const PASSES: usize>(seen: [(bool, bool, InUse); PASSES]) -> [Verdict; PASSES] {
        let mut doubt =
            Suspect::<Duration> { version: Version::default(), missed_since: None, unheld_since: None };
        let mut now = Duration::from_secs(1000);
        seen.map(|(is_missed, is_connection, held)| {
            now += INTERVAL;
            doubt.judge(Seen { is_missed, is_connection, held, may_be_mptcp: false }, now, INTERVAL)
        })
    }

    #[test]
    fn what_two_passes_find_neither_listed_nor_held_is_gone() {
        use InUse::{NeverTold, No, NotNow, Yes};
        use Verdict::{Gone, InDoubt, Open};
        assert_eq!(verdicts([(true, false, No), (true, false, No)]), [InDoubt, Gone]);
        assert_eq!(
            verdicts([(true, false, No), (true, false, Yes), (true, false, No)]),
            [InDoubt, Open, InDoubt]
        );
        assert_eq!(verdicts([(true, false, Yes), (true, false, Yes)]), [Open, Open]);
        // An error says nothing, and where nothing is ever told a list is enough.
        assert_eq!(
            verdicts([(true, false, No), (true, false, NotNow), (true, false, No)]),
            [InDoubt, InDoubt, Gone]
        );
        assert_eq!(verdicts([(true, false, NeverTold), (true, false, NeverTold)]), [InDoubt, Gone]);
        // A connection that no list shows is over, whoever holds its socket.
        for held in [Yes, No, NeverTold, NotNow] {
            assert_eq!(verdicts([(true, true, held), (true, true, held)]), [InDoubt, Gone], "{held:?}");
        }
    }

    #[test]
    fn where_no_list_can_be_had_nobody_may_have_held_it_for_ten_passes() {
        use InUse::{NeverTold, No, NotNow, Yes};
        use Verdict::{Elsewhere, Gone, InUse as IsHeld};
        let mut expected = [Elsewhere; 11];
        expected[10] = Gone;
        assert_eq!(verdicts([(false, true, No); 11]), expected);
        let mut seen = [(false, true, No); 11];
        seen[5].2 = NotNow;
        assert_eq!(verdicts(seen), expected);
        seen[5].2 = Yes;
        expected[5] = IsHeld;
        expected[10] = Elsewhere;
        assert_eq!(verdicts(seen), expected);
        assert_eq!(verdicts([(false, true, NeverTold); 11]), [Elsewhere; 11]);
    }

    /// A process holds the MPTCP socket and none of its paths: that nobody holds a path says nothing.
    #[test]
    fn what_may_be_a_path_of_mptcp_is_given_back_by_lists_only() {
        let mut doubt =
            Suspect::<Duration> { version: Version::default(), missed_since: None, unheld_since: None };
        let mut pass = |minute: u32, is_missed| {
            let seen = Seen { is_missed, is_connection: false, held: InUse::No, may_be_mptcp: !is_missed };
            doubt.judge(seen, minute * INTERVAL, INTERVAL)
        };
        assert!((1..100).all(|minute| pass(minute, false) == Verdict::Elsewhere));
        assert_eq!([pass(100, true), pass(101, true)], [Verdict::InDoubt, Verdict::Gone]);
    }

    #[test]
    fn passes_that_are_closer_than_the_interval_count_as_one() {
        let mut doubt =
            Suspect::<Duration> { version: Version::default(), missed_since: None, unheld_since: None };
        let seen = Seen { is_missed: true, is_connection: false, held: InUse::No, may_be_mptcp: false };
        let verdicts = [0, 30, 59, 60].map(|second| doubt.judge(seen, Duration::from_secs(second), INTERVAL));
        assert_eq!(verdicts, [Verdict::InDoubt, Verdict::InDoubt, Verdict::InDoubt, Verdict::Gone]);
    }
}
