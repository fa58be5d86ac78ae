//! A kernel in memory: what the daemon needs of the kernel without one, for tests.
//!
//! Maps are arrays in this process (`memory`), links are a table (`client`), and [`FakeKernel::connect`] and its methods
//! that take a [`FakeFlow`] follow the steps of the kernel programs by the code that these share with the host
//! (`lb_common`: the table of addresses, picks, ejection, load). Time stands still until [`FakeKernel::pass`]. Any operation
//! that the real kernel may refuse can be made to fail, see [`faults`].
//!
//! It has one CPU, no readers that a wait is for, no overflow of the flow table, no datagrams, and no programs of network interfaces. Local
//! tests show on the real kernel what depends on these. The scenarios of `lb_contract` run on both.

pub mod faults;

mod memory;

mod maps;

mod client;

mod programs;

pub use client::{FakeCgroup, FakeKernel};
pub use faults::FaultInjection;
pub use programs::{Connect, FakeFlow};
