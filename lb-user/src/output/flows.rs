//! The active flows, one by one: client, process, backend, phase, and the reason for the choice.
//!
//! The flows are read from the pinned maps and `/proc`, without a daemon. In memory, a flow
//! occupies only the bytes that the kernel stores for it, so that a hundred thousand flows fit.
//! Names are looked up when a flow is shown.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use lb_common::abi::{BackendState, Phase, Policy, Reason};
use lb_core::ids::ServiceIndex;
use lb_kernel::process::{self, Process};
use lb_kernel::{DatapathError, FlowSnapshot, Linux, OpenFlow, Pins, SlotView};
use lb_view::filter::Filter;
use lb_view::flows::{ActiveFlow, SCHEMA};
use lb_view::status::LeavingClient;
use lb_view::text::Listing;
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use thiserror::Error;

use super::names::{self, BackendsByService};
use super::status;

/// Why flows cannot be shown.
#[derive(Debug, Error)]
pub enum FlowsError {
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    #[error("{0}")]
    Unknown(String),
}

/// The active flows at one moment.
pub struct FlowReport {
    clients: Vec<FlowSnapshot>,
    /// Indexes of client and flow, sorted by age; the oldest flow is first.
    order: Vec<(u32, u32)>,
    processes: BTreeMap<u32, Process>,
    now_ns: u64,
    /// Leaving clients of another version. Only the number of their flows can be read.
    pub leaving: Vec<LeavingClient>,
    /// Clients with maps that could not be read, each with the reason. For example, a start is
    /// under way or was interrupted.
    pub unreadable: Vec<String>,
}

/// Finds the flows below a directory of pins.
///
/// # Errors
/// If the directory cannot be read, a permission is missing, or the filter names something that
/// does not exist. If the maps of one client cannot be read for another reason, `unreadable` names
/// the client.
pub fn find(directory: &Path, filter: &Filter) -> Result<FlowReport, FlowsError> {
    let all = Pins::all_versions(directory)?;
    let place = format!("below {}", directory.display());
    names::check_client(filter, all.iter().map(|pins| pins.client.as_str()), &place)
        .map_err(FlowsError::Unknown)?;
    let (mut clients, mut leaving, mut unreadable) = (Vec::new(), Vec::new(), Vec::new());
    for pins in all.iter().filter(|pins| filter.has_client(&pins.client)) {
        if !pins.is_of_this_version() {
            leaving.push(status::leaving(&Linux, pins));
            continue;
        }
        match FlowSnapshot::read(pins) {
            Ok(client) => clients.push(client),
            Err(error) if error.is_permission() => return Err(error.into()),
            Err(error) => unreadable.push(format!("client {}: {}", pins.client, crate::error::chain(&error))),
        }
    }
    names::check(filter, || backends_by_service(clients.iter())).map_err(FlowsError::Unknown)?;
    for client in &mut clients {
        apply_filter(client, filter);
    }
    Ok(FlowReport { leaving, unreadable, ..FlowReport::of(clients, lb_kernel::monotonic_ns()) })
}

/// The backends of each service of these clients, including removed backends with open flows.
pub fn backends_by_service<'a>(clients: impl Iterator<Item = &'a FlowSnapshot>) -> BackendsByService<'a> {
    let mut backends = BackendsByService::new();
    for client in clients {
        for (index, service) in &client.services {
            let slots = client.slots.values().filter(|slot| slot.service == *index);
            backends.entry(&service.name).or_default().extend(slots.map(|slot| slot.address));
        }
    }
    backends
}

/// Removes the flows that the filter excludes.
fn apply_filter(client: &mut FlowSnapshot, filter: &Filter) {
    let mut flows = std::mem::take(&mut client.flows);
    // A filter with a service excludes flows of unknown services; a filter with a backend excludes
    // flows of unknown backends.
    let service = |open: &OpenFlow| client.services.get(&ServiceIndex(open.flow.service));
    flows.retain(|open| {
        service(open).map_or(filter.service.is_none(), |service| filter.has_service(&service.name))
            && client.slot(open).map_or(filter.backend.is_none(), |slot| filter.has_backend(slot.address))
    });
    client.flows = flows;
}

impl FlowReport {
    fn of(clients: Vec<FlowSnapshot>, now_ns: u64) -> Self {
        let mut order: Vec<(u32, u32)> = Vec::new();
        let mut pids = BTreeSet::new();
        for (client, of) in (0u32..).zip(&clients) {
            order.extend((0u32..).zip(&of.flows).map(|(flow, _)| (client, flow)));
            pids.extend(of.flows.iter().map(|open| open.flow.process));
        }
        let open = |(client, flow): (u32, u32)| &clients[client as usize].flows[flow as usize];
        order.sort_by_cached_key(|at| (open(*at).flow.start_ns, at.0, open(*at).cookie));
        let processes = if process::numbers_are_ours() {
            pids.into_iter().filter_map(|pid| Some((pid, process::process(pid)?))).collect()
        } else {
            BTreeMap::new()
        };
        Self { clients, order, processes, now_ns, leaving: Vec::new(), unreadable: Vec::new() }
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// One flow. Number 0 is the oldest.
    ///
    /// # Panics
    /// If `number` is not less than [`FlowReport::len`].
    pub fn flow(&self, number: usize) -> ActiveFlow<'_> {
        let (client, flow) = self.order[number];
        let client = &self.clients[client as usize];
        let open = &client.flows[flow as usize];
        let flow = &open.flow;
        let service = client.services.get(&ServiceIndex(flow.service));
        let slot = client.slot(open);
        let table = service.map(|service| service.table);
        let table = table.filter(|table| table.generation == flow.table_generation && !table.is_empty());
        ActiveFlow {
            client: client.client.as_str().into(),
            service: service.map(|service| service.name.as_str().into()),
            address: service.map(|service| service.address),
            backend: slot.map(|slot| slot.address),
            slot: flow.slot,
            generation: flow.generation,
            state: slot.map_or("another backend", state_of).into(),
            phase: Phase::from_u8(flow.phase).map_or("unknown", Phase::name).into(),
            process: flow.process,
            process_name: self
                .processes
                .get(&flow.process)
                .and_then(|process| process.name_at(flow.start_ns))
                .map(Cow::Borrowed),
            // The kernel programs' clock may be up to one tick behind this clock, but is never
            // ahead of it.
            age_s: Duration::from_nanos(self.now_ns.saturating_sub(flow.start_ns)).as_secs_f64(),
            policy: Policy::from_u8(flow.why & 15).map_or("unknown", Policy::name).into(),
            reason: Reason::from_u8(flow.why >> 4).map_or("unknown", Reason::name).into(),
            table_generation: flow.table_generation,
            table_entries: flow.entries,
            table_share: table.map(|table| f64::from(flow.entries) / f64::from(table.len())),
            sample: flow.sample,
            cookie: open.cookie,
            namespace: flow.namespace,
        }
    }

    pub fn listing<'r>(&'r self) -> Listing<'r, impl Fn(usize) -> ActiveFlow<'r>> {
        Listing {
            count: self.len(),
            flow: |number| self.flow(number),
            has_many_clients: self.clients.len() > 1,
            leaving: &self.leaving,
            unreadable: &self.unreadable,
        }
    }

    /// All flows, oldest first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = ActiveFlow<'_>> {
        (0..self.len()).map(|number| self.flow(number))
    }
}

impl Serialize for FlowReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        /// Serializes one flow after another, so that the texts of all flows are never in memory
        /// together.
        struct FlowSequence<'a>(&'a FlowReport);
        impl Serialize for FlowSequence<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_seq(self.0.iter())
            }
        }
        let mut document = serializer.serialize_struct("Flows", 4)?;
        document.serialize_field("schema", &SCHEMA)?;
        document.serialize_field("flows", &FlowSequence(self))?;
        document.serialize_field("leaving", &self.leaving)?;
        document.serialize_field("unreadable", &self.unreadable)?;
        document.end()
    }
}

/// The state of a flow's backend: its health, or that it is leaving.
fn state_of(slot: &SlotView) -> &'static str {
    match slot.state {
        BackendState::Leaving => BackendState::Leaving.name(),
        _ => status::health(slot).name(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use lb_common::abi::{self, BackendState, EjectionState, HealthReason, Usable};
    use lb_core::ids::{BackendRef, Generation, Slot};
    use lb_kernel::SlotView;
    use lb_view::flows::FlowsDocument;

    use super::*;

    fn open(cookie: u64, start_s: u64, slot: u32, generation: u32) -> OpenFlow {
        let flow = abi::Flow {
            start_ns: start_s * 1_000_000_000,
            slot,
            generation,
            why: Policy::P2c as u8 | (Reason::Overflow as u8) << 4,
            phase: Phase::Connecting as u8,
            ..bytemuck::Zeroable::zeroed()
        };
        OpenFlow { cookie, flow, is_connected: true }
    }

    fn of(name: &str, flows: Vec<OpenFlow>) -> FlowSnapshot {
        let at = BackendRef { slot: Slot::new(4).unwrap(), generation: Generation(1) };
        let view = SlotView {
            at,
            service: ServiceIndex(0),
            address: ([10, 0, 0, 1], 80).into(),
            weight: 1,
            entries: 0,
            report: 0,
            lame_until_ns: 0,
            state: BackendState::Leaving,
            usable: Usable::No,
            reason: HealthReason::Healthy,
            is_probed_healthy: false,
            is_ejected: false,
            is_withheld: false,
            ejection: EjectionState::default(),
        };
        let slots = [(at.slot, view)].into();
        FlowSnapshot { client: name.to_owned(), services: BTreeMap::new(), slots, flows }
    }

    #[test]
    fn flows_of_all_clients_are_sorted_by_age() {
        let web = of("web", vec![open(1, 30, 4, 1), open(2, 10, 4, 1)]);
        let mail = of("mail", vec![open(3, 20, 4, 1), open(4, 41, 4, 1)]);
        let found = FlowReport::of(vec![web, mail], 40_000_000_000);
        let seen: Vec<(String, u64, f64)> =
            found.iter().map(|flow| (flow.client.to_string(), flow.cookie, flow.age_s)).collect();
        // The last flow began after the clock was read.
        let expected = [("web", 2, 30.0), ("mail", 3, 20.0), ("web", 1, 10.0), ("mail", 4, 0.0)];
        assert_eq!(seen, expected.map(|(client, cookie, age)| (client.to_owned(), cookie, age)));
    }

    /// Flows are written one by one, and are read back as one document.
    #[test]
    fn the_flows_document_parses() {
        let found = FlowReport::of(vec![of("web", vec![open(1, 30, 4, 1), open(2, 10, 4, 1)])], 0);
        let written = serde_json::to_value(&found).unwrap();
        let keys: Vec<&str> = written.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["flows", "leaving", "schema", "unreadable"]);
        let read: FlowsDocument = serde_json::from_value(written).unwrap();
        assert_eq!((read.schema, read.flows.len(), read.flows[0].cookie), (SCHEMA, 2, 2));
    }

    #[test]
    fn a_flow_in_a_reused_slot_shows_another_backend() {
        let found =
            FlowReport::of(vec![of("web", vec![open(1, 1, 4, 1), open(2, 2, 4, 0), open(3, 3, 5, 0)])], 0);
        let seen: Vec<(Option<SocketAddr>, Cow<'_, str>)> =
            found.iter().map(|flow| (flow.backend, flow.state)).collect();
        let there = Some(([10, 0, 0, 1], 80).into());
        let expected = [(there, "leaving"), (None, "another backend"), (None, "another backend")];
        assert_eq!(seen, expected.map(|(backend, state)| (backend, Cow::from(state))));
        let first = found.flow(0);
        assert_eq!([first.policy, first.reason, first.phase], ["p2c", "overflow", "connecting"]);
        assert_eq!((first.service, first.table_share, found.listing().has_many_clients), (None, None, false));
    }
}
