//! Generates the page docs/reference/configuration.md from the rows of [`keys`](super::keys).
//!
//! An example program that can write manual pages generates socklb.toml(5) from the same rows.

use super::keys::SECTIONS;
use lb_document::key::{Section, markdown};

/// The text before the tables: rules that hold for all keys.
pub const INTRODUCTION: &str = "The format is TOML. Unknown keys are refused. All faults of a file are \
                                reported at once. Relative paths are relative to\nthe directory of the \
                                file. Times are whole numbers with a unit: `\"50ms\"`, `\"90s\"`, \
                                `\"2m\"`, `\"1h\"`. Without `--config`\nand `SOCKLB_CONFIG`, the file is \
                                `/etc/socklb/socklb.toml`; `check FILE` checks another file.";

pub fn page() -> String {
    let mut page = format!(
        "# Configuration: every key of `socklb.toml`\n\n{INTRODUCTION}\n\n\
         This page is also installed as `man socklb.toml`. The command\n\
         `cargo run --package lb-user --example configuration` writes it from `crates/lb-config/src/keys.rs`.\n"
    );
    for sections in SECTIONS {
        let Section { header, text, .. } = sections[0];
        page += &format!("\n`{header}`, {text}:\n\n{}", markdown(sections));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_matches_the_rows() {
        let text = include_str!("../../../docs/reference/configuration.md");
        assert!(
            text == page(),
            "docs/reference/configuration.md is stale: `cargo run --package lb-user --example configuration` writes it"
        );
    }
}
