//! Backends in their slots.

use bytemuck::{Pod, Zeroable};

use crate::net::{Address, Be16};

/// Whether a backend may be chosen, and why not: one word, which a choice reads with a single load.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct StateWord {
    /// A [`Usable`] and its reason: see [`DaemonState`]. The daemon writes it together with the
    /// state: it stores only this half of the word, so that its stores never overwrite the
    /// programs' half.
    pub usable: u8,
    /// A [`BackendState`], for readers of the map.
    pub state: u8,
    /// 1 while the backend is ejected. The kernel programs set and clear it. The daemon also clears
    /// it: when an operator readmits the backend, when ejection is turned off, and before a slot
    /// gets another backend.
    pub ejected: u8,
    /// The [`FailureSource`](crate::ejection::FailureSource) of the run of failures; 0 if there is
    /// no run. Written by the kernel programs.
    pub failure_source: u8,
}
one_word!(StateWord, u32);

/// The daemon's half of a [`StateWord`]: a single store changes it.
#[repr(C, align(2))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct DaemonState {
    /// Bits 0 and 1: a [`Usable`]. Bit 2: whether a probe has found the backend healthy. Bits 3 to
    /// 6: a [`HealthReason`].
    pub usable: u8,
    /// A [`BackendState`], for readers of the map.
    pub state: u8,
}
one_word!(DaemonState, u16);

/// Whether the daemon lets connects choose a backend. Numbers are part of the ABI: bit 0 is set if
/// they may choose it, bit 1 if they may even while it is ejected.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Usable {
    /// It may not be chosen.
    No = 0,
    /// It may be chosen unless it is ejected.
    UnlessEjected = 1,
    /// It may be chosen although it is ejected, because too few others are available.
    EvenEjected = 3,
}

impl Usable {
    /// The bit of a [`DaemonState`] that is set if a probe has found the backend healthy.
    pub const PROBED_HEALTHY: u8 = 4;

    /// The value with this number; unknown numbers are interpreted as a choice interprets them.
    pub const fn from_u8(number: u8) -> Self {
        match number & 3 {
            1 => Self::UnlessEjected,
            3 => Self::EvenEjected,
            _ => Self::No,
        }
    }

    /// Whether it may be chosen at all.
    pub const fn is_usable(self) -> bool {
        !matches!(self, Self::No)
    }
}

impl From<bool> for Usable {
    /// The value for a backend that may be chosen, unless it is ejected, or not at all.
    fn from(may_be_chosen: bool) -> Self {
        if may_be_chosen { Self::UnlessEjected } else { Self::No }
    }
}

/// The health of a backend according to the daemon, and its reason: the worst of all verdicts,
/// except the programs' own ejections and a lame duck by the backend's own report, which have words
/// of their own. Numbers are part of the ABI. Readers of the map show it, and the next daemon
/// adopts it.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HealthReason {
    /// The word was written by a daemon that stored no reasons.
    Unstated = 0,
    /// Healthy.
    Healthy = 1,
    /// Unproven: no probe has finished.
    Unproven = 2,
    /// A lame duck according to its list.
    ListLameDuck = 3,
    /// Ejected: probes fail that come from another network namespace than the client's.
    ProbeElsewhere = 4,
    /// Refusing: probes cannot connect.
    ProbeConnect = 5,
    /// Refusing: probes connect, and the answer is an error or missing.
    ProbeAnswer = 6,
    /// Refusing: the backend reports that it is down.
    ReportDown = 7,
    /// Refusing: down according to its list.
    ListDown = 8,
    /// Drained: weight 0 according to its list.
    ListWeight = 9,
}

impl HealthReason {
    /// All of them, by number.
    pub const ALL: [Self; 10] = [
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
    ];
}

impl DaemonState {
    const REASON_BIT: u32 = 3;

    /// The half word of a backend in `state`, without a reason.
    pub const fn new(usable: Usable, state: BackendState) -> Self {
        Self { usable: usable as u8, state: state as u8 }
    }

    /// The same, with the result of a probe: whether the backend is healthy.
    #[must_use]
    pub const fn probed_healthy(self, is_probed_healthy: bool) -> Self {
        let bit = if is_probed_healthy { Usable::PROBED_HEALTHY } else { 0 };
        Self { usable: self.usable & !Usable::PROBED_HEALTHY | bit, ..self }
    }

    /// The same with a reason.
    #[must_use]
    pub const fn with_reason(self, reason: HealthReason) -> Self {
        let others = self.usable & ((1 << Self::REASON_BIT) - 1);
        Self { usable: others | (reason as u8) << Self::REASON_BIT, ..self }
    }

    /// Whether the daemon lets it be chosen.
    pub const fn usable(self) -> Usable {
        Usable::from_u8(self.usable)
    }

    /// Whether a probe has found the backend healthy.
    pub const fn is_probed_healthy(self) -> bool {
        self.usable & Usable::PROBED_HEALTHY != 0
    }

    /// The reason. Words of versions without reasons encoded the list's verdict in the state.
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
    /// The word of a backend in `state` that is not ejected.
    pub const fn new(usable: Usable, state: BackendState) -> Self {
        Self { usable: usable as u8, state: state as u8, ejected: 0, failure_source: 0 }
    }

    /// The daemon's half.
    pub const fn daemon(self) -> DaemonState {
        DaemonState { usable: self.usable, state: self.state }
    }

    /// 1 if the backend may be chosen, else 0. A number, so that loops over many backends need no
    /// branches.
    #[inline(always)]
    pub const fn may_be_chosen(self) -> u32 {
        let usable = self.usable as u32;
        // Usable, and either not ejected or usable nevertheless.
        usable & ((self.ejected as u32 ^ 1) | usable >> 1) & 1
    }

    /// Whether the backend may be chosen.
    #[inline(always)]
    pub const fn is_usable(self) -> bool {
        self.may_be_chosen() != 0
    }

    /// 1 if the fallback of a service with this word is a backup, else 0: the daemon lets no policy
    /// choose it, and it is not ejected.
    #[inline(always)]
    pub const fn is_backup(self) -> u32 {
        ((self.usable as u32 | self.ejected as u32) ^ 1) & 1
    }

    /// 1 if the backend may not be chosen only because it is ejected, else 0.
    #[inline(always)]
    pub const fn is_held_back(self) -> u32 {
        let usable = self.usable as u32;
        usable & self.ejected as u32 & (usable >> 1 ^ 1) & 1
    }
}

/// The purpose of a slot. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BackendState {
    /// The slot holds no backend.
    Free = 0,
    /// The backend is in the service's table, or is its backup ([`StateWord::is_backup`]).
    Member = 1,
    /// No longer in the table; the slot is retained until its last flow ends.
    Leaving = 4,
    /// Unavailable for long: another backend takes its place in the table until it is available
    /// again.
    Replaced = 5,
}

impl BackendState {
    /// All states of an occupied slot.
    pub const OCCUPIED: [Self; 3] = [Self::Member, Self::Replaced, Self::Leaving];

    /// The state with this number, if there is one. 2, 3 and 6 were members with a reason
    /// ([`DaemonState::reason`]).
    pub const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Free,
            1 | 2 | 3 | 6 => Self::Member,
            4 => Self::Leaving,
            5 => Self::Replaced,
            _ => return None,
        })
    }

    /// The word for it in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Member => "member",
            Self::Leaving => "leaving",
            Self::Replaced => "replaced",
        }
    }
}

/// The backend that has a slot. The daemon writes it only while no table, fallback or flow refers
/// to the slot, except the report id, and the weight, which only readers of the map use: it may
/// write these at any time.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct BackendAddress {
    /// The address that connect rewrites to.
    pub address: Address,
    /// The port that connect rewrites to.
    pub port: Be16,
    /// The service that owns the slot.
    pub service: u16,
    /// Its report id, the index of its [`Verdict`](super::host::Verdict);
    /// [`NO_REPORT`](super::host::NO_REPORT) if there are no reports.
    pub report: u32,
    /// The number of backends that have held this slot, wrapping. In a free slot, the generation of
    /// the next one.
    pub generation: u32,
    /// The configured weight (capacity); for readers of the map.
    pub weight: u32,
}
const _: () = assert!(size_of::<BackendAddress>() == 32);

/// A backend in its slot: all data that a choice reads and changes, in one cache line.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Backend {
    /// Open flows: sockets that were last directed to the slot. Written by the kernel programs, and
    /// by the daemon for records with a socket that is gone; both use atomic adds.
    pub flows: u64,
    /// Whether the backend may be chosen. The daemon writes one half at any time, the kernel
    /// programs the other.
    pub state: StateWord,
    /// Entries that the slot has in its service's current table. Written by the daemon with the
    /// table.
    pub entries: u32,
    /// Recent errors of its connections. Written by the kernel programs.
    pub errors: RecentErrors,
    /// Failures in a row, and until when it is ejected. Written by the kernel programs; cleared by
    /// the daemon with [`StateWord::ejected`].
    pub ejection: EjectionState,
    /// The identity of the backend.
    pub endpoint: BackendAddress,
}
const _: () = assert!(size_of::<Backend>() == 64);

/// A number of errors that halves every half-life: one word, so that a single store changes it.
/// Errors that two CPUs add at the same moment may count as one, because this is a weight, not a
/// counter.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct RecentErrors {
    /// The number at the tick `since`.
    pub count: u32,
    /// The tick at which they were this many.
    pub since: u32,
}
one_word!(RecentErrors, u64);

/// The recent results of a backend, by which [`ejection`](crate::ejection) decides: one word, so
/// that a single compare-and-swap changes it. All zero if no failure of the backend is remembered.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct EjectionState {
    /// A tick: of the last failure; until when the backend is ejected; or until when the trial must
    /// be decided.
    pub at: u32,
    /// Failures in a row, a leaky count: an established connection subtracts one.
    pub run: u8,
    /// How often it was ejected without having recovered; determines the duration of the next
    /// ejection.
    pub level: u8,
    /// An [`EjectionPhase`].
    pub phase: u8,
    /// The [`Ending`](crate::ending::Ending) of the last failure.
    pub ending: u8,
}
one_word!(EjectionState, u64);

/// The meaning of [`EjectionState::at`], and the next step. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EjectionPhase {
    /// Failures are counted.
    Counting = 0,
    /// The backend is ejected; after that time one connect may try it.
    Ejected = 1,
    /// That connect has begun and is undecided.
    Trial = 2,
}

impl EjectionPhase {
    /// The phase with this number; an unknown one means `Counting`.
    pub const fn from_u8(number: u8) -> Self {
        match number {
            1 => Self::Ejected,
            2 => Self::Trial,
            _ => Self::Counting,
        }
    }
}
