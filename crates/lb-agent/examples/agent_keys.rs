//! Writes the tables of keys in docs/reference/agent.md. A test compares these tables with the rows
//! in `config/keys.rs`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use lb_agent::config::reference::with_tables;

fn main() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/agent.md");
    let page = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let page = with_tables(&page).context("the page lacks the lines that mark the tables")?;
    fs::write(&path, page).with_context(|| format!("write {}", path.display()))
}
