//! Feedback: each client gives a member that is used less than the mean of its row more, and one that is used more less, a little at a
//! time, until all that it uses are used alike.
//!
//! With every client doing so this is a damped form of the Sinkhorn iteration on the graph of all their subsets, with the clients' true
//! loads as its row sums, which nobody has to know: it makes utilization even whatever the reason why it is not (machines, neighbours,
//! subsets, clients that are unequal or absent, other jobs). What makes it hold still is in four rules:
//!
//! - It starts from the weights *as they act*. Weights act on new flows alone, so flows that live long show old ones: a law that looks
//!   at its last weights runs ahead of them and swings.
//! - The longer it takes until a change is seen in a report, the smaller its steps ([`gain`]).
//! - A step is linear in the utilization, so that noise hardly moves the mean, and bounded.
//! - Who is frozen, or of whom nothing is known, keeps what it has.
//!
//! Wherever no report has come for long, and slowly in any case, shares go back to the structural ones.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::by_address::{ByAddress, Next};
use super::factor::{Factor, Factors};
use super::flows::Flows;
use super::{Heard, Hold, Look, MemberObservation, SeenRow, TICK, float, thousandths};

/// The least and the most that a member can have, of its structural weight.
const CLAMP: (f64, f64) = (1.0 / 8.0, 8.0);

/// The most that a weight moves in one tick, from what it was.
const STEP: f64 = 0.1;

/// The most that it is away from the weight as it acts: that far ahead of flows that live long.
const AHEAD: f64 = 0.5;

/// A lower utilization counts as the first: next to nothing is no reason to send ten times as much. A higher one as the second: use and
/// waiting together are no more, and one absurd report shall not hide what the others say.
const UTILIZATION: (f64, f64) = (0.1, 2.0);

/// The largest gain: what a weight should be by what it does, at once.
const MOST_GAIN: f64 = 1.0;

/// Utilization is smoothed over this part of the life of a flow: where weights act slowly there is time to look twice.
const SMOOTHED_LIVES: f64 = 0.125;

/// Gain times delay, both by the same clock: from where on it swings, with room.
const STABLE: f64 = 0.3;

/// After so long without a report what a member had is held no more.
const HELD: Duration = Duration::from_secs(180);

/// How long it takes from there to its structural share.
const DECAY: Duration = Duration::from_secs(60);

/// The time constant with which every factor goes to 1 in any case, or so many lives of a flow: nothing is remembered for ever.
const LEAK: Duration = Duration::from_secs(3600);
const LEAK_LIVES: u32 = 100;

/// A flow that lives longer counts as living so long: a day.
const MOST_LIFE: Duration = Duration::from_secs(24 * 3600);

/// From this share of errors on a backend gets no more than it has: what fails fast has little to do.
const MOST_ERRORS: f64 = 0.05;

/// Whose flows live so many times as long as the median of the row's gets no more than it has: who hangs has nothing to do, and flows to
/// it stay open until their clients give up.
const LONG_FLOWS: f64 = 4.0;

/// Members that have left are remembered for a while: at most so many more than there were members at any time.
const MOST_GONE: usize = 64;

/// So many time constants until a difference is a twentieth of what it was.
const SETTLED: u32 = 3;

/// What is remembered of the members of one row.
#[derive(Clone, Debug, Default)]
pub struct Feedback {
    members: ByAddress<MemberHistory>,
    /// The most members that the row has ever had.
    most: usize,
    /// The gain of the last step; `None` before the first.
    gain: Option<f64>,
}

/// What is remembered of a member.
#[derive(Clone, Copy, Debug)]
struct MemberHistory {
    /// Its factor. What is in force is this as of the last table: a step that is worth none is taken all the same, so that small ones
    /// add up.
    factor: f64,
    /// The same as it acts: smoothed over the life of a flow.
    acting: f64,
    /// When its last report was heard, and for how long there has been none; `None` if there never was one.
    heard: Option<Duration>,
    silence: Option<Duration>,
    /// For how long its factor has gone to 1 because of that.
    decayed: Duration,
    /// What its utilization is, smoothed.
    used: Option<f64>,
    /// Why it has learnt nothing, or gets no more.
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

    /// Takes in the newest report, if there is one.
    fn hear(&mut self, heard: Option<Heard>) {
        let at = heard.map(|heard| heard.at);
        if at.is_some() && at != self.heard {
            (self.heard, self.silence, self.decayed) = (at, Some(Duration::ZERO), Duration::ZERO);
        } else if let Some(silence) = &mut self.silence {
            *silence = silence.saturating_add(TICK);
        }
    }

    /// Something else decides what it has. What it is used by then says nothing of when it is learnt from again.
    const fn freeze(&mut self) {
        (self.used, self.hold) = (None, None);
    }

    /// One tick of its way to 1, which it reaches [`DECAY`] after it was held no more.
    fn decay(&mut self, may_rise: bool) {
        self.is_at_clamp = false;
        let left = DECAY.saturating_sub(self.decayed).max(TICK);
        let next = self.factor + (1.0 - self.factor) * (TICK.as_secs_f64() / left.as_secs_f64());
        self.factor = if may_rise { next } else { next.min(self.factor) };
        self.decayed = self.decayed.saturating_add(TICK);
    }
}

/// How strongly a tick answers to what it sees: gain over the larger of tick and life, times the time until a change shows, is at most
/// 0.3.
pub fn gain(life: Duration, delay: Duration) -> f64 {
    (STABLE * TICK.max(life).as_secs_f64() / delay.as_secs_f64()).min(MOST_GAIN)
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
    /// Takes up factors that were in force so long ago, and returns them: nearer to 1 the older they are, up to an hour. It is as if the
    /// last report had come when they were kept, but for what goes to 1 does so as slowly as ever: the tables that an earlier daemon has
    /// left have acted until now.
    pub fn adopt(&mut self, factors: &Factors, age: Duration) -> Factors {
        let part = 1.0 - (age.as_secs_f64() / LEAK.as_secs_f64()).min(1.0);
        let aged = |factor: Factor| 1.0 + (factor.number().clamp(CLAMP.0, CLAMP.1) - 1.0) * part;
        self.remember(factors, aged, age.min(HELD))
    }

    /// Takes up factors that an operator has frozen, as they are: they do not age, and another law may have made them.
    pub fn adopt_frozen(&mut self, factors: &Factors) -> Factors {
        self.remember(factors, Factor::number, Duration::ZERO)
    }

    fn remember(&mut self, factors: &Factors, number: impl Fn(Factor) -> f64, silence: Duration) -> Factors {
        let remembered = |(address, factor)| (address, MemberHistory::of(number(factor), Some(silence)));
        self.members = factors.iter().map(remembered).collect();
        self.factors()
    }

    /// What is kept for the next daemon: of members that have left a while ago as well.
    pub fn learnt(&self) -> Factors {
        self.members.iter().map(|(address, member)| (*address, Factor::of(member.factor))).collect()
    }

    /// Those of all that are in the row.
    fn factors(&self) -> Factors {
        let there = self.members.iter().filter(|(_, member)| member.gone.is_none());
        there.map(|(address, member)| (*address, Factor::of(member.factor))).collect()
    }

    /// Nothing is in force: what was learnt is forgotten, and what acts goes to 1 as flows end.
    pub fn forget(&mut self, row: &SeenRow, flows: Flows) {
        for member in self.members.values_mut() {
            (member.factor, member.hold, member.is_at_clamp) = (1.0, None, false);
        }
        self.leave(row, TICK);
        self.act(row, flows.life, true);
    }

    /// An operator has said that all stay as they are: nothing is learnt, nothing goes to 1, and nobody is forgotten, as far as the bound of
    /// those that have left allows.
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

    /// Whether a member's factor is as small or large as one can be.
    pub fn is_at_clamp(&self, address: SocketAddr) -> bool {
        self.members.get(&address).is_some_and(|member| member.is_at_clamp)
    }

    /// How many members are remembered, those that have left among them.
    #[cfg(test)]
    pub fn remembered(&self) -> usize {
        self.members.len()
    }

    /// Why members have learnt nothing in the last tick, or get no more.
    pub fn holds(&self) -> impl Iterator<Item = (SocketAddr, Hold)> + '_ {
        self.members.iter().filter_map(|(address, member)| Some((*address, member.hold?)))
    }

    /// Until a difference is made good: some time constants of the loop.
    pub fn settling(&self, flows: Flows) -> Duration {
        let life = flows.life.min(MOST_LIFE);
        // With reports of a second that are new, before any has come.
        let gain = self.gain.unwrap_or_else(|| gain(life, 3 * TICK + life.mul_f64(SMOOTHED_LIVES)));
        (TICK.max(life) * SETTLED).div_f64(gain)
    }

    /// What shall be in force after one tick. `frozen`: of whom something else decides. `acts`: whether tables follow this.
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
        // Whoever asks for nothing gets nothing, and is remembered for a while if it had something.
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
                // Nobody knows any more.
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
                // Errors count as utilization, as in gRFC A58: a backend that fails at everything is as good as full, however fast.
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

    /// What there is has acted for one tick more. Whoever is new has the mean of all, and who was there some minutes ago what it had.
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
        // Members that have left have taken their parts along: that of the others is 1 on average again, which changes no share.
        let scale = if actual > 0.0 { structural / actual } else { 1.0 };
        for remembered in self.members.values_mut() {
            remembered.factor *= scale;
            remembered.acting *= scale;
        }
        for address in new {
            self.members.insert(address, MemberHistory::of(1.0, None));
        }
    }

    /// Notes who is not in the row any more, and forgets who has not been there for long: whoever is replaced for a while, or is missing in
    /// one list, comes back with what it had. `passed`: how long it is since the last time, as far as that counts.
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
            // Bound: a list that always has others keeps at most as many as it ever had at once, and some. One that is short for
            // a moment loses nobody.
            since < HELD + DECAY && gone <= most_gone
        });
    }
}

/// The factors of members that learn, after one step, and whether each is as small or large as one can be.
fn step(learnt: &[Learnt], gain: f64, life: Duration) -> Vec<(SocketAddr, f64, bool)> {
    let known = || learnt.iter().filter_map(|member| Some((member.acting, member.utilization?)));
    let mean = known().map(|(weight, used)| weight * used).sum::<f64>()
        / known().map(|(weight, _)| weight).sum::<f64>();
    let moved = |member: &Learnt| {
        // Of whom nothing is known is used as the mean is.
        let used = member.utilization.unwrap_or(mean);
        member.acting * (1.0 + (gain * (1.0 - used / mean)).clamp(-AHEAD, AHEAD))
    };
    let mut wanted: Vec<f64> = learnt.iter().map(moved).collect();
    let caps: Vec<f64> =
        learnt.iter().map(|member| if member.may_rise { f64::INFINITY } else { member.weight }).collect();
    let before: f64 = learnt.iter().map(|member| member.weight).sum();
    let structural: f64 = learnt.iter().map(|member| member.structural).sum();
    normalise(&mut wanted, &caps, before);
    // Of what acts, which follows in a life: so the whole goes by the constant.
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

/// What a member has reported, if it tells how much it is used.
fn told(seen: &MemberObservation) -> Option<Heard> {
    seen.heard.filter(|heard| heard.load.utilization.is_some())
}

/// Whether a backend gets no more than it has: too much of what it does, or of what this task asks of it, fails.
fn fails(seen: &MemberObservation, now: Duration) -> bool {
    // What was said long ago forbids nothing.
    let recent = seen.heard.filter(|heard| now.saturating_sub(heard.at) < HELD);
    let reported = recent.and_then(|heard| heard.load.error_share());
    reported.into_iter().chain(seen.errors).any(|share| share > MOST_ERRORS)
}

/// How long flows to most members live: the median of those of whom it is known, if they are half of the row at least. Of two in the
/// middle the lower one: of two members, one may hang.
fn usual_life(row: &SeenRow) -> Option<f64> {
    let mut lives: Vec<f64> = row.values().filter_map(|seen| Some(seen.life?.usual)).collect();
    lives.sort_by(f64::total_cmp);
    // Where none is ever seen open, nothing can be told.
    let middle = lives.len().checked_sub(1)? / 2;
    (lives.len() * 2 >= row.len()).then(|| lives.get(middle).copied())?.filter(|life| *life > 0.0)
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
        // Where all are capped, nobody gets more, and so nobody less.
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
