//! Messages to the service manager (sd_notify(3)), sent by a separate thread.

use std::sync::mpsc;
use std::time::Duration;

use sd_notify::NotifyState;
use tracing::warn;

/// The connection to the service manager that started the program, if there is one.
///
/// A separate thread sends the messages: if the manager does not read them, the sender blocks, and
/// the event loop must not block.
pub struct Notifier {
    messages: Option<mpsc::SyncSender<String>>,
    /// Closed when the thread has sent all messages.
    finished: mpsc::Receiver<()>,
    status: String,
}

impl Notifier {
    /// Connects to the manager that `NOTIFY_SOCKET` names, if it is set.
    pub fn new() -> Self {
        /// Maximum number of waiting messages. Further messages are dropped, because a later
        /// message reports a newer state.
        const WAITING: usize = 16;
        let (ended, finished) = mpsc::channel();
        let messages = std::env::var_os("NOTIFY_SOCKET").and_then(|_| {
            let (messages, inbox) = mpsc::sync_channel(WAITING);
            let send_all = move || {
                send_all(&inbox);
                drop(ended);
            };
            std::thread::Builder::new().name("notify".to_owned()).spawn(send_all).ok().map(|_| messages)
        });
        Self { messages, finished, status: String::new() }
    }

    /// The interval between watchdog messages, half of the manager's limit. `None` if the manager
    /// requests no such messages.
    pub fn watchdog(&self) -> Option<Duration> {
        sd_notify::watchdog_enabled().map(|limit| limit / 2).filter(|interval| !interval.is_zero())
    }

    /// Sends a watchdog message, which shows the manager that this process is alive.
    pub fn watchdog_fed(&self) {
        self.send(&[NotifyState::Watchdog]);
    }

    /// Reports that a start or a reload is complete.
    pub fn ready(&mut self, status: String) {
        self.send(&[NotifyState::Ready, NotifyState::Status(&status)]);
        self.status = status;
    }

    /// Reports the state in one line, if that line has changed.
    pub fn status(&mut self, status: String) {
        if status != self.status {
            self.send(&[NotifyState::Status(&status)]);
            self.status = status;
        }
    }

    /// Reports that a configuration is being read.
    pub fn reloading(&self) {
        // The protocol requires the monotonic clock's time in the same message.
        match NotifyState::monotonic_usec_now() {
            Ok(now) => self.send(&[NotifyState::Reloading, now]),
            Err(_) => self.send(&[NotifyState::Reloading]),
        }
    }

    /// Reports that shutdown has begun.
    pub fn stopping(&self) {
        self.send(&[NotifyState::Stopping]);
    }

    /// Waits until all messages are sent, but at most a second, because the manager may not read
    /// them.
    pub fn finish(mut self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        if self.messages.take().is_some() {
            let _ = self.finished.recv_timeout(PATIENCE);
        }
    }

    fn send(&self, state: &[NotifyState<'_>]) {
        if let Some(messages) = &self.messages {
            let lines: Vec<String> = state.iter().map(ToString::to_string).collect();
            let _ = messages.try_send(lines.join("\n"));
        }
    }
}

impl Default for Notifier {
    fn default() -> Self {
        Self::new()
    }
}

/// Sends the messages until the channel is closed.
fn send_all(inbox: &mpsc::Receiver<String>) {
    let mut before = None;
    for message in inbox {
        let error = sd_notify::notify(&[NotifyState::Custom(&message)]).err().map(|error| error.to_string());
        // An error that lasts is logged once, not once per watchdog message.
        if let Some(error) = error.as_ref().filter(|error| before.as_ref() != Some(*error)) {
            warn!(%error, "cannot notify the service manager");
        }
        before = error;
    }
}
