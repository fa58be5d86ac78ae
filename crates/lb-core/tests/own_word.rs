//! How a client task's plan follows the backends' own reports and the results of probes.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lb_common::abi::Usable;
use lb_core::balancer::{self, Adopted, Fact};
use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::health::tiers::Tier;
use lb_core::health::{Health, Who, Why};
use lb_core::limits::Limits;
use lb_core::membership::{Assignment, Membership};
use lb_core::plan::Plan;
use lb_core::service::{Service, Size, Subset, Task};
use lb_core::subset::Algorithm;

type Balancer = balancer::Balancer<Duration>;

const fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn address(number: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, number], 80))
}

/// A task with four members of eight healthy endpoints.
fn balancer() -> (Balancer, Arc<Membership>) {
    let vip: SocketAddr = "10.96.0.10:80".parse().expect("the address is valid");
    let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(4) };
    let service = Service::new("users", vip, subset, 7);
    let endpoints = (0..8).map(|index| Endpoint {
        address: address(index + 1),
        index: u32::from(index),
        weight: 1,
        state: EndpointState::Healthy,
        zone: None,
        agent: None,
    });
    let list = EndpointList::new(endpoints.collect(), vip, &[]).expect("the list fits");
    let assignment = Assignment::of(&service, Task { index: 3, count: 10 }, list);
    let membership = Arc::clone(&assignment.membership);
    let limits = Limits { schedule_entries: 8192, flow_records: 64, slots: 64 };
    let mut balancer =
        Balancer::new(vec![service], limits, Adopted::default(), at(0)).expect("the plan fits");
    balancer.handle(at(0), Fact::Endpoints(0, assignment)).expect("the plan fits");
    (balancer, membership)
}

fn report(balancer: &mut Balancer, seconds: u64, who: Who, verdicts: &[(SocketAddr, Health)]) -> bool {
    let why = if who == Who::Report { Why::Report } else { Why::Probe };
    let verdicts = verdicts.iter().map(|(address, health)| (*address, (*health, why))).collect();
    balancer.handle(at(seconds), Fact::Verdicts(0, who, verdicts)).expect("only a list can be refused")
}

fn pass(balancer: &mut Balancer, seconds: u64) {
    balancer.handle(at(seconds), Fact::Time).expect("only a list can be refused");
}

fn usable(plan: &Plan, address: SocketAddr) -> Usable {
    plan.backends.values().find(|backend| backend.address == address).expect("the backend has a slot").usable
}

fn in_table(balancer: &Balancer) -> BTreeSet<SocketAddr> {
    balancer.row(0).expect("a list is in use").members.iter().map(|(address, _)| *address).collect()
}

#[test]
fn a_self_reported_lame_duck_is_replaced_without_a_state_word() {
    let (mut balancer, membership) = balancer();
    let members = in_table(&balancer);
    let lame = membership.members[0].endpoint.address;
    assert!(report(&mut balancer, 100, Who::Report, &[(lame, Health::LameDuck)]));
    assert_eq!(
        usable(&balancer.plan(), lame),
        Usable::UnlessEjected,
        "the state word does not contain the report"
    );
    let row = balancer.row(0).expect("a list is in use");
    assert_eq!((row.available, row.tier), ((3, 4), Tier::Healthy));
    assert_eq!(row.usable[&lame].1, Health::LameDuck);
    pass(&mut balancer, 111);
    assert_ne!(in_table(&balancer), members, "a substitute serves");
    assert!(report(&mut balancer, 120, Who::Report, &[]));
    pass(&mut balancer, 149);
    assert_ne!(in_table(&balancer), members);
    pass(&mut balancer, 150);
    assert_eq!(in_table(&balancer), members);
}

#[test]
fn self_reported_lame_ducks_serve_if_all_members_are_lame() {
    let (mut balancer, membership) = balancer();
    let all: Vec<_> =
        membership.members.iter().map(|member| (member.endpoint.address, Health::LameDuck)).collect();
    report(&mut balancer, 1, Who::Report, &all);
    let plan = balancer.plan();
    assert!(all.iter().all(|(address, _)| usable(&plan, *address) == Usable::UnlessEjected));
    assert_eq!(balancer.row(0).expect("a list is in use").tier, Tier::LameDucks);
    assert!(plan.services.values().all(|service| service.fallback.is_some()));
}

#[test]
fn a_refusing_backend_is_not_chosen_for_any_witness() {
    for who in [Who::Probe, Who::Report] {
        let (mut balancer, membership) = balancer();
        let down = membership.members[1].endpoint.address;
        assert!(report(&mut balancer, 100, who, &[(down, Health::Refusing)]));
        assert!(!report(&mut balancer, 101, who, &[(down, Health::Refusing)]), "the report changes nothing");
        assert_eq!(usable(&balancer.plan(), down), Usable::No);
        let other = if who == Who::Probe { Who::Report } else { Who::Probe };
        report(&mut balancer, 102, other, &[]);
        assert_eq!(
            usable(&balancer.plan(), down),
            Usable::No,
            "the other witness cannot withdraw this verdict"
        );
        // A fact from probes does not change backends that it does not contain. A fact from reports
        // is complete: all backends that it does not contain are healthy according to reports.
        let well = if who == Who::Probe { &[(down, Health::Healthy)][..] } else { &[] };
        assert!(report(&mut balancer, 103, who, well));
        assert_eq!(usable(&balancer.plan(), down), Usable::UnlessEjected);
    }
}

#[test]
fn a_refusing_substitute_is_skipped() {
    let (mut balancer, membership) = balancer();
    let lost = membership.members[0].endpoint.address;
    let [first, second] = [0, 1].map(|at: usize| membership.next[at].endpoint.address);
    report(&mut balancer, 100, Who::Probe, &[(first, Health::Refusing), (lost, Health::Refusing)]);
    pass(&mut balancer, 111);
    let table = in_table(&balancer);
    assert!(table.contains(&second) && !table.contains(&first) && !table.contains(&lost), "{table:?}");
}

#[test]
fn verdicts_on_backends_without_a_slot_remain_until_withdrawn() {
    let (mut balancer, membership) = balancer();
    let next = membership.next[0].endpoint.address;
    let identity = |balancer: &Balancer| {
        let (_, index, _) = balancer.services().next().expect("there is a service");
        lb_core::slots::Identity { service: index, address: next }
    };
    let known = identity(&balancer);
    report(&mut balancer, 1, Who::Probe, &[(next, Health::Refusing)]);
    pass(&mut balancer, 2);
    assert_eq!(
        balancer.standing(known).map(lb_core::health::BackendEvidence::health),
        Some(Health::Refusing)
    );
    report(&mut balancer, 3, Who::Probe, &[(next, Health::Healthy)]);
    assert_eq!(balancer.standing(known).map(lb_core::health::BackendEvidence::is_proven), Some(true));
    assert!(!report(&mut balancer, 4, Who::Probe, &[(next, Health::Healthy)]), "the report changes nothing");
    report(&mut balancer, 5, Who::Report, &[(next, Health::LameDuck)]);
    report(&mut balancer, 6, Who::Report, &[]);
    assert_eq!(balancer.standing(known).map(lb_core::health::BackendEvidence::health), Some(Health::Healthy));
}
