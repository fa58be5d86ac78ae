//! The files that the next start of the daemon needs. One `BackgroundWork::Store` stores all of
//! them outside of the event loop. Files that could not be stored are retried.
//!
//! The file system may be full, or may not answer. Connects do not need these files, so a failure
//! is only logged, and only once. If the daemon cannot store an operator's change, the answer to
//! the operator contains the failure.
//!
//! Files that could not be read at the start are read again later. Until a read succeeds, they are
//! not overwritten.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tracing::{info, warn};

use super::hosts::StoredHosts;
use super::loads::StoredLoads;
use crate::backoff::Backoff;
use crate::controller::overrides::StoredOverrides;
use crate::controller::{BackgroundWork, Controller};
use crate::source::SourceError;

/// A file that the daemon reads at its start, and writes later. It is JSON with a `schema`.
pub trait StoredFile: DeserializeOwned {
    /// The largest size of a file that the daemon reads, in bytes.
    const MAX_BYTES: u64;
    /// The version of the format.
    const SCHEMA: u32;
    /// Whether a file that cannot be parsed replaces the last such file. Otherwise both are
    /// preserved, up to a maximum number.
    const REPLACES_ASIDE: bool = true;
    /// What the file contains.
    const WHAT: &'static str;
    /// What to log if the file cannot be parsed.
    const LOST: &'static str;
    /// What to log if the file cannot be read when the daemon starts.
    const UNREAD: &'static str;
    /// What to log when a later read has succeeded.
    const READ: &'static str;

    /// The path of the file, below the state directory.
    fn path(state: &Path) -> PathBuf;

    /// The name that the file gets if it cannot be parsed. `taken` are the files that exist of
    /// [`asides`].
    ///
    /// # Errors
    /// If all names are taken.
    fn aside(path: &Path, taken: &[PathBuf]) -> Result<PathBuf, String> {
        let free = asides(path).find(|aside| Self::REPLACES_ASIDE || !taken.contains(aside));
        free.ok_or_else(|| {
            format!(
                "{ASIDES} files beside it have names with not-understood: remove those that are not needed"
            )
        })
    }

    /// # Errors
    /// Why the text cannot be parsed.
    fn parse(text: &[u8]) -> Result<Self, String> {
        /// The field that a file of any version has.
        #[derive(Deserialize)]
        struct FileVersion {
            schema: u32,
        }
        // The other fields depend on the version, so the version is checked first.
        let wrong = |why: &str| format!("this is not a file of {}: {why}", Self::WHAT);
        // serde would also parse an array as a structure.
        if !text.trim_ascii_start().starts_with(b"{") {
            return Err(wrong("it does not begin with `{`"));
        }
        let version: FileVersion = serde_json::from_slice(text).map_err(|error| wrong(&error.to_string()))?;
        if version.schema != Self::SCHEMA {
            return Err(format!(
                "the file's schema is {}, but this socklb supports only {}",
                version.schema,
                Self::SCHEMA
            ));
        }
        serde_json::from_slice(text).map_err(|error| wrong(&error.to_string()))
    }
}

/// The maximum number of files that are set aside for one stored file.
const ASIDES: u32 = 9;

/// The names that a stored file may get if it cannot be parsed.
pub fn asides(path: &Path) -> impl Iterator<Item = PathBuf> {
    let first = path.with_extension("json.not-understood");
    let more = (2..=ASIDES).map(|number| path.with_extension(format!("json.not-understood-{number}")));
    std::iter::once(first).chain(more)
}

/// The result of reading a stored file.
pub enum StoredRead<S> {
    Read(S),
    /// There is no file, or it cannot be parsed.
    Nothing,
    /// The file cannot be read now; the text is the reason.
    Unread(String),
}

impl<S: StoredFile> StoredRead<S> {
    /// The result of reading this text.
    ///
    /// # Errors
    /// Why the file cannot be parsed. It must then be renamed, so that later files can be stored.
    pub fn of(text: Result<Vec<u8>, SourceError>) -> Result<Self, String> {
        match text {
            Ok(text) => S::parse(&text).map(Self::Read),
            Err(error) if error.is_absent() => Ok(Self::Nothing),
            Err(error @ SourceError::TooLarge(..)) => Err(error.to_string()),
            Err(error) => Ok(Self::Unread(crate::error::chain(&error))),
        }
    }

    /// The content of the file; `None` if there is no content. A file that cannot be read must not
    /// be overwritten, so the reason is then stored in `unread`.
    pub fn content(self, unread: &mut Option<String>) -> Option<S> {
        let (content, error) = match self {
            Self::Read(content) => (Some(content), None),
            Self::Nothing => (None, None),
            Self::Unread(error) => (None, Some(error)),
        };
        match (&error, &unread) {
            (Some(error), None) => warn!(error, "{}", S::UNREAD),
            (None, Some(_)) => info!("{}", S::READ),
            (Some(_), Some(_)) | (None, None) => {}
        }
        *unread = error;
        content
    }
}

/// Which stored files to read.
#[derive(Clone, Copy)]
pub struct StoredKinds {
    pub loads: bool,
    pub overrides: bool,
    /// Only whether files of overrides are set aside.
    pub overrides_aside: bool,
    pub hosts: bool,
}

impl StoredKinds {
    pub const ALL: Self = Self { loads: true, overrides: true, overrides_aside: false, hosts: true };
}

/// The results of reading stored files; `None` for a file that was not requested.
pub struct StoredState {
    pub loads: Option<StoredRead<StoredLoads>>,
    pub overrides: Option<OverridesRead>,
    /// The files of overrides that are still set aside; `None` also if this is not known now.
    pub overrides_aside: Option<Vec<PathBuf>>,
    pub hosts: Option<StoredRead<StoredHosts>>,
}

/// The operators' overrides, and the files that were set aside because no daemon could parse them.
pub struct OverridesRead {
    pub file: StoredRead<StoredOverrides>,
    pub aside: Vec<PathBuf>,
}

impl OverridesRead {
    /// The result if it is not known which files are set aside, for this reason, is that the
    /// overrides cannot be read.
    pub fn of(file: StoredRead<StoredOverrides>, aside: Result<Vec<PathBuf>, String>) -> Self {
        match aside {
            Ok(aside) => Self { file, aside },
            Err(why) => Self { file: StoredRead::Unread(why), aside: Vec::new() },
        }
    }
}

/// The complete content of each file, keyed by path; `None` removes the file.
pub type StateFiles = BTreeMap<PathBuf, Option<Arc<[u8]>>>;

#[derive(Default)]
pub struct FilesToStore {
    /// The files to store. New content of a file replaces older content that is not stored yet.
    files: StateFiles,
    is_busy: bool,
    retry: Backoff,
    /// Whether files that could not be read at the start are being read again.
    is_reading: bool,
}

/// The files that could not be stored, and the first error.
#[derive(Default)]
pub struct StoreFailures {
    pub left: StateFiles,
    pub error: Option<String>,
}

impl FilesToStore {
    /// Schedules a file to be stored.
    pub fn add(&mut self, path: PathBuf, text: Arc<[u8]>) {
        self.files.insert(path, Some(text));
    }

    /// Schedules a file to be removed.
    pub fn remove(&mut self, path: PathBuf) {
        self.files.insert(path, None);
    }

    /// Removes the pause after failures, so that the next attempt to store begins at once.
    pub fn hurry(&mut self) {
        self.retry.retry_now();
    }

    /// The error of the last attempt to store files, if this file still waits to be stored.
    pub fn error_of(&self, path: &Path) -> Option<&str> {
        self.retry.error().filter(|_| self.files.contains_key(path))
    }
}

impl Controller {
    /// Starts to store the waiting files, unless an attempt is under way or a pause has not ended.
    pub fn start_storing(&mut self, now: Instant) {
        let FilesToStore { files, is_busy, retry, .. } = &mut self.sources.files_to_store;
        if !*is_busy && !files.is_empty() && retry.is_due(now) {
            *is_busy = true;
            if files.contains_key(&StoredOverrides::path(&self.config.paths.state)) {
                self.overrides.start_storing();
            }
            self.effects.push(BackgroundWork::Store(std::mem::take(files)).into());
        }
    }

    /// Handles the end of an attempt to store files.
    pub fn stored(&mut self, StoreFailures { mut left, error }: StoreFailures, now: Instant) {
        let FilesToStore { files, is_busy, retry, .. } = &mut self.sources.files_to_store;
        *is_busy = false;
        self.overrides.end_storing(!left.contains_key(&StoredOverrides::path(&self.config.paths.state)));
        left.append(files);
        *files = left;
        match error {
            Some(error) if retry.failed(now, &error) => {
                warn!(
                    error,
                    "cannot store the state for the next start of the daemon (endpoint lists, addresses, learnt weights, operators' overrides); retrying after a growing pause"
                );
            }
            Some(_) => {}
            None => {
                if retry.error().is_some() {
                    info!("the state for the next start of the daemon was stored");
                }
                retry.succeeded();
            }
        }
    }

    /// Reads the files that could not be read at the start, and checks whether files are still set
    /// aside, unless a read is under way.
    pub fn read_unread(&mut self) {
        let kinds = StoredKinds {
            loads: self.load_store.is_unread(),
            overrides: self.overrides.is_unread(),
            overrides_aside: !self.overrides.is_unread() && !self.overrides.aside().is_empty(),
            hosts: self.sources.hosts.store.is_unread(),
        };
        let is_any = kinds.loads || kinds.overrides || kinds.overrides_aside || kinds.hosts;
        if is_any && !std::mem::replace(&mut self.sources.files_to_store.is_reading, true) {
            self.effects.push(BackgroundWork::ReadStored(kinds, self.config.dns.clone()).into());
        }
    }

    /// Handles the end of another attempt to read stored files.
    pub fn apply_stored(&mut self, stored: StoredState, now: Instant) {
        let StoredState { loads, overrides, overrides_aside, hosts } = stored;
        self.sources.files_to_store.is_reading = false;
        if let Some(overrides) = overrides {
            self.apply_stored_overrides(overrides, now);
        }
        if let Some(aside) = overrides_aside {
            self.overrides.note_aside(aside);
        }
        if let Some(loads) = loads {
            self.apply_stored_loads(loads, now);
        }
        if let Some(hosts) = hosts {
            self.sources.hosts.store.take(hosts);
            self.resolve_hosts(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_parsed_is_reported_with_what_it_should_contain() {
        for (text, expected) in [
            ("[]", "this is not a file of operators' overrides: it does not begin with `{`"),
            ("[1,[]]", "this is not a file of operators' overrides: it does not begin with `{`"),
            ("", "this is not a file of operators' overrides: it does not begin with `{`"),
            ("{}", "this is not a file of operators' overrides: missing field `schema` at line 1 column 2"),
            (
                r#"{"schema":1}"#,
                "this is not a file of operators' overrides: missing field `overrides` at line 1 column 12",
            ),
            (r#"{"schema":7}"#, "the file's schema is 7, but this socklb supports only 1"),
        ] {
            assert_eq!(StoredOverrides::parse(text.as_bytes()).map(drop), Err(expected.to_owned()), "{text}");
        }
        assert!(StoredOverrides::parse(b"\n{\"schema\":1,\"overrides\":[]}").is_ok());
    }

    #[test]
    fn no_file_of_overrides_replaces_another() {
        let file = Path::new("/state/overrides/overrides.json");
        let names: Vec<PathBuf> = asides(file).collect();
        assert_eq!(names.len(), 9);
        for taken in 0..9 {
            assert_eq!(StoredOverrides::aside(file, &names[..taken]), Ok(names[taken].clone()));
            assert_eq!(StoredLoads::aside(file, &names[..taken]), Ok(names[0].clone()));
        }
        // An operator has removed one of them.
        assert_eq!(StoredOverrides::aside(file, &names[1..]), Ok(names[0].clone()));
        assert!(StoredOverrides::aside(file, &names).unwrap_err().starts_with("9 files"));
        assert_eq!(StoredLoads::aside(file, &names), Ok(names[0].clone()));
    }

    #[test]
    fn only_a_file_that_cannot_be_parsed_is_renamed() {
        let of = |text| match StoredRead::<StoredLoads>::of(text) {
            Ok(StoredRead::Read(_)) => "read",
            Ok(StoredRead::Nothing) => "nothing",
            Ok(StoredRead::Unread(_)) => "unread",
            Err(_) => "renamed",
        };
        let failed = |kind: std::io::ErrorKind| {
            of(Err(SourceError::Read { path: PathBuf::new(), source: kind.into() }))
        };
        assert_eq!(of(Ok(b"{\"schema\":1,\"clients\":{}}".to_vec())), "read");
        assert_eq!(of(Ok(b"{\"schema\":1,".to_vec())), "renamed");
        assert_eq!(of(Ok(b"{\"schema\":2}".to_vec())), "renamed");
        assert_eq!(of(Err(SourceError::TooLarge(PathBuf::new(), 1))), "renamed");
        assert_eq!(failed(std::io::ErrorKind::NotFound), "nothing");
        assert_eq!(failed(std::io::ErrorKind::PermissionDenied), "unread");
    }
}
