//! The part of its machine that a backend may use, by the rules of Linux (`cpu.max`; CFS bandwidth
//! control, `Documentation/scheduler/sched-bwc.rst`): a fixed amount of core time in each period.
//! When this amount is used up, nothing runs until the period ends.
//!
//! The model is simpler than the kernel in two respects. In the kernel, a period begins when
//! something runs again after a pause. Here, periods follow each other without a gap from time 0.
//! In the kernel, each CPU reserves a part of the quota in advance. Here, all cores share one
//! account.

use crate::metrics::float;

/// The limit of the time for which all cores together may work in each period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// The amount of core time, in microseconds; not 0.
    pub runtime_us: u64,
    /// The length of a period, in microseconds; not 0.
    pub period_us: u64,
}

impl Quota {
    /// How long each of `cores` cores may work in a whole period.
    fn run_us(self, cores: u64) -> u64 {
        self.runtime_us.div_ceil(cores).min(self.period_us)
    }

    /// The average number of cores that the quota allows.
    pub fn cores(self) -> f64 {
        float(self.runtime_us) / float(self.period_us)
    }
}

/// A quota and its unused part.
#[derive(Clone, Copy, Debug)]
pub struct Bandwidth {
    pub quota: Quota,
    /// The unused part of the quota in the current period.
    left_us: u64,
    /// The end of the current period.
    ends_us: u64,
}

impl Bandwidth {
    /// The first period begins at time 0, with the whole quota.
    pub const fn new(quota: Quota) -> Self {
        Self { quota, left_us: quota.runtime_us, ends_us: quota.period_us }
    }

    /// The state at `now_us`, if nothing has run since the last update.
    const fn at(self, now_us: u64) -> Self {
        if now_us < self.ends_us {
            return self;
        }
        let Quota { runtime_us, period_us } = self.quota;
        Self { quota: self.quota, left_us: runtime_us, ends_us: (now_us / period_us + 1) * period_us }
    }

    /// Simulates `cores` busy cores from `now_us` on, for `passed_us`, and subtracts their time
    /// from the quota. Returns for how many microseconds each of these cores runs.
    pub fn run(&mut self, now_us: u64, passed_us: u64, cores: u64) -> u64 {
        *self = self.at(now_us);
        let first = passed_us.min(self.ends_us - now_us);
        let ran = first.min(self.left_us.div_ceil(cores));
        self.left_us = self.left_us.saturating_sub(ran * cores);
        let (in_full, period) = (self.quota.run_us(cores), self.quota.period_us);
        let (whole, rest) = ((passed_us - first) / period, (passed_us - first) % period);
        let last = rest.min(in_full);
        if whole > 0 || rest > 0 {
            *self = self.at(now_us + passed_us - rest);
            self.left_us = self.left_us.saturating_sub(last * cores);
        }
        ran + whole * in_full + last
    }

    /// The time at which each of `cores` cores has run for `work_us`, if they have work from
    /// `now_us` on.
    pub fn done(&self, now_us: u64, work_us: u64, cores: u64) -> u64 {
        let now = self.at(now_us);
        let first = (now.ends_us - now_us).min(now.left_us.div_ceil(cores));
        if work_us <= first {
            return now_us.saturating_add(work_us);
        }
        let (left, in_full) = (work_us - first, self.quota.run_us(cores));
        let whole = (left - 1) / in_full;
        let in_periods = whole.saturating_mul(self.quota.period_us).saturating_add(left - whole * in_full);
        now.ends_us.saturating_add(in_periods)
    }
}
