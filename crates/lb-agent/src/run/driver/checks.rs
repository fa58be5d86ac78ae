//! Finds out whether the application can serve.

use std::time::Duration;

use lb_core::service::Protocol;

use super::{Driver, Event};
use crate::run::lifecycle::Input;
use crate::run::options::Check;
use crate::run::processes::Purpose;
use crate::run::readiness_check::{Attempt, PAUSE};

/// How long a command that checks may take.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

/// After how long it is said that the application is not ready.
const LATE: Duration = Duration::from_secs(30);

impl Driver {
    pub(super) fn start_check(&mut self) {
        if !self.lifecycle.is_starting() {
            return;
        }
        if self.checks == 0 {
            self.send_after(LATE, Event::Late);
        }
        self.checks += 1;
        let port = self.listener.address.port();
        let attempt = match (&self.args.ready, self.listener.protocol) {
            (Some(Check::Command(line)), _) => {
                let line = line.clone();
                if self.start_shell(Purpose::Check, &line) {
                    self.send_after(CHECK_TIMEOUT, Event::CheckOverdue(self.checks));
                } else {
                    self.send_after(PAUSE, Event::Check);
                }
                return;
            }
            (Some(Check::Http(port, path)), _) => Attempt::Http(*port, path.clone()),
            (Some(Check::Tcp(port)), _) => Attempt::Tcp(*port),
            (None, Protocol::Tcp) => Attempt::Tcp(port),
            (None, Protocol::Udp) => Attempt::Socket,
        };
        let (events, listener) = (self.events.clone(), self.listener);
        self.check = Some(tokio::spawn(async move {
            attempt.until_ready(listener).await;
            let _ = events.send(Event::Ready).await;
        }));
    }

    /// A command that checks has had its time.
    pub(super) fn check_overdue(&mut self, number: u64) {
        if self.lifecycle.is_starting() && number == self.checks {
            self.processes.kill_shells(Some(Purpose::Check));
        }
    }

    pub(super) fn late(&self) {
        if self.lifecycle.is_starting() {
            tracing::warn!(seconds = LATE.as_secs(), "the application is not ready yet");
        }
    }

    pub(super) fn stop_checking(&mut self) {
        if let Some(check) = self.check.take() {
            check.abort();
        }
        self.processes.kill_shells(Some(Purpose::Check));
    }

    pub(super) fn ready(&mut self) {
        // Now that it listens: whether at its own address alone.
        if let Err(error) = self.listener.find() {
            tracing::warn!(%error, "the kernel's list of sockets cannot be read");
        }
        self.input(Input::Ready);
    }

    pub(super) fn send_after(&self, pause: Duration, event: Event) {
        let events = self.events.clone();
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            // Nobody waits for it when the run is over.
            let _ = events.send(event).await;
        });
    }
}
