//! Code that the two drivers of the tests share: `cargo xtask test` on the host, and `vm` for
//! guests.
//!
//! This crate reads the table of test modules and the events of a test program, and determines the
//! consequences of a failure. It starts no program.

mod events;

mod modules;

mod second_try;

mod summary;

pub use events::{ARGUMENTS, Event, LIST, Run, VARIABLE, names};
pub use modules::{Class, Modules, Phase};
pub use second_try::{RETRIES, Retried, retry};
pub use summary::{Failed, Ran, Summary};
