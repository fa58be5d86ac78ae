//! Reads input files as a whole, up to a maximum length.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// The bytes of a file; `None` if the file has more than `most` bytes.
///
/// # Errors
/// The file cannot be read.
pub fn read(path: &Path, most: usize) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most as u64 + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes).filter(|bytes| bytes.len() <= most))
}
