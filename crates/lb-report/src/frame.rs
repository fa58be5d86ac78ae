//! Finds a UDP datagram in an Ethernet frame, and turns the frame around by exchanging addresses
//! and ports, so that the frame carries the answer back to its source. Kernel programs of network
//! interfaces and tests use the same code.
//!
//! The code supports Ethernet with at most one VLAN tag (IEEE 802.1Q or 802.1ad), IPv4 with options
//! (RFC 791), IPv6 without extension headers (RFC 8200), and UDP (RFC 768). All other frames,
//! including fragments, are ignored.

use core::mem::offset_of;

use lb_common::abi::responder::REPORT_WORDS;
use lb_common::net::{Address, Be16, Be32};
use network_types::eth::{EthHdr, EtherType};
use network_types::ip::{IpProto, Ipv4Hdr, Ipv6Hdr};
use network_types::udp::UdpHdr;
use network_types::vlan::VlanHdr;

use crate::wire::{BYTES, Datagram, is_of_one_host};

/// A header in a frame, or a field of a header.
///
/// # Safety
/// Any bytes must be a valid value, at any address.
pub unsafe trait Header: Copy {}

// SAFETY: the header consists of integers and arrays of bytes, without padding, and all reads are
// unaligned.
unsafe impl Header for EthHdr {}
// SAFETY: the header consists of integers and arrays of bytes, without padding, and all reads are
// unaligned.
unsafe impl Header for VlanHdr {}
// SAFETY: the header consists of integers and arrays of bytes, without padding, and all reads are
// unaligned.
unsafe impl Header for Ipv4Hdr {}
// SAFETY: the header consists of integers and arrays of bytes, without padding, and all reads are
// unaligned.
unsafe impl Header for Ipv6Hdr {}
// SAFETY: the header consists of integers and arrays of bytes, without padding, and all reads are
// unaligned.
unsafe impl Header for UdpHdr {}

// SAFETY: any byte is a valid `u8`.
unsafe impl Header for u8 {}
// SAFETY: any 16 bytes are a valid address.
unsafe impl Header for Address {}

/// The bytes of a report's datagram, as words in memory order.
pub type Payload = [u64; REPORT_WORDS];

/// The bytes of a frame.
pub trait Frame {
    /// The header at an offset; `None` if the frame ends before the header does.
    fn header<H: Header>(&self, offset: usize) -> Option<H>;

    /// Copies the bytes of a report's datagram, in memory order; `None` if the frame ends before
    /// the datagram does.
    fn datagram(&self, offset: usize, into: &mut Payload) -> Option<()>;
}

/// The bytes of a frame, writable.
pub trait FrameMut: Frame {
    /// Writes a header at an offset; `None` if the frame has no room for it.
    fn put_header<H: Header>(&mut self, offset: usize, header: H) -> Option<()>;

    /// Writes the bytes of a report's datagram at an offset; `None` if the frame has no room for
    /// them.
    fn put_datagram(&mut self, offset: usize, payload: &Payload) -> Option<()>;
}

/// A UDP datagram in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Udp {
    /// The source address.
    pub from: Address,
    /// The source port.
    pub from_port: Be16,
    /// The destination address.
    pub to: Address,
    /// The offset of the IP header.
    pub network: usize,
    /// The offset of the UDP header.
    pub header: usize,
    /// The length of UDP header and payload in bytes, according to the UDP header.
    pub length: u16,
}

impl Udp {
    /// The offset of the payload.
    #[inline(always)]
    pub const fn payload(self) -> usize {
        self.header + UdpHdr::LEN
    }

    /// Whether the datagram is in an IPv4 packet.
    #[inline(always)]
    const fn is_v4(self) -> bool {
        self.to.as_mapped().is_some()
    }

    /// Copies the payload. `None` if it does not have the length of a report's datagram, or the
    /// frame ends before the payload does.
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

/// The UDP datagram in a frame, if the frame contains one for this port.
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
    /// In a fragment, at least one of these bits is set: "more fragments", or a bit of the offset.
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

/// The hop limit of an answer, which is Linux's default.
const HOPS: u8 = 64;

/// Turns a frame around, so that it goes back to its source, and replaces its payload. `None` if
/// the frame ends before the payload does, which is impossible if the caller has read the previous
/// payload.
///
/// This function is not inlined into kernel programs, because their stack is limited to 512 bytes.
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

/// Whether [`turn`] can turn a frame around: the frame must have no IP options, nothing after the
/// payload, and no group address.
#[inline(always)]
pub fn can_turn<F: Frame + ?Sized>(frame: &F, udp: Udp) -> bool {
    /// The lowest bit of an address's first byte. It is set in a group address (IEEE 802).
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
    // A packet must not contain an IPv6 address in mapped form.
    let is_of_one_family = udp.from.as_mapped().is_some() == udp.is_v4();
    udp.header == udp.network + of_ip
        && length == udp.length as usize
        && is_of_one_family
        && is_of_one_host(udp.from)
}

/// The sum of all words of a header, in the byte order of this host. The checksum does not depend
/// on the byte order (RFC 1071).
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

/// The UDP checksum of an answer to the datagram `udp` (RFC 768, RFC 8200 section 8.1). IPv4 and
/// IPv6 use the same code, because the prefix of an IPv4 address in mapped form, 0xffff, does not
/// change a ones' complement sum.
#[inline(always)]
fn checksum_of_udp(udp: &Udp, header: UdpHdr, payload: &Payload) -> u16 {
    let two = |bytes| u64::from(u16::from_ne_bytes(bytes));
    let mut sum = two([0, UDP]) + 2 * two(header.len) + two(header.src) + two(header.dst);
    let [a, b, c, d] = udp.from.words;
    let [e, f, g, h] = udp.to.words;
    sum += halves(a) + halves(b) + halves(c) + halves(d) + halves(e) + halves(f) + halves(g) + halves(h);
    let mut at = 0;
    // Bound: the number of words of a payload.
    while at < payload.len() {
        let word = payload[at];
        sum += (word & 0xffff_ffff) + (word >> 32);
        at += 1;
    }
    // Zero would mean that there is no checksum.
    match !folded(sum) {
        0 => 0xffff,
        sum => sum,
    }
}

#[inline(always)]
const fn halves(word: Be32) -> u64 {
    word.to_network() as u64
}

/// Folds a sum into 16 bits by adding the carries.
#[expect(clippy::cast_possible_truncation, reason = "all carries have been added")]
#[inline(always)]
const fn folded(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// A frame in memory.
impl Frame for [u8] {
    fn header<H: Header>(&self, offset: usize) -> Option<H> {
        let bytes = self.get(offset..)?.get(..size_of::<H>())?;
        // SAFETY: the slice has as many bytes as the header, and any bytes are a valid header.
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
        // SAFETY: the slice has as many bytes as the header.
        unsafe { bytes.as_mut_ptr().cast::<H>().write_unaligned(header) };
        Some(())
    }

    fn put_datagram(&mut self, offset: usize, payload: &Payload) -> Option<()> {
        self.get_mut(offset..)?.get_mut(..BYTES)?.copy_from_slice(bytemuck::bytes_of(payload));
        Some(())
    }
}
