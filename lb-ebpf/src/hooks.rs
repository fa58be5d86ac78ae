//! The hooks, a file each: what is read of a call's context, what is done about it, and the verdict.
//!
//! They choose nothing themselves (`decide`), and keep no records (`flow`).

pub mod connect;

pub mod sendmsg;

pub mod peer;

pub mod tcp;

pub mod release;

pub mod holders;
