//! What the kernel programs count.

use bytemuck::{Pod, Zeroable};

use super::MAX_SERVICES;
use crate::ending::Ending;

/// This CPU's cursor over a service's schedule. Written by the daemon once, then by connect.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Cursor {
    /// How far it has come, wrapping: by one entry with each pick, or past the member that `least-loaded` took. Never reset:
    /// the cursor goes on over each new table.
    pub phase: u32,
    /// Where the cursor starts, as a fraction of the table's length in units of 2^-32.
    pub start: u32,
}
const _: () = assert!(size_of::<Cursor>() == 8);

/// How calls of connect and sendmsg ended: each call counts in exactly one field. Written by the kernel programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Outcomes {
    /// Sent to the backend that the policy picked.
    pub forwarded: u64,
    /// Every pick was unusable; sent to the service's fallback.
    pub fallback: u64,
    /// Every backend was at its limit; sent to the least loaded one.
    pub overflowed: u64,
    /// A datagram of a flow that there was already; sent where that goes.
    pub reused: u64,
    /// Sent to a backend, but the flow is not in any active count: the flow table was full, or the socket is a path of
    /// an MPTCP socket, whose end the programs cannot see.
    pub untracked: u64,
    /// Sent to an ejected backend, to find out whether it is well again.
    pub trial: u64,
    /// No usable backend: refused with the service's errno.
    pub no_backend: u64,
    /// Every backend was at its limit: refused with the service's errno.
    pub limited: u64,
    /// The maps contradicted each other; the call went through unchanged.
    pub passed: u64,
    /// The address is not a service, or the socket is the kernel's own; the call went through unchanged.
    pub not_a_service: u64,
}
const _: () = assert!(size_of::<Outcomes>() == 80);

/// How one call ended: a field of [`Outcomes`] for each.
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
    /// Those of calls to a service, in the order of their fields.
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

    /// What people are told of calls that ended so; nothing of the usual end.
    pub const fn remark(self) -> Option<&'static str> {
        match self {
            Self::Forwarded | Self::NotAService => None,
            Self::Fallback => Some("of them to the fallback"),
            Self::Overflowed => Some("of them over the limit, to the least loaded"),
            Self::Reused => Some("of them datagrams of flows that there were"),
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
    /// How many calls ended so.
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

/// The row of [`map::OUTCOMES`](super::map::OUTCOMES) that counts calls to addresses that are not services.
pub const NOT_A_SERVICE: u32 = MAX_SERVICES;

/// Rows of [`SlotCounters::endings`]: a power of two, so that an index can be masked. The last is nobody's and stays 0.
pub const ENDING_ROWS: usize = 16;
const _: () = assert!(Ending::ALL.len() < ENDING_ROWS);

/// What became of a slot's backend since it took the slot, on one CPU. Written by the kernel programs, zeroed by the daemon
/// before reuse. The sum over CPUs obeys: chosen = all endings + [`Backend::flows`](super::Backend::flows) + those that were
/// reclaimed ([`map::RECLAIMED`](super::map::RECLAIMED)) + untracked.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct SlotCounters {
    /// Flows sent to it. Kept in [`map::CHOSEN`](super::map::CHOSEN) as long as it has the slot, and 0 here.
    pub chosen: u64,
    /// Those of them that are in no active count.
    pub untracked: u64,
    /// Flows whose first SYN was sent.
    pub connecting: u64,
    /// Flows that were established.
    pub established: u64,
    /// Flows that turned out to go to another address: a program of somebody else rewrote the destination after ours.
    pub diverted: u64,
    /// Flows that ended, by [`Ending`].
    pub endings: [u64; ENDING_ROWS],
    /// Round-trip time of the handshake.
    pub rtt: Histogram,
    /// From the choice until the flow was established.
    pub connect: Histogram,
    /// How long ended flows lasted, in nanoseconds, together.
    pub lifetime_ns: u64,
    /// Bytes that ended flows received.
    pub bytes_received: u64,
    /// Bytes of ended flows that the peer acknowledged.
    pub bytes_sent: u64,
    /// Segments of ended flows that were sent again.
    pub retransmits: u64,
    /// How often the backend was ejected, also anew after a trial that failed.
    pub ejections: u64,
    /// Flows that were sent to it while it was ejected, to find out whether it is well again.
    pub trials: u64,
    /// How often it was taken back because a trial was established.
    pub readmissions: u64,
    /// Failures after which it was not ejected, because it was the last.
    pub withheld: u64,
}
const _: () = assert!(size_of::<SlotCounters>() == 568);

/// Buckets of a [`Histogram`].
pub const TIME_BUCKETS: usize = 20;
/// Binary logarithm of the first bucket's upper bound in microseconds; each further one is twice the one before, and the
/// last has none.
pub const FIRST_BUCKET_LOG2: u32 = 4;

/// A histogram of times.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Histogram {
    /// Microseconds, together.
    pub sum_us: u64,
    /// How many times were at most 2^(4 + i) microseconds and more than the bound before.
    pub buckets: [u64; TIME_BUCKETS],
}
const _: () = assert!(size_of::<Histogram>() == 168);

/// The bucket of a time.
#[inline(always)]
pub fn bucket(us: u32) -> usize {
    // 16 is the last of bucket 0, so that bounds are inclusive, as Prometheus has them.
    let above = u32::BITS - us.saturating_sub(1).leading_zeros();
    (above.saturating_sub(FIRST_BUCKET_LOG2) as usize).min(TIME_BUCKETS - 1)
}

/// What should not happen, so that it is seen if it does. Written by the kernel programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Anomalies {
    /// A socket closed that was a flow's when it dialled, and has no record: its record was taken out, or it dialled
    /// elsewhere since.
    pub close_without_record: u64,
    /// A flow was established that was not connecting.
    pub established_out_of_turn: u64,
    /// A record was found that another one had ended at the same moment.
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
