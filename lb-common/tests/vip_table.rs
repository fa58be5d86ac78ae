//! The VIP table: after any inserts and removals, every lookup returns the same result as in a map.
//! Between any two stores, a lookup finds every service that exists both before and after the
//! change.

use std::cell::RefCell;
use std::collections::BTreeMap;

use lb_common::abi::{MAX_SERVICES, VIP_CELLS, VipCell};
use lb_common::net::{Address, Be16};
use lb_common::vip_table::{Destination, Store, VipTable, find, insert, remove};
use proptest::prelude::*;

/// The cells of a table, and the address of each service.
struct Table {
    cells: RefCell<Vec<VipCell>>,
    services: Vec<Option<Destination>>,
}

impl Table {
    fn new() -> Self {
        let cells = vec![VipCell::FREE; VIP_CELLS as usize];
        Self { cells: RefCell::new(cells), services: vec![None; MAX_SERVICES as usize] }
    }

    fn store(&self, store: Store) {
        self.cells.borrow_mut()[store.position as usize] = store.cell;
    }

    fn used(&self) -> usize {
        self.cells.borrow().iter().filter(|cell| **cell != VipCell::FREE).count()
    }
}

impl VipTable for Table {
    fn cell(&self, position: u32) -> Option<VipCell> {
        self.cells.borrow().get(position as usize).copied()
    }

    fn serves(&self, service: u32, destination: Destination) -> bool {
        self.services.get(service as usize).is_some_and(|its| *its == Some(destination))
    }
}

/// A destination with an address of one of a few kinds. Destinations often differ in only one bit.
fn destination(number: u16) -> Destination {
    let [high, low] = number.to_be_bytes();
    let address = match high % 3 {
        0 => Address::from(std::net::Ipv4Addr::new(10, 96, high, low)),
        1 => Address::from(std::net::Ipv6Addr::new(0xfd00, 0, 0, high.into(), 0, 0, 0, low.into())),
        _ => Address::from(std::net::Ipv4Addr::new(10, low, 0, 1)),
    };
    Destination {
        address,
        port: Be16::from_host(80 + u16::from(low % 2)),
        protocol: if low % 4 < 2 { 6 } else { 17 },
    }
}

proptest! {
    #[test]
    fn lookups_match_a_map(
        steps in prop::collection::vec((any::<bool>(), 0u16..600), 1..200),
    ) {
        let mut table = Table::new();
        let mut model: BTreeMap<u16, u32> = BTreeMap::new();
        for (opens, number) in steps {
            let it = destination(number);
            // Two numbers may result in the same destination.
            let same = |other: &u16| destination(*other) == it;
            let before = model.keys().copied().find(same);
            let others: Vec<(u16, u32)> = model.iter().map(|(n, s)| (*n, *s)).filter(|(n, _)| Some(*n) != before).collect();
            let all_there = |table: &Table| others.iter().all(|(n, s)| find(table, destination(*n)) == Some(*s));
            if opens {
                let used: Vec<u32> = model.values().copied().collect();
                let Some(service) = (0..MAX_SERVICES).find(|service| !used.contains(service)) else { continue };
                table.services[service as usize] = Some(it);
                let store = insert(&table, it, service).expect("the table has room");
                table.store(store);
                if let Some(before) = before {
                    let old = model.remove(&before).expect("the model contains the destination");
                    table.services[old as usize] = None;
                }
                model.insert(number, service);
                prop_assert_eq!(find(&table, it), Some(service));
            } else {
                let stores: Vec<Store> = remove(&table, it).collect();
                prop_assert_eq!(!stores.is_empty(), before.is_some());
                for store in stores {
                    table.store(store);
                    prop_assert!(all_there(&table), "a lookup between two stores misses another service");
                    prop_assert_eq!(find(&table, it), None);
                }
                if let Some(before) = before {
                    let old = model.remove(&before).expect("the model contains the destination");
                    table.services[old as usize] = None;
                }
                prop_assert_eq!(find(&table, it), None);
            }
            prop_assert!(all_there(&table));
        }
        // After all removals no cell is in use: tombstones are removed with the last service that
        // requires them.
        for (number, _) in std::mem::take(&mut model) {
            let stores: Vec<Store> = remove(&table, destination(number)).collect();
            stores.into_iter().for_each(|store| table.store(store));
        }
        prop_assert_eq!(table.used(), 0);
    }
}

/// The table has room for the maximum number of services, even at neighbouring addresses.
#[test]
fn the_maximum_number_of_neighbouring_addresses_fits() {
    let mut table = Table::new();
    let of = |service: u32| Destination {
        address: Address::from(std::net::Ipv4Addr::from_bits(0x0a60_0000 + service)),
        port: Be16::from_host(80),
        protocol: 6,
    };
    for service in 0..MAX_SERVICES {
        table.services[service as usize] = Some(of(service));
        let store = insert(&table, of(service), service).expect("the table has room");
        table.store(store);
    }
    for service in 0..MAX_SERVICES {
        assert_eq!(find(&table, of(service)), Some(service));
    }
    // For most addresses that are not services, the first cell suffices.
    let looks = |address: u32| {
        let looks = std::cell::Cell::new(0u32);
        let counting = Counting { table: &table, looks: &looks };
        assert_eq!(find(&counting, of(address)), None);
        looks.get()
    };
    let misses = 10_000;
    let sum: u32 = (MAX_SERVICES..MAX_SERVICES + misses).map(looks).sum();
    // Knuth's estimate for an eighth in use: (1 + 1 / (1 - 1/8)^2) / 2 = 1.15.
    assert!(sum < misses * 13 / 10, "{sum} cells read for {misses} misses");
}

struct Counting<'t> {
    table: &'t Table,
    looks: &'t std::cell::Cell<u32>,
}

impl VipTable for Counting<'_> {
    fn cell(&self, position: u32) -> Option<VipCell> {
        self.looks.set(self.looks.get() + 1);
        self.table.cell(position)
    }

    fn serves(&self, service: u32, destination: Destination) -> bool {
        self.table.serves(service, destination)
    }
}
