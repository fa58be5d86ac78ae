//! The place in which a benchmark measures: listeners and agents of backends, keys, and a link.

pub mod announcer;

pub mod keys;

pub mod link;

pub mod listener;
