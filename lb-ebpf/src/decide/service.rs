//! Finds the service of a call in the VIP table.

use core::cell::Cell;

use lb_common::abi::{MAX_PROBES, NOT_A_SERVICE, Service, VipCell};
use lb_common::net::{Address, Be16, Be32};
use lb_common::vip_table::{Destination, OTHER, VipTable, find, look};

use crate::kernel::context::Dial;
use crate::maps::VIP_TABLE;
use crate::rows;

/// The dialled service. (It is not an `Option`, because the verifier requires that every part
/// always has a value.)
#[derive(Clone, Copy)]
pub struct Dialled {
    /// The service index; [`NOT_A_SERVICE`] if the address is not a service.
    pub index: u32,
    /// The service's row of `SERVICES`; null if the address is not a service.
    pub row: *const Service,
    /// The IP protocol number of the services that the socket can dial; 0 if there are none.
    pub protocol: u8,
}

impl Dialled {
    #[inline(always)]
    fn no_service(protocol: u8) -> Self {
        Self { index: NOT_A_SERVICE, row: core::ptr::null(), protocol }
    }

    /// Whether the address is a service.
    #[inline(always)]
    pub fn is_service(self) -> bool {
        !self.row.is_null()
    }
}

/// The service at an address.
#[inline(always)]
pub fn service_at(dial: &Dial, address: Address) -> Dialled {
    let Some(protocol) = dial.protocol() else { return Dialled::no_service(0) };
    let services = Services { row: Cell::new(core::ptr::null()) };
    let Some(index) = find(&services, Destination { address, port: dial.port(), protocol }) else {
        return Dialled::no_service(protocol);
    };
    // The lookup has nearly always stored the row already.
    let row = services.row.get();
    Dialled {
        index,
        row: if row.is_null() { rows::service(index).unwrap_or(core::ptr::null()) } else { row },
        protocol,
    }
}

struct Services {
    /// The service's row of `SERVICES`, if the first examined cell belongs to the service.
    row: Cell<*const Service>,
}

impl VipTable for Services {
    #[inline(always)]
    fn cell(&self, position: u32) -> Option<VipCell> {
        let cell: *const VipCell = VIP_TABLE.get_ptr(position)?;
        // SAFETY: a live map value. The daemon may change it at any time, so it is read by one
        // volatile load.
        Some(VipCell::from_word(unsafe { cell.cast::<u64>().read_volatile() }))
    }

    #[inline(always)]
    fn serves(&self, service: u32, destination: Destination) -> bool {
        let Some(service) = rows::service(service) else { return false };
        let (ab, cd, end) = words(destination);
        // SAFETY: a live map value, with an aligned address; a service's address does not change
        // while a cell refers to the service.
        let is_it = unsafe {
            rows::has_halves(&raw const (*service).address, [ab, cd])
                && rows::port_and_protocol(service) == end
        };
        if is_it {
            self.row.set(service);
        }
        is_it
    }

    #[inline(always)]
    fn further(&self, destination: Destination) -> u32 {
        let (ab, cd, end) = words(destination);
        service_further_on(ab, cd, end)
    }
}

/// The two halves of a destination's address, and its port and protocol, in network order.
#[inline(always)]
fn words(Destination { address, port, protocol }: Destination) -> (u64, u64, u32) {
    let [ab, cd] = address.halves();
    (ab, cd, u32::from(port.to_network()) | u32::from(protocol) << 16)
}

/// Number of cells that one function examines. The verifier follows a loop over this number of
/// cells more quickly than a loop over all cells.
const CELLS: u32 = 8;

/// The index of the service at a destination, from a search of all [`MAX_PROBES`] cells. Called
/// only if the first cell belongs to another service. If there is no service at the destination,
/// the result is [`OTHER`] or [`NOTHING`](lb_common::vip_table::NOTHING).
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn service_further_on(ab: u64, cd: u64, end: u32) -> u32 {
    const { assert!(MAX_PROBES == 4 * CELLS) };
    let more = |found, part| if found == OTHER { service_at_some(ab, cd, end, part) } else { found };
    // The calls are not in a loop, because without CAP_PERFMON the verifier cannot prove that a
    // loop with a call in it ends.
    more(more(more(more(OTHER, 0), 1), 2), 3)
}

/// Like [`service_further_on`], for the cells of one part: the result of [`look`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn service_at_some(ab: u64, cd: u64, end: u32, part: u32) -> u32 {
    let words = [ab as u32, (ab >> 32) as u32, cd as u32, (cd >> 32) as u32].map(Be32::from_network);
    let (port, protocol) = (Be16::from_network(end as u16), (end >> 16) as u8);
    let destination = Destination { address: Address { words }, port, protocol };
    look::<_, CELLS>(&Services { row: Cell::new(core::ptr::null()) }, destination, part.wrapping_mul(CELLS))
}
