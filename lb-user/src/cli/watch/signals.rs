//! The signals that a screen obeys. Whoever waits for them is not ended by them, and can give the terminal back.

use std::io;

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind};

/// What a signal asks for.
pub enum SignalAction {
    /// The terminal has another size, or this process was stopped and goes on.
    Redraw,
    /// To be stopped, as by ^Z.
    Stop,
    /// To end, by the signal of this number.
    End(u8),
}

/// The signals.
pub struct WatchSignals {
    resized: unix::Signal,
    continued: unix::Signal,
    stop: unix::Signal,
    interrupt: unix::Signal,
    quit: unix::Signal,
    terminate: unix::Signal,
    hang_up: unix::Signal,
}

impl WatchSignals {
    /// Waits for them from now on.
    ///
    /// # Errors
    /// If the process has no descriptor for it.
    pub fn new() -> io::Result<Self> {
        let of = |signal: Signal| unix::signal(SignalKind::from_raw(signal.as_raw()));
        Ok(Self {
            resized: of(Signal::WINCH)?,
            continued: of(Signal::CONT)?,
            stop: of(Signal::TSTP)?,
            interrupt: of(Signal::INT)?,
            quit: of(Signal::QUIT)?,
            terminate: of(Signal::TERM)?,
            hang_up: of(Signal::HUP)?,
        })
    }

    /// The next.
    pub async fn next(&mut self) -> SignalAction {
        let end = tokio::select! {
            _ = self.resized.recv() => return SignalAction::Redraw,
            _ = self.continued.recv() => return SignalAction::Redraw,
            _ = self.stop.recv() => return SignalAction::Stop,
            _ = self.interrupt.recv() => Signal::INT,
            _ = self.quit.recv() => Signal::QUIT,
            _ = self.terminate.recv() => Signal::TERM,
            _ = self.hang_up.recv() => Signal::HUP,
        };
        SignalAction::End(u8::try_from(end.as_raw()).unwrap_or(0))
    }
}
