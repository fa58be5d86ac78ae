//! SipHash-2-4 of whole words of 64 bits. socklb has its own implementation, because kernel
//! programs run it: every loop has a bound that the verifier can determine, and all operations are
//! on words. Tests compare this implementation with the one of the standard library.

/// A key of 16 bytes, as two words.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key([u64; 2]);

impl Key {
    /// Makes the key from its bytes.
    #[inline(always)]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
        Self([u64::from_le_bytes([a, b, c, d, e, f, g, h]), u64::from_le_bytes([i, j, k, l, m, n, o, p])])
    }

    /// Makes the key from its bytes as two little-endian words.
    #[inline(always)]
    pub const fn from_words(words: [u64; 2]) -> Self {
        Self(words)
    }
}

/// The message authentication code of a message of `N` words, whose bytes are read in memory order.
///
/// This function is not inlined into kernel programs, because every inlined copy would need space
/// for its variables on the stack of 512 bytes.
#[cfg_attr(target_arch = "bpf", inline(never))]
#[cfg_attr(not(target_arch = "bpf"), inline(always))]
pub fn siphash<const N: usize>(&Key([low, high]): &Key, message: &[u64; N]) -> u64 {
    // The ASCII of "somepseudorandomlygeneratedbytes", as in the paper.
    let mut state = [
        low ^ 0x736f_6d65_7073_6575,
        high ^ 0x646f_7261_6e64_6f6d,
        low ^ 0x6c79_6765_6e65_7261,
        high ^ 0x7465_6462_7974_6573,
    ];
    for word in *message {
        state = mixed_in(state, u64::from_le(word));
    }
    // The last word contains the message's length in bytes modulo 256 in its highest byte. The
    // other bytes are zero because the message consists of whole words.
    let mut state = mixed_in(state, (N as u64 * 8) << 56);
    state[2] ^= 0xff;
    let [a, b, c, d] = round(round(round(round(state))));
    a ^ b ^ c ^ d
}

/// Mixes a word of the message into the state, with two rounds.
#[inline(always)]
fn mixed_in(mut state: [u64; 4], word: u64) -> [u64; 4] {
    state[3] ^= word;
    state = round(round(state));
    state[0] ^= word;
    state
}

#[inline(always)]
fn round([mut a, mut b, mut c, mut d]: [u64; 4]) -> [u64; 4] {
    a = a.wrapping_add(b);
    b = b.rotate_left(13) ^ a;
    a = a.rotate_left(32);
    c = c.wrapping_add(d);
    d = d.rotate_left(16) ^ c;
    a = a.wrapping_add(d);
    d = d.rotate_left(21) ^ a;
    c = c.wrapping_add(b);
    b = b.rotate_left(17) ^ c;
    c = c.rotate_left(32);
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::hash::Hasher;

    use proptest::prelude::*;

    use super::*;

    const KEY: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    /// Each input consists of the bytes 00, 01, 02, ... up to some length. Two vectors are from the
    /// authors of SipHash, one is from another implementation.
    #[test]
    fn siphash_matches_known_vectors() {
        let key = Key::from_bytes(KEY);
        let words = |first: u8| {
            u64::from_ne_bytes(core::array::from_fn(|n| first + u8::try_from(n).expect("n is below 8")))
        };
        assert_eq!(siphash(&key, &[]), 0x726f_db47_dd0e_0e31);
        assert_eq!(siphash(&key, &[words(0)]), 0x93f5_f579_9a93_2462);
        let words = core::array::from_fn::<_, 7, _>(|n| words(8 * u8::try_from(n).expect("n is below 7")));
        assert_eq!(siphash(&key, &words), 0xb78d_bfaf_3a8d_83bd);
    }

    proptest! {
        #[test]
        fn the_standard_library_computes_the_same(key: [u8; 16], message: [u64; 9]) {
            let half = |from: usize| u64::from_le_bytes(core::array::from_fn(|n| key[from + n]));
            #[expect(deprecated, reason = "it computes SipHash-2-4, but its successor may use another hash")]
            let mut reference = core::hash::SipHasher::new_with_keys(half(0), half(8));
            for word in message {
                reference.write(&word.to_ne_bytes());
            }
            prop_assert_eq!(siphash(&Key::from_bytes(key), &message), reference.finish());
        }
    }
}
