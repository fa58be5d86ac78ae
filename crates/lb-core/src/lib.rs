//! socklb's decisions, as pure functions of facts: no I/O, no clock, no randomness, no async, no unsafe.
//!
//! In reading order: what the operator asked for ([`service`]) and what sources report ([`endpoint`]); which endpoints
//! this client task uses ([`subset`], [`membership`]), how many of them if that follows its load ([`load_band`]), and how much it sends to
//! each ([`weights`]); where they live in the
//! kernel ([`ids`], [`slots`]) and when a slot is free again ([`grace_period`]); whether they may be chosen
//! ([`health`]); how load moves weights ([`control`]), in which order connect takes them ([`schedule`]) and by which rules ([`rules`]); all of it as one
//! value and the ordered steps towards it ([`plan`]), and where each table lies ([`arena`]); the one door through which
//! facts come in ([`balancer`]); how the daemon's lists come into force ([`feed`]); and, for the planner and for tests, what
//! the kernel programs do with backends that fail ([`ejection`]); and what is known of backends' reports ([`reports`]).
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
