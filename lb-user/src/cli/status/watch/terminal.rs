//! The terminal in the modes that `socklb status --watch` needs: alternate buffer, no cursor, no
//! wrapping, unbuffered keys. All modes are restored at the end.

use std::io::{self, IsTerminal, Stdout, Write};

use anyhow::{Result, bail};
use lb_view::text::TerminalSize;
use rustix::io::Errno;
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios};
use tokio::sync::mpsc;

use super::keys::{KeyAction, keys};
use crate::output::print;

/// Enters the alternate screen, hides the cursor, and turns wrapping off. With wrapping, letters
/// that are wider than one column would make the screen scroll.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
/// The reverse of [`ENTER`].
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

/// The terminal of standard output while it shows a screen.
pub struct AlternateScreen<W: Write = Stdout> {
    out: W,
    /// The modes that the terminal of standard input had before; `None` if standard input is no
    /// terminal.
    before: Option<Termios>,
    is_left: bool,
}

impl AlternateScreen {
    /// Enters the alternate screen.
    ///
    /// # Errors
    /// If the terminal cannot be written to.
    pub fn enter() -> Result<Self> {
        // If standard input is no terminal, there are no keys and no modes to change.
        let before = rustix::termios::tcgetattr(io::stdin()).ok();
        Self::enter_on(io::stdout(), before)
    }
}

impl<W: Write> AlternateScreen<W> {
    fn enter_on(out: W, before: Option<Termios>) -> Result<Self> {
        let mut terminal = Self { out, before, is_left: false };
        if let Some(mut modes) = terminal.before.clone() {
            // ISIG stays set: ^C still sends SIGINT.
            modes.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
            modes.special_codes[SpecialCodeIndex::VMIN] = 1;
            modes.special_codes[SpecialCodeIndex::VTIME] = 0;
            rustix::termios::tcsetattr(io::stdin(), OptionalActions::Now, &modes)?;
        }
        terminal.write(ENTER)?;
        Ok(terminal)
    }

    /// Shows these rows, and clears the rest of the screen.
    ///
    /// # Errors
    /// If the terminal cannot be written to.
    pub fn show(&mut self, rows: &[String]) -> Result<()> {
        // Each row is cleared before it is written, and the rest of the screen at the end. Clearing
        // the whole screen first would flicker. A row cannot be cleared after it is written: if the
        // row is full, the cursor stays on the last letter, and clearing would erase this letter.
        let mut frame = "\x1b[H".to_owned();
        for (number, row) in rows.iter().enumerate() {
            frame.push_str(if number == 0 { "\x1b[2K" } else { "\r\n\x1b[2K" });
            frame.push_str(row);
        }
        if rows.is_empty() {
            frame.push_str("\x1b[J");
        } else if rows.len() < size().rows {
            frame.push_str("\r\n\x1b[J");
        }
        self.write(&frame)
    }

    /// Restores the terminal. A failure is ignored: it means that the terminal no longer exists.
    pub fn leave(&mut self) {
        if !std::mem::replace(&mut self.is_left, true) {
            let _ = self.write(LEAVE);
            if let Some(before) = &self.before {
                // `Flush` discards keys that were typed for the screen, so that the shell does not
                // receive them.
                let _ = rustix::termios::tcsetattr(io::stdin(), OptionalActions::Flush, before);
            }
        }
    }

    /// Writes sequences for the terminal, and rows that [`lb_view::text::Screen`] has escaped.
    fn write(&mut self, text: &str) -> Result<()> {
        if !print::raw(&mut self.out, text)? {
            bail!("the terminal no longer accepts output");
        }
        Ok(())
    }
}

impl<W: Write> Drop for AlternateScreen<W> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The size of the terminal of standard output; 80 columns by 24 rows if the size is unknown.
pub fn size() -> TerminalSize {
    let size = rustix::termios::tcgetwinsize(io::stdout());
    let (columns, rows) = size.map_or((0, 0), |size| (size.ws_col, size.ws_row));
    let or = |count: u16, usual: usize| if count == 0 { usual } else { count.into() };
    TerminalSize { columns: or(columns, 80), rows: or(rows, 24) }
}

/// The keys from standard input.
pub struct Keyboard {
    typed: mpsc::Receiver<Vec<KeyAction>>,
}

impl Keyboard {
    /// Starts to read keys if standard input is a terminal; otherwise no keys arrive.
    ///
    /// # Errors
    /// If no thread can be started to read them.
    pub fn open() -> io::Result<Self> {
        let (keys, typed) = mpsc::channel(1);
        if io::stdin().is_terminal() {
            // The thread ends with the process: nothing else ends a read from a terminal.
            std::thread::Builder::new().name("keys".to_owned()).spawn(move || read(&keys))?;
        }
        Ok(Self { typed })
    }

    /// Waits for the next keys; waits forever if standard input is no terminal.
    pub async fn keys(&mut self) -> Vec<KeyAction> {
        match self.typed.recv().await {
            Some(keys) => keys,
            None => std::future::pending().await,
        }
    }
}

/// Reads keys until the receiver is dropped or the input ends. The end of the input is sent as
/// [`KeyAction::Quit`].
fn read(wanted: &mpsc::Sender<Vec<KeyAction>>) {
    let mut typed = [0; 256];
    // Bound: the life of the process.
    loop {
        let (keys, is_last) = match rustix::io::read(io::stdin(), &mut typed) {
            Ok(count) if count > 0 => (keys(&typed[..count]), false),
            Err(Errno::INTR) => continue,
            Ok(_) | Err(_) => (vec![KeyAction::Quit], true),
        };
        if wanted.blocking_send(keys).is_err() || is_last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_terminal_gets_its_sequences_as_they_are() {
        let mut terminal = AlternateScreen::enter_on(Vec::new(), None).expect("a vector can be written");
        terminal.show(&["\x1b[31mdown\x1b[0m".to_owned(), "b".to_owned()]).expect("a vector can be written");
        terminal.leave();
        terminal.leave();
        let frame = "\x1b[H\x1b[2K\x1b[31mdown\x1b[0m\r\n\x1b[2Kb\r\n\x1b[J";
        assert_eq!(String::from_utf8_lossy(&terminal.out), format!("{ENTER}{frame}{LEAVE}"));
    }
}
