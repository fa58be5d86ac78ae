//! The mind of one client task: facts come in by one door, a complete plan comes out.
//!
//! It remembers the last good list of every service and which slots backends hold. It decides nothing about time: the
//! datapath tells it when a slot that it no longer needs has lost its last reference.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use lb_common::abi::{BackendState, MAX_SERVICES, NO_SLOT};
use thiserror::Error;

use crate::endpoint::EndpointList;
use crate::limits::Limits;
use crate::membership::{self, Membership};
use crate::plan::{BackendPlan, Plan, ServicePlan};
use crate::rules;
use crate::schedule;
use crate::service::Service;
use crate::slots::{Identity, Slot, Slots, SlotsExhausted};

/// A fact.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A source has a new list for the service at this position of the configuration, of which the task uses these: what
    /// [`Membership::of`] gives for the service, the task and the list.
    Endpoints(usize, EndpointList, Membership),
    /// Nothing in the kernel refers to these slots any more: no table, no fallback, no flow.
    Idle(Vec<u32>),
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

/// One service and what is known of its endpoints.
#[derive(Clone, Debug)]
struct ServiceState {
    service: Service,
    index: u16,
    /// `None` until a source has delivered.
    list: Option<ListInUse>,
}

/// A list in use.
#[derive(Clone, Debug)]
struct ListInUse {
    endpoints: EndpointList,
    membership: Membership,
    schedule: Arc<[u16]>,
    fallback: u32,
}

/// The mind of one client task.
#[derive(Clone, Debug)]
pub struct Balancer {
    limits: Limits,
    services: Vec<ServiceState>,
    slots: Slots,
    /// What the kernel held when the daemon started: kept for services whose source has not delivered yet, for services
    /// that were removed, and for the flows of both.
    adopted: Plan,
}

impl Balancer {
    /// A balancer that takes over what the kernel holds already (nothing, on a first start).
    ///
    /// # Errors
    /// If there are more services than indexes.
    pub fn new(services: Vec<Service>, limits: Limits, adopted: Plan) -> Result<Self, Refused> {
        let mut slots = Slots::new(limits.slots);
        for (&number, backend) in &adopted.backends {
            let identity = Identity { service: backend.service, address: backend.address };
            slots.adopt(identity, Slot { number, generation: backend.generation });
        }
        let mut taken: BTreeSet<u16> = adopted.services.keys().copied().collect();
        let mut states = Vec::with_capacity(services.len());
        for service in services {
            let index = match index_of(&adopted, &service) {
                Some(index) => index,
                None => free_index(&taken).ok_or(Refused::Services)?,
            };
            taken.insert(index);
            states.push(ServiceState { service, index, list: None });
        }
        let mut balancer = Self { limits, services: states, slots, adopted };
        balancer.drop_empty_services();
        Ok(balancer)
    }

    /// Goes on with the generations of slots that are free now, as (slot, next generation): what an earlier balancer has
    /// given to a slot must not be given to it again.
    pub fn set_generations(&mut self, next: impl IntoIterator<Item = (u32, u32)>) {
        for (slot, generation) in next {
            self.slots.set_generation(slot, generation);
        }
    }

    /// A removed service keeps its index for its flows; without a slot it has none.
    fn drop_empty_services(&mut self) {
        let in_use: BTreeSet<u16> = self.slots.iter().map(|(identity, _)| identity.service).collect();
        let configured: BTreeSet<u16> = self.services.iter().map(|state| state.index).collect();
        self.adopted.services.retain(|index, _| in_use.contains(index) || configured.contains(index));
    }

    /// Takes a fact in.
    ///
    /// # Errors
    /// If a list does not fit; nothing has changed then.
    ///
    /// # Panics
    /// If a list is for a service past the end.
    pub fn handle(&mut self, event: Event) -> Result<(), Refused> {
        match event {
            Event::Endpoints(position, endpoints, membership) => self.take(position, endpoints, membership),
            Event::Idle(numbers) => {
                self.forget(&numbers);
                Ok(())
            }
        }
    }

    fn take(
        &mut self,
        position: usize,
        endpoints: EndpointList,
        membership: Membership,
    ) -> Result<(), Refused> {
        let state = &self.services[position];
        let log2 = schedule::length_log2(u32::try_from(membership.members.len()).unwrap_or(u32::MAX));
        let length = if membership.members.is_empty() { 0 } else { 1u32 << log2 };
        self.check_schedules(position, length)?;
        // A copy, so that a list that does not fit leaves no slot held.
        let mut slots = self.slots.clone();
        let mut members = Vec::with_capacity(membership.members.len());
        for member in &membership.members {
            members.push(
                slots.hold(Identity { service: state.index, address: member.endpoint.address })?.number,
            );
        }
        self.slots = slots;
        let weights: Vec<u64> = membership.members.iter().map(|member| member.weight).collect();
        let fallback = fallback(&weights, &members);
        let schedule = table(&weights, &members, length);
        let state = &mut self.services[position];
        state.list = Some(ListInUse { endpoints, membership, schedule, fallback });
        let index = state.index;
        // From here on the list says what there is, not what was found at the start.
        self.adopted.services.remove(&index);
        Ok(())
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

    fn forget(&mut self, numbers: &[u32]) {
        let numbers: BTreeSet<u32> = numbers.iter().copied().collect();
        let needed = self.needed();
        let idle: Vec<(Identity, Slot)> = self
            .slots
            .iter()
            .filter(|(identity, slot)| numbers.contains(&slot.number) && !needed.contains(identity))
            .collect();
        for (identity, slot) in idle {
            self.slots.free(identity);
            self.adopted.backends.remove(&slot.number);
        }
        self.drop_empty_services();
    }

    fn is_configured(&self, index: u16) -> bool {
        self.services.iter().any(|state| state.index == index)
    }

    /// Slots that the plan keeps only because something may still refer to them.
    pub fn unneeded(&self) -> Vec<u32> {
        let needed: BTreeSet<Identity> = self.needed();
        self.slots
            .iter()
            .filter(|(identity, _)| !needed.contains(identity))
            .map(|(_, slot)| slot.number)
            .collect()
    }

    /// Backends that a table or a fallback of the plan names.
    fn needed(&self) -> BTreeSet<Identity> {
        let mut needed = BTreeSet::new();
        for state in &self.services {
            match (&state.list, self.adopted.services.get(&state.index)) {
                (Some(in_use), _) => needed.extend(
                    in_use
                        .membership
                        .members
                        .iter()
                        .map(|member| Identity { service: state.index, address: member.endpoint.address }),
                ),
                (None, Some(adopted)) => {
                    let mut named: BTreeSet<u32> =
                        adopted.schedule.iter().map(|slot| u32::from(*slot)).collect();
                    named.insert(adopted.fallback);
                    let backends = self.slots.iter().filter(|(_, slot)| named.contains(&slot.number));
                    needed.extend(backends.map(|(identity, _)| identity));
                }
                (None, None) => {}
            }
        }
        needed
    }

    /// The complete state that the kernel shall hold.
    pub fn plan(&self) -> Plan {
        let mut plan = Plan::default();
        for (&index, adopted) in &self.adopted.services {
            if !self.is_configured(index) {
                let closed = ServicePlan {
                    open: false,
                    fallback: NO_SLOT,
                    schedule: Arc::from([]),
                    ..adopted.clone()
                };
                plan.services.insert(index, closed);
            }
        }
        for state in &self.services {
            plan.services.insert(state.index, self.service_plan(state));
        }
        let needed = self.needed();
        let listed = self.listed();
        for (identity, slot) in self.slots.iter() {
            let backend = self.backend_plan(identity, slot, &listed, needed.contains(&identity));
            plan.backends.insert(slot.number, backend);
        }
        plan
    }

    fn service_plan(&self, state: &ServiceState) -> ServicePlan {
        let service = &state.service;
        let (fallback, schedule) = match (&state.list, self.adopted.services.get(&state.index)) {
            (Some(in_use), _) => (in_use.fallback, Arc::clone(&in_use.schedule)),
            (None, Some(adopted)) => (adopted.fallback, Arc::clone(&adopted.schedule)),
            (None, None) => (NO_SLOT, Arc::from([])),
        };
        ServicePlan {
            name: service.name.clone(),
            address: service.address,
            protocol: service.protocol,
            open: true,
            errno: service.errno,
            rules: rules::of(service),
            fallback,
            schedule,
        }
    }

    /// Weight and state of every listed endpoint.
    fn listed(&self) -> BTreeMap<Identity, (u16, BackendState)> {
        let mut listed = BTreeMap::new();
        for state in &self.services {
            let endpoints = state.list.iter().flat_map(|in_use| in_use.endpoints.as_slice());
            listed.extend(endpoints.map(|endpoint| {
                let identity = Identity { service: state.index, address: endpoint.address };
                (identity, (endpoint.weight, membership::state(endpoint)))
            }));
        }
        listed
    }

    fn backend_plan(
        &self,
        identity: Identity,
        slot: Slot,
        listed: &BTreeMap<Identity, (u16, BackendState)>,
        needed: bool,
    ) -> BackendPlan {
        let adopted = self.adopted.backends.get(&slot.number).filter(|a| a.generation == slot.generation);
        let (weight, state) = match (listed.get(&identity), adopted) {
            (Some((weight, state)), _) => (*weight, *state),
            (None, Some(adopted)) => (adopted.weight, adopted.state),
            (None, None) => (0, BackendState::Leaving),
        };
        // A healthy endpoint that the subset passed over is on its way out like one that the source dropped.
        let state = if !needed && state == BackendState::Healthy { BackendState::Leaving } else { state };
        BackendPlan {
            service: identity.service,
            address: identity.address,
            generation: slot.generation,
            weight,
            state,
            usable: needed,
        }
    }

    /// Per service, in the order of the configuration: its index, and the list and membership in use.
    pub fn services(
        &self,
    ) -> impl Iterator<Item = (&Service, u16, Option<(&EndpointList, &Membership)>)> + '_ {
        self.services.iter().map(|state| {
            let in_use = state.list.as_ref().map(|in_use| (&in_use.endpoints, &in_use.membership));
            (&state.service, state.index, in_use)
        })
    }
}

fn index_of(adopted: &Plan, service: &Service) -> Option<u16> {
    let same = |plan: &ServicePlan| {
        plan.name == service.name && plan.address == service.address && plan.protocol == service.protocol
    };
    adopted.services.iter().find(|(_, plan)| same(plan)).map(|(index, _)| *index)
}

fn free_index(taken: &BTreeSet<u16>) -> Option<u16> {
    (0..u16::try_from(MAX_SERVICES).unwrap_or(u16::MAX)).find(|index| !taken.contains(index))
}

/// The member with the largest weight; of several, the one in the lowest slot.
fn fallback(weights: &[u64], slots: &[u32]) -> u32 {
    let best = weights.iter().zip(slots).min_by_key(|(weight, slot)| (std::cmp::Reverse(**weight), **slot));
    best.map_or(NO_SLOT, |(_, slot)| *slot)
}

fn table(weights: &[u64], slots: &[u32], length: u32) -> Arc<[u16]> {
    let counts = schedule::apportion(weights, length);
    let slot = |member: u32| u16::try_from(slots[member as usize]).expect("a slot is below MAX_SLOTS");
    schedule::interleave(&counts).into_iter().map(slot).collect()
}
