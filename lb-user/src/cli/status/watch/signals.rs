//! The signals that `socklb status --watch` handles while it shows a screen. A signal with a
//! handler does not end the process, so the process can restore the terminal first.

use std::io;

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind};

pub enum SignalAction {
    /// The terminal has changed its size, or this process continues after a stop.
    Redraw,
    /// Stop the process, as ^Z does.
    Stop,
    /// End the process, because of the signal with this number.
    End(u8),
}

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
    /// Starts to catch the signals.
    ///
    /// # Errors
    /// If a handler cannot be installed.
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
