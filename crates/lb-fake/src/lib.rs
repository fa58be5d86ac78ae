//! A simulated kernel, which replaces the real kernel in tests of the daemon. All its state is in
//! memory.
//!
//! Maps are arrays in this process (`memory`), and links are entries of a table (`client`).
//! [`FakeKernel::connect`], [`FakeKernel::send_datagram`], and the methods with a [`FakeFlow`] as
//! argument, carry out the same steps as the kernel programs. They run the code that the kernel
//! programs share with the host (`lb_common`: the VIP table, picks, ejection, load). Flow records
//! are in `records`. Time does not pass until a call of [`FakeKernel::pass`]. Any operation that
//! the real kernel may refuse can be made to fail, see [`faults`].
//!
//! The simulated kernel has two CPUs, one network namespace, no connected datagram sockets, no
//! answers to datagrams, and no programs of network interfaces. The tests in `tests/local` cover
//! these on the real kernel. The scenarios of `lb_contract` run on both kernels.

mod client;
pub mod faults;
mod maps;
mod memory;
mod programs;
mod records;

pub use client::{FakeCgroup, FakeKernel};
pub use faults::FaultInjection;
pub use programs::{Connect, FakeFlow, FakeSocket};
