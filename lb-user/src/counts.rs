//! Counts over time: the counts of the last minute ([`window`]), and flows with an end that no
//! program recorded ([`reclaimed`]).

pub mod reclaimed;
pub mod window;
