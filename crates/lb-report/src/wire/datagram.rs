//! The layout of the datagram, its valid contents, and its MAC.

use core::net::SocketAddr;

use bytemuck::{Pod, Zeroable};
use lb_common::abi::host::{ReportBase, SenderName};
use lb_common::abi::responder::REPORT_WORDS;
use lb_common::net::{Address, Be16, Be32, IPPROTO_TCP, IPPROTO_UDP, socket_addr};

use super::siphash::{Key, siphash};
use super::{AUTHENTICATED_BYTES, BYTES, MAX_HOLD_MS, MAX_VALID_FOR_MS, VERSION};

/// The value of a number in a report if the agent does not know the number.
pub const UNKNOWN: u32 = u32::MAX;

/// The kind of a datagram. The MAC covers the kind, so a request cannot be changed into a report.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Requests the report of a backend. The fields of the report are zero.
    Request = 1,
    /// The report in reply to a request. It contains the request's nonce.
    Answer = 2,
    /// A report without a request, sent to subscribers when the readiness has changed.
    Push = 3,
}

/// The readiness of a backend in its reports.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Readiness {
    /// The agent does not know the readiness, or the datagram is not a report.
    Unknown = 0,
    /// The backend accepts requests.
    Ready = 1,
    /// The backend serves, but requests that clients open no new connections ("Site Reliability
    /// Engineering", chapter 20).
    LameDuck = 2,
    /// The backend accepts no requests.
    Down = 3,
}

/// Why bytes are not a valid datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Malformed {
    /// The length is not [`BYTES`].
    Length,
    /// The version is not [`VERSION`].
    Version,
    /// The kind is not a [`Kind`].
    Kind,
    /// The readiness is not a [`Readiness`].
    Readiness,
    /// The name is invalid: an unknown protocol, an address that does not belong to one host or
    /// needs a scope, or port 0.
    Name,
}

/// A datagram as it is sent. Integers are in network order, times in milliseconds. A datagram of
/// which all bytes are zero is invalid.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Datagram {
    /// [`VERSION`].
    pub version: u8,
    /// A [`Kind`].
    pub kind: u8,
    /// A [`Readiness`].
    pub readiness: u8,
    /// The protocol of the backend's name, as an IP protocol number.
    pub protocol: u8,
    /// The number of the key that authenticates the datagram.
    pub key_id: Be16,
    /// The port of the backend's name.
    pub port: Be16,
    /// The address of the backend's name.
    pub address: Address,
    /// A number that rises with each start of the agent.
    pub incarnation: Be32,
    /// A number that rises with each change of the report, within an incarnation.
    pub counter: Be32,
    /// A random number that the client draws for a request and that the agent copies into the
    /// answer. The nonce is compared as bytes, so its byte order does not matter.
    pub nonce: u64,
    /// A value that the agent computes for the receiver's address and sends in a report. The client
    /// copies the cookie from the previous report into a request, to prove to the agent that the
    /// client receives datagrams at its address. The cookie is also compared as bytes.
    pub cookie: u64,
    /// Requests per second, in thousandths, or [`UNKNOWN`].
    pub qps: Be32,
    /// Errors per second, in thousandths, or [`UNKNOWN`].
    pub eps: Be32,
    /// Utilization of the backend's capacity, in thousandths, or [`UNKNOWN`].
    pub utilization: Be32,
    /// How long the report is valid.
    pub valid_for: Be32,
    /// How long a silent backend remains a lame duck.
    pub hold: Be32,
    /// The length of the window over which the load was measured. Saturates at the largest number.
    pub window: Be16,
    /// How long ago the window ended. Saturates at the largest number.
    pub age: Be16,
    /// SipHash-2-4 of all bytes before it, lowest byte first.
    mac: [u8; 8],
}
const _: () = assert!(size_of::<Datagram>() == BYTES && BYTES == REPORT_WORDS * 8);
const _: () = assert!(core::mem::offset_of!(Datagram, mac) == AUTHENTICATED_BYTES);

/// A datagram as the input of the MAC.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Parts {
    authenticated: [u64; AUTHENTICATED_BYTES / 8],
    mac: u64,
}

impl Datagram {
    /// A datagram about a backend, with zero in the fields of the report.
    pub fn about(kind: Kind, protocol: u8, backend: SocketAddr) -> Self {
        Self {
            version: VERSION,
            kind: kind as u8,
            protocol,
            port: Be16::from_host(backend.port()),
            address: backend.ip().into(),
            ..Self::zeroed()
        }
    }

    /// The datagram that consists of these words.
    #[inline(always)]
    pub fn in_words(words: &[u64; REPORT_WORDS]) -> &Self {
        bytemuck::cast_ref(words)
    }

    /// The datagram that consists of these words, mutable.
    #[inline(always)]
    pub fn in_words_mut(words: &mut [u64; REPORT_WORDS]) -> &mut Self {
        bytemuck::cast_mut(words)
    }

    /// The words of the datagram.
    pub fn words(self) -> [u64; REPORT_WORDS] {
        bytemuck::cast(self)
    }

    /// Parses the bytes of a packet. The MAC is not checked.
    ///
    /// # Errors
    /// Why the bytes are not a valid datagram.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let datagram: Self = bytemuck::try_pod_read_unaligned(bytes).map_err(|_| Malformed::Length)?;
        datagram.check()?;
        Ok(datagram)
    }

    /// Checks every field except the MAC.
    ///
    /// # Errors
    /// The first invalid field.
    #[inline(always)]
    pub fn check(&self) -> Result<(), Malformed> {
        if self.version != VERSION {
            return Err(Malformed::Version);
        }
        if self.kind().is_none() {
            return Err(Malformed::Kind);
        }
        if self.readiness().is_none() {
            return Err(Malformed::Readiness);
        }
        if !matches!(self.protocol, IPPROTO_TCP | IPPROTO_UDP)
            || self.port.to_host() == 0
            || !is_of_one_host(self.address)
        {
            return Err(Malformed::Name);
        }
        Ok(())
    }

    /// The kind; `None` if it is invalid.
    #[inline(always)]
    pub const fn kind(&self) -> Option<Kind> {
        Some(match self.kind {
            1 => Kind::Request,
            2 => Kind::Answer,
            3 => Kind::Push,
            _ => return None,
        })
    }

    /// The readiness; `None` if it is invalid.
    #[inline(always)]
    pub const fn readiness(&self) -> Option<Readiness> {
        Some(match self.readiness {
            0 => Readiness::Unknown,
            1 => Readiness::Ready,
            2 => Readiness::LameDuck,
            3 => Readiness::Down,
            _ => return None,
        })
    }

    /// The number of the report; zero if the datagram is not a report.
    #[inline(always)]
    pub const fn base(&self) -> ReportBase {
        ReportBase { incarnation: self.incarnation.to_host(), counter: self.counter.to_host() }
    }

    /// How long the report is valid, in milliseconds, at most [`MAX_VALID_FOR_MS`].
    #[inline(always)]
    pub const fn valid_for_ms(&self) -> u32 {
        let valid_for = self.valid_for.to_host();
        if valid_for < MAX_VALID_FOR_MS { valid_for } else { MAX_VALID_FOR_MS }
    }

    /// How long a silent backend remains a lame duck, in milliseconds, at most [`MAX_HOLD_MS`]. The
    /// result is at least the time for which the report is valid, because the backend does not
    /// count as silent before that time has passed.
    #[inline(always)]
    pub const fn hold_ms(&self) -> u32 {
        let (hold, valid_for) = (self.hold.to_host(), self.valid_for_ms());
        let hold = if hold < MAX_HOLD_MS { hold } else { MAX_HOLD_MS };
        if hold < valid_for { valid_for } else { hold }
    }

    /// The backend's name in the form of kernel maps.
    #[inline(always)]
    pub const fn name(&self) -> SenderName {
        SenderName { address: self.address, port: self.port, protocol: self.protocol, _reserved: 0 }
    }

    /// The backend's address as in the endpoint list.
    pub fn backend(&self) -> SocketAddr {
        socket_addr(self.address, self.port)
    }

    /// The datagram with its message authentication code (MAC) under a key.
    #[must_use]
    #[inline(always)]
    pub fn sealed(mut self, key: Key) -> Self {
        self.seal(&key);
        self
    }

    /// Sets the MAC under a key.
    #[inline(always)]
    pub fn seal(&mut self, key: &Key) {
        self.mac = self.mac_under(key).to_le_bytes();
    }

    /// Whether the MAC is valid under a key.
    #[inline(always)]
    pub fn is_authentic(&self, key: Key) -> bool {
        u64::from_le_bytes(self.mac) == self.mac_under(&key)
    }

    #[inline(always)]
    fn mac_under(&self, key: &Key) -> u64 {
        let Parts { authenticated, .. } = bytemuck::cast_ref(self);
        siphash(key, authenticated)
    }

    /// The bytes to send.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::bytes_of(self)
    }
}

/// Whether an address identifies one host, and the same host everywhere: it is not unspecified, not
/// a group, and not link-local (such an address needs a scope).
#[inline(always)]
pub fn is_of_one_host(address: Address) -> bool {
    match address.as_mapped() {
        Some(v4) => {
            let bits = v4.to_host();
            let is_link_local = bits >> 16 == 0xa9fe;
            // Groups, reserved addresses and broadcast begin at 224.0.0.0.
            bits != 0 && bits < 0xe000_0000 && !is_link_local
        }
        None => {
            let first = address.words[0].to_host();
            let is_link_local = first >> 22 == 0xfe80 >> 6;
            let is_of_group = first >> 24 == 0xff;
            address != Address::UNSPECIFIED && !is_link_local && !is_of_group
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::net::IpAddr;
    use std::string::ToString;

    use proptest::prelude::*;

    use super::*;

    const KEY: Key = Key::from_bytes(*b"of sixteen bytes");

    fn backend() -> SocketAddr {
        "10.1.2.3:8080".parse().expect("the address is valid")
    }

    fn report() -> Datagram {
        Datagram {
            readiness: Readiness::LameDuck as u8,
            key_id: Be16::from_host(0x0102),
            incarnation: Be32::from_host(0x0304_0506),
            counter: Be32::from_host(7),
            nonce: u64::from_le_bytes(*b"nonceabc"),
            cookie: u64::from_le_bytes(*b"cookieab"),
            qps: Be32::from_host(100_000),
            eps: Be32::from_host(UNKNOWN),
            utilization: Be32::from_host(600),
            valid_for: Be32::from_host(10_000),
            hold: Be32::from_host(600_000),
            window: Be16::from_host(2_000),
            age: Be16::from_host(1_000),
            ..Datagram::about(Kind::Answer, IPPROTO_TCP, backend())
        }
    }

    /// The test compares the layout byte by byte. Another implementation computed the MAC.
    #[test]
    fn a_report_has_the_documented_layout() {
        let mut expected = std::vec![1, 2, 2, 6, 1, 2, 0x1f, 0x90];
        expected.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, 3]);
        expected.extend([3, 4, 5, 6, 0, 0, 0, 7]);
        expected.extend(b"nonceabccookieab");
        expected.extend([0, 1, 0x86, 0xa0, 0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0x58]);
        expected.extend([0, 0, 0x27, 0x10, 0, 9, 0x27, 0xc0, 0x07, 0xd0, 0x03, 0xe8]);
        let sealed = report().sealed(KEY);
        let (authenticated, mac) = sealed.bytes().split_at(AUTHENTICATED_BYTES);
        assert_eq!(authenticated, expected);
        assert_eq!(mac, [0xa4, 0xa8, 0xc4, 0x8b, 0x74, 0x32, 0x12, 0x1c]);
        let parsed = Datagram::parse(sealed.bytes()).expect("the bytes are a datagram");
        assert_eq!(parsed, sealed);
        assert_eq!((parsed.kind(), parsed.readiness()), (Some(Kind::Answer), Some(Readiness::LameDuck)));
        assert_eq!(parsed.backend(), backend());
    }

    #[test]
    fn malformed_datagrams_are_rejected_with_the_reason() {
        let good = report().sealed(KEY);
        for length in (0..BYTES).chain([BYTES + 1]) {
            let mut bytes = good.bytes().to_vec();
            bytes.resize(length, 0);
            assert_eq!(Datagram::parse(&bytes), Err(Malformed::Length), "{length} bytes");
        }
        let with = |change: fn(&mut Datagram)| {
            let mut datagram = good;
            change(&mut datagram);
            Datagram::parse(datagram.bytes())
        };
        assert_eq!(with(|datagram| datagram.version = 0), Err(Malformed::Version));
        assert_eq!(with(|datagram| datagram.version = 2), Err(Malformed::Version));
        assert_eq!(with(|datagram| datagram.kind = 0), Err(Malformed::Kind));
        assert_eq!(with(|datagram| datagram.kind = 4), Err(Malformed::Kind));
        assert_eq!(with(|datagram| datagram.readiness = 4), Err(Malformed::Readiness));
        assert_eq!(with(|datagram| datagram.protocol = 0), Err(Malformed::Name));
        assert_eq!(with(|datagram| datagram.port = Be16::from_host(0)), Err(Malformed::Name));
        assert_eq!(
            with(|datagram| datagram.protocol = IPPROTO_UDP).map(|datagram| datagram.protocol),
            Ok(IPPROTO_UDP)
        );
    }

    #[test]
    fn a_name_is_the_address_of_one_host() {
        for (address, is_one) in [
            ("10.0.0.1", true),
            ("127.0.0.1", true),
            ("169.253.0.1", true),
            ("169.254.0.1", false),
            ("0.0.0.0", false),
            ("223.255.255.255", true),
            ("224.0.0.1", false),
            ("255.255.255.255", false),
            ("::1", true),
            ("2001:db8::1", true),
            ("fd00::1", true),
            ("::", false),
            ("fe80::1", false),
            ("febf::1", false),
            ("fec0::1", true),
            ("ff02::1", false),
        ] {
            let ip: IpAddr = address.parse().expect("the address is valid");
            let datagram = Datagram::about(Kind::Request, IPPROTO_TCP, SocketAddr::new(ip, 80));
            let expected = if is_one { Ok(()) } else { Err(Malformed::Name) };
            assert_eq!(datagram.check(), expected, "{address}");
            assert_eq!(datagram.backend().ip().to_string(), address);
        }
    }

    proptest! {
        /// The test changes one bit of the message or of the MAC, under any key.
        #[test]
        fn a_change_of_any_bit_invalidates_the_mac(bit in 0..8 * BYTES, key: [u8; 16]) {
            let key = Key::from_bytes(key);
            let good = report().sealed(key);
            prop_assert!(good.is_authentic(key));
            let mut bytes = good.bytes().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            if let Ok(changed) = Datagram::parse(&bytes) {
                prop_assert!(!changed.is_authentic(key));
            }
        }

        #[test]
        fn parsed_datagrams_have_the_bytes_of_their_input(bytes: [u8; BYTES]) {
            if let Ok(datagram) = Datagram::parse(&bytes) {
                prop_assert_eq!(datagram.bytes(), &bytes[..]);
            }
        }
    }
}
