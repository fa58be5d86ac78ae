//! Which backend a call goes to: the look-up of the service, the choice, and the tables that it reads.
//!
//! What connect and sendmsg share is here; neither knows of the other.

pub mod service;

pub mod verdict;

pub mod decision;

mod choose;

pub mod tables;
