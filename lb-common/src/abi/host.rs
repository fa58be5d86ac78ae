//! The data that all client tasks of a host share in the kernel: until when each reporting backend
//! is a lame duck, the register of these backends, and the last accepted report of each. (A report
//! is accepted if it passes all checks.) The data also contains the addresses at which a kernel
//! program receives reports, and that program's counters.
//!
//! This is a separate ABI: one set of these maps exists per host, under
//! `<pins>/host-v<HOST_ABI_VERSION>/`, beside the directories of the clients. Clients of every ABI
//! version that supports reports read the same set. Any change of a layout here needs a new
//! [`HOST_ABI_VERSION`], but not a new version of the clients' maps.

use bytemuck::{Pod, Zeroable};

use crate::net::{Address, Be16};

/// The version of everything in this module; a part of the pin path.
pub const HOST_ABI_VERSION: u32 = 2;

/// Number of report ids. The maps [`map::VERDICTS`] (half a megabyte) and [`map::LAST_REPORTS`]
/// (two megabytes) each have this number of elements.
pub const REPORT_IDS: u32 = 65_536;

/// The report id of a backend without reports. The verdict with this id is always zero.
pub const NO_REPORT: u32 = 0;

/// Maximum number of backends that can have a report id at the same time: all ids except
/// [`NO_REPORT`].
pub const MAX_SENDERS: u32 = REPORT_IDS - 1;

/// Names of the maps as the objects declare them and as they are pinned.
pub mod map {
    /// Array, memory-mapped: report id to [`Verdict`](super::Verdict).
    pub const VERDICTS: &str = "verdicts";
    /// Hash: [`SenderName`](super::SenderName) to [`Sender`](super::Sender).
    pub const SENDERS: &str = "senders";
    /// Array, memory-mapped: report id to [`LastReport`](super::LastReport).
    pub const LAST_REPORTS: &str = "last_reports";
    /// Hash: an [`Address`](crate::net::Address) at which the daemon listens, to
    /// [`Listener`](super::Listener).
    pub const LISTENERS: &str = "listeners";
    /// Per-CPU array with one element: [`Receptions`](super::Receptions).
    pub const RECEPTIONS: &str = "receptions";

    /// The names of all maps.
    pub const ALL: [&str; 5] = [VERDICTS, SENDERS, LAST_REPORTS, LISTENERS, RECEPTIONS];
}

/// Until when a backend is a lame duck by its own report. Written as one word by the receiver of
/// the backend's reports, which is the daemon or a kernel program. Programs of clients read the
/// value for a backend that they have chosen, or that they could choose in place of a lame duck.
/// The value is a time, so it expires even if the receiver has stopped.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Verdict {
    /// The time until which the backend is a lame duck, in nanoseconds of `CLOCK_MONOTONIC`; 0 if
    /// the backend's last report does not make it a lame duck.
    pub lame_until_ns: u64,
}
const _: () = assert!(size_of::<Verdict>() == 8);

impl Verdict {
    /// Whether the backend is a lame duck at the time `now_ns`.
    #[inline(always)]
    pub const fn is_lame(self, now_ns: u64) -> bool {
        self.lame_until_ns > now_ns
    }
}

/// A backend's name in reports: its protocol, address and port as in the endpoint list.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct SenderName {
    /// The backend's address.
    pub address: Address,
    /// The backend's port.
    pub port: Be16,
    /// The IP protocol number.
    pub protocol: u8,
    /// Zero.
    pub _reserved: u8,
}
const _: () = assert!(size_of::<SenderName>() == 20);

/// The entry of a reporting backend in the register of senders. The entry outlives the daemon.
/// Written only by the daemon.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Sender {
    /// The backend's report id, 1 to [`MAX_SENDERS`].
    pub id: u32,
    /// Zero.
    pub _reserved: u32,
    /// The keys that authenticate the backend's reports; one or two of them are valid at a time.
    pub keys: [SenderKey; 2],
}
const _: () = assert!(size_of::<Sender>() == 56);

/// The number of a backend's last report: one word, so that a single compare-and-swap changes it.
/// As a number, the word of a later report is larger than the word of an earlier report. The word
/// is zero if there was no report.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ReportBase {
    /// The counter in the report.
    pub counter: u32,
    /// The incarnation of the agent that sent the report.
    pub incarnation: u32,
}
one_word!(ReportBase, u64);

/// The last accepted report and the last request of a backend; the next report is judged by
/// comparison with them (`lb_report::receive::judge`). Each of the four words of the value is
/// written with a single store. The daemon stores the nonce when it sends a request. The receiver
/// of a report, which is the daemon or a kernel program, clears the nonce and writes the other
/// words.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct LastReport {
    /// The number of the last accepted report.
    pub base: ReportBase,
    /// The highest number of any accepted report. It exceeds `base` if an agent has restarted with
    /// lower numbers, because its disk was lost and its clock was set back.
    pub highest: ReportBase,
    /// The nonce of the unanswered request; 0 if there is none.
    pub nonce: u64,
    /// When a repeated push was last passed on to the daemon, in nanoseconds of `CLOCK_MONOTONIC`.
    /// Written only by the kernel program.
    pub repeated_ns: u64,
}
const _: () = assert!(size_of::<LastReport>() == 32);

/// Maximum number of addresses at which a kernel program processes reports. Only the daemon's
/// socket receives reports that are sent to further addresses.
pub const MAX_LISTENERS: u32 = 1_024;

/// How a kernel program processes datagrams that are sent to an address at which the daemon
/// listens. Written by the daemon.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Listener {
    /// 1 if the program passes unaccepted datagrams on to the daemon's socket, 0 if it drops them;
    /// the program counts them in either case. The daemon stores 1 if it polls a backend that has
    /// no entry in [`map::SENDERS`], because the program accepts no report of such a backend.
    pub passes_unbelieved: u32,
}
const _: () = assert!(size_of::<Listener>() == 4);

/// Number of possible results when a kernel program processes a datagram.
pub const RECEPTIONS: usize = 10;

/// Number of datagrams that a kernel program processed on one CPU, for each result.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Receptions {
    /// The counter of each result, indexed by `lb_report::receive::Reception::number`.
    pub counts: [u64; RECEPTIONS],
}

/// A key that authenticates reports of a backend. Written by the daemon in [`map::SENDERS`], and by
/// an agent in a [`PreparedAnswer`](super::responder::PreparedAnswer).
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct SenderKey {
    /// The key's number, 1 or more; 0 if this entry contains no key.
    pub id: u16,
    /// Zero.
    pub _reserved: [u8; 6],
    /// The key, in the form that `lb_report::wire::Key::from_bytes` expects.
    pub key: [u8; 16],
}
const _: () = assert!(size_of::<SenderKey>() == 24);

// Implemented by hand, because the output must not show the key.
impl core::fmt::Debug for SenderKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SenderKey").field("id", &self.id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_is_lame_until_its_time() {
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
