//! The controller of one client task: facts come in by one door, a complete plan comes out.
//!
//! It remembers the last good list of every service, which slots backends hold, and since when a backend may not be
//! chosen. It reads no clock: each fact comes with its time. The datapath reports when a slot that is no longer needed
//! has lost its last reference.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use lb_common::abi::{BackendState, MAX_SERVICES, Usable};
use thiserror::Error;

use crate::availability::{Availability, Cause};
use crate::endpoint::EndpointList;
use crate::ids::{BackendRef, ServiceIndex, Slot};
use crate::limits::Limits;
use crate::membership::{self, Membership};
use crate::plan::{BackendPlan, Plan, ServicePlan};
use crate::rules;
use crate::schedule;
use crate::service::Service;
use crate::slots::{Identity, Slots, SlotsExhausted};

/// A fact.
#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// A source has a new list for the service at this position of the configuration, of which the task uses these: what
    /// [`Membership::of`] gives for the service, the task and the list.
    Endpoints(usize, Arc<EndpointList>, Arc<Membership>),
    /// Nothing in the kernel refers to these slots any more: no table, no fallback, no flow.
    Idle(BTreeSet<Slot>),
}

/// Why a list cannot be used. The list before it stays in force.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// Too many backends at once.
    #[error(transparent)]
    Slots(#[from] SlotsExhausted),
    /// The tables of all services would not fit.
    #[error(
        "the schedules of the client task would have {wanted} entries, limits.schedule_entries allows {allowed}"
    )]
    Schedule {
        /// Entries wanted.
        wanted: u64,
        /// Entries allowed.
        allowed: u32,
    },
    /// All service indexes are taken.
    #[error("a client task has at most {MAX_SERVICES} services, removed ones with open connections included")]
    Services,
}

/// What a balancer takes over from the kernel; nothing, on a first start.
#[derive(Clone, Debug, Default)]
pub struct Adopted {
    /// What the maps hold.
    pub plan: Plan,
    /// The generations that the next backends of free slots get, where they are not the first: what an earlier balancer has
    /// given to a slot must not be given to it again.
    pub next_generations: Vec<BackendRef>,
}

/// One service and what is known of its endpoints.
#[derive(Clone, Debug)]
struct ServiceState {
    service: Service,
    index: ServiceIndex,
    /// `None` until a source has delivered.
    list: Option<ListInUse>,
}

/// A list in use.
#[derive(Clone, Debug)]
struct ListInUse {
    endpoints: Arc<EndpointList>,
    membership: Arc<Membership>,
    schedule: Arc<[Slot]>,
    fallback: Option<Slot>,
}

/// What the list in use, or else the kernel, says of a backend.
#[derive(Clone, Copy, Debug)]
struct Report {
    weight: u16,
    state: BackendState,
    is_listed: bool,
}

/// The controller of one client task, by any clock.
#[derive(Clone, Debug)]
pub struct Balancer<T = Instant> {
    limits: Limits,
    services: Vec<ServiceState>,
    slots: Slots,
    /// Of every backend that has a slot.
    availability: BTreeMap<Identity, Availability<T>>,
    /// What the kernel held when the daemon started: kept for services whose source has not delivered yet, for services
    /// that were removed, and for the flows of both.
    adopted: Plan,
}

impl<T: Copy + Ord> Balancer<T> {
    /// A balancer that takes over what the kernel holds already.
    ///
    /// # Errors
    /// If there are more services than indexes.
    pub fn new(
        services: Vec<Service>,
        limits: Limits,
        Adopted { plan: adopted, next_generations }: Adopted,
        now: T,
    ) -> Result<Self, Refused> {
        let mut slots = Slots::new(limits.slots);
        for (&slot, backend) in &adopted.backends {
            let identity = Identity { service: backend.service, address: backend.address };
            slots.adopt(identity, BackendRef { slot, generation: backend.generation });
        }
        for BackendRef { slot, generation } in next_generations {
            slots.set_generation(slot, generation);
        }
        let mut taken: BTreeSet<ServiceIndex> = adopted.services.keys().copied().collect();
        let mut states = Vec::with_capacity(services.len());
        for service in services {
            let index = match index_of(&adopted, &service) {
                Some(index) => index,
                None => free_index(&taken).ok_or(Refused::Services)?,
            };
            taken.insert(index);
            states.push(ServiceState { service, index, list: None });
        }
        let availability = BTreeMap::new();
        let mut balancer = Self { limits, services: states, slots, availability, adopted };
        balancer.drop_empty_services();
        balancer.note_availability(None, now);
        Ok(balancer)
    }

    /// A removed service keeps its index for its flows; without a slot it has none.
    fn drop_empty_services(&mut self) {
        let in_use: BTreeSet<ServiceIndex> =
            self.slots.iter().map(|(identity, _)| identity.service).collect();
        let configured: BTreeSet<ServiceIndex> = self.services.iter().map(|state| state.index).collect();
        self.adopted.services.retain(|index, _| in_use.contains(index) || configured.contains(index));
    }

    /// Takes in a fact that came at `now`. Returns whether it changed anything: a list that says the same again does not,
    /// and costs nothing.
    ///
    /// # Errors
    /// If a list does not fit; nothing has changed then.
    ///
    /// # Panics
    /// If a list is for a service past the end.
    pub fn handle(&mut self, now: T, fact: Fact) -> Result<bool, Refused> {
        match fact {
            Fact::Endpoints(position, endpoints, membership) => {
                self.take(now, position, endpoints, membership)
            }
            Fact::Idle(numbers) => Ok(self.forget(&numbers)),
        }
    }

    fn take(
        &mut self,
        now: T,
        position: usize,
        endpoints: Arc<EndpointList>,
        membership: Arc<Membership>,
    ) -> Result<bool, Refused> {
        let state = &self.services[position];
        if state.list.as_ref().is_some_and(|in_use| in_use.says(&endpoints, &membership)) {
            return Ok(false);
        }
        let log2 = schedule::length_log2(u32::try_from(membership.members.len()).unwrap_or(u32::MAX));
        let length = if membership.members.is_empty() { 0 } else { 1u32 << log2 };
        self.check_schedules(position, length)?;
        // A copy, so that a list that does not fit leaves no slot in use.
        let mut slots = self.slots.clone();
        let mut members = Vec::with_capacity(membership.members.len());
        for member in &membership.members {
            let identity = Identity { service: state.index, address: member.endpoint.address };
            members.push(slots.hold(identity)?.slot);
        }
        self.slots = slots;
        let weights: Vec<u64> = membership.members.iter().map(|member| member.weight).collect();
        let fallback = fallback(&weights, &members);
        let schedule = table(&weights, &members, length);
        let state = &mut self.services[position];
        state.list = Some(ListInUse { endpoints, membership, schedule, fallback });
        let index = state.index;
        // From here on the list says what there is, not what the kernel held at the start.
        self.adopted.services.remove(&index);
        self.note_availability(Some(position), now);
        Ok(true)
    }

    fn check_schedules(&self, position: usize, length: u32) -> Result<(), Refused> {
        let others = self.services.iter().enumerate().filter(|(i, _)| *i != position).map(|(_, state)| {
            let adopted = self.adopted.services.get(&state.index);
            match (&state.list, adopted) {
                (Some(in_use), _) => in_use.schedule.len() as u64,
                (None, Some(adopted)) => adopted.schedule.len() as u64,
                (None, None) => 0,
            }
        });
        let wanted = others.sum::<u64>() + u64::from(length);
        let allowed = self.limits.schedule_entries;
        if wanted > u64::from(allowed) { Err(Refused::Schedule { wanted, allowed }) } else { Ok(()) }
    }

    fn forget(&mut self, slots: &BTreeSet<Slot>) -> bool {
        let members = self.members(&self.services);
        let idle: Vec<(Identity, BackendRef)> = self
            .slots
            .iter()
            .filter(|(identity, backend)| slots.contains(&backend.slot) && !members.contains(identity))
            .collect();
        for (identity, backend) in &idle {
            self.slots.free(*identity);
            self.availability.remove(identity);
            self.adopted.backends.remove(&backend.slot);
        }
        self.drop_empty_services();
        !idle.is_empty()
    }

    fn is_configured(&self, index: ServiceIndex) -> bool {
        self.services.iter().any(|state| state.index == index)
    }

    /// Slots that the plan keeps only because something may still refer to them.
    pub fn unneeded(&self) -> BTreeSet<Slot> {
        let members = self.members(&self.services);
        self.slots
            .iter()
            .filter(|(identity, _)| !members.contains(identity))
            .map(|(_, backend)| backend.slot)
            .collect()
    }

    /// Backends of these services that a table or a fallback of the plan names: they keep their slots. Whether one of them
    /// may be chosen is another question, see [`Balancer::usable`].
    fn members(&self, services: &[ServiceState]) -> BTreeSet<Identity> {
        let mut members = BTreeSet::new();
        for state in services {
            match (&state.list, self.adopted.services.get(&state.index)) {
                (Some(in_use), _) => members.extend(
                    in_use
                        .membership
                        .members
                        .iter()
                        .map(|member| Identity { service: state.index, address: member.endpoint.address }),
                ),
                (None, Some(adopted)) => {
                    let named: BTreeSet<Slot> =
                        adopted.schedule.iter().copied().chain(adopted.fallback).collect();
                    let backends = self.slots.iter().filter(|(_, backend)| named.contains(&backend.slot));
                    members.extend(backends.map(|(identity, _)| identity));
                }
                (None, None) => {}
            }
        }
        members
    }

    /// Whether a backend that has a slot may be chosen, as far as that depends on itself.
    pub fn availability(&self, identity: Identity, now: T) -> Option<Availability<T>> {
        self.availability.get(&identity).map(|availability| availability.at(now))
    }

    /// The backends that connect may choose. Here alone membership and availability meet: members that are available, and
    /// of a service that has none such, those that serve as a last resort.
    fn usable(&self, members: &BTreeSet<Identity>, now: T) -> BTreeSet<Identity> {
        let available = |identity: &Identity| self.availability[identity].at(now);
        let is_available = |identity: &&Identity| available(identity) == Availability::Available;
        let served: BTreeSet<ServiceIndex> =
            members.iter().filter(is_available).map(|identity| identity.service).collect();
        let is_usable = |identity: &&Identity| match available(identity) {
            Availability::Available => true,
            Availability::Unavailable { cause, .. } => {
                cause.is_last_resort() && !served.contains(&identity.service)
            }
        };
        members.iter().filter(is_usable).copied().collect()
    }

    /// Brings what is remembered of the availability of one service's backends, or of all, up to date with the lists in
    /// use.
    fn note_availability(&mut self, position: Option<usize>, now: T) {
        let (services, index) = match position {
            Some(position) => (&self.services[position..=position], Some(self.services[position].index)),
            None => (&self.services[..], None),
        };
        let (members, listed) = (self.members(services), listed(services));
        let mut noted = Vec::new();
        for (identity, at) in self.slots.iter() {
            if index.is_none_or(|index| index == identity.service) {
                let cause = cause(self.report(identity, at, &listed), members.contains(&identity));
                let before = self.availability.get(&identity).copied();
                noted.push((identity, Availability::next(before, cause, now)));
            }
        }
        self.availability.extend(noted);
    }

    /// The complete state that the kernel shall hold at `now`.
    pub fn plan(&self, now: T) -> Plan {
        let mut plan = Plan::default();
        for (&index, adopted) in &self.adopted.services {
            if !self.is_configured(index) {
                let closed =
                    ServicePlan { open: false, fallback: None, schedule: Arc::from([]), ..adopted.clone() };
                plan.services.insert(index, closed);
            }
        }
        for state in &self.services {
            plan.services.insert(state.index, self.service_plan(state));
        }
        let (members, listed) = (self.members(&self.services), listed(&self.services));
        let usable = self.usable(&members, now);
        for (identity, at) in self.slots.iter() {
            let report = self.report(identity, at, &listed);
            // A healthy endpoint that the subset passed over is on its way out like one that the source dropped.
            let is_leaving = report.state == BackendState::Healthy && !members.contains(&identity);
            let backend = BackendPlan {
                service: identity.service,
                address: identity.address,
                generation: at.generation,
                weight: report.weight,
                state: if is_leaving { BackendState::Leaving } else { report.state },
                usable: Usable::from(usable.contains(&identity)),
            };
            plan.backends.insert(at.slot, backend);
        }
        plan
    }

    fn service_plan(&self, state: &ServiceState) -> ServicePlan {
        let service = &state.service;
        let (fallback, schedule) = match (&state.list, self.adopted.services.get(&state.index)) {
            (Some(in_use), _) => (in_use.fallback, Arc::clone(&in_use.schedule)),
            (None, Some(adopted)) => (adopted.fallback, Arc::clone(&adopted.schedule)),
            (None, None) => (None, Arc::from([])),
        };
        ServicePlan {
            name: service.name.clone(),
            address: service.address,
            protocol: service.protocol,
            open: true,
            errno: service.errno,
            rules: rules::of(service),
            ejection: rules::of_ejection(service),
            fallback,
            schedule,
        }
    }

    fn report(&self, identity: Identity, at: BackendRef, listed: &BTreeMap<Identity, Report>) -> Report {
        let adopted = self.adopted.backends.get(&at.slot).filter(|a| a.generation == at.generation);
        match (listed.get(&identity), adopted) {
            (Some(report), _) => *report,
            (None, Some(BackendPlan { weight, state, .. })) => {
                Report { weight: *weight, state: *state, is_listed: false }
            }
            (None, None) => Report { weight: 0, state: BackendState::Leaving, is_listed: false },
        }
    }

    /// Per service, in the order of the configuration: its index, and the list and membership in use.
    pub fn services(
        &self,
    ) -> impl Iterator<Item = (&Service, ServiceIndex, Option<(&EndpointList, &Membership)>)> + '_ {
        self.services.iter().map(|state| {
            let in_use = state.list.as_ref().map(|in_use| (&*in_use.endpoints, &*in_use.membership));
            (&state.service, state.index, in_use)
        })
    }
}

impl ListInUse {
    fn says(&self, endpoints: &Arc<EndpointList>, membership: &Arc<Membership>) -> bool {
        fn same<V: PartialEq>(a: &Arc<V>, b: &Arc<V>) -> bool {
            Arc::ptr_eq(a, b) || a == b
        }
        same(&self.membership, membership) && same(&self.endpoints, endpoints)
    }
}

/// What the lists in use say of every endpoint in them.
fn listed(services: &[ServiceState]) -> BTreeMap<Identity, Report> {
    let mut listed = BTreeMap::new();
    for state in services {
        let endpoints = state.list.iter().flat_map(|in_use| in_use.endpoints.as_slice());
        listed.extend(endpoints.map(|endpoint| {
            let identity = Identity { service: state.index, address: endpoint.address };
            let state = membership::state(endpoint);
            (identity, Report { weight: endpoint.weight, state, is_listed: true })
        }));
    }
    listed
}

/// Why a backend may not be chosen, as far as that depends on itself.
fn cause(report: Report, is_member: bool) -> Option<Cause> {
    // What the kernel held goes on being used as it was until there is a list.
    if is_member && !report.is_listed {
        return None;
    }
    match report.state {
        BackendState::Unweighted => Some(Cause::Unweighted),
        BackendState::LameDuck => Some(Cause::LameDuck),
        BackendState::Healthy | BackendState::Leaving | BackendState::Free => {
            let elsewhere = if report.is_listed { Cause::OutsideSubset } else { Cause::Removed };
            (!is_member).then_some(elsewhere)
        }
    }
}

fn index_of(adopted: &Plan, service: &Service) -> Option<ServiceIndex> {
    let same = |plan: &ServicePlan| {
        plan.name == service.name && plan.address == service.address && plan.protocol == service.protocol
    };
    adopted.services.iter().find(|(_, plan)| same(plan)).map(|(index, _)| *index)
}

fn free_index(taken: &BTreeSet<ServiceIndex>) -> Option<ServiceIndex> {
    ServiceIndex::all().find(|index| !taken.contains(index))
}

/// The member with the largest weight; of several, the one in the lowest slot.
fn fallback(weights: &[u64], slots: &[Slot]) -> Option<Slot> {
    let best = weights.iter().zip(slots).min_by_key(|(weight, slot)| (std::cmp::Reverse(**weight), **slot));
    best.map(|(_, slot)| *slot)
}

fn table(weights: &[u64], slots: &[Slot], length: u32) -> Arc<[Slot]> {
    let counts = schedule::apportion(weights, length);
    schedule::interleave(&counts).into_iter().map(|member| slots[member as usize]).collect()
}
