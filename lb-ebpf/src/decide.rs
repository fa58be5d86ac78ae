//! Decides to which backend a call goes: the lookup of the service, the choice, and the tables that
//! it reads.
//!
//! It contains the code that connect and sendmsg share, and must not know either of them.

pub mod service;

pub mod verdict;

pub mod decision;

mod choose;

pub mod tables;
