//! Whom socklb believes: directories and daemons that belong to root, to its own user or to the owner of the pins.
//!
//! A user who may write to a directory decides what is found there, and a daemon that answers on the socket what `exec`
//! and `wait` do. Only owners and modes are checked here, not what lies in a directory.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Write permission of the group and of all other users.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// In a directory with this bit only the owner of a name may remove or rename it.
const STICKY: u32 = 0o1000;

/// Why a directory or a daemon is not used.
#[derive(Debug, Error)]
pub enum Untrusted {
    /// Another user could replace what lies there.
    #[error(
        "{} belongs to user {owner}, who could replace what socklb keeps there: `chown {user} {}`, or name another \
         directory with {flag}",
        path.display(), path.display()
    )]
    Owner {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Who would use it.
        user: u32,
        /// The option that names another.
        flag: &'static str,
    },
    /// Others may write there.
    #[error(
        "{} may be written by others (mode {:04o}): `chmod go-w {}`, or name another directory with {flag}",
        path.display(), mode & 0o7777, path.display()
    )]
    Writable {
        /// The directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// The option that names another.
        flag: &'static str,
    },
    /// A symbolic link, which could be pointed elsewhere.
    #[error("{} is a symbolic link within a bpf file system: remove it, or name another directory with --pins", .0.display())]
    Link(PathBuf),
    /// A symbolic link among stored files.
    #[error("{} is a symbolic link within a directory of stored files: remove it, or name another directory with --state", .0.display())]
    StoredLink(PathBuf),
    /// A daemon of another user.
    #[error(
        "the daemon at {} runs as user {user}, which is neither root nor the owner of {}: it is not believed",
        socket.display(), pins.display()
    )]
    Daemon {
        /// Its socket.
        socket: PathBuf,
        /// Who it runs as.
        user: u32,
        /// The directory of the pins.
        pins: PathBuf,
    },
    /// Its owner and mode cannot be seen.
    #[error("cannot tell whose {} is", path.display())]
    Unseen {
        /// The directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// Makes a directory if it does not exist, so that only its owner may write there, whatever the umask says.
///
/// # Errors
/// If it cannot be made.
pub fn make_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o755).create(path)
}

/// Checks that only this process's user or root may write to a directory. Those above it are the operator's choice.
/// `flag` is the option that names another.
///
/// # Errors
/// If others may, or that cannot be seen.
pub fn check_directory(path: &Path, flag: &'static str) -> Result<(), Untrusted> {
    let metadata = look(path, fs::metadata(path))?;
    check(path, &metadata, own_user(), 0, flag)
}

/// Checks that only this process's user or root may write to a file or directory that has this metadata.
///
/// # Errors
/// If others may.
pub fn check_stored(path: &Path, metadata: &fs::Metadata, flag: &'static str) -> Result<(), Untrusted> {
    check(path, metadata, own_user(), 0, flag)
}

/// Checks a directory of pins that exists, and all above it on the same file system: no other user can have replaced
/// them, or can do so later.
///
/// # Errors
/// If others can, or that cannot be seen.
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
        // By default every user may write to the root of bpffs (mode 1777), but its sticky bit protects our names
        // there.
        let is_root = level
            .parent()
            .is_none_or(|above| fs::metadata(above).is_ok_and(|metadata| metadata.dev() != device));
        check(level, &metadata, own_user(), if is_root { STICKY } else { 0 }, FLAG)?;
    }
    Ok(())
}

/// Checks that root may trust a daemon that runs as `peer`. Other users may ask any daemon: they act with their own
/// rights.
///
/// # Errors
/// If this process runs as root, and the daemon neither as root nor as the owner of the pins.
pub fn check_daemon(peer: u32, socket: &Path, pins: &Path) -> Result<(), Untrusted> {
    let owner = || fs::metadata(pins).ok().map(|metadata| metadata.uid());
    if own_user() != 0 || peer == 0 || owner() == Some(peer) {
        return Ok(());
    }
    Err(Untrusted::Daemon { socket: socket.to_owned(), user: peer, pins: pins.to_owned() })
}

/// `excused` is a bit of the mode that makes it harmless that others may write.
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

/// The user that this process acts as.
pub fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_directory_is_ours_alone_or_refused_with_what_mends_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        make_directory(&path).unwrap();
        for (mode, expected) in [(0o700, true), (0o750, true), (0o755, true), (0o775, false), (0o1777, false)]
        {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let found = check_directory(&path, "--run").map_err(|error| error.to_string());
            let path = path.display();
            let refusal = format!(
                "{path} may be written by others (mode {mode:04o}): `chmod go-w {path}`, or name another directory with \
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
        // A directory that belongs to root is good for every user.
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
