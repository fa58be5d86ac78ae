//! The last good lists, stored on disk for a start at which endpoint files cannot be used.
//!
//! A stored list may have been truncated. A truncated list may be a valid, shorter list, and a
//! start with this list removes backends. A stored list is therefore used only if its end is
//! intact.

use std::io;
use std::path::Path;

use lb_config::endpoints;
use lb_host::store::{StateDirectory, StoreError};

use crate::source::{self, SourceError};

/// The end of a complete stored list. A list in JSON does not need this line: its closing bracket
/// is the end.
const END_OF_TOML: &[u8] = b"\n# socklb: the list is complete\n";

/// The bytes that are added to the end of a list when it is stored.
fn end(text: &[u8]) -> &'static [u8] {
    if endpoints::is_json(text) { b"" } else { END_OF_TOML }
}

/// Whether the text of a stored list is complete.
pub fn is_whole(text: &[u8]) -> bool {
    text.ends_with(end(text))
}

/// Reads a stored list. `path` is two levels below the state directory.
///
/// # Errors
/// If the file cannot be read completely, or other users may write to the file or to the state
/// directory.
pub fn read(path: &Path) -> Result<Vec<u8>, SourceError> {
    read_at_most(path, source::MAX_BYTES)
}

/// Like [`read`], for a file of at most `most` bytes.
///
/// # Errors
/// The errors of [`read`].
pub fn read_at_most(path: &Path, most: u64) -> Result<Vec<u8>, SourceError> {
    let (store, name) = place(path);
    match store.read(name, most) {
        Ok(Some(text)) => Ok(text),
        Ok(None) => Err(SourceError::Read { path: path.to_owned(), source: io::ErrorKind::NotFound.into() }),
        Err(StoreError::Untrusted(error)) => Err(error.into()),
        Err(StoreError::TooLarge(path, most)) => Err(SourceError::TooLarge(path, most)),
        Err(StoreError::Read { path, source } | StoreError::Write { path, source }) => {
            Err(SourceError::Read { path, source })
        }
    }
}

/// The state directory of a file, and the file's path in it.
pub fn place(path: &Path) -> (StateDirectory, &Path) {
    let root = path.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    (StateDirectory::at(root), path.strip_prefix(root).unwrap_or(path))
}

/// Stores a list. Fails if another process is storing a list in the same directory; the caller must
/// then retry.
///
/// # Errors
/// If the list cannot be written. The previously stored list is then unchanged.
pub fn save(path: &Path, text: &[u8]) -> Result<(), StoreError> {
    let end = end(text);
    let is_stored = |stored: Vec<u8>| stored.strip_suffix(end).is_some_and(|stored| stored == text);
    if read(path).is_ok_and(is_stored) {
        return Ok(());
    }
    let (store, name) = place(path);
    store.write(name, &[text, end])
}

/// The content of the stored file of a list with this text.
#[cfg(test)]
pub fn whole(text: &[u8]) -> Vec<u8> {
    [text, end(text)].concat()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lb_config::ListFile;
    use lb_core::service::{Service, Subset};

    use super::*;
    use crate::source::{ListOrigin, ListSource};

    #[test]
    fn a_stored_list_without_its_end_is_not_whole() {
        let folder = tempfile::tempdir().unwrap();
        let toml = folder.path().join("last-good/users.toml");
        save(&toml, b"list").unwrap();
        let stored = fs::read(&toml).unwrap();
        assert!(stored.starts_with(b"list") && is_whole(&stored));
        for cut in 0..stored.len() {
            assert!(!is_whole(&stored[..cut]), "{cut}");
        }
        let json = folder.path().join("last-good/users.json");
        save(&json, b"[]").unwrap();
        assert_eq!(fs::read(&json).unwrap(), b"[]");
        // The text, not the name of the file, determines the format.
        save(&toml, b"[{}]").unwrap();
        assert_eq!(fs::read(&toml).unwrap(), b"[{}]");
        save(&toml, b"list").unwrap();
        // If an equal list is already stored, the list is not written again.
        let before = fs::metadata(&toml).unwrap().modified().unwrap();
        save(&toml, b"list").unwrap();
        assert_eq!(fs::metadata(&toml).unwrap().modified().unwrap(), before);
    }

    #[test]
    fn a_stored_list_reads_like_its_file_in_every_format() {
        let folder = tempfile::tempdir().unwrap();
        let service = Service::new("users", "10.96.0.10:80".parse().unwrap(), Subset::All, 0);
        let texts = [
            ("users", "- targets: [10.0.0.1:1]\n  labels: {zone: |\n    b}"),
            ("users.yml", "[10.0.0.1:1]"),
            ("users.YAML", "[10.0.0.1:1]"),
            (
                "users.yaml",
                "{kind: EndpointSlice, addressType: IPv4, endpoints: [addresses: [10.0.0.1]], ports: [port: 1]}",
            ),
            ("users.txt", "\u{feff}[\"10.0.0.1:1\"]\r\n"),
            ("users", "endpoint = [{ address = '10.0.0.1:1' }]"),
        ];
        for (name, text) in texts {
            let file = ListFile { path: folder.path().join(name), port_name: None, protocol: None };
            let source = ListSource::new(&service, ListOrigin::File(file), &[], folder.path());
            let read = |path: &Path, text: &[u8]| {
                let contents = source.parse(path, text.to_vec(), None).map_err(|error| error.to_string())?;
                Ok::<_, String>(contents.assignments.list().clone())
            };
            let list = read(source.file().unwrap(), text.as_bytes()).unwrap();
            save(&source.last_good, text.as_bytes()).unwrap();
            let stored = fs::read(&source.last_good).unwrap();
            assert_eq!(read(&source.last_good, &stored), Ok(list), "{text}");
            // If a disk loses the end of the file, the list is rejected, not used as a shorter
            // list. Only the last line feed may be missing.
            let end = String::from_utf8_lossy(&stored).trim_end().len();
            for cut in 0..end {
                assert!(read(&source.last_good, &stored[..cut]).is_err(), "the first {cut} bytes of {text}");
            }
        }
    }

    #[test]
    fn a_directory_that_others_may_write_is_not_used() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("last-good/users.toml");
        save(&path, b"list").unwrap();
        read(&path).unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("is writable by other users"));
        assert!(save(&path, b"other").unwrap_err().to_string().contains("is writable by other users"));
        assert!(fs::read(&path).unwrap().starts_with(b"list"));
    }

    #[test]
    fn two_processes_never_store_a_mixed_list() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("last-good/users.toml");
        let texts = [vec![b'a'; 100_000], vec![b'b'; 50_000]];
        save(&path, &[texts[0].as_slice(), b"."].concat()).unwrap();
        std::thread::scope(|scope| {
            for text in &texts {
                let (path, texts) = (&path, &texts);
                scope.spawn(move || {
                    for round in 0..100 {
                        let mut text = text.clone();
                        text.push(round);
                        match save(path, &text) {
                            Ok(()) => {}
                            Err(error) => {
                                let error = crate::error::chain(&error);
                                assert!(error.contains("another process is writing in"), "{error}");
                            }
                        }
                        let stored = fs::read(path).unwrap();
                        let body = stored.strip_suffix(END_OF_TOML).expect("the stored list is complete");
                        assert!(texts.iter().any(|text| body[..body.len() - 1] == **text));
                    }
                });
            }
        });
    }
}
