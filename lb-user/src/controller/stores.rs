//! Files that the daemon writes: the state for the next start, and the files that Envoy reads.

pub mod envoy;
pub mod files;
pub mod hosts;
pub mod loads;
