//! The errors of commands, as text for people, and the test for a missing privilege.

use std::fmt;
use std::io;

use lb_agent::config::ConfigError;
use lb_kernel::DatapathError;

use crate::config::ConfigFileError;
use crate::source::SourceError;
use lb_document::diagnostic::Diagnostics;
pub use lb_document::diagnostic::chain;

#[derive(Debug)]
pub enum CommandFailure {
    /// Faults of files, shown with the lines that contain them.
    Faults(Diagnostics),
    Other(anyhow::Error),
}

impl fmt::Display for CommandFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Faults(faults) => write!(f, "{faults}"),
            Self::Other(error) => write!(f, "{error:#}"),
        }
    }
}

impl<E: Into<anyhow::Error>> From<E> for CommandFailure {
    fn from(error: E) -> Self {
        let error = match error.into().downcast::<ConfigFileError>() {
            Ok(ConfigFileError::Faulty(faults)) => return Self::Faults(faults),
            Ok(error) => anyhow::Error::new(error),
            Err(error) => error,
        };
        let error = match error.downcast::<ConfigError>() {
            Ok(ConfigError::Faulty(faults)) => return Self::Faults(faults),
            Ok(error) => anyhow::Error::new(error),
            Err(error) => error,
        };
        match error.downcast::<SourceError>() {
            Ok(SourceError::Invalid(faults)) => Self::Faults(faults),
            Ok(error) => Self::Other(anyhow::Error::new(error)),
            Err(error) => Self::Other(error),
        }
    }
}

/// Whether one of the error's causes is a missing privilege.
pub fn is_permission(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<DatapathError>().is_some_and(DatapathError::is_permission)
            || cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::PermissionDenied)
    })
}
