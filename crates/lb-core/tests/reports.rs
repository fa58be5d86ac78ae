//! Report ids in the kernel's map `backends`. New ids are stored, and the next daemon adopts them
//! after a restart.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lb_core::balancer::{self, Adopted, Fact};
use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::limits::Limits;
use lb_core::membership::Assignment;
use lb_core::plan::{Plan, Step, diff};
use lb_core::reports::Name;
use lb_core::service::{Protocol, Service, Subset, Task};

type Balancer = balancer::Balancer<Duration>;

const LIMITS: Limits = Limits { schedule_entries: 8192, flow_records: 64, slots: 24 };
const NOW: Duration = Duration::ZERO;

fn backend(last: u8) -> SocketAddr {
    ([10, 0, 0, last], 80).into()
}

/// The same backends over TCP and over UDP.
fn services() -> Vec<Service> {
    let service = |name, last, protocol| {
        let service = Service::new(name, ([10, 96, 0, last], 80).into(), Subset::All, 0);
        Service { protocol, ..service }
    };
    vec![service("stream", 1, Protocol::Tcp), service("datagrams", 2, Protocol::Udp)]
}

fn delivered(position: usize, backends: &[u8]) -> Fact {
    let endpoints = backends.iter().zip(0..).map(|(last, index)| Endpoint {
        address: backend(*last),
        index,
        weight: 1,
        state: EndpointState::Healthy,
        zone: None,
        agent: None,
    });
    let service = &services()[position];
    let list = EndpointList::new(endpoints.collect(), service.address, &[]).expect("the list fits");
    Fact::Endpoints(position, Assignment::of(service, Task { index: 0, count: 1 }, list))
}

/// Passes these ids to each of the services. Returns whether any service changed.
fn set_ids(balancer: &mut Balancer, services: usize, ids: &[(Protocol, u8, u32)]) -> bool {
    let ids: BTreeMap<Name, u32> = ids
        .iter()
        .map(|(protocol, last, id)| (Name { protocol: *protocol, address: backend(*last) }, *id))
        .collect();
    let ids = Arc::new(ids);
    (0..services).fold(false, |is_news, position| {
        let fact = Fact::Reports(position, Arc::clone(&ids));
        balancer.handle(NOW, fact).expect("only a list can be refused") || is_news
    })
}

/// A balancer with both services, each with these backends, after adopting a plan.
fn balancer(adopted: &Plan, backends: &[u8]) -> Balancer {
    let adopted = Adopted { plan: adopted.clone(), ..Adopted::default() };
    let mut balancer =
        Balancer::new(services(), LIMITS, adopted, NOW).expect("there is room for the services");
    for position in 0..2 {
        balancer.handle(NOW, delivered(position, backends)).expect("the plan fits");
    }
    balancer
}

/// The report ids in a plan, each with the service's index and the last number of the address.
fn ids(plan: &Plan) -> Vec<(u16, u8, u32)> {
    let last = |address: SocketAddr| match address {
        SocketAddr::V4(v4) => v4.ip().octets()[3],
        SocketAddr::V6(_) => unreachable!("all addresses are IPv4"),
    };
    let mut ids: Vec<_> =
        plan.backends.values().map(|row| (row.service.0, last(row.address), row.report)).collect();
    ids.sort_unstable();
    ids
}

const BOTH: [(Protocol, u8, u32); 3] = [(Protocol::Tcp, 1, 5), (Protocol::Udp, 1, 6), (Protocol::Tcp, 2, 7)];

#[test]
fn a_report_id_needs_only_one_step() {
    let mut balancer = balancer(&Plan::default(), &[1, 2]);
    let before = balancer.plan();
    assert_eq!(ids(&before), [(0, 1, 0), (0, 2, 0), (1, 1, 0), (1, 2, 0)]);
    assert!(set_ids(&mut balancer, 2, &BOTH));
    let plan = balancer.plan();
    assert_eq!(ids(&plan), [(0, 1, 5), (0, 2, 7), (1, 1, 6), (1, 2, 0)]);
    let steps = diff(&before, &plan);
    let stored: Vec<u32> = steps
        .iter()
        .map(|step| match step {
            Step::SetReport(_, id) => *id,
            other => panic!("{other:?} is not a step for a report id"),
        })
        .collect();
    assert_eq!(stored, [5, 7, 6]);
    let mut recorded = before;
    steps.iter().for_each(|step| recorded.record(step));
    assert_eq!(recorded, plan);
    // The same ids again change nothing.
    assert!(!set_ids(&mut balancer, 2, &BOTH));
    // A new backend is written with its id.
    set_ids(&mut balancer, 2, &[&BOTH[..], &[(Protocol::Udp, 3, 9)]].concat());
    balancer.handle(NOW, delivered(1, &[1, 2, 3])).expect("the plan fits");
    let written = diff(&plan, &balancer.plan());
    assert!(written.iter().any(|step| matches!(step, Step::WriteBackend(_, row) if row.report == 9)));
    assert!(!written.iter().any(|step| matches!(step, Step::SetReport(..))), "{written:?}");
}

#[test]
fn a_restart_adopts_the_ids_until_new_ids_arrive() {
    let mut first = balancer(&Plan::default(), &[1, 2]);
    set_ids(&mut first, 2, &BOTH);
    let held = first.plan();
    let mut second = balancer(&held, &[1, 2]);
    assert_eq!(diff(&held, &second.plan()), []);
    set_ids(&mut second, 2, &BOTH);
    assert_eq!(diff(&held, &second.plan()), []);
    set_ids(&mut second, 2, &[]);
    let steps = diff(&held, &second.plan());
    assert!(steps.len() == 3 && steps.iter().all(|step| matches!(step, Step::SetReport(_, 0))), "{steps:?}");
}

#[test]
fn backends_of_a_removed_service_have_no_ids() {
    let mut before = balancer(&Plan::default(), &[1]);
    set_ids(&mut before, 2, &BOTH);
    let adopted = Adopted { plan: before.plan(), ..Adopted::default() };
    let only = services().into_iter().take(1).collect();
    let mut after = Balancer::new(only, LIMITS, adopted, NOW).expect("there is room for the services");
    assert_eq!(ids(&after.plan()), [(0, 1, 5), (1, 1, 0)]);
    set_ids(&mut after, 1, &[]);
    assert_eq!(ids(&after.plan()), [(0, 1, 0), (1, 1, 0)]);
}

#[test]
fn a_service_without_reports_has_no_ids_of_another_service() {
    let mut services = services();
    services.iter_mut().for_each(|service| service.protocol = Protocol::Tcp);
    let mut balancer =
        Balancer::new(services, LIMITS, Adopted::default(), NOW).expect("there is room for the services");
    for position in 0..2 {
        balancer.handle(NOW, delivered(position, &[1])).expect("the plan fits");
    }
    assert!(set_ids(&mut balancer, 1, &BOTH));
    assert_eq!(ids(&balancer.plan()), [(0, 1, 5), (1, 1, 0)]);
}
