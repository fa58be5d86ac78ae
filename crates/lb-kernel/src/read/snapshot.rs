//! The contents of one client task's maps as one value, which all output about maps uses.
//!
//! A snapshot is read from separately opened maps, so the daemon's event loop can continue during
//! the reading. Programs and the daemon write to the maps during the reading: a slot that gets
//! another backend during the reading is omitted. This module must not depend on earlier counts, or
//! on how a snapshot is shown.

mod flows;

pub use flows::FlowSnapshot;

use lb_common::abi::{Anomalies, NO_SLOT, Outcomes};

use lb_core::ids::Slot;

use crate::client::tables::{Counts, ServiceView, SlotView, Tables};
use crate::error::DatapathError;

/// The contents of one client task's maps.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The number of calls in the cgroup to addresses that are not services, and of calls of the
    /// kernel's own sockets.
    pub not_a_service: u64,
    /// The counts of anomalies, summed over all CPUs.
    pub anomalies: Anomalies,
    /// The services in the order of their indexes, including removed services with open flows.
    pub services: Vec<ServiceSnapshot>,
}

#[derive(Clone, Debug)]
pub struct ServiceSnapshot {
    /// The service's row in the maps.
    pub view: ServiceView,
    /// Whether any backend may be chosen.
    pub is_usable: bool,
    /// The outcomes of calls, summed over all CPUs.
    pub outcomes: Outcomes,
    /// The backends in the order of their slots.
    pub backends: Vec<BackendSnapshot>,
}

#[derive(Clone, Debug)]
pub struct BackendSnapshot {
    /// The backend's row in the maps.
    pub slot: SlotView,
    /// The backend's address as text, as in the labels of metrics.
    pub address: String,
    /// The backend's fraction of the entries in the service's table, from 0 to 1.
    pub share_wanted: f64,
    pub counts: Counts,
}

impl Snapshot {
    /// Reads a client task's maps.
    ///
    /// The function reads the counts of all slots together and assigns them to services afterwards.
    /// If it read the counts service by service in batches, it would read most slots several times,
    /// because the slots of different services are interleaved.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn read(tables: &Tables) -> Result<Self, DatapathError> {
        let mut services = Vec::new();
        for view in tables.services() {
            let outcomes = tables.outcomes(view.index)?;
            let is_usable = view.fallback != NO_SLOT;
            services.push(ServiceSnapshot { view, is_usable, outcomes, backends: Vec::new() });
        }
        let position_of =
            |slot: &SlotView| services.binary_search_by_key(&slot.service, |other| other.view.index).ok();
        let slots: Vec<(usize, SlotView)> =
            tables.slots().into_iter().filter_map(|slot| Some((position_of(&slot)?, slot))).collect();
        let occupied: Vec<Slot> = slots.iter().map(|(_, slot)| slot.at.slot).collect();
        let mut counted = Vec::with_capacity(slots.len());
        tables.visit_counts(&occupied, |_, counts| counted.push(counts))?;
        let same = of_the_same_generation(slots.into_iter().zip(counted), |slot| tables.slot(slot));
        for ((position, slot), counts) in same {
            let service = &mut services[position];
            service.backends.push(BackendSnapshot {
                address: slot.address.to_string(),
                share_wanted: share(slot.entries, service.view.table.len()),
                slot,
                counts,
            });
        }
        Ok(Self { not_a_service: tables.not_a_service()?, anomalies: tables.anomalies()?, services })
    }
}

/// Those slots that still have the same backend as before their counts were read. The counts of any
/// other slot may be those of its next backend.
fn of_the_same_generation(
    read: impl Iterator<Item = ((usize, SlotView), Counts)>,
    now: impl Fn(Slot) -> Option<SlotView>,
) -> impl Iterator<Item = ((usize, SlotView), Counts)> {
    read.filter(move |((_, before), _)| now(before.at.slot).is_some_and(|now| now.at == before.at))
}

fn share(entries: u32, length: u32) -> f64 {
    if length == 0 { 0.0 } else { f64::from(entries) / f64::from(length) }
}

#[cfg(test)]
mod tests {
    use lb_common::abi::{BackendState, EjectionState, HealthReason, Usable};
    use lb_core::ids::{BackendRef, Generation, ServiceIndex};

    use super::*;

    #[test]
    fn slots_reused_during_the_reading_are_left_out() {
        let view = |slot, generation| SlotView {
            at: BackendRef { slot: Slot::new(slot).unwrap(), generation: Generation(generation) },
            service: ServiceIndex(0),
            address: "192.0.2.1:80".parse().unwrap(),
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
        let before = [view(0, 1), view(1, 1), view(2, 7)];
        let read = before.map(|slot| ((0, slot), Counts::default()));
        // The second slot has another backend now, and the third is free.
        let now = |slot: Slot| [Some(view(0, 1)), Some(view(1, 2)), None][slot.index()];
        let retained: Vec<u32> = of_the_same_generation(read.into_iter(), now)
            .map(|((_, slot), _)| slot.at.slot.number())
            .collect();
        assert_eq!(retained, [0]);
    }

    #[test]
    fn a_share_is_a_part_of_the_table_and_zero_if_it_is_empty() {
        assert_eq!([share(256, 1024), share(0, 1024), share(0, 0)], [0.25, 0.0, 0.0]);
    }
}
