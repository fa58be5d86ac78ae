//! Determines how a flow ended, from the state that its socket has when the flow ends. The kernel
//! programs and the tests on the host run the same functions. The module must not use maps.

use crate::abi::Phase;
use crate::load::{in_one_register, sign_mask_in_register};

/// How a flow ended. Numbers are part of the ABI.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ending {
    /// Either side closed the established connection in an orderly way. For datagrams: the socket
    /// was closed, or directed to another destination.
    Closed = 0,
    /// The peer refused the connection.
    Refused = 1,
    /// The kernel gave up because no answer to the SYN arrived.
    TimedOut = 2,
    /// The network reported that the peer cannot be reached.
    Unreachable = 3,
    /// The peer reset the connection.
    Reset = 4,
    /// After the connection was established, the peer stopped acknowledging data.
    DataTimeout = 5,
    /// No SYN was sent: this host had no route or no port, or the application closed a socket whose
    /// SYN was deferred until there is data.
    NotSent = 6,
    /// The application gave up before the connection was established and before an answer was due.
    GaveUp = 7,
    /// The application aborted an established connection: with `SO_LINGER` 0, with unread data, or
    /// by a connect to `AF_UNSPEC`.
    Aborted = 8,
    /// Another program or the kernel destroyed the socket.
    Destroyed = 9,
    /// Another error. A failure before the connection was established also has this ending, if its
    /// cause cannot be read.
    Other = 10,
    /// The ending cannot be determined.
    Unknown = 11,
    /// The application gave up on a SYN whose answer was overdue.
    Unanswered = 12,
}

impl Ending {
    /// All endings, ordered by number.
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

    /// The word for the ending in tables, JSON and metrics.
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

    /// A word in which only the bit with the ending's number is set. A word with the bits of
    /// several endings serves to test for all of them at once ([`End::is_one_of`]).
    #[inline(always)]
    pub const fn bit(self) -> u32 {
        1 << (self as u32 & 31)
    }

    /// Whether the ending counts against the backend, regardless of the other data about the flow.
    /// Endings that this host or the application caused do not count.
    #[inline(always)]
    pub const fn is_error(self) -> bool {
        self.bit() & ERRORS != 0
    }
}

/// The bits of the endings that are errors.
const ERRORS: u32 = Ending::Refused.bit()
    | Ending::TimedOut.bit()
    | Ending::Unreachable.bit()
    | Ending::Reset.bit()
    | Ending::DataTimeout.bit()
    | Ending::Unanswered.bit();
/// The bits of the endings in which the client or the backend closed the connection.
const IN_ORDER: u32 = Ending::Closed.bit() | Ending::Aborted.bit();

/// The end of a flow, as numbers that can be passed to a function of a kernel program.
///
/// The methods return conditions as numbers, 1 or 0, and compute them without branches, because the
/// verifier follows both sides of each branch to the end of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The number of the [`Ending`] in the low eight bits, and flags in the next eight bits.
    word: u32,
    /// Bytes that the backend sent, counting a FIN as one byte. This number and [`End::bytes_sent`]
    /// are below 2^63.
    pub bytes_received: u64,
    /// Bytes that the backend acknowledged, counting a FIN as one byte.
    pub bytes_sent: u64,
}

impl End {
    const ESTABLISHED: u32 = 8;
    const SEND_FAILED: u32 = 9;
    const CLOSED_BY_PEER: u32 = 10;
    const REPORTED: u32 = 11;

    /// The end of a flow without data, established or not.
    #[inline(always)]
    pub const fn of(ending: Ending, was_established: bool) -> Self {
        let word = ending as u32 | (was_established as u32) << Self::ESTABLISHED;
        Self { word, bytes_received: 0, bytes_sent: 0 }
    }

    /// Sets the numbers of bytes.
    #[inline(always)]
    #[must_use]
    pub const fn with_bytes(self, received: u64, sent: u64) -> Self {
        Self { bytes_received: received, bytes_sent: sent, ..self }
    }

    /// Sets the numbers of bytes; `acknowledged` also counts the SYN as a byte.
    #[inline(always)]
    #[must_use]
    pub fn with_acknowledged(self, received: u64, acknowledged: u64) -> Self {
        self.with_bytes(received, acknowledged.wrapping_sub(u64::from(is_below(0, acknowledged))))
    }

    /// Sets the flag that the kernel could not send the SYN, because it had no route or no port, if
    /// `send_failed` is true. (The flag is needed because [`Ending::NotSent`] also covers a SYN
    /// that was deferred until there is data.)
    #[inline(always)]
    #[must_use]
    pub const fn send_failed_if(self, send_failed: bool) -> Self {
        Self { word: self.word | (send_failed as u32) << Self::SEND_FAILED, ..self }
    }

    /// The end of a flow of datagrams. This end is no evidence about the backend, because the
    /// application has usually read (and so cleared) any ICMP error before the flow ends.
    pub const OF_DATAGRAMS: Self =
        Self { word: Ending::Closed as u32 | 1 << Self::REPORTED, bytes_received: 0, bytes_sent: 0 };

    /// Sets the flags that follow from `from`, the last TCP state of the socket: whether the
    /// backend closed before the client did, and whether the end was already reported when the
    /// backend acknowledged the client's FIN ([`TCP_FIN_WAIT2`]).
    #[inline(always)]
    #[must_use]
    pub const fn from_state(self, from: u32) -> Self {
        // If the TCP state is already "closed" when the last descriptor is released, the peer has
        // reset the connection and the application has read the error.
        const CLOSED_BY_PEER: u32 = 1 << TCP_CLOSE_WAIT | 1 << TCP_LAST_ACK | 1 << TCP_CLOSE;
        let is_closed_by_peer = CLOSED_BY_PEER >> (from & 31) & 1;
        let is_reported = (1 << TCP_FIN_WAIT2) >> (from & 31) & 1;
        let bits = is_closed_by_peer << Self::CLOSED_BY_PEER | is_reported << Self::REPORTED;
        Self { word: self.word | bits, ..self }
    }

    /// The ending and the flags, without the numbers of bytes. Bits 16 and above are 0, so that
    /// callers can use them.
    #[inline(always)]
    pub const fn to_word(self) -> u32 {
        self.word
    }

    /// The end with the word that [`End::to_word`] returned, and these numbers of bytes.
    #[inline(always)]
    pub const fn from_word(word: u32, bytes_received: u64, bytes_sent: u64) -> Self {
        Self { word, bytes_received, bytes_sent }
    }

    /// The number of the [`Ending`].
    #[inline(always)]
    pub const fn number(self) -> u32 {
        self.word & 0xff
    }

    /// 1 if `endings` contains the bit of this ending ([`Ending::bit`]), else 0.
    #[inline(always)]
    pub fn is_one_of(self, endings: u32) -> u32 {
        // The bits must be in a register. If they are not, the compiler turns the shift of a single
        // bit into a comparison, and the comparison into a branch.
        #[expect(clippy::cast_possible_truncation, reason = "the value has 32 bits")]
        let endings = in_one_register(u64::from(endings)) as u32;
        endings >> (self.word & 31) & 1
    }

    #[inline(always)]
    const fn flag(self, bit: u32) -> u32 {
        self.word >> bit & 1
    }

    /// 1 if the connection was established, else 0.
    #[inline(always)]
    pub const fn was_established(self) -> u32 {
        self.flag(Self::ESTABLISHED)
    }

    /// 1 if the kernel could not send the SYN, else 0.
    #[inline(always)]
    pub const fn send_failed(self) -> u32 {
        self.flag(Self::SEND_FAILED)
    }

    /// 1 if the end is no evidence about the backend, else 0. The end is no evidence if two
    /// conditions are true: the client or the backend closed the connection; and the backend has
    /// sent data, or had nothing to answer, or the end was already reported.
    #[inline(always)]
    pub fn is_plain(self) -> u32 {
        // This expression needs fewer registers, and so less stack, than `sent_nothing`: functions
        // of a kernel program that call each other share 512 bytes of stack.
        let has_received = is_below(self.bytes_received, 2) ^ 1;
        let had_nothing_to_answer = is_below(self.bytes_sent, 2) & (self.flag(Self::CLOSED_BY_PEER) ^ 1);
        self.is_one_of(IN_ORDER) & (has_received | had_nothing_to_answer | self.flag(Self::REPORTED))
    }

    /// 1 if the end counts as load of the backend, else 0. Every kind of failure counts, because a
    /// failing backend must not look idle.
    #[inline(always)]
    pub fn is_load(self) -> u32 {
        let has_no_cause = self.is_one_of(Ending::Other.bit()) & (self.was_established() ^ 1);
        self.is_error() | self.send_failed() | self.sent_nothing() | has_no_cause
    }

    /// 1 if the [`Ending`] counts against the backend ([`Ending::is_error`]), else 0.
    #[inline(always)]
    pub fn is_error(self) -> u32 {
        self.is_one_of(ERRORS)
    }

    /// 1 if the backend sent no data on an established connection, and the client had sent data or
    /// the backend closed first; else 0. (A FIN counts as a byte, so a backend that answers with
    /// only one byte is indistinguishable from a backend that only closes.)
    #[inline(always)]
    fn sent_nothing(self) -> u32 {
        let closed_by_peer = self.flag(Self::CLOSED_BY_PEER);
        let has_sent = is_below(self.bytes_sent, 2) ^ 1;
        self.was_established()
            & is_below(self.bytes_received, 2)
            & (has_sent | closed_by_peer)
            & self.is_one_of(IN_ORDER)
    }

    /// 1 if the client sent data on an established connection and closed it before the backend sent
    /// anything, even a FIN; else 0.
    #[inline(always)]
    pub fn lacks_answer(self) -> u32 {
        self.sent_nothing() & is_below(self.bytes_received, 1) & (is_below(self.bytes_sent, 2) ^ 1)
    }

    /// 1 if the connection was established, the backend sent data, and the ending is no error, else
    /// 0.
    #[inline(always)]
    pub fn is_answered(self) -> u32 {
        self.was_established() & (is_below(self.bytes_received, 2) ^ 1) & (self.is_error() ^ 1)
    }
}

/// 1 if `number` is smaller than `limit`, else 0. Both must be below 2^63.
#[inline(always)]
pub fn is_below(number: u64, limit: u64) -> u32 {
    (sign_mask_in_register(number.wrapping_sub(limit)) & 1) as u32
}

/// `BPF_TCP_ESTABLISHED`
pub const TCP_ESTABLISHED: u32 = 1;
/// `BPF_TCP_FIN_WAIT2`: this side has closed, and the peer has acknowledged the FIN.
pub const TCP_FIN_WAIT2: u32 = 5;
/// `BPF_TCP_SYN_SENT`
pub const TCP_SYN_SENT: u32 = 2;
/// `BPF_TCP_SYN_RECV`
const TCP_SYN_RECV: u32 = 3;
/// `BPF_TCP_LISTEN`
const TCP_LISTEN: u32 = 10;
/// `BPF_TCP_CLOSE`
pub const TCP_CLOSE: u32 = 7;
/// `BPF_TCP_CLOSE_WAIT`: the peer has closed, and this side has not.
pub const TCP_CLOSE_WAIT: u32 = 8;
/// `BPF_TCP_LAST_ACK`: this side has closed after the peer.
pub const TCP_LAST_ACK: u32 = 9;

// Errnos, which are the same on every architecture that socklb supports.
const EACCES: u32 = 13;
const EPIPE: u32 = 32;
const ENONET: u32 = 64;
const EPROTO: u32 = 71;
const ENOPROTOOPT: u32 = 92;
const EOPNOTSUPP: u32 = 95;
const ENETUNREACH: u32 = 101;
const ECONNABORTED: u32 = 103;
const ECONNRESET: u32 = 104;
const ETIMEDOUT: u32 = 110;
const ECONNREFUSED: u32 = 111;
const EHOSTDOWN: u32 = 112;
const EHOSTUNREACH: u32 = 113;

/// The ending of a flow whose socket changes from the TCP state `from` to "closed". `phase` is the
/// number of a [`Phase`]. `error` is `sk_err` at that moment, if it can be read. If the result is
/// [`Ending::GaveUp`], the caller must refine it with [`Attempt::ending`]. The parameter `of_error`
/// must return the same results as the function [`of_error`].
#[inline(always)]
pub fn at_close(phase: u8, from: u32, error: Option<u32>, of_error: impl Fn(u32, bool) -> Ending) -> Ending {
    if phase == Phase::Chosen as u8 {
        return Ending::NotSent;
    }
    let Some(error) = error else { return Ending::Unknown };
    let was_established = phase == Phase::Established as u8;
    match error {
        0 if !was_established => Ending::GaveUp,
        // In an orderly close, the socket is in other states before it is closed.
        0 if from == TCP_ESTABLISHED || from == TCP_CLOSE_WAIT => Ending::Aborted,
        0 => Ending::Closed,
        error => of_error(error, was_established),
    }
}

/// The state of a connect that the application gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// An error that the network reported and the kernel did not act on (`sk_err_soft`); 0 if there
    /// is none or it cannot be read. Kernel fact: an ICMP error may arrive while a system call has
    /// locked the socket, for example during `connect()` itself if the peer is this host. Only this
    /// field then records the error, until the application clears it by reading `SO_ERROR`. After
    /// that only the socket's error queue contains the error (IPv4, Linux 5.18).
    pub soft_error: u32,
    /// How often the SYN was retransmitted; 0 if it cannot be read.
    pub retransmits: u32,
    /// Whether an answer was overdue when the application gave up, according to the service's
    /// rules.
    pub is_due: bool,
}

impl Attempt {
    /// The ending: if an error was reported, the ending of this error; else [`Ending::Unanswered`]
    /// if an answer was overdue or the SYN was retransmitted; else [`Ending::GaveUp`].
    #[inline(always)]
    pub fn ending(self) -> Ending {
        let Self { soft_error, retransmits, is_due } = self;
        if soft_error != 0 {
            return of_error(soft_error, false);
        }
        if is_due || retransmits != 0 { Ending::Unanswered } else { Ending::GaveUp }
    }
}

/// The state of a socket when its last descriptor is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketSnapshot {
    /// Whether the programs could read `error` and `was_established`; if false, both have no
    /// meaning. (The two are not in an `Option`, because the fields of a `None` would be
    /// uninitialized and the compiler might copy them. Without CAP_PERFMON the verifier rejects
    /// reads of uninitialized memory.)
    pub is_readable: bool,
    /// The TCP state (`sk_state`).
    pub state: u32,
    /// The pending error (`sk_err`).
    pub error: u32,
    /// Whether the connection was established.
    pub was_established: bool,
}

/// Whether the connection of every socket in this TCP state has been established. (For a closed
/// socket this is unknown.)
#[inline(always)]
pub fn implies_established(state: u32) -> bool {
    // The numbers of the kernel's TCP states are below 32.
    const NOT: u32 = 1 << TCP_CLOSE | 1 << TCP_SYN_SENT | 1 << TCP_SYN_RECV | 1 << TCP_LISTEN;
    NOT >> (state & 31) & 1 == 0
}

/// The ending of a flow whose socket is released, if the programs have received no event of the
/// connection.
///
/// A blocking connect that fails clears the error, so a refused, unreachable or timed-out connect
/// becomes [`Ending::Other`] unless the error is still pending. If the result is
/// [`Ending::GaveUp`], the caller must refine it with [`Attempt::ending`]. The parameter `of_error`
/// must return the same results as the function [`of_error`].
#[inline(always)]
pub fn at_release(snapshot: SocketSnapshot, of_error: impl Fn(u32, bool) -> Ending) -> Ending {
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

/// The ending of a flow whose socket has this error (an errno, not 0).
#[inline(always)]
pub fn of_error(error: u32, was_established: bool) -> Ending {
    match error {
        ECONNREFUSED => Ending::Refused,
        ETIMEDOUT if was_established => Ending::DataTimeout,
        ETIMEDOUT => Ending::TimedOut,
        ENETUNREACH | EHOSTUNREACH => Ending::Unreachable,
        // The errnos for further ICMP and ICMPv6 messages: prohibited, no such protocol, malformed,
        // isolated.
        EACCES | EPROTO | ENOPROTOOPT | EOPNOTSUPP | EHOSTDOWN | ENONET if !was_established => {
            Ending::Unreachable
        }
        // If a reset arrives after the peer has closed, the socket reports a broken pipe.
        ECONNRESET | EPIPE => Ending::Reset,
        ECONNABORTED => Ending::Destroyed,
        _ => Ending::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIN_WAIT2: u32 = TCP_FIN_WAIT2;

    #[test]
    fn numbers_of_endings_are_their_positions() {
        for (number, ending) in Ending::ALL.into_iter().enumerate() {
            assert_eq!(ending as usize, number);
        }
    }

    #[track_caller]
    fn check(phase: Phase, from: u32, error: u32, expected: Ending) {
        assert_eq!(at_close(phase as u8, from, Some(error), of_error), expected);
    }

    /// The TCP state and the error in each case, as observed on Linux 5.10 to 7.2.
    #[test]
    fn each_kind_of_close_has_its_ending() {
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
        check(Connecting, TCP_SYN_SENT, EACCES, Ending::Unreachable);
        check(Connecting, TCP_SYN_SENT, EPROTO, Ending::Unreachable);
        check(Established, TCP_ESTABLISHED, EPROTO, Ending::Other);
    }

    #[test]
    fn without_the_error_only_not_sent_is_known() {
        assert_eq!(at_close(Phase::Connecting as u8, TCP_SYN_SENT, None, of_error), Ending::Unknown);
        assert_eq!(at_close(Phase::Established as u8, FIN_WAIT2, None, of_error), Ending::Unknown);
        assert_eq!(at_close(Phase::Chosen as u8, TCP_SYN_SENT, None, of_error), Ending::NotSent);
    }

    #[test]
    fn a_cleared_error_at_release_is_a_failure_without_a_cause() {
        let shown = |state, error, was_established| {
            at_release(SocketSnapshot { is_readable: true, state, error, was_established }, of_error)
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
        assert_eq!(at_release(unread, of_error), Ending::Unknown);
        assert_eq!(
            at_release(SocketSnapshot { state: TCP_SYN_SENT, ..unread }, of_error),
            Ending::GaveUp,
            "the TCP state can always be read"
        );
    }

    #[test]
    fn an_attempt_is_unanswered_if_its_answer_is_overdue() {
        let of = |soft_error, retransmits, is_due| Attempt { soft_error, retransmits, is_due }.ending();
        assert_eq!(of(0, 0, false), Ending::GaveUp);
        assert_eq!(of(0, 0, true), Ending::Unanswered);
        assert_eq!(of(0, 1, false), Ending::Unanswered, "the SYN was sent again");
        assert_eq!(of(EHOSTUNREACH, 3, true), Ending::Unreachable, "the network has reported the cause");
        assert_eq!(of(ECONNREFUSED, 0, false), Ending::Refused);
        assert_eq!(of(EACCES, 0, false), Ending::Unreachable, "prohibited");
        assert_eq!(of(5, 0, false), Ending::Other);
    }

    #[test]
    fn failures_of_every_kind_count_as_load() {
        for (ending, was_established, received, sent, expected) in [
            (Ending::Refused, false, 0, 0, true),
            (Ending::Reset, true, 900, 100, true),
            (Ending::Other, false, 0, 0, true),
            (Ending::Other, true, 900, 100, false),
            (Ending::Closed, true, 1, 7, true),
            (Ending::Closed, true, 1, 0, false),
            (Ending::Closed, true, 2, 7, false),
            (Ending::Aborted, true, 0, 7, true),
            (Ending::GaveUp, false, 0, 0, false),
            (Ending::NotSent, false, 0, 0, false),
            (Ending::Destroyed, true, 0, 0, false),
        ] {
            let end = End::of(ending, was_established).with_bytes(received, sent);
            assert_eq!(end.is_load() != 0, expected, "{ending:?}");
        }
        assert_eq!(End::of(Ending::NotSent, false).send_failed_if(true).is_load(), 1);
        let closed = End::of(Ending::Closed, true).with_bytes(1, 0).from_state(TCP_LAST_ACK);
        assert_eq!(closed.is_load(), 1, "the backend accepts and closes at once");
    }

    #[test]
    fn an_end_is_plain_if_it_is_in_order_and_no_evidence() {
        let closed = End::of(Ending::Closed, true);
        for (end, expected) in [
            (closed.with_bytes(2, 7), 1),
            (closed.with_bytes(1, 7), 0),
            (closed.with_bytes(0, 1), 1),
            (End::of(Ending::Aborted, true), 1),
            (closed.with_bytes(1, 0).from_state(TCP_LAST_ACK), 0),
            (closed.with_bytes(0, 7).from_state(TCP_FIN_WAIT2), 1),
            (closed.with_bytes(0, 7).from_state(TCP_LAST_ACK), 0),
            (End::of(Ending::Refused, false).from_state(TCP_FIN_WAIT2), 0),
            (End::OF_DATAGRAMS, 1),
        ] {
            assert_eq!(end.is_plain(), expected, "{end:?}");
        }
        assert_eq!((End::OF_DATAGRAMS.is_load(), End::OF_DATAGRAMS.number()), (0, 0));
    }

    #[test]
    fn a_connection_lacks_an_answer_if_its_data_was_not_answered() {
        let lacks_and_has = |received, sent| {
            let end = End::of(Ending::Closed, true).with_bytes(received, sent);
            (end.lacks_answer() != 0, end.is_answered() != 0)
        };
        assert_eq!(lacks_and_has(0, 7), (true, false));
        assert_eq!(lacks_and_has(0, 1), (false, false), "the client sent no data");
        assert_eq!(lacks_and_has(1, 7), (false, false), "the backend closed");
        assert_eq!(lacks_and_has(2, 7), (false, true));
        assert_eq!(lacks_and_has(2, 0), (false, true), "the backend speaks first");
    }
}
