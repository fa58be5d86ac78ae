//! Writes the results of a run into the documentation: as text between two marks in
//! docs/design/performance.md, and as a picture in the same directory.

pub mod print;

mod picture;

pub mod runs;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::outcome::Outcome;
use crate::results::document;
use picture::picture;
use print::{group, summary};

/// The document in the folder.
const DOCUMENT: &str = "performance.md";
/// The picture in the folder.
const PICTURE: &str = "performance-connect.svg";
const BEGIN: &str = "<!-- written by `cargo xtask bench connect --report`: begin -->\n";
const END: &str = "<!-- written by `cargo xtask bench connect --report`: end -->\n";

/// Writes the report of a run; `took` is the duration of the run.
pub fn write(folder: &Path, outcomes: &[Outcome], took: Duration) -> Result<()> {
    let path = folder.join(DOCUMENT);
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let section = format!("\n{}\n\n{}", machine(took)?, section(outcomes));
    let text = replaced(&text, &section)
        .with_context(|| format!("a mark of the report is missing in {}", path.display()))?;
    std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    std::fs::write(folder.join(PICTURE), picture(outcomes)).context("write the picture")?;
    println!("written: {}, and {PICTURE} in the same directory", path.display());
    Ok(())
}

/// Replaces the text between the marks; `None` if a mark is missing.
fn replaced(text: &str, section: &str) -> Option<String> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}{section}{END}{after}"))
}

fn section(outcomes: &[Outcome]) -> String {
    let groups: Vec<String> = outcomes.iter().map(|outcome| group(outcome, "### ", document)).collect();
    format!(
        "In this run, {}.\n\n![Median times against direct, with their targets]({PICTURE})\n\n{}\n",
        summary(outcomes),
        groups.join("\n")
    )
}

/// Describes the machine, the date and the duration of the run.
fn machine(took: Duration) -> Result<String> {
    let processors = std::fs::read_to_string("/proc/cpuinfo")?;
    let model = processors.lines().find_map(|line| line.strip_prefix("model name"));
    let model = model.map_or("unknown", |line| line.trim_start_matches([' ', '\t', ':']));
    let count = processors.lines().filter(|line| line.starts_with("processor")).count();
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let date = std::process::Command::new("date").args(["-u", "+%F"]).output().context("read the date")?;
    Ok(format!(
        "{}, {count} CPUs ({model}), Linux {}; the run took {} s.",
        String::from_utf8_lossy(&date.stdout).trim(),
        kernel.trim(),
        took.as_secs()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connect::arms::groups::Name;
    use crate::connect::outcome::tests::outcome;

    #[test]
    fn text_between_the_marks_is_replaced() {
        let text = format!("before\n{BEGIN}old\n{END}after\n");
        assert_eq!(replaced(&text, "new\n").unwrap(), format!("before\n{BEGIN}new\n{END}after\n"));
        assert_eq!(replaced("no marks", "new\n"), None);
        assert_eq!(replaced(BEGIN, "new\n"), None);
    }

    #[test]
    fn the_document_has_the_marks() {
        let text = include_str!("../../../docs/design/performance.md");
        assert!(replaced(text, "").is_some());
    }

    #[test]
    fn a_section_has_every_group() {
        let text = section(&[outcome(Name::LeastLoaded, |_| Some(1.0)), outcome(Name::Echo, |_| Some(1.0))]);
        assert!(text.starts_with("In this run, targets: 5 reached, 0 not.\n"), "{text}");
        assert!(text.contains("### TCP connect(), least-loaded over 100\n"), "{text}");
        assert!(text.contains("### Requests and responses of 64 bytes\n"), "{text}");
    }
}
