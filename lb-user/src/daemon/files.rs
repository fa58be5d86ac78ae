//! The files that the daemon stores for its next start, and the files that Envoy reads.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lb_config::discovery::DnsSettings;
use tracing::warn;

use super::file_io::{FileIo, Files, PATIENCE};
use super::lists::ListReader;
use crate::controller::{
    EnvoyChanges, EnvoyFile, EnvoyResults, OverridesRead, StateFiles, StoreFailures, StoredFile, StoredHosts,
    StoredKinds, StoredOverrides, StoredRead, StoredState, asides, envoy_places_path,
};
use crate::output::envoy::{self, EnvoyLbEndpoint};
use crate::source::MAX_BYTES;

/// The longest wait until files are stored. Files are written and synchronized one by one.
const TO_STORE: Duration = Duration::from_secs(10);

/// Stores and removes files below the state directory. Returns the files for which this failed.
pub async fn store(io: &FileIo, state: &Path, files: StateFiles) -> StoreFailures {
    let all = files.clone();
    let directory = state.join("last-good");
    let stored = io.run(&directory, TO_STORE, move |disk| store_all(disk, files)).await;
    stored.unwrap_or_else(|no_answer| StoreFailures { left: all, error: Some(no_answer.to_string()) })
}

fn store_all(disk: &dyn Files, files: StateFiles) -> StoreFailures {
    let mut stored = StoreFailures::default();
    for (path, text) in files {
        let done = match &text {
            Some(text) => disk.store(&path, text),
            None => disk.remove_stored(&path),
        };
        if let Err(error) = done {
            stored.error.get_or_insert_with(|| crate::error::chain(&error));
            stored.left.insert(path, text);
        }
    }
    stored
}

/// Writes the files of one directory at a time. A directory that does not answer delays the other
/// directories by at most [`TO_STORE`].
pub async fn write_envoy_files(io: &FileIo, changes: EnvoyChanges) -> EnvoyResults {
    let mut by_directory: BTreeMap<PathBuf, EnvoyChanges> = BTreeMap::new();
    for (file, endpoints) in changes {
        by_directory.entry(file.directory.clone()).or_default().insert(file, endpoints);
    }
    let mut results = EnvoyResults::new();
    for (directory, changes) in by_directory {
        let all: Vec<EnvoyFile> = changes.keys().cloned().collect();
        match io.run(&directory, TO_STORE, move |disk| write_all(disk, changes)).await {
            Ok(written) => results.extend(written),
            Err(hung) => results.extend(all.into_iter().map(|file| (file, Some(hung.to_string())))),
        }
    }
    results
}

/// Writes and removes files that Envoy reads, in one directory.
fn write_all(disk: &dyn Files, changes: EnvoyChanges) -> EnvoyResults {
    let write = |file: &EnvoyFile, endpoints: Option<Arc<[EnvoyLbEndpoint]>>| match endpoints {
        Some(endpoints) => {
            disk.publish(&file.directory, &file.name(), &envoy::render(&file.service, &endpoints))
        }
        None => {
            let text = disk.read(&file.directory.join(file.name())).ok();
            let is_removed = envoy::may_be_removed(&file.service, text.as_deref());
            if is_removed { disk.withdraw(&file.directory, &file.name()) } else { Ok(()) }
        }
    };
    let result = |(file, endpoints)| {
        let error = write(&file, endpoints).err().map(|error| crate::error::chain(&error));
        (file, error)
    };
    changes.into_iter().map(result).collect()
}

/// Reads files that an earlier daemon stored. Lists that are read later use the stored addresses of
/// host names.
pub async fn read_stored(
    lists: &ListReader,
    state: &Path,
    kinds: StoredKinds,
    dns: &DnsSettings,
) -> StoredState {
    let io = &lists.io;
    let hosts: Option<StoredRead<StoredHosts>> =
        if kinds.hosts { Some(read_one(io, state).await) } else { None };
    if let Some(StoredRead::Read(stored)) = &hosts {
        lists.servers.adopt(stored.addresses(), dns);
    }
    StoredState {
        hosts,
        loads: if kinds.loads { Some(read_one(io, state).await) } else { None },
        overrides: if kinds.overrides {
            let file = read_one(io, state).await;
            Some(OverridesRead::of(file, overrides_aside(io, state).await))
        } else {
            None
        },
        overrides_aside: if kinds.overrides_aside { overrides_aside(io, state).await.ok() } else { None },
    }
}

/// The files of overrides that could not be parsed; an error if they are not known now.
async fn overrides_aside(io: &FileIo, state: &Path) -> Result<Vec<PathBuf>, String> {
    let path = StoredOverrides::path(state);
    let file = path.clone();
    let aside = io.run(&path, PATIENCE, move |disk| set_aside(disk, &file)).await;
    let aside = aside.map_err(|no_answer| no_answer.to_string())?;
    aside.map_err(|error| format!("cannot search for files beside {}: {error}", path.display()))
}

async fn read_one<S: StoredFile + Send + 'static>(io: &FileIo, state: &Path) -> StoredRead<S> {
    let path = S::path(state);
    let file = path.clone();
    io.run(&path, PATIENCE, move |disk| read_file(disk, &file))
        .await
        .unwrap_or_else(|no_answer| StoredRead::Unread(no_answer.to_string()))
}

/// Reads a file that an earlier daemon stored. A file that cannot be parsed is renamed.
fn read_file<S: StoredFile>(disk: &dyn Files, path: &Path) -> StoredRead<S> {
    let why = match StoredRead::of(disk.read_stored(path, S::MAX_BYTES)) {
        Ok(read) => return read,
        Err(why) => why,
    };
    let aside = if S::REPLACES_ASIDE { Ok(Vec::new()) } else { set_aside(disk, path) };
    let aside = aside.map_err(|error| error.to_string());
    let renamed = aside.and_then(|taken| S::aside(path, &taken)).map_err(|error| format!(": {error}"));
    let renamed = renamed.and_then(|aside| match disk.rename_stored(path, &aside) {
        Ok(()) => Ok(aside),
        Err(error) => Err(format!(" to {}: {}", aside.display(), crate::error::chain(&error))),
    });
    match renamed {
        Ok(aside) => {
            warn!(aside = %aside.display(), why, "{}", S::LOST);
            StoredRead::Nothing
        }
        Err(error) => StoredRead::Unread(format!("{why}; the file cannot be renamed{error}")),
    }
}

/// Reads the names and directories of the files that an earlier daemon wrote for Envoy.
pub async fn read_envoy_places(io: &FileIo, state: &Path) -> Vec<EnvoyFile> {
    let path = envoy_places_path(state);
    let file = path.clone();
    let read = io.run(&path, PATIENCE, move |disk| disk.read_stored(&file, MAX_BYTES).ok());
    EnvoyFile::stored(read.await.ok().flatten())
}

/// The files that were set aside because they could not be parsed, and that still exist.
///
/// # Errors
/// If the file system cannot determine whether one exists.
pub fn set_aside(disk: &dyn Files, path: &Path) -> io::Result<Vec<PathBuf>> {
    let exists = asides(path).map(|aside| Ok(disk.exists(&aside)?.then_some(aside)));
    exists.filter_map(Result::transpose).collect()
}

#[cfg(test)]
mod tests {
    use super::super::file_io::HostFiles;
    use super::*;
    use crate::controller::StoredLoads;

    #[test]
    fn a_file_that_cannot_be_parsed_is_renamed() {
        let folder = tempfile::tempdir().unwrap();
        let file = StoredLoads::path(folder.path());
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        let read = || read_file::<StoredLoads>(&HostFiles, &file);
        assert!(matches!(read(), StoredRead::Nothing));
        // A second such file replaces the first one.
        for text in ["{\"schema\":1,", "{\"schema\":2}"] {
            std::fs::write(&file, text).unwrap();
            assert!(matches!(read(), StoredRead::Nothing));
            let aside = file.with_file_name("factors.json.not-understood");
            assert_eq!(set_aside(&HostFiles, &file).unwrap(), [aside.as_path()]);
            assert_eq!(std::fs::read_to_string(&aside).unwrap(), text);
        }
        // A file that is too long is also renamed, so that later files can be stored.
        std::fs::File::create(&file).unwrap().set_len(StoredLoads::MAX_BYTES + 1).unwrap();
        assert!(matches!(read(), StoredRead::Nothing) && !file.exists());
        std::fs::write(&file, "{\"schema\":1,\"clients\":{}}").unwrap();
        assert!(matches!(read(), StoredRead::Read(_)) && file.exists());
    }

    /// A file that replaces the last one is renamed even if it is not known which files exist: here
    /// the names of further files are too long for the file system.
    #[test]
    fn a_file_that_replaces_another_is_renamed_without_a_search() {
        let folder = tempfile::tempdir().unwrap();
        let file = StoredLoads::path(folder.path()).with_file_name("f".repeat(235)).with_extension("json");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "{").unwrap();
        set_aside(&HostFiles, &file).unwrap_err();
        assert!(matches!(read_file::<StoredLoads>(&HostFiles, &file), StoredRead::Nothing));
        assert!(!file.exists() && asides(&file).next().unwrap().exists());
    }

    /// Overrides are decisions of operators, who may need every file.
    #[test]
    fn no_file_of_overrides_replaces_another() {
        let folder = tempfile::tempdir().unwrap();
        let file = StoredOverrides::path(folder.path());
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        for aside in asides(&file) {
            std::fs::write(aside, "an earlier file").unwrap();
        }
        // A file that cannot be renamed must not be overwritten.
        std::fs::write(&file, "{\"schema\":3}").unwrap();
        let StoredRead::Unread(why) = read_file::<StoredOverrides>(&HostFiles, &file) else {
            panic!("the file was not reported as unread")
        };
        assert!(
            why.contains("the file's schema is 3") && why.contains("cannot be renamed: 9 files"),
            "{why}"
        );
        // In a directory that cannot be searched, it is not known whether there are such files.
        let endless = folder.path().join("endless");
        std::os::unix::fs::symlink(&endless, &endless).unwrap();
        set_aside(&HostFiles, &endless.join("overrides.json")).unwrap_err();
    }
}
