//! The machines of a scenario's backends: how fast each is, and what makes it slower at times.

use lb_core::subset::random::{SplitMix64, shuffle};
use toml::Spanned;

use super::SpannedFault;
use crate::traffic::document::BackendsTable;
use crate::traffic::document::machines::{AntagonistTable, RestartCost, Speed};

/// The machines of all backends that there ever are.
#[derive(Clone, Debug, PartialEq)]
pub struct Machines {
    /// Cores of each.
    pub cores: u32,
    /// What each one's speed is, or how it is decided.
    speed: Speed,
    /// What makes them slower at times.
    pub antagonist: Option<AntagonistTable>,
    /// What makes them slower after a start.
    pub restart_cost: Option<RestartCost>,
    /// How many requests one works on at a time.
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
            return Err((antagonist.span(), "every is below \"100ms\": write at least that".into()));
        }
        Ok(Self {
            cores: table.cores.0,
            speed,
            antagonist: table.antagonist.as_ref().map(Spanned::get_ref).copied(),
            restart_cost: table.restart_cost,
            queue: table.queue.0,
        })
    }

    /// How fast the fastest of them can be.
    pub fn fastest(&self) -> f64 {
        match &self.speed {
            Speed::All(speed) => *speed,
            Speed::List(speeds) | Speed::Alternate(speeds) => speeds.iter().copied().fold(0.001, f64::max),
            Speed::Share(_, factor) => factor.max(1.0),
        }
    }

    /// How fast each of so many backends is; where chance decides, by this generator.
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
