//! What the maps of one client task hold, read in one pass for whoever shows it: status and metrics alike.
//!
//! It reads by maps that are opened for it, so that the event loop goes on with its own. Counts of all slots are read
//! together and handed out to services afterwards: reading them service by service would read the slots of others as
//! often as there are services, because the slots of one lie between those of others.

use lb_common::abi::{Anomalies, NO_SLOT, Outcomes};
use lb_kernel::{Counts, DatapathError, ServiceView, SlotView, Tables};

use crate::window::{Lately, Recent};

/// What the maps of one client task hold.
#[derive(Debug)]
pub struct Readout {
    /// Connects of the cgroup to addresses that are no service.
    pub not_a_service: u64,
    /// What should not happen.
    pub anomalies: Anomalies,
    /// Services in the order of their indexes, removed ones with open flows included.
    pub services: Vec<ServiceReadout>,
}

/// One service.
#[derive(Debug)]
pub struct ServiceReadout {
    /// As the maps show it.
    pub view: ServiceView,
    /// Whether some backend may be chosen.
    pub is_usable: bool,
    /// How connects ended.
    pub outcomes: Outcomes,
    /// Connects that were refused of late because all backends were at their limit, if somebody has watched.
    pub limited: Option<u64>,
    /// Backends by slot.
    pub backends: Vec<BackendReadout>,
}

/// One backend.
#[derive(Debug)]
pub struct BackendReadout {
    /// As the maps show it.
    pub slot: SlotView,
    /// Its address in text, as labels of metrics have it.
    pub address: String,
    /// Its part of the service's table.
    pub share_wanted: f64,
    /// What was counted.
    pub counts: Counts,
    /// What was counted of late, if somebody has watched.
    pub recent: Option<Recent>,
}

impl BackendReadout {
    /// Whether connects are sent to it, and nothing but failures came of them lately.
    pub fn is_failing(&self) -> bool {
        self.slot.usable && self.recent.as_ref().is_some_and(Recent::is_failing)
    }
}

/// Reads a client task's maps; `lately` is what somebody has watched.
///
/// # Errors
/// If the kernel refuses a look-up.
pub fn read(tables: &Tables, lately: Option<&Lately>) -> Result<Readout, DatapathError> {
    let mut services = Vec::new();
    for view in tables.services() {
        let outcomes = tables.outcomes(view.index)?;
        services.push(ServiceReadout {
            is_usable: view.fallback != NO_SLOT,
            limited: lately
                .filter(|_| view.rules.active_limit != 0)
                .and_then(|lately| lately.window.limited(view.index, outcomes.limited)),
            outcomes,
            view,
            backends: Vec::new(),
        });
    }
    let index_of =
        |slot: &SlotView| services.binary_search_by_key(&slot.service, |other| other.view.index).ok();
    let slots: Vec<(usize, SlotView)> =
        tables.slots().into_iter().filter_map(|slot| Some((index_of(&slot)?, slot))).collect();
    let numbers: Vec<u32> = slots.iter().map(|(_, slot)| slot.slot).collect();
    let mut counted = Vec::with_capacity(slots.len());
    tables.visit_counts(&numbers, |_, counts| counted.push(counts))?;
    for ((service, slot), counts) in of_the_same(slots.into_iter().zip(counted), |slot| tables.slot(slot)) {
        let service = &mut services[service];
        service.backends.push(BackendReadout {
            address: slot.address.to_string(),
            share_wanted: share(slot.entries, service.view.table.len()),
            recent: lately.and_then(|lately| lately.recent((slot.slot, slot.generation), &counts.sums)),
            slot,
            counts,
        });
    }
    Ok(Readout { not_a_service: tables.passed_by()?, anomalies: tables.anomalies()?, services })
}

/// Those whose slot is still the same backend's: another may have taken it meanwhile, and what was counted may be its own.
fn of_the_same(
    read: impl Iterator<Item = ((usize, SlotView), Counts)>,
    now: impl Fn(u32) -> Option<SlotView>,
) -> impl Iterator<Item = ((usize, SlotView), Counts)> {
    read.filter(move |((_, before), _)| {
        now(before.slot).is_some_and(|now| now.generation == before.generation)
    })
}

fn share(entries: u32, length: u32) -> f64 {
    if length == 0 { 0.0 } else { f64::from(entries) / f64::from(length) }
}

#[cfg(test)]
mod tests {
    use lb_common::abi::BackendState;

    use super::*;

    #[test]
    fn what_was_counted_in_a_slot_that_was_taken_meanwhile_is_nobodys() {
        let view = |slot, generation| SlotView {
            slot,
            generation,
            service: 0,
            address: "192.0.2.1:80".parse().unwrap(),
            weight: 1,
            state: BackendState::Healthy,
            usable: true,
            entries: 4,
        };
        let before = [view(0, 1), view(1, 1), view(2, 7)];
        let read = before.map(|slot| ((0, slot), Counts::default()));
        // The second is another's now, the third is free.
        let now = |slot| [Some(view(0, 1)), Some(view(1, 2)), None][slot as usize];
        let kept: Vec<u32> = of_the_same(read.into_iter(), now).map(|((_, slot), _)| slot.slot).collect();
        assert_eq!(kept, [0]);
    }
}
