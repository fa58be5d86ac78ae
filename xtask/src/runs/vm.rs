//! Tier vm: fetches the kernels, and starts the driver of the guests. The driver boots each kernel
//! in a guest, which runs the local tests.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use lb_suite::Summary;

use crate::command::{root, run as run_command, target};
use crate::downloads::kernels;
use crate::test::Built;

/// The tests that guests run. `tests/local/modules.toml` defines the classes of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tests {
    /// Classes A to D on the oldest kernel; class A and smoke tests on all other kernels.
    #[default]
    Normal,
    /// Classes A to E on the oldest kernel, and A to C on all other kernels.
    All,
    /// The tests of class A on the oldest kernel. They show that guests still boot.
    Smoke,
}

impl Tests {
    /// The tests that a run needs; `all` is set for a run with `--all`.
    pub fn of(all: bool) -> Self {
        if all { Self::All } else { Self::Normal }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// Use only this kernel.
    pub kernel: Option<&'a str>,
    /// Run only tests whose names contain this.
    pub filter: Option<&'a str>,
    /// The tests to run if there is no filter.
    pub tests: Tests,
    /// Record the verifier's counts instead of testing.
    pub record: bool,
}

/// Boots the guests with the test program `local`. `changed` lists new and changed tests. Returns
/// the guests' reports, even if tests failed.
pub fn run(
    built: &Built,
    local: &Path,
    options: &Options<'_>,
    changed: &[String],
) -> Result<(Vec<Summary>, Result<()>)> {
    if cfg!(not(target_arch = "x86_64")) {
        bail!(
            "tier vm runs this machine's programs in guests that are x86-64, so this machine must be x86-64"
        );
    }
    let kernels = match options.tests {
        Tests::Smoke => vec![kernels::oldest()?],
        Tests::Normal | Tests::All => kernels::all(options.kernel)?,
    };
    let scratch = target().join("vm");
    fs::create_dir_all(&scratch).with_context(|| format!("make {}", scratch.display()))?;
    let (results, names) = (scratch.join("results.json"), scratch.join("changed"));
    fs::write(&names, changed.join("\n")).with_context(|| format!("write {}", names.display()))?;
    let _ = fs::remove_file(&results);
    let mut driver = Command::new(built.folder.join("vm"));
    driver.arg("--programs").arg(&built.folder).arg("--tests").arg(local).arg("--scratch").arg(&scratch);
    driver.arg("--changed").arg(&names).arg("--results").arg(&results);
    match (options.filter, options.tests) {
        (Some(filter), _) => driver.args(["--filter", filter]),
        (None, Tests::Normal) => &mut driver,
        (None, Tests::All) => driver.arg("--all"),
        (None, Tests::Smoke) => driver.args(["--class", "A"]),
    };
    if options.record {
        driver.arg("--record").arg(root().join("tests/vm/verifier.toml"));
    }
    let result = run_command(driver.args(kernels));
    // If the driver failed before the first result, the file does not exist.
    let text = fs::read_to_string(&results).unwrap_or_else(|_| "[]".to_owned());
    let summaries = serde_json::from_str(&text).with_context(|| format!("read {}", results.display()))?;
    Ok((summaries, result))
}
