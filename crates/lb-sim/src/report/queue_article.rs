//! The sections on the article "Reinventing Backend Subsetting at Google" (ACM Queue), in reading
//! order.

use super::{numbers, palette, section};

pub mod balance;
mod cloud;
pub mod one_more;
pub mod resize;
mod resize_errors;
pub mod rings;
pub mod utilization;
pub mod weights;
