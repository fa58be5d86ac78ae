//! What a run waits for, and the signals among it.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::connections::Connections;
use super::signal::Signal;

/// Events that wait for the loop; who has more waits for it.
const EVENTS: usize = 64;

/// What the loop waits for.
#[derive(Debug)]
pub enum RunEvent {
    /// This process was sent a signal.
    Signal(Signal),
    /// Something has become of a child.
    Child,
    /// The application can serve.
    Ready,
    /// It is time for the next command that checks.
    Check,
    /// The command that checks, by its number, has had its time.
    CheckOverdue(u64),
    /// The application has had long enough to become ready.
    Late,
    /// So many clients have not acknowledged.
    Unheard(usize),
    /// A look at the connections is over.
    Looked(Duration, io::Result<Connections>),
}

/// Where events come in.
pub struct Events {
    /// For whoever has one.
    pub sender: mpsc::Sender<RunEvent>,
    /// For the loop.
    pub receiver: mpsc::Receiver<RunEvent>,
}

/// The signals of this process, which are taken before anything else is done: the first process of a container that does not take
/// them loses them.
pub struct Signals {
    /// Where they come in.
    pub(super) events: Events,
    /// Who takes them, for as long as these live.
    pub(super) tasks: JoinSet<()>,
}

impl Signals {
    /// Takes them from now on, but for those that this process was started to ignore, which the command shall ignore as well.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn take() -> io::Result<Self> {
        let (events, tasks) = take_signals()?;
        Ok(Self { events, tasks })
    }

    /// Waits for one that asks to end, before there is a command. Others are nobody's.
    pub async fn asked_to_end(&mut self) -> Signal {
        loop {
            let event = self.events.receiver.recv().await.expect("this process has a sender itself");
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
        // The runtime has no room for the last of the real-time signals.
        if !signal.is_real_time() {
            taken?;
        }
    }
    Ok((Events { sender, receiver }, tasks))
}

/// A bit for each signal, the lowest for signal 1.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
