//! Code for tests, fuzzers and benchmarks of the programs of network interfaces: frames of every
//! shape, and the maps of a host with one backend. No released program uses this code. The code is
//! in this crate because the crates that need it have no other crate in common.

use core::cell::Cell;
use core::net::{IpAddr, SocketAddr};

use bytemuck::Zeroable as _;
use lb_common::abi::host::{LastReport, Listener, ReportBase, SenderKey, SenderName};
use lb_common::abi::responder::{PreparedAnswer, Station, Subscriber, SubscriberName};
use lb_common::net::{Address, Be16};

use crate::receive::{Maps, Words};
use crate::respond::{self, Found};
use crate::wire::{Cookies, Datagram, Key, Kind, Readiness};

/// Room for the longest frame, with tags, all IPv4 options, and a payload that is longer than a
/// report's datagram.
pub const ROOM: usize = 256;

/// The headers of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The types of its VLAN tags, the outer tag first; 0 means no tag.
    pub tags: [u16; 2],
    /// The number of 32-bit words of options in an IPv4 header, up to 10.
    pub options: u8,
    /// The flags and the fragment offset in an IPv4 header.
    pub fragment: u16,
    /// The protocol of an IPv4 header, or the next header of IPv6.
    pub protocol: u8,
    /// A number that is added to the length in the UDP header, with wrapping.
    pub length_off: i16,
}

impl Shape {
    /// A UDP datagram without tags and options.
    pub const PLAIN: Self = Self { tags: [0; 2], options: 0, fragment: 0, protocol: 17, length_off: 0 };
}

/// The destination hardware address of frames.
pub const HERE: [u8; 6] = [0; 6];

/// A frame.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    bytes: [u8; ROOM],
    length: usize,
}

impl Frame {
    /// A frame with a payload from one address to another of the same family. All checksums are
    /// zero except the checksum of an IPv4 header.
    ///
    /// # Panics
    /// If the families differ, or the frame does not fit.
    pub fn new(shape: Shape, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Self {
        let mut frame = Self { bytes: [0; ROOM], length: 0 };
        // The destination is the address of the loopback interface; the source is invented.
        frame.put(&HERE);
        frame.put(&[2, 0, 0, 0, 0, 2]);
        for tag in shape.tags.into_iter().filter(|tag| *tag != 0) {
            frame.put(&tag.to_be_bytes());
            frame.put(&7_u16.to_be_bytes());
        }
        let udp = 8 + payload.len();
        match (from.ip(), to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let header = 20 + 4 * usize::from(shape.options);
                frame.put(&0x0800_u16.to_be_bytes());
                let start = frame.length;
                frame.put(&[0x45 + shape.options, 0]);
                frame.put(&number(header + udp));
                frame.put(&[0, 0]);
                frame.put(&shape.fragment.to_be_bytes());
                frame.put(&[64, shape.protocol, 0, 0]);
                frame.put(&from.octets());
                frame.put(&to.octets());
                // The options consist of "no operation".
                (0..shape.options).for_each(|_| frame.put(&[1; 4]));
                let sum = checksum(&frame.bytes[start..frame.length]);
                frame.bytes[start + 10..start + 12].copy_from_slice(&sum.to_be_bytes());
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                frame.put(&0x86dd_u16.to_be_bytes());
                frame.put(&[0x60, 0, 0, 0]);
                frame.put(&number(udp));
                frame.put(&[shape.protocol, 64]);
                frame.put(&from.octets());
                frame.put(&to.octets());
            }
            _ => panic!("{from} and {to} have different address families"),
        }
        frame.put(&from.port().to_be_bytes());
        frame.put(&to.port().to_be_bytes());
        let length = u16::from_be_bytes(number(udp)).wrapping_add_signed(shape.length_off);
        frame.put(&length.to_be_bytes());
        frame.put(&[0, 0]);
        frame.put(payload);
        frame
    }

    fn put(&mut self, bytes: &[u8]) {
        let end = self.length + bytes.len();
        self.bytes[self.length..end].copy_from_slice(bytes);
        self.length = end;
    }

    /// The frame's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// The frame's bytes, mutable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.length]
    }
}

fn number(length: usize) -> [u8; 2] {
    u16::try_from(length).expect("the length fits in 16 bits").to_be_bytes()
}

/// The checksum of Internet headers (RFC 1071) over 16-bit words.
pub fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    let sum: u32 = words.map(u32::from).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    !u16::try_from(folded).expect("the folded sum fits in 16 bits")
}

/// The maps of a host with a daemon that listens at one address and polls one backend.
#[derive(Clone, Debug)]
pub struct OneBackend {
    /// The address at which the daemon listens.
    pub address: Address,
    /// The settings of `address`.
    pub listener: Listener,
    /// The backend.
    pub name: SenderName,
    /// The backend's keys.
    pub keys: [SenderKey; 2],
    /// The last report that was accepted.
    pub last: Cell<LastReport>,
    /// The time until which the backend is a lame duck.
    pub lame_until_ns: Cell<u64>,
}

impl OneBackend {
    /// The maps for a backend with this address over TCP, which has not reported yet. Its key has
    /// the number 1.
    pub fn new(listens_at: IpAddr, backend: SocketAddr, key: [u8; 16]) -> Self {
        let name = SenderName {
            address: backend.ip().into(),
            port: Be16::from_host(backend.port()),
            protocol: 6,
            _reserved: 0,
        };
        let first = SenderKey { id: 1, key, ..SenderKey::default() };
        Self {
            address: listens_at.into(),
            listener: Listener::default(),
            name,
            keys: [first, SenderKey::default()],
            last: Cell::default(),
            lame_until_ns: Cell::default(),
        }
    }
}

impl Maps for OneBackend {
    type Sender = ();

    fn listener(&self, address: Address) -> Option<Listener> {
        (address == self.address).then_some(self.listener)
    }

    fn sender(&self, name: &SenderName) -> Option<()> {
        (*name == self.name).then_some(())
    }

    fn id(&self, (): ()) -> u32 {
        1
    }

    fn key(&self, (): (), number: u16) -> Option<Key> {
        let key = self.keys.iter().find(|key| number != 0 && key.id == number);
        key.map(|key| Key::from_bytes(key.key))
    }

    fn last(&self, _: u32) -> Option<LastReport> {
        Some(self.last.get())
    }

    fn believe(&self, _: u32, before: LastReport, after: LastReport) -> bool {
        assert_eq!(self.last.get(), before, "there is no other writer");
        self.last.set(after);
        true
    }

    fn set_repeated_ns(&self, _: u32, now_ns: u64) {
        self.last.set(LastReport { repeated_ns: now_ns, ..self.last.get() });
    }
}

impl Words for OneBackend {
    fn base(&self, _: u32) -> ReportBase {
        self.last.get().base
    }

    fn lame_until_ns(&self, _: u32) -> u64 {
        self.lame_until_ns.get()
    }

    fn replace_lame_until_ns(&self, _: u32, before: u64, after: u64) -> bool {
        let is_there = self.lame_until_ns.get() == before;
        if is_there {
            self.lame_until_ns.set(after);
        }
        is_there
    }
}

/// The answer that an agent has prepared for one ready backend, and the address at which it may be
/// requested.
#[derive(Clone, Debug)]
pub struct OneAnswer {
    /// The address at which the answer may be requested.
    pub served_at: Address,
    /// The backend.
    pub name: SenderName,
    /// The prepared answer.
    pub prepared: PreparedAnswer,
    /// The secret of the cookies, drawn at time zero.
    pub secret: [u8; 16],
    /// The last subscriber.
    pub subscriber: Cell<Option<(SubscriberName, Subscriber)>>,
}

impl OneAnswer {
    /// A backend with this address over TCP. Its key has number 1, and its last change number 3.
    /// The prepared answer is valid until the deadline.
    pub fn new(served_at: IpAddr, backend: SocketAddr, key: [u8; 16], deadline_ns: u64) -> Self {
        let mut report = Datagram::about(Kind::Answer, 6, backend);
        report.readiness = Readiness::Ready as u8;
        let first = SenderKey { id: 1, key, ..SenderKey::default() };
        let prepared = PreparedAnswer {
            deadline_ns,
            change: 3,
            keys: [first, SenderKey::default()],
            report: report.words(),
            ..PreparedAnswer::zeroed()
        };
        Self {
            served_at: served_at.into(),
            name: report.name(),
            prepared: prepared.checked(),
            secret: [7; 16],
            subscriber: Cell::default(),
        }
    }
}

impl respond::Maps for OneAnswer {
    fn is_served_at(&self, address: Address) -> bool {
        address == self.served_at
    }

    fn is_own(&self, station: Station) -> bool {
        station == HERE.into()
    }

    fn prepared(&self, name: &SenderName, into: &mut PreparedAnswer) -> Found {
        *into = self.prepared;
        if *name == self.name { Found::Prepared } else { Found::UnknownName }
    }

    fn subscribe(&self, name: &SubscriberName, subscriber: &Subscriber) {
        self.subscriber.set(Some((*name, *subscriber)));
    }

    fn cookies(&self, now_ns: u64) -> Cookies {
        Cookies::new(Key::from_bytes(self.secret), now_ns)
    }
}
