//! Which endpoints a client task uses, how many, and how much it sends to each.

pub mod load_band;
pub mod membership;
pub mod subset;
pub mod weights;
