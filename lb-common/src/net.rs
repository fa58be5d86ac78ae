//! Addresses and ports in network byte order. The byte order is part of the type, so an address or
//! a port is never a bare integer.
//!
//! The kernel passes an IPv4 address to programs as one 32-bit word, and an IPv6 address as four
//! words. All words are in network order. An IPv4 address is stored in its v4-mapped form (RFC 4291
//! section 2.5.5.2, `::ffff:a.b.c.d`), so that one type serves both families and a v4-mapped socket
//! needs no conversion.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bytemuck::{Pod, Zeroable};

/// The number of TCP in the IP header.
pub const IPPROTO_TCP: u8 = 6;
/// The number of UDP in the IP header.
pub const IPPROTO_UDP: u8 = 17;

/// A 16-bit integer in network byte order: a port.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Be16 {
    // The field has a name because tools that dump the maps show it.
    be: u16,
}

impl Be16 {
    /// Converts a value in host order.
    #[inline(always)]
    pub const fn from_host(value: u16) -> Self {
        Self { be: value.to_be() }
    }

    /// Converts bits in network order, as they are in memory or in a field of a kernel context.
    #[inline(always)]
    pub const fn from_network(bits: u16) -> Self {
        Self { be: bits }
    }

    /// The value in host order.
    #[inline(always)]
    pub const fn to_host(self) -> u16 {
        u16::from_be(self.be)
    }

    /// The bits in network order, as they are in memory.
    #[inline(always)]
    pub const fn to_network(self) -> u16 {
        self.be
    }
}

/// A 32-bit word in network byte order: an IPv4 address, or a quarter of an IPv6 address.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Be32 {
    be: u32,
}

impl Be32 {
    /// Converts a value in host order.
    #[inline(always)]
    pub const fn from_host(value: u32) -> Self {
        Self { be: value.to_be() }
    }

    /// Converts bits in network order, as they are in memory or in a field of a kernel context.
    #[inline(always)]
    pub const fn from_network(bits: u32) -> Self {
        Self { be: bits }
    }

    /// The value in host order.
    #[inline(always)]
    pub const fn to_host(self) -> u32 {
        u32::from_be(self.be)
    }

    /// The bits in network order, as they are in memory.
    #[inline(always)]
    pub const fn to_network(self) -> u32 {
        self.be
    }
}

/// An IPv6 address, or an IPv4 address in v4-mapped form.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Address {
    /// The four words of the address, each in network order.
    pub words: [Be32; 4],
}

impl Address {
    /// `::`, which is no host's address.
    pub const UNSPECIFIED: Self = Self { words: [Be32 { be: 0 }; 4] };

    /// The v4-mapped form of an IPv4 address.
    #[inline(always)]
    pub const fn mapped(v4: Be32) -> Self {
        Self { words: [Be32 { be: 0 }, Be32 { be: 0 }, Be32::from_host(0xffff), v4] }
    }

    /// The halves of the address, each as a number with the bytes that the half has in memory. (A
    /// program compares two numbers with fewer instructions than four words.)
    #[inline(always)]
    pub fn halves(self) -> [u64; 2] {
        let [a, b, c, d] = self.words.map(|word| u64::from(word.to_network()));
        [a | b << 32, c | d << 32]
    }

    /// The IPv4 word, if this address is v4-mapped.
    #[inline(always)]
    pub const fn as_mapped(self) -> Option<Be32> {
        let [a, b, c, d] = self.words;
        if a.be == 0 && b.be == 0 && c.to_host() == 0xffff { Some(d) } else { None }
    }
}

impl From<Ipv4Addr> for Address {
    fn from(address: Ipv4Addr) -> Self {
        Self::mapped(Be32::from_host(address.to_bits()))
    }
}

impl From<Ipv6Addr> for Address {
    fn from(address: Ipv6Addr) -> Self {
        let bits = address.to_bits();
        let word = |shift: u32| {
            // The shift moves 32 bits of the address to the lowest bits, and the cast drops all
            // other bits.
            #[expect(clippy::cast_possible_truncation, reason = "takes the low word")]
            Be32::from_host((bits >> shift) as u32)
        };
        Self { words: [word(96), word(64), word(32), word(0)] }
    }
}

impl From<IpAddr> for Address {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => v4.into(),
            IpAddr::V6(v6) => v6.into(),
        }
    }
}

impl From<Address> for IpAddr {
    /// A v4-mapped address becomes IPv4: socklb stores no native IPv6 address in that range.
    fn from(address: Address) -> Self {
        if let Some(v4) = address.as_mapped() {
            return Self::V4(Ipv4Addr::from_bits(v4.to_host()));
        }
        let bits = address.words.iter().fold(0u128, |bits, word| (bits << 32) | u128::from(word.to_host()));
        Self::V6(Ipv6Addr::from_bits(bits))
    }
}

/// The socket address of `address` and `port`.
pub fn socket_addr(address: Address, port: Be16) -> SocketAddr {
    SocketAddr::new(address.into(), port.to_host())
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn ports_are_stored_in_network_order() {
        assert_eq!(bytemuck::bytes_of(&Be16::from_host(80)), [0, 80]);
        assert_eq!(Be16::from_network(u16::from_ne_bytes([0x1f, 0x90])).to_host(), 8080);
    }

    #[test]
    fn ipv4_addresses_are_stored_v4_mapped() {
        let address = Address::from(Ipv4Addr::new(10, 96, 0, 10));
        assert_eq!(bytemuck::bytes_of(&address), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 96, 0, 10]);
        assert_eq!(address.as_mapped().map(Be32::to_host), Some(0x0a60_000a));
    }

    /// `as_mapped` decides which addresses are shown as IPv4, so this table tests its edge cases.
    #[test]
    fn only_addresses_with_the_mapped_prefix_are_v4_mapped() {
        let cases = [
            ("::ffff:127.0.0.1", true),
            ("::ffff:0.0.0.0", true),
            ("::127.0.0.1", false),
            ("::fffe:127.0.0.1", false),
            ("::1:ffff:127.0.0.1", false),
            ("1::ffff:127.0.0.1", false),
            ("64:ff9b::127.0.0.1", false),
            ("::1", false),
        ];
        for (text, mapped) in cases {
            let address = Address::from(text.parse::<Ipv6Addr>().unwrap());
            assert_eq!(address.as_mapped().is_some(), mapped, "{text}");
        }
    }

    #[test]
    fn addresses_survive_a_round_trip() {
        for text in ["10.96.0.10", "0.0.0.0", "255.255.255.255", "2001:db8::7", "::1", "fe80::1:2:3:4"] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(IpAddr::from(Address::from(address)), address);
        }
    }
}
