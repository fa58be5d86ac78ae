//! The contract between socklb's kernel programs and its daemon.
//!
//! The crate contains the definitions on which both sides must agree: byte order, map keys and
//! values with their limits, and the functions over this data, such as the pick of a backend. These
//! definitions must not depend on how a table is computed or how a map is written.
#![no_std]
#![warn(missing_docs)]
// Inline assembly for the target of the kernel programs is not stable yet.
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
