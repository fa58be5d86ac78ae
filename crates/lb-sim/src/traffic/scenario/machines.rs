//! The machines of a scenario's backends: the speed of each machine, the part of it that the
//! backend may use, and its slowdowns.

use lb_core::subset::random::{SplitMix64, shuffle};
use toml::Spanned;

use super::SpannedFault;
use crate::metrics::float;
use crate::traffic::document::BackendsTable;
use crate::traffic::document::machines::{AntagonistTable, QuotaCores, QuotaTable, RestartCost, Speed};
use crate::traffic::quota::Quota;

/// The machines of all backends that ever exist.
#[derive(Clone, Debug, PartialEq)]
pub struct Machines {
    /// Cores of each machine.
    pub cores: u32,
    /// The speed of each machine, or the rule that determines the speeds.
    speed: Speed,
    /// The quota of each backend; empty if there is no limit.
    quotas: Vec<Quota>,
    /// Other workloads ("neighbours") that make the machines slower at times.
    pub antagonist: Option<AntagonistTable>,
    /// The cost of a start: a machine is slower for a while.
    pub restart_cost: Option<RestartCost>,
    /// The maximum number of requests that one machine processes at a time.
    pub queue: u32,
}

impl Machines {
    pub(super) fn of(table: &BackendsTable, most: u32) -> Result<Self, SpannedFault> {
        let speed = table.speed.get_ref().clone();
        if let Speed::List(speeds) = &speed
            && speeds.len() != most as usize
        {
            let message =
                format!("there are {} speeds for {most} backends: write one for each", speeds.len());
            return Err((table.speed.span(), message));
        }
        if let Some(antagonist) = &table.antagonist
            && antagonist.get_ref().every.us < 100_000
        {
            return Err((antagonist.span(), "`every` is too short: write at least \"100ms\"".into()));
        }
        let quotas = table.quota.as_ref().map_or_else(|| Ok(Vec::new()), |quota| quotas(quota, most))?;
        Ok(Self {
            cores: table.cores.0,
            speed,
            quotas,
            antagonist: table.antagonist.as_ref().map(Spanned::get_ref).copied(),
            restart_cost: table.restart_cost,
            queue: table.queue.0,
        })
    }

    /// The highest possible speed of any machine. Quotas are not included: a machine has its full
    /// speed until the quota is used up.
    pub fn fastest(&self) -> f64 {
        match &self.speed {
            Speed::All(speed) => *speed,
            Speed::List(speeds) | Speed::Alternate(speeds) => speeds.iter().copied().fold(0.001, f64::max),
            Speed::Share(_, factor) => factor.max(1.0),
        }
    }

    /// The quota of this backend; `None` if the backend may use its whole machine.
    pub fn quota(&self, index: usize) -> Option<Quota> {
        self.quotas.get(index).copied()
    }

    /// The speeds of `count` backends; `rng` decides them if they are random.
    pub fn speeds(&self, count: u32, rng: &mut SplitMix64) -> Vec<f64> {
        let count = count as usize;
        match &self.speed {
            Speed::All(speed) => vec![*speed; count],
            Speed::List(speeds) => speeds[..count].to_vec(),
            Speed::Alternate(speeds) => speeds.iter().copied().cycle().take(count).collect(),
            Speed::Share(percent, factor) => {
                let mut speeds = vec![1.0; count];
                let some = (count * *percent as usize).div_ceil(100);
                speeds[..some].fill(*factor);
                shuffle(&mut speeds, rng);
                speeds
            }
        }
    }
}

/// The quota of each backend.
fn quotas(table: &Spanned<QuotaTable>, most: u32) -> Result<Vec<Quota>, SpannedFault> {
    let QuotaTable { cores, period } = table.get_ref();
    let fault = |message: String| (table.span(), message);
    if !(1_000..=1_000_000).contains(&period.us) {
        return Err(fault("the period of a quota must be 1 ms to 1 s, as in Linux".into()));
    }
    let quota = |cores: &f64| {
        if !(0.001..=1024.0).contains(cores) {
            return Err(fault(format!("a quota of {cores} cores: write 0.001 to 1024")));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a thousand seconds at most"
        )]
        let runtime_us = (cores * float(period.us)).round() as u64;
        if runtime_us < 1_000 {
            let message = format!(
                "a quota of {cores} cores is {runtime_us} us in {period}: Linux requires at least 1 ms"
            );
            return Err(fault(message));
        }
        Ok(Quota { runtime_us, period_us: period.us })
    };
    match cores {
        QuotaCores::All(cores) => Ok(vec![quota(cores)?; most as usize]),
        QuotaCores::List(list) if list.len() == most as usize => list.iter().map(quota).collect(),
        QuotaCores::List(list) => {
            Err(fault(format!("there are {} quotas for {most} backends: write one for each", list.len())))
        }
    }
}
