//! `socklb status --watch`: on a terminal a screen of its own that is brought up to date until it is left, elsewhere one
//! text after the other.
//!
//! What the terminal was is given back however it ends. Reading the status may take seconds, and is done beside the loop,
//! which goes on to hear keys and signals.

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
use crate::print;

/// Reads the status.
pub type Look = Arc<dyn Fn() -> Result<StatusDocument, CommandFailure> + Send + Sync>;

/// Shows the status every so often, until it is told to stop or the reader of the output is gone.
///
/// # Errors
/// If it cannot be read the first time, or not be written. On a terminal a status that cannot be read later is said there,
/// and read again.
pub fn run(look: Look, every: Duration) -> Result<ExitCode, CommandFailure> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    if !std::io::stdout().is_terminal() {
        return texts(&runtime, &look, every);
    }
    // Before the screen is taken: a name that is misspelt is told where it was typed.
    let view = WatchView { status: look()?, error: None, top: 0 };
    let code = runtime.block_on(screen(view, look, every));
    // A reading that is under way is not waited for.
    runtime.shutdown_background();
    Ok(code?)
}

/// One text after the other.
fn texts(runtime: &Runtime, look: &Look, every: Duration) -> Result<ExitCode, CommandFailure> {
    let mut tick = runtime.block_on(async { tokio::time::interval(every) });
    // Ends with the process: by ^C, or when the reader of the output is gone.
    loop {
        runtime.block_on(tick.tick());
        if !print::text(&text::status(&look()?, Style::for_stdout()))? {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// What is shown, and which part of it.
struct WatchView {
    /// The last that could be read.
    status: StatusDocument,
    /// Why it could not be read again.
    error: Option<String>,
    /// The first line that is seen.
    top: usize,
}

impl WatchView {
    /// As it is seen on the terminal as that is now.
    fn screen(&self) -> Screen {
        let (style, size) = (Style::for_stdout(), terminal::size());
        // COLUMNS may be what a shell said before the window was made smaller.
        let width = style.width.map_or(size.columns, |width| width.min(size.columns));
        let text = text::status(&self.status, Style { width: Some(width), ..style });
        Screen::new(&text, self.error.as_deref(), size, self.top)
    }

    fn read(&mut self, status: Result<StatusDocument, CommandFailure>) {
        match status {
            Ok(status) => (self.status, self.error) = (status, None),
            Err(failure) => {
                self.error = Some(format!("not up to date, trying again: {failure}").replace('\n', " "));
            }
        }
    }

    /// Moves what is seen.
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

/// The screen, until it is left.
async fn screen(mut view: WatchView, look: Look, every: Duration) -> Result<ExitCode> {
    // Before the terminal is changed: from here on no signal ends the process before that is given back.
    let mut signals = WatchSignals::new()?;
    let mut terminal = AlternateScreen::enter()?;
    let mut keyboard = Keyboard::open()?;
    let mut tick = tokio::time::interval(every);
    tick.reset();
    let mut reading = None;
    loop {
        terminal.show(&view.screen().rows())?;
        tokio::select! {
            asked = signals.next() => match asked {
                SignalAction::Redraw => {}
                SignalAction::Stop => {
                    terminal.leave();
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP)?;
                    terminal = AlternateScreen::enter()?;
                }
                SignalAction::End(signal) => return Ok(ExitCode::from(128 + signal)),
            },
            keys = keyboard.keys() => {
                // Bound: what was typed at once.
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

/// What was read; never, if nothing is being read.
async fn ended<T>(reading: &mut Option<JoinHandle<T>>) -> T {
    match reading {
        Some(reading) => reading.await.expect("reading does not panic, and is not cancelled"),
        None => pending().await,
    }
}
