//! What an agent and the kernel program that answers requests in its place share. Nothing of it is pinned: both are of one process,
//! which makes the maps when it starts.

use bytemuck::{Pod, Zeroable};

use super::host::{SenderKey, SenderName};
use crate::net::{Address, Be16};

/// Backends that are answered for: of an agent's file and of programs that have registered, with room for all of them to be others.
pub const MAX_ANSWERED: u32 = 512;

/// Subscribers that the program writes down between two looks of the agent, which knows as many of each backend. Past them the longest
/// silent one makes room.
pub const MAX_SUBSCRIBERS: u32 = 65_536;

/// Addresses of this host that may be asked.
pub const MAX_ADDRESSES: u32 = 1_024;

/// Hardware addresses of this host's interfaces at which requests may arrive.
pub const MAX_STATIONS: u32 = 64;

/// The hardware address of a network interface (IEEE 802), and two bytes of zero.
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
    /// Hash: an [`Address`](super::Address) of this host that is asked to nothing, which is one byte.
    pub const ADDRESSES: &str = "addresses";
    /// Hash: a [`Station`](super::Station) of this host to nothing, which is one byte.
    pub const STATIONS: &str = "stations";
    /// Hash that forgets the longest unused entry: [`SubscriberName`](super::SubscriberName) to [`Subscriber`](super::Subscriber).
    pub const SUBSCRIBERS: &str = "subscribers";
    /// Per-CPU array with one element: [`Counts`](super::Counts).
    pub const COUNTS: &str = "counts";
}

/// What is answered to requests for one backend, until a deadline. Written by the agent, each second and whenever it changes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct PreparedAnswer {
    /// When it was written, as nanoseconds of `CLOCK_MONOTONIC`: the load that it tells is older by the time since.
    pub written_ns: u64,
    /// Until when it holds, likewise. Later nobody knows any more whether the backend is ready.
    pub deadline_ns: u64,
    /// The number of the readiness's last change.
    pub change: u16,
    /// Zero.
    pub _reserved: [u8; 6],
    /// The backend's keys, of which one or two are valid at a time.
    pub keys: [SenderKey; 2],
    /// The report, without what belongs to one answer: key, nonce, cookie and MAC. A datagram as it lies in memory
    /// (`lb_report::wire::Datagram`).
    pub report: [u64; REPORT_WORDS],
    /// Of the words before it: a copy that was read while this was written does not have it.
    pub check: u64,
}
const _: () = assert!(size_of::<PreparedAnswer>() == WORDS * 8);

/// Words of a report.
pub const REPORT_WORDS: usize = 10;

/// Words of a [`PreparedAnswer`].
pub const WORDS: usize = 3 + 2 * 3 + REPORT_WORDS + 1;

impl PreparedAnswer {
    /// The same with its check.
    #[must_use]
    pub fn checked(mut self) -> Self {
        let words: &[u64; WORDS] = bytemuck::cast_ref(&self);
        self.check = words[..WORDS - 1].iter().fold(0, |check, word| mixed_in(check, *word));
        self
    }

    /// Copies its words, each read by `word`, to another one. Returns whether they belong together.
    #[inline(always)]
    pub fn copy(to: &mut Self, word: impl Fn(usize) -> u64) -> bool {
        let words: &mut [u64; WORDS] = bytemuck::cast_mut(to);
        let (mut check, mut at) = (0, 0);
        // Bound: all words but the last. Mixed in at once, so that a kernel program does not have to remember them.
        while at < WORDS - 1 {
            let read = word(at);
            words[at] = read;
            check = mixed_in(check, read);
            at += 1;
        }
        word(WORDS - 1) == check
    }
}

/// Against chance, not against anybody: a word is mixed in by a rotation and the multiplication with an odd number.
#[inline(always)]
const fn mixed_in(check: u64, word: u64) -> u64 {
    (check.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
}

/// Who is told of changes of which backend.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct SubscriberName {
    /// The backend.
    pub backend: SenderName,
    /// The asker's address.
    pub address: Address,
    /// Its port.
    pub port: Be16,
    /// Zero.
    pub _reserved: u16,
}
const _: () = assert!(size_of::<SubscriberName>() == 40);

/// What an asker has shown by its last request.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Subscriber {
    /// When that came, as nanoseconds of `CLOCK_MONOTONIC`.
    pub asked_ns: u64,
    /// Which address of this host it has asked.
    pub local: Address,
    /// The number of its key.
    pub key_id: u16,
    /// The number of the change of which it has heard.
    pub heard: u16,
    /// Zero.
    pub _reserved: u32,
}
const _: () = assert!(size_of::<Subscriber>() == 32);

/// For how many reasons a request may get no answer.
pub const REFUSALS: usize = 9;

/// How many requests there were, of one CPU, by what became of each.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Counts {
    /// Those that were answered.
    pub answered: u64,
    /// Those that were not, by `lb_report::answer::Refused::number`.
    pub refused: [u64; REFUSALS],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_two_answers_shows() {
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
            assert_eq!(is_whole, words == from || words == to, "{first}");
        }
        assert!(!PreparedAnswer::copy(&mut PreparedAnswer::zeroed(), |_| 1));
    }
}
