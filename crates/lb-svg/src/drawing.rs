//! The few shapes that figures need, as SVG elements.
//!
//! Shapes have classes instead of colours, so that a picture follows the light or dark scheme of
//! the reader's page; [`crate::palette`] defines the classes. A drawing also records where its
//! shapes and labels are, so that tests can find cut-off shapes and overlapping labels without a
//! browser. This module must not depend on axes or data.

use std::fmt::Write as _;

use crate::geometry::{Area, Point, on_circle};
use crate::palette::Paint;

/// The part of a text that is placed at the given point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

/// The size and weight of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lettering {
    /// For numbers on axes, and for notes.
    Small,
    /// For titles of axes, and for remarks.
    Label,
    /// For the name of a drawn object.
    Strong,
}

impl Lettering {
    const fn class(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Label => "label",
            Self::Strong => "strong",
        }
    }

    /// The height of a line, and the average width of a letter. The width is a high estimate: it is
    /// that of DejaVu Sans, which is wider than most fonts.
    const fn extent(self) -> (f64, f64) {
        match self {
            Self::Small => (12.0, 6.7),
            Self::Label => (13.0, 7.3),
            Self::Strong => (13.0, 7.9),
        }
    }
}

/// How a line is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineStyle {
    /// One unit wide.
    Thin,
    /// Wide enough to show the colour.
    Solid,
    /// Six units wide, for arcs.
    Thick,
    /// Background on both sides of a line that crosses other lines.
    Halo,
    /// For reference lines, such as published numbers.
    Dashed,
    /// For a second quantity of the same series.
    Dotted,
}

impl LineStyle {
    const fn class(self) -> &'static str {
        match self {
            Self::Thin => "thin",
            Self::Solid => "line",
            Self::Thick => "thick",
            Self::Halo => "around",
            Self::Dashed => "line dashed",
            Self::Dotted => "line dotted",
        }
    }
}

/// A picture that is being drawn.
#[derive(Clone, Debug)]
pub struct Drawing {
    /// The width in units. On a phone, a unit is slightly smaller than a pixel.
    pub width: f64,
    /// The height in units.
    pub height: f64,
    body: String,
    labels: Vec<(Area, String)>,
    bounds: Area,
}

/// Formats a number for a figure. The number is rounded to a tenth of a unit, which is finer than
/// any screen can show.
fn number(value: f64) -> String {
    let tenths = (value * 10.0).round() / 10.0;
    // Adding 0 avoids "-0".
    format!("{}", tenths + 0.0)
}

fn numbers(Point { x, y }: Point) -> String {
    format!("{} {}", number(x), number(y))
}

/// Escapes text for XML, in elements and in attributes.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Drawing {
    /// Creates an empty drawing.
    pub fn new(width: f64, height: f64) -> Self {
        let bounds = Area { left: 0.0, top: 0.0, right: 0.0, bottom: 0.0 };
        Self { width, height, body: String::new(), labels: Vec::new(), bounds }
    }

    /// The shapes, as SVG elements.
    pub fn body(&self) -> &str {
        &self.body
    }

    fn cover(&mut self, area: Area) {
        self.bounds.left = self.bounds.left.min(area.left);
        self.bounds.top = self.bounds.top.min(area.top);
        self.bounds.right = self.bounds.right.max(area.right);
        self.bounds.bottom = self.bounds.bottom.max(area.bottom);
    }

    fn cover_all(&mut self, points: &[Point]) {
        for &Point { x, y } in points {
            self.cover(Area { left: x, top: y, right: x, bottom: y });
        }
    }

    fn write(&mut self, element: std::fmt::Arguments<'_>) {
        self.body.write_fmt(element).expect("writing to a string cannot fail");
        self.body.push('\n');
    }

    /// Draws a line through points.
    pub fn polyline(&mut self, paint: Paint, line: LineStyle, points: &[Point]) {
        self.cover_all(points);
        self.open_path(paint, line, &path_through(points));
    }

    fn open_path(&mut self, paint: Paint, line: LineStyle, path: &str) {
        let (line, paint) = (line.class(), paint.name);
        self.write(format_args!("<path class=\"open {line} stroke-{paint}\" d=\"{path}\"/>"));
    }

    /// Draws a straight line.
    pub fn line(&mut self, paint: Paint, line: LineStyle, from: Point, to: Point) {
        self.polyline(paint, line, &[from, to]);
    }

    /// Fills the polygon of these points with a light tint.
    pub fn tinted(&mut self, paint: Paint, points: &[Point]) {
        self.cover_all(points);
        let path = path_through(points);
        self.write(format_args!("<path class=\"tint fill-{}\" d=\"{path}Z\"/>", paint.name));
    }

    /// Draws a filled rectangle.
    pub fn bar(&mut self, paint: Paint, area: Area) {
        let [x, y, width, height] = self.rectangle(area);
        let paint = paint.name;
        self.write(format_args!(
            "<rect class=\"fill-{paint}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>"
        ));
    }

    /// Draws many filled rectangles of one shade in one element.
    pub fn shaded(&mut self, paint: Paint, shade: usize, areas: &[Area]) {
        let mut path = String::new();
        for &area in areas {
            let [x, y, width, height] = self.rectangle(area);
            write!(path, "M{x} {y}h{width}v{height}h-{width}z").expect("writing to a string cannot fail");
        }
        self.write(format_args!("<path class=\"shade-{shade} fill-{}\" d=\"{path}\"/>", paint.name));
    }

    /// Records that an area is covered. Returns its corner and the lengths of its sides, as they
    /// are written into the figure.
    fn rectangle(&mut self, area: Area) -> [String; 4] {
        self.cover(area);
        [area.left, area.top, area.right - area.left, area.bottom - area.top].map(number)
    }

    /// Draws a filled circle.
    pub fn dot(&mut self, paint: Paint, centre: Point, radius: f64) {
        self.circle(&format!("fill-{}", paint.name), centre, radius);
    }

    /// Draws the outline of a circle.
    pub fn circle_line(&mut self, paint: Paint, line: LineStyle, centre: Point, radius: f64) {
        self.circle(&format!("open {} stroke-{}", line.class(), paint.name), centre, radius);
    }

    fn circle(&mut self, class: &str, centre: Point, radius: f64) {
        self.cover(Area::square(centre, radius));
        let (x, y, radius) = (number(centre.x), number(centre.y), number(radius));
        self.write(format_args!("<circle class=\"{class}\" cx=\"{x}\" cy=\"{y}\" r=\"{radius}\"/>"));
    }

    /// Draws a part of a circle's outline, clockwise. `from` and `to` are parts of a whole turn,
    /// counted from the top, and at most a whole turn apart. If `to` is smaller than `from`, the
    /// arc goes through the top.
    pub fn arc(&mut self, paint: Paint, line: LineStyle, (centre, radius): (Point, f64), from: f64, to: f64) {
        let (start, end) = (on_circle(centre, radius, from), on_circle(centre, radius, to));
        self.cover(Area::square(centre, radius));
        let large = u8::from((to - from).rem_euclid(1.0) > 0.5);
        let radius = number(radius);
        let (start, end) = (numbers(start), numbers(end));
        self.open_path(paint, line, &format!("M{start}A{radius} {radius} 0 {large} 1 {end}"));
    }

    /// Draws text with a background around its letters, so that the text is readable on top of
    /// lines.
    pub fn text(&mut self, paint: Paint, lettering: Lettering, point: Point, anchor: Anchor, text: &str) {
        let (height, letter) = lettering.extent();
        #[expect(clippy::cast_precision_loss, reason = "a label has no 2^53 letters")]
        let width = letter * text.chars().count() as f64;
        let (left, word) = match anchor {
            Anchor::Start => (point.x, "start"),
            Anchor::Middle => (point.x - width / 2.0, "middle"),
            Anchor::End => (point.x - width, "end"),
        };
        // The area reaches from the top of a capital letter to the bottom of a `g`.
        let area =
            Area { left, top: point.y - 0.76 * height, right: left + width, bottom: point.y + 0.22 * height };
        self.cover(area);
        self.labels.push((area, text.to_owned()));
        let (class, paint, text) = (lettering.class(), paint.name, escaped(text));
        let (x, y) = (number(point.x), number(point.y));
        self.write(format_args!(
            "<text class=\"halo {class} fill-{paint} stroke-paper\" x=\"{x}\" y=\"{y}\" text-anchor=\"{word}\">{text}</text>"
        ));
    }

    /// Draws text whose centre is at the point.
    pub fn centred(&mut self, paint: Paint, lettering: Lettering, point: Point, text: &str) {
        self.text(paint, lettering, point.moved(0.0, 4.0), Anchor::Middle, text);
    }

    /// Draws small text that explains an axis, a mark or a number.
    pub fn note(&mut self, point: Point, anchor: Anchor, text: &str) {
        self.text(Paint::QUIET, Lettering::Small, point, anchor, text);
    }

    /// Returns the faults of the layout: shapes beyond the edges, and overlapping labels.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let Area { left, top, right, bottom } = self.bounds;
        if left < 0.0 || top < 0.0 || right > self.width || bottom > self.height {
            faults.push(format!(
                "{:?} extends beyond the drawing of {} x {}",
                self.bounds, self.width, self.height
            ));
        }
        for (number, (area, text)) in self.labels.iter().enumerate() {
            for (other, words) in &self.labels[..number] {
                if area.overlaps(other) {
                    faults.push(format!("{text:?} overlaps {words:?}"));
                }
            }
        }
        faults
    }
}

fn path_through(points: &[Point]) -> String {
    let mut path = String::new();
    for (index, &point) in points.iter().enumerate() {
        path.push(if index == 0 { 'M' } else { 'L' });
        path.push_str(&numbers(point));
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::at;

    #[test]
    fn a_drawing_consists_of_elements_with_classes() {
        let mut drawing = Drawing::new(100.0, 50.0);
        drawing.line(Paint::INK, LineStyle::Dashed, at(0.0, 1.04), at(10.26, -0.01));
        drawing.text(Paint::QUIET, Lettering::Small, at(5.0, 20.0), Anchor::Start, "a < b & c");
        assert_eq!(
            drawing.body(),
            "<path class=\"open line dashed stroke-ink\" d=\"M0 1L10.3 0\"/>\n\
             <text class=\"halo small fill-quiet stroke-paper\" x=\"5\" y=\"20\" text-anchor=\"start\">\
             a &lt; b &amp; c</text>\n"
        );
    }

    #[test]
    fn cut_off_shapes_and_overlapping_labels_are_reported() {
        let mut drawing = Drawing::new(100.0, 50.0);
        drawing.text(Paint::INK, Lettering::Small, at(0.0, 20.0), Anchor::Start, "seven letters");
        assert_eq!(drawing.faults(), Vec::<String>::new());
        drawing.text(Paint::INK, Lettering::Small, at(90.0, 22.0), Anchor::End, "too near");
        assert_eq!(drawing.faults(), ["\"too near\" overlaps \"seven letters\""]);
        drawing.dot(Paint::INK, at(98.0, 10.0), 3.0);
        assert!(drawing.faults()[0].ends_with("beyond the drawing of 100 x 50"), "{:?}", drawing.faults());
    }
}
