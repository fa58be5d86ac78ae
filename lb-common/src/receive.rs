//! How a frame that may hold a report is taken in before the host's network stack sees it: a function of the frame and of what the
//! maps of the host hold. The kernel program calls it with these maps, tests with maps of their own.
//!
//! The questions come in the order of what they cost: whether it is for us at all, its length and layout, who is meant, its kind and
//! number, and at last its message authentication code (MAC).

use bytemuck::cast;

use crate::abi::host::{LastReport, Listener, SenderName};
use crate::frame::{Frame, udp_to};
use crate::net::{Address, Be16};
use crate::wire::{ACKNOWLEDGED_FOR_MS, BYTES, Datagram, Disbelieved, Key, judge, lame_until_ns};

/// The maps of the host, as whoever takes reports in reads and writes them.
pub trait Maps {
    /// An entry of the register.
    type Sender: Copy;

    /// What holds of an address, if the daemon listens there.
    fn listener(&self, address: Address) -> Option<Listener>;
    /// The entry of a backend.
    fn sender(&self, name: &SenderName) -> Option<Self::Sender>;
    /// Its report id.
    fn id(&self, sender: Self::Sender) -> u32;
    /// Its key of this number.
    fn key(&self, sender: Self::Sender, number: u16) -> Option<Key>;
    /// What was believed of it last.
    fn last(&self, id: u32) -> Option<LastReport>;
    /// Puts what is believed from now on in place of what was; false if another CPU was faster.
    fn believe(&self, id: u32, before: LastReport, after: LastReport) -> bool;
    /// Says when a push that had come before was passed on.
    fn set_repeated_ns(&self, id: u32, now_ns: u64);
    /// Until when it is a lame duck.
    fn lame_until_ns(&self, id: u32) -> u64;
    /// Says until when it is one, unless another CPU has said something else than `before` meanwhile.
    fn set_lame_until_ns(&self, id: u32, before: u64, after: u64);
}

/// What becomes of a datagram that is taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reception {
    /// It was believed: stored, and passed on to the daemon.
    Believed,
    /// Another CPU stored a report of this backend at the same moment: it is passed on to the daemon, which judges it.
    Contended,
    /// It is none of this version.
    Malformed,
    /// It is not believed.
    Disbelieved(Disbelieved),
}

/// How many kinds of them there are.
pub const RECEPTIONS: usize = 3 + Disbelieved::ALL.len();

impl Reception {
    /// The words for all of them in metrics and JSON, by their numbers.
    pub const NAMES: [&str; RECEPTIONS] = {
        let mut names = ["believed", "contended", "malformed", "", "", "", "", "", "", ""];
        let mut at = 0;
        while at < Disbelieved::ALL.len() {
            names[3 + at] = Disbelieved::ALL[at].name();
            at += 1;
        }
        names
    };

    /// By which it is counted.
    #[inline(always)]
    pub const fn number(self) -> u32 {
        match self {
            Self::Believed => 0,
            Self::Contended => 1,
            Self::Malformed => 2,
            Self::Disbelieved(why) => 3 + why as u32,
        }
    }
}

/// What was found in a frame for the daemon's socket, and whether the socket is to have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// What became of it.
    pub reception: Reception,
    /// Whether it goes on to the socket. Reports that are believed do: the daemon wants their load and round trip as well.
    pub goes_on: bool,
}

impl Received {
    const fn dropped(reception: Reception) -> Option<Self> {
        Some(Self { reception, goes_on: false })
    }

    const fn disbelieved(why: Disbelieved) -> Option<Self> {
        Self::dropped(Reception::Disbelieved(why))
    }
}

/// Takes a frame in. `None` if it is not for the daemon's port at one of its addresses: nothing is done with it then.
#[inline(always)]
pub fn receive<F: Frame + ?Sized, M: Maps>(
    frame: &F,
    maps: &M,
    port: Be16,
    now_ns: impl FnOnce() -> u64,
) -> Option<Received> {
    let udp = udp_to(frame, port)?;
    let listener = maps.listener(udp.to)?;
    let words = if udp.has(BYTES) { frame.datagram(udp.payload()) } else { None };
    let Some(words) = words else { return Received::dropped(Reception::Malformed) };
    let datagram: Datagram = cast(words.map(u64::to_le));
    if datagram.check().is_err() {
        return Received::dropped(Reception::Malformed);
    }
    let Some(sender) = maps.sender(&datagram.name()) else {
        let goes_on = listener.passes_unknown != 0;
        return Some(Received { reception: Reception::Disbelieved(Disbelieved::UnknownName), goes_on });
    };
    let id = maps.id(sender);
    let Some(last) = maps.last(id) else { return Received::disbelieved(Disbelieved::UnknownName) };
    let now_ns = now_ns();
    let judged = judge(last, &datagram);
    if let Err(why) = judged
        && !is_to_be_acknowledged_again(last, &datagram, why, now_ns)
    {
        return Received::disbelieved(why);
    }
    let Some(key) = maps.key(sender, datagram.key_id.to_host()) else {
        return Received::disbelieved(Disbelieved::UnknownKey);
    };
    if !datagram.is_authentic(key) {
        return Received::disbelieved(Disbelieved::Forged);
    }
    let after = match judged {
        Ok(after) => after,
        Err(why) => {
            maps.set_repeated_ns(id, now_ns);
            return Some(Received { reception: Reception::Disbelieved(why), goes_on: true });
        }
    };
    // Looked at before the report is this CPU's, so that what a later one says meanwhile is not taken back.
    let before = maps.lame_until_ns(id);
    if !maps.believe(id, last, after) {
        return Some(Received { reception: Reception::Contended, goes_on: true });
    }
    let until = lame_until_ns(&datagram, before, now_ns);
    if until != before {
        maps.set_lame_until_ns(id, before, until);
    }
    Some(Received { reception: Reception::Believed, goes_on: true })
}

/// Whether a push is the last one once more, which its agent sends until it is acknowledged: the daemon's request may have been lost.
/// Only now and then, so that nobody makes the daemon work who sends again what it has seen.
#[inline(always)]
fn is_to_be_acknowledged_again(last: LastReport, datagram: &Datagram, why: Disbelieved, now_ns: u64) -> bool {
    const APART_NS: u64 = ACKNOWLEDGED_FOR_MS as u64 * 1_000_000;
    matches!(why, Disbelieved::Replayed)
        && datagram.base().to_word() == last.base.to_word()
        && now_ns.wrapping_sub(last.repeated_ns) >= APART_NS
}
