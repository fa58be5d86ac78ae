//! The datagram with which a client's host requests a backend's state and the backend's agent
//! reports it. Requests, answers and pushes all have 80 bytes. The agent, the daemon and kernel
//! programs read and write such datagrams.
//!
//! A *request* requests the report of one backend. The backend is identified by its name: protocol,
//! address and port as in the endpoint list. An *answer* is as large as its request, so that an
//! agent cannot be used to amplify traffic. A *push* is a report that was not requested. Each
//! datagram is authenticated under the backend's key by SipHash-2-4 (Aumasson and Bernstein, 2012).

mod cookie;
mod datagram;
mod siphash;

use core::time::Duration;

pub use cookie::{Cookies, EPOCH_NS, RequestSource};
pub(crate) use datagram::is_of_one_host;
pub use datagram::{Datagram, Kind, Malformed, Readiness, UNKNOWN};
pub use siphash::{Key, siphash};

/// Size of a datagram in bytes, including its message authentication code (MAC).
pub const BYTES: usize = 80;

/// Number of bytes that the MAC authenticates: all bytes of a datagram before the MAC.
pub const AUTHENTICATED_BYTES: usize = BYTES - 8;

/// The version of the layout.
pub const VERSION: u8 = 1;

/// The longest `valid for` of a report, in milliseconds. If a report contains a longer time,
/// [`MAX_VALID_FOR_MS`] is used instead.
pub const MAX_VALID_FOR_MS: u32 = 300_000;

/// [`MAX_VALID_FOR_MS`] as a duration.
pub const MAX_VALID_FOR: Duration = Duration::from_millis(MAX_VALID_FOR_MS as u64);

/// The longest `hold` of a report, in milliseconds. A silent backend remains a lame duck for at
/// most this time.
pub const MAX_HOLD_MS: u32 = 3_600_000;

/// [`MAX_HOLD_MS`] as a duration.
pub const MAX_HOLD: Duration = Duration::from_millis(MAX_HOLD_MS as u64);

/// Minimum time between two acknowledgements of the same push, in milliseconds.
pub const ACKNOWLEDGED_FOR_MS: u32 = 5;
