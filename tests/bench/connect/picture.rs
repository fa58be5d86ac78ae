//! The p50 ratios of all groups as one picture: a row for each arm, its interval, its target.
//!
//! Written directly: the few shapes have classes, so that the picture follows the reader's light or dark page. Viewers
//! that are no browsers know classes, but not custom properties.

use std::fmt::Write as _;

use super::arm::{Between, Bound, Measure};
use super::outcome::{Figures, Outcome, Row};
use super::print::name;
use crate::statistics::Median;

/// Class, and its colour on a light and on a dark page.
const COLOURS: [(&str, [&str; 2]); 5] = [
    ("ink", ["#1b2228", "#e6eaed"]),
    ("quiet", ["#55606a", "#a2adb6"]),
    ("rule", ["#dde2e6", "#2d343b"]),
    ("ours", ["#0b7161", "#4fc4b0"]),
    ("target", ["#b3421c", "#f28f66"]),
];
const PAPER: [&str; 2] = ["#ffffff", "#14181c"];
const FONTS: &str = "system-ui,'Segoe UI',Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif";

const WIDTH: f64 = 860.0;
/// Where the scale begins and ends.
const SCALE: [f64; 2] = [340.0, 770.0];
/// What ratios these are.
const RATIOS: [f64; 2] = [0.98, 1.14];
const ROW: f64 = 17.0;
const TOP: f64 = 58.0;

/// Where a ratio is; one beyond the scale is at its end.
fn x_of(ratio: f64) -> f64 {
    let share = (ratio - RATIOS[0]) / (RATIOS[1] - RATIOS[0]);
    SCALE[0] + share.clamp(0.0, 1.0) * (SCALE[1] - SCALE[0])
}

/// The picture, as a file.
pub fn picture(outcomes: &[Outcome]) -> String {
    let mut body = String::new();
    let mut y = TOP;
    for outcome in outcomes {
        y += 1.3 * ROW;
        label(&mut body, "strong ink", 12.0, y, &outcome.group.title.replace('`', ""));
        // The first is what the others are compared with.
        for row in outcome.rows.iter().skip(1) {
            if let Ok(figures) = &row.figures {
                y += ROW;
                label(&mut body, "ink", 24.0, y, &name(outcome, row));
                draw(&mut body, y, row, figures);
            }
        }
    }
    let height = y + ROW;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" class=\"fig\" role=\"img\">\n\
         <title>Time of an operation against direct</title>\n<style>{}</style>\n\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\"/>\n",
        style()
    );
    label(&mut text, "strong ink", 12.0, 22.0, "Median time of an operation, as a ratio to direct");
    let key = "dot and bar: median over rounds and its 95 % interval; upright stroke: target";
    label(&mut text, "quiet", 12.0, 40.0, key);
    // Bound: the ticks of the scale.
    for tick in 0..=8_i32 {
        let ratio = RATIOS[0] + 0.02 * f64::from(tick);
        let (x, class) = (x_of(ratio), if tick == 1 { "quiet" } else { "rule" });
        line(&mut text, class, [x, TOP + 4.0], [x, height - 8.0]);
        writeln!(
            text,
            "<text class=\"quiet\" x=\"{x:.1}\" y=\"{TOP}\" text-anchor=\"middle\">{ratio:.2}</text>"
        )
        .expect("a string takes all");
    }
    text + &body + "</svg>\n"
}

fn draw(body: &mut String, y: f64, row: &Row, figures: &Figures) {
    let Median { value, low, high } = figures.ratio(Measure::P50);
    let middle = y - 4.0;
    let class = match row.arm.between {
        Between::Socklb(_) | Between::Unserved(_) => "ours",
        Between::Nothing | Between::Empty | Between::Floor | Between::Nft | Between::Haproxy => "ink",
    };
    for (target, _) in row.verdicts.iter().filter(|(target, _)| target.measure == Measure::P50) {
        let ends = match target.bound {
            Bound::AtMost(end) | Bound::AtLeast(end) => vec![end],
            Bound::Within(distance) => vec![1.0 - distance, 1.0 + distance],
            Bound::CoversOne => Vec::new(),
        };
        for x in ends.into_iter().map(x_of) {
            line(body, "target wide", [x, y - 10.0], [x, y + 2.0]);
        }
    }
    line(body, &format!("{class} wide"), [x_of(low), middle], [x_of(high), middle]);
    let x = x_of(value);
    let shape = if value > RATIOS[1] {
        // An arrow: it is further out.
        format!("<path class=\"{class}\" d=\"M{:.1} {:.1}l8 4l-8 4z\"/>\n", x - 4.0, middle - 4.0)
    } else {
        format!("<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{middle:.1}\" r=\"3.2\"/>\n")
    };
    body.push_str(&shape);
    label(body, class, SCALE[1] + 16.0, y, &format!("{value:.4}"));
}

fn line(body: &mut String, class: &str, [x1, y1]: [f64; 2], [x2, y2]: [f64; 2]) {
    writeln!(body, "<path class=\"open {class}\" d=\"M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}\"/>")
        .expect("a string takes all");
}

fn label(body: &mut String, class: &str, x: f64, y: f64, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    writeln!(body, "<text class=\"{class}\" x=\"{x}\" y=\"{y:.1}\">{text}</text>")
        .expect("a string takes all");
}

fn style() -> String {
    let paints = |scheme: usize| {
        let mut css = format!(".paper{{fill:{}}}", PAPER[scheme]);
        for (class, colours) in COLOURS {
            let colour = colours[scheme];
            write!(css, ".{class}{{fill:{colour}}}.open.{class}{{fill:none;stroke:{colour}}}")
                .expect("a string takes all");
        }
        css
    };
    format!(
        "text{{font:12px {FONTS};font-variant-numeric:tabular-nums}}text.strong{{font-weight:600;font-size:13px}}\
         .open{{stroke-width:1}}.wide{{stroke-width:2}}{}@media (prefers-color-scheme:dark){{{}}}",
        paints(0),
        paints(1)
    )
}

#[cfg(test)]
mod tests {
    use super::super::groups::Name;
    use super::super::outcome::tests::outcome;
    use super::*;

    #[test]
    fn every_arm_but_the_first_has_a_row_if_it_was_run() {
        let times = [1000.0, 1001.0, 1030.0, 2000.0];
        let text = picture(&[outcome(Name::LeastLoaded, |arm| (arm != 1).then_some(times[arm]))]);
        // One mark for each: a circle, or an arrow for what is beyond the scale.
        assert_eq!(text.matches("<circle").count(), 1, "{text}");
        assert_eq!(text.matches("l8 4l-8 4z").count(), 1, "{text}");
        assert!(text.contains(">1.0300</text>") && text.contains(">2.0000</text>"), "{text}");
        assert!(!text.contains("direct again"), "{text}");
        // Both targets, and no number that is none.
        assert_eq!(text.matches("target wide").count(), 2, "{text}");
        assert!(!text.contains("NaN"), "{text}");
        assert_eq!(text.matches("<text").count(), text.matches("</text>").count());
    }

    #[test]
    fn a_ratio_has_its_place_on_the_scale() {
        assert!((x_of(RATIOS[0]) - SCALE[0]).abs() < 1e-9);
        assert!((x_of(9.0) - SCALE[1]).abs() < 1e-9);
        assert!(x_of(1.0) < x_of(1.001));
    }
}
