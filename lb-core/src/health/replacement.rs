//! Who stands in for members that have been unavailable for long: the next of the task's order, one for each.
//!
//! One loss is one change, and the member comes back to its own place. Only this host's row changes: what other tasks of the job
//! see of a backend they see for themselves.

use std::ops::Add;
use std::time::Duration;

use lb_common::abi::MAX_LISTED;

/// For how long a replaced member has to be available without a failure before it takes its place back.
pub const PROBATION: Duration = Duration::from_secs(30);

/// One of a task's order: first the members, then those that may stand in for them. By any clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InOrder<T> {
    /// Since when it has been unavailable; `None` if it is available.
    pub unavailable_since: Option<T>,
    /// Since when it has been available without a failure; `None` if it is not.
    pub available_since: Option<T>,
    /// Whether somebody stands in for it: for a member, or for one that had stood in itself.
    pub is_replaced: bool,
}

/// Positions in the order: who is replaced, and who stands in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replacement {
    /// Members, best first.
    pub replaced: Vec<usize>,
    /// As many of those behind them, best first.
    pub substitutes: Vec<usize>,
    /// Of those behind them who would stand in and are unavailable, best first: as long as anybody is replaced they keep their
    /// slots and are tried, for who forgets them takes them again.
    pub failed: Vec<usize>,
}

/// Who of the first `members` of an order is replaced by whom from `now` on. At most half of them are replaced; in panic nobody
/// is who was not before. `after`: for how long a member has to be unavailable.
pub fn replacement<T: Copy + Ord + Add<Duration, Output = T>>(
    order: &[InOrder<T>],
    members: usize,
    after: Duration,
    is_panic: bool,
    now: T,
) -> Replacement {
    let members = members.min(order.len());
    let most = members / 2;
    let is_out = |one: &InOrder<T>| one.unavailable_since.is_some_and(|since| since + after <= now);
    let is_back = |one: &InOrder<T>| one.available_since.is_some_and(|since| since + PROBATION <= now);
    let stays_out = |at: &usize| order[*at].is_replaced && !is_back(&order[*at]);
    let goes_out = |at: &usize| !order[*at].is_replaced && is_out(&order[*at]);
    let mut replaced: Vec<usize> = (0..members).filter(stays_out).collect();
    if !is_panic {
        let mut new: Vec<usize> = (0..members).filter(goes_out).collect();
        // Whoever has been unavailable for longest goes first; those before keep their substitutes.
        new.sort_by_key(|at| order[*at].unavailable_since);
        replaced.extend(new);
    }
    replaced.truncate(most);
    let has_failed = |at: &usize| is_out(&order[*at]) || stays_out(at);
    let behind = members..order.len();
    let substitutes: Vec<usize> = behind.clone().filter(|at| !has_failed(at)).take(replaced.len()).collect();
    replaced.truncate(substitutes.len());
    replaced.sort_unstable();
    let room = if replaced.is_empty() { 0 } else { (MAX_LISTED as usize).saturating_sub(members + most) };
    let failed = behind.filter(has_failed).take(room).collect();
    Replacement { replaced, substitutes, failed }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_secs(10);

    const NOW: Duration = Duration::from_secs(1_000);

    /// `h` available for long, `b` available for a moment, `u` unavailable for long, `v` for longer, `n` for a moment; capitals
    /// are replaced.
    fn order(pattern: &str) -> Vec<InOrder<Duration>> {
        let one = |kind: char| {
            let (available, seconds) = match kind.to_ascii_lowercase() {
                'h' => (true, 30),
                'b' => (true, 29),
                'u' => (false, 10),
                'v' => (false, 11),
                'n' => (false, 9),
                _ => unreachable!("a kind"),
            };
            let since = Some(NOW - Duration::from_secs(seconds));
            InOrder {
                unavailable_since: since.filter(|_| !available),
                available_since: since.filter(|_| available),
                is_replaced: kind.is_ascii_uppercase(),
            }
        };
        pattern.chars().map(one).collect()
    }

    #[track_caller]
    fn check(pattern: &str, members: usize, is_panic: bool, replaced: &[usize], substitutes: &[usize]) {
        let is = replacement(&order(pattern), members, AFTER, is_panic, NOW);
        assert_eq!((&*is.replaced, &*is.substitutes), (replaced, substitutes), "{pattern}");
    }

    #[test]
    fn who_stood_in_and_failed_is_kept_and_waits_for_its_place_as_a_member_does() {
        for (pattern, substitutes, failed) in [
            ("hUhhuh", &[5][..], &[4][..]),
            ("hUhhUh", &[5], &[4]),
            ("hUhhBh", &[5], &[4]),
            ("hUhhHh", &[4], &[]),
            ("hUhhnh", &[4], &[]),
            ("hhhhUh", &[], &[]),
        ] {
            let is = replacement(&order(pattern), 4, AFTER, false, NOW);
            assert_eq!((&*is.substitutes, &*is.failed), (substitutes, failed), "{pattern}");
        }
    }

    #[test]
    fn a_member_that_is_unavailable_for_long_is_replaced_by_the_next_of_the_order() {
        check("hhhhhh", 4, false, &[], &[]);
        check("hunhhh", 4, false, &[1], &[4]);
        check("uhhuhhh", 4, false, &[0, 3], &[4, 5]);
        // Who stands in is looked at, too.
        check("huhhuh", 4, false, &[1], &[5]);
        check("huhhnh", 4, false, &[1], &[4]);
    }

    #[test]
    fn at_most_half_are_replaced_and_those_first_that_are_gone_for_longest() {
        check("uuuuhhhh", 4, false, &[0, 1], &[4, 5]);
        check("uvuvhhhh", 4, false, &[1, 3], &[4, 5]);
        check("uh", 1, false, &[], &[]);
        // Whoever is replaced stays so, although another has been gone for longer.
        check("UvUvhhhh", 4, false, &[0, 2], &[4, 5]);
    }

    #[test]
    fn nobody_is_replaced_if_nobody_can_stand_in() {
        check("uuhh", 4, false, &[], &[]);
        check("uuhhu", 4, false, &[], &[]);
        check("uuhhh", 4, false, &[0], &[4]);
    }

    #[test]
    fn a_member_takes_its_place_back_after_half_a_minute_without_a_failure() {
        check("hUhhh", 4, false, &[1], &[4]);
        check("hBhhh", 4, false, &[1], &[4]);
        check("hHhhh", 4, false, &[], &[]);
    }

    #[test]
    fn in_panic_nobody_is_replaced_who_was_not_before() {
        check("uUuuhh", 4, true, &[1], &[4]);
        check("uuuuhh", 4, true, &[], &[]);
        check("uHuuhh", 4, true, &[], &[]);
    }
}
