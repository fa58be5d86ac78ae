//! A terminal (pty) like an operator's. The program that runs on it reacts to keys, to the
//! terminal's size, and when the terminal is closed.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::pty::OpenptFlags;
use rustix::termios::{LocalModes, Winsize};

use crate::daemon::ChildGuard;
use crate::eventually;
use crate::probe::die_with_us;

pub struct Terminal {
    program: ChildGuard,
    /// The operator's end of the terminal.
    keyboard: File,
    /// The program's end, open so that tests can read its modes.
    line: OwnedFd,
    written: Arc<Mutex<Vec<u8>>>,
}

/// Switches to the alternate screen.
const ENTER: &str = "\x1b[?1049h";
/// Restores cursor and wrapping, and switches back to the main screen.
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
/// Moves to the start of the screen. Each screen begins with it.
const HOME: &str = "\x1b[H";
const ROW: &str = "\x1b[2K";

impl Terminal {
    /// Starts a program on a terminal of this many columns and rows.
    pub fn start(mut command: Command, columns: u16, rows: u16) -> Self {
        let keyboard = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
            .expect("open a terminal");
        rustix::pty::grantpt(&keyboard).expect("grant access to the terminal");
        rustix::pty::unlockpt(&keyboard).expect("unlock the terminal");
        let name = rustix::pty::ptsname(&keyboard, Vec::new()).expect("read the terminal's name");
        let line = rustix::fs::open(
            name.as_c_str(),
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )
        .expect("open the program's end");
        let keyboard = File::from(keyboard);
        resize(&keyboard, columns, rows);
        let end = || Stdio::from(line.try_clone().expect("clone the program's end"));
        command.stdin(end()).stdout(end()).stderr(Stdio::piped());
        command.env_remove("COLUMNS").env_remove("NO_COLOR");
        // SAFETY: the closure makes two system calls and allocates nothing.
        unsafe {
            command.pre_exec(|| {
                // The program receives the signals of this terminal, as if a shell had started it.
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(std::io::stdin())?;
                Ok(())
            });
        }
        die_with_us(&mut command);
        let program = ChildGuard::of(command.spawn().expect("start the program"));
        // Closes the clones of the program's end.
        drop(command);
        let written = Arc::new(Mutex::new(Vec::new()));
        let (shown, mut screen) = (written.clone(), keyboard.try_clone().expect("clone the operator's end"));
        std::thread::spawn(move || {
            let mut some = [0; 4096];
            // The loop ends when the program ends, because the read then fails.
            while let Ok(count @ 1..) = screen.read(&mut some) {
                shown.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&some[..count]);
            }
        });
        Self { program, keyboard, line, written }
    }

    /// The program's whole output so far.
    pub fn written(&self) -> String {
        String::from_utf8_lossy(&self.written.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
    }

    /// The rows of the last complete screen, without colors.
    pub fn rows(&self) -> Vec<String> {
        let written = self.written();
        // The last screen may be cut off.
        let Some((before, _)) = written.rsplit_once(HOME) else { return Vec::new() };
        let Some((_, screen)) = before.rsplit_once(HOME) else { return Vec::new() };
        let plain = |row: &str| {
            let row = row.trim_end_matches("\x1b[J").trim_end_matches(['\r', '\n']);
            ["\x1b[0m", "\x1b[1m", "\x1b[31m", "\x1b[33m"]
                .iter()
                .fold(row.to_owned(), |row, colour| row.replace(colour, ""))
        };
        screen.split(ROW).skip(1).map(plain).collect()
    }

    /// Waits for a screen for which `fact` holds.
    #[track_caller]
    pub fn shows(&self, what: &str, fact: impl Fn(&[String]) -> bool) -> Vec<String> {
        eventually(what, || self.rows(), |rows| fact(rows))
    }

    pub fn types(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("write the keys");
    }

    /// Changes the terminal's size.
    pub fn resize(&self, columns: u16, rows: u16) {
        resize(&self.keyboard, columns, rows);
    }

    /// Whether the terminal passes each key to the program immediately, without echo.
    pub fn is_raw(&self) -> bool {
        let modes = rustix::termios::tcgetattr(&self.line).expect("read the terminal's modes");
        !modes.local_modes.intersects(LocalModes::ICANON | LocalModes::ECHO)
    }

    /// Whether the alternate screen is shown. Panics if the program switched to it, or back, twice.
    pub fn is_taken(&self) -> bool {
        let written = self.written();
        let count = |of: &str| written.matches(of).count();
        match (count(ENTER), count(LEAVE)) {
            (taken, left) if taken == left => false,
            (taken, left) if taken == left + 1 => true,
            counts => panic!("the alternate screen was shown and left this often: {counts:?}"),
        }
    }

    pub fn program(&self) -> &Child {
        &self.program
    }

    /// Waits for the program's end, and returns its status.
    #[track_caller]
    pub fn ended(&mut self) -> ExitStatus {
        let ended = eventually(
            "the program ends",
            || self.program.try_wait().expect("wait for the program"),
            Option::is_some,
        );
        ended.expect("the program has ended")
    }
}

fn resize(terminal: &File, columns: u16, rows: u16) {
    let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(terminal, size).expect("set the size");
}
