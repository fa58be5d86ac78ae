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

/// Probes backends and receives reports beside the controller. It works by itself, and wakes the
/// controller with [`Event::Heard`](super::Event::Heard) when the health of a backend has changed.
/// No call blocks.
pub trait Network: Send {
    /// Makes connect probes of these targets and no others, each for a service that wants it.
    fn probe(&mut self, targets: &BTreeMap<ConnectTarget, String>);

    /// Begins no probe before this time has passed.
    fn hold_back(&self, time: Duration);

    /// A number that grows whenever targets or results change.
    fn version(&self) -> u64;

    /// The health of all targets that have a result.
    fn results(&self) -> BTreeMap<ConnectTarget, ProbedHealth>;

    /// What the probes of a target have found.
    fn findings(&self, target: &ConnectTarget) -> Option<Findings>;

    /// Begins to receive reports at this address and to store them in the kernel's entries with
    /// `stores`.
    ///
    /// # Errors
    /// If the socket or the thread for it cannot be created.
    fn listen(&mut self, address: SocketAddr, stores: Stores) -> io::Result<()>;

    /// The listener that receives reports; `None` if [`listen`](Self::listen) was never called.
    fn listener(&self) -> Option<&dyn ReportListener>;

    /// Makes the kernel receive reports where `at` describes, from now on, and nowhere else.
    fn receive(&mut self, at: Option<ReceiveAt>);

    /// How reports are received on the interfaces of the configuration.
    fn interfaces(&self) -> Vec<status::InterfaceStatus>;

    fn interface_faults(&self) -> Vec<String>;
}

/// The argument of [`ReportListener::look`]: the polled backends, the counts, and the time by
/// CLOCK_MONOTONIC.
pub type LookAtReports<'l> = dyn FnMut(&Senders<Duration>, &ExchangeCounts, Duration) + 'l;

/// Polls agents and receives their reports.
pub trait ReportListener {
    /// The address at which it listens.
    fn address(&self) -> SocketAddr;

    /// Polls these backends from now on and no others. `adopted` returns what an earlier daemon had
    /// believed of a new one.
    fn poll(&self, targets: Vec<Target>, adopted: &dyn Fn(Name) -> (Option<Base>, Option<Duration>));

    /// As [`Senders::poll_first`].
    fn poll_first(&self, names: Vec<Name>, after: Duration, spacing: Duration);

    /// As [`Senders::take_restarted`].
    fn take_restarted(&self) -> BTreeSet<Name>;

    /// The backends that are not healthy by their reports.
    fn sick(&self) -> BTreeMap<Name, Health>;

    /// Calls `look` once with the current state.
    fn look(&self, look: &mut LookAtReports<'_>);
}

impl dyn ReportListener + '_ {
    /// Returns what `of` makes of the current state.
    pub fn of<R>(&self, of: impl FnOnce(&Senders<Duration>, &ExchangeCounts, Duration) -> R) -> R {
        let (mut of, mut made) = (Some(of), None);
        self.look(&mut |senders, counts, now| made = of.take().map(|of| of(senders, counts, now)));
        made.expect("a look shows once")
    }
}

/// Where the kernel receives reports by itself.
#[derive(Clone)]
pub struct ReceiveAt {
    /// The maps that hold the believed reports.
    pub maps: Arc<HostMaps>,
    /// Where the daemon listens.
    pub address: SocketAddr,
    /// The interfaces.
    pub place: Place,
    /// Whether the daemon is to receive the datagrams that the kernel does not believe.
    pub passes_unbelieved: bool,
}
