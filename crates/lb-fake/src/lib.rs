//! A kernel in memory, which replaces the daemon's real kernel in tests.
//!
//! Maps are arrays in this process (`memory`), and links are a table (`client`).
//! [`FakeKernel::connect`] and the methods of [`FakeKernel`] that take a [`FakeFlow`] follow the
//! steps of the kernel programs, with the code that these share with the host (`lb_common`: the VIP
//! table, picks, ejection, load). Time stands still until [`FakeKernel::pass`]. Any operation that
//! the real kernel may refuse can be made to fail, see [`faults`].
//!
//! It has one CPU, no readers to wait for, no overflow of the flow table, no datagrams, and no
//! programs of network interfaces. Local tests cover these on the real kernel. The scenarios of
//! `lb_contract` run on both.

pub mod faults;

mod memory;

mod maps;

mod client;

mod programs;

pub use client::{FakeCgroup, FakeKernel};
pub use faults::FaultInjection;
pub use programs::{Connect, FakeFlow};
