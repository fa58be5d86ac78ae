//! Tests each rule by which a backend is ejected and readmitted, with ticks that wrap around.

use lb_common::abi::{BackendState, EjectionPhase, EjectionRules, EjectionState, StateWord, Usable};
use lb_common::ejection::{
    Evidence, EvidenceKind, FailureSource, NO_ANSWER, Verdict, duration, failure_source, is_over, left, next,
    on_trial, undecided, withheld,
};
use lb_common::ending::{End, Ending};
use lb_common::ticks::tick;
use proptest::prelude::*;

const BASE: u32 = 5_000;
const MAX: u32 = 300_000;
const RULES: EjectionRules = EjectionRules { base: BASE, max: MAX, failures: 5, hangs: 1, _reserved: [0; 2] };
/// The value of `random` that results in no jitter: the middle of the range.
const NO_JITTER: u32 = 1 << 31;
const NEW: EjectionState = EjectionState { at: 0, run: 0, level: 0, phase: 0, ending: 0 };

/// Failure sources: one process, and several processes.
const ONE: FailureSource = FailureSource::of(7);
const SEVERAL: FailureSource = FailureSource::SEVERAL;

const REFUSED: Evidence = Evidence {
    kind: EvidenceKind::FAILURE,
    is_trial: false,
    ending: Ending::Refused as u8,
    failure_source: ONE,
};
const SINKHOLE: Evidence = Evidence {
    kind: EvidenceKind::RESET,
    is_trial: false,
    ending: Ending::Reset as u8,
    failure_source: SEVERAL,
};
const ESTABLISHED: Evidence = Evidence::established(false);
const ANSWERED: Evidence = Evidence { kind: EvidenceKind::ANSWERED, ..ESTABLISHED };
const NO_ANSWER_EVIDENCE: Evidence =
    Evidence { kind: EvidenceKind::NO_ANSWER, is_trial: false, ending: NO_ANSWER, failure_source: SEVERAL };

/// A backend with its ejection word.
#[derive(Clone, Copy)]
struct Backend {
    state: EjectionState,
    now: u32,
}

/// The state word that matches an ejection word.
fn word(standing: EjectionState, usable: Usable) -> StateWord {
    let ejected = u8::from(standing.phase != EjectionPhase::Counting as u8);
    StateWord { ejected, ..StateWord::new(usable, BackendState::Member) }
}

impl Backend {
    fn word(&self) -> StateWord {
        word(self.state, Usable::UnlessEjected)
    }

    fn new(now: u32) -> Self {
        Self { state: NEW, now }
    }

    fn see(&mut self, evidence: Evidence) -> Verdict {
        if evidence.kind == EvidenceKind::NONE && evidence.is_trial {
            let before = self.state;
            self.state = undecided(before, self.now);
            return if before == self.state { Verdict::Unchanged } else { Verdict::Remembered };
        }
        let (state, verdict) = next(self.state, RULES, evidence, self.word(), self.now, NO_JITTER);
        self.state = state;
        verdict
    }

    fn ejected(now: u32) -> Self {
        let mut backend = Self::new(now);
        let verdicts = [(); 5].map(|()| backend.see(REFUSED));
        assert_eq!(verdicts[4], Verdict::Eject);
        assert!(verdicts[..4].iter().all(|verdict| *verdict == Verdict::Remembered));
        backend
    }

    fn try_it(&mut self) {
        assert!(is_over(self.state.at, RULES, self.now));
        self.state = on_trial(self.state, RULES, self.now);
    }

    fn phase(&self) -> EjectionPhase {
        EjectionPhase::from_u8(self.state.phase)
    }
}

fn of_end(end: End, is_trial: bool, lasted_ms: u64) -> Evidence {
    Evidence::of_end(end, is_trial, ONE, lasted_ms * 1_000_000)
}

fn of_trial(evidence: Evidence) -> Evidence {
    Evidence { is_trial: true, ..evidence }
}

#[test]
fn each_ending_gives_its_evidence() {
    const NONE: EvidenceKind = EvidenceKind::NONE;
    const FAILURE: EvidenceKind = EvidenceKind::FAILURE;
    for ending in Ending::ALL {
        let kind = |was_established, lasted_ms: u64, received| {
            let end = End::of(ending, was_established).with_bytes(received, 0);
            of_end(end, false, lasted_ms).kind
        };
        let before = match ending {
            Ending::Refused
            | Ending::TimedOut
            | Ending::Unreachable
            | Ending::Unanswered
            | Ending::DataTimeout => FAILURE,
            _ => NONE,
        };
        assert_eq!(kind(false, 0, 0), before, "{ending:?} before the connection was established");
        assert_eq!(kind(false, 200_000, 0), before, "{ending:?}");
        let (at_once, later) = match ending {
            Ending::Reset => (EvidenceKind::RESET, NONE),
            Ending::DataTimeout => (FAILURE, FAILURE),
            _ => (NONE, NONE),
        };
        assert_eq!([kind(true, 0, 0), kind(true, 2_999, 0)], [at_once; 2], "{ending:?} at once");
        assert_eq!(
            [kind(true, 3_000, 0), kind(true, 60_000, 0), kind(true, 0, 1)],
            [later; 3],
            "{ending:?} later"
        );
        // An established flow has already decided the trial.
        assert!(!of_end(End::of(ending, true), true, 0).is_trial);
        assert!(of_end(End::of(ending, false), true, 0).is_trial);
    }
}

#[test]
fn evidence_survives_a_round_trip_as_a_number() {
    for kind in [
        EvidenceKind::NONE,
        EvidenceKind::FAILURE,
        EvidenceKind::RESET,
        EvidenceKind::NO_ANSWER,
        EvidenceKind::SEND_FAILED,
        EvidenceKind::ESTABLISHED,
        EvidenceKind::ANSWERED,
    ] {
        for is_trial in [false, true] {
            for (ending, failure_source) in [(0, 255), (12, 0), (255, 7)] {
                let evidence =
                    Evidence { kind, is_trial, ending, failure_source: FailureSource(failure_source) };
                assert_eq!(Evidence::from_word(evidence.to_word()), evidence);
            }
        }
    }
}

#[test]
fn five_failures_in_a_row_eject_and_store_the_last_ending() {
    let backend = Backend::ejected(77);
    let expected = EjectionState {
        at: 77 + BASE,
        run: 5,
        level: 1,
        phase: EjectionPhase::Ejected as u8,
        ending: Ending::Refused as u8,
    };
    assert_eq!(backend.state, expected);
}

#[test]
fn a_sinkhole_is_ejected_after_four_serial_or_three_parallel_connects() {
    let mut backend = Backend::new(9);
    let turns = (1..).find(|_| {
        backend.see(ESTABLISHED);
        backend.see(SINKHOLE) == Verdict::Eject
    });
    assert_eq!(turns, Some(4));
    let mut backend = Backend::new(9);
    for _ in 0..3 {
        backend.see(ESTABLISHED);
    }
    assert_eq!([(); 3].map(|()| backend.see(SINKHOLE))[2], Verdict::Eject);
}

#[test]
fn one_failure_in_a_thousand_never_ejects() {
    let mut backend = Backend::new(9);
    for round in 0..10_000u32 {
        for _ in 0..999 {
            assert_ne!(backend.see(ESTABLISHED), Verdict::Eject);
        }
        backend.now += 10;
        assert_eq!(backend.see(REFUSED), Verdict::Remembered, "round {round}");
        assert_eq!(backend.state.run, 1);
    }
}

#[test]
fn a_failure_long_after_the_last_one_begins_a_new_run() {
    let mut backend = Backend::new(9);
    for _ in 0..100 {
        assert_eq!(backend.see(REFUSED), Verdict::Remembered);
        assert_eq!(backend.state.run, 1, "rare failures eject no backend");
        backend.now = backend.now.wrapping_add(MAX + 1);
    }
    let mut backend = Backend::new(9);
    for expected in [1, 2, 3, 4] {
        backend.see(REFUSED);
        assert_eq!(backend.state.run, expected);
        backend.now += MAX;
    }
    assert_eq!(backend.see(REFUSED), Verdict::Eject);
    // A backend that is ejected or on trial retains its run, even if the last failure was long ago.
    backend.now = backend.state.at.wrapping_add(10 * MAX);
    backend.try_it();
    assert_eq!(backend.see(of_trial(REFUSED)), Verdict::EjectLonger);
    assert_eq!((backend.state.run, backend.state.level), (5, 2));
}

#[test]
fn ejections_double_until_the_run_ends() {
    let mut backend = Backend::ejected(0);
    let mut times = vec![backend.state.at - backend.now];
    for _ in 0..8 {
        backend.now = backend.state.at;
        backend.try_it();
        assert_eq!(backend.see(of_trial(REFUSED)), Verdict::EjectLonger);
        times.push(backend.state.at - backend.now);
    }
    assert_eq!(times, [1, 2, 4, 8, 16, 32, 60, 60, 60].map(|factor| factor * BASE));
    // After a readmission, two more failures eject the backend again, at its previous level.
    backend.now = backend.state.at;
    backend.try_it();
    assert_eq!(backend.see(of_trial(ESTABLISHED)), Verdict::Readmit);
    assert_eq!((backend.phase(), backend.state.run), (EjectionPhase::Counting, 3));
    let mut again = backend;
    assert_eq!([(); 2].map(|()| again.see(REFUSED)), [Verdict::Remembered, Verdict::Eject]);
    assert_eq!(again.state.at - again.now, MAX);
    // Three established connections end the run of failures.
    for left in [2, 1, 0] {
        backend.see(ESTABLISHED);
        assert_eq!(backend.state.run, left);
    }
    assert_eq!(backend.state, NEW);
}

#[test]
fn ejections_double_for_small_numbers_of_failures() {
    for failures in [1, 2] {
        let rules = EjectionRules { failures, ..RULES };
        let see = |state, evidence, now| {
            next(state, rules, evidence, word(state, Usable::UnlessEjected), now, NO_JITTER)
        };
        let mut state = NEW;
        for _ in 0..failures {
            state = see(state, REFUSED, 0).0;
        }
        assert_eq!(state.at, BASE);
        let (state, verdict) = see(on_trial(state, rules, BASE), of_trial(ESTABLISHED), BASE);
        assert_eq!((verdict, state.run), (Verdict::Readmit, 0));
        let mut again = state;
        for _ in 0..failures {
            again = see(again, REFUSED, BASE).0;
        }
        assert_eq!(again.at - BASE, 2 * BASE, "the run of failures continues");
        assert_eq!(see(state, ESTABLISHED, BASE).0, NEW, "the connection ends the run of failures");
    }
}

#[test]
fn an_undecided_trial_passes_to_the_next_connect() {
    let mut backend = Backend::ejected(0);
    backend.now = backend.state.at;
    backend.try_it();
    assert!(!is_over(backend.state.at, RULES, backend.now + BASE - 1), "the trial may take BASE ticks");
    assert!(is_over(backend.state.at, RULES, backend.now + BASE));
    let undecided = of_end(End::of(Ending::GaveUp, false), true, 0);
    backend.now += 3;
    assert_eq!(backend.see(undecided), Verdict::Remembered);
    assert!(backend.phase() == EjectionPhase::Ejected && is_over(backend.state.at, RULES, backend.now));
    assert_eq!(backend.state.level, 1);
    // The end of a further trial changes nothing, because no trial is running.
    assert_eq!(backend.see(undecided), Verdict::Unchanged);
}

#[test]
fn a_trial_that_takes_too_long_counts_as_failed() {
    let mut backend = Backend::ejected(0);
    let mut time = BASE;
    for trial in 1..=8 {
        backend.now = backend.state.at;
        backend.state = on_trial(backend.state, RULES, backend.now);
        assert_eq!(backend.state.at - backend.now, time.min(RULES.max), "trial {trial}");
        assert_eq!(backend.state.level, trial);
        time *= 2;
    }
    // If the first trial is established later, the backend is still readmitted.
    assert_eq!(backend.see(of_trial(ESTABLISHED)), Verdict::Readmit);
}

#[test]
fn an_early_trial_does_not_lengthen_the_ejection() {
    let mut backend = Backend::ejected(0);
    for _ in 0..10 {
        backend.now += 1;
        backend.state = on_trial(backend.state, RULES, backend.now);
        assert_eq!(backend.see(of_trial(REFUSED)), Verdict::EjectLonger);
        assert_eq!((backend.state.at - backend.now, backend.state.level), (BASE, 1));
    }
    backend.now = backend.state.at;
    backend.try_it();
    assert_eq!(backend.see(of_trial(REFUSED)), Verdict::EjectLonger);
    assert_eq!((backend.state.at - backend.now, backend.state.level), (2 * BASE, 2));
}

#[test]
fn only_the_trial_decides_about_an_ejected_backend() {
    let mut backend = Backend::ejected(0);
    let before = backend.state;
    for _ in 0..100 {
        assert_eq!(backend.see(REFUSED), Verdict::Unchanged, "flows that began before the ejection");
        assert_eq!(backend.see(ESTABLISHED), Verdict::Unchanged);
    }
    backend.now = backend.state.at;
    assert_eq!(
        backend.see(REFUSED),
        Verdict::Unchanged,
        "the ejection's time is over, but no trial has begun"
    );
    backend.try_it();
    let on_trial = backend.state;
    assert_eq!(backend.see(REFUSED), Verdict::Unchanged);
    assert_eq!(backend.see(ESTABLISHED), Verdict::Unchanged);
    assert_eq!(backend.state, on_trial);
    // If a trial is established after the backend is no longer on trial, the backend is readmitted.
    backend.state = before;
    assert_eq!(backend.see(of_trial(ESTABLISHED)), Verdict::Readmit);
}

#[test]
fn any_flow_decides_after_the_time_of_an_overruled_ejection() {
    let ejected = Backend::ejected(0);
    let see = |evidence, now| {
        next(ejected.state, RULES, evidence, word(ejected.state, Usable::EvenEjected), now, NO_JITTER)
    };
    for evidence in [REFUSED, ESTABLISHED] {
        assert_eq!(see(evidence, BASE - 1), (ejected.state, Verdict::Unchanged));
    }
    assert_eq!(see(REFUSED, BASE).1, Verdict::EjectLonger);
    assert_eq!(see(ESTABLISHED, BASE).1, Verdict::Readmit);
}

#[test]
fn a_withheld_ejection_continues_to_count_failures() {
    let mut backend = Backend::new(9);
    for _ in 0..4 {
        backend.see(REFUSED);
    }
    for _ in 0..10 {
        let before = backend.state;
        backend.now += 1;
        let (after, verdict) =
            next(before, RULES, REFUSED, word(before, Usable::UnlessEjected), backend.now, NO_JITTER);
        assert_eq!(verdict, Verdict::Eject);
        backend.state = withheld(after, before, backend.now);
        assert_eq!(
            (backend.phase(), backend.state.run, backend.state.level),
            (EjectionPhase::Counting, 5, 0)
        );
        assert_eq!(backend.state.at, backend.now);
    }
    backend.see(ESTABLISHED);
    assert_eq!(backend.state.run, 4);
}

#[test]
fn a_backend_without_the_ejected_mark_counts_again_after_its_time() {
    let not_ejected = word(NEW, Usable::UnlessEjected);
    let over = MAX + MAX / 10 + 2;
    for trial in [false, true] {
        let mut backend = Backend::ejected(9);
        if trial {
            backend.now = backend.state.at;
            backend.try_it();
        }
        let see = |evidence, now| next(backend.state, RULES, evidence, not_ejected, now, NO_JITTER);
        // Before the ejection's time is over, another CPU may be about to store the state byte.
        assert_eq!(see(REFUSED, backend.now), (backend.state, Verdict::Unchanged));
        let later = backend.now + over;
        let (state, verdict) = see(REFUSED, later);
        assert_eq!((verdict, state.run, state.level), (Verdict::Remembered, 1, 0));
        assert_eq!(state.phase, EjectionPhase::Counting as u8);
        let (state, verdict) = see(ESTABLISHED, later);
        assert_eq!((verdict, state.run), (Verdict::Remembered, 4));
        assert_eq!(state.phase, EjectionPhase::Counting as u8);
        // If the ejection's time has been over only briefly, the run of failures continues, and the
        // next failure ejects the backend.
        assert_eq!(see(REFUSED, backend.state.at).1, Verdict::Eject);
    }
}

#[test]
fn rules_without_failures_store_nothing() {
    let rules = EjectionRules::default();
    for evidence in [REFUSED, SINKHOLE, ESTABLISHED, of_trial(REFUSED)] {
        assert_eq!(
            next(NEW, rules, evidence, word(NEW, Usable::UnlessEjected), 9, 9),
            (NEW, Verdict::Unchanged)
        );
    }
}

#[test]
fn long_silence_neither_ejects_nor_prolongs_an_ejection() {
    const DAY_NS: u64 = 86_400_000_000_000;
    for start in [9, u32::MAX - 100, 1 << 31] {
        for days in [1, 20, 26, 30, 50, 60, 400] {
            let later = start.wrapping_add(tick(days * DAY_NS));
            let mut backend = Backend::ejected(start);
            assert!(is_over(backend.state.at, RULES, later), "{days} days: a trial is due at once");
            backend.now = later;
            backend.try_it();
            backend.see(of_trial(ESTABLISHED));
            assert_eq!(backend.state.run, 3);
            let mut backend = Backend::new(start);
            for _ in 0..4 {
                backend.see(REFUSED);
            }
            backend.now = later;
            assert_eq!(backend.see(REFUSED), Verdict::Remembered, "{days} days: a new run begins");
            assert_eq!(backend.state.run, 1);
        }
    }
    // After an upgrade the clock may be a tick behind the clock of the previous programs.
    let mut backend = Backend::new(9);
    for _ in 0..4 {
        backend.see(REFUSED);
    }
    backend.now -= 1;
    assert_eq!(backend.see(REFUSED), Verdict::Eject);
}

#[test]
fn a_probed_healthy_backend_needs_twice_as_many_failures() {
    let mut backend = Backend::new(0);
    let probed_healthy =
        StateWord { usable: backend.word().usable | Usable::PROBED_HEALTHY, ..backend.word() };
    let mut see = || {
        let (state, verdict) = next(backend.state, RULES, REFUSED, probed_healthy, 0, NO_JITTER);
        backend.state = state;
        verdict
    };
    let verdicts = [(); 10].map(|()| see());
    assert!(verdicts[..9].iter().all(|verdict| *verdict == Verdict::Remembered));
    assert_eq!(verdicts[9], Verdict::Eject);
}

#[test]
fn failures_that_a_single_process_can_cause_do_not_eject() {
    for evidence in [SINKHOLE, NO_ANSWER_EVIDENCE] {
        let mut backend = Backend::new(0);
        for _ in 0..20 {
            assert_eq!(backend.see(Evidence { failure_source: ONE, ..evidence }), Verdict::Remembered);
        }
        assert_eq!(backend.state.run, RULES.failures - 1);
        assert_eq!(backend.see(evidence), Verdict::Eject, "a flow of another process fails in the same way");
    }
    // A refusal does not depend on the data that the client sends.
    let mut backend = Backend::new(0);
    assert_eq!([(); 5].map(|()| backend.see(REFUSED))[4], Verdict::Eject);
}

#[test]
fn the_failure_source_lasts_as_long_as_the_run() {
    let of = |before: EjectionState, made_by: FailureSource, by: FailureSource, now| {
        let state = StateWord { failure_source: made_by.0, ..word(before, Usable::UnlessEjected) };
        failure_source(before, RULES, Evidence { failure_source: by, ..REFUSED }, state, now)
    };
    let running = EjectionState { at: 100, run: 2, ..NEW };
    let other = FailureSource::of(8);
    assert_eq!(of(NEW, other, ONE, 100), ONE, "the stored source is of an earlier run");
    assert_eq!(of(running, ONE, ONE, 100), ONE);
    assert_eq!(of(running, other, ONE, 100), SEVERAL);
    assert_eq!(of(running, SEVERAL, ONE, 100), SEVERAL);
    assert_eq!(of(running, other, ONE, 101 + MAX), ONE, "the last failure was long ago");
    assert_eq!(of(running, other, FailureSource::default(), 100), other, "the evidence contains no source");
}

#[test]
fn only_an_answer_readmits_a_backend_ejected_for_missing_answers() {
    let mut backend = Backend::new(0);
    assert_eq!([(); 3].map(|()| backend.see(NO_ANSWER_EVIDENCE))[2], Verdict::Eject);
    backend.now = backend.state.at;
    backend.try_it();
    assert_eq!(
        backend.see(of_trial(ESTABLISHED)),
        Verdict::Unchanged,
        "the backend also accepted connections while it did not answer"
    );
    assert_eq!(backend.see(of_trial(NO_ANSWER_EVIDENCE)), Verdict::EjectLonger);
    backend.now = backend.state.at;
    backend.try_it();
    assert_eq!(backend.see(of_trial(ANSWERED)), Verdict::Readmit);
    // With `hangs` 0, a missing answer is no failure.
    let rules = EjectionRules { hangs: 0, ..RULES };
    let word = word(NEW, Usable::UnlessEjected);
    assert_eq!(next(NEW, rules, NO_ANSWER_EVIDENCE, word, 0, NO_JITTER), (NEW, Verdict::Unchanged));
}

#[test]
fn an_answer_is_missing_only_after_half_a_second() {
    let end = End::of(Ending::Closed, true).with_bytes(0, 7);
    assert_eq!(of_end(end, false, 499).kind, EvidenceKind::NONE);
    assert_eq!(
        of_end(end, true, 500),
        Evidence { is_trial: true, failure_source: ONE, ..NO_ANSWER_EVIDENCE }
    );
    assert_eq!(of_end(end.with_bytes(9, 7), true, 500).kind, EvidenceKind::ANSWERED);
    assert_eq!(of_end(End::of(Ending::NotSent, false), false, 0).kind, EvidenceKind::NONE, "deferred SYN");
    let send_failures = End::of(Ending::NotSent, false).send_failed_if(true);
    assert_eq!(of_end(send_failures, false, 0).kind, EvidenceKind::SEND_FAILED);
}

proptest! {
    /// Ticks wrap around after 52 days: an ejection has the same duration at any tick.
    #[test]
    fn the_duration_of_an_ejection_is_independent_of_the_tick(now: u32, level in 0u8..40, random: u32, base in 1u32..1_000_000, factor in 1u32..1000) {
        let rules = EjectionRules { base, max: base.saturating_mul(factor).min(4_000_000).max(base), ..RULES };
        let whole = (u64::from(base) << level.min(31)).min(u64::from(rules.max)) as f64;
        let lasts = duration(level.min(31), rules, random);
        prop_assert!((f64::from(lasts) - whole).abs() <= whole / 10.0 + 1.0, "{} ticks, not within 10 % of {}", lasts, whole);
        let until = now.wrapping_add(lasts);
        prop_assert_eq!(left(until, rules, now), lasts);
        prop_assert!(lasts == 0 || !is_over(until, rules, until.wrapping_sub(1)));
        prop_assert!(is_over(until, rules, until));
        prop_assert!(is_over(until, rules, until.wrapping_add(rules.max)));
    }

    /// For all events in any order, the run of failures never exceeds the number that ejects, and
    /// after enough established connections the ejection word is all zero.
    #[test]
    fn no_sequence_of_events_breaks_the_ejection_word(kinds in prop::collection::vec((0u32..7, any::<bool>(), 0u32..20_000, any::<bool>(), any::<bool>(), any::<u32>()), 0..200)) {
        let mut backend = Backend::new(5);
        for (kind, is_trial, later, overruled, was_ejected, random) in kinds {
            backend.now = backend.now.wrapping_add(later);
            if backend.phase() != EjectionPhase::Counting && is_over(backend.state.at, RULES, backend.now) {
                backend.state = on_trial(backend.state, RULES, backend.now);
            }
            let evidence = Evidence { is_trial, ..Evidence::from_word(kind) };
            let usable = if overruled { Usable::EvenEjected } else { Usable::UnlessEjected };
            let word = StateWord { ejected: u8::from(was_ejected), ..StateWord::new(usable, BackendState::Member) };
            let (state, verdict) = next(backend.state, RULES, evidence, word, backend.now, random);
            prop_assert!(state.run <= RULES.failures);
            prop_assert!(verdict != Verdict::Unchanged || state == backend.state);
            if verdict == Verdict::Eject || verdict == Verdict::EjectLonger {
                prop_assert_eq!(EjectionPhase::from_u8(state.phase), EjectionPhase::Ejected);
            }
            backend.state = state;
        }
        if backend.phase() != EjectionPhase::Counting {
            backend.see(of_trial(ANSWERED));
        }
        for _ in 0..6 {
            backend.see(ESTABLISHED);
        }
        prop_assert_eq!(backend.state, NEW);
    }
}
