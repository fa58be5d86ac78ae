//! What socklb shows, as types with a form in JSON and one as text: for its commands, its socket, its metrics and its
//! tests.
//!
//! In reading order: the status ([`status`]) with its backends ([`backend`]) and faults ([`fault`]), active flows
//! ([`flows`]), why a subset is as it is ([`explanation`]), what may be wrong with a host ([`diagnosis`]), whether a
//! process is covered ([`coverage`]), what is configured ([`configured`]) and what another configuration would change
//! ([`comparison`]); and all of it for people ([`text`]). It reads no map, no file and no clock: its
//! callers fill the values in.

pub mod backend;

pub mod fault;

pub mod load;

pub mod readmission;

pub mod status;

pub mod filter;

pub mod flows;

pub mod explanation;

pub mod diagnosis;

pub mod coverage;

pub mod configured;

pub mod comparison;

pub mod text;
