//! Rows and totals: what was counted, and how even connections and load are at the end of a step and of a run.
//!
//! Counts are checked against each other at the end. Must not change what happens.

use super::{Backend, World, float};
use crate::metrics::Spread;
use crate::traffic::tally::{Row, Total, utilization_of};

impl World<'_> {
    /// Connections that are open now.
    pub(super) fn open(&self) -> u64 {
        self.backends.iter().map(|backend| backend.connections).sum()
    }

    fn connections(&self) -> Spread {
        let wanted = self.backends.iter().filter(|backend| backend.wanted_since.is_some());
        Spread::of(&wanted.map(|backend| float(backend.connections)).collect::<Vec<_>>())
    }

    pub(super) fn row(&mut self, end_us: u64) -> Row {
        let (start_us, before) = self.at_last_row;
        self.at_last_row = (end_us, self.counts);
        let steady = |backend: &&Backend| backend.wanted_since.is_some_and(|since| since <= start_us);
        let loads = self.backends.iter().filter(steady).map(|backend| backend.per_weight(backend.step_load));
        let loads: Vec<f64> = loads.collect();
        self.backends.iter_mut().for_each(|backend| backend.step_load = 0);
        let running = self.backends.iter().filter(|backend| backend.is_up()).count();
        let clients = self.clients.iter().flatten().count();
        Row {
            run: self.run.name.clone(),
            at_us: end_us,
            backends: u32::try_from(running).expect("backends are counted in 32 bits"),
            clients: u32::try_from(clients).expect("clients are counted in 32 bits"),
            connections: self.connections(),
            load: Spread::of(&loads),
            utilization: utilization_of(&loads),
            counts: self.counts.since(before),
        }
    }

    pub(super) fn total(&self, rows: &[Row]) -> Total {
        let lasting = |backend: &&Backend| backend.exists && backend.exists_since == 0 && backend.weight > 0;
        let lasting: Vec<&Backend> = self.backends.iter().filter(lasting).collect();
        let loads: Vec<f64> = lasting.iter().map(|backend| backend.per_weight(backend.load)).collect();
        let unused = lasting.iter().filter(|backend| backend.load == 0 && backend.connections == 0).count();
        let failed = |row: &Row| float(row.counts.errors.sum()) / float(row.counts.arrivals.max(1));
        let counts = self.counts;
        let ended = counts.served + counts.abandoned + counts.errors.sum();
        let total = Total {
            run: self.run.name.clone(),
            counts,
            under_way: counts.arrivals - ended,
            connections_at_start: self.connections_at_start,
            connections_at_end: self.open(),
            connections: self.connections(),
            load: Spread::of(&loads),
            utilization: utilization_of(&loads),
            unused: u32::try_from(unused).expect("backends are counted in 32 bits"),
            worst_errors: rows.iter().map(failed).fold(0.0, f64::max),
        };
        let flows = self.clients.iter().flatten().flat_map(|client| client.links.iter().flatten());
        let flows: u64 = flows.map(|link| u64::from(link.flows)).sum();
        let pending = self.clients.iter().flatten().flat_map(|client| &client.pending);
        let flows = flows + pending.map(|pending| u64::from(*pending)).sum::<u64>();
        assert_eq!(total.under_way, flows, "every arrival is counted once");
        let ever = self.connections_at_start + counts.opened;
        let ended = counts.closed + counts.dropped;
        assert_eq!(ever - ended, total.connections_at_end, "every connection is counted once");
        total
    }
}
