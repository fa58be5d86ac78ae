//! `socklb status --watch`: on a terminal, shows a screen and refreshes it until the user quits. If
//! the output is not a terminal, the command prints one text after another.
//!
//! The command restores the terminal when it ends, except after SIGKILL. Reading the status may
//! take seconds, so another thread reads it while the loop handles keys and signals.

mod keys;
mod signals;
mod terminal;

use std::future::pending;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use lb_view::status::StatusDocument;
use lb_view::text::{self, Screen, Style};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

use self::keys::KeyAction;
use self::signals::{SignalAction, WatchSignals};
use self::terminal::{AlternateScreen, Keyboard};
use crate::error::CommandFailure;
use crate::output::print;

/// A function that reads the status.
pub type Look = Arc<dyn Fn() -> Result<StatusDocument, CommandFailure> + Send + Sync>;

/// Shows the status at intervals of `every`, until a key or a signal ends the command, or nothing
/// reads the output any longer.
///
/// # Errors
/// If the first read fails, or the output cannot be written. On a terminal, an error of a later
/// read appears on the screen, and the read is retried.
pub fn run(look: Look, every: Duration) -> Result<ExitCode, CommandFailure> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    if !std::io::stdout().is_terminal() {
        return texts(&runtime, &look, every);
    }
    // The first read happens before the screen is entered, so that the error for a misspelt name
    // appears below the typed command.
    let view = WatchView { status: look()?, error: None, top: 0 };
    let code = runtime.block_on(screen(view, look, every));
    // `shutdown_background` does not wait for a read that is under way.
    runtime.shutdown_background();
    Ok(code?)
}

fn texts(runtime: &Runtime, look: &Look, every: Duration) -> Result<ExitCode, CommandFailure> {
    let mut tick = runtime.block_on(async { tokio::time::interval(every) });
    // The loop ends with the process, for example on ^C, or when nothing reads the output any
    // longer.
    loop {
        runtime.block_on(tick.tick());
        if !print::text(&text::status(&look()?, Style::for_stdout()))? {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// The status on the screen, and the part of it that is visible.
struct WatchView {
    /// The last status that was read successfully.
    status: StatusDocument,
    /// Why the latest read failed; `None` if it succeeded.
    error: Option<String>,
    /// The first line that is visible.
    top: usize,
}

impl WatchView {
    /// The screen for the current size of the terminal.
    fn screen(&self) -> Screen {
        let (style, size) = (Style::for_stdout(), terminal::size());
        // The value of COLUMNS may be older than the window's present size.
        let width = style.width.map_or(size.columns, |width| width.min(size.columns));
        let text = text::status(&self.status, Style { width: Some(width), ..style });
        Screen::new(&text, self.error.as_deref(), size, self.top, style)
    }

    fn read(&mut self, status: Result<StatusDocument, CommandFailure>) {
        match status {
            Ok(status) => (self.status, self.error) = (status, None),
            Err(failure) => {
                self.error = Some(format!("not up to date, retrying: {failure}").replace('\n', " "));
            }
        }
    }

    fn scroll(&mut self, key: KeyAction) {
        let screen = self.screen();
        let (top, page) = (screen.top(), screen.room().max(1));
        let wanted = match key {
            KeyAction::Up => top.saturating_sub(1),
            KeyAction::Down => top + 1,
            KeyAction::PageUp => top.saturating_sub(page),
            KeyAction::PageDown => top + page,
            KeyAction::Home | KeyAction::Quit => 0,
            KeyAction::End => usize::MAX,
        };
        self.top = wanted.min(screen.last_top());
    }
}

/// Shows the screen until a key or a signal ends the command.
async fn screen(mut view: WatchView, look: Look, every: Duration) -> Result<ExitCode> {
    // The handlers are installed before the terminal is changed, so that no signal can end the
    // process before the terminal is restored.
    let mut signals = WatchSignals::new()?;
    let mut terminal = AlternateScreen::enter()?;
    let mut keyboard = Keyboard::open()?;
    let mut tick = tokio::time::interval(every);
    tick.reset();
    let mut reading = None;
    loop {
        terminal.show(&view.screen().rows())?;
        tokio::select! {
            action = signals.next() => match action {
                SignalAction::Redraw => {}
                SignalAction::Stop => {
                    terminal.leave();
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP)?;
                    terminal = AlternateScreen::enter()?;
                }
                SignalAction::End(signal) => return Ok(ExitCode::from(128 + signal)),
            },
            keys = keyboard.keys() => {
                // Bound: the keys that one read returned.
                for key in keys {
                    if key == KeyAction::Quit {
                        return Ok(ExitCode::SUCCESS);
                    }
                    view.scroll(key);
                }
            }
            _ = tick.tick(), if reading.is_none() => {
                let look = look.clone();
                reading = Some(tokio::task::spawn_blocking(move || look()));
            }
            status = ended(&mut reading) => {
                reading = None;
                tick.reset();
                view.read(status);
            }
        }
    }
}

/// Waits for the result of the read that is under way; waits forever if no read is under way.
async fn ended<T>(reading: &mut Option<JoinHandle<T>>) -> T {
    match reading {
        Some(reading) => reading.await.expect("the read neither panics nor is cancelled"),
        None => pending().await,
    }
}
