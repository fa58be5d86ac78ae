//! Writes docs/reference/configuration.md, which a test compares with the table of keys.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

fn main() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/configuration.md");
    fs::write(&path, lb_user::config::reference::page()).with_context(|| format!("write {}", path.display()))
}
