//! Compares Rocksteadier with and without structural weights: the part of the capacity that is
//! unused in the fleets of the ACM Queue article's sweep.
//!
//! No source has published this comparison.

use indicatif::ProgressBar;
use lb_core::subset::Algorithm;
use lb_svg::{Figure, Paint, Scale};

use super::cloud::Cloud;
use super::numbers::{grouped, utilization};
use super::palette::{ROCKSTEADIER, WEIGHTED};
use super::section::{Extent, NumberTable, ReportSection};
use super::utilization::{SIZE, sweep};
use crate::sweep::Cell;
use crate::sweep::summary::Summary;

struct WeightFigure {
    id: &'static str,
    name: &'static str,
    title: &'static str,
    paint: Paint,
    weighted: bool,
}

const FIGURES: [WeightFigure; 2] = [
    WeightFigure {
        id: "fig-unweighted",
        name: "rocksteadier",
        title: "Without weights: every connection the same share",
        paint: ROCKSTEADIER,
        weighted: false,
    },
    WeightFigure {
        id: "fig-weighted",
        name: "rocksteadier, weighted",
        title: "With structural weights: the same connections",
        paint: WEIGHTED,
        weighted: true,
    },
];

/// The number of sweeps of the section.
pub const SWEEPS: u64 = FIGURES.len() as u64;

/// Classes of connections per backend: lower bound (inclusive), upper bound (exclusive), and name.
const CLASSES: [(f64, f64, &str); 7] = [
    (1.0, 1.5, "1 to 1.5"),
    (1.5, 2.0, "1.5 to 2"),
    (2.0, 4.0, "2 to 4"),
    (4.0, 8.0, "4 to 8"),
    (8.0, 16.0, "8 to 16"),
    (16.0, f64::INFINITY, "16 or more"),
    (0.0, f64::INFINITY, "all"),
];

fn connections(cell: &Cell) -> f64 {
    f64::from(SIZE) * cell.ratio()
}

/// Summarizes the raw utilization of the fleets with at least `from` and less than `to` connections
/// per backend.
fn within(cells: &[Cell], from: f64, to: f64) -> Summary {
    let inside = cells.iter().filter(|cell| connections(cell) >= from && connections(cell) < to);
    Summary::of(inside.map(|cell| cell.raw))
}

pub fn section(extent: Extent, bar: &ProgressBar) -> ReportSection {
    let [without, with] =
        FIGURES.map(|case| sweep(extent, case.weighted).run(Algorithm::Rocksteadier, || bar.inc(1)));
    let mut table = NumberTable::new(&[
        "connections per backend",
        "mean, unweighted \u{2192} weighted",
        "worst, unweighted \u{2192} weighted",
    ]);
    for (from, to, words) in CLASSES {
        let [without, with] = [&without, &with].map(|cells| within(cells, from, to));
        let both = |of: fn(&Summary) -> f64| {
            format!("{}\u{a0}\u{2192}\u{a0}{}", utilization(of(&without)), utilization(of(&with)))
        };
        table.row([words, &both(|summary| summary.mean), &both(|summary| summary.min)]);
    }
    let [all_without, all_with] = [&without, &with].map(|cells| within(cells, 0.0, f64::INFINITY));
    let reading = vec![
        "Both drawings show the same subsets, now with raw utilization: mean load over largest load. Raw \
         utilization is also below 1 if connections cannot be divided evenly, so no unweighted algorithm can \
         reach 1 for all fleets. Without weights, each client spreads its traffic evenly over its 20 \
         backends. With weights, each client follows structural weights, which it computes by itself from \
         the subsets of all clients. The connections are the same in both cases."
            .to_owned(),
        format!(
            "Over all {} pairs the mean rises from {} to {}. From two connections per backend on, the worst \
             pair reaches {}. With fewer connections, some backends have no client at all or share too few \
             clients. Weights cannot correct this, but larger subsets can. These numbers apply if all tasks \
             of the one job are present, send the same, and have the same list. No source has published \
             this comparison: the article covers only unweighted connections.",
            grouped(without.len() as u64),
            utilization(all_without.mean),
            utilization(all_with.mean),
            utilization(within(&with, 2.0, f64::INFINITY).min)
        ),
    ];
    let figures = FIGURES.iter().zip([&without, &with]).map(|(case, cells)| figure(case, cells)).collect();
    ReportSection {
        id: "weights",
        heading: "Structural weights make the same subsets even",
        figures,
        reading,
        table,
    }
}

fn figure(case: &WeightFigure, cells: &[Cell]) -> Figure {
    let cloud = Cloud {
        id: case.id,
        title: case.title.to_owned(),
        quantity: "raw utilization",
        over: ["connections per backend", "M k / N"],
        x: Scale::Logarithmic(1.0, 256.0),
        ticks: &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0],
        name: case.name,
        paint: case.paint,
    };
    cloud.figure(&cells.iter().map(|cell| (connections(cell), cell.raw)).collect::<Vec<_>>())
}
