//! Hashes files of the repository with SHA-256. A record of a result contains the hash, which
//! identifies the versions of the files that led to the result.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// The content of files, keyed by their path below the root of the repository.
pub type Files = BTreeMap<String, Vec<u8>>;

/// Reads files, and every file below folders except build output (folders named `target`).
pub fn files(root: &Path, inputs: &[&str]) -> Result<Files> {
    let mut files = Files::new();
    let mut pending: Vec<_> = inputs.iter().map(|input| Path::new(input).to_owned()).collect();
    // The loop is bounded by the number of files and folders below `inputs`, because each is read
    // once.
    while let Some(name) = pending.pop() {
        let path = root.join(&name);
        if !path.is_dir() {
            let content = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            files.insert(name.to_string_lossy().into_owned(), content);
            continue;
        }
        for entry in fs::read_dir(&path).with_context(|| format!("read {}", path.display()))? {
            let entry = entry?.file_name();
            if entry != "target" {
                pending.push(name.join(entry));
            }
        }
    }
    Ok(files)
}

/// SHA-256 over name, length and content of each file, in the order of the names.
pub fn of(files: &Files) -> String {
    let mut hash = Sha256::new();
    for (name, content) in files {
        hash.update(format!("{name} {}\n", content.len()));
        hash.update(content);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
