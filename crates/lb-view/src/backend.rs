//! One backend as `status` shows it: its share, how flows ended, and how long connects take.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use lb_common::abi::{self, FIRST_BUCKET_LOG2, TIME_BUCKETS};
use lb_core::health::{Health, Who};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendStatus {
    pub address: SocketAddr,
    pub slot: u32,
    pub generation: u32,
    /// The name of the backend's health, from [`Health::name`](lb_core::health::Health::name).
    pub state: String,
    /// The source of `state`: `list`, `report`, `probe`, `kernel` or `operator`; `None` for a
    /// healthy backend.
    #[serde(default)]
    pub witness: Option<String>,
    /// The reason for `state`; `None` for a healthy backend.
    #[serde(default)]
    pub reason: Option<String>,
    /// The purpose of the backend's slot: a name from
    /// [`BackendState::name`](abi::BackendState::name).
    #[serde(default)]
    pub membership: String,
    /// Why the backend is ejected and until when; `None` if it is not ejected.
    #[serde(default)]
    pub ejection: Option<EjectionStatus>,
    /// Whether the backend failed often enough to be ejected, but was not ejected because it was
    /// the last available backend.
    #[serde(default)]
    pub is_withheld: bool,
    /// Seconds since the backend became unavailable; `None` if it is available, or without a
    /// daemon.
    #[serde(default)]
    pub unavailable_s: Option<f64>,
    /// The result of the backend's reports or of the daemon's probes; `None` without a daemon, or
    /// if the daemon does not check the backend.
    #[serde(default)]
    pub probe: Option<BackendHealth>,
    pub usable: bool,
    /// The backend's capacity relative to the other backends.
    pub weight: u32,
    /// The percentage by which an operator multiplies the weight; `None` if no operator does, or,
    /// without a daemon, if the stored overrides cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_percent: Option<u16>,
    /// The backend's share of the table's entries.
    pub share_wanted: f64,
    /// The backend's share of the flows of the last minute; `None` without a daemon or without
    /// flows.
    pub share_60s: Option<f64>,
    /// The backend's share of the flows since it was first seen; `None` without flows.
    pub share: Option<f64>,
    /// Flows that were started to the backend. Counts begin when the backend was first seen, except
    /// for counts of the last minute.
    pub started: u64,
    /// How many of the `started` flows are in no active count, because they have no record.
    pub untracked: u64,
    pub active: u64,
    /// Flows with records that were reclaimed because their sockets no longer exist.
    pub reclaimed: u64,
    /// Flows for which the first SYN was sent.
    pub connecting: u64,
    pub established: u64,
    /// How flows ended, keyed by [`Ending::name`](lb_common::ending::Ending::name).
    pub endings: BTreeMap<String, u64>,
    /// `started` minus the sum of `endings`, `active`, `reclaimed` and `untracked`, apart from
    /// calls that are still running. It is 0 unless something is wrong.
    pub unaccounted: i64,
    /// Flows that went to another address, because another program rewrote the destination after
    /// socklb's programs.
    pub diverted: u64,
    /// Diverted flows of the last minute; `None` without a daemon.
    pub diverted_60s: Option<u64>,
    /// Connects that failed in the last minute; `None` without a daemon. Connects that the
    /// application gave up or that this host could not send are not included.
    #[serde(default)]
    pub failed_60s: Option<u64>,
    /// Whether all connects of the last minute failed, and there were so many connects that chance
    /// is excluded. `false` if connects may not choose the backend.
    #[serde(default)]
    pub failing: bool,
    /// Round-trip times of handshakes in which no SYN was sent again.
    pub rtt: Times,
    /// Times from the choice of the backend to the established flow.
    pub connect: Times,
    /// Summary of [`BackendStatus::connect`]; `None` if no flow was established.
    pub latency: Option<ConnectLatency>,
    /// Summary of connect times of the last minute; `None` without a daemon.
    pub latency_60s: Option<ConnectLatency>,
    /// Rates of the last minute; `None` without a daemon.
    pub rates_60s: Option<ConnectionRates>,
    /// Sum of the lifetimes of ended flows, in seconds.
    pub lifetime_s: f64,
    /// Received bytes of flows that have ended.
    pub bytes_received: u64,
    /// Bytes that the peers of flows that have ended acknowledged.
    pub bytes_sent: u64,
    /// Retransmitted segments of flows that have ended.
    pub retransmits: u64,
    /// How often the backend was ejected.
    pub ejections: u64,
    pub trials: u64,
    /// How many trials established a connection, so that the backend was readmitted.
    pub readmissions: u64,
    /// The number of failures that did not eject the backend because it was the last available
    /// backend.
    pub withheld: u64,
}

impl BackendStatus {
    /// Whether connects to the backend fail, or the backend is ejected or refusing. An operator
    /// should look at such backends first.
    pub fn is_failing(&self) -> bool {
        self.failing || [Health::Ejected, Health::Refusing].iter().any(|bad| self.state == bad.name())
    }

    /// The backend's health, or its membership if it is healthy and leaving.
    pub fn state_in_words(&self) -> &str {
        match &self.state {
            state if state == Health::Healthy.name() && self.is_leaving() => &self.membership,
            _ if self.is_drained_by_operator() => "drained (operator)",
            _ if self.has_withheld_ejection() => "failing",
            state => state,
        }
    }

    /// Whether an operator has drained the backend.
    pub fn is_drained_by_operator(&self) -> bool {
        self.state == Health::Drained.name() && self.witness.as_deref() == Some(Who::Operator.name())
    }

    /// Whether the backend ranks as ejected although connects may choose it, because it is the last
    /// available backend.
    pub fn has_withheld_ejection(&self) -> bool {
        self.is_withheld && self.state == Health::Ejected.name()
    }

    /// Whether the backend is healthy or unproven.
    pub fn is_available(&self) -> bool {
        [Health::Healthy, Health::Unproven].iter().any(|good| self.state == good.name())
    }

    /// The backend's weight, with the percentage that an operator has set.
    pub fn weight_in_words(&self) -> String {
        match self.weight_percent {
            Some(percent) => format!("{} ({percent} %)", self.weight),
            None => self.weight.to_string(),
        }
    }

    /// Whether the backend has left the table and still has flows.
    pub fn is_leaving(&self) -> bool {
        self.membership == abi::BackendState::Leaving.name()
    }
}

/// The result of a backend's reports or probes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendHealth {
    /// `report`, `tcp` or `http`.
    pub kind: String,
    /// The state. For reports it is `ready`, `lame-duck`, `down`, `unheard`, `silent` or `unknown`;
    /// for probes it is `well` or `failing`. It is `unprobed` before the first result.
    pub state: String,
    /// Why the last probe failed, or why the state is unknown.
    pub why: Option<String>,
    /// Seconds since the last report.
    pub age_s: Option<f64>,
    /// Seconds for which the backend remains a lame duck if no further report arrives.
    pub lasts_s: Option<f64>,
    /// Duration of the last answered probe, in milliseconds.
    pub round_trip_ms: Option<f64>,
    /// Reported requests per second.
    pub qps: Option<f64>,
    /// Reported errors per second.
    pub eps: Option<f64>,
    /// Reported utilization; 1 is full capacity.
    pub utilization: Option<f64>,
}

impl BackendHealth {
    /// The state before the first probe of this kind.
    pub fn unprobed(kind: &str) -> Self {
        Self {
            kind: kind.to_owned(),
            state: "unprobed".to_owned(),
            why: None,
            age_s: None,
            lasts_s: None,
            round_trip_ms: None,
            qps: None,
            eps: None,
            utilization: None,
        }
    }

    /// The possible values of `state` for this kind.
    pub fn states(kind: &str) -> &'static [&'static str] {
        match kind {
            "report" => &["ready", "lame-duck", "down", "unheard", "silent", "unknown", "unprobed"],
            _ => &["well", "failing", "unprobed"],
        }
    }

    /// Whether the state is shown on a line of its own: it is not `ready`, `well` or `unprobed`.
    pub fn is_remarkable(&self) -> bool {
        !matches!(self.state.as_str(), "ready" | "well" | "unprobed")
    }
}

impl fmt::Display for BackendHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind.as_str() {
            "report" => write!(f, "reports: {}", self.state)?,
            kind => write!(f, "{kind} probes: {}", self.state)?,
        }
        if let Some(why) = &self.why {
            write!(f, ", {why}")?;
        }
        if let Some(seconds) = self.age_s {
            write!(f, ", last report {seconds:.1} s ago")?;
        }
        if let Some(milliseconds) = self.round_trip_ms {
            write!(f, ", round trip {milliseconds:.1} ms")?;
        }
        if let Some(share) = self.utilization {
            write!(f, ", utilization {:.0} %", share * 100.0)?;
        }
        if let Some(seconds) = self.lasts_s {
            write!(f, ", expires in {:.0} s without a further report", seconds.ceil())?;
        }
        Ok(())
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EjectionStatus {
    /// How many flows failed in a row.
    pub failures: u32,
    /// How the last of these flows failed: a name from
    /// [`name_of_failure`](lb_common::ejection::name_of_failure).
    pub cause: String,
    /// How often the backend has been ejected since it last recovered.
    pub times: u32,
    /// Seconds until the next trial. It is 0 if the next connect is the trial, and `None` while a
    /// trial is in progress.
    pub trial_in_s: Option<f64>,
}

impl BackendStatus {
    /// Why the backend is ejected and when its trial is due; `None` if it is not ejected. A
    /// refusing backend has no trial.
    pub fn ejection_in_words(&self) -> Option<String> {
        let EjectionStatus { failures, cause, times, trial_in_s } = self.ejection.as_ref()?;
        let mut text = format!("ejected: {failures} {cause} in a row");
        if *times > 1 {
            text += &format!(", ejected {times} times without recovery");
        }
        match trial_in_s {
            _ if self.state == Health::Refusing.name() => {}
            None => text += ", trial under way",
            Some(seconds) if *seconds <= 0.0 => text += ", next connect is the trial",
            Some(seconds) => text += &format!(", trial in {:.0} s", seconds.ceil()),
        }
        Some(text)
    }
}

#[cfg(test)]
impl BackendStatus {
    /// A healthy backend. All counts are zero.
    pub fn unused(address: SocketAddr, slot: u32) -> Self {
        let none = Times::from(&abi::Histogram::default());
        Self {
            address,
            slot,
            generation: 0,
            state: Health::Healthy.name().to_owned(),
            witness: None,
            reason: None,
            membership: abi::BackendState::Member.name().to_owned(),
            ejection: None,
            is_withheld: false,
            unavailable_s: None,
            probe: None,
            usable: true,
            weight: 1,
            weight_percent: None,
            share_wanted: 0.0,
            share_60s: None,
            share: None,
            started: 0,
            untracked: 0,
            active: 0,
            reclaimed: 0,
            connecting: 0,
            established: 0,
            endings: BTreeMap::new(),
            unaccounted: 0,
            diverted: 0,
            diverted_60s: None,
            failed_60s: None,
            failing: false,
            rtt: none.clone(),
            connect: none,
            latency: None,
            latency_60s: None,
            rates_60s: None,
            lifetime_s: 0.0,
            bytes_received: 0,
            bytes_sent: 0,
            retransmits: 0,
            ejections: 0,
            trials: 0,
            readmissions: 0,
            withheld: 0,
        }
    }
}

/// A histogram of times. The upper bound of bucket `i` is 16 x 2^i microseconds; the last bucket
/// has no upper bound.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    pub count: u64,
    pub sum_us: u64,
    pub buckets: Vec<u64>,
}

impl From<&abi::Histogram> for Times {
    fn from(times: &abi::Histogram) -> Self {
        Self { count: count(times), sum_us: times.sum_us, buckets: times.buckets.to_vec() }
    }
}

fn count(times: &abi::Histogram) -> u64 {
    times.buckets.iter().fold(0, |sum: u64, count| sum.saturating_add(*count))
}

/// How long connects take, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConnectLatency {
    pub mean_us: f64,
    /// The median. The estimate assumes that times are spread evenly within a bucket. The estimate
    /// is at most 4,194,304, the highest upper bound.
    pub p50_us: f64,
    /// The 99th percentile, estimated like the median.
    pub p99_us: f64,
}

impl ConnectLatency {
    /// `None` if the histogram is empty.
    #[expect(clippy::cast_precision_loss, reason = "times for people")]
    pub fn of(times: &abi::Histogram) -> Option<Self> {
        let count = count(times);
        (count > 0).then(|| Self {
            mean_us: times.sum_us as f64 / count as f64,
            p50_us: quantile(times, 0.5),
            p99_us: quantile(times, 0.99),
        })
    }

    /// The latency over the sum of several histograms; `None` if all are empty.
    pub fn of_all<'t>(all: impl Iterator<Item = &'t abi::Histogram>) -> Option<Self> {
        let mut sum = abi::Histogram::default();
        for times in all {
            sum.sum_us = sum.sum_us.saturating_add(times.sum_us);
            for (sum, count) in sum.buckets.iter_mut().zip(times.buckets) {
                *sum = sum.saturating_add(count);
            }
        }
        Self::of(&sum)
    }
}

/// The quantile `part` (0 to 1), estimated like `histogram_quantile` of Prometheus.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn quantile(times: &abi::Histogram, part: f64) -> f64 {
    let wanted = part * count(times) as f64;
    let mut below = 0.0;
    for (i, &count) in times.buckets.iter().enumerate().take(TIME_BUCKETS - 1) {
        let here = count as f64;
        if count > 0 && below + here >= wanted {
            let upper = f64::from(1u32 << (FIRST_BUCKET_LOG2 as usize + i));
            let lower = if i == 0 { 0.0 } else { upper / 2.0 };
            return lower + (upper - lower) * (wanted - below) / here;
        }
        below += here;
    }
    LONGEST_US
}

/// The highest upper bound of a histogram, in microseconds. Longer times are estimated as this
/// time.
pub const LONGEST_US: f64 = (1u32 << (FIRST_BUCKET_LOG2 as usize + TIME_BUCKETS - 2)) as f64;

/// Rates per second, averaged over about a minute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConnectionRates {
    /// The averaging time in seconds. It is less than 60 if the daemon started recently.
    pub over_s: f64,
    pub started: f64,
    /// Flows that ended with an error of the backend.
    pub errors: f64,
    /// How flows ended, keyed by [`Ending::name`](lb_common::ending::Ending::name). Endings that
    /// did not occur are left out.
    pub endings: BTreeMap<String, f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(buckets: &[(usize, u64)], sum_us: u64, expected: Option<[f64; 3]>) {
        let mut times = abi::Histogram { sum_us, ..abi::Histogram::default() };
        for (bucket, count) in buckets {
            times.buckets[*bucket] = *count;
        }
        let latency = ConnectLatency::of(&times);
        assert_eq!(latency.map(|latency| [latency.mean_us, latency.p50_us, latency.p99_us]), expected);
    }

    #[test]
    fn an_ejection_shows_its_cause_and_the_next_trial() {
        let of = |health: Health, times: u32, trial_in_s: Option<f64>| {
            let ejection = EjectionStatus { failures: 5, cause: "refused".to_owned(), times, trial_in_s };
            let unused = BackendStatus::unused("10.0.0.1:80".parse().unwrap(), 0);
            let backend =
                BackendStatus { state: health.name().to_owned(), ejection: Some(ejection), ..unused };
            backend.ejection_in_words().unwrap()
        };
        let ejected = Health::Ejected;
        assert_eq!(of(ejected, 1, Some(2.1)), "ejected: 5 refused in a row, trial in 3 s");
        assert_eq!(of(ejected, 1, Some(0.0)), "ejected: 5 refused in a row, next connect is the trial");
        let again = "ejected: 5 refused in a row, ejected 3 times without recovery";
        assert_eq!(of(ejected, 3, None), format!("{again}, trial under way"));
        assert_eq!(of(Health::Refusing, 3, Some(0.0)), again, "a refusing backend has no trial");
    }

    #[test]
    fn percentiles_are_estimated_within_their_bucket() {
        check(&[], 0, None);
        check(&[(0, 4)], 40, Some([10.0, 8.0, 15.84]));
        // Of 100 times, 99 are at most 32 us, so the 99th percentile is the upper bound of their
        // bucket.
        check(&[(1, 99), (10, 1)], 20_000, Some([200.0, 16.0 + 16.0 * 50.0 / 99.0, 32.0]));
        check(&[(19, 1)], 9_000_000, Some([9e6, LONGEST_US, LONGEST_US]));
        assert!((LONGEST_US - 4_194_304.0).abs() < f64::EPSILON);
    }
}
