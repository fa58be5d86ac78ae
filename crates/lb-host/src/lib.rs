//! Access to the host, for the daemon and for the agent, without any decision that belongs to one
//! of them.
//!
//! In reading order: which directories and processes are trusted ([`trust`]), the path of a Unix
//! socket ([`socket`]), changes in directories ([`watch`]), messages to the service manager
//! ([`notify`]), logging of resident programs ([`log`]), reading whole files ([`regular_file`]),
//! storage for a later start ([`store`]), and waking a thread ([`wake`]). Messages to the service
//! manager and changes in directories have threads of their own. A call that accesses the file
//! system may block as long as the file system does.

pub mod trust;

pub mod socket;

pub mod watch;

pub mod notify;

pub mod log;

pub mod regular_file;

pub mod store;

pub mod wake;
