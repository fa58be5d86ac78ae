//! Rocksteadier subsetting ("Reinventing Backend Subsetting at Google", ACM Queue 2022), socklb's
//! default.
//!
//! Clients and backends are cut into lots of ten by their numbers. Each lot of clients visits the
//! lots of backends in an order of its own. For each pair of lots, a shuffle deals the ten backends
//! to the ten clients, one to each. The dealing makes the load even, and a new backend enters an
//! order at one position without moving the other backends. The order depends neither on the number
//! of clients nor on the size of the subset, so no client reconnects when one of these changes.

use super::Position;
use super::random::{SplitMix64, mix64, shuffle};
use super::van_der_corput::{clockwise, rank, vdc};

/// The number of members of a lot, as in the article: larger lots make subsets differ more, but
/// balance worse.
const LOT: u32 = 10;

/// Makes the hash of the rotation differ from the hashes of the shuffles.
const ROTATION: u64 = 0xC1;

/// The order, read from a table with ten rows. Each lot of backends is a shuffled column, and the
/// columns are in the order in which the client's lot visits them. A client reads its own row
/// across all columns, then the next row, and so on, once around. The client skips the numbers of
/// the last lot that have no backend.
pub(super) fn order(position: Position) -> impl Iterator<Item = u32> {
    // Without the rotation by the seed, the first client lot of every job would begin with the same
    // backend lots. Many small jobs with the same backends would then all use these lots.
    let from = vdc(lot_of(position).into()).wrapping_add(mix64(&[position.seed, ROTATION]));
    read(position, move |lots| clockwise(lots, from))
}

/// The order as the article defines it: without the rotation, and with lots of backends that are
/// evenly spaced on the ring.
pub(super) fn scaled(position: Position) -> impl Iterator<Item = u32> {
    let client_lot = lot_of(position);
    read(position, move |lots| super::ring::from_scaled_point(lots, vdc(client_lot.into())))
}

const fn lot_of(position: Position) -> u32 {
    position.client / LOT
}

/// Reads the rows of a client. `lots` returns the order of the columns, given their number.
fn read<I: Iterator<Item = u32>>(position: Position, lots: impl Fn(u32) -> I) -> impl Iterator<Item = u32> {
    let Position { client, backends, seed, .. } = position;
    let first_row = rank(client % LOT, LOT);
    let backend_lots = backends.div_ceil(LOT);
    let places = (0..LOT).flat_map(move |row| {
        let row = (first_row + row) % LOT;
        lots(backend_lots).enumerate().map(move |(visited, lot)| (row as usize, visited, lot))
    });
    // The dealt lots, in the order in which the first row visits them. They are stored because the
    // order of a list without indexes has thousands of lots, and is read far beyond the first row:
    // most numbers of the order have no endpoint.
    let mut dealt = Vec::new();
    let backend = move |(row, visited, lot): (usize, usize, u32)| {
        if visited == dealt.len() {
            dealt.push(column(seed, lot_of(position).into(), lot));
        }
        lot * LOT + u32::from(dealt[visited][row])
    };
    places.map(backend).filter(move |&backend| backend < backends)
}

/// The shuffled backends of a lot: entry `row` goes to the client with this row in the client lot.
fn column(seed: u64, client_lot: u64, lot: u32) -> [u8; LOT as usize] {
    let mut column = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
    shuffle(&mut column, &mut SplitMix64::new(mix64(&[seed, client_lot, lot.into()])));
    column
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(client: u32, backends: u32) -> Vec<u32> {
        let position = Position { client, clients: 100, backends, size: 20, seed: 99 };
        order(position).collect()
    }

    #[test]
    fn the_first_rows_of_a_client_lot_cover_every_backend_once() {
        for first_client in [0, 10, 90] {
            let lots = 13;
            let mut dealt: Vec<u32> = (first_client..first_client + LOT)
                .flat_map(|client| row(client, lots * LOT).into_iter().take(13))
                .collect();
            dealt.sort_unstable();
            assert!(dealt.into_iter().eq(0..lots * LOT));
        }
    }

    #[test]
    fn a_row_visits_every_lot_once_before_it_repeats() {
        let mut lots: Vec<u32> = row(3, 130).into_iter().take(13).map(|backend| backend / LOT).collect();
        lots.sort_unstable();
        assert!(lots.into_iter().eq(0..13));
    }

    #[test]
    fn client_lots_begin_at_different_backend_lots() {
        let first_lot = |client| row(client, 40)[0] / LOT;
        let mut lots = [0, 10, 20, 30].map(first_lot);
        lots.sort_unstable();
        assert_eq!(lots, [0, 1, 2, 3]);
    }
}
