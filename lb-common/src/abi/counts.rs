//! Counters of the kernel programs.

use bytemuck::{Pod, Zeroable};

use super::MAX_SERVICES;
use crate::ending::Ending;

/// This CPU's cursor over a service's schedule. Written by the daemon once, then by connect.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Cursor {
    /// How far it has advanced, wrapping: by one entry per pick, or past the member that
    /// `least-loaded` chose. Never reset: the cursor continues over each new table.
    pub phase: u32,
    /// Where the cursor starts, as a fraction of the table's length in units of 2^-32.
    pub start: u32,
}
const _: () = assert!(size_of::<Cursor>() == 8);

/// Outcomes of calls of connect and sendmsg: each call counts in exactly one field. Written by the
/// kernel programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Outcomes {
    /// Sent to the backend that the policy picked.
    pub forwarded: u64,
    /// Every pick was unusable; sent to the service's fallback.
    pub fallback: u64,
    /// Every backend was at its limit; sent to the least loaded one.
    pub overflowed: u64,
    /// A datagram of an existing flow; sent to the backend of that flow.
    pub reused: u64,
    /// Sent to a backend, but the flow is not in any active count: the flow table was full, or the
    /// socket is a path of an MPTCP socket, whose end the programs cannot see.
    pub untracked: u64,
    /// Sent to an ejected backend, to test whether it works again.
    pub trial: u64,
    /// No usable backend: refused with the service's errno.
    pub no_backend: u64,
    /// Every backend was at its limit: refused with the service's errno.
    pub limited: u64,
    /// The maps contradicted each other; the call went through unchanged.
    pub passed: u64,
    /// The address is not a service, or the socket is the kernel's own; the call went through
    /// unchanged.
    pub not_a_service: u64,
}
const _: () = assert!(size_of::<Outcomes>() == 80);

/// The outcome of one call; each has a field of [`Outcomes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// [`Outcomes::forwarded`]
    Forwarded,
    /// [`Outcomes::fallback`]
    Fallback,
    /// [`Outcomes::overflowed`]
    Overflowed,
    /// [`Outcomes::reused`]
    Reused,
    /// [`Outcomes::untracked`]
    Untracked,
    /// [`Outcomes::trial`]
    Trial,
    /// [`Outcomes::no_backend`]
    NoBackend,
    /// [`Outcomes::limited`]
    Limited,
    /// [`Outcomes::passed`]
    Passed,
    /// [`Outcomes::not_a_service`]
    NotAService,
}

impl Outcome {
    /// The outcomes of calls to a service, in the order of their fields.
    pub const OF_A_SERVICE: [Self; 9] = [
        Self::Forwarded,
        Self::Fallback,
        Self::Overflowed,
        Self::Reused,
        Self::Untracked,
        Self::Trial,
        Self::NoBackend,
        Self::Limited,
        Self::Passed,
    ];

    /// The word for it in tables, JSON and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forwarded => "forwarded",
            Self::Fallback => "fallback",
            Self::Overflowed => "overflowed",
            Self::Reused => "reused",
            Self::Untracked => "untracked",
            Self::Trial => "trial",
            Self::NoBackend => "no-backend",
            Self::Limited => "limited",
            Self::Passed => "passed",
            Self::NotAService => "not_a_service",
        }
    }

    /// The remark that users see about calls with this outcome; `None` for the usual one.
    pub const fn remark(self) -> Option<&'static str> {
        match self {
            Self::Forwarded | Self::NotAService => None,
            Self::Fallback => Some("of them to the fallback"),
            Self::Overflowed => Some("of them over the limit, to the least loaded"),
            Self::Reused => Some("of them datagrams of existing flows"),
            Self::Untracked => Some("of them not in the active count (untracked)"),
            Self::Trial => Some("of them trials of ejected backends"),
            Self::NoBackend => Some("refused, no usable backend"),
            Self::Limited => Some("refused, all at their limit"),
            Self::Passed => Some("passed unchanged"),
        }
    }

    /// Whether the call was sent to a backend.
    pub const fn is_balanced(self) -> bool {
        matches!(
            self,
            Self::Forwarded
                | Self::Fallback
                | Self::Overflowed
                | Self::Reused
                | Self::Untracked
                | Self::Trial
        )
    }
}

impl Outcomes {
    /// The number of calls with this outcome.
    pub const fn of(&self, outcome: Outcome) -> u64 {
        match outcome {
            Outcome::Forwarded => self.forwarded,
            Outcome::Fallback => self.fallback,
            Outcome::Overflowed => self.overflowed,
            Outcome::Reused => self.reused,
            Outcome::Untracked => self.untracked,
            Outcome::Trial => self.trial,
            Outcome::NoBackend => self.no_backend,
            Outcome::Limited => self.limited,
            Outcome::Passed => self.passed,
            Outcome::NotAService => self.not_a_service,
        }
    }
}

/// The row of [`map::OUTCOMES`](super::map::OUTCOMES) that counts calls to addresses that are not
/// services.
pub const NOT_A_SERVICE: u32 = MAX_SERVICES;

/// Rows of [`SlotCounters::endings`]: a power of two, so that an index can be masked. The last is
/// unused and stays 0.
pub const ENDING_ROWS: usize = 16;
const _: () = assert!(Ending::ALL.len() < ENDING_ROWS);

/// Counters of a slot's backend since it took the slot, on one CPU. Written by the kernel programs,
/// zeroed by the daemon before reuse. The sums over CPUs obey: chosen = all endings +
/// [`Backend::flows`](super::Backend::flows) + reclaimed flows
/// ([`map::RECLAIMED`](super::map::RECLAIMED)) + untracked.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct SlotCounters {
    /// Flows sent to it. While it has the slot, [`map::CHOSEN`](super::map::CHOSEN) contains this
    /// number, and this field is 0.
    pub chosen: u64,
    /// The flows among them that are in no active count.
    pub untracked: u64,
    /// Flows whose first SYN was sent.
    pub connecting: u64,
    /// Flows that were established.
    pub established: u64,
    /// Flows that went to another address: a program of another owner rewrote the destination after
    /// socklb.
    pub diverted: u64,
    /// Flows that ended, by [`Ending`].
    pub endings: [u64; ENDING_ROWS],
    /// Histogram of the round-trip times of handshakes.
    pub rtt: Histogram,
    /// Histogram of the times from the choice until the flow was established.
    pub connect: Histogram,
    /// Sum of the durations of ended flows, in nanoseconds.
    pub lifetime_ns: u64,
    /// Bytes that ended flows received.
    pub bytes_received: u64,
    /// Bytes of ended flows that the peer acknowledged.
    pub bytes_sent: u64,
    /// Segments of ended flows that were retransmitted.
    pub retransmits: u64,
    /// Ejections of the backend, including those after a failed trial.
    pub ejections: u64,
    /// Flows sent to it while it was ejected, to test whether it works again.
    pub trials: u64,
    /// Readmissions of the backend after a trial was established.
    pub readmissions: u64,
    /// Ejections that were withheld because it was the last available backend.
    pub withheld: u64,
}
const _: () = assert!(size_of::<SlotCounters>() == 568);

/// Buckets of a [`Histogram`].
pub const TIME_BUCKETS: usize = 20;
/// Binary logarithm of the first bucket's upper bound in microseconds. Each further bound is twice
/// the previous one, and the last bucket has none.
pub const FIRST_BUCKET_LOG2: u32 = 4;

/// A histogram of times.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Histogram {
    /// The sum of the times, in microseconds.
    pub sum_us: u64,
    /// Number of times of at most 2^(4 + i) microseconds, above the previous bound.
    pub buckets: [u64; TIME_BUCKETS],
}
const _: () = assert!(size_of::<Histogram>() == 168);

/// The bucket of a time.
#[inline(always)]
pub fn bucket(us: u32) -> usize {
    // 16 is the last of bucket 0, so that bounds are inclusive, as in Prometheus.
    let above = u32::BITS - us.saturating_sub(1).leading_zeros();
    (above.saturating_sub(FIRST_BUCKET_LOG2) as usize).min(TIME_BUCKETS - 1)
}

/// Counters of events that should not happen. Written by the kernel programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Anomalies {
    /// A closed socket belonged to a flow when it dialed, and has no record: its record was
    /// removed, or it has dialed elsewhere since.
    pub close_without_record: u64,
    /// A flow was established that was not connecting.
    pub established_out_of_turn: u64,
    /// A record was found that another program run had ended at the same moment.
    pub ended_twice: u64,
    /// A socket was closed in a phase in which its end should have been seen.
    pub release_out_of_turn: u64,
}
const _: () = assert!(size_of::<Anomalies>() == 32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_ends_at_a_power_of_two() {
        for (us, expected) in
            [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (1 << 22, 18), ((1 << 22) + 1, 19)]
        {
            assert_eq!(bucket(us), expected, "{us} us");
        }
        assert_eq!(bucket(u32::MAX), TIME_BUCKETS - 1);
    }
}
