//! Chooses the toolchain for the kernel objects. No other file chooses it.
//!
//! The programs are built for a target without a compiled `core`. Compiling `core` needs the source
//! of the standard library and an unstable flag. Debian's `rustc-web` provides a compiler, its
//! source and a matching LLVM. The stable toolchain that runs this program builds the rest of the
//! tree.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::command::{self, cached, output, root};

/// The compiler for the kernel programs.
pub const RUSTC: &str = "/usr/bin/rustc";
/// The cargo of this compiler.
pub const CARGO: &str = "/usr/bin/cargo";
/// The LLVM of this compiler. The linker is built with it.
pub const LLVM: &str = "/usr/lib/llvm-22";
/// The version of the linker.
pub const LINKER_VERSION: &str = "0.13.0";

/// The folder into which `cargo xtask setup` installs the tools that it builds.
pub fn tools() -> PathBuf {
    cached("tools")
}

/// A tool that setup has built, or else the tool with the same name on the path.
pub fn tool(name: &str) -> PathBuf {
    let ours = tools().join("bin").join(name);
    if ours.exists() { ours } else { PathBuf::from(name) }
}

/// A cargo command for the kernel workspace with everything that makes its output reproducible.
pub fn ebpf_cargo(subcommand: &str) -> Command {
    let root = root();
    let home = std::env::var_os("CARGO_HOME").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cargo"),
        PathBuf::from,
    );
    let mut flags = vec![
        // The BTF is made from debug information. The shipped object contains only the BTF.
        "-Cdebuginfo=2".to_owned(),
        "-Clink-arg=--btf".to_owned(),
        // This instruction set has atomics that return a value. Programs without such atomics still
        // load on kernels that do not support them.
        "-Ctarget-cpu=v3".to_owned(),
        // If a stack slot once held a pointer and later holds a number, verifiers that guard
        // against leaks report a "corruption of a spilled pointer". Without CAP_PERFMON every
        // verifier guards against leaks.
        "-Clink-arg=--llvm-args=-no-stack-slot-sharing".to_owned(),
        // The object must contain no path of this machine.
        format!("--remap-path-prefix={}=/socklb", root.display()),
        format!("--remap-path-prefix={}=/cargo", home.display()),
    ];
    // Cargo names the folder of downloaded sources after their origin, which may be a mirror. If
    // several prefixes match, the compiler uses the last.
    let mut origins: Vec<PathBuf> = std::fs::read_dir(home.join("registry/src"))
        .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default();
    origins.sort();
    flags.extend(origins.iter().map(|origin| format!("--remap-path-prefix={}=/cargo", origin.display())));
    let mut command = Command::new(CARGO);
    command
        .current_dir(root.join("lb-ebpf"))
        .arg(subcommand)
        .args(["-Z", "build-std=core", "--target", "bpfel-unknown-none", "--locked"])
        .arg("--target-dir")
        .arg(root.join("lb-ebpf/target"))
        .env("RUSTC", RUSTC)
        // `build-std` and the atomics intrinsics are unstable.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .env("PATH", path_with(&tools().join("bin")))
        // The stable toolchain's wrapper must not choose the compiler of this command.
        .env_remove("RUSTUP_TOOLCHAIN")
        .env_remove("CARGO")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_TARGET_DIR");
    command
}

fn path_with(directory: &Path) -> OsString {
    let mut path = directory.as_os_str().to_owned();
    // Commands find `cargo clippy` and the linker by name. Debian's folder comes first.
    path.push(":/usr/bin:");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    path
}

/// The versions that determine the objects' bytes, formatted as in the record.
pub fn versions() -> Result<String> {
    let rustc = output(Command::new(RUSTC).arg("-V"))?;
    let linker = output(Command::new(tool("bpf-linker")).arg("--version"))?;
    let llvm = output(Command::new(Path::new(LLVM).join("bin/llvm-config")).arg("--version"))?;
    Ok(format!("{rustc}; {linker}; LLVM {llvm}"))
}

/// Copies an object without its debug information. Also removes what depends on this machine from
/// the names of functions: the symbols of a crate outside of the workspace, such as `lb-common` for
/// the kernel programs, contain a hash of the crate's path.
pub fn strip(from: &Path, to: &Path) -> Result<()> {
    let tools = Path::new(LLVM).join("bin");
    let symbols = output(Command::new(tools.join("llvm-nm")).arg("--just-symbol-name").arg(from))?;
    let mut objcopy = Command::new(tools.join("llvm-objcopy"));
    objcopy.arg("--strip-debug");
    for symbol in symbols.lines().filter(|symbol| symbol.starts_with("_R")) {
        objcopy.arg("--redefine-sym").arg(format!("{symbol}={}", without_hashes(symbol)));
    }
    command::run(objcopy.arg(from).arg(to))
}

/// A function's path without the hashes of its crates, as developers read it.
fn without_hashes(symbol: &str) -> String {
    format!("{:#}", rustc_demangle::demangle(symbol))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_do_not_depend_on_the_place_of_a_build() {
        let of = |report, program| {
            format!("_RINvNtNtCs{report}_9lb_report4wire7siphash7siphashKj9_ECs{program}_4host")
        };
        let plain = "lb_report::wire::siphash::siphash::<9>";
        assert_eq!(without_hashes(&of("ho8eaAdBOo1", "jKfn8pDsb8L")), plain);
        assert_eq!(without_hashes(&of("dUGmHBmkQwQ", "1RzCvhXYFMt")), plain);
        // Back references in a symbol are byte positions. The hashes before these positions have
        // different lengths.
        let turn = |report: &str, program: &str, at: &str| {
            without_hashes(&format!(
                "_RINvNtCs{report}_9lb_report5frame4turnNtNtCs{program}_9responder6packet6PacketEB{at}_"
            ))
        };
        let plain = "lb_report::frame::turn::<responder::packet::Packet>";
        assert_eq!(turn("ho8eaAdBOo1", "8282wHcZ5DH", "H"), plain);
        assert_eq!(turn("8eaAdBOo1", "Cs82wHcZ5D", "F"), plain);
    }

    #[test]
    fn names_that_only_resemble_hashes_stay() {
        let names = ["memcpy", "_RNvC4host6memcpy", "_RNvC4host9Cs_Cursor", "_RNvC4host8CsCursor"];
        let plain = ["memcpy", "host::memcpy", "host::Cs_Cursor", "host::CsCursor"];
        assert_eq!(names.map(without_hashes), plain);
    }
}
