//! Axes, which convert numbers to points of a drawing. Axes have ticks, a light grid, and titles
//! that state the unit.
//!
//! So that drawings do not mislead, an axis shows its whole range, and figures that are compared
//! have the same range. This module must not depend on the meaning of the numbers.

use crate::drawing::{Anchor, Drawing, LineStyle};
use crate::geometry::{Area, Point, at};
use crate::palette::Paint;

/// Converts a number to a fraction of the length of an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// Equal differences between numbers have equal lengths.
    Linear(f64, f64),
    /// Equal ratios of numbers have equal lengths.
    Logarithmic(f64, f64),
}

impl Scale {
    /// The number at the start of the axis.
    pub const fn start(self) -> f64 {
        match self {
            Self::Linear(from, _) | Self::Logarithmic(from, _) => from,
        }
    }

    /// 0 at the start of the axis, 1 at its end.
    pub fn fraction(self, value: f64) -> f64 {
        match self {
            Self::Linear(from, to) => (value - from) / (to - from),
            Self::Logarithmic(from, to) => (value / from).ln() / (to / from).ln(),
        }
    }
}

/// The title of an axis, and the numbers that have a label.
#[derive(Clone, Debug)]
pub struct Axis<'a> {
    /// The title, with the unit.
    pub title: &'a str,
    /// Numbers and their labels.
    pub ticks: Vec<(f64, String)>,
}

impl<'a> Axis<'a> {
    /// Creates an axis with the numbers themselves as labels.
    pub fn new(title: &'a str, ticks: &[f64]) -> Self {
        Self::worded(title, ticks, |tick| tick.to_string())
    }

    /// Creates an axis with labels that the function `words` returns.
    pub fn worded(title: &'a str, ticks: &[f64], words: fn(f64) -> String) -> Self {
        Self { title, ticks: ticks.iter().map(|&tick| (tick, words(tick))).collect() }
    }
}

/// Default width of a figure, in units of the drawing.
pub const WIDTH: f64 = 400.0;
/// Default height of a figure, in units of the drawing.
pub const HEIGHT: f64 = 280.0;

/// The area of a drawing in which a pair of numbers is a point.
#[derive(Clone, Copy, Debug)]
pub struct Plot {
    /// The area, without the axes.
    pub area: Area,
    /// The horizontal scale, from left to right.
    pub x: Scale,
    /// The vertical scale, from bottom to top.
    pub y: Scale,
}

impl Plot {
    /// Creates a plot that fills a figure of the default size.
    pub const fn usual(x: Scale, y: Scale) -> Self {
        Self { area: Area { left: 50.0, top: 34.0, right: 384.0, bottom: 234.0 }, x, y }
    }

    /// The point of a pair of numbers.
    pub fn point(&self, x: f64, y: f64) -> Point {
        let Area { left, top, right, bottom } = self.area;
        at(left + self.x.fraction(x) * (right - left), bottom - self.y.fraction(y) * (bottom - top))
    }

    /// The area between two corners.
    pub fn between(&self, (x, y): (f64, f64), (other_x, other_y): (f64, f64)) -> Area {
        let (a, b) = (self.point(x, y), self.point(other_x, other_y));
        Area { left: a.x.min(b.x), top: a.y.min(b.y), right: a.x.max(b.x), bottom: a.y.max(b.y) }
    }

    /// Draws the grid and the labels. Must be called before anything else is drawn, so that the
    /// grid is below everything else.
    pub fn axes(&self, drawing: &mut Drawing, x: &Axis<'_>, y: &Axis<'_>) {
        let Area { left, top, right, bottom } = self.area;
        for (value, words) in &y.ticks {
            let height = bottom - self.y.fraction(*value) * (bottom - top);
            drawing.line(Paint::RULE, LineStyle::Thin, at(left, height), at(right, height));
            drawing.note(at(left - 6.0, height + 4.0), Anchor::End, words);
        }
        for (value, words) in &x.ticks {
            let x = left + self.x.fraction(*value) * (right - left);
            drawing.line(Paint::QUIET, LineStyle::Thin, at(x, bottom), at(x, bottom + 4.0));
            drawing.note(at(x, bottom + 17.0), Anchor::Middle, words);
        }
        drawing.line(Paint::QUIET, LineStyle::Thin, at(left, bottom), at(right, bottom));
        // The title is above the axis, so that the text is horizontal.
        drawing.note(at(6.0, top - 18.0), Anchor::Start, y.title);
        if !x.title.is_empty() {
            drawing.note(at(right, bottom + 36.0), Anchor::End, x.title);
        }
    }

    /// Draws a line through pairs of numbers.
    pub fn line(&self, drawing: &mut Drawing, paint: Paint, line: LineStyle, pairs: &[(f64, f64)]) {
        let points: Vec<Point> = pairs.iter().map(|&(x, y)| self.point(x, y)).collect();
        drawing.polyline(paint, line, &points);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_ratios_have_equal_lengths_on_a_logarithmic_axis() {
        let scale = Scale::Logarithmic(0.25, 4.0);
        assert!((scale.fraction(1.0) - 0.5).abs() < 1e-12);
        assert!((scale.fraction(2.0) - 0.75).abs() < 1e-12);
    }
}
