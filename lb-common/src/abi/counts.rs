//! Counters of the kernel programs.

use bytemuck::{Pod, Zeroable};

use super::MAX_SERVICES;
use crate::ending::Ending;

/// The position of one CPU in a service's schedule. Written by the daemon when it writes the
/// service, and then by the kernel programs of connect and sendmsg.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Cursor {
    /// Number of steps of the cursor, modulo 2^32. A pick advances it by one, or with
    /// `least-loaded` to the position after the chosen member. A new table does not reset the
    /// number.
    pub phase: u32,
    /// The start of the cursor in a table, as a fraction of the table's length in units of 2^-32.
    /// Starts differ between CPUs and between client tasks.
    pub start: u32,
}
const _: () = assert!(size_of::<Cursor>() == 8);

/// Outcomes of calls of connect and sendmsg: each call counts in exactly one field. Written by the
/// kernel programs; the daemon sets all fields to zero when it writes the service.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Outcomes {
    /// Calls that were sent to the backend that the policy picked.
    pub forwarded: u64,
    /// Calls that were sent to the service's fallback, because no examined backend was usable.
    pub fallback: u64,
    /// Calls that were sent to the least loaded backend, because every backend was at its limit.
    pub overflowed: u64,
    /// Datagrams of existing flows, sent to the backends of these flows.
    pub reused: u64,
    /// Calls that were sent to a backend, but with a flow that no active count includes: the flow
    /// table was full, or the socket is a path of an MPTCP socket, and the programs cannot detect
    /// the end of such a path.
    pub untracked: u64,
    /// Calls that were sent to an ejected backend, to test whether the backend works again.
    pub trial: u64,
    /// Calls that were refused with the service's errno, because no backend was usable.
    pub no_backend: u64,
    /// Calls that were refused with the service's errno, because every backend was at its limit.
    pub limited: u64,
    /// Calls that the program left unchanged, because the content of the maps was inconsistent.
    pub passed: u64,
    /// Calls that the program left unchanged, because the address is not a service, or because the
    /// socket belongs to the kernel.
    pub not_a_service: u64,
}
const _: () = assert!(size_of::<Outcomes>() == 80);

/// The state of a service on one CPU. The cursor and the most frequent outcome are usually in
/// one cache line.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct CpuService {
    /// The position in the service's schedule.
    pub cursor: Cursor,
    /// The outcomes of the calls to the service.
    pub outcomes: Outcomes,
}
const _: () = assert!(size_of::<CpuService>() == 88);

/// The outcome of one call. Each variant has a field of [`Outcomes`].
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
    /// The outcomes that calls to a service can have, in the order of their fields.
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

    /// The word for the outcome in tables, JSON and metrics.
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

    /// The remark after the number of calls with this outcome, for users; `None` if the outcome
    /// needs no remark.
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

/// The index of the element of [`map::CPU_SERVICES`](super::map::CPU_SERVICES) that counts calls to
/// addresses that are not services, and calls of the kernel's own sockets.
pub const NOT_A_SERVICE: u32 = MAX_SERVICES;

/// Length of [`SlotCounters::endings`]: a power of two, so that an index can be masked. The
/// elements after the last ending are unused.
pub const ENDING_ROWS: usize = 16;
const _: () = assert!(Ending::ALL.len() <= ENDING_ROWS);

/// Counters of a slot's backend on one CPU. Written by the kernel programs. When a backend gets the
/// slot, the daemon sets the counters so that their sums over CPUs are the backend's retired
/// counters, or zero. `chosen` equals the total over all CPUs of all endings,
/// [`Backend::flows`](super::Backend::flows), the reclaimed flows
/// ([`map::RECLAIMED`](super::map::RECLAIMED)) and `untracked`.
///
/// In the map, three fields have other values, so that a program needs fewer atomic instructions
/// (see [`to_stored`](Self::to_stored)). The fields that most flows change are in neighbouring
/// cache lines.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct SlotCounters {
    /// Flows that were established. In the map, without the flows that `rtt` counts.
    pub established: u64,
    /// Flows sent to the backend. In the map this field is 0:
    /// [`Backend::chosen`](super::Backend::chosen) contains the number. The programs depend on the
    /// 0.
    pub chosen: u64,
    /// Flows whose first SYN was sent.
    pub connecting: u64,
    /// Sum of the durations of ended flows, in nanoseconds.
    pub lifetime_ns: u64,
    /// Received bytes of flows that have ended.
    pub bytes_received: u64,
    /// Bytes that the peers of flows that have ended acknowledged.
    pub bytes_sent: u64,
    /// Number of ended flows for each [`Ending`].
    pub endings: [u64; ENDING_ROWS],
    /// Histogram of the times from the choice until the flow was established. In the map, without
    /// the times that `rtt` counts.
    pub connect: Histogram,
    /// Histogram of the round-trip times of handshakes without a retransmitted SYN. (After a
    /// retransmission, the kernel does not always know the time: RFC 6298, section 3.)
    pub rtt: Histogram,
    /// Flows that were sent to the backend, but that [`Backend::flows`](super::Backend::flows) does
    /// not count.
    pub untracked: u64,
    /// Flows that went to another address, because another system's program rewrote the destination
    /// after socklb's program.
    pub diverted: u64,
    /// Retransmitted segments of flows that have ended.
    pub retransmits: u64,
    /// Ejections of the backend, including those after a failed trial.
    pub ejections: u64,
    /// Flows sent to the backend while it was ejected, to test whether it works again.
    pub trials: u64,
    /// Readmissions of the backend after a trial was established.
    pub readmissions: u64,
    /// Ejections that were withheld because the backend was the last available one.
    pub withheld: u64,
}
const _: () = assert!(size_of::<SlotCounters>() == 568);

impl SlotCounters {
    /// The counters in the form of the map. For nearly every flow, `established` and `connect`
    /// follow from `rtt`: if the first SYN was answered, the connect took as long as the handshake.
    #[must_use]
    pub fn to_stored(&self) -> Self {
        Self {
            established: self.established.wrapping_sub(self.rtt.count()),
            chosen: 0,
            connect: self.connect.combined(&self.rtt, u64::wrapping_sub),
            ..*self
        }
    }

    /// The counters with these sums over CPUs of the map's values, without `chosen`.
    #[must_use]
    pub fn from_stored(stored: &Self) -> Self {
        Self {
            established: stored.established.wrapping_add(stored.rtt.count()),
            connect: stored.connect.combined(&stored.rtt, u64::wrapping_add),
            ..*stored
        }
    }
}

/// Buckets of a [`Histogram`].
pub const TIME_BUCKETS: usize = 20;
/// Binary logarithm of the first bucket's upper bound in microseconds. Each bound is twice the
/// previous one, and the last bucket has no upper bound.
pub const FIRST_BUCKET_LOG2: u32 = 4;

/// A histogram of times.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Histogram {
    /// The sum of the times, in microseconds.
    pub sum_us: u64,
    /// The number of measured times in each bucket. Bucket `i` counts times up to 2^(4 + `i`)
    /// microseconds that are above the bound of the previous bucket.
    pub buckets: [u64; TIME_BUCKETS],
}
const _: () = assert!(size_of::<Histogram>() == 168);

impl Histogram {
    /// The number of times in all buckets.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, count| sum.wrapping_add(*count))
    }

    /// The result of `combine` for each pair of numbers of two histograms.
    fn combined(&self, other: &Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            sum_us: combine(self.sum_us, other.sum_us),
            buckets: core::array::from_fn(|i| combine(self.buckets[i], other.buckets[i])),
        }
    }
}

/// The index of the histogram bucket for a time of `us` microseconds.
#[inline(always)]
pub fn bucket(us: u32) -> usize {
    // Bounds are inclusive, as in Prometheus: 16 µs is in bucket 0.
    let above = u32::BITS - us.saturating_sub(1).leading_zeros();
    (above.saturating_sub(FIRST_BUCKET_LOG2) as usize).min(TIME_BUCKETS - 1)
}

/// Counters of events that should not happen, on one CPU. Written by the kernel programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Anomalies {
    /// A connection was closed, and its socket had no record, although a program had requested
    /// state-change events for the socket: the record was removed, or the socket has dialled
    /// another address since.
    pub close_without_record: u64,
    /// A connection was established although its flow was not in the phase "connecting".
    pub established_out_of_turn: u64,
    /// A program found a record and could not end its flow, because another program had removed the
    /// record meanwhile.
    pub ended_twice: u64,
    /// At the release of a socket, its connection was already closed, but its flow had not ended.
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

    #[test]
    fn the_form_of_the_map_has_the_same_content() {
        let histogram = |sum_us, at: usize| {
            let mut buckets = [0; TIME_BUCKETS];
            (buckets[at], buckets[19]) = (5, 2);
            Histogram { sum_us, buckets }
        };
        let counters = SlotCounters {
            established: 9,
            chosen: 12,
            connect: histogram(70, 3),
            rtt: histogram(40, 1),
            withheld: 1,
            ..SlotCounters::default()
        };
        let stored = counters.to_stored();
        let found = (stored.established, stored.chosen, stored.connect.sum_us, stored.connect.buckets[19]);
        assert_eq!(found, (2, 0, 30, 0));
        assert_eq!(SlotCounters::from_stored(&stored), SlotCounters { chosen: 0, ..counters });
    }
}
