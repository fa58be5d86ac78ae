//! Endpoint lists, from the notice of a change to the delivery to clients.

pub mod addresses;
pub mod hosts;
pub mod reads;
pub mod remote;
pub mod sources;
