//! The result of a group: ratios to the baseline with their noise, and whether targets are reached.
//! This module contains only values. It must not depend on how they are printed.

use super::arms::{Arm, Bound, Group, Measure, Target};
use super::programs::Cost;
use super::worker::Turn;
use crate::results::{Median, median};

/// The results of an arm.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Nanoseconds of one operation: the median of the rounds' medians.
    pub p50: f64,
    /// The 99th percentile of the time of all operations, in nanoseconds.
    pub p99_of_all: f64,
    /// Ratios to the arm's baseline, in the order of [`Measure::ALL`].
    pub ratios: [Median; 4],
    /// The cost of the kernel programs that have run.
    pub costs: Vec<Cost>,
}

impl Figures {
    pub fn ratio(&self, measure: Measure) -> Median {
        let [p50, p99, rate, cpu] = self.ratios;
        match measure {
            Measure::P50 => p50,
            Measure::P99 => p99,
            Measure::Rate => rate,
            Measure::Cpu => cpu,
        }
    }
}

/// The result for a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Pass,
    NotReached,
    /// The copy of the baseline differs too much from the baseline to evaluate the target.
    TooNoisy,
}

impl Verdict {
    /// The verdict in tables.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::NotReached => "not reached",
            Self::TooNoisy => "A/A too noisy",
        }
    }
}

/// A row of a group's table.
#[derive(Clone, Debug)]
pub struct Row {
    pub arm: Arm,
    /// The arm's results, or the reason why the arm was not run.
    pub figures: Result<Figures, String>,
    /// The arm's targets and their verdicts; empty for an arm that was not run.
    pub verdicts: Vec<(Target, Verdict)>,
}

/// A group and its results.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub group: Group,
    pub rounds: u32,
    /// Operations per turn.
    pub operations: u32,
    /// One row for each arm, in the order of the group's arms.
    pub rows: Vec<Row>,
}

/// The turns of one arm.
pub struct Measured {
    /// One turn for each round.
    pub turns: Vec<Turn>,
    /// The 99th percentile of the time of all operations, in nanoseconds.
    pub p99_of_all: f64,
    /// The cost of the kernel programs that have run.
    pub costs: Vec<Cost>,
}

impl Outcome {
    /// Computes ratios and verdicts from the measurements, arm by arm.
    pub fn of(group: Group, rounds: u32, operations: u32, measured: &[Result<Measured, String>]) -> Self {
        let figures: Vec<Result<Figures, String>> = (0..measured.len())
            .map(|arm| {
                let this = measured[arm].as_ref().map_err(Clone::clone)?;
                let baseline = measured[group.arms[arm].baseline].as_ref().map_err(Clone::clone)?;
                Ok(compare(this, baseline))
            })
            .collect();
        let noise = figures.get(1).and_then(|figures| figures.as_ref().ok()).map(|figures| figures.ratios);
        let rows = group.arms.iter().zip(&figures).map(|(arm, figures)| {
            let judged = figures.iter().flat_map(|figures| {
                arm.targets.iter().map(|target| (*target, judge(target, figures, noise.as_ref())))
            });
            Row { arm: arm.clone(), figures: figures.clone(), verdicts: judged.collect() }
        });
        let rows = rows.collect();
        Self { group, rounds, operations, rows }
    }
}

/// Computes the ratios of an arm. Each ratio is computed within a round, so a disturbance of the
/// machine affects both arms.
fn compare(this: &Measured, baseline: &Measured) -> Figures {
    let ratio = |of: fn(&Turn) -> f64| {
        let both = this.turns.iter().zip(&baseline.turns);
        median(&both.map(|(turn, base)| of(turn) / of(base)).collect::<Vec<_>>())
    };
    let p50s: Vec<f64> = this.turns.iter().map(|turn| turn.p50).collect();
    Figures {
        p50: median(&p50s).value,
        p99_of_all: this.p99_of_all,
        ratios: [
            ratio(|turn| turn.p50),
            ratio(|turn| turn.p99),
            ratio(|turn| turn.rate),
            ratio(|turn| turn.cpu),
        ],
        costs: this.costs.clone(),
    }
}

fn judge(target: &Target, figures: &Figures, noise: Option<&[Median; 4]>) -> Verdict {
    let place = Measure::ALL.iter().position(|measure| *measure == target.measure);
    let copy = noise.zip(place).map(|(noise, place)| noise[place].value);
    if let (Some(within), Some(copy)) = (target.if_noise_within, copy)
        && !(1.0 / within..=within).contains(&copy)
    {
        return Verdict::TooNoisy;
    }
    let Median { value, low, high } = figures.ratio(target.measure);
    let reached = match target.bound {
        Bound::AtMost(most) => value <= most,
        Bound::AtLeast(least) => value >= least,
        Bound::Within(distance) => (value - 1.0).abs() <= distance,
        Bound::CoversOne => low <= 1.0 && 1.0 <= high,
    };
    if reached { Verdict::Pass } else { Verdict::NotReached }
}

#[cfg(test)]
pub mod tests {
    use super::super::arms::groups::{Name, group};
    use super::*;

    /// Returns the outcome of a group in which each arm takes the time that `nanoseconds` returns,
    /// in every round and for every measure.
    pub fn outcome(name: Name, nanoseconds: impl Fn(usize) -> Option<f64>) -> Outcome {
        outcome_of(group(name), nanoseconds)
    }

    /// Returns the same outcome as [`outcome`], for any group.
    pub fn outcome_of(group: Group, nanoseconds: impl Fn(usize) -> Option<f64>) -> Outcome {
        let measured: Vec<_> = (0..group.arms.len())
            .map(|arm| {
                let time = nanoseconds(arm).ok_or("refused for a reason")?;
                let turn = Turn { p50: time, p99: 2.0 * time, rate: 1e9 / time, cpu: time };
                let exactly = Median { value: 100.0, low: 90.0, high: 110.0 };
                let cost = Cost { program: "connect4".to_owned(), nanoseconds: exactly, runs: 1.0 };
                Ok(Measured { turns: vec![turn; 10], p99_of_all: 2.0 * time, costs: vec![cost] })
            })
            .collect();
        Outcome::of(group, 10, 300, &measured)
    }

    #[track_caller]
    fn check(copy: f64, time: f64, expected: [Verdict; 4]) {
        let outcome = outcome(Name::Connect, |arm| match arm {
            0 => Some(1000.0),
            1 => Some(copy),
            _ => Some(time),
        });
        let p2c = outcome.rows.iter().find(|row| row.arm.name == "socklb active, p2c").unwrap();
        let verdicts: Vec<_> = p2c.verdicts.iter().map(|(_, verdict)| *verdict).collect();
        assert_eq!(verdicts, expected, "copy {copy}, time {time}");
    }

    #[test]
    fn targets_apply_to_the_median_ratio() {
        use Verdict::{NotReached, Pass, TooNoisy};
        check(1000.0, 1005.0, [Pass; 4]);
        check(1000.0, 1014.0, [Pass, Pass, Pass, NotReached]);
        check(1000.0, 1050.0, [NotReached, Pass, NotReached, NotReached]);
        check(1000.0, 1200.0, [NotReached; 4]);
        // Only the target for the 99th percentile has a condition on the noise.
        check(1060.0, 1200.0, [NotReached, TooNoisy, NotReached, NotReached]);
        check(940.0, 1005.0, [Pass, TooNoisy, Pass, Pass]);
    }

    #[test]
    fn an_arm_without_a_run_has_no_verdict() {
        let outcome = outcome(Name::LeastLoaded, |arm| (arm != 2).then_some(1000.0));
        assert_eq!(outcome.rows[2].figures.as_ref().unwrap_err(), "refused for a reason");
        assert_eq!(outcome.rows[2].verdicts, []);
        assert_eq!(outcome.rows[3].verdicts.len(), 1);
    }

    #[test]
    fn the_floor_is_compared_with_its_own_baseline() {
        let outcome = outcome(Name::Connect, |arm| Some(if arm == 3 { 500.0 } else { 1000.0 }));
        let ratio = |arm: usize| outcome.rows[arm].figures.as_ref().unwrap().ratio(Measure::P50).value;
        assert_eq!([ratio(2), ratio(3), ratio(4), ratio(5)], [1.0, 0.5, 2.0, 1.0]);
    }

    #[test]
    fn some_targets_require_an_interval_around_one() {
        let figures = |low, high| {
            let ratio = Median { value: f64::midpoint(low, high), low, high };
            Figures { p50: 1.0, p99_of_all: 1.0, ratios: [ratio; 4], costs: Vec::new() }
        };
        let verdict = |bound, low, high| judge(&Target::new(Measure::Rate, bound), &figures(low, high), None);
        assert_eq!(verdict(Bound::CoversOne, 0.98, 1.01), Verdict::Pass);
        assert_eq!(verdict(Bound::CoversOne, 1.01, 1.02), Verdict::NotReached);
        assert_eq!(verdict(Bound::Within(0.005), 1.004, 1.0058), Verdict::Pass);
        assert_eq!(verdict(Bound::Within(0.005), 0.993, 0.996), Verdict::NotReached);
    }
}
