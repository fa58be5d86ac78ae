//! Figures 2a to 2d of the ACM Queue article, and a figure of this kind for Rocksteadier.
//!
//! Each figure is a sweep of about 60,000 fleets. Each sweep is computed only once for the figure,
//! the table and the text.

use indicatif::ProgressBar;
use lb_core::subset::Algorithm;
use lb_svg::{Figure, Scale};

use super::cloud::Cloud;
use super::numbers::{grouped, utilization};
use super::palette::paint;
use super::section::{Extent, NumberTable, ReportSection};
use crate::metrics::mean;
use crate::sweep::summary::Summary;
use crate::sweep::{Cell, Sweep};

/// The size of a subset in the ACM Queue article.
pub const SIZE: u32 = 20;

struct SweepFigure {
    id: &'static str,
    name: &'static str,
    algorithm: Algorithm,
}

const FIGURES: [SweepFigure; 5] = [
    SweepFigure { id: "fig-2a", name: "Figure 2a", algorithm: Algorithm::Random },
    SweepFigure { id: "fig-2b", name: "Figure 2b", algorithm: Algorithm::Deterministic },
    SweepFigure { id: "fig-2c", name: "Figure 2c", algorithm: Algorithm::Ringsteady },
    SweepFigure { id: "fig-2d", name: "Figure 2d", algorithm: Algorithm::RingsteadyScaled },
    SweepFigure { id: "fig-2-rocksteadier", name: "Like Figure 2", algorithm: Algorithm::Rocksteadier },
];

/// The number of sweeps of the section.
pub const SWEEPS: u64 = FIGURES.len() as u64;

/// The sweep of the ACM Queue article, Figure 2.
pub const fn sweep(extent: Extent, weighted: bool) -> Sweep {
    Sweep { size: SIZE, max: extent.most_tasks, seed: 0, weighted }
}

/// Mean adjusted utilizations of one sweep.
struct Means {
    all: f64,
    /// The mean over fleets with less than one client per two backends.
    few: f64,
    /// The mean over fleets with at least four clients per backend.
    many: f64,
}

pub fn section(extent: Extent, bar: &ProgressBar) -> ReportSection {
    let head = [
        "adjusted utilization",
        "mean",
        "worst 5\u{a0}%",
        "worst",
        "mean, M/N < \u{bd}",
        "mean, M/N \u{2265} 4",
    ];
    let mut table = NumberTable::new(&head);
    let mut figures = Vec::new();
    let mut means = Vec::new();
    for case in &FIGURES {
        let cells = sweep(extent, false).run(case.algorithm, || bar.inc(1));
        let summary = Summary::of(cells.iter().map(|cell| cell.adjusted));
        let within = |from: f64, to: f64| {
            let inside = cells.iter().filter(|cell| cell.ratio() >= from && cell.ratio() < to);
            mean(inside.map(|cell| cell.adjusted))
        };
        let (few, many) = (within(0.0, 0.5), within(4.0, f64::INFINITY));
        let [all, p5, min, few_words, many_words] =
            [summary.mean, summary.p5, summary.min, few, many].map(utilization);
        table.row([case.algorithm.name(), &all, &p5, &min, &few_words, &many_words]);
        means.push(Means { all: summary.mean, few, many });
        figures.push(figure(case, &cells));
    }
    let [random, deterministic, ringsteady, scaled, _] = means.as_slice() else {
        unreachable!("there are five figures");
    };
    let reading = vec![
        format!(
            "Every point is a pair of job sizes with {SIZE} backends per client: {} pairs. Points further \
             right have more clients per backend, points further up more even connections. Adjusted \
             utilization is the smallest possible maximum of connections per backend, divided by the \
             connections of the busiest backend; it is at most 1. A stronger colour means more pairs, and \
             the line is the mean.",
            grouped(sweep(extent, false).cells())
        ),
        format!(
            "The article prints no numbers, but states: 2c \u{201c}achieves lower utilization in some cases \
             than deterministic subsetting (see Figure 2b) but is significantly better than random \
             subsetting (see Figure 2a)\u{201d}. Here the means of 2c, 2b and 2a are {}, {} and {}. On the \
             right-hand side of 2c \u{201c}utilization does not converge toward the ideal\u{201d}: from four \
             clients per backend on, its mean is {}, and that of 2b is {}. Backend scaling, 2d, raises this mean to \
             {}, \u{201c}with only a small degradation when M < N\u{201d}: below one client per two \
             backends, the mean is {} instead of {}.",
            utilization(ringsteady.all),
            utilization(deterministic.all),
            utilization(random.all),
            utilization(ringsteady.many),
            utilization(deterministic.many),
            utilization(scaled.many),
            utilization(scaled.few),
            utilization(ringsteady.few)
        ),
        "Rocksteadier gives up a little balance for subsets that differ between clients and change little. \
         The next section shows how weights restore the balance."
            .to_owned(),
    ];
    ReportSection { id: "sweep", heading: "Balance for all sizes of jobs", figures, reading, table }
}

fn figure(case: &SweepFigure, cells: &[Cell]) -> Figure {
    let cloud = Cloud {
        id: case.id,
        title: format!("{}: {}", case.name, case.algorithm),
        quantity: "adjusted utilization",
        over: ["clients per backend", "M / N"],
        x: Scale::Logarithmic(0.05, 12.8),
        ticks: &[0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0],
        name: case.algorithm.name(),
        paint: paint(case.algorithm),
    };
    cloud.figure(&cells.iter().map(|cell| (cell.ratio(), cell.adjusted)).collect::<Vec<_>>())
}
