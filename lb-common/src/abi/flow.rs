//! Flows: to which backend each socket was sent, and the phase of the flow.

use bytemuck::{Pod, Zeroable};

use super::MAX_DATAGRAM_FLOWS;
use crate::net::{Address, Be16};

/// The destination of a socket, and why and when it was chosen. The slot cannot be reused while the
/// flow is counted in its [`Backend::flows`](super::Backend::flows). Written by the kernel
/// programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Flow {
    /// When it was chosen, by `CLOCK_MONOTONIC`, with the resolution of the kernel's tick.
    pub start_ns: u64,
    /// Cookie of the socket's network namespace, whose list of sockets contains it.
    pub namespace: u64,
    /// The slot of the backend.
    pub slot: u32,
    /// The generation of the slot when it was chosen.
    pub generation: u32,
    /// The process that made the call.
    pub process: u32,
    /// The policy's sample: the position in the table of the cursor, including its start, or a
    /// random number. With the table and the loads of that time it gives the same choice again, see
    /// [`choose`](crate::pick::choose).
    pub sample: u32,
    /// The generation of the service's table when it was chosen.
    pub table_generation: u16,
    /// Entries of that table with this slot; 65,535 stands for more.
    pub entries: u16,
    /// The service index.
    pub service: u16,
    /// The [`Policy`](super::Policy) in the low four bits, and a [`Reason`] in the others.
    pub why: u8,
    /// A [`Phase`].
    pub phase: u8,
}
const _: () = assert!(size_of::<Flow>() == 40);

impl Flow {
    /// The content of a free bucket.
    pub const NONE: Self = Self {
        start_ns: 0,
        namespace: 0,
        slot: 0,
        generation: 0,
        process: 0,
        sample: 0,
        table_generation: 0,
        entries: 0,
        service: 0,
        why: 0,
        phase: 0,
    };
}

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

/// Why a backend was chosen. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The policy picked it.
    Picked = 0,
    /// Every pick was unusable; the backend is the service's fallback.
    Fallback = 1,
    /// Every backend was at its limit; this is the least loaded one.
    Overflow = 2,
    /// The backend is ejected, and the flow tests whether it works again.
    Trial = 3,
    /// The choice was a lame duck by its own report; this is another backend, from the schedule.
    Diverted = 4,
}

impl Reason {
    /// The reason with this number, if there is one.
    pub const fn from_u8(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Picked,
            1 => Self::Fallback,
            2 => Self::Overflow,
            3 => Self::Trial,
            4 => Self::Diverted,
            _ => return None,
        })
    }

    /// The word for it in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Picked => "picked",
            Self::Fallback => "fallback",
            Self::Overflow => "overflow",
            Self::Trial => "trial",
            Self::Diverted => "diverted",
        }
    }
}

/// A bucket of the flow table: the socket that holds it. Written by the kernel programs; the daemon
/// frees it, with the same compare-and-swap, if the socket is gone. The flow itself is in
/// [`map::FLOWS`](super::map::FLOWS) at the same index. Buckets are stored close together: sockets
/// that are created one after the other have consecutive cookies and so share a cache line, and a
/// connect to an address that is not a service reads only that line.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct FlowBucket {
    /// Cookie of the socket that holds the bucket. 0 if there is none, and [`RECLAIMING`] while the
    /// daemon checks whether its socket is gone. Cookies are never reused while the host is up.
    pub cookie: u64,
    /// How many flows sockets of this bucket have elsewhere: the sum of
    /// [`IN_OVERFLOW`](Self::IN_OVERFLOW) for each flow in the overflow table and
    /// [`IN_DATAGRAMS`](Self::IN_DATAGRAMS) for each entry of datagrams. A lookup searches
    /// elsewhere only if its part is not 0. A socket with a flow in the overflow table can
    /// therefore not also claim the bucket when it becomes free.
    pub elsewhere: u64,
}
const _: () = assert!(size_of::<FlowBucket>() == 16);

impl FlowBucket {
    /// One flow in the overflow table.
    pub const IN_OVERFLOW: u64 = 1;
    /// One entry of datagrams.
    pub const IN_DATAGRAMS: u64 = 1 << 32;

    /// The number of flows in the overflow table.
    #[inline(always)]
    pub fn in_overflow(elsewhere: u64) -> u64 {
        elsewhere & (Self::IN_DATAGRAMS - 1)
    }

    /// The number of entries of datagrams.
    #[inline(always)]
    pub fn in_datagrams(elsewhere: u64) -> u64 {
        elsewhere / Self::IN_DATAGRAMS
    }
}

/// A cookie that no socket has: the daemon stores it in place of a cookie while it checks whether
/// the socket is gone.
pub const RECLAIMING: u64 = u64::MAX;

/// The flows of a datagram socket that addresses its datagrams, one per service, in an array
/// without gaps. Written by the kernel programs; the daemon removes it if its socket is gone.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Datagrams {
    /// Flows; those with phase 0 are free, and so are all after them.
    pub flows: [Flow; MAX_DATAGRAM_FLOWS],
    /// The previous destination of each flow's service: answers from there may still arrive.
    pub before: [Peer; MAX_DATAGRAM_FLOWS],
    /// The value of `chosen` when each flow was chosen.
    pub order: [u32; MAX_DATAGRAM_FLOWS],
    /// Flows chosen for this socket so far, wrapping.
    pub chosen: u32,
    /// Zero.
    pub _reserved: u32,
}
const _: () = assert!(size_of::<Datagrams>() == 520);

impl Datagrams {
    /// No flow.
    pub const EMPTY: Self = Self {
        flows: [Flow::NONE; MAX_DATAGRAM_FLOWS],
        before: [Peer::NONE; MAX_DATAGRAM_FLOWS],
        order: [0; MAX_DATAGRAM_FLOWS],
        chosen: 0,
        _reserved: 0,
    };

    /// The entries that are flows.
    pub fn live(&self) -> impl Iterator<Item = &Flow> {
        self.flows.iter().filter(|flow| flow.phase != 0)
    }
}

/// An address without a slot: the backend that had it may be gone.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Peer {
    /// The address.
    pub address: Address,
    /// The port; 0 if there is no peer.
    pub port: Be16,
    /// Zero.
    pub _reserved: u16,
}
const _: () = assert!(size_of::<Peer>() == 20);

impl Peer {
    /// No peer.
    pub const NONE: Self = Self { address: Address::UNSPECIFIED, port: Be16::from_host(0), _reserved: 0 };
}
