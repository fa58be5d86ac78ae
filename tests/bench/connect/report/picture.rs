//! The p50 ratios of all groups as one picture. Each arm has a row with its interval and its
//! target.
//!
//! The scale of ratios is the same for all groups, so that readers can compare them. This module
//! must not write SVG itself: `lb_svg` writes it.

use lb_svg::palette::{GREEN, RED};
use lb_svg::{Anchor, Area, Drawing, Figure, Lettering, LineStyle, Paint, Plot, Scale, at};

use super::print::name;
use crate::connect::arms::{Between, Bound, Measure};
use crate::connect::outcome::{Figures, Outcome, Row};
use crate::results::Median;

const OURS: Paint = Paint::new("ours", GREEN);
const TARGET: Paint = Paint::new("target", RED);

const WIDTH: f64 = 860.0;
/// Height of a row of text.
const ROW: f64 = 17.0;
/// Height of a group's title, including the gap above it.
const TITLE: f64 = 1.3 * ROW;
const TOP: f64 = 58.0;
/// The range of ratios on the scale. A ratio outside of this range is drawn at the end of the
/// scale.
const RATIOS: [f64; 2] = [0.98, 1.14];

/// The rows of a group that are shown: all except the first, which is the baseline of the other
/// rows.
fn shown(outcome: &Outcome) -> impl Iterator<Item = (&Row, &Figures)> {
    let rows = outcome.rows.iter().skip(1);
    rows.filter_map(|row| row.figures.as_ref().ok().map(|figures| (row, figures)))
}

/// The picture as the content of a file.
pub fn picture(outcomes: &[Outcome]) -> String {
    let figure = Figure {
        id: "connect",
        title: "Time of an operation against direct".to_owned(),
        description: "For each arm of each group the median time of an operation as a ratio to direct, with its 95 % interval \
                      and its target."
            .to_owned(),
        drawing: drawing(outcomes),
    };
    figure.alone(&[OURS, TARGET])
}

fn drawing(outcomes: &[Outcome]) -> Drawing {
    let rows: f64 = outcomes.iter().map(|outcome| TITLE + shown(outcome).map(|_| ROW).sum::<f64>()).sum();
    let mut drawing = Drawing::new(WIDTH, TOP + rows + ROW);
    let heading = "Median time of an operation, as a ratio to direct";
    drawing.text(Paint::INK, Lettering::Strong, at(12.0, 22.0), Anchor::Start, heading);
    let key = "dot and bar: median over rounds and its 95 % interval; upright stroke: target";
    drawing.note(at(12.0, 40.0), Anchor::Start, key);
    let area = Area { left: 340.0, top: TOP + 4.0, right: 770.0, bottom: drawing.height - 8.0 };
    let plot = Plot { area, x: Scale::Linear(RATIOS[0], RATIOS[1]), y: Scale::Linear(0.0, 1.0) };
    for tick in 0..=8_i32 {
        let ratio = RATIOS[0] + 0.02 * f64::from(tick);
        let paint = if tick == 1 { Paint::QUIET } else { Paint::RULE };
        plot.line(&mut drawing, paint, LineStyle::Thin, &[(ratio, 0.0), (ratio, 1.0)]);
        drawing.note(at(plot.point(ratio, 0.0).x, TOP), Anchor::Middle, &format!("{ratio:.2}"));
    }
    let mut y = TOP;
    for outcome in outcomes {
        y += TITLE;
        let title = outcome.group.title.replace('`', "");
        drawing.text(Paint::INK, Lettering::Strong, at(12.0, y), Anchor::Start, &title);
        for (row, figures) in shown(outcome) {
            y += ROW;
            drawing.text(Paint::INK, Lettering::Small, at(24.0, y), Anchor::Start, &name(outcome, row));
            draw_row(&mut drawing, &plot, y, row, figures);
        }
    }
    drawing
}

fn draw_row(drawing: &mut Drawing, plot: &Plot, y: f64, row: &Row, figures: &Figures) {
    let x_of = |ratio: f64| plot.point(ratio.clamp(RATIOS[0], RATIOS[1]), 0.0).x;
    let Median { value, low, high } = figures.ratio(Measure::P50);
    let middle = y - 4.0;
    let paint = match row.arm.between {
        Between::Socklb(_) | Between::Unserved(_) => OURS,
        Between::Nothing | Between::Empty | Between::Floor | Between::Nft | Between::Haproxy => Paint::INK,
    };
    for (target, _) in row.verdicts.iter().filter(|(target, _)| target.measure == Measure::P50) {
        let ends = match target.bound {
            Bound::AtMost(end) | Bound::AtLeast(end) => vec![end],
            Bound::Within(distance) => vec![1.0 - distance, 1.0 + distance],
            Bound::CoversOne => Vec::new(),
        };
        for x in ends.into_iter().map(x_of) {
            drawing.line(TARGET, LineStyle::Solid, at(x, y - 10.0), at(x, y + 2.0));
        }
    }
    drawing.line(paint, LineStyle::Solid, at(x_of(low), middle), at(x_of(high), middle));
    let x = x_of(value);
    if value > RATIOS[1] {
        // Draws the head of an arrow, because the value is beyond the scale.
        let head = [at(x - 4.0, middle - 4.0), at(x + 4.0, middle), at(x - 4.0, middle + 4.0)];
        drawing.polyline(paint, LineStyle::Solid, &head);
    } else {
        drawing.dot(paint, at(x, middle), 3.2);
    }
    let value = format!("{value:.4}");
    drawing.text(paint, Lettering::Small, at(plot.area.right + 16.0, y), Anchor::Start, &value);
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;
    use crate::connect::arms::groups::Name;
    use crate::connect::outcome::tests::outcome;

    #[test]
    fn every_measured_arm_except_the_first_has_a_row() {
        let times = [1000.0, 1001.0, 1030.0, 2000.0];
        let outcomes = [outcome(Name::LeastLoaded, |arm| (arm != 1).then_some(times[arm]))];
        assert_eq!(drawing(&outcomes).faults(), Vec::<String>::new());
        let text = picture(&outcomes);
        // There is one mark for each row: a circle, or the head of an arrow at the end of the
        // scale.
        assert_eq!(text.matches("<circle").count(), 1, "{text}");
        assert_eq!(text.matches("d=\"M766 ").count(), 1, "{text}");
        assert!(text.contains(">1.0300</text>") && text.contains(">2.0000</text>"), "{text}");
        assert!(!text.contains("direct again"), "{text}");
        // Both targets are drawn, and no text contains NaN.
        assert_eq!(text.matches("class=\"open line stroke-target\"").count(), 2, "{text}");
        assert!(!text.contains("NaN"), "{text}");
    }

    #[test]
    fn labels_in_the_picture_are_neither_cut_off_nor_overlapping() {
        let names = Name::value_variants().iter();
        let outcomes: Vec<Outcome> = names.map(|&name| outcome(name, |_| Some(1000.0))).collect();
        assert_eq!(drawing(&outcomes).faults(), Vec::<String>::new());
    }
}
