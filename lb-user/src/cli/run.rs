//! `socklb run`: starts the daemon.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use lb_core::feed::ReadFailure;
use lb_document::LogFormat;
use lb_kernel::trust::{self, Untrusted};

use super::{PathOptions, read_config, read_config_in};
use crate::config::HostEnvironment;
use crate::config::addresses::{AddressSource, KnownAddresses, WithAddresses};
use crate::daemon;
use crate::error::{CommandFailure, is_permission};
use crate::output::print;
use crate::source::Stamp;
use lb_view::text::Style;

/// Runs the daemon until a signal ends it.
///
/// # Errors
/// If the daemon cannot start.
pub fn run(files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let (read, waiting) = mpsc::channel::<()>();
    let name = files.file().to_owned();
    // The file may be on a file system that does not answer. The daemon then waits for the file
    // system, because it can do nothing without a configuration.
    let report_waiting = move || {
        if waiting.recv_timeout(Duration::from_secs(2)) == Err(mpsc::RecvTimeoutError::Timeout) {
            print::message(format_args!("{} does not answer yet; waiting for it", name.display()));
        }
    };
    // If the thread cannot be started, the message does not appear.
    let _ = std::thread::Builder::new().name("waiting".to_owned()).spawn(report_waiting);
    // The stamp is taken before the file is read, so that the daemon detects any later change of
    // the file.
    let stamp = Stamp::at(files.file());
    let config = read_config(files)?;
    drop(read);
    check_state(&config.paths.state)?;
    lb_host::log::init(config.daemon.log_format == LogFormat::Json, Style::for_stderr().colour);
    let again = files.clone();
    let reread = move |known: &KnownAddresses| {
        let env = WithAddresses { env: &HostEnvironment, addresses: AddressSource::Known(known) };
        read_config_in(&again, &env).map_err(|failure| failure_of(&failure))
    };
    match daemon::run(config, stamp, Arc::new(reread)) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        // A service manager does not restart the daemon after the exit code for a missing
        // privilege. If the process has its privileges, a permission error may be temporary, for
        // example because another process uses a hook or a directory. The daemon then exits with
        // another code.
        Err(error) if is_permission(&error) && !lb_kernel::lacks_privilege() => {
            Err(anyhow::anyhow!("{error:#}").into())
        }
        Err(error) => Err(error.into()),
    }
}

/// Classifies a failure to reload the configuration: a missing or faulty file is
/// [`ReadFailure::Faulty`], any other failure is [`ReadFailure::Unread`].
fn failure_of(failure: &CommandFailure) -> ReadFailure {
    let is_missing = |error: &(dyn std::error::Error + 'static)| {
        error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    match failure {
        CommandFailure::Other(error) if !error.chain().any(is_missing) => {
            ReadFailure::Unread(failure.to_string())
        }
        CommandFailure::Other(_) | CommandFailure::Faults(_) => ReadFailure::Faulty(failure.to_string()),
    }
}

/// Checks that the state directory is trusted, because the daemon uses the lists in this directory
/// if it cannot read an endpoint file. If the directory cannot be created, the error appears later,
/// when the daemon stores a list. If the directory's file system does not answer within 2 s, the
/// check passes.
fn check_state(directory: &Path) -> Result<(), Untrusted> {
    fn look(path: &Path) -> Result<(), Untrusted> {
        match trust::make_directory(path) {
            Ok(()) => trust::check_directory(path, "--state"),
            Err(_) => Ok(()),
        }
    }
    let (seen, looked) = mpsc::channel();
    let path = directory.to_owned();
    let apart = std::thread::Builder::new().name("state".to_owned()).spawn(move || {
        let _ = seen.send(look(&path));
    });
    if apart.is_err() {
        return look(directory);
    }
    looked.recv_timeout(Duration::from_secs(2)).unwrap_or(Ok(()))
}
