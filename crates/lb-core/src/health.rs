//! Verdicts on a backend: the health that each witness ([`Who`]) reports, and since when. The worst
//! verdict determines the backend's health.
//!
//! Witnesses are independent of each other. [`probed`] computes a verdict from probe results. Other
//! files decide the consequences for a service: [`tiers`] decides which backends a connect may
//! choose, [`replacement`] decides which backends substitute for others, and [`loss`] decides for
//! which backends open connections are closed. docs/design/health.md has the truth table.

pub mod loss;
pub mod probed;
pub mod replacement;
pub mod tiers;

use lb_common::abi::{BackendState, HealthReason, Usable};

use crate::endpoint::{Endpoint, EndpointState};

named! {
    /// The health of a backend, from the best to the worst.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Health {
        /// Accepts connections.
        Healthy = "healthy",
        /// Probes are configured, and no probe of the backend has ended yet.
        Unproven = "unproven",
        /// Serves, but requests no new connections.
        LameDuck = "lame-duck",
        /// Suspected to fail: too many connects failed in a row, or probes fail while the client is
        /// in another network namespace than the daemon.
        Ejected = "ejected",
        /// Does not accept connections, or answers them with an error, according to a probe, the
        /// list or its own report.
        Refusing = "refusing",
        /// Never receives new connections.
        Drained = "drained",
    }
}

named! {
    /// The witness that reports a verdict on a backend.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Who {
        /// The source of the endpoint list.
        Source = "list",
        /// The kernel programs, which observe the results of flows.
        Kernel = "kernel",
        /// The daemon, which probes the backend.
        Probe = "probe",
        /// The backend, through the reports of its agent.
        Report = "report",
        /// An operator, by a command.
        Operator = "operator",
    }
}

/// The reason for a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// The `state` in the list.
    State,
    /// `weight = 0` in the list.
    Weight,
    /// This number of flows failed in a row.
    Failures(u8),
    /// Probes could not connect.
    Probe,
    /// Probes could connect, but received an error or no answer.
    Answer,
    /// The backend reported its health itself.
    Report,
    /// An operator has drained the backend.
    Drain,
}

/// A stored verdict. `T` is a time of any clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthVerdict<T> {
    /// The backend's health.
    pub health: Health,
    /// The witness that reports this health.
    pub who: Who,
    /// The reason.
    pub why: Why,
    /// The time since which the witness has reported this health.
    pub since: T,
    /// The time at which the verdict expires; `None` if it is valid until the witness replaces it.
    pub until: Option<T>,
}

/// A verdict as its witness reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportedVerdict<T> {
    /// The backend's health.
    pub health: Health,
    /// The reason.
    pub why: Why,
    /// The time at which the verdict expires; `None` if it is valid until the witness replaces it.
    pub until: Option<T>,
}

/// The reason in a state word. State words that an older daemon wrote contain no reason: then a
/// backend that is leaving or usable is treated as healthy, and any other backend as refusing.
pub const fn stated_reason(reason: HealthReason, state: BackendState, usable: Usable) -> HealthReason {
    match (reason, state) {
        (HealthReason::Unstated, BackendState::Leaving) => HealthReason::Healthy,
        (HealthReason::Unstated, _) if usable.is_usable() => HealthReason::Healthy,
        (HealthReason::Unstated, _) => HealthReason::ProbeConnect,
        (reason, _) => reason,
    }
}

/// The health for the reason code in a state word, and the witness and reason of the verdict behind
/// the code. The second value is `None` for a code without a verdict.
pub const fn meaning(reason: HealthReason) -> (Health, Option<(Who, Why)>) {
    match reason {
        HealthReason::Unstated | HealthReason::Healthy => (Health::Healthy, None),
        HealthReason::Unproven => (Health::Unproven, None),
        HealthReason::ListLameDuck => (Health::LameDuck, Some((Who::Source, Why::State))),
        HealthReason::ProbeElsewhere => (Health::Ejected, Some((Who::Probe, Why::Probe))),
        HealthReason::ProbeConnect => (Health::Refusing, Some((Who::Probe, Why::Probe))),
        HealthReason::ProbeAnswer => (Health::Refusing, Some((Who::Probe, Why::Answer))),
        HealthReason::ReportDown => (Health::Refusing, Some((Who::Report, Why::Report))),
        HealthReason::ListDown => (Health::Refusing, Some((Who::Source, Why::State))),
        HealthReason::ListWeight => (Health::Drained, Some((Who::Source, Why::Weight))),
        HealthReason::Operator => (Health::Drained, Some((Who::Operator, Why::Drain))),
    }
}

/// The reason code in the state word for a verdict; `None` if the kernel stores the verdict
/// elsewhere.
const fn reason(health: Health, who: Who, why: Why) -> Option<HealthReason> {
    Some(match (health, who, why) {
        (Health::LameDuck, Who::Source, _) => HealthReason::ListLameDuck,
        (Health::Ejected, Who::Probe, _) => HealthReason::ProbeElsewhere,
        (Health::Refusing, Who::Probe, Why::Answer) => HealthReason::ProbeAnswer,
        (Health::Refusing, Who::Probe, _) => HealthReason::ProbeConnect,
        (Health::Refusing, Who::Report, _) => HealthReason::ReportDown,
        (Health::Refusing, Who::Source, _) => HealthReason::ListDown,
        (Health::Drained, Who::Operator, _) => HealthReason::Operator,
        (Health::Drained, _, _) => HealthReason::ListWeight,
        _ => return None,
    })
}

/// The list's verdict on an endpoint; `None` if the list reports it as healthy.
pub fn list_verdict<T>(endpoint: &Endpoint) -> Option<ReportedVerdict<T>> {
    match (endpoint.weight, endpoint.state) {
        (0, _) => Some(ReportedVerdict { health: Health::Drained, why: Why::Weight, until: None }),
        (_, EndpointState::LameDuck) => {
            Some(ReportedVerdict { health: Health::LameDuck, why: Why::State, until: None })
        }
        (_, EndpointState::Down) => {
            Some(ReportedVerdict { health: Health::Refusing, why: Why::State, until: None })
        }
        (_, EndpointState::Healthy) => None,
    }
}

/// All verdicts on a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendEvidence<T> {
    /// At most one verdict of each witness ([`Who`]).
    verdicts: Vec<HealthVerdict<T>>,
    /// The time since which the backend has been available, or unavailable.
    since: T,
    is_available: bool,
    proof: Proof,
}

/// Whether a probe of a backend has ended, with any result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    /// No probe has ended.
    Missing,
    /// A probe of an earlier daemon has ended, but no probe of this daemon.
    TakenOver,
    /// A probe of this daemon has ended.
    Own,
}

impl<T: Copy + Ord> BackendEvidence<T> {
    /// Starts without verdicts: the backend becomes available at `now`.
    pub const fn new(now: T) -> Self {
        Self { verdicts: Vec::new(), since: now, is_available: true, proof: Proof::Missing }
    }

    /// Replaces the verdict of one witness; `None` removes it. If the health does not change, the
    /// verdict retains its start time. Returns whether anything has changed.
    pub fn set_verdict(&mut self, who: Who, verdict: Option<ReportedVerdict<T>>, now: T) -> bool {
        let before = self.verdicts.clone();
        let at = self.verdicts.iter().position(|verdict| verdict.who == who);
        let known = at.map(|at| self.verdicts.remove(at));
        if let Some(ReportedVerdict { health, why, until }) = verdict {
            let since = match known {
                Some(known) if known.health == health && !is_over(known.until, now) => known.since,
                _ => now,
            };
            self.verdicts.push(HealthVerdict { health, who, why, since, until });
            self.verdicts.sort_by_key(|verdict| verdict.who);
        }
        self.pass(now);
        self.verdicts != before
    }

    /// Removes the verdicts that have expired at `now`.
    pub fn pass(&mut self, now: T) {
        self.verdicts.retain(|verdict| !is_over(verdict.until, now));
        let is_available = self.health() == Health::Healthy;
        if is_available != self.is_available {
            (self.is_available, self.since) = (is_available, now);
        }
    }

    /// Notes that a probe of the backend has ended. Returns whether this was the first probe.
    pub fn prove(&mut self) -> bool {
        std::mem::replace(&mut self.proof, Proof::Own) == Proof::Missing
    }

    /// Notes that a probe of the backend ended before this daemon started.
    pub const fn take_over(&mut self) {
        self.proof = Proof::TakenOver;
    }

    /// Whether the probes of an earlier daemon found the backend healthy, and no probe of this
    /// daemon has ended yet.
    pub fn is_taken_over_well(&self) -> bool {
        self.proof == Proof::TakenOver && !self.verdicts.iter().any(|verdict| verdict.who == Who::Probe)
    }

    /// Removes all probe results.
    pub fn unprove(&mut self) {
        self.proof = Proof::Missing;
        self.verdicts.retain(|verdict| verdict.who != Who::Probe);
    }

    /// Whether a probe of the backend has ever ended, with any result.
    pub fn is_proven(&self) -> bool {
        self.proof != Proof::Missing
    }

    /// Whether a probe has ended and the probes have no verdict against the backend.
    pub fn is_probed_healthy(&self) -> bool {
        self.is_proven() && !self.verdicts.iter().any(|verdict| verdict.who == Who::Probe)
    }

    /// Whether the backend accepts connections, as far as is known. A refusing backend accepts
    /// connections if, according to every refusing verdict, it only answers requests with errors or
    /// does not answer them.
    pub fn accepts(&self) -> bool {
        let mut refusing = self.verdicts.iter().filter(|verdict| verdict.health == Health::Refusing);
        refusing.all(|verdict| verdict.why == Why::Answer)
    }

    /// Notes a failure that changes no verdict. The time for which the backend has been available
    /// without a failure starts again.
    pub fn note_failure(&mut self, now: T) {
        if self.is_available {
            self.since = now;
        }
    }

    /// The worst verdict, which determines the health. If several verdicts are equally bad, returns
    /// the oldest. `None` without a verdict.
    pub fn worst(&self) -> Option<&HealthVerdict<T>> {
        self.verdicts.iter().max_by(|a, b| a.health.cmp(&b.health).then(b.since.cmp(&a.since)))
    }

    /// The health of the worst verdict.
    pub fn health(&self) -> Health {
        self.worst().map_or(Health::Healthy, |verdict| verdict.health)
    }

    /// The reason for the backend's state word, from the worst verdict that is not stored elsewhere
    /// in the kernel.
    pub fn reason(&self) -> Option<HealthReason> {
        let reasons =
            self.verdicts.iter().filter_map(|of| Some((of.health, reason(of.health, of.who, of.why)?)));
        reasons.max_by_key(|(health, _)| *health).map(|(_, reason)| reason)
    }

    /// Whether the backend's own report declares the backend down.
    pub fn is_down_by_report(&self) -> bool {
        self.verdicts.iter().any(|of| of.who == Who::Report && of.health == Health::Refusing)
    }

    /// Whether the kernel programs have ejected the backend.
    pub fn is_ejected(&self) -> bool {
        self.verdicts.iter().any(|verdict| verdict.who == Who::Kernel && verdict.health == Health::Ejected)
    }

    /// Whether an operator has drained the backend.
    pub fn is_drained_by_operator(&self) -> bool {
        self.verdicts.iter().any(|verdict| verdict.who == Who::Operator)
    }

    /// Whether any verdict, not only the worst, declares the backend a lame duck.
    pub fn is_lame_duck(&self) -> bool {
        self.verdicts.iter().any(|verdict| verdict.health == Health::LameDuck)
    }

    /// The backend's health, and whether it is a lame duck, if its own report that it is a lame
    /// duck is ignored. Connects read this report and its expiry time from the verdict array. In
    /// the state word, the report never expires if the daemon dies.
    pub fn without_own_word(&self) -> (Health, bool) {
        let is_own =
            |verdict: &&HealthVerdict<T>| verdict.who == Who::Report && verdict.health == Health::LameDuck;
        let others = self.verdicts.iter().filter(|verdict| !is_own(verdict)).map(|verdict| verdict.health);
        let is_lame_duck = others.clone().any(|health| health == Health::LameDuck);
        (others.max().unwrap_or(Health::Healthy), is_lame_duck)
    }

    /// Removes the verdicts of the list and of the kernel programs, because the backend has no
    /// slot. Returns whether the backend [is known](Self::is_known) after that.
    pub fn drop_slot_verdicts(&mut self) -> bool {
        self.verdicts.retain(|verdict| matches!(verdict.who, Who::Probe | Who::Report | Who::Operator));
        self.is_known()
    }

    /// Whether a probe of the backend has ended, or a verdict on the backend exists.
    pub fn is_known(&self) -> bool {
        self.is_proven() || !self.verdicts.is_empty()
    }

    /// The time since which the backend has been unavailable; `None` if it is available.
    pub fn unavailable_since(&self) -> Option<T> {
        (!self.is_available).then_some(self.since)
    }

    /// The time since which the backend has been available without a failure; `None` if it is
    /// unavailable.
    pub fn available_since(&self) -> Option<T> {
        self.is_available.then_some(self.since)
    }

    /// All verdicts.
    pub fn verdicts(&self) -> &[HealthVerdict<T>] {
        &self.verdicts
    }

    /// The time at which the next verdict expires.
    pub fn next_end(&self) -> Option<T> {
        self.verdicts.iter().filter_map(|verdict| verdict.until).min()
    }
}

fn is_over<T: Copy + Ord>(until: Option<T>, now: T) -> bool {
    until.is_some_and(|until| until <= now)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(health: Health) -> Option<ReportedVerdict<u32>> {
        Some(ReportedVerdict { health, why: Why::Probe, until: None })
    }

    #[test]
    fn the_worst_verdict_determines_the_health() {
        for (a, b) in Health::ALL.into_iter().flat_map(|a| Health::ALL.map(|b| (a, b))) {
            let mut standing = BackendEvidence::new(0);
            standing.set_verdict(Who::Source, verdict(a), 1);
            standing.set_verdict(Who::Kernel, verdict(b), 2);
            assert_eq!(standing.health(), a.max(b));
            assert_eq!(standing.is_lame_duck(), a == Health::LameDuck || b == Health::LameDuck);
        }
    }

    #[test]
    fn a_repeated_verdict_retains_its_start_time() {
        let mut standing = BackendEvidence::new(0);
        assert!(standing.set_verdict(Who::Source, verdict(Health::LameDuck), 5));
        assert!(!standing.set_verdict(Who::Source, verdict(Health::LameDuck), 9));
        assert_eq!(standing.worst().map(|verdict| verdict.since), Some(5));
        assert!(standing.set_verdict(Who::Source, verdict(Health::Drained), 11));
        assert_eq!(standing.worst().map(|verdict| verdict.since), Some(11));
        // The backend has been unavailable since the first verdict.
        assert_eq!((standing.unavailable_since(), standing.available_since()), (Some(5), None));
        assert!(standing.set_verdict(Who::Source, None, 13));
        assert_eq!((standing.unavailable_since(), standing.available_since()), (None, Some(13)));
        assert!(!standing.set_verdict(Who::Source, None, 15));
        standing.note_failure(17);
        assert_eq!(standing.available_since(), Some(17));
    }

    #[test]
    fn a_verdict_expires_at_its_time() {
        let mut standing = BackendEvidence::new(0);
        let ejected = ReportedVerdict { health: Health::Ejected, why: Why::Failures(5), until: Some(8) };
        standing.set_verdict(Who::Kernel, Some(ejected), 2);
        assert_eq!(standing.next_end(), Some(8));
        standing.pass(7);
        assert_eq!(standing.health(), Health::Ejected);
        standing.pass(8);
        assert_eq!((standing.health(), standing.available_since()), (Health::Healthy, Some(8)));
    }
}
