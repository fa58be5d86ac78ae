//! Reads whole files. The files must be regular files, and not longer than a limit.

use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens a regular file for reading.
///
/// # Errors
/// If the file cannot be opened, or is a directory, a pipe or a device.
pub fn open(path: &Path) -> io::Result<(File, Metadata)> {
    open_with(path, 0)
}

/// Like [`open`], but does not follow a symbolic link at the end of the path.
///
/// # Errors
/// If [`open`] fails, or if the path is a symbolic link.
pub fn open_itself(path: &Path) -> io::Result<(File, Metadata)> {
    open_with(path, libc::O_NOFOLLOW).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => {
            io::Error::new(io::ErrorKind::InvalidInput, "the path is a symbolic link, which is not followed")
        }
        _ => error,
    })
}

fn open_with(path: &Path, flags: i32) -> io::Result<(File, Metadata)> {
    // Without O_NONBLOCK, opening a pipe would block until another process opens the pipe for
    // writing.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK | flags).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    Ok((file, metadata))
}

/// Returns the content of a file; `None` if it has more than `most` bytes. The limit bounds memory
/// and time if an operator names a wrong file.
///
/// # Errors
/// If the file cannot be read.
pub fn read(file: &File, most: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    // Reads one byte more than allowed, so that a longer file is detected and not truncated.
    let length = file.take(most + 1).read_to_end(&mut bytes)?;
    Ok((length as u64 <= most).then_some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_read_up_to_a_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        let (file, metadata) = open(&path).unwrap();
        assert_eq!((metadata.len(), read(&file, 5).unwrap().as_deref()), (5, Some(&b"12345"[..])));
        assert_eq!(read(&open(&path).unwrap().0, 4).unwrap(), None);
        assert_eq!(open(folder.path()).unwrap_err().to_string(), "it is not a regular file");
        assert_eq!(open(&folder.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        // A pipe without a writer would block a reader.
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        assert_eq!(open(&pipe).unwrap_err().to_string(), "it is not a regular file");
    }
}
