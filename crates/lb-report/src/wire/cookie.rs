//! Cookies prove to an agent that a client receives datagrams at its address. The agent stores no
//! state for this. Cookies also identify the last change that the client has received.
//!
//! A cookie has two parts: 48 bits of a SipHash under a secret of the agent, and the number of the
//! last change of the readiness in the clear. The hash is over the client's address and port, the
//! backend's name, the epoch and the number of the change. A client that returns a cookie has read
//! a datagram that was sent to its address. To guess a cookie, an attacker needs the backend's key
//! and about 2^47 datagrams. Kernel programs make the same cookies, so either the agent or a
//! program may have sent the previous answer.

use lb_common::abi::host::SenderName;
use lb_common::net::{Address, Be16};

use super::siphash::{Key, siphash};

/// The length of an epoch. A cookie is valid in the epoch in which it was made and in the next
/// epoch, so it is valid for at least ten minutes. This is longer than any polling interval of
/// clients.
pub const EPOCH_NS: u64 = 600 * 1_000_000_000;

/// The bits of a cookie that contain the number of the change.
const CHANGE: u64 = 0xffff;

/// The source of a request; an IPv4 address is in mapped form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestSource {
    /// The source's address.
    pub address: Address,
    /// The source's port.
    pub port: Be16,
}

/// Makes cookies of the current epoch, and checks cookies of the current and the previous epoch.
#[derive(Clone, Copy)]
pub struct Cookies {
    secret: Key,
    epoch: u64,
}

impl Cookies {
    /// Cookies under a secret that was drawn `age_ns` nanoseconds ago.
    #[inline(always)]
    pub const fn new(secret: Key, age_ns: u64) -> Self {
        Self { secret, epoch: age_ns / EPOCH_NS }
    }

    /// The cookie for a requester that receives the change with this number.
    #[inline(always)]
    pub fn cookie(&self, name: &SenderName, source: &RequestSource, change: u16) -> u64 {
        self.of_epoch(name, source, change, self.epoch)
    }

    /// The number of the change that the requester has received, if the cookie is valid for this
    /// requester.
    #[inline(always)]
    pub fn acknowledged(&self, cookie: u64, name: &SenderName, source: &RequestSource) -> Option<u16> {
        let change = (cookie & CHANGE) as u16;
        let good = |epoch| self.of_epoch(name, source, change, epoch) == cookie;
        if good(self.epoch) || self.epoch > 0 && good(self.epoch - 1) { Some(change) } else { None }
    }

    #[cfg_attr(target_arch = "bpf", inline(never))]
    #[cfg_attr(not(target_arch = "bpf"), inline(always))]
    fn of_epoch(&self, name: &SenderName, source: &RequestSource, change: u16, epoch: u64) -> u64 {
        let [a, b] = words(source.address);
        let [c, d] = words(name.address);
        let numbers = (source.port.to_network() as u64) << 48
            | (name.port.to_network() as u64) << 32
            | (name.protocol as u64) << 16
            | change as u64;
        siphash(&self.secret, &[a, b, c, d, numbers, epoch]) & !CHANGE | change as u64
    }
}

#[inline(always)]
const fn words(Address { words: [a, b, c, d] }: Address) -> [u64; 2] {
    [
        (a.to_network() as u64) << 32 | b.to_network() as u64,
        (c.to_network() as u64) << 32 | d.to_network() as u64,
    ]
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::net::SocketAddr;

    use super::*;

    const SECRET: Key = Key::from_bytes([7; 16]);

    fn name(address: &str, protocol: u8) -> SenderName {
        let address: SocketAddr = address.parse().expect("the address is valid");
        let port = Be16::from_host(address.port());
        SenderName { address: address.ip().into(), port, protocol, _reserved: 0 }
    }

    fn source(address: &str) -> RequestSource {
        let address: SocketAddr = address.parse().expect("the address is valid");
        RequestSource { address: address.ip().into(), port: Be16::from_host(address.port()) }
    }

    #[test]
    fn a_cookie_is_valid_in_its_epoch_and_the_next() {
        let (name, source) = (name("10.0.0.1:80", 6), source("192.0.2.7:9467"));
        let at = |age_ns| Cookies::new(SECRET, age_ns);
        let cookie = at(EPOCH_NS).cookie(&name, &source, 3);
        let acknowledged = |age_ns| at(age_ns).acknowledged(cookie, &name, &source);
        let epochs = [0, EPOCH_NS, 2 * EPOCH_NS, 3 * EPOCH_NS - 1, 3 * EPOCH_NS];
        assert_eq!(epochs.map(acknowledged), [None, Some(3), Some(3), Some(3), None]);
    }

    #[test]
    fn a_cookie_is_valid_for_one_client_backend_change_and_agent() {
        let cookies = Cookies::new(SECRET, 0);
        let (backend, one) = (name("10.0.0.1:80", 6), source("192.0.2.7:9467"));
        let cookie = cookies.cookie(&backend, &one, 3);
        assert_eq!(cookies.acknowledged(cookie, &backend, &one), Some(3));
        for other in ["192.0.2.7:9468", "192.0.2.8:9467", "[2001:db8::7]:9467"] {
            assert_eq!(cookies.acknowledged(cookie, &backend, &source(other)), None, "{other}");
        }
        for other in [name("10.0.0.1:80", 17), name("10.0.0.1:81", 6), name("10.0.0.2:80", 6)] {
            assert_eq!(cookies.acknowledged(cookie, &other, &one), None, "{other:?}");
        }
        assert_eq!(
            cookies.acknowledged(cookie ^ 1, &backend, &one),
            None,
            "the hash covers the number of the change"
        );
        assert_eq!(cookies.acknowledged(0, &backend, &one), None);
        let restarted = Cookies::new(Key::from_bytes([8; 16]), 0);
        assert_eq!(restarted.acknowledged(cookie, &backend, &one), None);
    }
}
