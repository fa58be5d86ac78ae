//! A cloud: a figure with too many points to draw each of them. It shows their density and a line
//! of their means.
//!
//! This module must not depend on the way in which the utilizations were computed.

use lb_svg::palette::SHADES;
use lb_svg::{
    Anchor, Area, Axis, Drawing, Figure, HEIGHT, Lettering, LineStyle, Paint, Plot, Scale, WIDTH, at,
};

use super::numbers::{grouped, utilization};
use crate::metrics::mean;
use crate::sweep::summary::Summary;

/// The utilizations of many pairs of job sizes, drawn over a quantity that follows from each pair.
pub struct Cloud {
    /// The identifier of the figure.
    pub id: &'static str,
    /// The title of the figure.
    pub title: String,
    /// The kind of utilization.
    pub quantity: &'static str,
    /// The quantity of the horizontal axis, in words and in symbols.
    pub over: [&'static str; 2],
    pub x: Scale,
    pub ticks: &'static [f64],
    /// The name of the series.
    pub name: &'static str,
    /// The paint of the series.
    pub paint: Paint,
}

impl Cloud {
    /// Draws the points, their means, and two lines of text in the lower right corner, where points
    /// are rare.
    pub fn figure(self, pairs: &[(f64, f64)]) -> Figure {
        let Self { id, title, quantity, over: [over, symbols], x, ticks, name, paint } = self;
        let plot = Plot::usual(x, Scale::Linear(0.0, 1.0));
        let mut drawing = Drawing::new(WIDTH, HEIGHT);
        let x = format!("{over}, {symbols}");
        plot.axes(&mut drawing, &Axis::new(&x, ticks), &Axis::new(quantity, &[0.0, 0.25, 0.5, 0.75, 1.0]));
        density(&mut drawing, &plot, paint, pairs);
        let means = means(&plot, pairs);
        plot.line(&mut drawing, Paint::PAPER, LineStyle::Halo, &means);
        plot.line(&mut drawing, Paint::INK, LineStyle::Solid, &means);
        let summary = Summary::of(pairs.iter().map(|&(_, utilization)| utilization));
        let words = format!("mean {}, worst {}", utilization(summary.mean), utilization(summary.min));
        let corner = at(plot.area.right - 4.0, plot.area.bottom - 28.0);
        drawing.text(paint, Lettering::Strong, corner, Anchor::End, name);
        drawing.text(Paint::INK, Lettering::Small, corner.moved(0.0, 17.0), Anchor::End, &words);
        let description = format!(
            "{}{} of {} pairs of job sizes over {over}, as a density. {words}.",
            quantity[..1].to_uppercase(),
            &quantity[1..],
            grouped(pairs.len() as u64)
        );
        Figure { id, title, description, drawing }
    }
}

/// The number of parts into which the axis is divided; each part has one mean. It is large enough
/// to show a bend, and small enough for a smooth line.
const PARTS: usize = 26;

fn means(plot: &Plot, pairs: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut parts = vec![Vec::new(); PARTS];
    for &(x, y) in pairs {
        parts[bin(plot.x.fraction(x), PARTS)].push((x, y));
    }
    let middle = |part: &Vec<(f64, f64)>| {
        let (x, y): (Vec<f64>, Vec<f64>) = part.iter().copied().unzip();
        (mean(x), mean(y))
    };
    parts.iter().filter(|part| !part.is_empty()).map(middle).collect()
}

/// The width and height of a bin of the density, in units of the drawing. A bin is so small that it
/// looks like a point.
const BIN: (f64, f64) = (2.0, 2.0);

/// Draws the density of the points.
fn density(drawing: &mut Drawing, plot: &Plot, paint: Paint, pairs: &[(f64, f64)]) {
    let Area { left, top, right, bottom } = plot.area;
    let columns = bins(right - left, BIN.0);
    let rows = bins(bottom - top, BIN.1);
    let mut counts = vec![0_u32; columns * rows];
    for &(x, y) in pairs {
        let column = bin(plot.x.fraction(x), columns);
        let row = bin(plot.y.fraction(y), rows);
        counts[row * columns + column] += 1;
    }
    for shade in 0..SHADES.len() {
        let mut areas: Vec<Area> = Vec::new();
        for (index, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            if shade_of(count) != shade {
                continue;
            }
            #[expect(clippy::cast_precision_loss, reason = "a few hundred bins")]
            let (x, y) = ((index % columns) as f64 * BIN.0 + left, bottom - (index / columns) as f64 * BIN.1);
            let area = Area { left: x, top: y - BIN.1, right: x + BIN.0, bottom: y };
            match areas.last_mut() {
                Some(before)
                    if before.right >= area.left && before.top >= area.top && before.top <= area.top =>
                {
                    before.right = area.right;
                }
                Some(_) | None => areas.push(area),
            }
        }
        if !areas.is_empty() {
            drawing.shaded(paint, shade, &areas);
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a few hundred bins of a positive length"
)]
fn bins(length: f64, bin: f64) -> usize {
    (length / bin).floor() as usize
}

/// The bin of a share; a value on the last edge belongs to the last bin.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "the result is at most a few hundred"
)]
fn bin(share: f64, bins: usize) -> usize {
    ((share * bins as f64).floor() as usize).min(bins - 1)
}

/// Each shade represents four times as many points as the previous shade.
const fn shade_of(count: u32) -> usize {
    match count {
        0..=1 => 0,
        2..=5 => 1,
        6..=21 => 2,
        22..=85 => 3,
        86.. => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::super::palette::RANDOM;
    use super::*;

    #[test]
    fn adjacent_bins_of_one_shade_are_one_rectangle() {
        let plot = Plot {
            area: Area { left: 0.0, top: 0.0, right: 20.0, bottom: 10.0 },
            x: Scale::Linear(0.0, 10.0),
            y: Scale::Linear(0.0, 1.0),
        };
        let mut drawing = Drawing::new(20.0, 10.0);
        density(&mut drawing, &plot, RANDOM, &[(0.5, 1.0), (1.5, 1.0), (3.5, 1.0), (9.0, 0.0), (9.0, 0.0)]);
        assert_eq!(
            drawing.body(),
            "<path class=\"shade-0 fill-random\" d=\"M0 0h4v2h-4zM6 0h2v2h-2z\"/>\n\
             <path class=\"shade-1 fill-random\" d=\"M18 8h2v2h-2z\"/>\n"
        );
    }
}
