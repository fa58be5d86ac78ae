//! Other builds of socklb, for tests of upgrades: one with changed kernel programs, one with another ABI version as well.
//!
//! Both are this tree's sources with one thing changed, built apart from it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{output, root, run as run_command, target};
use crate::test::{PROFILE, suite_cargo, triple};
use crate::{object, toolchain};

/// Builds both and puts them into the folder of the program itself, as `socklb-changed` and `socklb-next`.
pub fn build(programs: &Path) -> Result<()> {
    let tree = target().join("others/tree");
    copy_tree(&tree)?;
    // The same sources, optimized a little less: other instructions that do the same. (Optimized for size, sendmsg takes
    // more stack than a program may have.)
    let mut compile = toolchain::ebpf_cargo("build");
    compile.args(["--release", "--bin", "socklb"]).env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "2");
    run_command(&mut compile)?;
    let changed = tree.join("lb-ebpf/object/socklb.o");
    toolchain::strip(&root().join("lb-ebpf/target/bpfel-unknown-none/release/socklb"), &changed)?;
    if fs::read(&changed)? == fs::read(object::committed())? {
        bail!("the changed programs are the same: an upgrade to them would prove nothing");
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
    // Intermediate artefacts are the suite's own: dependencies are compiled once for all three trees. They are the same
    // only with the same features, which the example's dependencies for tests bring in.
    build.current_dir(tree).env("CARGO_TARGET_DIR", &folder).env("CARGO_BUILD_BUILD_DIR", target());
    run_command(build.args(["--workspace", "--bin", "socklb", "--example", "configuration"]))?;
    let built = folder.join(triple()?).join(PROFILE).join("socklb");
    fs::copy(&built, to).with_context(|| format!("copy {} to {}", built.display(), to.display()))?;
    Ok(())
}

/// Copies what git knows of this tree, as it is in the working directory. What has not changed keeps its time, so that it
/// is not built again.
fn copy_tree(to: &Path) -> Result<()> {
    let list = output(Command::new("git").current_dir(root()).args([
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    for name in list.lines() {
        let (from, to): (PathBuf, PathBuf) = (root().join(name), to.join(name));
        // Deleted and not committed.
        let Ok(content) = fs::read(&from) else { continue };
        if fs::read(&to).is_ok_and(|there| there == content) {
            continue;
        }
        let folder = to.parent().context("a file lies in a folder")?;
        fs::create_dir_all(folder)?;
        fs::write(&to, content).with_context(|| format!("write {}", to.display()))?;
    }
    Ok(())
}
