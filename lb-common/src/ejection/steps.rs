//! The steps of ejection: these functions judge the end of a flow, permit or withhold an ejection,
//! and make one connect at a time a trial.
//!
//! The kernel programs, the planner and the tests all run this code; the trait [`EjectionStore`]
//! provides access to the words of one service. A judgement first changes the backend's ejection
//! word by a compare-and-swap, and then stores the byte `ejected` of the backend's state word.
//! After that, a survey of all members determines when the next trial is due. Times are ticks.

use super::{
    Event, Evidence, EvidenceKind, FailureSource, SendFailures, Verdict, failure_source, is_over, left, next,
    next_trial, on_trial, undecided, withheld,
};
use crate::abi::{EjectionPhase, EjectionRules, EjectionState, NO_SLOT, NextTrial, StateWord};
use crate::ending::Ending;
use crate::pick::Survey;

/// The ejection words of one service and its backends: in BPF maps, or in memory.
pub trait EjectionStore {
    /// A reference to a backend.
    type Backend: Copy;

    /// The backend in a slot, if it belongs to the service.
    fn backend(&self, slot: u32) -> Option<Self::Backend>;

    /// The service's rules.
    fn rules(&self) -> EjectionRules;

    /// Whether the service's table has a list of its members.
    fn lists_members(&self) -> bool;

    /// Surveys all members, or scattered entries of the table if the members are not listed.
    fn survey(&self, now: u32) -> Survey;

    /// A random number for the jitter: all numbers of 32 bits are equally likely.
    fn random(&self) -> u32;

    /// The state word of a backend.
    fn state(&self, backend: Self::Backend) -> StateWord;

    /// Stores the failure source of a backend's run of failures.
    fn set_failure_source(&self, backend: Self::Backend, failure_source: FailureSource);

    /// The stored send failures: to which backends SYNs cannot be sent.
    fn send_failures(&self) -> SendFailures;

    /// Stores the send failures, and sets [`Service::awaits_syn`](crate::abi::Service::awaits_syn),
    /// so that the next SYN that is sent clears them.
    fn set_send_failures(&self, send_failures: SendFailures);

    /// The slot of the first backend that answered after the last missing answer, and the tick at
    /// which it answered. If there is none, the slot is [`NO_SLOT`] or more.
    fn answered(&self) -> (u32, u32);

    /// Whether no backend has answered since the last missing answer. If true,
    /// [`EjectionStore::answered`] returns an answer that arrived before the missing one.
    fn awaits_answer(&self) -> bool;

    /// Records that an answer is missing, so that the next answer of a backend is stored.
    fn await_answer(&self);

    /// Stores whether a backend is ejected: 1 or 0.
    fn set_ejected(&self, backend: Self::Backend, ejected: u8);

    /// The ejection word of a backend.
    fn standing(&self, backend: Self::Backend) -> EjectionState;

    /// Replaces the ejection word of a backend. Returns `false` if the word is no longer `before`,
    /// because another CPU has changed it.
    fn replace_standing(&self, backend: Self::Backend, before: EjectionState, after: EjectionState) -> bool;

    /// Clears the recent errors of a backend.
    fn forget_errors(&self, backend: Self::Backend);

    /// Whether a backend may have a trial: it must be below the limit of open flows, and must not
    /// be a lame duck by its own report.
    fn takes_trials(&self, backend: Self::Backend) -> bool;

    /// Increments the counter of an event for a slot.
    fn count(&self, slot: u32, counted: Counted);

    /// When the next trial is due, and which backend it tests.
    fn next_trial(&self) -> NextTrial;

    /// Stores the next trial.
    fn set_next_trial(&self, next: NextTrial);

    /// Stores the next trial if the stored one is still `before`.
    fn replace_next_trial(&self, before: NextTrial, after: NextTrial);

    /// Stores only how many connects precede the next trial.
    fn set_others(&self, others: u16);
}

/// An event that is counted per backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// An ejection.
    Ejection,
    /// An ejection that was withheld.
    Withheld,
    /// A trial.
    Trial,
    /// A readmission.
    Readmission,
}

/// The effect of evidence on a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// Nothing changed.
    Unchanged,
    /// The evidence is stored, without any other effect.
    Remembered,
    /// The backend should be ejected and is not, because it is the last available one.
    Withheld,
    /// The backend is ejected.
    Ejected,
    /// A trial failed, and the backend remains ejected for longer.
    EjectedLonger,
    /// The backend is readmitted, and its recent errors are cleared.
    Readmitted,
}

impl Judgement {
    /// The event after which the next trial must be scheduled; `None` if the next trial does not
    /// change.
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

/// The reason why the evidence was not judged. After each reason the caller must call [`judge`]
/// again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unjudged {
    /// Another CPU changed the ejection word first.
    Contended,
    /// The evidence requires an ejection, but it is unknown whether one more backend may be
    /// ejected. The caller must determine this by a survey, and then judge again.
    WantsRoom,
}

/// Judges the backend in a slot by evidence. `has_room`: whether one more backend may be ejected
/// ([`Survey::has_room`]); `None` if the caller has not surveyed the members. Afterwards the caller
/// must schedule the next trial if [`Judgement::event`] returns an event. (This function neither
/// surveys nor schedules, because functions of a kernel program that call each other share 512
/// bytes of stack, and because without CAP_PERFMON the verifier would have too many paths to follow
/// through a loop over all steps.)
///
/// # Errors
/// If the evidence was not judged.
#[inline(always)]
pub fn judge<W: EjectionStore>(
    store: &W,
    slot: u32,
    evidence: Evidence,
    has_room: Option<bool>,
    now: u32,
) -> Result<Judgement, Unjudged> {
    let Some(backend) = store.backend(slot) else { return Ok(Judgement::Unchanged) };
    if evidence.kind == EvidenceKind::NONE {
        let was_trial = evidence.is_trial && give_trial_up(store, slot, now);
        return Ok(if was_trial { Judgement::Remembered } else { Judgement::Unchanged });
    }
    let (rules, before, state) = (store.rules(), store.standing(backend), store.state(backend));
    let failure_source = failure_source(before, rules, evidence, state, now);
    let evidence = Evidence { failure_source, ..evidence };
    let (mut after, verdict) = next(before, rules, evidence, state, now, store.random());
    if matches!(verdict, Verdict::Unchanged) {
        return Ok(Judgement::Unchanged);
    }
    let mut is_withheld = false;
    if matches!(verdict, Verdict::Eject) {
        let Some(has_room) = has_room else { return Err(Unjudged::WantsRoom) };
        is_withheld = !has_room;
    }
    if is_withheld {
        after = withheld(after, before, now);
    }
    if !store.replace_standing(backend, before, after) {
        return Err(Unjudged::Contended);
    }
    store.set_failure_source(backend, failure_source);
    Ok(match verdict {
        Verdict::Unchanged | Verdict::Remembered => Judgement::Remembered,
        Verdict::Eject if is_withheld => {
            store.count(slot, Counted::Withheld);
            Judgement::Withheld
        }
        Verdict::Eject | Verdict::EjectLonger => {
            store.set_ejected(backend, 1);
            store.count(slot, Counted::Ejection);
            if matches!(verdict, Verdict::Eject) { Judgement::Ejected } else { Judgement::EjectedLonger }
        }
        Verdict::Readmit => {
            // Failures before a readmission no longer count.
            store.forget_errors(backend);
            store.set_failure_source(backend, FailureSource::default());
            store.set_ejected(backend, 0);
            store.count(slot, Counted::Readmission);
            Judgement::Readmitted
        }
    })
}

/// Discards a failure that may have another cause than the backend: a send failure may be the fault
/// of this host, and a missing answer may be normal for the protocol. `evidence` and the result are
/// words of [`Evidence`]; the result is 0 if no evidence is left. `began` is the tick at which the
/// flow began. Call this function once per flow, before [`judge`].
///
/// A send failure counts unless SYNs to other backends cannot be sent either. A missing answer
/// counts if another backend has answered since the previous missing answer, or since this flow
/// began. (The second condition is needed because clients send in bursts, so all requests to one
/// backend may end together.)
#[inline(always)]
pub fn weigh<W: EjectionStore>(store: &W, slot: u32, evidence: u32, began: u32) -> u32 {
    let counts = match Evidence::from_word(evidence).kind {
        EvidenceKind::NONE => false,
        EvidenceKind::SEND_FAILED => {
            let before = store.send_failures();
            let after = before.failed(slot);
            store.set_send_failures(after);
            if after.0 == SendFailures::HOST.0 {
                readmit_blamed(store, before.blamed());
            }
            after.0 != SendFailures::HOST.0
        }
        EvidenceKind::NO_ANSWER => {
            let ((answered, at), is_awaited) = (store.answered(), store.awaits_answer());
            if !is_awaited {
                store.await_answer();
            }
            let is_since_it_began = at.wrapping_sub(began) < 1 << 31;
            answered < NO_SLOT && answered != slot && (!is_awaited || is_since_it_began)
        }
        _ => true,
    };
    if counts || evidence & Evidence::TRIAL == 0 {
        return if counts { evidence } else { 0 };
    }
    // The flow was a trial: without evidence it is a trial that decided nothing.
    evidence & !Evidence::KIND
}

/// Readmits a backend that was ejected because SYNs to it could not be sent. Call this if SYNs to
/// other backends cannot be sent either.
#[inline(always)]
fn readmit_blamed<W: EjectionStore>(store: &W, slot: u32) {
    let Some(backend) = store.backend(slot) else { return };
    let before = store.standing(backend);
    if before.ending == Ending::NotSent as u8
        && store.replace_standing(backend, before, EjectionState::default())
    {
        store.set_ejected(backend, 0);
    }
}

/// Schedules the next trial, if the members are listed.
#[inline(always)]
pub fn schedule_trial<W: EjectionStore>(store: &W, event: Event, now: u32) {
    if !store.lists_members() {
        return;
    }
    // The survey and the store run twice: between this CPU's survey and its store, another CPU may
    // eject a backend and store its own result, which this CPU would overwrite. After a second
    // survey, either this CPU has seen the other CPU's ejection, or the other CPU stores last.
    for _ in 0..2 {
        let (seen, before) = (store.survey(now), store.next_trial());
        store.set_next_trial(next_trial(seen, store.rules(), event, before, now));
    }
}

/// The slot of the ejected backend for which the current connect is the trial, if a trial is due;
/// else [`NO_SLOT`].
#[inline(always)]
pub fn take_trial<W: EjectionStore>(store: &W, now: u32) -> u32 {
    let due = store.next_trial();
    if due.slot == 0 {
        return NO_SLOT;
    }
    if due.others != 0 {
        // If this store races with the store of another CPU, slightly more or fewer connects
        // precede the trial.
        store.set_others(due.others - 1);
        return NO_SLOT;
    }
    let rules = store.rules();
    if !is_over(due.at, rules, now) {
        return NO_SLOT;
    }
    let slot = begin_trial(store, due.slot(), now);
    // The next trial is postponed for two reasons: no other connect may become a trial while this
    // one is undecided; and if this backend may not have its trial now, not every connect should
    // attempt it. If another CPU has stored another trial meanwhile, the stored trial is newer and
    // remains.
    store.replace_next_trial(due, NextTrial { at: now.wrapping_add(rules.base), ..due });
    slot
}

/// Begins the trial of the backend in a slot. Returns the slot, or [`NO_SLOT`] if the backend may
/// not have its trial now.
#[inline(always)]
pub fn begin_trial<W: EjectionStore>(store: &W, slot: u32, now: u32) -> u32 {
    let Some(backend) = store.backend(slot) else { return NO_SLOT };
    let before = store.standing(backend);
    if !may_be_tried(store, backend, before, now)
        || !store.replace_standing(backend, before, on_trial(before, store.rules(), now))
    {
        return NO_SLOT;
    }
    store.count(slot, Counted::Trial);
    slot
}

/// Whether a connect at the tick `now` may be the trial of a backend with this ejection word.
#[inline(always)]
pub fn may_be_tried<W: EjectionStore>(
    store: &W,
    backend: W::Backend,
    before: EjectionState,
    now: u32,
) -> bool {
    // A trial must wait for the end of the ejection only if members are not listed: if they are
    // listed and no available backend works, [`next_trial`] makes a trial due earlier. A new trial
    // always waits for the end of a running one.
    let waits = before.phase == EjectionPhase::Trial as u8 || !store.lists_members();
    store.state(backend).is_held_back() != 0
        && (!waits || is_over(before.at, store.rules(), now))
        && store.takes_trials(backend)
}

/// Ends the running trial of the backend in a slot without a result, so that another trial follows
/// soon. Returns whether a trial was ended.
#[inline(always)]
pub fn give_trial_up<W: EjectionStore>(store: &W, slot: u32, now: u32) -> bool {
    let Some(backend) = store.backend(slot) else { return false };
    let before = store.standing(backend);
    let after = undecided(before, now);
    if after.to_word() == before.to_word() || !store.replace_standing(backend, before, after) {
        return false;
    }
    let others = store.next_trial().others;
    store.set_next_trial(NextTrial::of(slot, now, others));
    true
}

/// Makes a backend that was just ejected the service's next trial, if no trial is planned. `slot`
/// is the backend's slot. (Unlike [`schedule_trial`], this function surveys no members.)
#[inline(always)]
pub fn name_for_trial<W: EjectionStore>(store: &W, slot: u32, now: u32) {
    let Some(backend) = store.backend(slot) else { return };
    if store.lists_members() && store.next_trial().slot == 0 && store.state(backend).ejected != 0 {
        let left = left(store.standing(backend).at, store.rules(), now);
        store.set_next_trial(NextTrial::of(slot, now.wrapping_add(left), 0));
    }
}
