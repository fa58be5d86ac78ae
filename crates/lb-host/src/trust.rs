//! Decides which directories and daemons socklb trusts: those of root, of socklb's own user, or of
//! the owner of the pins.
//!
//! A user with write permission controls the files that socklb reads from a directory, and a daemon
//! that answers on the socket controls the effect of `exec` and `wait`. This module checks only
//! owners and modes, not the content of a directory.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Write permission for the group and for all other users.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// If a directory has this bit, an entry of the directory can be removed or renamed only by the
/// entry's owner.
const STICKY: u32 = 0o1000;

/// Why a directory or a daemon is not trusted.
#[derive(Debug, Error)]
pub enum Untrusted {
    /// The directory belongs to another user, who could replace its content.
    #[error(
        "{} belongs to user {owner}, who could replace the files that socklb stores there: `chown {user} {}`, or name another \
         directory with {flag}",
        path.display(), path.display()
    )]
    Owner {
        path: PathBuf,
        owner: u32,
        /// The user of this process.
        user: u32,
        /// The option that names another directory.
        flag: &'static str,
    },
    /// Other users may write to the directory.
    #[error(
        "{} is writable by other users (mode {:04o}): `chmod go-w {}`, or name another directory with {flag}",
        path.display(), mode & 0o7777, path.display()
    )]
    Writable {
        path: PathBuf,
        mode: u32,
        /// The option that names another directory.
        flag: &'static str,
    },
    /// A symbolic link on the path of the pins, which another user could redirect.
    #[error("{} is a symbolic link within a bpf file system: remove it, or name another directory with --pins", .0.display())]
    Link(PathBuf),
    /// A symbolic link among stored files.
    #[error("{} is a symbolic link within a directory of stored files: remove it, or name another directory with {flag}", path.display())]
    StoredLink {
        path: PathBuf,
        /// The option that names another directory.
        flag: &'static str,
    },
    /// The daemon runs as a user that is not trusted.
    #[error(
        "the daemon at {} runs as user {user}, which is neither root nor the owner of {}; its answers are not trusted",
        socket.display(), pins.display()
    )]
    Daemon {
        socket: PathBuf,
        /// The user that the daemon runs as.
        user: u32,
        /// The directory of the pins.
        pins: PathBuf,
    },
    /// The owner and the mode of a directory cannot be read.
    #[error("cannot read the owner and mode of {}", path.display())]
    Unseen { path: PathBuf, source: io::Error },
}

/// Creates a directory and its missing parents. Only their owner may write to them, regardless of
/// the umask.
///
/// # Errors
/// If a directory cannot be created.
pub fn make_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o755).create(path)
}

/// Checks that only root or the user of this process may write to a directory. Does not check the
/// directories above it, which the operator has chosen. `flag` is the option that names another
/// directory.
///
/// # Errors
/// If other users may write to it, or its owner and mode cannot be read.
pub fn check_directory(path: &Path, flag: &'static str) -> Result<(), Untrusted> {
    let metadata = look(path, fs::metadata(path))?;
    check(path, &metadata, own_user(), 0, flag)
}

/// Checks that only root or the user of this process may write to the file or directory with this
/// metadata.
///
/// # Errors
/// If other users may write to it.
pub fn check_stored(path: &Path, metadata: &fs::Metadata, flag: &'static str) -> Result<(), Untrusted> {
    check(path, metadata, own_user(), 0, flag)
}

/// Checks that no other user can replace, or could have replaced, an existing directory of pins or
/// a directory above it on the same file system.
///
/// # Errors
/// If another user can replace, or could have replaced, such a directory, or if an owner and mode
/// cannot be read.
pub fn check_pins(directory: &Path) -> Result<(), Untrusted> {
    const FLAG: &str = "--pins";
    let directory = look(directory, std::path::absolute(directory))?;
    let real = look(&directory, directory.canonicalize())?;
    let device = look(&real, fs::metadata(&real))?.dev();
    for level in directory.ancestors() {
        let metadata = look(level, fs::symlink_metadata(level))?;
        if metadata.dev() == device && metadata.is_symlink() {
            return Err(Untrusted::Link(level.to_owned()));
        }
    }
    for level in real.ancestors() {
        let metadata = look(level, fs::metadata(level))?;
        if metadata.dev() != device {
            break;
        }
        // By default, every user may write to the root of bpffs (mode 1777), but because of its
        // sticky bit no other user can replace socklb's entries.
        let is_root = level
            .parent()
            .is_none_or(|above| fs::metadata(above).is_ok_and(|metadata| metadata.dev() != device));
        check(level, &metadata, own_user(), if is_root { STICKY } else { 0 }, FLAG)?;
    }
    Ok(())
}

/// Checks that this process may trust a daemon that runs as user `peer`. If this process does not
/// run as root, every daemon is trusted, because this process has only the rights of its user.
///
/// # Errors
/// If this process runs as root, and the daemon runs neither as root nor as the owner of the pins.
pub fn check_daemon(peer: u32, socket: &Path, pins: &Path) -> Result<(), Untrusted> {
    let owner = || fs::metadata(pins).ok().map(|metadata| metadata.uid());
    if own_user() != 0 || peer == 0 || owner() == Some(peer) {
        return Ok(());
    }
    Err(Untrusted::Daemon { socket: socket.to_owned(), user: peer, pins: pins.to_owned() })
}

/// `excused` is a mode bit with which write permission for others is harmless.
fn check(
    path: &Path,
    metadata: &fs::Metadata,
    user: u32,
    excused: u32,
    flag: &'static str,
) -> Result<(), Untrusted> {
    let (owner, mode, path) = (metadata.uid(), metadata.mode(), path.to_owned());
    if owner != 0 && owner != user {
        return Err(Untrusted::Owner { path, owner, user, flag });
    }
    if mode & WRITABLE_BY_OTHERS != 0 && mode & excused == 0 {
        return Err(Untrusted::Writable { path, mode, flag });
    }
    Ok(())
}

fn look<T>(path: &Path, result: io::Result<T>) -> Result<T, Untrusted> {
    result.map_err(|source| Untrusted::Unseen { path: path.to_owned(), source })
}

/// The effective user of this process.
pub fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_directory_writable_by_other_users_is_refused_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        make_directory(&path).unwrap();
        for (mode, expected) in [(0o700, true), (0o750, true), (0o755, true), (0o775, false), (0o1777, false)]
        {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let found = check_directory(&path, "--run").map_err(|error| error.to_string());
            let path = path.display();
            let refusal = format!(
                "{path} is writable by other users (mode {mode:04o}): `chmod go-w {path}`, or name another directory with \
                 --run"
            );
            assert_eq!(found, if expected { Ok(()) } else { Err(refusal) });
        }
    }

    #[test]
    fn owners_are_this_user_or_root() {
        let folder = tempfile::tempdir().unwrap();
        let metadata = fs::metadata(folder.path()).unwrap();
        let owner = metadata.uid();
        let of = |user| check(folder.path(), &metadata, user, 0, "--run").map_err(|error| error.to_string());
        assert_eq!(of(owner), Ok(()));
        let other = of(owner + 1);
        // Every user accepts a directory that belongs to root.
        assert_eq!(other.is_ok(), owner == 0, "{other:?}");
    }

    #[test]
    fn pins_are_not_reached_through_a_link_on_their_own_file_system() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target");
        fs::create_dir(&target).unwrap();
        symlink(&target, folder.path().join("link")).unwrap();
        let error = check_pins(&folder.path().join("link")).unwrap_err();
        assert!(matches!(error, Untrusted::Link(path) if path.ends_with("link")));
    }
}
