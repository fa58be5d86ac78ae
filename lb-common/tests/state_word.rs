//! The daemon's half of a backend's state word: its fields, and the meaning of words from older
//! daemons.

use lb_common::abi::{BackendState, DaemonState, HealthReason, StateWord, Usable};

#[test]
fn fields_of_the_word_are_independent() {
    for usable in [Usable::No, Usable::UnlessEjected, Usable::EvenEjected] {
        for state in [BackendState::Free].into_iter().chain(BackendState::OCCUPIED) {
            for (reason, is_probed_healthy) in
                HealthReason::ALL.into_iter().flat_map(|one| [(one, false), (one, true)])
            {
                let half =
                    DaemonState::new(usable, state).with_reason(reason).probed_healthy(is_probed_healthy);
                assert_eq!(
                    (
                        half.usable(),
                        BackendState::from_u8(half.state),
                        half.reason(),
                        half.is_probed_healthy()
                    ),
                    (usable, Some(state), reason, is_probed_healthy)
                );
                for ejected in [0, 1] {
                    let word = |half: DaemonState| StateWord {
                        usable: half.usable,
                        state: half.state,
                        ejected,
                        failure_source: 0,
                    };
                    let plain = DaemonState::new(usable, state);
                    assert_eq!(word(half).may_be_chosen(), word(plain).may_be_chosen());
                    assert_eq!(word(half).is_held_back(), word(plain).is_held_back());
                    assert_eq!(word(half).daemon(), half);
                }
            }
        }
    }
}

/// Versions before 0.2 encoded the verdict of the endpoint list in the state, and stored no
/// reasons.
#[test]
fn states_of_older_words_are_members_with_a_reason() {
    for (state, reason) in [
        (1, HealthReason::Unstated),
        (2, HealthReason::ListLameDuck),
        (3, HealthReason::ListWeight),
        (6, HealthReason::ListDown),
    ] {
        assert_eq!(BackendState::from_u8(state), Some(BackendState::Member));
        assert_eq!(DaemonState { usable: 1, state }.reason(), reason);
    }
    assert_eq!([4, 5].map(BackendState::from_u8), [BackendState::Leaving, BackendState::Replaced].map(Some));
    assert_eq!(BackendState::from_u8(7), None);
    assert_eq!(DaemonState { usable: 15 << 3, state: 1 }.reason(), HealthReason::Unstated);
}
