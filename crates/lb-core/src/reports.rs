//! The parts of a backend's report that decisions use: the backend's name and its load. Another
//! crate receives and verifies reports.

use std::net::SocketAddr;
use std::time::Duration;

use lb_common::net::Address;

use crate::service::Protocol;

/// The name of a backend: its protocol and its address in the endpoint list. The backend's agent
/// may have another address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    /// The backend's protocol.
    pub protocol: Protocol,
    /// The backend's address in the endpoint list.
    pub address: SocketAddr,
}

impl Name {
    /// The name in the form of the wire format, so that an IPv4 address and its v4-mapped form are
    /// one name.
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
    /// The used part of the backend's capacity, in thousandths.
    pub utilization: Option<u32>,
    /// The time over which the load was measured.
    pub window: Duration,
    /// The age of the measurement when the report was sent.
    pub age: Duration,
}

impl ReportedLoad {
    /// Errors divided by requests. The result is above 1 if the backend does not count failed
    /// requests in `qps`. `None` unless the backend reports both requests and errors.
    pub fn error_share(&self) -> Option<f64> {
        let (eps, qps) = (self.eps?, self.qps?);
        Some(if eps == 0 { 0.0 } else { f64::from(eps) / f64::from(qps) })
    }
}
