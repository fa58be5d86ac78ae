//! Builds the Debian package: the programs `socklb` and `socklb-sim`, files generated from the
//! command line, pages of documentation, and everything in `packaging/`.
//!
//! Debian's own tools determine the dependencies and write the archive. `packaging/debian` contains
//! the input of these tools, and the scripts that dpkg runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, root, run as run_command, target};
use crate::test::{PROFILE, suite_cargo, triple};

/// The packaged programs. The planner (`socklb-sim`) needs none of [`FILES`].
const PROGRAMS: [&str; 2] = ["socklb", "socklb-sim"];

/// The other files of the package: paths in the repository, in which `*` matches any text, and
/// their destinations. A destination that ends with `/` is a folder.
const FILES: [(&str, &str); 26] = [
    ("packaging/systemd/socklb.service", "usr/lib/systemd/system/"),
    ("packaging/systemd/socklb-agent.service", "usr/lib/systemd/system/"),
    ("packaging/systemd/socklb.sysusers", "usr/lib/sysusers.d/socklb.conf"),
    ("packaging/systemd/socklb.tmpfiles", "usr/lib/tmpfiles.d/socklb.conf"),
    ("packaging/systemd/*.conf", "usr/share/doc/socklb/examples/"),
    ("packaging/examples/*.toml", "usr/share/doc/socklb/examples/"),
    ("packaging/grafana/socklb.json", "usr/share/doc/socklb/examples/grafana/"),
    ("packaging/kubernetes/socklb.yaml", "usr/share/doc/socklb/examples/kubernetes/"),
    ("packaging/prometheus/*.yml", "usr/share/doc/socklb/examples/prometheus/"),
    ("target/package/files/*.1", "usr/share/man/man1/"),
    ("target/package/files/*.5", "usr/share/man/man5/"),
    ("target/package/files/socklb.bash", "usr/share/bash-completion/completions/socklb"),
    ("target/package/files/socklb-sim.bash", "usr/share/bash-completion/completions/socklb-sim"),
    ("target/package/files/_socklb*", "usr/share/zsh/vendor-completions/"),
    ("target/package/files/*.fish", "usr/share/fish/vendor_completions.d/"),
    ("packaging/debian/README.Debian", "usr/share/doc/socklb/"),
    // Without a Debian revision the package is native, and the changelog of a native package has
    // this name.
    ("packaging/debian/changelog", "usr/share/doc/socklb/"),
    ("packaging/debian/copyright", "usr/share/doc/socklb/"),
    ("lb-ebpf/LICENSE", "usr/share/doc/socklb/LICENSE.object"),
    ("README.md", "usr/share/doc/socklb/"),
    ("CHANGELOG.md", "usr/share/doc/socklb/"),
    ("docs/*.md", "usr/share/doc/socklb/docs/"),
    ("docs/guide/*.md", "usr/share/doc/socklb/docs/guide/"),
    ("docs/reference/*.md", "usr/share/doc/socklb/docs/reference/"),
    ("docs/design/*.md", "usr/share/doc/socklb/docs/design/"),
    ("packaging/debian/p*", "DEBIAN/"),
];

/// The folders whose files Debian requires to be compressed.
const COMPRESSED: [&str; 2] = ["usr/share/man", "usr/share/doc/socklb/changelog"];

/// `cargo xtask package`.
pub fn run() -> Result<()> {
    let package = build(From::Release)?;
    println!("package: {}", package.display());
    Ok(())
}

/// The build of the packaged programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    Release,
    /// The build of the test suite, which already exists. Tests install and use a package of this
    /// build. It must not be shipped.
    Suite,
}

/// Builds the package and returns its path. Afterwards, the folder contains no other package.
pub fn build(from: From) -> Result<PathBuf> {
    // This check comes before the build, because the build takes minutes.
    if let Err(error) = Command::new("dpkg-shlibdeps").arg("--version").output() {
        bail!(
            "cannot start dpkg-shlibdeps: {error}; `cargo xtask setup --check` lists all missing tools, `cargo xtask setup` installs them"
        );
    }
    // The folder is in the repository even if cargo's target folder is elsewhere, because tests
    // look for the package there.
    let folder = root().join("target/package");
    let files = folder.join("files");
    // The folder is emptied first, so that the manual page of a removed command is not packaged.
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    fs::create_dir_all(&files).with_context(|| format!("create {}", files.display()))?;
    let suite = target().join(triple()?).join(PROFILE);
    // The example writes the manual pages and completions. The build uses the features of the whole
    // workspace, like the build of the tests, so that nothing is compiled twice.
    let mut build = suite_cargo("build")?;
    build.args(["--workspace", "--example", "manual"]);
    if from == From::Suite {
        build.args(["--bin", "socklb", "--bin", "socklb-sim"]);
    }
    run_command(&mut build)?;
    run_command(Command::new(suite.join("examples/manual")).arg(&files))?;
    let programs = match from {
        From::Release => {
            let packages = ["--package", "lb-user", "--package", "lb-sim", "--bins"];
            run_command(cargo().args(["build", "--release", "--locked"]).args(packages))?;
            target().join("release")
        }
        From::Suite => suite,
    };
    let tree = folder.join("tree");
    lay_out(&programs, &tree)?;
    write_control(from, &tree)?;
    // The modes in a working copy depend on its umask.
    run_command(Command::new("chmod").args(["--recursive", "u=rwX,go=rX"]).arg(&tree))?;
    let mut deb = Command::new("dpkg-deb");
    // Packages that are not shipped are not compressed.
    let level = if from == From::Suite { "-z0" } else { "-z6" };
    run_command(deb.args(["--root-owner-group", "-Zxz", level, "--build"]).arg(&tree).arg(&folder))?;
    fs::remove_dir_all(&tree).with_context(|| format!("remove {}", tree.display()))?;
    let mut entries = fs::read_dir(&folder)?.flatten().map(|entry| entry.path());
    let is_package = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "deb");
    entries.find(is_package).with_context(|| format!("dpkg-deb left no package in {}", folder.display()))
}

/// Copies programs and files to their places below `tree`.
fn lay_out(programs: &Path, tree: &Path) -> Result<()> {
    for program in PROGRAMS {
        let to = tree.join("usr/bin").join(program);
        copy(&programs.join(program), &to)?;
        let mut strip = Command::new("strip");
        strip.args(["--strip-unneeded", "--remove-section=.comment", "--remove-section=.note"]);
        run_command(strip.arg(to))?;
    }
    for (pattern, place) in FILES {
        for file in matching(pattern)? {
            let mut to = tree.join(place);
            if place.ends_with('/') {
                to.push(file.file_name().context("the file has no name")?);
            }
            copy(&file, &to)?;
        }
    }
    let mut compress = Command::new("gzip");
    compress.args(["-9", "--no-name", "--recursive"]).args(COMPRESSED.map(|path| tree.join(path)));
    run_command(&mut compress)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().context("the file has no folder")?)?;
    fs::copy(from, to).map(drop).with_context(|| format!("copy {} to {}", from.display(), to.display()))
}

/// The files that match a pattern of [`FILES`]. Returns an error if no file matches.
fn matching(pattern: &str) -> Result<Vec<PathBuf>> {
    let Some((before, after)) = pattern.split_once('*') else { return Ok(vec![root().join(pattern)]) };
    let (folder, before) = before.rsplit_once('/').context("the pattern has no folder")?;
    let folder = root().join(folder);
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(before) && name.ends_with(after) {
            files.push(entry.path());
        }
    }
    if files.is_empty() {
        bail!("the package needs {pattern}, and no file has such a name");
    }
    Ok(files)
}

/// Writes the description of the package into `tree`, with the libraries that its programs need.
/// The version is that of the changelog.
fn write_control(from: From, tree: &Path) -> Result<()> {
    // Both tools read `debian/control`. Without these paths they would also write files beside it.
    let debian = root().join("packaging");
    let variables = tree.with_file_name("substvars");
    fs::write(&variables, "shlibs:Depends=\n").with_context(|| format!("write {}", variables.display()))?;
    let variables = format!("-T{}", variables.display());
    // The programs of the suite are linked statically, so they need no libraries.
    if from == From::Release {
        let mut libraries = Command::new("dpkg-shlibdeps");
        // libc6 itself depends on libgcc-s1.
        libraries.arg("-xlibgcc-s1").args(PROGRAMS.map(|program| tree.join("usr/bin").join(program)));
        run_command(libraries.current_dir(&debian).arg(&variables))?;
    }
    let mut control = Command::new("dpkg-gencontrol");
    control.arg(format!("-P{}", tree.display()));
    control.arg(format!("-f{}", tree.with_file_name("list").display()));
    run_command(control.current_dir(&debian).arg(&variables))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_of_the_package_names_files() {
        for (pattern, _) in FILES.iter().filter(|(pattern, _)| !pattern.starts_with("target/")) {
            assert!(matching(pattern).unwrap().iter().all(|file| file.is_file()), "{pattern}");
        }
        let error = matching("docs/*.absent").unwrap_err().to_string();
        assert_eq!(error, "the package needs docs/*.absent, and no file has such a name");
    }
}
