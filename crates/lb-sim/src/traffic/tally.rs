//! What is counted while a scenario is played: rows of steps, and totals of a run.
//!
//! Every arrival is counted once when it comes and once for how it ends. Must not decide anything.

use serde::Serialize;

use crate::metrics::{Spread, raw_utilization};

/// Arrivals that failed, by their reasons.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestErrors {
    /// The client had no backend to choose.
    pub refused: u64,
    /// No connection to the backends that were tried was up.
    pub unready: u64,
    /// The backend was down, which the client did not know yet.
    pub down: u64,
    /// Its connection ended before it did.
    pub cut: u64,
    /// All backends that the client could choose were at its limit.
    pub limited: u64,
    /// The backend had as many requests as it works on.
    pub rejected: u64,
    /// The backend answered with an error.
    pub answered: u64,
    /// The client gave it up.
    pub timed_out: u64,
}

impl RequestErrors {
    /// All of them.
    pub const fn sum(self) -> u64 {
        let Self { refused, unready, down, cut, limited, rejected, answered, timed_out } = self;
        refused + unready + down + cut + limited + rejected + answered + timed_out
    }

    const fn since(self, before: Self) -> Self {
        Self {
            refused: self.refused - before.refused,
            unready: self.unready - before.unready,
            down: self.down - before.down,
            cut: self.cut - before.cut,
            limited: self.limited - before.limited,
            rejected: self.rejected - before.rejected,
            answered: self.answered - before.answered,
            timed_out: self.timed_out - before.timed_out,
        }
    }
}

/// What has happened up to now. Counts only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TrafficCounts {
    /// Connects or requests that began.
    pub arrivals: u64,
    /// Arrivals that ended well.
    pub served: u64,
    /// Arrivals that were under way when their client went away.
    pub abandoned: u64,
    /// Arrivals that failed.
    pub errors: RequestErrors,
    /// Times that a client tried one again.
    pub retries: u64,
    /// Connections that clients opened.
    pub opened: u64,
    /// Connections that clients closed.
    pub closed: u64,
    /// Closed connections whose backend was healthy and reported, and only no longer in the client's subset.
    pub moved: u64,
    /// Connections that ended because their backend stopped.
    pub dropped: u64,
}

impl TrafficCounts {
    /// What has happened since earlier counts.
    pub const fn since(self, before: Self) -> Self {
        Self {
            arrivals: self.arrivals - before.arrivals,
            served: self.served - before.served,
            abandoned: self.abandoned - before.abandoned,
            errors: self.errors.since(before.errors),
            retries: self.retries - before.retries,
            opened: self.opened - before.opened,
            closed: self.closed - before.closed,
            moved: self.moved - before.moved,
            dropped: self.dropped - before.dropped,
        }
    }
}

/// What has happened to one job and its copies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct JobCounts {
    /// The job, as the file names it.
    pub job: String,
    /// Connects or requests that began.
    pub arrivals: u64,
    /// Arrivals that failed.
    pub errors: u64,
    /// Connections that its clients opened.
    pub opened: u64,
    /// Connections that its clients closed whose backend was healthy and reported, and only no longer in the client's subset.
    pub moved: u64,
}

impl JobCounts {
    /// What has happened since earlier counts of the same job.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            job: self.job.clone(),
            arrivals: self.arrivals - before.arrivals,
            errors: self.errors - before.errors,
            opened: self.opened - before.opened,
            moved: self.moved - before.moved,
        }
    }
}

/// One step of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepRow {
    /// The run.
    pub run: String,
    /// The end of the step.
    pub at_us: u64,
    /// Backends that run at its end.
    pub backends: u32,
    /// Clients that run at its end.
    pub clients: u32,
    /// Open connections, at its end, of the backends that run and for which the source asks for traffic: not lame
    /// ducks.
    pub connections: Spread,
    /// Arrivals over capacity during the step, of the backends that were healthy and reported all the time.
    pub load: Spread,
    /// The mean load over the largest: the part of the capacity that can be used before the first backend is full.
    pub utilization: f64,
    /// Busy core time over cores that may be used during the step, of the same backends, if requests cost CPU time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Spread>,
    /// What became of clients' weights, in a run in which something moves them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<WeightChanges>,
    /// What happened during the step.
    #[serde(flatten)]
    pub counts: TrafficCounts,
    /// The same of each job, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<JobCounts>,
    /// The numbers behind `load` and `cpu`, if the scenario keeps traces.
    #[serde(skip)]
    pub traces: Option<Traces>,
}

/// What each backend did in a step, by index: one point of its trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traces {
    /// Arrivals over capacity.
    pub load: Vec<f64>,
    /// Busy core time over cores that may be used.
    pub cpu: Vec<f64>,
}

/// What became of clients' weights in a step, where these follow load or members start slowly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WeightChanges {
    /// Tables that clients made because factors had moved.
    pub tables: u64,
    /// The factors of all members of all clients, at its end.
    pub factors: Spread,
}

/// What was counted over a whole run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Total {
    /// The run.
    pub run: String,
    /// What happened.
    #[serde(flatten)]
    pub counts: TrafficCounts,
    /// The same of each job, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<JobCounts>,
    /// Arrivals that were still under way at the end.
    pub under_way: u64,
    /// Connections that were open at the start, before anything happened: those that clients keep for their requests.
    pub connections_at_start: u64,
    /// Connections that were open at the end.
    pub connections_at_end: u64,
    /// Open connections, at the end, of the backends that ran and for which the source asked for traffic.
    pub connections: Spread,
    /// Arrivals over capacity, of the backends that were part of the service from the start to the end.
    pub load: Spread,
    /// The mean load over the largest.
    pub utilization: f64,
    /// The same if each arrival were at a backend that is drawn by weight: what chance alone gives. `None` if nothing arrived.
    pub floor: Option<f64>,
    /// How many of these backends never got anything.
    pub unused: u32,
    /// The largest share of a step's arrivals that failed.
    pub worst_errors: f64,
}

/// What was measured of machines and requests in one run with one seed, from when measuring began.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadTotal {
    /// Busy core time over cores that may be used, of each backend that was part of the service from the start to the end.
    pub cpu: Vec<f64>,
    /// What the machine of each of these can do when nothing makes it slower, in cores of speed 1.
    pub capacity: Vec<f64>,
    /// Utilization if each request were at a backend that is drawn by capacity.
    pub floor: Vec<f64>,
    /// CPU time of all arrivals over what the machines at the start can give when nothing makes them slower.
    pub asked: f64,
    /// How long requests took that were served, in microseconds: of a thousand of them 500, 990 and 999 took no longer.
    pub latency_us: [u64; 3],
    /// What happened meanwhile.
    pub counts: TrafficCounts,
}

/// Utilization of some loads, and 1 if there were none: nothing is wasted.
pub fn utilization_of(loads: &[f64]) -> f64 {
    if loads.iter().all(|load| *load == 0.0) { 1.0 } else { raw_utilization(loads) }
}
