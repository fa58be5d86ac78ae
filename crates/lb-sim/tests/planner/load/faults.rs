//! Weights that follow load while backends report wrong loads, hang, send no reports or start, or
//! while most backends are lame ducks. Clients must not all use one backend, and weights must not
//! oscillate.

use crate::fleet::{FLEET, busiest_over_least, most, rows, weights};
use crate::played;
use lb_sim::metrics::float;
use lb_sim::traffic::TrafficReport;
use lb_sim::traffic::figures::RunFigures;
use lb_sim::traffic::tally::StepRow;

/// The runs of the scenarios. They differ in how clients compute weights.
const RUNS: &str = include_str!("../fleet/runs.toml");

/// An additional run, in which the number of active requests is limited.
const LIMIT: &str = "[[run]]\nname = \"limit\"\nload = \"feedback\"\nactive_limit = 8\n";

const FEEDBACK: &str = "load = \"feedback\"\n";

fn fail(lines: &str) -> String {
    format!("[[fail]]\nat = \"30s\"\nfor = \"10m\"\nbackends = 1\n{lines}\n")
}

fn figures<'a>(report: &'a TrafficReport, run: &str) -> &'a RunFigures {
    let figures = report.figures.as_ref().expect("there are figures, because requests cost CPU time");
    figures.runs.iter().find(|figures| figures.run == run).expect("the scenario has this run")
}

/// The utilization of the busiest backend, and the lowest and the highest utilization of the other
/// backends.
fn busiest_and_others(report: &TrafficReport, run: &str) -> (f64, f64, f64) {
    let mut cpu = figures(report, run).cpu.clone();
    cpu.sort_by(f64::total_cmp);
    let (busiest, others) = cpu.split_last().expect("the fleet has backends");
    (*busiest, others[0], others[others.len() - 1])
}

/// The part of all arrivals that failed in these rows.
fn failed(rows: &[&StepRow]) -> f64 {
    let sum = |of: fn(&StepRow) -> u64| float(rows.iter().map(|row| of(row)).sum());
    sum(|row| row.counts.errors.sum()) / sum(|row| row.counts.arrivals)
}

#[test]
fn a_lying_backend_gets_at_most_eight_times_its_share() {
    let report = played(&(FLEET.to_owned() + RUNS + LIMIT + &fail("mode = \"lies\"\nutilization = 0.01")));
    for run in ["feedback", "p2c", "limit"] {
        // At first the lying backend has a sixth of each table with this backend, and later at most
        // eight thirteenths.
        let last = rows(&report, run, (130, 180));
        assert!(last.iter().all(|row| weights(row).factors.max < 8.0), "{run}: {:?}", weights(last[0]));
        let (busiest, least, most) = busiest_and_others(&report, run);
        assert!(busiest > 0.95 && most / least < 1.15, "{run}: {busiest} {least} {most}");
        // The utilization of the other backends does not oscillate.
        let even: Vec<f64> = last.iter().map(|row| row.cpu.expect("requests have a cost").min).collect();
        assert!(most - even.iter().copied().fold(1.0, f64::min) < 0.05, "{run}: {even:?}");
    }
    // A policy that compares open flows sends less to the lying backend. With a limit, clients send
    // the remaining requests to the other backends.
    let load = |run: &str| rows(&report, run, (130, 180)).last().expect("the run has rows").load;
    let share = |run: &str| load(run).max / load(run).mean / 20.0;
    for run in ["feedback", "p2c", "limit"] {
        assert!(share(run) < 0.14, "{run}: {}", share(run));
    }
    // When the machine of the lying backend is full, requests to it take long, so clients send no
    // more requests to it.
    assert!(failed(&rows(&report, "feedback", (130, 180))) < 0.05);
    assert!(failed(&rows(&report, "p2c", (130, 180))) < 0.001);
    let p99 = |run: &str| figures(&report, run).latency_ms.p99.mean;
    assert!(failed(&rows(&report, "limit", (130, 180))) == 0.0 && p99("limit") < 600.0, "{}", p99("limit"));
    // For comparison: the weights of A58 have no upper bound, and depend only on the reports of the
    // backend.
    assert!(busiest_and_others(&report, "a58").2 > 1.5 * busiest_and_others(&report, "feedback").2);
}

#[test]
fn a_hung_backend_gains_no_share() {
    let text = FLEET.replace("rate = 60.0", "rate = 60.0\ntimeout = \"2s\"");
    let report = played(&(text + RUNS + LIMIT + &fail("mode = \"hang\"")));
    let failed = |run: &str| failed(&rows(&report, run, (130, 180)));
    // The hung backend reports nearly no load. Without the rule for long flows, 18 % of the
    // requests failed with weighted round robin, and 10 % with p2c.
    for run in ["structural", "feedback", "p2c", "limit"] {
        assert!(failed(run) < 0.05, "{run}: {}", failed(run));
    }
    // A58 uses the last rates that the application reported before the application hung.
    assert!(failed("a58") < 0.05, "{}", failed("a58"));
    for run in ["feedback", "p2c", "limit"] {
        let cpu =
            rows(&report, run, (130, 180)).into_iter().map(|row| row.cpu.expect("requests have a cost"));
        assert!(
            most(&cpu.map(|cpu| cpu.max / cpu.mean).collect::<Vec<_>>()) < 1.3,
            "{run}: another backend has a much larger load than the mean"
        );
    }
}

#[test]
fn requests_at_a_hung_backend_are_served_or_cut_and_counted_once() {
    let text = FLEET.replace("\"180s\"", "\"40s\"").replace("\"130s\"", "\"0s\"");
    let report = played(&(text + "[[fail]]\nat = \"10s\"\nfor = \"20s\"\nbackends = 2\nmode = \"hang\"\n"));
    let errors = |from| {
        rows(&report, "as written", (from, from + 10)).iter().map(|row| row.counts.errors.cut).sum::<u64>()
    };
    // The clients have no timeout, so requests at hung backends end only when the processes
    // restart.
    assert_eq!((errors(0), errors(10)), (0, 0));
    assert!(errors(20) + errors(30) > 1_000, "{} {}", errors(20), errors(30));
    assert_eq!(report.summary.runs[0].counts.errors.cut, errors(20) + errors(30));
    let idle = rows(&report, "as written", (10, 30));
    assert!(
        idle.iter().all(|row| row.cpu.expect("requests have a cost").min < 0.001),
        "a hung process must not use CPU time"
    );
}

#[test]
fn a_silent_backend_returns_to_its_structural_share_after_three_minutes() {
    let silent = "[[fail]]\nat = \"60s\"\nfor = \"300s\"\nbackends = 1\nmode = \"silent\"\n";
    let text = FLEET.replace("\"180s\"", "\"430s\"") + FEEDBACK + silent;
    let report = played(&text);
    let even = |from, to| most(&busiest_over_least(&rows(&report, "as written", (from, to))));
    assert!(even(60, 240) < 1.15, "{}", even(60, 240));
    // The weight of the silent backend returns to the value that it had before any load report.
    // Meanwhile the weights of the others do not change.
    assert!(even(300, 360) > 1.2, "{}", even(300, 360));
    assert!(even(390, 430) < 1.15, "after the backend reports again: {}", even(390, 430));
}

#[test]
fn a58_drops_the_weight_of_a_backend_silent_for_three_minutes() {
    // All backends fall silent. If fewer than two weights are known, every backend has the same
    // weight.
    let silent = "[[fail]]\nat = \"60s\"\nfor = \"10m\"\nshare = 100\nmode = \"silent\"\n";
    let text = FLEET.replace("\"180s\"", "\"260s\"").replace("\"random\"", "\"rocksteadier\"")
        + "load = \"a58\"\n"
        + silent;
    let report = played(&text);
    let factors = |from, to| {
        rows(&report, "as written", (from, to)).iter().map(|row| weights(row).factors.rsd).collect::<Vec<_>>()
    };
    assert!(factors(60, 230).iter().all(|rsd| *rsd > 0.3), "{:?}", factors(60, 230));
    assert!(factors(250, 260).iter().all(|rsd| *rsd < 0.01), "{:?}", factors(250, 260));
}

#[test]
fn slow_start_reaches_the_share_without_overshoot() {
    let text = FLEET
        .replace("count = 20", "count = 20\nrestart_cost = { factor = 3.0, for = \"10s\" }")
        .replace("\"180s\"", "\"140s\"")
        .replace("\"10s\"\nmeasure", "\"1s\"\nmeasure")
        + "load = \"feedback\"\n[[run]]\nname = \"slowly\"\nslow_start = \"20s\"\n[[run]]\nname = \"at-once\"\n\
           [[restart]]\nat = \"60s\"\nbatch = 1\nlame_duck = \"2s\"\ndown = \"3s\"\npause = \"10m\"\n";
    let report = played(&text);
    // The restarted backend returns at 65 s. From the next whole second on, it has the lowest load
    // of all backends.
    let least = |run: &str, second: u64| rows(&report, run, (second - 1, second))[0].load;
    let part = |run: &str, second: u64| least(run, second).min / least(run, second).mean;
    let grows: Vec<f64> = [67, 72, 77].map(|second| part("slowly", second)).into();
    assert!(grows[0] < 0.2 && grows.windows(2).all(|pair| pair[0] < pair[1]), "{grows:?}");
    assert!(part("at-once", 67) > 2.0 * grows[0], "{}", part("at-once", 67));
    // During slow start nothing is learnt about the backend: its factor is the earlier factor times
    // the part of slow start that has passed.
    let factor = |second| weights(rows(&report, "slowly", (second - 1, second))[0]).factors.min;
    assert!(factor(66) < 0.1, "{}", factor(66));
    let grown = factor(75) / factor(66);
    assert!((4.5..5.6).contains(&grown), "{grown}");
    let busiest = |run: &str, from, to| {
        most(
            &rows(&report, run, (from, to))
                .iter()
                .map(|row| row.cpu.expect("requests have a cost").max)
                .collect::<Vec<_>>(),
        )
    };
    assert!(
        busiest("at-once", 66, 80) > 0.8 && busiest("slowly", 66, 80) < 0.6,
        "{} {}",
        busiest("at-once", 66, 80),
        busiest("slowly", 66, 80)
    );
    let settled = |run: &str| busiest(run, 100, 110) / figures(&report, run).cpu_mean.mean;
    assert!(settled("slowly") < 1.35, "{}", settled("slowly"));
}

#[test]
fn factors_stay_the_same_in_panic() {
    let restart =
        "[[restart]]\nat = \"60s\"\nbatch = 19\nlame_duck = \"30s\"\ndown = \"1s\"\npause = \"10m\"\n";
    let text =
        FLEET.replace("\"180s\"", "\"150s\"").replace("rate = 60.0", "rate = 40.0") + FEEDBACK + restart;
    let report = played(&text);
    let before = weights(rows(&report, "as written", (50, 60))[0]).factors;
    for row in rows(&report, "as written", (60, 90)) {
        // All backends except one are lame ducks, and the remaining one gets the whole load.
        assert_eq!((weights(row).tables, weights(row).factors), (0, before), "{row:?}");
    }
    assert!(
        weights(rows(&report, "as written", (90, 100))[0]).tables > 0,
        "tables must change after the panic"
    );
}
