//! The code of the hooks, one file per kind: the code reads a call's context, acts on it, and
//! returns the verdict.
//!
//! It must not choose backends itself (`decide` does), and must not store records itself (`flow`
//! does).

pub mod connect;

pub mod sendmsg;

pub mod peer;

pub mod tcp;

pub mod release;

pub mod holders;
