//! The controller of one client task: [`Balancer::handle`] applies each [`Fact`], and
//! [`Balancer::plan`] returns a complete plan.
//!
//! The balancer stores the list in force of every service, the slot of each backend, and the
//! evidence on each backend. It reads no clock: the caller passes the time of each fact. The code
//! that reads the maps reports slots to which nothing in the kernel refers any more
//! ([`Fact::Idle`]).

pub mod row;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Add;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lb_common::abi::host::NO_REPORT;
use lb_common::abi::{BackendState, HealthReason, MAX_SERVICES, Usable};
use lb_common::ejection::doubled_if;
use thiserror::Error;

use crate::control::by_address::Next;
use crate::control::factor::Factors;
use crate::endpoint::EndpointList;
use crate::health::loss::Presence;
use crate::health::{self, BackendEvidence, Health, ReportedVerdict, Who, Why};
use crate::ids::{BackendRef, ServiceIndex, Slot};
use crate::limits::Limits;
use crate::members::membership::{Assignment, Membership};
use crate::plan::{BackendPlan, Plan, ServicePlan};
use crate::reports::Name;
use crate::service::{HealthRules, Service};
use crate::tables::rules;
use crate::tables::schedule;
use crate::tables::slots::{Identity, Slots, SlotsExhausted};

use row::Circumstances;
pub use row::Row;

/// The kernel programs' verdict on a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelVerdict {
    /// Whether the backend is ejected.
    pub is_ejected: bool,
    /// How many failures in a row the programs have counted.
    pub failures: u8,
}

/// The host's report ids, keyed by the [`Name`] of the backend.
pub type ReportIdMap = Arc<BTreeMap<Name, u32>>;

/// An input of [`Balancer::handle`].
#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// A source has a new list for the service at this position in the configuration. The
    /// membership must be the result of [`Membership::of`] for the service, the task and the list.
    Endpoints(usize, Assignment),
    /// The kernel programs' verdict on each slot with failures. Slots that are not in the map have
    /// no failures.
    Kernel(BTreeMap<Slot, KernelVerdict>),
    /// The verdicts of one witness ([`Who`]) on the backends of the service at this position. They
    /// replace the witness's earlier verdicts: backends that are not in the map are healthy
    /// according to this witness. For [`Who::Probe`], the map contains every backend that has a
    /// result, and the verdicts on all other backends do not change. The map may contain backends
    /// without a slot, because these may become substitutes.
    Verdicts(usize, Who, BTreeMap<SocketAddr, (Health, Why)>),
    /// Factors from load control and slow start for members of the service at this position. Each
    /// factor multiplies a member's structural weight. These factors replace the earlier factors.
    Factors(usize, Factors),
    /// Factors that operators have set for members of the service at this position. Each factor
    /// also multiplies a member's structural weight. These factors replace the operators' earlier
    /// factors.
    OperatorWeights(usize, Factors),
    /// Services with recently established connections to a backend that is not ejected. Replaces
    /// the earlier set. If this host reaches one backend, the host is not the reason why other
    /// backends are unreachable.
    Serving(BTreeSet<ServiceIndex>),
    /// Only time has passed.
    Time,
    /// Report ids by protocol and address. The map contains at least the id of every backend with
    /// reports that the service at this position uses. Until the first fact of this kind arrives,
    /// the service's backends retain the ids that are in the kernel.
    Reports(usize, ReportIdMap),
    /// Nothing in the kernel refers to these slots any more: no table, no fallback and no flow.
    Idle(BTreeSet<Slot>),
}

/// Why a list cannot be used. The previous list remains in force.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum UnusableList {
    /// There are more backends than slots.
    #[error(transparent)]
    Slots(#[from] SlotsExhausted),
    /// The schedules of all services together do not fit into the schedule map.
    #[error(
        "the schedules of the client task would have {wanted} entries, but limits.schedule_entries allows \
         only {allowed}"
    )]
    Schedule {
        /// The number of entries that all schedules require.
        wanted: u64,
        /// The allowed number of entries.
        allowed: u32,
    },
    /// No service index is free.
    #[error(
        "a client task has at most {MAX_SERVICES} services, including removed services with open connections"
    )]
    Services,
}

/// Kernel state that a balancer adopts; empty on a first start.
#[derive(Clone, Debug, Default)]
pub struct Adopted {
    /// The contents of the maps.
    pub plan: Plan,
    /// For each free slot that was used before, the generation of its next backend: a slot must not
    /// reuse a generation that an earlier balancer has assigned to the slot.
    pub next_generations: Vec<BackendRef>,
}

/// One service and the state of its endpoints.
#[derive(Clone, Debug)]
struct ServiceState<T> {
    service: Service,
    index: ServiceIndex,
    /// `None` until a source has delivered a list.
    list: Option<ListInUse<T>>,
    /// The time until which the service treats all backends alike, because no probe of a member had
    /// ended when the list arrived.
    fresh_until: Option<T>,
    /// `None` until the first [`Fact::Reports`].
    reports: Option<ReportIdMap>,
    factors: Factors,
    operator_weights: Factors,
}

#[derive(Clone, Debug)]
struct ListInUse<T> {
    endpoints: Arc<EndpointList>,
    membership: Arc<Membership>,
    row: Row<T>,
    schedule: Arc<[Slot]>,
    fallback: Option<Slot>,
}

/// The controller of one client task. `T` is a time of any clock.
#[derive(Clone, Debug)]
pub struct Balancer<T = Instant> {
    limits: Limits,
    services: Vec<ServiceState<T>>,
    slots: Slots,
    /// The evidence on backends. A backend without a slot is included only if it is
    /// [known](BackendEvidence::is_known).
    standings: BTreeMap<Identity, BackendEvidence<T>>,
    /// The kernel programs' verdicts in the last [`Fact::Kernel`].
    verdicts: BTreeMap<Slot, KernelVerdict>,
    /// Services with recently established connections to a backend that is not ejected.
    serving: BTreeSet<ServiceIndex>,
    /// Ejected backends that have returned since the last [`Balancer::take_returned`]. A backend
    /// has returned if a witness has withdrawn its verdict against the backend, or if the backend
    /// has started again.
    returned: BTreeSet<Identity>,
    /// The contents of the maps when the daemon started. The plan uses them for services that do
    /// not have a list yet, and for removed services and their flows.
    adopted: Plan,
}

impl<T: Copy + Ord + Add<Duration, Output = T>> Balancer<T> {
    /// Creates a balancer that adopts the present contents of the maps.
    ///
    /// # Errors
    /// If there are more services than indexes.
    pub fn new(
        services: Vec<Service>,
        limits: Limits,
        Adopted { plan: adopted, next_generations }: Adopted,
        now: T,
    ) -> Result<Self, UnusableList> {
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
                None => free_index(&taken).ok_or(UnusableList::Services)?,
            };
            taken.insert(index);
            states.push(ServiceState {
                service,
                index,
                list: None,
                fresh_until: None,
                reports: None,
                factors: Factors::default(),
                operator_weights: Factors::default(),
            });
        }
        let standings = adopted_standings(&states, &adopted, now);
        let (verdicts, serving, returned) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        let mut balancer =
            Self { limits, services: states, slots, standings, verdicts, serving, returned, adopted };
        balancer.drop_empty_services();
        for (identity, _) in balancer.slots.iter() {
            balancer.standings.entry(identity).or_insert_with(|| BackendEvidence::new(now));
        }
        Ok(balancer)
    }

    /// Frees the indexes of removed services that no longer have a slot, and therefore have no
    /// flow.
    fn drop_empty_services(&mut self) {
        let in_use: BTreeSet<ServiceIndex> =
            self.slots.iter().map(|(identity, _)| identity.service).collect();
        let configured: BTreeSet<ServiceIndex> = self.services.iter().map(|state| state.index).collect();
        self.adopted.services.retain(|index, _| in_use.contains(index) || configured.contains(index));
    }

    /// Applies a fact that arrived at `now`. Returns whether the fact changed anything. A list that
    /// equals the list in use changes nothing.
    ///
    /// # Errors
    /// If a list does not fit. In this case, the balancer is unchanged.
    ///
    /// # Panics
    /// If no service has the position in the fact.
    pub fn handle(&mut self, now: T, fact: Fact) -> Result<bool, UnusableList> {
        match fact {
            Fact::Endpoints(position, assignment) => self.take(now, position, assignment),
            Fact::Kernel(verdicts) => {
                let concerned = self.apply_kernel_verdicts(verdicts, now);
                Ok(self.arrange_all(now, |state, _| concerned.contains(&state.index)))
            }
            Fact::Verdicts(position, who, reported) => {
                let index = self.services[position].index;
                let is_news = self.apply_verdicts(index, who, &reported, now);
                if is_news {
                    self.arrange(position, now);
                }
                // New verdicts are a change even if the row does not change, because state words
                // contain the reason of a verdict.
                Ok(is_news)
            }
            Fact::Factors(position, factors) => {
                self.services[position].factors = factors;
                Ok(self.weigh(position))
            }
            Fact::OperatorWeights(position, factors) => {
                self.services[position].operator_weights = factors;
                Ok(self.weigh(position))
            }
            Fact::Serving(services) => {
                let before = std::mem::replace(&mut self.serving, services);
                let changed: BTreeSet<ServiceIndex> =
                    before.symmetric_difference(&self.serving).copied().collect();
                Ok(self.arrange_all(now, |state, _| changed.contains(&state.index)))
            }
            // Verdicts that a balancer receives do not expire, so time changes only rows that are
            // not settled ([`Row::is_unsettled`]).
            Fact::Time => Ok(self.arrange_all(now, |_, row| row.is_unsettled())),
            Fact::Reports(position, reports) => {
                let state = &mut self.services[position];
                let is_news = state.reports.as_ref() != Some(&reports);
                state.reports = Some(reports);
                Ok(is_news)
            }
            Fact::Idle(numbers) => Ok(self.forget(&numbers)),
        }
    }

    fn take(
        &mut self,
        now: T,
        position: usize,
        Assignment { list: endpoints, membership }: Assignment,
    ) -> Result<bool, UnusableList> {
        let state = &self.services[position];
        if state.list.as_ref().is_some_and(|in_use| in_use.matches(&endpoints, &membership)) {
            return Ok(false);
        }
        let state = &self.services[position];
        let index = state.index;
        let evidence = self.evidence_with_list(index, &endpoints, now);
        let mut members = membership.members.iter().map(|member| member.endpoint.address);
        let is_known = members.any(|address| {
            let identity = Identity { service: index, address };
            newest(&evidence, &self.standings, identity).is_some_and(BackendEvidence::is_proven)
        });
        let fresh_until = match state.service.health.first_look {
            Some(look) if !is_known => Some(now + look),
            Some(_) => state.fresh_until,
            None => None,
        };
        let circumstances = Circumstances {
            is_fresh: fresh_until.is_some_and(|until| now < until),
            ..self.circumstances(state, self.replaced(state, now), now)
        };
        let row_of = |this: &Self, membership: &Membership, circumstances: &Circumstances<T>| {
            let standing = |address| newest(&evidence, &this.standings, Identity { service: index, address });
            row::row(membership, circumstances, standing, now)
        };
        let mut row = row_of(self, &membership, &circumstances);
        // If there is no room for substitutes, the row is built without them. If there is no room
        // for the members either, the list is refused.
        let (row, built) = match self.build(position, &mut row) {
            Ok(built) => (row, built),
            Err(_) => {
                let plain = Membership { next: Vec::new(), lame_ducks: Vec::new(), ..(*membership).clone() };
                let circumstances = Circumstances { replaced: BTreeMap::new(), ..circumstances };
                let mut plain = row_of(self, &plain, &circumstances);
                let built = self.build(position, &mut plain)?;
                (plain, built)
            }
        };
        self.use_row(position, built, |schedule, fallback| ListInUse {
            endpoints,
            membership,
            row,
            schedule,
            fallback,
        });
        self.services[position].fresh_until = fresh_until;
        // From now on the list determines the plan, instead of the adopted contents of the maps.
        self.adopted.services.remove(&index);
        self.apply_list_verdicts(position, now);
        self.forget_unlisted(position);
        Ok(true)
    }

    /// Forgets the probe results of backends that have left the list of a service. If such a
    /// backend has no slot and is not drained by an operator, removes all evidence on it.
    fn forget_unlisted(&mut self, position: usize) {
        let Some(ServiceState { index, list: Some(in_use), .. }) = self.services.get(position) else {
            return;
        };
        let (slots, index, endpoints) = (&self.slots, *index, &in_use.endpoints);
        let mut forgotten = Vec::new();
        for (known, standing) in self.standings.range_mut(Identity::all_of(index)) {
            if endpoints.get(known.address).is_none() {
                // Another backend may have this address later.
                standing.unprove();
                // A drain by an operator also applies to a backend that a later list contains
                // again.
                let is_needed = slots.get(*known).is_some() || standing.is_drained_by_operator();
                forgotten.extend((!is_needed).then_some(*known));
            }
        }
        for known in forgotten {
            self.standings.remove(&known);
        }
    }

    /// The inputs of a service's row. `replaced`: the replaced backends, each with the time since
    /// which it has been replaced.
    fn circumstances(
        &self,
        state: &ServiceState<T>,
        replaced: BTreeMap<SocketAddr, T>,
        now: T,
    ) -> Circumstances<T> {
        Circumstances {
            rules: state.service.health,
            replaced,
            used: self.used(state),
            is_serving: self.serving.contains(&state.index),
            is_fresh: state.fresh_until.is_some_and(|until| now < until),
        }
    }

    /// The backends in the table of a service or, before it has a list, in its adopted table.
    fn used(&self, state: &ServiceState<T>) -> BTreeSet<SocketAddr> {
        match (&state.list, self.adopted.services.get(&state.index)) {
            (Some(in_use), _) => in_use.row.members.iter().map(|(address, _)| *address).collect(),
            (None, Some(adopted)) => {
                let slots: BTreeSet<Slot> = adopted.schedule.iter().copied().collect();
                let backends = slots.iter().filter_map(|slot| self.adopted.backends.get(slot));
                backends.map(|backend| backend.address).collect()
            }
            (None, None) => BTreeSet::new(),
        }
    }

    /// The replaced backends of a service, each with the time since which it has been replaced.
    /// Before the service has a list, these are the replaced backends of its adopted table.
    fn replaced(&self, state: &ServiceState<T>, now: T) -> BTreeMap<SocketAddr, T> {
        match (&state.list, self.adopted.services.get(&state.index)) {
            (Some(in_use), _) => in_use.row.replaced.clone(),
            (None, Some(adopted)) => {
                let backends = adopted.replaced.iter().filter_map(|slot| self.adopted.backends.get(slot));
                backends.map(|backend| (backend.address, now)).collect()
            }
            (None, None) => BTreeMap::new(),
        }
    }

    /// Assigns slots to the backends of `row`, and builds the table of these slots. If there are
    /// enough slots for all backends except the backup, removes the backup from the row.
    ///
    /// # Errors
    /// If the row does not fit. In this case, no slot is assigned.
    fn build(&mut self, position: usize, row: &mut Row<T>) -> Result<Built, UnusableList> {
        let log2 = schedule::length_log2(u32::try_from(row.members.len()).unwrap_or(u32::MAX));
        let length = if row.members.is_empty() { 0 } else { 1u32 << log2 };
        self.check_schedules(position, length)?;
        let index = self.services[position].index;
        let members = row.members.iter().map(|(address, _)| address);
        let held = members.chain(row.replaced.keys()).chain(&row.backup);
        let held: Vec<_> = held.map(|address| Identity { service: index, address: *address }).collect();
        let held = match self.slots.hold_all(&held) {
            Err(_) if row.backup.is_some() => {
                row.drop_backup();
                self.slots.hold_all(&held[..held.len() - 1])?
            }
            held => held?,
        };
        let slots: Vec<Slot> = held.into_iter().map(|backend| backend.slot).collect();
        let weights = weights_of(row, &self.services[position]);
        let slot = |address| self.slots.get(Identity { service: index, address }).map(|backend| backend.slot);
        let fallback = row.fallback().and_then(slot);
        Ok(Built { fallback, schedule: table(&weights, &slots[..row.members.len()], length) })
    }

    fn use_row(
        &mut self,
        position: usize,
        Built { schedule, fallback }: Built,
        list: impl FnOnce(Arc<[Slot]>, Option<Slot>) -> ListInUse<T>,
    ) {
        self.services[position].list = Some(list(schedule, fallback));
    }

    /// Recomputes the [`Row`]s of the services that `concerns` selects. Returns whether any row has
    /// changed.
    fn arrange_all(&mut self, now: T, concerns: impl Fn(&ServiceState<T>, &Row<T>) -> bool) -> bool {
        let mut changed = false;
        for position in 0..self.services.len() {
            let state = &self.services[position];
            if state.list.as_ref().is_some_and(|in_use| concerns(state, &in_use.row)) {
                changed |= self.arrange(position, now);
            }
        }
        changed
    }

    fn arrange(&mut self, position: usize, now: T) -> bool {
        let state = &self.services[position];
        let Some(in_use) = &state.list else { return false };
        let standing = |address| self.standings.get(&Identity { service: state.index, address });
        let circumstances = self.circumstances(state, in_use.row.replaced.clone(), now);
        let mut row = row::row(&in_use.membership, &circumstances, standing, now);
        let has_room = |address| self.slots.has_room_for(Identity { service: state.index, address });
        if !row.backup.is_none_or(has_room) {
            row.drop_backup();
        }
        if row == in_use.row {
            return false;
        }
        let needs_no_slot = row.backup.is_none() || row.backup == in_use.row.backup;
        if row.members == in_use.row.members && row.replaced == in_use.row.replaced && needs_no_slot {
            // The table does not change. Only the set of usable backends and the fallback may
            // change.
            let slot = |address| {
                let identity = Identity { service: state.index, address };
                self.slots.get(identity).map(|backend| backend.slot)
            };
            let fallback = row.fallback().and_then(slot);
            if let Some(in_use) = &mut self.services[position].list {
                (in_use.row, in_use.fallback) = (row, fallback);
            }
            return true;
        }
        // If there is no room for the substitutes, the row does not change.
        let in_use = in_use.clone();
        let Ok(built) = self.build(position, &mut row) else { return false };
        self.use_row(position, built, |schedule, fallback| ListInUse { row, schedule, fallback, ..in_use });
        self.apply_list_verdicts(position, now);
        true
    }

    /// Rebuilds the table of a service with its present factors. Returns whether the table has
    /// changed.
    fn weigh(&mut self, position: usize) -> bool {
        let state = &self.services[position];
        let Some(in_use) = &state.list else { return false };
        // The row has not changed, so its backends have slots, and the table retains its length.
        let index = state.index;
        let slot = |address| self.slots.get(Identity { service: index, address }).map(|at| at.slot);
        let members: Option<Vec<Slot>> =
            in_use.row.members.iter().map(|(address, _)| slot(*address)).collect();
        let weights = weights_of(&in_use.row, state);
        let length = u32::try_from(in_use.schedule.len()).unwrap_or(u32::MAX);
        let schedule = members.map(|members| table(&weights, &members, length));
        match (schedule, &mut self.services[position].list) {
            (Some(schedule), Some(in_use)) if schedule != in_use.schedule => {
                in_use.schedule = schedule;
                true
            }
            _ => false,
        }
    }

    /// The backends in the table of the service at a position, with their structural weights.
    pub fn weights(&self, position: usize) -> &[(SocketAddr, u64)] {
        self.services[position].list.as_ref().map_or(&[], |in_use| &in_use.row.members)
    }

    /// The backends of the service at a position that operators have drained.
    pub fn drained_by_operator(&self, position: usize) -> impl Iterator<Item = SocketAddr> + '_ {
        let known = self.standings.range(Identity::all_of(self.services[position].index));
        known.filter(|(_, standing)| standing.is_drained_by_operator()).map(|(known, _)| known.address)
    }

    /// The factors that operators have set for members of the service at a position.
    pub fn operator_weights(&self, position: usize) -> &Factors {
        &self.services[position].operator_weights
    }

    /// The table of the service at a position, and the service's index; `None` before the service
    /// has a list.
    pub fn schedule(&self, position: usize) -> Option<(ServiceIndex, &Arc<[Slot]>)> {
        let state = &self.services[position];
        state.list.as_ref().map(|in_use| (state.index, &in_use.schedule))
    }

    /// The number of entries in the table of the service at a position.
    pub fn entries(&self, position: usize) -> usize {
        self.services[position].list.as_ref().map_or(0, |in_use| in_use.schedule.len())
    }

    /// Whether the service at a position has no list, but a table of an earlier balancer, which
    /// stays in force until the first list.
    pub fn has_adopted_table(&self, position: usize) -> bool {
        let ServiceState { list, index, .. } = &self.services[position];
        list.is_none() && self.adopted.services.get(index).is_some_and(|plan| !plan.schedule.is_empty())
    }

    /// The slot of a backend of the service at a position.
    pub fn slot(&self, position: usize, address: SocketAddr) -> Option<BackendRef> {
        self.slots.get(Identity { service: self.services[position].index, address })
    }

    fn check_schedules(&self, position: usize, length: u32) -> Result<(), UnusableList> {
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
        if wanted > u64::from(allowed) { Err(UnusableList::Schedule { wanted, allowed }) } else { Ok(()) }
    }

    fn forget(&mut self, slots: &BTreeSet<Slot>) -> bool {
        let members = self.members();
        let is_idle =
            |&(identity, at): &(Identity, BackendRef)| slots.contains(&at.slot) && !members.has(identity, at);
        let idle: Vec<(Identity, BackendRef)> = self.slots.iter().filter(is_idle).collect();
        drop(members);
        for (identity, backend) in &idle {
            self.slots.free(*identity);
            // Evidence of probes and reports remains, because the backend may become a substitute
            // later.
            if let Entry::Occupied(mut standing) = self.standings.entry(*identity)
                && !standing.get_mut().drop_slot_verdicts()
            {
                standing.remove();
            }
            self.verdicts.remove(&backend.slot);
            self.adopted.backends.remove(&backend.slot);
        }
        self.drop_empty_services();
        !idle.is_empty()
    }

    fn is_configured(&self, index: ServiceIndex) -> bool {
        self.services.iter().any(|state| state.index == index)
    }

    /// The slots of leaving backends: the plan retains them only because a reader or a flow may
    /// still refer to them.
    pub fn unneeded(&self) -> BTreeSet<Slot> {
        let members = self.members();
        let unneeded = self.slots.iter().filter(|(identity, at)| !members.has(*identity, *at));
        unneeded.map(|(_, at)| at.slot).collect()
    }

    /// The backends that are in a table, that are replaced, or that are a fallback or backup. They
    /// retain their slots. [`Balancer::usable`] decides whether a connect may choose them.
    fn members(&self) -> NamedMembers<'_, T> {
        let states = self.services.iter().map(|state| (state.index, state)).collect();
        let without_list = self.services.iter().filter(|state| state.list.is_none());
        let adopted = without_list.filter_map(|state| self.adopted.services.get(&state.index));
        let named = |adopted: &ServicePlan| {
            let slots = adopted.schedule.iter().chain(&adopted.replaced).copied();
            slots.chain(adopted.fallback).collect::<Vec<_>>()
        };
        NamedMembers { states, adopted: adopted.flat_map(named).collect() }
    }

    /// The members of the service at this position, and its missing backends
    /// ([`Presence::missing`]). Missing backends are included if they have a slot or are in
    /// `known`. `None` before the service has a list.
    pub fn presence(&self, position: usize, known: impl Iterator<Item = SocketAddr>) -> Option<Presence> {
        let state = &self.services[position];
        let ListInUse { endpoints, row, .. } = state.list.as_ref()?;
        let is_missing = |identity: &Identity| {
            let refuses =
                |standing: &BackendEvidence<T>| standing.health() == Health::Refusing && !standing.accepts();
            endpoints.get(identity.address).is_none() || self.standings.get(identity).is_some_and(refuses)
        };
        let known = known.map(|address| Identity { service: state.index, address });
        let missing = self.slots.of(state.index).map(|(identity, _)| identity).chain(known);
        let missing: BTreeMap<SocketAddr, bool> = missing
            .filter(is_missing)
            .map(|identity| (identity.address, self.slots.get(identity).is_some()))
            .collect();
        let members = row.members.iter().map(|(address, _)| address).chain(row.replaced.keys());
        let members = members.filter(|address| !missing.contains_key(address)).copied().collect();
        Some(Presence { members, missing, is_panic: row.is_panic })
    }

    /// The evidence on a backend.
    pub fn standing(&self, identity: Identity) -> Option<&BackendEvidence<T>> {
        self.standings.get(&identity)
    }

    /// The daemon's decision whether a connect may choose a backend. The kernel programs decide
    /// about ejection.
    fn usable(
        &self,
        state: Option<&ServiceState<T>>,
        identity: Identity,
        adopted: Option<&BackendPlan>,
    ) -> Usable {
        match state {
            Some(ServiceState { list: Some(in_use), .. }) => {
                in_use.row.usable.get(&identity.address).map_or(Usable::No, |(usable, _)| *usable)
            }
            // Until the service has a list, the decision of the earlier daemon remains in force.
            Some(_) => adopted.map_or(Usable::No, |adopted| adopted.usable),
            None => Usable::No,
        }
    }

    /// The slots of replaced backends with a withheld ejection: they failed, but each was the last
    /// available backend at that time. Connects no longer choose them. So only a trial can show
    /// that they have recovered, and a trial requires an ejection.
    pub fn replaced_without_ejection(&self) -> Vec<Slot> {
        let is_withheld = |slot: &Slot| {
            self.verdicts.get(slot).is_some_and(|verdict| !verdict.is_ejected && verdict.failures > 0)
        };
        let of_service = |state: &ServiceState<T>| {
            let identity = |address: &SocketAddr| Identity { service: state.index, address: *address };
            let replaced = state.list.iter().flat_map(|in_use| in_use.row.replaced.keys().map(identity));
            let ejected =
                replaced.filter(|one| self.standings.get(one).is_some_and(BackendEvidence::is_ejected));
            ejected.filter_map(|one| Some(self.slots.get(one)?.slot)).filter(is_withheld).collect::<Vec<_>>()
        };
        self.services.iter().flat_map(of_service).collect()
    }

    /// Notes that backends of the service at this position have started again. If they are ejected,
    /// [`Balancer::take_returned`] returns them.
    pub fn note_returns(&mut self, position: usize, has_started: impl Fn(SocketAddr) -> bool) {
        let service = self.services[position].index;
        let ejected = self.standings.iter().filter(|(known, standing)| {
            known.service == service && standing.is_ejected() && has_started(known.address)
        });
        self.returned.extend(ejected.map(|(known, _)| *known));
    }

    /// The slots of ejected backends that have returned since the last call: a witness has
    /// withdrawn its verdict against the backend, or the backend has started again. The caller
    /// makes the trial of each of these backends due at once.
    pub fn take_returned(&mut self) -> Vec<Slot> {
        let returned = std::mem::take(&mut self.returned);
        returned.into_iter().filter_map(|identity| Some(self.slots.get(identity)?.slot)).collect()
    }

    /// Applies the list's verdicts to all backends of the service at this position that have slots.
    fn apply_list_verdicts(&mut self, position: usize, now: T) {
        let ServiceState { index, list, .. } = &self.services[position];
        if let Some(in_use) = list {
            let evidence = self.evidence_with_list(*index, &in_use.endpoints, now);
            self.standings.extend(evidence);
        }
        for (identity, _) in self.slots.of(*index) {
            self.standings.entry(identity).or_insert_with(|| BackendEvidence::new(now));
        }
    }

    /// The evidence on all backends of a service that have slots, updated with the verdicts of
    /// `list`.
    fn evidence_with_list(
        &self,
        service: ServiceIndex,
        list: &EndpointList,
        now: T,
    ) -> BTreeMap<Identity, BackendEvidence<T>> {
        let reported: BTreeMap<SocketAddr, Option<ReportedVerdict<T>>> = list
            .as_slice()
            .iter()
            .map(|endpoint| (endpoint.address, health::list_verdict(endpoint)))
            .collect();
        let with_verdict = |(identity, _): (Identity, BackendRef)| {
            let known = self.standings.get(&identity).cloned();
            let mut standing = known.unwrap_or_else(|| BackendEvidence::new(now));
            standing.set_verdict(Who::Source, reported.get(&identity.address).copied().flatten(), now);
            (identity, standing)
        };
        self.slots.of(service).map(with_verdict).collect()
    }

    /// Applies the verdicts of one witness on a service's backends ([`Fact::Verdicts`]). Returns
    /// whether anything changed.
    fn apply_verdicts(
        &mut self,
        service: ServiceIndex,
        who: Who,
        reported: &BTreeMap<SocketAddr, (Health, Why)>,
        now: T,
    ) -> bool {
        let mut is_news = false;
        let identity = |address: &SocketAddr| Identity { service, address: *address };
        for (address, (health, why)) in reported {
            let standing =
                self.standings.entry(identity(address)).or_insert_with(|| BackendEvidence::new(now));
            let verdict = ReportedVerdict { health: *health, why: *why, until: None };
            let is_well = *health == Health::Healthy;
            let has_changed = standing.set_verdict(who, (!is_well).then_some(verdict), now);
            if has_changed && is_well {
                self.returned.extend(standing.is_ejected().then(|| identity(address)));
            }
            let is_first = who == Who::Probe && standing.prove();
            is_news |= has_changed || is_first;
        }
        if who == Who::Probe {
            self.end_freshness(service);
        }
        let slots = &self.slots;
        self.standings.retain(|known, standing| {
            if known.service == service && who != Who::Probe && !reported.contains_key(&known.address) {
                let has_changed = standing.set_verdict(who, None, now);
                self.returned.extend((has_changed && standing.is_ejected()).then_some(*known));
                is_news |= has_changed;
            }
            known.service != service || slots.get(*known).is_some() || standing.is_known()
        });
        is_news
    }

    /// Ends the time in which a service treats all backends alike, if a probe of each member has
    /// ended.
    fn end_freshness(&mut self, service: ServiceIndex) {
        let standings = &self.standings;
        let is_proven = |address: SocketAddr| {
            standings.get(&Identity { service, address }).is_some_and(BackendEvidence::is_proven)
        };
        for state in self.services.iter_mut().filter(|state| state.index == service) {
            let members = state.list.iter().flat_map(|in_use| &in_use.membership.members);
            if members.map(|member| member.endpoint.address).all(is_proven) {
                state.fresh_until = None;
            }
        }
    }

    /// Applies the kernel programs' verdicts. Returns the services that have a backend with a
    /// changed verdict.
    fn apply_kernel_verdicts(
        &mut self,
        verdicts: BTreeMap<Slot, KernelVerdict>,
        now: T,
    ) -> BTreeSet<ServiceIndex> {
        if verdicts == self.verdicts {
            return BTreeSet::new();
        }
        let of =
            |verdicts: &BTreeMap<Slot, KernelVerdict>, slot| verdicts.get(&slot).copied().unwrap_or_default();
        let of_slot = self
            .slots
            .iter()
            .map(|(identity, at)| (identity, of(&self.verdicts, at.slot), of(&verdicts, at.slot)));
        let changed: Vec<_> = of_slot.filter(|(_, before, after)| before != after).collect();
        let concerned: BTreeSet<ServiceIndex> =
            changed.iter().map(|(identity, ..)| identity.service).collect();
        let limit = |state: &ServiceState<T>| state.service.ejection.map_or(u8::MAX, |rules| rules.failures);
        let services = self.services.iter().filter(|state| concerned.contains(&state.index));
        let services: BTreeMap<ServiceIndex, (u8, BTreeSet<SocketAddr>)> =
            services.map(|state| (state.index, (limit(state), self.available(state, &verdicts)))).collect();
        for (identity, before, after) in changed {
            let standing = self.standings.entry(identity).or_insert_with(|| BackendEvidence::new(now));
            let verdict =
                ReportedVerdict { health: Health::Ejected, why: Why::Failures(after.failures), until: None };
            // A backend that has reached the limit of failures is treated as ejected even if its
            // ejection is withheld because it is the last available backend. The programs double
            // the limit for a backend that probes have found healthy, unless it is the last
            // available backend.
            let limit = services.get(&identity.service).map_or(u8::MAX, |(failures, available)| {
                let has_others = available.iter().any(|address| *address != identity.address);
                doubled_if(*failures, (standing.is_probed_healthy() && has_others).into())
            });
            let is_ejected = after.is_ejected || after.failures >= limit;
            standing.set_verdict(Who::Kernel, is_ejected.then_some(verdict), now);
            if after.failures > before.failures {
                standing.note_failure(now);
            }
        }
        self.verdicts = verdicts;
        concerned
    }

    /// The backends of a service that are available after `verdicts`, and the backup.
    fn available(
        &self,
        state: &ServiceState<T>,
        verdicts: &BTreeMap<Slot, KernelVerdict>,
    ) -> BTreeSet<SocketAddr> {
        let Some(row) = state.list.as_ref().map(|in_use| &in_use.row) else { return BTreeSet::new() };
        let is_ejected = |address: SocketAddr| {
            let at = self.slots.get(Identity { service: state.index, address });
            at.and_then(|at| verdicts.get(&at.slot)).is_some_and(|verdict| verdict.is_ejected)
        };
        let health = row.usable.iter().map(|(address, (_, health))| (*address, *health));
        let available =
            health.filter(|(address, health)| *health <= Health::Unproven && !is_ejected(*address));
        available.map(|(address, _)| address).chain(row.backup).collect()
    }

    /// The complete desired contents of the maps.
    pub fn plan(&self) -> Plan {
        let mut plan = Plan::default();
        for (&index, adopted) in &self.adopted.services {
            if !self.is_configured(index) {
                let closed = ServicePlan {
                    open: false,
                    fallback: None,
                    schedule: Arc::from([]),
                    replaced: Vec::new(),
                    ..adopted.clone()
                };
                plan.services.insert(index, closed);
            }
        }
        for state in &self.services {
            plan.services.insert(state.index, self.service_plan(state));
        }
        let members = self.members();
        for (identity, at) in self.slots.iter() {
            let state = members.state(identity.service);
            let adopted = self.adopted(at);
            let backend = BackendPlan {
                service: identity.service,
                address: identity.address,
                generation: at.generation,
                weight: weight_of(state, identity).or(adopted.map(|adopted| adopted.weight)).unwrap_or(0),
                state: match adopted {
                    // A backend is leaving if it is outside the subset, or if the source has
                    // removed it.
                    _ if !members.has(identity, at) => BackendState::Leaving,
                    _ if is_replaced(state, identity) => BackendState::Replaced,
                    Some(adopted) if state.is_some_and(|state| state.list.is_none()) => adopted.state,
                    _ => BackendState::Member,
                },
                reason: self.reason(state, identity, adopted),
                usable: self.usable(state, identity, adopted),
                is_probed_healthy: self
                    .standings
                    .get(&identity)
                    .is_some_and(BackendEvidence::is_probed_healthy),
                report: self.report_id(state, identity, adopted),
            };
            plan.backends.insert(at.slot, backend);
        }
        plan
    }

    fn service_plan(&self, state: &ServiceState<T>) -> ServicePlan {
        let service = &state.service;
        let slot = |address: &SocketAddr| {
            let identity = Identity { service: state.index, address: *address };
            self.slots.get(identity).map(|backend| backend.slot)
        };
        let (fallback, schedule, replaced) = match (&state.list, self.adopted.services.get(&state.index)) {
            (Some(in_use), _) => {
                let replaced = in_use.row.replaced.keys().filter_map(slot).collect();
                (in_use.fallback, Arc::clone(&in_use.schedule), replaced)
            }
            (None, Some(adopted)) => {
                (adopted.fallback, Arc::clone(&adopted.schedule), adopted.replaced.clone())
            }
            (None, None) => (None, Arc::from([]), Vec::new()),
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
            replaced,
        }
    }

    /// The entry that a backend had in the maps when the daemon started.
    fn adopted(&self, at: BackendRef) -> Option<&BackendPlan> {
        self.adopted.backends.get(&at.slot).filter(|adopted| adopted.generation == at.generation)
    }

    /// The health reason for a backend's state word. Until the service has a list, this is the
    /// adopted reason.
    fn reason(
        &self,
        state: Option<&ServiceState<T>>,
        identity: Identity,
        adopted: Option<&BackendPlan>,
    ) -> HealthReason {
        let Some(in_use) = state.and_then(|state| state.list.as_ref()) else {
            return adopted.map_or(HealthReason::Unstated, |adopted| adopted.reason);
        };
        let health = in_use.row.usable.get(&identity.address).map(|(_, health)| *health);
        match self.standings.get(&identity).and_then(BackendEvidence::reason) {
            Some(reason) => reason,
            None if health == Some(Health::Unproven) => HealthReason::Unproven,
            None => HealthReason::Healthy,
        }
    }

    /// The report id of a backend; [`NO_REPORT`] for backends of a removed service, because
    /// connects no longer choose them.
    fn report_id(
        &self,
        state: Option<&ServiceState<T>>,
        identity: Identity,
        adopted: Option<&BackendPlan>,
    ) -> u32 {
        let Some(state) = state else { return NO_REPORT };
        let id = match &state.reports {
            Some(ids) => {
                let name = Name { protocol: state.service.protocol, address: identity.address };
                ids.get(&name).copied()
            }
            None => adopted.map(|adopted| adopted.report),
        };
        id.unwrap_or(NO_REPORT)
    }

    /// The current [`Row`] of the service at this position in the configuration; `None` before the
    /// service has a list.
    pub fn row(&self, position: usize) -> Option<&Row<T>> {
        self.services[position].list.as_ref().map(|in_use| &in_use.row)
    }

    /// The current list of the service at this position in the configuration; `None` before a
    /// source has delivered a list.
    pub fn list(&self, position: usize) -> Option<&Arc<EndpointList>> {
        self.services[position].list.as_ref().map(|in_use| &in_use.endpoints)
    }

    /// For each service, in the order of the configuration: its configuration, its index, and its
    /// current list and membership.
    pub fn services(
        &self,
    ) -> impl Iterator<Item = (&Service, ServiceIndex, Option<(&EndpointList, &Membership)>)> + '_ {
        self.services.iter().map(|state| {
            let in_use = state.list.as_ref().map(|in_use| (&*in_use.endpoints, &*in_use.membership));
            (&state.service, state.index, in_use)
        })
    }
}

/// The evidence on a backend: from `evidence`, which includes the verdicts of an incoming list; if
/// `evidence` has no entry, from `before`.
fn newest<'s, T>(
    evidence: &'s BTreeMap<Identity, BackendEvidence<T>>,
    before: &'s BTreeMap<Identity, BackendEvidence<T>>,
    identity: Identity,
) -> Option<&'s BackendEvidence<T>> {
    evidence.get(&identity).or_else(|| before.get(&identity))
}

/// The result of [`Balancer::members`].
struct NamedMembers<'b, T> {
    /// The services of the configuration.
    states: BTreeMap<ServiceIndex, &'b ServiceState<T>>,
    /// The slots of adopted tables and fallbacks, for services that have no list yet.
    adopted: BTreeSet<Slot>,
}

impl<'b, T> NamedMembers<'b, T> {
    /// The service with this index; `None` if it is no longer configured.
    fn state(&self, index: ServiceIndex) -> Option<&'b ServiceState<T>> {
        self.states.get(&index).copied()
    }

    fn has(&self, identity: Identity, at: BackendRef) -> bool {
        match self.state(identity.service) {
            Some(ServiceState { list: Some(in_use), .. }) => {
                in_use.row.usable.contains_key(&identity.address)
            }
            Some(_) => self.adopted.contains(&at.slot),
            None => false,
        }
    }
}

/// The table and the fallback that [`Balancer::build`] computes from a [`Row`].
struct Built {
    schedule: Arc<[Slot]>,
    fallback: Option<Slot>,
}

impl<T> ListInUse<T> {
    fn matches(&self, endpoints: &Arc<EndpointList>, membership: &Arc<Membership>) -> bool {
        fn same<V: PartialEq>(a: &Arc<V>, b: &Arc<V>) -> bool {
            Arc::ptr_eq(a, b) || a == b
        }
        same(&self.membership, membership) && same(&self.endpoints, endpoints)
    }
}

/// The capacity of a backend according to the current list.
fn weight_of<T>(state: Option<&ServiceState<T>>, identity: Identity) -> Option<u16> {
    Some(state?.list.as_ref()?.endpoints.get(identity.address)?.weight)
}

fn is_replaced<T>(state: Option<&ServiceState<T>>, identity: Identity) -> bool {
    let in_use = state.and_then(|state| state.list.as_ref());
    in_use.is_some_and(|in_use| in_use.row.replaced.contains_key(&identity.address))
}

fn index_of(adopted: &Plan, service: &Service) -> Option<ServiceIndex> {
    let same = |plan: &ServicePlan| {
        plan.name == service.name && plan.address == service.address && plan.protocol == service.protocol
    };
    adopted.services.iter().find(|(_, plan)| same(plan)).map(|(index, _)| *index)
}

/// The evidence on the backends of adopted tables, from their state words. Each verdict is valid
/// until its witness reports again. A state word that an older daemon wrote contains no reason:
/// then the backend is treated as healthy if it was usable, and as refusing if it was not.
fn adopted_standings<T: Copy + Ord>(
    states: &[ServiceState<T>],
    adopted: &Plan,
    now: T,
) -> BTreeMap<Identity, BackendEvidence<T>> {
    let mut standings = BTreeMap::new();
    for state in states {
        let Some(table) = adopted.services.get(&state.index) else { continue };
        // Verdicts of a witness that is no longer configured are not adopted, because the witness
        // would never withdraw them.
        let HealthRules { first_look, heeds_reports, .. } = state.service.health;
        let is_probed = first_look.is_some();
        let slots: BTreeSet<Slot> = table.schedule.iter().chain(&table.replaced).copied().collect();
        for backend in slots.iter().filter_map(|slot| adopted.backends.get(slot)) {
            let reason = health::stated_reason(backend.reason, backend.state, backend.usable);
            let mut standing = BackendEvidence::new(now);
            match (reason, health::meaning(reason)) {
                (_, (health, Some((who @ Who::Probe, why)))) if is_probed => {
                    standing.take_over();
                    standing.set_verdict(who, Some(ReportedVerdict { health, why, until: None }), now);
                }
                (_, (health, Some((who @ Who::Report, why)))) if heeds_reports => {
                    standing.set_verdict(who, Some(ReportedVerdict { health, why, until: None }), now);
                }
                // Until the operators' overrides are read, the drain remains in force.
                (_, (health, Some((who @ Who::Operator, why)))) => {
                    standing.set_verdict(who, Some(ReportedVerdict { health, why, until: None }), now);
                }
                (HealthReason::Healthy, _) if is_probed => standing.take_over(),
                _ => continue,
            }
            let identity = Identity { service: state.index, address: backend.address };
            standings.insert(identity, standing);
        }
    }
    standings
}

fn free_index(taken: &BTreeSet<ServiceIndex>) -> Option<ServiceIndex> {
    ServiceIndex::all().find(|index| !taken.contains(index))
}

/// The members' weights in the table: structural weights times factors.
fn weights_of<T>(row: &Row<T>, state: &ServiceState<T>) -> Vec<u64> {
    let mut next = Next::default();
    let mut factor =
        |address| state.factors.of_next(&mut next, address).and(state.operator_weights.of(address));
    row.members.iter().map(|(address, weight)| factor(*address).times(*weight)).collect()
}

fn table(weights: &[u64], slots: &[Slot], length: u32) -> Arc<[Slot]> {
    let counts = schedule::apportion(weights, length);
    schedule::interleave(&counts).into_iter().map(|member| slots[member as usize]).collect()
}
