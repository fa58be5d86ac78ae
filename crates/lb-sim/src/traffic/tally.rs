//! The counts of a simulated scenario: rows for its steps, and totals for each run.
//!
//! Every arrival is counted once when it begins and once when it ends. This module must not decide
//! anything.

use serde::Serialize;

use crate::metrics::{Spread, raw_utilization};

/// Number of failed arrivals for each reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestErrors {
    /// The client had no backend to choose.
    pub refused: u64,
    /// The client had no established connection to any of the backends that it tried to choose.
    pub unready: u64,
    /// The backend was down, refused the connect or did not answer it.
    pub down: u64,
    /// The connection ended before the request did.
    pub cut: u64,
    /// All backends that the client could choose were at the client's limit.
    pub limited: u64,
    /// The backend was already processing its maximum number of requests.
    pub rejected: u64,
    /// The backend answered with an error.
    pub answered: u64,
    /// The client gave up on the request.
    pub timed_out: u64,
}

impl RequestErrors {
    /// The sum of all reasons.
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

/// Counts since the start. They never decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TrafficCounts {
    /// Connects or requests that began.
    pub arrivals: u64,
    /// Arrivals that succeeded.
    pub served: u64,
    /// Arrivals that had not ended when their client was removed.
    pub abandoned: u64,
    /// Arrivals that failed.
    pub errors: RequestErrors,
    /// Retries by clients.
    pub retries: u64,
    /// Connections that clients opened.
    pub opened: u64,
    /// Connections that clients closed.
    pub closed: u64,
    /// Connections that clients closed only because the backend had left their subset. The backend
    /// was healthy and listed.
    pub moved: u64,
    /// Connections that ended because their backend stopped.
    pub dropped: u64,
}

impl TrafficCounts {
    /// Returns these counts minus earlier ones.
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

/// The counts of a job and its copies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct JobCounts {
    /// The name of the job in the file.
    pub job: String,
    /// Connects or requests that began.
    pub arrivals: u64,
    /// Arrivals that failed.
    pub errors: u64,
    /// Connections that the job's clients opened.
    pub opened: u64,
    /// Connections that the job's clients closed only because the backend had left their subset.
    /// The backend was healthy and listed.
    pub moved: u64,
}

impl JobCounts {
    /// Returns these counts minus earlier counts of the same job.
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

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepRow {
    pub run: String,
    /// The end of the step.
    pub at_us: u64,
    /// The number of running backends at the end of the step.
    pub backends: u32,
    /// The number of running clients at the end of the step.
    pub clients: u32,
    /// The numbers of open connections of the backends at the end of the step. Only running
    /// backends that should get traffic are included: no lame ducks, and no backends with weight 0.
    pub connections: Spread,
    /// The loads of the backends during the step: arrivals divided by capacity. Only backends that
    /// were healthy and listed during the whole step are included.
    pub load: Spread,
    /// The mean load divided by the largest load: the part of the capacity that is usable before
    /// the first backend is full.
    pub utilization: f64,
    /// CPU utilization of the backends in `load` during the step: the time that cores worked,
    /// divided by the time that they were usable. `None` if requests cost no CPU time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Spread>,
    /// How clients' weights changed; `None` in a run without load control and slow start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<WeightChanges>,
    /// The counts of the step.
    #[serde(flatten)]
    pub counts: TrafficCounts,
    /// The counts of each job; empty if there is only one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<JobCounts>,
    /// The values from which `load` and `cpu` are computed; `None` if the scenario records no
    /// traces.
    #[serde(skip)]
    pub traces: Option<Traces>,
}

/// The values of each backend in a step, in the order of indexes. For each backend, they are one
/// point of its trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traces {
    /// Arrivals divided by capacity.
    pub load: Vec<f64>,
    /// The time that cores worked, divided by the time that they were usable.
    pub cpu: Vec<f64>,
}

/// How clients' weights changed in a step, in a run in which weights follow load or members start
/// slowly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WeightChanges {
    /// Tables that clients built because factors had changed.
    pub tables: u64,
    /// The factors of all members of all clients at the end of the step.
    pub factors: Spread,
}

/// The counts of a whole run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Total {
    pub run: String,
    #[serde(flatten)]
    pub counts: TrafficCounts,
    /// The counts of each job; empty if there is only one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<JobCounts>,
    /// Arrivals that had not ended at the end of the run.
    pub under_way: u64,
    /// The number of connections that were open at the start, before any event. These are
    /// connections of jobs with traffic `requests`.
    pub connections_at_start: u64,
    /// Connections that were open at the end.
    pub connections_at_end: u64,
    /// The numbers of open connections at the end, of running backends that should get traffic.
    pub connections: Spread,
    /// Arrivals divided by capacity, of the backends that were part of the service from start to
    /// end.
    pub load: Spread,
    /// The mean load divided by the largest load.
    pub utilization: f64,
    /// The utilization that chance alone would give: each arrival goes to a backend that is drawn
    /// in proportion to weight. `None` if nothing arrived.
    pub floor: Option<f64>,
    /// How many of the backends in `load` received neither an arrival nor a connection.
    pub unused: u32,
    /// The largest share of arrivals that failed in one step.
    pub worst_errors: f64,
}

/// Measurements of machines and requests in one run with one seed. They begin at the scenario's
/// `measure_from`.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadTotal {
    /// CPU utilization of each backend that was part of the service from start to end: the time
    /// that cores worked, divided by the time that they were usable.
    pub cpu: Vec<f64>,
    /// The capacity of each of these backends' machines without any slowdown, in cores of speed 1.
    pub capacity: Vec<f64>,
    /// The utilization of these backends if each request went to a backend that is drawn in
    /// proportion to capacity.
    pub floor: Vec<f64>,
    /// The CPU time of all arrivals, divided by the capacity that the machines at the start have
    /// without any slowdown.
    pub offered: f64,
    /// The 50th, 99th and 99.9th percentile of the duration of served requests, in microseconds.
    pub latency_us: [u64; 3],
    /// The counts since measuring began.
    pub counts: TrafficCounts,
}

/// The mean of these loads divided by the largest. It is 1 if all loads are 0, because then no
/// capacity is wasted.
pub fn utilization_of(loads: &[f64]) -> f64 {
    if loads.iter().all(|load| *load == 0.0) { 1.0 } else { raw_utilization(loads) }
}
