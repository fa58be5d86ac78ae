//! Access to the kernel: contexts of programs, the clock, and atomic instructions. The module must
//! not depend on services.

pub mod cast;

pub mod context;

pub mod sock_ops;

pub mod socket;

pub mod clock;

pub mod atomic;

pub mod global_function;

pub mod log;
