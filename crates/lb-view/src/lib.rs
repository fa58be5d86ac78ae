//! The documents that socklb shows. Each document is a type with a JSON form and a text form. The
//! commands, the daemon's socket, the metrics and the tests use them.
//!
//! In reading order: the status ([`status`]) with its backends ([`backend`]) and faults
//! ([`fault`]), active flows ([`flows`]), why a task has its subset ([`explanation`]), the
//! diagnosis of a host ([`diagnosis`]), the coverage of a process ([`coverage`]), the configuration
//! ([`configured`]) and the changes that another configuration would make ([`comparison`]), and the
//! text form of all of them ([`text`]). This crate reads no map, no file and no clock: its callers
//! supply the values.

mod answers;
pub mod backend;
pub mod comparison;
pub mod configured;
pub mod diagnosis;
pub mod explanation;
pub mod fault;
pub mod filter;
pub mod flows;
pub mod load;
pub mod status;
pub mod text;

pub use answers::{close_result, coverage, overrides, readmission, source};
