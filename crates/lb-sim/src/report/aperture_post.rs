//! The sections on Twitter's post "Deterministic Aperture", in reading order.

use super::{numbers, palette, panels, section};

pub mod aperture;
mod aperture_first;
pub mod aperture_over_time;
mod aperture_rings;
