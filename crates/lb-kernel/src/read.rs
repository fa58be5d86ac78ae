//! Observations of clients, whether or not a daemon runs.
//!
//! The modules are: the [`snapshot`] of a client's maps, which all output uses; the open [`flows`];
//! the [`records`] of flows; [`reclaim`], which frees records without a socket, with the lists of
//! sockets of network [`namespaces`] and the sockets that processes have open ([`holders`]); the
//! connections of flows that an operator [closes](close); the network namespace of a client
//! ([`client_namespace`]); sockets that are not balanced ([`uncovered`]); and foreign programs on
//! the same cgroups ([`neighbours`]).

pub mod client_namespace;

pub mod close;

pub mod flows;

pub mod holders;

pub mod namespaces;

pub mod neighbours;

pub mod reclaim;

pub mod records;

pub mod snapshot;

pub mod uncovered;
