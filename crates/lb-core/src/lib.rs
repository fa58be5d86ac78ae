//! socklb's decisions, as pure functions of facts: no I/O, no clock, no randomness, no async, no
//! unsafe code.
//!
//! In reading order:
//!
//! - the operator's configuration ([`service`]) and the lists that sources report ([`endpoint`]);
//! - which endpoints this client task uses ([`subset`], [`membership`]), the number of these
//!   endpoints if it follows the task's load ([`load_band`]), and how much the task sends to each
//!   ([`weights`]);
//! - which slots endpoints have in the kernel's arrays ([`ids`], [`slots`]), and when a slot is
//!   free again ([`grace_period`]);
//! - which endpoints a connect may choose ([`health`]);
//! - how load changes weights ([`control`]), in which order connects take the endpoints
//!   ([`schedule`]), and by which rules they choose one ([`rules`]);
//! - the desired state of the kernel's maps as one value, the ordered steps that lead to it
//!   ([`plan`]), and the place of each table in the kernel's array ([`arena`]);
//! - the single entry point for facts ([`balancer`]), and how the daemon puts lists in force
//!   ([`feed`]);
//! - when idle connections are closed, so that pools spread over all backends ([`rebalance`]);
//! - how the kernel programs treat failing backends, for the planner and for tests ([`ejection`]);
//! - the parts of backends' reports that the decisions use ([`reports`]).
#![forbid(unsafe_code)]
#![warn(missing_docs)]

#[macro_use]
mod named;
pub mod balancer;
pub mod control;
pub mod ejection;
pub mod endpoint;
pub mod feed;
pub mod health;
pub mod ids;
pub mod limits;
mod members;
pub mod plan;
pub mod rebalance;
pub mod reports;
pub mod service;
mod tables;

pub use members::{load_band, membership, subset, weights};
pub use tables::{arena, cursor, grace_period, rules, schedule, slots};
