//! Runs a backend's command from its start to its end. The backend is a lame duck until the command
//! is ready, and again before it ends ("Site Reliability Engineering", chapter 20, clean shutdown).
//!
//! In reading order: the options ([`Args`]); how a command ends ([`ProcessStatus`]); the pure state
//! machine that decides all actions ([`lifecycle`]); and the parts that execute the actions: the
//! processes and their groups, the terminal, the connections, the reports to the agent, and the one
//! loop (`driver`). While [`run`] is active, nothing else in this process may start children.

mod connections;
mod driver;
mod events;
mod group;
pub mod lifecycle;
mod options;
mod processes;
mod readiness_check;
mod report_task;
pub mod signal;
pub mod status;
mod terminal;

pub use events::Signals;
pub use options::{Args, LameDuckHook, ReadinessMethod};
pub use status::ProcessStatus;

use std::io;
use std::net::SocketAddr;

use lb_core::service::Protocol;

use self::connections::BackendListener;
use self::driver::RunDriver;
use self::processes::Processes;
use self::terminal::Terminal;
use crate::reporter::ReadinessReporter;

/// Runs a command as the backend at this address, and reports its readiness to the agent through
/// `reporter`. First handles the signals that have arrived already. Returns how the command ended,
/// for [`ProcessStatus::end`].
pub async fn run<V: ReadinessReporter + 'static>(
    args: Args,
    protocol: Protocol,
    address: SocketAddr,
    signals: Signals,
    reporter: V,
) -> ProcessStatus {
    let port = args.port.unwrap_or(address.port());
    let address = SocketAddr::new(address.ip(), port);
    let listener = BackendListener { protocol, address, is_alone: false };
    let Signals { events, tasks } = signals;
    let terminal = Terminal::in_foreground();
    let processes = match Processes::start(&args.command, terminal.as_ref()) {
        Ok(processes) => processes,
        Err(error) => {
            tracing::error!(command = ?args.command, %error, "cannot start the command");
            let is_there = error.kind() != io::ErrorKind::NotFound;
            return if is_there { ProcessStatus::NOT_STARTED } else { ProcessStatus::NOT_FOUND };
        }
    };
    RunDriver::new(args, listener, processes, terminal, events.sender, reporter)
        .run(events.receiver, tasks)
        .await
}
