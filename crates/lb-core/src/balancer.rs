//! The controller of one client task: [`Balancer::handle`] applies each [`Fact`], and
//! [`Balancer::plan`] returns a complete plan.
//!
//! The membership of a list and the evidence on its backends determine the [`Row`], and the row
//! determines the table. `evidence` applies the verdicts on backends.
//!
//! The balancer stores the list in force of every service, the slot of each backend, and the
//! evidence on each backend. It reads no clock: the caller passes the time of each fact. The code
//! that reads the maps reports slots to which nothing in the kernel refers any more
//! ([`Fact::Idle`]).

mod evidence;

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Add;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lb_common::abi::host::NO_REPORT;
use lb_common::abi::{BackendState, HealthReason, MAX_SERVICES, MAX_SUBSET, Usable};
use thiserror::Error;

use crate::control::by_address::Next;
use crate::control::factor::Factors;
use crate::endpoint::EndpointList;
use crate::health::loss::Presence;
use crate::health::replacement::{InOrder, replacement};
use crate::health::tiers::{self, Tier, TierCandidate};
use crate::health::{self, BackendEvidence, Health, ReportedVerdict, Who, Why};
use crate::ids::{BackendRef, ServiceIndex, Slot};
use crate::limits::Limits;
use crate::members::membership::{Assignment, Member, Membership};
use crate::plan::{BackendPlan, Plan, ServicePlan};
use crate::reports::Name;
use crate::service::Service;
use crate::tables::rules;
use crate::tables::schedule;
use crate::tables::slots::{Identity, Slots, SlotsExhausted};

use evidence::adopted_standings;

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

/// The backends that a service uses now. `T` is a time of any clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row<T = Instant> {
    /// The backends in the table, with their structural weights.
    pub members: Vec<(SocketAddr, u64)>,
    /// The replaced backends (members, and substitutes that failed), each with the time since which
    /// it has been replaced.
    pub replaced: BTreeMap<SocketAddr, T>,
    /// For each backend in the table, each replaced backend, and the backup: whether a connect may
    /// choose it, and its health.
    pub usable: BTreeMap<SocketAddr, (Usable, Health)>,
    /// The lame duck that connects use after the programs have ejected every member, until the
    /// daemon reacts. The backup is in no table.
    pub backup: Option<SocketAddr>,
    /// The tier that serves: connects choose its backends.
    pub tier: Tier,
    /// The number of available backends and the number of all backends, among those that are in the
    /// table or replaced. Drained backends are not counted: a drain is no failure, so it must not
    /// lead to panic. Lame ducks that serve because no other backend is available are not counted
    /// either.
    pub available: (usize, usize),
    /// Whether the available part is below `panic_threshold`.
    pub is_below_threshold: bool,
    /// Whether the service is in panic: the available part is below the threshold, and no recently
    /// established connection shows that a backend serves. Connects may then choose every backend
    /// that may accept connections.
    pub is_panic: bool,
    /// Whether the first probes of all backends are still running, so that all are treated alike.
    is_fresh: bool,
}

impl<T> Row<T> {
    /// Whether the row may change because time passes: a backend is unavailable or replaced, or the
    /// first probes are still running.
    pub fn is_unsettled(&self) -> bool {
        let (available, tried) = self.available;
        available < tried || self.drained() > 0 || !self.replaced.is_empty() || self.is_fresh
    }

    /// The number of drained backends that are in the table or replaced.
    pub fn drained(&self) -> usize {
        self.usable.values().filter(|(_, health)| *health == Health::Drained).count()
    }

    /// Removes the backup.
    pub fn drop_backup(&mut self) {
        if let Some(address) = self.backup.take() {
            self.usable.remove(&address);
        }
    }

    /// The backend that connects use if every backend that they examined was unusable. It is the
    /// backup or, without a backup, the usable member with the best health. Of equally healthy
    /// members, it is the member with the largest weight.
    pub fn fallback(&self) -> Option<SocketAddr> {
        let rank = |(at, (address, weight)): (usize, &(SocketAddr, u64))| {
            let (usable, health) = self.usable[address];
            // If members are equal, the first in the table is chosen.
            usable.is_usable().then_some(((Reverse(health), *weight, Reverse(at)), *address))
        };
        let best = self.members.iter().enumerate().filter_map(rank).max_by_key(|(rank, _)| *rank);
        self.backup.or(best.map(|(_, address)| address))
    }
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
        let is_fresh = fresh_until.is_some_and(|until| now < until);
        let row_of = |this: &Self, membership: &Membership, replaced: &BTreeMap<SocketAddr, T>| {
            this.row_of(&this.services[position], membership, replaced, is_fresh, &evidence, now)
        };
        let mut row = row_of(self, &membership, &self.replaced(state, now));
        // If there is no room for substitutes, the row is built without them. If there is no room
        // for the members either, the list is refused.
        let (row, Built { schedule, fallback }) = match self.build(position, &mut row) {
            Ok(built) => (row, built),
            Err(_) => {
                let plain = Membership { next: Vec::new(), lame_ducks: Vec::new(), ..(*membership).clone() };
                let mut plain = row_of(self, &plain, &BTreeMap::new());
                let built = self.build(position, &mut plain)?;
                (plain, built)
            }
        };
        self.services[position].list = Some(ListInUse { endpoints, membership, row, schedule, fallback });
        self.services[position].fresh_until = fresh_until;
        // From now on the list determines the plan, instead of the adopted contents of the maps.
        self.adopted.services.remove(&index);
        self.apply_list_verdicts(position, now);
        self.forget_unlisted(position);
        Ok(true)
    }

    /// Computes the row of a service for a membership. `replaced`: the replaced backends of the
    /// previous row, each with the time since which it has been replaced. `is_fresh`: whether the
    /// first probes of all backends are still running. `evidence`: the evidence on backends that
    /// takes precedence over the stored evidence.
    fn row_of(
        &self,
        state: &ServiceState<T>,
        membership: &Membership,
        replaced: &BTreeMap<SocketAddr, T>,
        is_fresh: bool,
        evidence: &BTreeMap<Identity, BackendEvidence<T>>,
        now: T,
    ) -> Row<T> {
        let (rules, used_before) = (state.service.health, self.used(state));
        let standing =
            |address| newest(evidence, &self.standings, Identity { service: state.index, address });
        let members = &membership.members;
        let wants_proof = rules.first_look.is_some() && !is_fresh;
        let candidate = |member: &Member| candidate(member, standing(member.endpoint.address), wants_proof);
        let in_order: Vec<InOrder<T>> = members
            .iter()
            .chain(&membership.next)
            .map(|member| {
                let standing = standing(member.endpoint.address);
                InOrder {
                    unavailable_since: standing.and_then(BackendEvidence::unavailable_since),
                    available_since: standing.and_then(BackendEvidence::available_since),
                    replaced_since: replaced.get(&member.endpoint.address).copied(),
                    is_unproven: rules.first_look.is_some()
                        && !standing.is_some_and(BackendEvidence::is_proven),
                    is_used: used_before.contains(&member.endpoint.address),
                }
            })
            .collect();
        let changed = replacement(&in_order, members.len(), rules.replace_after, now);
        let is_replaced = |at: &usize| changed.replaced.contains(at);
        let mut used: Vec<&Member> =
            (0..members.len()).filter(|at| !is_replaced(at)).map(|at| &members[at]).collect();
        used.extend(changed.substitutes.iter().map(|at| &membership.next[at - members.len()]));
        let mut out: Vec<&Member> = changed.replaced.iter().map(|at| &members[*at]).collect();
        out.extend(changed.failed.iter().map(|at| &membership.next[at - members.len()]));
        let is_drained = |member: &&&Member| candidate(member).health == Health::Drained;
        let tried = used.iter().chain(&out).filter(|member| !is_drained(member)).count();
        let is_available = |member: &&&Member| candidate(member).health <= Health::Unproven;
        let available = used.iter().chain(&out).filter(is_available).count();
        let is_below_threshold = tiers::is_below_threshold(available, tried, rules.panic_threshold);
        let is_panic = is_below_threshold && !self.serving.contains(&state.index);
        if !used.iter().any(|member| is_available(&member)) {
            let room = (MAX_SUBSET as usize).saturating_sub(used.len());
            used.extend(membership.lame_ducks.iter().take(room));
        }
        let tier = tiers::tier(used.iter().map(|member| candidate(member)), is_panic, rules.drain_fallback);
        let is_backup = |member: &&Member| candidate(member).health == Health::LameDuck;
        let backup = membership.lame_ducks.iter().find(is_backup).filter(|_| tier < Tier::LameDucks);
        let usable = used.iter().chain(&out).copied().chain(backup).map(|member| {
            let address = member.endpoint.address;
            let without = without_own_word(member, standing(address), wants_proof);
            (address, (tiers::usable(without, tier), candidate(member).health))
        });
        let since = |address| replaced.get(&address).copied().unwrap_or(now);
        Row {
            tier,
            usable: usable.collect(),
            members: used.iter().map(|member| (member.endpoint.address, member.weight)).collect(),
            backup: backup.map(|member| member.endpoint.address),
            replaced: out.iter().map(|member| member.endpoint.address).map(|one| (one, since(one))).collect(),
            available: (available, tried),
            is_below_threshold,
            is_panic,
            is_fresh,
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
        let is_fresh = state.fresh_until.is_some_and(|until| now < until);
        let (membership, replaced) = (&in_use.membership, &in_use.row.replaced);
        let mut row = self.row_of(state, membership, replaced, is_fresh, &BTreeMap::new(), now);
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
        let Ok(Built { schedule, fallback }) = self.build(position, &mut row) else { return false };
        self.services[position].list = Some(ListInUse { row, schedule, fallback, ..in_use });
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

/// The facts that determine a member's tier. With `wants_proof`, the member is unproven until its
/// first probe has ended.
fn candidate<T: Copy + Ord>(
    member: &Member,
    standing: Option<&BackendEvidence<T>>,
    wants_proof: bool,
) -> TierCandidate {
    let found = standing.map(|standing| (standing.health(), standing.is_lame_duck()));
    candidate_by(found, member, standing, wants_proof)
}

/// Like [`candidate`], but without the member's own report that it is a lame duck, because the
/// state word must not depend on that report.
fn without_own_word<T: Copy + Ord>(
    member: &Member,
    standing: Option<&BackendEvidence<T>>,
    wants_proof: bool,
) -> TierCandidate {
    candidate_by(standing.map(BackendEvidence::without_own_word), member, standing, wants_proof)
}

/// Combines a member's list entry with other evidence. `found`: the health according to the other
/// evidence, and whether this evidence shows a lame duck.
fn candidate_by<T: Copy + Ord>(
    found: Option<(Health, bool)>,
    member: &Member,
    standing: Option<&BackendEvidence<T>>,
    wants_proof: bool,
) -> TierCandidate {
    let listed = listed(member, wants_proof && !standing.is_some_and(BackendEvidence::is_proven));
    let (health, is_lame_duck) = found.unwrap_or((Health::Healthy, false));
    TierCandidate {
        health: health.max(listed.health),
        is_lame_duck: is_lame_duck || listed.is_lame_duck,
        accepts: listed.accepts && standing.is_none_or(BackendEvidence::accepts),
    }
}

/// The facts of a member's list entry. These facts are needed because the evidence on a backend
/// without a slot does not include the list's verdict.
fn listed(member: &Member, is_unproven: bool) -> TierCandidate {
    let least = if is_unproven { Health::Unproven } else { Health::Healthy };
    let health = health::list_verdict::<()>(&member.endpoint).map_or(least, |verdict| verdict.health);
    TierCandidate { health, is_lame_duck: health == Health::LameDuck, accepts: health != Health::Refusing }
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
