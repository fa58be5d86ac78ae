//! The data that an agent shares with the kernel program that answers requests in the agent's
//! place. None of it is pinned: one process owns the maps and the program, and creates the maps
//! when it starts.

use bytemuck::{Pod, Zeroable};

use super::host::{SenderKey, SenderName};
use crate::net::{Address, Be16};

/// Maximum backends with a prepared answer. This is enough for all backends in an agent's
/// configuration and all backends of registered programs, even if no backend is in both.
pub const MAX_ANSWERED: u32 = 512;

/// Maximum subscribers that the program records until the agent reads them; the agent stores at
/// most the same number per backend. If there are more, the kernel evicts the subscriber whose last
/// request is oldest.
pub const MAX_SUBSCRIBERS: u32 = 65_536;

/// Maximum number of addresses of this host at which the program answers requests.
pub const MAX_ADDRESSES: u32 = 1_024;

/// Maximum number of hardware addresses of this host's interfaces: the program answers only frames
/// that are sent to one of them.
pub const MAX_STATIONS: u32 = 64;

/// The hardware address of a network interface (IEEE 802), followed by two zero bytes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Pod, Zeroable)]
pub struct Station(u64);

impl From<[u8; 6]> for Station {
    #[inline(always)]
    fn from([a, b, c, d, e, f]: [u8; 6]) -> Self {
        Self(u64::from_ne_bytes([a, b, c, d, e, f, 0, 0]))
    }
}

/// Names of the maps as the object declares them.
pub mod map {
    /// Hash: [`SenderName`](super::SenderName) to [`PreparedAnswer`](super::PreparedAnswer).
    pub const ANSWERS: &str = "answers";
    /// Hash used as a set: an [`Address`](super::Address) of this host at which requests are
    /// answered. The value is one unused byte.
    pub const ADDRESSES: &str = "addresses";
    /// Hash used as a set: a [`Station`](super::Station) of this host. The value is one unused
    /// byte.
    pub const STATIONS: &str = "stations";
    /// Hash that evicts the least recently used entry: [`SubscriberName`](super::SubscriberName) to
    /// [`Subscriber`](super::Subscriber).
    pub const SUBSCRIBERS: &str = "subscribers";
    /// Per-CPU array with one element: [`Counts`](super::Counts).
    pub const COUNTS: &str = "counts";
}

/// The answer to requests for one backend, valid until a deadline. Written by the agent every
/// second and after each change.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct PreparedAnswer {
    /// When the answer was written, in nanoseconds of `CLOCK_MONOTONIC`. The program adds the time
    /// since then to the age of the load in the report.
    pub written_ns: u64,
    /// Until when the answer is valid, in nanoseconds of `CLOCK_MONOTONIC`. After this time, the
    /// readiness of the backend is unknown.
    pub deadline_ns: u64,
    /// The number of the last change of the backend's readiness.
    pub change: u16,
    /// Zero.
    pub _reserved: [u8; 6],
    /// The backend's keys, one of which authenticates an answer; one or two are valid at a time.
    pub keys: [SenderKey; 2],
    /// The report as the bytes of a datagram (`lb_report::wire::Datagram`). The program fills in
    /// the fields that differ per answer: key, nonce, cookie and MAC.
    pub report: [u64; REPORT_WORDS],
    /// A checksum of the words before it. A copy that was read during a write does not match its
    /// checksum.
    pub check: u64,
}
const _: () = assert!(size_of::<PreparedAnswer>() == WORDS * 8);

/// Number of 64-bit words of a report.
pub const REPORT_WORDS: usize = 10;

/// Number of 64-bit words of a [`PreparedAnswer`].
pub const WORDS: usize = 3 + 2 * 3 + REPORT_WORDS + 1;

impl PreparedAnswer {
    /// Fills in the checksum.
    #[must_use]
    pub fn checked(mut self) -> Self {
        let words: &[u64; WORDS] = bytemuck::cast_ref(&self);
        self.check = words[..WORDS - 1].iter().fold(0, |check, word| mixed_in(check, *word));
        self
    }

    /// Reads all words of an answer by calling `word` with their indexes, and stores the words in
    /// `to`. Returns whether the checksum matches the words.
    #[inline(always)]
    pub fn copy(to: &mut Self, word: impl Fn(usize) -> u64) -> bool {
        let words: &mut [u64; WORDS] = bytemuck::cast_mut(to);
        let (mut check, mut at) = (0, 0);
        // Bound: all words but the last. The checksum is computed in the same loop, so that a
        // kernel program need not load the words again.
        while at < WORDS - 1 {
            let read = word(at);
            words[at] = read;
            check = mixed_in(check, read);
            at += 1;
        }
        word(WORDS - 1) == check
    }
}

/// Adds a word to the checksum `check`, by a rotation and a multiplication by an odd number. The
/// checksum detects accidental changes, not malicious ones.
#[inline(always)]
const fn mixed_in(check: u64, word: u64) -> u64 {
    (check.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
}

/// A client that subscribes to changes of a backend. Written by the kernel program.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct SubscriberName {
    /// The name of the backend.
    pub backend: SenderName,
    /// The client's address.
    pub address: Address,
    /// The client's port.
    pub port: Be16,
    /// Zero.
    pub _reserved: u16,
}
const _: () = assert!(size_of::<SubscriberName>() == 40);

/// The content of a subscriber's last request. Written by the kernel program; the agent reads and
/// removes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Subscriber {
    /// When the request arrived, in nanoseconds of `CLOCK_MONOTONIC`.
    pub asked_ns: u64,
    /// The address of this host to which the request was sent.
    pub local: Address,
    /// The number of the key that authenticated the request.
    pub key_id: u16,
    /// The number of the change that the request acknowledged.
    pub heard: u16,
    /// Zero.
    pub _reserved: u32,
}
const _: () = assert!(size_of::<Subscriber>() == 32);

/// Number of reasons for which the program may refuse a request.
pub const REFUSALS: usize = 9;

/// Number of requests on one CPU, for each result. Written by the kernel program.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Counts {
    /// Answered requests.
    pub answered: u64,
    /// Refused requests, indexed by `lb_report::answer::Refused::number`.
    pub refused: [u64; REFUSALS],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mixture_of_two_answers_fails_its_check() {
        let one = PreparedAnswer { written_ns: 1, ..PreparedAnswer::zeroed() }.checked();
        let other = PreparedAnswer { written_ns: 2, change: 1, ..PreparedAnswer::zeroed() }.checked();
        let [from, to]: [[u64; WORDS]; 2] = [one, other].map(bytemuck::cast);
        let differ = (0..WORDS).filter(|at| from[*at] != to[*at]).count();
        assert_eq!(differ, 3);
        for first in 0..=WORDS {
            let mut words = to;
            words[..first].copy_from_slice(&from[..first]);
            let mut copy = PreparedAnswer::zeroed();
            let is_whole = PreparedAnswer::copy(&mut copy, |at| words[at]);
            assert_eq!(is_whole, words == from || words == to, "first {first} words of the old answer");
        }
        assert!(!PreparedAnswer::copy(&mut PreparedAnswer::zeroed(), |_| 1));
    }
}
