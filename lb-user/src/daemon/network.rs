//! The network of this host: connect probes, reports, and programs on network interfaces.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lb_kernel::Features;
use lb_view::status;
use tokio::sync::Notify;

use super::receivers::Receiving;
use crate::controller::exchange::ReportStore;
use crate::controller::{Network, ReceiveAt};
use crate::probes::{ConnectTarget, Findings, ProbedHealth, Probes};
use crate::reports::{ReportExchanger, ReportSocket};

pub struct HostNetwork {
    probes: Probes,
    receiving: Receiving,
    news: Arc<Notify>,
    pins: PathBuf,
    features: Features,
}

impl HostNetwork {
    /// A network that does not probe or poll any backend yet. `news` is notified when the health of
    /// a backend changes.
    pub fn new(news: Arc<Notify>, pins: PathBuf, features: Features) -> Self {
        let probes = Probes::new(Arc::clone(&news));
        Self { probes, receiving: Receiving::default(), news, pins, features }
    }
}

impl Network for HostNetwork {
    fn probe(&mut self, targets: &BTreeMap<ConnectTarget, String>) {
        self.probes.set_targets(targets);
    }

    fn hold_back(&self, time: Duration) {
        self.probes.hold_back(time);
    }

    fn version(&self) -> u64 {
        self.probes.version()
    }

    fn results(&self) -> BTreeMap<ConnectTarget, ProbedHealth> {
        self.probes.results()
    }

    fn findings(&self, target: &ConnectTarget) -> Option<Findings> {
        self.probes.findings(target)
    }

    fn listen(&mut self, address: SocketAddr, store: ReportStore) -> io::Result<ReportExchanger> {
        ReportExchanger::start(ReportSocket::bind(address)?, Arc::clone(&self.news), store)
    }

    fn receive(&mut self, at: Option<ReceiveAt>) {
        self.receiving.want(at, &self.pins, self.features);
    }

    fn interfaces(&self) -> Vec<status::InterfaceStatus> {
        self.receiving.interfaces()
    }

    fn interface_faults(&self) -> Vec<String> {
        self.receiving.faults()
    }
}
