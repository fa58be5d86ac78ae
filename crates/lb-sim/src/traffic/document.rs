//! A scenario file as written: its keys, their defaults, and the bounds of each value.
//!
//! `crates/lb-sim/scenarios/README.md` describes the file for users. [`scenario`](super::scenario)
//! checks whether the values are consistent. Its messages contain the positions of some values in
//! the file; these values are [`Spanned`].

pub mod demand;
pub mod machines;
pub mod operator;
pub mod size;

use lb_common::abi::MAX_BACKENDS;
use serde::Deserialize;
use toml::Spanned;

use super::assignments::ShareModel;
use super::values::{
    ActiveLimit, AlgorithmName, EjectionChoice, ErrorDecay, LoadChoice, OverflowName, PolicyName,
    ScenarioName, Seed, SlowStart, Span, Within,
};
use crate::samples::Distribution;
use demand::{ArrivalRate, BurstChoice, ClosedTable, CostChoice, SkewChoice};
use machines::{AntagonistTable, QuotaTable, RestartCost, Speed};
use operator::{ReweightTable, SwitchTable, UpgradeTable};
use size::SubsetSize;

/// The number of backends.
pub type Backends = Within<1, MAX_BACKENDS>;

/// The number of tasks of a job.
pub type Tasks = Within<1, MAX_CLIENTS>;

/// The maximum number of clients that a scenario starts, including clients that resizes add.
pub const MAX_CLIENTS: u32 = 20_000;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioDocument {
    /// A description in one line.
    pub title: String,
    /// The seed of all random times.
    #[serde(default = "seed_0")]
    pub seed: Seed,
    /// The number of seeds that are simulated: `seed` and the following ones. Each seed results in
    /// different subsets.
    #[serde(default = "one_seed")]
    pub seeds: Within<1, 100>,
    /// The length of the scenario in virtual time.
    pub duration: Spanned<Span>,
    /// The length of time that one row of the results covers.
    pub step: Spanned<Span>,
    /// The time at which the measurement of load and latency begins.
    #[serde(default = "from_the_start")]
    pub measure_from: Spanned<Span>,
    /// The delay until clients receive a change of the fleet.
    #[serde(default)]
    pub notice: PropagationDelay,
    /// How clients receive the reports of backends. Without this table, the list marks lame ducks,
    /// and backends do not report load.
    pub reports: Option<Spanned<ReportsTable>>,
    /// The name of the service that all clients connect to.
    #[serde(default = "service_name")]
    pub service: ScenarioName,
    /// The backends at the start.
    pub backends: BackendsTable,
    /// The clients; at least one job.
    pub job: Vec<Spanned<JobTable>>,
    /// Changes of the size of the service or of jobs.
    #[serde(default)]
    pub resize: Vec<Spanned<ResizeTable>>,
    /// Rolling restarts of all backends.
    #[serde(default)]
    pub restart: Vec<Spanned<RestartTable>>,
    /// Backends that fail while they are still in the list.
    #[serde(default)]
    pub fail: Vec<Spanned<FailTable>>,
    /// Backends with a changed weight in the list.
    #[serde(default)]
    pub reweight: Vec<Spanned<ReweightTable>>,
    /// Operator commands that switch load control.
    #[serde(default)]
    pub switch: Vec<Spanned<SwitchTable>>,
    /// Replacements of all daemons at once.
    #[serde(default)]
    pub upgrade: Vec<Spanned<UpgradeTable>>,
    /// The variants to compare. If there are none, the scenario is simulated as written.
    #[serde(default)]
    pub run: Vec<Spanned<RunTable>>,
}

/// The delay until a client receives a change: `delay` plus a random part of `spread`. The part is
/// drawn for each client and change.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PropagationDelay {
    /// The minimum delay.
    pub delay: Span,
    /// The maximum of the random part of the delay.
    pub spread: Span,
}

/// How clients receive the reports of backends. Each report takes `delay` plus a random part of
/// `spread`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReportsTable {
    /// The minimum delay.
    #[serde(default)]
    pub delay: Span,
    /// The maximum of the random part of the delay.
    #[serde(default)]
    pub spread: Span,
    /// The time between two load reports of a backend.
    #[serde(default = "one_second")]
    pub interval: Span,
    /// The time over which load is measured.
    #[serde(default = "one_second")]
    pub window: Span,
    /// Whether the reported utilization includes waiting, as in an agent's report. If it does,
    /// utilization is the use of the cores plus the share of time in which a request waited for a
    /// core or for more quota.
    #[serde(default = "yes")]
    pub pressure: bool,
    /// Whether reports include requests and errors per second. In production, an application must
    /// report these to its agent.
    #[serde(default = "yes")]
    pub rates: bool,
    /// The percentage of load reports that are lost. Reports about lame ducks are repeated until
    /// they arrive.
    #[serde(default)]
    pub loss: Within<0, 99>,
}

/// The backends at the start.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendsTable {
    pub count: Backends,
    /// The weights of backends with a weight other than 1.
    #[serde(default)]
    pub weights: Vec<Spanned<WeightTable>>,
    /// The number of cores of each backend.
    #[serde(default = "one_core")]
    pub cores: Within<1, 1024>,
    /// The speed of the cores.
    #[serde(default = "as_costs_are_counted")]
    pub speed: Spanned<Speed>,
    /// The part of its machine that each backend may use. If it is left out, each backend may use
    /// its whole machine.
    pub quota: Option<Spanned<QuotaTable>>,
    /// Other workloads ("neighbours") that make the machines of backends slower at times.
    pub antagonist: Option<Spanned<AntagonistTable>>,
    /// The cost of a start, which makes backends slower for a while.
    pub restart_cost: Option<RestartCost>,
    /// The maximum number of requests that a backend processes at a time. It rejects all further
    /// requests.
    #[serde(default = "queue_of_10_000")]
    pub queue: Within<1, 1_000_000>,
}

/// The weight of some backends.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightTable {
    /// The first index.
    pub from: Within<0, { MAX_BACKENDS - 1 }>,
    /// The last index.
    pub to: Within<0, { MAX_BACKENDS - 1 }>,
    /// Capacity relative to the other backends. Backends with weight 0 get no new traffic.
    pub weight: Within<0, 65_535>,
}

/// The kind of traffic that a job's tasks send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Traffic {
    /// Each arrival is a connect, and its connection does not depend on other connections.
    Connections,
    /// Each task has a connection to every member, and each arrival is a request over one of these
    /// connections.
    Requests,
}

/// What a client does with a connection if the backend leaves the client's subset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Closing {
    /// The client closes the connection after its last request has ended.
    #[default]
    Drain,
    /// The client closes the connection at once; its requests fail.
    Cut,
}

/// A job of client tasks, or several jobs that differ only in their names.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobTable {
    pub name: ScenarioName,
    /// The number of tasks at the start.
    pub tasks: Tasks,
    /// The number of jobs of this kind. They are named `<name>-0`, `<name>-1` and so on.
    pub copies: Option<Within<1, 10_000>>,
    /// The subsetting algorithm.
    #[serde(default = "rocksteadier")]
    pub algorithm: AlgorithmName,
    /// The size of a subset.
    #[serde(default = "size_20")]
    pub size: SubsetSize,
    /// The rule that decides the share of each member.
    #[serde(default)]
    pub shares: ShareModel,
    /// The seed of the job's subsets. If it is left out, it is XXH64 of `<job>/<service>`.
    pub seed: Option<Seed>,
    /// The kind of traffic that the job's tasks send.
    pub traffic: Traffic,
    /// The mean time between two arrivals at one task. If it is left out, nothing arrives.
    pub interval: Option<Span>,
    /// The distribution of the times between arrivals.
    #[serde(default)]
    pub arrivals: Distribution,
    /// Mean lifetime of a connection or a request.
    #[serde(default)]
    pub lasts: Span,
    /// The distribution of the lifetimes in `lasts`.
    #[serde(default)]
    pub lives: Distribution,
    /// The time until a new connection can be used, for jobs with traffic `requests`.
    #[serde(default)]
    pub connect: Span,
    /// What happens to a connection if the backend leaves the subset, for jobs with traffic
    /// `requests`.
    #[serde(default)]
    pub closing: Closing,
    /// When the job's tasks eject a backend. If it is left out, they never do.
    pub ejection: Option<EjectionChoice>,
    /// How a task chooses among its members.
    #[serde(default = "weighted_round_robin")]
    pub policy: PolicyName,
    /// The law that adjusts weights to load.
    #[serde(default)]
    pub load: LoadChoice,
    /// The time until a member that is new, or available again, has its whole share.
    #[serde(default)]
    pub slow_start: SlowStart,
    /// The half-life of an error, for policies that compare loads.
    #[serde(default)]
    pub error_decay: ErrorDecay,
    /// The maximum number of open requests or connections of one task to one backend. A task skips
    /// a backend to which it has this number of open requests or connections.
    pub active_limit: Option<ActiveLimit>,
    /// What a task does if all members are at `active_limit`.
    #[serde(default = "least_loaded")]
    pub overflow: OverflowName,
    /// The number of CPUs on which each task runs. Each CPU has its own cursor.
    #[serde(default = "one_cpu")]
    pub cpus: Within<1, 256>,
    /// The number of arrivals per second at one task. It replaces `interval`.
    pub rate: Option<ArrivalRate>,
    /// Users that wait until a request ends before they send the next one. This replaces `interval`
    /// and `rate`.
    pub closed: Option<ClosedTable>,
    /// How unequal the rates of the job's tasks are. If it is left out, the rates are equal.
    pub skew: Option<SkewChoice>,
    /// Times in which all tasks of the job send more.
    pub burst: Option<BurstChoice>,
    /// The percentage of the job's tasks that are absent: subsets are computed as if they were
    /// present, but they send nothing.
    #[serde(default)]
    pub missing: Within<0, 99>,
    /// The CPU time of a request. If it is left out, a request takes no CPU time, and `lasts`
    /// determines how long it lasts.
    pub cost: Option<CostChoice>,
    /// The mean time of a request in addition to its CPU time, for example to wait for input and
    /// output elsewhere. Only for requests with a cost.
    pub wait: Option<Span>,
    /// The mean lifetime of a connection that carries several requests, one after the other. If it
    /// is left out, each connection has one request.
    pub connection_life: Option<Span>,
    /// The mean time from the end of a request to the next request on the same connection.
    #[serde(default)]
    pub pause: Span,
    /// The time after which a client gives up a request. If it is left out, clients never give up.
    pub timeout: Option<Span>,
    /// How often a client retries a failed request.
    #[serde(default)]
    pub retries: Within<0, 10>,
}

/// A change of the size of the service or of a job.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeTable {
    pub at: Span,
    /// The number of backends after the resize.
    pub backends: Option<Backends>,
    /// How long a backend still serves after its removal from the list.
    #[serde(default)]
    pub lame_duck: Span,
    /// The job that is resized. If the job has copies, its name is written without a number, and
    /// all copies are resized.
    pub job: Option<ScenarioName>,
    /// The number of tasks after the resize.
    pub tasks: Option<Tasks>,
}

/// A rolling restart: all backends restart in the order of their indexes, in batches.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestartTable {
    /// When the first batch begins.
    pub at: Span,
    /// The number of backends in a batch.
    pub batch: Backends,
    /// How long each backend serves as a lame duck before it stops.
    #[serde(default)]
    pub lame_duck: Span,
    /// How long each backend is down.
    pub down: Span,
    /// Time from the return of a batch to the start of the next batch.
    #[serde(default)]
    pub pause: Span,
}

/// Backends that fail, once or repeatedly, while they are still in the list.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailTable {
    /// When the first failure begins.
    pub at: Span,
    /// The length of each failure.
    #[serde(rename = "for")]
    pub lasts: Span,
    /// The percentage of all backends that fail.
    pub share: Option<Within<1, 100>>,
    /// The number of backends that fail. It replaces `share`.
    pub backends: Option<Backends>,
    /// The effect on connects to the failing backends.
    #[serde(default)]
    pub mode: FailMode,
    /// In mode `slow`: how many times slower the backends are.
    pub slowdown: Option<f64>,
    /// In mode `lies`: the utilization that the backends report.
    pub utilization: Option<f64>,
    /// The time after which a client gives up an unanswered connect.
    pub timeout: Option<Span>,
    /// Time from the start of one failure to the start of the next.
    pub every: Option<Span>,
    /// The number of failures.
    pub times: Option<Within<1, 10_000>>,
}

/// The effect of a failing backend on connects to this backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailMode {
    /// The backend refuses connects without a delay.
    #[default]
    Refuse,
    /// The backend does not answer connects. The client gives up after `timeout`.
    Blackhole,
    /// Connections are established, and reset at once.
    ResetAtOnce,
    /// Connections are served, but slowly.
    Slow,
    /// Connections are established, but each request is answered with an error without a delay.
    /// Only the application can detect these errors.
    Errors,
    /// Connections are established, but no request is answered, because the process hangs.
    Hang,
    /// Connections are served, but the backend reports the same utilization at any load.
    Lies,
    /// Connections are served, but the backend reports no load.
    Silent,
}

impl FailMode {
    /// Whether connections to a backend that fails in this way can be established and remain open.
    pub const fn is_up(self) -> bool {
        match self {
            Self::Refuse | Self::Blackhole | Self::ResetAtOnce => false,
            Self::Slow | Self::Errors | Self::Hang | Self::Lies | Self::Silent => true,
        }
    }
}

/// One variant of the scenario. Each value replaces the value of the scenario.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunTable {
    /// The name of the run. The default is the name of its algorithm or policy.
    pub name: Option<ScenarioName>,
    /// The subsetting algorithm of all jobs.
    pub algorithm: Option<AlgorithmName>,
    /// The size of all subsets.
    pub size: Option<SubsetSize>,
    /// The rule that decides the share of each member, in all jobs.
    pub shares: Option<ShareModel>,
    /// How long backends serve as lame ducks, in all restarts and resizes.
    pub lame_duck: Option<Span>,
    /// When a backend is ejected, in all jobs with traffic `connections`.
    pub ejection: Option<EjectionChoice>,
    /// How all tasks choose among their members.
    pub policy: Option<PolicyName>,
    /// How clients receive the reports of backends.
    pub reports: Option<ReportsTable>,
    /// The law that adjusts weights to load, in all jobs.
    pub load: Option<LoadChoice>,
    /// The duration of slow start, in all jobs.
    pub slow_start: Option<SlowStart>,
    /// The half-life of an error, in all jobs.
    pub error_decay: Option<ErrorDecay>,
    /// The limit of all tasks, as in `active_limit` of a job; `"off"` for no limit.
    pub active_limit: Option<ActiveLimit>,
    /// The number of arrivals per second at each task, in all jobs that have a rate.
    pub rate: Option<ArrivalRate>,
    /// How unequal the rates of the tasks are, in all jobs.
    pub skew: Option<SkewChoice>,
    /// The mean time of a request in addition to its CPU time, in all jobs. Only for requests with
    /// a cost.
    pub wait: Option<Span>,
    /// How often a client retries a failed request, in all jobs.
    pub retries: Option<Within<0, 10>>,
}

const fn yes() -> bool {
    true
}

const fn one_second() -> Span {
    Span { us: 1_000_000 }
}

const fn one_seed() -> Within<1, 100> {
    Within(1)
}

fn from_the_start() -> Spanned<Span> {
    Spanned::new(0..0, Span::default())
}

const fn one_core() -> Within<1, 1024> {
    Within(1)
}

fn as_costs_are_counted() -> Spanned<Speed> {
    Spanned::new(0..0, Speed::default())
}

const fn queue_of_10_000() -> Within<1, 1_000_000> {
    Within(10_000)
}

const fn weighted_round_robin() -> PolicyName {
    PolicyName(lb_core::service::Policy::WeightedRoundRobin)
}

const fn least_loaded() -> OverflowName {
    OverflowName(lb_core::service::Overflow::LeastLoaded)
}

const fn one_cpu() -> Within<1, 256> {
    Within(1)
}

const fn seed_0() -> Seed {
    Seed(0)
}

fn service_name() -> ScenarioName {
    ScenarioName("service".into())
}

const fn rocksteadier() -> AlgorithmName {
    AlgorithmName(lb_core::subset::Algorithm::Rocksteadier)
}

const fn size_20() -> SubsetSize {
    SubsetSize(lb_core::service::Size::Fixed(20))
}
