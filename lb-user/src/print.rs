//! Prints the output of commands. If a write fails, for example because the disk is full, the
//! result is an error, never a panic. If nothing reads the output any longer, that is not an error.

use std::fmt;
use std::io::{self, Write};

use anyhow::{Context, Result};
use serde::Serialize;

use lb_document::diagnostic::Diagnostics;
use lb_host::log::as_error;
use lb_view::text::Style;

/// Prints a whole text to standard output. Returns `false` if nothing reads the output any longer.
///
/// # Errors
/// If the text cannot be written.
pub fn text(text: &str) -> Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("write to standard output"),
    }
}

/// Prints a value as JSON to standard output, piece by piece, because the text may be too long for
/// memory. Returns `false` if nothing reads the output any longer.
///
/// # Errors
/// If the text cannot be written.
pub fn json(value: &impl Serialize) -> Result<bool> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let written = serde_json::to_writer_pretty(&mut out, value).map_err(io::Error::from);
    match written.and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("write to standard output"),
    }
}

/// Prints a message to standard error. Ignores a failure: there is no other place to report it.
pub fn message(message: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "socklb: {message}");
}

/// Prints to standard error why a command failed.
pub fn failure(why: impl fmt::Display) {
    let _ = io::stderr().lock().write_all(as_error(&format!("socklb: {why}\n")).as_bytes());
}

/// Prints the faults of a file to standard error.
pub fn faults(faults: &Diagnostics) {
    let text = faults.terminal(Style::for_stderr().colour).to_string();
    let _ = io::stderr().lock().write_all(as_error(&text).as_bytes());
}
