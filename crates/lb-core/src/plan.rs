//! The complete desired state of a client task's maps as one value, and the ordered steps from one
//! plan to the next.
//!
//! The code that executes a plan makes no decisions. The steps are ordered so that a connect
//! between any two steps finds a complete table, in which every slot has its backend, and a correct
//! fallback. Executing a step twice is harmless.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use lb_common::abi::{BackendState, DaemonState, EjectionRules, HealthReason, Rules, Usable};

use crate::ids::{Generation, ServiceIndex, Slot};
use crate::service::Protocol;

/// The desired kernel state of one client task.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The services, keyed by their indexes in the kernel's arrays.
    pub services: BTreeMap<ServiceIndex, ServicePlan>,
    /// The backends, keyed by their slots.
    pub backends: BTreeMap<Slot, BackendPlan>,
}

/// The desired kernel state of one service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePlan {
    /// The service's name.
    pub name: String,
    /// The address that processes dial.
    pub address: SocketAddr,
    /// The protocol with which processes dial the address.
    pub protocol: Protocol,
    /// Whether connects to the address are balanced. A removed service is closed, but retains its
    /// index until its last flow ends.
    pub open: bool,
    /// The errno of a connect that finds no usable backend.
    pub errno: u16,
    /// The rules and limits by which a connect picks a backend.
    pub rules: Rules,
    /// The rules by which backends are ejected.
    pub ejection: EjectionRules,
    /// The slot that a connect takes if every backend that it examined is unusable. If this is
    /// `None`, the connect is refused.
    pub fallback: Option<Slot>,
    /// Slots in the order in which connects take them; their number is a power of two or 0.
    pub schedule: Arc<[Slot]>,
    /// Slots of replaced backends. They get trials.
    pub replaced: Vec<Slot>,
}

/// The desired kernel state of one backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendPlan {
    /// The index of the backend's service.
    pub service: ServiceIndex,
    /// The address where the backend listens.
    pub address: SocketAddr,
    /// The generation of the backend's slot.
    pub generation: Generation,
    /// The backend's capacity, relative to other backends of the service.
    pub weight: u16,
    /// The purpose of the backend's slot.
    pub state: BackendState,
    /// The daemon's reason for the backend's health.
    pub reason: HealthReason,
    /// Whether a connect may choose the backend, according to the daemon.
    pub usable: Usable,
    /// Whether probes have found the backend healthy. Its ejection then needs twice as many
    /// failures.
    pub is_probed_healthy: bool,
    /// The backend's report id; [`NO_REPORT`](lb_common::abi::host::NO_REPORT) if the host receives
    /// no reports of the backend.
    pub report: u32,
}

impl BackendPlan {
    /// The fields of the backend's state word that the daemon writes.
    pub fn daemon_state(&self) -> DaemonState {
        let state = DaemonState::new(self.usable, self.state);
        state.probed_healthy(self.is_probed_healthy).with_reason(self.reason)
    }
}

/// The number of entries of each slot in a schedule.
pub fn entries_by_slot(schedule: &[Slot]) -> BTreeMap<Slot, u32> {
    // An array, because a schedule may be as long as the map, and looking up each entry in a tree
    // would be slow.
    let slots = schedule.iter().max().map_or(0, |last| last.number() + 1);
    let mut entries = vec![0; slots as usize];
    schedule.iter().for_each(|slot| entries[slot.index()] += 1);
    Slot::below(slots).zip(entries).filter(|(_, entries)| *entries > 0).collect()
}

/// One change of the kernel's maps: a step of [`diff`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Stop balancing connects to the service's address, unless another service has taken over the
    /// address. Existing flows continue.
    Close(ServiceIndex),
    /// Write a service without opening it.
    WriteService(ServiceIndex, ServicePlan),
    /// Write a backend into a slot to which nothing refers.
    WriteBackend(Slot, BackendPlan),
    /// Store the errno of refused connects.
    SetErrno(ServiceIndex, u16),
    /// Store the rules for further connects. Existing flows remain at their backends.
    SetRules(ServiceIndex, Rules),
    /// Store the rules of ejection. If they disable ejection, ejected backends are readmitted.
    SetEjection(ServiceIndex, EjectionRules),
    /// Store the fallback.
    SetFallback(ServiceIndex, Option<Slot>),
    /// Store the fields of a backend's state word that the daemon writes.
    SetState(Slot, DaemonState),
    /// Store the weight, which only the daemon and commands read.
    SetWeight(Slot, u16),
    /// Store the report id, which links the backend to its entry in the verdict array.
    SetReport(Slot, u32),
    /// Write a complete new table, with its replaced slots, into a free region, and switch to it.
    Publish(ServiceIndex, Arc<[Slot]>, Vec<Slot>),
    /// Start balancing connects to the service's address.
    Open(ServiceIndex),
    /// Clear a slot to which nothing refers any more.
    FreeBackend(Slot),
    /// Clear the index of a closed service to which nothing refers any more.
    FreeService(ServiceIndex),
}

impl Plan {
    /// Checks the invariants on which the kernel programs rely.
    ///
    /// # Panics
    /// If a schedule or a fallback contains a slot of another service, or the length of a schedule
    /// is not a power of two.
    pub fn assert_consistent(&self) {
        self.assert_consistent_of(|_, _| true);
    }

    /// Like [`Self::assert_consistent`], for a plan that follows the consistent plan `before`. If
    /// every slot still belongs to the same service, unchanged services are not checked again,
    /// because most changes concern one service of many.
    fn assert_consistent_after(&self, before: &Self) {
        let is_same_slots = self.backends.len() == before.backends.len()
            && self.backends.iter().zip(&before.backends).all(
                |((slot, backend), (slot_before, backend_before))| {
                    slot == slot_before && backend.service == backend_before.service
                },
            );
        self.assert_consistent_of(|index, service| {
            !is_same_slots || before.services.get(&index).is_none_or(|before| before != service)
        });
    }

    fn assert_consistent_of(&self, concerns: impl Fn(ServiceIndex, &ServicePlan) -> bool) {
        // An array, because a schedule may be as long as the map, and looking up each entry in a
        // tree would be slow.
        let slots = self.backends.last_key_value().map_or(0, |(last, _)| last.index() + 1);
        let mut owners = vec![None; slots];
        for (slot, backend) in &self.backends {
            owners[slot.index()] = Some(backend.service);
        }
        let owner = |slot: &Slot| owners.get(slot.index()).copied().flatten();
        for (index, service) in self.services.iter().filter(|(index, service)| concerns(**index, service)) {
            let len = service.schedule.len();
            assert!(len == 0 || len.is_power_of_two(), "service {index}: the schedule has {len} entries");
            for slot in service.schedule.iter() {
                assert!(
                    owner(slot) == Some(*index),
                    "service {index}: the schedule contains slot {slot} of another service"
                );
            }
            for slot in &service.replaced {
                assert!(
                    owner(slot) == Some(*index),
                    "service {index}: the replaced slot {slot} belongs to another service"
                );
            }
            if let Some(slot) = service.fallback {
                assert!(
                    owner(&slot) == Some(*index),
                    "service {index}: the fallback is slot {slot} of another service"
                );
            }
        }
    }

    /// Applies a step to this plan, so that the plan describes the maps after the step.
    pub fn record(&mut self, step: &Step) {
        match step {
            Step::Close(index) => self.service(*index).open = false,
            Step::WriteService(index, service) => {
                let empty = ServicePlan {
                    open: false,
                    schedule: Arc::from([]),
                    replaced: Vec::new(),
                    ..service.clone()
                };
                self.services.insert(*index, empty);
            }
            Step::WriteBackend(slot, backend) => {
                self.backends.insert(*slot, backend.clone());
            }
            Step::SetErrno(index, errno) => self.service(*index).errno = *errno,
            Step::SetRules(index, rules) => self.service(*index).rules = *rules,
            Step::SetEjection(index, rules) => self.service(*index).ejection = *rules,
            Step::SetFallback(index, slot) => self.service(*index).fallback = *slot,
            Step::SetState(slot, state) => {
                let backend = self.backend(*slot);
                backend.usable = state.usable();
                backend.is_probed_healthy = state.is_probed_healthy();
                backend.reason = state.reason();
                backend.state = BackendState::from_u8(state.state).expect("a plan has known states only");
            }
            Step::SetWeight(slot, weight) => self.backend(*slot).weight = *weight,
            Step::SetReport(slot, report) => self.backend(*slot).report = *report,
            Step::Publish(index, schedule, replaced) => {
                let service = self.service(*index);
                (service.schedule, service.replaced) = (Arc::clone(schedule), replaced.clone());
            }
            Step::Open(index) => self.service(*index).open = true,
            Step::FreeBackend(slot) => {
                self.backends.remove(slot);
            }
            Step::FreeService(index) => {
                self.services.remove(index);
            }
        }
    }

    fn service(&mut self, index: ServiceIndex) -> &mut ServicePlan {
        self.services.get_mut(&index).expect("a step refers to a service that was written before")
    }

    fn backend(&mut self, slot: Slot) -> &mut BackendPlan {
        self.backends.get_mut(&slot).expect("a step refers to a backend that was written before")
    }
}

/// The steps from the present kernel state to the desired kernel state.
///
/// If the daemon is killed between any two steps, the maps work, and the next daemon can adopt
/// them. The order of the steps ensures this:
/// 1. Slots to which nothing refers are cleared, before other backends get them.
/// 2. New backends are written, then new services, because the fallback of a service may be a new
///    backend.
/// 3. Services that were not open are updated and opened. If a service takes over the address of
///    another service, a single store moves the address, so that connects always find a service at
///    this address.
/// 4. Removed services are closed, before their tables are emptied.
/// 5. All other services are updated.
/// 6. Service indexes to which nothing refers are cleared.
///
/// # Panics
/// If the new plan is not consistent, or assigns an index to a service while another service with
/// this index is open.
pub fn diff(old: &Plan, new: &Plan) -> Vec<Step> {
    new.assert_consistent_after(old);
    let changed = changed(old, new);
    let mut steps = Vec::new();
    // A slot may already have another backend in the new plan, because an earlier attempt to free
    // the slot has failed. The slot must still be freed first, because otherwise the counters of
    // its earlier backend are lost.
    let is_gone = |(slot, backend): &(&Slot, &BackendPlan)| {
        new.backends.get(slot).is_none_or(|after| after.generation != backend.generation)
    };
    steps.extend(old.backends.iter().filter(is_gone).map(|(&slot, _)| Step::FreeBackend(slot)));
    write(old, new, &mut steps);
    let was_open = |index: ServiceIndex| old.services.get(&index).is_some_and(|before| before.open);
    for (&index, _) in new.services.iter().filter(|(index, service)| service.open && !was_open(**index)) {
        update(old, new, index, &changed, &mut steps);
        steps.push(Step::Open(index));
    }
    let stays_open = |index: ServiceIndex| new.services.get(&index).is_some_and(|service| service.open);
    steps.extend(old.services.keys().filter(|i| was_open(**i) && !stays_open(**i)).map(|&i| Step::Close(i)));
    for &index in new.services.keys().filter(|index| was_open(**index) || !stays_open(**index)) {
        update(old, new, index, &changed, &mut steps);
    }
    steps
        .extend(old.services.keys().filter(|i| !new.services.contains_key(i)).map(|&i| Step::FreeService(i)));
    steps
}

fn write(old: &Plan, new: &Plan, steps: &mut Vec<Step>) {
    for (&slot, backend) in &new.backends {
        let same = old.backends.get(&slot).is_some_and(|before| before.generation == backend.generation);
        if !same {
            steps.push(Step::WriteBackend(slot, backend.clone()));
        }
    }
    for (&index, service) in &new.services {
        match old.services.get(&index) {
            Some(before) if same_service(before, service) => {}
            Some(before) => {
                assert!(!before.open, "index {index} still belongs to service {}", before.name);
                steps.push(Step::WriteService(index, service.clone()));
            }
            None => steps.push(Step::WriteService(index, service.clone())),
        }
    }
}

fn same_service(a: &ServicePlan, b: &ServicePlan) -> bool {
    a.address == b.address && a.protocol == b.protocol && a.name == b.name
}

/// Backends that are in both plans and have changed, in the order of their slots: each with its old
/// and its new state.
type Changed<'p> = Vec<(Slot, &'p BackendPlan, &'p BackendPlan)>;

fn changed<'p>(old: &'p Plan, new: &'p Plan) -> Changed<'p> {
    let both = |(slot, after): (&Slot, &'p BackendPlan)| Some((*slot, old.backends.get(slot)?, after));
    let is_changed = |(_, before, after): &(Slot, &BackendPlan, &BackendPlan)| {
        before.generation == after.generation && before != after
    };
    new.backends.iter().filter_map(both).filter(is_changed).collect()
}

/// Adds the steps that update one service and its backends. These steps do not open or close the
/// service.
fn update(old: &Plan, new: &Plan, index: ServiceIndex, changed: &Changed<'_>, steps: &mut Vec<Step>) {
    let service = &new.services[&index];
    let before = old.services.get(&index).filter(|before| same_service(before, service));
    // A new service gets its errno, its rules and its fallback with the step that writes it.
    if let Some(before) = before {
        if before.errno != service.errno {
            steps.push(Step::SetErrno(index, service.errno));
        }
        // Every policy can pick from every table, so the rules may change before the table.
        if before.rules != service.rules {
            steps.push(Step::SetRules(index, service.rules));
        }
        if before.ejection != service.ejection {
            steps.push(Step::SetEjection(index, service.ejection));
        }
        // The fallback changes before the state words. If the state words changed first, a connect
        // could find its pick unusable by a new state word, and take the old fallback, which may be
        // unusable, too.
        if before.fallback != service.fallback {
            steps.push(Step::SetFallback(index, service.fallback));
        }
    }
    set_states(index, changed, steps);
    let is_same =
        |before: &ServicePlan| before.schedule == service.schedule && before.replaced == service.replaced;
    if !before.map_or(service.schedule.is_empty(), is_same) {
        steps.push(Step::Publish(index, Arc::clone(&service.schedule), service.replaced.clone()));
    }
}

fn set_states(index: ServiceIndex, changed: &Changed<'_>, steps: &mut Vec<Step>) {
    let mut unusable = Vec::new();
    for &(slot, before, backend) in changed.iter().filter(|(_, _, backend)| backend.service == index) {
        if before.weight != backend.weight {
            steps.push(Step::SetWeight(slot, backend.weight));
        }
        if before.report != backend.report {
            steps.push(Step::SetReport(slot, backend.report));
        }
        if before.daemon_state() != backend.daemon_state() {
            let step = Step::SetState(slot, backend.daemon_state());
            // Backends become usable before other backends become unusable, so that fewer picks
            // find an unusable backend.
            if backend.usable.is_usable() { steps.push(step) } else { unusable.push(step) }
        }
    }
    steps.append(&mut unusable);
}
