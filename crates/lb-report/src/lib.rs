//! The protocol by which backends report how they are, both ends of it and the kernel programs between them: without a socket, a file, a
//! clock or a random number. Datagrams come in and go out as values, with the time.
//!
//! In reading order: the datagram and what is believed of it ([`wire`]); the programs of network interfaces, which find it in a frame
//! ([`frame`]), take it in for the daemon ([`receive`]), and answer it ([`answer`], [`respond`]) for the agent. Kernel programs are built
//! with these alone, without `std`. On hosts: what backends are
//! called ([`name`]), the keys ([`keys`]), the places of verdicts in the kernel ([`ids`]), whoever asks
//! ([`client`]), and whoever is asked ([`agent`]).
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
