//! Builds and strips the kernel objects. Writes the copies to be committed, and a record that ties
//! them to their sources and their toolchain.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::command::{root, run as run_command, target};
use crate::{digest, toolchain};

/// The shipped objects: the programs for clients, the programs that probe the kernel's features,
/// the host's maps with the receiver, and the responder.
const NAMES: [&str; 4] = ["socklb", "probes", "host", "responder"];

/// The objects that also have a variant with programs that write log lines, for developers.
const LOGGING: [&str; 3] = ["socklb", "host", "responder"];

/// The path of the committed object with the programs for clients.
pub fn committed() -> PathBuf {
    committed_as("socklb")
}

fn committed_as(name: &str) -> PathBuf {
    root().join("lb-ebpf/object").join(name).with_extension("o")
}

fn record_path() -> PathBuf {
    root().join("lb-ebpf/object/record.toml")
}

/// The record that ties the committed objects to their sources.
#[derive(Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The SHA-256 of the sources, see [`sources_hash`].
    pub sources: String,
    /// The versions of compiler, linker and LLVM.
    pub toolchain: String,
    /// The SHA-256 of each object.
    pub objects: BTreeMap<String, String>,
}

impl Record {
    /// Reads the record in the directory of the committed objects.
    pub fn read() -> Result<Self> {
        let path = record_path();
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("read {}", path.display()))
    }

    fn write(&self) -> Result<()> {
        let Self { sources, toolchain, objects } = self;
        let mut text = format!(
            "# Written by `cargo xtask object`; checked by `cargo xtask tidy` and rebuilt by `cargo xtask test`.\n\
             sources = \"{sources}\"\ntoolchain = \"{toolchain}\"\n\n[objects]\n"
        );
        for (name, hash) in objects {
            text.push_str(&format!("{name} = \"{hash}\"\n"));
        }
        fs::write(record_path(), text).context("write the objects' record")
    }
}

/// `cargo xtask object`.
pub fn run() -> Result<()> {
    for name in NAMES {
        let bytes = fs::read(build(name)?)?;
        let to = committed_as(name);
        fs::write(&to, &bytes).with_context(|| format!("write {}", to.display()))?;
        println!("{}: {} bytes, sha256 {}", to.display(), bytes.len(), hex(&bytes));
    }
    Record { sources: sources_hash()?, toolchain: toolchain::versions()?, objects: hashes()? }.write()
}

/// The SHA-256 of each committed object.
pub fn hashes() -> Result<BTreeMap<String, String>> {
    let hash = |name| {
        let path = committed_as(name);
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        Ok((name.to_owned(), hex(&bytes)))
    };
    NAMES.into_iter().map(hash).collect()
}

/// Builds a binary of the kernel workspace, and strips it. Returns its path.
pub fn build(name: &str) -> Result<PathBuf> {
    build_with(name, &[], &target().join("ebpf"))
}

fn build_with(name: &str, options: &[&str], to: &Path) -> Result<PathBuf> {
    let mut cargo = toolchain::ebpf_cargo("build");
    run_command(cargo.args(["--release", "--bin", name]).args(options))?;
    let from = root().join("lb-ebpf/target/bpfel-unknown-none/release").join(name);
    fs::create_dir_all(to)?;
    let to = to.join(format!("{name}.o"));
    toolchain::strip(&from, &to)?;
    Ok(to)
}

/// Builds the variants that write log lines, for developers of the programs. Returns their folder.
pub fn build_logging() -> Result<PathBuf> {
    let folder = target().join("ebpf/log-programs");
    for name in LOGGING {
        let built = build_with(name, &["--features", "log-programs"], &folder.join("new"))?;
        let to = folder.join(name).with_extension("o");
        // An unchanged file is not written again, because cargo would rebuild the crates that
        // include the file.
        if fs::read(&to).ok() != Some(fs::read(&built)?) {
            fs::copy(&built, &to)?;
        }
    }
    Ok(folder)
}

/// Copies the variants that write log lines to a folder beside the test programs, where tests look
/// for them.
pub fn build_logging_for_tests(programs: &Path) -> Result<()> {
    let folder = programs.join("log-programs");
    fs::create_dir_all(&folder)?;
    let built = build_logging()?;
    for name in LOGGING {
        let file = Path::new(name).with_extension("o");
        fs::copy(built.join(&file), folder.join(&file))
            .with_context(|| format!("copy {name} to {}", folder.display()))?;
    }
    Ok(())
}

/// Rebuilds the objects and compares their bytes with the committed ones, if the recorded toolchain
/// is available.
pub fn rebuild_and_compare() -> Result<()> {
    let record = Record::read()?;
    let versions = toolchain::versions()?;
    if versions != record.toolchain {
        println!(
            "objects: built by {}, but this machine has {versions}: not comparing bytes; tidy checks the \
             hash of the sources",
            record.toolchain
        );
        return Ok(());
    }
    for name in NAMES {
        let bytes = fs::read(build(name)?)?;
        if bytes != fs::read(committed_as(name))? {
            bail!(
                "the committed object {name} differs from a build of its sources: run `cargo xtask object` and commit \
                 the result"
            );
        }
        println!("object {name}: rebuilt; all {} bytes are the same", bytes.len());
    }
    Ok(())
}

/// The SHA-256 of everything that determines the objects' bytes.
pub fn sources_hash() -> Result<String> {
    Ok(digest::of(&digest::files(&root(), &SOURCES)?))
}

/// The files that determine the objects' bytes. The list contains only the modules of `lb-report`
/// that are built without `std`.
const SOURCES: [&str; 14] = [
    "lb-common/Cargo.toml",
    "lb-common/src",
    "lb-ebpf/Cargo.lock",
    "lb-ebpf/Cargo.toml",
    "lb-ebpf/src",
    "crates/lb-report/Cargo.toml",
    "crates/lb-report/src/answer.rs",
    "crates/lb-report/src/frame.rs",
    "crates/lb-report/src/lib.rs",
    "crates/lb-report/src/receive.rs",
    "crates/lb-report/src/respond.rs",
    "crates/lb-report/src/wire",
    "crates/lb-report/src/wire.rs",
    "xtask/src/toolchain.rs",
];

/// The SHA-256 of the bytes, in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source that is missing in the list does not make the object stale when it changes.
    #[test]
    fn every_module_built_without_std_is_a_source() {
        let text = fs::read_to_string(root().join("crates/lb-report/src/lib.rs")).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let modules: Vec<&str> = lines
            .windows(2)
            .filter(|pair| !pair[0].starts_with("#[cfg("))
            .filter_map(|pair| pair[1].strip_prefix("pub mod ")?.strip_suffix(';'))
            .collect();
        let is_source =
            |path: &Path| !path.exists() || SOURCES.iter().any(|source| root().join(source) == path);
        let folder = root().join("crates/lb-report/src");
        for module in &modules {
            let file = folder.join(module).with_extension("rs");
            assert!(is_source(&file) && is_source(&folder.join(module)), "{module}");
        }
        assert_eq!(modules, ["wire", "frame", "receive", "answer", "respond"]);
    }
}
