//! Formats outcomes as tables.

use std::fmt::Write as _;

use crate::connect::arms::{Bound, Measure, Target};
use crate::connect::outcome::{Figures, Outcome, Row, Verdict};
use crate::results::{Format, Median};

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

/// Formats a group: its title after `mark`, and the tables of its arms and of their programs.
pub fn group(outcome: &Outcome, mark: &str, table: Format) -> String {
    let Outcome { group, rounds, operations, rows } = outcome;
    let ratios = Measure::ALL.map(|measure| format!("{} ratio [95 % CI]", measure.name()));
    let mut titles = vec!["arm", "p50, us"];
    titles.extend(ratios.iter().map(String::as_str));
    titles.extend(["p99 of all, us", "targets"]);
    let cells = |row: &Row| {
        let Ok(figures) = &row.figures else {
            let why = row.figures.as_ref().err().map_or("", String::as_str);
            return vec![row.arm.name.clone(), format!("not run: {why}")];
        };
        let us = |ns: f64| format!("{:.2}", ns / 1000.0);
        let verdicts = row.verdicts.iter().map(|(of, verdict)| match verdict {
            Verdict::Pass => format!("{}: pass", target(of)),
            Verdict::NotReached | Verdict::TooNoisy => format!("{}: **{}**", target(of), verdict.words()),
        });
        let mut cells = vec![name(outcome, row), us(figures.p50)];
        cells.extend(figures.ratios.map(interval));
        cells.extend([us(figures.p99_of_all), verdicts.collect::<Vec<_>>().join("; ")]);
        cells
    };
    let arms = table(&titles, &rows.iter().map(cells).collect::<Vec<_>>());
    let mut text = format!(
        "{mark}{}\n\n{} {rounds} rounds of {operations} operations.\n\n{arms}",
        group.title, group.remark
    );
    let measured = rows.iter().filter_map(|row| Some((row, row.figures.as_ref().ok()?)));
    let with_programs = measured.filter(|(_, figures)| !figures.costs.is_empty());
    let costs: Vec<_> =
        with_programs.map(|(row, figures)| vec![row.arm.name.clone(), programs(figures)]).collect();
    if !costs.is_empty() {
        let titles = ["arm", "time per run of its programs [range of the median]"];
        text += &format!("\n{}", table(&titles, &costs));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connect::arms::groups::Name;
    use crate::connect::outcome::tests::outcome;
    use crate::results::document;

    #[test]
    fn targets_are_printed_beside_measurements() {
        let outcome = outcome(Name::LeastLoaded, |arm| Some([1000.0, 1001.0, 1030.0, 1030.0][arm]));
        let text = group(&outcome, "### ", document);
        assert!(text.starts_with("### TCP connect(), least-loaded over 100\n\n"), "{text}");
        assert!(text.contains("1.0300 [1.0300, 1.0300]"), "{text}");
        assert!(text.contains("| 2.06 | p50 <= 1.045: pass |"), "{text}");
        assert!(text.contains("connect4 100 ns [90, 110]"), "{text}");
        assert!(text.contains("| 2.06 | p50 <= 1.025: **not reached** |"), "{text}");
        assert_eq!(summary(&[outcome]), "targets: 1 reached, 1 not");
    }

    #[test]
    fn an_arm_without_a_run_is_named() {
        let outcome = outcome(Name::LeastLoaded, |arm| (arm != 2).then_some(1000.0));
        let text = group(&outcome, "", document);
        assert!(text.contains("| socklb active, least-loaded | not run: refused for a reason |"), "{text}");
        assert_eq!(summary(&[outcome]), "targets: 1 reached, 0 not, 1 of arms without a run");
    }
}
