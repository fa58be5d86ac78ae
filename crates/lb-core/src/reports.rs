//! What decisions need of a backend's report: the backend's name and its load. How reports arrive,
//! and which of them are trusted, is outside of this crate.

use std::net::SocketAddr;
use std::time::Duration;

use lb_common::net::Address;

use crate::service::Protocol;

/// The name of a backend: its address in the endpoint list, wherever its agent listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    /// Its protocol.
    pub protocol: Protocol,
    /// Its address.
    pub address: SocketAddr,
}

impl Name {
    /// The name as the wire format has it, so that an IPv4 address and its v4-mapped form are one
    /// name.
    #[must_use]
    pub fn on_wire(self) -> Self {
        let ip = std::net::IpAddr::from(Address::from(self.address.ip()));
        Self { address: SocketAddr::new(ip, self.address.port()), ..self }
    }
}

/// The load that a backend reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportedLoad {
    /// Requests per second, in thousandths; `None` if unknown.
    pub qps: Option<u32>,
    /// Errors per second, in thousandths.
    pub eps: Option<u32>,
    /// The used part of its capacity, in thousandths.
    pub utilization: Option<u32>,
    /// The time over which this was measured.
    pub window: Duration,
    /// The age of the measurement when the report was sent.
    pub age: Duration,
}

impl ReportedLoad {
    /// The share of its requests that the backend reports as errors: above 1 if its requests do not
    /// include the failed ones. `None` if it reports no requests or no errors.
    pub fn error_share(&self) -> Option<f64> {
        let (eps, qps) = (self.eps?, self.qps?);
        Some(if eps == 0 { 0.0 } else { f64::from(eps) / f64::from(qps) })
    }
}
