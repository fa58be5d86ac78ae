//! Which backends substitute for members that have been unavailable for long: the next backends of
//! the task's order, one for each lost member.
//!
//! The loss of a member changes one backend in the table, and the member later returns to the
//! table. Only a few members are replaced at a time, because a fault of this host must not move the
//! whole task to backends that other tasks use. Only this task's table changes: other tasks of the
//! job judge backends by their own evidence.

use std::ops::Add;
use std::time::Duration;

use lb_common::abi::MAX_LISTED;

/// A replaced member returns to the table after it has been available without a failure for this
/// time.
pub const PROBATION: Duration = Duration::from_secs(30);

/// Within one `replace_after`, at most one in this many members is replaced (a quarter of them),
/// but at least one may always be replaced.
const PACE: usize = 4;

/// If at least this many substitutes have been used and more than half of them have failed, members
/// are replaced one at a time.
const MANY: usize = 4;

/// One backend of a task's order. The order contains the members first, and then their possible
/// substitutes. `T` is a time of any clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InOrder<T> {
    /// The time since which the backend has been unavailable; `None` if it is available.
    pub unavailable_since: Option<T>,
    /// The time since which the backend has been available without a failure; `None` if it is
    /// unavailable.
    pub available_since: Option<T>,
    /// The time since which the backend has been replaced; `None` if it is not replaced. Members
    /// and substitutes can be replaced.
    pub replaced_since: Option<T>,
    /// Whether probes of the backend are configured and no probe has ended yet.
    pub is_unproven: bool,
    /// Whether the backend is in the table.
    pub is_used: bool,
}

/// Positions in the order: the replaced backends and their substitutes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replacement {
    /// The replaced members, best first.
    pub replaced: Vec<usize>,
    /// Positions after the members, best first: as many as in `replaced`.
    pub substitutes: Vec<usize>,
    /// Former substitutes that are unavailable, best first. While any member is replaced, they
    /// retain their slots and get trials. Without their slots, their failures would be forgotten,
    /// and they would be chosen as substitutes again.
    pub failed: Vec<usize>,
}

/// Which of the first `members` of an order are replaced at `now`, and their substitutes. A member
/// is replaced after it has been unavailable for the time `after`.
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
    // The member that has been unavailable for longest is replaced first. Members that are already
    // replaced remain replaced.
    new.sort_by_key(|at| order[*at].unavailable_since);
    replaced.extend(new.into_iter().take(at_a_time.saturating_sub(recent)));
    // The kernel's list must have room for all members of a table and all replaced backends.
    replaced.truncate(listed.saturating_sub(members));

    let mut substitutes: Vec<usize> = behind.clone().filter(|at| !has_failed(at)).collect();
    // Unproven substitutes come last.
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

    /// `h`: available for long. `b`: available for a moment. `u`: unavailable for long. `v`:
    /// unavailable for longer than `u`. `n`: unavailable for a moment. `?`: unproven. `x`: like
    /// `u`, but not in the table. Backends with capital letters have been replaced for long.
    fn order(pattern: &str) -> Vec<InOrder<Duration>> {
        let one = |kind: char| {
            let (available, seconds) = match kind.to_ascii_lowercase() {
                'h' | '?' => (true, 30),
                'b' => (true, 29),
                'u' | 'x' => (false, 10),
                'v' => (false, 11),
                'n' => (false, 9),
                _ => unreachable!("unknown kind {kind:?}"),
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
    fn a_failed_substitute_retains_its_slot_and_needs_probation() {
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
        // Substitutes must be available, too.
        check("huhhuh", 4, &[1], &[5]);
        check("huhhnh", 4, &[1], &[4]);
    }

    #[test]
    fn at_most_a_quarter_is_replaced_at_a_time_longest_unavailable_first() {
        check("uuuuhhhh", 4, &[0], &[4]);
        check("uvuvhhhh", 4, &[1], &[4]);
        check("uh", 1, &[0], &[1]);
        check("uuuuuuuuhhhhhhhh", 8, &[0, 1], &[8, 9]);
        // A replaced member remains replaced, although another member has been unavailable for
        // longer.
        check("UvUvhhhh", 4, &[0, 1, 2], &[4, 5, 6]);
        // In the end all members are replaced.
        check("UUUuhhhh", 4, &[0, 1, 2, 3], &[4, 5, 6, 7]);
        // A member that was replaced a moment ago is one of the two members that may be replaced
        // now.
        let mut order = order("uUuuuuuuhhhhhhhh");
        order[1].replaced_since = Some(NOW - AFTER + Duration::from_secs(1));
        assert_eq!(replacement(&order, 8, AFTER, NOW).replaced, [0, 1]);
    }

    #[test]
    fn if_most_substitutes_fail_members_are_replaced_one_at_a_time() {
        check("UUuuuuuuUUUhhhhhh", 8, &[0, 1, 2], &[11, 12, 13]);
        check("UUuuuuuuUUhhhhhh", 8, &[0, 1, 2, 3], &[10, 11, 12, 13]);
    }

    #[test]
    fn no_member_is_replaced_without_a_substitute() {
        check("uuhh", 4, &[], &[]);
        check("uuhhu", 4, &[], &[]);
        check("uuhhh", 4, &[0], &[4]);
    }

    #[test]
    fn unproven_endpoints_are_the_last_substitutes() {
        check("uhhh?h", 4, &[0], &[5]);
        check("UUhh?h", 4, &[0, 1], &[4, 5]);
        check("uhhh??", 4, &[0], &[4]);
    }

    #[test]
    fn a_member_returns_after_30_s_without_a_failure() {
        check("hUhhh", 4, &[1], &[4]);
        check("hBhhh", 4, &[1], &[4]);
        check("hHhhh", 4, &[], &[]);
    }
}
