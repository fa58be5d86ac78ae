//! Access to the host, for the daemon and the agent. The crate makes no decisions for them.
//!
//! In reading order: which directories and processes are trusted ([`trust`]), binding a Unix
//! socket, and addresses for UDP sockets ([`socket`]), changes in directories ([`watch`]), messages
//! to the service manager ([`notify`]), logging ([`log`]), reading whole files ([`regular_file`]),
//! files for a later start ([`store`]), and waking a thread ([`wake`]). [`watch`] and [`notify`]
//! have their own threads. A call that accesses the file system blocks while the file system
//! blocks.

pub mod log;
pub mod notify;
pub mod regular_file;
pub mod socket;
pub mod store;
pub mod trust;
pub mod wake;
pub mod watch;
