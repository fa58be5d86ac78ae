//! How a client task's plan follows the health of its backends: which backends are replaced, which
//! serve in panic, and how replacement and panic end.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use lb_common::abi::{BackendState, HealthReason, Usable};
use lb_core::balancer::{self, Adopted, Fact, KernelVerdict};
use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::health::tiers::Tier;
use lb_core::health::{Health, Who, Why};
use lb_core::ids::Slot;
use lb_core::limits::Limits;
use lb_core::membership::Assignment;
use lb_core::plan::{BackendPlan, Plan, diff};
use lb_core::service::{Ejection, HealthRules, Service, Size, Subset, Task};
use lb_core::subset::Algorithm;

type Balancer = balancer::Balancer<Duration>;

const LIMITS: Limits = Limits { schedule_entries: 8192, flow_records: 64, slots: 64 };
const TASK: Task = Task { index: 3, count: 10 };

const fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn service(size: u32) -> Service {
    let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(size) };
    Service::new("users", "10.96.0.10:80".parse().expect("the address is valid"), subset, 7)
}

/// The endpoints of a pattern. The character at each index is `h` healthy, `l` lame duck.
fn list(pattern: &str) -> EndpointList {
    let endpoints = pattern.chars().zip(0..).map(|(kind, index)| Endpoint {
        address: SocketAddr::from(([10, 0, 0, u8::try_from(index + 1).expect("the number is small")], 80)),
        index,
        weight: 1,
        state: if kind == 'l' { EndpointState::LameDuck } else { EndpointState::Healthy },
        zone: None,
        agent: None,
    });
    EndpointList::new(endpoints.collect(), "10.96.0.10:80".parse().expect("the address is valid"), &[])
        .expect("the list fits")
}

fn delivered(size: u32, pattern: &str) -> Fact {
    Fact::Endpoints(0, Assignment::of(&service(size), TASK, list(pattern)))
}

fn balancer(size: u32, pattern: &str) -> Balancer {
    balancing(service(size), size, pattern)
}

/// A service with ejection.
fn ejecting(size: u32, pattern: &str) -> Balancer {
    balancing(Service { ejection: Some(Ejection::default()), ..service(size) }, size, pattern)
}

fn balancing(service: Service, size: u32, pattern: &str) -> Balancer {
    let mut balancer =
        Balancer::new(vec![service], LIMITS, Adopted::default(), at(0)).expect("the plan fits");
    balancer.handle(at(0), delivered(size, pattern)).expect("the plan fits");
    balancer
}

fn ejected(slots: &[Slot]) -> Fact {
    Fact::Kernel(slots.iter().map(|slot| (*slot, KernelVerdict { is_ejected: true, failures: 5 })).collect())
}

fn in_table(plan: &Plan) -> BTreeSet<Slot> {
    plan.services.values().flat_map(|service| service.schedule.iter().copied()).collect()
}

fn replaced(plan: &Plan) -> Vec<Slot> {
    let replaced: BTreeSet<Slot> =
        plan.services.values().flat_map(|service| service.replaced.clone()).collect();
    replaced.into_iter().collect()
}

fn backend(plan: &Plan, slot: Slot) -> &BackendPlan {
    &plan.backends[&slot]
}

#[test]
fn an_ejected_member_is_replaced_and_later_returns() {
    let mut balancer = balancer(4, &"h".repeat(20));
    let before = balancer.plan();
    let members = in_table(&before);
    assert_eq!(members.len(), 4);
    let lost = *members.first().expect("there are four members");
    // The member is ejected. For ten seconds the plan does not change; only the kernel excludes the
    // member from connects.
    assert_eq!(balancer.handle(at(100), ejected(&[lost])), Ok(true));
    for seconds in [100, 109] {
        balancer.handle(at(seconds), Fact::Time).expect("only a list can be refused");
        let plan = balancer.plan();
        assert_eq!((in_table(&plan), replaced(&plan)), (members.clone(), vec![]), "at {seconds} s");
        assert_eq!(backend(&plan, lost).usable, Usable::UnlessEjected);
    }
    assert_eq!(balancer.handle(at(110), Fact::Time), Ok(true));
    let during = balancer.plan();
    assert_eq!(replaced(&during), [lost]);
    let now = in_table(&during);
    assert_eq!((now.len(), now.intersection(&members).count()), (4, 3), "one lost member changes one member");
    assert!(!now.contains(&lost));
    // The replaced member retains its slot and gets trials. Its substitute gets as many connects as
    // each of the other members.
    assert_eq!(
        (backend(&during, lost).usable, backend(&during, lost).state),
        (Usable::UnlessEjected, BackendState::Replaced)
    );
    let substitute = *now.difference(&members).next().expect("one substitute serves");
    let entries = during.services.values().next().expect("there is one service").schedule.iter();
    assert_eq!(entries.filter(|slot| **slot == substitute).count(), 256);
    assert!(!balancer.unneeded().contains(&lost));
    // A trial readmits the member. After half a minute without a failure it returns to its place.
    assert_eq!(balancer.handle(at(200), Fact::Kernel(BTreeMap::new())), Ok(true));
    let failed = KernelVerdict { is_ejected: false, failures: 4 };
    balancer.handle(at(220), Fact::Kernel([(lost, failed)].into())).expect("only a list can be refused");
    assert_eq!(balancer.handle(at(249), Fact::Time), Ok(false), "the backend has failed once more");
    assert_eq!(replaced(&balancer.plan()), [lost]);
    assert_eq!(balancer.handle(at(250), Fact::Time), Ok(true));
    let after = balancer.plan();
    assert_eq!((in_table(&after), replaced(&after)), (members, vec![]));
    assert_eq!(backend(&after, substitute).state, BackendState::Leaving);
    assert!(balancer.unneeded().contains(&substitute));
    assert_eq!(balancer.handle(at(300), Fact::Time), Ok(false), "nothing changes after that");
}

#[test]
fn a_failed_substitute_is_replaced_and_still_gets_trials() {
    let mut balancer = balancer(4, &"h".repeat(20));
    let members = in_table(&balancer.plan());
    let lost = *members.first().expect("there are four members");
    let stands_in = |plan: &Plan| *in_table(plan).difference(&members).next().expect("one substitute serves");
    balancer.handle(at(100), ejected(&[lost])).expect("only a list can be refused");
    balancer.handle(at(110), Fact::Time).expect("only a list can be refused");
    let first = stands_in(&balancer.plan());
    balancer.handle(at(120), ejected(&[lost, first])).expect("only a list can be refused");
    assert_eq!(balancer.handle(at(130), Fact::Time), Ok(true));
    let plan = balancer.plan();
    let second = stands_in(&plan);
    assert_ne!(first, second);
    assert_eq!(replaced(&plan).into_iter().collect::<BTreeSet<_>>(), [lost, first].into());
    let BackendPlan { usable, state, .. } = backend(&plan, first);
    assert_eq!((*usable, *state), (Usable::UnlessEjected, BackendState::Replaced));
    assert!(!balancer.unneeded().contains(&first));
    // While the member and its first substitute remain dead, nothing changes any more.
    for seconds in 131..600 {
        assert_eq!(balancer.handle(at(seconds), Fact::Time), Ok(false), "at {seconds} s");
    }
    // First the substitute recovers, and serves again after half a minute without a failure. Then
    // the member recovers, and returns to its place after the same time.
    balancer.handle(at(600), ejected(&[lost])).expect("only a list can be refused");
    assert_eq!(balancer.handle(at(630), Fact::Time), Ok(true));
    assert_eq!(stands_in(&balancer.plan()), first);
    balancer.handle(at(700), Fact::Kernel(BTreeMap::new())).expect("only a list can be refused");
    assert_eq!(balancer.handle(at(730), Fact::Time), Ok(true));
    let plan = balancer.plan();
    assert_eq!((in_table(&plan), replaced(&plan)), (members, vec![]));
}

#[test]
fn all_lost_members_are_replaced_a_quarter_at_a_time() {
    let mut balancer = balancer(8, &"h".repeat(30));
    let members: Vec<Slot> = in_table(&balancer.plan()).into_iter().collect();
    balancer.handle(at(100), ejected(&members)).expect("only a list can be refused");
    for (seconds, expected) in [(109, 0), (110, 2), (119, 2), (120, 4), (130, 6), (140, 8), (200, 8)] {
        balancer.handle(at(seconds), Fact::Time).expect("only a list can be refused");
        let plan = balancer.plan();
        assert_eq!((replaced(&plan).len(), in_table(&plan).len()), (expected, 8), "at {seconds} s");
    }
    assert_eq!(replaced(&balancer.plan()), members);
    // All members recover, and return to the table half a minute later.
    balancer.handle(at(300), Fact::Kernel(BTreeMap::new())).expect("only a list can be refused");
    balancer.handle(at(330), Fact::Time).expect("only a list can be refused");
    assert_eq!(in_table(&balancer.plan()), members.into_iter().collect());
}

#[test]
fn panic_counts_all_tried_backends_and_ends_when_one_serves() {
    let mut balancer = balancer(4, &"h".repeat(30));
    let members: Vec<Slot> = in_table(&balancer.plan()).into_iter().collect();
    let look = |balancer: &Balancer| {
        let row = balancer.row(0).expect("a list is in use");
        (row.available, row.is_panic, row.tier)
    };
    balancer.handle(at(100), ejected(&members[..2])).expect("only a list can be refused");
    assert_eq!(look(&balancer), ((2, 4), false, Tier::Healthy), "half of the members are available");
    balancer.handle(at(101), ejected(&members[..3])).expect("only a list can be refused");
    assert_eq!(look(&balancer), ((1, 4), true, Tier::Panic));
    for slot in &members {
        assert_eq!(backend(&balancer.plan(), *slot).usable, Usable::EvenEjected);
    }
    // The fourth backend serves, so this host is not the reason why the other backends are
    // unreachable.
    let index = balancer.services().next().map(|(_, index, _)| index).expect("there is a service");
    assert_eq!(balancer.handle(at(102), Fact::Serving([index].into())), Ok(true));
    assert_eq!(look(&balancer), ((1, 4), false, Tier::Healthy));
    assert_eq!(backend(&balancer.plan(), members[0]).usable, Usable::UnlessEjected);
    assert_eq!(balancer.handle(at(103), Fact::Serving(BTreeSet::new())), Ok(true));
    assert_eq!(look(&balancer), ((1, 4), true, Tier::Panic));
    // Substitutes are included: in the end four of seven backends are available, which is no panic.
    for seconds in (111..=141).step_by(10) {
        balancer.handle(at(seconds), Fact::Time).expect("only a list can be refused");
    }
    assert_eq!(look(&balancer), ((4, 7), false, Tier::Healthy));
}

#[test]
fn a_backend_with_a_withheld_ejection_is_treated_as_ejected() {
    let mut balancer = ejecting(2, "hh");
    let members: Vec<Slot> = in_table(&balancer.plan()).into_iter().collect();
    let last = KernelVerdict { is_ejected: false, failures: 5 };
    let Fact::Kernel(mut verdicts) = ejected(&members[..1]) else {
        unreachable!("`ejected` returns kernel verdicts")
    };
    verdicts.insert(members[1], KernelVerdict { failures: 4, ..last });
    balancer.handle(at(100), Fact::Kernel(verdicts.clone())).expect("only a list can be refused");
    assert_eq!(balancer.row(0).map(|row| row.tier), Some(Tier::Healthy));
    verdicts.insert(members[1], last);
    balancer.handle(at(101), Fact::Kernel(verdicts)).expect("only a list can be refused");
    assert_eq!(balancer.row(0).map(|row| row.tier), Some(Tier::Ejected));
}

#[test]
fn a_backend_with_passing_probes_needs_twice_as_many_failures() {
    let mut balancer = ejecting(2, "hh");
    let members: Vec<SocketAddr> = balancer.weights(0).iter().map(|(address, _)| *address).collect();
    let probed = |balancer: &mut Balancer, health| {
        let found = members.iter().map(|address| (*address, (health, Why::Probe))).collect();
        balancer.handle(at(100), Fact::Verdicts(0, Who::Probe, found)).expect("only a list can be refused");
        let plan = balancer.plan();
        in_table(&plan).iter().map(|slot| backend(&plan, *slot).is_probed_healthy).collect::<Vec<_>>()
    };
    assert_eq!(probed(&mut balancer, Health::Refusing), [false; 2]);
    assert_eq!(probed(&mut balancer, Health::Healthy), [true; 2]);
    let slot = *in_table(&balancer.plan()).first().expect("there are two members");
    let mut available_after = |failures| {
        let verdict = KernelVerdict { is_ejected: false, failures };
        balancer.handle(at(101), Fact::Kernel([(slot, verdict)].into())).expect("only a list can be refused");
        balancer.row(0).expect("a list is in use").available
    };
    assert_eq!([available_after(9), available_after(10)], [(2, 2), (1, 2)]);
}

#[test]
fn a_backend_suspected_by_probes_is_treated_as_ejected_without_a_trial() {
    let mut balancer = balancer(2, "hh");
    let members: Vec<SocketAddr> = balancer.weights(0).iter().map(|(address, _)| *address).collect();
    let guess = |health| members.iter().map(|address| (*address, (health, Why::Probe))).collect();
    balancer
        .handle(at(100), Fact::Verdicts(0, Who::Probe, guess(Health::Ejected)))
        .expect("only a list can be refused");
    let look = |balancer: &Balancer| balancer.row(0).map(|row| (row.tier, row.available));
    assert_eq!(look(&balancer), Some((Tier::Ejected, (0, 2))));
    let plan = balancer.plan();
    assert!(in_table(&plan).iter().all(|slot| backend(&plan, *slot).usable == Usable::EvenEjected));
    balancer
        .handle(at(101), Fact::Verdicts(0, Who::Probe, guess(Health::Healthy)))
        .expect("only a list can be refused");
    assert_eq!(look(&balancer), Some((Tier::Healthy, (2, 2))));
    assert_eq!(balancer.take_returned(), [], "the programs have ejected no backend, so no trial is due");
}

#[test]
fn lame_ducks_serve_only_while_no_member_is_available() {
    let mut balancer = balancer(2, "hhll");
    let members: Vec<Slot> = in_table(&balancer.plan()).into_iter().collect();
    assert_eq!(members.len(), 2);
    balancer.handle(at(100), ejected(&members)).expect("only a list can be refused");
    let plan = balancer.plan();
    assert_eq!(balancer.row(0).map(|row| row.tier), Some(Tier::LameDucks));
    assert_eq!(in_table(&plan).len(), 4, "both lame ducks are in the table");
    for slot in in_table(&plan) {
        // The kernel excludes ejected backends from connects, and sends them trials.
        assert_eq!(backend(&plan, slot).usable, Usable::UnlessEjected);
    }
    let fallback =
        plan.services.values().next().and_then(|service| service.fallback).expect("there is a fallback");
    assert_eq!(backend(&plan, fallback).reason, HealthReason::ListLameDuck);
    balancer.handle(at(200), ejected(&members[..1])).expect("only a list can be refused");
    assert_eq!(in_table(&balancer.plan()), members.iter().copied().collect());
}

/// The backup gets a slot last. Without a slot for it, the plan still follows health.
#[test]
fn a_backup_without_a_slot_changes_nothing() {
    for (slots, has_backup) in [(3, false), (4, true)] {
        let limits = Limits { slots, ..LIMITS };
        let mut balancer =
            Balancer::new(vec![service(3)], limits, Adopted::default(), at(0)).expect("the plan fits");
        balancer.handle(at(0), delivered(3, "hhhl")).expect("the plan fits");
        let plan = balancer.plan();
        let members = in_table(&plan);
        let fallback =
            plan.services.values().next().and_then(|service| service.fallback).expect("there is a fallback");
        assert_eq!((members.len(), !members.contains(&fallback)), (3, has_backup));
        let lost = *members.first().expect("there are three members");
        assert_eq!(balancer.handle(at(1), ejected(&[lost])), Ok(true));
        assert_eq!(balancer.row(0).map(|row| row.available), Some((2, 3)));
        let has_one = balancer.row(0).map(|row| row.backup.is_some());
        assert_eq!(has_one, Some(has_backup));
        // The plan already follows the health, so the passing of time changes nothing.
        assert_eq!(balancer.handle(at(1), Fact::Time), Ok(false));
    }
}

#[test]
fn ejected_backends_serve_if_there_are_no_others() {
    let mut balancer = balancer(2, "hh");
    let members: Vec<Slot> = in_table(&balancer.plan()).into_iter().collect();
    balancer.handle(at(100), ejected(&members)).expect("only a list can be refused");
    assert_eq!(balancer.row(0).map(|row| row.tier), Some(Tier::Ejected));
    let plan = balancer.plan();
    for slot in members {
        assert_eq!(backend(&plan, slot).usable, Usable::EvenEjected);
    }
    assert!(plan.services.values().all(|service| service.fallback.is_some()));
}

/// A daemon that starts adopts the replaced backends from the maps.
#[test]
fn the_next_daemon_adopts_replacements() {
    let mut first = balancer(4, &"h".repeat(20));
    let lost = *in_table(&first.plan()).first().expect("there are four members");
    first.handle(at(100), ejected(&[lost])).expect("only a list can be refused");
    first.handle(at(110), Fact::Time).expect("only a list can be refused");
    let kernel = first.plan();
    let adopted = Adopted { plan: kernel.clone(), next_generations: Vec::new() };
    let mut second = Balancer::new(vec![service(4)], LIMITS, adopted, at(0)).expect("the plan fits");
    assert_eq!(diff(&kernel, &second.plan()), [], "before the daemon has a list");
    second.handle(at(0), ejected(&[lost])).expect("only a list can be refused");
    second.handle(at(1), delivered(4, &"h".repeat(20))).expect("the plan fits");
    assert_eq!(diff(&kernel, &second.plan()), []);
}

/// A service with probes, and a plan in which its backends have these health reasons.
fn maps(reasons: &[(Usable, HealthReason)]) -> (Service, Plan) {
    let service =
        Service { health: HealthRules { first_look: Some(at(1)), ..HealthRules::default() }, ..service(4) };
    let mut before = balancing(service.clone(), 4, "hhhh");
    let all =
        list("hhhh").as_slice().iter().map(|one| (one.address, (Health::Healthy, Why::Probe))).collect();
    before.handle(at(0), Fact::Verdicts(0, Who::Probe, all)).expect("only a list can be refused");
    let mut plan = before.plan();
    for (backend, (usable, reason)) in plan.backends.values_mut().zip(reasons) {
        (backend.usable, backend.reason) = (*usable, *reason);
        let is_well = matches!(reason, HealthReason::Healthy | HealthReason::Unstated);
        backend.is_probed_healthy = usable.is_usable() && is_well;
    }
    (service, plan)
}

/// The next daemon begins with the state words in the maps. If a state word of an older daemon has
/// no reason, the backend is treated as healthy if it was usable, and as refusing if it was not.
#[test]
fn the_next_daemon_adopts_each_reason() {
    use HealthReason::{Healthy, ProbeAnswer, ProbeConnect, ProbeElsewhere, Unproven, Unstated};
    let cases = [
        (Usable::UnlessEjected, Healthy, Healthy, Usable::UnlessEjected),
        (Usable::No, ProbeConnect, ProbeConnect, Usable::No),
        (Usable::No, ProbeAnswer, ProbeAnswer, Usable::No),
        (Usable::UnlessEjected, ProbeElsewhere, ProbeElsewhere, Usable::UnlessEjected),
        (Usable::No, Unproven, Unproven, Usable::No),
        (Usable::No, Unstated, ProbeConnect, Usable::No),
        (Usable::UnlessEjected, Unstated, Healthy, Usable::UnlessEjected),
    ];
    for (usable, held, reason, usable_then) in cases {
        let well = (Usable::UnlessEjected, Healthy);
        let (service, plan) = maps(&[(usable, held), well, well, well]);
        let adopted = Adopted { plan: plan.clone(), next_generations: Vec::new() };
        let mut next = Balancer::new(vec![service], LIMITS, adopted, at(10)).expect("the plan fits");
        assert_eq!(diff(&plan, &next.plan()), [], "{held:?}, before the daemon has a list");
        next.handle(at(10), delivered(4, "hhhh")).expect("the plan fits");
        let first = next.plan().backends.values().next().cloned().expect("there are four members");
        assert_eq!((first.reason, first.usable), (reason, usable_then), "{held:?}");
    }
}

/// If the probes of a service were removed from the configuration, or replaced by reports, none of
/// their results is adopted.
#[test]
fn the_next_daemon_ignores_verdicts_of_unconfigured_witnesses() {
    let well = (Usable::UnlessEjected, HealthReason::Healthy);
    for (reason, first_look, heeds_reports, expected) in [
        (HealthReason::ReportDown, None, true, HealthReason::ReportDown),
        (HealthReason::ReportDown, None, false, HealthReason::Healthy),
        (HealthReason::ReportDown, Some(at(1)), false, HealthReason::Unproven),
        (HealthReason::ProbeConnect, None, true, HealthReason::Healthy),
        (HealthReason::Unproven, None, false, HealthReason::Healthy),
    ] {
        let (service, plan) = maps(&[(Usable::No, reason), well, well, well]);
        let health = HealthRules { first_look, heeds_reports, ..service.health };
        let adopted = Adopted { plan, next_generations: Vec::new() };
        let mut next = Balancer::new(vec![Service { health, ..service }], LIMITS, adopted, at(10))
            .expect("the plan fits");
        next.handle(at(10), delivered(4, "hhhh")).expect("the plan fits");
        let first = next.plan().backends.values().next().cloned().expect("there are four members");
        assert_eq!(
            first.reason, expected,
            "{reason:?}, first_look {first_look:?}, heeds_reports {heeds_reports}"
        );
    }
}

/// If only a reason changes, and the serving backends remain the same, the state word changes, too.
#[test]
fn a_state_word_follows_its_reason() {
    let (service, plan) = maps(&[]);
    let adopted = Adopted { plan, next_generations: Vec::new() };
    let mut balancer = Balancer::new(vec![service], LIMITS, adopted, at(10)).expect("the plan fits");
    balancer.handle(at(10), delivered(4, "hhhh")).expect("the plan fits");
    let address = list("hhhh").as_slice()[0].address;
    for (why, reason) in [(Why::Probe, HealthReason::ProbeConnect), (Why::Answer, HealthReason::ProbeAnswer)]
    {
        let found = BTreeMap::from([(address, (Health::Refusing, why))]);
        assert!(
            balancer
                .handle(at(11), Fact::Verdicts(0, Who::Probe, found))
                .expect("only a list can be refused")
        );
        let plan = balancer.plan();
        let backend = plan
            .backends
            .values()
            .find(|backend| backend.address == address)
            .expect("the plan has the backend");
        assert_eq!((backend.reason, backend.usable), (reason, Usable::No));
    }
}
