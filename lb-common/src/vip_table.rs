//! The VIP table, which contains the service of each address: a hash table with open addressing and
//! linear probing (Knuth, "The Art of Computer Programming", volume 3, section 6.4). Each cell
//! changes with a single store.
//!
//! The kernel programs look up every destination, and most destinations are not services. A lookup
//! in a hash map of the kernel requires a call, which takes about twenty nanoseconds; a lookup in
//! this table reads one cell for nearly all destinations. A lookup that runs between two stores of
//! the daemon finds every service that exists both before and after the daemon's change. An IPv4
//! address is looked up in v4-mapped form.

use crate::abi::{MAX_PROBES, VIP_CELLS, VipCell};
use crate::net::{Address, Be16};

/// The address that a process dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Destination {
    /// The address.
    pub address: Address,
    /// The port.
    pub port: Be16,
    /// The IP protocol number.
    pub protocol: u8,
}

impl Destination {
    /// A 64-bit hash in which each bit depends on all of the input. (The function multiplies by odd
    /// constants with few regularities, from SplitMix64 and from the golden ratio, and XORs the
    /// upper half into the lower half.)
    #[inline(always)]
    fn hash(self) -> u64 {
        let [ab, cd] = self.address.halves();
        let rest = u64::from(self.port.to_network()) | u64::from(self.protocol) << 16;
        let mut hash = ab.wrapping_mul(0xBF58_476D_1CE4_E5B9);
        hash = (hash ^ hash >> 32 ^ cd).wrapping_mul(0x94D0_49BB_1331_11EB);
        hash = (hash ^ hash >> 32 ^ rest).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        hash ^ hash >> 32
    }

    /// The position at which a lookup begins, modulo the number of cells, and the
    /// [`mark`](VipCell::mark) of a matching cell.
    #[inline(always)]
    fn start(self) -> (u32, u32) {
        let hash = self.hash();
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        let (low, high) = (hash as u32, (hash >> 32) as u32);
        (low, high)
    }
}

/// The table and the addresses of its services, in kernel maps or in memory.
pub trait VipTable: Sized {
    /// A cell, or `None` past the end.
    fn cell(&self, position: u32) -> Option<VipCell>;

    /// Whether the service with this index has this address; false if there is no such service.
    fn serves(&self, service: u32, destination: Destination) -> bool;

    /// The result of [`look`] for all cells after the first. This is a method so that the kernel
    /// programs can compile the loop as separate functions, which the verifier follows only once.
    #[inline(always)]
    fn further(&self, destination: Destination) -> u32 {
        look::<_, { MAX_PROBES - 1 }>(self, destination, 1)
    }
}

#[inline(always)]
fn position(first: u32, probe: u32) -> u32 {
    first.wrapping_add(probe) & (VIP_CELLS - 1)
}

/// The result of a lookup, in place of a service index, if no service has the destination.
pub const NOTHING: u32 = u32::MAX;
/// The result for a cell, in place of a service index, if the cell belongs to another service or is
/// a tombstone. The lookup must then continue.
pub const OTHER: u32 = u32::MAX - 1;

/// The index of the service at a destination, if there is one.
#[inline(always)]
pub fn find<T: VipTable>(table: &T, destination: Destination) -> Option<u32> {
    let mut found = probe(table, destination, 0);
    if found == OTHER {
        found = table.further(destination);
    }
    if found < OTHER { Some(found) } else { None }
}

/// Examines the cell that is `number` cells after the cell to which the destination hashes. Returns
/// the service index, [`NOTHING`] or [`OTHER`]. (The result is a plain number and not an enum,
/// because the verifier requires that every part of a value is initialized.)
#[inline(always)]
pub fn probe<T: VipTable>(table: &T, destination: Destination, number: u32) -> u32 {
    let (first, mark) = destination.start();
    let Some(cell) = table.cell(position(first, number)) else { return NOTHING };
    if cell.service == VipCell::FREE.service {
        return NOTHING;
    }
    // For a tombstone, this number is not the index of any service.
    let service = cell.service - 1;
    if cell.mark == mark && table.serves(service, destination) { service } else { OTHER }
}

/// Examines `CELLS` cells, beginning with cell number `first` (see [`probe`]). Returns the service
/// index, [`NOTHING`], or [`OTHER`] if the lookup must continue after these cells.
#[inline(always)]
pub fn look<T: VipTable, const CELLS: u32>(table: &T, destination: Destination, first: u32) -> u32 {
    // Bound: CELLS cells.
    for cell in 0..CELLS {
        let found = probe(table, destination, first.wrapping_add(cell));
        if found != OTHER {
            return found;
        }
    }
    OTHER
}

/// The position of a destination's cell, if the destination is in the table.
fn position_of<T: VipTable>(table: &T, destination: Destination) -> Option<u32> {
    let is_it = |number: &u32| probe(table, destination, *number);
    let number = (0..MAX_PROBES).find(|number| is_it(number) != OTHER)?;
    (is_it(&number) != NOTHING).then(|| position(destination.start().0, number))
}

/// A store that the caller must make in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    /// The index of the cell.
    pub position: u32,
    /// The new content.
    pub cell: VipCell,
}

/// The store that enters a service at a destination. If the table has another service at this
/// destination, the store replaces it. `None` if none of the [`MAX_PROBES`] cells is free; with an
/// eighth of the cells in use, this practically never occurs by chance.
pub fn insert(table: &impl VipTable, destination: Destination, service: u32) -> Option<Store> {
    let (first, mark) = destination.start();
    let cell = VipCell { mark, service: service + 1 };
    let mut tombstone = None;
    for probe in 0..MAX_PROBES {
        let position = position(first, probe);
        let there = table.cell(position)?;
        if there == VipCell::TOMBSTONE {
            tombstone = tombstone.or(Some(position));
        } else if there == VipCell::FREE {
            return Some(Store { position: tombstone.unwrap_or(position), cell });
        } else if there.mark == mark && table.serves(there.service - 1, destination) {
            return Some(Store { position, cell });
        }
    }
    tombstone.map(|position| Store { position, cell })
}

/// The stores that remove the service at a destination, in the order in which the caller must make
/// them; none if there is no service. If the cell after the service's cell is free, no lookup needs
/// to continue past the service's cell, so this cell and the tombstones directly before it become
/// free. If the cell after it is not free, the service's cell becomes a tombstone.
pub fn remove(table: &impl VipTable, destination: Destination) -> impl Iterator<Item = Store> {
    let start = position_of(table, destination);
    let is_last = start.is_some_and(|start| table.cell(position(start, 1)) == Some(VipCell::FREE));
    let cell = if is_last { VipCell::FREE } else { VipCell::TOMBSTONE };
    let before = (1..VIP_CELLS)
        .filter_map(move |steps| Some(position(start?, VIP_CELLS - steps)))
        .take_while(move |position| is_last && table.cell(*position) == Some(VipCell::TOMBSTONE));
    start
        .map(|position| Store { position, cell })
        .into_iter()
        .chain(before.map(|position| Store { position, cell: VipCell::FREE }))
}
