//! Rows and totals: the counts at the end of each step and of the run, and how even connections and
//! load were.
//!
//! At the end of the run, checks that the counts are consistent. This module must not change the
//! course of the run.

use super::machine_work::SimulatedServer;
use super::{SimulatedBackend, Simulation};
use crate::metrics::{Spread, float};
use crate::traffic::tally::{LoadTotal, StepRow, Total, Traces, WeightChanges, utilization_of};

impl Simulation<'_> {
    /// The number of connections that are currently open.
    pub(super) fn open(&self) -> u64 {
        self.backends.iter().map(|backend| backend.connections).sum()
    }

    fn connections(&self) -> Spread {
        let wanted = self.backends.iter().filter(|backend| backend.wanted_since.is_some());
        Spread::of(&wanted.map(|backend| float(backend.connections)).collect::<Vec<_>>())
    }

    pub(super) fn row(&mut self, end_us: u64) -> StepRow {
        let (start_us, before) = self.at_last_row;
        self.at_last_row = (end_us, self.counts);
        let jobs_before = std::mem::replace(&mut self.by_job_at_last_row, self.by_job.clone());
        let jobs = self.by_job.iter().zip(&jobs_before).map(|(job, before)| job.since(before));
        let jobs = if self.by_job.len() > 1 { jobs.collect() } else { Vec::new() };
        let steady =
            |backend: &&SimulatedBackend| backend.wanted_since.is_some_and(|since| since <= start_us);
        let loads = self.backends.iter().filter(steady).map(|backend| backend.per_weight(backend.step_load));
        let loads: Vec<f64> = loads.collect();
        let used = |server: &mut SimulatedServer| {
            server.take_step_us(end_us) / float(end_us - start_us) / server.cores()
        };
        let cpu: Vec<f64> = self.machines.iter_mut().map(used).collect();
        let cpu = cpu.iter().zip(&self.backends).filter(|(_, backend)| steady(backend)).map(|(cpu, _)| *cpu);
        let cpu: Vec<f64> = cpu.collect();
        self.backends.iter_mut().for_each(|backend| backend.step_load = 0);
        let running = self.backends.iter().filter(|backend| backend.is_up()).count();
        let clients = self.clients.iter().flatten().count();
        StepRow {
            run: self.run.name.clone(),
            at_us: end_us,
            backends: u32::try_from(running).expect("the number of backends fits into 32 bits"),
            clients: u32::try_from(clients).expect("the number of clients fits into 32 bits"),
            connections: self.connections(),
            load: Spread::of(&loads),
            utilization: utilization_of(&loads),
            cpu: self.scenario.has_costs().then(|| Spread::of(&cpu)),
            weights: self.weights(),
            counts: self.counts.since(before),
            jobs,
            traces: self.scenario.retains_traces.then_some(Traces { load: loads, cpu }),
        }
    }

    /// How clients' weights have changed since the last row; `None` if neither load control nor
    /// slow start adjusts weights.
    fn weights(&mut self) -> Option<WeightChanges> {
        let tables = std::mem::take(&mut self.tables);
        let factors: Vec<f64> = self.clients.iter().flatten().flat_map(|client| client.factors()).collect();
        (!factors.is_empty()).then(|| WeightChanges { tables, factors: Spread::of(&factors) })
    }

    /// Begins the measurement of load and latency.
    pub(super) fn measure(&mut self) {
        let now = self.now;
        self.machines.iter_mut().for_each(|server| server.measure(now));
        self.counts_before = self.counts;
    }

    pub(super) fn load_total(&self) -> LoadTotal {
        let measured_us = float(self.scenario.duration.us - self.scenario.measure_from.us);
        let machines = self.backends.iter().zip(&self.machines);
        let lasting = machines.filter(|(backend, _)| backend.is_lasting()).map(|(_, server)| server);
        let is_lasting = |index: usize| self.backends[index].is_lasting();
        let latency = |part: f64| self.latency.value_at_quantile(part);
        LoadTotal {
            cpu: lasting.clone().map(|server| server.busy_us() / measured_us / server.cores()).collect(),
            capacity: lasting.map(SimulatedServer::capacity).collect(),
            floor: self
                .floor
                .utilizations(is_lasting)
                .iter()
                .map(|seconds| seconds * 1e6 / measured_us)
                .collect(),
            offered: self.floor.offered_load() * 1e6 / measured_us,
            latency_us: [0.5, 0.99, 0.999].map(latency),
            counts: self.counts.since(self.counts_before),
        }
    }

    pub(super) fn total(&self, rows: &[StepRow]) -> Total {
        let lasting: Vec<&SimulatedBackend> =
            self.backends.iter().filter(|backend| backend.is_lasting()).collect();
        let loads: Vec<f64> = lasting.iter().map(|backend| backend.per_weight(backend.load)).collect();
        let unused = lasting.iter().filter(|backend| backend.load == 0 && backend.connections == 0).count();
        let failed = |row: &StepRow| float(row.counts.errors.sum()) / float(row.counts.arrivals.max(1));
        let counts = self.counts;
        let ended = counts.served + counts.abandoned + counts.errors.sum();
        let total = Total {
            run: self.run.name.clone(),
            counts,
            jobs: if self.by_job.len() > 1 { self.by_job.clone() } else { Vec::new() },
            under_way: counts.arrivals - ended,
            connections_at_start: self.connections_at_start,
            connections_at_end: self.open(),
            connections: self.connections(),
            load: Spread::of(&loads),
            utilization: utilization_of(&loads),
            floor: (counts.arrivals > 0)
                .then(|| utilization_of(&self.floor.loads(|index| self.backends[index].is_lasting()))),
            unused: u32::try_from(unused).expect("the number of backends fits into 32 bits"),
            worst_errors: rows.iter().map(failed).fold(0.0, f64::max),
        };
        assert_eq!(total.under_way, self.requests.under_way(), "every arrival is counted once");
        let flows = self.clients.iter().flatten().flat_map(|client| client.links.iter().flatten());
        let flows: u64 = flows.map(|link| u64::from(link.flows)).sum();
        let sent = self.requests.of(|request| request.is_on_link).len() as u64;
        assert_eq!(flows, sent, "every request that was sent is on one connection");
        let ever = self.connections_at_start + counts.opened;
        let ended = counts.closed + counts.dropped;
        assert_eq!(ever - ended, total.connections_at_end, "every connection is counted once");
        total
    }
}
