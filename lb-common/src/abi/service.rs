//! Services, which processes dial, and the tables from which backends are picked.

use bytemuck::{Pod, Zeroable};

use super::{MAX_LISTED, NAME_BYTES};
use crate::net::{Address, Be16};

/// A cell of the table that maps an address to its service, see [`vip_table`](crate::vip_table).
/// Written by the daemon, as one word.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct VipCell {
    /// The upper 32 bits of the hash of the destination.
    pub mark: u32,
    /// The service index plus one; 0 if the cell is free, and 2^32 - 1 if its service was removed.
    pub service: u32,
}
one_word!(VipCell, u64);

impl VipCell {
    /// A free cell: a lookup ends here.
    pub const FREE: Self = Self { mark: 0, service: 0 };
    /// A cell whose service was removed: a lookup continues after it.
    pub const TOMBSTONE: Self = Self { mark: 0, service: u32::MAX };
}

/// The location of a service's current table: one word, so that a single store switches tables.
/// Written by the daemon.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct TableRef {
    /// The index of the table's first entry (not cell) in [`map::SCHEDULE`](super::map::SCHEDULE);
    /// a multiple of the table's length.
    pub base: u32,
    /// The number of tables of the service that have been published, modulo 2^16. The number
    /// distinguishes successive tables in a dump of the maps.
    pub generation: u16,
    /// Binary logarithm of the number of entries, [`MIN_SCHEDULE_LOG2`](super::MIN_SCHEDULE_LOG2)
    /// to [`MAX_SCHEDULE_LOG2`](super::MAX_SCHEDULE_LOG2); 0 means "no table".
    pub length_log2: u8,
    /// The list that contains the table's [`Members`]: 1 for the service's first list, 2 for its
    /// second list, or [`NO_MEMBERS`] if the members are not listed.
    pub members: u8,
}
one_word!(TableRef, u64);

impl TableRef {
    /// The index of this table's members in [`map::MEMBERS`](super::map::MEMBERS), if they are
    /// listed. `service` is the service index.
    #[inline(always)]
    pub fn members_of(self, service: u32) -> Option<u32> {
        if self.members == NO_MEMBERS { None } else { Some(2 * service + u32::from((self.members - 1) & 1)) }
    }

    /// Number of entries; 0 if there is no table.
    pub const fn len(self) -> u32 {
        if self.length_log2 == 0 { 0 } else { 1 << self.length_log2 }
    }

    /// Whether there is no table.
    pub const fn is_empty(self) -> bool {
        self.length_log2 == 0
    }
}

/// A service: the data that the programs require at a connect, and that the command `status`
/// requires while no daemon is running. Written by the daemon, except the fields that name another
/// writer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Service {
    /// The location of the current table; stored as one word after the table itself is complete.
    pub table: TableRef,
    /// The next trial of an ejected backend. Written by the kernel programs. The daemon also writes
    /// this field: it clears the field when ejection is turned off, and stores another backend if
    /// the stored backend has left, was readmitted or cannot have its trial.
    pub next_trial: NextTrial,
    /// The slot that a connect takes if no examined backend is usable; if the slot is
    /// [`NO_SLOT`](super::NO_SLOT), the connect is refused. If a change of state words requires
    /// another fallback, the daemon stores the fallback first. So programs must read the fallback
    /// after the state words.
    pub fallback: u32,
    /// The errno of a refused connect, as a positive number.
    pub errno: u16,
    /// 1 if a SYN of this service could not be sent, and no SYN has been sent since; else 0.
    /// Written by the kernel programs.
    pub awaits_syn: u8,
    /// 1 if a backend did not answer a client's data, and no backend has answered since; else 0.
    /// Written by the kernel programs.
    pub awaits_answer: u8,
    /// The address that processes dial; getpeername returns it.
    pub address: Address,
    /// The port that processes dial.
    pub port: Be16,
    /// The IP protocol number.
    pub protocol: u8,
    /// [`SERVICE_FREE`], [`SERVICE_LIVE`] or [`SERVICE_LEAVING`].
    pub state: u8,
    /// The rules by which a backend of the service is picked.
    pub rules: Rules,
    /// When a backend is ejected, and for how long.
    pub ejection: EjectionRules,
    /// The name, padded with zeros.
    pub name: [u8; NAME_BYTES],
    /// A [`SendFailures`](crate::ejection::SendFailures): the backend to which SYNs could not be
    /// sent. Written by the kernel programs.
    pub send_failures: u16,
    /// The slot plus one of the first backend that answered after the last missing answer; 0 if
    /// there is none. Written by the kernel programs.
    pub answered: u16,
    /// Cookie of the client's network namespace: only flows in this namespace count for or against
    /// backends. If the cookie is 0, the namespace is unknown and all flows count. Written by the
    /// daemon at any time.
    pub namespace: u64,
    /// 1 if several processes of the client have begun flows recently, else 0. If it is 1, and only
    /// flows of one process fail, this process may have caused the failures. Written by the daemon
    /// at any time.
    pub several_processes: u8,
    /// Zero.
    pub _reserved: [u8; 3],
    /// The tick at which the backend in `answered` answered. Written by the kernel programs.
    pub answered_at: u32,
    /// The peak of open flows per share: the largest number that any usable backend has, but at
    /// most twice the mean of the usable backends with open flows. The unit is 2^-16 flows. With
    /// `least-loaded` every backend is one share. With `p2c` a share is the whole table: the flows
    /// of a backend, multiplied by the length of the table and divided by the backend's entries.
    /// Zero if no usable backend has flows, and until the service has a policy that compares load.
    /// Written by the daemon every second, and when it changes the table.
    pub peak_flows: u64,
    /// Zero.
    pub _reserved_last: [u8; 24],
}
const _: () = assert!(size_of::<Service>() == 192);
// A connect reads only the first cache line, if values are aligned to cache lines.
const _: () =
    assert!(core::mem::offset_of!(Service, ejection) <= 64 && size_of::<Service>().is_multiple_of(64));

/// The next trial of an ejected backend of a service: one word, so that a single store changes it.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct NextTrial {
    /// The tick at which the trial is due.
    pub at: u32,
    /// The slot of the ejected backend, plus one; 0 if no trial is planned.
    pub slot: u16,
    /// How many further connects must precede the trial. Programs decrement the number with a store
    /// to only this field.
    pub others: u16,
}
one_word!(NextTrial, u64);

impl NextTrial {
    /// The trial of the backend in a slot, at a tick, after `others` connects.
    #[inline(always)]
    pub const fn of(slot: u32, at: u32, others: u16) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "no slot is above NO_SLOT - 1, which has 16 bits"
        )]
        let slot = slot as u16 + 1;
        Self { at, slot, others }
    }

    /// The slot, or [`NO_SLOT`](super::NO_SLOT) if no trial is planned.
    #[inline(always)]
    pub const fn slot(self) -> u32 {
        (self.slot as u32).wrapping_sub(1) & super::NO_SLOT
    }
}

/// When a backend is ejected, and for how long. Written by the daemon at any time, word by word.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct EjectionRules {
    /// Ticks of the first ejection. Each further ejection lasts twice as long as the previous one,
    /// up to `max`.
    pub base: u32,
    /// Maximum ticks of an ejection, without jitter.
    pub max: u32,
    /// Failures in a row that eject a backend; 0 turns ejection off.
    pub failures: u8,
    /// 1 if an established connection on which the backend does not answer is a failure, else 0.
    pub hangs: u8,
    /// Zero.
    pub _reserved: [u8; 2],
}
const _: () = assert!(size_of::<EjectionRules>() == 12);

/// The rules by which a backend of a service is picked. Written by the daemon at any time, word by
/// word.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Rules {
    /// A [`Policy`].
    pub policy: u8,
    /// An [`Overflow`].
    pub overflow: u8,
    /// Number of retransmissions of a SYN after which a connect to the service times out; 0 leaves
    /// the kernel's setting unchanged.
    pub syn_retries: u8,
    /// Zero.
    pub _reserved: u8,
    /// Number of open flows at which a backend is no longer eligible; 0 means no limit.
    pub active_limit: u32,
    /// Half-life of the number of recent errors, in ticks; 0 means that errors are not counted.
    pub error_half_life: u32,
    /// Ticks after which a new backend is chosen for a flow of a datagram socket that is not
    /// connected; 0 means never.
    pub rebind: u32,
    /// Ticks after which the answer to a SYN is overdue: if the application gives up later, the
    /// flow ends as unanswered. If the value is 0, only a retransmission makes the answer overdue.
    pub unanswered_after: u32,
}
const _: () = assert!(size_of::<Rules>() == 20);

/// The policy by which a backend is picked from a service's table. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Policy {
    /// The next entry of an interleaved schedule in which all backends have the same number of
    /// entries. This policy ignores all weights, including the structural ones.
    RoundRobin = 0,
    /// The next entry of an interleaved schedule in which backends have entries in proportion to
    /// their weights.
    WeightedRoundRobin = 1,
    /// The members with the fewest open flows, in turn. Recent errors count as open flows. This
    /// policy examines every member.
    LeastLoaded = 2,
    /// Of the backends of two random entries of the schedule, the one with the lower load per
    /// weight.
    P2c = 3,
    /// A random entry of the schedule.
    Random = 4,
}

impl Policy {
    /// All policies, ordered by number, which is also their order in the documentation.
    pub const ALL: [Self; 5] =
        [Self::RoundRobin, Self::WeightedRoundRobin, Self::LeastLoaded, Self::P2c, Self::Random];

    /// The policy with this number, if there is one.
    pub const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::RoundRobin,
            1 => Self::WeightedRoundRobin,
            2 => Self::LeastLoaded,
            3 => Self::P2c,
            4 => Self::Random,
            _ => return None,
        })
    }

    /// The word for this value in configuration, tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::WeightedRoundRobin => "weighted-round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::P2c => "p2c",
            Self::Random => "random",
        }
    }

    /// Whether the number of a member's schedule entries is proportional to its weight. If false,
    /// all members have the same number of entries.
    pub const fn is_weighted(self) -> bool {
        !matches!(self, Self::RoundRobin)
    }

    /// Whether this policy adds a backend's recent errors to its load.
    pub const fn counts_errors(self) -> bool {
        matches!(self, Self::LeastLoaded | Self::P2c)
    }
}

/// The treatment of a flow if every backend is at its limit of open flows. Numbers are part of the
/// ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Overflow {
    /// The flow goes to the least loaded backend. To find it, the program examines every member.
    LeastLoaded = 0,
    /// The call is refused with the service's errno.
    Refuse = 1,
}

impl Overflow {
    /// All values, in their order in the documentation.
    pub const ALL: [Self; 2] = [Self::LeastLoaded, Self::Refuse];

    /// The word for this value in configuration, tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::LeastLoaded => "least-loaded",
            Self::Refuse => "refuse",
        }
    }
}

/// The list of a table's backends, each once, followed by the replaced backends, for which
/// substitutes serve. Replaced backends are listed because they get trials while they are ejected.
/// Written by the daemon, only while no table refers to the list.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Members {
    /// Number of backends in the table.
    pub count: u32,
    /// Number of all backends in the list, including the replaced ones.
    pub listed: u32,
    /// The slots of the backends; only the first `listed` are valid.
    pub slots: [u16; MAX_LISTED as usize],
}
const _: () = assert!(size_of::<Members>() == 776);

/// The value of [`TableRef::members`] for a table without a list of members: there are too many
/// members, or no rule needs the list.
pub const NO_MEMBERS: u8 = 0;

/// [`Service::state`]: no service has this index.
pub const SERVICE_FREE: u8 = 0;
/// [`Service::state`]: the service is configured.
pub const SERVICE_LIVE: u8 = 1;
/// [`Service::state`]: the service was removed. It retains its index until its last flow ends, so
/// that getpeername still returns its address.
pub const SERVICE_LEAVING: u8 = 2;

/// Four schedule entries, each the slot of a backend or [`NO_SLOT`](super::NO_SLOT). Written by the
/// daemon, only while no service refers to the cell. A cell has four entries because the kernel
/// rounds the size of every array element up to eight bytes.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ScheduleCell {
    /// Slots of four consecutive entries.
    pub slots: [u16; 4],
}
const _: () = assert!(size_of::<ScheduleCell>() == 8);

/// Entries per [`ScheduleCell`].
pub const ENTRIES_PER_CELL: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_found_by_their_numbers() {
        for (number, policy) in (0..).zip(Policy::ALL) {
            assert_eq!((policy as u8, Policy::from_u8(number)), (number, Some(policy)));
        }
        assert_eq!(Policy::from_u8(5), None);
    }
}
