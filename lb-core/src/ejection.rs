//! Ejection on the host, in the steps in which the kernel programs carry it out (`lb-ebpf/src/ejection.rs`): what a flow shows
//! is judged, an ejection finds room or is withheld, and one connect at a time is a trial.
//!
//! For the planner and for tests. Every decision is [`lb_common::ejection`]'s, and every look at all members
//! [`pick::survey`]'s; here is only their order, without the compare-and-swaps that several CPUs need. Time is an argument, in
//! ticks, and so is the number that decides the jitter.

use std::sync::Arc;

use lb_common::abi::{
    BackendState, DaemonState, EjectionPhase, EjectionRules, EjectionState, MAX_SUBSET, NO_SLOT, NextTrial,
    RecentErrors, StateWord, TableRef, Usable,
};
use lb_common::ejection::{self, Event, Evidence, EvidenceKind, Verdict};
use lb_common::pick::{self, Survey, Tables};

use crate::ids::Slot;

/// What has followed from some evidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// Nothing.
    Unchanged,
    /// It is remembered; the backend stays as it was.
    Remembered,
    /// The backend is not ejected, because it is the last.
    Withheld,
    /// The backend is ejected.
    Ejected,
    /// The backend stays ejected, for longer.
    EjectedLonger,
    /// The backend is taken back, and its recent errors are forgotten.
    Readmitted,
}

/// What a row of the kernel's backends knows of its ejection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    state: StateWord,
    standing: EjectionState,
}

const FREE: Row = Row {
    state: StateWord::new(Usable::No, BackendState::Free),
    standing: EjectionState { at: 0, run: 0, level: 0, phase: 0, ending: 0 },
};

/// The ejected backends of one service of one client task.
#[derive(Clone, Debug)]
pub struct Ejector {
    rules: EjectionRules,
    /// By slot.
    rows: Vec<Row>,
    schedule: Arc<[Slot]>,
    /// The slots of the schedule, each once, and then those that others stand in for, if they are few enough to be listed.
    members: Option<Vec<u32>>,
    /// How many of them are of the schedule.
    in_table: u32,
    next_trial: NextTrial,
}

impl Ejector {
    /// For a service with these rules, of which nothing bad is known.
    pub fn new(rules: EjectionRules) -> Self {
        let next_trial = NextTrial::default();
        Self { rules, rows: Vec::new(), schedule: Arc::from([]), members: None, in_table: 0, next_trial }
    }

    // ---- what the daemon does ------------------------------------------------------------------------------------------

    /// The service has this table from now on, and these are tried although they are not in it.
    pub fn publish(&mut self, schedule: Arc<[Slot]>, replaced: &[Slot]) {
        let mut members: Vec<u32> = schedule.iter().map(|slot| slot.number()).collect();
        members.sort_unstable();
        members.dedup();
        self.in_table = u32::try_from(members.len()).expect("at most as many as slots");
        let is_listed = members.len() <= MAX_SUBSET as usize;
        members.extend(replaced.iter().map(|slot| slot.number()));
        self.members = is_listed.then_some(members);
        self.schedule = schedule;
    }

    /// Names an ejected backend for the next trial, if none is named that is held back. To be called now and then.
    pub fn renew_trial(&mut self, now: u32) {
        let named = self.next_trial.slot();
        if named == NO_SLOT || self.row(named).state.is_held_back() == 0 {
            self.schedule_trial(Event::Judged, now);
        }
    }

    /// Ejects a backend that is not ejected although it fails, because it was the last: others stand in for it now.
    pub fn eject(&mut self, slot: u32, now: u32) {
        let rules = self.rules;
        let row = self.row_mut(slot);
        row.standing = ejection::ejected(row.standing, rules, now, ejection::NO_JITTER);
        row.state.ejected = 1;
        self.schedule_trial(Event::Judged, now);
    }

    /// The time of an ejected backend is over, because something else has shown that it may be well again.
    pub fn end_ejection(&mut self, slot: u32, now: u32) {
        let row = self.row_mut(slot);
        let after = ejection::time_over(row.standing, now);
        if after != row.standing {
            row.standing = after;
            self.next_trial = NextTrial::of(slot, now, 0);
        }
    }

    /// Whether the backend in a slot may be chosen, and why not.
    pub fn set_state(&mut self, slot: u32, state: DaemonState) {
        let row = self.row_mut(slot);
        row.state = StateWord { usable: state.usable, state: state.state, ..row.state };
    }

    /// The slot gets another backend, of which nothing bad is known.
    pub fn clear(&mut self, slot: u32) {
        *self.row_mut(slot) = FREE;
    }

    // ---- what a choice reads -------------------------------------------------------------------------------------------

    /// The state word of a slot.
    pub fn state(&self, slot: u32) -> StateWord {
        self.row(slot).state
    }

    /// How the backend in a slot has done of late, and until when it is ejected.
    pub fn standing(&self, slot: u32) -> EjectionState {
        self.row(slot).standing
    }

    /// The slots of the table and of those that others stand in for, if they are few enough to be listed.
    pub fn members(&self) -> Option<&[u32]> {
        self.members.as_deref()
    }

    /// When the next trial is due.
    pub const fn next_trial(&self) -> NextTrial {
        self.next_trial
    }

    /// The slot of an ejected backend that this connect is to try, if a trial is due: asked before a policy picks. Not even a
    /// trial goes to a backend that has as many open flows as the service allows.
    pub fn due_trial(&mut self, now: u32, is_at_limit: impl Fn(u32) -> bool) -> Option<u32> {
        let next = self.next_trial;
        if next.slot == 0 {
            return None;
        }
        if next.others != 0 {
            self.next_trial.others -= 1;
            return None;
        }
        if !ejection::is_over(next.at, self.rules, now) {
            return None;
        }
        let slot = next.slot();
        if self.may_be_tried(slot, now) && !is_at_limit(slot) {
            self.begin_trial(slot, now);
            self.schedule_trial(Event::TrialBegan, now);
            return Some(slot);
        }
        // Not at each connect anew.
        self.next_trial.at = now.wrapping_add(self.rules.base);
        None
    }

    /// Whether a connect that begins now may be the trial of the backend in a slot.
    pub fn may_be_tried(&self, slot: u32, now: u32) -> bool {
        let Row { state, standing } = self.row(slot);
        // Of a service whose members are listed, the trial may be due before its time is over: where nobody is well. But one
        // that is under way is left alone.
        let waits = standing.phase == EjectionPhase::Trial as u8 || self.members.is_none();
        state.is_held_back() != 0 && (!waits || ejection::is_over(standing.at, self.rules, now))
    }

    /// A connect that begins now is the trial of the backend in a slot.
    pub fn begin_trial(&mut self, slot: u32, now: u32) {
        let rules = self.rules;
        let row = self.row_mut(slot);
        row.standing = ejection::on_trial(row.standing, rules, now);
    }

    // ---- what flows show -----------------------------------------------------------------------------------------------

    /// Takes in what became of a flow to the backend in a slot. `random` decides the jitter.
    pub fn report(&mut self, slot: u32, evidence: Evidence, now: u32, random: u32) -> Judgement {
        let Row { state, standing: before } = self.row(slot);
        if !evidence.matters(before) {
            return Judgement::Unchanged;
        }
        if evidence.kind == EvidenceKind::None {
            return self.pass_trial_on(slot, now);
        }
        let (after, verdict) = ejection::next(before, self.rules, evidence, state, now, random);
        let (after, judgement) = match verdict {
            Verdict::Unchanged => return Judgement::Unchanged,
            Verdict::Remembered => (after, Judgement::Remembered),
            Verdict::Eject if !self.has_room(now) => {
                (ejection::withheld(after, before, now), Judgement::Withheld)
            }
            Verdict::Eject => (after, Judgement::Ejected),
            Verdict::EjectLonger => (after, Judgement::EjectedLonger),
            Verdict::Readmit => (after, Judgement::Readmitted),
        };
        let row = self.row_mut(slot);
        row.standing = after;
        match judgement {
            Judgement::Unchanged | Judgement::Remembered => return judgement,
            Judgement::Withheld => {}
            Judgement::Ejected | Judgement::EjectedLonger => row.state.ejected = 1,
            Judgement::Readmitted => row.state.ejected = 0,
        }
        let event = match judgement {
            Judgement::EjectedLonger => Event::TrialFailed,
            Judgement::Readmitted => Event::Readmitted,
            _ => Event::Judged,
        };
        self.schedule_trial(event, now);
        judgement
    }

    /// A trial has decided nothing: it is soon the next one's turn.
    fn pass_trial_on(&mut self, slot: u32, now: u32) -> Judgement {
        let row = self.row_mut(slot);
        let after = ejection::undecided(row.standing, now);
        if after == row.standing {
            return Judgement::Unchanged;
        }
        row.standing = after;
        self.next_trial = NextTrial::of(slot, now, self.next_trial.others);
        Judgement::Remembered
    }

    /// Whether one more backend may be ejected.
    fn has_room(&self, now: u32) -> bool {
        let seen = match &self.members {
            Some(_) => self.survey(now),
            None => {
                let (rows, table) = (Rows(self), self.table());
                let part = |part| pick::survey_entries(&rows, table, part, self.rules, now);
                pick::survey(|group| pick::survey_group(group, part))
            }
        };
        seen.has_room()
    }

    /// A look at all members, if they are listed.
    pub fn survey(&self, now: u32) -> Survey {
        if self.members.is_none() {
            return Survey::NOBODY;
        }
        let part = |part| pick::survey_members(&Rows(self), (), part, self.rules, now);
        pick::survey(|group| pick::survey_group(group, part))
    }

    /// Decides when the next trial is due, if members are listed. (The kernel programs do so twice, because of other CPUs.)
    fn schedule_trial(&mut self, event: Event, now: u32) {
        self.next_trial = ejection::next_trial(self.survey(now), self.rules, event, self.next_trial, now);
    }

    fn row(&self, slot: u32) -> Row {
        self.rows.get(slot as usize).copied().unwrap_or(FREE)
    }

    fn row_mut(&mut self, slot: u32) -> &mut Row {
        let at = slot as usize;
        if at >= self.rows.len() {
            self.rows.resize(at + 1, FREE);
        }
        &mut self.rows[at]
    }

    fn table(&self) -> TableRef {
        let length_log2 = self.schedule.len().checked_ilog2().unwrap_or(0);
        let length_log2 = u8::try_from(length_log2).expect("a logarithm of 64 bits");
        TableRef { base: 0, generation: 0, length_log2, members: 0 }
    }
}

/// What a look at all members reads: it never picks.
struct Rows<'e>(&'e Ejector);

impl Tables for Rows<'_> {
    type Backend = u32;
    type Members = ();
    type Position = usize;

    fn entry(&self, entry: u32) -> Option<u32> {
        self.0.schedule.get(entry as usize).map(|slot| slot.number())
    }

    fn backend(&self, slot: u32) -> Option<u32> {
        (slot < NO_SLOT).then_some(slot)
    }

    fn state(&self, slot: u32) -> StateWord {
        self.0.state(slot)
    }

    fn flows(&self, _: u32) -> u32 {
        0
    }

    fn errors(&self, _: u32) -> RecentErrors {
        RecentErrors::default()
    }

    fn ejection(&self, slot: u32) -> EjectionState {
        self.0.standing(slot)
    }

    fn entries(&self, _: u32) -> u32 {
        0
    }

    fn members(&self, _: TableRef) -> Option<()> {
        self.0.members.as_ref().map(|_| ())
    }

    fn list(&self, (): ()) -> Option<(u32, u32, usize)> {
        let listed = u32::try_from(self.0.members.as_ref()?.len()).expect("at most MAX_LISTED");
        Some((self.0.in_table, listed, 0))
    }

    fn position(&self, (): (), number: u32) -> Option<usize> {
        Some(number as usize)
    }

    fn member(&self, position: usize) -> (u32, usize) {
        let members = self.0.members.as_ref();
        (members.expect("members that are asked for are listed")[position], position + 1)
    }

    fn fallback(&self) -> u32 {
        NO_SLOT
    }
}
