//! Figures as SVG: shapes with classes, a palette for light and dark pages, axes, and the document around a drawing.
//!
//! One writer for the planner's report and the benchmark's picture. It is our own because what it adds to text is not
//! what SVG crates offer: colours by class, so that a figure follows the reader's page without scripts, and a record of
//! where labels and shapes lie, so that tests find what is cut off without a browser. The crate `svg` would replace
//! only the few lines that format elements, by builders with untyped attributes. Must not know what is drawn, nor
//! depend on another crate.
#![forbid(unsafe_code)]

pub mod geometry;

pub mod palette;

pub mod drawing;

pub mod chart;

pub mod figure;

pub use chart::{Axis, HEIGHT, Plot, Scale, WIDTH};
pub use drawing::{Anchor, Drawing, Lettering, LineStyle, escaped};
pub use figure::Figure;
pub use geometry::{Area, Point, at, on_circle};
pub use palette::Paint;
