//! The controller's view of the network: connect probes, the listener that receives reports, and
//! the programs of network interfaces.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lb_kernel::HostMaps;
use lb_kernel::xdp::Place;
use lb_view::status;

use super::exchange::ReportStore;
use crate::probes::{ConnectTarget, Findings, ProbedHealth};
use crate::reports::ReportExchanger;

/// Probes backends and receives reports on separate threads and tasks, and wakes the controller
/// with [`Event::HealthChanged`](super::Event::HealthChanged) when the health of a backend has
/// changed. No call blocks.
pub trait Network: Send {
    /// Sets the targets of connect probes, each with a service that uses it. The earlier targets
    /// are no longer probed.
    fn probe(&mut self, targets: &BTreeMap<ConnectTarget, String>);

    /// Delays the next probe and all later probes by this time.
    fn hold_back(&self, time: Duration);

    /// A number that grows whenever targets or results change.
    fn version(&self) -> u64;

    /// The health of each target that has a result.
    fn results(&self) -> BTreeMap<ConnectTarget, ProbedHealth>;

    /// The results of a target's probes.
    fn findings(&self, target: &ConnectTarget) -> Option<Findings>;

    /// Starts to receive reports at this address, and to store them in the kernel with `store`.
    ///
    /// # Errors
    /// If the socket or its thread cannot be created.
    fn listen(&mut self, address: SocketAddr, store: ReportStore) -> io::Result<ReportExchanger>;

    /// Makes the kernel receive reports only on the interfaces and at the address that `at`
    /// describes.
    fn receive(&mut self, at: Option<ReceiveAt>);

    /// How reports are received on each configured interface.
    fn interfaces(&self) -> Vec<status::InterfaceStatus>;

    fn interface_faults(&self) -> Vec<String>;
}

/// The interfaces and the address at which the kernel receives reports without the daemon.
#[derive(Clone)]
pub struct ReceiveAt {
    /// The maps in which accepted reports are stored.
    pub maps: Arc<HostMaps>,
    /// The address at which the daemon listens.
    pub address: SocketAddr,
    pub place: Place,
    /// Whether the daemon also receives the datagrams that the kernel's program does not accept.
    pub passes_unbelieved: bool,
}

impl PartialEq for ReceiveAt {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.maps, &other.maps)
            && (self.address, &self.place, self.passes_unbelieved)
                == (other.address, &other.place, other.passes_unbelieved)
    }
}
