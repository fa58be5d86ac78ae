//! The events that `socklb agent run` handles, including signals.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::connections::Connections;
use super::signal::Signal;

/// Capacity of the queue of events. If the queue is full, a sender waits.
const EVENTS: usize = 64;

#[derive(Debug)]
pub enum RunEvent {
    /// This process received a signal.
    Signal(Signal),
    /// The state of a child has changed.
    Child,
    /// The application can serve.
    Ready,
    /// The next attempt to run the readiness command is due.
    Check,
    /// The time limit of the readiness command with this number has passed.
    CheckOverdue(u64),
    /// The time limit has passed after which a warning is logged that the application is not ready.
    Late,
    /// The number of clients that have not acknowledged the last report.
    Unacknowledged(usize),
    /// A count of the connections has ended. The fields are the time from the start of `socklb
    /// agent run` to the start of the count, and the result.
    Looked(Duration, io::Result<Connections>),
}

/// The queue of events.
pub struct Events {
    pub sender: mpsc::Sender<RunEvent>,
    pub receiver: mpsc::Receiver<RunEvent>,
}

/// The signals of this process. Handlers are installed before all other work: without handlers, the
/// first process of a container would lose its signals.
pub struct Signals {
    /// The queue in which signals arrive.
    pub(super) events: Events,
    /// The tasks that receive the signals, for as long as this set exists.
    pub(super) tasks: JoinSet<()>,
}

impl Signals {
    /// Receives signals from now on. Excludes signals that were ignored when this process started,
    /// because the command must also ignore them. SIGTERM is received in any case.
    ///
    /// # Errors
    /// If the kernel refuses a signal handler.
    pub fn take() -> io::Result<Self> {
        let (events, tasks) = take_signals()?;
        Ok(Self { events, tasks })
    }

    /// Waits for a signal that requests the end of this process, before the command is started.
    /// Other signals have no effect.
    pub async fn end_requested(&mut self) -> Signal {
        loop {
            let event = self.events.receiver.recv().await.expect("this process holds a sender");
            if let RunEvent::Signal(signal) = event
                && signal.is_request_to_end()
            {
                return signal;
            }
        }
    }
}

fn take_signals() -> io::Result<(Events, JoinSet<()>)> {
    let (sender, receiver) = mpsc::channel(EVENTS);
    let mut tasks = JoinSet::new();
    let ignored = ignored_signals();
    let is_ignored = |signal: Signal| ignored >> (signal.as_raw() - 1) & 1 == 1 && signal != Signal::TERM;
    let mut take = |kind, event: fn(Signal) -> RunEvent, number| -> io::Result<()> {
        let mut stream = signal(kind)?;
        let sender = sender.clone();
        tasks.spawn(async move {
            while stream.recv().await.is_some() && sender.send(event(number)).await.is_ok() {}
        });
        Ok(())
    };
    take(SignalKind::child(), |_| RunEvent::Child, Signal::from_raw(0))?;
    for signal in Signal::taken().filter(|signal| !is_ignored(*signal)) {
        let taken = take(SignalKind::from_raw(signal.as_raw()), RunEvent::Signal, signal);
        // The runtime cannot receive the last real-time signal.
        if !signal.is_real_time() {
            taken?;
        }
    }
    Ok((Events { sender, receiver }, tasks))
}

/// The signals that this process ignores, with one bit per signal; the lowest bit is for signal 1.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
