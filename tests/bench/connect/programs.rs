//! The time of one run of each kernel program, from the kernel's own statistics. It is measured
//! separately, one arm after the other, because these statistics slow the programs down.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use aya::programs::loaded_programs;

use super::worker::Worker;
use crate::results::{Median, median};

/// The cost of one kernel program while one arm runs.
#[derive(Clone, Debug)]
pub struct Cost {
    pub program: String,
    /// The time of one run in nanoseconds, including the time in which the kernel reads the clock.
    pub nanoseconds: Median,
    /// The number of runs in one operation of the arm.
    pub runs: f64,
}

const PASSES: usize = 7;

/// Returns the cost of the programs with these ids, which are on the cgroup of a worker. Leaves out
/// a program that does not run in every operation, because other operations may have caused its
/// runs.
pub fn costs(worker: &mut Worker, programs: &[u32], operations: u32) -> Result<Vec<Cost>> {
    let _statistics =
        aya::sys::enable_stats(aya::sys::Stats::RunTime).context("switch the kernel's statistics on")?;
    let mut costs: BTreeMap<String, (Vec<f64>, Vec<f64>)> = BTreeMap::new();
    for _ in 0..PASSES {
        let earlier = counts(programs);
        worker.turn(operations, false);
        for ((name, runs, time), (_, runs_before, time_before)) in counts(programs).into_iter().zip(earlier) {
            let (runs, time) = (runs - runs_before, time - time_before);
            if runs * 10 >= u64::from(operations) * 9 {
                let (times, each) = costs.entry(name).or_default();
                #[expect(clippy::cast_precision_loss, reason = "a few thousand runs")]
                let (runs, time) = (runs as f64, time as f64);
                times.push(time / runs);
                each.push(runs / f64::from(operations));
            }
        }
    }
    let cost = |(program, (times, each)): (String, (Vec<f64>, Vec<f64>))| Cost {
        program,
        nanoseconds: median(&times),
        runs: median(&each).value,
    };
    Ok(costs.into_iter().map(cost).collect())
}

/// The name, the number of runs and the nanoseconds of each program.
fn counts(programs: &[u32]) -> Vec<(String, u64, u128)> {
    let loaded = loaded_programs().filter_map(Result::ok);
    let ours = loaded.filter(|program| programs.contains(&program.id()));
    let count = |program: aya::programs::ProgramInfo| {
        let name = program.name_as_str().unwrap_or("?").to_owned();
        (name, program.run_count(), program.run_time().as_nanos())
    };
    ours.map(count).collect()
}
