//! The protocol by which backends report their state: the code of its two ends, and of the kernel
//! programs between them. The crate uses no socket, file, clock or random number: datagrams and
//! times are arguments and results.
//!
//! In reading order: the datagram ([`wire`]); how it is found in a frame ([`frame`]); the rules by
//! which it is accepted, and the program that processes it before the daemon ([`receive`]); the
//! program that answers it in place of the agent ([`answer`], [`respond`]). Kernel programs use
//! only these modules, without `std`. The daemon and the agent also use the names of backends
//! ([`name`]), keys ([`keys`]), report ids ([`ids`]), the client, which sends requests
//! ([`client`]), and the agent's side, which answers requests ([`agent`]).
#![cfg_attr(not(feature = "std"), no_std)]
#![warn(missing_docs)]

pub mod wire;

pub mod frame;

pub mod receive;

pub mod answer;

pub mod respond;

#[cfg(feature = "std")]
pub mod name;

#[cfg(feature = "std")]
pub mod keys;

#[cfg(feature = "std")]
pub mod ids;

#[cfg(feature = "std")]
pub mod client;

#[cfg(feature = "std")]
pub mod agent;

#[cfg(feature = "std")]
pub mod fixtures;

#[cfg(test)]
mod moment;
