//! Flows: the backend to which each socket was sent, and the phase of the flow.

use bytemuck::{Pod, Zeroable};

use super::MAX_DATAGRAM_FLOWS;
use crate::net::{Address, Be16};

/// The backend to which a socket was sent, and why and when the backend was chosen. The slot cannot
/// be reused while its [`Backend::flows`](super::Backend::flows) counts the flow. Written by the
/// kernel programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Flow {
    /// When the backend was chosen, in nanoseconds of `CLOCK_MONOTONIC`, with the resolution of the
    /// kernel's tick.
    pub start_ns: u64,
    /// Cookie of the socket's network namespace. The daemon searches for the socket in the kernel's
    /// list of the sockets in this namespace.
    pub namespace: u64,
    /// The slot of the backend.
    pub slot: u32,
    /// The generation of the slot at the time of the choice.
    pub generation: u32,
    /// The ID, in the host's PID namespace, of the process that made the call.
    pub process: u32,
    /// The policy's sample: the cursor's position in the table, which includes its start, or a
    /// random number. Given this sample, and the table and the loads at the time of the choice,
    /// [`choose`](crate::pick::choose) returns the same backend. The sample is 0 if the call became
    /// a trial before the policy made a choice.
    pub sample: u32,
    /// The generation of the service's table at the time of the choice.
    pub table_generation: u16,
    /// Number of entries of that table with this slot; 65,535 means 65,535 or more.
    pub entries: u16,
    /// The service index.
    pub service: u16,
    /// The [`Policy`](super::Policy) in the low four bits, and a [`Reason`] in the high four bits.
    pub why: u8,
    /// A [`Phase`].
    pub phase: u8,
}
const _: () = assert!(size_of::<Flow>() == 40);

impl Flow {
    /// An empty flow: all fields are 0.
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

/// The progress of a flow. Numbers are part of the ABI.
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

    /// The word for the phase in tables and JSON.
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
    /// The policy picked the backend.
    Picked = 0,
    /// No examined backend was usable; the backend is the service's fallback.
    Fallback = 1,
    /// Every backend was at its limit; the chosen backend is the least loaded one.
    Overflow = 2,
    /// The backend is ejected, and the flow tests whether it works again.
    Trial = 3,
    /// The first choice was a lame duck by its own report; the chosen backend is another one from
    /// the schedule.
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

    /// The word for the reason in tables and JSON.
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

/// A bucket of the flow table: the cookie of the socket that uses it, and the socket's flow.
/// Written by the kernel programs; the daemon also frees a bucket, with the same compare-and-swap,
/// if the socket is gone. A bucket is one cache line, so that finding a record loads no other line.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct FlowBucket {
    /// Cookie of the socket that uses the bucket; 0 if the bucket is free, and [`RECLAIMING`] while
    /// the daemon checks whether that socket is gone. Cookies are never reused while the host is
    /// up.
    pub cookie: u64,
    /// For the sockets whose cookies map to this bucket: the number of their flows in other maps.
    /// Each flow in the overflow table adds [`IN_OVERFLOW`](Self::IN_OVERFLOW), and each entry of
    /// [`map::DATAGRAMS`](super::map::DATAGRAMS) adds [`IN_DATAGRAMS`](Self::IN_DATAGRAMS). A
    /// lookup searches one of these maps only if the count for the map is not 0. So the lookup for
    /// a socket with a flow in the overflow table finds this flow, even if the bucket has become
    /// free meanwhile.
    pub elsewhere: u64,
    /// The flow of the socket. If the bucket is free, the last flow in the bucket.
    pub flow: Flow,
    /// Zero.
    pub _reserved: u64,
}
const _: () = assert!(size_of::<FlowBucket>() == 64);

impl FlowBucket {
    /// The amount that each flow in the overflow table adds to [`elsewhere`](Self::elsewhere).
    pub const IN_OVERFLOW: u64 = 1;
    /// The amount that each entry of [`map::DATAGRAMS`](super::map::DATAGRAMS) adds to
    /// [`elsewhere`](Self::elsewhere).
    pub const IN_DATAGRAMS: u64 = 1 << 32;

    /// The number of flows in the overflow table that a value of [`elsewhere`](Self::elsewhere)
    /// counts.
    #[inline(always)]
    pub fn in_overflow(elsewhere: u64) -> u64 {
        elsewhere & (Self::IN_DATAGRAMS - 1)
    }

    /// The number of entries of [`map::DATAGRAMS`](super::map::DATAGRAMS) that a value of
    /// [`elsewhere`](Self::elsewhere) counts.
    #[inline(always)]
    pub fn in_datagrams(elsewhere: u64) -> u64 {
        elsewhere / Self::IN_DATAGRAMS
    }
}

/// A cookie that no socket has: the daemon stores it in place of a cookie while it checks whether
/// the socket is gone.
pub const RECLAIMING: u64 = u64::MAX;

/// The flows of a datagram socket that sends to addresses without connecting: one per service, in
/// an array without gaps. Written by the kernel programs; the daemon removes the entry if its
/// socket is gone.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Datagrams {
    /// The flows. An element with phase 0 is free, and so are all elements after it.
    pub flows: [Flow; MAX_DATAGRAM_FLOWS],
    /// For each flow, the previous backend of its service, from which answers may still arrive.
    pub before: [Peer; MAX_DATAGRAM_FLOWS],
    /// For each flow, the value of `chosen` when its backend was chosen.
    pub order: [u32; MAX_DATAGRAM_FLOWS],
    /// How many flows have begun for this socket, modulo 2^32.
    pub chosen: u32,
    /// Zero.
    pub _reserved: u32,
}
const _: () = assert!(size_of::<Datagrams>() == 520);

impl Datagrams {
    /// An entry without flows.
    pub const EMPTY: Self = Self {
        flows: [Flow::NONE; MAX_DATAGRAM_FLOWS],
        before: [Peer::NONE; MAX_DATAGRAM_FLOWS],
        order: [0; MAX_DATAGRAM_FLOWS],
        chosen: 0,
        _reserved: 0,
    };

    /// The flows that are in use.
    pub fn live(&self) -> impl Iterator<Item = &Flow> {
        self.flows.iter().filter(|flow| flow.phase != 0)
    }
}

/// The address of a backend, stored without its slot, because the backend may be gone.
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
