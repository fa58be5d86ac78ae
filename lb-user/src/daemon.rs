//! The daemon: a shell around the [`controller`](crate::controller). The controller makes the
//! decisions; the shell waits for events and executes effects. If an effect needs several calls,
//! pure functions evaluate the results in between. The shell itself decides only about its own
//! threads, time limits and calls.
//!
//! In reading order: the loop that waits for events and executes effects (`event_loop`), the start
//! and the end (`start`), watched directories (`watches`), files, whose file system may not answer
//! (`file_io`), the reading of lists (`lists`) and configurations (`loader`), the servers that send
//! lists (`remotes`), the opening of clients (`opener`), stored files and the files that Envoy
//! reads (`files`), and probes, reports and network interfaces (`network`, `receivers`).

mod event_loop;

mod start;

mod watches;

mod file_io;

mod lists;

mod remotes;

mod loader;

mod opener;

mod files;

mod network;

mod receivers;

mod memory;

use std::sync::Arc;

use lb_core::feed::ReadFailure;

#[cfg(test)]
pub use self::event_loop::Worker;
pub use self::event_loop::run;
pub use self::file_io::HostFiles;
#[cfg(test)]
pub use self::file_io::{FileIo, Files};
pub use self::files::set_aside;
#[cfg(test)]
pub use self::lists::ListReader;
#[cfg(test)]
pub use self::remotes::Servers;
#[cfg(test)]
pub use self::watches::Watches;
use crate::config::Config;
use crate::config::addresses::KnownAddresses;

/// Reads the configuration again, with the options of the command line and the given addresses of
/// services.
pub type Reread = Arc<dyn Fn(&KnownAddresses) -> Result<Config, ReadFailure> + Send + Sync>;
