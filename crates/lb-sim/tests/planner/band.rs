//! Simulates subsets that grow and shrink with the load of their task. Each task has a connection
//! to every member, so the number of connections is the number of members.

use lb_sim::traffic::scenario::Scenario;
use lb_sim::traffic::{TrafficReport, play};

/// Simulates requests that last 100 ms on average, with `rate` arrivals per second at each task. So
/// on average `rate` / 10 requests of a task are open.
fn played(rate: u32, more: &str) -> TrafficReport {
    let text = format!(
        r#"
title = "sizes that follow load"
duration = "8m"
step = "10s"
[backends]
count = 60
[[job]]
name = "web"
tasks = 10
algorithm = "random"
size = {{ low = 0.875, high = 1.125 }}
traffic = "requests"
rate = {rate}
lasts = "100ms"
{more}
"#
    );
    play(&Scenario::read("band", "band.toml", &text).unwrap_or_else(|fault| panic!("{fault}")), 1)
}

const BACKENDS: f64 = 60.0;
const TASKS: f64 = 10.0;

/// The average number of members of a task at the end of each step.
fn sizes(report: &TrafficReport) -> Vec<f64> {
    report.steps.iter().map(|row| row.connections.mean * BACKENDS / TASKS).collect()
}

#[test]
fn subsets_grow_when_load_rises_and_shrink_when_it_falls() {
    // From the end of the fourth minute to the end of the sixth, the load is four times as high:
    // each task has 40 open requests instead of 10.
    let report = played(100, "burst = { factor = 4.0, every = \"4m\", for = \"2m\" }");
    let sizes = sizes(&report);
    assert!(
        sizes[..24].iter().all(|size| *size == 12.0),
        "a subset does not have the minimum size: {sizes:?}"
    );
    assert!(sizes[24..36].windows(2).all(|pair| pair[0] <= pair[1]), "a subset shrinks: {sizes:?}");
    // 40 / 1.125 is 35.6. Because of chance the subsets are slightly larger.
    assert!((35.5..39.0).contains(&sizes[30]) && (35.5..39.0).contains(&sizes[35]), "{sizes:?}");
    assert!(sizes[36..].windows(2).all(|pair| pair[0] >= pair[1]), "a subset grows: {sizes:?}");
    assert_eq!(sizes[47], 12.0, "{sizes:?}");
    let counts = report.summary.runs[0].counts;
    assert_eq!(counts.errors.sum(), 0, "a client must close a connection only after its last request");
    assert_eq!(counts.opened, counts.moved, "every opened connection was closed: {counts:?}");
}

#[test]
fn subsets_stay_the_same_under_constant_load() {
    let moved = |report: &TrafficReport| {
        report.steps[12..].iter().map(|row| row.counts.moved + row.counts.opened).sum::<u64>()
    };
    // There are three cases: a load for which far fewer members than the minimum size are enough; a
    // load in the middle of the band at the minimum size; and 20 open requests, which fit sizes of
    // 18 to 22. Requests arrive at random, so at times one member is added or removed. This happens
    // in at most one of 120 evaluations, and there are 3,600 evaluations.
    for (rate, most) in [(5, 0), (120, 30), (200, 30)] {
        let report = played(rate, "");
        let sizes = sizes(&report);
        assert!(
            moved(&report) <= most,
            "{} members of 10 tasks were added or removed in 6 minutes: {sizes:?}",
            moved(&report)
        );
        assert!(sizes.iter().all(|size| *size >= 12.0));
        let part = f64::from(rate) / 10.0 / sizes[47];
        assert!(part < 1.125 && (part > 0.875 || sizes[47] == 12.0), "{part} requests each: {sizes:?}");
    }
}

#[test]
fn a_subset_has_at_most_all_backends() {
    let report = played(1_000, "");
    assert_eq!(sizes(&report)[47], BACKENDS, "100 open requests need all 60 backends");
    assert_eq!(report.summary.runs[0].counts.moved, 0);
}
