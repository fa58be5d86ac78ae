//! The client's side: the reports of backends, as far as they are believed. [`senders`] decides
//! which backends to poll and when; [`reported`] holds the state of one backend.
//!
//! Times in a report are durations, which are added to this host's clock: clocks of different hosts
//! are never compared. The module does no I/O and draws no random numbers: datagrams, times and
//! nonces are arguments and results.

pub mod reported;

pub mod senders;
