//! Feedback: each client gives more to a member that is used less than the mean of its row, and
//! less to a member that is used more, a little at a time, until all its members are used alike.
//!
//! If every client does so, this is a damped form of the Sinkhorn iteration on the graph of all
//! their subsets. Its row sums are the clients' true loads, which no client needs to know. So it
//! makes utilization even, whatever the cause of the difference is: machines, neighbours, subsets,
//! clients that are unequal or absent, other jobs. Four rules make it stable:
//!
//! - A step starts from the weights *as they act*. Weights act only on new flows, so long-lived
//!   flows still follow old weights: a law that starts from its latest weights runs ahead of the
//!   flows and oscillates.
//! - The longer a change takes to show in a report, the smaller the steps ([`gain`]).
//! - A step is linear in the utilization, so that noise hardly moves the mean, and it is bounded.
//! - A member that is frozen, or has no report, keeps its factor.
//!
//! If a member has not reported for long, and slowly in any case, its share returns to the
//! structural share.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::by_address::{ByAddress, Next};
use super::factor::{Factor, Factors};
use super::flows::Flows;
use super::{Heard, Hold, Look, MemberObservation, SeenRow, TICK, float, thousandths};

/// The smallest and the largest factor.
const CLAMP: (f64, f64) = (1.0 / 8.0, 8.0);

/// The largest relative change of a weight in one tick.
const STEP: f64 = 0.1;

/// The largest relative distance between a weight and the weight as it acts: how far the law may
/// run ahead of long-lived flows.
const AHEAD: f64 = 0.5;

/// Utilizations below the first number count as the first, because an almost unused member must not
/// get ten times as much. Those above the second count as the second: use and waiting together do
/// not exceed it, and one absurd report must not hide the others.
const UTILIZATION: (f64, f64) = (0.1, 2.0);

/// The largest gain: a single step corrects the whole difference.
const MOST_GAIN: f64 = 1.0;

/// Utilization is smoothed over this part of the life of a flow: if weights act slowly, there is
/// time for further measurements.
const SMOOTHED_LIVES: f64 = 0.125;

/// The limit for gain times delay, with the delay in units of the longer of tick and life. It
/// leaves a margin to the point where the loop would oscillate.
const STABLE: f64 = 0.3;

/// If a member has not reported for this long, its factor is no longer held.
const HELD: Duration = Duration::from_secs(180);

/// How long the factor then takes to reach the structural share.
const DECAY: Duration = Duration::from_secs(60);

/// Every factor goes to 1 with this time constant, or with this many lives of a flow if that is
/// longer, so that no factor stays for ever.
const LEAK: Duration = Duration::from_secs(3600);
const LEAK_LIVES: u32 = 100;

/// Longer lives of a flow count as this: a day.
const MOST_LIFE: Duration = Duration::from_secs(24 * 3600);

/// A backend with a larger share of errors may not gain weight: a backend that fails fast has
/// little to do.
const MOST_ERRORS: f64 = 0.05;

/// If a backend's flows live this many times longer than the median of the row, it may not gain
/// weight: a hung backend has nothing to do, and its flows stay open until their clients give up.
const LONG_FLOWS: f64 = 4.0;

/// Factors of members that have left are stored for a while: for at most this many more than the
/// row has ever had members.
const MOST_GONE: usize = 64;

/// After this many time constants, a difference is a twentieth of its first size.
const SETTLED: u32 = 3;

/// The law's memory of the members of one row.
#[derive(Clone, Debug, Default)]
pub struct Feedback {
    members: ByAddress<MemberHistory>,
    /// The largest number of members that the row has ever had.
    most: usize,
    /// The gain of the last step; `None` before the first.
    gain: Option<f64>,
}

/// The law's memory of a member.
#[derive(Clone, Copy, Debug)]
struct MemberHistory {
    /// Its factor. The factor in force is the one at the last table. Steps too small for a new
    /// table still change this factor, so that they add up.
    factor: f64,
    /// The factor as it acts: smoothed over the life of a flow.
    acting: f64,
    /// When its last report arrived, and for how long none has arrived since; `None` if it has
    /// never reported.
    heard: Option<Duration>,
    silence: Option<Duration>,
    /// For how long the factor has been going to 1 because of that silence.
    decayed: Duration,
    /// Its utilization, smoothed.
    used: Option<f64>,
    /// Why its factor did not change, or may not grow.
    hold: Option<Hold>,
    is_at_clamp: bool,
    /// For how long it has not been in the row.
    gone: Option<Duration>,
}

impl MemberHistory {
    const fn of(factor: f64, silence: Option<Duration>) -> Self {
        Self {
            factor,
            acting: factor,
            heard: None,
            silence,
            decayed: Duration::ZERO,
            used: None,
            hold: None,
            is_at_clamp: false,
            gone: None,
        }
    }

    /// Notes the newest report, if there is one.
    fn hear(&mut self, heard: Option<Heard>) {
        let at = heard.map(|heard| heard.at);
        if at.is_some() && at != self.heard {
            (self.heard, self.silence, self.decayed) = (at, Some(Duration::ZERO), Duration::ZERO);
        } else if let Some(silence) = &mut self.silence {
            *silence = silence.saturating_add(TICK);
        }
    }

    /// Something else decides the factor. The smoothed utilization of this time would be out of
    /// date when learning resumes, so it is dropped.
    const fn freeze(&mut self) {
        (self.used, self.hold) = (None, None);
    }

    /// Moves the factor towards 1 for one tick. It reaches 1 when [`DECAY`] has passed since the
    /// end of the hold.
    fn decay(&mut self, may_rise: bool) {
        self.is_at_clamp = false;
        let left = DECAY.saturating_sub(self.decayed).max(TICK);
        let next = self.factor + (1.0 - self.factor) * (TICK.as_secs_f64() / left.as_secs_f64());
        self.factor = if may_rise { next } else { next.min(self.factor) };
        self.decayed = self.decayed.saturating_add(TICK);
    }
}

/// The gain of a step: the part of a difference that one tick corrects, at most 1. Gain times
/// `delay`, the time until a change shows, is at most 0.3 times the longer of tick and `life`.
pub fn gain(life: Duration, delay: Duration) -> f64 {
    (STABLE * TICK.max(life).as_secs_f64() / delay.as_secs_f64()).min(MOST_GAIN)
}

/// A member that takes part in a tick.
struct Learnt {
    address: SocketAddr,
    /// Its weight as it acts, and its weight as it is.
    acting: f64,
    weight: f64,
    structural: f64,
    /// Its utilization, if it is known.
    utilization: Option<f64>,
    may_rise: bool,
}

impl Feedback {
    /// Takes over factors that are `age` old, and returns them: the older they are, the nearer to
    /// 1, which they reach after an hour. Members count as silent since the factors were stored.
    /// But even if their hold is over, their factors take the usual time to go to 1, because the
    /// earlier daemon's tables have been in force until now.
    pub fn adopt(&mut self, factors: &Factors, age: Duration) -> Factors {
        let part = 1.0 - (age.as_secs_f64() / LEAK.as_secs_f64()).min(1.0);
        let aged = |factor: Factor| 1.0 + (factor.number().clamp(CLAMP.0, CLAMP.1) - 1.0) * part;
        self.remember(factors, aged, age.min(HELD))
    }

    /// Takes over factors that an operator has frozen. They are not changed: frozen factors do not
    /// age, and another law may have computed them.
    pub fn adopt_frozen(&mut self, factors: &Factors) -> Factors {
        self.remember(factors, Factor::number, Duration::ZERO)
    }

    fn remember(&mut self, factors: &Factors, number: impl Fn(Factor) -> f64, silence: Duration) -> Factors {
        let remembered = |(address, factor)| (address, MemberHistory::of(number(factor), Some(silence)));
        self.members = factors.iter().map(remembered).collect();
        self.factors()
    }

    /// The factors to store for the next daemon, including those of members that left recently.
    pub fn learnt(&self) -> Factors {
        self.members.iter().map(|(address, member)| (*address, Factor::of(member.factor))).collect()
    }

    /// The factors of all members that are in the row.
    fn factors(&self) -> Factors {
        let there = self.members.iter().filter(|(_, member)| member.gone.is_none());
        there.map(|(address, member)| (*address, Factor::of(member.factor))).collect()
    }

    /// Resets all factors to 1, because tables do not follow the law. The factors as they act go to
    /// 1 as flows end.
    pub fn forget(&mut self, row: &SeenRow, flows: Flows) {
        for member in self.members.values_mut() {
            (member.factor, member.hold, member.is_at_clamp) = (1.0, None, false);
        }
        self.leave(row, TICK);
        self.act(row, flows.life, true);
    }

    /// One tick while an operator has frozen all factors: no factor changes, and no member is
    /// forgotten unless too many have left.
    pub fn freeze(&mut self, look: &Look, acts: bool) -> Factors {
        self.leave(&look.row, Duration::ZERO);
        self.act(&look.row, look.flows.life, acts);
        let mut next = Next::default();
        for (address, seen) in look.row.iter() {
            if let Some(remembered) = self.members.get_next_mut(&mut next, address) {
                remembered.hear(told(seen));
                remembered.freeze();
            }
        }
        self.factors()
    }

    /// Whether a member's factor is at the lower or upper bound.
    pub fn is_at_clamp(&self, address: SocketAddr) -> bool {
        self.members.get(&address).is_some_and(|member| member.is_at_clamp)
    }

    /// How many members the law remembers, including those that have left.
    #[cfg(test)]
    pub fn remembered(&self) -> usize {
        self.members.len()
    }

    /// Why factors did not change in the last tick, or may not grow.
    pub fn holds(&self) -> impl Iterator<Item = (SocketAddr, Hold)> + '_ {
        self.members.iter().filter_map(|(address, member)| Some((*address, member.hold?)))
    }

    /// How long the loop takes to correct a difference: some of its time constants.
    pub fn settling(&self, flows: Flows) -> Duration {
        let life = flows.life.min(MOST_LIFE);
        // Before the first step, this assumes a new report every second.
        let gain = self.gain.unwrap_or_else(|| gain(life, 3 * TICK + life.mul_f64(SMOOTHED_LIVES)));
        (TICK.max(life) * SETTLED).div_f64(gain)
    }

    /// The factors after one tick. `frozen`: the members with a factor that something else decides.
    /// `acts`: whether tables follow these factors.
    pub fn tick(
        &mut self,
        now: Duration,
        look: &Look,
        frozen: &BTreeMap<SocketAddr, Hold>,
        acts: bool,
    ) -> Factors {
        let row = &look.row;
        let life = look.flows.life.min(MOST_LIFE);
        self.leave(row, TICK);
        self.act(row, life, acts);
        let mut learnt: Vec<Learnt> = Vec::new();
        let smoothed = life.mul_f64(SMOOTHED_LIVES);
        let part = TICK.as_secs_f64() / (TICK + smoothed).as_secs_f64();
        let (mut slowest, mut silent) = (Duration::ZERO, 0);
        let usual_life = usual_life(row);
        let mut next = Next::default();
        // A member with weight 0 gets nothing. If it had a factor, the factor is stored for a
        // while.
        for (&address, seen) in row.iter().filter(|(_, seen)| seen.weight > 0) {
            let Some(remembered) = self.members.get_next_mut(&mut next, &address) else { continue };
            let heard = told(seen);
            remembered.hear(heard);
            if frozen.contains_key(&address) {
                remembered.freeze();
                continue;
            }
            let no_more = if fails(seen, now) {
                Some(Hold::Errors)
            } else if seen.life.zip(usual_life).is_some_and(|(life, usual)| life.now > LONG_FLOWS * usual) {
                Some(Hold::LongFlows)
            } else {
                None
            };
            let may_rise = no_more.is_none();
            remembered.hold = no_more;
            let silence = remembered.silence;
            if silence.is_some_and(|silence| silence >= HELD) {
                // Its load has been unknown for too long.
                remembered.decay(may_rise);
            }
            let heard = heard.filter(|heard| heard.is_fresh(now));
            if silence.is_some() && heard.is_none() {
                silent += 1;
                remembered.hold = Some(Hold::NoReport);
                if silence.is_some_and(|silence| silence > smoothed) {
                    remembered.used = None;
                }
                continue;
            }
            if let Some(Heard { load, .. }) = heard {
                // Errors count as utilization, as in gRFC A58: a backend that fails every request
                // counts as full, however fast it answers.
                let errors = load.error_share().unwrap_or(0.0).min(1.0);
                let used =
                    (thousandths(load.utilization.unwrap_or(0)) + errors).clamp(UTILIZATION.0, UTILIZATION.1);
                let before = remembered.used.unwrap_or(used);
                remembered.used = Some(before + (used - before) * part);
            }
            slowest = heard.map_or(slowest, |heard| slowest.max(heard.delay(now)));
            let structural = float(seen.weight);
            learnt.push(Learnt {
                address,
                acting: structural * remembered.acting,
                weight: structural * remembered.factor,
                structural,
                utilization: heard.and(remembered.used),
                may_rise,
            });
        }
        let known = learnt.iter().filter(|member| member.utilization.is_some()).count();
        if known * 2 >= learnt.len() + silent && known > 0 {
            let gain = gain(life, slowest + smoothed);
            self.gain = Some(gain);
            let mut next = Next::default();
            for (address, factor, is_at_clamp) in step(&learnt, gain, life) {
                let member =
                    self.members.get_next_mut(&mut next, &address).expect("every member is remembered");
                (member.factor, member.is_at_clamp) = (factor, is_at_clamp);
            }
        } else {
            for Learnt { address, utilization, .. } in &learnt {
                let member = self.members.get_mut(address).expect("every member is remembered");
                let hold = if utilization.is_some() { Hold::FewReports } else { Hold::NoReport };
                member.hold = member.hold.or(Some(hold));
            }
        }
        self.factors()
    }

    /// Advances the factors as they act by one tick. A new member begins with the mean of all, and
    /// a member that returns within some minutes begins with its earlier factor.
    fn act(&mut self, row: &SeenRow, life: Duration, acts: bool) {
        let part = TICK.as_secs_f64() / (TICK + life.min(MOST_LIFE)).as_secs_f64();
        let (mut structural, mut actual) = (0.0, 0.0);
        let (mut next, mut new) = (Next::default(), Vec::new());
        for (address, seen) in row.iter().filter(|(_, seen)| seen.weight > 0) {
            let Some(remembered) = self.members.get_next_mut(&mut next, address) else {
                new.push(*address);
                continue;
            };
            let in_force = if acts { remembered.factor } else { 1.0 };
            remembered.acting += (in_force - remembered.acting) * part;
            structural += float(seen.weight);
            actual += float(seen.weight) * remembered.factor;
        }
        // Members that have left took their parts with them. The remaining factors are scaled so
        // that their mean is 1 again, which changes no share.
        let scale = if actual > 0.0 { structural / actual } else { 1.0 };
        for remembered in self.members.values_mut() {
            remembered.factor *= scale;
            remembered.acting *= scale;
        }
        for address in new {
            self.members.insert(address, MemberHistory::of(1.0, None));
        }
    }

    /// Notes which members have left the row, and forgets those that left long ago: a member that
    /// is replaced for a while, or missing in one list, returns with its factor. `passed`: the time
    /// to count since the last call.
    fn leave(&mut self, row: &SeenRow, passed: Duration) {
        let mut next = Next::default();
        let mut is_there =
            |address: &SocketAddr| row.get_next(&mut next, address).is_some_and(|seen| seen.weight > 0);
        self.most = self.most.max(row.len());
        let most_gone = self.most + MOST_GONE;
        let mut gone = 0;
        self.members.retain(|address, member| {
            if is_there(address) {
                member.gone = None;
                return true;
            }
            let since = member.gone.map_or(Duration::ZERO, |gone| gone.saturating_add(passed));
            *member =
                MemberHistory { gone: Some(since), used: None, hold: None, is_at_clamp: false, ..*member };
            gone += 1;
            // Bound: if a list always has other members, at most `MOST_GONE` more than it ever had
            // at once are remembered. A list that is short for a moment loses no factor.
            since < HELD + DECAY && gone <= most_gone
        });
    }
}

/// The factors of members that learn, after one step, and whether each is at the lower or upper
/// bound.
fn step(learnt: &[Learnt], gain: f64, life: Duration) -> Vec<(SocketAddr, f64, bool)> {
    let known = || learnt.iter().filter_map(|member| Some((member.acting, member.utilization?)));
    let mean = known().map(|(weight, used)| weight * used).sum::<f64>()
        / known().map(|(weight, _)| weight).sum::<f64>();
    let moved = |member: &Learnt| {
        // A member with unknown utilization counts as used like the mean.
        let used = member.utilization.unwrap_or(mean);
        member.acting * (1.0 + (gain * (1.0 - used / mean)).clamp(-AHEAD, AHEAD))
    };
    let mut wanted: Vec<f64> = learnt.iter().map(moved).collect();
    let caps: Vec<f64> =
        learnt.iter().map(|member| if member.may_rise { f64::INFINITY } else { member.weight }).collect();
    let before: f64 = learnt.iter().map(|member| member.weight).sum();
    let structural: f64 = learnt.iter().map(|member| member.structural).sum();
    normalise(&mut wanted, &caps, before);
    // A step starts from the factor as it acts, which follows the step within one life. So the part
    // per step is that of a life, and the whole goes to 1 with this time constant.
    let leak = LEAK.max(life * LEAK_LIVES);
    let leak = TICK.max(life).as_secs_f64() / leak.as_secs_f64();
    let mut clamped = vec![false; learnt.len()];
    for ((wanted, member), is_clamped) in wanted.iter_mut().zip(learnt).zip(&mut clamped) {
        let own = member.structural * before / structural;
        *wanted += (own - *wanted) * leak;
        *is_clamped = *wanted <= CLAMP.0 * own || *wanted >= CLAMP.1 * own;
        *wanted = wanted.clamp(CLAMP.0 * own, CLAMP.1 * own);
        *wanted = wanted.clamp((1.0 - STEP) * member.weight, (1.0 + STEP) * member.weight);
    }
    normalise(&mut wanted, &caps, before);
    let results = learnt.iter().zip(wanted).zip(clamped);
    results
        .map(|((member, wanted), is_clamped)| (member.address, wanted / member.structural, is_clamped))
        .collect()
}

/// A member's report, if it contains a utilization.
fn told(seen: &MemberObservation) -> Option<Heard> {
    seen.heard.filter(|heard| heard.load.utilization.is_some())
}

/// Whether a backend may not gain weight because too many of its requests, or of this task's flows
/// to it, fail.
fn fails(seen: &MemberObservation, now: Duration) -> bool {
    // An old report is no reason to hold a factor.
    let recent = seen.heard.filter(|heard| now.saturating_sub(heard.at) < HELD);
    let reported = recent.and_then(|heard| heard.load.error_share());
    reported.into_iter().chain(seen.errors).any(|share| share > MOST_ERRORS)
}

/// How long flows to most members live: the median of the members with a known life, if these are
/// at least half of the row. Of two in the middle, the lower one counts: one of two members may
/// hang.
fn usual_life(row: &SeenRow) -> Option<f64> {
    let mut lives: Vec<f64> = row.values().filter_map(|seen| Some(seen.life?.usual)).collect();
    lives.sort_by(f64::total_cmp);
    // If no flow is ever seen open, the usual life is unknown.
    let middle = lives.len().checked_sub(1)? / 2;
    (lives.len() * 2 >= row.len()).then(|| lives.get(middle).copied())?.filter(|life| *life > 0.0)
}

/// Scales weights to a sum. Weights that would exceed their caps are set to them, and the others
/// share the rest in proportion.
fn normalise(weights: &mut [f64], caps: &[f64], sum: f64) {
    let mut is_capped = vec![false; weights.len()];
    // Bound: each round except the last caps at least one weight.
    loop {
        let (mut capped, mut free) = (0.0, 0.0);
        for ((weight, cap), is_capped) in weights.iter().zip(caps).zip(&is_capped) {
            if *is_capped { capped += cap } else { free += weight }
        }
        // If all weights are capped, none may grow, so none shrinks either.
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
