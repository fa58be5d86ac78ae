//! The last lists that could be used, kept on disk for a start without their files.
//!
//! A list that was cut off is a shorter list, and a start that took it would drop backends. So a list is renamed into
//! place once all of it is on the disk, and is used only if it ends as it was written.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use lb_config::endpoints;
use lb_kernel::trust::{self, Untrusted};
use rustix::fs::FlockOperation;

use crate::source::{self, SourceError};

/// What ends a list that was written whole. JSON needs no more than its last bracket.
const END_OF_TOML: &[u8] = b"\n# socklb: the list is complete\n";

/// The last line of a list that is kept.
fn end(text: &[u8]) -> &'static [u8] {
    if endpoints::is_json(text) { b"" } else { END_OF_TOML }
}

/// Whether what was kept was written whole.
pub fn is_whole(text: &[u8]) -> bool {
    text.ends_with(end(text))
}

/// Reads what is kept at a path.
///
/// # Errors
/// If it cannot be read whole, or others may write to the directory of the state.
pub fn read(path: &Path) -> Result<Vec<u8>, SourceError> {
    check(path)?;
    source::read_whole(path)
}

/// As [`read`], of a file that may be so long.
///
/// # Errors
/// As there.
pub fn read_at_most(path: &Path, most: u64) -> Result<Vec<u8>, SourceError> {
    check(path)?;
    source::read_at_most(path, most)
}

/// Checks that no other user may write to the directory of the state and so decide what a start without a file uses.
/// Checked each time, because the directory may not have answered at the start.
fn check(path: &Path) -> Result<(), Untrusted> {
    match path.parent().and_then(Path::parent) {
        Some(state) if state.exists() => trust::check_directory(state, "--state"),
        _ => Ok(()),
    }
}

/// Keeps a list: writes it to another name, waits until it is on the disk, and renames it into place. If another
/// process is keeping a list in the directory, this fails, to be tried again.
///
/// # Errors
/// If it cannot be written; what was kept before stays.
pub fn keep(path: &Path, text: &[u8]) -> io::Result<()> {
    let end = end(text);
    let is_kept = |kept: Vec<u8>| kept.strip_suffix(end).is_some_and(|kept| kept == text);
    if fs::read(path).is_ok_and(is_kept) {
        return Ok(());
    }
    let directory = path.parent().ok_or_else(|| io::Error::other("it has no directory"))?;
    trust::make_directory(directory)?;
    check(path).map_err(io::Error::other)?;
    let lock = File::open(directory)?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let text = format!("another process keeps its lists in {} now", directory.display());
            return Err(io::Error::new(io::ErrorKind::WouldBlock, text));
        }
        Err(error) => return Err(error.into()),
    }
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let written = write(Path::new(&new), &[text, end]).and_then(|()| fs::rename(&new, path));
    if written.is_err() {
        // What was written takes room on a disk that may be full.
        let _ = fs::remove_file(&new);
        return written;
    }
    // The new name must be on the disk, too.
    lock.sync_all()
}

fn write(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let mut file = File::create(path)?;
    for part in parts {
        file.write_all(part)?;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use lb_config::ListFile;
    use lb_core::service::{Service, Subset};

    use super::*;
    use crate::source::FileSource;

    #[test]
    fn a_list_is_kept_with_its_end_and_one_without_is_not_whole() {
        let folder = tempfile::tempdir().unwrap();
        let toml = folder.path().join("last-good/users.toml");
        keep(&toml, b"list").unwrap();
        let kept = fs::read(&toml).unwrap();
        assert!(kept.starts_with(b"list") && is_whole(&kept));
        for cut in 0..kept.len() {
            assert!(!is_whole(&kept[..cut]), "{cut}");
        }
        let json = folder.path().join("last-good/users.json");
        keep(&json, b"[]").unwrap();
        assert_eq!(fs::read(&json).unwrap(), b"[]");
        // The text decides, not the name.
        keep(&toml, b"[{}]").unwrap();
        assert_eq!(fs::read(&toml).unwrap(), b"[{}]");
        keep(&toml, b"list").unwrap();
        // What is kept already is not written again.
        let before = fs::metadata(&toml).unwrap().modified().unwrap();
        keep(&toml, b"list").unwrap();
        assert_eq!(fs::metadata(&toml).unwrap().modified().unwrap(), before);
    }

    #[test]
    fn a_list_that_is_kept_is_read_as_before_whatever_it_is_written_in() {
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
            let file = ListFile { path: folder.path().join(name), port_name: None };
            let source = FileSource::new(&service, file, &[], folder.path());
            let read = |path: &Path, text: &[u8]| {
                let contents = source.parse(path, text.to_vec()).map_err(|error| error.to_string())?;
                Ok::<_, String>(contents.assignments.list().clone())
            };
            let list = read(&source.file.path, text.as_bytes()).unwrap();
            keep(&source.last_good, text.as_bytes()).unwrap();
            let kept = fs::read(&source.last_good).unwrap();
            assert_eq!(read(&source.last_good, &kept), Ok(list), "{text}");
            // A disk that lost the end of it gives no shorter list; what ends a line may be lost.
            let end = String::from_utf8_lossy(&kept).trim_end().len();
            for cut in 0..end {
                assert!(read(&source.last_good, &kept[..cut]).is_err(), "{cut} of {text}");
            }
        }
    }

    #[test]
    fn what_others_may_write_is_neither_used_nor_written() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("last-good/users.toml");
        keep(&path, b"list").unwrap();
        read(&path).unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("may be written by others"));
        assert!(keep(&path, b"other").unwrap_err().to_string().contains("may be written by others"));
        assert!(fs::read(&path).unwrap().starts_with(b"list"));
    }

    #[test]
    fn of_two_processes_each_keeps_a_whole_list() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("last-good/users.toml");
        let texts = [vec![b'a'; 100_000], vec![b'b'; 50_000]];
        keep(&path, &[texts[0].as_slice(), b"."].concat()).unwrap();
        std::thread::scope(|scope| {
            for text in &texts {
                let (path, texts) = (&path, &texts);
                scope.spawn(move || {
                    for round in 0..100 {
                        let mut text = text.clone();
                        text.push(round);
                        match keep(path, &text) {
                            Ok(()) => {}
                            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}"),
                        }
                        let kept = fs::read(path).unwrap();
                        let body = kept.strip_suffix(END_OF_TOML).expect("a whole list");
                        assert!(texts.iter().any(|text| body[..body.len() - 1] == **text));
                    }
                });
            }
        });
        // The second process changes nothing.
        let lock = File::open(path.parent().unwrap()).unwrap();
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
        let before = fs::read(&path).unwrap();
        assert_eq!(keep(&path, b"other").unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(fs::read(&path).unwrap(), before);
    }
}
