//! The configuration as a file: whether it can be read at all, and how far.
//!
//! What its text says is for [`lb_config`] to know.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use lb_host::regular_file;
use thiserror::Error;

use lb_config::{Config, MAX_FILE_BYTES, NamedFile, Paths, ProcessEnvironment, parse_paths, parse_with};
use lb_document::diagnostic::{DiagnosticCollector, Diagnostics, utf8};

/// Where the configuration is, unless `--config` says otherwise.
pub const DEFAULT_PATH: &str = "/etc/socklb/socklb.toml";

/// Why there is no configuration.
#[derive(Debug, Error)]
pub enum ConfigFileError {
    /// The file cannot be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// There is no file at the default path.
    #[error(
        "there is no configuration at {DEFAULT_PATH}, and --config names no other: the package has an example, \
         /usr/share/doc/socklb/examples/socklb.toml, which is packaging/examples/socklb.toml in the repository"
    )]
    None,
    /// The file is too long to be a configuration.
    #[error("read {}: longer than {MAX_FILE_BYTES} bytes, which no configuration is", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// The file was read and is wrong.
    #[error(transparent)]
    Faulty(#[from] Diagnostics),
}

/// Reads the configuration file at `path`.
///
/// # Errors
/// The file cannot be read, or all its faults.
pub fn read(path: &Path, env: &dyn ProcessEnvironment) -> Result<Config, ConfigFileError> {
    read_with(path, env, |_, _, _| ())
}

/// Reads `[paths]` of the configuration file at `path`, whatever else is wrong with it, for commands that need no more.
///
/// # Errors
/// The file cannot be read, or the faults of that table. If there is none, and the text cannot be parsed, the faults of
/// the text.
pub fn read_paths(path: &Path) -> Result<Paths, ConfigFileError> {
    let bytes = read_file(path)?;
    Ok(parse_paths(utf8(&bytes, path)?, path)?)
}

/// As [`read`], and shows to `look` the endpoint files that the text names, whatever else is wrong with it, and the
/// addresses of all services. What `look` reports is a fault of the configuration.
///
/// # Errors
/// The file cannot be read, or all its faults.
pub fn read_with(
    path: &Path,
    env: &dyn ProcessEnvironment,
    look: impl FnOnce(&[NamedFile], &[SocketAddr], &mut DiagnosticCollector<'_>),
) -> Result<Config, ConfigFileError> {
    let bytes = read_file(path)?;
    let config = parse_with(utf8(&bytes, path)?, path, env, look)?;
    Ok(config)
}

fn read_file(path: &Path) -> Result<Vec<u8>, ConfigFileError> {
    let cannot = |source| ConfigFileError::Read { path: path.to_owned(), source };
    let (file, _) = match regular_file::open(path) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound && path == Path::new(DEFAULT_PATH) => {
            return Err(ConfigFileError::None);
        }
        Err(error) => return Err(cannot(error)),
    };
    let bytes = regular_file::read(&file, MAX_FILE_BYTES as u64).map_err(cannot)?;
    bytes.ok_or_else(|| ConfigFileError::TooLong { path: path.to_owned() })
}
