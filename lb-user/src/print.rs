//! What commands print, to streams that may not take it: a full disk is a failure with a message, never a panic, and a
//! reader that has gone wants no more.

use std::fmt;
use std::io::{self, Write};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::diagnostic::Faults;
use lb_view::text::Style;

/// Prints a text to standard output, whole. Returns whether anybody reads it.
///
/// # Errors
/// If it cannot be written.
pub fn text(text: &str) -> Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("write to standard output"),
    }
}

/// Prints a value as JSON to standard output, piece by piece: it may be longer than what one wants to hold. Returns
/// whether anybody reads it.
///
/// # Errors
/// If it cannot be written.
pub fn json(value: &impl Serialize) -> Result<bool> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let written = serde_json::to_writer_pretty(&mut out, value).map_err(io::Error::from);
    match written.and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("write to standard output"),
    }
}

/// Tells something on standard error. If that takes nothing, nobody can be told.
pub fn message(message: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "socklb: {message}");
}

/// Shows faults of a file on standard error.
pub fn faults(faults: &Faults) {
    let _ = write!(io::stderr().lock(), "{}", faults.terminal(Style::for_stderr().colour));
}
