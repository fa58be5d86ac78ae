//! `socklb-sim rebalance`: how fast pools of long connections spread over all backends again after
//! one backend has restarted.

use anyhow::{Result, bail};
use clap::Args;
use lb_core::rebalance::{ClosingRate, RebalanceRules};
use lb_core::service::Policy;
use serde::Serialize;

use super::arguments::{backends, clients, within};
use crate::output;
use crate::rebalance::{GOAL, Pools};
use crate::table::percent;

/// The maximum number of decisions, over all seconds, tasks and backends. A run with this number
/// takes about half a minute.
const MAX_COST: u64 = 1 << 30;

/// The options of `socklb-sim rebalance`.
#[derive(Debug, Args)]
pub struct RebalanceOptions {
    /// Client tasks of the job, each with a pool of connections
    #[arg(long, value_name = "M", default_value = "20", value_parser = clients)]
    tasks: u32,
    /// Connections of each pool
    #[arg(long, value_name = "C", default_value = "50", value_parser = |text: &str| within(text, 65_536))]
    connections: u32,
    /// Backends of each pool
    #[arg(long, value_name = "N", default_value = "8", value_parser = backends)]
    backends: u32,
    /// Maximum rate of closings of all tasks together, as in the configuration
    #[arg(long, value_name = "RATE", default_value_t = RebalanceRules::DEFAULT.rate, value_parser = rate)]
    rate: ClosingRate,
    /// Part of a backend's share, 0.1 to 0.95; backends with fewer connections are refilled
    #[arg(long, value_name = "PART", default_value = "0.8", value_parser = below)]
    below: u32,
    /// Policy of the service
    #[arg(long, value_name = "POLICY", default_value = "weighted-round-robin", value_parser = policy)]
    policy: Policy,
    /// CPUs on which each task dials
    #[arg(long, value_name = "CPUS", default_value = "2", value_parser = |text: &str| within(text, 1_024))]
    cpus: u32,
    /// Seed of the random choice of backends for the first connections
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn rate(text: &str) -> Result<ClosingRate, String> {
    let help =
        || format!("write a rate from {} to {}, such as 1/s or 30/m", ClosingRate::MIN, ClosingRate::MAX);
    text.parse().map_err(|()| help())
}

/// Returns the part in thousandths.
fn below(text: &str) -> Result<u32, &'static str> {
    let part = text.parse().ok().filter(|part| (0.1..=0.95).contains(part));
    let thousandths = part.map(|part: f64| (part * 1000.0).round());
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "100 to 950")]
    thousandths.map(|thousandths| thousandths as u32).ok_or("write a number from 0.1 to 0.95")
}

fn policy(text: &str) -> Result<Policy, String> {
    let known = Policy::ALL.into_iter().find(|policy| policy.name() == text);
    known.ok_or_else(|| format!("write one of {}", Policy::ALL.map(Policy::name).join(", ")))
}

#[derive(Serialize)]
struct RebalanceDocument {
    schema: u32,
    tasks: u32,
    connections: u32,
    backends: u32,
    rate: String,
    below: f64,
    policy: &'static str,
    cpus: u32,
    seed: String,
    closed_before: u64,
    at_return: f64,
    goal: f64,
    /// Times are in seconds since the backend's return.
    goal_reached: Option<u64>,
    settled: Option<u64>,
    bound: Option<u64>,
    closed: u64,
    last_closing: Option<u64>,
    at_end: f64,
    lowest_other: f64,
    highest_other: f64,
}

pub fn run(options: &RebalanceOptions) -> Result<()> {
    let RebalanceOptions { tasks, connections, backends, rate, below, policy, cpus, seed, json } = *options;
    let rules = RebalanceRules { rate, below_thousandths: below, ..RebalanceRules::DEFAULT };
    let pools = Pools { tasks, connections, backends, policy, cpus, rules, seed };
    if backends < 2 {
        bail!("write at least 2 backends: one of them restarts");
    }
    if u64::from(tasks) * u64::from(connections) > crate::fleet::MAX_CONNECTIONS {
        bail!(
            "{tasks} pools of {connections} connections: the limit is {} connections",
            crate::fleet::MAX_CONNECTIONS
        );
    }
    if pools.cost() > MAX_COST {
        bail!(
            "a run would take too long: {} decisions, but the limit is {MAX_COST} (use fewer tasks or \
             backends, or a higher rate)",
            pools.cost()
        );
    }
    let course = pools.play();
    let document = RebalanceDocument {
        schema: output::SCHEMA,
        tasks,
        connections,
        backends,
        rate: rate.to_string(),
        below: f64::from(below) / 1000.0,
        policy: policy.name(),
        cpus,
        seed: seed.to_string(),
        closed_before: course.closed_before,
        at_return: course.at_return,
        goal: GOAL,
        goal_reached: course.goal_reached,
        settled: course.settled,
        bound: pools.bound(),
        closed: course.closed,
        last_closing: (course.closed > 0).then_some(course.last_closing),
        at_end: course.at_end,
        lowest_other: course.lowest_other,
        highest_other: course.highest_other,
    };
    if json { output::json(&document) } else { output::text(document.text()) }
}

impl RebalanceDocument {
    fn text(&self) -> String {
        let Self { tasks, connections, backends, rate, below, policy, cpus, seed, .. } = self;
        let after =
            |seconds: Option<u64>| seconds.map_or("never".to_owned(), |seconds| format!("{seconds} s"));
        let mut lines = vec![
            format!(
                "{tasks} pools of {connections} connections, {backends} backends, rate {rate}, below {below}, {policy}, {cpus} CPUs, seed {seed}"
            ),
            String::new(),
            format!("closed before the restart   {}", self.closed_before),
            format!("the backend returns with    {} of its share", percent(self.at_return)),
        ];
        match self.bound {
            None => lines.push(
                "the pools are too small: even a backend without connections causes no closings".to_owned(),
            ),
            Some(bound) => lines.extend([
                format!(
                    "the backend reaches {} after {} (bound: {bound} s)",
                    percent(self.goal),
                    after(self.goal_reached)
                ),
                format!("the last closing is after   {}", after(self.last_closing)),
                format!(
                    "closed connections          {} of {}",
                    self.closed,
                    u64::from(*tasks) * u64::from(*connections)
                ),
                format!("at the end, the backend has {} of its share", percent(self.at_end)),
                format!(
                    "other backends had          {} to {} of their shares",
                    percent(self.lowest_other),
                    percent(self.highest_other)
                ),
            ]),
        }
        lines.push(String::new());
        lines.join("\n")
    }
}
