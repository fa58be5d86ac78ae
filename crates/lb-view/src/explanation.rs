//! Why a client task uses these backends with these shares: the inputs, the order and the results.

use std::net::SocketAddr;

use lb_core::membership;

use crate::load::ServiceLoadStatus;
use crate::status::UnusedEndpoints;
use serde::{Deserialize, Serialize};

/// Version of the JSON form.
pub const SCHEMA: u32 = 5;

/// The explanation of one service of one client task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The client task.
    pub client: String,
    /// The service.
    pub service: String,
    /// Whether a running daemon answered; if not, the configuration was read anew.
    pub from_daemon: bool,
    /// What the subset was computed from.
    pub inputs: Inputs,
    /// What changes shares while the list stays; `None` if nothing does, or without a daemon.
    #[serde(default)]
    pub load: Option<ServiceLoadStatus>,
    /// The order that the algorithm gives the task, as far as it was looked at. Indexes that no endpoint has are left out.
    pub order: Vec<OrderedEndpoint>,
    /// The members in the order in which they were taken.
    pub members: Vec<SubsetMember>,
    /// Endpoints that no task of the job uses, if there are some.
    #[serde(default)]
    pub unused: Option<UnusedEndpoints>,
    /// Members and others of the table that are not healthy, as addresses in their order.
    pub unhealthy: Vec<Unhealthy>,
    /// Who is in the table without being a member: in place of those that are replaced, or because nobody is healthy.
    pub substitutes: Vec<SocketAddr>,
    /// Whether so few are available that ejected ones are chosen as well.
    pub is_panic: bool,
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
    /// How evenly tasks connect to a list without indexes; `None` if it has some, or each task uses all.
    #[serde(default)]
    pub evenness: Option<TaskEvenness>,
    /// The algorithm, or "all".
    pub algorithm: String,
    /// k, unless all are taken.
    pub size: Option<u32>,
    /// How the size was chosen, if it is `auto`.
    pub auto: Option<Auto>,
    /// Where shares come from.
    pub shares: ShareSource,
    /// The seed, as a decimal string.
    pub seed: String,
    /// The policy.
    pub policy: String,
}

/// How evenly the tasks of a job connect to a list without indexes: mean over largest number of tasks of an endpoint, 1 is even.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskEvenness {
    /// With the indexes that the addresses give.
    pub by_address: f64,
    /// As it would be with the indexes from 0 on.
    pub dense: f64,
}

impl From<membership::Evenness> for TaskEvenness {
    fn from(evenness: membership::Evenness) -> Self {
        let membership::Evenness { by_address, dense } = evenness;
        Self { by_address, dense }
    }
}

impl TaskEvenness {
    /// Whether indexes would make connections so much more even that it is worth a note.
    pub fn is_low(&self) -> bool {
        self.dense - self.by_address > 0.1
    }

    /// In words, under a policy that heeds weights or does not.
    pub fn describe(&self, is_weighted: bool) -> String {
        let Self { by_address, dense } = self;
        let weights = if is_weighted {
            "shares make loads even; connections alone"
        } else {
            "the policy ignores weights, which would make loads even; connections"
        };
        format!(
            "the list has no indexes, so they are hashes of addresses: {weights} use {:.0} % of the backends, and {:.0} % with indexes",
            100.0 * by_address,
            100.0 * dense
        )
    }
}

/// How a size was chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Auto {
    /// The least that was asked for.
    pub min: u32,
    /// The smallest size to try: `min`, or as many as each task must use so that every backend has a task.
    pub least: u32,
    /// Sizes that were tried.
    pub tried: Vec<CandidateSize>,
    /// The reason in words.
    pub why: String,
}

/// A size that was tried.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CandidateSize {
    /// The size.
    pub size: u32,
    /// The part of all backends that the job can use with it before the first is full; 0.99 is enough.
    pub utilization: f64,
}

/// Where the shares of members come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShareSource {
    /// The weights alone: the task is alone, or every task uses the same.
    Weights,
    /// The subsets of all tasks of the job, so that their load is even.
    Job,
    /// The parts of the arcs of all tasks of the job, fitted to weights so that their load is even.
    Arc,
    /// The policy ignores weights: all members have the same.
    Equal,
}

/// One endpoint of the order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OrderedEndpoint {
    /// The endpoint index.
    pub index: u32,
    /// What became of it.
    pub verdict: String,
    /// Where it listens.
    pub address: SocketAddr,
}

/// One that is not healthy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unhealthy {
    /// Where it listens.
    pub address: SocketAddr,
    /// How it is: "lame-duck", "refusing", "ejected" or "drained".
    pub health: String,
    /// Who says so: "source", "kernel" or "daemon".
    pub who: String,
    /// Whether another backend stands in for it, so that it is not in the table.
    pub is_replaced: bool,
    /// Whether a connect may choose it all the same.
    pub may_be_chosen: bool,
}

/// One member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SubsetMember {
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
    pub entries: u32,
    /// Entries it would have if they could be divided: share * entries.
    pub quota: f64,
}
