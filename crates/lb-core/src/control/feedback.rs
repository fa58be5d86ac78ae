//! Feedback: in small steps, each client task moves load from members above the mean utilization of
//! its members to members below it, until all members are equally utilized.
//!
//! If every client does this, the result is a damped form of the Sinkhorn iteration on the graph of
//! all subsets. The row sums of this iteration are the true loads of the clients, which no client
//! has to compute. So utilization becomes even, whatever the cause of the differences is: machines,
//! neighbours, subsets, unequal or missing clients, other jobs. Four rules make the law stable:
//!
//! - A step starts from the *acting* weights. Weights act only on new flows, so long-lived flows
//!   still follow old weights. A law that starts from its latest weights would run ahead of the
//!   flows and oscillate.
//! - The longer a change takes to show in reports, the smaller the steps are ([`gain`]).
//! - A step is linear in the utilization, so that noise hardly changes the mean. The size of a step
//!   is bounded.
//! - A member that is frozen, or has no recent report, retains its factor.
//!
//! All factors slowly return to 1, the structural share. If a member has not reported for long, its
//! factor returns quickly.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::by_address::{ByAddress, Next};
use super::factor::{Factor, Factors};
use super::flows::Flows;
use super::{Hold, Look, MemberObservation, ReceivedReport, SeenRow, TICK, float, thousandths};

/// The smallest and the largest factor.
const CLAMP: (f64, f64) = (1.0 / 8.0, 8.0);

/// The largest relative change of a weight in one tick.
const STEP: f64 = 0.1;

/// The largest relative difference between a factor and the acting factor. This limit prevents the
/// law from running too far ahead of long-lived flows, which still follow earlier weights.
const AHEAD: f64 = 0.5;

/// Reported utilizations are clamped to this range. Without the lower limit, an almost unused
/// member could get ten times its traffic. The upper limit bounds the effect of one absurd report;
/// real utilizations, which include waiting, do not exceed it.
const UTILIZATION: (f64, f64) = (0.1, 2.0);

/// The largest gain, at which a single step corrects the whole difference.
const MOST_GAIN: f64 = 1.0;

/// Utilization is smoothed over this part of a flow's lifetime: if weights act slowly, there is
/// time to average more measurements.
const SMOOTHED_LIVES: f64 = 0.125;

/// The limit for gain times delay, with the delay in units of a tick or a lifetime, whichever is
/// longer. This limit leaves a margin to the value at which the loop would oscillate.
const STABLE: f64 = 0.3;

/// A member without reports retains its factor for this time.
const HELD: Duration = Duration::from_secs(180);

/// After [`HELD`], the factor returns to 1 within this time.
const DECAY: Duration = Duration::from_secs(60);

/// Every factor returns to 1 with this time constant, or with `LEAK_LIVES` lifetimes of a flow if
/// that is longer, so that no factor is permanent.
const LEAK: Duration = Duration::from_secs(3600);
const LEAK_LIVES: u32 = 100;

/// A lifetime of flows above one day is treated as one day.
const MOST_LIFE: Duration = Duration::from_secs(24 * 3600);

/// A backend with a larger share of errors may not gain weight, because a backend that fails fast
/// has a low utilization.
const MOST_ERRORS: f64 = 0.05;

/// If a backend's flows live this many times longer than the median of the service's members, the
/// backend may not gain weight: a hung backend has a low utilization, and its flows remain open
/// until clients give up.
const LONG_FLOWS: f64 = 4.0;

/// The factors of absent members are stored for four minutes. Their number is at most `MOST_GONE`
/// plus the largest number of members that the service has had at one time.
const MOST_GONE: usize = 64;

/// After this many time constants, a difference is a twentieth of its initial size.
const SETTLED: u32 = 3;

/// The state of the feedback law for one service at one client task.
#[derive(Clone, Debug, Default)]
pub struct Feedback {
    members: ByAddress<MemberHistory>,
    /// The largest number of members that the service has had at one time.
    most: usize,
    /// The gain of the last step; `None` before the first step.
    gain: Option<f64>,
}

/// The state of the feedback law for one member.
#[derive(Clone, Copy, Debug)]
struct MemberHistory {
    /// The member's factor. Steps that are too small for a new table also change this factor, so
    /// that they add up; the factor in force changes only with a table.
    factor: f64,
    /// The acting factor: the factor, smoothed over the mean lifetime of a flow.
    acting: f64,
    /// When the member's last report arrived, and for how long no new report has arrived since;
    /// `None` if the member has never reported.
    reported_at: Option<Duration>,
    silence: Option<Duration>,
    /// The time for which the factor has been returning to 1 because no report has arrived for
    /// [`HELD`].
    decayed: Duration,
    /// The member's utilization, smoothed over [`SMOOTHED_LIVES`] lifetimes of a flow.
    used: Option<f64>,
    /// Why the member's factor did not change, or may not rise.
    hold: Option<Hold>,
    is_at_clamp: bool,
    /// The time for which the member has been absent from the service's members; `None` if it is
    /// present.
    gone: Option<Duration>,
}

impl MemberHistory {
    const fn of(factor: f64, silence: Option<Duration>) -> Self {
        Self {
            factor,
            acting: factor,
            reported_at: None,
            silence,
            decayed: Duration::ZERO,
            used: None,
            hold: None,
            is_at_clamp: false,
            gone: None,
        }
    }

    /// Notes the newest report, if there is one.
    fn on_report(&mut self, report: Option<ReceivedReport>) {
        let at = report.map(|report| report.at);
        if at.is_some() && at != self.reported_at {
            (self.reported_at, self.silence, self.decayed) = (at, Some(Duration::ZERO), Duration::ZERO);
        } else if let Some(silence) = &mut self.silence {
            *silence = silence.saturating_add(TICK);
        }
    }

    /// Freezes the factor for a tick. The smoothed utilization is dropped, because it is out of
    /// date when the factor changes again.
    const fn freeze(&mut self) {
        (self.used, self.hold) = (None, None);
    }

    /// Moves the factor towards 1 for one tick. It reaches 1 after [`DECAY`].
    fn decay(&mut self, may_rise: bool) {
        self.is_at_clamp = false;
        let left = DECAY.saturating_sub(self.decayed).max(TICK);
        let next = self.factor + (1.0 - self.factor) * (TICK.as_secs_f64() / left.as_secs_f64());
        self.factor = if may_rise { next } else { next.min(self.factor) };
        self.decayed = self.decayed.saturating_add(TICK);
    }
}

/// The gain of a step: the part of a difference that one tick corrects, at most 1. `delay` is the
/// time until a change shows in reports, `life` the lifetime of a flow. Gain times `delay` is at
/// most 0.3 times the longer of a tick and `life`.
pub fn gain(life: Duration, delay: Duration) -> f64 {
    (STABLE * TICK.max(life).as_secs_f64() / delay.as_secs_f64()).min(MOST_GAIN)
}

/// A member that takes part in a step.
struct Participant {
    address: SocketAddr,
    /// The member's structural weight times its acting factor, and times its current factor.
    acting: f64,
    weight: f64,
    structural: f64,
    /// The member's utilization, if it is known.
    utilization: Option<f64>,
    may_rise: bool,
}

impl Feedback {
    /// Adopts factors that are `age` old, and returns them. The older they are, the nearer to 1 the
    /// adopted factors are; after an hour they are 1. The time since the factors were stored is
    /// treated as a time without reports. Factors that were stored more than three minutes ago
    /// still take a minute to return to 1, because the earlier daemon's tables have been in force
    /// until now.
    pub fn adopt(&mut self, factors: &Factors, age: Duration) -> Factors {
        let part = 1.0 - (age.as_secs_f64() / LEAK.as_secs_f64()).min(1.0);
        let aged = |factor: Factor| 1.0 + (factor.number().clamp(CLAMP.0, CLAMP.1) - 1.0) * part;
        self.remember(factors, aged, age.min(HELD))
    }

    /// Adopts factors that an operator has frozen, without changes: frozen factors do not age.
    /// Another law may have computed them.
    pub fn adopt_frozen(&mut self, factors: &Factors) -> Factors {
        self.remember(factors, Factor::number, Duration::ZERO)
    }

    fn remember(&mut self, factors: &Factors, number: impl Fn(Factor) -> f64, silence: Duration) -> Factors {
        let remembered = |(address, factor)| (address, MemberHistory::of(number(factor), Some(silence)));
        self.members = factors.iter().map(remembered).collect();
        self.factors()
    }

    /// The factors to store for the next daemon, including those of members that left recently.
    pub fn snapshot(&self) -> Factors {
        self.members.iter().map(|(address, member)| (*address, Factor::of(member.factor))).collect()
    }

    /// The factors of all present members.
    fn factors(&self) -> Factors {
        let there = self.members.iter().filter(|(_, member)| member.gone.is_none());
        there.map(|(address, member)| (*address, Factor::of(member.factor))).collect()
    }

    /// Resets all factors to 1, because the law is switched off. The acting factors return to 1
    /// while flows end.
    pub fn forget(&mut self, row: &SeenRow, flows: Flows) {
        for member in self.members.values_mut() {
            (member.factor, member.hold, member.is_at_clamp) = (1.0, None, false);
        }
        self.leave(row, TICK);
        self.act(row, flows.life, true);
    }

    /// One tick while an operator has frozen all factors. No factor changes, and members that have
    /// left are forgotten only if there are too many.
    pub fn freeze(&mut self, look: &Look, acts: bool) -> Factors {
        self.leave(&look.row, Duration::ZERO);
        self.act(&look.row, look.flows.life, acts);
        let mut next = Next::default();
        for (address, seen) in look.row.iter() {
            if let Some(remembered) = self.members.get_next_mut(&mut next, address) {
                remembered.on_report(with_utilization(seen));
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

    /// Why factors did not change in the last tick, or may not rise.
    pub fn holds(&self) -> impl Iterator<Item = (SocketAddr, Hold)> + '_ {
        self.members.iter().filter_map(|(address, member)| Some((*address, member.hold?)))
    }

    /// The time in which the loop corrects a difference of utilization: three time constants.
    pub fn settling(&self, flows: Flows) -> Duration {
        let life = flows.life.min(MOST_LIFE);
        // Before the first step, the gain assumes a new report every second.
        let gain = self.gain.unwrap_or_else(|| gain(life, 3 * TICK + life.mul_f64(SMOOTHED_LIVES)));
        (TICK.max(life) * SETTLED).div_f64(gain)
    }

    /// The factors after one tick. `frozen`: the members with a factor that must not change, and
    /// why. `acts`: whether tables follow these factors.
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
        let mut participants: Vec<Participant> = Vec::new();
        let smoothed = life.mul_f64(SMOOTHED_LIVES);
        let part = TICK.as_secs_f64() / (TICK + smoothed).as_secs_f64();
        let (mut slowest, mut unreported) = (Duration::ZERO, 0);
        let usual_life = usual_life(row);
        let mut next = Next::default();
        // A member with weight 0 is treated like an absent member.
        for (&address, seen) in row.iter().filter(|(_, seen)| seen.weight > 0) {
            let Some(remembered) = self.members.get_next_mut(&mut next, &address) else { continue };
            let report = with_utilization(seen);
            remembered.on_report(report);
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
                // The load of this member has been unknown for too long.
                remembered.decay(may_rise);
            }
            let report = report.filter(|report| report.is_fresh(now));
            if silence.is_some() && report.is_none() {
                unreported += 1;
                remembered.hold = Some(Hold::NoReport);
                if silence.is_some_and(|silence| silence > smoothed) {
                    remembered.used = None;
                }
                continue;
            }
            if let Some(ReceivedReport { load, .. }) = report {
                // Errors are added to the utilization, as in gRFC A58, so that a backend that fails
                // every request is treated as fully used, however fast it answers.
                let errors = load.error_share().unwrap_or(0.0).min(1.0);
                let used =
                    (thousandths(load.utilization.unwrap_or(0)) + errors).clamp(UTILIZATION.0, UTILIZATION.1);
                let before = remembered.used.unwrap_or(used);
                remembered.used = Some(before + (used - before) * part);
            }
            slowest = report.map_or(slowest, |report| slowest.max(report.delay(now)));
            let structural = float(seen.weight);
            participants.push(Participant {
                address,
                acting: structural * remembered.acting,
                weight: structural * remembered.factor,
                structural,
                utilization: report.and(remembered.used),
                may_rise,
            });
        }
        let known = participants.iter().filter(|member| member.utilization.is_some()).count();
        if known * 2 >= participants.len() + unreported && known > 0 {
            let gain = gain(life, slowest + smoothed);
            self.gain = Some(gain);
            let mut next = Next::default();
            for (address, factor, is_at_clamp) in step(&participants, gain, life) {
                let member =
                    self.members.get_next_mut(&mut next, &address).expect("every member is remembered");
                (member.factor, member.is_at_clamp) = (factor, is_at_clamp);
            }
        } else {
            for Participant { address, utilization, .. } in &participants {
                let member = self.members.get_mut(address).expect("every member is remembered");
                let hold = if utilization.is_some() { Hold::FewReports } else { Hold::NoReport };
                member.hold = member.hold.or(Some(hold));
            }
        }
        self.factors()
    }

    /// Moves the acting factors towards the factors in force for one tick. A new member begins with
    /// factor 1, which is the mean. A member that returns within four minutes begins with its
    /// earlier factor.
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
        // After members have left, the mean of the remaining factors may differ from 1. All factors
        // are scaled so that the mean is 1 again. The scaling changes no share.
        let scale = if actual > 0.0 { structural / actual } else { 1.0 };
        for remembered in self.members.values_mut() {
            remembered.factor *= scale;
            remembered.acting *= scale;
        }
        for address in new {
            self.members.insert(address, MemberHistory::of(1.0, None));
        }
    }

    /// Notes which members are absent, and forgets members that have been absent for long. A member
    /// that is replaced for a short time, or missing in one list, returns with its factor.
    /// `passed`: the time since the last call, or 0 if this time must not be added to the absence
    /// of members.
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
            // Bound: even if the members change all the time, at most `most_gone` absent members
            // are stored. The bound is so high that no factor is lost if a list is short for a
            // moment.
            since < HELD + DECAY && gone <= most_gone
        });
    }
}

/// The factors of members after one step, and whether each factor is at the lower or upper bound.
fn step(participants: &[Participant], gain: f64, life: Duration) -> Vec<(SocketAddr, f64, bool)> {
    let known = || participants.iter().filter_map(|member| Some((member.acting, member.utilization?)));
    let mean = known().map(|(weight, used)| weight * used).sum::<f64>()
        / known().map(|(weight, _)| weight).sum::<f64>();
    let moved = |member: &Participant| {
        // A member with unknown utilization is treated as if its utilization were the mean.
        let used = member.utilization.unwrap_or(mean);
        member.acting * (1.0 + (gain * (1.0 - used / mean)).clamp(-AHEAD, AHEAD))
    };
    let mut wanted: Vec<f64> = participants.iter().map(moved).collect();
    let caps: Vec<f64> = participants
        .iter()
        .map(|member| if member.may_rise { f64::INFINITY } else { member.weight })
        .collect();
    let before: f64 = participants.iter().map(|member| member.weight).sum();
    let structural: f64 = participants.iter().map(|member| member.structural).sum();
    normalise(&mut wanted, &caps, before);
    // The leak moves factors towards 1. A step starts from the acting factor, which follows the
    // factor within about one lifetime of a flow. So each step applies the leak of one whole
    // lifetime.
    let leak = LEAK.max(life * LEAK_LIVES);
    let leak = TICK.max(life).as_secs_f64() / leak.as_secs_f64();
    let mut clamped = vec![false; participants.len()];
    for ((wanted, member), is_clamped) in wanted.iter_mut().zip(participants).zip(&mut clamped) {
        let own = member.structural * before / structural;
        *wanted += (own - *wanted) * leak;
        *is_clamped = *wanted <= CLAMP.0 * own || *wanted >= CLAMP.1 * own;
        *wanted = wanted.clamp(CLAMP.0 * own, CLAMP.1 * own);
        *wanted = wanted.clamp((1.0 - STEP) * member.weight, (1.0 + STEP) * member.weight);
    }
    normalise(&mut wanted, &caps, before);
    let results = participants.iter().zip(wanted).zip(clamped);
    results
        .map(|((member, wanted), is_clamped)| (member.address, wanted / member.structural, is_clamped))
        .collect()
}

/// A member's report, if it contains a utilization.
fn with_utilization(seen: &MemberObservation) -> Option<ReceivedReport> {
    seen.report.filter(|report| report.load.utilization.is_some())
}

/// Whether too many of the backend's requests, or of this task's flows to the backend, fail. The
/// backend may then not gain weight.
fn fails(seen: &MemberObservation, now: Duration) -> bool {
    // The errors in a report that is too old are ignored.
    let recent = seen.report.filter(|report| now.saturating_sub(report.at) < HELD);
    let reported = recent.and_then(|report| report.load.error_share());
    reported.into_iter().chain(seen.errors).any(|share| share > MOST_ERRORS)
}

/// The median lifetime of flows to the members with a known lifetime, if these are at least half of
/// all members. If their number is even, the result is the lower of the two middle values, because
/// one of two members may hang.
fn usual_life(row: &SeenRow) -> Option<f64> {
    let mut lives: Vec<f64> = row.values().filter_map(|seen| Some(seen.life?.usual)).collect();
    lives.sort_by(f64::total_cmp);
    // If flows are so short that none was open at a tick, the median is unknown.
    let middle = lives.len().checked_sub(1)? / 2;
    (lives.len() * 2 >= row.len()).then(|| lives.get(middle).copied())?.filter(|life| *life > 0.0)
}

/// Scales weights so that they sum to `sum`. Weights that would exceed their caps are set to the
/// caps, and the other weights share the rest in proportion.
fn normalise(weights: &mut [f64], caps: &[f64], sum: f64) {
    let mut is_capped = vec![false; weights.len()];
    // Bound: each iteration except the last caps at least one weight.
    loop {
        let (mut capped, mut free) = (0.0, 0.0);
        for ((weight, cap), is_capped) in weights.iter().zip(caps).zip(&is_capped) {
            if *is_capped { capped += cap } else { free += weight }
        }
        // If all weights are capped, there is nothing left to scale.
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
