//! Where in an Ethernet frame a UDP datagram lies, and how the frame is turned round to carry the answer: the same for the kernel
//! programs of network interfaces and for tests.
//!
//! Ethernet with at most one VLAN tag (IEEE 802.1Q or 802.1ad), IPv4 with options (RFC 791), IPv6 without extension headers (RFC
//! 8200), UDP (RFC 768). Whatever else there is, fragments among it, is nobody's here.

use core::mem::offset_of;

use lb_common::abi::responder::REPORT_WORDS;
use lb_common::net::{Address, Be16, Be32};
use network_types::eth::{EthHdr, EtherType};
use network_types::ip::{IpProto, Ipv4Hdr, Ipv6Hdr};
use network_types::udp::UdpHdr;
use network_types::vlan::VlanHdr;

use crate::wire::{BYTES, Datagram, is_of_one_host};

/// A header as it lies in a frame, or a field of one.
///
/// # Safety
/// Any bytes are one, at any address.
pub unsafe trait Header: Copy {}

// SAFETY: integers and arrays of bytes, without padding; whoever reads one reads it unaligned.
unsafe impl Header for EthHdr {}
// SAFETY: as above.
unsafe impl Header for VlanHdr {}
// SAFETY: as above.
unsafe impl Header for Ipv4Hdr {}
// SAFETY: as above.
unsafe impl Header for Ipv6Hdr {}
// SAFETY: as above.
unsafe impl Header for UdpHdr {}

// SAFETY: a byte.
unsafe impl Header for u8 {}
// SAFETY: an address of IPv6 as it lies in a header.
unsafe impl Header for Address {}

/// The bytes of a datagram of a report, in words as they lie in memory.
pub type Payload = [u64; REPORT_WORDS];

/// The bytes of a frame.
pub trait Frame {
    /// The header at an offset; `None` if the frame ends before it does.
    fn header<H: Header>(&self, offset: usize) -> Option<H>;

    /// Copies as many bytes as a datagram of a report has, as they lie there; `None` if the frame ends before they do.
    fn datagram(&self, offset: usize, into: &mut Payload) -> Option<()>;
}

/// The bytes of a frame that may be written.
pub trait FrameMut: Frame {
    /// Puts a header at an offset, if the frame has the room.
    fn put_header<H: Header>(&mut self, offset: usize, header: H) -> Option<()>;

    /// Puts there what [`Frame::datagram`] reads.
    fn put_datagram(&mut self, offset: usize, payload: &Payload) -> Option<()>;
}

/// A UDP datagram in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Udp {
    /// The address that it comes from,
    pub from: Address,
    /// and the port.
    pub from_port: Be16,
    /// The address that it goes to.
    pub to: Address,
    /// Where the header of IP begins.
    pub network: usize,
    /// Where its header begins.
    pub header: usize,
    /// Bytes of header and payload, as the header says.
    pub length: u16,
}

impl Udp {
    /// Where the payload begins.
    #[inline(always)]
    pub const fn payload(self) -> usize {
        self.header + UdpHdr::LEN
    }

    /// Whether it is one of IPv4.
    #[inline(always)]
    const fn is_v4(self) -> bool {
        self.to.as_mapped().is_some()
    }

    /// Copies the payload, if it is as long as a datagram of a report.
    #[inline(always)]
    pub fn read<F: Frame + ?Sized>(self, frame: &F, into: &mut Datagram) -> Option<()> {
        if self.length as usize != UdpHdr::LEN + BYTES {
            return None;
        }
        frame.datagram(self.payload(), bytemuck::cast_mut(into))
    }
}

const VLAN: u16 = EtherType::Ieee8021q as u16;
const PROVIDER_VLAN: u16 = EtherType::Ieee8021ad as u16;
const IPV4: u16 = EtherType::Ipv4 as u16;
const IPV6: u16 = EtherType::Ipv6 as u16;
const UDP: u8 = IpProto::Udp as u8;

/// The UDP datagram to a port that a frame holds, if it holds one.
#[inline(always)]
pub fn udp_to<F: Frame + ?Sized>(frame: &F, port: Be16) -> Option<Udp> {
    let ethernet: EthHdr = frame.header(0)?;
    let (network, offset) = match ethernet.ether_type {
        VLAN | PROVIDER_VLAN => {
            let tag: VlanHdr = frame.header(EthHdr::LEN)?;
            (tag.ether_type, EthHdr::LEN + VlanHdr::LEN)
        }
        other => (other, EthHdr::LEN),
    };
    match network {
        IPV4 => in_ipv4(frame, offset, port),
        IPV6 => in_ipv6(frame, offset, port),
        _ => None,
    }
}

#[inline(always)]
fn in_ipv4<F: Frame + ?Sized>(frame: &F, offset: usize, port: Be16) -> Option<Udp> {
    /// More fragments follow, or some came before: all but "do not fragment" and the bit that is reserved.
    const FRAGMENT: u16 = 0x3fff;
    let ip: Ipv4Hdr = frame.header(offset)?;
    let length = ip.vihl & 0xf;
    if ip.vihl >> 4 != 4 || length < 5 || ip.proto != UDP {
        return None;
    }
    if u16::from_be_bytes(ip.frags) & FRAGMENT != 0 {
        return None;
    }
    let [from, to] = [ip.src_addr, ip.dst_addr].map(v4);
    udp_at(frame, [offset, offset + 4 * length as usize], [from, to], port)
}

#[inline(always)]
fn in_ipv6<F: Frame + ?Sized>(frame: &F, offset: usize, port: Be16) -> Option<Udp> {
    let ip: Ipv6Hdr = frame.header(offset)?;
    if ip.vcf[0] >> 4 != 6 || ip.next_hdr != UDP {
        return None;
    }
    let [from, to] = [ip.src_addr, ip.dst_addr].map(v6);
    udp_at(frame, [offset, offset + Ipv6Hdr::LEN], [from, to], port)
}

#[inline(always)]
const fn v4(bytes: [u8; 4]) -> Address {
    Address::mapped(word(bytes))
}

#[inline(always)]
const fn v6([a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]: [u8; 16]) -> Address {
    Address { words: [word([a, b, c, d]), word([e, f, g, h]), word([i, j, k, l]), word([m, n, o, p])] }
}

#[inline(always)]
const fn word(bytes: [u8; 4]) -> Be32 {
    Be32::from_network(u32::from_ne_bytes(bytes))
}

#[inline(always)]
fn udp_at<F: Frame + ?Sized>(
    frame: &F,
    [network, header]: [usize; 2],
    [from, to]: [Address; 2],
    port: Be16,
) -> Option<Udp> {
    let udp: UdpHdr = frame.header(header)?;
    if u16::from_ne_bytes(udp.dst) != port.to_network() {
        return None;
    }
    let from_port = Be16::from_network(u16::from_ne_bytes(udp.src));
    Some(Udp { from, from_port, to, network, header, length: u16::from_be_bytes(udp.len) })
}

/// Through how many routers an answer may go, as Linux has it.
const HOPS: u8 = 64;

/// Sends a frame back to where it came from, with another payload of the length of a report's. `None` if the frame ends before that,
/// which whoever has read the payload that was there knows that it does not.
///
/// Not inlined into kernel programs, for the sake of their stack (512 bytes).
#[cfg_attr(target_arch = "bpf", inline(never))]
#[cfg_attr(not(target_arch = "bpf"), inline(always))]
pub fn turn<F: FrameMut + ?Sized>(frame: &mut F, udp: &Udp, payload: &Payload) -> Option<()> {
    let ethernet: EthHdr = frame.header(0)?;
    let header: UdpHdr = frame.header(udp.header)?;
    frame.put_header(0, EthHdr { dst_addr: ethernet.src_addr, src_addr: ethernet.dst_addr, ..ethernet })?;
    if udp.is_v4() {
        let ip: Ipv4Hdr = frame.header(udp.network)?;
        let ip = Ipv4Hdr { ttl: HOPS, src_addr: ip.dst_addr, dst_addr: ip.src_addr, check: [0; 2], ..ip };
        let check = !folded(sum_of_ipv4(&ip));
        frame.put_header(udp.network, Ipv4Hdr { check: check.to_ne_bytes(), ..ip })?;
    } else {
        frame.put_header(udp.network + offset_of!(Ipv6Hdr, hop_limit), HOPS)?;
        frame.put_header(udp.network + offset_of!(Ipv6Hdr, src_addr), udp.to)?;
        frame.put_header(udp.network + offset_of!(Ipv6Hdr, dst_addr), udp.from)?;
    }
    let turned = UdpHdr { src: header.dst, dst: header.src, check: [0; 2], ..header };
    let check = checksum_of_udp(udp, turned, payload);
    frame.put_header(udp.header, UdpHdr { check: check.to_ne_bytes(), ..turned })?;
    frame.put_datagram(udp.payload(), payload)
}

/// Whether [`turn`] can send a frame back: its headers are as plain as those of an answer, without options of IP, with nothing behind
/// the payload, and no group among the addresses.
#[inline(always)]
pub fn can_turn<F: Frame + ?Sized>(frame: &F, udp: Udp) -> bool {
    /// The lowest bit of the first byte: addressed to a group (IEEE 802).
    const GROUP: u8 = 1;
    let Some(ethernet) = frame.header::<EthHdr>(0) else { return false };
    if (ethernet.dst_addr[0] | ethernet.src_addr[0]) & GROUP != 0 || udp.from_port.to_network() == 0 {
        return false;
    }
    let [of_ip, length] = if udp.is_v4() {
        let Some(ip) = frame.header::<Ipv4Hdr>(udp.network) else { return false };
        [Ipv4Hdr::LEN, (u16::from_be_bytes(ip.tot_len) as usize).wrapping_sub(Ipv4Hdr::LEN)]
    } else {
        let Some(ip) = frame.header::<Ipv6Hdr>(udp.network) else { return false };
        [Ipv6Hdr::LEN, u16::from_be_bytes(ip.payload_len) as usize]
    };
    // An IPv6 address in mapped form is nobody's on a wire.
    let is_of_one_family = udp.from.as_mapped().is_some() == udp.is_v4();
    udp.header == udp.network + of_ip
        && length == udp.length as usize
        && is_of_one_family
        && is_of_one_host(udp.from)
}

/// The sum of all words of a header, in the order of bytes of this host, which does not matter (RFC 1071).
#[inline(always)]
fn sum_of_ipv4(ip: &Ipv4Hdr) -> u64 {
    let pair = |a: u8, b: u8| u64::from(u16::from_ne_bytes([a, b]));
    let of_two = |[a, b]: [u8; 2]| pair(a, b);
    let of_four = |[a, b, c, d]: [u8; 4]| pair(a, b) + pair(c, d);
    pair(ip.vihl, ip.tos)
        + of_two(ip.tot_len)
        + of_two(ip.id)
        + of_two(ip.frags)
        + pair(ip.ttl, ip.proto)
        + of_two(ip.check)
        + of_four(ip.src_addr)
        + of_four(ip.dst_addr)
}

/// The checksum of a datagram between the ends of another one (RFC 768, RFC 8200 section 8.1). Both families have the same: what an
/// IPv4 address is preceded by in mapped form is 0xffff, which changes no sum of this kind.
#[inline(always)]
fn checksum_of_udp(udp: &Udp, header: UdpHdr, payload: &Payload) -> u16 {
    let two = |bytes| u64::from(u16::from_ne_bytes(bytes));
    let mut sum = two([0, UDP]) + 2 * two(header.len) + two(header.src) + two(header.dst);
    let [a, b, c, d] = udp.from.words;
    let [e, f, g, h] = udp.to.words;
    sum += halves(a) + halves(b) + halves(c) + halves(d) + halves(e) + halves(f) + halves(g) + halves(h);
    let mut at = 0;
    // Bound: the words of a payload.
    while at < payload.len() {
        let word = payload[at];
        sum += (word & 0xffff_ffff) + (word >> 32);
        at += 1;
    }
    // Zero would say that there is none.
    match !folded(sum) {
        0 => 0xffff,
        sum => sum,
    }
}

#[inline(always)]
const fn halves(word: Be32) -> u64 {
    word.to_network() as u64
}

/// The sum of the 16-bit words that a sum of words is made of, with what is carried over.
#[expect(clippy::cast_possible_truncation, reason = "what is carried over has been added")]
#[inline(always)]
const fn folded(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// A frame that lies in memory.
impl Frame for [u8] {
    fn header<H: Header>(&self, offset: usize) -> Option<H> {
        let bytes = self.get(offset..)?.get(..size_of::<H>())?;
        // SAFETY: as many bytes as a header has, and any are one.
        Some(unsafe { bytes.as_ptr().cast::<H>().read_unaligned() })
    }

    fn datagram(&self, offset: usize, into: &mut Payload) -> Option<()> {
        bytemuck::bytes_of_mut(into).copy_from_slice(self.get(offset..)?.get(..BYTES)?);
        Some(())
    }
}

impl FrameMut for [u8] {
    fn put_header<H: Header>(&mut self, offset: usize, header: H) -> Option<()> {
        let bytes = self.get_mut(offset..)?.get_mut(..size_of::<H>())?;
        // SAFETY: as many bytes as a header has.
        unsafe { bytes.as_mut_ptr().cast::<H>().write_unaligned(header) };
        Some(())
    }

    fn put_datagram(&mut self, offset: usize, payload: &Payload) -> Option<()> {
        self.get_mut(offset..)?.get_mut(..BYTES)?.copy_from_slice(bytemuck::bytes_of(payload));
        Some(())
    }
}
