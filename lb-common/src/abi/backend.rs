//! Who may be picked: backends in their slots.

use bytemuck::{Pod, Zeroable};

use crate::net::{Address, Be16};

/// Whether a backend may be chosen, and why not: one word, which a choice reads with a single load.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct StateWord {
    /// A [`Usable`], and why: see [`DaemonState`]. Written by the daemon, together with the state: it stores this half and nothing
    /// else of the word, so that no store of its own undoes what a program has found meanwhile.
    pub usable: u8,
    /// A [`BackendState`], for readers of the map.
    pub state: u8,
    /// 1 while the backend is ejected. Set by the kernel programs, and cleared by them; the daemon clears it, too: for an
    /// operator who wants the backend back, where ejection is turned off, and before a slot gets another backend.
    pub ejected: u8,
    /// The [`FailureSource`](crate::ejection::FailureSource) of the run of failures; 0 if there is no run. Written by the kernel
    /// programs.
    pub failure_source: u8,
}
one_word!(StateWord, u32);

/// What the daemon says of a backend, the first half of a [`StateWord`]: it changes with a single store.
#[repr(C, align(2))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct DaemonState {
    /// Bits 0 and 1: a [`Usable`]. Bit 2: whether a probe has found the backend well. Bits 3 to 6: a [`HealthReason`].
    pub usable: u8,
    /// A [`BackendState`], for readers of the map.
    pub state: u8,
}
one_word!(DaemonState, u16);

/// Whether the daemon lets a backend be chosen. Numbers are part of the ABI: bit 0 is whether, bit 1 is whether also while
/// the backend is ejected.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Usable {
    /// It may not be chosen.
    No = 0,
    /// It may be chosen unless it is ejected.
    UnlessEjected = 1,
    /// It may be chosen although it is ejected: too few others are available.
    EvenEjected = 3,
}

impl Usable {
    /// The bit of a [`DaemonState`] by which the daemon says that a probe has found the backend well.
    pub const PROBED_HEALTHY: u8 = 4;

    /// The value with this number; numbers that mean nothing are read as a choice reads them.
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
    /// Of a backend that may be chosen or not, unless it is ejected.
    fn from(may_be_chosen: bool) -> Self {
        if may_be_chosen { Self::UnlessEjected } else { Self::No }
    }
}

/// The health that the daemon knows of a backend, and its reason: of all verdicts the worst, but for the programs' own ejections and
/// the backend's own report that it is a lame duck, which have words of their own. Numbers are part of the ABI. Readers of the map
/// show it, and the next daemon adopts it.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HealthReason {
    /// A daemon wrote the word that gave no reasons.
    Unstated = 0,
    /// Healthy.
    Healthy = 1,
    /// Unproven: no probe has finished.
    Unproven = 2,
    /// A lame duck by its list.
    ListLameDuck = 3,
    /// Ejected: probes fail that come from another network namespace than the client's.
    ProbeElsewhere = 4,
    /// Refusing: probes cannot connect.
    ProbeConnect = 5,
    /// Refusing: probes connect, and the answer is an error or missing.
    ProbeAnswer = 6,
    /// Refusing: the backend reports that it is down.
    ReportDown = 7,
    /// Refusing: down by its list.
    ListDown = 8,
    /// Drained: weight 0 by its list.
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

    /// The same, of a backend that a probe has found well or not.
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

    /// Whether a probe has found the backend well.
    pub const fn is_probed_healthy(self) -> bool {
        self.usable & Usable::PROBED_HEALTHY != 0
    }

    /// The reason. Before there were reasons, some states told what the list says.
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
    /// The word of a backend in `state`, which is not ejected.
    pub const fn new(usable: Usable, state: BackendState) -> Self {
        Self { usable: usable as u8, state: state as u8, ejected: 0, failure_source: 0 }
    }

    /// The daemon's half.
    pub const fn daemon(self) -> DaemonState {
        DaemonState { usable: self.usable, state: self.state }
    }

    /// 1 if the backend may be chosen, else 0. A number, because loops over many backends do without branches.
    #[inline(always)]
    pub const fn may_be_chosen(self) -> u32 {
        let usable = self.usable as u32;
        // Usable, and either not ejected or usable all the same.
        usable & ((self.ejected as u32 ^ 1) | usable >> 1) & 1
    }

    /// Whether it says that the backend may be chosen.
    #[inline(always)]
    pub const fn is_usable(self) -> bool {
        self.may_be_chosen() != 0
    }

    /// 1 if the fallback of a service with this word is a backup, else 0: the daemon lets no policy choose it, and it is not ejected.
    #[inline(always)]
    pub const fn is_backup(self) -> u32 {
        ((self.usable as u32 | self.ejected as u32) ^ 1) & 1
    }

    /// 1 if the daemon lets the backend be chosen and it is ejected, and this decides; else 0.
    #[inline(always)]
    pub const fn is_held_back(self) -> u32 {
        let usable = self.usable as u32;
        usable & self.ejected as u32 & (usable >> 1 ^ 1) & 1
    }
}

/// What a slot is for. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BackendState {
    /// The slot holds no backend.
    Free = 0,
    /// The backend is in the service's table, or is its backup ([`StateWord::is_backup`]).
    Member = 1,
    /// Not in the table any more; the slot is kept until its last flow ends.
    Leaving = 4,
    /// Unavailable for long: another backend has its place in the table until it is back.
    Replaced = 5,
}

impl BackendState {
    /// All that an occupied slot may have.
    pub const OCCUPIED: [Self; 3] = [Self::Member, Self::Replaced, Self::Leaving];

    /// The state with this number, if there is one. 2, 3 and 6 were members with a reason ([`DaemonState::reason`]).
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

/// Who has a slot. Written by the daemon, only while no table, fallback or flow refers to the slot; but at any time the weight,
/// which only readers of the map want, and the report id.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct BackendAddress {
    /// The address that connect rewrites to.
    pub address: Address,
    /// The port that connect rewrites to.
    pub port: Be16,
    /// The service that owns the slot.
    pub service: u16,
    /// Its report id: which [`Verdict`](super::host::Verdict) is about it; [`NO_REPORT`](super::host::NO_REPORT) if none is.
    pub report: u32,
    /// Counts the backends that have held this slot, wrapping. In a free slot, what the next one gets.
    pub generation: u32,
    /// The configured weight (capacity); for readers of the map.
    pub weight: u32,
}
const _: () = assert!(size_of::<BackendAddress>() == 32);

/// A backend in its slot: all that a choice reads and changes of it, in one cache line.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Backend {
    /// Open flows: sockets that were last directed to the slot. Written by the kernel programs, and by the daemon for
    /// records whose socket is gone, with atomic adds on both sides.
    pub flows: u64,
    /// May it be chosen? Half of it is written by the daemon at any time, half by the kernel programs.
    pub state: StateWord,
    /// Entries that the slot has in its service's current table. Written by the daemon with the table.
    pub entries: u32,
    /// Errors of its connections lately. Written by the kernel programs.
    pub errors: RecentErrors,
    /// Failures in a row, and until when it is ejected. Written by the kernel programs; cleared by the daemon with
    /// [`StateWord::ejected`].
    pub ejection: EjectionState,
    /// Who it is.
    pub endpoint: BackendAddress,
}
const _: () = assert!(size_of::<Backend>() == 64);

/// A number of errors that loses half of itself every half-life: one word, so that it changes with a single store. An
/// error that is added on two CPUs at the same moment may count once: it is a weight, not a count.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct RecentErrors {
    /// How many, at the tick `since`.
    pub count: u32,
    /// The tick at which they were this many.
    pub since: u32,
}
one_word!(RecentErrors, u64);

/// How a backend has done of late, as [`ejection`](crate::ejection) decides by it: one word, so that it changes with a single
/// compare-and-swap. All zero for a backend of which nothing bad is known.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct EjectionState {
    /// A tick: of the last failure; until when it is ejected; or until when the trial is to be decided.
    pub at: u32,
    /// Failures in a row, a leaky count: a connection that is established takes one away.
    pub run: u8,
    /// How often it was ejected without having recovered: what the next ejection lasts.
    pub level: u8,
    /// An [`EjectionPhase`].
    pub phase: u8,
    /// The [`Ending`](crate::ending::Ending) of the last failure.
    pub ending: u8,
}
one_word!(EjectionState, u64);

/// What [`EjectionState::at`] tells, and what is to come. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EjectionPhase {
    /// Failures are counted.
    Counting = 0,
    /// It is ejected; when the time is over, one connect is let through.
    Ejected = 1,
    /// That connect is under way.
    Trial = 2,
}

impl EjectionPhase {
    /// The phase with this number; an unknown one counts.
    pub const fn from_u8(number: u8) -> Self {
        match number {
            1 => Self::Ejected,
            2 => Self::Trial,
            _ => Self::Counting,
        }
    }
}
