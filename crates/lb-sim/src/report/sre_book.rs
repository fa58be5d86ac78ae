//! The sections on the book "Site Reliability Engineering". [`load`] is the last one of the report.

use super::{numbers, palette, panels, section};

pub mod book;

mod shuffles;

mod load_switch;

pub mod load;
