//! Decides to which backend a call goes: the lookup of the service, the choice of a backend, and
//! the access to the tables.
//!
//! Connect and sendmsg share this code, which must depend on neither of them.

pub mod service;

pub mod verdict;

pub mod decision;

mod choose;

pub mod tables;
