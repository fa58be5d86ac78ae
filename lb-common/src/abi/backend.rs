//! Backends in their slots.

use bytemuck::{Pod, Zeroable};

use super::host::REPORT_IDS;
use crate::net::{Address, Be16};

/// Whether connects may choose a backend, and if not, the reason: one word, which a program reads
/// with a single load. One half belongs to the daemon ([`DaemonState`]), the other half to the
/// kernel programs.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct StateWord {
    /// The field `usable` of [`DaemonState`]. Written by the daemon, which stores `usable` and
    /// `state` together as one 16-bit word, so that its store does not overwrite the programs'
    /// half.
    pub usable: u8,
    /// The field `state` of [`DaemonState`]. Written by the daemon together with `usable`.
    pub state: u8,
    /// 1 while the backend is ejected, else 0. Written by the kernel programs. The daemon also sets
    /// this byte when it ejects the backend, and clears the byte when an operator readmits the
    /// backend, when ejection is turned off, and before the slot gets another backend.
    pub ejected: u8,
    /// The [`FailureSource`](crate::ejection::FailureSource) of the failures in a row; 0 if there
    /// are none. Written by the kernel programs.
    pub failure_source: u8,
}
one_word!(StateWord, u32);

/// The daemon's half of a [`StateWord`]: a single store changes it.
#[repr(C, align(2))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct DaemonState {
    /// Bits 0 and 1: a [`Usable`]. Bit 2: set if a probe has found the backend healthy. Bits 3 to
    /// 6: a [`HealthReason`].
    pub usable: u8,
    /// A [`BackendState`]. Only the daemon and the commands read it.
    pub state: u8,
}
one_word!(DaemonState, u16);

/// Whether the daemon permits connects to choose a backend. The numbers are part of the ABI: bit 0
/// is set if connects may choose the backend, bit 1 if they may choose it even while it is ejected.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Usable {
    /// Connects may not choose the backend.
    No = 0,
    /// Connects may choose the backend unless it is ejected.
    UnlessEjected = 1,
    /// Connects may choose the backend even while it is ejected, because too few backends are
    /// available (panic).
    EvenEjected = 3,
}

impl Usable {
    /// The bit in the field `usable` of a [`DaemonState`] that is set if a probe has found the
    /// backend healthy.
    pub const PROBED_HEALTHY: u8 = 4;

    /// The value in the two lowest bits of a number. The number 2 is never written; it means
    /// [`Usable::No`], because its bit 0 is not set.
    pub const fn from_u8(number: u8) -> Self {
        match number & 3 {
            1 => Self::UnlessEjected,
            3 => Self::EvenEjected,
            _ => Self::No,
        }
    }

    /// Whether connects may choose the backend, at least while it is not ejected.
    pub const fn is_usable(self) -> bool {
        !matches!(self, Self::No)
    }
}

impl From<bool> for Usable {
    /// [`Usable::UnlessEjected`] for `true`, [`Usable::No`] for `false`.
    fn from(may_be_chosen: bool) -> Self {
        if may_be_chosen { Self::UnlessEjected } else { Self::No }
    }
}

/// The health of a backend according to the daemon, and its reason. It is the worst of all verdicts
/// except two, which are stored elsewhere: an ejection by the programs ([`StateWord::ejected`]),
/// and the backend's own report that it is a lame duck ([`Verdict`](super::host::Verdict)). Numbers
/// are part of the ABI. Commands show the reason, and a restarted daemon adopts it.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HealthReason {
    /// No reason is stored, because an older version of the daemon wrote the word.
    Unstated = 0,
    /// Healthy.
    Healthy = 1,
    /// Unproven: no probe has finished.
    Unproven = 2,
    /// A lame duck according to its list.
    ListLameDuck = 3,
    /// Ejected: the probes fail, and they are sent from another network namespace than the
    /// client's.
    ProbeElsewhere = 4,
    /// Refusing: probes cannot connect.
    ProbeConnect = 5,
    /// Refusing: probes connect, but the answer is missing or an error.
    ProbeAnswer = 6,
    /// Refusing: the backend reports that it is down.
    ReportDown = 7,
    /// Refusing: down according to its list.
    ListDown = 8,
    /// Drained: weight 0 according to its list.
    ListWeight = 9,
    /// Drained by an operator.
    Operator = 10,
}

impl HealthReason {
    /// All reasons, ordered by number.
    pub const ALL: [Self; 11] = [
        Self::Unstated,
        Self::Healthy,
        Self::Unproven,
        Self::ListLameDuck,
        Self::ProbeElsewhere,
        Self::ProbeConnect,
        Self::ProbeAnswer,
        Self::ReportDown,
        Self::ListDown,
        Self::ListWeight,
        Self::Operator,
    ];
}

impl DaemonState {
    const REASON_BIT: u32 = 3;

    /// A value with these two fields, without a reason and without a probe's result.
    pub const fn new(usable: Usable, state: BackendState) -> Self {
        Self { usable: usable as u8, state: state as u8 }
    }

    /// Sets whether a probe has found the backend healthy.
    #[must_use]
    pub const fn probed_healthy(self, is_probed_healthy: bool) -> Self {
        let bit = if is_probed_healthy { Usable::PROBED_HEALTHY } else { 0 };
        Self { usable: self.usable & !Usable::PROBED_HEALTHY | bit, ..self }
    }

    /// Sets the reason.
    #[must_use]
    pub const fn with_reason(self, reason: HealthReason) -> Self {
        let others = self.usable & ((1 << Self::REASON_BIT) - 1);
        Self { usable: others | (reason as u8) << Self::REASON_BIT, ..self }
    }

    /// Whether the daemon permits connects to choose the backend.
    pub const fn usable(self) -> Usable {
        Usable::from_u8(self.usable)
    }

    /// Whether a probe has found the backend healthy.
    pub const fn is_probed_healthy(self) -> bool {
        self.usable & Usable::PROBED_HEALTHY != 0
    }

    /// The reason for the backend's health. Older versions stored the verdict of the endpoint list
    /// in `state`, as number 2, 3 or 6; this method translates these numbers.
    pub fn reason(self) -> HealthReason {
        let stated = HealthReason::ALL.get((self.usable >> Self::REASON_BIT & 15) as usize).copied();
        match (stated.unwrap_or(HealthReason::Unstated), self.state) {
            (HealthReason::Unstated, 2) => HealthReason::ListLameDuck,
            (HealthReason::Unstated, 3) => HealthReason::ListWeight,
            (HealthReason::Unstated, 6) => HealthReason::ListDown,
            (reason, _) => reason,
        }
    }
}

impl StateWord {
    /// A word with these values, for a backend that is not ejected.
    pub const fn new(usable: Usable, state: BackendState) -> Self {
        Self { usable: usable as u8, state: state as u8, ejected: 0, failure_source: 0 }
    }

    /// The daemon's half of the word.
    pub const fn daemon(self) -> DaemonState {
        DaemonState { usable: self.usable, state: self.state }
    }

    /// 1 if the backend may be chosen, else 0. The result is a number so that loops over many
    /// backends need no branches.
    #[inline(always)]
    pub const fn may_be_chosen(self) -> u32 {
        let usable = self.usable as u32;
        // Bit 0 of `usable`, if the backend is not ejected or bit 1 is set.
        usable & ((self.ejected as u32 ^ 1) | usable >> 1) & 1
    }

    /// Whether the backend may be chosen.
    #[inline(always)]
    pub const fn is_usable(self) -> bool {
        self.may_be_chosen() != 0
    }

    /// Whether the daemon permits connects to choose the backend, and the backend is not ejected.
    #[inline(always)]
    pub const fn is_usable_and_not_ejected(self) -> bool {
        self.usable & 1 != 0 && self.ejected == 0
    }

    /// 1 if the backend is a backup, else 0. This method is only for the state word of a service's
    /// fallback. A backup is not ejected, and the daemon permits no policy to choose it.
    #[inline(always)]
    pub const fn is_backup(self) -> u32 {
        ((self.usable as u32 | self.ejected as u32) ^ 1) & 1
    }

    /// 1 if an ejection is the only reason why the backend may not be chosen, else 0.
    #[inline(always)]
    pub const fn is_held_back(self) -> u32 {
        let usable = self.usable as u32;
        usable & self.ejected as u32 & (usable >> 1 ^ 1) & 1
    }
}

/// The use of a slot. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BackendState {
    /// The slot has no backend.
    Free = 0,
    /// The backend is in the service's table, or is the service's backup
    /// ([`StateWord::is_backup`]).
    Member = 1,
    /// The backend is no longer in the table; it retains the slot until its last flow ends.
    Leaving = 4,
    /// The backend has been unavailable for long: a substitute is in the table until the replaced
    /// backend is available again.
    Replaced = 5,
}

impl BackendState {
    /// All states of an occupied slot.
    pub const OCCUPIED: [Self; 3] = [Self::Member, Self::Replaced, Self::Leaving];

    /// The state with this number, if there is one. Older versions used 2, 3 and 6 for members with
    /// a reason ([`DaemonState::reason`]).
    pub const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Free,
            1 | 2 | 3 | 6 => Self::Member,
            4 => Self::Leaving,
            5 => Self::Replaced,
            _ => return None,
        })
    }

    /// The word for the state in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Member => "member",
            Self::Leaving => "leaving",
            Self::Replaced => "replaced",
        }
    }
}

/// The identity of the backend that has a slot. Written by the daemon: the report id and the weight
/// at any time, the other fields only while no table, fallback or flow refers to the slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct BackendAddress {
    /// The destination address that the programs write at a connect.
    pub address: Address,
    /// The destination port that the programs write at a connect.
    pub port: Be16,
    /// The index of the backend's service.
    pub service: u16,
    /// The backend's report id, which is the index of its [`Verdict`](super::host::Verdict);
    /// [`NO_REPORT`](super::host::NO_REPORT) if the daemon receives no reports of it.
    pub report: u16,
    /// The backend's structural weight (its capacity). Only the daemon and the commands read it.
    pub weight: u16,
    /// Number of earlier backends in this slot, modulo 2^32. In a free slot: the generation of the
    /// next backend.
    pub generation: u32,
}
const _: () = assert!(size_of::<BackendAddress>() == 28 && REPORT_IDS <= 1 << u16::BITS);

/// A backend in its slot: all data that a choice reads and changes, in one cache line.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Backend {
    /// Open flows: the number of sockets that were last directed to the slot. Written by the kernel
    /// programs, and by the daemon when it reclaims a record whose socket is gone; both use atomic
    /// adds.
    pub flows: u64,
    /// Whether the backend may be chosen. Written by the daemon and by the kernel programs at any
    /// time, see [`StateWord`].
    pub state: StateWord,
    /// Number of the slot's entries in the current table of its service. Written by the daemon when
    /// it publishes the table.
    pub entries: u32,
    /// Recent errors of the backend's connections. Written by the kernel programs. The daemon also
    /// writes the field, by a compare-and-swap: it adds errors that it has found, limits their
    /// number, delays their halving, and clears stale errors.
    pub errors: RecentErrors,
    /// Failures in a row, and the end of an ejection. Written by the kernel programs. The daemon
    /// also writes this field when it ejects or readmits the backend, or makes the next connect the
    /// backend's trial.
    pub ejection: EjectionState,
    /// The identity of the backend.
    pub endpoint: BackendAddress,
    /// The number of flows that were sent to the backend, modulo 2^32. Written by the kernel
    /// programs, with atomic adds before they change `flows`, and by the daemon when it writes the
    /// backend. The number is in this row because a connect has its cache line anyway. The daemon
    /// extends it to 64 bits: it differs from the number of flows that are open or have ended only
    /// by flows that begin or end while the daemon reads
    /// ([`SlotCounters::chosen`](super::SlotCounters::chosen)).
    pub chosen: u32,
}
const _: () = assert!(size_of::<Backend>() == 64);

/// A number of errors that halves every half-life: one word, so that a single store changes it. The
/// number is approximate: if two CPUs add an error at the same moment, the two errors may count as
/// one.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct RecentErrors {
    /// The number of errors at the tick `since`.
    pub count: u32,
    /// The tick at which there were `count` errors.
    pub since: u32,
}
one_word!(RecentErrors, u64);

/// The recent results of a backend's connects, which determine its ejection (see
/// [`ejection`](crate::ejection)): one word, so that a single compare-and-swap changes it. All zero
/// if no failure is stored.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct EjectionState {
    /// A tick; its meaning depends on `phase`. [`Counting`](EjectionPhase::Counting): when the last
    /// failure occurred. [`Ejected`](EjectionPhase::Ejected): when the ejection ends.
    /// [`Trial`](EjectionPhase::Trial): until when the trial must be decided.
    pub at: u32,
    /// Failures in a row. An established connection subtracts one.
    pub run: u8,
    /// Number of ejections in the present run of failures; determines the duration of the next
    /// ejection.
    pub level: u8,
    /// An [`EjectionPhase`].
    pub phase: u8,
    /// The number of the [`Ending`](crate::ending::Ending) of the last failure, or
    /// [`NO_ANSWER`](crate::ejection::NO_ANSWER).
    pub ending: u8,
}
one_word!(EjectionState, u64);

/// The phase of a backend's ejection, which determines the meaning of [`EjectionState::at`].
/// Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EjectionPhase {
    /// Failures are counted.
    Counting = 0,
    /// The backend is ejected. After [`EjectionState::at`] one connect may be its trial.
    Ejected = 1,
    /// The backend is ejected, and the trial has begun and is undecided.
    Trial = 2,
}

impl EjectionPhase {
    /// The phase with this number; an unknown number means [`Counting`](Self::Counting).
    pub const fn from_u8(number: u8) -> Self {
        match number {
            1 => Self::Ejected,
            2 => Self::Trial,
            _ => Self::Counting,
        }
    }
}
