//! Writes results to standard output: text for people, or one line of JSON for programs.
//!
//! It is no error if the reader closes the pipe early. This module must not depend on the meaning
//! of the results.

use std::io::{self, BufWriter, Write};

use anyhow::{Context, Result};
use serde::Serialize;

/// The version of the JSON format. Within a version, fields may be added, but no field is changed
/// or removed.
pub const SCHEMA: u32 = 1;

pub fn text(text: impl std::fmt::Display) -> Result<()> {
    finish(|out| write!(out, "{text}"))
}

/// Prints one JSON document.
pub fn json(value: &impl Serialize) -> Result<()> {
    finish(|out| {
        serde_json::to_writer(&mut *out, value)?;
        writeln!(out)
    })
}

fn finish(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| out.flush()) {
        // A reader such as `head` closes the pipe early.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("write to standard output"),
    }
}
