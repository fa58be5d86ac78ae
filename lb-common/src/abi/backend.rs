//! Who may be picked: backends in their slots.

use bytemuck::{Pod, Zeroable};

use crate::net::{Address, Be16};

/// Whether a backend may be chosen, and why not: one word, so that it changes with a single store.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct StateWord {
    /// 1 if the backend may be chosen, else 0. The only part the kernel reads.
    pub usable: u8,
    /// A [`BackendState`], for readers of the map.
    pub state: u8,
    /// Zero.
    pub _reserved: u16,
}
one_word!(StateWord, u32);

impl StateWord {
    /// The word of a backend in `state`.
    pub const fn new(usable: bool, state: BackendState) -> Self {
        Self { usable: usable as u8, state: state as u8, _reserved: 0 }
    }

    /// Whether it says that the backend may be chosen.
    #[inline(always)]
    pub fn is_usable(self) -> bool {
        self.usable != 0
    }
}

/// What is known of a backend. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BackendState {
    /// The slot holds no backend.
    Free = 0,
    /// Takes connections.
    Healthy = 1,
    /// Serves, asks for no new connections.
    LameDuck = 2,
    /// Weight 0: no new connections.
    Unweighted = 3,
    /// Not in the subset any more; the slot is kept until its last flow ends.
    Leaving = 4,
}

impl BackendState {
    /// The state with this number, if there is one.
    pub const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Free,
            1 => Self::Healthy,
            2 => Self::LameDuck,
            3 => Self::Unweighted,
            4 => Self::Leaving,
            _ => return None,
        })
    }

    /// The word for it in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Healthy => "healthy",
            Self::LameDuck => "lame-duck",
            Self::Unweighted => "unweighted",
            Self::Leaving => "leaving",
        }
    }
}

/// Who has a slot. Written by the daemon, only while no table, fallback or flow refers to the slot (but the weight, which
/// only readers of the map want, at any time).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct BackendAddress {
    /// The address that connect rewrites to.
    pub address: Address,
    /// The port that connect rewrites to.
    pub port: Be16,
    /// The service that owns the slot.
    pub service: u16,
    /// Zero.
    pub _reserved: u32,
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
    /// May it be chosen? Written by the daemon at any time.
    pub state: StateWord,
    /// Entries that the slot has in its service's current table. Written by the daemon with the table.
    pub share: u32,
    /// Errors of its connections lately. Written by the kernel programs.
    pub errors: RecentErrors,
    /// Flows whose records the daemon has taken out, because their sockets were gone. Written by the daemon.
    pub swept: u64,
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
