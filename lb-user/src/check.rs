//! `socklb check`: everything that can be known of a configuration without touching the kernel: its own faults, those of
//! the endpoint files it names, and whether what they hold fits the limits.

use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;

use crate::commands::{Failure, balancer_of, file_sources, offers};
use crate::config::{self, ConfigError, Host, NamedFile};
use crate::diagnostic::{Faults, Report};
use crate::print;
use crate::source::{self, SourceError};

/// Checks the configuration at `file`, and tells all faults at once.
///
/// # Errors
/// If it cannot be read, or does not fit its limits.
pub fn run(file: &Path) -> Result<ExitCode, Failure> {
    let path = std::path::absolute(file)?;
    let mut faulty: Vec<Faults> = Vec::new();
    let look = |files: &[NamedFile], services: &[SocketAddr], report: &mut Report<'_>| {
        for NamedFile { service, path, span } in files {
            match source::read_list(path, *service, services) {
                Ok(_) => {}
                // Of a file that several services name, as TCP and UDP at one address do, what they have in common once.
                Err(SourceError::Invalid(faults)) if faulty.contains(&faults) => {}
                Err(SourceError::Invalid(faults)) => faulty.push(faults),
                // One that cannot be read has no place of its own: the configuration's is told.
                Err(error) => report.add(span.clone(), crate::chain(&error), None),
            }
        }
    };
    let config = match config::read_with(&path, &Host, look) {
        Ok(config) => Some(config),
        Err(ConfigError::Faulty(faults)) => {
            faulty.insert(0, faults);
            None
        }
        Err(error) => return Err(error.into()),
    };
    faulty.iter().for_each(print::faults);
    let Some(config) = config.filter(|_| faulty.is_empty()) else { return Ok(ExitCode::FAILURE) };
    // What the files hold must fit the limits, too.
    let offers = offers(&config.clients, &file_sources(&config))?;
    for client in &config.clients {
        balancer_of(&config, client, &offers)?;
    }
    print::text(&format!("{}: ok\n", file.display()))?;
    Ok(ExitCode::SUCCESS)
}
