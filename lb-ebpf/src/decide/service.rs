//! Which service a call is for: the VIP table as the programs see it.

use lb_common::abi::VipCell;
use lb_common::net::Address;
use lb_common::vip_table::{Destination, VipTable, find};

use crate::kernel::context::Dial;
use crate::maps::VIP_TABLE;
use crate::rows;

/// The index of the service at an address, if there is one.
#[inline(always)]
pub fn service_at(dial: &Dial, address: Address) -> Option<u32> {
    find(&Services, Destination { address, port: dial.port(), protocol: dial.protocol()? })
}

struct Services;

impl VipTable for Services {
    #[inline(always)]
    fn cell(&self, position: u32) -> Option<VipCell> {
        let cell: *const VipCell = VIP_TABLE.get_ptr(position)?;
        // SAFETY: a live map value, which changes at any time, hence one volatile load.
        Some(VipCell::from_word(unsafe { cell.cast::<u64>().read_volatile() }))
    }

    #[inline(always)]
    fn serves(&self, service: u32, destination: Destination) -> bool {
        match rows::service(service) {
            Some(service) => {
                // SAFETY: a live map value; a service's address stays while its cell refers to it.
                let (address, port, protocol) =
                    unsafe { ((*service).address, (*service).port, (*service).protocol) };
                destination == Destination { address, port, protocol }
            }
            None => false,
        }
    }
}
