//! Feedback: each client gives a member that is used less than the mean of its row more, and one that is used more less, a little at a
//! time, until all that it uses are used alike.
//!
//! With every client doing so, this is the Sinkhorn iteration on the graph of all their subsets, with the clients' true loads as its
//! row sums, which nobody has to know: it makes utilization even whatever the reason why it is not (machines, neighbours, subsets,
//! clients that are unequal or absent, other jobs). What makes it hold still is in four rules:
//!
//! - It starts from the weights *as they act*. Weights act on new flows alone, so flows that live long show old ones: a law that looks
//!   at its last weights runs ahead of them and swings.
//! - The longer it takes until a change is seen in a report, the smaller its steps ([`gain`]).
//! - A step is linear in the utilization, so that noise neither adds nor takes on average, and bounded.
//! - Who is frozen, or of whom nothing is known, keeps what it has.
//!
//! Wherever no report has come for long, and slowly in any case, shares go back to the structural ones.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::factor::{Factor, Factors};
use super::{Flows, Heard, Seen, SeenRow, TICK};

/// The least and the most that a member can have, of its structural weight.
const CLAMP: (f64, f64) = (1.0 / 8.0, 8.0);

/// The most that a weight moves in one tick, from what it was.
const STEP: f64 = 0.1;

/// The most that it is away from the weight as it acts: that far ahead of flows that live long.
const AHEAD: f64 = 0.5;

/// A lower utilization counts as this one: next to nothing is no reason to send ten times as much.
const LEAST_UTILIZATION: f64 = 0.1;

/// The largest gain.
const MOST_GAIN: f64 = 0.5;

/// Gain times delay, both by the same clock: from where on it swings, with room.
const STABLE: f64 = 0.3;

/// A report is learnt from for so many of the times that it covers, and two ticks: whoever falls silent keeps what it has, and makes
/// nobody else wait for it.
const FRESH_WINDOWS: u32 = 3;

/// After so long without a report what a member had is held no more.
const HELD: Duration = Duration::from_secs(180);

/// How long it takes from there to its structural share.
const DECAY: Duration = Duration::from_secs(60);

/// How long it takes to the structural share in any case, or so many lives of a flow: nothing is remembered for ever.
const LEAK: Duration = Duration::from_secs(3600);
const LEAK_LIVES: f64 = 100.0;

/// From this share of errors on a backend gets no more than it has: what fails fast has little to do.
const MOST_ERRORS: f64 = 0.05;

/// What is remembered of the members of one row.
#[derive(Clone, Debug, Default)]
pub struct Feedback(BTreeMap<SocketAddr, Remembered>);

/// What is remembered of a member.
#[derive(Clone, Copy, Debug)]
struct Remembered {
    /// Its factor. What is in force is this as of the last table: a step that is worth none is taken all the same, so that small ones
    /// add up.
    factor: f64,
    /// The same as it acts: smoothed over the life of a flow.
    acting: f64,
}

/// How strongly a tick answers to what it sees: gain over the larger of tick and life, times the time until a change shows, is at most
/// 0.3.
pub fn gain(life: Duration, delay: Duration) -> f64 {
    (STABLE * TICK.max(life).as_secs_f64() / delay.as_secs_f64()).min(MOST_GAIN)
}

/// Until a change that is made now is seen: it has to be measured, told, and looked at.
fn delay(heard: &Heard, now: Duration) -> Duration {
    // The next report is as far from this one as the time that it covers.
    heard.load.window + heard.age(now) + heard.load.window.max(TICK) + TICK
}

/// A member that takes part in a tick.
struct Learnt {
    address: SocketAddr,
    /// Its weight as it acts, and as it is.
    acting: f64,
    weight: f64,
    structural: f64,
    /// Its utilization, if it is known.
    utilization: Option<f64>,
    may_rise: bool,
}

impl Feedback {
    /// What shall be in force after one tick.
    pub fn tick(&mut self, now: Duration, row: &SeenRow, flows: Flows) -> Factors {
        self.act(row, flows);
        let mut learnt: Vec<Learnt> = Vec::new();
        let (mut slowest, mut silent) = (Duration::ZERO, 0);
        for (&address, seen) in row {
            let remembered = self.0.get_mut(&address).expect("every member is remembered");
            let heard = seen.heard.filter(|heard| heard.load.utilization.is_some());
            if heard.is_some_and(|heard| now.saturating_sub(heard.at) >= HELD) {
                // Nobody knows any more.
                remembered.factor = towards_one(remembered.factor, DECAY);
                silent += 1;
                continue;
            }
            if seen.is_frozen {
                continue;
            }
            if let Some(heard) = &heard {
                if now.saturating_sub(heard.at) > heard.load.window * FRESH_WINDOWS + 2 * TICK {
                    silent += 1;
                    continue;
                }
                slowest = slowest.max(delay(heard, now));
            }
            let structural = float(seen.weight);
            let utilization = heard.and_then(|heard| heard.load.utilization);
            learnt.push(Learnt {
                address,
                acting: structural * remembered.acting,
                weight: structural * remembered.factor,
                structural,
                utilization: utilization.map(|thousandths| f64::from(thousandths) / 1000.0),
                may_rise: !fails(seen),
            });
        }
        let known = learnt.iter().filter(|member| member.utilization.is_some()).count();
        if known * 2 >= learnt.len() + silent && known > 0 {
            let gain = gain(flows.life, slowest);
            let leak = LEAK.max(flows.life.mul_f64(LEAK_LIVES));
            for (address, factor) in step(&learnt, gain, leak) {
                self.0.get_mut(&address).expect("every member is remembered").factor = factor;
            }
        }
        self.0.iter().map(|(address, remembered)| (*address, Factor::of(remembered.factor))).collect()
    }

    /// What there is has acted for one tick more. Whoever is new has its structural share, which is the mean of all.
    fn act(&mut self, row: &SeenRow, flows: Flows) {
        self.0.retain(|address, _| row.contains_key(address));
        let part = TICK.as_secs_f64() / (TICK + flows.life).as_secs_f64();
        for &address in row.keys() {
            let new = Remembered { factor: 1.0, acting: 1.0 };
            let Remembered { factor, acting } = self.0.entry(address).or_insert(new);
            *acting += (*factor - *acting) * part;
        }
    }
}

/// The factors of members that learn, after one step.
fn step(learnt: &[Learnt], gain: f64, leak: Duration) -> Vec<(SocketAddr, f64)> {
    let used = |member: &Learnt| member.utilization.map(|used| used.max(LEAST_UTILIZATION));
    let known = || learnt.iter().filter_map(|member| Some((member.acting, used(member)?)));
    let mean = known().map(|(weight, used)| weight * used).sum::<f64>()
        / known().map(|(weight, _)| weight).sum::<f64>();
    let moved = |member: &Learnt| {
        // Of whom nothing is known is used as the mean is.
        let used = used(member).unwrap_or(mean);
        member.acting * (1.0 + (gain * (1.0 - used / mean)).clamp(-AHEAD, AHEAD))
    };
    let mut wanted: Vec<f64> = learnt.iter().map(moved).collect();
    let caps: Vec<f64> =
        learnt.iter().map(|member| if member.may_rise { f64::INFINITY } else { member.weight }).collect();
    let before: f64 = learnt.iter().map(|member| member.weight).sum();
    let structural: f64 = learnt.iter().map(|member| member.structural).sum();
    normalise(&mut wanted, &caps, before);
    for (wanted, member) in wanted.iter_mut().zip(learnt) {
        let own = member.structural * before / structural;
        *wanted += (own - *wanted) * (TICK.as_secs_f64() / leak.as_secs_f64()).min(1.0);
        *wanted = wanted.clamp(CLAMP.0 * own, CLAMP.1 * own);
        *wanted = wanted.clamp((1.0 - STEP) * member.weight, (1.0 + STEP) * member.weight);
    }
    normalise(&mut wanted, &caps, before);
    learnt.iter().zip(wanted).map(|(member, wanted)| (member.address, wanted / member.structural)).collect()
}

/// Whether a backend gets no more than it has: too much of what it does, or of what this task asks of it, fails.
fn fails(seen: &Seen) -> bool {
    let reported = seen.heard.and_then(|heard| {
        let qps = heard.load.qps.filter(|qps| *qps > 0)?;
        Some(f64::from(heard.load.eps?) / f64::from(qps))
    });
    reported.into_iter().chain(seen.errors).any(|share| share > MOST_ERRORS)
}

/// A factor one tick later on its way to 1.
fn towards_one(factor: f64, takes: Duration) -> f64 {
    factor + (1.0 - factor) * (TICK.as_secs_f64() / takes.as_secs_f64())
}

/// Brings weights to a sum, in proportion, but for those that would be above their caps: these are at them.
fn normalise(weights: &mut [f64], caps: &[f64], sum: f64) {
    let mut is_capped = vec![false; weights.len()];
    // Bound: each turn but the last caps one weight at least.
    loop {
        let (mut capped, mut free) = (0.0, 0.0);
        for ((weight, cap), is_capped) in weights.iter().zip(caps).zip(&is_capped) {
            if *is_capped { capped += cap } else { free += weight }
        }
        // Where all are capped, the sum is not reached: everybody fails, and nobody gets more.
        let scale = if free > 0.0 { (sum - capped).max(0.0) / free } else { 1.0 };
        let mut is_new = false;
        for ((weight, cap), is_capped) in weights.iter_mut().zip(caps).zip(&mut is_capped) {
            if !*is_capped && *weight * scale > *cap {
                (*weight, *is_capped, is_new) = (*cap, true, true);
            }
        }
        if !is_new {
            weights
                .iter_mut()
                .zip(&is_capped)
                .filter(|(_, is)| !**is)
                .for_each(|(weight, _)| *weight *= scale);
            return;
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "structural weights are below 2^33")]
fn float(weight: u64) -> f64 {
    weight as f64
}
