//! Figure 5 in the form of the ACM Queue article: the errors of two frontend jobs over time, while
//! their backend job is resized.
//!
//! The shipped scenario `figure-5` is simulated in virtual time. The article states neither sizes
//! nor rates.

use lb_svg::{Area, Axis, Drawing, Figure, Paint, Plot, Scale, WIDTH};

use super::palette::{DETERMINISTIC, ROCKSTEADIER};
use crate::metrics::float;
use crate::traffic::tally::{JobCounts, StepRow};
use crate::traffic::{TrafficReport, play, shipped};

const SCENARIO: &str = "figure-5";

/// The simulation of two jobs while their service is resized.
pub struct ResizeErrors {
    report: TrafficReport,
    minutes: f64,
}

impl ResizeErrors {
    pub fn play() -> Self {
        let scenario = shipped::scenario(SCENARIO);
        Self { report: play(&scenario, scenario.seed), minutes: float(scenario.duration.us) / 60e6 }
    }

    /// The counts of a job in the whole run.
    pub fn total(&self, algorithm: &str) -> &JobCounts {
        of(&self.report.summary.runs[0].jobs, algorithm)
    }

    /// Errors over time of both jobs.
    pub fn figure(&self) -> Figure {
        let x = Scale::Linear(0.0, self.minutes);
        let mut drawing = Drawing::new(WIDTH, 312.0);
        let ticks: Vec<f64> = (0..=10).map(|tenth| self.minutes * f64::from(tenth) / 10.0).collect();
        let minutes = Axis::worded("minutes", &ticks, |minute| format!("{minute:.0}"));
        for (algorithm, paint, top, axis) in [
            ("deterministic", DETERMINISTIC, 34.0, &Axis::new("", &[])),
            ("rocksteadier", ROCKSTEADIER, 174.0, &minutes),
        ] {
            let area = Area { left: 50.0, top, right: 384.0, bottom: top + 96.0 };
            let plot = Plot { area, x, y: Scale::Linear(0.0, MOST) };
            let words = format!("requests that fail, {algorithm}");
            plot.axes(&mut drawing, axis, &Axis::worded(&words, &[0.0, MOST / 2.0, MOST], tenths_of_percent));
            self.bars(&mut drawing, &plot, paint, algorithm);
        }
        Figure {
            id: "fig-5",
            title: "Figure 5: errors of two jobs while their backend job is resized".to_owned(),
            description: "Bars over ten minutes, one for every twenty seconds: with deterministic subsets a \
                          spike at each of nine resizes, with Rocksteadier hardly any spikes, and no errors \
                          between resizes."
                .to_owned(),
            drawing,
        }
    }

    fn bars(&self, drawing: &mut Drawing, plot: &Plot, paint: Paint, algorithm: &str) {
        let mut from = 0.0;
        for StepRow { at_us, jobs, .. } in &self.report.steps {
            let to = float(*at_us) / 60e6;
            let JobCounts { arrivals, errors, .. } = of(jobs, algorithm);
            if *errors > 0 {
                drawing.bar(paint, plot.between((from, 0.0), (to, float(*errors) / float(*arrivals))));
            }
            from = to;
        }
    }
}

/// The largest share of a step's requests that fits into the drawing.
const MOST: f64 = 0.008;

fn tenths_of_percent(share: f64) -> String {
    format!("{:.1}\u{a0}%", 100.0 * share)
}

fn of<'a>(jobs: &'a [JobCounts], algorithm: &str) -> &'a JobCounts {
    jobs.iter().find(|counts| counts.job == algorithm).expect("the scenario has a job of this name")
}
