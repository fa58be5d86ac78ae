//! The results of connects, the ejections and readmissions that follow from these results, and the
//! counts of both.
//!
//! This module must not decide when backends fail, nor which backends are ejected: the
//! [`SimulatedClient`]'s ejector decides on ejections.

use lb_common::ejection::{Evidence, FailureSource};
use lb_common::ending::{End, Ending};
use lb_common::ticks::{TICK_LOG2, tick};
use lb_core::ejection::Judgement;

use super::Simulation;
use crate::traffic::client::SimulatedClient;
use crate::traffic::ejections::{EjectionCounts, EjectionRow, EjectionTotal, Most};

/// The counts of ejections.
#[derive(Debug, Default)]
pub(super) struct Judged {
    counts: EjectionCounts,
    at_last_row: EjectionCounts,
    /// The number of members that are currently ejected, over all clients.
    ejected: u64,
    most_ejected: f64,
    fewest_left: Option<u32>,
    most: Most,
    /// When the last failure ended, and the longest remaining time of an ejection at that time, in
    /// microseconds.
    over: Option<(u64, u64)>,
    /// The time since which no backend is ejected.
    well_since: u64,
}

impl Simulation<'_> {
    /// The current tick of the kernel programs' clock.
    pub(super) const fn tick(&self) -> u32 {
        tick(self.now * 1_000)
    }

    /// Counts a connect that is a trial.
    pub(super) fn try_backend(&mut self, client: &mut SimulatedClient, slot: u32) {
        client.pairs[slot as usize].trials += 1;
        self.judged.counts.trials += 1;
    }

    /// Handles an established connect.
    pub(super) fn succeed(&mut self, client: &mut SimulatedClient, slot: u32, is_trial: bool) {
        self.judge(client, slot, Evidence::established(is_trial));
    }

    /// Handles a connect that failed with this ending, or that was reset as soon as it was
    /// established.
    pub(super) fn blame(&mut self, client: &mut SimulatedClient, slot: u32, is_trial: bool, ending: Ending) {
        self.judged.counts.failed += 1;
        client.pairs[slot as usize].failed += u32::from(!is_trial);
        let was_established = ending == Ending::Reset;
        if was_established {
            self.succeed(client, slot, is_trial);
        }
        // In this model a client task is one process, and its failures must be enough for an
        // ejection. So the evidence is declared to come from several sources.
        let end = End::of(ending, was_established);
        self.judge(client, slot, Evidence::of_end(end, is_trial, FailureSource::SEVERAL, 0));
        // The established connection of a trial has just readmitted the backend, which clears the
        // backend's errors. If the connection is reset after that, this is the first error since
        // the readmission.
        if ending.is_error() {
            client.count_error(slot, self.tick());
        }
    }

    fn judge(&mut self, client: &mut SimulatedClient, slot: u32, evidence: Evidence) {
        let judgement = client.report(slot, evidence, self.tick());
        let (counts, pair) = (&mut self.judged.counts, &mut client.pairs[slot as usize]);
        match judgement {
            Judgement::Unchanged | Judgement::Remembered => return,
            Judgement::Withheld => {
                counts.withheld += 1;
                pair.withheld += 1;
            }
            Judgement::Ejected | Judgement::EjectedLonger => {
                counts.ejections += 1;
                pair.ejections += 1;
            }
            Judgement::Readmitted => counts.readmissions += 1,
        }
        self.note_ejected(client);
    }

    /// Updates the number of ejected members after a client has changed.
    pub(super) fn note_ejected(&mut self, client: &mut SimulatedClient) {
        let before = u64::from(client.ejected);
        let (members, ejected) = client.count_ejected();
        client.ejected = ejected;
        let judged = &mut self.judged;
        judged.ejected = judged.ejected + u64::from(ejected) - before;
        if ejected > 0 {
            judged.most_ejected = judged.most_ejected.max(f64::from(ejected) / f64::from(members));
            let left = members - ejected;
            judged.fewest_left = Some(judged.fewest_left.map_or(left, |fewest| fewest.min(left)));
        }
        if before > 0 && judged.ejected == 0 {
            judged.well_since = self.now;
        }
    }

    /// Subtracts the ejections of a removed client, and collects the client's counts.
    pub(super) fn forget_ejected(&mut self, client: &SimulatedClient) {
        client.pairs.iter().for_each(|pair| self.judged.most.add(*pair));
        self.judged.ejected -= u64::from(client.ejected);
    }

    /// Collects the counts of backends that have lost their slots.
    pub(super) fn forget_pairs(&mut self, client: &mut SimulatedClient) {
        client.freed.drain(..).for_each(|pair| self.judged.most.add(pair));
    }

    /// Handles the recovery of backends. If this was the last failure, records the longest
    /// remaining time of an ejection.
    pub(super) fn note_recovery(&mut self) {
        if self.scenario.fails.iter().all(|fail| fail.end_us() <= self.now) {
            let left = self.clients.iter().flatten().map(|client| client.longest_left(self.tick()));
            let left_us = (u64::from(left.max().unwrap_or(0)) << TICK_LOG2) / 1_000;
            self.judged.over = Some((self.now, left_us));
        }
    }

    pub(super) fn ejection_row(&mut self, end_us: u64) -> EjectionRow {
        let judged = &mut self.judged;
        let before = std::mem::replace(&mut judged.at_last_row, judged.counts);
        let counts = judged.counts.since(before);
        EjectionRow { run: self.run.name.clone(), at_us: end_us, ejected: judged.ejected, counts }
    }

    pub(super) fn ejection_total(&self) -> EjectionTotal {
        let Judged { counts, ejected, most_ejected, fewest_left, mut most, over, well_since, .. } =
            self.judged;
        let pairs = self.clients.iter().flatten().flat_map(|client| &client.pairs);
        pairs.for_each(|pair| most.add(*pair));
        let well_after_us =
            over.filter(|_| ejected == 0).map(|(over_us, _)| well_since.saturating_sub(over_us));
        let longest_left_us = over.map_or(0, |(_, left_us)| left_us);
        assert!(
            counts.trials <= self.counts.arrivals + self.counts.retries,
            "there are more trials than connects"
        );
        EjectionTotal {
            run: self.run.name.clone(),
            counts,
            most_ejected,
            fewest_left,
            most,
            longest_left_us,
            well_after_us,
        }
    }
}
