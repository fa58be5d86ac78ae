//! Where tables lie in the store that they share: a place for a new one, and what to move when there is none.
//!
//! Lengths are powers of two and places are multiples of the length, so that a table never straddles another's place.
//! Which places are taken is the only state, and it is read from the tables themselves.

/// A part of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its first entry.
    pub base: u32,
    /// Its entries.
    pub length: u32,
}

impl Region {
    const fn end(self) -> u32 {
        self.base + self.length
    }

    const fn overlaps(self, other: Self) -> bool {
        self.base < other.end() && other.base < self.end()
    }
}

/// The lowest base for `length` entries in a store of `entries`, clear of everything `taken`.
///
/// # Panics
/// If `length` is 0.
pub fn first_fit(taken: &[Region], entries: u32, length: u32) -> Option<u32> {
    assert!(length > 0, "an empty table needs no place");
    let mut taken: Vec<Region> = taken.to_vec();
    taken.sort_by_key(|region| region.base);
    let mut base = 0u32;
    for region in taken {
        if base.checked_add(length)? <= region.base {
            break;
        }
        base = base.max(region.end().checked_next_multiple_of(length)?);
    }
    (base.checked_add(length)? <= entries).then_some(base)
}

/// A table that is to be moved: where it lies, and where it goes.
pub type Move = (Region, u32);

/// Which tables to copy elsewhere so that, once their old places are free, a place for `length` entries is.
///
/// Tables of other lengths cut the free space into pieces that may all be too short, however much of it there is. The
/// places for `length` entries are tried from the emptiest on; where the tables in it find no room elsewhere either,
/// room is made for them first, one power of two down, and so on. `None` if there is nothing to move.
///
/// # Panics
/// If `length` is 0.
pub fn make_room(live: &[Region], entries: u32, length: u32) -> Option<Vec<Move>> {
    // Bound: one round per power of two.
    let mut wanted = length;
    while wanted > 1 {
        let mut windows: Vec<(u32, Region)> = (0..entries / wanted)
            .map(|i| Region { base: i * wanted, length: wanted })
            .map(|window| {
                (live.iter().filter(|table| table.overlaps(window)).map(|table| table.length).sum(), window)
            })
            .filter(|(load, _)| *load > 0 && *load < wanted)
            .collect();
        windows.sort_by_key(|(load, window)| (*load, window.base));
        for (_, window) in windows {
            if let Some(moves) = empty(live, entries, window) {
                return Some(moves);
            }
        }
        wanted /= 2;
    }
    None
}

/// Copies that empty a window: each of its tables to a place outside that is free now.
fn empty(live: &[Region], entries: u32, window: Region) -> Option<Vec<Move>> {
    let mut taken: Vec<Region> = live.to_vec();
    taken.push(window);
    let mut tables: Vec<Region> = live.iter().copied().filter(|table| table.overlaps(window)).collect();
    // The longest first: the short ones fit into what is left.
    tables.sort_by_key(|table| std::cmp::Reverse(table.length));
    let mut moves = Vec::with_capacity(tables.len());
    for table in tables {
        let base = first_fit(&taken, entries, table.length)?;
        taken.push(Region { base, length: table.length });
        moves.push((table, base));
    }
    Some(moves)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn regions(taken: &[(u32, u32)]) -> Vec<Region> {
        taken.iter().map(|&(base, length)| Region { base, length }).collect()
    }

    #[track_caller]
    fn check(taken: &[(u32, u32)], length: u32, expected: Option<u32>) {
        assert_eq!(first_fit(&regions(taken), 8192, length), expected);
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
    fn scattered_tables_are_moved_together() {
        // Both halves of the store are nearly empty, and neither is free.
        let live = regions(&[(0, 1024), (4096, 1024)]);
        assert_eq!(first_fit(&live, 8192, 4096), None);
        assert_eq!(make_room(&live, 8192, 4096), Some(vec![(Region { base: 0, length: 1024 }, 5120)]));
        // A full store has nothing to move.
        assert_eq!(make_room(&regions(&[(0, 4096), (4096, 4096)]), 8192, 4096), None);
    }

    proptest! {
        /// Whatever tables were published before, one that the limit allows finds room: the store holds twice the
        /// limit, and what is in the way is moved.
        #[test]
        fn a_table_within_the_limit_always_finds_room(
            limit_log2 in 12u32..=19,
            steps in prop::collection::vec((0usize..12, 10u32..=16), 1..120),
        ) {
            let limit = 1u32 << limit_log2;
            let mut tables: Vec<Option<Region>> = vec![None; 12];
            for (service, log2) in steps {
                let length = 1u32 << log2;
                let others: u32 = tables.iter().enumerate().filter(|(i, _)| *i != service)
                    .filter_map(|(_, table)| table.map(|table| table.length)).sum();
                if others + length > limit {
                    continue;
                }
                let mut rounds = 0;
                let base = loop {
                    let live: Vec<Region> = tables.iter().flatten().copied().collect();
                    if let Some(base) = first_fit(&live, 2 * limit, length) {
                        break base;
                    }
                    rounds += 1;
                    prop_assert!(rounds <= 16, "{live:?} leave no room for {length} of {}", 2 * limit);
                    let moves = make_room(&live, 2 * limit, length);
                    prop_assert!(moves.is_some(), "{live:?} leave nothing to move for {length} of {}", 2 * limit);
                    for (from, to) in moves.unwrap_or_default() {
                        let table = tables.iter_mut().flatten().find(|table| **table == from).unwrap();
                        table.base = to;
                    }
                };
                tables[service] = Some(Region { base, length });
            }
        }
    }
}
