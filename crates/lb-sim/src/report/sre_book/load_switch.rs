//! Figure 20-6 of the book "Site Reliability Engineering": the CPU usage of all tasks before and
//! after clients switch to weights that follow load.
//!
//! Simulates the run `feedback` of the scenario `book-load` in virtual time. Halfway through the
//! run, an operator switches load control on.

use lb_core::control::Switch;
use lb_svg::{Anchor, Axis, Drawing, Figure, HEIGHT, Lettering, LineStyle, Paint, Plot, Scale, WIDTH, at};

use super::numbers::whole_percent;
use super::palette::{RANDOM, ROCKSTEADIER};
use super::panels;
use crate::metrics::{Spread, float, mean};
use crate::traffic::document::operator::SwitchTable;
use crate::traffic::scenario::Scenario;
use crate::traffic::values::{Span, SwitchName};
use crate::traffic::{TrafficReport, play};

const RUN: &str = "feedback";

/// The number of steps drawn, half of them before the switch.
const STEPS: u64 = 40;

/// The simulated fleet, before and after clients switch to weights that follow load.
pub struct SwitchedLoad {
    report: TrafficReport,
    duration: Span,
}

impl SwitchedLoad {
    /// Simulates the fleet with one seed. Measures in the last quarter of the run, when weights
    /// have settled.
    pub fn play(mut scenario: Scenario) -> Self {
        let duration = scenario.duration;
        let [half, step] = [2, STEPS].map(|parts| Span { us: duration.us / parts });
        let switch = |(at, switch)| SwitchTable { at, load: SwitchName(switch) };
        scenario.switches = [(Span::default(), Switch::Off), (half, Switch::On)].map(switch).into();
        scenario.runs.retain(|run| run.name == RUN);
        (scenario.seeds, scenario.step) = (1, step);
        scenario.measure_from = Span { us: duration.us / 4 * 3 };
        Self { report: play(&scenario, scenario.seed), duration }
    }

    /// CPU usage of the busiest task divided by that of the least busy one, from the start to the
    /// switch.
    pub fn before(&self) -> f64 {
        let steps = panels::steps(&self.report.steps, RUN);
        let steps = &steps[..steps.len() / 2];
        let usage = |task: usize| mean(steps.iter().map(|(_, traces)| traces.cpu[task]));
        let usages: Vec<f64> = (0..steps[0].1.cpu.len()).map(usage).collect();
        let Spread { min, max, .. } = Spread::of(&usages);
        max / min
    }

    /// The CPU usage of the busiest task divided by that of the least busy one, in the last quarter
    /// of the run: as measured, and as chance alone would give it.
    pub fn after_and_chance(&self) -> [f64; 2] {
        let figures =
            &self.report.figures.as_ref().expect("there are figures, because requests cost CPU time").runs[0];
        [figures.evenness, figures.floor].map(|evenness| evenness.cpu_max_over_min.mean)
    }

    /// Draws a trace for each task, before and after the switch.
    pub fn figure(&self) -> Figure {
        let last = float(self.duration.us) / 1e6;
        let plot = Plot::usual(Scale::Linear(0.0, last), Scale::Linear(0.0, 1.25));
        let mut drawing = Drawing::new(WIDTH, HEIGHT);
        let ticks = [0.0, 0.25, 0.5, 0.75, 1.0].map(|part| part * last);
        plot.axes(
            &mut drawing,
            &Axis::worded("seconds", &ticks, |seconds| format!("{seconds:.0}")),
            &Axis::worded("CPU usage of a task", &[0.0, 0.25, 0.5, 0.75, 1.0], whole_percent),
        );
        let steps = panels::steps(&self.report.steps, RUN);
        let cpu = steps.iter().map(|(end, traces)| (*end, traces.cpu.iter().collect()));
        panels::traces(&mut drawing, &plot, ROCKSTEADIER, cpu);
        let x = plot.point(last / 2.0, 0.0).x;
        drawing.line(Paint::INK, LineStyle::Dashed, at(x, plot.area.top - 6.0), at(x, plot.area.bottom));
        drawing.note(at(x, plot.area.top - 10.0), Anchor::Middle, "switch");
        for (words, paint, part) in [("structural weights", RANDOM, 0.25), ("feedback", ROCKSTEADIER, 0.75)] {
            drawing.text(paint, Lettering::Strong, plot.point(part * last, 1.15), Anchor::Middle, words);
        }
        let (before, [after, _]) = (self.before(), self.after_and_chance());
        Figure {
            id: "fig-20-6",
            title: "Figure 20-6: CPU usage around the switch to feedback".to_owned(),
            description: format!(
                "A trace over time for each of 50 backend tasks. The switch is in the middle. Before it, the \
                 busiest task has {before:.1} times the CPU usage of the least busy one; at the end, \
                 {after:.1} times."
            ),
            drawing,
        }
    }
}
