//! Regions of the schedule map: the first free region for a new table, and which tables to move if
//! no region is free.
//!
//! Lengths are powers of two, and a region begins at a multiple of its length. So two regions are
//! disjoint, or one region contains the other region.

/// A part of the schedule map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleRegion {
    /// The index of the region's first entry.
    pub base: u32,
    /// The number of entries in the region.
    pub length: u32,
}

impl ScheduleRegion {
    const fn end(self) -> u32 {
        self.base + self.length
    }

    /// Whether the two regions share an entry.
    pub const fn overlaps(self, other: Self) -> bool {
        self.base < other.end() && other.base < self.end()
    }
}

/// The lowest base at which a region of `length` entries fits into a map of `entries` entries
/// without overlapping any region of `in_use`; `None` if it fits nowhere.
///
/// # Panics
/// If `length` is 0.
pub fn first_fit(in_use: &[ScheduleRegion], entries: u32, length: u32) -> Option<u32> {
    assert!(length > 0, "the length of a region must not be 0");
    let mut in_use: Vec<ScheduleRegion> = in_use.to_vec();
    in_use.sort_by_key(|region| region.base);
    let mut base = 0u32;
    for region in in_use {
        if base.checked_add(length)? <= region.base {
            break;
        }
        base = base.max(region.end().checked_next_multiple_of(length)?);
    }
    (base.checked_add(length)? <= entries).then_some(base)
}

/// Chooses tables to copy. When the old regions of these tables are free, a region of `length`
/// entries is free. Returns each table's present region and its new base; `None` if no table can be
/// moved.
///
/// Much space may be free, but in pieces that are all too short. So the function empties one window
/// of `length` entries. A window is a part of the map that begins at a multiple of its length. If
/// possible, the window with the fewest used entries is chosen. If the tables of no window fit
/// elsewhere, the function empties a window of half the length, and so on.
///
/// Assume that `live`, with the new table in place of its predecessor, fills at most half of the
/// map. Then each call makes the longest free region at least twice as long: some window is at most
/// half full, and its tables fit into a free region that is half as long as a window. So the number
/// of calls until there is room is at most the number of doublings from the shortest table to
/// `length`. Usually the first call is enough.
///
/// # Panics
/// If `length` is 0.
pub fn make_room(live: &[ScheduleRegion], entries: u32, length: u32) -> Option<Vec<(ScheduleRegion, u32)>> {
    // Bound: one iteration per power of two.
    let mut window_length = length;
    while window_length > 1 {
        let load = |window: ScheduleRegion| {
            live.iter().filter(|table| table.overlaps(window)).map(|table| table.length).sum::<u32>()
        };
        let mut windows: Vec<(u32, ScheduleRegion)> = (0..entries / window_length)
            .map(|i| ScheduleRegion { base: i * window_length, length: window_length })
            .map(|window| (load(window), window))
            .filter(|(load, _)| *load > 0 && *load < window_length)
            .collect();
        windows.sort_by_key(|(load, window)| (*load, window.base));
        if let Some(moves) = windows.into_iter().find_map(|(_, window)| empty(live, entries, window)) {
            return Some(moves);
        }
        window_length /= 2;
    }
    None
}

/// The moves that empty a window, each to a free region outside the window; `None` if a table does
/// not fit elsewhere.
fn empty(
    live: &[ScheduleRegion],
    entries: u32,
    window: ScheduleRegion,
) -> Option<Vec<(ScheduleRegion, u32)>> {
    let mut in_use: Vec<ScheduleRegion> = live.to_vec();
    in_use.push(window);
    let mut tables: Vec<ScheduleRegion> =
        live.iter().copied().filter(|table| table.overlaps(window)).collect();
    // The longest tables are moved first, because short tables fit into the remaining gaps.
    tables.sort_by_key(|table| std::cmp::Reverse(table.length));
    let mut moves = Vec::with_capacity(tables.len());
    for table in tables {
        let base = first_fit(&in_use, entries, table.length)?;
        in_use.push(ScheduleRegion { base, length: table.length });
        moves.push((table, base));
    }
    Some(moves)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn regions(in_use: &[(u32, u32)]) -> Vec<ScheduleRegion> {
        in_use.iter().map(|&(base, length)| ScheduleRegion { base, length }).collect()
    }

    #[track_caller]
    fn check(in_use: &[(u32, u32)], length: u32, expected: Option<u32>) {
        assert_eq!(first_fit(&regions(in_use), 8192, length), expected);
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
        // Both halves of the map are nearly empty, but neither is free.
        let live = regions(&[(0, 1024), (4096, 1024)]);
        assert_eq!(first_fit(&live, 8192, 4096), None);
        assert_eq!(
            make_room(&live, 8192, 4096),
            Some(vec![(ScheduleRegion { base: 0, length: 1024 }, 5120)])
        );
        // No table of a full map can move.
        assert_eq!(make_room(&regions(&[(0, 4096), (4096, 4096)]), 8192, 4096), None);
    }
}
