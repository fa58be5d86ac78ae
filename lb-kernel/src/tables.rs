//! The tables of one client task as they lie in its maps: plans are read from them, steps written into them, and counts
//! read back.
//!
//! The schedule map is one store of entries. A new table is written where no service points and becomes current with a
//! single store of its table reference; the region that it leaves is written again only after every program that may still be reading
//! it has ended.

mod counts;

mod vip_table;

mod fullness;

pub use counts::Counts;
pub use fullness::Fullness;

use std::collections::BTreeMap;
use std::io;
use std::mem::offset_of;
use std::net::SocketAddr;
use std::sync::Arc;

use aya::maps::MapError;
use lb_common::abi::{
    self, Anomalies, Backend, BackendAddress, BackendState, Cursor, ENTRIES_PER_CELL, Members, NO_MEMBERS,
    NO_SLOT, NOT_A_SERVICE, Outcomes, Rules, SERVICE_FREE, SERVICE_LEAVING, SERVICE_LIVE, ScheduleCell,
    Service, StateWord, TableRef, map,
};
use lb_common::load;
use lb_common::net::{Address, Be16, socket_addr};
use lb_core::arena::region::{Region, first_fit, make_room};
use lb_core::plan::{BackendPlan, Plan, ServicePlan, Step};
use lb_core::service::Protocol;
use lb_core::walk;

use super::counters::sum;
use super::error::DatapathError;
use super::maps::{Maps, PerCpu, Raw, on_every_cpu};
use super::pins::Pins;
use super::retired;

/// The tables of one client task.
pub struct Tables {
    maps: Maps,
    pins: Pins,
    /// Tables that were replaced, and may still be read.
    retired: Vec<Retired>,
    /// Those of them that were replaced before the wait for readers that is under way.
    waiting: Vec<Retired>,
    /// Backends that have returned: slot and generation, and the counts that they go on with.
    returned: Vec<((u32, u32), abi::SlotCounters)>,
}

/// A table that was replaced.
struct Retired {
    entries: Region,
    /// Where its members lie, if they did not move on to its successor.
    members: Option<u32>,
}

/// What the starts of a client's cursors are computed from.
#[derive(Clone, Debug)]
pub struct CursorSeed {
    /// Tells client tasks apart, see [`lb_core::walk::start`].
    pub task: String,
    /// CPUs that the kernel may ever run on.
    pub cpus: u32,
}

/// A slot as the maps show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotView {
    pub slot: u32,
    pub generation: u32,
    pub service: u16,
    pub address: SocketAddr,
    pub weight: u32,
    pub state: BackendState,
    pub usable: bool,
    /// Entries that it has in its service's table.
    pub entries: u32,
}

/// A service as the maps show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceView {
    pub index: u16,
    pub name: String,
    pub address: SocketAddr,
    pub protocol: Protocol,
    pub open: bool,
    pub errno: u16,
    pub fallback: u32,
    pub rules: Rules,
    pub table: TableRef,
}

impl Tables {
    /// Opens the tables of a client.
    ///
    /// # Errors
    /// If a map is missing or may not be opened.
    pub fn open(pins: &Pins, writable: bool) -> Result<Self, DatapathError> {
        let maps = Maps::open(&pins.maps(), writable)?;
        Ok(Self { maps, pins: pins.clone(), retired: Vec::new(), waiting: Vec::new(), returned: Vec::new() })
    }

    // ---- reading ---------------------------------------------------------------------------------------------------

    /// The services in the maps, closed ones included.
    pub fn services(&self) -> Vec<ServiceView> {
        let mut views = Vec::new();
        for index in 0..self.maps.services.len() {
            let row = self.maps.services.get(index);
            if row.state == SERVICE_FREE {
                continue;
            }
            let index = u16::try_from(index).expect("MAX_SERVICES fits in 16 bits");
            let address = socket_addr(row.address, row.port);
            let protocol = protocol_of(&row);
            // The word is read in one piece: the daemon may be switching tables meanwhile.
            let word = self.maps.services.load64(usize::from(index), offset_of!(Service, table));
            views.push(ServiceView {
                index,
                name: name_of(&row),
                address,
                protocol,
                open: self.open_at(address, protocol) == Some(index),
                errno: u16::try_from(row.errno).unwrap_or(u16::MAX),
                fallback: row.fallback,
                rules: row.rules,
                table: TableRef::from_word(word),
            });
        }
        views
    }

    /// The occupied slots.
    pub fn slots(&self) -> Vec<SlotView> {
        let slots = 0..u32::try_from(self.maps.backends.len()).unwrap_or(u32::MAX);
        slots.filter_map(|slot| self.slot(slot)).collect()
    }

    /// A slot, if it is occupied.
    pub fn slot(&self, slot: u32) -> Option<SlotView> {
        let Backend { state, share, endpoint, .. } = self.maps.backends.get(slot as usize);
        let known = BackendState::from_u8(state.state).filter(|state| *state != BackendState::Free)?;
        Some(SlotView {
            slot,
            generation: endpoint.generation,
            service: endpoint.service,
            address: socket_addr(endpoint.address, endpoint.port),
            weight: endpoint.weight,
            state: known,
            usable: state.is_usable(),
            entries: share,
        })
    }

    /// The generation that the next backend of each free slot gets, where it is not the first.
    pub fn next_generations(&self) -> Vec<(u32, u32)> {
        let slots = 0..u32::try_from(self.maps.backends.len()).unwrap_or(u32::MAX);
        let free = slots
            .filter(|slot| self.maps.backends.get(*slot as usize).state.state == BackendState::Free as u8);
        let generations = free.map(|slot| (slot, self.maps.backends.get(slot as usize).endpoint.generation));
        generations.filter(|(_, generation)| *generation != 0).collect()
    }

    /// The entries of a table, one slot each.
    pub fn schedule(&self, table: TableRef) -> Vec<u16> {
        let cells = table.base / ENTRIES_PER_CELL..(table.base + table.len()) / ENTRIES_PER_CELL;
        let cells = cells.filter(|cell| (*cell as usize) < self.maps.schedule.len());
        cells.flat_map(|cell| self.maps.schedule.get(cell as usize).slots).collect()
    }

    /// Open flows of a slot's backend.
    pub fn active(&self, slot: u32) -> u64 {
        self.maps.backends.get(slot as usize).flows
    }

    /// Takes a slot's errors away if they are long past, at the programs' tick `now`. One that is added meanwhile stays.
    pub fn forget_errors(&self, slot: u32, now: u32) {
        let (slot, errors) = (slot as usize, offset_of!(Backend, errors));
        let word = self.maps.backends.load64(slot, errors);
        if load::are_stale(bytemuck::cast(word), now) {
            self.maps.backends.replace64(slot, errors, word, 0);
        }
    }

    /// What should not have happened, over all CPUs.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn anomalies(&self) -> Result<Anomalies, DatapathError> {
        let cpus =
            self.maps.anomalies.get(&0, 0).map_err(|error| self.fail(map::ANOMALIES, "read", error))?;
        Ok(sum(&raw_values(&cpus)))
    }

    /// How connects to a service ended, over all CPUs.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn outcomes(&self, index: u16) -> Result<Outcomes, DatapathError> {
        self.outcome_row(u32::from(index))
    }

    /// Connects to addresses that are no service, over all CPUs.
    ///
    /// # Errors
    /// If the kernel refuses the look-up.
    pub fn passed_by(&self) -> Result<u64, DatapathError> {
        Ok(self.outcome_row(NOT_A_SERVICE)?.not_a_service)
    }

    fn outcome_row(&self, row: u32) -> Result<Outcomes, DatapathError> {
        let cpus =
            self.maps.outcomes.get(&row, 0).map_err(|error| self.fail(map::OUTCOMES, "read", error))?;
        Ok(sum(&raw_values(&cpus)))
    }

    /// The maps' contents as a plan.
    ///
    /// # Errors
    /// If they contradict themselves.
    pub fn read_plan(&self, pins: &Pins) -> Result<Plan, DatapathError> {
        let contradiction = |what: String| DatapathError::Contradiction {
            client: pins.client.clone(),
            detach: pins.detach_command(),
            what,
        };
        let mut plan = Plan::default();
        let mut seen = BTreeMap::new();
        for view in self.slots() {
            if let Some(other) = seen.insert((view.service, view.address), view.slot) {
                let what = format!("slots {other} and {} hold the same backend {}", view.slot, view.address);
                return Err(contradiction(what));
            }
            plan.backends.insert(
                view.slot,
                BackendPlan {
                    service: view.service,
                    address: view.address,
                    generation: view.generation,
                    weight: u16::try_from(view.weight).unwrap_or(u16::MAX),
                    state: view.state,
                    usable: view.usable,
                },
            );
        }
        for view in self.services() {
            let schedule: Arc<[u16]> = self.schedule(view.table).into();
            let owned = |slot: u32| plan.backends.get(&slot).is_some_and(|b| b.service == view.index);
            if schedule.len() != view.table.len() as usize {
                return Err(contradiction(format!("service {} points past the schedule map", view.name)));
            }
            if let Some(slot) = schedule.iter().find(|slot| !owned(u32::from(**slot))) {
                return Err(contradiction(format!(
                    "the schedule of service {} names slot {slot}",
                    view.name
                )));
            }
            if view.fallback != NO_SLOT && !owned(view.fallback) {
                return Err(contradiction(format!(
                    "the fallback of service {} is slot {}",
                    view.name, view.fallback
                )));
            }
            plan.services.insert(
                view.index,
                ServicePlan {
                    name: view.name,
                    address: view.address,
                    protocol: view.protocol,
                    open: view.open,
                    errno: view.errno,
                    rules: view.rules,
                    fallback: view.fallback,
                    schedule,
                },
            );
        }
        Ok(plan)
    }

    // ---- writing ---------------------------------------------------------------------------------------------------

    /// Carries out one step towards a plan with these services. Returns `false` if a new table finds no room until readers are gone.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn carry_out(
        &mut self,
        step: &Step,
        services: &BTreeMap<u16, ServicePlan>,
        cursor_seed: &CursorSeed,
    ) -> Result<bool, DatapathError> {
        match step {
            Step::Close(index) => self.close(*index),
            Step::WriteService(index, service) => self.write_service(*index, service, cursor_seed)?,
            Step::WriteBackend(slot, backend) => {
                let service = services.get(&backend.service).expect("a backend is of a service of the plan");
                self.write_backend(*slot, backend, &service.name)?;
            }
            Step::SetErrno(index, errno) => {
                let at = offset_of!(Service, errno);
                self.maps.services.store32(usize::from(*index), at, u32::from(*errno));
            }
            Step::SetRules(index, rules) => self.set_rules(*index, *rules),
            Step::SetFallback(index, slot) => {
                self.maps.services.store32(usize::from(*index), offset_of!(Service, fallback), *slot);
            }
            Step::SetState(slot, usable, state) => {
                self.set_state(*slot, StateWord::new(*usable, *state));
            }
            Step::SetWeight(slot, weight) => {
                let at = offset_of!(Backend, endpoint.weight);
                self.maps.backends.store32(*slot as usize, at, u32::from(*weight));
            }
            Step::Publish(index, schedule) => return Ok(self.publish(*index, schedule)),
            Step::Open(index) => self.open_service(*index)?,
            Step::FreeBackend(slot) => self.free_backend(*slot)?,
            // Nothing else changes: a program may have found the service just before its address was another's, and what it
            // reads is a closed service still. What gets the index next writes all of it.
            Step::FreeService(index) => self.set_service_state(*index, SERVICE_FREE),
        }
        Ok(true)
    }

    fn write_service(
        &mut self,
        index: u16,
        service: &ServicePlan,
        cursor_seed: &CursorSeed,
    ) -> Result<(), DatapathError> {
        let mut row: Service = bytemuck::Zeroable::zeroed();
        row.fallback = service.fallback;
        row.errno = u32::from(service.errno);
        row.rules = service.rules;
        row.address = Address::from(service.address.ip());
        row.port = Be16::from_host(service.address.port());
        row.protocol = service.protocol.number();
        row.state = SERVICE_LIVE;
        let name = service.name.as_bytes();
        assert!(name.len() < row.name.len(), "the configuration bounds names");
        row.name[..name.len()].copy_from_slice(name);
        self.maps.services.set(usize::from(index), &row);
        // Counters and cursors of whatever had the index before end here.
        let start = |cpu| Cursor {
            phase: 0,
            start: walk::start(&cursor_seed.task, &service.name, cpu, cursor_seed.cpus),
        };
        let index = u32::from(index);
        let values = |error| self.fail_io(map::WALKS, "write", error);
        let walk = on_every_cpu(start, cursor_seed.cpus).map_err(values)?;
        let zero = on_every_cpu(|_| Outcomes::default(), cursor_seed.cpus).map_err(values)?;
        set(&mut self.maps.walks, index, walk).map_err(|error| self.fail(map::WALKS, "write", error))?;
        set(&mut self.maps.outcomes, index, zero).map_err(|error| self.fail(map::OUTCOMES, "write", error))
    }

    /// Each word by itself: connect may read between two of them, and finds rules that it can follow.
    fn set_rules(&mut self, index: u16, rules: Rules) {
        for (i, word) in bytemuck::cast_ref::<Rules, [u32; size_of::<Rules>() / 4]>(&rules).iter().enumerate()
        {
            self.maps.services.store32(usize::from(index), offset_of!(Service, rules) + 4 * i, *word);
        }
    }

    /// A backend that was here before goes on with its counts. They are written first, and forgotten elsewhere last.
    fn write_backend(
        &mut self,
        slot: u32,
        backend: &BackendPlan,
        service: &str,
    ) -> Result<(), DatapathError> {
        let who = retired::name(service, backend.address);
        let fail = |error| self.fail_io(map::DEPARTED, "read", error);
        let departed = self.maps.departed.of(&who).map_err(fail)?;
        let (counts, swept) =
            departed.map_or_else(Default::default, |departed| (departed.counts, departed.swept));
        self.maps.counts.set(slot, &counts).map_err(|error| self.fail_io(map::COUNTS, "write", error))?;
        self.maps.backends.set_part(
            slot as usize,
            offset_of!(Backend, endpoint),
            &BackendAddress {
                address: Address::from(backend.address.ip()),
                port: Be16::from_host(backend.address.port()),
                service: backend.service,
                _reserved: 0,
                generation: backend.generation,
                weight: u32::from(backend.weight),
            },
        );
        // No flow is open, so nobody else writes.
        self.maps.backends.store64(slot as usize, offset_of!(Backend, errors), 0);
        self.maps.backends.store64(slot as usize, offset_of!(Backend, swept), swept);
        self.set_share(slot, 0);
        self.set_state(slot, StateWord::new(backend.usable, backend.state));
        if departed.is_some() {
            self.maps.departed.forget(&who).map_err(|error| self.fail_io(map::DEPARTED, "write", error))?;
            self.returned.push(((slot, backend.generation), counts));
        }
        Ok(())
    }

    fn free_backend(&mut self, slot: u32) -> Result<(), DatapathError> {
        if let Some(view) = self.slot(slot) {
            let Counts { sums, active: _, swept } = self.counts(slot)?;
            let service = name_of(&self.maps.services.get(usize::from(view.service)));
            let who = retired::name(&service, view.address);
            let kept = self.maps.departed.keep(&who, sums, swept);
            kept.map_err(|error| self.fail_io(map::DEPARTED, "write", error))?;
        }
        // A free row keeps the generation that the slot's next backend gets.
        let mut row: BackendAddress = bytemuck::Zeroable::zeroed();
        row.generation = self.maps.backends.get(slot as usize).endpoint.generation.wrapping_add(1);
        self.set_state(slot, StateWord::new(false, BackendState::Free));
        self.maps.backends.set_part(slot as usize, offset_of!(Backend, endpoint), &row);
        Ok(())
    }

    /// Backends that have returned since this was last asked.
    pub(super) fn returned(&mut self) -> Vec<((u32, u32), abi::SlotCounters)> {
        std::mem::take(&mut self.returned)
    }

    fn set_state(&mut self, slot: u32, state: StateWord) {
        self.maps.backends.store32(slot as usize, offset_of!(Backend, state), state.to_word());
    }

    fn set_share(&mut self, slot: u32, entries: u32) {
        self.maps.backends.store32(slot as usize, offset_of!(Backend, share), entries);
    }

    fn publish(&mut self, index: u16, schedule: &[u16]) -> bool {
        let at = offset_of!(Service, table);
        let old = TableRef::from_word(self.maps.services.load64(usize::from(index), at));
        let generation = old.generation.wrapping_add(1);
        let length = u32::try_from(schedule.len()).expect("the planner bounds schedules");
        let shares = shares(schedule);
        let mut new = TableRef { base: 0, generation, length_log2: 0, members: NO_MEMBERS };
        if length != 0 {
            let Some(base) = self.room(length) else {
                self.make_room(length);
                return false;
            };
            if shares.len() <= abi::MAX_SUBSET as usize {
                let Some(half) = self.free_half(index, old) else { return false };
                new.members = half;
                self.write_members(index, new, shares.keys().copied());
            }
            self.write_entries(base, schedule);
            new = TableRef { base, length_log2: u8::try_from(length.ilog2()).expect("below 32"), ..new };
        }
        let dropped = self.schedule(old).into_iter().filter(|slot| !shares.contains_key(slot));
        let dropped: Vec<u16> = dropped.collect();
        for (slot, entries) in &shares {
            self.set_share(u32::from(*slot), *entries);
        }
        self.maps.services.store64(usize::from(index), at, new.to_word());
        for slot in dropped {
            self.set_share(u32::from(slot), 0);
        }
        if !old.is_empty() {
            let entries = Region { base: old.base, length: old.len() };
            self.retired.push(Retired { entries, members: old.members_of(u32::from(index)) });
        }
        true
    }

    /// The half of a service's members that neither its table nor a program that is still running refers to, as
    /// [`TableRef`] has it.
    fn free_half(&self, index: u16, current: TableRef) -> Option<u8> {
        let is_free = |half: &u8| {
            let members = TableRef { members: *half, ..current }.members_of(u32::from(index));
            let mut retired = self.retired.iter().chain(&self.waiting);
            *half != current.members && !retired.any(|retired| retired.members == members)
        };
        (NO_MEMBERS + 1..=NO_MEMBERS + 2).find(is_free)
    }

    fn write_members(&mut self, index: u16, table: TableRef, slots: impl ExactSizeIterator<Item = u16>) {
        let count = u32::try_from(slots.len()).expect("at most MAX_SUBSET");
        let mut members = Members { count, ..bytemuck::Zeroable::zeroed() };
        for (member, slot) in members.slots.iter_mut().zip(slots) {
            *member = slot;
        }
        let at = table.members_of(u32::from(index)).expect("a half was chosen");
        self.maps.members.set(at as usize, &members);
    }

    fn write_entries(&mut self, base: u32, schedule: &[u16]) {
        for (cell, slots) in schedule.chunks_exact(ENTRIES_PER_CELL as usize).enumerate() {
            let slots: [u16; 4] = slots.try_into().expect("chunks of four");
            let cell = (base / ENTRIES_PER_CELL) as usize + cell;
            self.maps.schedule.set(cell, &ScheduleCell { slots });
        }
    }

    /// A region of the schedule map for `length` entries that no program may be reading.
    fn room(&self, length: u32) -> Option<u32> {
        let mut taken = self.live();
        taken.extend(self.retired.iter().chain(&self.waiting).map(|retired| retired.entries));
        first_fit(&taken, self.entries(), length)
    }

    fn entries(&self) -> u32 {
        u32::try_from(self.maps.schedule.len()).unwrap_or(u32::MAX).saturating_mul(ENTRIES_PER_CELL)
    }

    /// Where the current tables lie.
    fn live(&self) -> Vec<Region> {
        let tables = (0..self.maps.services.len()).map(|index| self.table_of(index));
        tables
            .filter(|table| !table.is_empty())
            .map(|table| Region { base: table.base, length: table.len() })
            .collect()
    }

    fn table_of(&self, index: usize) -> TableRef {
        TableRef::from_word(self.maps.services.load64(index, offset_of!(Service, table)))
    }

    /// Copies tables together, so that there is room for `length` entries once readers of the old places are gone. Only
    /// if nothing is waited for already: what that frees may be enough.
    fn make_room(&mut self, length: u32) {
        if !self.retired.is_empty() || !self.waiting.is_empty() {
            return;
        }
        let moves = make_room(&self.live(), self.entries(), length).unwrap_or_default();
        for (from, base) in moves {
            let index = (0..self.maps.services.len()).find(|index| {
                let table = self.table_of(*index);
                !table.is_empty() && table.base == from.base
            });
            let index = index.expect("a table that is live belongs to a service");
            let table = self.table_of(index);
            let entries = self.schedule(table);
            self.write_entries(base, &entries);
            // The same table in another region: its generation stays.
            self.maps.services.store64(
                index,
                offset_of!(Service, table),
                TableRef { base, ..table }.to_word(),
            );
            self.retired.push(Retired { entries: from, members: None });
        }
    }

    fn open_service(&mut self, index: u16) -> Result<(), DatapathError> {
        let row = self.maps.services.get(usize::from(index));
        self.direct(socket_addr(row.address, row.port), protocol_of(&row), index)?;
        self.set_service_state(index, SERVICE_LIVE);
        Ok(())
    }

    fn close(&mut self, index: u16) {
        let row = self.maps.services.get(usize::from(index));
        let (address, protocol) = (socket_addr(row.address, row.port), protocol_of(&row));
        // Another service may have taken the address over.
        if self.open_at(address, protocol) == Some(index) {
            self.undirect(address, protocol);
        }
        self.set_service_state(index, SERVICE_LEAVING);
    }

    fn set_service_state(&mut self, index: u16, state: u8) {
        let mut row = self.maps.services.get(usize::from(index));
        row.state = state;
        // The rest of the word is what is dialled: it does not change.
        let word = bytemuck::bytes_of(&row);
        let at = offset_of!(Service, state) & !3;
        let word = u32::from_ne_bytes(word[at..at + 4].try_into().expect("four bytes"));
        self.maps.services.store32(usize::from(index), at, word);
    }

    // ---- waiting ---------------------------------------------------------------------------------------------------

    /// Whether a region is not free yet; also after a wait that failed.
    pub(super) fn has_retired(&self) -> bool {
        !self.retired.is_empty() || !self.waiting.is_empty()
    }

    pub(super) fn before_wait(&mut self) {
        self.waiting.append(&mut self.retired);
    }

    pub(super) fn after_wait(&mut self) {
        self.waiting.clear();
    }

    fn fail(&self, name: &str, operation: &'static str, error: MapError) -> DatapathError {
        self.fail_io(name, operation, io::Error::other(error))
    }

    fn fail_io(&self, name: &str, operation: &'static str, source: io::Error) -> DatapathError {
        DatapathError::Map { path: self.pins.maps().join(name), operation, source }
    }
}

/// How many entries each slot has.
fn shares(schedule: &[u16]) -> BTreeMap<u16, u32> {
    let mut shares = BTreeMap::new();
    for slot in schedule {
        *shares.entry(*slot).or_insert(0) += 1;
    }
    shares
}

fn raw_values<T: bytemuck::Pod>(cpus: &aya::maps::PerCpuValues<Raw<T>>) -> Vec<T> {
    cpus.iter().map(|Raw(value)| *value).collect()
}

/// The protocol of a service in the maps. None but ours are written.
fn protocol_of(row: &Service) -> Protocol {
    Protocol::of_number(row.protocol).unwrap_or(Protocol::Tcp)
}

fn name_of(row: &Service) -> String {
    let end = row.name.iter().position(|byte| *byte == 0).unwrap_or(row.name.len());
    String::from_utf8_lossy(&row.name[..end]).into_owned()
}

fn set<T: bytemuck::Pod>(
    map: &mut PerCpu<T>,
    index: u32,
    values: aya::maps::PerCpuValues<Raw<T>>,
) -> Result<(), MapError> {
    map.set(index, values, 0)
}
