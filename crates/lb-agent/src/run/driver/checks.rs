//! Checks whether the application can serve.

use std::time::Duration;

use lb_core::service::Protocol;

use super::{RunDriver, RunEvent};
use crate::run::lifecycle::Input;
use crate::run::options::ReadinessMethod;
use crate::run::processes::CommandPurpose;
use crate::run::readiness_check::{PAUSE, ReadinessProbe};

/// Time limit of a readiness command.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

/// Time after which a warning is logged if the application is not ready.
const LATE: Duration = Duration::from_secs(30);

impl RunDriver {
    pub(super) fn start_check(&mut self) {
        if !self.lifecycle.is_starting() {
            return;
        }
        if self.checks == 0 {
            self.send_after(LATE, RunEvent::Late);
        }
        self.checks += 1;
        let port = self.listener.address.port();
        let attempt = match (&self.args.ready, self.listener.protocol) {
            (Some(ReadinessMethod::Command(line)), _) => {
                let line = line.clone();
                if self.start_shell(CommandPurpose::Check, &line) {
                    self.send_after(CHECK_TIMEOUT, RunEvent::CheckOverdue(self.checks));
                } else {
                    self.send_after(PAUSE, RunEvent::Check);
                }
                return;
            }
            (Some(ReadinessMethod::Http(port, path)), _) => ReadinessProbe::Http(*port, path.clone()),
            (Some(ReadinessMethod::Tcp(port)), _) => ReadinessProbe::Tcp(*port),
            (None, Protocol::Tcp) => ReadinessProbe::Tcp(port),
            (None, Protocol::Udp) => ReadinessProbe::Socket,
        };
        let (events, listener) = (self.events.clone(), self.listener);
        self.check = Some(tokio::spawn(async move {
            attempt.until_ready(listener).await;
            let _ = events.send(RunEvent::Ready).await;
        }));
    }

    /// The time limit of readiness command `number` has passed.
    pub(super) fn check_overdue(&mut self, number: u64) {
        if self.lifecycle.is_starting() && number == self.checks {
            self.processes.kill_shells(Some(CommandPurpose::Check));
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
        self.processes.kill_shells(Some(CommandPurpose::Check));
    }

    pub(super) fn ready(&mut self) {
        // The application listens now, so the kernel's list shows whether it has a socket at the
        // backend's own address.
        if let Err(error) = self.listener.find() {
            tracing::warn!(%error, "cannot read the kernel's list of sockets");
        }
        self.input(Input::Ready);
    }

    pub(super) fn send_after(&self, pause: Duration, event: RunEvent) {
        let events = self.events.clone();
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            // The send fails only after the driver has ended.
            let _ = events.send(event).await;
        });
    }
}
