//! The protocol by which backends report their state: both ends of it, and the kernel programs
//! between them. The crate uses no socket, file, clock or random number: datagrams and times are
//! arguments and results.
//!
//! In reading order: the datagram and the rules for believing it ([`wire`]); the programs of
//! network interfaces, which find it in a frame ([`frame`]), process it before the daemon
//! ([`receive`]), and answer it ([`answer`], [`respond`]) for the agent. Kernel programs use only
//! these modules, without `std`. On hosts: names of backends ([`name`]), keys ([`keys`]), the
//! places of verdicts in the kernel ([`ids`]), the client, which sends requests ([`client`]), and
//! the agent, which answers them ([`agent`]).
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
