//! Why a client task uses these backends with these shares: the inputs, the walk and the formulas, step by step.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use lb_core::balancer::Balancer;
use lb_core::membership::{self, Verdict};
use lb_core::plan::Plan;
use lb_core::service::Subset;
use serde::{Deserialize, Serialize};

use crate::config::Client;

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
    /// The seed, as a decimal string.
    pub seed: String,
    /// The policy.
    pub policy: String,
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
    /// Its capacity.
    pub weight: u16,
    /// Its entries of the schedule.
    pub entries: usize,
    /// Entries it would have if they could be divided: weight / sum of weights * entries.
    pub quota: f64,
}

/// Explains every service of a client that `wanted` names (all, if it is `None`) and that has a list.
pub fn explain(
    client: &Client,
    balancer: &Balancer,
    wanted: Option<&str>,
    from_daemon: bool,
) -> Vec<Explanation> {
    let plan = balancer.plan();
    let mut explanations = Vec::new();
    for (service, place, in_use) in balancer.services() {
        let Some((endpoints, membership)) = in_use else { continue };
        if wanted.is_some_and(|wanted| wanted != service.name) {
            continue;
        }
        let (algorithm, size) = match service.subset {
            Subset::All => ("all".to_owned(), None),
            Subset::Sized { algorithm, .. } => (algorithm.name().to_owned(), membership.size),
        };
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
        let schedule = &plan.services[&place].schedule;
        let fallback = plan.services[&place].fallback;
        explanations.push(Explanation {
            schema: SCHEMA,
            client: client.name.clone(),
            service: service.name.clone(),
            from_daemon,
            inputs: Inputs {
                job: client.job.clone(),
                index: client.task.index,
                count: client.task.count,
                backends: endpoints.index_space(),
                endpoints: endpoints.as_slice().len(),
                algorithm,
                size,
                seed: service.seed.to_string(),
                policy: service.policy.name().to_owned(),
            },
            walk: walk.collect(),
            members: members(&plan, place, &membership.members),
            entries: schedule.len(),
            first: schedule.iter().take(SHOWN_ENTRIES).map(|slot| addresses[&u32::from(*slot)]).collect(),
            fallback: addresses.get(&fallback).copied(),
        });
    }
    explanations
}

fn members(plan: &Plan, place: u16, members: &[membership::Member]) -> Vec<Member> {
    let schedule = &plan.services[&place].schedule;
    let mut counts: BTreeMap<u16, usize> = BTreeMap::new();
    for slot in schedule.iter() {
        *counts.entry(*slot).or_default() += 1;
    }
    let slot_of = |address: SocketAddr| {
        let mut backends = plan.backends.iter();
        backends
            .find(|(_, backend)| backend.service == place && backend.address == address)
            .map(|(slot, _)| *slot)
    };
    let member = |member: &membership::Member| {
        let slot = slot_of(member.endpoint.address)?;
        let entries = u16::try_from(slot).ok().and_then(|slot| counts.get(&slot)).copied().unwrap_or(0);
        #[expect(clippy::cast_precision_loss, reason = "schedules are far below 2^53 entries")]
        let quota = member.share * schedule.len() as f64;
        Some(Member {
            index: member.endpoint.index,
            address: member.endpoint.address,
            slot,
            weight: member.endpoint.weight,
            entries,
            quota,
        })
    };
    members.iter().filter_map(member).collect()
}
