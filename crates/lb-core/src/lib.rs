//! socklb's decisions, as pure functions of facts: no I/O, no clock, no randomness, no async, no
//! unsafe.
//!
//! In reading order:
//!
//! - the operator's configuration ([`service`]) and the lists that sources report ([`endpoint`]);
//! - which endpoints this client task uses ([`subset`], [`membership`]), how many if that number
//!   follows the task's load ([`load_band`]), and how much the task sends to each ([`weights`]);
//! - where endpoints live in the kernel ([`ids`], [`slots`]), and when a slot is free again
//!   ([`grace_period`]);
//! - which endpoints connect may choose ([`health`]);
//! - how load moves weights ([`control`]), in which order connect takes the endpoints
//!   ([`schedule`]), and by which rules ([`rules`]);
//! - all of that as one value with the ordered steps towards it ([`plan`]), and where each table
//!   lies ([`arena`]);
//! - the single entry point for facts ([`balancer`]), and how the daemon's lists come into force
//!   ([`feed`]);
//! - what the kernel programs do with failing backends, for the planner and for tests
//!   ([`ejection`]);
//! - what the decisions know of backends' reports ([`reports`]).
#![forbid(unsafe_code)]
#![warn(missing_docs)]

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

pub mod reports;
