//! Commands that build something and run it: the demo, the benchmarks, the guests, and the runs
//! that search for faults.

pub mod bench;
pub mod demo;
pub mod fuzz;
pub mod inject;
pub mod soak;
pub mod vm;
