//! The contents of one client task's maps as one value. Everything that shows maps uses this value.
//!
//! A snapshot opens the maps for itself, so that the event loop continues to use its own. Programs
//! and the daemon write meanwhile: the counts of a slot that got another backend during the reading
//! are left out. This module must know neither earlier counts nor how a snapshot is shown.

mod flows;

pub use flows::FlowSnapshot;

use lb_common::abi::{Anomalies, NO_SLOT, Outcomes};

use lb_core::ids::Slot;

use crate::client::tables::{Counts, ServiceView, SlotView, Tables};
use crate::error::DatapathError;

/// The contents of one client task's maps.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Calls of the cgroup to addresses that are not services, and calls of the kernel's own
    /// sockets.
    pub not_a_service: u64,
    /// The anomalies, over all CPUs.
    pub anomalies: Anomalies,
    /// Services in the order of their indexes, including removed ones with open flows.
    pub services: Vec<ServiceSnapshot>,
}

#[derive(Clone, Debug)]
pub struct ServiceSnapshot {
    /// As the maps show it.
    pub view: ServiceView,
    /// Whether some backend may be chosen.
    pub is_usable: bool,
    /// How calls ended, over all CPUs.
    pub outcomes: Outcomes,
    /// Backends in the order of their slots.
    pub backends: Vec<BackendSnapshot>,
}

#[derive(Clone, Debug)]
pub struct BackendSnapshot {
    /// As the maps show it.
    pub slot: SlotView,
    /// Its address as text, as in the labels of metrics.
    pub address: String,
    /// Its part of the entries of the service's table, 0 to 1.
    pub share_wanted: f64,
    pub counts: Counts,
}

impl Snapshot {
    /// Reads a client task's maps.
    ///
    /// Reads the counts of all slots together and distributes them to services afterwards. Reading
    /// service by service would read each slot as often as there are services, because the slots of
    /// services lie between each other.
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

/// The slots that still have the same backend as before their counts were read. The counts of any
/// other slot may be those of the next backend.
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
    fn counts_of_a_slot_that_got_another_backend_meanwhile_are_left_out() {
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
        let kept: Vec<u32> = of_the_same_generation(read.into_iter(), now)
            .map(|((_, slot), _)| slot.at.slot.number())
            .collect();
        assert_eq!(kept, [0]);
    }

    #[test]
    fn a_share_is_a_part_of_the_table_and_nothing_of_an_empty_one() {
        assert_eq!([share(256, 1024), share(0, 1024), share(0, 0)], [0.25, 0.0, 0.0]);
    }
}
