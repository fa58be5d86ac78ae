//! The network of this host: connect probes, reports, and programs on network interfaces.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lb_core::health::Health;
use lb_core::reports::Name;
use lb_kernel::Features;
use lb_report::client::reported::Base;
use lb_report::client::senders::Target;
use lb_view::status;
use tokio::sync::Notify;

use super::receiving::Receiving;
use crate::controller::{LookAtReports, Network, ReceiveAt, ReportListener, Stores};
use crate::probes::{ConnectTarget, Findings, ProbedHealth, Probes};
use crate::reports::{ReportExchanger, ReportSocket};

pub struct HostNetwork {
    probes: Probes,
    listener: Option<ReportExchanger>,
    receiving: Receiving,
    news: Arc<Notify>,
    pins: PathBuf,
    features: Features,
}

impl HostNetwork {
    /// A network without targets and listener. `news` is notified when the health of a backend
    /// changes.
    pub fn new(news: Arc<Notify>, pins: PathBuf, features: Features) -> Self {
        let probes = Probes::new(Arc::clone(&news));
        Self { probes, listener: None, receiving: Receiving::default(), news, pins, features }
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

    fn listen(&mut self, address: SocketAddr, stores: Stores) -> io::Result<()> {
        let socket = ReportSocket::bind(address)?;
        self.listener = Some(ReportExchanger::start(socket, Arc::clone(&self.news), stores)?);
        Ok(())
    }

    fn listener(&self) -> Option<&dyn ReportListener> {
        self.listener.as_ref().map(|listener| listener as &dyn ReportListener)
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

impl ReportListener for ReportExchanger {
    fn address(&self) -> SocketAddr {
        self.address()
    }

    fn poll(&self, targets: Vec<Target>, adopted: &dyn Fn(Name) -> (Option<Base>, Option<Duration>)) {
        self.set_targets(targets, adopted);
    }

    fn poll_first(&self, names: Vec<Name>, after: Duration, spacing: Duration) {
        self.poll_first(names, after, spacing);
    }

    fn take_restarted(&self) -> BTreeSet<Name> {
        self.take_restarted()
    }

    fn sick(&self) -> BTreeMap<Name, Health> {
        self.sick()
    }

    fn look(&self, look: &mut LookAtReports<'_>) {
        self.look(|senders, counts, now| look(senders, counts, now));
    }
}
