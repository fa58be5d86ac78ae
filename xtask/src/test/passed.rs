//! Records which parts of the suite have passed, and with which inputs. Some parts depend on few
//! files, and run only if one of these files has changed.
//!
//! The record is `tests/passed.toml`. A run writes it, and a developer commits it. The next run
//! skips parts that have passed with the same inputs, and prints their names. `cargo xtask test
//! --all` skips nothing.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::command::root;
use crate::digest;

/// A part of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The tests in guests on all kernels.
    Guests,
    /// The release build, and all tests of the package.
    Package,
    /// The format, lints and documentation of all code, which must have no warnings.
    Lints,
    /// The licences and bans of dependencies.
    Licences,
}

impl Part {
    const ALL: [Self; 4] = [Self::Guests, Self::Package, Self::Lints, Self::Licences];

    fn name(self) -> &'static str {
        match self {
            Self::Guests => "guests",
            Self::Package => "package",
            Self::Lints => "lints",
            Self::Licences => "licences",
        }
    }

    /// The files and folders on which the part depends. For [`Part::Guests`], [`Passed`] leaves out
    /// the modules of the local tests that no guest runs.
    fn inputs(self) -> &'static [&'static str] {
        match self {
            Self::Guests => &[
                "lb-ebpf/object",
                "lb-common/Cargo.toml",
                "lb-common/src",
                "crates/lb-kernel/Cargo.toml",
                "crates/lb-kernel/src",
                "crates/lb-report/Cargo.toml",
                "crates/lb-report/src",
                "tests/Cargo.toml",
                "tests/init",
                "tests/local",
                "tests/probe",
                "tests/stage",
                "tests/stress",
                "tests/suite",
                "tests/vm",
            ],
            Self::Package => &[
                "Cargo.lock",
                "Cargo.toml",
                "lb-user/Cargo.toml",
                "lb-user/examples",
                "packaging",
                "tests/machine",
                "tests/package",
                "tests/stage/host/machine.rs",
                "xtask/src/package.rs",
            ],
            Self::Lints => &[
                ".cargo",
                "Cargo.lock",
                "Cargo.toml",
                "clippy.toml",
                "crates",
                "fuzz",
                "lb-common",
                "lb-ebpf",
                "lb-user",
                "rustfmt.toml",
                "tests",
                "xtask",
            ],
            Self::Licences => {
                &["Cargo.lock", "Cargo.toml", "deny.toml", "lb-ebpf/Cargo.lock", "lb-ebpf/Cargo.toml"]
            }
        }
    }
}

/// The record of passed parts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Passed {
    /// The last commit on which the whole suite passed.
    pub commit: Option<String>,
    /// For each part, the hash of the inputs with which it has passed.
    #[serde(default)]
    inputs: BTreeMap<String, String>,
    /// The modules of the local tests that guests do not run.
    #[serde(skip)]
    host_modules: Vec<String>,
}

const PATH: &str = "tests/passed.toml";

impl Passed {
    /// Reads the record. Without a record, no part has passed. `host_modules` are the modules of
    /// the local tests that no guest runs.
    pub fn read(host_modules: Vec<String>) -> Result<Self> {
        let text = match fs::read_to_string(root().join(PATH)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.with_context(|| format!("read {PATH}"))?,
        };
        let passed =
            toml::from_str(&text).with_context(|| format!("read {PATH}: remove it to run everything"))?;
        Ok(Self { host_modules, ..passed })
    }

    /// Whether a part has passed with its current inputs.
    pub fn has(&self, part: Part) -> Result<bool> {
        Ok(self.inputs.get(part.name()) == Some(&self.hash(part)?))
    }

    /// Records that a part has passed, and writes the record.
    pub fn note(&mut self, part: Part) -> Result<()> {
        self.inputs.insert(part.name().to_owned(), self.hash(part)?);
        self.write()
    }

    /// Records that the whole suite has passed on a commit, and writes the record.
    pub fn note_commit(&mut self, commit: String) -> Result<()> {
        self.commit = Some(commit);
        self.write()
    }

    fn write(&self) -> Result<()> {
        let mut text = "# The parts that have passed, each with a hash of the files on which it depends (xtask/src/test/passed.rs). Written by\n\
                        # `cargo xtask test`. Commit this file: the next run skips these parts if their files are unchanged.\n"
            .to_owned();
        if let Some(commit) = &self.commit {
            text += &format!("commit = \"{commit}\"\n");
        }
        text += "\n[inputs]\n";
        for part in Part::ALL {
            if let Some(hash) = self.inputs.get(part.name()) {
                text += &format!("{} = \"{hash}\"\n", part.name());
            }
        }
        fs::write(root().join(PATH), text).with_context(|| format!("write {PATH}"))
    }

    /// The hash of a part's inputs.
    fn hash(&self, part: Part) -> Result<String> {
        let mut files = digest::files(&root(), part.inputs())?;
        let path = |module: &String| format!("tests/local/{}.rs", module.replace("::", "/"));
        let unused: Vec<String> = self.host_modules.iter().map(path).collect();
        // Guests do not run all modules of the local tests, but the lints cover all of them.
        files.retain(|name, _| name != PATH && (part != Part::Guests || !unused.contains(name)));
        Ok(digest::of(&files))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_input_of_every_part_exists_and_counts() {
        let passed = Passed::default();
        for part in Part::ALL {
            for input in part.inputs() {
                assert!(!digest::files(&root(), &[input]).unwrap().is_empty(), "{input} is empty");
            }
            let mut files = digest::files(&root(), part.inputs()).unwrap();
            files.remove(PATH);
            assert_eq!(passed.hash(part).unwrap(), digest::of(&files));
            files.first_entry().unwrap().get_mut().push(b' ');
            assert_ne!(passed.hash(part).unwrap(), digest::of(&files));
        }
    }

    #[test]
    fn a_module_that_no_guest_runs_does_not_count_for_guests() {
        let without = Passed { host_modules: vec!["backends::endpoints".to_owned()], ..Passed::default() };
        assert_ne!(without.hash(Part::Guests).unwrap(), Passed::default().hash(Part::Guests).unwrap());
        assert_eq!(without.hash(Part::Lints).unwrap(), Passed::default().hash(Part::Lints).unwrap());
    }

    #[test]
    fn a_part_has_passed_if_its_inputs_match_the_record() {
        let mut passed = Passed::default();
        assert!(!passed.has(Part::Licences).unwrap());
        let hash = passed.hash(Part::Licences).unwrap();
        passed.inputs.insert("licences".to_owned(), hash);
        assert!(passed.has(Part::Licences).unwrap() && !passed.has(Part::Lints).unwrap());
        passed.inputs.insert("licences".to_owned(), "0".to_owned());
        assert!(!passed.has(Part::Licences).unwrap());
    }
}
