//! Jobs during a run: the service of a job, as the daemon's configuration would define it, and the
//! rate of each task.
//!
//! This module must not depend on the state of clients or backends.

use std::collections::BTreeSet;
use std::time::Duration;

use lb_core::control::ControlRules;
use lb_core::service::{Service, Subset};
use lb_core::subset::random::{SplitMix64, mix64, shuffle};

use crate::metrics::float;
use crate::traffic::assignments::ShareModel;
use crate::traffic::client::SERVICE;
use crate::traffic::document::{JobTable, Traffic};
use crate::traffic::scenario::{Scenario, ScenarioRun};
use crate::unequal::absent;

#[derive(Debug)]
pub(super) struct SimulatedJob {
    pub table: JobTable,
    pub shares: ShareModel,
    pub service: Service,
    /// The client of each task.
    pub clients: Vec<u32>,
    /// The mean time between two arrivals at one task, or the mean pause of a user.
    gap_us: Option<u64>,
    /// The relative rates of the tasks that exist at the start; the mean of the rates is 1. Empty
    /// if all tasks send at the same rate.
    rates: Vec<f64>,
    /// The absent tasks.
    missing: BTreeSet<u32>,
}

/// Longer than any run, because a run takes at most a day.
const NEVER_US: u64 = 100 * 24 * 3600 * 1_000_000;

impl SimulatedJob {
    pub fn new(
        scenario: &Scenario,
        ScenarioRun { differs: run, .. }: &ScenarioRun,
        position: usize,
        table: &JobTable,
        seed: u64,
        subset_seed: Option<u64>,
    ) -> Self {
        let mut table = table.clone();
        table.policy = run.policy.unwrap_or(table.policy);
        table.load = run.load.unwrap_or(table.load);
        table.slow_start = run.slow_start.unwrap_or(table.slow_start);
        table.error_decay = run.error_decay.unwrap_or(table.error_decay);
        table.active_limit = run.active_limit.or(table.active_limit);
        table.skew = run.skew.or(table.skew);
        table.wait = table.cost.and(run.wait).or(table.wait);
        table.retries = run.retries.unwrap_or(table.retries);
        table.rate = table.rate.map(|rate| run.rate.unwrap_or(rate));
        let algorithm = run.algorithm.unwrap_or(table.algorithm).0;
        let size = run.size.unwrap_or(table.size).0;
        let own = || lb_core::service::seed(&table.name.0, &scenario.service);
        // Later seeds use other subsets, unless the file sets the seed of the subsets.
        let of_play = || subset_seed.map_or_else(own, |number| mix64(&[own(), number]));
        let seed_of_subsets = table.seed.map_or_else(of_play, |seed| seed.0);
        let subset = Subset::Sized { algorithm, size };
        let service = Service::new(&scenario.service, SERVICE, subset, seed_of_subsets);
        let ejection = run.ejection.or(table.ejection).and_then(|choice| choice.0);
        // With traffic `requests`, a client re-establishes its connections even to backends that
        // fail. It makes no connects by which an ejector could judge backends.
        let ejection = ejection.filter(|_| table.traffic == Traffic::Connections);
        let policy = table.policy.0;
        let error_decay = table.error_decay.0.filter(|_| policy.counts_errors());
        let service = Service {
            policy,
            active_limit: table.active_limit.and_then(|limit| limit.0),
            overflow: table.overflow.0,
            error_decay: error_decay.map(|span| Duration::from_micros(span.us)),
            ejection,
            control: ControlRules {
                law: table.load.0,
                slow_start: table.slow_start.0.map(|span| Duration::from_micros(span.us)),
                ..ControlRules::default()
            },
            ..service
        };
        let position = position as u64;
        let tasks = table.tasks.0;
        let rates = table.skew.map_or_else(Vec::new, |skew| {
            skew.0.rates(tasks, &mut SplitMix64::new(mix64(&[seed, 5, position])))
        });
        let mut order: Vec<u32> = (0..tasks).collect();
        shuffle(&mut order, &mut SplitMix64::new(mix64(&[seed, 6, position])));
        let missing = absent(tasks, table.missing.0);
        let missing = order.into_iter().take(missing as usize).collect();
        let gap_us = match (table.interval, table.rate, table.closed) {
            (Some(interval), ..) => Some(interval.us),
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most a day")]
            (_, Some(rate), _) => Some((1e6 / rate.0).round() as u64),
            (.., Some(closed)) => Some(closed.think.us),
            (None, None, None) => None,
        };
        let shares = run.shares.unwrap_or(table.shares);
        Self { table, shares, service, clients: Vec::new(), gap_us, rates, missing }
    }

    /// The mean time between two arrivals at a task, or the mean pause of its users; `None` if
    /// nothing arrives.
    pub fn gap_us(&self, task: u32) -> Option<u64> {
        let rate = self.rates.get(task as usize).copied().unwrap_or(1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a larger gap is longer than any run"
        )]
        self.gap_us.map(|gap_us| {
            if rate == 1.0 { gap_us } else { ((float(gap_us) / rate).round() as u64).min(NEVER_US) }
        })
    }

    /// The mean number of open connections of one task with `connection_life`; 0 without this key.
    pub fn mean_open(&self, task: u32) -> f64 {
        let life = self.table.connection_life.map_or(0.0, |life| float(life.us));
        self.gap_us(task).map_or(0.0, |gap_us| life / float(gap_us.max(1)))
    }

    /// The time of an arrival that would be due `gap_us` after `now_us` at the normal rate.
    pub fn due(&self, now_us: u64, gap_us: u64) -> u64 {
        self.table.burst.map_or(now_us + gap_us, |burst| burst.0.due(now_us, gap_us))
    }

    pub fn is_missing(&self, task: u32) -> bool {
        self.missing.contains(&task)
    }

    pub const fn holds_links(&self) -> bool {
        matches!(self.table.traffic, Traffic::Requests)
    }
}
