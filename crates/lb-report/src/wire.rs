//! The datagram by which a backend's agent says how the backend is: 80 bytes, the same in every direction, read by the agent,
//! by the daemon and by kernel programs.
//!
//! A *request* asks for the report of one backend, by its name: protocol, address and port as the endpoint list has them. An
//! *answer* is as large as its request, so that nobody can make an agent send more than was sent to it. A *push* is a report that
//! nobody has asked for. Each is authenticated under the backend's key by SipHash-2-4 (Aumasson and Bernstein, 2012).

mod cookie;
mod datagram;
mod judging;
mod siphash;

use core::time::Duration;

pub use cookie::{Asker, Cookies, EPOCH_NS};
pub(crate) use datagram::is_of_one_host;
pub use datagram::{Datagram, Kind, Malformed, Readiness, UNKNOWN};
pub use judging::{Disbelieved, after, judge, lame_until_ns};
pub use siphash::{Key, siphash};

/// Bytes of a datagram, its message authentication code (MAC) included.
pub const BYTES: usize = 80;

/// Bytes of it that the MAC authenticates: all that come before it.
pub const AUTHENTICATED_BYTES: usize = BYTES - 8;

/// The version of the layout.
pub const VERSION: u8 = 1;

/// The longest `valid for` of a report that is followed.
pub const MAX_VALID_FOR_MS: u32 = 300_000;

/// The same as a duration.
pub const MAX_VALID_FOR: Duration = Duration::from_millis(MAX_VALID_FOR_MS as u64);

/// The longest `hold` of a report that is followed: a lame duck that has fallen silent is one for no longer.
pub const MAX_HOLD_MS: u32 = 3_600_000;

/// The same as a duration.
pub const MAX_HOLD: Duration = Duration::from_millis(MAX_HOLD_MS as u64);

/// A push that comes again is acknowledged again, but not more often than this, in milliseconds.
pub const ACKNOWLEDGED_FOR_MS: u32 = 5;
