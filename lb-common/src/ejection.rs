//! When a backend is ejected and readmitted: a circuit breaker for each backend of a client task.
//! The kernel programs run it as flows end, and the planner and the tests run it on the host.
//!
//! Failures make a leaky run: each failure adds to it, each established connection subtracts one. A
//! run of [`failures`](EjectionRules::failures) ejects a backend for [`base`](EjectionRules::base),
//! twice as long for each ejection before the run is back at 0, and at most for
//! [`max`](EjectionRules::max). Then one connect may try the backend, the *trial*: if it is
//! established the backend is readmitted, if it fails the backend is ejected for twice as long.
//! (Envoy's outlier detection ejects as well, but readmits hosts by time, not by a trial.)
//!
//! The module must not know any map or clock. Times are ticks, which wrap around after 52 days, so
//! they are compared by their distance. A time that is further ahead than the longest ejection is
//! in the past.

pub mod steps;

use crate::abi::{EjectionPhase, EjectionRules, EjectionState, NO_SLOT, NextTrial, StateWord, Usable};
use crate::ending::{End, Ending, is_below};
use crate::load::{sign_mask_in_register, smaller};
use crate::pick::Survey;

/// The result of a flow, by which its backend is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// Whether it counts for or against the backend.
    pub kind: EvidenceKind,
    /// Whether the flow was a trial.
    pub is_trial: bool,
    /// The ending of the flow; without meaning if it has not ended.
    pub ending: u8,
    /// The process that began the flow. For [`next`]: the source of the whole run of failures
    /// including this one, see [`failure_source`].
    pub failure_source: FailureSource,
}

/// Whether evidence counts for or against a backend. (A number and not an enum, because the
/// compiler makes a branch for each variant of an enum.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvidenceKind(u8);

impl EvidenceKind {
    /// No evidence; a trial with this result has decided nothing.
    pub const NONE: Self = Self(0);
    /// A failure.
    pub const FAILURE: Self = Self(1);
    /// A reset after the connection was established. It weighs twice, because the establishment
    /// counted for the backend.
    pub const RESET: Self = Self(2);
    /// An established connection that the backend did not answer: it weighs twice, and counts only
    /// while other backends answer, see [`Service::answered`](crate::abi::Service::answered).
    pub const NO_ANSWER: Self = Self(3);
    /// The SYN could not be sent: it counts unless SYNs to other backends fail as well, see
    /// [`SendFailures`].
    pub const SEND_FAILED: Self = Self(4);
    /// The connection was established.
    pub const ESTABLISHED: Self = Self(5);
    /// The backend answered: this decides the trial of a backend that was ejected for missing
    /// answers.
    pub const ANSWERED: Self = Self(6);

    #[inline(always)]
    const fn is(self, other: Self) -> bool {
        self.0 == other.0
    }

    /// The number that it adds to a run of failures.
    #[inline(always)]
    const fn weight(self) -> u8 {
        // Two bits for each number, in place of a branch for each.
        const WEIGHTS: u32 = 1 << (2 * EvidenceKind::FAILURE.0)
            | 2 << (2 * EvidenceKind::RESET.0)
            | 2 << (2 * EvidenceKind::NO_ANSWER.0)
            | 1 << (2 * EvidenceKind::SEND_FAILED.0);
        (WEIGHTS >> ((2 * self.0) & 31) & 3) as u8
    }

    /// Whether it counts against the backend.
    #[inline(always)]
    pub const fn is_failure(self) -> bool {
        self.weight() != 0
    }

    /// Whether a process can cause it by the data that it sends: a request that a server answers
    /// with a reset, or not at all.
    #[inline(always)]
    const fn depends_on_request(self) -> bool {
        self.weight() == 2
    }
}

/// The process that caused a run of failures, in one byte. If one process caused all of them, its
/// requests may be the cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailureSource(pub u8);

impl FailureSource {
    /// Two or more processes, or the client's only process.
    pub const SEVERAL: Self = Self(255);

    /// The source for a process. (One of 254 pairs of processes has the same byte.)
    #[inline(always)]
    pub const fn of(process: u32) -> Self {
        let number = (process % 254) as u8 + 1;
        Self(number)
    }

    /// The source for a process of a client; [`SEVERAL`](Self::SEVERAL) unless several processes of
    /// the client have begun flows recently (`is_one_of_several`, 1 or 0).
    #[inline(always)]
    pub fn among(process: u32, is_one_of_several: u8) -> Self {
        // All bits of the mask are set if it is the only process.
        let mask = sign_mask_in_register(u64::from(is_one_of_several).wrapping_sub(1));
        #[expect(clippy::cast_possible_truncation, reason = "a mask")]
        let alone = mask as u8;
        Self(Self::of(process).0 | alone)
    }
}

/// A reset counts against the backend if it comes within this time after the choice and no data was
/// received: a backend that accepts and then resets at once does not serve. Later resets are more
/// likely caused by the client or a middlebox.
const RESET_AT_ONCE_NS: u64 = 3_000_000_000;

/// A missing answer counts only if this much time has passed since the choice: the client may have
/// waited for less.
const NO_ANSWER_AFTER_NS: u64 = 500_000_000;

impl Evidence {
    /// The bits of the kind in its number.
    pub const KIND: u32 = 7;
    /// The bit that is set if the flow was a trial.
    pub const TRIAL: u32 = 8;

    /// The evidence that a connection was established.
    #[inline(always)]
    pub const fn established(is_trial: bool) -> Self {
        Self { kind: EvidenceKind::ESTABLISHED, is_trial, ending: 0, failure_source: FailureSource(0) }
    }

    /// The evidence of the end of a flow that lasted `lasted_ns`.
    pub fn of_end(end: End, is_trial: bool, failure_source: FailureSource, lasted_ns: u64) -> Self {
        Self::from_word(Self::word_of_end(end, u32::from(is_trial), failure_source, lasted_ns))
    }

    /// The same as a number. `is_trial` is 1 or 0. Computed without branches, like [`End`].
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
        // At most one of them is 1.
        let kind = is_failure * u32::from(EvidenceKind::FAILURE.0)
            + is_reset * u32::from(EvidenceKind::RESET.0)
            + lacks_answer * u32::from(EvidenceKind::NO_ANSWER.0)
            + end.send_failed() * u32::from(EvidenceKind::SEND_FAILED.0)
            + end.is_answered() * u32::from(EvidenceKind::ANSWERED.0);
        // An established flow has already decided a trial, unless an answer decides it.
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

    /// Whether it can change the ejection word of a backend. Most evidence cannot.
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

/// Whether a backend was ejected for missing answers: accepting connections then does not show that
/// it works.
#[inline(always)]
const fn awaits_answer(before: EjectionState) -> bool {
    before.phase != EjectionPhase::Counting as u8 && before.ending == NO_ANSWER
}

/// The value of [`EjectionState::ending`] for established connections without an answer, in place
/// of the number of an [`Ending`]. The client determined how they ended.
pub const NO_ANSWER: u8 = 13;
const _: () = assert!(NO_ANSWER as usize == Ending::ALL.len());

/// The name of a backend's last failure in tables, JSON and metrics: that of an [`Ending`], or
/// `no-answer`.
pub fn name_of_failure(ending: u8) -> &'static str {
    match ending {
        NO_ANSWER => "no-answer",
        ending => Ending::ALL.get(usize::from(ending)).copied().unwrap_or(Ending::Unknown).name(),
    }
}

/// Which backend SYNs cannot be sent to, and whether that is this host's fault: a word of its
/// service.
///
/// A send failure counts against a backend as long as SYNs to other backends do not fail as well.
/// If one does, and no SYN was sent in between, this host cannot send at all: then no failure
/// counts until a SYN is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendFailures(pub u16);

impl SendFailures {
    /// No send failure is known.
    pub const NONE: Self = Self(0);
    /// SYNs to several backends cannot be sent.
    pub const HOST: Self = Self(u16::MAX);

    /// The word after a SYN to the backend in a slot could not be sent. The failure counts unless
    /// the result is [`SendFailures::HOST`].
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
    /// The backend should be ejected if one more may be; otherwise see [`withheld`].
    Eject,
    /// The backend stays ejected for longer.
    EjectLonger,
    /// The backend is readmitted.
    Readmit,
}

/// The number of failures in a row that ejects a backend.
#[inline(always)]
pub fn failures_to_eject(rules: EjectionRules, state: StateWord) -> u8 {
    doubled_if(rules.failures, (state.usable / Usable::PROBED_HEALTHY) & 1)
}

/// The number of failures in a row that ejects a backend: the number in the rules, doubled if the
/// daemon's probes find it healthy (`is_probed_healthy`, 1 or 0).
#[inline(always)]
pub fn doubled_if(failures: u8, is_probed_healthy: u8) -> u8 {
    // A shift in place of a branch. A run counts at most 255.
    at_most_255(u32::from(failures) << is_probed_healthy)
}

#[inline(always)]
fn at_most_255(number: u32) -> u8 {
    #[expect(clippy::cast_possible_truncation, reason = "the smaller of it and 255")]
    let number = smaller(u64::from(number), 255) as u8;
    number
}

/// The ejection word of a backend after evidence at the tick `now`, and the verdict. Evidence of
/// kind [`EvidenceKind::NONE`] leaves a trial [`undecided`].
///
/// If a run depends on requests, and a single process caused it, it does not eject: it stays one
/// failure below.
///
/// `state` is the backend's state word. If it is chosen although it is ejected
/// ([`Usable::EvenEjected`]), any flow that ends after the ejection's time counts like a trial. If
/// the ejection's time is over and the state word does not mark the backend as ejected, it is not
/// ejected: two CPUs that judge at the same moment may leave such words, because each stores the
/// state word after its compare-and-swap. `random` decides the jitter.
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
        // Accepting connections does not show that the backend answers them.
        let shows = if is_established {
            !awaits_answer(before)
        } else {
            !is_counting && evidence.kind.is(EvidenceKind::ANSWERED)
        };
        // A trial that is established after a later one has failed nevertheless shows that the
        // backend works.
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

/// The source of a backend's run of failures, including this failure. (Without branches: the
/// verifier would follow the subsequent code once per branch.)
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
    // Evidence of an established connection names no process and leaves the source unchanged.
    let is_none = is_below(u64::from(evidence.failure_source.0), 1);
    let several = u32::from(FailureSource::SEVERAL.0) * (is_another & (is_none ^ 1));
    #[expect(clippy::cast_possible_truncation, reason = "of bytes")]
    let failure_source =
        (u32::from(evidence.failure_source.0) | several | (u32::from(state.failure_source) * is_none)) as u8;
    FailureSource(failure_source)
}

/// The ejection word of a backend after a trial that decided nothing: the next connect is the next
/// trial.
#[inline(always)]
pub fn undecided(before: EjectionState, now: u32) -> EjectionState {
    if before.phase == EjectionPhase::Trial as u8 {
        EjectionState { at: now, phase: EjectionPhase::Ejected as u8, ..before }
    } else {
        before
    }
}

/// The ejection word of an ejected backend that ends its time at the tick `now`: something other
/// than its connects has shown that it may work again, so a trial is due.
#[inline(always)]
pub fn time_over(before: EjectionState, now: u32) -> EjectionState {
    if before.phase == EjectionPhase::Ejected as u8 { EjectionState { at: now, ..before } } else { before }
}

/// The ejection word in place of an ejection that is withheld: the run is unchanged, and the next
/// failure tries to eject again.
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

/// Number of doublings after which any time exceeds the longest configurable one.
const MOST_LEVELS: u8 = 31;

#[inline(always)]
const fn raised(level: u8) -> u8 {
    if level < MOST_LEVELS { level + 1 } else { level }
}

/// The random number that results in no jitter: the middle of the range.
pub const NO_JITTER: u32 = 1 << 31;

/// Ticks of an ejection: doubled for each level, with a jitter of up to a tenth, so that many
/// clients do not try ejected backends at the same moment.
#[inline(always)]
pub fn duration(level: u8, rules: EjectionRules, random: u32) -> u32 {
    let doubled = u64::from(rules.base) << (level & MOST_LEVELS);
    #[expect(clippy::cast_possible_truncation, reason = "at most the largest number of 32 bits")]
    let length = if doubled < u64::from(rules.max) { doubled as u32 } else { rules.max };
    let tenth = length / 10;
    // A fraction of 2^32 in place of a remainder: programs have no cheap division by a variable.
    let jitter = ((u64::from(random) * u64::from(2 * tenth + 1)) >> 32) as u32;
    length - tenth + jitter
}

/// Bits of the ticks of the longest configurable ejection: an hour and its jitter.
pub const EJECTION_BITS: u32 = 22;

/// The longest duration of an ejection, with jitter.
#[inline(always)]
pub(crate) const fn longest(rules: EjectionRules) -> u32 {
    rules.max.saturating_add(rules.max / 10 + 1)
}

/// Ticks until a time; 0 if it has passed, or if it is further ahead than an ejection can last.
#[inline(always)]
pub const fn left(at: u32, rules: EjectionRules, now: u32) -> u32 {
    let ahead = at.wrapping_sub(now);
    if ahead > longest(rules) { 0 } else { ahead }
}

/// Whether a time has passed.
#[inline(always)]
pub const fn is_over(at: u32, rules: EjectionRules, now: u32) -> bool {
    left(at, rules, now) == 0
}

/// Whether a failure was so long ago that the run starts again.
#[inline(always)]
const fn is_long_ago(at: u32, rules: EjectionRules, now: u32) -> bool {
    let since = now.wrapping_sub(at);
    // The clock may be a tick behind that of the programs before an upgrade: a time slightly ahead
    // is not long ago.
    since > rules.max && since < 0u32.wrapping_sub(longest(rules))
}

/// The ejection word of an ejected backend while a connect that begins now is its trial.
///
/// The trial may take as long as the last ejection. If it is undecided by then, it counts as a
/// failure, so that a client with a long timeout does not lose one connect after another to a
/// silent backend. A trial that begins early because no backend is well does not lengthen the
/// ejection by failing.
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

/// The event after which the next trial of a service is scheduled. Numbers can be passed to a
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

/// The next trial of a service, after a survey of all of its members. `before` is the previous
/// decision.
///
/// If no backend is well, trials come at least every `base`, so that the first backend to recover
/// is found soon.
///
/// As many connects as there are available backends come between two trials, unless the first trial
/// has readmitted its backend. Otherwise a client that connects rarely, or with trials that decide
/// nothing, would begin one trial after another. So a client never sends a larger part of its
/// connects to failing backends than it would without ejection.
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
