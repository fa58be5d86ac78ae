//! What backends say of themselves, as far as it is believed: whom to ask and when ([`senders`]), and what one of them has said
//! ([`reported`]).
//!
//! Times of a report are durations, which are added to this host's clock: no two hosts' clocks are compared. It does no I/O and
//! draws nothing: datagrams come in and go out as values, with the time and a nonce.

pub mod reported;

pub mod senders;

use std::net::SocketAddr;
use std::time::Duration;

use lb_common::net::Address;
use lb_common::wire::{Datagram, Kind, MAX_HOLD_MS, MAX_VALID_FOR_MS};

use crate::service::Protocol;

/// The longest `hold` of a report that is followed: a lame duck that has fallen silent is one for no longer.
pub const MAX_HOLD: Duration = Duration::from_millis(MAX_HOLD_MS as u64);

/// The longest `valid for` of a report that is followed.
pub const MAX_VALID_FOR: Duration = Duration::from_millis(MAX_VALID_FOR_MS as u64);

/// What a backend is called: as the endpoint list has it, wherever its agent listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    /// Its protocol.
    pub protocol: Protocol,
    /// Its address.
    pub address: SocketAddr,
}

impl Name {
    /// That of a datagram that was parsed; `None` if its protocol is no service's.
    pub fn of(datagram: &Datagram) -> Option<Self> {
        Some(Self { protocol: Protocol::of_number(datagram.protocol)?, address: datagram.backend() })
    }

    /// Whether it can stand in a datagram: it is one host's, and means the same to everybody.
    pub fn can_report(self) -> bool {
        Datagram::about(Kind::Request, self.protocol.number(), self.address).check().is_ok()
    }

    /// The name as the wire has it, so that an IPv4 address and the same one in v4-mapped form are one name.
    #[must_use]
    pub fn on_wire(self) -> Self {
        let ip = std::net::IpAddr::from(Address::from(self.address.ip()));
        Self { address: SocketAddr::new(ip, self.address.port()), ..self }
    }
}

/// What a backend says of its load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests a second, in thousandths; `None` if it does not know.
    pub qps: Option<u32>,
    /// Errors a second, in thousandths.
    pub eps: Option<u32>,
    /// Of what it can do, in thousandths.
    pub utilization: Option<u32>,
    /// Over how long that was measured.
    pub window: Duration,
    /// How long ago, when it was said.
    pub age: Duration,
}

impl Load {
    /// The share of its requests that the backend reports as errors: above 1 if it counts served ones alone. `None` if it reports no
    /// requests or no errors.
    pub fn error_share(&self) -> Option<f64> {
        let (eps, qps) = (self.eps?, self.qps?);
        Some(if eps == 0 { 0.0 } else { f64::from(eps) / f64::from(qps) })
    }
}
