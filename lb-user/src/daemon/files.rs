//! Files on disk: endpoint lists, and the files that are stored for the next start of the daemon.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lb_core::feed::Version;
use lb_host::store::{StateDirectory, StoreError};
use tracing::warn;

use crate::controller::{
    EnvoyChanges, EnvoyFile, EnvoyResults, StateFiles, StoreFailures, StoredFile, StoredRead, asides,
};
use crate::envoy::{self, EnvoyLbEndpoint};
use crate::source::{self, SourceError, Stamp, last_good};

/// The files of a host. Each call blocks until the file system answers.
pub trait Files: Send + Sync {
    /// The stamp of the file at a path; `None` if there is no file.
    fn stamp(&self, path: &Path) -> Option<Stamp>;

    /// Whether there is anything at a path.
    ///
    /// # Errors
    /// If the file system cannot determine this.
    fn exists(&self, path: &Path) -> io::Result<bool>;

    /// The version of the file at a path. Also opens the file, because some network file systems
    /// answer stat(2) from a cache even while their server does not answer.
    fn version(&self, path: &Path) -> Version<Stamp>;

    /// Reads an endpoint file.
    ///
    /// # Errors
    /// See [`source::read_whole`].
    fn read(&self, path: &Path) -> Result<Vec<u8>, SourceError>;

    /// Reads a file that an earlier daemon stored, if it has at most `most` bytes.
    ///
    /// # Errors
    /// See [`last_good::read_at_most`].
    fn read_stored(&self, path: &Path, most: u64) -> Result<Vec<u8>, SourceError>;

    /// # Errors
    /// If the file cannot be renamed. Its path is then unchanged.
    fn rename_stored(&self, path: &Path, to: &Path) -> Result<(), StoreError>;

    /// Removes a file that was stored, if it exists.
    ///
    /// # Errors
    /// See [`StateDirectory::remove`].
    fn remove_stored(&self, path: &Path) -> Result<(), StoreError>;

    /// # Errors
    /// See [`last_good::save`].
    fn store(&self, path: &Path, text: &[u8]) -> Result<(), StoreError>;

    /// Replaces a file that other programs read: writes a new file and renames it over the old one,
    /// unless the old content equals `text`. `name` is the file's path below `directory`.
    ///
    /// # Errors
    /// See [`StateDirectory::write`].
    fn publish(&self, directory: &Path, name: &Path, text: &[u8]) -> Result<(), StoreError>;

    /// Removes a published file, if it exists.
    ///
    /// # Errors
    /// See [`StateDirectory::remove`].
    fn withdraw(&self, directory: &Path, name: &Path) -> Result<(), StoreError>;
}

/// The files of this host.
pub struct HostFiles;

impl Files for HostFiles {
    fn stamp(&self, path: &Path) -> Option<Stamp> {
        Stamp::at(path)
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        match std::fs::symlink_metadata(path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn version(&self, path: &Path) -> Version<Stamp> {
        source::answers(path)
    }

    fn read(&self, path: &Path) -> Result<Vec<u8>, SourceError> {
        source::read_whole(path)
    }

    fn read_stored(&self, path: &Path, most: u64) -> Result<Vec<u8>, SourceError> {
        last_good::read_at_most(path, most)
    }

    fn rename_stored(&self, path: &Path, to: &Path) -> Result<(), StoreError> {
        let (store, name) = last_good::place(path);
        store.rename(name, to)
    }

    fn remove_stored(&self, path: &Path) -> Result<(), StoreError> {
        let (store, name) = last_good::place(path);
        store.remove(name)
    }

    fn store(&self, path: &Path, text: &[u8]) -> Result<(), StoreError> {
        last_good::save(path, text)
    }

    fn publish(&self, directory: &Path, name: &Path, text: &[u8]) -> Result<(), StoreError> {
        let published = StateDirectory::public(directory);
        // Envoy reads a file again whenever the file is replaced, so a file that already has this
        // content is not replaced. The read fails if the file is longer than `text`; in this case,
        // the content differs.
        if published.read(name, text.len() as u64).is_ok_and(|before| before.as_deref() == Some(text)) {
            return Ok(());
        }
        published.write(name, &[text])
    }

    fn withdraw(&self, directory: &Path, name: &Path) -> Result<(), StoreError> {
        StateDirectory::public(directory).remove(name)
    }
}

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
