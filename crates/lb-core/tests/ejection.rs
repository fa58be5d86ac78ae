//! Ejection with the steps of the kernel programs: how the state of a service changes with evidence
//! on its backends.

use std::sync::Arc;

use lb_common::abi::{
    BackendState, DaemonState, EjectionPhase, EjectionRules, EjectionState, NextTrial, StateWord, Usable,
};
use lb_common::ejection::{
    Evidence, EvidenceKind, FailureSource, NO_ANSWER, Verdict, is_over, next, on_trial, undecided, withheld,
};
use lb_common::ending::Ending;
use lb_core::ejection::{Ejector, Judgement};
use lb_core::ids::Slot;
use proptest::prelude::*;

const BASE: u32 = 5_000;
const RULES: EjectionRules =
    EjectionRules { base: BASE, max: 300_000, failures: 5, hangs: 1, _reserved: [0; 2] };
/// The middle of the range of random numbers, which means no jitter.
const NO_JITTER: u32 = 1 << 31;
const ONE: FailureSource = FailureSource::of(7);
const REFUSED: Evidence = Evidence {
    kind: EvidenceKind::FAILURE,
    is_trial: false,
    ending: Ending::Refused as u8,
    failure_source: ONE,
};
const ESTABLISHED: Evidence = Evidence::established(false);
const UNDECIDED: Evidence =
    Evidence { kind: EvidenceKind::NONE, is_trial: true, ending: Ending::GaveUp as u8, failure_source: ONE };

fn of_trial(evidence: Evidence) -> Evidence {
    Evidence { is_trial: true, ..evidence }
}

fn service(rules: EjectionRules, backends: u32) -> Ejector {
    let mut service = Ejector::new(rules);
    let slots: Vec<Slot> = Slot::below(backends).collect();
    let length = backends.next_power_of_two().max(64) as usize;
    service.publish(slots.iter().copied().cycle().take(length).collect::<Arc<[Slot]>>(), &[], None);
    for slot in slots {
        service.set_state(slot.number(), DaemonState::new(Usable::UnlessEjected, BackendState::Member));
    }
    service
}

fn fail(service: &mut Ejector, slot: u32, now: u32) -> Vec<Judgement> {
    (0..RULES.failures).map(|_| service.report(slot, REFUSED, now, NO_JITTER)).collect()
}

fn ejected(service: &Ejector, backends: u32) -> u32 {
    (0..backends).map(|slot| u32::from(service.state(slot).ejected)).sum()
}

fn never(_: u32) -> bool {
    false
}

/// Makes the connects between two trials: one for each other available backend.
#[track_caller]
fn let_others_go_first(service: &mut Ejector, others: u16, now: u32) {
    assert_eq!(service.next_trial().others, others);
    for _ in 0..others {
        assert_eq!(service.due_trial(now, never), None);
    }
}

#[test]
fn a_backend_is_ejected_tried_and_readmitted() {
    use Judgement::{Ejected, EjectedLonger, Readmitted, Remembered, Unchanged};
    let mut service = service(RULES, 4);
    assert_eq!(fail(&mut service, 1, 7), [Remembered, Remembered, Remembered, Remembered, Ejected]);
    assert_eq!(service.next_trial(), NextTrial::of(1, 7 + BASE, 0));
    assert_eq!(
        service.report(1, REFUSED, 8, NO_JITTER),
        Unchanged,
        "this connect was under way before the ejection"
    );
    assert_eq!(service.due_trial(6 + BASE, never), None);
    assert_eq!(service.due_trial(7 + BASE, never), Some(1));
    assert_eq!(service.due_trial(7 + BASE, never), None, "one connect is the trial");
    assert_eq!(service.report(1, of_trial(REFUSED), 8 + BASE, NO_JITTER), EjectedLonger);
    let now = 8 + 3 * BASE;
    assert_eq!(service.next_trial(), NextTrial::of(1, now, 3));
    let_others_go_first(&mut service, 3, 9 + BASE);
    assert_eq!(service.due_trial(now - 1, never), None);
    assert_eq!(service.due_trial(now, never), Some(1));
    assert_eq!(service.report(1, of_trial(ESTABLISHED), now, NO_JITTER), Readmitted);
    assert_eq!((service.state(1).ejected, service.next_trial()), (0, NextTrial::default()));
    assert_eq!([(); 2].map(|()| service.report(1, REFUSED, now, NO_JITTER)), [Remembered, Ejected]);
    // The slot gets another backend.
    service.clear(1);
    assert_eq!((service.state(1).ejected, service.standing(1)), (0, EjectionState::default()));
}

#[test]
fn an_undecided_trial_is_soon_repeated_by_another_connect() {
    let mut service = service(RULES, 4);
    fail(&mut service, 1, 0);
    assert_eq!(service.due_trial(BASE, never), Some(1));
    assert_eq!(service.report(1, UNDECIDED, BASE + 9, NO_JITTER), Judgement::Remembered);
    let_others_go_first(&mut service, 3, BASE + 9);
    assert_eq!(service.due_trial(BASE + 9, never), Some(1));
    let_others_go_first(&mut service, 3, BASE + 9);
    // A trial may last at most as long as the first ejection.
    assert_eq!(service.due_trial(2 * BASE + 8, never), None);
    assert_eq!(service.due_trial(2 * BASE + 9, never), Some(1));
    let_others_go_first(&mut service, 3, 2 * BASE + 9);
    // A trial that takes longer is treated as failed, so the next trial may last twice as long.
    assert_eq!(service.due_trial(4 * BASE + 8, never), None);
    assert_eq!(service.due_trial(4 * BASE + 9, never), Some(1));
}

#[test]
fn a_trial_waits_while_its_backend_is_at_the_limit() {
    let mut service = service(RULES, 4);
    fail(&mut service, 1, 0);
    assert_eq!(service.due_trial(BASE, |slot| slot == 1), None);
    assert_eq!(service.due_trial(BASE, never), None, "no trial may begin before the next due time");
    assert_eq!(service.due_trial(2 * BASE, never), Some(1));
}

#[test]
fn all_but_the_last_are_ejected() {
    for backends in [1, 2, 3, 10, 256] {
        let mut service = service(RULES, backends);
        for slot in 0..backends {
            let last = fail(&mut service, slot, 0).pop();
            let expected = if slot + 1 < backends { Judgement::Ejected } else { Judgement::Withheld };
            assert_eq!(last, Some(expected), "slot {slot} of {backends} backends");
        }
        assert_eq!(ejected(&service, backends), backends - 1);
    }
}

#[test]
fn without_a_healthy_backend_trials_are_at_most_one_base_apart() {
    let mut service = service(RULES, 4);
    (0..4).for_each(|slot| drop(fail(&mut service, slot, 0)));
    let mut trials = Vec::new();
    // There is one connect per tick: a trial, or a connect to the backend that could not be
    // ejected.
    for now in 0..40 * BASE {
        if let Some(slot) = service.due_trial(now, never) {
            trials.push((now, slot));
            service.report(slot, of_trial(REFUSED), now, NO_JITTER);
        } else {
            service.report(3, REFUSED, now, NO_JITTER);
        }
    }
    assert!(trials.iter().zip(&trials[1..]).all(|(one, next)| next.0 - one.0 <= BASE + 1), "{trials:?}");
    for slot in [0, 1, 2] {
        assert!(trials.iter().filter(|(_, tried)| *tried == slot).count() > 10, "{trials:?}");
    }
    // One backend has recovered: trials come when the ejections are over.
    service.report(3, ESTABLISHED, 40 * BASE, NO_JITTER);
    let (first, slot) =
        (40 * BASE..).find_map(|now| Some((now, service.due_trial(now, never)?))).expect("a trial is due");
    assert!(first <= 41 * BASE);
    service.report(slot, of_trial(REFUSED), first, NO_JITTER);
    let left = service.next_trial().at - first;
    assert!(left > BASE, "{left} ticks until the next trial");
}

#[test]
fn rare_connects_still_readmit_a_recovered_backend() {
    let mut service = service(RULES, 2);
    let mut now = 0;
    let mut connect = |service: &mut Ejector, is_well: bool| {
        now += BASE + 1;
        let tried = service.due_trial(now, never);
        // Without a trial, the connect goes to the backend that is not ejected. The backend in slot
        // 1 recovers.
        let slot = tried.unwrap_or_else(|| {
            (0..2).find(|slot| service.state(*slot).ejected == 0).expect("one backend is not ejected")
        });
        let evidence = if slot == 1 && is_well { ESTABLISHED } else { REFUSED };
        let evidence = Evidence { is_trial: tried.is_some(), ..evidence };
        service.report(slot, evidence, now, NO_JITTER);
        evidence.kind == EvidenceKind::ESTABLISHED
    };
    fail(&mut service, 0, 0);
    for _ in 0..100 {
        connect(&mut service, false);
    }
    assert!(service.state(0).ejected == 1 && service.standing(1).run == RULES.failures);
    let passed = (0..100).filter(|_| connect(&mut service, true)).count();
    assert!(passed > 90, "{passed} of 100 connects passed");
}

/// Ejection must not increase connects to dead backends at any rate of connects, with any results
/// of trials, and with any number of dead backends.
#[test]
fn ejection_never_increases_connects_to_dead_backends() {
    for (backends, dead, evidence) in
        [(5, 1, REFUSED), (5, 1, UNDECIDED), (10, 5, REFUSED), (10, 5, UNDECIDED), (2, 1, REFUSED)]
    {
        let evidence = of_trial(evidence);
        for pause in [1, BASE / 2, BASE + 1, 2 * RULES.max] {
            let mut service = service(RULES, backends);
            // The backends were ejected for the longest time, while the client made many connects.
            (0..dead).for_each(|slot| drop(fail(&mut service, slot, 0)));
            assert_eq!(ejected(&service, backends), dead);
            let mut now = 0;
            while service.standing(0).level < 8 {
                now += 1;
                if let Some(slot) = service.due_trial(now, never) {
                    service.report(slot, of_trial(REFUSED), now, NO_JITTER);
                }
            }
            const CONNECTS: u32 = 300;
            let mut to_dead = 0;
            for _ in 0..CONNECTS {
                now += pause;
                if let Some(slot) = service.due_trial(now, never) {
                    to_dead += 1;
                    service.report(slot, evidence, now, NO_JITTER);
                }
            }
            let most = CONNECTS * dead / backends + 1;
            assert!(
                to_dead <= most,
                "{to_dead} of {CONNECTS} connects to {dead} dead of {backends} backends, {evidence:?}, pause {pause}"
            );
        }
    }
}

/// After a trial that readmits a backend, the next trial is due at once.
#[test]
fn backends_that_recover_together_are_readmitted_one_after_another() {
    let mut service = service(RULES, 10);
    (0..5).for_each(|slot| drop(fail(&mut service, slot, 0)));
    for _ in 0..5 {
        let slot = service.due_trial(BASE, never).expect("a trial is due");
        assert_eq!(service.report(slot, of_trial(ESTABLISHED), BASE, NO_JITTER), Judgement::Readmitted);
    }
    assert_eq!(ejected(&service, 10), 0);
}

#[test]
fn above_256_members_a_backend_is_tried_when_its_turn_comes() {
    let mut service = service(RULES, 257);
    assert_eq!(fail(&mut service, 256, 0).pop(), Some(Judgement::Ejected));
    assert_eq!(service.next_trial(), NextTrial::default());
    assert!(!service.begin_trial(256, BASE - 1) && service.begin_trial(256, BASE));
    assert!(!service.begin_trial(256, BASE + 1), "one connect is the trial");
    assert_eq!(service.report(256, of_trial(ESTABLISHED), BASE, NO_JITTER), Judgement::Readmitted);
}

const SEND_FAILED: Evidence = Evidence {
    kind: EvidenceKind::SEND_FAILED,
    is_trial: false,
    ending: Ending::NotSent as u8,
    failure_source: ONE,
};
/// Data from several processes of the client had no answer.
const UNANSWERED: Evidence = Evidence {
    kind: EvidenceKind::NO_ANSWER,
    ending: NO_ANSWER,
    failure_source: FailureSource::SEVERAL,
    ..SEND_FAILED
};

#[test]
fn send_failures_to_one_backend_eject_it() {
    let service = service(RULES, 3);
    for failure in 1..=RULES.failures {
        let judgement = service.report(1, SEND_FAILED, 0, NO_JITTER);
        let expected = if failure == 5 { Judgement::Ejected } else { Judgement::Remembered };
        assert_eq!(judgement, expected);
        service.sent();
    }
}

#[test]
fn send_failures_to_all_backends_eject_none() {
    let service = service(RULES, 3);
    // The first picks are all of one backend, and the later picks are of other backends.
    for _ in 0..5 {
        service.report(1, SEND_FAILED, 0, NO_JITTER);
    }
    assert_eq!(ejected(&service, 3), 1);
    for slot in [0, 2].into_iter().cycle().take(20) {
        assert_eq!(service.report(slot, SEND_FAILED, 1, NO_JITTER), Judgement::Unchanged);
    }
    assert_eq!((ejected(&service, 3), service.standing(1)), (0, EjectionState::default()));
    // After a SYN to any backend was sent, failures are counted again.
    service.sent();
    assert_eq!(service.report(0, SEND_FAILED, 2, NO_JITTER), Judgement::Remembered);
}

#[test]
fn a_missing_answer_is_counted_only_while_other_backends_answer() {
    let service = service(RULES, 3);
    for _ in 0..10 {
        assert_eq!(service.report(1, UNANSWERED, 0, NO_JITTER), Judgement::Unchanged);
        service.answered(1, 0);
    }
    assert_eq!(
        service.report(1, UNANSWERED, 0, NO_JITTER),
        Judgement::Unchanged,
        "answers of the same backend show nothing"
    );
    for _ in 0..2 {
        service.answered(2, 0);
        assert_eq!(service.report(1, UNANSWERED, 0, NO_JITTER), Judgement::Remembered);
    }
    service.answered(0, 0);
    assert_eq!(service.report(1, UNANSWERED, 0, NO_JITTER), Judgement::Ejected);
}

/// A backend hangs. Clients send a burst of three requests to this backend every 100 ms, and give
/// up each request after a second. The other backends answer at once.
#[test]
fn all_simultaneous_missing_answers_are_counted() {
    let service = service(RULES, 3);
    let mut judgements = Vec::new();
    for burst in 0..15 {
        let now = burst * 100;
        if burst >= 10 {
            judgements
                .extend((0..3).map(|_| service.report_since(0, UNANSWERED, now - 1000, now, NO_JITTER)));
        }
        for _ in 0..3 {
            service.report(0, Evidence::established(false), now, NO_JITTER);
        }
        service.answered(1, now + 10);
    }
    let ejected_at = judgements.iter().position(|judgement| *judgement == Judgement::Ejected);
    assert!(ejected_at.is_some_and(|at| at < 9), "no ejection within three bursts: {judgements:?}");
}

/// After one answer, no backend answers any more. The first missing answers after that answer are
/// counted. Later missing answers show nothing about a single backend, because no backend answers.
#[test]
fn missing_answers_of_all_backends_eject_none() {
    let service = service(RULES, 3);
    service.report_since(0, UNANSWERED, 0, 600, NO_JITTER);
    service.answered(1, 700);
    for slot in [0, 1, 2].into_iter().cycle().take(60) {
        service.report_since(slot, UNANSWERED, 701, 1_500, NO_JITTER);
    }
    assert_eq!(ejected(&service, 3), 0);
    assert_eq!([0, 1, 2].map(|slot| service.standing(slot).run), [2, 0, 0]);
}

/// A reference model of a service: the ejection state of each backend follows the rules separately,
/// and all counts are recomputed.
struct Model {
    words: Vec<EjectionState>,
    ejected: Vec<bool>,
}

impl Model {
    fn report(&mut self, slot: usize, evidence: Evidence, now: u32, random: u32) -> Judgement {
        let before = self.words[slot];
        if evidence.kind == EvidenceKind::NONE {
            self.words[slot] = if evidence.is_trial { undecided(before, now) } else { before };
            let changed = self.words[slot] != before;
            return if changed { Judgement::Remembered } else { Judgement::Unchanged };
        }
        let word = StateWord {
            ejected: u8::from(self.ejected[slot]),
            ..StateWord::new(Usable::UnlessEjected, BackendState::Member)
        };
        let (after, verdict) = next(before, RULES, evidence, word, now, random);
        self.words[slot] = after;
        let count = self.ejected.iter().filter(|ejected| **ejected).count();
        match verdict {
            Verdict::Unchanged => Judgement::Unchanged,
            Verdict::Remembered => Judgement::Remembered,
            Verdict::Eject if self.ejected.len() - count < 2 => {
                self.words[slot] = withheld(after, before, now);
                Judgement::Withheld
            }
            Verdict::Eject => {
                self.ejected[slot] = true;
                Judgement::Ejected
            }
            Verdict::EjectLonger => Judgement::EjectedLonger,
            Verdict::Readmit => {
                self.ejected[slot] = false;
                Judgement::Readmitted
            }
        }
    }
}

proptest! {
    /// In any history, each backend has the states that the rules require, and the number of
    /// ejected backends is never above the limit. While any backend is ejected, a trial is due at
    /// the latest when the first ejection time is over.
    #[test]
    fn a_service_follows_a_reference_model_in_any_history(
        backends in 1u32..8,
        steps in prop::collection::vec((0u32..8, 0u32..4, any::<bool>(), 0u32..3_000, any::<u32>()), 0..300),
        start: u32,
    ) {
        let service = service(RULES, backends);
        let mut model = Model {
            words: vec![EjectionState::default(); backends as usize],
            ejected: vec![false; backends as usize],
        };
        let mut now = start;
        for (slot, kind, fails, later, random) in steps {
            now = now.wrapping_add(later);
            if let Some(tried) = service.due_trial(now, never) {
                let word = &mut model.words[tried as usize];
                // If no backend is available, a trial may begin before the ejection time is over,
                // but never during another trial.
                prop_assert!(word.phase == EjectionPhase::Ejected as u8 || is_over(word.at, RULES, now));
                *word = on_trial(*word, RULES, now);
                prop_assert_eq!(*word, service.standing(tried));
                let evidence = of_trial(if fails { REFUSED } else { ESTABLISHED });
                prop_assert_eq!(
                    service.report(tried, evidence, now, random),
                    model.report(tried as usize, evidence, now, random)
                );
            }
            let nothing = Evidence { is_trial: false, ..UNDECIDED };
            let reset = Evidence { kind: EvidenceKind::RESET, failure_source: FailureSource::SEVERAL, ..REFUSED };
            let (slot, evidence) =
                (slot % backends, [nothing, REFUSED, reset, ESTABLISHED][kind as usize]);
            prop_assert_eq!(
                service.report(slot, evidence, now, random),
                model.report(slot as usize, evidence, now, random)
            );
            for slot in 0..backends {
                prop_assert_eq!(service.standing(slot), model.words[slot as usize]);
                prop_assert_eq!(service.state(slot).ejected == 1, model.ejected[slot as usize]);
            }
            let count = ejected(&service, backends);
            prop_assert!(count < backends);
            let next = service.next_trial();
            prop_assert_eq!(next.slot == 0, count == 0);
            if count > 0 {
                prop_assert!(service.state(next.slot()).ejected == 1);
            }
        }
    }
}
