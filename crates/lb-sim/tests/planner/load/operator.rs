//! Weights that follow load while an operator changes weights, switches load control, or upgrades
//! all daemons at once.

use crate::fleet::{FLEET, busiest_over_least, most, rows, weights};
use crate::played;
use lb_sim::metrics::mean;
use lb_sim::traffic::tally::StepRow;

const FEEDBACK: &str = "load = \"feedback\"\n";

/// For each step, the utilization of the least busy backend divided by the mean.
fn least_over_mean(rows: &[&StepRow]) -> Vec<f64> {
    rows.iter().filter_map(|row| row.cpu).map(|cpu| cpu.min / cpu.mean).collect()
}

fn reweighted(weight: u32) -> String {
    let text = FLEET.replace("count = 20", "count = 20\nweights = [{ from = 0, to = 19, weight = 100 }]");
    format!("{text}{FEEDBACK}[[reweight]]\nat = \"80s\"\nfrom = 1\nto = 1\nweight = {weight}\n")
}

#[test]
fn a_changed_weight_restarts_shares_without_oscillation() {
    // The weight is halved. The backend gets its former load again, because it has free capacity.
    let report = played(&reweighted(50));
    let least = least_over_mean(&rows(&report, "as written", (80, 180)));
    assert!(least[0] < 0.75, "the new weight must act at once: {least:?}");
    assert!(
        least.windows(2).all(|pair| pair[1] > pair[0] - 0.08),
        "the load must return without oscillation: {least:?}"
    );
    let settled = |report| most(&busiest_over_least(&rows(report, "as written", (130, 180))));
    assert!(settled(&report) < 1.12, "{}", settled(&report));
    // The weight becomes a tenth. The backend gets at most eight times its new share. The loads of
    // the others remain even.
    let report = played(&reweighted(10));
    let least = least_over_mean(&rows(&report, "as written", (80, 180)));
    assert!(least.windows(2).all(|pair| pair[1] > pair[0] - 0.08), "{least:?}");
    assert!(least[0] < 0.2 && (0.7..0.9).contains(least.last().expect("the run has rows")), "{least:?}");
    let busiest: Vec<f64> = rows(&report, "as written", (130, 180))
        .iter()
        .filter_map(|row| row.cpu)
        .map(|cpu| cpu.max / cpu.mean)
        .collect();
    assert!(most(&busiest) < 1.1, "{busiest:?}");
}

#[test]
fn long_connections_do_not_oscillate_after_a_weight_change() {
    let text = reweighted(50)
        .replace("rate = 60.0", "rate = 10.0\nconnection_life = \"20s\"\npause = \"3200ms\"")
        .replace("\"180s\"", "\"300s\"")
        .replace("at = \"80s\"", "at = \"140s\"");
    let report = played(&text);
    let even = |from, to| busiest_over_least(&rows(&report, "as written", (from, to)));
    // Chance makes every step uneven, because a task opens only ten connections per second.
    let (before, seen, after) = (even(80, 140), even(140, 180), even(220, 300));
    assert!(most(&seen) > most(&before) + 0.1, "{before:?} {seen:?}");
    assert!(most(&after) < most(&before) + 0.1, "{before:?} {after:?}");
    assert!(mean(after.iter().copied()) < mean(before.iter().copied()) + 0.05, "{before:?} {after:?}");
}

#[test]
fn a_switch_freezes_or_turns_off_the_law_of_all_tasks() {
    let text = FLEET.replace("\"180s\"", "\"240s\"")
        + FEEDBACK
        + "[[switch]]\nat = \"60s\"\nload = \"freeze\"\n[[switch]]\nat = \"120s\"\nload = \"off\"\n\
           [[switch]]\nat = \"160s\"\nload = \"on\"\n\
           [[fail]]\nat = \"70s\"\nfor = \"50s\"\nshare = 30\nmode = \"slow\"\nslowdown = 1.5\n";
    let report = played(&text);
    let before = weights(rows(&report, "as written", (50, 60))[0]).factors;
    let frozen = rows(&report, "as written", (60, 120));
    for row in &frozen {
        assert_eq!(
            (weights(row).tables, weights(row).factors),
            (0, before),
            "frozen factors are equal to the last digit: {row:?}"
        );
    }
    assert!(
        most(&busiest_over_least(&frozen)) > 1.4,
        "the loads must become uneven while factors are frozen"
    );
    let off = rows(&report, "as written", (120, 160));
    for row in &off {
        assert_eq!((weights(row).factors.min, weights(row).factors.max), (1.0, 1.0), "{row:?}");
    }
    assert_eq!(off.iter().map(|row| weights(row).tables).sum::<u64>(), 20, "one table for each task");
    assert!(most(&busiest_over_least(&off)) > 3.0);
    assert!(
        most(&busiest_over_least(&rows(&report, "as written", (210, 240)))) < 1.15,
        "the loads must be even after 50 s"
    );
}

#[test]
fn replaced_daemons_continue_with_the_saved_state() {
    let text = FLEET.replace("\"180s\"", "\"240s\"")
        + FEEDBACK
        + "[[upgrade]]\nat = \"80s\"\nkept = \"10s\"\n[[upgrade]]\nat = \"140s\"\nkept = \"nothing\"\n";
    let report = played(&text);
    let even = |from, to| most(&busiest_over_least(&rows(&report, "as written", (from, to))));
    let restored = weights(rows(&report, "as written", (60, 70))[0]).factors;
    let next = weights(rows(&report, "as written", (80, 90))[0]).factors;
    assert!(
        (restored.max - next.max).abs() < 0.1 && (restored.min - next.min).abs() < 0.05,
        "{restored:?} {next:?}"
    );
    assert!(even(60, 80) < 1.10 && even(80, 140) < 1.12, "{} {}", even(60, 80), even(80, 140));
    // If no state was saved, load control starts without learnt state.
    assert!(even(140, 150) > 2.0 && even(200, 240) < 1.12, "{} {}", even(140, 150), even(200, 240));
    assert_eq!(report.summary.runs[0].counts.moved, 0, "an upgrade must not move connections");
    assert_eq!(report.summary.runs[0].counts.errors.sum(), 0);
}

#[test]
fn frozen_factors_stay_frozen_after_an_upgrade() {
    let text = FLEET.to_owned()
        + FEEDBACK
        + "[[switch]]\nat = \"60s\"\nload = \"freeze\"\n[[upgrade]]\nat = \"100s\"\nkept = \"10s\"\n";
    let report = played(&text);
    let before = weights(rows(&report, "as written", (60, 70))[0]).factors;
    let after = weights(rows(&report, "as written", (100, 110))[0]).factors;
    // The saved factors include changes that were too small for a new table.
    for (before, after) in [(before.min, after.min), (before.max, after.max)] {
        assert!((after / before - 1.0).abs() < 0.02, "{before} {after}");
    }
    for row in rows(&report, "as written", (100, 180)) {
        assert_eq!((weights(row).tables, weights(row).factors), (0, after), "{row:?}");
    }
}
