//! One backend as `status` has it: what it gets, what became of its flows, how long connects take.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use lb_common::abi::{self, FIRST_BUCKET_LOG2, TIME_BUCKETS};
use lb_core::health::Health;
use serde::{Deserialize, Serialize};

/// One backend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendStatus {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its slot.
    pub slot: u32,
    /// The slot's generation.
    pub generation: u32,
    /// Its health, by [`Health::name`](lb_core::health::Health::name).
    pub state: String,
    /// Where that comes from: `list`, `report`, `probe` or `kernel`; `None` of a healthy backend.
    #[serde(default)]
    pub witness: Option<String>,
    /// Why it is in that state; `None` of a healthy backend.
    #[serde(default)]
    pub reason: Option<String>,
    /// What its slot is for, by [`BackendState::name`](abi::BackendState::name).
    #[serde(default)]
    pub membership: String,
    /// Why and until when it is ejected; `None` if it is not.
    #[serde(default)]
    pub ejection: Option<EjectionStatus>,
    /// Whether the programs did not eject it although it failed often enough, because it is the last.
    #[serde(default)]
    pub is_withheld: bool,
    /// For how many seconds it has not been available; `None` if it is, or without a daemon.
    #[serde(default)]
    pub unavailable_s: Option<f64>,
    /// What its reports or the daemon's probes say; `None` if it is not probed, or without a daemon.
    #[serde(default)]
    pub probe: Option<BackendHealth>,
    /// Whether connect may choose it.
    pub usable: bool,
    /// Its capacity.
    pub weight: u32,
    /// Its share of the table.
    pub share_wanted: f64,
    /// Its share of the flows of the last minute; `None` without a daemon or without flows.
    pub share_60s: Option<f64>,
    /// Its share of the flows since it was first seen; `None` without flows.
    pub share: Option<f64>,
    /// Flows that were started to it. Counts are since it was first seen, except those of the last minute.
    pub started: u64,
    /// Of these: flows that are in no active count.
    pub untracked: u64,
    /// Active flows.
    pub active: u64,
    /// Flows whose records were reclaimed, because their sockets were gone.
    pub reclaimed: u64,
    /// Flows whose first SYN was sent.
    pub connecting: u64,
    /// Flows that were established.
    pub established: u64,
    /// How flows ended, by [`Ending::name`](lb_common::ending::Ending::name).
    pub endings: BTreeMap<String, u64>,
    /// By how many flows the counts do not add up, also after what running calls explain; 0 unless something is wrong.
    pub unaccounted: i64,
    /// Flows that went to another address, because another program rewrote the destination after ours.
    pub diverted: u64,
    /// Diverted flows of the last minute; `None` without a daemon.
    pub diverted_60s: Option<u64>,
    /// Connects that failed in the last minute, except those that the application gave up or that this host did not
    /// send; `None` without a daemon.
    #[serde(default)]
    pub failed_60s: Option<u64>,
    /// Whether it may be chosen, no connect of the last minute was established, and enough of them failed to say so.
    #[serde(default)]
    pub failing: bool,
    /// Round-trip time of the handshake.
    pub rtt: Times,
    /// From the choice until the flow was established.
    pub connect: Times,
    /// [`BackendStatus::connect`] in brief; `None` where no flow was established.
    pub latency: Option<ConnectLatency>,
    /// Of the last minute; `None` without a daemon.
    pub latency_60s: Option<ConnectLatency>,
    /// Of the last minute; `None` without a daemon.
    pub rates_60s: Option<ConnectionRates>,
    /// Sum of the lifetimes of ended flows, in seconds.
    pub lifetime_s: f64,
    /// Bytes that ended flows received.
    pub bytes_received: u64,
    /// Bytes of ended flows that the peer acknowledged.
    pub bytes_sent: u64,
    /// Segments of ended flows that were sent again.
    pub retransmits: u64,
    /// How often it was ejected.
    pub ejections: u64,
    /// Flows that were trials.
    pub trials: u64,
    /// How often it was taken back because a trial was established.
    pub readmissions: u64,
    /// Failures after which it was not ejected, because it was the last.
    pub withheld: u64,
}

impl BackendStatus {
    /// Whether it is to be looked at first: its connects fail, it is ejected or refusing.
    pub fn is_failing(&self) -> bool {
        self.failing || [Health::Ejected, Health::Refusing].iter().any(|bad| self.state == bad.name())
    }

    /// Its health, or that it is leaving if nothing else is to be said of it.
    pub fn state_in_words(&self) -> &str {
        if self.is_leaving() && self.state == Health::Healthy.name() { &self.membership } else { &self.state }
    }

    /// Whether it is in the table no more, and has flows left.
    pub fn is_leaving(&self) -> bool {
        self.membership == abi::BackendState::Leaving.name()
    }
}

/// What reports or probes say of a backend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendHealth {
    /// `report`, `tcp` or `http`.
    pub kind: String,
    /// Of reports `ready`, `lame-duck`, `down`, `unheard`, `silent` or `unknown`; of probes `well` or `failing`; `unprobed` before
    /// the first.
    pub state: String,
    /// Why the last probe failed, or why nothing is known.
    pub why: Option<String>,
    /// How many seconds ago the last report came.
    pub age_s: Option<f64>,
    /// For how many seconds it is a lame duck if it says nothing more.
    pub lasts_s: Option<f64>,
    /// How long the last probe took that was answered, in milliseconds.
    pub round_trip_ms: Option<f64>,
    /// Requests a second, as it says.
    pub qps: Option<f64>,
    /// Errors a second, as it says.
    pub eps: Option<f64>,
    /// How much of what it can do it does, as it says.
    pub utilization: Option<f64>,
}

impl BackendHealth {
    /// Of a backend that was not probed yet, by probes of this kind.
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

    /// What the state of a backend may be by probes of this kind.
    pub fn states(kind: &str) -> &'static [&'static str] {
        match kind {
            "report" => &["ready", "lame-duck", "down", "unheard", "silent", "unknown", "unprobed"],
            _ => &["well", "failing", "unprobed"],
        }
    }

    /// Whether there is something to tell: it is neither ready nor well, nor about to be probed first.
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
            write!(f, ", heard {seconds:.1} s ago")?;
        }
        if let Some(milliseconds) = self.round_trip_ms {
            write!(f, ", round trip {milliseconds:.1} ms")?;
        }
        if let Some(share) = self.utilization {
            write!(f, ", utilization {:.0} %", share * 100.0)?;
        }
        if let Some(seconds) = self.lasts_s {
            write!(f, ", for {:.0} s if it is silent", seconds.ceil())?;
        }
        Ok(())
    }
}

/// Why and until when a backend is ejected.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EjectionStatus {
    /// How many flows failed in a row.
    pub failures: u32,
    /// What the last of them was, by [`name_of_failure`](lb_common::ejection::name_of_failure).
    pub cause: String,
    /// How often it was ejected without having recovered since.
    pub times: u32,
    /// In how many seconds it is tried again: 0 if by the next connect, `None` while a trial is under way.
    pub trial_in_s: Option<f64>,
}

impl BackendStatus {
    /// Why it is ejected, and when it is tried again; `None` if it is not. A backend that is known to refuse is not tried.
    pub fn ejection_in_words(&self) -> Option<String> {
        let EjectionStatus { failures, cause, times, trial_in_s } = self.ejection.as_ref()?;
        let mut text = format!("ejected: {failures} {cause} in a row");
        if *times > 1 {
            text += &format!(", {times} times without recovery");
        }
        match trial_in_s {
            _ if self.state == Health::Refusing.name() => {}
            None => text += ", trial under way",
            Some(seconds) if *seconds <= 0.0 => text += ", trial by the next connect",
            Some(seconds) => text += &format!(", trial in {:.0} s", seconds.ceil()),
        }
        Some(text)
    }
}

#[cfg(test)]
impl BackendStatus {
    /// A healthy backend of which nothing was counted.
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

/// A histogram of times. The upper bound of bucket `i` is 16 x 2^i microseconds; the last bucket has none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// Number of times.
    pub count: u64,
    /// Their sum in microseconds.
    pub sum_us: u64,
    /// Number of times in each bucket.
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
    /// The mean.
    pub mean_us: f64,
    /// The median, estimated: times within a bucket are taken for evenly spread. At most 4,194,304, the last bound.
    pub p50_us: f64,
    /// The 99th percentile, estimated likewise.
    pub p99_us: f64,
}

impl ConnectLatency {
    /// The latency of a histogram; `None` if that is empty.
    #[expect(clippy::cast_precision_loss, reason = "times for people")]
    pub fn of(times: &abi::Histogram) -> Option<Self> {
        let count = count(times);
        (count > 0).then(|| Self {
            mean_us: times.sum_us as f64 / count as f64,
            p50_us: quantile(times, 0.5),
            p99_us: quantile(times, 0.99),
        })
    }

    /// The latency of several histograms together.
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

/// The time that a part of all times does not exceed, as Prometheus' `histogram_quantile` estimates it.
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

/// The highest bound of a histogram, in microseconds: the estimate for every time that is longer.
pub const LONGEST_US: f64 = (1u32 << (FIRST_BUCKET_LOG2 as usize + TIME_BUCKETS - 2)) as f64;

/// Rates per second, averaged over about a minute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConnectionRates {
    /// Over how many seconds: fewer than 60 for a daemon that has just started.
    pub over_s: f64,
    /// Flows that were started to it.
    pub started: f64,
    /// Flows that ended with an error of the backend.
    pub errors: f64,
    /// How flows ended, by [`Ending::name`](lb_common::ending::Ending::name); endings that did not occur are left out.
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
    fn an_ejection_is_told_with_its_cause_and_what_comes() {
        let of = |health: Health, times: u32, trial_in_s: Option<f64>| {
            let ejection = EjectionStatus { failures: 5, cause: "refused".to_owned(), times, trial_in_s };
            let unused = BackendStatus::unused("10.0.0.1:80".parse().unwrap(), 0);
            let backend =
                BackendStatus { state: health.name().to_owned(), ejection: Some(ejection), ..unused };
            backend.ejection_in_words().unwrap()
        };
        let ejected = Health::Ejected;
        assert_eq!(of(ejected, 1, Some(2.1)), "ejected: 5 refused in a row, trial in 3 s");
        assert_eq!(of(ejected, 1, Some(0.0)), "ejected: 5 refused in a row, trial by the next connect");
        let again = "ejected: 5 refused in a row, 3 times without recovery";
        assert_eq!(of(ejected, 3, None), format!("{again}, trial under way"));
        assert_eq!(of(Health::Refusing, 3, Some(0.0)), again, "it is not tried");
    }

    #[test]
    fn percentiles_are_estimated_within_their_bucket() {
        check(&[], 0, None);
        check(&[(0, 4)], 40, Some([10.0, 8.0, 15.84]));
        // 99 of 100 at most 32 us: the 99th is the last of them.
        check(&[(1, 99), (10, 1)], 20_000, Some([200.0, 16.0 + 16.0 * 50.0 / 99.0, 32.0]));
        check(&[(19, 1)], 9_000_000, Some([9e6, LONGEST_US, LONGEST_US]));
        assert!((LONGEST_US - 4_194_304.0).abs() < f64::EPSILON);
    }
}
