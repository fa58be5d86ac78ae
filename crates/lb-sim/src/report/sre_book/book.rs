//! Figures 20-3, 20-4 and 20-5 of the book "Site Reliability Engineering": connections per backend.
//!
//! The book does not state the generator of its random subsets, so they cannot be reproduced.
//! Instead, the drawing shows one seed with lines at the book's smallest and largest count, and the
//! table shows the usual range over many seeds.

use lb_core::subset::Algorithm;
use lb_svg::{Anchor, Axis, Drawing, Figure, HEIGHT, Lettering, LineStyle, Paint, Plot, Point, Scale, WIDTH};

use super::numbers::whole_percent;
use super::palette::paint;
use super::section::{Extent, NumberTable, ReportSection};
use super::shuffles;
use crate::fleet::Fleet;
use crate::metrics::{Spread, mean, percentile};

/// The number of tasks in the SRE book's fleet.
const TASKS: u32 = 300;

struct PublishedFigure {
    id: &'static str,
    name: &'static str,
    algorithm: Algorithm,
    size: u32,
    /// The smallest and the largest number of connections of a backend in the SRE book's figure.
    published: [u32; 2],
}

const FIGURES: [PublishedFigure; 3] = [
    PublishedFigure {
        id: "fig-20-3",
        name: "20-3",
        algorithm: Algorithm::Random,
        size: 90,
        published: [57, 109],
    },
    PublishedFigure {
        id: "fig-20-4",
        name: "20-4",
        algorithm: Algorithm::Random,
        size: 30,
        published: [15, 45],
    },
    PublishedFigure {
        id: "fig-20-5",
        name: "20-5",
        algorithm: Algorithm::Deterministic,
        size: 10,
        published: [10, 10],
    },
];

/// Connections of every backend relative to their mean, in ascending order.
fn shares(subsets: &PublishedFigure, seed: u64) -> Vec<f64> {
    let fleet =
        Fleet { algorithm: subsets.algorithm, clients: TASKS, backends: TASKS, size: subsets.size, seed };
    let mut connections = fleet.graph().connections();
    connections.sort_unstable();
    connections.iter().map(|&count| f64::from(count) / f64::from(subsets.size)).collect()
}

pub fn section(extent: Extent) -> ReportSection {
    let mut table = NumberTable::new(&["figure", "book", "here, seed\u{a0}0", "here, usual"]);
    let mut figures = Vec::new();
    for subsets in &FIGURES {
        let shares = shares(subsets, 0);
        let spread = Spread::of(&shares);
        let extremes: Vec<[f64; 2]> = (0..extent.trials)
            .map(|seed| Spread::of(&self::shares(subsets, seed)))
            .map(|spread| [spread.min, spread.max])
            .collect();
        for (which, ours, words) in [(0, spread.min, "fewest"), (1, spread.max, "most")] {
            let all: Vec<f64> = extremes.iter().map(|extremes| extremes[which]).collect();
            let (low, high) = (percentile(&all, 5), percentile(&all, 95));
            let published = f64::from(subsets.published[which]) / f64::from(subsets.size);
            let usual = whole_percent(mean(all));
            table.row([
                &format!("{}, {words}", subsets.name),
                &counted(subsets, published),
                &counted(subsets, ours),
                &format!("{usual} ({:.0}\u{a0}to\u{a0}{})", 100.0 * low, whole_percent(high)),
            ]);
        }
        figures.push(figure(subsets, &shares));
    }
    shuffles::rows(&mut table, extent.trials);
    figures.push(shuffles::figure());
    let reading = vec![
        "Each drawing shows the 300 backends in ascending order of connections. The height is the number of \
         connections relative to the mean. A flat line means that every backend has the same load. All \
         backends must be as large as the busiest one, so the capacity above 100 % must be paid for at all \
         backends."
            .to_owned(),
        format!(
            "Random subsets distribute connections unevenly even if each client uses 90 of 300 backends, and \
             more unevenly if it uses 30. The last column is the mean over {} seeds, with the range that \
             contains nine of ten seeds. The book's Figure 20-4 is a usual draw; 20-3 shows an unusually low \
             minimum. Deterministic subsetting gives every backend exactly 10 connections.",
            extent.trials
        ),
        shuffles::reading(),
    ];
    ReportSection {
        id: "book",
        heading: "Random subsets are uneven, deterministic ones are not",
        figures,
        reading,
        table,
    }
}

/// Formats a share with its number of connections.
fn counted(subsets: &PublishedFigure, share: f64) -> String {
    format!("{}\u{a0}({:.0})", whole_percent(share), share * f64::from(subsets.size))
}

fn figure(subsets: &PublishedFigure, shares: &[f64]) -> Figure {
    let (paint, spread) = (paint(subsets.algorithm), Spread::of(shares));
    let last = f64::from(TASKS);
    let plot = Plot::usual(Scale::Linear(0.0, last), Scale::Linear(0.0, 2.0));
    let mut drawing = Drawing::new(WIDTH, HEIGHT);
    let x = Axis::new("backends, fewest connections first", &[1.0, 100.0, 200.0, 300.0]);
    plot.axes(
        &mut drawing,
        &x,
        &Axis::worded("connections, share of the mean", &[0.0, 0.5, 1.0, 1.5, 2.0], whole_percent),
    );
    let points = steps(&plot, shares);
    let ground = [plot.point(last, 0.0), plot.point(0.0, 0.0)];
    drawing.tinted(paint, &[points.as_slice(), &ground].concat());
    drawing.polyline(paint, LineStyle::Solid, &points);
    if subsets.published[0] == subsets.published[1] {
        let middle = plot.point(last / 2.0, 1.0);
        let words = match (counted(subsets, spread.min), counted(subsets, spread.max)) {
            (min, max) if min == max => format!("all {min}, as in the book"),
            (min, max) => format!("{min} to {max}"),
        };
        drawing.text(paint, Lettering::Strong, middle.moved(0.0, -9.0), Anchor::Middle, &words);
    } else {
        for (published, word, down) in
            [(subsets.published[0], "fewest", 14.0), (subsets.published[1], "most", -6.0)]
        {
            let share = f64::from(published) / f64::from(subsets.size);
            drawing.line(Paint::INK, LineStyle::Dashed, plot.point(0.0, share), plot.point(last, share));
            let middle = plot.point(last / 2.0, share);
            let words = format!("book: {word} {}", counted(subsets, share));
            drawing.text(Paint::INK, Lettering::Small, middle.moved(0.0, down), Anchor::Middle, &words);
        }
        // The label is outside of the lines for the SRE book's values, so that no line crosses it.
        let least = f64::min(spread.min, f64::from(subsets.published[0]) / f64::from(subsets.size));
        let low = plot.point(0.0, least);
        let words = counted(subsets, spread.min);
        drawing.text(paint, Lettering::Strong, low.moved(4.0, 17.0), Anchor::Start, &words);
        let most = f64::max(spread.max, f64::from(subsets.published[1]) / f64::from(subsets.size));
        let high = plot.point(last, most);
        let words = counted(subsets, spread.max);
        drawing.text(paint, Lettering::Strong, high.moved(0.0, -8.0), Anchor::End, &words);
    }
    let title =
        format!("Figure {}: {}, {} of 300 backends each", subsets.name, subsets.algorithm, subsets.size);
    let description = format!(
        "Connections of 300 backends in ascending order. The fewest are {} of the mean, the most {}.",
        whole_percent(spread.min),
        whole_percent(spread.max)
    );
    Figure { id: subsets.id, title, description, drawing }
}

/// The corners of a line with stairs, one stair for each group of neighbouring backends with equal
/// shares.
fn steps(plot: &Plot, shares: &[f64]) -> Vec<Point> {
    let mut points = Vec::new();
    let mut before = f64::NAN;
    for (rank, &share) in (0_u32..).zip(shares) {
        if share != before {
            if rank > 0 {
                points.push(plot.point(f64::from(rank), before));
            }
            points.push(plot.point(f64::from(rank), share));
            before = share;
        }
    }
    points.push(plot.point(f64::from(TASKS), before));
    points
}
