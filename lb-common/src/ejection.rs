//! Ejects and readmits backends: a circuit breaker for each backend of a client task. The kernel
//! programs run this code when flows end, and the planner and the tests run it on the host.
//!
//! A backend has a *run* of failures: each failure adds to the run, and each established connection
//! subtracts one. When the run reaches [`failures`](EjectionRules::failures), the backend is
//! ejected for the time [`base`](EjectionRules::base). Each further ejection lasts twice as long,
//! at most [`max`](EjectionRules::max), until the run is back at 0.
//!
//! After the ejection's time, one connect may try the backend: the *trial*. If the trial is
//! established, the backend is readmitted; if it fails, the backend is ejected for twice as long.
//! (Envoy's outlier detection also ejects hosts, but readmits them after a time, without a trial.)
//!
//! The module must not use maps or clocks. Times are ticks, which wrap around after 52 days, so
//! they are compared by their distance: a time that is further in the future than the longest
//! ejection counts as past.

pub mod steps;

use crate::abi::{EjectionPhase, EjectionRules, EjectionState, NO_SLOT, NextTrial, StateWord, Usable};
use crate::ending::{End, Ending, is_below};
use crate::load::{sign_mask_in_register, smaller};
use crate::pick::Survey;

/// The result of a flow, as evidence for or against its backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// Whether the result counts for or against the backend.
    pub kind: EvidenceKind,
    /// Whether the flow was a trial.
    pub is_trial: bool,
    /// The number of the flow's [`Ending`], or [`NO_ANSWER`]; meaningless while the flow is open.
    pub ending: u8,
    /// The failure source of the process that began the flow. But in evidence for [`next`], this
    /// field must contain the source of the whole run of failures, including this failure (see
    /// [`failure_source`]).
    pub failure_source: FailureSource,
}

/// Whether evidence counts for or against a backend. (It is a number and not an enum, because the
/// compiler makes a branch for each variant of an enum.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvidenceKind(u8);

impl EvidenceKind {
    /// No evidence. A trial with this result has decided nothing.
    pub const NONE: Self = Self(0);
    /// A failure.
    pub const FAILURE: Self = Self(1);
    /// A reset of an established connection. It counts as two failures, because the established
    /// connection has already subtracted one from the run of failures.
    pub const RESET: Self = Self(2);
    /// An established connection on which the backend sent no answer. It counts as two failures,
    /// and only while other backends answer, see
    /// [`Service::answered`](crate::abi::Service::answered).
    pub const NO_ANSWER: Self = Self(3);
    /// The SYN could not be sent. It counts as a failure unless SYNs to other backends cannot be
    /// sent either, see [`SendFailures`].
    pub const SEND_FAILED: Self = Self(4);
    /// The connection was established.
    pub const ESTABLISHED: Self = Self(5);
    /// The backend answered. This decides the trial of a backend that was ejected for missing
    /// answers.
    pub const ANSWERED: Self = Self(6);

    #[inline(always)]
    const fn is(self, other: Self) -> bool {
        self.0 == other.0
    }

    /// The number of failures that the evidence adds to a run.
    #[inline(always)]
    const fn weight(self) -> u8 {
        // Two bits per kind in one number replace a branch per kind.
        const WEIGHTS: u32 = 1 << (2 * EvidenceKind::FAILURE.0)
            | 2 << (2 * EvidenceKind::RESET.0)
            | 2 << (2 * EvidenceKind::NO_ANSWER.0)
            | 1 << (2 * EvidenceKind::SEND_FAILED.0);
        (WEIGHTS >> ((2 * self.0) & 31) & 3) as u8
    }

    /// Whether the evidence counts against the backend.
    #[inline(always)]
    pub const fn is_failure(self) -> bool {
        self.weight() != 0
    }

    /// Whether a process can cause the failure by the data that it sends: a server may answer some
    /// requests with a reset, or not at all.
    #[inline(always)]
    const fn depends_on_request(self) -> bool {
        self.weight() == 2
    }
}

/// One byte for a run of failures: it identifies the process whose flows failed, or states that
/// flows of several processes failed. If flows of only one process failed, the requests of this
/// process may have caused the failures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailureSource(pub u8);

impl FailureSource {
    /// Several processes, or the only process of the client.
    pub const SEVERAL: Self = Self(255);

    /// The source for a process. (Two processes have the same byte with a probability of 1/254.)
    #[inline(always)]
    pub const fn of(process: u32) -> Self {
        let number = (process % 254) as u8 + 1;
        Self(number)
    }

    /// The source for a process of a client. `is_one_of_several` is 1 if several processes of the
    /// client have begun flows recently, else 0. If it is 0, the source is
    /// [`SEVERAL`](Self::SEVERAL), because no other process can confirm the failures.
    #[inline(always)]
    pub fn among(process: u32, is_one_of_several: u8) -> Self {
        // All bits of the mask are set if the process is not one of several.
        let mask = sign_mask_in_register(u64::from(is_one_of_several).wrapping_sub(1));
        #[expect(clippy::cast_possible_truncation, reason = "a mask")]
        let alone = mask as u8;
        Self(Self::of(process).0 | alone)
    }
}

/// A reset counts against the backend if it arrives within this time after the choice and no data
/// was received: a backend that accepts a connection and then resets it at once does not serve.
/// Later resets are more likely caused by the client or a middlebox.
const RESET_AT_ONCE_NS: u64 = 3_000_000_000;

/// A missing answer counts only if at least this time has passed since the choice: a client that
/// closes earlier has not waited long enough for an answer.
const NO_ANSWER_AFTER_NS: u64 = 500_000_000;

impl Evidence {
    /// The bits of [`Evidence::to_word`] that contain the kind.
    pub const KIND: u32 = 7;
    /// The bit of [`Evidence::to_word`] that is set if the flow was a trial.
    pub const TRIAL: u32 = 8;

    /// The evidence that a connection was established.
    #[inline(always)]
    pub const fn established(is_trial: bool) -> Self {
        Self { kind: EvidenceKind::ESTABLISHED, is_trial, ending: 0, failure_source: FailureSource(0) }
    }

    /// The evidence from the end of a flow that lasted `lasted_ns` nanoseconds.
    pub fn of_end(end: End, is_trial: bool, failure_source: FailureSource, lasted_ns: u64) -> Self {
        Self::from_word(Self::word_of_end(end, u32::from(is_trial), failure_source, lasted_ns))
    }

    /// Like [`Evidence::of_end`], but returns the evidence as a word ([`Evidence::to_word`]),
    /// computed without branches. `is_trial` is 1 or 0.
    #[inline(always)]
    pub fn word_of_end(end: End, is_trial: u32, failure_source: FailureSource, lasted_ns: u64) -> u32 {
        /// Endings of a connect that count against the backend.
        const FAILED: u32 = Ending::Refused.bit()
            | Ending::TimedOut.bit()
            | Ending::Unreachable.bit()
            | Ending::Unanswered.bit();
        let was_established = end.was_established();
        let is_failure =
            end.is_one_of(FAILED) & (was_established ^ 1) | end.is_one_of(Ending::DataTimeout.bit());
        let is_reset = was_established
            & end.is_one_of(Ending::Reset.bit())
            & is_below(end.bytes_received, 1)
            & is_below(lasted_ns, RESET_AT_ONCE_NS);
        let lacks_answer = end.lacks_answer() & (is_below(lasted_ns, NO_ANSWER_AFTER_NS) ^ 1);
        // At most one of these conditions is 1.
        let kind = is_failure * u32::from(EvidenceKind::FAILURE.0)
            + is_reset * u32::from(EvidenceKind::RESET.0)
            + lacks_answer * u32::from(EvidenceKind::NO_ANSWER.0)
            + end.send_failed() * u32::from(EvidenceKind::SEND_FAILED.0)
            + end.is_answered() * u32::from(EvidenceKind::ANSWERED.0);
        // An established flow has already decided the trial, unless the trial waits for an answer.
        let decides = lacks_answer | end.is_answered() | (was_established ^ 1);
        let ending = end.number() * (lacks_answer ^ 1) + u32::from(NO_ANSWER) * lacks_answer;
        kind | (is_trial & decides) << 3 | ending << 8 | u32::from(failure_source.0) << 16
    }

    /// The evidence as one number, which can be passed to a function of a kernel program.
    #[inline(always)]
    pub const fn to_word(self) -> u32 {
        self.kind.0 as u32
            | (self.is_trial as u32) << 3
            | (self.ending as u32) << 8
            | (self.failure_source.0 as u32) << 16
    }

    /// The inverse of [`Evidence::to_word`].
    #[inline(always)]
    pub const fn from_word(word: u32) -> Self {
        let kind = EvidenceKind((word & Self::KIND) as u8);
        #[expect(clippy::cast_possible_truncation, reason = "the second byte")]
        let ending = (word >> 8) as u8;
        #[expect(clippy::cast_possible_truncation, reason = "the third byte")]
        let failure_source = FailureSource((word >> 16) as u8);
        Self { kind, is_trial: word & 8 != 0, ending, failure_source }
    }

    /// Whether the evidence can change `before`, the ejection word of its backend. Most evidence
    /// cannot.
    #[inline(always)]
    pub fn matters(self, before: EjectionState) -> bool {
        if self.kind.is(EvidenceKind::ESTABLISHED) {
            before.to_word() != 0
        } else if self.kind.is(EvidenceKind::ANSWERED) {
            awaits_answer(before)
        } else {
            self.is_trial || self.kind.is_failure()
        }
    }
}

/// Whether the backend was ejected for missing answers. If true, an established connection does not
/// show that the backend works again.
#[inline(always)]
const fn awaits_answer(before: EjectionState) -> bool {
    before.phase != EjectionPhase::Counting as u8 && before.ending == NO_ANSWER
}

/// The value of [`EjectionState::ending`] for an established connection without an answer. It
/// replaces the number of the [`Ending`], because the client determined how the connection ended.
pub const NO_ANSWER: u8 = 13;
const _: () = assert!(NO_ANSWER as usize == Ending::ALL.len());

/// The name of a backend's last failure in tables, JSON and metrics: the name of an [`Ending`], or
/// `no-answer`.
pub fn name_of_failure(ending: u8) -> &'static str {
    match ending {
        NO_ANSWER => "no-answer",
        ending => Ending::ALL.get(usize::from(ending)).copied().unwrap_or(Ending::Unknown).name(),
    }
}

/// The content of [`Service::send_failures`](crate::abi::Service::send_failures): the backend to
/// which SYNs cannot be sent, or the mark that this host cannot send SYNs.
///
/// A send failure counts against its backend unless SYNs to other backends also fail. If a SYN to
/// another backend cannot be sent either, and no SYN was sent in between, this host is considered
/// unable to send: no send failure counts until a SYN is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendFailures(pub u16);

impl SendFailures {
    /// No send failure is known.
    pub const NONE: Self = Self(0);
    /// SYNs to several backends cannot be sent.
    pub const HOST: Self = Self(u16::MAX);

    /// The value after a SYN to the backend in `slot` could not be sent. The failure counts against
    /// the backend unless the result is [`SendFailures::HOST`].
    #[inline(always)]
    #[must_use]
    pub const fn failed(self, slot: u32) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "slots are below NO_SLOT, which has 16 bits")]
        let this = slot as u16 + 1;
        if self.0 == 0 || self.0 == this { Self(this) } else { Self::HOST }
    }

    /// The slot of the only backend with send failures; [`NO_SLOT`] or more if there is none.
    #[inline(always)]
    pub const fn blamed(self) -> u32 {
        (self.0 as u32).wrapping_sub(1)
    }
}

/// The effect of evidence on a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing has changed.
    Unchanged,
    /// The evidence is stored, without any other effect.
    Remembered,
    /// The backend must be ejected if one more backend may be ejected. If no further backend may be
    /// ejected, the caller must store the word that [`withheld`] returns.
    Eject,
    /// The backend remains ejected for longer.
    EjectLonger,
    /// The backend is readmitted.
    Readmit,
}

/// The number of failures in a row that ejects a backend with this state word.
#[inline(always)]
pub fn failures_to_eject(rules: EjectionRules, state: StateWord) -> u8 {
    doubled_if(rules.failures, (state.usable / Usable::PROBED_HEALTHY) & 1)
}

/// The number of failures in a row that ejects a backend: the number in the rules, doubled if the
/// daemon's probes find the backend healthy (`is_probed_healthy`, 1 or 0).
#[inline(always)]
pub fn doubled_if(failures: u8, is_probed_healthy: u8) -> u8 {
    // A shift replaces a branch. The result is at most 255, because the run of failures is stored
    // in a byte.
    at_most_255(u32::from(failures) << is_probed_healthy)
}

#[inline(always)]
fn at_most_255(number: u32) -> u8 {
    #[expect(clippy::cast_possible_truncation, reason = "at most 255")]
    let number = smaller(u64::from(number), 255) as u8;
    number
}

/// The ejection word of a backend after evidence at the tick `now`, and the effect. Evidence of
/// kind [`EvidenceKind::NONE`] leaves a trial [`undecided`].
///
/// If the failure depends on the client's data ([`EvidenceKind::RESET`] or
/// [`EvidenceKind::NO_ANSWER`]) and all failures of the run belong to flows of one process, the
/// backend is not ejected: the run remains one failure below the limit.
///
/// `state` is the backend's state word. If connects may choose the backend although it is ejected
/// ([`Usable::EvenEjected`]), any flow that ends after the ejection's time counts like a trial. If
/// the ejection's time is over and the state word does not mark the backend as ejected, the backend
/// is treated as not ejected: if two CPUs judge at the same moment, they may leave such words,
/// because each CPU stores the state word after its compare-and-swap. `random` determines the
/// jitter.
#[inline(always)]
pub fn next(
    before: EjectionState,
    rules: EjectionRules,
    evidence: Evidence,
    state: StateWord,
    now: u32,
    random: u32,
) -> (EjectionState, Verdict) {
    let unchanged = (before, Verdict::Unchanged);
    if rules.failures == 0 {
        return unchanged;
    }
    let is_overruled = matches!(Usable::from_u8(state.usable), Usable::EvenEjected);
    let is_time_over = is_over(before.at, rules, now);
    let phase = match EjectionPhase::from_u8(before.phase) {
        _ if state.ejected == 0 && is_time_over => EjectionPhase::Counting,
        phase => phase,
    };
    let decides = match phase {
        EjectionPhase::Counting => false,
        EjectionPhase::Ejected => is_overruled && is_time_over,
        EjectionPhase::Trial => evidence.is_trial || is_overruled,
    };
    let is_counting = matches!(phase, EjectionPhase::Counting);
    if !evidence.kind.is_failure() {
        if evidence.kind.is(EvidenceKind::NONE) {
            let after = if evidence.is_trial { undecided(before, now) } else { before };
            return if after.to_word() == before.to_word() {
                unchanged
            } else {
                (after, Verdict::Remembered)
            };
        }
        let is_established = evidence.kind.is(EvidenceKind::ESTABLISHED);
        if is_counting && is_established {
            let run = before.run - u8::from(before.run != 0);
            let counting = EjectionPhase::Counting as u8;
            let after = EjectionState { run, phase: counting, ..before };
            let after = if run == 0 { EjectionState::default() } else { after };
            return if after.to_word() == before.to_word() {
                unchanged
            } else {
                (after, Verdict::Remembered)
            };
        }
        // Whether the evidence shows that the backend works. An established connection is no such
        // evidence if the backend was ejected for missing answers.
        let shows = if is_established {
            !awaits_answer(before)
        } else {
            !is_counting && evidence.kind.is(EvidenceKind::ANSWERED)
        };
        // A trial that is established shows that the backend works, even if a later trial has
        // already failed.
        if !shows || !decides && !evidence.is_trial {
            return unchanged;
        }
        let run = failures_to_eject(rules, state).saturating_sub(2);
        let after = EjectionState { at: now, run, phase: EjectionPhase::Counting as u8, ..before };
        return (after, Verdict::Readmit);
    }
    if evidence.kind.is(EvidenceKind::NO_ANSWER) && rules.hangs == 0 {
        return unchanged;
    }
    let before = EjectionState { ending: evidence.ending, ..before };
    if !is_counting {
        return if decides { (ejected(before, rules, now, random), Verdict::EjectLonger) } else { unchanged };
    }
    let (run, level) = if is_long_ago(before.at, rules, now) { (0, 0) } else { (before.run, before.level) };
    let failures = failures_to_eject(rules, state);
    let run = at_most_255(u32::from(run) + u32::from(evidence.kind.weight()));
    let before = EjectionState { at: now, level, phase: EjectionPhase::Counting as u8, ..before };
    if run < failures {
        return (EjectionState { run, ..before }, Verdict::Remembered);
    }
    if evidence.kind.depends_on_request() && evidence.failure_source.0 != FailureSource::SEVERAL.0 {
        return (EjectionState { run: failures - 1, ..before }, Verdict::Remembered);
    }
    (ejected(before, rules, now, random), Verdict::Eject)
}

/// The source of a backend's run of failures, including the failure in `evidence`. (It is computed
/// without branches, because the verifier follows the subsequent code once per branch.)
#[inline(always)]
pub fn failure_source(
    before: EjectionState,
    rules: EjectionRules,
    evidence: Evidence,
    state: StateWord,
    now: u32,
) -> FailureSource {
    let since = u64::from(now.wrapping_sub(before.at));
    let goes_on = is_below(0, u64::from(before.run)) & (is_below(u64::from(rules.max), since) ^ 1);
    let is_another = is_below(0, u64::from(state.failure_source))
        & is_below(0, u64::from(state.failure_source ^ evidence.failure_source.0))
        & goes_on;
    // Evidence that a connection was established contains no source and leaves the stored source
    // unchanged.
    let is_none = is_below(u64::from(evidence.failure_source.0), 1);
    let several = u32::from(FailureSource::SEVERAL.0) * (is_another & (is_none ^ 1));
    #[expect(clippy::cast_possible_truncation, reason = "the operands are bytes")]
    let failure_source =
        (u32::from(evidence.failure_source.0) | several | (u32::from(state.failure_source) * is_none)) as u8;
    FailureSource(failure_source)
}

/// The ejection word of a backend after a trial that decided nothing: the ejection's time is over
/// at once, so that the next connect can be the next trial.
#[inline(always)]
pub fn undecided(before: EjectionState, now: u32) -> EjectionState {
    if before.phase == EjectionPhase::Trial as u8 {
        EjectionState { at: now, phase: EjectionPhase::Ejected as u8, ..before }
    } else {
        before
    }
}

/// The ejection word of an ejected backend if the ejection's time ends at the tick `now`, so that a
/// trial is due. The daemon stores this word if something other than a connect has shown that the
/// backend may work again.
#[inline(always)]
pub fn time_over(before: EjectionState, now: u32) -> EjectionState {
    if before.phase == EjectionPhase::Ejected as u8 { EjectionState { at: now, ..before } } else { before }
}

/// The ejection word if an ejection is withheld: the backend is not ejected, and its run of
/// failures remains long enough that the next failure leads to the same decision. `ejected` is the
/// word that [`next`] returned, and `before` the word before it.
#[inline(always)]
pub const fn withheld(ejected: EjectionState, before: EjectionState, now: u32) -> EjectionState {
    EjectionState { at: now, level: before.level, phase: EjectionPhase::Counting as u8, ..ejected }
}

/// The ejection word of a backend that is ejected at the tick `now`.
#[inline(always)]
pub fn ejected(before: EjectionState, rules: EjectionRules, now: u32, random: u32) -> EjectionState {
    EjectionState {
        at: now.wrapping_add(duration(before.level, rules, random)),
        run: rules.failures,
        level: raised(before.level),
        phase: EjectionPhase::Ejected as u8,
        ending: before.ending,
    }
}

/// Number of doublings after which any ejection time exceeds the longest configurable time.
const MOST_LEVELS: u8 = 31;

#[inline(always)]
const fn raised(level: u8) -> u8 {
    if level < MOST_LEVELS { level + 1 } else { level }
}

/// The value of `random` that results in no jitter: the middle of the range.
pub const NO_JITTER: u32 = 1 << 31;

/// The duration of an ejection in ticks: doubled for each level, with a jitter of up to a tenth, so
/// that many clients do not begin trials at the same moment.
#[inline(always)]
pub fn duration(level: u8, rules: EjectionRules, random: u32) -> u32 {
    let doubled = u64::from(rules.base) << (level & MOST_LEVELS);
    #[expect(clippy::cast_possible_truncation, reason = "smaller than `max`, which has 32 bits")]
    let length = if doubled < u64::from(rules.max) { doubled as u32 } else { rules.max };
    let tenth = length / 10;
    // A multiplication and a shift replace a remainder, because a division by a variable is
    // expensive in a program.
    let jitter = ((u64::from(random) * u64::from(2 * tenth + 1)) >> 32) as u32;
    length - tenth + jitter
}

/// Number of bits of the longest configurable ejection in ticks: an hour and its jitter.
pub const EJECTION_BITS: u32 = 22;

/// The longest possible duration of an ejection in ticks, including jitter.
#[inline(always)]
pub(crate) const fn longest(rules: EjectionRules) -> u32 {
    rules.max.saturating_add(rules.max / 10 + 1)
}

/// The number of ticks from `now` until `at`; 0 if `at` has passed, or if it is further ahead than
/// an ejection can last.
#[inline(always)]
pub const fn left(at: u32, rules: EjectionRules, now: u32) -> u32 {
    let ahead = at.wrapping_sub(now);
    if ahead > longest(rules) { 0 } else { ahead }
}

/// Whether the tick `at` has passed.
#[inline(always)]
pub const fn is_over(at: u32, rules: EjectionRules, now: u32) -> bool {
    left(at, rules, now) == 0
}

/// Whether the last failure, at the tick `at`, was so long ago that the next failure begins a new
/// run of failures.
#[inline(always)]
const fn is_long_ago(at: u32, rules: EjectionRules, now: u32) -> bool {
    let since = now.wrapping_sub(at);
    // A time slightly in the future is not long ago: after an upgrade the clock may be a tick
    // behind the clock of the previous programs.
    since > rules.max && since < 0u32.wrapping_sub(longest(rules))
}

/// The ejection word of an ejected backend when a connect at the tick `now` becomes its trial.
///
/// The trial may take as long as the last ejection. A trial that is undecided after this time
/// counts as a failure, so that a client with a long timeout does not lose one connect after
/// another to a silent backend. If a trial begins early because no available backend works, the
/// failure of this trial does not lengthen the ejection.
#[inline(always)]
pub fn on_trial(before: EjectionState, rules: EjectionRules, now: u32) -> EjectionState {
    let level = if before.phase == EjectionPhase::Trial as u8 {
        raised(before.level)
    } else if is_over(before.at, rules, now) {
        before.level
    } else {
        before.level.saturating_sub(1)
    };
    let time = duration(level.saturating_sub(1), rules, NO_JITTER);
    EjectionState { at: now.wrapping_add(time), level, phase: EjectionPhase::Trial as u8, ..before }
}

/// The event after which the next trial of a service is scheduled. The numbers are passed to a
/// function of a kernel program.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A backend was ejected, or its ejection was withheld.
    Judged = 0,
    /// A trial has failed.
    TrialFailed = 1,
    /// A trial has begun.
    TrialBegan = 2,
    /// A backend was readmitted.
    Readmitted = 3,
}

impl Event {
    /// The event with this number.
    #[inline(always)]
    pub const fn from_u32(number: u32) -> Self {
        match number {
            1 => Self::TrialFailed,
            2 => Self::TrialBegan,
            3 => Self::Readmitted,
            _ => Self::Judged,
        }
    }
}

/// The next trial of a service, after the survey `seen` of all of its members. `before` is the
/// stored next trial, which the result replaces.
///
/// If no available backend works, there is at least one trial per [`base`](EjectionRules::base), so
/// that the first backend that recovers is found soon.
///
/// Between two trials there are as many other connects as there are available backends, unless the
/// first trial has readmitted its backend. Without these connects, a client that connects rarely,
/// or that gets no result from its trials, would begin one trial after another. So ejection never
/// increases the part of a client's connects that goes to failing backends.
#[inline(always)]
pub fn next_trial(
    seen: Survey,
    rules: EjectionRules,
    event: Event,
    before: NextTrial,
    now: u32,
) -> NextTrial {
    let mut ticks = seen.ticks_left();
    if !seen.any_is_well() {
        if ticks > rules.base {
            ticks = rules.base;
        }
        let decided = left(before.at, rules, now);
        if matches!(event, Event::Judged | Event::Readmitted) && before.slot != 0 && decided < ticks {
            ticks = decided;
        }
    }
    let others = match event {
        Event::TrialBegan | Event::TrialFailed => seen.available(),
        Event::Judged => before.others,
        Event::Readmitted => 0,
    };
    match seen.next_slot() {
        NO_SLOT => NextTrial::default(),
        slot => NextTrial::of(slot, now.wrapping_add(ticks), others),
    }
}
