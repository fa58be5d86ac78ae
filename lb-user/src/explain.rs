//! Why a client task uses these backends with these shares: the inputs, the walk and the formulas, step by step.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use lb_core::balancer::Balancer;
use lb_core::endpoint::EndpointList;
use lb_core::membership::{self, Membership, Verdict};
use lb_core::plan::Plan;
use lb_core::service::{Service, Size, Subset};
use lb_core::subset::{Algorithm, Position};
use lb_core::weights;
use serde::{Deserialize, Serialize};

use crate::config::Client;

mod absent;

pub use absent::{Dials, why_none};

/// Version of the JSON form.
pub const SCHEMA: u32 = 1;

/// Entries of the schedule that are shown.
const SHOWN_ENTRIES: usize = 32;

/// The explanation of one service of one client task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The client task.
    pub client: String,
    /// The service.
    pub service: String,
    /// Whether a running daemon answered, or the configuration was read anew.
    pub from_daemon: bool,
    /// What the subset was computed from.
    pub inputs: Inputs,
    /// The walk over the order, one row per index looked at.
    pub walk: Vec<Looked>,
    /// The members in the order in which they were taken.
    pub members: Vec<Member>,
    /// Entries of the schedule.
    pub entries: usize,
    /// Its first entries, as addresses.
    pub first: Vec<SocketAddr>,
    /// The backend that is taken when every pick is unusable.
    pub fallback: Option<SocketAddr>,
}

/// What a subset is computed from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Inputs {
    /// The job.
    pub job: String,
    /// m: this task's number.
    pub index: u32,
    /// M: tasks of the job.
    pub count: u32,
    /// N: highest endpoint index plus one.
    pub backends: u32,
    /// Endpoints in the source's list.
    pub endpoints: usize,
    /// The algorithm, or "all".
    pub algorithm: String,
    /// k, unless all are taken.
    pub size: Option<u32>,
    /// Why it is that, if it was chosen.
    pub auto: Option<Auto>,
    /// Where shares come from.
    pub shares: Shares,
    /// The seed, as a decimal string.
    pub seed: String,
    /// The policy.
    pub policy: String,
}

/// How a size was chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Auto {
    /// The least that was asked for.
    pub min: u32,
    /// The least that was looked at: `min`, or as many as each task must use so that every backend has one.
    pub least: u32,
    /// Sizes that were looked at.
    pub tried: Vec<Tried>,
    /// The reason in words.
    pub why: String,
}

/// A size that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    /// The size.
    pub size: u32,
    /// The part of all backends that the job can use with it before the first is full; 0.99 is enough.
    pub utilization: f64,
}

/// Where the shares of members come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shares {
    /// The weights alone: the task is alone, or every task uses the same.
    Weights,
    /// The subsets of all tasks of the job, so that their load is even.
    Job,
    /// The parts of an arc.
    Arc,
    /// The policy ignores weights: all members have the same.
    Equal,
}

/// One index of the order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Looked {
    /// The endpoint index.
    pub index: u32,
    /// What became of it.
    pub verdict: String,
    /// Its endpoint, if it has one.
    pub address: Option<SocketAddr>,
}

/// One member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Its endpoint's index.
    pub index: u32,
    /// Where it listens.
    pub address: SocketAddr,
    /// Its slot.
    pub slot: u32,
    /// Tasks of the job that use it.
    pub connections: u32,
    /// Its capacity.
    pub weight: u16,
    /// Its share of this task's connects.
    pub share: f64,
    /// What it gets of all tasks of the job, relative to what its weight entitles it to: 1 is even.
    pub load: f64,
    /// Its entries of the schedule.
    pub entries: usize,
    /// Entries it would have if they could be divided: share * entries.
    pub quota: f64,
}

/// Explains every service of a client that `wanted` names (all, if it is `None`) and that has a list, at `now`.
pub fn explain<T: Copy + Ord>(
    client: &Client,
    balancer: &Balancer<T>,
    now: T,
    wanted: Option<&str>,
    from_daemon: bool,
) -> Vec<Explanation> {
    let is_wanted = |service: &Service| wanted.is_none_or(|wanted| wanted == service.name);
    // The plan of a large client takes milliseconds to make.
    if !balancer.services().any(|(service, ..)| is_wanted(service)) {
        return Vec::new();
    }
    let plan = balancer.plan(now);
    let mut explanations = Vec::new();
    for (service, index, in_use) in balancer.services() {
        let Some((endpoints, membership)) = in_use else { continue };
        if !is_wanted(service) {
            continue;
        }
        let address = |index| {
            let list = endpoints.as_slice();
            list.binary_search_by_key(&index, |endpoint| endpoint.index).ok().map(|at| list[at].address)
        };
        let walk = membership.walk.iter().map(|&(index, verdict): &(u32, Verdict)| Looked {
            index,
            verdict: verdict.name().to_owned(),
            address: address(index),
        });
        let addresses: BTreeMap<u32, SocketAddr> =
            plan.backends.iter().map(|(slot, backend)| (*slot, backend.address)).collect();
        let schedule = &plan.services[&index].schedule;
        let fallback = plan.services[&index].fallback;
        explanations.push(Explanation {
            schema: SCHEMA,
            client: client.name.clone(),
            service: service.name.clone(),
            from_daemon,
            inputs: inputs(client, service, endpoints, membership),
            walk: walk.collect(),
            members: members(&plan, index, &membership.members),
            entries: schedule.len(),
            first: schedule.iter().take(SHOWN_ENTRIES).map(|slot| addresses[&u32::from(*slot)]).collect(),
            fallback: addresses.get(&fallback).copied(),
        });
    }
    explanations
}

fn inputs(client: &Client, service: &Service, endpoints: &EndpointList, membership: &Membership) -> Inputs {
    let count = client.task.count;
    let backends = endpoints.index_space();
    // What auto chooses may be more than there are.
    let size = membership.size.map(|size| size.min(backends));
    let everybody_has_all = membership.members.iter().all(|member| member.connections == count);
    let (algorithm, by_weight) = match service.subset {
        Subset::All => ("all", Shares::Weights),
        Subset::Sized { algorithm, .. } if algorithm.is_aperture() && count > 1 => {
            (algorithm.name(), Shares::Arc)
        }
        Subset::Sized { algorithm, .. } if count == 1 || everybody_has_all => {
            (algorithm.name(), Shares::Weights)
        }
        Subset::Sized { algorithm, .. } => (algorithm.name(), Shares::Job),
    };
    let shares = if service.policy.is_weighted() { by_weight } else { Shares::Equal };
    let auto = match service.subset {
        Subset::Sized { algorithm, size: Size::Auto { min } } => {
            let position =
                Position { client: client.task.index, clients: count, backends, size: 0, seed: service.seed };
            Some(auto(algorithm, position, min, membership))
        }
        Subset::Sized { size: Size::Fixed(_), .. } | Subset::All => None,
    };
    Inputs {
        job: client.job.clone(),
        index: client.task.index,
        count,
        backends,
        endpoints: endpoints.as_slice().len(),
        algorithm: algorithm.to_owned(),
        size,
        auto,
        shares,
        seed: service.seed.to_string(),
        policy: service.policy.name().to_owned(),
    }
}

/// The largest size that `auto` chooses before it takes all.
const LARGEST_RUNG: u32 = weights::RUNGS[weights::RUNGS.len() - 1];

fn auto(algorithm: Algorithm, position: Position, min: u32, membership: &Membership) -> Auto {
    let Position { clients, backends, .. } = position;
    let least = weights::least_size(position, min);
    let size = membership.size.unwrap_or(backends);
    let tried: Vec<Tried> =
        membership.tried.iter().map(|&(size, utilization)| Tried { size, utilization }).collect();
    let mut why = match least == min {
        true => format!("at least {min}"),
        false => format!("at least {least}, for each of {backends} backends to have one of {clients} tasks"),
    };
    why.push_str(if clients == 1 {
        "; a task that is alone uses all"
    } else if size < backends && algorithm.is_aperture() {
        "; arcs are even at any size"
    } else if size < backends {
        "; the first at which the tasks together can use 99 % of the backends"
    } else if least > LARGEST_RUNG && least < backends {
        "; no size that auto chooses from is so large: all"
    } else if tried.is_empty() {
        "; there are no more"
    } else {
        "; all, for with fewer the tasks together cannot use 99 % of the backends"
    });
    Auto { min, least, tried, why }
}

fn members(plan: &Plan, index: u16, members: &[membership::Member]) -> Vec<Member> {
    let schedule = &plan.services[&index].schedule;
    let mut counts: BTreeMap<u16, usize> = BTreeMap::new();
    for slot in schedule.iter() {
        *counts.entry(*slot).or_default() += 1;
    }
    let backends = plan.backends.iter().filter(|(_, backend)| backend.service == index);
    let slots: BTreeMap<SocketAddr, u32> = backends.map(|(slot, backend)| (backend.address, *slot)).collect();
    let member = |member: &membership::Member| {
        let slot = *slots.get(&member.endpoint.address)?;
        let entries = u16::try_from(slot).ok().and_then(|slot| counts.get(&slot)).copied().unwrap_or(0);
        #[expect(clippy::cast_precision_loss, reason = "schedules are far below 2^53 entries")]
        let quota = member.share * schedule.len() as f64;
        Some(Member {
            index: member.endpoint.index,
            address: member.endpoint.address,
            slot,
            connections: member.connections,
            weight: member.endpoint.weight,
            share: member.share,
            // Whoever is used has a weight, and so a target.
            load: member.load / member.target,
            entries,
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
    fn a_chosen_size_has_its_reason() {
        let rocksteadier = Algorithm::Rocksteadier;
        check(
            rocksteadier,
            (1, 100),
            12,
            "at least 100, for each of 100 backends to have one of 1 tasks; a task that is alone uses all",
        );
        check(rocksteadier, (1, 3), 12, "at least 12; a task that is alone uses all");
        check(
            rocksteadier,
            (1000, 1000),
            12,
            "at least 12; the first at which the tasks together can use 99 % of the backends",
        );
        check(
            rocksteadier,
            (10, 200),
            12,
            "at least 20, for each of 200 backends to have one of 10 tasks; the first at which the tasks together can \
             use 99 % of the backends",
        );
        check(rocksteadier, (10, 5), 12, "at least 12; there are no more");
        check(
            rocksteadier,
            (2, 1000),
            12,
            "at least 500, for each of 1000 backends to have one of 2 tasks; no size that auto chooses from is so large: all",
        );
        check(Algorithm::Aperture, (1000, 1000), 12, "at least 12; arcs are even at any size");
        check(
            Algorithm::Random,
            (2, 40),
            12,
            "at least 20, for each of 40 backends to have one of 2 tasks; all, for with fewer the tasks together cannot \
             use 99 % of the backends",
        );
    }
}
