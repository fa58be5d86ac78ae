//! Figure 5 of the ACM Queue article: a job of backends that is resized step by step.
//!
//! Shows errors over time as in the article, from the shipped scenario `figure-5`. Also shows how
//! many connections are closed at each step, which causes these errors, and the smallest possible
//! number of closed connections.

use lb_core::subset::Algorithm;
use lb_svg::{Anchor, Area, Axis, Drawing, Figure, LineStyle, Paint, Plot, Scale, WIDTH, at};

use super::numbers::{grouped, percent, whole_percent};
use super::palette::paint;
use super::resize_errors::ResizeErrors;
use super::section::{NumberTable, ReportSection};
use crate::fleet::Fleet;
use crate::metrics::churn::{Churn, churn, minimum};
use crate::metrics::mean;

const ALGORITHMS: [Algorithm; 2] = [Algorithm::Deterministic, Algorithm::Rocksteadier];

/// The ACM Queue article mentions "varying step sizes" without naming them. These are the sizes of
/// the shipped scenario `figure-5`.
const SIZES: [u32; 10] = [100, 101, 102, 107, 112, 132, 152, 112, 101, 100];

const fn fleet(algorithm: Algorithm, backends: u32) -> Fleet {
    Fleet { algorithm, clients: 100, backends, size: 20, seed: 0 }
}

struct ResizeStep {
    from: u32,
    to: u32,
    dropped: Churn,
    /// The part of the connections that must be closed so that the load stays even.
    minimum: f64,
}

fn steps(algorithm: Algorithm) -> Vec<ResizeStep> {
    let step = |pair: &[u32]| {
        let (old, new) = (fleet(algorithm, pair[0]), fleet(algorithm, pair[1]));
        let dropped = churn(&old.graph(), &new.graph());
        ResizeStep { from: pair[0], to: pair[1], dropped, minimum: minimum(&old, &new) }
    };
    SIZES.windows(2).map(step).collect()
}

pub fn section() -> ReportSection {
    let [deterministic, rocksteadier] = ALGORITHMS.map(steps);
    let mut table = NumberTable::new(&["backends", "deterministic", "rocksteadier", "for evenness"]);
    for (one, other) in deterministic.iter().zip(&rocksteadier) {
        let [theirs, ours, evenness] = [one.dropped.mean, other.dropped.mean, one.minimum].map(percent);
        table.row([&format!("{} to {}", one.from, one.to), &theirs, &ours, &evenness]);
    }
    let [ours, theirs] = [&rocksteadier, &deterministic]
        .map(|steps| percent(mean(steps.iter().map(|step| step.dropped.mean))));
    let evenness = percent(mean(rocksteadier.iter().map(|step| step.minimum)));
    table.row(["mean of all steps", &theirs, &ours, &evenness]);
    let played = ResizeErrors::play();
    let of_deterministic = played.total("deterministic");
    let reading = vec![
        "A backend job grows and shrinks in steps of different sizes. Each task of two jobs of 100 client \
         tasks uses 20 of its backends. The first drawing shows the errors of these two jobs: requests under \
         way on a connection that the client closes because the backend has left its subset, and requests \
         that find no established connection yet. The second drawing shows the closed connections of each \
         resize: a bar is the mean part of a client\u{2019}s connections that a step closes, and the thin \
         line above it reaches to the worst affected client. The short stroke is the part that must be closed \
         if the load is perfectly even before and after the resize."
            .to_owned(),
        format!(
            "The article measured the errors of two frontend jobs while their backend job was resized: \
             \u{201c}Every time the backend size changed, the frontend job using deterministic subsetting \
             would see a spike of errors, whereas the frontend job using Rocksteadier Subsetting was largely \
             unaffected.\u{201d} Here {} of {} requests fail with deterministic subsets, and {} with \
             Rocksteadier. The closed connections are the cause: on average over the steps deterministic subsets close \
             {theirs} of all connections, and {} when a single backend is added; Rocksteadier closes {ours} \
             and {}. An even load requires that {evenness} are closed on average.",
            of_deterministic.errors,
            grouped(of_deterministic.arrivals),
            played.total("rocksteadier").errors,
            percent(deterministic[0].dropped.mean),
            percent(rocksteadier[0].dropped.mean)
        ),
    ];
    let figures = vec![played.figure(), figure(&[deterministic, rocksteadier])];
    ReportSection { id: "resize", heading: "A backend job that is resized in steps", figures, reading, table }
}

fn figure(all: &[Vec<ResizeStep>; 2]) -> Figure {
    let last = f64::from(u32::try_from(SIZES.len()).expect("there are ten sizes")) - 1.0;
    let x = Scale::Linear(-0.5, last - 0.5);
    let mut drawing = Drawing::new(WIDTH, 414.0);
    let sizes = Plot {
        area: Area { left: 50.0, top: 34.0, right: 384.0, bottom: 98.0 },
        x,
        y: Scale::Linear(0.0, 200.0),
    };
    let none = Axis::new("", &[]);
    sizes.axes(&mut drawing, &none, &Axis::new("backends", &[0.0, 100.0, 200.0]));
    let mut stairs = Vec::new();
    for (step, &size) in (0_u32..).zip(&SIZES) {
        // A size applies from one resize to the next. Resizes are in the middle of the bars.
        let from = (f64::from(step) - 1.0).max(-0.5);
        let to = f64::from(step).min(last - 0.5);
        stairs.push((from, f64::from(size)));
        stairs.push((to, f64::from(size)));
    }
    sizes.line(&mut drawing, Paint::INK, LineStyle::Solid, &stairs);
    for (row, (steps, algorithm)) in all.iter().zip(ALGORITHMS).enumerate() {
        let top = if row == 0 { 144.0 } else { 286.0 };
        let area = Area { left: 50.0, top, right: 384.0, bottom: top + 84.0 };
        let plot = Plot { area, x, y: Scale::Linear(0.0, 1.0) };
        let paint = paint(algorithm);
        let title = format!("connections closed, {algorithm}");
        plot.axes(&mut drawing, &none, &Axis::worded(&title, &[0.0, 0.5, 1.0], whole_percent));
        for (number, step) in (0_u32..).zip(steps) {
            let middle = f64::from(number);
            let Churn { mean, worst, .. } = step.dropped;
            drawing.bar(paint, plot.between((middle - 0.3, 0.0), (middle + 0.3, mean)));
            plot.line(&mut drawing, paint, LineStyle::Thin, &[(middle, mean), (middle, worst)]);
            let mut stroke = |paint, line, half: f64, height: f64| {
                plot.line(&mut drawing, paint, line, &[(middle - half, height), (middle + half, height)]);
            };
            stroke(paint, LineStyle::Thin, 0.12, worst);
            stroke(Paint::INK, LineStyle::Solid, 0.42, step.minimum);
            let word = if step.to > step.from { "+" } else { "\u{2212}" };
            let word = format!("{word}{}", step.to.abs_diff(step.from));
            let below = at(plot.point(middle, 0.0).x, area.bottom + 15.0);
            drawing.note(below, Anchor::Middle, &word);
        }
    }
    let foot = at(384.0, 408.0);
    drawing.note(foot, Anchor::End, "resizes of the backend job, in order");
    Figure {
        id: "fig-5-closed",
        title: "Connections closed by each resize".to_owned(),
        description: "The size of a backend job over nine resizes, and for each the share of connections that are closed: \
                      tall bars for deterministic subsets, bars near the least possible for Rocksteadier."
            .to_owned(),
        drawing,
    }
}
