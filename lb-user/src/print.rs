//! What commands print, to streams that may not take it: a full disk is a failure with a message, never a panic, and a
//! reader that has gone wants no more.

use std::fmt;
use std::io::{self, Write};

use anyhow::{Context, Result};

use crate::diagnostic::Faults;
use crate::render::Style;

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

/// Tells something on standard error. If that takes nothing, nobody can be told.
pub fn message(message: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "socklb: {message}");
}

/// Shows faults of a file on standard error.
pub fn faults(faults: &Faults) {
    let _ = write!(io::stderr().lock(), "{}", faults.terminal(Style::for_stderr().colour));
}
