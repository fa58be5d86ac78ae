//! Decides whether the flow of a suspected record has ended. A [`Suspect`] contains what the passes
//! so far have observed.
//!
//! This module must not use maps, lists of sockets or clocks: a pass supplies the observations and
//! their time.

use std::ops::Sub;
use std::time::{Duration, Instant};

use crate::read::records::{Record, Version};

/// If the namespace of a socket cannot be examined, its flow is considered ended after this number
/// of intervals in which no process had the socket open. (If no process uses a connection any
/// longer, the kernel closes it after two minutes at the latest.)
const WITHOUT_LIST: u32 = 10;

/// The observations of one pass about a record whose socket no list contains.
#[derive(Clone, Copy, Debug)]
pub struct Observation {
    /// Whether a complete list of the socket's namespace does not contain the socket. If `false`,
    /// no such list could be read.
    pub is_missed: bool,
    /// Whether a program has recorded that the flow's SYN was sent. Such a flow ends with its
    /// connection, even if a process still has the socket open.
    pub is_connection: bool,
    pub in_use: InUse,
    /// Whether the socket may be a path of an MPTCP socket. Processes have only the MPTCP socket
    /// open, and none of its paths.
    pub may_be_mptcp: bool,
}

/// Whether a process has a socket open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InUse {
    Yes,
    No,
    NotReported,
    NotNow,
}

/// A suspected record, and the times since which the observations suggest that its flow has ended.
/// `T` is a time of any clock.
#[derive(Debug)]
pub struct Suspect<T = Instant> {
    /// Distinguishes the suspected flow from a later flow of the same socket.
    pub version: Version,
    /// The time since which no list has contained the socket and no process has been known to have
    /// it open.
    pub missed_since: Option<T>,
    /// The time since which no process has had the socket open.
    pub unused_since: Option<T>,
}

/// The judgement on a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The flow has ended.
    Gone,
    /// The flow may have ended. If a pass at least an interval later has the same result, the flow
    /// has ended.
    Suspected,
    /// The flow remains: the socket is open in a process, and not connected.
    Open,
    /// The flow remains: the socket is open in a process, and may be connected.
    InUse,
    /// The flow remains: the observations do not suffice for a judgement on the socket.
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
            InUse::Yes | InUse::NotReported => None,
        };
        if observation.is_missed {
            match observation.in_use {
                InUse::Yes if !observation.is_connection => {
                    self.missed_since = None;
                    return Verdict::Open;
                }
                InUse::NotNow if !observation.is_connection => return Verdict::Suspected,
                // If the kernel never reports open sockets, only the list decides: a socket that
                // the list does not contain has no connection.
                InUse::Yes | InUse::No | InUse::NotReported | InUse::NotNow => {}
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

    /// The verdicts of passes on a record, one pass per minute, with these observations:
    /// `is_missed`, `is_connection` and `in_use`.
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
    fn a_socket_missed_and_unused_in_two_passes_is_gone() {
        use InUse::{No, NotNow, NotReported, Yes};
        use Verdict::{Gone, Open, Suspected};
        assert_eq!(verdicts([(true, false, No), (true, false, No)]), [Suspected, Gone]);
        assert_eq!(
            verdicts([(true, false, No), (true, false, Yes), (true, false, No)]),
            [Suspected, Open, Suspected]
        );
        assert_eq!(verdicts([(true, false, Yes), (true, false, Yes)]), [Open, Open]);
        // A failed query proves nothing. If the kernel never reports open sockets, a list is
        // sufficient.
        assert_eq!(
            verdicts([(true, false, No), (true, false, NotNow), (true, false, No)]),
            [Suspected, Suspected, Gone]
        );
        assert_eq!(verdicts([(true, false, NotReported), (true, false, NotReported)]), [Suspected, Gone]);
        // A connection that no list contains has ended, even if a process has its socket open.
        for held in [Yes, No, NotReported, NotNow] {
            assert_eq!(verdicts([(true, true, held), (true, true, held)]), [Suspected, Gone], "{held:?}");
        }
    }

    #[test]
    fn without_a_list_a_socket_is_gone_after_ten_unused_passes() {
        use InUse::{No, NotNow, NotReported, Yes};
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
        assert_eq!(verdicts([(false, true, NotReported); 11]), [Elsewhere; 11]);
    }

    /// Processes have the MPTCP socket open and none of its paths, so a path that no process has
    /// open may still be connected.
    #[test]
    fn possible_mptcp_paths_are_reclaimed_only_by_lists() {
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
