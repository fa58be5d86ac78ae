//! Reads the configuration file: all of it, or only its `[paths]`. [`lb_config`] parses the text.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use lb_host::regular_file;
use thiserror::Error;

use lb_config::{Config, MAX_FILE_BYTES, NamedFile, Paths, ProcessEnvironment, parse_paths, parse_with};
use lb_document::diagnostic::{DiagnosticCollector, Diagnostics, utf8};

/// The path of the configuration file if `--config` does not name another file.
pub const DEFAULT_PATH: &str = "/etc/socklb/socklb.toml";

/// Why the configuration cannot be used.
#[derive(Debug, Error)]
pub enum ConfigFileError {
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// There is no file at the default path.
    #[error(
        "there is no configuration at {DEFAULT_PATH}: create it, or name another file with --config. The \
         package has an example, /usr/share/doc/socklb/examples/socklb.toml (in the repository: \
         packaging/examples/socklb.toml)"
    )]
    None,
    /// The file is longer than a configuration may be.
    #[error("read {}: longer than {MAX_FILE_BYTES} bytes, the largest size of a configuration", path.display())]
    TooLong { path: PathBuf },
    /// The file was read and has faults.
    #[error(transparent)]
    Faulty(#[from] Diagnostics),
}

/// Reads the configuration file at `path`.
///
/// # Errors
/// If the file cannot be read, or has faults. The error contains all faults.
pub fn read(path: &Path, env: &dyn ProcessEnvironment) -> Result<Config, ConfigFileError> {
    read_with(path, env, |_, _, _| ())
}

/// Reads only `[paths]` of the configuration file at `path`, for commands that need nothing else.
/// Ignores faults elsewhere in the file.
///
/// # Errors
/// If the file cannot be read, or `[paths]` has faults. If a fault of syntax makes `[paths]`
/// unreadable, the error contains the faults of the whole text.
pub fn read_paths(path: &Path) -> Result<Paths, ConfigFileError> {
    let bytes = read_file(path)?;
    Ok(parse_paths(utf8(&bytes, path)?, path)?)
}

/// Like [`read`]. Also calls `look`, even if the text has faults, with the endpoint files in the
/// text and the addresses of all services. Faults that `look` reports count as faults of the
/// configuration.
///
/// # Errors
/// If the file cannot be read, or has faults. The error contains all faults.
pub fn read_with(
    path: &Path,
    env: &dyn ProcessEnvironment,
    look: impl FnOnce(&[NamedFile], &[SocketAddr], &DiagnosticCollector<'_>),
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
