//! Who stands in for members that have been unavailable for long: the next of the task's order, one for each.
//!
//! One loss is one change, and the member comes back to its own place. However many are lost, each gets a substitute; but only a
//! few at a time, for a fault of this host must not carry the whole task to backends that others use. Only this host's row
//! changes: what other tasks of the job see of a backend they see for themselves.

use std::ops::Add;
use std::time::Duration;

use lb_common::abi::MAX_LISTED;

/// For how long a replaced member has to be available without a failure before it takes its place back.
pub const PROBATION: Duration = Duration::from_secs(30);

/// At most this part of the members is replaced within one `replace_after`, and one member in any case.
const PACE: usize = 4;

/// From so many substitutes on, of which more than half fail as well, one member at a time is replaced.
const MANY: usize = 4;

/// One of a task's order: first the members, then those that may stand in for them. By any clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InOrder<T> {
    /// Since when it has been unavailable; `None` if it is available.
    pub unavailable_since: Option<T>,
    /// Since when it has been available without a failure; `None` if it is not.
    pub available_since: Option<T>,
    /// Since when it has had a substitute: a member, or a substitute itself.
    pub replaced_since: Option<T>,
    /// Whether it is probed and no probe of it has ended yet.
    pub is_unproven: bool,
    /// Whether it is in the table.
    pub is_used: bool,
}

/// Positions in the order: who is replaced, and who stands in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replacement {
    /// Members, best first.
    pub replaced: Vec<usize>,
    /// As many of those behind them, best first.
    pub substitutes: Vec<usize>,
    /// Of those behind them who have stood in and are unavailable, best first: as long as anybody is replaced they keep their slots
    /// and are tried, for who forgets them takes them again.
    pub failed: Vec<usize>,
}

/// Which of the first `members` of an order are replaced, and their substitutes, from `now` on. `after`: for how long a member has
/// to be unavailable.
pub fn replacement<T: Copy + Ord + Add<Duration, Output = T>>(
    order: &[InOrder<T>],
    members: usize,
    after: Duration,
    now: T,
) -> Replacement {
    let members = members.min(order.len());
    let listed = MAX_LISTED as usize;
    let is_out = |one: &InOrder<T>| one.unavailable_since.is_some_and(|since| since + after <= now);
    let is_back = |one: &InOrder<T>| one.available_since.is_some_and(|since| since + PROBATION <= now);
    let stays_out = |at: &usize| order[*at].replaced_since.is_some() && !is_back(&order[*at]);
    let goes_out = |at: &usize| order[*at].replaced_since.is_none() && is_out(&order[*at]);
    let has_failed = |at: &usize| is_out(&order[*at]) || stays_out(at);
    let behind = members..order.len();

    let mut replaced: Vec<usize> = (0..members).filter(stays_out).collect();
    let failed = behind.clone().filter(stays_out).count();
    let tried = replaced.len() + failed;
    let at_a_time = if tried >= MANY && 2 * failed > tried { 1 } else { (members / PACE).max(1) };
    let is_recent = |at: &&usize| order[**at].replaced_since.is_some_and(|since| since + after > now);
    let recent = replaced.iter().filter(is_recent).count();
    let mut new: Vec<usize> = (0..members).filter(goes_out).collect();
    // The member that has been unavailable for longest goes first; those before keep their substitutes.
    new.sort_by_key(|at| order[*at].unavailable_since);
    replaced.extend(new.into_iter().take(at_a_time.saturating_sub(recent)));
    // All members of a table and all that are replaced are listed.
    replaced.truncate(listed.saturating_sub(members));

    let mut substitutes: Vec<usize> = behind.clone().filter(|at| !has_failed(at)).collect();
    // Unproven ones come last.
    substitutes.sort_by_key(|at| order[*at].is_unproven);
    substitutes.truncate(replaced.len());
    substitutes.sort_unstable();
    replaced.truncate(substitutes.len());
    replaced.sort_unstable();
    let room = if replaced.is_empty() { 0 } else { listed.saturating_sub(members + replaced.len()) };
    let has_stood_in = |at: &usize| order[*at].is_used || order[*at].replaced_since.is_some();
    let failed = behind.filter(|at| has_failed(at) && has_stood_in(at)).take(room).collect();
    Replacement { replaced, substitutes, failed }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_secs(10);

    const NOW: Duration = Duration::from_secs(1_000);

    /// `h` available for long, `b` available for a moment, `u` unavailable for long, `v` for longer, `n` for a moment, `?` unproven,
    /// `x` as `u` but not in the table; capitals are replaced, for long.
    fn order(pattern: &str) -> Vec<InOrder<Duration>> {
        let one = |kind: char| {
            let (available, seconds) = match kind.to_ascii_lowercase() {
                'h' | '?' => (true, 30),
                'b' => (true, 29),
                'u' | 'x' => (false, 10),
                'v' => (false, 11),
                'n' => (false, 9),
                _ => unreachable!("a kind"),
            };
            let since = Some(NOW - Duration::from_secs(seconds));
            InOrder {
                unavailable_since: since.filter(|_| !available),
                available_since: since.filter(|_| available),
                replaced_since: kind.is_ascii_uppercase().then_some(NOW - AFTER),
                is_unproven: kind == '?',
                is_used: kind != 'x',
            }
        };
        pattern.chars().map(one).collect()
    }

    #[track_caller]
    fn check(pattern: &str, members: usize, replaced: &[usize], substitutes: &[usize]) {
        let is = replacement(&order(pattern), members, AFTER, NOW);
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
            ("hUhhxh", &[5], &[]),
            ("hhhhUh", &[], &[]),
        ] {
            let is = replacement(&order(pattern), 4, AFTER, NOW);
            assert_eq!((&*is.substitutes, &*is.failed), (substitutes, failed), "{pattern}");
        }
    }

    #[test]
    fn a_member_that_is_unavailable_for_long_is_replaced_by_the_next_of_the_order() {
        check("hhhhhh", 4, &[], &[]);
        check("hunhhh", 4, &[1], &[4]);
        // Who stands in is looked at, too.
        check("huhhuh", 4, &[1], &[5]);
        check("huhhnh", 4, &[1], &[4]);
    }

    #[test]
    fn a_quarter_is_replaced_at_a_time_and_those_first_that_are_gone_for_longest() {
        check("uuuuhhhh", 4, &[0], &[4]);
        check("uvuvhhhh", 4, &[1], &[4]);
        check("uh", 1, &[0], &[1]);
        check("uuuuuuuuhhhhhhhh", 8, &[0, 1], &[8, 9]);
        // Whoever is replaced stays so, although another has been gone for longer.
        check("UvUvhhhh", 4, &[0, 1, 2], &[4, 5, 6]);
        // In the end all are.
        check("UUUuhhhh", 4, &[0, 1, 2, 3], &[4, 5, 6, 7]);
        // Who was replaced a moment ago counts.
        let mut order = order("uUuuuuuuhhhhhhhh");
        order[1].replaced_since = Some(NOW - AFTER + Duration::from_secs(1));
        assert_eq!(replacement(&order, 8, AFTER, NOW).replaced, [0, 1]);
    }

    #[test]
    fn where_most_substitutes_fail_too_one_is_replaced_at_a_time() {
        check("UUuuuuuuUUUhhhhhh", 8, &[0, 1, 2], &[11, 12, 13]);
        check("UUuuuuuuUUhhhhhh", 8, &[0, 1, 2, 3], &[10, 11, 12, 13]);
    }

    #[test]
    fn nobody_is_replaced_if_nobody_can_stand_in() {
        check("uuhh", 4, &[], &[]);
        check("uuhhu", 4, &[], &[]);
        check("uuhhh", 4, &[0], &[4]);
    }

    #[test]
    fn unproven_endpoints_stand_in_last() {
        check("uhhh?h", 4, &[0], &[5]);
        check("UUhh?h", 4, &[0, 1], &[4, 5]);
        check("uhhh??", 4, &[0], &[4]);
    }

    #[test]
    fn a_member_takes_its_place_back_after_half_a_minute_without_a_failure() {
        check("hUhhh", 4, &[1], &[4]);
        check("hBhhh", 4, &[1], &[4]);
        check("hHhhh", 4, &[], &[]);
    }
}
