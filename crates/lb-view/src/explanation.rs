//! Why a client task uses these backends with these shares: the inputs, the order and the results.

use std::net::SocketAddr;

use lb_core::membership;

use crate::load::ServiceLoadStatus;
use crate::status::UnusedEndpoints;
use serde::{Deserialize, Serialize};

pub const SCHEMA: u32 = 5;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    pub schema: u32,
    pub client: String,
    pub service: String,
    /// Whether a running daemon answered; if not, the configuration was read again.
    pub from_daemon: bool,
    pub inputs: Inputs,
    /// What changes the shares while the list stays the same; `None` if nothing does, or without a
    /// daemon.
    #[serde(default)]
    pub load: Option<ServiceLoadStatus>,
    /// The order that the algorithm gives the task, up to the last endpoint that was looked at.
    /// Indexes without an endpoint are left out.
    pub order: Vec<OrderedEndpoint>,
    /// The members in the order in which they were chosen.
    pub members: Vec<SubsetMember>,
    /// Endpoints that no task of the job uses; `None` if every endpoint is used.
    #[serde(default)]
    pub unused: Option<UnusedEndpoints>,
    /// Members and other backends of the table that are not healthy, in the order of their
    /// addresses.
    pub unhealthy: Vec<Unhealthy>,
    /// Backends that are in the table without being members: they take the place of replaced
    /// members, or no member is healthy.
    pub substitutes: Vec<SocketAddr>,
    /// Whether so few backends are available that connects also choose ejected ones.
    pub is_panic: bool,
    /// The number of entries of the schedule.
    pub entries: usize,
    /// The backends of the first entries of the schedule.
    pub first: Vec<SocketAddr>,
    /// The backend that connect uses if no entry and no member that it looks at is usable.
    pub fallback: Option<SocketAddr>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Inputs {
    pub job: String,
    /// m: this task's number.
    pub index: u32,
    /// M: the number of tasks of the job.
    pub count: u32,
    /// N: the highest endpoint index plus one.
    pub backends: u32,
    /// The number of endpoints in the source's list.
    pub endpoints: usize,
    /// How evenly tasks connect to a list without indexes; `None` if the list has some, or if each
    /// task uses all endpoints.
    #[serde(default)]
    pub evenness: Option<TaskEvenness>,
    /// The name of the subset algorithm, or `all`.
    pub algorithm: String,
    /// k, the size of the subset; `None` if the task uses all endpoints.
    pub size: Option<u32>,
    /// How the size was chosen, if it is `auto`.
    pub auto: Option<Auto>,
    pub shares: ShareSource,
    /// The seed, as a decimal string.
    pub seed: String,
    pub policy: String,
}

/// How evenly the tasks of a job connect to a list without indexes: the mean number of tasks per
/// endpoint divided by the largest. 1 is even.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskEvenness {
    /// With the indexes that follow from the addresses.
    pub by_address: f64,
    /// With indexes counted from 0 upwards.
    pub dense: f64,
}

impl From<membership::Evenness> for TaskEvenness {
    fn from(evenness: membership::Evenness) -> Self {
        let membership::Evenness { by_address, dense } = evenness;
        Self { by_address, dense }
    }
}

impl TaskEvenness {
    /// Whether indexes would make connections so much more even that a note is worthwhile.
    pub fn is_low(&self) -> bool {
        self.dense - self.by_address > 0.1
    }

    /// A sentence about the evenness. It depends on whether the policy uses weights.
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

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Auto {
    /// The minimum that the configuration asks for.
    pub min: u32,
    /// The smallest size to try: `min`, or, if that is larger, the number of backends per task,
    /// rounded up, so that every backend has a task.
    pub least: u32,
    pub tried: Vec<CandidateSize>,
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CandidateSize {
    pub size: u32,
    /// The part of all backends that the job can use with this size before the first backend is
    /// full. A size with at least 0.99 is accepted.
    pub utilization: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShareSource {
    /// Only the weights: the task is alone, or every task uses the same endpoints.
    Weights,
    /// The subsets of all tasks of the job, so that the load is even.
    Job,
    /// The arcs of all tasks of the job, fitted to the weights so that the load is even.
    Arc,
    /// The policy ignores weights: all members have the same share.
    Equal,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OrderedEndpoint {
    pub index: u32,
    /// `member`, or why it is none: `lame-duck`, `down` or `weight 0`.
    pub verdict: String,
    pub address: SocketAddr,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unhealthy {
    pub address: SocketAddr,
    /// Its health: `lame-duck`, `unproven`, `refusing`, `ejected` or `drained`.
    pub health: String,
    /// The witness that found it: `list`, `report`, `probe` or `kernel`.
    pub who: String,
    /// Whether another backend takes its place, so that it is not in the table.
    pub is_replaced: bool,
    /// Whether connects may choose it although it is not healthy.
    pub may_be_chosen: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SubsetMember {
    pub index: u32,
    pub address: SocketAddr,
    pub slot: u32,
    /// The number of tasks of the job that use it.
    pub connections: u32,
    pub weight: u16,
    /// Its share of this task's connects.
    pub share: f64,
    /// The load that all tasks of the job together put on it, relative to the load that its weight
    /// calls for: 1 is even.
    pub load: f64,
    /// Its entries of the schedule.
    pub entries: u32,
    /// Its exact number of entries before rounding: share * entries.
    pub quota: f64,
}
