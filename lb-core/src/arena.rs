//! The schedule arena: the store of entries that the tables of one client task share.

pub mod region;
