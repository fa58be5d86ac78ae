//! The sections on Twitter's post "Deterministic Aperture", in reading order.

use super::{numbers, palette, panels, section};

pub mod aperture;

mod aperture_first;

mod aperture_rings;

pub mod aperture_over_time;
