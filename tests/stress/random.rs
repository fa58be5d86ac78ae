//! Numbers that look random and are the same for the same seed: splitmix64.

/// A sequence of numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each pair.
    pub fn new(seed: u64, part: u64) -> Self {
        let mut random = Self(seed);
        random.0 ^= random.next().wrapping_mul(part.wrapping_add(1));
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u32) -> u32 {
        // The upper half, scaled: at most as large as `end`.
        u32::try_from(((self.next() >> 32) * u64::from(end)) >> 32).expect("below a 32-bit number")
    }

    /// An index into a list that is not empty.
    pub fn index(&mut self, length: usize) -> usize {
        self.below(u32::try_from(length).expect("a short list")) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_the_sequence_and_every_number_comes() {
        let mut counts = [0u32; 10];
        let (mut one, mut same, mut other) = (Random::new(1, 2), Random::new(1, 2), Random::new(1, 3));
        let mut equal = 0;
        for _ in 0..10_000 {
            let number = one.below(10);
            assert_eq!(number, same.below(10));
            equal += u32::from(number == other.below(10));
            counts[number as usize] += 1;
        }
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
        assert!((900..1100).contains(&equal), "{equal}");
    }
}
