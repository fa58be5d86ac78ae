//! Reads key files: checks that only their owner and group can read them, then parses them.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use lb_host::regular_file;
use lb_report::keys::{Keys, KeysError, Secret};
use thiserror::Error;

/// Maximum size of a key file, in bytes. Two keys and their comments need less than a tenth of this
/// size.
const MAX_BYTES: u64 = 64 << 10;

/// Mode bits that a key file may not have. The group may only read it, and other users may have no
/// access.
const TOO_OPEN: u32 = 0o037;

/// The reason why a key file cannot be used. The message contains no part of a key.
#[derive(Debug, Error)]
pub enum KeyFileError {
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The mode allows more than access by the owner and reading by the group.
    #[error("{} is accessible to other users (mode {mode:04o}): `chmod 640 {}`, and create new keys if \
             another user may have read the file", path.display(), path.display())]
    TooOpen { path: PathBuf, mode: u32 },
    /// Another user owns the file and can replace it.
    #[error("{} belongs to user {owner}, who could replace the keys: `chown root {}`", path.display(), path.display())]
    Owner { path: PathBuf, owner: u32 },
    #[error("{} is longer than {MAX_BYTES} bytes, the limit for a key file", .0.display())]
    TooLong(PathBuf),
    #[error("{} is not text: write lines `ID KEY`", .0.display())]
    NotText(PathBuf),
    /// A line has a fault.
    #[error("{}", path.display())]
    Faulty {
        path: PathBuf,
        /// The number of the line, and the fault.
        source: KeysError,
    },
}

/// Reads a key file.
///
/// # Errors
/// If the file cannot be read, if other users have access to the file or own it, or if a line has a
/// fault.
pub fn read_key_file<K: Secret>(path: &Path) -> Result<Keys<K>, KeyFileError> {
    let cannot = |source| KeyFileError::Read { path: path.to_owned(), source };
    let (file, metadata) = regular_file::open(path).map_err(cannot)?;
    let (mode, owner) = (metadata.mode() & 0o7777, metadata.uid());
    if mode & TOO_OPEN != 0 {
        return Err(KeyFileError::TooOpen { path: path.to_owned(), mode });
    }
    if !may_own(owner, lb_host::trust::own_user()) {
        return Err(KeyFileError::Owner { path: path.to_owned(), owner });
    }
    let bytes = regular_file::read(&file, MAX_BYTES).map_err(cannot)?;
    let bytes = bytes.ok_or_else(|| KeyFileError::TooLong(path.to_owned()))?;
    let text = String::from_utf8(bytes).map_err(|_| KeyFileError::NotText(path.to_owned()))?;
    Keys::parse(&text).map_err(|source| KeyFileError::Faulty { path: path.to_owned(), source })
}

/// Whether a process of user `reader` trusts a key file of this owner. Root trusts every owner,
/// because `socklb check` as root may read a file that belongs to the user of a daemon.
fn may_own(owner: u32, reader: u32) -> bool {
    reader == 0 || [0, reader].contains(&owner)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use lb_document::diagnostic::chain;
    use lb_report::keys::BackendKey;

    use super::*;

    #[test]
    fn only_root_trusts_a_key_file_of_another_user() {
        for (owner, reader, expected) in
            [(0, 0, true), (7, 0, true), (0, 7, true), (7, 7, true), (8, 7, false)]
        {
            assert_eq!(may_own(owner, reader), expected, "owner {owner}, reader {reader}");
        }
    }

    #[test]
    fn exposed_key_files_and_wrong_lines_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let write = |text: &str, mode| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            read_key_file::<BackendKey>(&path).map_err(|error| chain(&error))
        };
        let good = format!("7 {}\n", "0f".repeat(16));
        for mode in [0o400, 0o600, 0o640] {
            assert_eq!(write(&good, mode).unwrap().current().id, 7);
        }
        let at = path.display();
        for mode in [0o644, 0o604, 0o660, 0o610] {
            let expected = format!(
                "{at} is accessible to other users (mode {mode:04o}): `chmod 640 {at}`, and create new keys \
                 if another user may have read the file"
            );
            assert_eq!(write(&good, mode).unwrap_err(), expected);
        }
        let expected = format!("{at}: line 2: a backend's key has 32 digits, this has 4");
        assert_eq!(write("# mine\n7 0f0f\n", 0o600).unwrap_err(), expected);
        let long = "#".repeat(65_537);
        assert!(write(&long, 0o600).unwrap_err().ends_with("the limit for a key file"));
        let error = chain(&read_key_file::<BackendKey>(folder.path()).unwrap_err());
        assert!(error.ends_with("it is not a regular file"), "{error}");
    }
}
