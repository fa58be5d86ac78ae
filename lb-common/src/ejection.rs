//! When a backend is ejected, and when it is taken back: a circuit breaker for each backend of a client task, run by the kernel
//! programs as flows end, and by the planner and the tests on the host.
//!
//! Failures make a leaky run: each adds to it, each connection that is established takes one away. A run of
//! [`failures`](EjectionRules::failures) ejects for [`base`](EjectionRules::base), twice as long each time that follows before the
//! run was back at 0, and at most for [`max`](EjectionRules::max). When the time is over one connect is let through, the
//! *trial*: if it is established the backend is taken back, if it fails the backend is ejected for twice as long. (Envoy's
//! outlier detection ejects as well; its hosts come back with the clock, not by a trial.)
//!
//! It knows no map and no clock: times are ticks, which begin anew after 52 days, so they are compared by their distance. One
//! that is further ahead than an ejection can last is over.

pub mod steps;

use crate::abi::{EjectionPhase, EjectionRules, EjectionState, NO_SLOT, NextTrial, StateWord, Usable};
use crate::ending::Ending;
use crate::pick::Survey;

/// What became of a flow, as its backend is judged by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// Whether it speaks for or against the backend.
    pub kind: EvidenceKind,
    /// Whether the flow was a trial.
    pub is_trial: bool,
    /// How it ended; of no meaning if it has not.
    pub ending: u8,
}

/// Whether it speaks for or against a backend. Numbers are those of [`Evidence::to_word`].
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvidenceKind {
    /// It says nothing; a trial that ends so has decided nothing.
    None = 0,
    /// A failure.
    Failure = 1,
    /// A failure that the connection's being established had spoken against: it weighs twice.
    FailureAfterEstablished = 2,
    /// The connection was established.
    Established = 3,
}

/// A reset counts against the backend if it comes so soon after the choice, and nothing was received: who accepts and then
/// resets at once does not serve. Later it is more likely the client's or a middlebox's doing.
const RESET_AT_ONCE_NS: u64 = 3_000_000_000;

impl Evidence {
    /// That a connection was established.
    #[inline(always)]
    pub const fn established(is_trial: bool) -> Self {
        Self { kind: EvidenceKind::Established, is_trial, ending: 0 }
    }

    /// What the end of a flow says that lasted so long and received so much. (Seldom asked how long: that takes a look at the
    /// clock.)
    #[inline(always)]
    pub fn of_end(
        ending: Ending,
        was_established: bool,
        is_trial: bool,
        lasted_ns: impl FnOnce() -> u64,
        bytes_received: u64,
    ) -> Self {
        let kind = match ending {
            Ending::Refused | Ending::TimedOut | Ending::Unreachable | Ending::Unanswered
                if !was_established =>
            {
                EvidenceKind::Failure
            }
            Ending::DataTimeout => EvidenceKind::Failure,
            Ending::Reset if was_established && bytes_received == 0 && lasted_ns() < RESET_AT_ONCE_NS => {
                EvidenceKind::FailureAfterEstablished
            }
            _ => EvidenceKind::None,
        };
        // What was established has decided a trial already.
        Self { kind, is_trial: is_trial && !was_established, ending: ending as u8 }
    }

    /// As one number, which is what a function of a kernel program can be given.
    #[inline(always)]
    pub const fn to_word(self) -> u32 {
        self.kind as u32 | (self.is_trial as u32) << 2 | (self.ending as u32) << 8
    }

    /// From that number.
    #[inline(always)]
    pub const fn from_word(word: u32) -> Self {
        let kind = match word & 3 {
            1 => EvidenceKind::Failure,
            2 => EvidenceKind::FailureAfterEstablished,
            3 => EvidenceKind::Established,
            _ => EvidenceKind::None,
        };
        #[expect(clippy::cast_possible_truncation, reason = "the second byte")]
        let ending = (word >> 8) as u8;
        Self { kind, is_trial: word & 4 != 0, ending }
    }

    /// Whether it can change anything of a backend that stands like this. Most of what happens cannot.
    #[inline(always)]
    pub fn matters(self, before: EjectionState) -> bool {
        match self.kind {
            EvidenceKind::Failure | EvidenceKind::FailureAfterEstablished => true,
            EvidenceKind::Established => before.to_word() != 0,
            EvidenceKind::None => self.is_trial,
        }
    }
}

/// What evidence makes of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing has changed.
    Unchanged,
    /// It is remembered, and the backend stays as it was.
    Remembered,
    /// The backend is to be ejected, if there is room for one more; see [`withheld`].
    Eject,
    /// The backend stays ejected, for longer.
    EjectLonger,
    /// The backend is taken back.
    Readmit,
}

/// How a backend stands after some evidence at the tick `now`, and what follows.
///
/// `state`: its state word. If it is chosen although it is ejected ([`Usable::EvenEjected`]), any flow that decides after the time of
/// the ejection is as good as a trial. And if the word does not say that it is ejected once that time is over, it is not: two CPUs
/// that judge at the same moment may leave that behind, for each stores the state word after its compare-and-swap. `random`:
/// decides the jitter.
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
    let is_overruled = state.usable == Usable::EvenEjected as u8;
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
    match evidence.kind {
        EvidenceKind::Established => {
            if matches!(phase, EjectionPhase::Counting) {
                let run = before.run.saturating_sub(1);
                let counting = EjectionPhase::Counting as u8;
                let after = EjectionState { run, phase: counting, ..before };
                let after = if run == 0 { EjectionState::default() } else { after };
                return if after.to_word() == before.to_word() {
                    unchanged
                } else {
                    (after, Verdict::Remembered)
                };
            }
            // A trial that is established after another one has failed shows all the same that the backend is well.
            if !decides && !evidence.is_trial {
                return unchanged;
            }
            let run = rules.failures.saturating_sub(2);
            let after = EjectionState { at: now, run, phase: EjectionPhase::Counting as u8, ..before };
            (after, Verdict::Readmit)
        }
        EvidenceKind::None if !evidence.is_trial => unchanged,
        EvidenceKind::None => match undecided(before, now) {
            after if after.to_word() == before.to_word() => unchanged,
            after => (after, Verdict::Remembered),
        },
        EvidenceKind::Failure | EvidenceKind::FailureAfterEstablished => {
            let before = EjectionState { ending: evidence.ending, ..before };
            if !matches!(phase, EjectionPhase::Counting) {
                return if decides {
                    (ejected(before, rules, now, random), Verdict::EjectLonger)
                } else {
                    unchanged
                };
            }
            let (run, level) =
                if is_long_ago(before.at, rules, now) { (0, 0) } else { (before.run, before.level) };
            let weight = if matches!(evidence.kind, EvidenceKind::FailureAfterEstablished) { 2 } else { 1 };
            let run = run.saturating_add(weight);
            let before = EjectionState { at: now, level, phase: EjectionPhase::Counting as u8, ..before };
            if run < rules.failures {
                return (EjectionState { run, ..before }, Verdict::Remembered);
            }
            (ejected(before, rules, now, random), Verdict::Eject)
        }
    }
}

/// How a backend stands after its trial has decided nothing: the next connect is the next one.
#[inline(always)]
pub fn undecided(before: EjectionState, now: u32) -> EjectionState {
    if before.phase == EjectionPhase::Trial as u8 {
        EjectionState { at: now, phase: EjectionPhase::Ejected as u8, ..before }
    } else {
        before
    }
}

/// How an ejected backend stands whose time is over at the tick `now`, because something else than its connects has shown that it
/// may be well again: a trial is due.
#[inline(always)]
pub fn time_over(before: EjectionState, now: u32) -> EjectionState {
    if before.phase == EjectionPhase::Ejected as u8 { EjectionState { at: now, ..before } } else { before }
}

/// In place of an ejection for which there is no room: the run stays where it is, and the next failure asks again.
#[inline(always)]
pub const fn withheld(ejected: EjectionState, before: EjectionState, now: u32) -> EjectionState {
    EjectionState { at: now, level: before.level, phase: EjectionPhase::Counting as u8, ..ejected }
}

/// How a backend stands that is ejected at the tick `now`.
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

/// Doublings after which any time is longer than the longest that can be asked for.
const MOST_LEVELS: u8 = 31;

#[inline(always)]
const fn raised(level: u8) -> u8 {
    if level < MOST_LEVELS { level + 1 } else { level }
}

/// In the middle of a jitter's range there is none.
pub const NO_JITTER: u32 = 1 << 31;

/// Ticks of an ejection: twice as many for each level, within a tenth more or less, so that ejected backends of many clients are
/// not all tried at the same moment.
#[inline(always)]
pub fn duration(level: u8, rules: EjectionRules, random: u32) -> u32 {
    let doubled = u64::from(rules.base) << (level & MOST_LEVELS);
    #[expect(clippy::cast_possible_truncation, reason = "at most the largest number of 32 bits")]
    let length = if doubled < u64::from(rules.max) { doubled as u32 } else { rules.max };
    let tenth = length / 10;
    // A part of 2^32 in place of a remainder: programs have no cheap division by what is not known.
    let jitter = ((u64::from(random) * u64::from(2 * tenth + 1)) >> 32) as u32;
    length - tenth + jitter
}

/// Bits of the ticks of the longest ejection that may be asked for: an hour and its jitter.
pub const EJECTION_BITS: u32 = 22;

/// The longest that an ejection can last.
#[inline(always)]
pub(crate) const fn longest(rules: EjectionRules) -> u32 {
    rules.max.saturating_add(rules.max / 10 + 1)
}

/// Ticks until a time; 0 if it has come, also if it is further ahead than an ejection can last.
#[inline(always)]
pub const fn left(at: u32, rules: EjectionRules, now: u32) -> u32 {
    let ahead = at.wrapping_sub(now);
    if ahead > longest(rules) { 0 } else { ahead }
}

/// Whether a time has come.
#[inline(always)]
pub const fn is_over(at: u32, rules: EjectionRules, now: u32) -> bool {
    left(at, rules, now) == 0
}

/// Whether a failure was so long ago that the run begins anew.
#[inline(always)]
const fn is_long_ago(at: u32, rules: EjectionRules, now: u32) -> bool {
    let since = now.wrapping_sub(at);
    // The clock may be a tick behind that of the programs before an upgrade: what is a little ahead is not long ago.
    since > rules.max && since < 0u32.wrapping_sub(longest(rules))
}

/// How an ejected backend stands while a connect that begins now is its trial.
///
/// The trial has as long to decide as the last ejection lasted. One that has not decided by then is as good as a failure, so
/// that the connects of a client whose timeout is long are not lost one after another to a backend that is silent. One that
/// comes before its time, where nobody is well, makes nothing longer by failing.
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

/// After what the next trial of a service is looked for. Numbers are those that a function of a kernel program is given.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A backend was ejected, or that it be ejected was withheld.
    Judged = 0,
    /// A trial has failed.
    TrialFailed = 1,
    /// A trial has begun.
    TrialBegan = 2,
    /// A backend was taken back.
    Readmitted = 3,
}

impl Event {
    /// From its number.
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

/// When the next trial of a service is due, and of whom, after a look at all of its members. `before`: what was decided last.
///
/// Where nobody is well, trials come at least every `base`, so that whoever recovers first is found soon.
///
/// Between two trials come as many connects as backends are available, unless the first has taken its backend back: a client
/// that connects rarely, or whose trials decide nothing, would begin one trial after another otherwise. So it never sends more
/// of its connects to backends that are ill than if nobody were ejected.
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
