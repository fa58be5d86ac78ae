//! What all client tasks of a host share in the kernel: until when each backend that reports is a lame duck, who reports, and what
//! was believed last; and, where a kernel program takes reports in, where it looks for them and what it has counted.
//!
//! An ABI of its own: one set of these maps exists per host, under `<pins>/host-v<HOST_ABI_VERSION>/`, beside the directories of
//! the clients. Clients of every ABI version that knows reports read the same one. Any change of a layout here is a new
//! [`HOST_ABI_VERSION`]; the clients' version stays.

use bytemuck::{Pod, Zeroable};

use crate::net::{Address, Be16};

/// The version of everything in this module; a part of the pin path.
pub const HOST_ABI_VERSION: u32 = 2;

/// Elements of [`map::VERDICTS`], one for each report id: half a megabyte, which every host can spare.
pub const REPORT_IDS: u32 = 65_536;

/// The report id of a backend of which no report is heard. Its verdict is never anything but zero.
pub const NO_REPORT: u32 = 0;

/// Names that may have a report id at a time: all ids but [`NO_REPORT`].
pub const MAX_SENDERS: u32 = REPORT_IDS - 1;

/// Names of the maps as the objects declare them and as they are pinned.
pub mod map {
    /// Array, memory-mapped: report id to [`Verdict`](super::Verdict).
    pub const VERDICTS: &str = "verdicts";
    /// Hash: [`SenderName`](super::SenderName) to [`Sender`](super::Sender).
    pub const SENDERS: &str = "senders";
    /// Array, memory-mapped: report id to [`LastReport`](super::LastReport).
    pub const LAST_REPORTS: &str = "last_reports";
    /// Hash: an [`Address`](crate::net::Address) at which the daemon listens to [`Listener`](super::Listener).
    pub const LISTENERS: &str = "listeners";
    /// Per-CPU array with one element: [`Receptions`](super::Receptions).
    pub const RECEPTIONS: &str = "receptions";

    /// All of them.
    pub const ALL: [&str; 5] = [VERDICTS, SENDERS, LAST_REPORTS, LISTENERS, RECEPTIONS];
}

/// Until when a backend is a lame duck by its own report. Written by whoever receives its reports, as one word; read by connect,
/// for the backend that it has chosen. It ends by itself, so a receiver that dies leaves nothing behind that lasts.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Verdict {
    /// `CLOCK_MONOTONIC`, nanoseconds; 0 if it is none.
    pub lame_until_ns: u64,
}
const _: () = assert!(size_of::<Verdict>() == 8);

impl Verdict {
    /// Whether it says of a backend that it is a lame duck at this time.
    #[inline(always)]
    pub const fn is_lame(self, now_ns: u64) -> bool {
        self.lame_until_ns > now_ns
    }
}

/// A backend's name, by which it reports: its protocol, address and port as the endpoint list has them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct SenderName {
    /// Its address.
    pub address: Address,
    /// Its port.
    pub port: Be16,
    /// The IP protocol number.
    pub protocol: u8,
    /// Zero.
    pub _reserved: u8,
}
const _: () = assert!(size_of::<SenderName>() == 20);

/// A backend that reports: the register of its name. It outlives the daemon. Written by the daemon alone.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Sender {
    /// Its report id, 1 to [`MAX_SENDERS`].
    pub id: u32,
    /// Zero.
    pub _reserved: u32,
    /// Its keys, of which one or two are valid at a time.
    pub keys: [SenderKey; 2],
}
const _: () = assert!(size_of::<Sender>() == 56);

/// Which report of a backend was the last: one word, so that it changes with a single compare-and-swap. As a number, a later
/// report is larger than an earlier one. All zero if there was none.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ReportBase {
    /// The counter of the report.
    pub counter: u32,
    /// The incarnation of its agent.
    pub incarnation: u32,
}
one_word!(ReportBase, u64);

/// What was believed of a backend last, and what it was asked: by this the next report is judged
/// (`lb_report::wire::judge`). Four words, each written in one piece by whoever takes reports in; the nonce by whoever asks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct LastReport {
    /// The number of the last report that was believed.
    pub base: ReportBase,
    /// The highest number that was ever believed. Numbers go back with an agent that has lost its disk or its clock.
    pub highest: ReportBase,
    /// The nonce of the request that has no answer yet; 0 if there is none.
    pub nonce: u64,
    /// When a push that had come before was passed on to the daemon for the last time, as nanoseconds of `CLOCK_MONOTONIC`. Written by
    /// the program alone.
    pub repeated_ns: u64,
}
const _: () = assert!(size_of::<LastReport>() == 32);

/// How many addresses the daemon may listen at for a kernel program to take reports in.
pub const MAX_LISTENERS: u32 = 1_024;

/// What a kernel program is to do with datagrams to an address at which the daemon listens. Written by the daemon.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Listener {
    /// 1 if what is not believed goes on to the daemon as well, which is counted all the same: where backends are asked that have no
    /// entry in [`map::SENDERS`], or answers may be for somebody behind this host, whose nonces the daemon's own are not.
    pub passes_unbelieved: u32,
}
const _: () = assert!(size_of::<Listener>() == 4);

/// How many things may become of a datagram that a kernel program takes in.
pub const RECEPTIONS: usize = 10;

/// How many datagrams a kernel program took in, of one CPU, by what became of each.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Receptions {
    /// By `lb_report::receive::Reception::number`.
    pub counts: [u64; RECEPTIONS],
}

/// A key by which reports of a backend are authentic.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct SenderKey {
    /// Its number, from 1 on; 0 if this is no key.
    pub id: u16,
    /// Zero.
    pub _reserved: [u8; 6],
    /// The key, as `lb_report::wire::Key::from_bytes` takes it.
    pub key: [u8; 16],
}
const _: () = assert!(size_of::<SenderKey>() == 24);

// It does not show what it is.
impl core::fmt::Debug for SenderKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SenderKey").field("id", &self.id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_ends_at_its_time() {
        let verdict = Verdict { lame_until_ns: 1_000 };
        assert_eq!([999, 1_000, 1_001].map(|now_ns| verdict.is_lame(now_ns)), [true, false, false]);
        assert!(!Verdict::default().is_lame(0));
    }

    #[test]
    fn a_later_report_has_the_larger_base() {
        let base = |incarnation, counter| ReportBase { counter, incarnation }.to_word();
        let in_order = [base(0, 0), base(0, u32::MAX), base(1, 0), base(1, 7), base(u32::MAX, 0)];
        assert!(in_order.is_sorted());
    }
}
