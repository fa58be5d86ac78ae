//! The open flows of one client task, with the services and slots to which the numbers in the flows
//! refer.
//!
//! Flows are read before services and slots, because the service and the backend of a flow exist
//! while the flow is open. If the last flow of a slot ends during the reading, the slot may get
//! another backend before the slot is read. A second reading of the flows shows whether such a flow
//! has ended, or is still open without its backend, which is a fault.

use std::collections::{BTreeMap, BTreeSet};

use lb_core::ids::{BackendRef, Generation, ServiceIndex, Slot};

use crate::client::tables::{ServiceView, SlotView, Tables};
use crate::error::DatapathError;
use crate::host::pins::Pins;
use crate::read::flows::{self, OpenFlow};

/// The open flows of one client task, with the services and slots to which the numbers in the flows
/// refer.
#[derive(Clone, Debug)]
pub struct FlowSnapshot {
    pub client: String,
    pub services: BTreeMap<ServiceIndex, ServiceView>,
    pub slots: BTreeMap<Slot, SlotView>,
    /// The open flows, in no particular order.
    pub flows: Vec<OpenFlow>,
}

impl FlowSnapshot {
    /// Reads a client task's pinned maps.
    ///
    /// # Errors
    /// If a map cannot be opened or read.
    pub fn read(pins: &Pins) -> Result<Self, DatapathError> {
        let tables = Tables::open(pins, false)?;
        let flows = flows::flows(pins)?;
        let mut snapshot = Self {
            client: pins.client.clone(),
            services: tables.services().into_iter().map(|service| (service.index, service)).collect(),
            slots: tables.slots().into_iter().map(|slot| (slot.at.slot, slot)).collect(),
            flows,
        };
        if snapshot.flows.iter().any(|open| snapshot.slot(open).is_none()) {
            snapshot.drop_ended(&flows::flows(pins)?);
        }
        Ok(snapshot)
    }

    /// The slot of a flow, if it still has the flow's backend.
    pub fn slot(&self, open: &OpenFlow) -> Option<&SlotView> {
        slot_of(&self.slots, open)
    }

    /// Removes those flows whose slot has another backend and that are no longer open, because they
    /// ended during the reading. A flow that is still open although its slot has another backend is
    /// a fault, and remains in the snapshot.
    fn drop_ended(&mut self, open_now: &[OpenFlow]) {
        let open_now: BTreeSet<(u64, u64)> = open_now.iter().map(identity).collect();
        let Self { slots, flows, .. } = self;
        flows.retain(|open| slot_of(slots, open).is_some() || open_now.contains(&identity(open)));
    }
}

fn slot_of<'a>(slots: &'a BTreeMap<Slot, SlotView>, open: &OpenFlow) -> Option<&'a SlotView> {
    let at = BackendRef { slot: Slot::new(open.flow.slot)?, generation: Generation(open.flow.generation) };
    slots.get(&at.slot).filter(|slot| slot.at == at)
}

/// Identifies a flow and distinguishes it from a later flow of the same socket.
fn identity(open: &OpenFlow) -> (u64, u64) {
    (open.cookie, open.flow.start_ns)
}

#[cfg(test)]
mod tests {
    use lb_common::abi::{BackendState, EjectionState, Flow, HealthReason, Usable};

    use super::*;

    fn open(cookie: u64, start_ns: u64, slot: u32, generation: u32) -> OpenFlow {
        let flow = Flow { start_ns, slot, generation, ..bytemuck::Zeroable::zeroed() };
        OpenFlow { cookie, flow, is_connected: true }
    }

    #[test]
    fn a_flow_to_a_previous_backend_stays_only_while_open() {
        let at = BackendRef { slot: Slot::new(4).unwrap(), generation: Generation(1) };
        let slot = SlotView {
            at,
            service: ServiceIndex(0),
            address: ([10, 0, 0, 1], 80).into(),
            weight: 1,
            state: BackendState::Member,
            usable: Usable::UnlessEjected,
            reason: HealthReason::Healthy,
            is_probed_healthy: false,
            is_ejected: false,
            is_withheld: false,
            ejection: EjectionState::default(),
            entries: 4,
            report: 0,
            lame_until_ns: 0,
        };
        let mut snapshot = FlowSnapshot {
            client: "web".to_owned(),
            services: BTreeMap::new(),
            slots: [(at.slot, slot)].into(),
            // One flow to the slot's backend, two to its previous backend, and one to a slot that
            // is free.
            flows: vec![open(1, 10, 4, 1), open(2, 20, 4, 0), open(3, 30, 4, 0), open(4, 40, 5, 0)],
        };
        // The first flow has also ended, but its backend is known. The socket of the third flow has
        // a later flow.
        snapshot.drop_ended(&[open(2, 20, 4, 0), open(3, 31, 4, 1)]);
        let retained: Vec<u64> = snapshot.flows.iter().map(|open| open.cookie).collect();
        assert_eq!(retained, [1, 2]);
    }
}
