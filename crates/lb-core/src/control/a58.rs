//! The weights of gRPC's `weighted_round_robin` (gRFC A58): requests per second divided by
//! utilization.
//!
//! These weights measure the capacity of machines, and do not depend on subsets or clients: equal
//! machines have equal weights, however many clients each has. They replace structural weights, and
//! are the reference with which [`feedback`](super::feedback) is compared.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::factor::{Factor, Factors};
use super::flows::Flows;
use super::{MemberObservation, ReceivedReport, SeenRow, float, thousandths};

/// A weight is used only after reports have arrived for this time (`blackout_period`).
const BLACKOUT: Duration = Duration::from_secs(10);

/// A weight is forgotten after this time without a report (`weight_expiration_period`).
const EXPIRATION: Duration = Duration::from_secs(180);

/// The errors per request, times this number, are added to the utilization
/// (`error_utilization_penalty`).
const PENALTY: f64 = 1.0;

/// The last known A58 weight of a member.
#[derive(Clone, Copy, Debug)]
struct LastWeight {
    weight: f64,
    updated: Duration,
    /// When the first report arrived after the member had become available: the start of the
    /// blackout. `None` after an expiration.
    since: Option<Duration>,
}

/// The A58 weights of one service's members.
#[derive(Clone, Debug, Default)]
pub struct A58(BTreeMap<SocketAddr, LastWeight>);

/// The weight that the gRFC computes from a report; 0 without requests or utilization.
fn weight(ReceivedReport { load, .. }: &ReceivedReport) -> f64 {
    let number = |number: Option<u32>| thousandths(number.unwrap_or(0));
    let (qps, eps) = (number(load.qps), number(load.eps));
    let mut utilization = number(load.utilization);
    if utilization > 0.0 && qps > 0.0 {
        utilization += eps / qps * PENALTY;
    }
    if utilization == 0.0 { 0.0 } else { qps / utilization }
}

impl A58 {
    /// The factors that replace each member's structural weight with its A58 weight. With fewer
    /// than two known weights, all members get the same weight. `ready_since`: the time since which
    /// a member is available.
    pub fn factors(
        &mut self,
        now: Duration,
        row: &SeenRow,
        ready_since: impl Fn(SocketAddr) -> Duration,
    ) -> Factors {
        self.0.retain(|address, _| row.contains_key(address));
        // A member with weight 0 gets no connects.
        let row: SeenRow =
            row.iter().filter(|(_, seen)| seen.weight > 0).map(|(at, seen)| (*at, *seen)).collect();
        for (&address, MemberObservation { report, .. }) in row.iter() {
            if let Some(report) = report {
                self.on_report(address, report, ready_since(address));
            }
        }
        let known: BTreeMap<SocketAddr, f64> =
            row.keys().filter_map(|&address| Some((address, self.weight(address, now)?))).collect();
        let (count, all) = (count(row.len()), known.values().sum::<f64>());
        let mean = if known.len() < 2 { 1.0 } else { all / self::count(known.len()) };
        let of = |address| if known.len() < 2 { mean } else { known.get(&address).copied().unwrap_or(mean) };
        let whole: f64 = row.keys().map(|&address| of(address)).sum();
        let structural = row.values().map(|seen| float(seen.weight)).sum::<f64>() / count;
        // The factor is divided by the member's structural weight, because later the factor is
        // multiplied by that weight. So the structural weight has no effect.
        let factor = |(&address, seen): (&SocketAddr, &MemberObservation)| {
            (address, Factor::of(of(address) * count / whole * structural / float(seen.weight)))
        };
        row.iter().map(factor).collect()
    }

    fn on_report(&mut self, address: SocketAddr, report: &ReceivedReport, ready_since: Duration) {
        let new = weight(report);
        let before = self.0.get(&address);
        // After a member has become available again, its next report starts a new blackout.
        let since = before.and_then(|before| before.since).filter(|since| *since >= ready_since);
        let is_known = before.is_some_and(|before| before.updated >= report.at);
        if new == 0.0 || report.at < ready_since || (is_known && since.is_some()) {
            return;
        }
        let since = since.unwrap_or(report.at);
        self.0.insert(address, LastWeight { weight: new, updated: report.at, since: Some(since) });
    }

    /// The weight to use now; `None` if it is unknown, in its blackout, or expired.
    fn weight(&mut self, address: SocketAddr, now: Duration) -> Option<f64> {
        let remembered = self.0.get_mut(&address)?;
        if now.saturating_sub(remembered.updated) >= EXPIRATION {
            remembered.since = None;
            return None;
        }
        let since = remembered.since?;
        (now.saturating_sub(since) >= BLACKOUT).then_some(remembered.weight)
    }
}

/// The time until a change has its full effect: after the blackout, the weight follows the reports,
/// and when the present flows have ended, all flows follow the weight.
pub fn settling(flows: Flows) -> Duration {
    BLACKOUT + flows.life
}

#[expect(clippy::cast_precision_loss, reason = "a few thousand members at most")]
fn count(members: usize) -> f64 {
    members as f64
}
