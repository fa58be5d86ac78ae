//! `socklb-sim traffic`: simulates a scenario and prints its counts, as tables or as JSON.
//!
//! A scenario is either a file or the name of a shipped scenario. This module must not simulate
//! anything itself.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::input;
use crate::metrics::interval::Interval;
use crate::output;
use crate::table::{TextTable, percent};
use crate::traffic::ejections::{EjectionCounts, EjectionRow, EjectionTotal};
use crate::traffic::figures::RunFigures;
use crate::traffic::scenario::Scenario;
use crate::traffic::tally::{JobCounts, StepRow, Total};
use crate::traffic::{Figures, TrafficReport, play, shipped};

/// The options of `socklb-sim traffic`.
#[derive(Debug, Args)]
pub struct TrafficOptions {
    /// Scenario that comes with the program (figure-5, rolling-update, aperture, aperture-by-load,
    /// small-jobs, ejection-tenth, ejection-half, ejection-flapping, ejection-all, book-load,
    /// book-load-08, book-load-skew, book-load-equal, load-reports, load-kept, load-small-jobs,
    /// load-changes, load-faults, sinkhole, active-limit, restart-cost, bursts), or the path of a
    /// file
    #[arg(long, value_name = "NAME|FILE")]
    scenario: String,
    /// Seed of the arrivals and lifetimes of requests, instead of the scenario's seed
    #[arg(long)]
    seed: Option<u64>,
    /// Print one line of JSON instead of tables
    #[arg(long)]
    json: bool,
}

/// The maximum length of a scenario file. Each shipped scenario has less than 4 KiB.
const MAX_BYTES: usize = 1 << 20;

pub fn run(options: &TrafficOptions) -> Result<()> {
    let scenario = read(&options.scenario)?;
    let report = play(&scenario, options.seed.unwrap_or(scenario.seed));
    if options.json { output::json(&report) } else { output::text(text(&scenario, &report)) }
}

/// Reads the shipped scenario with this name. If there is none, reads the file with this path.
fn read(scenario: &str) -> Result<Scenario> {
    if let Some(text) = shipped::text(scenario) {
        return Ok(Scenario::read(scenario, scenario, text)?);
    }
    let help = || format!("read scenario {scenario:?}: neither a file nor one of {}", shipped::names());
    let Some(bytes) = input::read(Path::new(scenario), MAX_BYTES).with_context(help)? else {
        bail!("{scenario} is longer than the limit of {MAX_BYTES} bytes");
    };
    let text = String::from_utf8(bytes).with_context(help)?;
    let name = Path::new(scenario).file_stem().map_or(scenario.into(), |stem| stem.to_string_lossy());
    Ok(Scenario::read(&name, scenario, &text)?)
}

const HEAD: [&str; 2] = [
    "      time backends clients | connections per backend       | load per backend | arrivals   errors |  opened   moved dropped",
    "                            |    min    mean    max     rsd |     rsd    util. |                   |",
];

fn text(scenario: &Scenario, report: &TrafficReport) -> String {
    let mut lines = vec![
        scenario.title.clone(),
        format!(
            "scenario {}, seed {}, {} in steps of {}",
            scenario.name, report.seed, scenario.duration, scenario.step
        ) + &match report.seeds {
            1 => String::new(),
            seeds => format!("; rows and summary are for this seed, load for {seeds} seeds"),
        },
    ];
    let ejections = report.ejection.as_ref();
    for total in &report.summary.runs {
        lines.push(format!("\n{}", total.run));
        let more = if ejections.is_some() { EJECTION_HEAD } else { [""; 2] };
        lines.extend(HEAD.iter().zip(more).map(|(head, more)| format!("{head}{more}")));
        let rows = report.steps.iter().enumerate().filter(|(_, row)| row.run == total.run);
        lines.extend(rows.map(|(number, row)| {
            line(row) + &ejections.map_or(String::new(), |ejections| cells(&ejections.steps[number]))
        }));
    }
    lines.push("\nsummary".into());
    lines.extend(report.summary.runs.iter().map(summary));
    let ejections = ejections.map_or(String::new(), |ejections| comparison(report, &ejections.runs));
    let figures = report.figures.as_ref().map_or(String::new(), |figures| of_load(scenario, figures));
    lines.join("\n") + "\n" + &ejections + &figures
}

/// Formats a table that compares all runs: how even CPU usage was, and how long requests took.
fn of_load(scenario: &Scenario, figures: &Figures) -> String {
    let mut table = TextTable::new([
        "run",
        "busiest / least busy",
        "chance alone",
        "busiest / mean",
        "raw utilization",
        "mean CPU",
        "p50 ms",
        "p99 ms",
        "p99.9 ms",
        "errors",
    ]);
    for RunFigures { run, evenness, floor, cpu_mean, latency_ms, error_share, .. } in &figures.runs {
        table.row([
            run.clone(),
            interval(evenness.cpu_max_over_min, 2),
            interval(floor.cpu_max_over_min, 2),
            interval(evenness.cpu_max_over_mean, 2),
            interval(evenness.raw_utilization, 2),
            interval(*cpu_mean, 2),
            interval(latency_ms.p50, 0),
            interval(latency_ms.p99, 0),
            interval(latency_ms.p999, 0),
            percent(error_share.mean),
        ]);
    }
    let seeds = match scenario.seeds {
        1 => "one seed".to_owned(),
        seeds => format!("means of {seeds} seeds ± half of the 95 % interval"),
    };
    let overloaded = figures.runs.iter().filter(|figures| figures.offered.mean > 1.0);
    let notes = overloaded.map(|RunFigures { run, offered, .. }| {
        format!(
            "note: {run} needs {:.2} times the capacity of all machines: each machine queues up to {} requests, and rejects further ones\n",
            offered.mean, scenario.machines.queue
        )
    });
    let notes: String = notes.collect();
    format!(
        "\nbusy core time over cores, and latency of served requests, from {} on; {seeds}. chance alone: the unevenness\n\
         of independent arrivals at backends chosen at random in proportion to capacity\n{table}{notes}",
        scenario.measure_from
    )
}

/// Formats a mean and half of the width of its confidence interval.
fn interval(Interval { mean, high, .. }: Interval, digits: usize) -> String {
    if !mean.is_finite() {
        return "-".into();
    }
    if high == mean {
        format!("{mean:.digits$}")
    } else {
        format!("{mean:.digits$} ± {:.digits$}", high - mean)
    }
}

/// The additional column headings if backends are ejected.
const EJECTION_HEAD: [&str; 2] = [" | ejected ejections  trials withheld", "                         |"];

fn cells(row: &EjectionRow) -> String {
    let EjectionCounts { ejections, trials, withheld, .. } = row.counts;
    format!(" | {:>7} {ejections:>9} {trials:>7} {withheld:>8}", row.ejected)
}

/// A length of time in seconds with one decimal, rounded up.
fn seconds(us: u64) -> String {
    let tenths = us.div_ceil(100_000);
    format!("{}.{} s", tenths / 10, tenths % 10)
}

/// Formats a table that compares all runs: how many connects failed, and how the clients reacted.
fn comparison(report: &TrafficReport, runs: &[EjectionTotal]) -> String {
    let mut table = TextTable::new([
        "run",
        "failed",
        "of all",
        "at most",
        "ejections",
        "trials",
        "readmitted",
        "withheld",
        "ejected",
        "left",
        "well after",
    ]);
    for (total, run) in report.summary.runs.iter().zip(runs) {
        let EjectionTotal { counts, most, .. } = run;
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
        let part = counts.failed as f64 / total.counts.arrivals.max(1) as f64;
        let none = || "-".to_owned();
        table.row([
            run.run.clone(),
            counts.failed.to_string(),
            percent(part),
            most.failed.max(most.failed_withheld).to_string(),
            counts.ejections.to_string(),
            counts.trials.to_string(),
            counts.readmissions.to_string(),
            counts.withheld.to_string(),
            run.fewest_left.map_or_else(none, |_| percent(run.most_ejected)),
            run.fewest_left.map_or_else(none, |left| left.to_string()),
            run.well_after_us.filter(|_| run.fewest_left.is_some()).map_or_else(none, seconds),
        ]);
    }
    format!(
        "\nfailed connects; the largest number of failed connects, without trials, from one client to one backend; the largest part of a client's members\n\
         that was ejected, the fewest members that were left, and the time from the last failure until no backend was ejected\n{table}"
    )
}

fn line(row: &StepRow) -> String {
    let StepRow { backends, clients, connections, load, utilization, counts, .. } = row;
    let percent = |part: f64| format!("{:.2}%", 100.0 * part);
    // There is no value if nothing arrived, or if no backend was present during the whole step.
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

/// A time as hours, minutes, seconds, and as many decimals as necessary.
fn clock(us: u64) -> String {
    let seconds = us / 1_000_000;
    let text = format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
    let parts = format!(".{:06}", us % 1_000_000);
    text + parts.trim_end_matches('0').trim_end_matches('.')
}

fn summary(total: &Total) -> String {
    let Total { run, counts, connections, load, utilization, .. } = total;
    let errors = counts.errors;
    // Kinds of errors that occur only in some scenarios.
    let more = [
        (errors.limited, "at the limit"),
        (errors.rejected, "rejected"),
        (errors.answered, "answered with an error"),
        (errors.timed_out, "timed out"),
        (counts.retries, "retries"),
    ];
    let more: String = more
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!(", {count} {what}"))
        .collect();
    let jobs = total.jobs.iter().map(|JobCounts { job, arrivals, errors, opened, moved }| {
        format!(
            "\n    job          {job}: {arrivals} arrivals, {errors} errors, {opened} opened, {moved} moved"
        )
    });
    let jobs: String = jobs.collect();
    let floor =
        total.floor.map_or(String::new(), |floor| format!(" (by chance alone {:.1} %)", 100.0 * floor));
    format!(
        "  {run}\n    connections  {} at the start, {} at the end ({:.0} to {:.0} per backend, relative standard deviation {:.2} %)\n    \
         load         relative standard deviation {:.3} %, utilization {:.1} %{floor}, {} of the backends unused\n    \
         arrivals     {}: {} served, {} under way, {} abandoned, {} errors (at worst {:.3} % of a step)\n    \
         errors       {} cut, {} down, {} unready, {} refused{more}\n    \
         churn        {} moved, {} dropped, {} opened, {} closed{jobs}",
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
    fn the_text_report_has_a_table_and_a_summary() {
        let scenario = Scenario::read("two", "two.toml", TEXT).unwrap();
        // Each client sends three requests per step to the backends in turn. Both clients begin
        // with the same backend, so this backend gets four requests. Each backend stops once, and
        // both clients reconnect to it.
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
    load         relative standard deviation 0.000 %, utilization 100.0 % (by chance alone 75.0 %), 0 of the backends unused
    arrivals     12: 12 served, 0 under way, 0 abandoned, 0 errors (at worst 0.000 % of a step)
    errors       0 cut, 0 down, 0 unready, 0 refused
    churn        0 moved, 4 dropped, 4 opened, 0 closed
";
        assert_eq!(text(&scenario, &play(&scenario, 5)), expected);
    }

    #[test]
    fn the_json_document_has_the_shape_in_the_readme() {
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
    fn a_report_with_ejections_has_columns_for_them_and_compares_runs() {
        let text = r#"
            title = "One client, two backends, of which one refuses from 2 s to 9 s"
            duration = "20s"
            step = "10s"
            backends = { count = 2 }
            [[job]]
            name = "one"
            tasks = 1
            traffic = "connections"
            interval = "100ms"
            arrivals = "even"
            [[fail]]
            at = "2s"
            for = "7s"
            backends = 1
            [[run]]
            name = "on"
            ejection = {}
            [[run]]
            name = "off"
        "#;
        let scenario = Scenario::read("two", "two.toml", text).unwrap();
        let report = play(&scenario, 5);
        let shown = super::text(&scenario, &report);
        let (rows, compared) = shown.split_once("\nfailed connects").unwrap();
        let lines: Vec<&str> = rows.lines().filter(|line| line.contains("0:00:")).collect();
        let tails = lines.iter().map(|line| line.rsplit_once('|').unwrap().1).collect::<Vec<_>>();
        // Five connects fail within a second. After five seconds a trial fails, and ten seconds
        // later a trial succeeds.
        let expected = [
            "       1         2       1        0",
            "       0         0       1        0",
            "       0         0       0        0",
            "       0         0       0        0",
        ];
        assert_eq!(tails, expected, "{shown}");
        let table: Vec<&str> = compared.lines().skip(2).collect();
        let expected = [
            "run  failed  of all  at most  ejections  trials  readmitted  withheld  ejected  left  well after",
            "on        6   3.0 %        5          2       2           1         0   50.0 %     1       9.6 s",
            "off      35  17.5 %       35          0       0           0         0        -     -           -",
        ];
        assert_eq!(table, expected, "{shown}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["ejection"]["steps"][0]["ejected"], 1);
        assert_eq!(json["ejection"]["runs"][1]["most"]["failed"], 35);
        let without =
            serde_json::to_value(play(&Scenario::read("two", "two.toml", TEXT).unwrap(), 5)).unwrap();
        assert!(without.get("ejection").is_none(), "the field exists only if a run ejects backends");
    }

    #[test]
    fn a_load_above_one_is_noted() {
        let costly = TEXT.replace(
            "500ms\"\n        arrivals",
            "500ms\"\n        cost = { mean = \"1s\", exact = true }\n        arrivals",
        );
        let scenario = Scenario::read("two", "two.toml", &costly).unwrap();
        let shown = text(&scenario, &play(&scenario, 5));
        let note = "note: as written needs 2.00 times the capacity of all machines: each machine queues up to 10000 \
                    requests, and rejects further ones\n";
        assert!(shown.ends_with(note), "{shown}");
        assert!(
            !text(&scenario, &play(&Scenario::read("two", "two.toml", TEXT).unwrap(), 5)).contains("note:")
        );
    }

    #[test]
    fn an_unknown_scenario_name_is_reported() {
        let error = format!("{:#}", read("figure-6").unwrap_err());
        let expected = "read scenario \"figure-6\": neither a file nor one of figure-5, rolling-update, aperture, \
                        aperture-by-load, small-jobs, ejection-tenth, ejection-half, ejection-flapping, ejection-all, book-load, book-load-08, book-load-skew, \
                        book-load-equal, load-reports, load-kept, load-small-jobs, load-changes, load-faults, sinkhole, active-limit, \
                        restart-cost, bursts: ";
        assert!(error.starts_with(expected), "{error}");
        assert_eq!(read("figure-5").unwrap().name, "figure-5");
    }
}
