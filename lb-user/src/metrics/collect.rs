//! Collects the values of one client task for a page: the event loop's state, and a snapshot of the
//! maps, which are opened for each page.

use std::collections::BTreeSet;

use lb_core::ids::BackendRef;
use lb_kernel::{BackendSnapshot, DatapathError, Fullness, Snapshot, Tables};

use crate::counts::window::{Lately, Recent};
use crate::output::facts::ClientFacts;

#[derive(Debug)]
pub struct ClientMetrics {
    pub facts: ClientFacts,
    /// The contents of the client's maps; `None` if they cannot be read.
    pub maps: Option<MapMetrics>,
}

/// The contents of the maps of one client task.
#[derive(Debug)]
pub struct MapMetrics {
    pub fullness: [Fullness; 5],
    /// Contains each service name only once.
    pub snapshot: Snapshot,
    /// The backends to which all connects of the last minute failed.
    pub failing: BTreeSet<BackendRef>,
}

/// Collects the values of a client task.
pub fn collect(facts: ClientFacts) -> ClientMetrics {
    let maps = Tables::open(&facts.pins, false).and_then(|tables| read_maps(&tables, facts.lately.as_ref()));
    let maps = maps.inspect_err(|error| {
        // The failure is logged only at level debug: the metric `socklb_client_readable` shows it,
        // and a warning would be repeated with every scrape.
        tracing::debug!(client = %facts.pins.client, error = %crate::error::chain(error), "the client's maps cannot be read for metrics");
    });
    ClientMetrics { maps: maps.ok(), facts }
}

fn read_maps(tables: &Tables, lately: Option<&Lately>) -> Result<MapMetrics, DatapathError> {
    let mut snapshot = Snapshot::read(tables)?;
    // A service that was removed and configured again may have two indexes until the last flow of
    // the old index has ended. A series has only one value, which comes from the new index.
    snapshot.services.sort_by(|a, b| (&a.view.name, b.view.open).cmp(&(&b.view.name, a.view.open)));
    snapshot.services.dedup_by(|one, before| one.view.name == before.view.name);
    let backends = snapshot.services.iter().flat_map(|service| &service.backends);
    let failing = backends.filter(|backend| lately.is_some_and(|lately| is_failing(backend, lately)));
    let failing = failing.map(|backend| backend.slot.at).collect();
    Ok(MapMetrics { fullness: tables.fullness()?, snapshot, failing })
}

/// Whether a backend is failing, by the rule of `socklb status`.
fn is_failing(backend: &BackendSnapshot, lately: &Lately) -> bool {
    let BackendSnapshot { slot, counts, .. } = backend;
    let recent = lately.recent(slot.at, &counts.sums);
    Recent::is_failing_backend(slot.usable.is_usable(), recent.as_ref())
}
