//! Figure 5 of the article: a backend job that is resized step by step.

use lb_core::subset::Algorithm;
use lb_svg::{Anchor, Area, Axis, Drawing, Figure, Lettering, Line, Paint, Plot, Scale, WIDTH, at};

use super::numbers::{mean, percent, whole_percent};
use super::palette::{DETERMINISTIC, ROCKSTEADIER};
use super::section::{Section, Table};
use crate::fleet::Fleet;
use crate::metrics::churn::{Churn, churn, minimum};

const CASES: [(Algorithm, Paint); 2] =
    [(Algorithm::Deterministic, DETERMINISTIC), (Algorithm::Rocksteadier, ROCKSTEADIER)];

/// The article tells of "varying step sizes" without naming them; these are those of our own scenario of its figure.
const SIZES: [u32; 10] = [100, 101, 102, 107, 112, 132, 152, 112, 101, 100];

const fn fleet(algorithm: Algorithm, backends: u32) -> Fleet {
    Fleet { algorithm, clients: 100, backends, size: 20, seed: 0 }
}

/// One resize.
struct Step {
    from: u32,
    to: u32,
    dropped: Churn,
    /// What evenness demands.
    minimum: f64,
}

fn steps(algorithm: Algorithm) -> Vec<Step> {
    let step = |pair: &[u32]| {
        let (old, new) = (fleet(algorithm, pair[0]), fleet(algorithm, pair[1]));
        let dropped = churn(&old.graph(), &new.graph());
        Step { from: pair[0], to: pair[1], dropped, minimum: minimum(&old, &new) }
    };
    SIZES.windows(2).map(step).collect()
}

/// The section.
pub fn section() -> Section {
    let [deterministic, rocksteadier] = CASES.map(|(algorithm, _)| steps(algorithm));
    let mut table = Table::new(&["backends", "deterministic", "rocksteadier", "for evenness"]);
    for (one, other) in deterministic.iter().zip(&rocksteadier) {
        table.row([
            format!("{} to {}", one.from, one.to),
            percent(one.dropped.mean),
            percent(other.dropped.mean),
            percent(one.minimum),
        ]);
    }
    let over_all = |steps: &[Step], of: fn(&Step) -> f64| mean(&steps.iter().map(of).collect::<Vec<f64>>());
    let [ours, theirs] =
        [&rocksteadier, &deterministic].map(|steps| over_all(steps, |step| step.dropped.mean));
    let evenness = over_all(&rocksteadier, |step| step.minimum);
    table.row(["mean of all steps".to_owned(), percent(theirs), percent(ours), percent(evenness)]);
    let reading = vec![
        "A backend job grows and shrinks in steps of different sizes, before 100 clients with 20 backends each. A bar is \
         the mean share of a client\u{2019}s connections that a step closes; the thin line above it reaches to the client \
         that is hit worst. The short stroke is what an algorithm closes that is perfectly even before and after."
            .to_owned(),
        format!(
            "The article measured the errors of two frontend jobs while their backend job was resized: \u{201c}Every time \
             the backend size changed, the frontend job using deterministic subsetting would see a spike of errors, whereas \
             the frontend job using Rocksteadier Subsetting was largely unaffected.\u{201d} Here are the closed \
             connections behind such spikes: {} of all in a mean step with deterministic subsets, and {} where a single backend \
             is added; {} and {} with Rocksteadier. Evenness demands {} in a mean step.",
            percent(theirs),
            percent(deterministic[0].dropped.mean),
            percent(ours),
            percent(rocksteadier[0].dropped.mean),
            percent(evenness)
        ),
    ];
    let figures = vec![figure(&[deterministic, rocksteadier])];
    Section { id: "resize", heading: "A backend job that is resized in steps", figures, reading, table }
}

fn figure(all: &[Vec<Step>; 2]) -> Figure {
    let last = f64::from(u32::try_from(SIZES.len()).expect("ten sizes")) - 1.0;
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
        // A size holds from the resize before it to the one after it; resizes are in the middle of the bars.
        let from = (f64::from(step) - 1.0).max(-0.5);
        let to = f64::from(step).min(last - 0.5);
        stairs.push((from, f64::from(size)));
        stairs.push((to, f64::from(size)));
    }
    sizes.line(&mut drawing, Paint::INK, Line::Solid, &stairs);
    for (row, (steps, (algorithm, paint))) in all.iter().zip(CASES).enumerate() {
        let top = if row == 0 { 144.0 } else { 286.0 };
        let area = Area { left: 50.0, top, right: 384.0, bottom: top + 84.0 };
        let plot = Plot { area, x, y: Scale::Linear(0.0, 1.0) };
        let title = format!("connections closed, {algorithm}");
        plot.axes(&mut drawing, &none, &Axis::worded(&title, &[0.0, 0.5, 1.0], whole_percent));
        for (place, step) in (0_u32..).zip(steps) {
            let place = f64::from(place);
            drawing.bar(paint, plot.between((place - 0.3, 0.0), (place + 0.3, step.dropped.mean)));
            plot.line(
                &mut drawing,
                paint,
                Line::Thin,
                &[(place, step.dropped.mean), (place, step.dropped.worst)],
            );
            plot.line(
                &mut drawing,
                paint,
                Line::Thin,
                &[(place - 0.12, step.dropped.worst), (place + 0.12, step.dropped.worst)],
            );
            let ideal = step.minimum;
            plot.line(&mut drawing, Paint::INK, Line::Solid, &[(place - 0.42, ideal), (place + 0.42, ideal)]);
            let word = if step.to > step.from { "+" } else { "\u{2212}" };
            let word = format!("{word}{}", step.to.abs_diff(step.from));
            let below = at(plot.point(place, 0.0).x, area.bottom + 15.0);
            drawing.text(Paint::QUIET, Lettering::Small, below, Anchor::Middle, &word);
        }
    }
    let foot = at(384.0, 408.0);
    drawing.text(
        Paint::QUIET,
        Lettering::Small,
        foot,
        Anchor::End,
        "resize of the backend job, one after the other",
    );
    Figure {
        id: "fig-5",
        title: "Figure 5: stepped resize of a backend job".to_owned(),
        description: "The size of a backend job over nine resizes, and for each the share of connections that are closed: \
                      tall bars for deterministic subsets, bars near the least possible for Rocksteadier."
            .to_owned(),
        drawing,
    }
}
