//! The endings of flows: as socklb names them, and as the owner of the socket observed them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The reason for the end of a flow, with socklb's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ending {
    /// An orderly close by either side.
    Closed,
    /// The connect was refused.
    Refused,
    /// The connect timed out without an answer to the SYN.
    TimedOut,
    /// ICMP reports that the destination cannot be reached.
    Unreachable,
    /// The peer reset the connection.
    Reset,
    /// The connection timed out without an acknowledgement of data.
    DataTimeout,
    /// No SYN left this host.
    NotSent,
    /// The application cancelled the connect before an answer was due.
    GaveUp,
    /// The application aborted the connection.
    Aborted,
    /// An administrator destroyed the socket.
    Destroyed,
    Other,
    /// Accounting cannot determine the ending.
    Unknown,
    /// The application cancelled the connect after an answer was due.
    Unanswered,
}

/// All endings, in the order of the variants.
pub const ENDINGS: [Ending; 13] = [
    Ending::Closed,
    Ending::Refused,
    Ending::TimedOut,
    Ending::Unreachable,
    Ending::Reset,
    Ending::DataTimeout,
    Ending::NotSent,
    Ending::GaveUp,
    Ending::Aborted,
    Ending::Destroyed,
    Ending::Other,
    Ending::Unknown,
    Ending::Unanswered,
];

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = serde_json::to_value(self).expect("an ending is plain data");
        f.write_str(name.as_str().expect("an ending is a string"))
    }
}

/// The ending of a flow as a worker observed it. This type has more cases than [`Ending`], because
/// the kernel's counters distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The worker or the peer closed, and everything was read.
    Closed,
    /// ECONNREFUSED, by a reset or by ICMP.
    Refused,
    /// ETIMEDOUT of the connect.
    TimedOut,
    /// EHOSTUNREACH or ENETUNREACH by ICMP.
    Unreachable,
    /// Another errno by ICMP.
    Other,
    /// ECONNRESET.
    Reset,
    /// ETIMEDOUT of data that was sent.
    DataTimeout,
    /// The connect failed and nothing was sent.
    NotSent,
    /// The worker cancelled the connect. Socklb counts [`Ending::GaveUp`] or
    /// [`Ending::Unanswered`], depending on how busy the machine is, so tests compare the sum.
    GaveUp,
    /// The worker closed with `SO_LINGER` 0.
    Lingered,
    /// The worker closed with unread data.
    Unread,
    /// The worker connected to `AF_UNSPEC`.
    Disconnected,
    /// ECONNABORTED by sock_diag, on an established connection.
    Destroyed,
    /// ECONNABORTED by sock_diag, before the connection was established.
    DestroyedEarly,
}

impl Seen {
    /// The ending as socklb counts it.
    pub fn ending(self) -> Ending {
        match self {
            Self::Closed => Ending::Closed,
            Self::Refused => Ending::Refused,
            Self::TimedOut => Ending::TimedOut,
            Self::Unreachable => Ending::Unreachable,
            Self::Other => Ending::Other,
            Self::Reset => Ending::Reset,
            Self::DataTimeout => Ending::DataTimeout,
            Self::NotSent => Ending::NotSent,
            Self::GaveUp => Ending::GaveUp,
            Self::Lingered | Self::Unread | Self::Disconnected => Ending::Aborted,
            Self::Destroyed | Self::DestroyedEarly => Ending::Destroyed,
        }
    }

    /// Whether a SYN left this host.
    pub fn was_sent(self) -> bool {
        self != Self::NotSent
    }

    pub fn was_established(self) -> bool {
        match self {
            Self::Closed
            | Self::Reset
            | Self::DataTimeout
            | Self::Lingered
            | Self::Unread
            | Self::Disconnected
            | Self::Destroyed => true,
            Self::Refused
            | Self::TimedOut
            | Self::Unreachable
            | Self::Other
            | Self::NotSent
            | Self::GaveUp
            | Self::DestroyedEarly => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_are_named_in_their_order() {
        let names: Vec<String> = ENDINGS.iter().map(ToString::to_string).collect();
        let expected = "closed refused timed-out unreachable reset data-timeout not-sent gave-up aborted destroyed \
                        other unknown unanswered";
        assert_eq!(names.join(" "), expected);
    }
}
