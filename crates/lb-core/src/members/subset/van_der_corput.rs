//! The van der Corput sequence: points on a ring of circumference 1. For every n, the first n
//! points are nearly evenly spaced.
//!
//! A task or backend can be added without moving any other point, because point i does not depend
//! on the number of points. The base is 2, so point i is the number i with its bits reversed, which
//! takes one instruction.

/// The point of `i`, in units of 2^-64: the bits of `i` reversed. This function is its own inverse.
pub const fn vdc(i: u64) -> u64 {
    i.reverse_bits()
}

/// The numbers below `n` in the order of their points, from 0 on.
pub fn order(n: u32) -> impl Iterator<Item = u32> {
    clockwise(n, 0)
}

/// How many numbers below `n` are equal to `low` in their lowest `bits` bits.
const fn sharing(low: u32, bits: u32, n: u32) -> u32 {
    if low < n { ((n - 1 - low) >> bits) + 1 } else { 0 }
}

/// The rank of `i` in the [`order`] of the numbers below `n`: how many of them come before it.
///
/// The order compares bits from the lowest up. So a number comes before `i` if all its bits below
/// some bit equal those of `i`, and that bit is 0 in the number and 1 in `i`.
pub fn rank(i: u32, n: u32) -> u32 {
    let before = |bit: u32| if i >> bit & 1 == 1 { sharing(i & ((1 << bit) - 1), bit + 1, n) } else { 0 };
    (0..u32::BITS - 1).map(before).sum()
}

/// The number with this rank in the [`order`] of the numbers below `n`. `rank` must be below `n`.
pub fn nth(mut rank: u32, n: u32) -> u32 {
    let mut number = 0;
    for bit in 0..u32::BITS - 1 {
        // Among numbers with the known low bits, numbers with a 0 as the next bit come before
        // numbers with a 1.
        let zeros = sharing(number, bit + 1, n);
        if rank >= zeros {
            rank -= zeros;
            number |= 1 << bit;
        }
        if sharing(number, bit + 1, n) <= 1 {
            break;
        }
    }
    number
}

/// The numbers below `n` in their [`order`], once around, beginning with the number with rank
/// `start`.
pub fn from_rank(n: u32, start: u32) -> impl Iterator<Item = u32> {
    clockwise(n, vdc(nth(start, n).into()))
}

/// The numbers below `n` in the order of their points, once around the ring, beginning with the
/// first point at or after `from`. The sequence is lazy. Each number takes at most two steps on
/// average, because at most half of the points on the grid are empty.
pub fn clockwise(n: u32, from: u64) -> impl Iterator<Item = u32> {
    // All points are on the grid of the next power of two. The grid has at least one bit, because a
    // step of a whole turn (2^64) does not fit in 64 bits.
    let bits = u64::from(n).next_power_of_two().trailing_zeros().max(1);
    let step = 1_u64 << (64 - bits);
    // `from` rounded up to the grid. The sum wraps, because the ring begins again after the last
    // point.
    let start = from.wrapping_add(step - 1) & !(step - 1);
    (0..1_u64 << bits)
        .map(move |steps| vdc(start.wrapping_add(steps.wrapping_mul(step))))
        .filter_map(move |number| u32::try_from(number).ok().filter(|&number| number < n))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A direct implementation of `clockwise`.
    fn clockwise_by_sorting(n: u32, from: u64) -> Vec<u32> {
        let mut numbers: Vec<u32> = (0..n).collect();
        numbers.sort_by_key(|&number| vdc(number.into()).wrapping_sub(from));
        numbers
    }

    #[test]
    fn the_grid_in_its_order_is_sorted_by_point() {
        for n in 0..=70 {
            assert!(order(n).eq(clockwise_by_sorting(n, 0)), "n = {n}");
            for i in 0..=n {
                let point = vdc(i.into());
                for from in [point.wrapping_sub(1), point, point + 1, u64::MAX] {
                    assert!(clockwise(n, from).eq(clockwise_by_sorting(n, from)), "n = {n}, from = {from}");
                }
            }
        }
    }

    #[test]
    fn the_order_begins_with_a_number_exactly_at_its_start() {
        assert!(clockwise(4, vdc(3)).eq([3, 0, 2, 1]));
        assert!(clockwise(4, vdc(3) + 1).eq([0, 2, 1, 3]));
    }

    #[test]
    fn a_rank_is_the_position_in_the_order() {
        for n in (1..70).chain([1000, 65_536]) {
            assert!(order(n).map(|i| rank(i, n)).eq(0..n), "n = {n}");
            assert!((0..n).map(|position| nth(position, n)).eq(order(n)), "n = {n}");
        }
    }

    #[test]
    fn an_added_number_moves_no_other() {
        for n in 0..100 {
            let before: Vec<u32> = order(n).collect();
            let after: Vec<u32> = order(n + 1).filter(|&i| i < n).collect();
            assert_eq!(before, after);
        }
    }
}
