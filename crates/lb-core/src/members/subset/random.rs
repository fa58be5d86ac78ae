//! Random numbers that are the same on every machine and in every version: a generator, a hash and
//! a shuffle, in 64-bit integers.
//!
//! A subset must never change because a dependency changed, and generators of libraries do not
//! guarantee the same output in all versions. The numbers are not secret, and can be predicted.

/// Steele, Lea and Flood's SplitMix64 generator ("Fast splittable pseudorandom number generators",
/// 2014).
#[derive(Clone, Debug)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// A generator with this seed. Every seed is equally good.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next random number.
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = self.state;
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 if `n` is 0.
    ///
    /// Lemire's multiply-shift ("Fast random integer generation in an interval", 2019) without its
    /// rejection step: the bias of at most `n` in 2^64 is too small to be visible in a fleet, and
    /// each number needs exactly one draw.
    pub const fn below(&mut self, n: u64) -> u64 {
        ((self.next_u64() as u128 * n as u128) >> 64) as u64
    }
}

/// Fisher and Yates' shuffle, from the last item down.
pub fn shuffle<T>(items: &mut [T], rng: &mut SplitMix64) {
    for last in (1..items.len()).rev() {
        let other = rng.below(last as u64 + 1);
        items.swap(last, usize::try_from(other).expect("the number is at most an index of the slice"));
    }
}

/// A hash of a sequence of words. It does not include the length, so use it for sequences of known
/// length.
pub fn mix64(words: &[u64]) -> u64 {
    words.iter().fold(0, |hash, word| SplitMix64::new(hash ^ word).next_u64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_below_their_bound() {
        let mut rng = SplitMix64::new(3);
        for n in [1, 2, 10, 1 << 63, u64::MAX] {
            for _ in 0..100 {
                assert!(rng.below(n) < n);
            }
        }
        assert_eq!(rng.below(0), 0);
    }

    #[test]
    fn a_shuffle_of_at_most_one_item_uses_no_random_number() {
        let mut rng = SplitMix64::new(5);
        shuffle::<u32>(&mut [], &mut rng);
        shuffle(&mut [1], &mut rng);
        assert_eq!(rng.next_u64(), SplitMix64::new(5).next_u64());
    }

    #[test]
    fn the_order_of_words_counts() {
        assert_ne!(mix64(&[1, 2]), mix64(&[2, 1]));
    }
}
