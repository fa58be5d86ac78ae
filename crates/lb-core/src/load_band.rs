//! When a task's subset grows and shrinks with its own load: the load band of Finagle's aperture.
//!
//! A task looks at its open flows, smoothed, over the size of its subset. At `high` or above the subset grows by one, at `low` or below
//! it shrinks by one, along the task's own order. So a subset is as large as its task is busy, whatever the others do. Knows no
//! backend; reads no clock.

use std::time::Duration;

/// Between which loads a subset keeps its size. In thousandths of an open flow for each backend of the subset, so that a number of a
/// file stays what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadBand {
    /// At or below this it shrinks. Less than `high`, and not 0.
    pub low_thousandths: u32,
    /// At or above this it grows.
    pub high_thousandths: u32,
    /// The least size, 1 to [`lb_common::abi::MAX_SUBSET`].
    pub min: u32,
}

impl Default for LoadBand {
    /// One flow for each backend, as Finagle has it; the least size is that of `auto`, because below it there are too few to lose some.
    fn default() -> Self {
        Self { low_thousandths: 875, high_thousandths: 1_125, min: crate::weights::MIN_AUTO_SIZE }
    }
}

/// From one look at the open flows to the next, and so from one step to the next.
pub const LOOK: Duration = Duration::from_secs(1);

/// Over how long open flows are smoothed, as Finagle does.
pub const SMOOTHING: Duration = Duration::from_secs(15);

/// The size of one task's subset, and its load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BandedSize {
    band: LoadBand,
    size: u32,
    /// Open flows, smoothed, and when somebody looked; `None` before the first look.
    seen: Option<(f64, Duration)>,
}

impl BandedSize {
    /// The least size, of a task whose load nobody has looked at.
    pub const fn new(band: LoadBand) -> Self {
        Self { band, size: band.min, seen: None }
    }

    /// Of a task whose subset had so many before anybody looked: a daemon that starts goes on from its tables.
    pub fn of(band: LoadBand, size: u32) -> Self {
        Self { size: size.max(band.min), ..Self::new(band) }
    }

    /// With another size, because the one that was wanted cannot be had.
    #[must_use]
    pub const fn with_size(self, size: u32) -> Self {
        Self { size, ..self }
    }

    /// How many backends the subset has. Where there are fewer, it has all of them.
    pub const fn size(&self) -> u32 {
        self.size
    }

    /// Looks at the task's open flows, at a time by the caller's clock, where there are `most` backends. Returns the size, which is at
    /// most one away from what it was, but for backends that have come or gone.
    pub fn look(&mut self, now: Duration, open: u32, most: u32) -> u32 {
        let open = f64::from(open);
        // An exponential would do the same for steps that are short against the smoothing, with other last bits elsewhere.
        let smoothed = self.seen.map_or(open, |(before, at)| {
            let passed = now.saturating_sub(at).as_secs_f64();
            before + (open - before) * (passed / (passed + SMOOTHING.as_secs_f64()))
        });
        self.seen = Some((smoothed, now));
        let Self { band, size, .. } = *self;
        let least = band.min.min(most);
        let flows_of = |thousandths: u32, size: u32| f64::from(thousandths) * f64::from(size) / 1000.0;
        let is_high = smoothed >= flows_of(band.high_thousandths, size);
        // One flow more must not make the smaller subset grow again: in small subsets, and in narrow bands, it would at once.
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

    /// What the size is after each of so many looks, a second apart, with so many flows open at each second.
    fn sizes(banded: &mut BandedSize, seconds: std::ops::Range<u64>, open: impl Fn(u64) -> u32) -> Vec<u32> {
        seconds.map(|second| banded.look(Duration::from_secs(second), open(second), 100)).collect()
    }

    fn changes(sizes: &[u32]) -> usize {
        sizes.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }

    #[test]
    fn it_grows_with_load_one_by_one_and_shrinks_when_it_is_gone() {
        let mut banded = BandedSize::new(LoadBand::default());
        assert_eq!(sizes(&mut banded, 0..60, |_| 12), [12; 60], "within the band");
        let up = sizes(&mut banded, 60..180, |_| 40);
        assert!(up.windows(2).all(|pair| pair[1] == pair[0] || pair[1] == pair[0] + 1), "{up:?}");
        // As large as it takes for less than 1.125 flows each, and no larger.
        assert_eq!((up[119], changes(&up[60..])), (36, 0), "{up:?}");
        let down = sizes(&mut banded, 180..400, |_| 16);
        assert!(down.windows(2).all(|pair| pair[1] == pair[0] || pair[1] + 1 == pair[0]), "{down:?}");
        // As large as it takes for more than 0.875 flows each.
        assert_eq!((down[219], changes(&down[100..])), (18, 0), "{down:?}");
        assert_eq!(sizes(&mut banded, 400..600, |_| 0).last(), Some(&12), "the least");
    }

    #[test]
    fn load_that_stays_is_settled_for_good_whatever_the_band() {
        for (low, high, min) in
            [(875, 1_125, 12), (875, 1_125, 1), (1_000, 1_001, 1), (100, 9_000, 5), (1, 100, 1)]
        {
            for open in 0..120 {
                let mut banded =
                    BandedSize::new(LoadBand { low_thousandths: low, high_thousandths: high, min });
                sizes(&mut banded, 0..300, |_| open);
                let settled = sizes(&mut banded, 300..400, |_| open);
                assert_eq!(changes(&settled), 0, "{open} flows in {low} to {high}: {settled:?}");
                // The same from above.
                sizes(&mut banded, 400..700, |_| 100);
                sizes(&mut banded, 700..1_200, |_| open);
                let settled = sizes(&mut banded, 1_200..1_300, |_| open);
                assert_eq!(changes(&settled), 0, "{open} flows in {low} to {high}: {settled:?}");
            }
        }
    }

    #[test]
    fn one_flow_more_or_less_does_not_flap() {
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
                        "{open} flows in {low} to {high}, every {period} s: {settled:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_burst_that_is_over_at_once_adds_little() {
        let mut banded = BandedSize::new(LoadBand::default());
        sizes(&mut banded, 0..100, |_| 12);
        // Twice the flows for two seconds: an eighth of it is seen.
        let after = sizes(&mut banded, 100..130, |second| if second < 102 { 24 } else { 12 });
        assert!(after.iter().all(|size| *size <= 13), "{after:?}");
    }

    #[test]
    fn there_are_never_more_than_there_are_and_never_fewer_than_the_least() {
        let mut banded = BandedSize::new(LoadBand::default());
        let mut look = |second, open, most| banded.look(Duration::from_secs(second), open, most);
        assert_eq!(look(0, 1_000, 20), 13);
        assert_eq!((1..30).map(|second| look(second, 1_000, 20)).last(), Some(20));
        assert_eq!(look(30, 1_000, 15), 15, "some are gone");
        assert_eq!(look(31, 0, 5), 5, "fewer than the least: all");
        assert_eq!(look(32, 0, 0), 1, "nobody is there");
        assert_eq!((33..200).map(|second| look(second, 0, 20)).last(), Some(12));
        // A clock that stands still, or goes back, changes nothing by itself.
        assert_eq!((look(200, 0, 20), look(200, 0, 20), look(50, 0, 20)), (12, 12, 12));
    }
}
