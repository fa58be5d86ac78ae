//! Explains, step by step, why a client task uses its backends with their shares: the inputs, the
//! order and the formulas.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Add;
use std::time::Duration;

use lb_common::abi::Usable;
use lb_core::balancer::{Balancer, Row};
use lb_core::endpoint::EndpointList;
use lb_core::health::tiers::Tier;
use lb_core::health::{BackendEvidence, Health, Who};
use lb_core::ids::{ServiceIndex, Slot};
use lb_core::membership::{self, Membership, MembershipVerdict};
use lb_core::plan::{Plan, entries_by_slot};
use lb_core::service::{Service, Size, Subset};
use lb_core::slots::Identity;
use lb_core::subset::{Algorithm, Position};
use lb_core::weights;
use lb_view::explanation::{
    Auto, CandidateSize, Explanation, Inputs, OrderedEndpoint, SCHEMA, ShareSource, SubsetMember, Unhealthy,
};
use lb_view::load::ServiceLoadStatus;

use crate::config::ClientConfig;

mod absent;

pub use absent::{Dials, why_none};

const SHOWN_ENTRIES: usize = 32;

/// Explains the service with the name `wanted`, or all services of the client if `wanted` is
/// `None`. Services without a list are skipped.
pub fn explain<T: Copy + Ord + Add<Duration, Output = T>>(
    client: &ClientConfig,
    balancer: &Balancer<T>,
    wanted: Option<&str>,
    from_daemon: bool,
    mut loads: BTreeMap<String, ServiceLoadStatus>,
) -> Vec<Explanation> {
    let is_wanted = |service: &Service| wanted.is_none_or(|wanted| wanted == service.name);
    // Checks first whether the client has the service, because building the plan of a large client
    // takes milliseconds.
    if !balancer.services().any(|(service, ..)| is_wanted(service)) {
        return Vec::new();
    }
    let plan = balancer.plan();
    let mut explanations = Vec::new();
    for (position, (service, index, in_use)) in balancer.services().enumerate() {
        let (Some((endpoints, membership)), Some(row)) = (in_use, balancer.row(position)) else { continue };
        if !is_wanted(service) {
            continue;
        }
        let address = |index| {
            let list = endpoints.as_slice();
            list.binary_search_by_key(&index, |endpoint| endpoint.index).ok().map(|at| list[at].address)
        };
        // If the size follows load, the stored order covers all sizes. The explanation shows only
        // the members before the one that the next larger size adds.
        let ends_at = if matches!(service.subset, Subset::Sized { size: Size::Band(_), .. }) {
            let mut members = membership
                .order
                .iter()
                .enumerate()
                .filter(|(_, (_, verdict))| *verdict == MembershipVerdict::Member);
            members.nth(membership.members.len()).map_or(usize::MAX, |(at, _)| at)
        } else {
            usize::MAX
        };
        let order = membership.order.iter().take(ends_at).filter_map(|&(index, verdict)| {
            Some(OrderedEndpoint { index, verdict: verdict.name().to_owned(), address: address(index)? })
        });
        let addresses: BTreeMap<Slot, SocketAddr> =
            plan.backends.iter().map(|(slot, backend)| (*slot, backend.address)).collect();
        let schedule = &plan.services[&index].schedule;
        let fallback = plan.services[&index].fallback;
        explanations.push(Explanation {
            schema: SCHEMA,
            client: client.name.clone(),
            service: service.name.clone(),
            from_daemon,
            inputs: inputs(client, service, endpoints, membership),
            load: loads.remove(&service.name),
            operator_weights: Vec::new(),
            order: order.collect(),
            members: members(&plan, index, &membership.members),
            unused: membership.unused.map(Into::into),
            unhealthy: unhealthy(balancer, index, row),
            substitutes: substitutes(row, membership),
            is_panic: row.is_panic,
            entries: schedule.len(),
            first: schedule.iter().take(SHOWN_ENTRIES).map(|slot| addresses[slot]).collect(),
            fallback: fallback.and_then(|slot| addresses.get(&slot).copied()),
        });
    }
    explanations
}

fn inputs(
    client: &ClientConfig,
    service: &Service,
    endpoints: &EndpointList,
    membership: &Membership,
) -> Inputs {
    let count = client.task.count;
    // The size that `auto` chooses may be larger than the number of endpoints.
    let size = membership.size.map(|size| size.min(endpoints.count()));
    let everybody_has_all = membership.members.iter().all(|member| member.connections == count);
    // Even if every task uses all backends, the arc of a task may cover some backends only partly.
    // The covered parts then determine the shares.
    let is_whole = everybody_has_all && size.is_some_and(|size| size as usize >= membership.members.len());
    let (algorithm, by_weight) = match service.subset {
        Subset::All => ("all", ShareSource::Weights),
        Subset::Sized { algorithm, size: Size::Band(_) } => (algorithm.name(), ShareSource::Weights),
        Subset::Sized { algorithm, .. } if count == 1 || is_whole => (algorithm.name(), ShareSource::Weights),
        Subset::Sized { algorithm, .. } if algorithm.is_aperture() => (algorithm.name(), ShareSource::Arc),
        Subset::Sized { algorithm, .. } => (algorithm.name(), ShareSource::Job),
    };
    let shares = if service.policy.is_weighted() { by_weight } else { ShareSource::Equal };
    let auto = match service.subset {
        Subset::Sized { algorithm, size: Size::Auto { min } } => {
            let position = Position {
                client: client.task.index,
                clients: count,
                backends: endpoints.count(),
                size: 0,
                seed: service.seed,
            };
            Some(auto(algorithm, position, min, membership))
        }
        Subset::Sized { size: Size::Fixed(_) | Size::Band(_), .. } | Subset::All => None,
    };
    Inputs {
        job: client.job.clone(),
        index: client.task.index,
        count,
        backends: endpoints.index_space(),
        endpoints: endpoints.as_slice().len(),
        evenness: membership.evenness.map(Into::into),
        algorithm: algorithm.to_owned(),
        size,
        auto,
        shares,
        seed: service.seed.to_string(),
        policy: service.policy.name().to_owned(),
    }
}

/// The largest subset size that `auto` tries before it uses all endpoints.
const LARGEST_RUNG: u32 = weights::RUNGS[weights::RUNGS.len() - 1];

fn auto(algorithm: Algorithm, position: Position, min: u32, membership: &Membership) -> Auto {
    let Position { clients, backends, .. } = position;
    let least = weights::least_size(position, min);
    let size = membership.size.unwrap_or(backends);
    let tried: Vec<CandidateSize> =
        membership.tried.iter().map(|&(size, utilization)| CandidateSize { size, utilization }).collect();
    let mut why = match least == min {
        true => format!("at least {min}"),
        false => {
            format!("at least {least}, so that each of {backends} backends is used by one of {clients} tasks")
        }
    };
    why.push_str(if clients == 1 {
        "; the only task of a job uses all backends"
    } else if size < backends && algorithm.is_aperture() {
        "; arcs use all backends evenly at any size"
    } else if size < backends {
        "; the smallest such size at which the tasks together can use 99 % of the backends"
    } else if least > LARGEST_RUNG && least < backends {
        "; auto has no size this large, so all backends are used"
    } else if tried.is_empty() {
        "; there are no more backends"
    } else {
        "; all backends, because with smaller subsets the tasks together cannot use 99 % of the backends"
    });
    Auto { min, least, tried, why }
}

/// Whether a connect may now choose this backend of `row`.
pub fn may_be_chosen<T: Copy + Ord + Add<Duration, Output = T>>(
    balancer: &Balancer<T>,
    service: ServiceIndex,
    row: &Row<T>,
    address: SocketAddr,
) -> bool {
    let Some((usable, health)) = row.usable.get(&address) else { return false };
    let verdict = balancer.standing(Identity { service, address }).and_then(BackendEvidence::worst);
    // A backend's report that it is a lame duck is not in the backend's state word, but in the
    // verdict array.
    let is_lame_by_report =
        verdict.is_some_and(|verdict| verdict.who == Who::Report && verdict.health == Health::LameDuck);
    match usable {
        Usable::UnlessEjected | Usable::EvenEjected if is_lame_by_report => row.tier == Tier::LameDucks,
        Usable::No => false,
        Usable::UnlessEjected => *health != Health::Ejected,
        Usable::EvenEjected => true,
    }
}

/// The unhealthy backends of a balancer's [`Row`].
fn unhealthy<T: Copy + Ord + Add<Duration, Output = T>>(
    balancer: &Balancer<T>,
    service: ServiceIndex,
    row: &Row<T>,
) -> Vec<Unhealthy> {
    let of = |(address, (_, health)): (&SocketAddr, &(Usable, Health))| {
        let (address, is_replaced) = (*address, row.replaced.contains_key(address));
        let verdict = balancer.standing(Identity { service, address }).and_then(BackendEvidence::worst);
        (is_replaced || *health != Health::Healthy).then(|| Unhealthy {
            address,
            health: health.name().to_owned(),
            who: match (verdict, health) {
                (Some(verdict), _) => verdict.who,
                (None, Health::Unproven) => Who::Probe,
                // If a backend has no slot yet, only the list contains evidence of its health.
                (None, _) => Who::Source,
            }
            .name()
            .to_owned(),
            is_replaced,
            may_be_chosen: may_be_chosen(balancer, service, row, address),
        })
    };
    row.usable.iter().filter_map(of).collect()
}

/// The backends in the table that are not members of the subset.
fn substitutes<T>(row: &Row<T>, membership: &Membership) -> Vec<SocketAddr> {
    let members: BTreeSet<SocketAddr> = membership.members.iter().map(|one| one.endpoint.address).collect();
    row.members.iter().map(|(address, _)| *address).filter(|address| !members.contains(address)).collect()
}

fn members(plan: &Plan, index: ServiceIndex, members: &[membership::Member]) -> Vec<SubsetMember> {
    let schedule = &plan.services[&index].schedule;
    let entries = entries_by_slot(schedule);
    let backends = plan.backends.iter().filter(|(_, backend)| backend.service == index);
    let slots: BTreeMap<SocketAddr, Slot> =
        backends.map(|(slot, backend)| (backend.address, *slot)).collect();
    let member = |member: &membership::Member| {
        let slot = *slots.get(&member.endpoint.address)?;
        #[expect(clippy::cast_precision_loss, reason = "schedules are far below 2^53 entries")]
        let quota = member.share * schedule.len() as f64;
        Some(SubsetMember {
            index: member.endpoint.index,
            address: member.endpoint.address,
            slot: slot.number(),
            connections: member.connections,
            weight: member.endpoint.weight,
            share: member.share,
            // Every member has a weight, so its target is not 0.
            load: member.load / member.target,
            entries: entries.get(&slot).copied().unwrap_or(0),
            quota,
        })
    };
    members.iter().filter_map(member).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(algorithm: Algorithm, (clients, backends): (u32, u32), min: u32, expected: &str) {
        let position = Position { client: 0, clients, backends, size: 0, seed: 7 };
        let weights::Choice { size, tried } = weights::choose_size(algorithm, position, min);
        let membership = Membership { size: Some(size), tried, ..Membership::default() };
        assert_eq!(auto(algorithm, position, min, &membership).why, expected);
    }

    #[test]
    fn an_automatic_size_comes_with_its_reason() {
        let rocksteadier = Algorithm::Rocksteadier;
        check(
            rocksteadier,
            (1, 100),
            12,
            "at least 100, so that each of 100 backends is used by one of 1 tasks; the only task of a job uses all backends",
        );
        check(rocksteadier, (1, 3), 12, "at least 12; the only task of a job uses all backends");
        check(
            rocksteadier,
            (1000, 1000),
            12,
            "at least 12; the smallest such size at which the tasks together can use 99 % of the backends",
        );
        check(
            rocksteadier,
            (10, 200),
            12,
            "at least 20, so that each of 200 backends is used by one of 10 tasks; the smallest such size at which the tasks together can \
             use 99 % of the backends",
        );
        check(rocksteadier, (10, 5), 12, "at least 12; there are no more backends");
        check(
            rocksteadier,
            (2, 1000),
            12,
            "at least 500, so that each of 1000 backends is used by one of 2 tasks; auto has no size this large, so all backends are used",
        );
        check(Algorithm::Aperture, (1000, 1000), 12, "at least 12; arcs use all backends evenly at any size");
        check(
            Algorithm::Random,
            (2, 40),
            12,
            "at least 20, so that each of 40 backends is used by one of 2 tasks; all backends, because with smaller subsets the tasks together cannot \
             use 99 % of the backends",
        );
    }
}
