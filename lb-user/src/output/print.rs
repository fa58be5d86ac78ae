//! Prints the output of commands. If a write fails, for example because the disk is full, the
//! result is an error, never a panic. If nothing reads the output any longer, that is not an error.

use std::fmt;
use std::io::{self, Write};

use anyhow::{Context, Result};
use serde::Serialize;

use lb_document::control::escaped_in_json;
use lb_document::diagnostic::Diagnostics;
use lb_host::log::as_error;
use lb_view::text::Style;

/// Prints a whole text to standard output, without control characters. Returns `false` if nothing
/// reads the output any longer.
///
/// # Errors
/// If the text cannot be written.
pub fn text(text: &str) -> Result<bool> {
    raw(&mut io::stdout().lock(), &Style::for_stdout().shown(text))
}

/// Replaces the last line on the terminal.
///
/// # Errors
/// If the text cannot be written.
pub fn in_place(line: &str) -> Result<bool> {
    raw(&mut io::stdout().lock(), &format!("\r\x1b[K{}", Style::for_stdout().shown(line)))
}

/// Prints a JSON document to standard output, with control characters in their escaped form.
///
/// # Errors
/// If the text cannot be written.
pub fn json_text(text: &str) -> Result<bool> {
    raw(&mut io::stdout().lock(), &escaped_in_json(text))
}

/// Prints a text whose control characters are for the terminal. Names and messages in it must
/// already be escaped. Returns `false` if nothing reads the output any longer.
///
/// # Errors
/// If the text cannot be written.
pub fn raw(out: &mut impl Write, text: &str) -> Result<bool> {
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
    let mut out = EscapedJson(io::BufWriter::new(io::stdout().lock()));
    let written = serde_json::to_writer_pretty(&mut out, value).map_err(io::Error::from);
    match written.and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("write to standard output"),
    }
}

/// Escapes the control characters that a JSON document may contain: serde_json escapes only those
/// of ASCII.
struct EscapedJson<W>(W);

impl<W: Write> Write for EscapedJson<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // serde_json writes the pieces of a string as whole characters.
        match std::str::from_utf8(bytes) {
            Ok(text) => self.0.write_all(escaped_in_json(text).as_bytes())?,
            Err(_) => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Prints a message to standard error. Ignores a failure: there is no other place to report it.
pub fn message(message: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "socklb: {}", Style::default().shown(&message.to_string()));
}

/// Prints to standard error why a command failed.
pub fn failure(why: impl fmt::Display) {
    let text = format!("socklb: {why}\n");
    let _ = io::stderr().lock().write_all(as_error(&Style::default().shown(&text)).as_bytes());
}

/// Prints the faults of a file to standard error.
pub fn faults(faults: &Diagnostics) {
    let text = faults.terminal(Style::for_stderr().colour).to_string();
    let _ = io::stderr().lock().write_all(as_error(&text).as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_contains_control_characters_only_in_their_escaped_form() {
        let value = ["größer\n", "a\u{1b}b\u{9b}c\u{202e}d\u{7f}"];
        let mut out = EscapedJson(Vec::new());
        serde_json::to_writer_pretty(&mut out, &value).expect("a vector can be written");
        let text = String::from_utf8(out.0).expect("JSON is UTF-8");
        assert_eq!(text, "[\n  \"größer\\n\",\n  \"a\\u001bb\\u009bc\\u202ed\\u007f\"\n]");
        assert_eq!(serde_json::from_str::<[String; 2]>(&text).expect("it is still JSON"), value);
    }
}
