//! The configuration of this host: the file, and the environment of the process that reads the
//! file. [`lb_config`] parses the text.

pub mod addresses;
mod file;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

pub use file::{ConfigFileError, DEFAULT_PATH, read, read_paths, read_with};
pub use lb_config::*;
use lb_report::keys::{Keys, ServiceKey};

use crate::error::chain;

/// The environment of this process, on this host.
pub struct HostEnvironment;

impl ProcessEnvironment for HostEnvironment {
    fn variable(&self, name: &str) -> Option<String> {
        // The name of an environment variable is not empty, and contains neither `=` nor NUL.
        // Without this check, getenv(3) with the name `A=B` would find a variable `A` with a value
        // that begins with `B=`.
        let is_name = !name.is_empty() && !name.contains(['=', '\0']);
        is_name.then(|| std::env::var_os(name)).flatten().map(|value| value.to_string_lossy().into_owned())
    }

    fn host_name(&self) -> Option<String> {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
        Some(name.trim_end().to_owned())
    }

    fn service_keys(&self, path: &Path) -> Result<Keys<ServiceKey>, String> {
        lb_agent::config::read_key_file(path).map_err(|error| chain(&error))
    }

    /// Reads the stored address of a service. Also returns `None` if the file system does not
    /// answer within 2 s.
    fn service_address(&self, origin: &ClusterIpOrigin, state: &Path) -> Option<SocketAddr> {
        let (send, read) = mpsc::channel();
        let (origin, state) = (origin.to_string(), state.to_owned());
        let look = move || {
            let known = addresses::read(&state).ok();
            let _ = send.send(known.and_then(|known| known.get(&origin).copied()));
        };
        std::thread::Builder::new().name("addresses".to_owned()).spawn(look).ok()?;
        read.recv_timeout(Duration::from_secs(2)).ok().flatten()
    }
}

#[cfg(test)]
pub mod tests {
    use std::path::PathBuf;

    use super::*;

    /// The shortest valid configuration.
    pub const LEAST: &str = "[[client]]\njob = 'j'\ncgroup = 'c'\n\
         [[service]]\nname = 's'\naddress = '10.96.0.10:80'\nbackends = { static = [] }\n";

    /// An empty environment.
    struct Nothing;

    impl ProcessEnvironment for Nothing {}

    /// Parses a configuration without an environment. Panics if the text has faults.
    pub fn good(text: &str) -> Config {
        let read = parse(text, Path::new("/etc/socklb/socklb.toml"), &Nothing);
        read.unwrap_or_else(|faults| panic!("{faults}\nin\n{text}"))
    }

    #[test]
    fn an_unreadable_file_is_named_with_its_cause() {
        let error = read(Path::new("/nonexistent/socklb.toml"), &HostEnvironment).unwrap_err();
        assert_eq!(error.to_string(), "read /nonexistent/socklb.toml");
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(cause, "No such file or directory (os error 2)");
        let error = read(Path::new("/dev/zero"), &HostEnvironment).unwrap_err();
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(cause, "it is not a regular file");
        let long = tempfile::NamedTempFile::new().unwrap();
        long.as_file().set_len(MAX_FILE_BYTES as u64 + 1).unwrap();
        assert!(matches!(read(long.path(), &HostEnvironment), Err(ConfigFileError::TooLong { .. })));
    }

    #[test]
    fn paths_are_read_despite_other_faults() {
        let run = |text: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text).unwrap();
            read_paths(file.path()).map(|paths| paths.run)
        };
        assert_eq!(run("colour = 1\n[[client]]\njob = 1").unwrap(), PathBuf::from("/run/socklb"));
        assert_eq!(run("[paths]\nrun = '/r'\n[limits\n").unwrap(), PathBuf::from("/r"));
        assert!(matches!(run("[limits\n"), Err(ConfigFileError::Faulty(_))));
        assert!(matches!(run("[paths]\nrun = 1"), Err(ConfigFileError::Faulty(_))));
    }

    #[test]
    fn no_variable_name_panics() {
        for name in ["", "=", "A=B", "A\0"] {
            assert_eq!(HostEnvironment.variable(name), None);
        }
    }
}
