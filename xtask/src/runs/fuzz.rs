//! Runs libFuzzer, guided by coverage, on all readers of external text. Stable Rust has the
//! required instrumentation. Sanitizers would need nightly Rust, and would find little in safe
//! code.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::command::{cargo, root, run as run_command, target};

/// `cargo xtask fuzz`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Run only this reader: the name of a folder in `fuzz/corpus`
    target: Option<String>,
    /// Minutes for each reader
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..))]
    minutes: u64,
}

/// Instrumentation that counts executed edges in 8-bit counters within the program, and reports the
/// operands of comparisons to the fuzzer.
const INSTRUMENTATION: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                               -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                               -Cllvm-args=-sanitizer-coverage-pc-table \
                               -Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions -Copt-level=2";
/// The target of the build. Without an explicit target, cargo also applies the flags to build
/// scripts.
const HOST: &str = "x86_64-unknown-linux-gnu";

/// `cargo xtask fuzz`.
pub fn run(options: &Options) -> Result<()> {
    let folder = target().join("fuzz");
    let mut build = cargo();
    build.args(["build", "--locked", "--package", "lb-fuzz", "--features", "libfuzzer", "--bin", "fuzz"]);
    build.args(["--target", HOST, "--target-dir"]).arg(&folder).env("RUSTFLAGS", INSTRUMENTATION);
    run_command(&mut build)?;
    for name in names(options.target.as_deref())? {
        let found = folder.join("found").join(&name);
        fs::create_dir_all(&found).with_context(|| format!("make {}", found.display()))?;
        let mut fuzz = std::process::Command::new(folder.join(HOST).join("debug/fuzz"));
        fuzz.env("SOCKLB_FUZZ", &name);
        fuzz.arg(format!("-max_total_time={}", Duration::from_secs(60 * options.minutes).as_secs()));
        // A reader fails if it takes ten seconds or 512 MB for a text. Texts have at most 64 KiB.
        fuzz.args(["-timeout=10", "-rss_limit_mb=512", "-max_len=65536", "-print_final_stats=1"]);
        fuzz.arg(format!("-dict={}", root().join("fuzz/dictionaries").join(&name).display()));
        fuzz.arg(format!("-artifact_prefix={}/failed-{name}-", folder.display()));
        run_command(fuzz.arg(&found).arg(root().join("fuzz/corpus").join(&name)))?;
    }
    Ok(())
}

/// The names of all readers, or the name of the requested reader.
fn names(only: Option<&str>) -> Result<Vec<String>> {
    let corpora = root().join("fuzz/corpus");
    let entries = fs::read_dir(&corpora).with_context(|| format!("list {}", corpora.display()))?;
    let mut names = entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<Vec<_>>>()?;
    names.sort();
    if let Some(only) = only {
        ensure!(
            names.iter().any(|name| name == only),
            "there is no reader {only}; the readers are {}",
            names.join(", ")
        );
        names.retain(|name| name == only);
    }
    Ok(names)
}
