//! What is read from the maps for one page, by maps that are opened for it: the event loop goes on with its own.

use lb_common::abi::{Anomalies, NO_SLOT, Outcomes};

use super::ClientFacts;
use crate::datapath::{Counts, DatapathError, Fullness, ServiceView, SlotView, Tables};

/// One client task.
#[derive(Debug)]
pub struct ClientReadout {
    pub facts: ClientFacts,
    /// What its maps hold; nothing if they cannot be read.
    pub maps: Option<MapsReadout>,
}

/// What the maps of one client task hold.
#[derive(Debug)]
pub struct MapsReadout {
    pub not_a_service: u64,
    pub anomalies: Anomalies,
    pub fullness: [Fullness; 5],
    /// Each name once.
    pub services: Vec<ServiceReadout>,
}

/// One service.
#[derive(Debug)]
pub struct ServiceReadout {
    pub view: ServiceView,
    pub is_usable: bool,
    pub outcomes: Outcomes,
    pub backends: Vec<BackendReadout>,
}

/// One backend.
#[derive(Debug)]
pub struct BackendReadout {
    pub slot: SlotView,
    /// As labels have it.
    pub address: String,
    pub share_wanted: f64,
    pub counts: Counts,
}

/// Reads a client task's maps.
pub fn read(facts: ClientFacts) -> ClientReadout {
    let maps = Tables::open(&facts.pins, false).and_then(|tables| read_maps(&tables));
    let maps = maps.inspect_err(|error| {
        // No warning: whoever scrapes sees it, and this comes once per scrape.
        tracing::debug!(client = %facts.pins.client, error = %crate::chain(error), "maps cannot be read for metrics");
    });
    ClientReadout { maps: maps.ok(), facts }
}

fn read_maps(tables: &Tables) -> Result<MapsReadout, DatapathError> {
    let mut views = tables.services();
    // A service that was removed and configured again may have two places until the last flow of the old one has ended. A
    // series has one value, and it is the new one's.
    views.sort_by(|a, b| (&a.name, b.open).cmp(&(&b.name, a.open)));
    views.dedup_by(|one, before| one.name == before.name);
    let mut services = Vec::with_capacity(views.len());
    for view in views {
        services.push(ServiceReadout {
            is_usable: view.fallback != NO_SLOT,
            outcomes: tables.outcomes(view.place)?,
            view,
            backends: Vec::new(),
        });
    }
    let place_of = |slot: &SlotView| services.iter().position(|service| service.view.place == slot.service);
    let slots: Vec<(usize, SlotView)> =
        tables.slots().into_iter().filter_map(|slot| Some((place_of(&slot)?, slot))).collect();
    let numbers: Vec<u32> = slots.iter().map(|(_, slot)| slot.slot).collect();
    let mut counted = Vec::with_capacity(slots.len());
    tables.visit_counts(&numbers, |_, counts| counted.push(counts))?;
    for ((service, slot), counts) in slots.into_iter().zip(counted) {
        // Another backend may have taken the slot meanwhile, and what was counted may be its own.
        if tables.slot(slot.slot).is_none_or(|now| now.generation != slot.generation) {
            continue;
        }
        let service = &mut services[service];
        service.backends.push(BackendReadout {
            address: slot.address.to_string(),
            share_wanted: share(slot.entries, service.view.table.len()),
            slot,
            counts,
        });
    }
    Ok(MapsReadout {
        not_a_service: tables.passed_by()?,
        anomalies: tables.anomalies()?,
        fullness: tables.fullness()?,
        services,
    })
}

fn share(entries: u32, length: u32) -> f64 {
    if length == 0 { 0.0 } else { f64::from(entries) / f64::from(length) }
}
