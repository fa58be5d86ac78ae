//! Figures 20-3, 20-4 and 20-5 of the book "Site Reliability Engineering": connections per backend.
//!
//! The book's random subsets cannot be drawn again, because it does not name their generator. So its extremes are lines
//! in our drawing of one seed, and the table tells what is usual over many seeds.

use lb_core::subset::Algorithm;
use lb_svg::{Anchor, Axis, Drawing, Figure, HEIGHT, Lettering, Line, Paint, Plot, Point, Scale, WIDTH, at};

use super::Extent;
use super::numbers::{mean, quantile, whole_percent};
use super::palette::{DETERMINISTIC, RANDOM};
use super::section::{Section, Table};
use crate::fleet::Fleet;
use crate::metrics::spread_of;

/// The book's fleet.
const TASKS: u32 = 300;

struct Case {
    id: &'static str,
    name: &'static str,
    algorithm: Algorithm,
    paint: Paint,
    size: u32,
    /// The smallest and the largest count in the book's figure.
    published: [u32; 2],
}

const CASES: [Case; 3] = [
    Case {
        id: "fig-20-3",
        name: "20-3",
        algorithm: Algorithm::Random,
        paint: RANDOM,
        size: 90,
        published: [57, 109],
    },
    Case {
        id: "fig-20-4",
        name: "20-4",
        algorithm: Algorithm::Random,
        paint: RANDOM,
        size: 30,
        published: [15, 45],
    },
    Case {
        id: "fig-20-5",
        name: "20-5",
        algorithm: Algorithm::Deterministic,
        paint: DETERMINISTIC,
        size: 10,
        published: [10, 10],
    },
];

/// Connections of every backend, as shares of their mean, fewest first.
fn shares(case: &Case, seed: u64) -> Vec<f64> {
    let fleet = Fleet { algorithm: case.algorithm, clients: TASKS, backends: TASKS, size: case.size, seed };
    let mut connections = fleet.graph().connections();
    connections.sort_unstable();
    connections.iter().map(|&count| f64::from(count) / f64::from(case.size)).collect()
}

/// The section.
pub fn section(extent: Extent) -> Section {
    let mut table = Table::new(&["figure", "book", "here, seed\u{a0}0", "here, usual"]);
    let mut figures = Vec::new();
    for case in &CASES {
        let shares = shares(case, 0);
        let spread = spread_of(&shares);
        let extremes: Vec<[f64; 2]> = (0..extent.trials)
            .map(|seed| spread_of(&self::shares(case, seed)))
            .map(|spread| [spread.min, spread.max])
            .collect();
        for (which, ours, words) in [(0, spread.min, "fewest"), (1, spread.max, "most")] {
            let all: Vec<f64> = extremes.iter().map(|extremes| extremes[which]).collect();
            let (low, high) = (quantile(&all, 0.05), quantile(&all, 0.95));
            let published = f64::from(case.published[which]) / f64::from(case.size);
            table.row([
                format!("{}, {words}", case.name),
                counted(case, published),
                counted(case, ours),
                format!(
                    "{} ({:.0}\u{a0}to\u{a0}{})",
                    whole_percent(mean(&all)),
                    100.0 * low,
                    whole_percent(high)
                ),
            ]);
        }
        figures.push(figure(case, &shares));
    }
    let reading = vec![
        "Each drawing lines the 300 backends up, the one with the fewest connections first. The height is its number \
         of connections, compared with the mean of all. A flat line means that every backend works equally hard. \
         Whatever lies above 100 % has to be paid for on all backends, because all are as large as the busiest one \
         needs."
            .to_owned(),
        format!(
            "Random subsets are uneven even if each client uses 90 of 300 backends, and more so with 30. The last \
             column is the mean over {} seeds, with the range of nine in ten of them: the book's Figure 20-4 is a usual \
             draw; 20-3 shows an unusually low minimum. Deterministic subsetting gives every backend exactly 10.",
            extent.trials
        ),
    ];
    Section {
        id: "book",
        heading: "Random subsets are uneven, deterministic ones are not",
        figures,
        reading,
        table,
    }
}

/// A share with the number of connections that it is.
fn counted(case: &Case, share: f64) -> String {
    format!("{}\u{a0}({:.0})", whole_percent(share), share * f64::from(case.size))
}

fn figure(case: &Case, shares: &[f64]) -> Figure {
    let spread = spread_of(shares);
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
    drawing.tinted(case.paint, &[points.as_slice(), &ground].concat());
    drawing.polyline(case.paint, Line::Solid, &points);
    if case.published[0] == case.published[1] {
        let place = plot.point(last / 2.0, 1.0);
        let words = match (counted(case, spread.min), counted(case, spread.max)) {
            (min, max) if min == max => format!("all {min}, as in the book"),
            (min, max) => format!("{min} to {max}"),
        };
        drawing.text(case.paint, Lettering::Strong, at(place.x, place.y - 9.0), Anchor::Middle, &words);
    } else {
        for (published, word, down) in
            [(case.published[0], "fewest", 14.0), (case.published[1], "most", -6.0)]
        {
            let share = f64::from(published) / f64::from(case.size);
            drawing.line(Paint::INK, Line::Dashed, plot.point(0.0, share), plot.point(last, share));
            let place = plot.point(last / 2.0, share);
            let words = format!("book: {word} {}", counted(case, share));
            drawing.text(Paint::INK, Lettering::Small, at(place.x, place.y + down), Anchor::Middle, &words);
        }
        // Beyond the book's lines, so that these do not cross the words.
        let least = f64::min(spread.min, f64::from(case.published[0]) / f64::from(case.size));
        let low = plot.point(0.0, least);
        let words = counted(case, spread.min);
        drawing.text(case.paint, Lettering::Strong, at(low.x + 4.0, low.y + 17.0), Anchor::Start, &words);
        let most = f64::max(spread.max, f64::from(case.published[1]) / f64::from(case.size));
        let high = plot.point(last, most);
        let words = counted(case, spread.max);
        drawing.text(case.paint, Lettering::Strong, at(high.x, high.y - 8.0), Anchor::End, &words);
    }
    let title = format!("Figure {}: {}, {} of 300 backends each", case.name, case.algorithm, case.size);
    let description = format!(
        "Connections of 300 backends in ascending order. The fewest are {} of the mean, the most {}.",
        whole_percent(spread.min),
        whole_percent(spread.max)
    );
    Figure { id: case.id, title, description, drawing }
}

/// One step per backend.
fn steps(plot: &Plot, shares: &[f64]) -> Vec<Point> {
    let mut points = Vec::new();
    let mut before = f64::NAN;
    for (place, &share) in (0_u32..).zip(shares) {
        if share != before {
            if place > 0 {
                points.push(plot.point(f64::from(place), before));
            }
            points.push(plot.point(f64::from(place), share));
            before = share;
        }
    }
    points.push(plot.point(f64::from(TASKS), before));
    points
}
