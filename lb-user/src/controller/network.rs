//! The controller's view of the network: connect probes, the listener that receives reports, and
//! the programs of network interfaces.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lb_core::health::Health;
use lb_core::reports::Name;
use lb_kernel::HostMaps;
use lb_kernel::xdp::Place;
use lb_report::client::reported::Base;
use lb_report::client::senders::{Senders, Target};
use lb_view::status;

use super::Stores;
use crate::probes::{ConnectTarget, Findings, ProbedHealth};
use crate::reports::ExchangeCounts;

/// Probes backends and receives reports beside the controller. It works on its own threads and
/// tasks, and wakes the controller with [`Event::HealthChanged`](super::Event::HealthChanged) when
/// the health of a backend has changed. No call blocks.
pub trait Network: Send {
    /// Sets the targets of connect probes, each with a service that uses it. The earlier targets
    /// are no longer probed.
    fn probe(&mut self, targets: &BTreeMap<ConnectTarget, String>);

    /// Delays the next probe by this time, and so all probes after it.
    fn hold_back(&self, time: Duration);

    /// A number that grows whenever targets or results change.
    fn version(&self) -> u64;

    /// The health of each target that has a result.
    fn results(&self) -> BTreeMap<ConnectTarget, ProbedHealth>;

    /// The results of the probes of a target.
    fn findings(&self, target: &ConnectTarget) -> Option<Findings>;

    /// Starts to receive reports at this address, and to store them in the kernel with `stores`.
    ///
    /// # Errors
    /// If the socket or its thread cannot be created.
    fn listen(&mut self, address: SocketAddr, stores: Stores) -> io::Result<()>;

    /// The listener that receives reports; `None` if [`listen`](Self::listen) was never called.
    fn listener(&self) -> Option<&dyn ReportListener>;

    /// Makes the kernel receive reports only on the interfaces and at the address that `at`
    /// describes.
    fn receive(&mut self, at: Option<ReceiveAt>);

    /// For each interface of the configuration, how reports are received there.
    fn interfaces(&self) -> Vec<status::InterfaceStatus>;

    fn interface_faults(&self) -> Vec<String>;
}

/// The argument of [`ReportListener::look`], which is called with the polled backends, the counts,
/// and the time by CLOCK_MONOTONIC.
pub type LookAtReports<'l> = dyn FnMut(&Senders<Duration>, &ExchangeCounts, Duration) + 'l;

/// Polls agents and receives their reports.
pub trait ReportListener {
    /// The address that the listener is bound to.
    fn address(&self) -> SocketAddr;

    /// Sets the backends that are polled; others are no longer polled. For a backend that was not
    /// polled before, `adopted` returns the last report that an earlier daemon has accepted, and
    /// the time until which the backend is a lame duck.
    fn poll(&self, targets: Vec<Target>, adopted: &dyn Fn(Name) -> (Option<Base>, Option<Duration>));

    /// See [`Senders::poll_first`].
    fn poll_first(&self, names: Vec<Name>, after: Duration, spacing: Duration);

    /// See [`Senders::take_restarted`].
    fn take_restarted(&self) -> BTreeSet<Name>;

    /// The backends that are not healthy according to their reports.
    fn sick(&self) -> BTreeMap<Name, Health>;

    /// Calls `look` once with the current state.
    fn look(&self, look: &mut LookAtReports<'_>);
}

impl dyn ReportListener + '_ {
    /// Calls `of` with the current state, and returns its result.
    pub fn of<R>(&self, of: impl FnOnce(&Senders<Duration>, &ExchangeCounts, Duration) -> R) -> R {
        let (mut of, mut made) = (Some(of), None);
        self.look(&mut |senders, counts, now| made = of.take().map(|of| of(senders, counts, now)));
        made.expect("`look` calls its argument once")
    }
}

/// The interfaces and the address at which the kernel receives reports without the daemon.
#[derive(Clone)]
pub struct ReceiveAt {
    /// The maps in which accepted reports are stored.
    pub maps: Arc<HostMaps>,
    /// The address at which the daemon listens.
    pub address: SocketAddr,
    /// The interfaces.
    pub place: Place,
    /// Whether the daemon also receives the datagrams that the kernel's program does not accept.
    pub passes_unbelieved: bool,
}
