//! What is found out about clients by looking, whether or not a daemon runs.
//!
//! What all of it is shown from ([`snapshot`]); the open [`flows`]; [`records`] of flows, and the [`reclaim`]ing of those whose socket is
//! gone, by the [`namespaces`]' lists of sockets and by its [`holders`]; in which network namespace a client is ([`client_namespace`]);
//! the sockets that are not balanced ([`uncovered`]), and programs of others on the same cgroups ([`neighbours`]).

pub mod client_namespace;

pub mod flows;

pub mod holders;

pub mod namespaces;

pub mod neighbours;

pub mod reclaim;

pub mod records;

pub mod snapshot;

pub mod uncovered;
