//! What is remembered and counted of the sockets that were sent to backends.

pub mod record;

pub mod datagrams;

pub mod tally;
