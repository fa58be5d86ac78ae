//! Flows: which socket was sent where, and how far it has come.

use bytemuck::{Pod, Zeroable};

use super::MAX_DATAGRAM_FLOWS;

/// Where a socket was sent, why, and when. The slot cannot be reused while the flow is counted in its
/// [`Active`](super::Active). Written by the kernel programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Flow {
    /// When it was chosen, by `CLOCK_MONOTONIC`: to the kernel's tick where it has a coarse clock.
    pub start_ns: u64,
    /// Cookie of the socket's network namespace: in which list of sockets it is to be looked for.
    pub namespace: u64,
    /// The slot of the backend.
    pub slot: u32,
    /// The generation of the slot at that time.
    pub generation: u32,
    /// The process that made the call.
    pub process: u32,
    /// What the policy drew: where in the table the walk stood, its start included, or a random number. With the table and
    /// the loads of that time it gives the same choice again, see [`choose`](crate::pick::choose).
    pub draw: u32,
    /// The generation of the service's table at that time.
    pub table_generation: u16,
    /// Entries of that table that named the slot; 65,535 stands for more.
    pub share: u16,
    /// The service's place.
    pub service: u16,
    /// The [`Policy`](super::Policy) in the low four bits, and a [`Reason`] in the others.
    pub why: u8,
    /// A [`Phase`].
    pub phase: u8,
    /// For the programs alone: a number that went through a map is none that the verifier can tell. Without CAP_PERFMON it
    /// allows no arithmetic on a map pointer with a number that each path to it knows to be another one.
    pub unknown: u64,
}
const _: () = assert!(size_of::<Flow>() == 48);

/// How far a flow has come. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// A backend was chosen.
    Chosen = 1,
    /// The first SYN was sent.
    Connecting = 2,
    /// The handshake is over.
    Established = 3,
    /// A datagram socket is directed to the backend.
    Datagrams = 4,
}

impl Phase {
    /// The phase with this number, if there is one.
    pub const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Chosen,
            2 => Self::Connecting,
            3 => Self::Established,
            4 => Self::Datagrams,
            _ => return None,
        })
    }

    /// The word for it in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Chosen => "chosen",
            Self::Connecting => "connecting",
            Self::Established => "established",
            Self::Datagrams => "datagrams",
        }
    }
}

/// Why a backend was taken. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The policy picked it.
    Picked = 0,
    /// Every pick was unusable; it is the service's fallback.
    Fallback = 1,
    /// Every backend was at its limit; it is the least loaded one.
    Overflow = 2,
}

impl Reason {
    /// The reason with this number, if there is one.
    pub const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Picked,
            1 => Self::Fallback,
            2 => Self::Overflow,
            _ => return None,
        })
    }

    /// The word for it in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Picked => "picked",
            Self::Fallback => "fallback",
            Self::Overflow => "overflow",
        }
    }
}

/// One place of the flow table, a cache line. Written by the kernel programs; taken out by the daemon, with the same
/// compare-and-swap, if its socket is gone.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct FlowRecord {
    /// The socket that holds the place, 0 if none, and [`HELD`] while the daemon looks whether its socket is gone. Cookies
    /// are never reused while the host is up.
    pub cookie: u64,
    /// Its flow.
    pub flow: Flow,
    /// Sockets of this place whose flow is in the overflow table. Only if non-zero is that table searched; a socket
    /// whose flow is there can therefore not claim the place as well once it is free.
    pub overflowed: u64,
}
const _: () = assert!(size_of::<FlowRecord>() == 64);

/// A cookie that no socket has: the daemon puts it in place of one whose socket may be gone.
pub const HELD: u64 = u64::MAX;

/// The flows of a datagram socket that addresses its datagrams, one per service. Written by the kernel programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Datagrams {
    /// Flows; those whose phase is 0 are free.
    pub flows: [Flow; MAX_DATAGRAM_FLOWS],
}
const _: () = assert!(size_of::<Datagrams>() == 384);

/// Which flow of a socket the kernel's list of sockets has shown. A connect that
/// the kernel has not begun, or that failed, is in no list though its socket is open; once a list has shown the flow, the
/// socket's absence means that the connection is over. Written and read by the daemon only; in a map so that it outlives
/// the daemon.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Listed {
    /// The slot of the flow's backend.
    pub slot: u32,
    /// Its generation.
    pub generation: u32,
}
const _: () = assert!(size_of::<Listed>() == 8);
