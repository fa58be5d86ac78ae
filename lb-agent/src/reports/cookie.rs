//! Cookies: how the agent knows, without remembering anybody, that an address is its asker's and what was said to it last.
//!
//! A cookie is 48 bits of a SipHash of the asker's address, the backend's name, the epoch and the number of the readiness's last
//! change, under a secret of the agent's, and that number in the clear. Whoever returns it has read what was sent to the address.
//! Guessing one takes the backend's key and 2^47 datagrams.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use lb_common::wire::{Key, siphash};

use crate::name::Name;

/// A cookie is good in the epoch in which it was made and in the next: for ten minutes at least, which is longer than any interval
/// at which clients ask.
const EPOCH: Duration = Duration::from_mins(10);

/// The bits that have the number of the change.
const CHANGE: u64 = 0xffff;

/// Makes and recognises cookies.
pub struct Cookies {
    secret: Key,
    start: Instant,
}

impl Cookies {
    /// Under this secret, with the first epoch from now on.
    pub const fn new(secret: Key, now: Instant) -> Self {
        Self { secret, start: now }
    }

    /// The cookie for an asker that is told of the change with this number.
    pub fn cookie(&self, name: Name, asker: SocketAddr, change: u16, now: Instant) -> u64 {
        self.of_epoch(name, asker, change, self.epoch(now))
    }

    /// Which change the asker has heard of, if the cookie is one of its own.
    pub fn heard(&self, cookie: u64, name: Name, asker: SocketAddr, now: Instant) -> Option<u16> {
        let change = u16::try_from(cookie & CHANGE).unwrap_or_default();
        let epoch = self.epoch(now);
        let good = |epoch| self.of_epoch(name, asker, change, epoch) == cookie;
        (good(epoch) || epoch.checked_sub(1).is_some_and(good)).then_some(change)
    }

    fn epoch(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_secs() / EPOCH.as_secs()
    }

    fn of_epoch(&self, name: Name, asker: SocketAddr, change: u16, epoch: u64) -> u64 {
        let [a, b] = words(asker.ip());
        let [c, d] = words(name.address().ip());
        let numbers = [asker.port(), name.address().port(), name.protocol().number().into(), change];
        let numbers = numbers.into_iter().fold(0, |word: u64, number| word << 16 | u64::from(number));
        siphash(self.secret, [a, b, c, d, numbers, epoch]) & !CHANGE | u64::from(change)
    }
}

fn words(ip: IpAddr) -> [u64; 2] {
    let bits = match ip.to_canonical() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
        IpAddr::V6(v6) => v6.to_bits(),
    };
    #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
    [(bits >> 64) as u64, bits as u64]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> Name {
        "10.0.0.1:80".parse().unwrap()
    }

    fn asker() -> SocketAddr {
        "192.0.2.7:9467".parse().unwrap()
    }

    #[test]
    fn a_cookie_is_good_in_its_epoch_and_the_next() {
        let now = Instant::now();
        let cookies = Cookies::new(Key::from_bytes([7; 16]), now);
        let cookie = cookies.cookie(name(), asker(), 3, now + EPOCH);
        let heard = |epochs: u32| cookies.heard(cookie, name(), asker(), now + EPOCH * epochs);
        assert_eq!([0, 1, 2, 3].map(heard), [None, Some(3), Some(3), None]);
        let end = now + EPOCH * 3 - Duration::from_millis(1);
        assert_eq!(cookies.heard(cookie, name(), asker(), end), Some(3));
    }

    #[test]
    fn a_cookie_is_of_one_asker_one_backend_one_change_and_one_agent() {
        let now = Instant::now();
        let cookies = Cookies::new(Key::from_bytes([7; 16]), now);
        let cookie = cookies.cookie(name(), asker(), 3, now);
        let mut other = asker();
        other.set_port(9468);
        assert_eq!(cookies.heard(cookie, name(), other, now), None);
        assert_eq!(cookies.heard(cookie, name(), "192.0.2.8:9467".parse().unwrap(), now), None);
        assert_eq!(cookies.heard(cookie, "10.0.0.1:80/udp".parse().unwrap(), asker(), now), None);
        assert_eq!(cookies.heard(cookie, "10.0.0.1:81".parse().unwrap(), asker(), now), None);
        assert_eq!(cookies.heard(cookie ^ 1, name(), asker(), now), None, "the number is authenticated");
        assert_eq!(cookies.heard(0, name(), asker(), now), None);
        let restarted = Cookies::new(Key::from_bytes([8; 16]), now);
        assert_eq!(restarted.heard(cookie, name(), asker(), now), None);
        assert_eq!(cookies.heard(cookie, name(), "[::ffff:192.0.2.7]:9467".parse().unwrap(), now), Some(3));
    }
}
