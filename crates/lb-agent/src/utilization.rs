//! The utilization of a backend: the used part of its capacity. The utilization is computed from
//! two times: the time for which the tasks of the backend's cgroup have run on processors, and the
//! time in which at least one task has waited for a processor.
//!
//! The time of waiting is included, because the time on processors does not rise when neighbours
//! occupy the processors. This file contains the arithmetic; `cgroup` reads the files of the
//! kernel.

use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

mod cgroup;
mod mounts;
mod own;

pub use cgroup::{Measured, measure};
pub use mounts::Mounts;
pub use own::{own_cgroup, own_tree};

/// The path of a cgroup, relative to the mount; `None` if the text is not the path of a cgroup
/// below the mount.
pub fn below_the_mount(text: &str) -> Option<PathBuf> {
    let path = Path::new(text.trim_matches('/'));
    let is_below = path.components().all(|component| matches!(component, Component::Normal(_)));
    (is_below && !path.as_os_str().is_empty()).then(|| path.to_owned())
}

/// The use of processors by a cgroup, at the time of a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The time of the reading.
    pub at: Instant,
    /// Time on processors, of all threads of the cgroup together.
    pub used: Duration,
    /// Time in which at least one task waited for a processor; `None` if the kernel does not
    /// measure this time.
    pub waited: Option<Duration>,
    /// The processors that the cgroup can use, in thousandths.
    pub cores: u32,
}

impl Usage {
    /// The utilization since an earlier reading, in thousandths, and the time between the readings.
    /// `None` if the utilization is unknown, for example because the cgroup was created again.
    pub fn since(&self, before: &Self) -> Option<(u32, Duration)> {
        let window = self.at.checked_duration_since(before.at).filter(|window| !window.is_zero())?;
        let used = self.used.checked_sub(before.used)?;
        let cores = u128::from(self.cores.max(1));
        let of_capacity = used.as_micros() * 1_000_000 / (window.as_micros().max(1) * cores);
        let waited = match (self.waited, before.waited) {
            (Some(now), Some(before)) => now.checked_sub(before)?,
            // Between the two readings, the kernel has begun or stopped to measure the time of
            // waiting.
            (None, _) | (_, None) => Duration::ZERO,
        };
        // The time of throttling is measured per processor, so it may be longer than the elapsed
        // time.
        let share = (waited.as_micros() * 1000 / window.as_micros().max(1)).min(1000);
        Some((u32::try_from(of_capacity + share).unwrap_or(u32::MAX - 1), window))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utilization_is_use_of_capacity_plus_the_share_of_time_spent_waiting() {
        let start = Instant::now();
        let usage = |ms: u64, used: u64, waited: Option<u64>, cores| Usage {
            at: start + Duration::from_millis(ms),
            used: Duration::from_millis(used),
            waited: waited.map(Duration::from_millis),
            cores,
        };
        let begin = usage(0, 5000, Some(100), 1500);
        let cases = [
            (usage(2000, 5000, Some(100), 1500), Some(0)),
            (usage(2000, 8000, Some(100), 1500), Some(1000)),
            (usage(2000, 6500, Some(100), 1500), Some(500)),
            (usage(2000, 6500, Some(1100), 1500), Some(1000)),
            (usage(2000, 8000, Some(99_999), 1500), Some(2000)),
            (usage(2000, 6500, None, 1500), Some(500)),
            (usage(2000, 4999, Some(100), 1500), None),
            (usage(2000, 6500, Some(99), 1500), None),
            (usage(0, 6500, Some(100), 1500), None),
            (usage(2000, 6000, Some(100), 0), Some(500_000)),
        ];
        for (now, expected) in cases {
            assert_eq!(now.since(&begin).map(|(utilization, _)| utilization), expected, "{now:?}");
        }
        assert_eq!(
            usage(2000, 5000, None, 1).since(&begin).map(|(_, window)| window),
            Some(Duration::from_secs(2))
        );
    }
}
