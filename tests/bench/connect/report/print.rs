//! Formats outcomes as tables, for a terminal or for a document.

use std::fmt::Write as _;

use crate::connect::arms::{Bound, Measure, Target};
use crate::connect::outcome::{Figures, Outcome, Row, Verdict};
use crate::results::statistics::Median;

fn target(target: &Target) -> String {
    let name = target.measure.name();
    match target.bound {
        Bound::AtMost(most) => format!("{name} <= {most}"),
        Bound::AtLeast(least) => format!("{name} >= {least}"),
        Bound::Within(distance) => format!("{name} within {} %", distance * 100.0),
        Bound::CoversOne => format!("{name}: interval covers 1"),
    }
}

fn interval(ratio: Median) -> String {
    // The ratio of the baseline itself is 1, without an interval.
    if [ratio.low, ratio.value, ratio.high] == [1.0; 3] {
        return "1".to_owned();
    }
    format!("{:.4} [{:.4}, {:.4}]", ratio.value, ratio.low, ratio.high)
}

/// Formats a group for a terminal.
pub fn terminal(outcome: &Outcome) -> String {
    let mut text = String::new();
    let Outcome { group, rounds, operations, rows } = outcome;
    let mut write =
        |line: std::fmt::Arguments<'_>| writeln!(text, "{line}").expect("writing to a string cannot fail");
    write(format_args!("\n{}: {} {rounds} rounds of {operations} operations", group.title, group.remark));
    let [p50, p99, rate, cpu] = Measure::ALL.map(|measure| format!("{} ratio [95 % CI]", measure.name()));
    write(format_args!(
        "{:<48}{:>9} {p50:>26} {p99:>26} {rate:>26} {cpu:>26} {:>10}",
        "", "p50 us", "p99 us, all"
    ));
    for row in rows {
        match &row.figures {
            Ok(figures) => {
                let [p50, p99, rate, cpu] = figures.ratios.map(interval);
                write(format_args!(
                    "{:<48}{:>9.2} {p50:>26} {p99:>26} {rate:>26} {cpu:>26} {:>10.2}",
                    name(outcome, row),
                    figures.p50 / 1000.0,
                    figures.p99_of_all / 1000.0
                ));
            }
            Err(why) => write(format_args!("{:<48}not run: {why}", row.arm.name)),
        }
        if !row.verdicts.is_empty() {
            let verdicts =
                row.verdicts.iter().map(|(of, verdict)| format!("{}: {}", target(of), verdict.words()));
            write(format_args!("    {}", verdicts.collect::<Vec<_>>().join("; ")));
        }
    }
    for (row, figures) in with_programs(outcome) {
        write(format_args!("{:<48}{}", row.arm.name, programs(figures)));
    }
    text
}

/// An arm's name, followed by its baseline unless the baseline is the first arm or clear from the
/// name.
pub fn name(outcome: &Outcome, row: &Row) -> String {
    let (name, baseline) = (&row.arm.name, &outcome.group.arms[row.arm.baseline].name);
    if row.arm.baseline == 0 || name.starts_with(baseline) {
        return name.clone();
    }
    format!("{name} (to: {baseline})")
}

fn with_programs(outcome: &Outcome) -> impl Iterator<Item = (&Row, &Figures)> {
    let measured = outcome.rows.iter().filter_map(|row| Some((row, row.figures.as_ref().ok()?)));
    measured.filter(|(_, figures)| !figures.costs.is_empty())
}

/// The cost of an arm's programs in one operation.
fn programs(figures: &Figures) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut sum = 0.0;
    for cost in &figures.costs {
        let Median { value, low, high } = cost.nanoseconds;
        let runs = if cost.runs < 1.05 { String::new() } else { format!(" x {:.1}", cost.runs) };
        parts.push(format!("{} {value:.0} ns [{low:.0}, {high:.0}]{runs}", cost.program));
        sum += value * cost.runs;
    }
    if parts.len() > 1 {
        parts.push(format!("together {sum:.0} ns"));
    }
    parts.join(", ")
}

/// States how many targets are reached, how many are not, and how many were not evaluated.
pub fn summary(outcomes: &[Outcome]) -> String {
    let rows = || outcomes.iter().flat_map(|outcome| &outcome.rows);
    let count = |verdict| rows().flat_map(|row| &row.verdicts).filter(|(_, is)| *is == verdict).count();
    let not_run: usize = rows().filter(|row| row.figures.is_err()).map(|row| row.arm.targets.len()).sum();
    let mut text = format!("targets: {} reached, {} not", count(Verdict::Pass), count(Verdict::NotReached));
    for (number, what) in [(count(Verdict::TooNoisy), "too noisy"), (not_run, "of arms without a run")] {
        if number > 0 {
            write!(text, ", {number} {what}").expect("writing to a string cannot fail");
        }
    }
    text
}

/// Formats a group for a document.
pub fn markdown(outcome: &Outcome) -> String {
    let mut text = String::new();
    let Outcome { group, rounds, operations, rows } = outcome;
    let mut write =
        |line: std::fmt::Arguments<'_>| writeln!(text, "{line}").expect("writing to a string cannot fail");
    write(format_args!(
        "### {}\n\n{} {rounds} rounds of {operations} operations.\n",
        group.title, group.remark
    ));
    write(format_args!(
        "| arm | p50, us | p50 ratio | p99 ratio | rate ratio | CPU ratio | p99 of all, us | targets |"
    ));
    write(format_args!("|---|---|---|---|---|---|---|---|"));
    for row in rows {
        let Ok(figures) = &row.figures else {
            write(format_args!("| {} | not run | | | | | | |", row.arm.name));
            continue;
        };
        let [p50, p99, rate, cpu] = figures.ratios.map(interval);
        let verdicts = row.verdicts.iter().map(|(of, verdict)| match verdict {
            Verdict::Pass => format!("{}: pass", target(of)),
            Verdict::NotReached | Verdict::TooNoisy => format!("{}: **{}**", target(of), verdict.words()),
        });
        write(format_args!(
            "| {} | {:.2} | {p50} | {p99} | {rate} | {cpu} | {:.2} | {} |",
            name(outcome, row),
            figures.p50 / 1000.0,
            figures.p99_of_all / 1000.0,
            verdicts.collect::<Vec<_>>().join("; ")
        ));
    }
    if with_programs(outcome).next().is_some() {
        write(format_args!("\n| arm | time per run of its programs [range of the median] |\n|---|---|"));
        for (row, figures) in with_programs(outcome) {
            write(format_args!("| {} | {} |", row.arm.name, programs(figures)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connect::arms::groups::Name;
    use crate::connect::outcome::tests::outcome;

    #[test]
    fn targets_are_printed_beside_measurements() {
        let outcome = outcome(Name::LeastLoaded, |arm| Some([1000.0, 1001.0, 1030.0, 1030.0][arm]));
        let text = terminal(&outcome);
        assert!(text.contains("1.0300 [1.0300, 1.0300]"), "{text}");
        assert!(text.contains("\n    p50 <= 1.025: not reached\n"), "{text}");
        assert!(text.contains("\n    p50 <= 1.045: pass\n"), "{text}");
        assert!(text.contains("connect4 100 ns [90, 110]"), "{text}");
        let text = markdown(&outcome);
        assert!(text.contains("| 2.06 | p50 <= 1.025: **not reached** |"), "{text}");
        assert_eq!(summary(&[outcome]), "targets: 1 reached, 1 not");
    }

    #[test]
    fn an_arm_without_a_run_is_named() {
        let outcome = outcome(Name::LeastLoaded, |arm| (arm != 2).then_some(1000.0));
        assert!(terminal(&outcome).contains("not run: refused for a reason"));
        assert!(markdown(&outcome).contains("| socklb active, least-loaded | not run |"));
        assert_eq!(summary(&[outcome]), "targets: 1 reached, 0 not, 1 of arms without a run");
    }
}
