//! The cgroup of a client task: where cgroup2 is mounted, and which cgroup a path names.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::error::DatapathError;

/// An open cgroup.
#[derive(Debug)]
pub struct Cgroup {
    /// Its full path.
    pub path: PathBuf,
    /// Its directory.
    pub directory: File,
    /// The kernel's id of it: a cgroup that was removed and made again has another.
    pub id: u64,
}

impl Cgroup {
    /// Opens the cgroup at `relative` below the cgroup2 mount.
    ///
    /// # Errors
    /// If there is no cgroup2, no such cgroup, or the path leaves the mount.
    pub fn open(relative: &Path) -> Result<Self, DatapathError> {
        let mount = cgroup2_mount()?;
        let path = mount.join(relative);
        let fail = |source| DatapathError::OpenCgroup { path: path.clone(), source };
        let real = match path.canonicalize() {
            Ok(real) => real,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(DatapathError::NoCgroup(path));
            }
            Err(error) => return Err(fail(error)),
        };
        // A symbolic link can lead out of the mount even if the text of the path does not.
        if !real.starts_with(&mount) || !on_cgroup2(&real) {
            return Err(DatapathError::OutsideCgroup2 { path, mount });
        }
        let directory = File::open(&real).map_err(fail)?;
        let metadata = directory.metadata().map_err(fail)?;
        if !metadata.is_dir() {
            let source = std::io::Error::new(std::io::ErrorKind::NotADirectory, "it is a file of a cgroup");
            return Err(DatapathError::OpenCgroup { path, source });
        }
        // Kernel fact: the inode number of a cgroup's directory is its id (64-bit kernels, since 5.5).
        Ok(Self { id: metadata.ino(), path: real, directory })
    }
}

/// The path of the cgroup with this id, if it exists.
pub fn path_of(id: u64) -> Option<PathBuf> {
    let mut pending = vec![cgroup2_mount().ok()?];
    // Bound: cgroups of the host, each looked at once; a directory tree of cgroups has no cycles.
    while let Some(directory) = pending.pop() {
        if std::fs::metadata(&directory).is_ok_and(|metadata| metadata.ino() == id) {
            return Some(directory);
        }
        let Ok(entries) = std::fs::read_dir(&directory) else { continue };
        pending.extend(
            entries
                .flatten()
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                .map(|entry| entry.path()),
        );
    }
    None
}

fn on_cgroup2(path: &Path) -> bool {
    /// `CGROUP2_SUPER_MAGIC`
    const MAGIC: i64 = 0x6367_7270;
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type == MAGIC)
}

/// Where cgroup2 is mounted, found by file system type: `/sys/fs/cgroup` on a unified host, elsewhere on a hybrid one.
///
/// # Errors
/// If it is not mounted.
pub fn cgroup2_mount() -> Result<PathBuf, DatapathError> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").map_err(DatapathError::MountInfo)?;
    mount_of_type(&table, "cgroup2").ok_or(DatapathError::NoCgroup2)
}

/// The first mount of a file system type in the text of a `mountinfo` file (proc_pid_mountinfo(5)).
fn mount_of_type(table: &str, kind: &str) -> Option<PathBuf> {
    table.lines().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        if source.split(' ').next() != Some(kind) {
            return None;
        }
        Some(PathBuf::from(unescape(mount.split(' ').nth(4)?)))
    })
}

/// Undoes the octal escapes of blanks in a mount table.
fn unescape(field: &str) -> String {
    field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup2_is_found_by_type_wherever_it_is() {
        let hybrid = "\
            30 23 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755\n\
            31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n\
            32 30 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        assert_eq!(mount_of_type(hybrid, "cgroup2"), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        let unified = "25 23 0:22 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(mount_of_type(unified, "cgroup2"), Some(PathBuf::from("/sys/fs/cgroup")));
        let odd = "25 23 0:22 / /mnt/a\\040b rw - cgroup2 none rw\n";
        assert_eq!(mount_of_type(odd, "cgroup2"), Some(PathBuf::from("/mnt/a b")));
        assert_eq!(mount_of_type("25 23 0:22 / /sys rw - sysfs sysfs rw\n", "cgroup2"), None);
    }
}
