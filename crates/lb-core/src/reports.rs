//! What decisions know of the reports of backends: whose a report is, and what it says of load. How reports come, and which are
//! believed, is for whoever hands them on.

use std::net::SocketAddr;
use std::time::Duration;

use lb_common::net::Address;

use crate::service::Protocol;

/// What a backend is called: as the endpoint list has it, wherever its agent listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    /// Its protocol.
    pub protocol: Protocol,
    /// Its address.
    pub address: SocketAddr,
}

impl Name {
    /// The name as the wire has it, so that an IPv4 address and the same one in v4-mapped form are one name.
    #[must_use]
    pub fn on_wire(self) -> Self {
        let ip = std::net::IpAddr::from(Address::from(self.address.ip()));
        Self { address: SocketAddr::new(ip, self.address.port()), ..self }
    }
}

/// What a backend says of its load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportedLoad {
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

impl ReportedLoad {
    /// The share of its requests that the backend reports as errors: above 1 if it counts served ones alone. `None` if it reports no
    /// requests or no errors.
    pub fn error_share(&self) -> Option<f64> {
        let (eps, qps) = (self.eps?, self.qps?);
        Some(if eps == 0 { 0.0 } else { f64::from(eps) / f64::from(qps) })
    }
}
