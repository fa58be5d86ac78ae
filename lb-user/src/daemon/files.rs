//! The files that the daemon stores for its next start, and the files that Envoy reads.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::warn;

use super::file_io::Files;
use crate::controller::{
    EnvoyChanges, EnvoyFile, EnvoyResults, StateFiles, StoreFailures, StoredFile, StoredRead, asides,
};
use crate::envoy::{self, EnvoyLbEndpoint};

/// Stores and removes files. Returns the files for which this failed.
pub fn store_all(disk: &dyn Files, files: StateFiles) -> StoreFailures {
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

/// Writes and removes files that Envoy reads.
pub fn write_envoy_files(disk: &dyn Files, changes: EnvoyChanges) -> EnvoyResults {
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

/// Reads a file that an earlier daemon stored. A file that cannot be parsed is renamed.
pub fn read_stored<S: StoredFile>(disk: &dyn Files, path: &Path) -> StoredRead<S> {
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
    use crate::controller::{StoredLoads, StoredOverrides};

    #[test]
    fn a_file_that_cannot_be_parsed_is_renamed() {
        let folder = tempfile::tempdir().unwrap();
        let file = StoredLoads::path(folder.path());
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        let read = || read_stored::<StoredLoads>(&HostFiles, &file);
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
        assert!(matches!(read_stored::<StoredLoads>(&HostFiles, &file), StoredRead::Nothing));
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
        let StoredRead::Unread(why) = read_stored::<StoredOverrides>(&HostFiles, &file) else {
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
