//! Places and areas of a drawing.

/// A place in a drawing, in its units, from its upper left corner.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// To the right.
    pub x: f64,
    /// Downwards.
    pub y: f64,
}

/// A place in a drawing.
pub const fn at(x: f64, y: f64) -> Point {
    Point { x, y }
}

/// The place that is `share` of a turn after the top of a circle, clockwise.
pub fn on_circle(centre: Point, radius: f64, share: f64) -> Point {
    let angle = std::f64::consts::TAU * share;
    at(centre.x + radius * angle.sin(), centre.y - radius * angle.cos())
}

/// A rectangle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Area {
    /// Left edge.
    pub left: f64,
    /// Upper edge.
    pub top: f64,
    /// Right edge.
    pub right: f64,
    /// Lower edge.
    pub bottom: f64,
}

impl Area {
    /// Whether the two share more than an edge.
    #[cfg(test)]
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
        let place = on_circle(at(10.0, 10.0), 5.0, 0.25);
        assert_eq!(
            (format!("{:.3}", place.x), format!("{:.3}", place.y)),
            ("15.000".to_owned(), "10.000".to_owned())
        );
    }
}
