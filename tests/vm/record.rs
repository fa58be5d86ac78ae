//! Writes the counts of the guests' verifiers into the committed record.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use stage::record::{Count, RECORDING, Record};

/// Selects the test that prints the counts.
pub const TEST: &str = "verifier::";

/// Writes the guests' counts and those of this machine's kernel. Recorded counts of other kernels
/// do not change.
pub fn write(path: &Path, counts: impl IntoIterator<Item = Count>, tests: &Path) -> Result<()> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let mut record = Record::parse(&text).with_context(|| format!("read {}", path.display()))?;
    let host = count_here(tests)?;
    record.replace(counts.into_iter().chain(host));
    fs::write(path, record.text()).with_context(|| format!("write {}", path.display()))?;
    println!(
        "recorded in {}: check the difference, and commit the file if the difference is intended",
        path.display()
    );
    Ok(())
}

/// Counts on the kernel of this machine.
fn count_here(tests: &Path) -> Result<Vec<Count>> {
    let output = Command::new(tests).arg(TEST).env(RECORDING, "1").output();
    let output = output.with_context(|| format!("start {}", tests.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("{} {TEST}: {}\n{text}", tests.display(), output.status);
    }
    Ok(text.lines().filter_map(Count::of_line).collect())
}
