//! Indexes for a list without indexes: a hash of each address.
//!
//! The order of a list must not affect the indexes, and an added endpoint should not change other
//! indexes. If the index were the rank among sorted addresses, an added endpoint would change
//! nearly all indexes; with a hash, it changes only indexes of addresses that collide.
//! `docs/reference/subsets.md` has the definition, and `docs/design/subsets.md` the costs.

use std::net::SocketAddr;

use xxhash_rust::xxh64::xxh64;

/// The number of possible indexes, for a list of any length. More indexes make the orders of all
/// client tasks longer; fewer indexes make more addresses collide.
pub const PLACES: u32 = 16_384;

/// The longest list without indexes: three quarters of [`PLACES`]. In a list of this length, an
/// added endpoint changes two of the other indexes on average; with 16,000 endpoints, it changes
/// forty.
pub const MAX_WITHOUT_INDEXES: u32 = PLACES / 4 * 3;

/// The text to hash: RFC 5952 with brackets, and a v4-mapped address as IPv4.
fn text(address: SocketAddr) -> String {
    SocketAddr::new(address.ip().to_canonical(), address.port()).to_string()
}

/// The index of each address, in the order of `addresses`: XXH64 of its text with seed 0, modulo
/// [`PLACES`]. If an address that is earlier in sorted order has that index, the later address gets
/// the next free index, wrapping around at the end. Equal addresses get different indexes.
///
/// # Panics
/// If there are more addresses than [`PLACES`].
pub fn indexes(addresses: &[SocketAddr]) -> Vec<u32> {
    assert!(addresses.len() <= PLACES as usize, "{} addresses, but only {PLACES} indexes", addresses.len());
    let mut order: Vec<usize> = (0..addresses.len()).collect();
    order.sort_by_key(|position| addresses[*position]);
    let mut is_taken = vec![false; PLACES as usize];
    let mut indexes = vec![0; addresses.len()];
    for position in order {
        let hash = xxh64(text(addresses[position]).as_bytes(), 0) % u64::from(PLACES);
        let first = u32::try_from(hash).expect("the hash is below PLACES");
        let mut places = (first..PLACES).chain(0..first);
        let free = places.find(|place| !is_taken[*place as usize]);
        indexes[position] = free.expect("there are at least as many indexes as addresses");
        is_taken[indexes[position] as usize] = true;
    }
    indexes
}
