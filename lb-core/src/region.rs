//! Where a new table goes: the first free place of a store that is wide enough.
//!
//! Lengths are powers of two and places are multiples of the length, so that a table never straddles another's place.
//! The set of taken places is the only state, and it is read from the tables themselves.

/// A part of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its first entry.
    pub base: u32,
    /// Its entries.
    pub length: u32,
}

/// The lowest base for `length` entries in a store of `entries`, clear of everything `taken`.
///
/// # Panics
/// If `length` is 0.
pub fn first_fit(mut taken: Vec<Region>, entries: u32, length: u32) -> Option<u32> {
    assert!(length > 0, "an empty table needs no place");
    taken.sort_by_key(|region| region.base);
    let mut base = 0u32;
    for region in taken {
        if base.checked_add(length)? <= region.base {
            break;
        }
        let end = region.base.checked_add(region.length)?;
        base = base.max(end.checked_next_multiple_of(length)?);
    }
    (base.checked_add(length)? <= entries).then_some(base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(taken: &[(u32, u32)], length: u32, expected: Option<u32>) {
        let taken = taken.iter().map(|&(base, length)| Region { base, length }).collect();
        assert_eq!(first_fit(taken, 8192, length), expected);
    }

    #[test]
    fn the_lowest_aligned_gap_is_taken() {
        check(&[], 1024, Some(0));
        check(&[(0, 1024)], 1024, Some(1024));
        check(&[(0, 1024)], 4096, Some(4096));
        check(&[(4096, 1024), (0, 1024)], 2048, Some(2048));
        check(&[(1024, 1024)], 1024, Some(0));
        check(&[(0, 4096), (4096, 4096)], 1024, None);
        check(&[(0, 1024), (4096, 1024)], 8192, None);
    }

    #[test]
    fn the_store_holds_what_it_is_made_for() {
        // Twice the entries in use: whatever the order, one more table of the same length fits.
        let mut taken = Vec::new();
        for _ in 0..8 {
            let base = first_fit(taken.clone(), 8192, 1024).unwrap();
            taken.push(Region { base, length: 1024 });
        }
        assert_eq!(first_fit(taken, 8192, 1024), None);
    }
}
