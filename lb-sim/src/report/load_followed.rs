//! Figure 20-6 of the book "Site Reliability Engineering": how CPU usage is distributed before and after weights follow load.
//!
//! Must not play anything: it draws the figures of a report.

use lb_svg::{Anchor, Axis, Drawing, Figure, HEIGHT, Lettering, Line, Paint, Plot, Scale, WIDTH};

use super::numbers::whole_percent;
use super::palette::{DETERMINISTIC, RANDOM, ROCKSTEADIER, WEIGHTED};
use crate::traffic::figures::RunFigures;

/// The runs, and where each line's name has room: rank and usage.
const LINES: [(&str, Paint, &str, (f64, f64)); 4] = [
    ("round-robin", RANDOM, "round robin", (27.0, 0.34)),
    ("least-loaded", DETERMINISTIC, "least-loaded", (27.0, 0.555)),
    ("a58", WEIGHTED, "gRFC A58", (3.0, 0.76)),
    ("feedback", ROCKSTEADIER, "feedback", (3.0, 0.54)),
];

/// CPU usage of all tasks, the busiest first, with each of these.
pub fn figure(runs: &[RunFigures]) -> Figure {
    let plot = Plot::usual(Scale::Linear(1.0, 50.0), Scale::Linear(0.0, 1.1));
    let mut drawing = Drawing::new(WIDTH, HEIGHT);
    plot.axes(
        &mut drawing,
        &Axis::new("backend tasks, busiest first", &[1.0, 10.0, 20.0, 30.0, 40.0, 50.0]),
        &Axis::worded("CPU usage", &[0.0, 0.25, 0.5, 0.75, 1.0], whole_percent),
    );
    for (run, paint, name, (rank, usage)) in LINES {
        let figures = runs.iter().find(|figures| figures.run == run).expect("the scenario has this run");
        let mut cpu = figures.cpu.clone();
        cpu.sort_unstable_by(|one, other| other.total_cmp(one));
        let pairs: Vec<(f64, f64)> =
            (1_u32..).zip(&cpu).map(|(rank, usage)| (f64::from(rank), *usage)).collect();
        plot.line(&mut drawing, paint, Line::Solid, &pairs);
        drawing.text(paint, Lettering::Strong, plot.point(rank, usage), Anchor::Start, name);
    }
    Figure {
        id: "fig-20-6",
        title: "Figure 20-6: CPU usage before and after weights follow load".to_owned(),
        description: "CPU usage of 50 tasks in descending order, a line each for round robin and least-loaded, which fall from all to below \
                      half, for gRFC A58, which falls a little, and for feedback, which is nearly level."
            .to_owned(),
        drawing,
    }
}
