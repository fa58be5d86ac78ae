//! The health checks of all backends. Each check has a task of its own, so that it delays neither
//! other checks nor the event loop.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lb_report::agent::name::Name;
use lb_report::agent::streak::Outcome;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use super::AgentEvent;
use crate::config::HealthCheck;

pub struct Checks {
    tasks: JoinSet<()>,
    by_name: BTreeMap<Name, RunningCheck>,
    events: mpsc::Sender<AgentEvent>,
    begun: u64,
}

struct RunningCheck {
    check: HealthCheck,
    task: AbortHandle,
    /// Distinguishes the results of this task from the results of an earlier task for the same
    /// backend.
    number: u64,
    last: Option<(Outcome, Instant)>,
}

impl Checks {
    /// Creates a set without checks. Results are sent to `events`.
    pub fn new(events: mpsc::Sender<AgentEvent>) -> Self {
        Self { tasks: JoinSet::new(), by_name: BTreeMap::new(), events, begun: 0 }
    }

    /// Sets the check of the backend; `None` removes it. Returns whether the method of the check
    /// has changed.
    pub fn set(&mut self, name: Name, check: Option<&HealthCheck>) -> bool {
        // Removes the tasks that have ended.
        while self.tasks.try_join_next().is_some() {}
        let before = self.by_name.get(&name);
        if before.map(|running| &running.check) == check {
            return false;
        }
        let is_another = before.map(|running| &running.check.check) != check.map(|check| &check.check);
        let last = before.and_then(|running| running.last.clone()).filter(|_| !is_another);
        self.remove(name);
        if let Some(check) = check {
            self.begun += 1;
            let task = self.tasks.spawn(repeat(name, self.begun, check.clone(), self.events.clone()));
            self.by_name.insert(name, RunningCheck { check: check.clone(), task, number: self.begun, last });
        }
        is_another
    }

    /// Starts the check again. Earlier results are dropped, and so is the result of an attempt in
    /// progress.
    pub fn restart(&mut self, name: Name) {
        if let Some(RunningCheck { check, .. }) = self.by_name.get(&name) {
            let check = check.clone();
            self.remove(name);
            self.set(name, Some(&check));
        }
    }

    pub fn remove(&mut self, name: Name) {
        if let Some(running) = self.by_name.remove(&name) {
            running.task.abort();
        }
    }

    /// Records the result of a check. Returns whether the check still exists.
    pub fn ended(&mut self, name: Name, number: u64, outcome: &Outcome, now: Instant) -> bool {
        let Some(running) = self.by_name.get_mut(&name).filter(|running| running.number == number) else {
            return false;
        };
        running.last = Some((outcome.clone(), now));
        true
    }

    /// The check of a backend, and its last result.
    pub fn get(&self, name: Name) -> Option<(&HealthCheck, Option<&(Outcome, Instant)>)> {
        self.by_name.get(&name).map(|running| (&running.check, running.last.as_ref()))
    }
}

/// Runs the check at intervals, until the task is aborted.
async fn repeat(name: Name, number: u64, check: HealthCheck, events: mpsc::Sender<AgentEvent>) {
    loop {
        let next = tokio::time::Instant::now() + jittered(check.interval, random());
        let outcome = check.check.run(check.timeout).await;
        if events.send(AgentEvent::Checked { name, number, outcome }).await.is_err() {
            return;
        }
        tokio::time::sleep_until(next).await;
    }
}

/// Varies the interval by up to a tenth, so that the checks of many hosts do not coincide.
fn jittered(interval: Duration, random: u8) -> Duration {
    interval * (900 + 200 * u32::from(random) / 255) / 1000
}

/// A random number; nothing secret depends on it.
fn random() -> u8 {
    let mut bytes = [127];
    // If the kernel provides no random number, the interval is the configured interval.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK);
    bytes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_vary_by_a_tenth() {
        let second = Duration::from_secs(1);
        let times = [0, 127, 255].map(|random| jittered(second, random).as_millis());
        assert_eq!(times, [900, 999, 1100]);
    }
}
