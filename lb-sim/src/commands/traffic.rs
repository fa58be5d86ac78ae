//! `socklb-sim traffic`: plays a scenario and prints what was counted, as tables or as JSON.
//!
//! A scenario is one that comes with the program or a file. Must not know how scenarios are played.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::output;
use crate::traffic::scenario::Scenario;
use crate::traffic::tally::{Row, Total};
use crate::traffic::{Report, play, shipped};

/// A scenario, and how to show it.
#[derive(Debug, Args)]
pub struct Options {
    /// A scenario that comes with the program (figure-5, rolling-update, aperture, small-jobs), or the path of a file
    #[arg(long, value_name = "NAME|FILE")]
    scenario: String,
    /// Decides when requests arrive and how long they live, instead of the scenario's seed
    #[arg(long)]
    seed: Option<u64>,
    /// One line of JSON instead of tables
    #[arg(long)]
    json: bool,
}

/// The longest scenario file. The shipped ones have less than 4 KiB.
const MAX_BYTES: u64 = 1 << 20;

/// Plays a scenario and prints what happened.
pub fn run(options: &Options) -> Result<()> {
    let scenario = read(&options.scenario)?;
    let report = play(&scenario, options.seed.unwrap_or(scenario.seed));
    if options.json { output::json(&report) } else { output::text(text(&scenario, &report)) }
}

/// A shipped scenario by its name, or else a file.
fn read(scenario: &str) -> Result<Scenario> {
    if let Some(text) = shipped::text(scenario) {
        return Ok(Scenario::read(scenario, scenario, text)?);
    }
    let help = || format!("read scenario {scenario:?}: neither a file nor one of {}", shipped::names());
    let file = File::open(scenario).with_context(help)?;
    let mut text = String::new();
    file.take(MAX_BYTES + 1).read_to_string(&mut text).with_context(help)?;
    if text.len() as u64 > MAX_BYTES {
        bail!("{scenario} is longer than {MAX_BYTES} bytes: that is no scenario");
    }
    let name = Path::new(scenario).file_stem().map_or(scenario.into(), |stem| stem.to_string_lossy());
    Ok(Scenario::read(&name, scenario, &text)?)
}

const HEAD: [&str; 2] = [
    "      time backends clients | connections per backend       | load per backend | arrivals   errors |  opened   moved dropped",
    "                            |    min    mean    max     rsd |     rsd    util. |                   |",
];

fn text(scenario: &Scenario, report: &Report) -> String {
    let mut lines = vec![
        scenario.title.clone(),
        format!(
            "scenario {}, seed {}, {} in steps of {}",
            scenario.name, report.seed, scenario.duration, scenario.step
        ),
    ];
    for total in &report.summary.runs {
        lines.push(format!("\n{}", total.run));
        lines.extend(HEAD.map(str::to_owned));
        lines.extend(report.steps.iter().filter(|row| row.run == total.run).map(line));
    }
    lines.push("\nsummary".into());
    lines.extend(report.summary.runs.iter().map(summary));
    lines.join("\n") + "\n"
}

fn line(row: &Row) -> String {
    let Row { backends, clients, connections, load, utilization, counts, .. } = row;
    let percent = |part: f64| format!("{:.2}%", 100.0 * part);
    // Without a backend that was there all the time, or without arrivals, nothing can be said.
    let (rsd, utilization) =
        if load.max > 0.0 { (percent(load.rsd), percent(*utilization)) } else { ("-".into(), "-".into()) };
    format!(
        "{:>10} {backends:>8} {clients:>7} | {:>6.0} {:>7.1} {:>6.0} {:>7} | {rsd:>7} {utilization:>8} | {:>8} {:>8} | {:>7} {:>7} {:>7}",
        clock(row.at_us),
        connections.min,
        connections.mean,
        connections.max,
        percent(connections.rsd),
        counts.arrivals,
        counts.errors.sum(),
        counts.opened,
        counts.moved,
        counts.dropped,
    )
}

/// A time as on a stopwatch: hours, minutes, seconds, and as many digits of their parts as it takes.
fn clock(us: u64) -> String {
    let seconds = us / 1_000_000;
    let text = format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
    let parts = format!(".{:06}", us % 1_000_000);
    text + parts.trim_end_matches('0').trim_end_matches('.')
}

fn summary(total: &Total) -> String {
    let Total { run, counts, connections, load, utilization, .. } = total;
    let errors = counts.errors;
    format!(
        "  {run}\n    connections  {} at the start, {} at the end ({:.0} to {:.0} per backend, relative standard deviation {:.2} %)\n    \
         load         relative standard deviation {:.3} %, utilization {:.1} %, {} of the backends unused\n    \
         arrivals     {}: {} served, {} under way, {} abandoned, {} errors (at worst {:.3} % of a step)\n    \
         errors       {} cut, {} down, {} unready, {} refused\n    \
         churn        {} moved, {} dropped, {} opened, {} closed",
        total.connections_at_start,
        total.connections_at_end,
        connections.min,
        connections.max,
        100.0 * connections.rsd,
        100.0 * load.rsd,
        100.0 * utilization,
        total.unused,
        counts.arrivals,
        counts.served,
        total.under_way,
        counts.abandoned,
        errors.sum(),
        100.0 * total.worst_errors,
        errors.cut,
        errors.down,
        errors.unready,
        errors.refused,
        counts.moved,
        counts.dropped,
        counts.opened,
        counts.closed,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        title = "Two clients hold a connection to each of two backends, of which one restarts"
        duration = "3s"
        step = "1500ms"
        backends = { count = 2 }
        [[job]]
        name = "two"
        tasks = 2
        traffic = "requests"
        interval = "500ms"
        arrivals = "even"
        [[restart]]
        at = "2s"
        batch = 1
        down = "400ms"
    "#;

    #[test]
    fn a_report_for_people_has_a_table_and_a_summary() {
        let scenario = Scenario::read("two", "two.toml", TEXT).unwrap();
        // Each client sends three requests per step, by turns; both begin with the same backend, so it has four. Each
        // backend stops once, and both clients come back to it.
        let expected = "\
Two clients hold a connection to each of two backends, of which one restarts
scenario two, seed 5, 3s in steps of 1500ms

as written
      time backends clients | connections per backend       | load per backend | arrivals   errors |  opened   moved dropped
                            |    min    mean    max     rsd |     rsd    util. |                   |
 0:00:01.5        2       2 |      2     2.0      2   0.00% |  33.33%   75.00% |        6        0 |       0       0       0
   0:00:03        2       2 |      2     2.0      2   0.00% |       -        - |        6        0 |       4       0       4

summary
  as written
    connections  4 at the start, 4 at the end (2 to 2 per backend, relative standard deviation 0.00 %)
    load         relative standard deviation 0.000 %, utilization 100.0 %, 0 of the backends unused
    arrivals     12: 12 served, 0 under way, 0 abandoned, 0 errors (at worst 0.000 % of a step)
    errors       0 cut, 0 down, 0 unready, 0 refused
    churn        0 moved, 4 dropped, 4 opened, 0 closed
";
        assert_eq!(text(&scenario, &play(&scenario, 5)), expected);
    }

    #[test]
    fn the_json_document_has_the_shape_that_the_readme_promises() {
        let scenario = Scenario::read("two", "two.toml", TEXT).unwrap();
        let json = serde_json::to_value(play(&scenario, u64::MAX)).unwrap();
        assert_eq!(json["schema"], 1);
        assert_eq!(json["scenario"], "two");
        assert_eq!(json["seed"], "18446744073709551615");
        assert_eq!(json["steps"][1]["run"], "as written");
        assert_eq!(json["steps"][1]["at_us"], 3_000_000);
        assert_eq!(json["steps"][0]["connections"]["mean"], 2.0);
        assert_eq!(json["steps"][0]["errors"]["cut"], 0);
        assert_eq!(json["summary"]["runs"][0]["connections_at_start"], 4);
        assert_eq!(json["summary"]["runs"][0]["arrivals"], 12);
    }

    #[test]
    fn what_is_no_scenario_is_named() {
        let error = format!("{:#}", read("figure-6").unwrap_err());
        let expected = "read scenario \"figure-6\": neither a file nor one of figure-5, rolling-update, aperture, small-jobs: ";
        assert!(error.starts_with(expected), "{error}");
        assert_eq!(read("figure-5").unwrap().name, "figure-5");
    }
}
