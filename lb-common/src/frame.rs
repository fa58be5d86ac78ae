//! Where in an Ethernet frame a UDP datagram lies: read the same way by the kernel programs of network interfaces and by tests.
//!
//! Ethernet with at most one VLAN tag (IEEE 802.1Q or 802.1ad), IPv4 with options (RFC 791), IPv6 without extension headers (RFC
//! 8200), UDP (RFC 768). Whatever else there is, fragments among it, is nobody's here.

use network_types::eth::{EthHdr, EtherType};
use network_types::ip::{IpProto, Ipv4Hdr, Ipv6Hdr};
use network_types::udp::UdpHdr;
use network_types::vlan::VlanHdr;

use crate::net::{Address, Be16, Be32};
use crate::wire::BYTES;

/// A header as it lies in a frame.
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

/// The bytes of a frame.
pub trait Frame {
    /// The header at an offset; `None` if the frame ends before it does.
    fn header<H: Header>(&self, offset: usize) -> Option<H>;

    /// As many bytes as a datagram of a report has, as words of which each has its first byte lowest.
    fn datagram(&self, offset: usize) -> Option<[u64; BYTES / 8]>;
}

/// A UDP datagram in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Udp {
    /// The address that it goes to.
    pub to: Address,
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

    /// Whether the payload has so many bytes.
    #[inline(always)]
    pub const fn has(self, bytes: usize) -> bool {
        self.length as usize == UdpHdr::LEN + bytes
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
    let to = Address::mapped(Be32::from_network(u32::from_ne_bytes(ip.dst_addr)));
    udp_at(frame, offset + 4 * length as usize, to, port)
}

#[inline(always)]
fn in_ipv6<F: Frame + ?Sized>(frame: &F, offset: usize, port: Be16) -> Option<Udp> {
    let ip: Ipv6Hdr = frame.header(offset)?;
    if ip.vcf[0] >> 4 != 6 || ip.next_hdr != UDP {
        return None;
    }
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = ip.dst_addr;
    let word = |bytes| Be32::from_network(u32::from_ne_bytes(bytes));
    let words = [word([a, b, c, d]), word([e, f, g, h]), word([i, j, k, l]), word([m, n, o, p])];
    udp_at(frame, offset + Ipv6Hdr::LEN, Address { words }, port)
}

#[inline(always)]
fn udp_at<F: Frame + ?Sized>(frame: &F, header: usize, to: Address, port: Be16) -> Option<Udp> {
    let udp: UdpHdr = frame.header(header)?;
    if u16::from_ne_bytes(udp.dst) != port.to_network() {
        return None;
    }
    Some(Udp { to, header, length: u16::from_be_bytes(udp.len) })
}

/// A frame that lies in memory.
impl Frame for [u8] {
    fn header<H: Header>(&self, offset: usize) -> Option<H> {
        let bytes = self.get(offset..)?.get(..size_of::<H>())?;
        // SAFETY: as many bytes as a header has, and any are one.
        Some(unsafe { bytes.as_ptr().cast::<H>().read_unaligned() })
    }

    fn datagram(&self, offset: usize) -> Option<[u64; BYTES / 8]> {
        let bytes = self.get(offset..)?.get(..BYTES)?;
        let words: [u64; BYTES / 8] = bytemuck::pod_read_unaligned(bytes);
        Some(words.map(u64::from_le))
    }
}
