//! The files that socklb stores for a later start. Each file is read and written as a whole, in a
//! directory that only socklb's user and root may write to.
//!
//! If another user could write to that directory, that user could create a file or a link there,
//! and so decide what the next daemon loads, and which files a daemon that runs as root overwrites.
//! So each directory from the root of the store down to the file, and the file itself, must belong
//! to root or to the user of this process, and no other user may have write permission. No symbolic
//! link below the root is followed.
//!
//! Each call blocks while the file system blocks, so no function of this module must be called on a
//! thread of an asynchronous runtime.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use thiserror::Error;

use crate::regular_file;
use crate::trust::{self, Untrusted};

/// The option that names another directory for the store.
const FLAG: &str = "--state";

/// The key that names another directory for published files.
const PUBLIC_FLAG: &str = "[envoy] directory";

/// Why a file cannot be read or written.
#[derive(Debug, Error)]
pub enum StoreError {
    /// Another user may write to the file, or may have written it.
    #[error(transparent)]
    Untrusted(#[from] Untrusted),
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The file is longer than the caller's limit, in bytes.
    #[error("{} is larger than {} KiB, the limit for a valid file", .0.display(), .1 >> 10)]
    TooLarge(PathBuf, u64),
    /// The file cannot be written. The previous content remains.
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateDirectory {
    root: PathBuf,
    /// The option or key that names another directory.
    flag: &'static str,
    /// Whether all users may read the files.
    is_public: bool,
}

impl StateDirectory {
    /// `root` need not exist yet.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), flag: FLAG, is_public: false }
    }

    /// A directory of files that all users may read, regardless of the umask. The directory above
    /// `root` must exist.
    pub fn public(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), flag: PUBLIC_FLAG, is_public: true }
    }

    /// `name` is relative to the root.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.root.join(name)
    }

    /// Reads a file; `None` if it does not exist.
    ///
    /// # Errors
    /// If other users may write to the file or to a directory above it, if it is not a regular
    /// file, has more than `most` bytes, or cannot be read.
    pub fn read(&self, name: impl AsRef<Path>, most: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let path = self.path(name);
        let fail = |source| StoreError::Read { path: path.clone(), source };
        if !self.check(&path)? {
            return Ok(None);
        }
        let (file, metadata) = match regular_file::open_itself(&path) {
            Ok(opened) => opened,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(fail(error)),
        };
        trust::check_stored(&path, &metadata, self.flag)?;
        let bytes = regular_file::read(&file, most).map_err(fail)?;
        bytes.map(Some).ok_or(StoreError::TooLarge(path, most))
    }

    /// Writes a file, and replaces an existing one. The content is written to a temporary file,
    /// which is renamed when its whole content is on the disk. Missing directories are created.
    ///
    /// # Errors
    /// If other users may write to a directory above the file, if another process writes to the
    /// file's directory at the same moment, or if the file cannot be written. The previous content
    /// remains, unless only the synchronization of the directory failed.
    pub fn write(&self, name: impl AsRef<Path>, parts: &[&[u8]]) -> Result<(), StoreError> {
        let path = self.path(name);
        let fail = |source| StoreError::Write { path: path.clone(), source };
        let directory = path.parent().unwrap_or(&self.root);
        if self.is_public {
            make_public_directories(&self.root, directory).map_err(fail)?;
        } else {
            trust::make_directory(directory).map_err(fail)?;
        }
        self.check(&path)?;
        let lock = File::open(directory).map_err(fail)?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let text = format!("another process is writing in {}", directory.display());
                return Err(fail(io::Error::new(io::ErrorKind::WouldBlock, text)));
            }
            Err(error) => return Err(fail(error.into())),
        }
        let mut new = path.clone().into_os_string();
        new.push(".new");
        let new = PathBuf::from(new);
        let written = write_new(&new, parts, self.is_public).and_then(|()| fs::rename(&new, &path));
        if let Err(error) = written {
            // A partly written file would occupy space on a disk that may be full.
            let _ = fs::remove_file(&new);
            return Err(fail(error));
        }
        // The new name must also be on the disk. Some file systems cannot synchronize a directory.
        match rustix::fs::fsync(&lock) {
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(error) => Err(fail(error.into())),
        }
    }

    /// Renames a file within the store.
    ///
    /// # Errors
    /// If other users may write to a directory above the file, or if the rename fails.
    pub fn rename(&self, name: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<(), StoreError> {
        let (path, to) = (self.path(name), self.path(to));
        self.check(&path)?;
        fs::rename(&path, to).map_err(|source| StoreError::Write { path, source })
    }

    /// Removes a file, if it exists.
    ///
    /// # Errors
    /// If other users may write to a directory above the file, or if the file cannot be removed.
    pub fn remove(&self, name: impl AsRef<Path>) -> Result<(), StoreError> {
        let path = self.path(name);
        if !self.check(&path)? {
            return Ok(());
        }
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(StoreError::Write { path, source })
            }
            _ => Ok(()),
        }
    }

    /// Checks the directories above a file, from the root down. Returns whether they all exist.
    fn check(&self, path: &Path) -> Result<bool, StoreError> {
        let below = path.ancestors().skip(1).take_while(|level| *level != self.root);
        let below: Vec<&Path> = below.collect();
        match fs::metadata(&self.root) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(source) => return Err(StoreError::Read { path: self.root.clone(), source }),
        }
        trust::check_directory(&self.root, self.flag)?;
        for level in below.into_iter().rev() {
            match fs::symlink_metadata(level) {
                Ok(metadata) if metadata.is_symlink() => {
                    return Err(Untrusted::StoredLink { path: level.to_owned(), flag: self.flag }.into());
                }
                Ok(metadata) => trust::check_stored(level, &metadata, self.flag)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
                Err(source) => return Err(StoreError::Read { path: level.to_owned(), source }),
            }
        }
        Ok(true)
    }
}

/// Creates the root of a store and a directory in it, if they are missing. Existing directories
/// retain their mode.
fn make_public_directories(root: &Path, directory: &Path) -> io::Result<()> {
    for level in [root, directory] {
        match fs::create_dir(level) {
            Ok(()) => fs::set_permissions(level, fs::Permissions::from_mode(0o755))?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let above = level.parent().unwrap_or(level).display();
                let text = format!(
                    "there is no directory {above}: create it, or name another directory with {PUBLIC_FLAG}"
                );
                return Err(io::Error::new(error.kind(), text));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Creates a file. An existing entry at its path, such as another user's link, is removed and not
/// followed.
fn write_new(path: &Path, parts: &[&[u8]], is_public: bool) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o644).custom_flags(libc::O_NOFOLLOW);
    let mut file = options.open(path)?;
    if is_public {
        file.set_permissions(fs::Permissions::from_mode(0o644))?;
    }
    for part in parts {
        file.write_all(part)?;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn store() -> (tempfile::TempDir, StateDirectory) {
        let folder = tempfile::tempdir().unwrap();
        let store = StateDirectory::at(folder.path().join("state"));
        (folder, store)
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn error_of(result: Result<impl std::fmt::Debug, StoreError>) -> String {
        let error = result.unwrap_err();
        let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
        format!("{error}{}", source.unwrap_or_default())
    }

    #[test]
    fn written_files_are_read_and_missing_ones_are_none() {
        let (_folder, store) = store();
        assert_eq!(store.read("load/factors", 9).unwrap(), None);
        store.write("load/factors", &[b"one", b"two"]).unwrap();
        assert_eq!(store.read("load/factors", 6).unwrap().as_deref(), Some(&b"onetwo"[..]));
        assert_eq!(store.read("load/other", 6).unwrap(), None);
        assert!(error_of(store.read("load/factors", 5)).contains("larger than 0 KiB"));
        store.write("load/factors", &[b"three"]).unwrap();
        assert_eq!(store.read("load/factors", 9).unwrap().as_deref(), Some(&b"three"[..]));
        store.rename("load/factors", "load/aside").unwrap();
        assert_eq!(store.read("load/factors", 9).unwrap(), None);
    }

    #[test]
    fn files_that_other_users_may_write_are_neither_read_nor_replaced() {
        let (_folder, store) = store();
        store.write("load/factors", &[b"ours"]).unwrap();
        for (path, good, bad) in [("", 0o755, 0o777), ("load", 0o755, 0o775), ("load/factors", 0o644, 0o646)]
        {
            set_mode(&store.path(path), bad);
            let error = error_of(store.read("load/factors", 9));
            assert!(
                error.contains("is writable by other users") && error.contains("--state"),
                "{path}: {error}"
            );
            if path != "load/factors" {
                assert!(
                    error_of(store.write("load/factors", &[b"other"])).contains("is writable by other users")
                );
            }
            set_mode(&store.path(path), good);
        }
        assert_eq!(store.read("load/factors", 9).unwrap().as_deref(), Some(&b"ours"[..]));
        // Only root can change the owner of a file, so this part of the test needs root.
        if rustix::process::geteuid().is_root() {
            for path in ["load", "load/factors"] {
                std::os::unix::fs::chown(store.path(path), Some(65_534), None).unwrap();
                assert!(error_of(store.read("load/factors", 9)).contains("belongs to user 65534"), "{path}");
                std::os::unix::fs::chown(store.path(path), Some(0), None).unwrap();
            }
        }
    }

    #[test]
    fn links_are_not_followed_and_only_regular_files_are_read() {
        let (folder, store) = store();
        store.write("load/factors", &[b"ours"]).unwrap();
        let victim = folder.path().join("victim");
        fs::write(&victim, "victim").unwrap();
        // A link at the path of the temporary file.
        symlink(&victim, store.path("load/factors.new")).unwrap();
        store.write("load/factors", &[b"next"]).unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"victim");
        assert_eq!(store.read("load/factors", 9).unwrap().as_deref(), Some(&b"next"[..]));
        fs::remove_file(store.path("load/factors")).unwrap();
        for target in [victim.as_path(), Path::new("/dev/zero")] {
            symlink(target, store.path("load/factors")).unwrap();
            assert!(error_of(store.read("load/factors", 9)).contains("symbolic link"), "{target:?}");
            fs::remove_file(store.path("load/factors")).unwrap();
        }
        rustix::fs::mknodat(
            rustix::fs::CWD,
            store.path("load/factors"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert!(error_of(store.read("load/factors", 9)).contains("not a regular file"));
        // A directory of the store may not be a link. The root may be a link, because the operator
        // chooses it.
        fs::rename(store.path("load"), folder.path().join("elsewhere")).unwrap();
        symlink(folder.path().join("elsewhere"), store.path("load")).unwrap();
        assert!(error_of(store.read("load/factors", 9)).contains("symbolic link"));
        assert!(error_of(store.write("load/factors", &[b"other"])).contains("symbolic link"));
        let linked = folder.path().join("linked");
        symlink(store.path(""), &linked).unwrap();
        StateDirectory::at(&linked).write("other", &[b"ours"]).unwrap();
    }

    #[test]
    fn an_unreadable_root_is_not_an_empty_store() {
        let (folder, _) = store();
        fs::write(folder.path().join("file"), "").unwrap();
        let error = error_of(StateDirectory::at(folder.path().join("file/state")).read("factors", 9));
        assert!(error.contains("cannot read") && error.contains("Not a directory"), "{error}");
        let looped = folder.path().join("looped");
        symlink(&looped, &looped).unwrap();
        assert!(error_of(StateDirectory::at(&looped).read("factors", 9)).contains("cannot read"));
    }

    #[test]
    fn a_failed_write_leaves_the_earlier_content() {
        let (_folder, store) = store();
        store.write("factors", &[b"ours"]).unwrap();
        fs::create_dir(store.path("factors.new")).unwrap();
        assert!(error_of(store.write("factors", &[b"other"])).contains("cannot write"));
        assert_eq!(store.read("factors", 9).unwrap().as_deref(), Some(&b"ours"[..]));
        fs::remove_dir(store.path("factors.new")).unwrap();
        let lock = File::open(store.path("")).unwrap();
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
        assert!(error_of(store.write("factors", &[b"other"])).contains("another process is writing in"));
    }

    #[test]
    fn all_users_may_read_public_files_and_none_may_replace_them() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("envoy");
        let store = StateDirectory::public(&root);
        store.write("web/users.json", &[b"{}"]).unwrap();
        let mode = |name: &str| fs::metadata(store.path(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!([mode(""), mode("web"), mode("web/users.json")], [0o755, 0o755, 0o644]);
        // A mode that an operator has set remains.
        set_mode(&root, 0o750);
        store.write("web/users.json", &[b"[]"]).unwrap();
        assert_eq!(
            (mode(""), store.read("web/users.json", 9).unwrap().as_deref()),
            (0o750, Some(&b"[]"[..]))
        );
        set_mode(&root, 0o777);
        for error in
            [error_of(store.write("web/users.json", &[b"{}"])), error_of(store.remove("web/users.json"))]
        {
            assert!(error.contains("or name another directory with [envoy] directory"), "{error}");
        }
        set_mode(&root, 0o755);
        store.remove("web/users.json").unwrap();
        store.remove("web/users.json").unwrap();
        store.remove("other/users.json").unwrap();
        assert!(!store.path("web/users.json").exists() && store.path("web").exists());
        // The parent directory of the root is not created, so a mistyped path is an error.
        let error = error_of(StateDirectory::public(folder.path().join("a/b")).write("c/d", &[b"{}"]));
        let why = format!("there is no directory {}: create it", folder.path().join("a").display());
        assert!(error.contains("cannot write") && error.contains(&why), "{error}");
    }
}
