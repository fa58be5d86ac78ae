//! Counts the connections repeatedly while `socklb agent run` waits for them to end, and logs the
//! result of the wait.

use std::io;
use std::time::Duration;

use tokio::time::Instant;

use super::{RunDriver, RunEvent};
use crate::run::connections::Connections;
use crate::run::lifecycle::{Cause, ConnectionSnapshot, Input, Wait};

/// Pause between two counts of the connections. If a count takes long, the pause is longer, so that
/// counting takes at most a tenth of the time.
const LOOK: Duration = Duration::from_millis(100);
const LOOK_SHARE: u32 = 10;

impl RunDriver {
    pub(super) fn look_if_due(&mut self) {
        if self.look_at.is_some_and(|at| at <= Instant::now()) {
            self.look_at = None;
            let (listener, idle, events) = (self.listener, self.args.idle, self.events.clone());
            let began = self.began.elapsed();
            // A count of a million connections takes so long that it runs on a thread for blocking
            // work.
            tokio::task::spawn_blocking(move || {
                // The send fails only after the driver has ended.
                let _ = events.blocking_send(RunEvent::Looked(began, listener.connections(idle)));
            });
        }
    }

    pub(super) fn looked(&mut self, began: Duration, result: io::Result<Connections>) {
        let took = self.began.elapsed().saturating_sub(began);
        self.look_at = Some(Instant::now() + LOOK.max(took * (LOOK_SHARE - 1)));
        match result {
            Ok(Connections { busy, idle }) => {
                self.input(Input::Looked(ConnectionSnapshot { began, busy, idle }));
            }
            // The kernel's list changed while it was read; the next count follows soon.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                if !std::mem::replace(&mut self.is_blind, true) {
                    tracing::warn!(%error, "cannot read the list of connections; waiting for the whole grace");
                }
            }
        }
    }

    pub(super) fn report(&self, wait: Wait) {
        let Wait { cause, waited, unacknowledged, look } = wait;
        let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
        let (busy, idle) = (look.map(|look| look.busy), look.map(|look| look.idle));
        let unheard_clients = unacknowledged;
        match cause {
            Cause::Quiet => {
                tracing::info!(waited_ms, unheard_clients, idle, "no connection is in use any more");
            }
            Cause::Grace if look.is_none() => {
                tracing::warn!(
                    waited_ms,
                    unheard_clients,
                    "the grace is over, and the connections could not be read"
                );
            }
            Cause::Grace => tracing::warn!(
                waited_ms,
                unheard_clients,
                busy,
                idle,
                "the grace is over, and these connections are still open"
            ),
            Cause::SecondSignal => tracing::warn!(
                waited_ms,
                unheard_clients,
                busy,
                idle,
                "a second signal ended the wait, and these connections are still open"
            ),
        }
    }
}
