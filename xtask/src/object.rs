//! The kernel object: built, stripped, and committed with a record that ties it to its sources and its toolchain.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::command::{root, run as run_command, target};
use crate::toolchain;

/// The committed copy.
pub fn committed() -> PathBuf {
    root().join("lb-ebpf/object/socklb.o")
}

fn record_path() -> PathBuf {
    root().join("lb-ebpf/object/record.toml")
}

/// What ties the committed object to where it comes from.
#[derive(Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// SHA-256 over the sources, see [`sources_hash`].
    pub sources: String,
    /// SHA-256 of the object.
    pub object: String,
    /// Versions of compiler, linker and LLVM.
    pub toolchain: String,
}

impl Record {
    /// The record beside the committed object.
    pub fn read() -> Result<Self> {
        let path = record_path();
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("read {}", path.display()))
    }

    fn write(&self) -> Result<()> {
        let Self { sources, object, toolchain } = self;
        let text = format!(
            "# Written by `cargo xtask object`; checked by `cargo xtask tidy` and rebuilt by `cargo xtask test`.\n\
             sources = \"{sources}\"\nobject = \"{object}\"\ntoolchain = \"{toolchain}\"\n"
        );
        fs::write(record_path(), text).context("write the object's record")
    }
}

/// `cargo xtask object`.
pub fn run() -> Result<()> {
    let built = build("socklb")?;
    let bytes = fs::read(&built)?;
    fs::write(committed(), &bytes).context("write the committed object")?;
    let record = Record { sources: sources_hash()?, object: hex(&bytes), toolchain: toolchain::versions()? };
    record.write()?;
    println!("{}: {} bytes, sha256 {}", committed().display(), bytes.len(), record.object);
    Ok(())
}

/// Builds one of the kernel workspace's binaries and strips it. Returns where it is.
pub fn build(name: &str) -> Result<PathBuf> {
    let mut cargo = toolchain::ebpf_cargo("build");
    run_command(cargo.args(["--release", "--bin", name]))?;
    let from = root().join("lb-ebpf/target/bpfel-unknown-none/release").join(name);
    let to = target().join("ebpf");
    fs::create_dir_all(&to)?;
    let to = to.join(format!("{name}.o"));
    toolchain::strip(&from, &to)?;
    Ok(to)
}

/// Rebuilds the object and compares bytes, if the recorded toolchain is the one at hand.
pub fn rebuild_and_compare() -> Result<()> {
    let record = Record::read()?;
    let versions = toolchain::versions()?;
    if versions != record.toolchain {
        println!(
            "object: built by {}, this machine has {versions}: bytes are not comparable, its sources' hash is checked \
             by tidy",
            record.toolchain
        );
        return Ok(());
    }
    let bytes = fs::read(build("socklb")?)?;
    if bytes != fs::read(committed())? {
        bail!(
            "the committed object is not what its sources build to: run `cargo xtask object` and commit the result"
        );
    }
    println!("object: rebuilt, the same {} bytes", bytes.len());
    Ok(())
}

/// SHA-256 over everything that decides the object's bytes: name, length and content of each file, by name.
pub fn sources_hash() -> Result<String> {
    let root = root();
    let mut files = BTreeMap::new();
    for directory in ["lb-ebpf/src", "lb-common/src"] {
        collect(&root, &root.join(directory), &mut files)?;
    }
    for file in ["lb-ebpf/Cargo.toml", "lb-ebpf/Cargo.lock", "lb-common/Cargo.toml", "xtask/src/toolchain.rs"]
    {
        files.insert(file.to_owned(), fs::read(root.join(file)).with_context(|| format!("read {file}"))?);
    }
    let mut hash = Sha256::new();
    for (name, content) in files {
        hash.update(format!("{name} {}\n", content.len()));
        hash.update(content);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn collect(root: &Path, directory: &Path, files: &mut BTreeMap<String, Vec<u8>>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            collect(root, &path, files)?;
        } else {
            let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
            files.insert(name, fs::read(&path)?);
        }
    }
    Ok(())
}

/// SHA-256 in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
