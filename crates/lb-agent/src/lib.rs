//! The agent beside backends: says how each of them is, to whoever has its key and asks. Needs no kernel programs and no root.
//!
//! In reading order: how a backend is named in text ([`name`]; what is reported of it is `lb-report`'s), the keys that reports are
//! authenticated with ([`keys`]), how health is checked ([`check`]) and load measured ([`utilization`]); the configuration
//! ([`config`]), which start this is ([`incarnation`]), and the agent at work ([`serve`]), how it is ([`status`], [`metrics`]) and
//! how it is spoken to ([`client`]); who says how a backend is ([`voice`]), the program that a backend is run by, from its start to
//! its end ([`run`]), and the commands ([`cli`]).

pub mod name;

pub mod keys;

pub mod check;

pub mod utilization;

pub mod config;

pub mod incarnation;

pub mod serve;

pub mod status;

pub mod metrics;

pub mod client;

pub mod voice;

pub mod run;

pub mod cli;
