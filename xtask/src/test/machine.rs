//! Prepares this machine for a run: checks the free space on its disks, and removes the remains of
//! killed runs.
//!
//! When a test is killed, its namespaces, mounts and pins end with its processes, and the next test
//! removes its cgroups. Only its folders remain.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::command::target;

/// The required free space in bytes, for the programs and logs of a run, and for temporary files of
/// tests.
const ROOM: [(Place, u64); 2] = [(Place::Target, 6 << 30), (Place::Temporary, 1 << 30)];

#[derive(Clone, Copy)]
enum Place {
    Target,
    Temporary,
}

/// The prefix of the tests' folders (tests/stage/host/namespace.rs).
const FOLDERS: &str = "socklb-test-";

/// Every run takes less time, so an older folder does not belong to a current run.
const OLD: Duration = Duration::from_secs(3 * 3600);

/// Checks the free space, and removes the folders of killed tests.
pub fn prepare() -> Result<()> {
    for (place, needed) in ROOM {
        let folder = match place {
            Place::Target => target(),
            Place::Temporary => std::env::temp_dir(),
        };
        let stat = rustix::fs::statvfs(&folder)
            .with_context(|| format!("read the free space of {}", folder.display()))?;
        check_room(&folder, stat.f_bavail * stat.f_frsize, needed)?;
    }
    let removed = remove_old(&std::env::temp_dir(), OLD)?;
    if removed > 0 {
        println!("test: removed {removed} folders of tests that were killed");
    }
    Ok(())
}

fn check_room(folder: &Path, free: u64, needed: u64) -> Result<()> {
    if free < needed {
        let [free, needed] = [free, needed].map(|bytes| bytes >> 20);
        bail!(
            "{} has {free} MiB of free space, and the tests need {needed} MiB: make room, or set CARGO_TARGET_DIR or TMPDIR",
            folder.display()
        );
    }
    Ok(())
}

/// Removes tests' folders that were last modified at least `old` ago. Returns the number of removed
/// folders.
fn remove_old(temporary: &Path, old: Duration) -> Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(temporary).with_context(|| format!("read {}", temporary.display()))? {
        let entry = entry?;
        let is_ours = entry.file_name().to_string_lossy().starts_with(FOLDERS);
        // A folder is skipped if it was removed meanwhile, or if it belongs to another user.
        let age = entry
            .metadata()
            .and_then(|metadata| metadata.modified())
            .ok()
            .and_then(|time| time.elapsed().ok());
        if is_ours && age.is_some_and(|age| age >= old) && fs::remove_dir_all(entry.path()).is_ok() {
            removed += 1;
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_reported_with_the_needed_space() {
        check_room(Path::new("/a"), 2 << 30, 1 << 30).unwrap();
        let error = check_room(Path::new("/a"), 10 << 20, 1 << 30).unwrap_err().to_string();
        assert!(error.starts_with("/a has 10 MiB of free space, and the tests need 1024 MiB"), "{error}");
    }

    #[test]
    fn only_old_folders_of_tests_are_removed() {
        let folder = std::env::temp_dir().join(format!("socklb-machine-{}", std::process::id()));
        for name in ["socklb-test-a", "socklb-test-b", "other"] {
            fs::create_dir_all(folder.join(name)).unwrap();
        }
        assert_eq!(remove_old(&folder, Duration::from_secs(60)).unwrap(), 0);
        assert_eq!(remove_old(&folder, Duration::ZERO).unwrap(), 2);
        assert!(folder.join("other").exists());
        fs::remove_dir_all(&folder).unwrap();
    }
}
