//! The place of backends, rules and tables in the kernel's arrays, and when a place is free again.

pub mod arena;
pub mod cursor;
pub mod grace_period;
pub mod rules;
pub mod schedule;
pub mod slots;
