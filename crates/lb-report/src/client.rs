//! Whoever asks: what backends say of themselves, as far as it is believed. Whom to ask and when ([`senders`]), and what one of them has
//! said ([`reported`]).
//!
//! Times of a report are durations, which are added to this host's clock: no two hosts' clocks are compared. It does no I/O and
//! draws nothing: datagrams come in and go out as values, with the time and a nonce.

pub mod reported;

pub mod senders;
