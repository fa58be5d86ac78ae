//! The steps of ejection, in the order in which they change a backend's words: a flow's end is judged, an ejection finds room or is
//! withheld, and one connect at a time is a trial.
//!
//! The kernel programs, the planner and the tests run this one copy; [`Words`] is where the words of one service lie. Each step
//! is a compare-and-swap of the backend's word, then a store of its state byte, and then a look at all members, which says when
//! the next trial is due. Times are ticks.

use super::{
    Event, Evidence, EvidenceKind, Verdict, is_over, next, next_trial, on_trial, undecided, withheld,
};
use crate::abi::{EjectionPhase, EjectionRules, EjectionState, NO_SLOT, NextTrial, StateWord};
use crate::pick::Survey;

/// The words of one service and its backends, as one side keeps them.
pub trait Words {
    /// A reference to a backend.
    type Backend: Copy;

    /// The backend in a slot, if it is one of the service.
    fn backend(&self, slot: u32) -> Option<Self::Backend>;

    /// The service's rules.
    fn rules(&self) -> EjectionRules;

    /// Whether the members of its table are listed.
    fn lists_members(&self) -> bool;

    /// A look at all members, or at scattered entries of the table where they are not listed.
    fn survey(&self, now: u32) -> Survey;

    /// A number that decides the jitter, uniform in 32 bits.
    fn random(&self) -> u32;

    /// The state word of a backend.
    fn state(&self, backend: Self::Backend) -> StateWord;

    /// Stores whether a backend is ejected: 1 or 0.
    fn set_ejected(&self, backend: Self::Backend, ejected: u8);

    /// The ejection word of a backend.
    fn standing(&self, backend: Self::Backend) -> EjectionState;

    /// Replaces it. Returns `false` if it is not `before` any more: another CPU was quicker.
    fn replace_standing(&self, backend: Self::Backend, before: EjectionState, after: EjectionState) -> bool;

    /// Forgets the recent errors of a backend.
    fn forget_errors(&self, backend: Self::Backend);

    /// Whether a trial may go to a backend: it is below the limit of open flows, and no lame duck by its own report.
    fn takes_trials(&self, backend: Self::Backend) -> bool;

    /// Counts in the counters of a slot.
    fn count(&self, slot: u32, counted: Counted);

    /// When the next trial is due.
    fn next_trial(&self) -> NextTrial;

    /// Stores that.
    fn set_next_trial(&self, next: NextTrial);

    /// Stores it, unless it is not `before` any more.
    fn replace_next_trial(&self, before: NextTrial, after: NextTrial);

    /// Stores how many connects come before the next trial, and nothing else of that word.
    fn set_others(&self, others: u16);
}

/// What is counted of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// An ejection.
    Ejection,
    /// An ejection for which there was no room.
    Withheld,
    /// A trial.
    Trial,
    /// A readmission.
    Readmission,
}

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

impl Judgement {
    /// After what the next trial is to be looked for, if it is.
    #[inline(always)]
    pub const fn event(self) -> Option<Event> {
        match self {
            Self::Unchanged | Self::Remembered => None,
            Self::Withheld | Self::Ejected => Some(Event::Judged),
            Self::EjectedLonger => Some(Event::TrialFailed),
            Self::Readmitted => Some(Event::Readmitted),
        }
    }
}

/// Judges the backend in a slot by some evidence. `None`: another CPU was quicker, so judge again. After that, the next trial is
/// to be scheduled where [`Judgement::event`] says so. (By the caller: functions of a kernel program that call each other share 512
/// bytes of stack, and without CAP_PERFMON the verifier has too many ways to follow through a loop of all this.)
#[inline(always)]
pub fn judge<W: Words>(words: &W, slot: u32, evidence: Evidence, now: u32) -> Option<Judgement> {
    let Some(backend) = words.backend(slot) else { return Some(Judgement::Unchanged) };
    let (rules, before) = (words.rules(), words.standing(backend));
    let (mut after, verdict) = next(before, rules, evidence, words.state(backend), now, words.random());
    if matches!(verdict, Verdict::Unchanged) {
        return Some(Judgement::Unchanged);
    }
    let is_withheld = matches!(verdict, Verdict::Eject) && !words.survey(now).has_room();
    if is_withheld {
        after = withheld(after, before, now);
    }
    if !words.replace_standing(backend, before, after) {
        return None;
    }
    Some(match verdict {
        Verdict::Unchanged | Verdict::Remembered => Judgement::Remembered,
        Verdict::Eject if is_withheld => {
            words.count(slot, Counted::Withheld);
            Judgement::Withheld
        }
        Verdict::Eject | Verdict::EjectLonger => {
            words.set_ejected(backend, 1);
            words.count(slot, Counted::Ejection);
            if matches!(verdict, Verdict::Eject) { Judgement::Ejected } else { Judgement::EjectedLonger }
        }
        Verdict::Readmit => {
            // It begins with a clean record: what failed before says nothing of what it is now.
            words.forget_errors(backend);
            words.set_ejected(backend, 0);
            words.count(slot, Counted::Readmission);
            Judgement::Readmitted
        }
    })
}

/// Stores when the next trial is due, if members are listed.
#[inline(always)]
pub fn schedule_trial<W: Words>(words: &W, event: Event, now: u32) {
    if !words.lists_members() {
        return;
    }
    // Twice: another CPU may have ejected a backend between the look and the store, and have stored before. Whoever looks after
    // its own store sees what the other one has done, or the other one stores last.
    for _ in 0..2 {
        let (seen, before) = (words.survey(now), words.next_trial());
        words.set_next_trial(next_trial(seen, words.rules(), event, before, now));
    }
}

/// The slot of an ejected backend that a connect which begins now is to try, if a trial is due; else [`NO_SLOT`].
#[inline(always)]
pub fn take_trial<W: Words>(words: &W, now: u32) -> u32 {
    let due = words.next_trial();
    if due.slot == 0 {
        return NO_SLOT;
    }
    if due.others != 0 {
        // A store that comes late lets a few connects more or less go first.
        words.set_others(due.others - 1);
        return NO_SLOT;
    }
    let rules = words.rules();
    if !is_over(due.at, rules, now) {
        return NO_SLOT;
    }
    let slot = begin_trial(words, due.slot(), now);
    // Until it is decided; and if it could not be tried, not again at each connect. If another CPU has said something else
    // meanwhile, that is newer.
    words.replace_next_trial(due, NextTrial { at: now.wrapping_add(rules.base), ..due });
    slot
}

/// Begins the trial of the backend in a slot. Returns the slot, or [`NO_SLOT`] if the backend may not be tried.
#[inline(always)]
pub fn begin_trial<W: Words>(words: &W, slot: u32, now: u32) -> u32 {
    let Some(backend) = words.backend(slot) else { return NO_SLOT };
    let before = words.standing(backend);
    if !may_be_tried(words, backend, before, now)
        || !words.replace_standing(backend, before, on_trial(before, words.rules(), now))
    {
        return NO_SLOT;
    }
    words.count(slot, Counted::Trial);
    slot
}

/// Whether a connect that begins now may be the trial of a backend with this ejection word.
#[inline(always)]
pub fn may_be_tried<W: Words>(words: &W, backend: W::Backend, before: EjectionState, now: u32) -> bool {
    // Of a service whose members are listed, the trial may be due before its time is over: where nobody is well. But one that is
    // under way is left alone.
    let waits = before.phase == EjectionPhase::Trial as u8 || !words.lists_members();
    words.state(backend).is_held_back() != 0
        && (!waits || is_over(before.at, words.rules(), now))
        && words.takes_trials(backend)
}

/// A trial has decided nothing: it is soon the next one's turn. Returns whether the flow was the trial.
#[inline(always)]
pub fn give_trial_up<W: Words>(words: &W, slot: u32, now: u32) -> bool {
    let Some(backend) = words.backend(slot) else { return false };
    let before = words.standing(backend);
    let after = undecided(before, now);
    if after.to_word() == before.to_word() || !words.replace_standing(backend, before, after) {
        return false;
    }
    let others = words.next_trial().others;
    words.set_next_trial(NextTrial::of(slot, now, others));
    true
}

/// Whether evidence says no more than that a trial has decided nothing: [`give_trial_up`] takes it.
#[inline(always)]
pub const fn gives_up(evidence: Evidence) -> bool {
    matches!(evidence.kind, EvidenceKind::None)
}
