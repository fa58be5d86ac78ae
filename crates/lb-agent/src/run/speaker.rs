//! Reports the backend's readiness to the agent, in a task beside the run. If the agent fails or
//! hangs, the task retries, and the run continues.

use std::time::Duration;

use lb_report::wire::Readiness;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::events::RunEvent;
use crate::voice::Voice;

/// How long the agent may take for one answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Pause before the first retry; it doubles up to `LONGEST_PAUSE`.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Pause between two requests for the number of clients that have not acknowledged. Clients of a
/// lame duck acknowledge within a few round trips.
const ASK: Duration = Duration::from_millis(50);

/// How long the last report may take after the end of the run.
const LAST_WORD: Duration = Duration::from_secs(1);

/// Sends the wishes of the run to the task that reports to the agent.
pub struct Speaker {
    wish: watch::Sender<Wish>,
    task: JoinHandle<()>,
}

#[derive(Clone, Copy, Default)]
struct Wish {
    readiness: Option<Readiness>,
    /// Whether to request the number of clients that have not acknowledged.
    asks: bool,
}

impl Speaker {
    /// Starts the task, which sends [`RunEvent::Unheard`].
    pub fn start<V: Voice + 'static>(voice: V, events: mpsc::Sender<RunEvent>) -> Self {
        let (wish, wishes) = watch::channel(Wish::default());
        Self { wish, task: tokio::spawn(speak(voice, wishes, events)) }
    }

    /// Makes the agent report this readiness from now on.
    pub fn say(&self, readiness: Readiness) {
        self.wish.send_modify(|wish| wish.readiness = Some(readiness));
    }

    /// From now on requests the number of clients that have not acknowledged the last report, until
    /// it is zero.
    pub fn ask(&self) {
        self.wish.send_if_modified(|wish| !std::mem::replace(&mut wish.asks, true));
    }

    /// Waits at most a second for the last report, and ends the task.
    pub async fn finish(self) {
        let Self { wish, mut task } = self;
        drop(wish);
        if tokio::time::timeout(LAST_WORD, &mut task).await.is_err() {
            tracing::warn!("cannot report to the agent in time how the backend ended");
            task.abort();
        }
    }
}

async fn speak<V: Voice>(mut voice: V, mut wishes: watch::Receiver<Wish>, events: mpsc::Sender<RunEvent>) {
    let mut said = None;
    let mut has_everybody_heard = false;
    let mut pause = PAUSE;
    loop {
        // Checked before the wish is read, so that the last wish is not missed.
        let is_over = wishes.has_changed().is_err();
        let wish = *wishes.borrow_and_update();
        let result = match wish.readiness.filter(|readiness| said != Some(*readiness)) {
            Some(readiness) => bounded(voice.say(readiness)).await.map(|()| {
                said = Some(readiness);
                has_everybody_heard = false;
            }),
            None if is_over => return,
            None if wish.asks && !has_everybody_heard => match bounded(voice.unheard()).await {
                Ok(count) => {
                    has_everybody_heard = count == 0;
                    // After the run there is no receiver.
                    let _ = events.send(RunEvent::Unheard(count)).await;
                    wait(&mut wishes, ASK).await;
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

/// Waits for `pause`, or until there is another wish.
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

    /// Fails at first, and records the readiness that it receives.
    struct Flaky {
        failures: usize,
        unheard: usize,
        said: Arc<Mutex<Vec<Readiness>>>,
    }

    impl Voice for Flaky {
        async fn say(&mut self, readiness: Readiness) -> anyhow::Result<()> {
            self.failures = self.failures.checked_sub(1).map_or(Ok(0), |left| {
                self.failures = left;
                Err(anyhow::anyhow!("the agent is gone"))
            })?;
            self.said.lock().unwrap().push(readiness);
            Ok(())
        }

        async fn unheard(&mut self) -> anyhow::Result<usize> {
            let unheard = self.unheard;
            self.unheard = unheard.saturating_sub(1);
            Ok(unheard)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_report_is_retried_before_unheard_clients_are_counted() {
        let said = Arc::new(Mutex::new(Vec::new()));
        let (events, mut heard) = mpsc::channel(8);
        let speaker = Speaker::start(Flaky { failures: 3, unheard: 2, said: said.clone() }, events);
        speaker.say(Readiness::LameDuck);
        speaker.ask();
        for expected in [2, 1, 0] {
            let Some(RunEvent::Unheard(count)) = heard.recv().await else { panic!("it is asked") };
            assert_eq!(count, expected);
        }
        speaker.say(Readiness::Down);
        speaker.finish().await;
        assert_eq!(*said.lock().unwrap(), [Readiness::LameDuck, Readiness::Down]);
        assert!(matches!(heard.recv().await, Some(RunEvent::Unheard(0)) | None));
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_hangs_does_not_delay_the_end() {
        struct Deaf;
        impl Voice for Deaf {
            async fn say(&mut self, _: Readiness) -> anyhow::Result<()> {
                std::future::pending().await
            }
            async fn unheard(&mut self) -> anyhow::Result<usize> {
                std::future::pending().await
            }
        }
        let (events, _heard) = mpsc::channel(8);
        let speaker = Speaker::start(Deaf, events);
        speaker.say(Readiness::Down);
        speaker.finish().await;
    }
}
