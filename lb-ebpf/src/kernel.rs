//! The kernel as the programs see it: contexts, the clock, and atomic instructions. It knows nothing of services.

pub mod cast;

pub mod context;

pub mod sock_ops;

pub mod socket;

pub mod clock;

pub mod atomic;

pub mod global_function;

pub mod log;
