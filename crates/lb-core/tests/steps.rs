//! The steps from one plan to the next, on a fake kernel. After every step, a connect must find a
//! complete table and a backend of its service.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use lb_common::abi::{
    BackendState, EjectionState, MAX_SCHEDULE_LOG2, MIN_SCHEDULE_LOG2, RecentErrors, StateWord, TableRef,
    Usable,
};
use lb_common::pick::{How, Pick, Tables, choose};
use lb_core::balancer::{self, Adopted, Fact};
use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::health::{Health, HealthVerdict, Who, Why};
use lb_core::ids::{ServiceIndex, Slot};
use lb_core::limits::Limits;
use lb_core::membership::Assignment;
use lb_core::plan::{Plan, Step, diff};
use lb_core::service::{Service, Subset, Task};
use lb_core::slots::Identity;
use proptest::prelude::*;

/// A balancer with a clock that the tests set.
type Balancer = balancer::Balancer<Duration>;

const START: Duration = Duration::ZERO;

const fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const LIMITS: Limits = Limits { schedule_entries: 8192, flow_records: 64, slots: 24 };

fn service(name: &str, last: u8) -> Service {
    Service::new(name, SocketAddr::from(([10, 96, 0, last], 80)), Subset::All, 0)
}

/// The state that a balancer adopts from a kernel with this plan.
fn adopt(plan: &Plan) -> Adopted {
    Adopted { plan: plan.clone(), ..Adopted::default() }
}

/// The fact of a new list for the service at this position, in a job with one task.
fn delivered(services: &[Service], position: usize, list: EndpointList) -> Fact {
    Fact::Endpoints(position, Assignment::of(&services[position], Task { index: 0, count: 1 }, list))
}

/// Endpoints of a service by their numbers: weight 1 to 3, or a lame duck.
fn list(service: u8, members: &BTreeMap<u8, u8>) -> EndpointList {
    let endpoints = members.iter().map(|(&number, &kind)| Endpoint {
        address: SocketAddr::from(([10, 0, service, number], 80)),
        index: u32::from(number),
        weight: u16::from(kind.max(1)),
        state: if kind == 0 { EndpointState::LameDuck } else { EndpointState::Healthy },
        zone: None,
        agent: None,
    });
    EndpointList::new(endpoints.collect(), SocketAddr::from(([10, 96, 0, service], 80)), &[])
        .expect("the list fits")
}

/// A service's tables as a connect reads them.
struct View<'a> {
    plan: &'a Plan,
    index: ServiceIndex,
}

impl Tables for View<'_> {
    type Backend = u32;
    type Members = ();
    type Position = usize;

    fn entry(&self, entry: u32) -> Option<u32> {
        self.plan.services[&self.index].schedule.get(entry as usize).map(|slot| slot.number())
    }

    fn backend(&self, slot: u32) -> Option<u32> {
        Some(slot)
    }

    fn state(&self, slot: u32) -> StateWord {
        let backend = Slot::new(slot).and_then(|slot| self.plan.backends.get(&slot));
        let usable = backend.map_or(Usable::No, |backend| backend.usable);
        StateWord::new(usable, BackendState::Member)
    }

    fn flows(&self, _: u32) -> u32 {
        0
    }

    fn errors(&self, _: u32) -> RecentErrors {
        RecentErrors::default()
    }

    fn ejection(&self, _: u32) -> EjectionState {
        EjectionState::default()
    }

    fn entries(&self, _: u32) -> u32 {
        1
    }

    /// The slots in the schedule, as the kernel's list of members has them.
    fn members(&self, _: TableRef) -> Option<()> {
        (!self.listed().is_empty()).then_some(())
    }

    fn list(&self, (): ()) -> Option<(u32, u32, usize)> {
        let count = u32::try_from(self.listed().len()).expect("the number is small");
        Some((count, count, 0))
    }

    fn position(&self, (): (), number: u32) -> Option<usize> {
        Some(number as usize)
    }

    fn member(&self, position: usize) -> (u32, usize) {
        (self.listed().into_iter().nth(position).expect("the position is in the list"), position + 1)
    }

    fn fallback(&self) -> u32 {
        Slot::number_or_none(self.plan.services[&self.index].fallback)
    }
}

impl View<'_> {
    fn listed(&self) -> BTreeSet<u32> {
        self.plan.services[&self.index].schedule.iter().map(|slot| slot.number()).collect()
    }
}

/// The backend of a connect to `address` now; `None` if the address is not balanced.
fn connect(
    plan: &Plan,
    keys: &BTreeMap<SocketAddr, ServiceIndex>,
    address: SocketAddr,
    sample: u32,
) -> Option<Pick> {
    let &index = keys.get(&address)?;
    let len = plan.services[&index].schedule.len();
    let length_log2 = if len == 0 { 0 } else { u8::try_from(len.ilog2()).expect("the number is small") };
    assert!(len == 0 || (MIN_SCHEDULE_LOG2..=MAX_SCHEDULE_LOG2).contains(&length_log2));
    let table = TableRef { base: 0, generation: 0, length_log2, members: 0 };
    Some(choose(&View { plan, index }, table, plan.services[&index].rules, sample, 0))
}

/// Applies a step to the keys: the service index of each address.
fn record_key(keys: &mut BTreeMap<SocketAddr, ServiceIndex>, plan: &Plan, step: &Step) {
    match step {
        Step::Open(index) => {
            keys.insert(plan.services[index].address, *index);
        }
        Step::Close(index) => {
            let address = plan.services[index].address;
            if keys.get(&address) == Some(index) {
                keys.remove(&address);
            }
        }
        _ => {}
    }
}

/// Executes the steps from `old` to `new`, and checks the state after every step.
fn carry_out(
    old: &Plan,
    new: &Plan,
    keys: &mut BTreeMap<SocketAddr, ServiceIndex>,
    always: &[SocketAddr],
) -> Plan {
    let mut now = old.clone();
    for step in diff(old, new) {
        now.record(&step);
        record_key(keys, &now, &step);
        // The daemon may be killed here, so the maps must be ready for adoption.
        now.assert_consistent();
        for address in always {
            for sample in [0, 1, 7, 500, 1023] {
                let picked = connect(&now, keys, *address, sample);
                let slot = match picked {
                    Some(Pick { how: How::Picked | How::Fallback, slot }) => {
                        Slot::new(slot).expect("the slot is valid")
                    }
                    other => panic!("connect to {address} after {step:?}: {other:?}"),
                };
                let backend = &now.backends[&slot];
                assert_eq!(
                    backend.service, keys[address],
                    "a connect must not reach another service after {step:?}"
                );
            }
        }
    }
    assert_eq!(now, *new, "after all steps, the maps must match the plan");
    now
}

fn members() -> impl Strategy<Value = BTreeMap<u8, u8>> {
    prop::collection::btree_map(1u8..=8, 0u8..=3, 1..8)
}

proptest! {
    /// Lists change, backends return to their slots, and the daemon is killed between steps. The
    /// next daemon adopts the maps. Connects to a service with endpoints always reach a backend of
    /// that service, and no slot changes its backend while anything refers to it.
    #[test]
    fn no_connect_fails_between_any_two_steps(
        changes in prop::collection::vec((0usize..2, members(), any::<bool>(), 0usize..40), 1..12),
    ) {
        let services = vec![service("a", 0), service("b", 1)];
        let addresses: Vec<SocketAddr> = services.iter().map(|service| service.address).collect();
        let mut balancer = Balancer::new(services.clone(), LIMITS, Adopted::default(), START).expect("the plan fits");
        let mut lists = [BTreeMap::from([(1, 1)]), BTreeMap::from([(1, 1)])];
        for (position, members) in lists.iter().enumerate() {
            let list = list(u8::try_from(position).expect("the number is small"), members);
            balancer.handle(START, delivered(&services, position, list)).expect("the plan fits");
        }
        let mut keys = BTreeMap::new();
        let mut kernel = carry_out(&Plan::default(), &balancer.plan(), &mut keys, &[]);
        for (position, members, killed, at) in changes {
            lists[position] = members;
            let changed = list(u8::try_from(position).expect("the number is small"), &lists[position]);
            if balancer.handle(START, delivered(&services, position, changed)).is_err() {
                // No slot was free, and nothing changed.
                prop_assert_eq!(&kernel, &balancer.plan());
                continue;
            }
            if killed {
                for step in diff(&kernel, &balancer.plan()).into_iter().take(at) {
                    kernel.record(&step);
                    record_key(&mut keys, &kernel, &step);
                }
                balancer = Balancer::new(services.clone(), LIMITS, adopt(&kernel), START).expect("the plan fits");
                for (position, members) in lists.iter().enumerate() {
                    let list = list(u8::try_from(position).expect("the number is small"), members);
                    balancer.handle(START, delivered(&services, position, list)).expect("the plan fits");
                }
            }
            kernel = carry_out(&kernel, &balancer.plan(), &mut keys, &addresses);
            balancer.handle(START, Fact::Idle(balancer.unneeded())).expect("the plan fits");
            kernel = carry_out(&kernel, &balancer.plan(), &mut keys, &addresses);
            let taken: BTreeSet<Slot> = kernel.backends.keys().copied().collect();
            let wanted: usize = lists.iter().map(|list| {
                let healthy = list.values().filter(|kind| **kind > 0).count();
                // One lame duck has a slot as the backup.
                if healthy > 0 { list.len().min(healthy + 1) } else { list.len() }
            }).sum();
            prop_assert_eq!(taken.len(), wanted, "idle slots must be freed");
        }
    }
}

/// A balancer with a list of two endpoints for every service, and its plan.
fn settled(services: &[Service], adopted: &Plan) -> (Balancer, Plan) {
    let mut balancer =
        Balancer::new(services.to_vec(), LIMITS, adopt(adopted), START).expect("the plan fits");
    for position in 0..services.len() {
        let members = BTreeMap::from([(1, 1), (2, 1)]);
        let list = list(u8::try_from(position).expect("the number is small"), &members);
        balancer.handle(START, delivered(services, position, list)).expect("the plan fits");
    }
    let plan = balancer.plan();
    (balancer, plan)
}

#[test]
fn a_renamed_service_is_balanced_at_every_step() {
    let mut keys = BTreeMap::new();
    let (_, before) = settled(&[service("old", 0)], &Plan::default());
    let kernel = carry_out(&Plan::default(), &before, &mut keys, &[]);
    let (mut balancer, after) = settled(&[service("new", 0)], &kernel);
    let address = SocketAddr::from(([10, 96, 0, 0], 80));
    let kernel = carry_out(&kernel, &after, &mut keys, &[address]);
    assert_eq!(kernel.services.len(), 2, "the old service remains until its flows end");
    balancer.handle(START, Fact::Idle(balancer.unneeded())).expect("the plan fits");
    let kernel = carry_out(&kernel, &balancer.plan(), &mut keys, &[address]);
    assert_eq!(kernel.services.values().map(|service| service.name.as_str()).collect::<Vec<_>>(), ["new"]);
}

#[test]
fn a_removed_service_without_backends_frees_its_index() {
    let mut keys = BTreeMap::new();
    let empty =
        Balancer::new(vec![service("empty", 0)], LIMITS, Adopted::default(), START).expect("the plan fits");
    let kernel = carry_out(&Plan::default(), &empty.plan(), &mut keys, &[]);
    let next = Balancer::new(vec![service("next", 1)], LIMITS, adopt(&kernel), START).expect("the plan fits");
    let kernel = carry_out(&kernel, &next.plan(), &mut keys, &[]);
    assert_eq!(kernel.services.values().map(|service| service.name.as_str()).collect::<Vec<_>>(), ["next"]);
    assert_eq!(keys.len(), 1);
}

#[test]
fn a_closing_service_never_refuses_a_connect() {
    let mut keys = BTreeMap::new();
    let (_, both) = settled(&[service("stays", 0), service("goes", 1)], &Plan::default());
    let kernel = carry_out(&Plan::default(), &both, &mut keys, &[]);
    let (_, one) = settled(&[service("stays", 0)], &kernel);
    let gone = SocketAddr::from(([10, 96, 0, 1], 80));
    let mut now = kernel.clone();
    for step in diff(&kernel, &one) {
        now.record(&step);
        record_key(&mut keys, &now, &step);
        // Connects to the address are balanced until the service is closed, and never refused.
        match connect(&now, &keys, gone, 0) {
            None | Some(Pick { how: How::Picked, .. }) => {}
            other => panic!("connect to the removed service after {step:?}: {other:?}"),
        }
    }
    assert_eq!(now.services.values().filter(|service| service.fallback.is_none()).count(), 1);
}

#[test]
fn an_unusable_backend_has_a_verdict_with_reason_and_time() {
    let services = [service("a", 0)];
    let mut balancer =
        Balancer::new(services.to_vec(), LIMITS, Adopted::default(), START).expect("the plan fits");
    let both = |kind| BTreeMap::from([(1, 1), (2, kind)]);
    // For each list: its time and members, since when the second backend is a lame duck, and
    // whether that backend is usable.
    let cases = [
        (10, both(1), None, true),
        (20, both(0), Some(20), false),
        (30, both(0), Some(20), false),
        (40, BTreeMap::from([(1, 1)]), None, false),
        (50, both(1), None, true),
        // There is no better backend, so the lame duck serves, but it remains unavailable.
        (60, BTreeMap::from([(2, 0)]), Some(60), true),
        (70, BTreeMap::from([(2, 0), (3, 1)]), Some(60), false),
    ];
    let second = Identity { service: ServiceIndex(0), address: SocketAddr::from(([10, 0, 0, 2], 80)) };
    for (now, members, since, usable) in cases {
        balancer.handle(at(now), delivered(&services, 0, list(0, &members))).expect("the plan fits");
        let verdict = balancer.standing(second).and_then(|standing| standing.worst().copied());
        let expected = since.map(|since| HealthVerdict {
            health: Health::LameDuck,
            who: Who::Source,
            why: Why::State,
            since: at(since),
            until: None,
        });
        assert_eq!(verdict, expected, "at {now} s");
        let plan = balancer.plan();
        let backend = plan.backends.values().find(|backend| backend.address == second.address);
        assert_eq!(backend.map(|backend| backend.usable), Some(Usable::from(usable)), "at {now} s");
    }
}

#[test]
fn an_equal_list_changes_nothing() {
    let services = [service("a", 0)];
    let (mut balancer, before) = settled(&services, &Plan::default());
    let same = list(0, &BTreeMap::from([(1, 1), (2, 1)]));
    assert_eq!(balancer.handle(at(9), delivered(&services, 0, same)), Ok(false));
    assert_eq!(balancer.plan(), before);
    let another = list(0, &BTreeMap::from([(1, 1), (2, 2)]));
    assert_eq!(balancer.handle(at(9), delivered(&services, 0, another)), Ok(true));
}

/// The step that frees the slot has failed, and the next plan has another backend in the slot.
#[test]
fn a_slot_is_freed_before_another_backend_gets_it() {
    let services = [service("users", 10)];
    let mut balancer = Balancer::new(services.to_vec(), LIMITS, adopt(&Plan::default()), START).unwrap();
    let deliver = |members: &[u8], balancer: &mut Balancer| {
        let list = list(10, &members.iter().map(|member| (*member, 1)).collect());
        balancer.handle(START, delivered(&services, 0, list)).unwrap();
        balancer.plan()
    };
    let before = deliver(&[1], &mut balancer);
    deliver(&[2], &mut balancer);
    let idle = balancer.unneeded();
    balancer.handle(START, Fact::Idle(idle)).unwrap();
    let after = deliver(&[2, 3], &mut balancer);
    let slot = *before.backends.keys().next().unwrap();
    assert_ne!(after.backends[&slot].address, before.backends[&slot].address, "the slot has another backend");
    let of_slot = |step: &Step| match step {
        Step::FreeBackend(of) => (*of == slot).then_some("free"),
        Step::WriteBackend(of, _) => (*of == slot).then_some("write"),
        _ => None,
    };
    assert_eq!(diff(&before, &after).iter().filter_map(of_slot).collect::<Vec<_>>(), ["free", "write"]);
}
