//! The client's side: polls backends and processes their reports. [`senders`] decides which
//! backends to poll and when; [`reported`] is the state of one backend.
//!
//! A report contains durations and no times. The client adds these durations to the time of its own
//! host, so the clocks of two hosts are never compared. The module does no I/O and draws no random
//! numbers: datagrams, times and nonces are arguments and results.

pub mod reported;

pub mod senders;
