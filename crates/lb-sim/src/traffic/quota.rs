//! How much of its machine a backend may use, as Linux bounds it (`cpu.max`; CFS bandwidth control,
//! `Documentation/scheduler/sched-bwc.rst`): so much time of a core in each period, after which nothing runs until the period ends.
//!
//! In the kernel a period begins when something runs again after a pause, and each CPU takes its part of a quota in advance. Here all
//! periods follow each other from time 0, and all cores take from one account.

use crate::metrics::float;

/// How long cores may work in each period, all of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// In microseconds of a core. Not 0.
    pub runtime_us: u64,
    /// In microseconds. Not 0.
    pub period_us: u64,
}

impl Quota {
    /// How long so many cores work in a whole period.
    fn run_us(self, cores: u64) -> u64 {
        self.runtime_us.div_ceil(cores).min(self.period_us)
    }

    /// Of a core, what it comes to.
    pub fn cores(self) -> f64 {
        float(self.runtime_us) / float(self.period_us)
    }
}

/// A quota and what is left of it.
#[derive(Clone, Copy, Debug)]
pub struct Bandwidth {
    /// The quota.
    pub quota: Quota,
    /// Of this period.
    left_us: u64,
    /// When that ends.
    ends_us: u64,
}

impl Bandwidth {
    /// The first period begins at time 0, and nothing is used.
    pub const fn new(quota: Quota) -> Self {
        Self { quota, left_us: quota.runtime_us, ends_us: quota.period_us }
    }

    /// As it is at a time when nothing has run since the last one.
    const fn at(self, now_us: u64) -> Self {
        if now_us < self.ends_us {
            return self;
        }
        let Quota { runtime_us, period_us } = self.quota;
        Self { quota: self.quota, left_us: runtime_us, ends_us: (now_us / period_us + 1) * period_us }
    }

    /// So many cores have work for so long from now on: how long they do it.
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

    /// When so many cores have worked for so long from now on.
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
