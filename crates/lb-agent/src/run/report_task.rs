//! Reports the backend's readiness to the agent, in a separate task. If the agent fails or hangs,
//! the task retries, and `socklb agent run` continues.

use std::time::Duration;

use lb_report::wire::Readiness;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::events::RunEvent;
use crate::reporter::ReadinessReporter;

/// How long the agent may take for one answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Pause before the first retry. The pause doubles with each retry, up to `LONGEST_PAUSE`.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Pause between two requests for the number of clients that have not acknowledged. Clients of a
/// lame duck acknowledge within a few round trips.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long the task may take to deliver the last report after the driver has ended.
const LAST_WORD: Duration = Duration::from_secs(1);

/// The handle of the task: passes the backend's readiness to the task.
pub struct ReportTask {
    wish: watch::Sender<Wish>,
    task: JoinHandle<()>,
}

#[derive(Clone, Copy, Default)]
struct Wish {
    readiness: Option<Readiness>,
    /// Whether to request the number of clients that have not acknowledged.
    polls: bool,
}

impl ReportTask {
    /// Starts the task, which sends [`RunEvent::Unacknowledged`].
    pub fn start<V: ReadinessReporter + 'static>(reporter: V, events: mpsc::Sender<RunEvent>) -> Self {
        let (wish, wishes) = watch::channel(Wish::default());
        Self { wish, task: tokio::spawn(report_wishes(reporter, wishes, events)) }
    }

    /// Makes the agent report this readiness from now on.
    pub fn set_readiness(&self, readiness: Readiness) {
        self.wish.send_modify(|wish| wish.readiness = Some(readiness));
    }

    /// Requests the number of clients that have not acknowledged the last report, repeatedly from
    /// now on until the number is zero.
    pub fn poll_unacknowledged(&self) {
        self.wish.send_if_modified(|wish| !std::mem::replace(&mut wish.polls, true));
    }

    /// Waits at most a second until the last report is delivered, and ends the task.
    pub async fn finish(self) {
        let Self { wish, mut task } = self;
        drop(wish);
        if tokio::time::timeout(LAST_WORD, &mut task).await.is_err() {
            tracing::warn!("the agent did not accept the backend's last readiness in time");
            task.abort();
        }
    }
}

async fn report_wishes<V: ReadinessReporter>(
    mut reporter: V,
    mut wishes: watch::Receiver<Wish>,
    events: mpsc::Sender<RunEvent>,
) {
    let mut reported = None;
    let mut all_acknowledged = false;
    let mut pause = PAUSE;
    loop {
        // The end of the driver is checked before the readiness is read, so that the last change is
        // not missed.
        let is_over = wishes.has_changed().is_err();
        let wish = *wishes.borrow_and_update();
        let result = match wish.readiness.filter(|readiness| reported != Some(*readiness)) {
            Some(readiness) => bounded(reporter.report(readiness)).await.map(|()| {
                reported = Some(readiness);
                all_acknowledged = false;
            }),
            None if is_over => return,
            None if wish.polls && !all_acknowledged => match bounded(reporter.unacknowledged()).await {
                Ok(count) => {
                    all_acknowledged = count == 0;
                    // The send fails only after the driver has ended.
                    let _ = events.send(RunEvent::Unacknowledged(count)).await;
                    wait(&mut wishes, POLL_INTERVAL).await;
                    Ok(())
                }
                Err(error) => Err(error),
            },
            None => {
                let _ = wishes.changed().await;
                Ok(())
            }
        };
        pause = match result {
            Ok(()) => PAUSE,
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "a request to the agent failed; retrying");
                wait(&mut wishes, pause).await;
                (pause * 2).min(LONGEST_PAUSE)
            }
        };
    }
}

/// Waits for `pause`, or until the driver changes its requests to the task.
async fn wait(wishes: &mut watch::Receiver<Wish>, pause: Duration) {
    let changed = async {
        if wishes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let _ = tokio::time::timeout(pause, changed).await;
}

async fn bounded<T>(answer: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let timeout = |_| anyhow::anyhow!("no answer within {} s", TIMEOUT.as_secs());
    tokio::time::timeout(TIMEOUT, answer).await.map_err(timeout)?
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A reporter that fails at first, and records the readiness that it receives.
    struct Flaky {
        failures: usize,
        unacknowledged: usize,
        reported: Arc<Mutex<Vec<Readiness>>>,
    }

    impl ReadinessReporter for Flaky {
        async fn report(&mut self, readiness: Readiness) -> anyhow::Result<()> {
            self.failures = self.failures.checked_sub(1).map_or(Ok(0), |left| {
                self.failures = left;
                Err(anyhow::anyhow!("the agent is gone"))
            })?;
            self.reported.lock().unwrap().push(readiness);
            Ok(())
        }

        async fn unacknowledged(&mut self) -> anyhow::Result<usize> {
            let unacknowledged = self.unacknowledged;
            self.unacknowledged = unacknowledged.saturating_sub(1);
            Ok(unacknowledged)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_report_is_retried_before_unheard_clients_are_counted() {
        let reported = Arc::new(Mutex::new(Vec::new()));
        let (events, mut received) = mpsc::channel(8);
        let report_task =
            ReportTask::start(Flaky { failures: 3, unacknowledged: 2, reported: reported.clone() }, events);
        report_task.set_readiness(Readiness::LameDuck);
        report_task.poll_unacknowledged();
        for expected in [2, 1, 0] {
            let Some(RunEvent::Unacknowledged(count)) = received.recv().await else {
                panic!("no count arrived")
            };
            assert_eq!(count, expected);
        }
        report_task.set_readiness(Readiness::Down);
        report_task.finish().await;
        assert_eq!(*reported.lock().unwrap(), [Readiness::LameDuck, Readiness::Down]);
        assert!(matches!(received.recv().await, Some(RunEvent::Unacknowledged(0)) | None));
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_hangs_does_not_delay_the_end() {
        struct Deaf;
        impl ReadinessReporter for Deaf {
            async fn report(&mut self, _: Readiness) -> anyhow::Result<()> {
                std::future::pending().await
            }
            async fn unacknowledged(&mut self) -> anyhow::Result<usize> {
                std::future::pending().await
            }
        }
        let (events, _received) = mpsc::channel(8);
        let report_task = ReportTask::start(Deaf, events);
        report_task.set_readiness(Readiness::Down);
        report_task.finish().await;
    }
}
