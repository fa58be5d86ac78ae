//! The counts of simulated scenarios, compared with calculations by hand, and properties that every
//! scenario must have.

use lb_core::subset::Algorithm;
use lb_sim::metrics::Spread;
use lb_sim::traffic::tally::{RequestErrors, StepRow, Total, TrafficCounts};
use lb_sim::traffic::{TrafficReport, play};
use proptest::prelude::*;

use super::scenario;

#[track_caller]
fn check(text: &str, steps: &[StepRow], total: &Total) {
    let report = play(&scenario(text), 1);
    assert_eq!(report.steps, steps);
    // The field `floor` is random, so it cannot be calculated by hand.
    let floor = report.summary.runs[0].floor;
    assert_eq!(report.summary.runs, [Total { floor, ..total.clone() }]);
}

/// Values that are the same for every backend.
fn all(value: f64) -> Spread {
    Spread { min: value, mean: value, max: value, rsd: 0.0 }
}

const ONE_CLIENT: &str = r#"
title = "one client connects once a second, each connection lives for two"
duration = "8s"
step = "4s"
[backends]
count = 2
[[job]]
name = "one"
tasks = 1
size = 2
traffic = "connections"
interval = "1s"
arrivals = "even"
lasts = "2s"
lives = "even"
"#;

#[test]
fn a_stopped_backend_loses_its_connections_and_its_share() {
    let text = format!("{ONE_CLIENT}\n[[resize]]\nat = \"4s\"\nbackends = 1\n");
    // The first arrival is at a time s in the first second. Four arrivals come before the resize,
    // two at each backend. The first two of them, at s and s + 1, have ended before the resize.
    // Each backend has one of the other two.
    let first = StepRow {
        run: "as written".into(),
        at_us: 4_000_000,
        backends: 2,
        clients: 1,
        connections: all(1.0),
        load: all(2.0),
        utilization: 1.0,
        cpu: None,
        weights: None,
        counts: TrafficCounts { arrivals: 4, served: 2, opened: 4, closed: 2, ..TrafficCounts::default() },
        jobs: Vec::new(),
        traces: None,
    };
    // One of the two open arrivals is cut. The other one ends, and so do the arrivals of s + 4 and
    // s + 5. The last two arrivals of the run have not ended.
    let cut = RequestErrors { cut: 1, ..RequestErrors::default() };
    let second = StepRow {
        at_us: 8_000_000,
        backends: 1,
        connections: all(2.0),
        load: all(4.0),
        counts: TrafficCounts {
            arrivals: 4,
            served: 3,
            errors: cut,
            opened: 4,
            closed: 3,
            dropped: 1,
            ..TrafficCounts::default()
        },
        ..first.clone()
    };
    let total = Total {
        run: "as written".into(),
        counts: TrafficCounts {
            arrivals: 8,
            served: 5,
            abandoned: 0,
            errors: cut,
            retries: 0,
            opened: 8,
            closed: 5,
            moved: 0,
            dropped: 1,
        },
        jobs: Vec::new(),
        under_way: 2,
        connections_at_start: 0,
        connections_at_end: 2,
        connections: all(2.0),
        // Only the backend that remained in the service is included.
        load: all(6.0),
        utilization: 1.0,
        floor: None,
        unused: 0,
        worst_errors: 0.25,
    };
    check(&text, &[first, second], &total);
}

#[test]
fn an_uninformed_client_connects_to_a_stopped_backend() {
    let text = format!("{ONE_CLIENT}\n[[resize]]\nat = \"4s\"\nbackends = 1\n");
    let text = text.replace("step", "notice = { delay = \"2s\" }\nstep");
    let report = play(&scenario(&text), 1);
    // The counts are those of the previous test, but one of the arrivals of s + 4 and s + 5 goes to
    // the stopped backend.
    let expected = TrafficCounts {
        arrivals: 4,
        served: 2,
        errors: RequestErrors { cut: 1, down: 1, ..RequestErrors::default() },
        opened: 3,
        closed: 2,
        dropped: 1,
        ..TrafficCounts::default()
    };
    assert_eq!(report.steps[1].counts, expected);
    assert_eq!((report.steps[1].connections, report.steps[1].load), (all(2.0), all(3.0)));
}

#[test]
fn load_follows_capacity_and_is_measured_by_it() {
    let text = ONE_CLIENT.replace("count = 2", "count = 2\nweights = [{ from = 0, to = 0, weight = 3 }]");
    let report = play(&scenario(&text.replace("connections", "requests")), 1);
    // Of every four arrivals, three go to the first backend, because it has weight three, and one
    // goes to the second.
    for row in &report.steps {
        assert_eq!((row.load, row.connections), (all(1.0), all(1.0)));
        assert_eq!((row.counts.opened, row.counts.moved), (0, 0));
    }
    assert_eq!(report.summary.runs[0].connections_at_start, 2);
    assert_eq!(report.summary.runs[0].load, all(2.0));
}

#[test]
fn held_connections_follow_the_subset() {
    // Each of 4 tasks has connections to 2 of 4 backends: 0 1, 2 3, 0 1, 2 3. With 5 backends, the
    // tasks have connections to 0 1, 2 3, 4 0, 1 2.
    let text = r#"
        title = "held"
        duration = "4s"
        step = "2s"
        [backends]
        count = 4
        [[job]]
        name = "four"
        tasks = 4
        algorithm = "round-robin"
        size = 2
        traffic = "requests"
        [[resize]]
        at = "2s"
        backends = 5
    "#;
    let report = play(&scenario(text), 1);
    let moved = TrafficCounts { opened: 2, closed: 2, moved: 2, ..TrafficCounts::default() };
    let counts: Vec<TrafficCounts> = report.steps.iter().map(|row| row.counts).collect();
    assert_eq!(counts, [TrafficCounts::default(), moved]);
    assert_eq!(report.steps[0].connections, all(2.0));
    // The backends have 2, 2, 2, 1 and 1 connections.
    let connections = report.steps[1].connections;
    assert_eq!((connections.min, connections.mean, connections.max), (1.0, 1.6, 2.0));
}

#[test]
fn a_service_without_capacity_refuses_every_connect() {
    let text = ONE_CLIENT.replace("count = 2", "count = 2\nweights = [{ from = 0, to = 1, weight = 0 }]");
    let total = &play(&scenario(&text), 1).summary.runs[0];
    assert_eq!(
        total.counts,
        TrafficCounts {
            arrivals: 8,
            errors: RequestErrors { refused: 8, ..RequestErrors::default() },
            ..TrafficCounts::default()
        }
    );
}

#[test]
fn clients_come_and_go_with_their_connections() {
    let text = format!(
        "{ONE_CLIENT}\n[[resize]]\nat = \"2s\"\njob = \"one\"\ntasks = 3\n[[resize]]\nat = \"5s\"\njob = \"one\"\ntasks = 1\n"
    );
    let report = play(&scenario(&text), 1);
    let clients: Vec<u32> = report.steps.iter().map(|row| row.clients).collect();
    assert_eq!(clients, [3, 1]);
    // The first task has 8 arrivals. Each of the others has 3, and 2 of these are open when the
    // task is removed.
    let total = &report.summary.runs[0];
    assert_eq!((total.counts.arrivals, total.counts.abandoned, total.under_way), (14, 4, 2));
    assert_eq!((total.counts.served, total.counts.closed, total.connections_at_end), (8, 12, 2));
}

/// A scenario with all kinds of events.
fn busy() -> impl Strategy<Value = String> {
    let job = (
        prop::sample::select(Algorithm::ALL.map(Algorithm::name).to_vec()),
        1u32..12,
        prop_oneof![(1u32..9).prop_map(|size| size.to_string()), Just("\"auto\"".to_owned())],
        prop::sample::select(vec!["connections", "requests"]),
        prop::sample::select(vec!["drain", "cut"]),
        prop::sample::select(vec!["structural", "equal"]),
    );
    let resize = prop_oneof![
        (0u32..20, 1u32..30, 0u32..3).prop_map(|(at, count, lame_duck)| format!(
            "at = \"{at}s\"\nbackends = {count}\nlame_duck = \"{lame_duck}s\""
        )),
        (0u32..20, 1u32..12)
            .prop_map(|(at, tasks)| format!("at = \"{at}s\"\njob = \"job-0\"\ntasks = {tasks}")),
    ];
    let restart = (1u32..30, 0u32..3, 0u32..3, 0u32..2);
    let jobs = prop::collection::vec(job, 1..3);
    (1u32..24, jobs, prop::collection::vec(resize, 0..5), prop::option::of(restart), 0u32..3).prop_map(
        |(count, jobs, resizes, restart, spread)| {
            let mut text = format!(
                "title = \"busy\"\nduration = \"20s\"\nstep = \"3s\"\nnotice = {{ spread = \"{spread}s\" }}\n\
                 backends = {{ count = {count}, weights = [{{ from = 0, to = 0, weight = 5 }}] }}\n"
            );
            for (number, (algorithm, tasks, size, traffic, closing, shares)) in jobs.into_iter().enumerate() {
                text += &format!(
                    "[[job]]\nname = \"job-{number}\"\ntasks = {tasks}\nalgorithm = \"{algorithm}\"\nsize = {size}\n\
                     traffic = \"{traffic}\"\nclosing = \"{closing}\"\nshares = \"{shares}\"\ninterval = \"100ms\"\n\
                     lasts = \"700ms\"\nconnect = \"300ms\"\n"
                );
            }
            for resize in resizes {
                text += &format!("[[resize]]\n{resize}\n");
            }
            if let Some((batch, lame_duck, down, pause)) = restart {
                text += &format!(
                    "[[restart]]\nat = \"4s\"\nbatch = {batch}\nlame_duck = \"{lame_duck}s\"\ndown = \"{down}s\"\npause = \"{pause}s\"\n"
                );
            }
            text
        },
    )
}

fn sum(rows: &[StepRow], of: impl Fn(&TrafficCounts) -> u64) -> u64 {
    rows.iter().map(|row| of(&row.counts)).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The counts are consistent: each arrival has either ended once or not ended, and each opened
    /// connection is closed, dropped or open. The rows add up to the totals.
    #[test]
    fn everything_is_counted_once(text in busy(), seed in any::<u64>()) {
        let TrafficReport { steps, summary, .. } = play(&scenario(&text), seed);
        for total in &summary.runs {
            let TrafficCounts { arrivals, served, abandoned, errors, opened, closed, moved, dropped, .. } = total.counts;
            prop_assert_eq!(arrivals, served + abandoned + errors.sum() + total.under_way);
            prop_assert_eq!(total.connections_at_start + opened, closed + dropped + total.connections_at_end);
            prop_assert!(moved <= closed);
            prop_assert_eq!(sum(&steps, |counts| counts.arrivals), arrivals);
            prop_assert_eq!(sum(&steps, |counts| counts.served), served);
            prop_assert_eq!(sum(&steps, |counts| counts.errors.sum()), errors.sum());
            prop_assert_eq!(sum(&steps, |counts| counts.opened), opened);
            prop_assert!(total.utilization > 0.0 && total.utilization <= 1.0);
        }
        prop_assert_eq!(steps.len(), 7);
        prop_assert_eq!(steps[6].at_us, 20_000_000);
    }

    /// The same file with the same seed gives the same document.
    #[test]
    fn runs_differ_only_by_seed(text in busy(), seed in any::<u64>()) {
        let json = |seed| serde_json::to_string(&play(&scenario(&text), seed)).expect("a report has a JSON form");
        prop_assert_eq!(json(seed), json(seed));
        prop_assert_ne!(json(seed), json(seed ^ 1));
    }
}
