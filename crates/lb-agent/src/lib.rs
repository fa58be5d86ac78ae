//! The agent that runs beside backends: it reports the state of each backend to clients that have
//! the backend's key and request a report. The agent needs no kernel programs and no root, except
//! for `[xdp]`.
//!
//! In reading order: a backend's name as text ([`name`]), the keys that authenticate reports
//! ([`keys`]), health checks ([`check`]) and the measurement of load ([`utilization`]); the
//! configuration ([`config`]) and the number of this start ([`incarnation`]); the running agent
//! ([`serve`]), its state ([`status`], [`metrics`]) and both ends of its control socket
//! ([`control`]).
//!
//! After these: how a program reports a backend's readiness ([`reporter`]), how a backend's command
//! is run from its start to its end ([`run`]), and the commands ([`cli`]). The format of reports is
//! in `lb-report`.

pub mod check;
pub mod cli;
pub mod config;
pub mod control;
pub mod incarnation;
pub mod keys;
pub mod metrics;
pub mod name;
pub mod reporter;
pub mod run;
pub mod serve;
pub mod status;
pub mod utilization;
