//! An [`EjectionStore`] in memory, for the planner and for tests. It runs the same [`steps`] as the
//! kernel programs. The time, in ticks, and the random number for the jitter are arguments.

use std::cell::Cell;
use std::sync::Arc;

use lb_common::abi::{
    BackendState, DaemonState, EjectionRules, EjectionState, MAX_SUBSET, NO_SLOT, NextTrial, RecentErrors,
    StateWord, TableRef, Usable,
};
pub use lb_common::ejection::steps::Judgement;
use lb_common::ejection::steps::{self, Counted, EjectionStore};
use lb_common::ejection::{self, Event, Evidence, FailureSource, NO_JITTER, SendFailures};
use lb_common::pick::{self, Survey, Tables};

use crate::ids::Slot;

/// The ejection state of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EjectedRow {
    state: StateWord,
    standing: EjectionState,
}

const FREE: EjectedRow = EjectedRow {
    state: StateWord::new(Usable::No, BackendState::Free),
    standing: EjectionState { at: 0, run: 0, level: 0, phase: 0, ending: 0 },
};

/// The ejection state of one service of one client task.
#[derive(Clone, Debug)]
pub struct Ejector {
    rules: EjectionRules,
    /// The ejection state of each backend, indexed by slot.
    rows: Vec<Cell<EjectedRow>>,
    schedule: Arc<[Slot]>,
    /// The slots of the schedule, each once, and then the replaced slots; `None` if the schedule
    /// has too many slots for a list.
    members: Option<Vec<u32>>,
    /// The number of different slots in the schedule. These come first in `members`.
    in_table: u32,
    /// The slot of the fallback, or [`NO_SLOT`].
    fallback: u32,
    next_trial: Cell<NextTrial>,
    send_failures: Cell<SendFailures>,
    /// The slot of the first backend that answered after the latest missing answer, or [`NO_SLOT`],
    /// and the time of that answer.
    answered: Cell<(u32, u32)>,
    /// Whether no backend has answered since the latest missing answer.
    awaits_answer: Cell<bool>,
}

impl Ejector {
    /// Creates the ejection state of a service without failures.
    pub fn new(rules: EjectionRules) -> Self {
        Self {
            rules,
            rows: Vec::new(),
            schedule: Arc::from([]),
            members: None,
            in_table: 0,
            fallback: NO_SLOT,
            next_trial: Cell::default(),
            send_failures: Cell::default(),
            answered: Cell::new((NO_SLOT, 0)),
            awaits_answer: Cell::default(),
        }
    }

    // ---- actions of the daemon ------------------------------------------------------------------

    /// Sets the service's table, its fallback, and the replaced slots. Replaced slots get trials
    /// although they are not in the table.
    pub fn publish(&mut self, schedule: Arc<[Slot]>, replaced: &[Slot], fallback: Option<Slot>) {
        self.fallback = Slot::number_or_none(fallback);
        let mut members: Vec<u32> = schedule.iter().map(|slot| slot.number()).collect();
        members.sort_unstable();
        members.dedup();
        self.in_table =
            u32::try_from(members.len()).expect("a table has at most as many members as there are slots");
        let is_listed = members.len() <= MAX_SUBSET as usize;
        members.extend(replaced.iter().map(|slot| slot.number()));
        self.members = is_listed.then_some(members);
        self.schedule = schedule;
    }

    /// Chooses an ejected backend for the next trial, unless the backend that was chosen previously
    /// is still excluded from connects. The daemon calls this regularly.
    pub fn renew_trial(&self, now: u32) {
        let named = self.next_trial().slot();
        if named == NO_SLOT || self.row(named).state.is_held_back() == 0 {
            self.schedule_trial(Event::Judged, now);
        }
    }

    /// Ejects a backend with a withheld ejection, because it now has a substitute.
    pub fn eject(&mut self, slot: u32, now: u32) {
        let rules = self.rules;
        let row = self.row_mut(slot);
        row.standing = ejection::ejected(row.standing, rules, now, NO_JITTER);
        row.state.ejected = 1;
        self.schedule_trial(Event::Judged, now);
    }

    /// Ends the ejection time of a backend that has probably recovered. Its trial is then due.
    pub fn end_ejection(&mut self, slot: u32, now: u32) {
        let row = self.row_mut(slot);
        let after = ejection::time_over(row.standing, now);
        if after != row.standing {
            row.standing = after;
            self.next_trial.set(NextTrial::of(slot, now, 0));
        }
    }

    /// Sets whether a connect may choose the backend in a slot, and the purpose of the slot.
    pub fn set_state(&mut self, slot: u32, state: DaemonState) {
        let row = self.row_mut(slot);
        row.state = StateWord { usable: state.usable, state: state.state, ..row.state };
    }

    /// Resets a slot for another backend, without failures.
    pub fn clear(&mut self, slot: u32) {
        *self.row_mut(slot) = FREE;
    }

    // ---- inputs of a choice ---------------------------------------------------------------------

    /// The state word of a slot.
    pub fn state(&self, slot: u32) -> StateWord {
        self.row(slot).state
    }

    /// The recent failures of the backend in a slot, and its ejection time.
    pub fn standing(&self, slot: u32) -> EjectionState {
        self.row(slot).standing
    }

    /// The slots of the table and the replaced slots; `None` if the table has too many slots for a
    /// list.
    pub fn members(&self) -> Option<&[u32]> {
        self.members.as_deref()
    }

    /// The slot of the next trial, and when it is due.
    pub const fn next_trial(&self) -> NextTrial {
        self.next_trial.get()
    }

    /// The slot of the ejected backend to which this connect goes as a trial; `None` if no trial is
    /// due. The caller calls this before a policy picks. A backend at its `active_limit`
    /// (`is_at_limit`) gets no trial.
    pub fn due_trial(&self, now: u32, is_at_limit: impl Fn(u32) -> bool) -> Option<u32> {
        let slot = steps::take_trial(&MemoryStore { ejector: self, random: NO_JITTER, is_at_limit }, now);
        (slot != NO_SLOT).then(|| {
            self.schedule_trial(Event::TrialBegan, now);
            slot
        })
    }

    /// Begins a trial of the backend in a slot, if a trial is allowed. Returns whether the trial
    /// has begun.
    pub fn begin_trial(&self, slot: u32, now: u32) -> bool {
        steps::begin_trial(&self.store(), slot, now) != NO_SLOT
    }

    // ---- evidence from flows --------------------------------------------------------------------

    /// Notes that a SYN to some backend left this host.
    pub fn sent(&self) {
        self.send_failures.set(SendFailures::NONE);
    }

    /// Notes that the backend in a slot answered a client's data.
    pub fn answered(&self, slot: u32, now: u32) {
        if self.awaits_answer.replace(false) {
            self.answered.set((slot, now));
        }
    }

    /// Applies evidence to the backend in a slot. The evidence is from a flow that begins and ends
    /// now. `random` determines the jitter of an ejection.
    pub fn report(&self, slot: u32, evidence: Evidence, now: u32, random: u32) -> Judgement {
        self.report_since(slot, evidence, now, now, random)
    }

    /// Like [`Self::report`], for a flow that began at tick `began`.
    pub fn report_since(
        &self,
        slot: u32,
        evidence: Evidence,
        began: u32,
        now: u32,
        random: u32,
    ) -> Judgement {
        if !evidence.matters(self.row(slot).standing) {
            return Judgement::Unchanged;
        }
        let store = MemoryStore { random, ..self.store() };
        let evidence = Evidence::from_word(steps::weigh(&store, slot, evidence.to_word(), began));
        let has_room = self.survey(now).has_room();
        let judgement = steps::judge(&store, slot, evidence, Some(has_room), now);
        let judgement = judgement.expect("the room is known, and no other CPU interferes");
        if let Some(event) = judgement.event() {
            self.schedule_trial(event, now);
        }
        judgement
    }

    fn schedule_trial(&self, event: Event, now: u32) {
        steps::schedule_trial(&self.store(), event, now);
    }

    fn store(&self) -> MemoryStore<'_, fn(u32) -> bool> {
        MemoryStore { ejector: self, random: NO_JITTER, is_at_limit: |_| false }
    }

    /// Surveys all members or, without a list of members, scattered entries of the table.
    pub fn survey(&self, now: u32) -> Survey {
        let (rows, table, rules) = (Rows(self), self.table(), self.rules);
        let part = |part| match self.members {
            Some(_) => pick::survey_members(&rows, (), part, rules, now),
            None => pick::survey_entries(&rows, table, part, rules, now),
        };
        pick::survey(&rows, rules, |group| pick::survey_group(group, part))
    }

    fn row(&self, slot: u32) -> EjectedRow {
        self.rows.get(slot as usize).map_or(FREE, Cell::get)
    }

    fn change(&self, slot: u32, change: impl FnOnce(&mut EjectedRow)) {
        let row = &self.rows[slot as usize];
        let mut after = row.get();
        change(&mut after);
        row.set(after);
    }

    fn row_mut(&mut self, slot: u32) -> &mut EjectedRow {
        let at = slot as usize;
        if at >= self.rows.len() {
            self.rows.resize(at + 1, Cell::new(FREE));
        }
        self.rows[at].get_mut()
    }

    fn table(&self) -> TableRef {
        let length_log2 = self.schedule.len().checked_ilog2().unwrap_or(0);
        let length_log2 = u8::try_from(length_log2).expect("the logarithm of a usize fits into a u8");
        TableRef { base: 0, generation: 0, length_log2, members: 0 }
    }
}

/// An [`Ejector`] as the store of the ejection [`steps`].
struct MemoryStore<'e, F> {
    ejector: &'e Ejector,
    random: u32,
    is_at_limit: F,
}

impl<F: Fn(u32) -> bool> EjectionStore for MemoryStore<'_, F> {
    type Backend = u32;

    fn backend(&self, slot: u32) -> Option<u32> {
        ((slot as usize) < self.ejector.rows.len()).then_some(slot)
    }

    fn rules(&self) -> EjectionRules {
        self.ejector.rules
    }

    fn lists_members(&self) -> bool {
        self.ejector.members.is_some()
    }

    fn survey(&self, now: u32) -> Survey {
        self.ejector.survey(now)
    }

    fn random(&self) -> u32 {
        self.random
    }

    fn state(&self, slot: u32) -> StateWord {
        self.ejector.state(slot)
    }

    fn set_failure_source(&self, slot: u32, failure_source: FailureSource) {
        self.ejector.change(slot, |row| row.state.failure_source = failure_source.0);
    }

    fn send_failures(&self) -> SendFailures {
        self.ejector.send_failures.get()
    }

    fn set_send_failures(&self, send_failures: SendFailures) {
        self.ejector.send_failures.set(send_failures);
    }

    fn answered(&self) -> (u32, u32) {
        self.ejector.answered.get()
    }

    fn awaits_answer(&self) -> bool {
        self.ejector.awaits_answer.get()
    }

    fn await_answer(&self) {
        self.ejector.awaits_answer.set(true);
    }

    fn set_ejected(&self, slot: u32, ejected: u8) {
        self.ejector.change(slot, |row| row.state.ejected = ejected);
    }

    fn standing(&self, slot: u32) -> EjectionState {
        self.ejector.standing(slot)
    }

    fn replace_standing(&self, slot: u32, _: EjectionState, after: EjectionState) -> bool {
        self.ejector.change(slot, |row| row.standing = after);
        true
    }

    /// Does nothing, because the caller counts errors. After [`Judgement::Readmitted`], the caller
    /// must forget them.
    fn forget_errors(&self, _: u32) {}

    fn takes_trials(&self, slot: u32) -> bool {
        !(self.is_at_limit)(slot)
    }

    /// Does nothing, because the caller counts ejections and trials, too.
    fn count(&self, _: u32, _: Counted) {}

    fn next_trial(&self) -> NextTrial {
        self.ejector.next_trial()
    }

    fn set_next_trial(&self, next: NextTrial) {
        self.ejector.next_trial.set(next);
    }

    fn replace_next_trial(&self, _: NextTrial, after: NextTrial) {
        self.set_next_trial(after);
    }

    fn set_others(&self, others: u16) {
        self.set_next_trial(NextTrial { others, ..self.next_trial() });
    }
}

/// The inputs of a survey. A survey picks no backend, so it needs neither flows nor errors.
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
        let listed =
            u32::try_from(self.0.members.as_ref()?.len()).expect("a list has at most MAX_LISTED slots");
        Some((self.0.in_table, listed, 0))
    }

    fn position(&self, (): (), number: u32) -> Option<usize> {
        Some(number as usize)
    }

    fn member(&self, position: usize) -> (u32, usize) {
        let members = self.0.members.as_ref();
        (members.expect("a position exists only if the members are listed")[position], position + 1)
    }

    fn fallback(&self) -> u32 {
        self.0.fallback
    }
}
