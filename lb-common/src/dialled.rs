//! Which service is dialled at an address: a hash table with open addressing and linear probing (Knuth, "The Art of
//! Computer Programming", volume 3, section 6.4), of cells that change with a single store each.
//!
//! The kernel programs look every address up that a process dials, most of which are no services; a hash map of the kernel's
//! is a call of some twenty nanoseconds for that, these are one cell for nearly all. Whatever store of the daemon a look-up
//! falls between, it finds every service that is there before and after it. An IPv4 address is looked up v4-mapped.

use crate::abi::{DIALLED_CELLS, DialledCell, MAX_PROBES};
use crate::net::{Address, Be16};

/// What a process dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dialled {
    /// The address.
    pub address: Address,
    /// The port.
    pub port: Be16,
    /// The IP protocol number.
    pub protocol: u8,
}

impl Dialled {
    /// 64 bits of which every one depends on all of it. (Multiplications by odd constants with few regularities, those of
    /// SplitMix64 and the golden ratio, and shifts that bring the upper half down.)
    #[inline(always)]
    fn hash(self) -> u64 {
        let [a, b, c, d] = self.address.words.map(|word| u64::from(word.to_network()));
        let rest = u64::from(self.port.to_network()) | u64::from(self.protocol) << 16;
        let mut hash = (a | b << 32).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        hash = (hash ^ hash >> 32 ^ (c | d << 32)).wrapping_mul(0x94D0_49BB_1331_11EB);
        hash = (hash ^ hash >> 32 ^ rest).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        hash ^ hash >> 32
    }

    /// The cell at which a look-up begins, and what its cell is marked with.
    #[inline(always)]
    fn start(self) -> (u32, u32) {
        let hash = self.hash();
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        let (low, high) = (hash as u32, (hash >> 32) as u32);
        (low, high)
    }
}

/// The table as one side sees it.
pub trait Cells {
    /// A cell, or `None` past the end.
    fn cell(&self, position: u32) -> Option<DialledCell>;

    /// Whether this is what is dialled for a service. Of a number that is no service's the answer is no.
    fn is_of(&self, service: u32, dialled: Dialled) -> bool;
}

#[inline(always)]
fn position(first: u32, probe: u32) -> u32 {
    first.wrapping_add(probe) & (DIALLED_CELLS - 1)
}

/// The service that is dialled, if it is one.
#[inline(always)]
pub fn find<T: Cells>(cells: &T, dialled: Dialled) -> Option<u32> {
    look(cells, dialled).map(|(_, service)| service)
}

/// The cell of what is dialled, and its service.
#[inline(always)]
fn look<T: Cells>(cells: &T, dialled: Dialled) -> Option<(u32, u32)> {
    let (first, mark) = dialled.start();
    // Bound: MAX_PROBES cells.
    for probe in 0..MAX_PROBES {
        let position = position(first, probe);
        let cell = cells.cell(position)?;
        if cell.service == DialledCell::FREE.service {
            return None;
        }
        // No service has the number of one that is gone.
        let service = cell.service - 1;
        if cell.mark == mark && cells.is_of(service, dialled) {
            return Some((position, service));
        }
    }
    None
}

/// A cell that is to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    /// Where.
    pub position: u32,
    /// What.
    pub cell: DialledCell,
}

/// What makes a service the one that is dialled, in place of another one if there is. `None` if there is no room near enough:
/// with an eighth of the cells in use that does not happen by chance.
pub fn open(cells: &impl Cells, dialled: Dialled, service: u32) -> Option<Store> {
    let (first, mark) = dialled.start();
    let cell = DialledCell { mark, service: service + 1 };
    let mut gone = None;
    for probe in 0..MAX_PROBES {
        let position = position(first, probe);
        let there = cells.cell(position)?;
        if there == DialledCell::GONE {
            gone = gone.or(Some(position));
        } else if there == DialledCell::FREE {
            return Some(Store { position: gone.unwrap_or(position), cell });
        } else if there.mark == mark && cells.is_of(there.service - 1, dialled) {
            return Some(Store { position, cell });
        }
    }
    gone.map(|position| Store { position, cell })
}

/// What closes the service that is dialled, in this order: the cell becomes free if nobody is looked for beyond it, and so do
/// those before it that were kept for its sake. Nothing if there is no service.
pub fn close(cells: &impl Cells, dialled: Dialled) -> impl Iterator<Item = Store> {
    let place = look(cells, dialled).map(|(position, _)| position);
    let is_last = place.is_some_and(|place| cells.cell(position(place, 1)) == Some(DialledCell::FREE));
    let cell = if is_last { DialledCell::FREE } else { DialledCell::GONE };
    let before = (1..DIALLED_CELLS)
        .filter_map(move |steps| Some(position(place?, DIALLED_CELLS - steps)))
        .take_while(move |position| is_last && cells.cell(*position) == Some(DialledCell::GONE));
    place
        .map(|position| Store { position, cell })
        .into_iter()
        .chain(before.map(|position| Store { position, cell: DialledCell::FREE }))
}
