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

pub mod service;

pub mod limits;

pub mod ids;

pub mod endpoint;

pub mod subset;

pub mod weights;

pub mod load_band;

pub mod membership;

pub mod slots;

pub mod grace_period;

pub mod health;

pub mod control;

pub mod schedule;

pub mod rules;

pub mod plan;

pub mod balancer;

pub mod arena;

pub mod feed;

pub mod cursor;

pub mod ejection;

pub mod rebalance;

pub mod reports;
