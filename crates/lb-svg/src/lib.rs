//! Figures as SVG: shapes with classes, a palette for light and dark pages, axes, and the document
//! around a drawing.
//!
//! The planner's report and the benchmark's picture share this writer. SVG crates do not offer two
//! features that it has: colours by class, so that a figure follows the reader's page without
//! scripts, and a record of the positions of labels and shapes, so that tests detect cut-off ones
//! without a browser. The crate `svg` would replace only the few lines that format elements, with
//! builders that have untyped attributes. Must not know what is drawn, and must not depend on
//! another crate.
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
