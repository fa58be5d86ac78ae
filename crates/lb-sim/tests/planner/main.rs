//! All integration tests of the planner, in one program: fourteen programs took longer to compile
//! and to link.

mod band;
mod commands;
mod ejections;
mod failures;
mod figures;
mod fleet;
mod lists;
mod load;
mod load_faults;
mod load_operator;
mod rebalance;
mod report;
mod scenario_files;
mod shipped;
mod traffic;
mod unequal;
