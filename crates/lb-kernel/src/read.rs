//! Observations of clients, whether or not a daemon runs.
//!
//! The modules are: [`snapshot`], from which everything is shown; the open [`flows`]; the
//! [`records`] of flows, and [`reclaim`] for records without a socket, which uses the
//! [`namespaces`]' lists of sockets and the [`holders`] of sockets; the network namespace of a
//! client ([`client_namespace`]); sockets that are not balanced ([`uncovered`]); and foreign
//! programs on the same cgroups ([`neighbours`]).

pub mod client_namespace;

pub mod flows;

pub mod holders;

pub mod namespaces;

pub mod neighbours;

pub mod reclaim;

pub mod records;

pub mod snapshot;

pub mod uncovered;
