//! The load reports of backends, and when clients evaluate them.
//!
//! Every backend measures at its own times. A client uses the newest report that it has received.
//! This module must not evaluate a report: a client's [`Control`](lb_core::control::Control)
//! evaluates it.

use std::collections::VecDeque;
use std::time::Duration;

use lb_core::control::{ReceivedReport, TICK};
use lb_core::reports::ReportedLoad;
use lb_core::subset::random::{SplitMix64, mix64};

use super::clients::number;
use super::{Simulation, SimulationEvent};
use crate::metrics::float;
use crate::traffic::document::{FailMode, ReportsTable};

/// The load measurements and reports of one backend.
#[derive(Debug, Default)]
pub(super) struct LoadReports {
    /// The sums at each measurement, oldest first. Only the measurements that a window needs are
    /// stored.
    measured: VecDeque<Sums>,
    /// The reports that were sent and may not have arrived yet, oldest first.
    sent: VecDeque<SentReport>,
}

/// The sums of a backend's counts and times, from the start of the run to a point of time.
#[derive(Clone, Copy, Debug)]
struct Sums {
    at_us: u64,
    busy_us: f64,
    waited_us: f64,
    arrivals: u64,
    errors: u64,
}

#[derive(Clone, Copy, Debug)]
struct SentReport {
    number: u64,
    at_us: u64,
    load: ReportedLoad,
}

impl Simulation<'_> {
    /// Makes backends begin to measure, each at its own time, because agents do not start at the
    /// same time.
    pub(super) fn begin_to_report(&mut self) {
        let Some(table) = self.reports else { return };
        for backend in 0..number(self.backends.len()) {
            let first = SplitMix64::new(mix64(&[self.seed, 13, backend.into()])).below(table.interval.us);
            self.queue.push(first, SimulationEvent::ReportLoad(backend));
        }
    }

    /// Measures the load of a running backend, and sends a report.
    pub(super) fn report_load(&mut self, backend: u32) {
        let Some(table) = self.reports else { return };
        let (now, index) = (self.now, backend as usize);
        self.queue.push(now + table.interval.us, SimulationEvent::ReportLoad(backend));
        let (backend, reporting) = (&self.backends[index], &mut self.reporting[index]);
        // The agent is a separate process, so it continues to report while the backend fails.
        if !backend.running || backend.failing == Some(FailMode::Silent) {
            reporting.measured.clear();
            return;
        }
        let (busy_us, waited_us) = self.machines[index].busy_and_waited_us(now);
        let cores = self.machines[index].cores();
        let now_sums = Sums {
            at_us: now,
            busy_us,
            waited_us,
            arrivals: backend.load - backend.hung,
            errors: backend.errors,
        };
        let since = |sums: &Sums| now - sums.at_us;
        while reporting.measured.get(1).is_some_and(|next| since(next) >= table.window.us) {
            reporting.measured.pop_front();
        }
        if let Some(before) = reporting.measured.front() {
            let mut load = load_of(before, &now_sums, cores, table);
            if backend.failing == Some(FailMode::Lies) {
                load.utilization = Some(self.lie);
            }
            reporting.sent.push_back(SentReport { number: now / table.interval.us, at_us: now, load });
        }
        reporting.measured.push_back(now_sums);
        let retained_us = table.delay.us + table.spread.us + RETAINED_REPORTS * table.interval.us;
        while reporting.sent.front().is_some_and(|sent| now - sent.at_us > retained_us) {
            reporting.sent.pop_front();
        }
    }

    /// Returns the newest report that a client has received from a backend.
    fn newest_report(&self, client: u32, backend: u32) -> Option<ReceivedReport> {
        let table = self.reports?;
        let reached = |sent: &SentReport| {
            let mut rng =
                SplitMix64::new(mix64(&[self.seed, 10, sent.number, backend.into(), client.into()]));
            let is_lost = rng.below(100) < u64::from(table.loss.0);
            let at_us = sent.at_us + table.delay.us + rng.below(table.spread.us + 1);
            (!is_lost && at_us <= self.now).then_some(at_us)
        };
        self.reporting[backend as usize].sent.iter().rev().find_map(|sent| {
            let at_us = reached(sent)?;
            let age = Duration::from_micros(at_us - sent.at_us);
            let interval = Duration::from_micros(table.interval.us);
            Some(ReceivedReport {
                load: ReportedLoad { age, ..sent.load },
                at: Duration::from_micros(at_us),
                interval,
            })
        })
    }

    /// Makes a client evaluate the backends' reports and adjust its weights.
    pub(super) fn tick_control(&mut self, id: u32) {
        self.with_client(id, |world, client| {
            let is_made = client
                .follow_load(Duration::from_micros(world.now), |backend| world.newest_report(id, backend));
            world.tables += u64::from(is_made);
            let next = world.now + u64::try_from(TICK.as_micros()).expect("a second fits into 64 bits");
            world.queue.push(next, SimulationEvent::TickControl(id));
        });
    }
}

/// How many reports are stored in addition to those that may not have arrived yet. If more than
/// this number are lost in a row, the client has no report.
const RETAINED_REPORTS: u64 = 32;

/// The load between two measurements as an agent reports it. If `pressure` is set, utilization is
/// the use of the cores plus the share of time in which a request waited for a core or for more
/// quota. If `pressure` is not set, utilization is only the use of the cores.
fn load_of(before: &Sums, now: &Sums, cores: f64, table: ReportsTable) -> ReportedLoad {
    let passed_us = float(now.at_us - before.at_us);
    let busy = (now.busy_us - before.busy_us) / passed_us / cores;
    let waited = if table.pressure { (now.waited_us - before.waited_us) / passed_us } else { 0.0 };
    let per_second = |count: u64| table.rates.then(|| thousandths(float(count) * 1e6 / passed_us));
    ReportedLoad {
        qps: per_second(now.arrivals - before.arrivals),
        eps: per_second(now.errors - before.errors),
        utilization: Some(thousandths(busy + waited)),
        window: Duration::from_micros(now.at_us - before.at_us),
        age: Duration::ZERO,
    }
}

fn thousandths(number: f64) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "at most the maximum of the wire format"
    )]
    let thousandths = (number * 1000.0).round() as u32;
    thousandths
}
