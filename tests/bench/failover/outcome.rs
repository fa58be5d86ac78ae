//! The results of a cell, and whether they meet its requirements. This module contains only values.
//! It must not depend on how they are printed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use lb_common::ending::Ending;
use lb_view::backend::BackendStatus;
use lb_view::status::ServiceStatus;
use serde::Serialize;

use super::caller::Made;
use super::cell::{Cell, Fault, Fleet, Manner};

/// The results of a cell.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    pub connects: u64,
    /// Connects that failed.
    pub failed: u64,
    /// Connects that were trials.
    pub trials: u64,
    pub trials_failed: u64,
    /// The number of dead backends that are ejected at the end.
    pub ejected: usize,
    /// Failures after which the backend was not ejected, because it was the last available backend.
    pub withheld: u64,
    /// Milliseconds from the start of the first failed connect to the end of the last failed
    /// connect that was not a trial. `None` if a dead backend is not ejected at the end, because
    /// then connects still fail.
    pub over_after_ms: Option<f64>,
    /// How much the connects to a live backend differ from its share of the connects to all live
    /// backends: the largest difference, divided by the share. `None` if there are too few
    /// connects.
    pub share_off: Option<f64>,
    /// The number of connects to each live backend, from which `share_off` is computed.
    pub live: Vec<u64>,
    /// Resets by dead backends that the kernel programs took for aborts by the client.
    pub taken_for_aborted: u64,
    /// How often the client has received each error.
    pub errors: BTreeMap<String, u64>,
    /// Differences between the client's results and the kernel's counts.
    pub contradictions: Vec<String>,
}

/// The addresses of a cell's backends.
pub struct Backends {
    pub dead: Vec<SocketAddr>,
    pub live: Vec<SocketAddr>,
}

/// The backend of a service that has this address.
pub fn backend(service: &ServiceStatus, address: SocketAddr) -> Result<&BackendStatus> {
    let mut backends = service.backends.iter();
    backends
        .find(|backend| backend.address == address)
        .with_context(|| format!("the service has no backend {address}"))
}

/// The minimum number of connects per live backend from which shares are computed.
const LEAST_SAMPLE: f64 = 100.0;

impl Figures {
    /// Computes the figures of a cell from the client's results and from the later status of the
    /// client's service.
    pub fn of(cell: Cell, backends: &Backends, made: &Made, service: &ServiceStatus) -> Result<Self> {
        let dead: Vec<&BackendStatus> =
            backends.dead.iter().map(|address| backend(service, *address)).collect::<Result<_>>()?;
        let sum = |of: fn(&BackendStatus) -> u64| dead.iter().map(|backend| of(backend)).sum::<u64>();
        let trials = sum(|backend| backend.trials);
        // If a backend accepts connections and resets them, its trials fail even if they have
        // readmitted the backend.
        let trials_failed = match cell.fault {
            Fault::Refuse | Fault::Blackhole | Fault::Reset => trials,
            Fault::SlowAccept => trials - sum(|backend| backend.readmissions),
        };
        let ejected = dead.iter().filter(|backend| backend.ejection.is_some()).count();
        let failed = u64::try_from(made.failed.len())?;
        Ok(Self {
            connects: made.connects,
            failed,
            trials,
            trials_failed,
            ejected,
            withheld: sum(|backend| backend.withheld),
            over_after_ms: (ejected == dead.len()).then(|| over_after(made, trials_failed)).flatten(),
            share_off: None,
            live: Vec::new(),
            taken_for_aborted: match cell.fault {
                Fault::Reset => sum(|backend| backend.endings.get("aborted").copied().unwrap_or(0)),
                Fault::Refuse | Fault::Blackhole | Fault::SlowAccept => 0,
            },
            errors: made.errors.clone(),
            contradictions: contradictions(cell.fault, &dead, made, service),
        })
    }

    /// Computes `live` and `share_off` from the connects between two readings of the status.
    #[expect(clippy::cast_precision_loss, reason = "counts of connects")]
    pub fn compare_shares(
        &mut self,
        live: &[SocketAddr],
        before: Option<&ServiceStatus>,
        after: &ServiceStatus,
    ) -> Result<()> {
        for address in live {
            let until = before.map_or(Ok(0), |before| anyhow::Ok(backend(before, *address)?.established))?;
            self.live.push(backend(after, *address)?.established - until);
        }
        let mean = self.mean_of_live();
        if mean >= LEAST_SAMPLE {
            let off = self.live.iter().map(|count| (*count as f64 / mean - 1.0).abs());
            self.share_off = off.max_by(f64::total_cmp);
        }
        Ok(())
    }

    /// The mean number of connects to a live backend.
    #[expect(clippy::cast_precision_loss, reason = "counts of connects")]
    pub fn mean_of_live(&self) -> f64 {
        self.live.iter().sum::<u64>() as f64 / self.live.len().max(1) as f64
    }
}

/// Finds the last failure that was not a trial. Trials come long after the failures that lead to
/// ejection, so the last failures are failures of trials.
fn over_after(made: &Made, trials_failed: u64) -> Option<f64> {
    let others = made.failed.len().checked_sub(usize::try_from(trials_failed).ok()?)?;
    let (first, last) = (made.failed.first()?, made.failed.get(others.checked_sub(1)?)?);
    Some(last.ended.saturating_sub(first.began).as_secs_f64() * 1000.0)
}

/// Compares the client's results with the counts of the kernel.
fn contradictions(
    fault: Fault,
    dead: &[&BackendStatus],
    made: &Made,
    service: &ServiceStatus,
) -> Vec<String> {
    let mut found = Vec::new();
    let ended = |ending: &str| -> u64 { dead.iter().filter_map(|backend| backend.endings.get(ending)).sum() };
    let mut compare = |what: &str, counted: u64, seen: u64| {
        if counted != seen {
            let endings = Ending::ALL.map(|ending| format!("{} {}", ending.name(), ended(ending.name())));
            let (endings, errors) = (endings.join(", "), &made.errors);
            found.push(format!(
                "{what}: counts {counted} and {seen} differ; errors {errors:?}; endings {endings}"
            ));
        }
    };
    let started: u64 = service.backends.iter().map(|backend| backend.started).sum();
    compare("started", started, made.connects);
    let failed = made.failed.len() as u64;
    match fault {
        Fault::Refuse => compare("refused", ended("refused"), failed),
        Fault::Blackhole => compare("unanswered", ended("unanswered"), failed),
        // If the application clears the socket's error before the kernel program reads it, the flow
        // looks as if the application had ended it.
        Fault::Reset => compare("reset or aborted", ended("reset") + ended("aborted"), failed),
        // A connect that enters the queue is counted as established, but the client may give up
        // before the first byte.
        Fault::SlowAccept => {}
    }
    let trials: u64 = service.backends.iter().map(|backend| backend.trials).sum();
    compare("trials", service.outcomes.get("trial").copied().unwrap_or(0), trials);
    found
}

/// The number of connects of a cell that connects in turn. A requirement limits how many of them
/// may fail.
pub const IN_TURN: u64 = 1_000;
/// The time within which [`IN_TURN`] connects must end.
pub const IN_TURN_WITHIN: Duration = Duration::from_millis(5_500);
const MOST_FAILED_IN_TURN: u64 = 8;
/// When the fifth failure ejects the backend, fifty other connects are under way.
const MOST_FAILED_OF_FIFTY: u64 = 5 + 50;
const MOST_SHARE_OFF: f64 = 0.1;

/// Returns the requirements that a cell does not meet. Most cells have no requirements.
pub fn missed(cell: Cell, figures: &Figures) -> Vec<String> {
    let mut missed = figures.contradictions.clone();
    if !cell.ejects || cell.fault != Fault::Refuse || cell.fleet != Fleet::ONE_OF_FIVE {
        return missed;
    }
    let most = match cell.manner {
        Manner::InTurn => MOST_FAILED_IN_TURN,
        Manner::Fifty => MOST_FAILED_OF_FIFTY,
    };
    if figures.failed > most {
        missed.push(format!("{} connects failed, at most {most} allowed", figures.failed));
    }
    if cell.manner == Manner::InTurn && figures.connects < IN_TURN {
        missed.push(format!("only {} connects in {IN_TURN_WITHIN:?}", figures.connects));
    }
    if figures.share_off.is_none_or(|off| off > MOST_SHARE_OFF) {
        missed.push(format!("shares differ by {:?}, at most {MOST_SHARE_OFF} allowed", figures.share_off));
    }
    missed
}
