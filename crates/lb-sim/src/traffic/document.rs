//! A scenario file as it is written: keys, defaults, and each value within its own bounds.
//!
//! `crates/lb-sim/scenarios/README.md` describes it for people. What values mean together is checked in
//! [`scenario`](super::scenario), which needs the positions of some of them for its messages: those are [`Spanned`].

pub mod size;

pub mod demand;

pub mod machines;

pub mod operator;

use lb_common::abi::MAX_BACKENDS;
use serde::Deserialize;
use toml::Spanned;

use super::assignments::ShareModel;
use super::values::{
    ActiveLimit, AlgorithmName, EjectionChoice, ErrorDecay, LoadChoice, OverflowName, PolicyName,
    ScenarioName, Seed, SlowStart, Span, Within,
};
use crate::sampling::Distribution;
use demand::{BurstChoice, ClosedTable, CostChoice, Rate, SkewChoice};
use machines::{AntagonistTable, QuotaTable, RestartCost, Speed};
use operator::{ReweightTable, SwitchTable, UpgradeTable};
use size::SubsetSize;

/// How many backends there may be.
pub type Backends = Within<1, MAX_BACKENDS>;

/// How many tasks a job may have.
pub type Tasks = Within<1, MAX_CLIENTS>;

/// Most clients that a scenario starts, those of resizes included.
pub const MAX_CLIENTS: u32 = 20_000;

/// A scenario file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioDocument {
    /// One line about it.
    pub title: String,
    /// The seed of everything random in time.
    #[serde(default = "seed_0")]
    pub seed: Seed,
    /// How many seeds it is played with, each as far as its intervals need.
    #[serde(default = "one_seed")]
    pub seeds: Within<1, 100>,
    /// How long it goes on.
    pub duration: Spanned<Span>,
    /// How much of that one row covers.
    pub step: Spanned<Span>,
    /// From when on load and latency are measured.
    #[serde(default = "from_the_start")]
    pub measure_from: Spanned<Span>,
    /// How long it takes until clients know of a change.
    #[serde(default)]
    pub notice: PropagationDelay,
    /// How clients hear what backends say of themselves; without it, the list says who is a lame duck, and nobody says its load.
    pub reports: Option<Spanned<ReportsTable>>,
    /// The name of the service that all clients connect to.
    #[serde(default = "service_name")]
    pub service: ScenarioName,
    /// The backends at the start.
    pub backends: BackendsTable,
    /// The clients: at least one job.
    pub job: Vec<Spanned<JobTable>>,
    /// Jobs that become larger or smaller.
    #[serde(default)]
    pub resize: Vec<Spanned<ResizeTable>>,
    /// Rolling restarts of all backends.
    #[serde(default)]
    pub restart: Vec<Spanned<RestartTable>>,
    /// Backends that fail while they are reported.
    #[serde(default)]
    pub fail: Vec<Spanned<FailTable>>,
    /// Backends that get another weight.
    #[serde(default)]
    pub reweight: Vec<Spanned<ReweightTable>>,
    /// What an operator says of the laws that move weights.
    #[serde(default)]
    pub switch: Vec<Spanned<SwitchTable>>,
    /// Daemons that are replaced, all at once.
    #[serde(default)]
    pub upgrade: Vec<Spanned<UpgradeTable>>,
    /// The variants that are compared; without any, the scenario is played as it is.
    #[serde(default)]
    pub run: Vec<Spanned<RunTable>>,
}

/// How long it takes until clients know of a change: each of them `delay` and a random part of `spread`.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PropagationDelay {
    /// At least this.
    pub delay: Span,
    /// At most this much more.
    pub spread: Span,
}

/// How clients hear what backends say of themselves: each report takes `delay` and a random part of `spread`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReportsTable {
    /// At least this.
    #[serde(default)]
    pub delay: Span,
    /// At most this much more.
    #[serde(default)]
    pub spread: Span,
    /// From one report of a backend's load to the next.
    #[serde(default = "one_second")]
    pub interval: Span,
    /// Over how long load is measured.
    #[serde(default = "one_second")]
    pub window: Span,
    /// Whether utilization has the share of time that a request waited for a core, or for more quota, as an agent reports it, beside the
    /// use of the cores.
    #[serde(default = "yes")]
    pub pressure: bool,
    /// Whether requests and errors a second are reported as well, which an application has to tell its agent.
    #[serde(default = "yes")]
    pub rates: bool,
    /// How many percent of these do not arrive. That a backend is a lame duck is told again until it is heard.
    #[serde(default)]
    pub loss: Within<0, 99>,
}

/// The backends at the start.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendsTable {
    /// How many.
    pub count: Backends,
    /// Capacities that are not 1.
    #[serde(default)]
    pub weights: Vec<Spanned<WeightTable>>,
    /// How many cores each has.
    #[serde(default = "one_core")]
    pub cores: Within<1, 1024>,
    /// How fast these are.
    #[serde(default = "as_costs_are_counted")]
    pub speed: Spanned<Speed>,
    /// How much of its machine each may use; if left out, all of it.
    pub quota: Option<Spanned<QuotaTable>>,
    /// What makes them slower at times.
    pub antagonist: Option<Spanned<AntagonistTable>>,
    /// What makes them slower after a start.
    pub restart_cost: Option<RestartCost>,
    /// How many requests one works on at a time; further ones are rejected.
    #[serde(default = "queue_of_10_000")]
    pub queue: Within<1, 1_000_000>,
}

/// The capacity of some backends.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightTable {
    /// The first index.
    pub from: Within<0, { MAX_BACKENDS - 1 }>,
    /// The last index.
    pub to: Within<0, { MAX_BACKENDS - 1 }>,
    /// Capacity relative to the others; 0 asks for no traffic.
    pub weight: Within<0, 65_535>,
}

/// What a job's tasks send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Traffic {
    /// Each arrival is a connect, and the connection lives on its own.
    Connections,
    /// Each task keeps a connection to every member, and each arrival is a request over one of them.
    Requests,
}

/// What a client does with a connection to a backend that is no longer in its subset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Closing {
    /// Lets the requests on it end.
    #[default]
    Drain,
    /// Closes it at once; the requests on it fail.
    Cut,
}

/// A job of client tasks, or several alike.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobTable {
    /// Its name.
    pub name: ScenarioName,
    /// How many tasks it has at the start.
    pub tasks: Tasks,
    /// How many such jobs there are, named `<name>-0` and so on.
    pub copies: Option<Within<1, 10_000>>,
    /// How subsets are chosen.
    #[serde(default = "rocksteadier")]
    pub algorithm: AlgorithmName,
    /// How large a subset is.
    #[serde(default = "size_20")]
    pub size: SubsetSize,
    /// What decides how much goes to each member.
    #[serde(default)]
    pub shares: ShareModel,
    /// The seed of its subsets; if left out, XXH64 of `<job>/<service>`.
    pub seed: Option<Seed>,
    /// What its tasks send.
    pub traffic: Traffic,
    /// Mean time between two arrivals at one task; if left out, nothing arrives.
    pub interval: Option<Span>,
    /// How the times between arrivals are distributed.
    #[serde(default)]
    pub arrivals: Distribution,
    /// Mean time that a connection or a request lives.
    #[serde(default)]
    pub lasts: Span,
    /// How these times are distributed.
    #[serde(default)]
    pub lives: Distribution,
    /// How long a new connection of `requests` takes until it can be used.
    #[serde(default)]
    pub connect: Span,
    /// What becomes of connections of `requests` to backends that leave the subset.
    #[serde(default)]
    pub closing: Closing,
    /// When its tasks eject a backend; if left out, never.
    pub ejection: Option<EjectionChoice>,
    /// How a task picks among its members.
    #[serde(default = "weighted_round_robin")]
    pub policy: PolicyName,
    /// What moves weights by load.
    #[serde(default)]
    pub load: LoadChoice,
    /// Over how long a member that is new, or available again, comes to its share.
    #[serde(default)]
    pub slow_start: SlowStart,
    /// After how long an error counts half, for policies that compare loads.
    #[serde(default)]
    pub error_decay: ErrorDecay,
    /// Requests or connections of a task to one backend at which it takes another one.
    pub active_limit: Option<ActiveLimit>,
    /// What happens when all are at it.
    #[serde(default = "least_loaded")]
    pub overflow: OverflowName,
    /// CPUs that each task runs on: each has a cursor of its own.
    #[serde(default = "one_cpu")]
    pub cpus: Within<1, 256>,
    /// Arrivals in a second at one task, in place of an interval.
    pub rate: Option<Rate>,
    /// Users who wait for each request, in place of both.
    pub closed: Option<ClosedTable>,
    /// How unequal the rates of its tasks are; if left out, they are equal.
    pub skew: Option<SkewChoice>,
    /// Times in which all its tasks send more.
    pub burst: Option<BurstChoice>,
    /// How many percent of its tasks are absent: subsets count on them, and they send nothing.
    #[serde(default)]
    pub missing: Within<0, 99>,
    /// CPU time of a request; if left out, it takes none and lasts as long as `lasts` says.
    pub cost: Option<CostChoice>,
    /// Mean time that a request with a cost is held beside its CPU time, for others' input and output.
    pub wait: Option<Span>,
    /// Mean time that a connection is kept, with one request after another on it; if left out, each has one.
    pub connection_life: Option<Span>,
    /// Mean time from the end of such a request to the next one.
    #[serde(default)]
    pub pause: Span,
    /// After how long a client gives a request up; if left out, never.
    pub timeout: Option<Span>,
    /// How often a client tries a request again that has failed.
    #[serde(default)]
    pub retries: Within<0, 10>,
}

/// Another size of the service or of a job.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeTable {
    /// When.
    pub at: Span,
    /// How many backends from then on.
    pub backends: Option<Backends>,
    /// How long a backend that is no longer reported goes on serving.
    #[serde(default)]
    pub lame_duck: Span,
    /// The job whose tasks change. A job with copies is named without their numbers.
    pub job: Option<ScenarioName>,
    /// How many tasks from then on.
    pub tasks: Option<Tasks>,
}

/// A rolling restart: all backends in the order of their indexes, some at a time.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestartTable {
    /// When the first ones begin.
    pub at: Span,
    /// How many at a time.
    pub batch: Backends,
    /// How long each serves as a lame duck before it stops.
    #[serde(default)]
    pub lame_duck: Span,
    /// How long each is down.
    pub down: Span,
    /// How long after a batch is up the next one begins.
    #[serde(default)]
    pub pause: Span,
}

/// Backends that fail while their source goes on reporting them as healthy, once or again and again.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailTable {
    /// When the first time.
    pub at: Span,
    /// How long each time.
    #[serde(rename = "for")]
    pub lasts: Span,
    /// How many of the backends, in percent.
    pub share: Option<Within<1, 100>>,
    /// How many backends, in place of a share.
    pub backends: Option<Backends>,
    /// What connects to them meet.
    #[serde(default)]
    pub mode: FailMode,
    /// How many times as slow those are that are slow.
    pub slowdown: Option<f64>,
    /// The utilization that those report that lie.
    pub utilization: Option<f64>,
    /// After how long a client gives up a connect that nobody answers.
    pub timeout: Option<Span>,
    /// From the beginning of one time to that of the next.
    pub every: Option<Span>,
    /// How often.
    pub times: Option<Within<1, 10_000>>,
}

/// What connects to a backend that fails meet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailMode {
    /// They are refused at once.
    #[default]
    Refuse,
    /// Nobody answers; the client gives up after a while.
    Blackhole,
    /// They are established, and reset at once.
    ResetAtOnce,
    /// They are served, slowly.
    Slow,
    /// They are established, and every request is answered with an error at once, which only the application can see.
    Errors,
    /// They are established, and nothing is answered: the process hangs, and does nothing.
    Hang,
    /// They are served, and the backend reports the same utilization whatever it does.
    Lies,
    /// They are served, and the backend reports no load.
    Silent,
}

impl FailMode {
    /// Whether connections to such a backend can be established and kept.
    pub const fn is_up(self) -> bool {
        match self {
            Self::Refuse | Self::Blackhole | Self::ResetAtOnce => false,
            Self::Slow | Self::Errors | Self::Hang | Self::Lies | Self::Silent => true,
        }
    }
}

/// One variant: what differs from the scenario's jobs and restarts.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunTable {
    /// Its name; its algorithm's, if it has none.
    pub name: Option<ScenarioName>,
    /// How all jobs choose subsets.
    pub algorithm: Option<AlgorithmName>,
    /// How large all subsets are.
    pub size: Option<SubsetSize>,
    /// What decides how much goes to each member, in all jobs.
    pub shares: Option<ShareModel>,
    /// The time as a lame duck of all restarts and resizes.
    pub lame_duck: Option<Span>,
    /// When a backend is ejected, in all jobs whose traffic is connections.
    pub ejection: Option<EjectionChoice>,
    /// How all tasks pick.
    pub policy: Option<PolicyName>,
    /// How clients hear what backends say of themselves.
    pub reports: Option<ReportsTable>,
    /// What moves weights by load, in all jobs.
    pub load: Option<LoadChoice>,
    /// How long slow start takes, in all jobs.
    pub slow_start: Option<SlowStart>,
    /// After how long an error counts half, in all jobs.
    pub error_decay: Option<ErrorDecay>,
    /// The limit of all tasks, or `"off"`.
    pub active_limit: Option<ActiveLimit>,
    /// Arrivals in a second at each task, in all jobs that have a rate.
    pub rate: Option<Rate>,
    /// How unequal the tasks of all jobs are.
    pub skew: Option<SkewChoice>,
    /// How long requests with a cost are held beside it, in all jobs.
    pub wait: Option<Span>,
    /// How often a client tries again, in all jobs.
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
