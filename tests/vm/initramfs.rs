//! The content of a guest's root: init, the tests and their programs, and the few programs of the
//! host that tests call.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cpio::Archive;

/// Programs of the host that tests call, each with its purpose. Tests find them at this path or
/// through `PATH`. The image also has the libraries that they are linked to, so tests need no
/// further file in a guest.
const HOST_PROGRAMS: [(&str, &str); 7] = [
    ("/usr/sbin/bpftool", "shows maps by the names of their fields"),
    ("/usr/bin/setpriv", "removes capabilities"),
    ("/usr/bin/mkfifo", "puts a pipe in the place of a file"),
    ("/usr/bin/chmod", "runs commands that messages advise"),
    ("/usr/bin/chown", "runs commands that messages advise"),
    ("/usr/bin/sleep", "is a process with another name"),
    ("/usr/bin/ip", "connects a network namespace with another one"),
];

/// The programs of this repository. They are in the same folder as the tests, because the stage
/// looks for them there.
const PROGRAMS: [&str; 6] =
    ["socklb", "probe", "stress", "log-programs/socklb.o", "log-programs/host.o", "log-programs/responder.o"];

/// Makes the image. The plan has a line for each run of the tests (`Phase`). It is a file, because
/// a kernel's command line would be too short.
pub fn build(programs: &Path, tests: &Path, modules: &Path, plan: &str) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    let mut folders = BTreeSet::new();
    for folder in ["dev", "modules", "proc", "run", "sys", "tests", "tmp"] {
        archive.folder(folder);
        folders.insert(PathBuf::from(folder));
    }
    let mut add = |from: &Path, to: &str| {
        let content = fs::read(from).with_context(|| format!("read {}", from.display()))?;
        for folder in above(to) {
            if folders.insert(folder.clone()) {
                archive.folder(&folder.to_string_lossy());
            }
        }
        archive.file(to, &content);
        anyhow::Ok(())
    };
    add(&programs.join("init"), "init")?;
    add(tests, "tests/local")?;
    for program in PROGRAMS {
        add(&programs.join(program), &format!("tests/{program}"))?;
    }
    let mut libraries = BTreeSet::new();
    for (program, what) in HOST_PROGRAMS {
        if !Path::new(program).exists() {
            bail!("{program} ({what}) is not installed: run `cargo xtask setup`");
        }
        add(Path::new(program), program.trim_start_matches('/'))?;
        libraries.extend(libraries_of(program)?);
    }
    for library in libraries {
        add(Path::new(&library), library.trim_start_matches('/'))?;
    }
    for entry in fs::read_dir(modules).with_context(|| format!("read {}", modules.display()))? {
        let path = entry?.path();
        let name = path.file_name().context("a module's name")?.to_string_lossy().into_owned();
        add(&path, &format!("modules/{name}"))?;
    }
    archive.file("plan", plan.as_bytes());
    Ok(archive.finish())
}

/// The folders above a path, the highest first.
fn above(path: &str) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Path::new(path).ancestors().skip(1).map(Path::to_owned).collect();
    folders.retain(|folder| !folder.as_os_str().is_empty());
    folders.reverse();
    folders
}

/// The files that the dynamic linker would load for a program, and the linker itself.
fn libraries_of(program: &str) -> Result<Vec<String>> {
    let output = Command::new("ldd").arg(program).output().context("start ldd")?;
    if !output.status.success() {
        bail!("ldd {program}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(paths_of(&String::from_utf8_lossy(&output.stdout)))
}

/// The paths in the output of ldd. A line is `name => /path (address)`, `/path (address)`, or a
/// name without a file, which the kernel provides.
fn paths_of(ldd: &str) -> Vec<String> {
    let words = ldd.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    words.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_the_paths_of_ldd() {
        let text = "\tlinux-vdso.so.1 (0x00007ffe)\n\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f0d)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f0d)\n";
        assert_eq!(paths_of(text), ["/lib/x86_64-linux-gnu/libz.so.1", "/lib64/ld-linux-x86-64.so.2"]);
    }

    #[test]
    fn folders_precede_their_content() {
        assert_eq!(above("usr/sbin/bpftool"), [PathBuf::from("usr"), PathBuf::from("usr/sbin")]);
        assert_eq!(above("init"), Vec::<PathBuf>::new());
    }
}
