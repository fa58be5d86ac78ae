//! Whether the flow of a suspected record is over: what passes have seen of it, as one value that is judged.
//!
//! This module knows neither maps nor lists of sockets, and no clock: a pass tells it what was seen and when.

use std::ops::Sub;
use std::time::{Duration, Instant};

use crate::read::records::{Record, Version};

/// Intervals for which no process may have used a socket whose namespace cannot be looked into, before its flow is
/// over: the kernel closes connections that no process uses, and gives up within two minutes.
const WITHOUT_LIST: u32 = 10;

/// What a pass has seen of a record whose socket no list has shown.
#[derive(Clone, Copy, Debug)]
pub struct Observation {
    /// Whether a complete list of its namespace misses it; if not, no such list could be had.
    pub is_missed: bool,
    /// Whether a program has seen its SYN leave: its flow ends with the connection, whatever process has the socket.
    pub is_connection: bool,
    pub in_use: InUse,
    /// Whether it may be a path of an MPTCP socket: processes use the MPTCP socket, and none of its paths.
    pub may_be_mptcp: bool,
}

/// Whether a process has a socket open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InUse {
    Yes,
    No,
    NeverTold,
    NotNow,
}

/// Since when a record is suspected, by any clock.
#[derive(Debug)]
pub struct Suspect<T = Instant> {
    /// The flow that is suspected, not a later one of the same socket.
    pub version: Version,
    /// Since when lists miss it and no process is known to use it.
    pub missed_since: Option<T>,
    /// Since when no process uses it.
    pub unused_since: Option<T>,
}

/// What becomes of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its flow is over.
    Gone,
    /// Its flow is over if a later pass, an interval after the first, sees the same.
    Suspected,
    /// Its socket is open and not connected.
    Open,
    /// A process uses its socket, which may be connected.
    InUse,
    /// Nothing is known of its socket, or nothing yet.
    Elsewhere,
}

impl Suspect {
    pub fn of(record: &Record) -> Self {
        Self { version: record.version(), missed_since: None, unused_since: None }
    }
}

impl<T: Copy + Sub<Output = Duration>> Suspect<T> {
    pub fn judge(&mut self, observation: Observation, now: T, interval: Duration) -> Verdict {
        self.unused_since = match observation.in_use {
            InUse::No => self.unused_since.or(Some(now)),
            InUse::NotNow => self.unused_since,
            InUse::Yes | InUse::NeverTold => None,
        };
        if observation.is_missed {
            match observation.in_use {
                InUse::Yes if !observation.is_connection => {
                    self.missed_since = None;
                    return Verdict::Open;
                }
                InUse::NotNow if !observation.is_connection => return Verdict::Suspected,
                // Where the use of sockets is never told, the list alone decides: what it misses has no connection.
                InUse::Yes | InUse::No | InUse::NeverTold | InUse::NotNow => {}
            }
            let since = *self.missed_since.get_or_insert(now);
            return if now - since >= interval { Verdict::Gone } else { Verdict::Suspected };
        }
        match (observation.in_use, self.unused_since) {
            (InUse::Yes, _) => Verdict::InUse,
            (InUse::No, Some(since))
                if !observation.may_be_mptcp && now - since >= WITHOUT_LIST * interval =>
            {
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

    /// The verdicts on a record of which passes, one a minute, see this.
    fn verdicts<const PASSES: usize>(seen: [(bool, bool, InUse); PASSES]) -> [Verdict; PASSES] {
        let mut suspect =
            Suspect::<Duration> { version: Version::default(), missed_since: None, unused_since: None };
        let mut now = Duration::from_secs(1000);
        seen.map(|(is_missed, is_connection, held)| {
            now += INTERVAL;
            suspect.judge(
                Observation { is_missed, is_connection, in_use: held, may_be_mptcp: false },
                now,
                INTERVAL,
            )
        })
    }

    #[test]
    fn what_two_passes_find_neither_seen_nor_in_use_is_gone() {
        use InUse::{NeverTold, No, NotNow, Yes};
        use Verdict::{Gone, Open, Suspected};
        assert_eq!(verdicts([(true, false, No), (true, false, No)]), [Suspected, Gone]);
        assert_eq!(
            verdicts([(true, false, No), (true, false, Yes), (true, false, No)]),
            [Suspected, Open, Suspected]
        );
        assert_eq!(verdicts([(true, false, Yes), (true, false, Yes)]), [Open, Open]);
        // An error says nothing, and where nothing is ever told a list is enough.
        assert_eq!(
            verdicts([(true, false, No), (true, false, NotNow), (true, false, No)]),
            [Suspected, Suspected, Gone]
        );
        assert_eq!(verdicts([(true, false, NeverTold), (true, false, NeverTold)]), [Suspected, Gone]);
        // A connection that no list shows is over, whatever process has its socket.
        for held in [Yes, No, NeverTold, NotNow] {
            assert_eq!(verdicts([(true, true, held), (true, true, held)]), [Suspected, Gone], "{held:?}");
        }
    }

    #[test]
    fn where_no_list_can_be_had_no_process_may_have_used_it_for_ten_passes() {
        use InUse::{NeverTold, No, NotNow, Yes};
        use Verdict::{Elsewhere, Gone, InUse as IsInUse};
        let mut expected = [Elsewhere; 11];
        expected[10] = Gone;
        assert_eq!(verdicts([(false, true, No); 11]), expected);
        let mut seen = [(false, true, No); 11];
        seen[5].2 = NotNow;
        assert_eq!(verdicts(seen), expected);
        seen[5].2 = Yes;
        expected[5] = IsInUse;
        expected[10] = Elsewhere;
        assert_eq!(verdicts(seen), expected);
        assert_eq!(verdicts([(false, true, NeverTold); 11]), [Elsewhere; 11]);
    }

    /// A process uses the MPTCP socket and none of its paths: that no process uses a path says nothing.
    #[test]
    fn what_may_be_a_path_of_mptcp_is_given_back_by_lists_only() {
        let mut suspect =
            Suspect::<Duration> { version: Version::default(), missed_since: None, unused_since: None };
        let mut pass = |minute: u32, is_missed| {
            let observation =
                Observation { is_missed, is_connection: false, in_use: InUse::No, may_be_mptcp: !is_missed };
            suspect.judge(observation, minute * INTERVAL, INTERVAL)
        };
        assert!((1..100).all(|minute| pass(minute, false) == Verdict::Elsewhere));
        assert_eq!([pass(100, true), pass(101, true)], [Verdict::Suspected, Verdict::Gone]);
    }

    #[test]
    fn passes_that_are_closer_than_the_interval_count_as_one() {
        let mut suspect =
            Suspect::<Duration> { version: Version::default(), missed_since: None, unused_since: None };
        let observation =
            Observation { is_missed: true, is_connection: false, in_use: InUse::No, may_be_mptcp: false };
        let verdicts =
            [0, 30, 59, 60].map(|second| suspect.judge(observation, Duration::from_secs(second), INTERVAL));
        assert_eq!(verdicts, [Verdict::Suspected, Verdict::Suspected, Verdict::Suspected, Verdict::Gone]);
    }
}
