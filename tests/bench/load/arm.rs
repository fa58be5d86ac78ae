//! An arm: a rule that decides which backend a connection goes to. It is measured on its own fleet,
//! first without changes, and then after the quota of one backend was halved.

use std::time::{Duration, Instant};

use anyhow::Result;
use stage::{Setup, Stage};

use super::Times;
use super::fleet::{Backend, Cost, Fleet, Mode, QUOTAS, RATES};
use super::sender::{Sender, Sent};
use super::series::{Reading, Series, mean};
use crate::pause;
use crate::place::{Place, cgroups, client, fixed, reported_each, service};

/// The rule that decides which backend a connection goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Arm {
    RoundRobin,
    LeastLoaded,
    P2c,
    /// Weighted round robin with structural weights
    Structural,
    /// Weighted round robin with weights by gRFC A58
    A58,
    /// Weighted round robin with weights that follow load
    Feedback,
    /// p2c with weights that follow load
    FeedbackP2c,
}

impl Arm {
    /// The arms that are compared by default.
    pub const USUAL: [Self; 6] =
        [Self::RoundRobin, Self::LeastLoaded, Self::P2c, Self::Structural, Self::A58, Self::Feedback];

    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::P2c => "p2c",
            Self::Structural => "structural",
            Self::A58 => "a58",
            Self::Feedback => "feedback",
            Self::FeedbackP2c => "feedback-p2c",
        }
    }

    /// The arm's policy, under its name in the configuration and in the planner.
    pub fn policy(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::P2c | Self::FeedbackP2c => "p2c",
            Self::Structural | Self::A58 | Self::Feedback => "weighted-round-robin",
        }
    }

    /// The load control of the arm, as in the configuration; `None` if weights do not follow load.
    pub fn control(self) -> Option<&'static str> {
        match self {
            Self::RoundRobin | Self::LeastLoaded | Self::P2c | Self::Structural => None,
            Self::A58 => Some("a58"),
            Self::Feedback | Self::FeedbackP2c => Some("feedback"),
        }
    }

    /// Returns whether the arm's results must meet the requirements of the benchmark.
    pub fn is_judged(self) -> bool {
        matches!(self, Self::Feedback | Self::FeedbackP2c)
    }
}

/// The configuration line for a service with this load control.
pub fn load_line(control: Option<&str>) -> String {
    control.map(|control| format!("load = {{ control = \"{control}\" }}\n")).unwrap_or_default()
}

/// The results of an arm in a mode.
#[derive(Debug)]
pub struct Outcome {
    pub arm: Arm,
    pub mode: Mode,
    /// For each backend, the used part of its quota.
    pub utilization: Vec<f64>,
    /// For each backend, the mean utilization that the agent reported during the same time.
    pub reported: Vec<f64>,
    /// For each backend, the part of the time in which its quota was used up.
    pub throttled: Vec<f64>,
    /// The readings after a quota has changed; `None` if no quota has changed.
    pub changed: Option<Series>,
    /// The results of the clients' requests, since the clients started.
    pub sent: Sent,
}

/// The index of the backend with the quota that changes. It is one of the backends with the largest
/// quota.
const CHANGED: usize = QUOTAS.len() - 1;

/// The quotas after one of them was halved.
fn changed_quotas() -> [u32; QUOTAS.len()] {
    let mut quotas = QUOTAS;
    quotas[CHANGED] /= 2;
    quotas
}

/// The time between two readings.
const READS: Duration = Duration::from_secs(1);

/// Measures an arm in all these modes at the same time. The fleets of the modes share only the
/// processors, of which half are idle.
pub fn run(
    stage: &Stage,
    arm: Arm,
    modes: &[Mode],
    cost: Cost,
    times: Times,
    round: u32,
) -> Result<Vec<Outcome>> {
    let setup = Setup::new(stage, &format!("{}-{round}", arm.name()));
    let fleet = Fleet::start(&setup, modes, cost)?;
    let mut host = Host::start(&setup, arm, &fleet);
    host.place.wait_for("ready", modes.len() * RATES.len() * QUOTAS.len());
    for mode in modes {
        host.send(*mode, cost)?;
    }
    pause::pause(times.settle);
    let (steady, reported) = watch(&fleet, &QUOTAS, times.measure)?;
    // Without load control, the effect of a changed quota is known in advance.
    let changed = if arm.control().is_some() && !times.change.is_zero() {
        for (_, backends) in &fleet.backends {
            backends[CHANGED].limit(changed_quotas()[CHANGED])?;
        }
        Some(watch(&fleet, &changed_quotas(), times.change)?.0)
    } else {
        None
    };
    let mut changed = changed.map(Vec::into_iter);
    let mut outcomes = Vec::new();
    for ((mode, steady), reported) in modes.iter().zip(&steady).zip(reported) {
        outcomes.push(Outcome {
            arm,
            mode: *mode,
            utilization: steady.utilization(),
            reported,
            throttled: steady.throttled(),
            changed: changed.as_mut().and_then(Iterator::next),
            sent: host.sent(*mode),
        });
    }
    Ok(outcomes)
}

/// Makes a reading each second for `time`. Returns the readings of each mode, and the mean of the
/// agent's reports for each backend.
fn watch(fleet: &Fleet, quotas: &[u32], time: Duration) -> Result<(Vec<Series>, Vec<Vec<f64>>)> {
    let read = || -> Result<Vec<Reading>> {
        let reading = |backends: &[Backend]| {
            let used: Result<Vec<_>> = backends.iter().map(Backend::used).collect();
            Ok(Reading { at: Instant::now(), used: used? })
        };
        fleet.backends.iter().map(|(_, backends)| reading(backends)).collect()
    };
    let mut all: Vec<Series> = read()?.into_iter().map(|first| Series::new(quotas, first)).collect();
    let mut reports = Vec::new();
    let (start, mut next) = (Instant::now(), Instant::now());
    while next < start + time {
        next += READS;
        pause::until(next);
        for (series, reading) in all.iter_mut().zip(read()?) {
            series.push(reading);
        }
        reports.push(fleet.reported());
    }
    let reported = |mode: usize| -> Vec<f64> {
        let backends = 0..quotas.len();
        let of = |backend: usize| reports.iter().map(|report| report[mode][backend]).collect::<Vec<_>>();
        backends.map(|backend| mean(&of(backend))).collect()
    };
    let reported = (0..all.len()).map(reported).collect();
    Ok((all, reported))
}

/// The host of the clients: a daemon, and the processes of all client tasks.
struct Host {
    senders: Vec<(Mode, Sender)>,
    /// The cgroups of the place are those of the client tasks, by mode.
    place: Place,
}

impl Host {
    fn start(setup: &Setup, arm: Arm, fleet: &Fleet) -> Self {
        let mut text = fleet.key.reports("127.0.0.1:9467");
        let cgroups = cgroups(fleet.backends.len() * RATES.len());
        for ((mode, backends), cgroups) in fleet.backends.iter().zip(cgroups.chunks(RATES.len())) {
            let (name, count) = (mode.name(), RATES.len());
            for (index, cgroup) in cgroups.iter().enumerate() {
                let task = format!(
                    "name = \"{name}-{index}\"\nindex = {index}\ncount = {count}\nservices = [\"{name}\"]\n"
                );
                text += &client(name, cgroup, &task);
            }
            let policy = format!("subset = \"all\"\npolicy = \"{}\"\n", arm.policy());
            let more = policy + &reported_each("1s") + &load_line(arm.control());
            let backends = fixed(backends.iter().map(|backend| backend.address));
            text += &service(name, mode.service(), &backends, &more);
        }
        Self { senders: Vec::new(), place: Place::start(setup, cgroups, &text) }
    }

    /// Makes the clients of a mode send. Modes start in the order of the fleet.
    fn send(&mut self, mode: Mode, cost: Cost) -> Result<()> {
        let cgroups = self.place.cgroups[self.senders.len()..].iter();
        for (number, (cgroup, pace)) in cgroups.zip(&cost.paces(mode)).enumerate() {
            self.senders.push((mode, Sender::start(cgroup, &[mode.service()], pace, number)?));
        }
        Ok(())
    }

    /// The results of the requests in a mode.
    fn sent(&mut self, mode: Mode) -> Sent {
        let mut all = Sent::default();
        for (_, sender) in self.senders.iter_mut().filter(|(of, _)| *of == mode) {
            let sent = sender.sent();
            all.sent += sent.sent;
            all.answered += sent.answered;
            all.failed += sent.failed;
            all.why = sent.why.or(all.why);
        }
        all
    }
}
