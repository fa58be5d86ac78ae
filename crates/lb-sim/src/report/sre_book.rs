//! The sections on the book "Site Reliability Engineering". The report ends with the section
//! [`load`].

use super::{numbers, palette, panels, section};

pub mod book;
pub mod load;
mod load_switch;
mod shuffles;
