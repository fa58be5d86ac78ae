//! Runs external commands. Prints each command before it runs. If a command fails, the error
//! contains the command and its status.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The root folder of the repository.
pub fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().expect("xtask is in the repository").to_owned()
}

/// The folder for all build results: cargo's target folder, which may be outside of the repository.
pub fn target() -> PathBuf {
    // The path of this program is `<target>/<profile>/xtask`.
    let here = std::env::current_exe().expect("the path of the running program");
    here.ancestors().nth(2).expect("a profile's folder").to_owned()
}

/// A cached folder of tools or kernels. Its content depends only on versions, not on this clone, so
/// all clones of a user share it.
pub fn cached(name: &str) -> PathBuf {
    let folder =
        |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
    cache.map_or_else(target, |cache| cache.join("socklb")).join(name)
}

/// The cargo that runs this program.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// The command line as text for a shell.
pub fn describe(command: &Command) -> String {
    let mut words: Vec<String> = Vec::new();
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            words.push(format!("{}={}", name.to_string_lossy(), quote(value)));
        }
    }
    words.push(quote(command.get_program()));
    words.extend(command.get_args().map(quote));
    words.join(" ")
}

fn quote(word: &OsStr) -> String {
    // `CARGO_ENCODED_RUSTFLAGS` separates flags by this character. The text has a blank instead.
    let word = word.to_string_lossy().replace('\x1f', " ");
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:+,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Prints a command and runs it.
pub fn run(command: &mut Command) -> Result<()> {
    let text = describe(command);
    println!("$ {text}");
    let status = command.status().with_context(|| format!("start {text}"))?;
    if !status.success() {
        bail!("{text}: {status}");
    }
    Ok(())
}

/// Runs a command without printing it. Returns its standard output, trimmed.
pub fn output(command: &mut Command) -> Result<String> {
    let text = describe(command);
    let output = command.output().with_context(|| format!("start {text}"))?;
    if !output.status.success() {
        bail!("{text}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout).with_context(|| format!("output of {text}"))?.trim().to_owned())
}
