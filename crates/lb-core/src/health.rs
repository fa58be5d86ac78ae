//! What is said of a backend, by whom and since when: verdicts, of which the worst counts.
//!
//! Sources of verdicts do not know each other. What follows from them for a service is decided beside: who may be chosen
//! ([`tiers`]), and who stands in for whom ([`replacement`]); what probes make of it
//! ([`probed`]). docs/design/health.md has the truth table. Knows no slot, no
//! table and no clock.

pub mod tiers;

pub mod replacement;

pub mod probed;

use lb_common::abi::{BackendState, HealthReason, Usable};

use crate::endpoint::{Endpoint, EndpointState};

/// How a backend is, from the best to the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Health {
    /// Takes connections.
    Healthy,
    /// It is probed, and no probe of it has ended yet.
    Unproven,
    /// Serves, asks for no new connections.
    LameDuck,
    /// A guess: connects failed too often in a row, or probes fail that come from another network namespace than the client's.
    Ejected,
    /// Does not accept connections, or answers them with an error: known, by a probe, the list or itself.
    Refusing,
    /// Gets no new connections, whatever happens.
    Drained,
}

impl Health {
    /// All of them, the best first.
    pub const ALL: [Self; 6] =
        [Self::Healthy, Self::Unproven, Self::LameDuck, Self::Ejected, Self::Refusing, Self::Drained];

    /// The word for it in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Unproven => "unproven",
            Self::LameDuck => "lame-duck",
            Self::Refusing => "refusing",
            Self::Ejected => "ejected",
            Self::Drained => "drained",
        }
    }
}

/// Who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Who {
    /// The source of the endpoint list.
    Source,
    /// The kernel programs, by what becomes of flows.
    Kernel,
    /// The daemon, by probes of its own.
    Probe,
    /// The backend, by the reports of its agent.
    Report,
}

impl Who {
    /// The word for it in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Source => "list",
            Self::Kernel => "kernel",
            Self::Probe => "probe",
            Self::Report => "report",
        }
    }
}

/// Why somebody says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// The list says so: `state`.
    State,
    /// The list says `weight = 0`.
    Weight,
    /// So many flows failed in a row.
    Failures(u8),
    /// Probes could not connect.
    Probe,
    /// Probes could connect, and were answered with an error or not at all.
    Answer,
    /// It says so itself.
    Report,
}

/// One verdict, by any clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict<T> {
    /// How the backend is.
    pub health: Health,
    /// Who says so.
    pub who: Who,
    /// Why.
    pub why: Why,
    /// Since when it is said to be like that.
    pub since: T,
    /// When that ends by itself; `None` if it takes another word.
    pub until: Option<T>,
}

/// What somebody says at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said<T> {
    /// How the backend is.
    pub health: Health,
    /// Why.
    pub why: Why,
    /// When that ends by itself.
    pub until: Option<T>,
}

/// The reason that a state word gives. An older daemon gave none: a backend that its list does not rule out was refusing if it might
/// not be chosen, and healthy if it might.
pub const fn stated_reason(reason: HealthReason, state: BackendState, usable: Usable) -> HealthReason {
    match (reason, state) {
        (HealthReason::Unstated, BackendState::Leaving) => HealthReason::Healthy,
        (HealthReason::Unstated, _) if usable.is_usable() => HealthReason::Healthy,
        (HealthReason::Unstated, _) => HealthReason::ProbeConnect,
        (reason, _) => reason,
    }
}

/// The health that a reason of a state word means, who found it, and why; `None` if no verdict led to it.
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
    }
}

/// The reason of a state word that a verdict gives; `None` if it has a word of its own in the kernel.
const fn reason(health: Health, who: Who, why: Why) -> Option<HealthReason> {
    Some(match (health, who, why) {
        (Health::LameDuck, Who::Source, _) => HealthReason::ListLameDuck,
        (Health::Ejected, Who::Probe, _) => HealthReason::ProbeElsewhere,
        (Health::Refusing, Who::Probe, Why::Answer) => HealthReason::ProbeAnswer,
        (Health::Refusing, Who::Probe, _) => HealthReason::ProbeConnect,
        (Health::Refusing, Who::Report, _) => HealthReason::ReportDown,
        (Health::Refusing, Who::Source, _) => HealthReason::ListDown,
        (Health::Drained, _, _) => HealthReason::ListWeight,
        _ => return None,
    })
}

/// What the list says of an endpoint, if that is not that all is well.
pub fn said_of<T>(endpoint: &Endpoint) -> Option<Said<T>> {
    match (endpoint.weight, endpoint.state) {
        (0, _) => Some(Said { health: Health::Drained, why: Why::Weight, until: None }),
        (_, EndpointState::LameDuck) => Some(Said { health: Health::LameDuck, why: Why::State, until: None }),
        (_, EndpointState::Down) => Some(Said { health: Health::Refusing, why: Why::State, until: None }),
        (_, EndpointState::Healthy) => None,
    }
}

/// All that is said of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendEvidence<T> {
    /// At most one of each who says something.
    verdicts: Vec<Verdict<T>>,
    /// Since when it is as available as it is, or as unavailable.
    since: T,
    is_available: bool,
    proof: Proof,
}

/// Whether a probe of a backend has ended, with whatever result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    /// None.
    Missing,
    /// One of an earlier daemon, and none of this one.
    TakenOver,
    /// One of this daemon.
    Own,
}

impl<T: Copy + Ord> BackendEvidence<T> {
    /// A backend of which nothing is said.
    pub const fn new(now: T) -> Self {
        Self { verdicts: Vec::new(), since: now, is_available: true, proof: Proof::Missing }
    }

    /// Takes in what somebody says now, in place of what they said before; `None` if they have nothing to say. The same word
    /// again keeps its time. Returns whether anything has changed.
    pub fn hear(&mut self, who: Who, said: Option<Said<T>>, now: T) -> bool {
        let before = self.verdicts.clone();
        let at = self.verdicts.iter().position(|verdict| verdict.who == who);
        let known = at.map(|at| self.verdicts.remove(at));
        if let Some(Said { health, why, until }) = said {
            let since = match known {
                Some(known) if known.health == health && !is_over(known.until, now) => known.since,
                _ => now,
            };
            self.verdicts.push(Verdict { health, who, why, since, until });
            self.verdicts.sort_by_key(|verdict| verdict.who);
        }
        self.pass(now);
        self.verdicts != before
    }

    /// Lets time pass: verdicts that end by themselves go.
    pub fn pass(&mut self, now: T) {
        self.verdicts.retain(|verdict| !is_over(verdict.until, now));
        let is_available = self.health() == Health::Healthy;
        if is_available != self.is_available {
            (self.is_available, self.since) = (is_available, now);
        }
    }

    /// A probe of it has ended. Returns whether that is the first.
    pub fn prove(&mut self) -> bool {
        std::mem::replace(&mut self.proof, Proof::Own) == Proof::Missing
    }

    /// A probe of it has ended before this daemon began.
    pub const fn take_over(&mut self) {
        self.proof = Proof::TakenOver;
    }

    /// Whether it is well by the probes of an earlier daemon, and none of this one has changed that.
    pub fn is_taken_over_well(&self) -> bool {
        self.proof == Proof::TakenOver && !self.verdicts.iter().any(|verdict| verdict.who == Who::Probe)
    }

    /// Nothing is known of it by probes any more.
    pub fn unprove(&mut self) {
        self.proof = Proof::Missing;
        self.verdicts.retain(|verdict| verdict.who != Who::Probe);
    }

    /// Whether a probe of it has ever ended, with whatever result.
    pub fn is_proven(&self) -> bool {
        self.proof != Proof::Missing
    }

    /// Whether probes have found it well.
    pub fn is_probed_healthy(&self) -> bool {
        self.is_proven() && !self.verdicts.iter().any(|verdict| verdict.who == Who::Probe)
    }

    /// Whether it accepts connections as far as is known: of one that is refusing, if all that speaks against it is how it
    /// answers them.
    pub fn accepts(&self) -> bool {
        let mut refusing = self.verdicts.iter().filter(|verdict| verdict.health == Health::Refusing);
        refusing.all(|verdict| verdict.why == Why::Answer)
    }

    /// A failure that changes nothing else: the time for which it has been available begins anew.
    pub fn note_failure(&mut self, now: T) {
        if self.is_available {
            self.since = now;
        }
    }

    /// The verdict that counts: the worst, and of equal ones the oldest. `None` if all is well.
    pub fn worst(&self) -> Option<&Verdict<T>> {
        self.verdicts.iter().max_by(|a, b| a.health.cmp(&b.health).then(b.since.cmp(&a.since)))
    }

    /// How it is, all in all.
    pub fn health(&self) -> Health {
        self.worst().map_or(Health::Healthy, |verdict| verdict.health)
    }

    /// The reason of its state word: the worst verdict that has no word of its own in the kernel.
    pub fn reason(&self) -> Option<HealthReason> {
        let reasons =
            self.verdicts.iter().filter_map(|of| Some((of.health, reason(of.health, of.who, of.why)?)));
        reasons.max_by_key(|(health, _)| *health).map(|(_, reason)| reason)
    }

    /// Whether it is down by its own report.
    pub fn is_down_by_report(&self) -> bool {
        self.verdicts.iter().any(|of| of.who == Who::Report && of.health == Health::Refusing)
    }

    /// Whether the kernel programs have ejected it.
    pub fn is_ejected(&self) -> bool {
        self.verdicts.iter().any(|verdict| verdict.who == Who::Kernel && verdict.health == Health::Ejected)
    }

    /// Whether anybody says that it is a lame duck, whatever else is said.
    pub fn is_lame_duck(&self) -> bool {
        self.verdicts.iter().any(|verdict| verdict.health == Health::LameDuck)
    }

    /// How it is by all but its own word that it is a lame duck, and whether it is a lame duck by that. Of its own word connects
    /// know by themselves, until when it holds: a daemon that dies leaves nothing behind that nobody takes back.
    pub fn without_own_word(&self) -> (Health, bool) {
        let is_own = |verdict: &&Verdict<T>| verdict.who == Who::Report && verdict.health == Health::LameDuck;
        let others = self.verdicts.iter().filter(|verdict| !is_own(verdict)).map(|verdict| verdict.health);
        let is_lame_duck = others.clone().any(|health| health == Health::LameDuck);
        (others.max().unwrap_or(Health::Healthy), is_lame_duck)
    }

    /// Keeps what is known of a backend without a slot: by probes and by itself. Returns whether there is anything.
    pub fn keep_words(&mut self) -> bool {
        self.verdicts.retain(|verdict| matches!(verdict.who, Who::Probe | Who::Report));
        self.is_known()
    }

    /// Whether anything is known of it.
    pub fn is_known(&self) -> bool {
        self.is_proven() || !self.verdicts.is_empty()
    }

    /// Since when it has not been available; `None` if it is.
    pub fn unavailable_since(&self) -> Option<T> {
        (!self.is_available).then_some(self.since)
    }

    /// Since when it has been available without a failure; `None` if it is not.
    pub fn available_since(&self) -> Option<T> {
        self.is_available.then_some(self.since)
    }

    /// Everything that is said.
    pub fn verdicts(&self) -> &[Verdict<T>] {
        &self.verdicts
    }

    /// When the next verdict ends by itself.
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

    fn said(health: Health) -> Option<Said<u32>> {
        Some(Said { health, why: Why::Probe, until: None })
    }

    #[test]
    fn the_worst_verdict_counts_whoever_says_it() {
        for (a, b) in Health::ALL.into_iter().flat_map(|a| Health::ALL.map(|b| (a, b))) {
            let mut standing = BackendEvidence::new(0);
            standing.hear(Who::Source, said(a), 1);
            standing.hear(Who::Kernel, said(b), 2);
            assert_eq!(standing.health(), a.max(b));
            assert_eq!(standing.is_lame_duck(), a == Health::LameDuck || b == Health::LameDuck);
        }
    }

    #[test]
    fn the_same_word_keeps_its_time_and_another_begins_anew() {
        let mut standing = BackendEvidence::new(0);
        assert!(standing.hear(Who::Source, said(Health::LameDuck), 5));
        assert!(!standing.hear(Who::Source, said(Health::LameDuck), 9));
        assert_eq!(standing.worst().map(|verdict| verdict.since), Some(5));
        assert!(standing.hear(Who::Source, said(Health::Drained), 11));
        assert_eq!(standing.worst().map(|verdict| verdict.since), Some(11));
        // It has been unavailable all the time.
        assert_eq!((standing.unavailable_since(), standing.available_since()), (Some(5), None));
        assert!(standing.hear(Who::Source, None, 13));
        assert_eq!((standing.unavailable_since(), standing.available_since()), (None, Some(13)));
        assert!(!standing.hear(Who::Source, None, 15));
        standing.note_failure(17);
        assert_eq!(standing.available_since(), Some(17));
    }

    #[test]
    fn what_ends_by_itself_ends_at_its_time() {
        let mut standing = BackendEvidence::new(0);
        let ejected = Said { health: Health::Ejected, why: Why::Failures(5), until: Some(8) };
        standing.hear(Who::Kernel, Some(ejected), 2);
        assert_eq!(standing.next_end(), Some(8));
        standing.pass(7);
        assert_eq!(standing.health(), Health::Ejected);
        standing.pass(8);
        assert_eq!((standing.health(), standing.available_since()), (Health::Healthy, Some(8)));
    }
}
