//! Why a client task uses its backends with their shares: the inputs, the order of endpoints, and
//! the resulting shares.

use std::net::SocketAddr;

use lb_core::membership;

use crate::load::ServiceLoadStatus;
use crate::status::UnusedEndpoints;
use serde::{Deserialize, Serialize};

pub const SCHEMA: u32 = 6;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    pub schema: u32,
    pub client: String,
    pub service: String,
    /// Whether a running daemon answered. If not, the command has read the configuration itself.
    pub from_daemon: bool,
    pub inputs: Inputs,
    /// Load control and slow start, which change shares while the list is unchanged. `None` if the
    /// service has neither, or without a daemon.
    #[serde(default)]
    pub load: Option<ServiceLoadStatus>,
    /// The percentages by which operators have multiplied weights (`socklb weight`); empty without
    /// a daemon.
    #[serde(default)]
    pub operator_weights: Vec<OperatorWeight>,
    /// The order of endpoints that the algorithm computes for the task, up to the last endpoint
    /// that was examined. Indexes without an endpoint are left out.
    pub order: Vec<OrderedEndpoint>,
    /// The members in the order in which they were chosen.
    pub members: Vec<SubsetMember>,
    /// Endpoints that no task of the job uses; `None` if every endpoint is used.
    #[serde(default)]
    pub unused: Option<UnusedEndpoints>,
    /// Members and substitutes that are not healthy, in the order of their addresses.
    pub unhealthy: Vec<Unhealthy>,
    /// Backends that are in the table but are not members: they replace members, or serve because
    /// no member is healthy.
    pub substitutes: Vec<SocketAddr>,
    /// Whether so few backends are available that connects may choose ejected backends.
    pub is_panic: bool,
    /// The number of entries of the schedule.
    pub entries: usize,
    /// The backends of the first entries of the schedule.
    pub first: Vec<SocketAddr>,
    /// The backend that a connect uses if no entry and no member that it examined is usable.
    pub fallback: Option<SocketAddr>,
}

/// A percentage that an operator has set for a backend's weight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorWeight {
    pub address: SocketAddr,
    /// The percentage that multiplies the backend's share, before all shares are scaled to sum to
    /// 1.
    pub percent: u16,
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
    /// How evenly tasks connect to a list without indexes; `None` if the list has indexes, or if
    /// every task uses all endpoints.
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
/// endpoint divided by the largest number of tasks of one endpoint. 1 is even.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskEvenness {
    /// The evenness with indexes that are derived from the addresses.
    pub by_address: f64,
    /// The evenness with the indexes 0, 1, 2 and so on.
    pub dense: f64,
}

impl From<membership::Evenness> for TaskEvenness {
    fn from(evenness: membership::Evenness) -> Self {
        let membership::Evenness { by_address, dense } = evenness;
        Self { by_address, dense }
    }
}

impl TaskEvenness {
    /// Whether connections are clearly less even than with the indexes 0, 1, 2 and so on. If so,
    /// the command shows the evenness.
    pub fn is_low(&self) -> bool {
        self.dense - self.by_address > 0.1
    }

    /// A sentence about the evenness. `is_weighted`: whether the policy uses weights.
    pub fn describe(&self, is_weighted: bool) -> String {
        let Self { by_address, dense } = self;
        let weights = if is_weighted {
            "structural weights nevertheless make loads even"
        } else {
            "the policy ignores weights, although weights would make loads even"
        };
        format!(
            "the list has no indexes, so indexes are hashes of addresses; the mean number of tasks per backend is {:.0} % of the \
             largest one ({:.0} % with indexes); {weights}",
            100.0 * by_address,
            100.0 * dense
        )
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Auto {
    /// The minimum in the configuration.
    pub min: u32,
    /// The smallest size to examine: `min` or the number of backends per task, rounded up,
    /// whichever is larger. With a smaller size, some backends would have no task.
    pub least: u32,
    pub tried: Vec<CandidateSize>,
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CandidateSize {
    pub size: u32,
    /// The part of all backends' capacity that the job can use with this size before the first
    /// backend is full. A size with at least 0.99 is accepted.
    pub utilization: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShareSource {
    /// Only the weights are used, because the job has one task, or because every task uses the same
    /// endpoints.
    Weights,
    /// The subsets of all tasks of the job are used, so that the load is even.
    Job,
    /// The arcs of all tasks of the job are used, fitted to the weights so that the load is even.
    Arc,
    /// All members have the same share, because the policy ignores weights.
    Equal,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OrderedEndpoint {
    pub index: u32,
    /// `member`, or why it is not a member: `lame-duck`, `down` or `weight 0`.
    pub verdict: String,
    pub address: SocketAddr,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unhealthy {
    pub address: SocketAddr,
    /// The backend's health: `lame-duck`, `unproven`, `refusing`, `ejected` or `drained`.
    pub health: String,
    /// The source of this health: `list`, `report`, `probe`, `kernel` or `operator`.
    pub who: String,
    /// Whether another backend replaces this backend in the table.
    pub is_replaced: bool,
    /// Whether connects may choose the backend although it is unhealthy.
    pub may_be_chosen: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SubsetMember {
    pub index: u32,
    pub address: SocketAddr,
    pub slot: u32,
    /// The number of the job's tasks that use the member.
    pub connections: u32,
    pub weight: u16,
    /// The member's share of this task's connects.
    pub share: f64,
    /// The load that the member gets from all tasks of the job, divided by the member's part of the
    /// weights; 1 is even.
    pub load: f64,
    /// The number of the member's entries in the schedule.
    pub entries: u32,
    /// The exact number of the member's entries before rounding: `share` times the number of
    /// entries of the schedule.
    pub quota: f64,
}
