//! The hooks, one file each: they read a call's context, act on it, and return the verdict.
//!
//! They must not choose backends themselves (`decide`), or store records (`flow`).

pub mod connect;

pub mod sendmsg;

pub mod peer;

pub mod tcp;

pub mod release;

pub mod holders;
