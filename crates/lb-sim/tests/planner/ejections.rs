//! Clients that eject backends: the keys that configure ejection, and properties that hold for
//! every kind of failure.

use lb_sim::traffic::tally::TrafficCounts;
use lb_sim::traffic::{TrafficReport, play};
use proptest::prelude::*;

use super::{read, scenario};

const START: &str = "title = \"t\"\nduration = \"10s\"\nstep = \"1s\"\nbackends = { count = 4 }\n";
const JOB: &str = "[[job]]\nname = \"a\"\ntasks = 2\ntraffic = \"connections\"\n";

fn played(text: &str, seed: u64) -> TrafficReport {
    play(&scenario(text), seed)
}

#[test]
fn ejection_has_the_keys_of_the_configuration() {
    let ejects = |lines: &str| read(&format!("{START}{JOB}{lines}\n")).map(|scenario| scenario.ejects());
    for (lines, expected) in [
        ("", false),
        ("ejection = \"off\"", false),
        ("ejection = {}", true),
        ("ejection = { failures = 255, base = \"1h\", max = \"1h\" }", true),
        ("ejection = { failures = 1, base = \"100ms\", max = \"100ms\" }", true),
        ("[[run]]\nname = \"a\"\nejection = { failures = 3 }", true),
    ] {
        assert_eq!(ejects(lines), Ok(expected), "{lines}");
    }
    let check = |lines: &str, expected: &str| match ejects(lines) {
        Ok(_) => panic!("these lines were accepted: {lines}"),
        Err(fault) => {
            assert!(fault.starts_with(&format!("x.toml:{expected}")), "{fault}\ninstead of\n{expected}");
        }
    };
    check(
        "ejection = \"on\"",
        "9:12: \"on\" is not an ejection: write \"off\", or a table as in { failures = 5 }",
    );
    check(
        "ejection = true",
        "9:12: invalid type: boolean `true`, expected \"off\", or a table as in { failures = 5 }",
    );
    check(
        "ejection = { fails = 5 }",
        "9:14: unknown field `fails`, expected one of `failures`, `base`, `max`",
    );
    check("ejection = { failures = 0 }", "9:25: 0 is not a whole number from 1 to 255");
    check("ejection = { failures = 256 }", "9:25: 256 is not a whole number from 1 to 255");
    check("ejection = { base = \"99ms\" }", "9:12: base is \"99ms\": write \"100ms\" to \"1h\"");
    check("ejection = { max = \"2h\" }", "9:12: max is \"2h\": write \"100ms\" to \"1h\"");
    check(
        "ejection = { base = \"10m\" }",
        "9:12: `base` is \"10m\", but no ejection is longer than `max`, which is \"5m\"",
    );
    let requests = |text: String| read(&text.replace("connections", "requests")).map(|_| ());
    let fault = requests(format!("{START}{JOB}ejection = {{}}\n")).unwrap_err();
    assert!(
        fault.starts_with("x.toml:5:1: ejection needs connects, and tasks that send requests make none"),
        "{fault}"
    );
    let fault = requests(format!("{START}{JOB}[[run]]\nname = \"a\"\nejection = {{}}\n")).unwrap_err();
    assert!(fault.starts_with("x.toml:9:1: ejection needs connects, and no job makes any"), "{fault}");
}

/// One client and two backends, one of which fails from second 1 to the end of the run. The client
/// makes a connect every tenth of a second.
fn failing(mode: &str, ejection: &str) -> String {
    format!(
        "title = \"one\"\nduration = \"60s\"\nstep = \"60s\"\nbackends = {{ count = 2 }}\n[[job]]\nname = \"one\"\ntasks = 1\n\
         traffic = \"connections\"\ninterval = \"100ms\"\narrivals = \"even\"\nejection = {ejection}\n\
         [[fail]]\nat = \"1s\"\nfor = \"59s\"\nbackends = 1\nmode = \"{mode}\"\n"
    )
}

#[test]
fn each_kind_of_failure_is_ejected_after_its_number_of_connects() {
    for seed in 0..4 {
        let run = |mode, ejection| {
            let report = played(&failing(mode, ejection), seed);
            report.ejection.expect("the run has ejections").runs.remove(0)
        };
        // Each of the ejections of 5, 10 and 20 seconds ends with a failed trial.
        let refused = run("refuse", "{}");
        assert_eq!((refused.most.failed, refused.counts.failed, refused.counts.trials), (5, 8, 3));
        // A client gives up an unanswered connect after three seconds. Until then it begins five
        // more of these connects per second. So when the first five connects have failed, about
        // fifteen are unanswered. The test tolerates a difference of two. Each trial also takes
        // three seconds.
        let silent = run("blackhole", "{}");
        assert!((18..=22).contains(&silent.most.failed), "{silent:?}");
        assert_eq!(silent.counts.trials, 3);
        // An established connection subtracts one failure, and a reset at once counts as two. So
        // four connects are enough for an ejection. Each trial readmits the backend for a moment.
        let reset = run("reset_at_once", "{}");
        assert_eq!((reset.most.failed, reset.counts.trials, reset.counts.readmissions), (4, 3, 3));
        // The configured values are used instead of the defaults.
        let sooner = run("refuse", "{ failures = 2, base = \"1s\", max = \"1s\" }");
        assert_eq!(sooner.most.failed, 2);
        assert!((50..=62).contains(&sooner.counts.trials), "{sooner:?}");
    }
}

#[test]
fn above_256_members_ejection_works_without_their_list() {
    let text = "title = \"many\"\nduration = \"3m\"\nstep = \"30s\"\nbackends = { count = 300 }\n[[job]]\nname = \"one\"\n\
                tasks = 1\nsize = \"auto\"\ntraffic = \"connections\"\ninterval = \"2ms\"\nejection = {}\n\
                [[fail]]\nat = \"30s\"\nfor = \"1m\"\nshare = 10\n";
    let report = played(text, 1);
    let run = &report.ejection.expect("the run has ejections").runs[0];
    assert_eq!((run.most.failed, run.counts.readmissions), (5, 30), "{run:?}");
    assert!(run.most.trials <= 5 && run.well_after_us.is_some(), "{run:?}");
}

/// A scenario with failing backends and clients that eject them. If `changes` is set, the scenario
/// has other events too.
fn busy(changes: bool) -> impl Strategy<Value = String> {
    let rules = (1u32..8, 1u32..4, 0u32..20).prop_map(|(failures, base, more)| {
        format!("{{ failures = {failures}, base = \"{base}s\", max = \"{}s\" }}", base + more)
    });
    let fail = (
        0u32..8,
        1u32..5,
        1u32..=100,
        prop::sample::select(vec!["refuse", "blackhole", "reset_at_once"]),
        1u32..4,
    );
    let fail = fail.prop_map(|(at, lasts, share, mode, times)| {
        let every = lasts + 1;
        let text = format!("at = \"{at}s\"\nfor = \"{lasts}s\"\nshare = {share}\nmode = \"{mode}\"\nevery = \"{every}s\"\ntimes = {times}");
        if mode == "blackhole" { format!("{text}\ntimeout = \"1500ms\"") } else { text }
    });
    let change = prop::sample::select(if changes {
        vec![
            "[[resize]]\nat = \"6s\"\nbackends = 3\n",
            "[[resize]]\nat = \"9s\"\nbackends = 30\nlame_duck = \"1s\"\n",
            "[[resize]]\nat = \"7s\"\njob = \"job\"\ntasks = 2\n",
            "[[restart]]\nat = \"4s\"\nbatch = 5\ndown = \"1s\"\n",
        ]
    } else {
        vec![""]
    });
    (1u32..24, 1u32..6, 1u32..12, rules, fail, change).prop_map(|(count, tasks, size, rules, fail, change)| {
        format!(
            "title = \"busy\"\nduration = \"30s\"\nstep = \"5s\"\nbackends = {{ count = {count} }}\n[[job]]\nname = \"job\"\n\
             tasks = {tasks}\nsize = {size}\ntraffic = \"connections\"\ninterval = \"50ms\"\nlasts = \"300ms\"\nejection = {rules}\n\
             [[fail]]\n{fail}\n{change}"
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every arrival and every connection is counted once, and the steps add up to the totals,
    /// whatever fails or changes.
    #[test]
    fn counts_stay_consistent_while_backends_are_ejected(text in busy(true), seed in any::<u64>()) {
        let report = played(&text, seed);
        let total = &report.summary.runs[0];
        let TrafficCounts { arrivals, served, abandoned, errors, opened, closed, dropped, .. } = total.counts;
        prop_assert_eq!(arrivals, served + abandoned + errors.sum() + total.under_way);
        prop_assert_eq!(opened, closed + dropped + total.connections_at_end);
        let ejections = report.ejection.as_ref().expect("the run has ejections");
        let sum = |of: fn(&lb_sim::traffic::ejections::EjectionCounts) -> u64| -> u64 {
            ejections.steps.iter().map(|row| of(&row.counts)).sum()
        };
        let whole = ejections.runs[0].counts;
        prop_assert_eq!(sum(|counts| counts.failed), whole.failed);
        prop_assert_eq!(sum(|counts| counts.trials), whole.trials);
        prop_assert_eq!(sum(|counts| counts.ejections), whole.ejections);
        prop_assert!(whole.failed <= errors.sum() && whole.readmissions <= whole.trials);
        prop_assert_eq!(
            serde_json::to_string(&report).expect("the report has a JSON form"),
            serde_json::to_string(&played(&text, seed)).expect("the report has a JSON form")
        );
    }

    /// While the members of the subset do not change, the last available member is never ejected.
    #[test]
    fn the_last_available_backend_is_never_ejected(text in busy(false), seed in any::<u64>()) {
        let report = played(&text, seed);
        let run = &report.ejection.as_ref().expect("the run has ejections").runs[0];
        if let Some(left) = run.fewest_left {
            prop_assert!(left >= 1, "{:?}", run);
        }
        prop_assert_eq!(report.summary.runs[0].counts.errors.refused, 0, "a client can always choose a backend");
    }
}
