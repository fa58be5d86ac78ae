//! Prints the results of the fleets as tables, and compares them with the requirements.

use std::time::Duration;

use super::arm::{Arm, Outcome};
use super::fleet::{Mode, QUOTAS};
use super::series::{busiest_over_mean, mean};
use crate::results::{Finding, table};

/// The maximum that the requirement allows for the utilization of the busiest backend divided by
/// the mean.
const NEEDED: f64 = 1.10;
/// The length of the window in which the requirement must be met after a change.
const WINDOW: Duration = Duration::from_secs(10);
/// The maximum difference that the requirement allows between the planner and the measurement.
const AGREES: f64 = 0.05;

/// Prints a line for each outcome.
pub fn progress(outcomes: &[Outcome]) {
    for outcome in outcomes {
        println!(
            "{}, {}: busiest over mean {:.3}; {} requests, {} failed",
            outcome.arm.name(),
            outcome.mode.name(),
            busiest_over_mean(&outcome.utilization),
            outcome.sent.sent,
            outcome.sent.failed,
        );
    }
}

/// Sorts the outcomes by mode, and then in the order of the enum [`Arm`]. All tables have this
/// order.
fn sorted(outcomes: &[Outcome]) -> Vec<&Outcome> {
    let mut sorted: Vec<&Outcome> = outcomes.iter().collect();
    sorted.sort_by_key(|outcome| (outcome.mode as u8, outcome.arm as u8));
    sorted
}

/// Formats a table with a row for each arm and mode.
pub fn outcomes(outcomes: &[Outcome], planned: impl Fn(Arm, Mode) -> Option<f64>) -> String {
    let titles = [
        "connections",
        "arm",
        "busiest over mean",
        "in the planner",
        "as reported",
        "mean",
        "a quota halves: <= 1.10 after",
        "in the last 20 s",
        "requests",
        "failed",
    ];
    let row = |outcome: &&Outcome| {
        let changed = outcome.changed.as_ref();
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let even = changed.map(|series| match series.even_after(WINDOW, NEEDED) {
            Some(after) => format!("{:.0} s", after.as_secs_f64()),
            None => "never".to_owned(),
        });
        let last = changed.map(|series| busiest_over_mean(&series.lately(2 * WINDOW)));
        let failed = match (outcome.sent.failed, &outcome.sent.why) {
            (failed, Some(why)) => format!("{failed} ({why})"),
            (failed, None) => failed.to_string(),
        };
        vec![
            outcome.mode.name().to_owned(),
            outcome.arm.name().to_owned(),
            format!("{:.3}", busiest_over_mean(&outcome.utilization)),
            or_dash(planned(outcome.arm, outcome.mode).map(|planned| format!("{planned:.3}"))),
            format!("{:.3}", busiest_over_mean(&outcome.reported)),
            format!("{:.3}", mean(&outcome.utilization)),
            or_dash(even),
            or_dash(last.map(|last| format!("{last:.3}"))),
            outcome.sent.sent.to_string(),
            failed,
        ]
    };
    table(&titles, &sorted(outcomes).iter().map(row).collect::<Vec<_>>())
}

/// Formats a table with a row for each arm and mode, and a column for each backend.
pub fn backends(outcomes: &[Outcome]) -> String {
    let quotas: Vec<String> = QUOTAS.iter().map(|percent| format!("{percent} %")).collect();
    let mut titles = vec!["connections", "arm", "of each backend"];
    titles.extend(quotas.iter().map(String::as_str));
    let rows = |outcome: &&Outcome| {
        let kinds = [
            ("used", &outcome.utilization),
            ("out of quota", &outcome.throttled),
            ("reported", &outcome.reported),
        ];
        kinds.map(|(what, numbers)| {
            let mut row =
                vec![outcome.mode.name().to_owned(), outcome.arm.name().to_owned(), what.to_owned()];
            row.extend(numbers.iter().map(|number| format!("{number:.3}")));
            row
        })
    };
    table(&titles, &sorted(outcomes).iter().flat_map(rows).collect::<Vec<_>>())
}

/// Returns the measurements with their requirements.
pub fn findings(outcomes: &[Outcome], planned: impl Fn(Arm, Mode) -> Option<f64>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (mut agree, mut compared) = (0, 0);
    for outcome in sorted(outcomes) {
        let name = format!("{}, {} connections", outcome.arm.name(), outcome.mode.name());
        let measured = busiest_over_mean(&outcome.utilization);
        if let Some(planned) = planned(outcome.arm, outcome.mode) {
            compared += 1;
            agree += u32::from((measured - planned).abs() <= AGREES);
        }
        if outcome.sent.failed > 0 {
            let failed = format!("{} of {}", outcome.sent.failed, outcome.sent.sent);
            findings.push(Finding::judged(format!("{name}: requests that failed"), failed, "0", false));
        }
        if !outcome.arm.is_judged() {
            continue;
        }
        findings.push(Finding::judged(
            format!("{name}: busiest over mean"),
            format!("{measured:.3}"),
            format!("<= {NEEDED:.2}"),
            measured <= NEEDED,
        ));
        if let Some(series) = &outcome.changed {
            let after = series.even_after(WINDOW, NEEDED);
            findings.push(Finding::judged(
                format!("{name}: <= {NEEDED:.2} again over 10 s, after a quota has halved"),
                after.map_or_else(
                    || "never".to_owned(),
                    |after| format!("after {:.0} s", after.as_secs_f64()),
                ),
                "within 60 s",
                after.is_some_and(|after| after <= Duration::from_secs(61)),
            ));
        }
    }
    findings.push(Finding::judged(
        format!("the planner is within {AGREES:.2} of the measurement"),
        format!("{agree} of {compared}"),
        "all".to_owned(),
        agree == compared,
    ));
    findings
}
