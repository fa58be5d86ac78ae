//! Records and counters of the sockets that were directed to backends.

pub mod record;

pub mod datagrams;

pub mod tally;
