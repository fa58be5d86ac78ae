//! The contract between socklb's kernel programs and its daemon.
//!
//! Only what *both* sides lay out or execute lives here: byte order, map keys and values with their limits, the one
//! function that picks a backend. It knows nothing of how a table is computed or how a map is written.
#![no_std]
#![warn(missing_docs)]
// Assembly of the kernel programs' target is not stable yet.
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

pub mod net;

pub mod abi;

pub mod constants;

pub mod vip_table;

pub mod ending;

pub mod load;

pub mod ejection;

pub mod pick;

pub mod ticks;
