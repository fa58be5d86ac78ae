//! What the daemon and the agent need of the host that they run on, and what neither of them decides.
//!
//! In reading order: which directories and processes are believed ([`trust`]), how the path of a Unix socket is taken
//! ([`socket`]), what changes in directories ([`watch`]), what the service manager is told ([`notify`]), where resident programs log ([`log`]), how files are
//! read whole ([`regular_file`]), where what a later start needs is stored ([`store`]), and how a thread is woken ([`wake`]). Nothing here holds up a caller that must not wait: what may block has a thread of its own.

pub mod trust;

pub mod socket;

pub mod watch;

pub mod notify;

pub mod log;

pub mod regular_file;

pub mod store;

pub mod wake;
