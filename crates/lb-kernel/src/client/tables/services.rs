//! The services of a client task in its maps: this module reads them into views, and writes them
//! step by step.
//!
//! When a service's row is written, its counters and cursors, which are in another map, are reset.
//! The kernel programs read the row at any moment, so each of its words must be valid independently
//! of the others.

use std::mem::offset_of;
use std::net::SocketAddr;

use lb_common::abi::{
    CpuService, Cursor, EjectionRules, NOT_A_SERVICE, NextTrial, Outcomes, Rules, SERVICE_FREE,
    SERVICE_LEAVING, SERVICE_LIVE, Service, TableRef, map,
};
use lb_common::net::{Address, Be16, socket_addr};
use lb_core::cursor;
use lb_core::ids::{ServiceIndex, Slot};
use lb_core::plan::ServicePlan;
use lb_core::service::Protocol;

use super::Tables;
use crate::error::DatapathError;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceView {
    pub index: ServiceIndex,
    pub name: String,
    pub address: SocketAddr,
    pub protocol: Protocol,
    pub open: bool,
    pub errno: u16,
    /// The number of the fallback's slot, or [`NO_SLOT`](lb_common::abi::NO_SLOT).
    pub fallback: u32,
    pub rules: Rules,
    pub ejection: EjectionRules,
    pub table: TableRef,
}

/// The input from which the starts of a client's cursors are computed.
#[derive(Clone, Debug)]
pub struct CursorSeed {
    /// A text that differs between client tasks, see [`lb_core::cursor::start`].
    pub task: String,
    /// Number of CPUs that the kernel may ever run on.
    pub cpus: u32,
}

impl Tables {
    /// The services in the maps, including closed ones.
    pub fn services(&self) -> Vec<ServiceView> {
        let mut views = Vec::new();
        for index in self.all_indexes() {
            let row = self.maps.services.get(index.index());
            if row.state == SERVICE_FREE {
                continue;
            }
            let address = socket_addr(row.address, row.port);
            let protocol = protocol_of(&row);
            views.push(ServiceView {
                index,
                name: name_of(&row),
                address,
                protocol,
                open: self.open_at(address, protocol) == Some(index),
                errno: row.errno,
                fallback: row.fallback,
                rules: row.rules,
                ejection: row.ejection,
                table: self.table_ref(index),
            });
        }
        views
    }

    pub(super) fn all_indexes(&self) -> impl Iterator<Item = ServiceIndex> {
        ServiceIndex::all().take(self.maps.services.length())
    }

    /// The outcomes of calls to a service, summed over all CPUs.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn outcomes(&self, index: ServiceIndex) -> Result<Outcomes, DatapathError> {
        self.outcome_row(index.number())
    }

    /// Like [`Tables::outcomes`], for several services. Their indexes must be in ascending order.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn outcomes_of(&self, indexes: &[ServiceIndex]) -> Result<Vec<Outcomes>, DatapathError> {
        let rows: Vec<u32> = indexes.iter().map(|index| index.number()).collect();
        let found = self.maps.cpu_services.get_some(&rows);
        let found = found.map_err(|error| self.fail_io(map::CPU_SERVICES, "read", error))?;
        Ok(found.into_iter().map(|service| service.outcomes).collect())
    }

    /// The number of calls to addresses that are not services, and of calls of the kernel's own
    /// sockets, summed over all CPUs.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn not_a_service(&self) -> Result<u64, DatapathError> {
        Ok(self.outcome_row(NOT_A_SERVICE)?.not_a_service)
    }

    fn outcome_row(&self, row: u32) -> Result<Outcomes, DatapathError> {
        let found = self.maps.cpu_services.get(row);
        Ok(found.map_err(|error| self.fail_io(map::CPU_SERVICES, "read", error))?.outcomes)
    }

    /// Writes a service that is not open, without a table.
    ///
    /// # Errors
    /// If the kernel refuses. The row is then unchanged.
    pub(crate) fn write_service(
        &mut self,
        index: ServiceIndex,
        service: &ServicePlan,
        cursor_seed: &CursorSeed,
    ) -> Result<(), DatapathError> {
        let mut row: Service = bytemuck::Zeroable::zeroed();
        row.fallback = Slot::number_or_none(service.fallback);
        row.errno = service.errno;
        row.rules = service.rules;
        row.ejection = service.ejection;
        row.address = Address::from(service.address.ip());
        row.port = Be16::from_host(service.address.port());
        row.protocol = service.protocol.number();
        row.state = SERVICE_LIVE;
        let name = service.name.as_bytes();
        assert!(name.len() < row.name.len(), "the configuration limits the length of names");
        row.name[..name.len()].copy_from_slice(name);
        // This write resets the counters and cursors of the previous service with this index.
        let on_cpu = |cpu| CpuService {
            cursor: Cursor {
                phase: 0,
                start: cursor::start(&cursor_seed.task, &service.name, cpu, cursor_seed.cpus),
            },
            outcomes: Outcomes::default(),
        };
        let set = self.maps.cpu_services.set_each(index.number(), on_cpu);
        set.map_err(|error| self.fail_io(map::CPU_SERVICES, "write", error))?;
        // The row is written last, so that after an error there is no row that the stored plan does
        // not contain.
        self.maps.services.set(index.index(), &row);
        Ok(())
    }

    pub(crate) fn set_errno(&mut self, index: ServiceIndex, errno: u16) {
        self.maps.services.store16(index.index(), offset_of!(Service, errno), errno);
    }

    /// Stores, if they have changed, the network namespace whose flows are evidence (0: the flows
    /// of all namespaces are evidence), and whether several processes have begun flows.
    pub(crate) fn set_evidence_scope(
        &mut self,
        index: ServiceIndex,
        namespace: u64,
        several_processes: bool,
    ) {
        let (services, row) = (&mut self.maps.services, index.index());
        let at = offset_of!(Service, namespace);
        if services.load64(row, at) != namespace {
            services.store64(row, at, namespace);
        }
        // The three bytes after this byte are zero, so the comparison of the whole word is
        // sufficient.
        let at = offset_of!(Service, several_processes);
        if services.load32(row, at) != u32::from(several_processes) {
            services.store8(row, at, u8::from(several_processes));
        }
    }

    /// Stores the peak number of open flows per share, if it changed.
    pub(crate) fn set_peak_flows(&mut self, index: ServiceIndex, peak: u64) {
        let (services, row, at) = (&mut self.maps.services, index.index(), offset_of!(Service, peak_flows));
        if services.load64(row, at) != peak {
            services.store64(row, at, peak);
        }
    }

    pub(crate) fn set_fallback(&mut self, index: ServiceIndex, slot: Option<Slot>) {
        self.maps.services.store32(index.index(), offset_of!(Service, fallback), Slot::number_or_none(slot));
    }

    /// Stores the rules word by word: a connect that reads between two stores still reads valid
    /// rules.
    pub(crate) fn set_rules(&mut self, index: ServiceIndex, rules: Rules) {
        for (i, word) in bytemuck::cast_ref::<Rules, [u32; size_of::<Rules>() / 4]>(&rules).iter().enumerate()
        {
            self.maps.services.store32(index.index(), offset_of!(Service, rules) + 4 * i, *word);
        }
    }

    /// Stores the ejection rules word by word. If the new rules eject no backend, the function
    /// readmits all ejected backends.
    pub(crate) fn set_ejection(&mut self, index: ServiceIndex, rules: EjectionRules) {
        for (i, word) in bytemuck::cast_ref::<EjectionRules, [u32; size_of::<EjectionRules>() / 4]>(&rules)
            .iter()
            .enumerate()
        {
            self.maps.services.store32(index.index(), offset_of!(Service, ejection) + 4 * i, *word);
        }
        if rules.failures == 0 {
            for view in self.slots().into_iter().filter(|view| view.service == index) {
                self.readmit(view.at.slot);
            }
            self.set_next_trial(index, NextTrial::default());
        }
    }

    pub(super) fn next_trial(&self, index: ServiceIndex) -> NextTrial {
        NextTrial::from_word(self.maps.services.load64(index.index(), offset_of!(Service, next_trial)))
    }

    pub(super) fn set_next_trial(&mut self, index: ServiceIndex, next: NextTrial) {
        self.maps.services.store64(index.index(), offset_of!(Service, next_trial), next.to_word());
    }

    /// Starts to balance connects to the service's address.
    ///
    /// # Errors
    /// If the VIP table has no free cell for the address.
    pub(crate) fn open_service(&mut self, index: ServiceIndex) -> Result<(), DatapathError> {
        let row = self.maps.services.get(index.index());
        self.direct(socket_addr(row.address, row.port), protocol_of(&row), index)?;
        self.set_service_state(index, SERVICE_LIVE);
        Ok(())
    }

    /// Stops balancing connects to the service's address, unless the address now belongs to another
    /// service.
    pub(crate) fn close_service(&mut self, index: ServiceIndex) {
        let row = self.maps.services.get(index.index());
        let (address, protocol) = (socket_addr(row.address, row.port), protocol_of(&row));
        if self.open_at(address, protocol) == Some(index) {
            self.undirect(address, protocol);
        }
        self.set_service_state(index, SERVICE_LEAVING);
    }

    /// Frees the index of a closed service. The rest of the row is unchanged: a program may have
    /// found the service just before it was closed or another service got its address, and must
    /// still read a complete row. The next service with this index overwrites the whole row.
    pub(crate) fn free_service(&mut self, index: ServiceIndex) {
        self.set_service_state(index, SERVICE_FREE);
    }

    fn set_service_state(&mut self, index: ServiceIndex, state: u8) {
        let mut row = self.maps.services.get(index.index());
        row.state = state;
        // The rest of the word is the service's port and protocol, which do not change.
        let word = bytemuck::bytes_of(&row);
        let at = offset_of!(Service, state) & !3;
        let word = u32::from_ne_bytes(word[at..at + 4].try_into().expect("the range has four bytes"));
        self.maps.services.store32(index.index(), at, word);
    }
}

/// The protocol of a service in the maps, which contain only known protocols.
fn protocol_of(row: &Service) -> Protocol {
    Protocol::of_number(row.protocol).unwrap_or(Protocol::Tcp)
}

pub(super) fn name_of(row: &Service) -> String {
    let end = row.name.iter().position(|byte| *byte == 0).unwrap_or(row.name.len());
    String::from_utf8_lossy(&row.name[..end]).into_owned()
}
