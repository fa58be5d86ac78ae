//! Figures as SVG: shapes with classes, a palette for light and dark pages, axes, and the document
//! around a drawing.
//!
//! The planner's report and the benchmark's picture share this code. The code has two features that
//! SVG crates do not offer. Colours are set by class, so that a figure follows the colours of the
//! reader's page without scripts. The positions of labels and shapes are recorded, so that tests
//! can find cut-off shapes without a browser. The crate `svg` would replace only the few lines that
//! format elements, and its attributes are untyped. This crate must not depend on the meaning of a
//! drawing, or on another crate.
#![forbid(unsafe_code)]

pub mod chart;
pub mod drawing;
pub mod figure;
pub mod geometry;
pub mod palette;

pub use chart::{Axis, HEIGHT, Plot, Scale, WIDTH};
pub use drawing::{Anchor, Drawing, Lettering, LineStyle, escaped};
pub use figure::Figure;
pub use geometry::{Area, Point, at, on_circle};
pub use palette::Paint;
