//! How loaded a backend is, as the policies compare it: open flows, and errors of late that count like open flows, so that
//! a backend that fails fast does not look idle ("Site Reliability Engineering", chapter 20: errors count as active
//! requests). It knows no clock.

use crate::abi::RecentErrors;

/// What is left of `errors` at the tick `now`: half of them after each half-life, rounded down. A half-life of 0 counts none.
#[inline(always)]
pub fn decayed(errors: RecentErrors, now: u32, half_life: u32) -> u32 {
    let halvings = halvings(errors, now, half_life);
    if half_life == 0 || halvings >= u32::BITS { 0 } else { errors.count >> halvings }
}

/// `errors` with one more, at the tick `now`.
#[inline(always)]
pub fn with_another(errors: RecentErrors, now: u32, half_life: u32) -> RecentErrors {
    match decayed(errors, now, half_life) {
        0 => RecentErrors { count: 1, since: now },
        // Halvings go on at their own times: if each error began a new half-life, frequent ones would never be forgotten.
        count => RecentErrors {
            count: count.saturating_add(1),
            since: errors.since.wrapping_add(halvings(errors, now, half_life).wrapping_mul(half_life)),
        },
    }
}

#[inline(always)]
fn halvings(errors: RecentErrors, now: u32, half_life: u32) -> u32 {
    now.wrapping_sub(errors.since).checked_div(half_life).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HALF_LIFE: u32 = 1000;
    const NONE: RecentErrors = RecentErrors { count: 0, since: 0 };

    #[track_caller]
    fn check(errors: RecentErrors, now: u32, expected: u32) {
        assert_eq!(decayed(errors, now, HALF_LIFE), expected);
    }

    #[test]
    fn errors_lose_half_of_themselves_every_half_life() {
        let errors = RecentErrors { count: 9, since: 5_000 };
        check(errors, 5_000, 9);
        check(errors, 5_999, 9);
        check(errors, 6_000, 4);
        check(errors, 7_000, 2);
        check(errors, 8_000, 1);
        check(errors, 9_000, 0);
        check(errors, 4_999, 0);
        assert_eq!(decayed(errors, 5_000, 0), 0, "errors do not count");
    }

    #[test]
    fn ticks_wrap() {
        check(RecentErrors { count: 4, since: u32::MAX - 400 }, 400, 4);
        check(RecentErrors { count: 4, since: u32::MAX - 400 }, 700, 2);
    }

    /// One error in half a half-life, for ever: what remains is bounded, and gone soon after the last.
    #[test]
    fn a_steady_rate_has_a_steady_weight() {
        let mut errors = NONE;
        let mut now = 7;
        for _ in 0..1000 {
            errors = with_another(errors, now, HALF_LIFE);
            assert!(decayed(errors, now, HALF_LIFE) <= 4, "{errors:?} at {now}");
            now += HALF_LIFE / 2;
        }
        check(errors, now + 3 * HALF_LIFE, 0);
    }

    proptest! {
        #[test]
        fn an_error_more_is_one_more(count in 0u32..1_000_000, since: u32, later in 0u32..100_000, half_life in 1u32..10_000) {
            let errors = RecentErrors { count, since };
            let now = since.wrapping_add(later);
            let before = decayed(errors, now, half_life);
            prop_assert_eq!(decayed(with_another(errors, now, half_life), now, half_life), before + 1);
        }
    }
}
