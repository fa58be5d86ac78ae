//! What the service manager is told (sd_notify(3)), by a thread of its own.

use std::sync::mpsc;
use std::time::Duration;

use sd_notify::NotifyState;
use tracing::warn;

/// The service manager that started the program, if one did.
///
/// A thread of its own speaks to it: a manager that does not read blocks the sender, and the loop must not block.
pub struct Notifier {
    messages: Option<mpsc::SyncSender<String>>,
    /// Closed when the thread has sent everything.
    said: mpsc::Receiver<()>,
    status: String,
}

impl Notifier {
    /// The one that `NOTIFY_SOCKET` names.
    pub fn new() -> Self {
        /// Messages beyond this are dropped: a later one reports the state at its time.
        const WAITING: usize = 16;
        let (ended, said) = mpsc::channel();
        let messages = std::env::var_os("NOTIFY_SOCKET").and_then(|_| {
            let (messages, inbox) = mpsc::sync_channel(WAITING);
            let speak = move || {
                speak(&inbox);
                drop(ended);
            };
            std::thread::Builder::new().name("notify".to_owned()).spawn(speak).ok().map(|_| messages)
        });
        Self { messages, said, status: String::new() }
    }

    /// How often to send it a sign of life: twice as often as it demands.
    pub fn watchdog(&self) -> Option<Duration> {
        sd_notify::watchdog_enabled().map(|limit| limit / 2).filter(|interval| !interval.is_zero())
    }

    /// A sign of life.
    pub fn watchdog_fed(&self) {
        self.tell(&[NotifyState::Watchdog]);
    }

    /// All is there that was asked for, also after a reload.
    pub fn ready(&mut self, status: String) {
        self.tell(&[NotifyState::Ready, NotifyState::Status(&status)]);
        self.status = status;
    }

    /// One line on the state, if it is another one.
    pub fn status(&mut self, status: String) {
        if status != self.status {
            self.tell(&[NotifyState::Status(&status)]);
            self.status = status;
        }
    }

    /// A configuration is being read.
    pub fn reloading(&self) {
        // The protocol wants the time of the monotonic clock beside it.
        match NotifyState::monotonic_usec_now() {
            Ok(now) => self.tell(&[NotifyState::Reloading, now]),
            Err(_) => self.tell(&[NotifyState::Reloading]),
        }
    }

    /// The end has begun.
    pub fn stopping(&self) {
        self.tell(&[NotifyState::Stopping]);
    }

    /// Waits until everything is sent, but not long for a manager that does not read.
    pub fn finish(mut self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        if self.messages.take().is_some() {
            let _ = self.said.recv_timeout(PATIENCE);
        }
    }

    fn tell(&self, state: &[NotifyState<'_>]) {
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

/// Passes messages on until there are no more.
fn speak(inbox: &mpsc::Receiver<String>) {
    let mut before = None;
    for message in inbox {
        let error = sd_notify::notify(&[NotifyState::Custom(&message)]).err().map(|error| error.to_string());
        // Logged once, not once per sign of life.
        if let Some(error) = error.as_ref().filter(|error| before.as_ref() != Some(*error)) {
            warn!(%error, "cannot notify the service manager");
        }
        before = error;
    }
}
