//! Results: their statistics, and how they are printed.

pub mod finding;

pub mod statistics;
