//! The cgroup of a client task: the mount point of cgroup2, and the cgroup that a path names.

pub mod own;

pub mod tree;

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::DatapathError;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    pub path: PathBuf,
    /// The kernel's id of the cgroup. If the cgroup is removed and created again, the new cgroup
    /// has another id.
    pub id: u64,
}

impl Cgroup {
    /// Opens the cgroup at a full path.
    ///
    /// # Errors
    /// If there is no such cgroup, or the path does not lead to a cgroup of version 2.
    pub fn at(path: &Path) -> Result<Self, DatapathError> {
        open(path).map(|(cgroup, _)| cgroup)
    }

    /// Opens the cgroup's directory.
    ///
    /// # Errors
    /// If the directory cannot be opened, or if the path now leads to another cgroup.
    pub fn open(&self) -> Result<File, DatapathError> {
        match open(&self.path)? {
            (now, directory) if now == *self => Ok(directory),
            _ => Err(DatapathError::NoCgroup(self.path.clone())),
        }
    }
}

fn open(path: &Path) -> Result<(Cgroup, File), DatapathError> {
    let fail = |source| DatapathError::OpenCgroup { path: path.to_owned(), source };
    let directory = match File::open(path) {
        Ok(directory) => directory,
        // If a component of the path is not a directory, there is no such cgroup either.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Err(DatapathError::NoCgroup(path.to_owned()));
        }
        Err(error) => return Err(fail(error)),
    };
    // Because of a symbolic link, the path can lead out of the mount even if its text does not.
    if !is_cgroup2(&directory) {
        return Err(DatapathError::OutsideCgroup2(path.to_owned()));
    }
    let metadata = directory.metadata().map_err(fail)?;
    if !metadata.is_dir() {
        let source =
            std::io::Error::new(ErrorKind::NotADirectory, "the path leads to a file in a cgroup's directory");
        return Err(DatapathError::OpenCgroup { path: path.to_owned(), source });
    }
    // Kernel fact: the inode number of a cgroup's directory is its id (64-bit kernels, since 5.5).
    Ok((Cgroup { id: metadata.ino(), path: path.to_owned() }, directory))
}

/// The id of the cgroup whose directory is at a full path.
///
/// # Errors
/// If the path does not exist, or its metadata cannot be read.
pub fn id_at(path: &Path) -> std::io::Result<u64> {
    std::fs::metadata(path).map(|metadata| metadata.ino())
}

/// The path of the cgroup with this id, if it exists.
pub fn path_of(id: u64) -> Option<PathBuf> {
    let mut pending = vec![cgroup2_mount().ok()?];
    // Bound: each cgroup of the host is read once, because a tree of directories has no cycles.
    while let Some(directory) = pending.pop() {
        if std::fs::metadata(&directory).is_ok_and(|metadata| metadata.ino() == id) {
            return Some(directory);
        }
        pending.extend(children(&directory));
    }
    None
}

/// Whether an open directory is a cgroup of version 2.
pub fn is_cgroup2(directory: impl AsFd) -> bool {
    /// `CGROUP2_SUPER_MAGIC`
    const MAGIC: i64 = 0x6367_7270;
    rustix::fs::fstatfs(directory).is_ok_and(|stat| stat.f_type == MAGIC)
}

/// The processes of a cgroup and of all cgroups below it.
pub fn processes(cgroup: &Path) -> Vec<u32> {
    each_process(cgroup).collect()
}

/// The processes of a cgroup and of all cgroups below it. Each cgroup is read only when the
/// iterator reaches it.
pub fn each_process(cgroup: &Path) -> impl Iterator<Item = u32> {
    let mut pending = vec![cgroup.to_owned()];
    // Bound: each cgroup below this one is read once.
    let directories = std::iter::from_fn(move || {
        let directory = pending.pop()?;
        pending.extend(children(&directory));
        Some(directory)
    });
    directories.flat_map(|directory| {
        // A cgroup that cannot be read was removed, and has no processes.
        let procs = std::fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
        procs.lines().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()
    })
}

/// The ids of all cgroups below a cgroup.
pub fn ids_below(cgroup: &Path) -> Vec<u64> {
    let mut ids = Vec::new();
    let mut pending = children(cgroup);
    // Bound: each cgroup below this one is read once.
    while let Some(directory) = pending.pop() {
        ids.extend(std::fs::metadata(&directory).ok().map(|metadata| metadata.ino()));
        pending.extend(children(&directory));
    }
    ids
}

fn children(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

/// The ids of this process's cgroup and of the cgroups above it, innermost first. Programs that are
/// attached to any of these run for the sockets that this process creates.
///
/// # Errors
/// If there is no cgroup2, or this process is outside the mounted part of cgroup2.
pub fn ours_and_above() -> Result<Vec<u64>, DatapathError> {
    let text = std::fs::read_to_string("/proc/self/cgroup").map_err(DatapathError::OwnCgroup)?;
    Ok(and_above(&text)?.into_iter().map(|(_, id)| id).collect())
}

/// The paths and ids of a process's cgroup and of the cgroups above it, innermost first.
///
/// # Errors
/// If there is no such process or no cgroup2, or the process is outside the mounted part of
/// cgroup2.
pub fn of_process_and_above(pid: u32) -> Result<Vec<(PathBuf, u64)>, DatapathError> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup"));
    and_above(&text.map_err(|source| DatapathError::CgroupOfProcess { pid, source })?)
}

/// The paths and ids of a process's cgroup and of the cgroups above it, from the text of the
/// process's `cgroup` file.
fn and_above(text: &str) -> Result<Vec<(PathBuf, u64)>, DatapathError> {
    let relative = of_version_2(text).ok_or(DatapathError::NoCgroup2)?;
    // The path in the text is relative to the root of this process's cgroup namespace, so the path
    // is valid only below a mount of that root.
    let table = std::fs::read_to_string("/proc/self/mountinfo").map_err(DatapathError::MountInfo)?;
    let mount = mounts_of_type(&table, "cgroup2").into_iter().find(|mount| mount.root == "/");
    let mount = mount.ok_or(DatapathError::NoOwnCgroup2)?.at;
    // Joining an empty path appends a slash. Collecting the components removes the slash.
    let path: PathBuf = mount.join(relative.trim_start_matches('/')).components().collect();
    let ancestors = path.ancestors().take_while(|ancestor| ancestor.starts_with(&mount));
    let with_id = |path: &Path| std::fs::metadata(path).map(|metadata| (path.to_owned(), metadata.ino()));
    let all: Result<Vec<_>, _> = ancestors.map(with_id).collect();
    all.map_err(|source| DatapathError::OpenCgroup { path, source })
}

/// The path of a process's cgroup of version 2 in the text of its `cgroup` file (cgroups(7)).
fn of_version_2(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::"))
}

/// The mount point of cgroup2, found by file system type: `/sys/fs/cgroup` on a unified host,
/// another path on a hybrid host.
///
/// If there are several mounts, the function prefers a mount that shows the whole tree. A mount
/// that was made in a cgroup namespace shows only the part below the root of the namespace.
///
/// # Errors
/// If cgroup2 is not mounted.
pub fn cgroup2_mount() -> Result<PathBuf, DatapathError> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").map_err(DatapathError::MountInfo)?;
    let mut mounts = mounts_of_type(&table, "cgroup2");
    // The sort is stable, so the result is the first whole mount or, if there is no whole mount,
    // the first mount.
    mounts.sort_by_key(|mount| !is_whole(&mount.at));
    mounts.into_iter().next().map(|mount| mount.at).ok_or(DatapathError::NoCgroup2)
}

/// A warning if the cgroup2 mount shows only the cgroups of a cgroup namespace and hides the host's
/// other cgroups.
pub fn namespace_warning() -> Option<String> {
    let mount = cgroup2_mount().ok()?;
    (!is_whole(&mount)).then(|| {
        format!(
            "{} shows only the cgroups of a cgroup namespace; to see the host's cgroups, run socklb in the host's namespace \
             (for containers, the option --cgroupns=host) or mount the host's whole cgroup2 tree",
            mount.display()
        )
    })
}

/// Whether a mount shows the whole hierarchy, and not only the part below the root of a cgroup
/// namespace.
fn is_whole(mount: &Path) -> bool {
    // Kernel fact: the root of the hierarchy is the first cgroup and has id 1.
    std::fs::metadata(mount).is_ok_and(|metadata| metadata.ino() == 1)
}

/// A mount: the part of the file system that it shows, and its mount point.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    root: String,
    at: PathBuf,
}

/// The mounts of a file system type in the text of a `mountinfo` file (proc_pid_mountinfo(5)).
fn mounts_of_type(table: &str, kind: &str) -> Vec<Mount> {
    let mount = |line: &str| {
        let (mount, source) = line.split_once(" - ")?;
        if source.split(' ').next() != Some(kind) {
            return None;
        }
        let mut fields = mount.split(' ').skip(3);
        Some(Mount { root: unescape(fields.next()?), at: PathBuf::from(unescape(fields.next()?)) })
    };
    table.lines().filter_map(mount).collect()
}

/// Replaces the octal escapes of blanks and backslashes in a mount table.
fn unescape(field: &str) -> String {
    field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup2_is_found_by_file_system_type() {
        let hybrid = "\
            30 23 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755\n\
            31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n\
            32 30 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        let check = |table: &str, expected: &[&str]| {
            let expected: Vec<Mount> =
                expected.iter().map(|at| Mount { root: "/".to_owned(), at: PathBuf::from(at) }).collect();
            assert_eq!(mounts_of_type(table, "cgroup2"), expected);
        };
        check(hybrid, &["/sys/fs/cgroup/unified"]);
        let unified = "25 23 0:22 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        check(unified, &["/sys/fs/cgroup"]);
        check(&format!("{hybrid}{unified}"), &["/sys/fs/cgroup/unified", "/sys/fs/cgroup"]);
        let odd = "25 23 0:22 / /mnt/a\\040b rw - cgroup2 none rw\n";
        check(odd, &["/mnt/a b"]);
        check("25 23 0:22 / /sys rw - sysfs sysfs rw\n", &[]);
    }

    #[test]
    fn the_process_cgroup_is_that_of_version_2() {
        let hybrid = "4:cpu:/jobs\n1:name=systemd:/x\n0::/system.slice/a.service\n";
        assert_eq!(of_version_2(hybrid), Some("/system.slice/a.service"));
        assert_eq!(of_version_2("4:cpu:/jobs\n"), None);
    }
}
