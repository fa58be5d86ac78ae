//! The code of the hooks, one file per kind of hook: it reads the context of a call or event, and
//! applies the result.
//!
//! This code must not choose backends (the module `decide` does), and must not store records (the
//! module `flow` does).

pub mod connect;

pub mod sendmsg;

pub mod peer;

pub mod tcp;

pub mod release;

pub mod holders;
