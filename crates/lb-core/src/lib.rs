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
//! - which endpoints a connect may choose ([`health`]);
//! - how load moves weights ([`control`]), in which order connects take the endpoints
//!   ([`schedule`]), and by which rules ([`rules`]);
//! - the result as one value with the ordered steps towards it ([`plan`]), and the place of each
//!   table in the kernel's array ([`arena`]);
//! - the single entry point for facts ([`balancer`]), and how the daemon puts lists in force
//!   ([`feed`]);
//! - how the kernel programs treat failing backends, for the planner and for tests ([`ejection`]);
//! - backends' reports, as the decisions use them ([`reports`]).
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
