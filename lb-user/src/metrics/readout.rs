//! What is read from the maps for one page, by maps that are opened for it: the event loop goes on with its own.

use lb_kernel::{DatapathError, Fullness, Tables};

use crate::facts::ClientFacts;
use crate::readout::{self, Readout};
use crate::window::Lately;

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
    pub fullness: [Fullness; 5],
    /// With each service name once.
    pub held: Readout,
}

/// Reads a client task's maps.
pub fn read(facts: ClientFacts) -> ClientReadout {
    let maps = Tables::open(&facts.pins, false).and_then(|tables| read_maps(&tables, facts.lately.as_ref()));
    let maps = maps.inspect_err(|error| {
        // No warning: whoever scrapes sees it, and this comes once per scrape.
        tracing::debug!(client = %facts.pins.client, error = %crate::error::chain(error), "maps cannot be read for metrics");
    });
    ClientReadout { maps: maps.ok(), facts }
}

fn read_maps(tables: &Tables, lately: Option<&Lately>) -> Result<MapsReadout, DatapathError> {
    let mut held = readout::read(tables, lately)?;
    // A service that was removed and configured again may have two places until the last flow of the old one has ended. A
    // series has one value, and it is the new one's.
    held.services.sort_by(|a, b| (&a.view.name, b.view.open).cmp(&(&b.view.name, a.view.open)));
    held.services.dedup_by(|one, before| one.view.name == before.view.name);
    Ok(MapsReadout { fullness: tables.fullness()?, held })
}
