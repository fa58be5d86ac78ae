//! When a client task closes idle connections, so that its connection pools spread over all
//! backends again.
//!
//! A backend that returns gets its share of new connects only. A pool with long connections may
//! open no connection for days, so the backend remains without load. If a member has clearly fewer
//! open flows than its share, idle flows of the members furthest above their shares are closed. The
//! pool dials again, and the table determines the backend of the new connection.
//!
//! The kernel programs readmit an ejected member only after a trial, which is a connect. If a pool
//! does not dial, no trial happens. So when the trial of a member is due, one idle flow to another
//! member is closed, and the connect that replaces it is the trial.
//!
//! Call [`Rebalance::tick`] about once per second. After it has returned a closing, call
//! [`Rebalance::handle_outcome`] with the result; until then, `tick` returns nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use crate::service::Task;

/// Younger flows are not closed. The connection that replaces a closed connection is young, so no
/// connection of a client is closed twice within this time.
pub const MIN_AGE: Duration = Duration::from_mins(1);

/// A member is refilled only if it is at least this many flows below its limit
/// ([`RebalanceRules::below_thousandths`]). With a smaller number, random differences in small
/// pools would cause closings.
const MIN_DEFICIT: u128 = 2;

/// How long the next closing waits for the pool to replace the last closed connections. If the pool
/// does not dial again, at most one closing happens in this time.
const REPLACEMENT: Duration = Duration::from_secs(10);

/// How long a member is skipped if it had no flow that could be closed.
const SKIPPED: Duration = Duration::from_secs(30);

/// After a flow was closed for the trial of a member, no other flow is closed for this member's
/// trials in this time. So failing trials close at most one flow in this time, however short the
/// ejections are.
const NEXT_TRIAL: Duration = MIN_AGE;

/// How long a task closes nothing after failed or useless closings.
const PAUSE: Duration = Duration::from_mins(10);

/// A refilled member gains one flow after a certain number of closings, on average. If the refilled
/// members gain no flow after `FUTILE` times as many closings, the closings are treated as useless.
/// The number is large, because the cursors of many CPUs may all pass over a member for long.
const FUTILE: u128 = 30;

/// A rate of closings. In text, it is a number per second, minute or hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClosingRate {
    per_hour: u32,
}

impl ClosingRate {
    /// One per hour.
    pub const MIN: Self = Self { per_hour: 1 };
    /// 1,000 per second.
    pub const MAX: Self = Self::per_second(1_000);

    /// Each unit, with the number of its units in an hour.
    const UNITS: [(char, u32); 3] = [('s', 3_600), ('m', 60), ('h', 1)];

    /// This number of closings per second.
    pub const fn per_second(number: u32) -> Self {
        Self { per_hour: number * 3_600 }
    }

    /// The closings per second of each of `tasks` tasks, which share the rate equally.
    pub fn of_task(self, tasks: u32) -> f64 {
        f64::from(self.per_hour) / 3_600.0 / f64::from(tasks.max(1))
    }
}

impl fmt::Display for ClosingRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = Self::UNITS.into_iter().find(|(_, units)| self.per_hour.is_multiple_of(*units));
        let (unit, units) = whole.unwrap_or(('h', 1));
        write!(f, "{}/{unit}", self.per_hour / units)
    }
}

impl FromStr for ClosingRate {
    type Err = ();

    /// Parses a rate such as `1/s`, `30/m` or `6/h`.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (number, unit) = text.split_once('/').ok_or(())?;
        let (_, units) = Self::UNITS.into_iter().find(|(name, _)| unit == name.to_string()).ok_or(())?;
        if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(());
        }
        let per_hour = number.parse::<u32>().ok().and_then(|number| number.checked_mul(units)).ok_or(())?;
        let rate = Self { per_hour };
        if (Self::MIN..=Self::MAX).contains(&rate) { Ok(rate) } else { Err(()) }
    }
}

/// The configuration of rebalancing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RebalanceRules {
    /// The highest rate of closings for the whole job.
    pub rate: ClosingRate,
    /// Only a connection that has been idle for this time is closed.
    pub idle: Duration,
    /// The limit of a member as a part of its share, in thousandths, at most 1000. Members below
    /// their limits are refilled.
    pub below_thousandths: u32,
}

impl RebalanceRules {
    /// The defaults of the configuration.
    pub const DEFAULT: Self =
        Self { rate: ClosingRate::per_second(1), idle: Duration::from_secs(5), below_thousandths: 800 };
}

/// A member of a service's table, and one client task's flows to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberFlows {
    /// The member's address.
    pub address: SocketAddr,
    /// The member's part of new connects, relative to the other members: the number of its entries
    /// in the table.
    pub entries: u32,
    /// The task's open flows to the member.
    pub open: u32,
    /// Whether the member can gain flows.
    pub state: MemberState,
    /// Whether the member has reached `active_limit`.
    pub is_at_limit: bool,
}

/// Whether a member can gain flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberState {
    /// Connects may choose the member, and it is not in slow start.
    Warm,
    /// The member is ejected, and the time of the ejection is over: a connect may be its trial.
    TrialDue {
        /// The number of trials that the member has had.
        trials: u64,
    },
    /// The member is unavailable for another reason, or in slow start. It neither gains nor loses
    /// flows.
    Held,
}

/// Connections to close now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closing {
    /// The member to which connections are closed.
    pub address: SocketAddr,
    /// The largest number of connections to close, at least 1.
    pub most: u32,
    /// The ejected member for which the next connect must be the trial. With a trial, `most` is 1.
    pub trial: Option<SocketAddr>,
}

/// The result of a closing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClosingOutcome {
    /// This many connections were closed; with 0, none was idle and old enough.
    Closed(u32),
    /// The closing was not attempted, because other closings were in progress.
    Postponed,
    /// Connections cannot be closed.
    Failed,
}

named! {
    /// The present activity of rebalancing, or the reason why it closes nothing.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum RebalanceState {
        /// No member has so few flows that flows of other members are closed.
        #[default]
        Even = "even",
        /// The service is in panic.
        Panic = "panic",
        /// Flows are closed at the permitted rate, so that members gain flows.
        Refilling = "refilling",
        /// A flow is closed, so that its replacement can be the trial of an ejected member.
        Trial = "trial",
        /// A flow was closed for the trial of an ejected member, and no other flow may be closed
        /// yet.
        AwaitsTrial = "awaits-trial",
        /// The pool has not replaced the flows that were closed last.
        NotDialled = "not-dialled",
        /// No flow of the members above their shares is idle and old enough.
        NothingIdle = "nothing-idle",
        /// The last closing has failed.
        Failed = "failed",
        /// Many flows were closed, and the members below their shares have gained none.
        NoEffect = "no-effect",
    }
}

/// A member with so few flows that flows of other members are closed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShortMember {
    /// The member's address.
    pub address: SocketAddr,
    /// The task's open flows to the member.
    pub open: u32,
    /// The member's share of the task's open flows, in flows.
    pub share: f64,
}

/// The result of the last tick, for display.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RebalanceView {
    /// The activity of rebalancing, or the reason why it closes nothing.
    pub state: RebalanceState,
    /// The members that should gain flows, or the ejected member with a due trial.
    pub short: Vec<ShortMember>,
    /// When the task tries again, if it waits until a certain time.
    pub retry_at: Option<Duration>,
}

/// Decides which idle connections one client task closes for one service.
#[derive(Clone, Debug)]
pub struct Rebalance {
    rules: RebalanceRules,
    task: Task,
    /// The closings that the rate permits now. Their number grows only while a member is refilled,
    /// or while a flow should be closed for a trial.
    permits: f64,
    /// The time of the last tick.
    ticked: Option<Duration>,
    /// The refilled members. A member is refilled from the time when it is far below its limit
    /// until it reaches the limit.
    refilled: BTreeSet<SocketAddr>,
    /// The largest number of open flows that the refilled members have had together, and the number
    /// of closings since it was reached.
    progress: (u64, u64),
    /// The closing for which [`Rebalance::handle_outcome`] has not been called yet.
    pending: Option<PendingClosing>,
    /// The number of open flows before the last closing, and a time limit. The next closing waits
    /// until the pool has that number of open flows again, or until the time limit.
    awaited: Option<(u64, Duration)>,
    /// The members without a flow that can be closed, each with the time until which it is skipped.
    skipped: BTreeMap<SocketAddr, Duration>,
    /// The last closing for a trial of each member.
    tried: BTreeMap<SocketAddr, LastTrial>,
    /// Why the task pauses, and until when.
    pause: (RebalanceState, Duration),
    view: RebalanceView,
}

/// A closing for the trial of a member.
#[derive(Clone, Copy, Debug)]
struct LastTrial {
    /// The number of the member's trials before the closing.
    trials: u64,
    /// The time until which no other flow is closed for trials of the member.
    until: Duration,
}

impl Rebalance {
    /// Starts without earlier closings.
    pub fn new(rules: RebalanceRules, task: Task) -> Self {
        Self {
            rules,
            task,
            permits: Self::phase(task),
            ticked: None,
            refilled: BTreeSet::new(),
            progress: (0, 0),
            pending: None,
            awaited: None,
            skipped: BTreeMap::new(),
            tried: BTreeMap::new(),
            pause: (RebalanceState::Even, Duration::ZERO),
            view: RebalanceView::default(),
        }
    }

    /// The permits with which a task begins. They differ between tasks, so that the tasks of a job
    /// do not all close at the same time.
    fn phase(task: Task) -> f64 {
        f64::from(task.index) / f64::from(task.count.max(1))
    }

    /// The configuration of rebalancing in use.
    pub const fn rules(&self) -> RebalanceRules {
        self.rules
    }

    /// The task for which these decisions are made.
    pub const fn task(&self) -> Task {
        self.task
    }

    /// Whether any member is refilled, as of the last tick.
    pub fn is_refilling(&self) -> bool {
        !self.refilled.is_empty()
    }

    /// The activity of rebalancing at the last tick, or the reason why it closes nothing.
    pub const fn view(&self) -> &RebalanceView {
        &self.view
    }

    /// Decides whether to close connections now, and to which member. Each address may occur only
    /// once.
    pub fn tick(&mut self, now: Duration, members: &[MemberFlows], is_panic: bool) -> Option<Closing> {
        let passed = now.saturating_sub(self.ticked.replace(now).unwrap_or(now));
        let pool = PoolFlows::of(members, None);
        self.update_refilled(&pool, is_panic);
        self.skipped.retain(|_, until| *until > now);
        self.update_tried(now, members);
        let trial = if is_panic { None } else { self.due_trial(members) };
        let wants_trial = trial.as_ref().is_some_and(|due| due.tried.is_none());
        if self.refilled.is_empty() && !wants_trial {
            self.permits = self.permits.min(Self::phase(self.task));
            self.awaited = None;
            self.view = match trial {
                Some(due) => RebalanceView {
                    state: RebalanceState::AwaitsTrial,
                    short: vec![due.pool.short(due.member)],
                    // If the trial has not begun, the wait has no time limit.
                    retry_at: due.tried.filter(|tried| tried.trials != due.trials).map(|tried| tried.until),
                },
                None if is_panic => RebalanceView { state: RebalanceState::Panic, ..Default::default() },
                None => RebalanceView::default(),
            };
            return None;
        }
        self.refill_permits(passed);
        let trial = trial.filter(|_| wants_trial);
        self.view = RebalanceView { state: RebalanceState::Refilling, short: Vec::new(), retry_at: None };
        if let Some(due) = &trial {
            self.view.state = RebalanceState::Trial;
            self.view.short.push(due.pool.short(due.member));
        } else {
            let refilled = pool.members.iter().filter(|member| self.refilled.contains(&member.address));
            self.view.short.extend(refilled.map(|member| pool.short(member)));
        }
        match self.decide(now, &pool, trial.as_ref()) {
            Ok(closing) => {
                let closing = closing?;
                self.permits -= f64::from(closing.most);
                let trials = trial.map_or(0, |due| due.trials);
                self.pending = Some(PendingClosing { closing, open: pool.open, trials });
                Some(closing)
            }
            Err((state, retry_at)) => {
                (self.view.state, self.view.retry_at) = (state, Some(retry_at));
                None
            }
        }
    }

    /// The next closing, if the rate permits a closing and no earlier closing is in progress.
    ///
    /// # Errors
    /// Why nothing can be closed, and until when.
    fn decide(
        &mut self,
        now: Duration,
        pool: &PoolFlows<'_>,
        trial: Option<&DueTrial<'_>>,
    ) -> Result<Option<Closing>, (RebalanceState, Duration)> {
        if self.pending.is_some() {
            return Ok(None);
        }
        if self.pause.1 > now {
            return Err(self.pause);
        }
        if let Some((open, until)) = self.awaited
            && pool.open < open
            && until > now
        {
            return Err((RebalanceState::NotDialled, until));
        }
        if let Some(due) = trial {
            let donor = self.donor(&due.pool)?;
            let closing = Closing { address: donor.address, most: 1, trial: Some(due.member.address) };
            return Ok((floor(self.permits) > 0).then_some(closing));
        }
        if self.is_futile(pool) {
            self.pause = (RebalanceState::NoEffect, now + PAUSE);
            self.progress.1 = 0;
            return Err(self.pause);
        }
        let donor = self.donor(pool)?;
        let refilled = pool.members.iter().filter(|member| self.refilled.contains(&member.address));
        let wanted =
            |member: &&MemberFlows| pool.share(member).div_ceil(pool.entries) - u128::from(member.open);
        let wanted: u128 = refilled.map(wanted).sum();
        let most = pool.excess(donor).unsigned_abs().div_ceil(pool.entries).min(wanted);
        let most = u32::try_from(most).unwrap_or(u32::MAX).min(floor(self.permits));
        Ok((most > 0).then_some(Closing { address: donor.address, most, trial: None }))
    }

    /// The member furthest above its share, among those that may have idle flows.
    ///
    /// # Errors
    /// If there is no such member; the error contains the time of the next attempt.
    fn donor<'m>(&self, pool: &PoolFlows<'m>) -> Result<&'m MemberFlows, (RebalanceState, Duration)> {
        let is_donor = |member: &&MemberFlows| {
            pool.excess(member) > 0
                && !self.refilled.contains(&member.address)
                && !self.skipped.contains_key(&member.address)
        };
        let donors = pool.members.iter().copied().filter(is_donor);
        let donor = donors.max_by_key(|member| (pool.excess(member), std::cmp::Reverse(member.address)));
        let until = self.skipped.values().min();
        donor.ok_or((RebalanceState::NothingIdle, until.copied().unwrap_or_default()))
    }

    /// Handles the result of the closing that [`Self::tick`] returned last.
    pub fn handle_outcome(&mut self, now: Duration, outcome: ClosingOutcome) {
        let Some(PendingClosing { closing, open, trials }) = self.pending.take() else { return };
        let closed = match outcome {
            ClosingOutcome::Closed(closed) => closed.min(closing.most),
            ClosingOutcome::Postponed | ClosingOutcome::Failed => 0,
        };
        self.permits += f64::from(closing.most - closed);
        match closing.trial {
            Some(address) if closed > 0 => {
                self.tried.insert(address, LastTrial { trials, until: now + NEXT_TRIAL });
            }
            Some(_) => {}
            None => self.progress.1 += u64::from(closed),
        }
        match outcome {
            ClosingOutcome::Closed(0) => {
                self.skipped.insert(closing.address, now + SKIPPED);
            }
            ClosingOutcome::Closed(_) => self.awaited = Some((open, now + REPLACEMENT)),
            ClosingOutcome::Postponed => {}
            ClosingOutcome::Failed => self.pause = (RebalanceState::Failed, now + PAUSE),
        }
    }

    /// Updates the set of refilled members.
    fn update_refilled(&mut self, pool: &PoolFlows<'_>, is_panic: bool) {
        let is_refilled = |member: &&&MemberFlows| {
            // A member remains refilled until it has reached the limit, even if it is no longer far
            // below the limit. In small pools, [`MIN_DEFICIT`] flows are a large part of the share.
            let is_below = if self.refilled.contains(&member.address) {
                u128::from(member.open) * pool.entries * 1000 < self.limit(pool, member)
            } else {
                self.is_far_below(pool, member)
            };
            is_below && !member.is_at_limit
        };
        let refilled: BTreeSet<SocketAddr> = if is_panic {
            BTreeSet::new()
        } else {
            pool.members.iter().filter(is_refilled).map(|member| member.address).collect()
        };
        let open: u64 = pool.sum(|member| refilled.contains(&member.address), |member| member.open);
        if refilled != self.refilled || open > self.progress.0 {
            self.progress = (open, 0);
        }
        self.refilled = refilled;
    }

    fn refill_permits(&mut self, passed: Duration) {
        let rate = self.rules.rate.of_task(self.task.count);
        // The time between ticks is about a second, so more permits would allow a burst above the
        // rate.
        self.permits = (self.permits + rate * passed.as_secs_f64()).min(rate.max(1.0));
    }

    /// Whether the refilled members have gained no flow after many closings.
    fn is_futile(&self, pool: &PoolFlows<'_>) -> bool {
        let entries = pool.sum(|member| self.refilled.contains(&member.address), |member| member.entries);
        u128::from(self.progress.1) * u128::from(entries) > FUTILE * pool.entries
    }

    /// The limit below which a member is refilled, in thousandths of a flow, times the sum of
    /// entries.
    fn limit(&self, pool: &PoolFlows<'_>, member: &MemberFlows) -> u128 {
        pool.share(member) * u128::from(self.rules.below_thousandths)
    }

    fn is_far_below(&self, pool: &PoolFlows<'_>, member: &MemberFlows) -> bool {
        (u128::from(member.open) + MIN_DEFICIT) * pool.entries * 1000 <= self.limit(pool, member)
    }

    /// When another closing is allowed, forgets the earlier closings for trials that have begun and
    /// for members that have left.
    fn update_tried(&mut self, now: Duration, members: &[MemberFlows]) {
        let has_begun = |tried: &LastTrial, state| match state {
            MemberState::TrialDue { trials } => trials != tried.trials,
            MemberState::Warm => true,
            // The trial may be running. The decision waits for its result.
            MemberState::Held => false,
        };
        self.tried.retain(|address, tried| {
            let member = members.iter().find(|member| member.address == *address);
            tried.until > now || member.is_some_and(|member| !has_begun(tried, member.state))
        });
    }

    /// The ejected member that has a due trial and would be far below its limit if it were
    /// readmitted. If there are several, a member for which a flow may be closed now is preferred.
    fn due_trial<'m>(&self, members: &'m [MemberFlows]) -> Option<DueTrial<'m>> {
        let due = members.iter().filter_map(|member| {
            let MemberState::TrialDue { trials } = member.state else { return None };
            let tried = self.tried.get(&member.address).copied();
            let pool = PoolFlows::of(members, Some(member.address));
            let is_wanted = !member.is_at_limit && member.entries > 0 && self.is_far_below(&pool, member);
            is_wanted.then_some(DueTrial { pool, member, trials, tried })
        });
        due.min_by_key(|due| due.tried.is_some())
    }
}

/// A closing without a known outcome.
#[derive(Clone, Copy, Debug)]
struct PendingClosing {
    closing: Closing,
    /// The number of open flows before the closing.
    open: u64,
    /// For a closing before a trial: the number of the member's earlier trials.
    trials: u64,
}

/// An ejected member with a due trial.
struct DueTrial<'m> {
    /// The pool that results if the member is readmitted.
    pool: PoolFlows<'m>,
    member: &'m MemberFlows,
    /// The number of trials that the member has had.
    trials: u64,
    /// The last closing for the member's trial, if that closing forbids another one.
    tried: Option<LastTrial>,
}

/// The members among which the flows of a pool are divided, and their sums.
struct PoolFlows<'m> {
    members: Vec<&'m MemberFlows>,
    /// The sum of the members' table entries, at least 1.
    entries: u128,
    /// The sum of the members' open flows.
    open: u64,
}

impl<'m> PoolFlows<'m> {
    /// The warm members, and the ejected member `readmitted` as if it were warm.
    fn of(members: &'m [MemberFlows], readmitted: Option<SocketAddr>) -> Self {
        let takes_part = |member: &&MemberFlows| {
            (member.state == MemberState::Warm || Some(member.address) == readmitted) && member.entries > 0
        };
        let members: Vec<_> = members.iter().filter(takes_part).collect();
        let mut pool = Self { members, entries: 1, open: 0 };
        pool.entries = u128::from(pool.sum(|_| true, |member| member.entries).max(1));
        pool.open = pool.sum(|_| true, |member| member.open);
        pool
    }

    fn sum(&self, is_meant: impl Fn(&MemberFlows) -> bool, number: impl Fn(&MemberFlows) -> u32) -> u64 {
        let meant = self.members.iter().filter(|member| is_meant(member));
        meant.map(|member| u64::from(number(member))).sum()
    }

    /// The share of a member in flows, times the sum of entries.
    fn share(&self, member: &MemberFlows) -> u128 {
        u128::from(self.open) * u128::from(member.entries)
    }

    /// How many flows a member has above its share, times the sum of entries.
    fn excess(&self, member: &MemberFlows) -> i128 {
        let open = u128::from(member.open) * self.entries;
        open.cast_signed() - self.share(member).cast_signed()
    }

    #[expect(clippy::cast_precision_loss, reason = "a number of flows for people")]
    fn short(&self, member: &MemberFlows) -> ShortMember {
        let share = self.share(member) as f64 / self.entries as f64;
        ShortMember { address: member.address, open: member.open, share }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "permits are from 0 to 1000")]
fn floor(permits: f64) -> u32 {
    // The sum of many small steps may lie just below a whole number.
    (permits + 1e-6).max(0.0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::subset::random::SplitMix64;

    const SECOND: Duration = Duration::from_secs(1);
    const ALONE: Task = Task { index: 0, count: 1 };

    fn address(number: usize) -> SocketAddr {
        ([10, 0, 0, u8::try_from(number).unwrap()], 80).into()
    }

    /// Warm members with equal parts and these open flows.
    fn members(open: &[u32]) -> Vec<MemberFlows> {
        let member = |(number, open): (usize, &u32)| MemberFlows {
            address: address(number),
            entries: 4,
            open: *open,
            state: MemberState::Warm,
            is_at_limit: false,
        };
        open.iter().enumerate().map(member).collect()
    }

    /// The closings of a task that ticks each second with the same members. All closings have this
    /// outcome.
    fn closings(
        rebalance: &mut Rebalance,
        seconds: std::ops::Range<u64>,
        members: &[MemberFlows],
        outcome: ClosingOutcome,
    ) -> Vec<(u64, usize, u32)> {
        let mut closings = Vec::new();
        for second in seconds {
            let now = Duration::from_secs(second);
            if let Some(Closing { address: SocketAddr::V4(at), most, .. }) =
                rebalance.tick(now, members, false)
            {
                closings.push((second, usize::from(at.ip().octets()[3]), most));
                rebalance.handle_outcome(now, outcome);
            }
        }
        closings
    }

    fn first(rules: RebalanceRules, members: &[MemberFlows]) -> Option<(usize, u32)> {
        let mut rebalance = Rebalance::new(rules, ALONE);
        closings(&mut rebalance, 0..3, members, ClosingOutcome::Closed(1)).first().map(|(_, at, n)| (*at, *n))
    }

    const FAST: RebalanceRules =
        RebalanceRules { rate: ClosingRate::per_second(100), ..RebalanceRules::DEFAULT };

    #[test]
    fn a_rate_is_written_per_second_minute_or_hour() {
        for text in ["1/s", "1000/s", "1/m", "90/m", "1/h", "7/h"] {
            assert_eq!(text.parse::<ClosingRate>().map(|rate| rate.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("60/m".parse(), Ok(ClosingRate::per_second(1)));
        assert!((ClosingRate::per_second(1).of_task(20) - 0.05).abs() < 1e-9);
        for text in ["", "1", "/s", "0/s", "1001/s", "+1/s", "-1/s", "1/d", "1.5/s", "1/s ", "9999999999/h"] {
            assert_eq!(text.parse::<ClosingRate>(), Err(()), "{text}");
        }
    }

    #[test]
    fn a_member_is_refilled_from_two_below_its_limit_until_it_reaches_the_limit() {
        // The share is 6.25 and the limit 5.
        let mut rebalance = Rebalance::new(FAST, ALONE);
        let mut is_closing = |second, open: [u32; 8]| {
            assert_eq!(open.iter().sum::<u32>(), 50);
            let closing = rebalance.tick(second * SECOND, &members(&open), false);
            rebalance.handle_outcome(second * SECOND, ClosingOutcome::Closed(1));
            closing.is_some()
        };
        assert!(!is_closing(0, [4, 6, 6, 6, 7, 7, 7, 7]));
        assert!(is_closing(2, [3, 6, 6, 7, 7, 7, 7, 7]));
        assert!(is_closing(3, [4, 6, 6, 6, 7, 7, 7, 7]), "refilling has begun");
        assert!(!is_closing(4, [5, 6, 6, 6, 6, 7, 7, 7]));
        assert!(!is_closing(5, [4, 6, 6, 6, 7, 7, 7, 7]), "refilling has ended");
    }

    #[test]
    fn the_member_furthest_above_its_share_loses_flows_and_stays_within_one_of_its_share() {
        let unequal = |open: &[u32], entries: &[u32]| {
            let mut members = members(open);
            members.iter_mut().zip(entries).for_each(|(member, entries)| member.entries = *entries);
            members
        };
        // The shares are 40, 20, 10 and 10.
        assert_eq!(first(FAST, &unequal(&[44, 26, 10, 0], &[4, 2, 1, 1])), Some((1, 6)));
        assert_eq!(first(FAST, &unequal(&[48, 22, 10, 0], &[4, 2, 1, 1])), Some((0, 8)));
        // If more flows were closed than the refilled member lacks, it could exceed its share.
        assert_eq!(first(FAST, &members(&[33, 14, 17, 16])), Some((0, 6)));
        assert_eq!(first(FAST, &members(&[50, 50, 39, 61])), None);
        assert_eq!(first(FAST, &members(&[50, 50, 38, 62])), Some((3, 12)));
    }

    #[test]
    fn a_small_or_even_pool_closes_nothing() {
        let mut rng = SplitMix64::new(20_261_128);
        for flows in 0..20 {
            for _ in 0..200 {
                let mut open = [0; 8];
                (0..flows).for_each(|_| open[usize::try_from(rng.below(8)).unwrap()] += 1);
                assert_eq!(first(FAST, &members(&open)), None, "{open:?}");
            }
        }
        for flows in 0..500 {
            let open: Vec<u32> = (0..8).map(|member| (flows + member) / 8).collect();
            assert_eq!(first(FAST, &members(&open)), None, "{open:?}");
        }
        assert_eq!(first(FAST, &[]), None);
        assert_eq!(first(FAST, &members(&[9])), None);
    }

    #[test]
    fn members_that_cannot_gain_flows_are_not_refilled() {
        let (open, refilled) = ([0, 10, 10, 10], Some((1, 3)));
        assert_eq!(first(FAST, &members(&open)), refilled);
        let changed = |change: fn(&mut MemberFlows)| {
            let mut members = members(&open);
            change(&mut members[0]);
            first(FAST, &members)
        };
        assert_eq!(changed(|member| member.state = MemberState::Held), None);
        assert_eq!(changed(|member| member.is_at_limit = true), None);
        assert_eq!(changed(|member| member.entries = 0), None);
        let mut rebalance = Rebalance::new(FAST, ALONE);
        for second in 0..10 {
            assert_eq!(
                rebalance.tick(second * SECOND, &members(&open), true),
                None,
                "the service is in panic"
            );
        }
    }

    #[test]
    fn the_tasks_of_a_job_share_its_rate_and_do_not_close_together() {
        let rules = RebalanceRules { rate: ClosingRate::per_second(2), ..FAST };
        // One task alone may close two flows per second; no permits are saved while all members
        // have their shares of flows.
        let mut rebalance = Rebalance::new(rules, ALONE);
        let even = members(&[6; 8]);
        assert_eq!(closings(&mut rebalance, 0..100, &even, ClosingOutcome::Closed(1)), []);
        let uneven = members(&[0, 1, 8, 8, 8, 8, 8, 9]);
        let of_task = closings(&mut rebalance, 100..111, &uneven, ClosingOutcome::Closed(2));
        assert_eq!(of_task.iter().map(|(_, _, most)| most).sum::<u32>(), 22, "{of_task:?}");
        let mut per_second = BTreeMap::<u64, u32>::new();
        for index in 0..20 {
            let mut rebalance = Rebalance::new(rules, Task { index, count: 20 });
            let of_task = closings(&mut rebalance, 0..101, &uneven, ClosingOutcome::Closed(1));
            assert_eq!(of_task.len(), 10, "task {index}: {of_task:?}");
            of_task.iter().for_each(|(second, _, most)| *per_second.entry(*second).or_default() += most);
        }
        assert!(per_second.values().all(|closings| *closings == 2), "{per_second:?}");
    }

    #[test]
    fn a_member_without_idle_flows_is_skipped_for_a_while() {
        let mut rebalance = Rebalance::new(FAST, ALONE);
        let uneven = members(&[0, 12, 11, 1]);
        let tried = closings(&mut rebalance, 0..65, &uneven, ClosingOutcome::Closed(0));
        let expected = [(1, 1), (2, 2), (31, 1), (32, 2), (61, 1), (62, 2)];
        assert_eq!(tried.iter().map(|(second, at, _)| (*second, *at)).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn closings_wait_until_the_pool_has_dialled_again() {
        let mut rebalance = Rebalance::new(FAST, ALONE);
        assert_eq!(rebalance.tick(SECOND, &members(&[0, 10, 10, 10]), false), None);
        let closing = rebalance.tick(2 * SECOND, &members(&[0, 10, 10, 10]), false);
        assert_eq!(closing, Some(Closing { address: address(1), most: 3, trial: None }));
        let (fewer, same) = (members(&[0, 8, 10, 10]), members(&[0, 9, 11, 10]));
        assert_eq!(rebalance.tick(3 * SECOND, &same, false), None, "the outcome of the closing is unknown");
        rebalance.handle_outcome(3 * SECOND, ClosingOutcome::Closed(2));
        for second in 4..13 {
            assert_eq!(rebalance.tick(second * SECOND, &fewer, false), None);
        }
        assert!(
            rebalance.clone().tick(13 * SECOND, &fewer, false).is_some(),
            "after ten seconds, a closing need not wait for the pool"
        );
        assert!(rebalance.tick(12 * SECOND, &same, false).is_some());
    }

    #[test]
    fn closings_that_fail_or_do_not_help_stop_for_a_while() {
        let uneven = members(&[0, 12, 12, 12]);
        let seconds = |outcome| {
            let mut rebalance = Rebalance::new(RebalanceRules::DEFAULT, ALONE);
            let closings = closings(&mut rebalance, 0..800, &uneven, outcome);
            closings.into_iter().map(|(second, ..)| second).collect::<Vec<_>>()
        };
        assert_eq!(seconds(ClosingOutcome::Failed), [1, 601]);
        // A member with a quarter of the table gets one of four new connections.
        let useless = seconds(ClosingOutcome::Closed(1));
        assert_eq!((useless[..121].to_vec(), useless[121]), ((1..=121).collect(), 722));
        assert_eq!(seconds(ClosingOutcome::Postponed).len(), 799, "each postponed closing is tried again");
    }

    /// The state of an ejected member with a due trial.
    const DUE: MemberState = MemberState::TrialDue { trials: 0 };

    /// A pool with a member that is ejected and has no flows.
    fn with_ejected(state: MemberState) -> Vec<MemberFlows> {
        let mut members = members(&[0, 9, 8, 7]);
        members[0].state = state;
        members
    }

    #[test]
    fn one_flow_is_closed_for_the_trial_of_an_ejected_member() {
        let first = |members: &[MemberFlows], is_panic| {
            let mut rebalance = Rebalance::new(FAST, ALONE);
            assert_eq!(rebalance.tick(SECOND, members, is_panic), None);
            rebalance.tick(2 * SECOND, members, is_panic)
        };
        let due = with_ejected(DUE);
        let closing = Closing { address: address(1), most: 1, trial: Some(address(0)) };
        assert_eq!(first(&due, false), Some(closing));
        assert_eq!(first(&due, true), None, "the service is in panic");
        assert_eq!(first(&with_ejected(MemberState::Held), false), None, "the trial is not due yet");
        // The share is 6 and the limit is 4.8. The member must be 2 flows below the limit, as for
        // refilling.
        for (open, is_closed) in [([2, 8, 7, 7], true), ([3, 7, 7, 7], false)] {
            let mut members = members(&open);
            members[0].state = DUE;
            assert_eq!(first(&members, false).is_some(), is_closed, "{open:?}");
        }
        for change in
            [|one: &mut MemberFlows| one.is_at_limit = true, |one: &mut MemberFlows| one.entries = 0]
        {
            let mut members = due.clone();
            change(&mut members[0]);
            assert_eq!(first(&members, false), None);
        }
        // A trial comes before refilling, and the refilled member loses nothing.
        let mut members = members(&[0, 1, 20, 19]);
        members[0].state = DUE;
        assert_eq!(first(&members, false), Some(Closing { address: address(2), ..closing }));
    }

    #[test]
    fn no_second_flow_is_closed_for_a_trial_that_has_not_begun() {
        let mut rebalance = Rebalance::new(FAST, ALONE);
        let due = with_ejected(DUE);
        assert_eq!(closings(&mut rebalance, 0..10_000, &due, ClosingOutcome::Closed(1)), [(1, 1, 1)]);
        let short = ShortMember { address: address(0), open: 0, share: 6.0 };
        let view = RebalanceView { state: RebalanceState::AwaitsTrial, short: vec![short], retry_at: None };
        assert_eq!(*rebalance.view(), view);
        // If no flow could be closed, no trial was attempted: each of the donors is tried again.
        let mut rebalance = Rebalance::new(FAST, ALONE);
        let tried = closings(&mut rebalance, 0..62, &due, ClosingOutcome::Closed(0));
        assert_eq!(tried, [(1, 1, 1), (2, 2, 1), (3, 3, 1), (31, 1, 1), (32, 2, 1), (33, 3, 1), (61, 1, 1)]);
    }

    #[test]
    fn trials_that_fail_at_once_close_at_most_one_flow_per_minute() {
        let mut rebalance = Rebalance::new(FAST, ALONE);
        let mut closed = Vec::new();
        let mut trials = 0;
        for second in 0..3_600 {
            let now = second * SECOND;
            // The trial fails, and the next ejection is over, before the next tick.
            if rebalance.tick(now, &with_ejected(MemberState::TrialDue { trials }), false).is_some() {
                rebalance.handle_outcome(now, ClosingOutcome::Closed(1));
                trials += 1;
                closed.push(second);
            }
        }
        assert_eq!(closed, (0..60).map(|number| 1 + 60 * number).collect::<Vec<_>>());
        assert_eq!(rebalance.view().retry_at, Some(3_601 * SECOND));
    }

    #[test]
    fn a_readmitted_member_is_refilled() {
        let mut rebalance = Rebalance::new(FAST, ALONE);
        assert_eq!(
            closings(&mut rebalance, 0..5, &with_ejected(DUE), ClosingOutcome::Closed(1)),
            [(1, 1, 1)]
        );
        let mut readmitted = with_ejected(MemberState::Warm);
        (readmitted[0].open, readmitted[1].open) = (1, 8);
        assert_eq!(closings(&mut rebalance, 5..6, &readmitted, ClosingOutcome::Closed(2)), [(5, 1, 2)]);
        assert_eq!(rebalance.view().state, RebalanceState::Refilling);
    }

    #[test]
    fn the_view_has_the_reason_why_nothing_is_closed() {
        let view = |members: &[MemberFlows], outcome, seconds: u64| {
            let mut rebalance = Rebalance::new(FAST, ALONE);
            closings(&mut rebalance, 0..seconds, members, outcome);
            let RebalanceView { state, short, retry_at } = rebalance.view().clone();
            (state, short.len(), retry_at)
        };
        let uneven = members(&[0, 12, 11, 1]);
        let closed = ClosingOutcome::Closed(1);
        assert_eq!(view(&members(&[6; 4]), closed, 5), (RebalanceState::Even, 0, None));
        assert_eq!(view(&uneven, ClosingOutcome::Postponed, 5), (RebalanceState::Refilling, 2, None));
        let idle = ClosingOutcome::Closed(0);
        assert_eq!(view(&uneven, idle, 5), (RebalanceState::NothingIdle, 2, Some(31 * SECOND)));
        assert_eq!(view(&uneven, ClosingOutcome::Failed, 5), (RebalanceState::Failed, 2, Some(601 * SECOND)));
        let (state, _, retry_at) = view(&members(&[0, 12, 12, 12]), closed, 700);
        assert_eq!((state, retry_at > Some(600 * SECOND)), (RebalanceState::NoEffect, true));
        let mut rebalance = Rebalance::new(FAST, ALONE);
        closings(&mut rebalance, 0..2, &uneven, closed);
        rebalance.tick(2 * SECOND, &members(&[0, 11, 11, 1]), false);
        let RebalanceView { state, retry_at, .. } = *rebalance.view();
        assert_eq!((state, retry_at), (RebalanceState::NotDialled, Some(11 * SECOND)));
        rebalance.tick(3 * SECOND, &uneven, true);
        assert_eq!(rebalance.view().state, RebalanceState::Panic);
    }
}
