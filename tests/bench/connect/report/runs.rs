//! Compares several runs of one group, each with new processes, programs and maps. The memory
//! layout differs from run to run, and the interval of a single run does not include the effect of
//! this difference.

use crate::connect::arms::{Arm, Between, Build, Measure};
use crate::connect::outcome::{Figures, Outcome};
use crate::results::table;

/// One figure over all runs: its median, its smallest and its largest value.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Spread {
    median: f64,
    least: f64,
    greatest: f64,
}

impl Spread {
    /// Returns `None` if a run lacks the figure.
    fn of(values: impl Iterator<Item = Option<f64>>) -> Option<Self> {
        let mut values = values.collect::<Option<Vec<f64>>>()?;
        values.sort_by(f64::total_cmp);
        Some(Self { median: values[values.len() / 2], least: *values.first()?, greatest: *values.last()? })
    }

    fn text(spread: Option<Self>, decimals: usize) -> String {
        spread.map_or_else(String::new, |Self { median, least, greatest }| {
            format!("{median:.decimals$} [{least:.decimals$}, {greatest:.decimals$}]")
        })
    }
}

/// The figures of an arm in one run.
fn figures(outcome: &Outcome, arm: usize) -> Option<&Figures> {
    outcome.rows[arm].figures.as_ref().ok()
}

/// The ratio of a measure to the first arm, which is the baseline of every arm except copies and
/// other builds.
fn ratio(outcome: &Outcome, arm: usize, measure: Measure) -> Option<f64> {
    let own = figures(outcome, arm)?.ratio(measure).value;
    match outcome.group.arms[arm].baseline {
        0 => Some(own),
        baseline => Some(own * ratio(outcome, baseline, measure)?),
    }
}

/// The nanoseconds that an arm takes longer than its baseline, which is the first arm or the arm
/// with one backend.
fn added(outcome: &Outcome, arm: usize) -> Option<f64> {
    let of = &outcome.group.arms[arm];
    let base = if of.between == Between::Floor { of.baseline } else { 0 };
    let times = if base == 0 {
        ratio(outcome, arm, Measure::P50)?
    } else {
        figures(outcome, arm)?.ratio(Measure::P50).value
    };
    Some((times - 1.0) * figures(outcome, base)?.p50)
}

/// Formats a table of a group's runs, and then the differences between this build and another
/// build.
pub fn compare(runs: &[&Outcome]) -> String {
    let group = &runs[0].group;
    let floor = group.arms.iter().position(|arm| arm.between == Between::Floor);
    let cells = |(number, arm): (usize, &Arm)| {
        let over = |figure: &dyn Fn(&Outcome) -> Option<f64>| Spread::of(runs.iter().map(|run| figure(run)));
        let by_floor = |run: &Outcome| Some(added(run, number)? / added(run, floor?)?);
        vec![
            arm.name.clone(),
            Spread::text(over(&|run| ratio(run, number, Measure::P50)), 4),
            Spread::text(over(&|run| added(run, number)), 0),
            Spread::text(over(&by_floor), 2),
            Spread::text(over(&|run| ratio(run, number, Measure::Cpu)), 4),
        ]
    };
    let titles = ["arm", "p50 ratio", "p50 added, ns", "added / floor's", "CPU ratio"];
    let arms = table(&titles, &group.arms.iter().enumerate().map(cells).collect::<Vec<_>>());
    let mut text = format!("\n{}: {} runs, median [least, greatest]\n\n{arms}", group.title, runs.len());
    let others = group
        .arms
        .iter()
        .enumerate()
        .filter(|(_, arm)| arm.between.client().is_some_and(|client| client.build != Build::This));
    for (other, arm) in others {
        let this = arm.baseline;
        let points = |arm: usize, measure| {
            let less =
                |run: &&Outcome| Some(100.0 * (ratio(run, this, measure)? - ratio(run, arm, measure)?));
            Spread::text(Spread::of(runs.iter().map(less)), 2)
        };
        let [p50, cpu] = [Measure::P50, Measure::Cpu].map(|measure| points(other, measure));
        // In `arms`, the copy of this build is between this build and the other build.
        let [p50_again, cpu_again] = [Measure::P50, Measure::Cpu].map(|measure| points(other - 1, measure));
        text += &format!(
            "{} minus {}, points: p50 {p50}, CPU {cpu}; minus itself again: p50 {p50_again}, CPU {cpu_again}\n",
            group.arms[this].name, arm.name
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connect::arms::groups::Name;
    use crate::connect::outcome::tests::outcome;

    #[test]
    fn additions_are_relative_to_the_floor() {
        // The direct arms take 1,000 ns, including the arm with one backend. The floor program adds
        // 10 ns, and every arm of socklb adds 20 to 22 ns, depending on the run.
        let run = |more: f64| {
            outcome(Name::Connect, move |arm| {
                Some(match arm {
                    0..=3 => 1000.0,
                    4 => 1010.0,
                    _ => 1020.0 + more,
                })
            })
        };
        let runs = [run(0.0), run(2.0), run(1.0)];
        let text = compare(&runs.iter().collect::<Vec<_>>());
        let line = text.lines().find(|line| line.starts_with("| socklb active, p2c ")).unwrap();
        let cells: Vec<&str> = line.split('|').skip(2).map(str::trim).collect();
        let expected =
            ["1.0210 [1.0200, 1.0220]", "21 [20, 22]", "2.10 [2.00, 2.20]", "1.0210 [1.0200, 1.0220]", ""];
        assert_eq!(cells, expected);
    }

    #[test]
    fn builds_are_compared_in_points_beside_a_copy() {
        let run = outcome_of_two();
        let text = compare(&[&run]);
        let line = text.lines().find(|line| line.contains(" minus ")).unwrap();
        assert_eq!(
            line,
            "socklb active, least-loaded minus socklb active, least-loaded, other build, points: p50 -1.00 [-1.00, -1.00], CPU \
             -1.00 [-1.00, -1.00]; minus itself again: p50 -0.10 [-0.10, -0.10], CPU -0.10 [-0.10, -0.10]"
        );
    }

    /// This build takes 2 % more than the direct arm, its copy 2.1 %, and the other build 3 %.
    fn outcome_of_two() -> Outcome {
        crate::connect::outcome::tests::outcome_of(
            crate::connect::arms::groups::group(Name::LeastLoaded).of_two_builds(Build::Other),
            |arm| Some([1000.0, 1000.0, 1020.0, 1021.0, 1030.0][arm.min(4)]),
        )
    }
}
