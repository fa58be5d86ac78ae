//! When a task's subset grows and shrinks with the task's own load: the load band of Finagle's
//! aperture.
//!
//! The load is the task's smoothed number of open flows divided by the size of its subset. At the
//! high limit or above, the subset grows by one; at the low limit or below, it shrinks by one. The
//! subset grows and shrinks along the task's own order, and does not depend on other tasks.

use std::time::Duration;

/// The loads between which a subset retains its size, in thousandths of an open flow per backend of
/// the subset, so that numbers in files are represented exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadBand {
    /// At or below this load the subset shrinks. The limit is below `high_thousandths`, and not 0.
    pub low_thousandths: u32,
    /// At or above this load the subset grows.
    pub high_thousandths: u32,
    /// The smallest size, 1 to [`lb_common::abi::MAX_SUBSET`].
    pub min: u32,
}

impl Default for LoadBand {
    /// A band around one flow per backend, as in Finagle. The smallest size is the default minimum
    /// of `auto`: in a smaller subset, the loss of a few backends leaves too few.
    fn default() -> Self {
        Self { low_thousandths: 875, high_thousandths: 1_125, min: super::weights::MIN_AUTO_SIZE }
    }
}

/// The interval at which the number of open flows and the size are updated.
pub const LOOK: Duration = Duration::from_secs(1);

/// The time constant with which the number of open flows is smoothed, as in Finagle.
pub const SMOOTHING: Duration = Duration::from_secs(15);

/// The size of one task's subset, and its load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BandedSize {
    band: LoadBand,
    size: u32,
    /// The smoothed number of open flows, and the time of the last update; `None` before the first
    /// update.
    seen: Option<(f64, Duration)>,
}

impl BandedSize {
    /// Starts with the smallest size, for a task with unknown load.
    pub const fn new(band: LoadBand) -> Self {
        Self { band, size: band.min, seen: None }
    }

    /// Continues with `size`, the size of the subset in an earlier daemon's tables.
    pub fn of(band: LoadBand, size: u32) -> Self {
        Self { size: size.max(band.min), ..Self::new(band) }
    }

    /// Replaces the size, because the wanted size is not possible.
    #[must_use]
    pub const fn with_size(self, size: u32) -> Self {
        Self { size, ..self }
    }

    /// The wanted number of backends in the subset. If there are fewer backends, the subset
    /// contains all of them.
    pub const fn size(&self) -> u32 {
        self.size
    }

    /// Updates the size from the task's number of open flows; `now` is the time of the caller's
    /// clock, and `most` is the number of backends. Returns the size, which changes by at most one
    /// unless the number of backends has changed.
    pub fn look(&mut self, now: Duration, open: u32, most: u32) -> u32 {
        let open = f64::from(open);
        // An exponential function would give nearly the same results for steps that are short
        // relative to the smoothing, but its last bits differ between machines.
        let smoothed = self.seen.map_or(open, |(before, at)| {
            let passed = now.saturating_sub(at).as_secs_f64();
            before + (open - before) * (passed / (passed + SMOOTHING.as_secs_f64()))
        });
        self.seen = Some((smoothed, now));
        let Self { band, size, .. } = *self;
        let least = band.min.min(most);
        let flows_of = |thousandths: u32, size: u32| f64::from(thousandths) * f64::from(size) / 1000.0;
        let is_high = smoothed >= flows_of(band.high_thousandths, size);
        // The subset shrinks only if one more flow would not make the smaller subset grow again at
        // once. Without this condition, small subsets with narrow bands could grow and shrink in
        // turns.
        let is_low = smoothed <= flows_of(band.low_thousandths, size)
            && smoothed + 1.0 <= flows_of(band.high_thousandths, size.saturating_sub(1));
        let wanted = if is_high {
            size.saturating_add(1)
        } else if is_low {
            size.saturating_sub(1)
        } else {
            size
        };
        self.size = wanted.clamp(least, most.max(1));
        self.size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size after each update, one per second, with this number of open flows at each second.
    fn sizes(banded: &mut BandedSize, seconds: std::ops::Range<u64>, open: impl Fn(u64) -> u32) -> Vec<u32> {
        seconds.map(|second| banded.look(Duration::from_secs(second), open(second), 100)).collect()
    }

    fn changes(sizes: &[u32]) -> usize {
        sizes.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }

    #[test]
    fn a_subset_grows_and_shrinks_with_load_one_by_one() {
        let mut banded = BandedSize::new(LoadBand::default());
        assert_eq!(sizes(&mut banded, 0..60, |_| 12), [12; 60], "within the band");
        let up = sizes(&mut banded, 60..180, |_| 40);
        assert!(up.windows(2).all(|pair| pair[1] == pair[0] || pair[1] == pair[0] + 1), "{up:?}");
        // The smallest size with less than 1.125 flows per backend.
        assert_eq!((up[119], changes(&up[60..])), (36, 0), "{up:?}");
        let down = sizes(&mut banded, 180..400, |_| 16);
        assert!(down.windows(2).all(|pair| pair[1] == pair[0] || pair[1] + 1 == pair[0]), "{down:?}");
        // The largest size with more than 0.875 flows per backend.
        assert_eq!((down[219], changes(&down[100..])), (18, 0), "{down:?}");
        assert_eq!(sizes(&mut banded, 400..600, |_| 0).last(), Some(&12), "the size falls to the minimum");
    }

    #[test]
    fn constant_load_leads_to_a_constant_size_in_any_band() {
        for (low, high, min) in
            [(875, 1_125, 12), (875, 1_125, 1), (1_000, 1_001, 1), (100, 9_000, 5), (1, 100, 1)]
        {
            for open in 0..120 {
                let mut banded =
                    BandedSize::new(LoadBand { low_thousandths: low, high_thousandths: high, min });
                sizes(&mut banded, 0..300, |_| open);
                let settled = sizes(&mut banded, 300..400, |_| open);
                assert_eq!(changes(&settled), 0, "{open} flows, band {low} to {high}: sizes {settled:?}");
                // The size also settles when it falls from a larger size.
                sizes(&mut banded, 400..700, |_| 100);
                sizes(&mut banded, 700..1_200, |_| open);
                let settled = sizes(&mut banded, 1_200..1_300, |_| open);
                assert_eq!(changes(&settled), 0, "{open} flows, band {low} to {high}: sizes {settled:?}");
            }
        }
    }

    #[test]
    fn one_flow_more_or_less_does_not_resize_a_subset_repeatedly() {
        for (low, high, min) in [(875, 1_125, 12), (875, 1_125, 1), (1_000, 1_001, 1), (900, 1_000, 2)] {
            for open in 0..60 {
                for period in [1, 2, 5, 15, 60] {
                    let mut banded =
                        BandedSize::new(LoadBand { low_thousandths: low, high_thousandths: high, min });
                    let by_turns = |second: u64| open + u32::from((second / period).is_multiple_of(2));
                    sizes(&mut banded, 0..400, by_turns);
                    let settled = sizes(&mut banded, 400..1_000, by_turns);
                    assert_eq!(
                        changes(&settled),
                        0,
                        "{open} flows, band {low} to {high}, every {period} s: sizes {settled:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_short_burst_adds_at_most_one_backend() {
        let mut banded = BandedSize::new(LoadBand::default());
        sizes(&mut banded, 0..100, |_| 12);
        // The number of flows is doubled for two seconds, so the smoothed load rises by an eighth.
        let after = sizes(&mut banded, 100..130, |second| if second < 102 { 24 } else { 12 });
        assert!(after.iter().all(|size| *size <= 13), "{after:?}");
    }

    #[test]
    fn a_size_is_between_the_minimum_and_the_number_of_backends() {
        let mut banded = BandedSize::new(LoadBand::default());
        let mut look = |second, open, most| banded.look(Duration::from_secs(second), open, most);
        assert_eq!(look(0, 1_000, 20), 13);
        assert_eq!((1..30).map(|second| look(second, 1_000, 20)).last(), Some(20));
        assert_eq!(look(30, 1_000, 15), 15, "five backends were removed");
        assert_eq!(look(31, 0, 5), 5, "fewer backends than the minimum");
        assert_eq!(look(32, 0, 0), 1, "no backend exists");
        assert_eq!((33..200).map(|second| look(second, 0, 20)).last(), Some(12));
        // If the clock does not advance, or moves backwards, the size does not change.
        assert_eq!((look(200, 0, 20), look(200, 0, 20), look(50, 0, 20)), (12, 12, 12));
    }
}
