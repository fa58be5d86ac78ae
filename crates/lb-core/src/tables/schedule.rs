//! Computes tables from integer weights: how many entries each backend gets, and in which order.
//! Connects take backends from these tables.
//!
//! The entries must match the weights as closely as whole numbers can. Every daemon must compute
//! the same table from the same weights, so the arithmetic is exact. An entry is a position in the
//! caller's list of weights.

use lb_common::abi::{MAX_SCHEDULE_LOG2, MIN_SCHEDULE_LOG2, SCHEDULE_ENTRIES_PER_BACKEND};

/// The longest table that [`interleave`] orders exactly.
const MAX_ENTRIES: u64 = 1 << MAX_SCHEDULE_LOG2;

/// The logarithm of the length of a table for `backends` backends: a power of two with
/// [`SCHEDULE_ENTRIES_PER_BACKEND`] entries for each, within the bounds of the kernel's tables.
pub fn length_log2(backends: u32) -> u8 {
    let wanted = u64::from(backends) * u64::from(SCHEDULE_ENTRIES_PER_BACKEND);
    (MIN_SCHEDULE_LOG2..MAX_SCHEDULE_LOG2).find(|&log2| 1_u64 << log2 >= wanted).unwrap_or(MAX_SCHEDULE_LOG2)
}

/// How many of `entries` entries each weight gets: a number in proportion to the weight, rounded by
/// largest remainder, and at least one entry for every positive weight.
///
/// A weight of 0 gets no entry. The counts sum to `entries`, or to 0 if no weight is positive. A
/// weight with a fair share below one entry gets exactly one entry; the other weights divide the
/// rest. If remainders are equal, the lower position is rounded up first. Panics if there are more
/// positive weights than entries, but the limits of a service and the length of its table prevent
/// this.
pub fn apportion(weights: &[u64], entries: u32) -> Vec<u32> {
    let mut counts = vec![0; weights.len()];
    let mut rising: Vec<usize> = (0..weights.len()).filter(|&i| weights[i] > 0).collect();
    assert!(
        rising.len() <= entries as usize,
        "{} positive weights do not fit in {entries} entries",
        rising.len()
    );
    if rising.is_empty() {
        return counts;
    }
    rising.sort_by_key(|&i| weights[i]);

    // 128 bits are enough for the sum of all weights that fit in memory, and for any weight times
    // the number of entries.
    let mut weights_left: u128 = rising.iter().map(|&i| u128::from(weights[i])).sum();
    let mut entries_left = u128::from(entries);
    let mut small = 0;
    // If a weight gets a whole entry for a smaller share, fewer entries are left for the other
    // weights, and the next share may fall below one. A single pass from the lightest weight up
    // finds all such weights. The pass ends before the heaviest weight, because at any time at
    // least as many entries as weights are left.
    for &i in &rising {
        let weight = u128::from(weights[i]);
        if weight * entries_left >= weights_left {
            break;
        }
        counts[i] = 1;
        weights_left -= weight;
        entries_left -= 1;
        small += 1;
    }
    share(weights, &rising[small..], weights_left, entries_left, &mut counts);
    counts
}

/// Divides `entries` by largest remainder among the weights at the positions `members`. `sum` is
/// the sum of these weights.
fn share(weights: &[u64], members: &[usize], sum: u128, entries: u128, counts: &mut [u32]) {
    let mut remainders = Vec::with_capacity(members.len());
    let mut entries_left = entries;
    for &i in members {
        let product = u128::from(weights[i]) * entries;
        let whole = product / sum;
        counts[i] = u32::try_from(whole).expect("a part of the entries fits into a u32");
        entries_left -= whole;
        remainders.push((product % sum, i));
    }
    remainders.sort_unstable_by(|(a, i), (b, j)| b.cmp(a).then(i.cmp(j)));
    let rounded_up = usize::try_from(entries_left)
        .expect("each remainder is below one, so fewer entries than members are left");
    for &(_, i) in &remainders[..rounded_up] {
        counts[i] += 1;
    }
}

/// The table in which position `i` of `counts` has `counts[i]` entries, evenly spread: entry j of c
/// is due at the fraction (2j + 1) / 2c of the table. Entries are in the order in which they are
/// due; if two are due at once, the lower position is first.
///
/// The table is empty if all counts are 0. Panics if the table would be longer than the kernel's
/// longest table.
pub fn interleave(counts: &[u32]) -> Vec<u32> {
    let length: u64 = counts.iter().map(|&count| u64::from(count)).sum();
    assert!(length <= MAX_ENTRIES, "a table has at most {MAX_ENTRIES} entries, not {length}");
    let mut due: Vec<(u32, u32)> = Vec::new();
    for (position, &count) in (0..).zip(counts) {
        due.extend((0..count).map(|j| (deadline(j, count), position)));
    }
    // A stable sort leaves ties in the order of positions. It is fast, because the deadlines of
    // each position are an ascending run already.
    due.sort_by_key(|&(deadline, _)| deadline);
    due.into_iter().map(|(_, position)| position).collect()
}

/// (2j + 1) / 2c in units of 2^-32, rounded down. Rounding does not change the order: the deadlines
/// of one position are at least 2^-16 apart, and two different deadlines of positions with counts a
/// and b are at least 1 / 2ab apart. Because a + b is at most 2^16, this is at least 2^-31, so
/// different deadlines still differ after rounding.
fn deadline(j: u32, count: u32) -> u32 {
    let fraction = ((2 * u64::from(j) + 1) << 31) / u64::from(count);
    u32::try_from(fraction).expect("j is below the count, so the fraction is below one")
}
const _: () = assert!(MAX_SCHEDULE_LOG2 <= 16);

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_panics(run: impl FnOnce() -> Vec<u32> + std::panic::UnwindSafe, expected: &str) {
        let message = std::panic::catch_unwind(run).unwrap_err().downcast::<String>().unwrap();
        assert_eq!(*message, expected);
    }

    #[test]
    fn a_table_has_32_entries_per_backend_within_its_bounds() {
        let cases = [(0, 10), (1, 10), (32, 10), (33, 11), (64, 11), (65, 12), (1024, 15), (1025, 16)];
        for (backends, log2) in cases {
            assert_eq!(length_log2(backends), log2, "{backends} backends");
        }
        assert_eq!(length_log2(lb_common::abi::MAX_BACKENDS), 16);
        assert_eq!(length_log2(u32::MAX), 16);
    }

    #[test]
    fn without_a_positive_weight_there_is_no_table() {
        assert_eq!(apportion(&[], 16), []);
        assert_eq!(apportion(&[0, 0], 16), [0, 0]);
        assert_eq!(apportion(&[0], 0), [0]);
        assert_eq!(interleave(&[]), []);
        assert_eq!(interleave(&[0, 0]), []);
    }

    #[test]
    fn a_single_positive_weight_gets_the_whole_table() {
        assert_eq!(apportion(&[0, 5, 0], 8), [0, 8, 0]);
        assert_eq!(interleave(&[0, 3, 0]), [1, 1, 1]);
    }

    #[test]
    fn as_many_weights_as_entries_get_one_each() {
        assert_eq!(apportion(&[1, 1_000, u64::MAX], 3), [1, 1, 1]);
    }

    #[test]
    fn more_weights_than_entries_are_refused() {
        check_panics(|| apportion(&[1, 1, 1, 1], 3), "4 positive weights do not fit in 3 entries");
    }

    #[test]
    fn a_weight_rounded_up_to_one_entry_may_push_the_next_below_one() {
        // Weight 25 of 100 gets exactly one of 4 entries. After weight 1 has got a whole entry,
        // weight 25 of 99 would get less than one of 3 entries.
        assert_eq!(apportion(&[1, 25, 74], 4), [1, 1, 2]);
    }

    #[test]
    fn the_largest_weights_do_not_overflow() {
        assert_eq!(apportion(&[u64::MAX; 4], u32::MAX), [1 << 30, 1 << 30, 1 << 30, (1 << 30) - 1]);
        assert_eq!(apportion(&[u64::MAX, 1], 1024), [1023, 1]);
    }

    #[test]
    fn equal_remainders_go_to_the_lower_position() {
        assert_eq!(apportion(&[1, 1, 1, 1], 6), [2, 2, 1, 1]);
    }

    #[test]
    fn the_longest_table_is_ordered_and_a_longer_one_refused() {
        let counts = [32_767, 32_768, 1];
        assert_eq!(interleave(&counts).len(), 65_536);
        check_panics(|| interleave(&[65_536, 1]), "a table has at most 65536 entries, not 65537");
    }

    #[test]
    fn the_closest_deadlines_retain_their_order() {
        // The deadlines of these two counts are closest in the middle, where the entries alternate
        // without ties.
        let table = interleave(&[32_767, 32_769]);
        let mut position_of = [0_u64; 2];
        let mut last = (0, 1);
        for position in table {
            let count = [32_767, 32_769][position as usize];
            let due = (2 * position_of[position as usize] + 1, 2 * count);
            assert!(last.0 * due.1 <= due.0 * last.1, "{last:?} is due after {due:?}");
            position_of[position as usize] += 1;
            last = due;
        }
    }
}
