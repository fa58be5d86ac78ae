//! What the controller has of the network: probes by connection, the listener that receives reports, and the programs of network interfaces.

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

/// What probes and receives beside the controller. It works by itself, and wakes the controller with
/// [`Event::Heard`](super::Event::Heard) when it has found a backend otherwise than before. Nothing here blocks.
pub trait Network: Send {
    /// Probes these by connection and no others, each for a service that wants it.
    fn probe(&mut self, targets: &BTreeMap<ConnectTarget, String>);

    /// Begins no probe before this time has passed.
    fn hold_back(&self, time: Duration);

    /// Counts what probes have found otherwise than before.
    fn version(&self) -> u64;

    /// How all targets of which something is known are by their probes.
    fn results(&self) -> BTreeMap<ConnectTarget, ProbedHealth>;

    /// What the probes of a target have found.
    fn findings(&self, target: &ConnectTarget) -> Option<Findings>;

    /// Begins to receive reports at this address, in which the kernel's entries are stored by `stores`.
    ///
    /// # Errors
    /// If there is no socket or no thread for it.
    fn listen(&mut self, address: SocketAddr, stores: Stores) -> io::Result<()>;

    /// The listener that receives reports; `None` if it was never begun.
    fn listener(&self) -> Option<&dyn ReportListener>;

    /// Has the kernel take reports in where `at` says from now on, and nowhere else.
    fn receive(&mut self, at: Option<ReceiveAt>);

    /// How reports come in on the interfaces of the configuration.
    fn interfaces(&self) -> Vec<status::InterfaceStatus>;

    /// What is wrong with these.
    fn interface_faults(&self) -> Vec<String>;
}

/// What [`ReportListener::look`] shows: who is polled, what came, and the time by CLOCK_MONOTONIC.
pub type LookAtReports<'l> = dyn FnMut(&Senders<Duration>, &ExchangeCounts, Duration) + 'l;

/// Polls agents and receives their reports.
pub trait ReportListener {
    /// Where it listens.
    fn address(&self) -> SocketAddr;

    /// Polls these from now on and no others. `adopted`: what an earlier daemon had believed of one that is new.
    fn poll(&self, targets: Vec<Target>, adopted: &dyn Fn(Name) -> (Option<Base>, Option<Duration>));

    /// As [`Senders::poll_first`].
    fn poll_first(&self, names: Vec<Name>, after: Duration, spacing: Duration);

    /// As [`Senders::take_restarted`].
    fn take_restarted(&self) -> BTreeSet<Name>;

    /// The backends that are not healthy by their reports.
    fn sick(&self) -> BTreeMap<Name, Health>;

    /// Shows what is known.
    fn look(&self, look: &mut LookAtReports<'_>);
}

impl dyn ReportListener + '_ {
    /// What `of` makes of what is known.
    pub fn of<R>(&self, of: impl FnOnce(&Senders<Duration>, &ExchangeCounts, Duration) -> R) -> R {
        let (mut of, mut made) = (Some(of), None);
        self.look(&mut |senders, counts, now| made = of.take().map(|of| of(senders, counts, now)));
        made.expect("a look shows once")
    }
}

/// Where the kernel takes in reports by itself.
#[derive(Clone)]
pub struct ReceiveAt {
    /// The maps that hold what is believed.
    pub maps: Arc<HostMaps>,
    /// Where the daemon listens.
    pub address: SocketAddr,
    /// On which interfaces.
    pub place: Place,
    /// Whether the daemon is to see what is not believed.
    pub passes_unbelieved: bool,
}
