//! The planner's results for each arm, with the same fleet.

use std::fmt::Write as _;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use stage::daemon::finish;
use stage::{Setup, program};

use super::Times;
use super::arm::Arm;
use super::fleet::{Cost, Mode, PERIOD, QUOTAS};

/// The number of seeds that are simulated.
const SEEDS: u32 = 3;

#[derive(Deserialize)]
struct Played {
    figures: Figures,
}

#[derive(Deserialize)]
struct Figures {
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    cpu_max_over_mean: Estimate,
}

#[derive(Deserialize)]
struct Estimate {
    mean: f64,
}

/// Returns, for each arm, the utilization of the busiest backend divided by the mean.
pub fn play(setup: &Setup, arms: &[Arm], mode: Mode, cost: Cost, times: Times) -> Result<Vec<f64>> {
    let scenario = setup.write(&format!("{}.toml", mode.name()), &scenario(arms, mode, cost, times)?);
    let mut command = Command::new(program("socklb-sim"));
    let output = finish(command.args(["traffic", "--json", "--scenario"]).arg(scenario));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    anyhow::ensure!(output.status.success(), "the planner failed: {error}");
    let played: Played = serde_json::from_slice(&output.stdout).context("parse the planner's output")?;
    Ok(played.figures.runs.into_iter().map(|run| run.cpu_max_over_mean.mean).collect())
}

fn scenario(arms: &[Arm], mode: Mode, cost: Cost, times: Times) -> Result<String> {
    let quotas: Vec<f64> = QUOTAS.iter().map(|percent| f64::from(*percent) / 100.0).collect();
    let (settle, all) = (times.settle.as_secs(), (times.settle + times.measure).as_secs());
    // An agent measures load every two seconds, over the last two seconds, and receives a request
    // every second.
    let mut text = format!(
        "title = \"the benchmark's fleet\"\nseeds = {SEEDS}\nduration = \"{all}s\"\nmeasure_from = \"{settle}s\"\n\
         step = \"{all}s\"\nservice = \"{}\"\n\
         reports = {{ delay = \"1ms\", spread = \"1s\", window = \"2s\", interval = \"2s\" }}\n\
         [backends]\ncount = {}\nquota = {{ cores = {quotas:?}, period = \"{}ms\" }}\n",
        mode.name(),
        quotas.len(),
        PERIOD.as_millis(),
    );
    let mean = cost.mean.as_micros();
    let cost_of = if cost.sigma > 0.0 {
        format!("{{ mean = \"{mean}us\", sigma = {:.3}, cap = \"10s\" }}", cost.sigma)
    } else {
        format!("{{ mean = \"{mean}us\", exact = true }}")
    };
    for (number, pace) in cost.paces(mode).iter().enumerate() {
        write!(
            text,
            "[[job]]\nname = \"task-{number}\"\ntasks = 1\nsize = {}\ntraffic = \"connections\"\nrate = {:.4}\n\
             cost = {cost_of}\n",
            quotas.len(),
            pace.connections,
        )?;
        if !pace.life.is_zero() {
            let (life, pause) = (pace.life.as_millis(), pace.pause.as_millis());
            writeln!(text, "connection_life = \"{life}ms\"\npause = \"{pause}ms\"\nlives = \"even\"")?;
        }
    }
    for arm in arms {
        write!(text, "[[run]]\nname = \"{}\"\npolicy = \"{}\"\n", arm.name(), arm.policy())?;
        if let Some(control) = arm.control() {
            writeln!(text, "load = \"{control}\"")?;
        }
    }
    Ok(text)
}
