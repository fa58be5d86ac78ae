//! Points and areas of a drawing, in its units.
//!
//! The origin is the upper left corner and y grows downwards, as in SVG. This module must not
//! depend on shapes.

/// A point of a drawing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// The distance from the left edge.
    pub x: f64,
    /// The distance from the upper edge.
    pub y: f64,
}

pub const fn at(x: f64, y: f64) -> Point {
    Point { x, y }
}

impl Point {
    /// The point that is this far to the right of this point, and this far below it.
    pub const fn moved(self, right: f64, down: f64) -> Self {
        at(self.x + right, self.y + down)
    }
}

/// The point on a circle at `turn` of a whole turn (0 to 1), clockwise from the top.
pub fn on_circle(centre: Point, radius: f64, turn: f64) -> Point {
    let angle = std::f64::consts::TAU * turn;
    at(centre.x + radius * angle.sin(), centre.y - radius * angle.cos())
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Area {
    pub left: f64,
    /// Upper edge.
    pub top: f64,
    pub right: f64,
    /// Lower edge.
    pub bottom: f64,
}

impl Area {
    /// The square whose sides are at the distance `half` from its centre.
    pub const fn square(Point { x, y }: Point, half: f64) -> Self {
        Self { left: x - half, top: y - half, right: x + half, bottom: y + half }
    }

    /// Returns whether the two areas share more than an edge.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.left < other.right
            && other.left < self.right
            && self.top < other.bottom
            && other.top < self.bottom
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_turn_ends_on_the_right() {
        let point = on_circle(at(10.0, 10.0), 5.0, 0.25);
        assert_eq!(
            (format!("{:.3}", point.x), format!("{:.3}", point.y)),
            ("15.000".to_owned(), "10.000".to_owned())
        );
    }
}
