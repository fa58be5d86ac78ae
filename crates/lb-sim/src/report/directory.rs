//! Writes a report's files without overwriting files that are not part of a report.
//!
//! Every file of a report begins with a mark. A directory that is not empty must contain a file
//! with the mark, and a file without the mark is never overwritten. Each file is written under
//! another name and then renamed, so other processes never read an incomplete file.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{ErrorKind, Read as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// The beginning of every file that the report writes. Only files with this beginning are
/// overwritten.
pub const MARK: &str = "<!-- written by socklb-sim report -->";

/// The beginning of the names of incomplete files. A killed run may leave such a file behind.
const UNFINISHED: &str = ".socklb-sim-";

/// The mark must be within this number of bytes from the start of a file.
const HEAD: u64 = 256;

/// A directory into which a report may be written.
#[derive(Debug)]
pub struct ReportDirectory {
    path: PathBuf,
}

impl ReportDirectory {
    /// Creates the directory if it does not exist, and checks whether existing content is a report.
    pub fn open(path: &Path) -> Result<Self> {
        fs::create_dir_all(path).with_context(|| format!("create the directory {}", path.display()))?;
        let mut foreign = None;
        for entry in fs::read_dir(path).with_context(|| format!("list {}", path.display()))? {
            let entry = entry.with_context(|| format!("list {}", path.display()))?;
            if is_unfinished(&entry.file_name()) {
                continue;
            }
            if is_marked(&entry.path())? {
                return Ok(Self { path: path.to_owned() });
            }
            foreign = Some(entry.file_name());
        }
        if let Some(name) = foreign {
            bail!(
                "--out {}: the directory contains {}, but no earlier report: name an empty directory, or one \
                 that does not exist",
                path.display(),
                name.display()
            );
        }
        Ok(Self { path: path.to_owned() })
    }

    /// Writes the files; each pair is a name and a text. If any of them would replace a file
    /// without the mark, writes no file.
    pub fn write(&self, files: &[(String, String)]) -> Result<()> {
        for (name, _) in files {
            let path = self.path.join(name);
            let there = match fs::symlink_metadata(&path) {
                Ok(metadata) => metadata,
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(error).with_context(|| format!("inspect {}", path.display())),
            };
            if !there.is_file() || !is_marked(&path)? {
                bail!("{} was not written by `socklb-sim report`, so it is not replaced", path.display());
            }
        }
        for (name, text) in files {
            self.replace(name, text)?;
        }
        Ok(())
    }

    fn replace(&self, name: &str, text: &str) -> Result<()> {
        let (path, unfinished) = (self.path.join(name), self.path.join(format!("{UNFINISHED}{name}")));
        match fs::remove_file(&unfinished) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("remove {}", unfinished.display())),
        }
        let write = || {
            let mut file = File::create_new(&unfinished)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&unfinished, &path)
        };
        write().with_context(|| format!("write {}", path.display()))
    }
}

fn is_unfinished(name: &OsStr) -> bool {
    name.to_string_lossy().starts_with(UNFINISHED)
}

/// Whether the path is a regular file with the mark in its first [`HEAD`] bytes.
fn is_marked(path: &Path) -> Result<bool> {
    if !fs::symlink_metadata(path).with_context(|| format!("inspect {}", path.display()))?.is_file() {
        return Ok(false);
    }
    let mut head = Vec::new();
    let file = File::open(path).with_context(|| format!("read {}", path.display()))?;
    file.take(HEAD).read_to_end(&mut head).with_context(|| format!("read {}", path.display()))?;
    Ok(String::from_utf8_lossy(&head).contains(MARK))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(text: &str) -> Vec<(String, String)> {
        [("index.html", "<!DOCTYPE html>\n"), ("a.svg", "")]
            .map(|(name, before)| (name.to_owned(), format!("{before}{MARK}\n{text}\n")))
            .to_vec()
    }

    fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn a_report_replaces_an_earlier_report() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made/with/parents");
        for text in ["first", "second"] {
            ReportDirectory::open(&path).unwrap().write(&files(text)).unwrap();
            assert_eq!(names(&path), ["a.svg", "index.html"]);
            assert_eq!(fs::read_to_string(path.join("a.svg")).unwrap(), format!("{MARK}\n{text}\n"));
        }
    }

    #[test]
    fn a_directory_with_foreign_files_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("thesis.tex"), "years of work").unwrap();
        let error = format!("{:#}", ReportDirectory::open(folder.path()).unwrap_err());
        assert_eq!(
            error,
            format!(
                "--out {}: the directory contains thesis.tex, but no earlier report: name an empty \
                 directory, or one that does not exist",
                folder.path().display()
            )
        );
    }

    #[test]
    fn a_foreign_file_is_not_replaced_and_nothing_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let directory = ReportDirectory::open(folder.path()).unwrap();
        directory.write(&files("first")).unwrap();
        fs::write(folder.path().join("a.svg"), "<svg/>").unwrap();
        let error = format!(
            "{:#}",
            ReportDirectory::open(folder.path()).unwrap().write(&files("second")).unwrap_err()
        );
        let path = folder.path().join("a.svg");
        assert_eq!(
            error,
            format!("{} was not written by `socklb-sim report`, so it is not replaced", path.display())
        );
        assert_eq!(fs::read_to_string(path).unwrap(), "<svg/>");
        assert!(fs::read_to_string(folder.path().join("index.html")).unwrap().contains("first"));
    }

    #[test]
    fn leftovers_of_a_killed_run_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(".socklb-sim-index.html"), "half").unwrap();
        ReportDirectory::open(folder.path()).unwrap().write(&files("whole")).unwrap();
        assert_eq!(names(folder.path()), ["a.svg", "index.html"]);
    }

    #[test]
    fn a_file_as_destination_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "").unwrap();
        let error = format!("{:#}", ReportDirectory::open(&path).unwrap_err());
        assert!(error.starts_with(&format!("create the directory {}: ", path.display())), "{error}");
    }
}
