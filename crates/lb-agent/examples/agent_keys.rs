//! Writes the tables of keys in docs/reference/agent.md. A test compares the tables with the rows.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use lb_agent::config::reference::with_tables;

fn main() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/agent.md");
    let page = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let page = with_tables(&page).context("the page has no place for the tables")?;
    fs::write(&path, page).with_context(|| format!("write {}", path.display()))
}
