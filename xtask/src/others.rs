//! Builds two other versions of socklb for tests of upgrades: one has changed kernel programs, and
//! the other also has another ABI version.
//!
//! Both are built in a copy of this tree, which also has another version of the workspace's
//! packages.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{output, root, run as run_command, target};
use crate::test::{PROFILE, suite_cargo, triple};
use crate::{object, toolchain};

/// Builds both versions and copies them to the folder `programs`, as `socklb-changed` and
/// `socklb-next`.
pub fn build(programs: &Path) -> Result<()> {
    let tree = target().join("others/tree");
    copy_tree(&tree)?;
    for file in ["Cargo.toml", "Cargo.lock"] {
        let path = root().join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        write_if_other(&tree.join(file), renumbered(&text, OF_OTHERS).as_bytes())?;
    }
    // The changed programs have the same sources, but are compiled with less optimization, which
    // results in other instructions with the same effect. (With optimization for size, the program
    // of sendmsg needs more stack than a program may have.) Dependencies are not compiled again.
    let mut compile = toolchain::ebpf_cargo("build");
    compile.args(["--release", "--bin", "socklb", "--config", "profile.release.package.lb-ebpf.opt-level=2"]);
    run_command(&mut compile)?;
    let changed = tree.join("lb-ebpf/object/socklb.o");
    toolchain::strip(&root().join("lb-ebpf/target/bpfel-unknown-none/release/socklb"), &changed)?;
    if fs::read(&changed)? == fs::read(object::committed())? {
        bail!("the changed programs equal the shipped ones: an upgrade to them would prove nothing");
    }
    build_one(&tree, &programs.join("socklb-changed"))?;
    let abi = tree.join("lb-common/src/abi.rs");
    let text = fs::read_to_string(&abi)?;
    let line = text.lines().find(|line| line.starts_with("pub const ABI_VERSION: u32 = "));
    let line = line.context("lb-common/src/abi.rs has no line for ABI_VERSION")?;
    fs::write(&abi, text.replace(line, "pub const ABI_VERSION: u32 = 65535;"))?;
    build_one(&tree, &programs.join("socklb-next"))
}

fn build_one(tree: &Path, to: &Path) -> Result<()> {
    let folder = target().join("others/build");
    let mut build = suite_cargo("build")?;
    // The build shares its intermediate artefacts with the test suite: dependencies are compiled
    // once for all three trees, if their features are the same. The example only makes cargo
    // include the features that tests need.
    build.current_dir(tree).env("CARGO_TARGET_DIR", &folder).env("CARGO_BUILD_BUILD_DIR", target());
    // The two versions differ by one line, so an incremental build saves a minute.
    build.env("CARGO_INCREMENTAL", "1");
    run_command(build.args(["--workspace", "--bin", "socklb", "--example", "agent_keys"]))?;
    let built = folder.join(triple()?).join(PROFILE).join("socklb");
    fs::copy(&built, to).with_context(|| format!("copy {} to {}", built.display(), to.display()))?;
    Ok(())
}

/// The version of all packages in the copied tree. Cargo distinguishes packages by their version
/// and by their path *within* their workspace. If the versions were equal, artefacts of the two
/// trees would replace each other.
const OF_OTHERS: &str = "0.1.0-other";

/// Changes the version of the workspace's own packages in the text of a manifest or a lock file.
fn renumbered(text: &str, version: &str) -> String {
    let mut blocks: Vec<String> = text.split("\n[").map(str::to_owned).collect();
    for block in &mut blocks {
        let is_ours = block.starts_with("workspace.package]")
            || (block.starts_with("[package]]") && !block.contains("\nsource = "));
        if is_ours {
            let lines = block.split('\n').map(|line| {
                if line.starts_with("version = ") {
                    format!("version = \"{version}\"")
                } else {
                    line.to_owned()
                }
            });
            *block = lines.collect::<Vec<String>>().join("\n");
        }
    }
    blocks.join("\n[")
}

/// Writes a file unless it already has this content. An unchanged file retains its modification
/// time, so cargo does not rebuild it.
fn write_if_other(to: &Path, content: &[u8]) -> Result<()> {
    if fs::read(to).is_ok_and(|there| there == content) {
        return Ok(());
    }
    let folder = to.parent().context("the file has no folder")?;
    fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    fs::write(to, content).with_context(|| format!("write {}", to.display()))
}

/// Copies all files of the working directory that git tracks or would add, except the manifest and
/// the lock file.
fn copy_tree(to: &Path) -> Result<()> {
    let list = output(Command::new("git").current_dir(root()).args([
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    for name in list.lines().filter(|name| !["Cargo.toml", "Cargo.lock"].contains(name)) {
        // git also lists a tracked file that was deleted without a commit.
        let Ok(content) = fs::read(root().join(name)) else { continue };
        write_if_other(&to.join(name), &content)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_packages_of_the_workspace_get_another_version() {
        let manifest = "[workspace]\nresolver = \"3\"\n\n[workspace.package]\nversion = \"0.1.0\"\n\n\
                        [workspace.dependencies]\nlog = \"0.4\"\n";
        assert_eq!(renumbered(manifest, "2"), manifest.replace("0.1.0", "2"));
        let lock = "version = 4\n\n[[package]]\nname = \"log\"\nversion = \"0.1.0\"\nsource = \"registry\"\n\n\
                    [[package]]\nname = \"lb-core\"\nversion = \"0.1.0\"\ndependencies = [\n \"log\",\n]\n";
        let ours = "name = \"lb-core\"\nversion = \"";
        assert_eq!(renumbered(lock, "2"), lock.replace(&format!("{ours}0.1.0"), &format!("{ours}2")));
        let tree = fs::read_to_string(root().join("Cargo.lock")).unwrap();
        assert!(renumbered(&tree, OF_OTHERS).matches(OF_OTHERS).count() > 10);
    }
}
