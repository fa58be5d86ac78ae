//! How a flow ended, told from what the kernel shows at that moment: one set of functions, run by the kernel programs and
//! by the tests on the host. It knows nothing of maps.

use crate::abi::Phase;

/// How a flow ended. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ending {
    /// In order, by either side, after it was established; or the socket of a datagram flow was closed or went elsewhere.
    Closed = 0,
    /// The peer refused the connection.
    Refused = 1,
    /// No answer to the SYN.
    TimedOut = 2,
    /// The network said that the peer cannot be reached.
    Unreachable = 3,
    /// The peer reset the connection.
    Reset = 4,
    /// Established, and then the peer acknowledged nothing more.
    DataTimeout = 5,
    /// This host had no route or no port: no SYN left.
    NotSent = 6,
    /// The application gave up before the connection was established, and before an answer was due.
    GaveUp = 7,
    /// The application cut an established connection off: `SO_LINGER` 0, unread data, `AF_UNSPEC`.
    Aborted = 8,
    /// Somebody destroyed the socket.
    Destroyed = 9,
    /// Another error; without causes, any failure to be established.
    Other = 10,
    /// It cannot be told.
    Unknown = 11,
    /// The application gave up on a SYN that had not been answered when an answer was due.
    Unanswered = 12,
}

impl Ending {
    /// All of them, by number.
    pub const ALL: [Self; 13] = [
        Self::Closed,
        Self::Refused,
        Self::TimedOut,
        Self::Unreachable,
        Self::Reset,
        Self::DataTimeout,
        Self::NotSent,
        Self::GaveUp,
        Self::Aborted,
        Self::Destroyed,
        Self::Other,
        Self::Unknown,
        Self::Unanswered,
    ];

    /// The word for it in tables, JSON and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Refused => "refused",
            Self::TimedOut => "timed-out",
            Self::Unreachable => "unreachable",
            Self::Reset => "reset",
            Self::DataTimeout => "data-timeout",
            Self::NotSent => "not-sent",
            Self::GaveUp => "gave-up",
            Self::Aborted => "aborted",
            Self::Destroyed => "destroyed",
            Self::Other => "other",
            Self::Unknown => "unknown",
            Self::Unanswered => "unanswered",
        }
    }

    /// Whether it counts against the backend. What this host or the application did does not.
    #[inline(always)]
    pub const fn is_error(self) -> bool {
        matches!(
            self,
            Self::Refused
                | Self::TimedOut
                | Self::Unreachable
                | Self::Reset
                | Self::DataTimeout
                | Self::Unanswered
        )
    }
}

/// `BPF_TCP_ESTABLISHED`
pub const TCP_ESTABLISHED: u32 = 1;
/// `BPF_TCP_SYN_SENT`
pub const TCP_SYN_SENT: u32 = 2;
/// `BPF_TCP_SYN_RECV`
const TCP_SYN_RECV: u32 = 3;
/// `BPF_TCP_LISTEN`
const TCP_LISTEN: u32 = 10;
/// `BPF_TCP_CLOSE`
pub const TCP_CLOSE: u32 = 7;
/// `BPF_TCP_CLOSE_WAIT`: the peer has closed, we have not.
pub const TCP_CLOSE_WAIT: u32 = 8;

// Linux has these numbers on every architecture that eBPF programs are loaded on here.
const EPIPE: u32 = 32;
const ENETUNREACH: u32 = 101;
const ECONNABORTED: u32 = 103;
const ECONNRESET: u32 = 104;
const ETIMEDOUT: u32 = 110;
const ECONNREFUSED: u32 = 111;
const EHOSTUNREACH: u32 = 113;

/// The ending of a flow whose socket goes from the TCP state `from` to closed, with `error` (`sk_err`) at that moment, if
/// that can be read. Of [`Ending::GaveUp`] an [`Attempt`] tells more.
#[inline(always)]
pub fn at_close(phase: u8, from: u32, error: Option<u32>) -> Ending {
    if phase == Phase::Chosen as u8 {
        return Ending::NotSent;
    }
    let Some(error) = error else { return Ending::Unknown };
    let was_established = phase == Phase::Established as u8;
    match error {
        0 if !was_established => Ending::GaveUp,
        // Who closes in order goes through other states before.
        0 if from == TCP_ESTABLISHED || from == TCP_CLOSE_WAIT => Ending::Aborted,
        0 => Ending::Closed,
        error => of_error(error, was_established),
    }
}

/// What is known of a connect that the application gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// An error that the network reported and the kernel did not act on (`sk_err_soft`), 0 if none or if it cannot be read.
    /// Kernel fact: of an ICMP error that arrives while a call holds the socket, as during `connect()` itself where the
    /// peer is this host, only this is kept, until the application reads `SO_ERROR`, which clears it.
    pub soft_error: u32,
    /// How often the SYN was sent again, 0 if it cannot be read.
    pub retransmits: u32,
    /// Whether an answer was due by then, as the service says.
    pub is_due: bool,
}

impl Attempt {
    /// How it ended: whether the network said why there is no answer, an answer was due, or the application was quicker.
    #[inline(always)]
    pub fn ending(self) -> Ending {
        let Self { soft_error, retransmits, is_due } = self;
        if soft_error != 0 {
            return of_error(soft_error, false);
        }
        if is_due || retransmits != 0 { Ending::Unanswered } else { Ending::GaveUp }
    }
}

/// What a socket shows of itself when its last descriptor is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketSnapshot {
    /// Whether more than its state could be read; nothing else means anything if not. (An `Option` would leave the rest of
    /// it unwritten, and the compiler may then copy what was never written, which the verifier refuses to those without
    /// CAP_PERFMON.)
    pub is_readable: bool,
    /// Its TCP state.
    pub state: u32,
    /// Its pending error (`sk_err`).
    pub error: u32,
    /// Whether it was established.
    pub was_established: bool,
}

/// Whether only a socket that was established is in a TCP state. (One that is closed may have been, too.)
#[inline(always)]
pub fn tells_established(state: u32) -> bool {
    // 32 bits are enough for the kernel's states.
    const NOT: u32 = 1 << TCP_CLOSE | 1 << TCP_SYN_SENT | 1 << TCP_SYN_RECV | 1 << TCP_LISTEN;
    NOT >> (state & 31) & 1 == 0
}

/// The ending of a flow whose socket is released, where nothing was seen of it since the choice.
///
/// A blocking connect that fails clears what could be read of it, so that refused, unreachable and timed out are one
/// here: [`Ending::Other`], but where the error is still pending. Of [`Ending::GaveUp`] an [`Attempt`] tells more.
#[inline(always)]
pub fn at_release(snapshot: SocketSnapshot) -> Ending {
    let SocketSnapshot { is_readable, state, error, was_established } = snapshot;
    if state == TCP_SYN_SENT {
        return Ending::GaveUp;
    }
    if !is_readable {
        return Ending::Unknown;
    }
    match error {
        0 if was_established => Ending::Closed,
        0 => Ending::Other,
        error => of_error(error, was_established),
    }
}

#[inline(always)]
fn of_error(error: u32, was_established: bool) -> Ending {
    match error {
        ECONNREFUSED => Ending::Refused,
        ETIMEDOUT if was_established => Ending::DataTimeout,
        ETIMEDOUT => Ending::TimedOut,
        ENETUNREACH | EHOSTUNREACH => Ending::Unreachable,
        // A reset that meets a socket whose peer has closed already shows as a broken pipe.
        ECONNRESET | EPIPE => Ending::Reset,
        ECONNABORTED => Ending::Destroyed,
        _ => Ending::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIN_WAIT2: u32 = 5;

    #[test]
    fn numbers_are_positions() {
        for (number, ending) in Ending::ALL.into_iter().enumerate() {
            assert_eq!(ending as usize, number);
        }
    }

    #[track_caller]
    fn check(phase: Phase, from: u32, error: u32, expected: Ending) {
        assert_eq!(at_close(phase as u8, from, Some(error)), expected);
    }

    /// What Linux shows in each case, as seen on 5.10 to 7.2.
    #[test]
    fn every_way_to_close_has_its_ending() {
        use Phase::{Chosen, Connecting, Established};
        check(Chosen, TCP_SYN_SENT, 0, Ending::NotSent);
        check(Connecting, TCP_SYN_SENT, 0, Ending::GaveUp);
        check(Connecting, TCP_SYN_SENT, ECONNREFUSED, Ending::Refused);
        check(Connecting, TCP_SYN_SENT, ETIMEDOUT, Ending::TimedOut);
        check(Connecting, TCP_SYN_SENT, EHOSTUNREACH, Ending::Unreachable);
        check(Connecting, TCP_SYN_SENT, ENETUNREACH, Ending::Unreachable);
        check(Connecting, TCP_SYN_SENT, ECONNABORTED, Ending::Destroyed);
        check(Established, FIN_WAIT2, 0, Ending::Closed);
        check(Established, TCP_ESTABLISHED, 0, Ending::Aborted);
        check(Established, TCP_CLOSE_WAIT, 0, Ending::Aborted);
        check(Established, TCP_ESTABLISHED, ECONNRESET, Ending::Reset);
        check(Established, TCP_CLOSE_WAIT, EPIPE, Ending::Reset);
        check(Established, FIN_WAIT2, ECONNRESET, Ending::Reset);
        check(Established, TCP_ESTABLISHED, ETIMEDOUT, Ending::DataTimeout);
        check(Established, TCP_ESTABLISHED, EHOSTUNREACH, Ending::Unreachable);
        check(Established, TCP_ESTABLISHED, ECONNABORTED, Ending::Destroyed);
        check(Established, TCP_ESTABLISHED, 71, Ending::Other);
    }

    #[test]
    fn without_the_error_only_what_was_not_sent_is_known() {
        assert_eq!(at_close(Phase::Connecting as u8, TCP_SYN_SENT, None), Ending::Unknown);
        assert_eq!(at_close(Phase::Established as u8, FIN_WAIT2, None), Ending::Unknown);
        assert_eq!(at_close(Phase::Chosen as u8, TCP_SYN_SENT, None), Ending::NotSent);
    }

    #[test]
    fn at_release_a_cleared_error_is_a_failure_without_a_cause() {
        let shown = |state, error, was_established| {
            at_release(SocketSnapshot { is_readable: true, state, error, was_established })
        };
        assert_eq!(shown(TCP_ESTABLISHED, 0, true), Ending::Closed);
        assert_eq!(shown(TCP_CLOSE_WAIT, 0, true), Ending::Closed);
        assert_eq!(shown(TCP_CLOSE, 0, true), Ending::Closed);
        assert_eq!(shown(TCP_CLOSE, 0, false), Ending::Other);
        assert_eq!(shown(TCP_SYN_SENT, 0, false), Ending::GaveUp);
        assert_eq!(shown(TCP_CLOSE, ECONNREFUSED, false), Ending::Refused);
        assert_eq!(shown(TCP_CLOSE, ETIMEDOUT, false), Ending::TimedOut);
        assert_eq!(shown(TCP_CLOSE, ETIMEDOUT, true), Ending::DataTimeout);
        assert_eq!(shown(TCP_CLOSE, ECONNRESET, true), Ending::Reset);
        let unread =
            SocketSnapshot { is_readable: false, state: TCP_ESTABLISHED, error: 0, was_established: true };
        assert_eq!(at_release(unread), Ending::Unknown);
        assert_eq!(
            at_release(SocketSnapshot { state: TCP_SYN_SENT, ..unread }),
            Ending::GaveUp,
            "its state is always shown"
        );
    }

    #[test]
    fn an_attempt_is_unanswered_once_an_answer_was_due() {
        let of = |soft_error, retransmits, is_due| Attempt { soft_error, retransmits, is_due }.ending();
        assert_eq!(of(0, 0, false), Ending::GaveUp);
        assert_eq!(of(0, 0, true), Ending::Unanswered);
        assert_eq!(of(0, 1, false), Ending::Unanswered, "sent again");
        assert_eq!(of(EHOSTUNREACH, 3, true), Ending::Unreachable, "the network has said why");
        assert_eq!(of(ECONNREFUSED, 0, false), Ending::Refused);
        assert_eq!(of(71, 0, false), Ending::Other);
    }
}
