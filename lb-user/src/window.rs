//! What was counted in the last minute: samples of the counters of every slot, some seconds apart, and the difference
//! between the oldest of them and now.
//!
//! Reading the counters of ten thousand backends moves megabytes for each CPU, so it is done seldom, and of each value
//! only what is shown is kept. It reads no clock and no map.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Sub;
use std::time::{Duration, Instant};

use lb_common::abi::{Counts, TIME_BUCKETS, Times};
use lb_common::ending::Ending;

/// What was counted is shown over this time, or a little more.
pub const WINDOW: Duration = Duration::from_secs(60);
/// Samples are this far apart: of 10,000 backends each takes 1.6 MB, and there are at most five of them.
pub const DISTANCE: Duration = Duration::from_secs(15);
/// What was counted in a shorter time is taken for this: of a daemon that has just started, rates mean nothing yet.
const SHORTEST: Duration = Duration::from_millis(100);

/// Endings that there are.
const ENDINGS: usize = Ending::ALL.len();

/// Counts of one slot at one time. What is counted is far less than 2^32 in a minute, so the low halves will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The slot and its generation: another generation is another backend.
    pub slot: (u32, u32),
    /// Flows sent to it.
    chosen: u32,
    /// Flows that went elsewhere.
    diverted: u32,
    endings: [u32; ENDINGS],
    connect: [u32; TIME_BUCKETS],
    connect_us: u64,
    /// Whether its counts did not add up, whatever happened meanwhile.
    pub is_off: bool,
}

impl Sample {
    /// Of a slot's counts.
    pub fn of(slot: (u32, u32), counts: &Counts) -> Self {
        Self {
            slot,
            chosen: low(counts.chosen),
            diverted: low(counts.diverted),
            endings: std::array::from_fn(|ending| low(counts.endings[ending])),
            connect: counts.connect.buckets.map(low),
            connect_us: counts.connect.sum_us,
            is_off: false,
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
fn low(count: u64) -> u32 {
    count as u32
}

/// What was counted of a backend lately.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Recent {
    /// In how many seconds.
    pub seconds: f64,
    /// Flows sent to it.
    pub chosen: u64,
    /// Flows that went elsewhere.
    pub diverted: u64,
    /// Flows that ended, by [`Ending`].
    pub endings: [u64; ENDINGS],
    /// From the choice until the flow was established.
    pub connect: Times,
}

/// The samples of one client's slots, by any clock.
#[derive(Debug)]
pub struct Window<T = Instant> {
    /// Each in the order of slots.
    samples: VecDeque<(T, Vec<Sample>)>,
    /// Of backends that took their slots with counts of earlier: what they began with.
    beginnings: BTreeMap<(u32, u32), Sample>,
}

impl<T> Default for Window<T> {
    fn default() -> Self {
        Self { samples: VecDeque::new(), beginnings: BTreeMap::new() }
    }
}

impl<T: Copy + Sub<Output = Duration>> Window<T> {
    /// Whether it is time for the next sample.
    pub fn is_due(&self, now: T) -> bool {
        self.samples.back().is_none_or(|(last, _)| now - *last >= DISTANCE)
    }

    /// Takes samples in, which are in the order of slots.
    pub fn push(&mut self, now: T, samples: Vec<Sample>) {
        self.samples.push_back((now, samples));
        // The oldest one kept is the newest that is at least a window old.
        while self.samples.get(1).is_some_and(|(time, _)| now - *time >= WINDOW) {
            self.samples.pop_front();
        }
        let Self { samples, beginnings } = self;
        if let Some((_, oldest)) = samples.front() {
            beginnings.retain(|slot, _| find(oldest, *slot).is_none());
        }
    }

    /// Takes in what a backend's counts were when it took its slot.
    pub fn begin(&mut self, slot: (u32, u32), counts: &Counts) {
        // Whoever had the slot before has left it.
        self.beginnings.retain(|other, _| other.0 != slot.0);
        self.beginnings.insert(slot, Sample::of(slot, counts));
    }

    /// What was counted since the oldest sample; nothing before there is one.
    pub fn recent(&self, now: T, slot: (u32, u32), counts: &Counts) -> Option<Recent> {
        let (time, oldest) = self.samples.front()?;
        let seconds = (now - *time).max(SHORTEST).as_secs_f64();
        let fresh = || Sample::of(slot, &Counts::default());
        let before = find(oldest, slot).or_else(|| self.beginnings.get(&slot).copied()).unwrap_or_else(fresh);
        let since = |now: u64, before: u32| u64::from(low(now).wrapping_sub(before));
        Some(Recent {
            seconds,
            chosen: since(counts.chosen, before.chosen),
            diverted: since(counts.diverted, before.diverted),
            endings: std::array::from_fn(|i| since(counts.endings[i], before.endings[i])),
            connect: Times {
                sum_us: counts.connect.sum_us.wrapping_sub(before.connect_us),
                buckets: std::array::from_fn(|i| since(counts.connect.buckets[i], before.connect[i])),
            },
        })
    }

    /// Whether a slot's counts did not add up in the last two samples: not for a moment only.
    pub fn is_off(&self, slot: (u32, u32)) -> bool {
        let mut last = self.samples.iter().rev().take(2);
        let is_off = |samples: &[Sample]| find(samples, slot).is_some_and(|sample| sample.is_off);
        last.len() == 2 && last.all(|(_, samples)| is_off(samples))
    }
}

fn find(samples: &[Sample], slot: (u32, u32)) -> Option<Sample> {
    samples.binary_search_by_key(&slot, |sample| sample.slot).ok().map(|at| samples[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: (u32, u32) = (3, 1);

    fn chosen(count: u64) -> Counts {
        Counts { chosen: count, ..Counts::default() }
    }

    fn recent(window: &Window<Duration>, now: Duration, count: u64) -> Option<(u64, f64)> {
        window.recent(now, SLOT, &chosen(count)).map(|recent| (recent.chosen, recent.seconds))
    }

    #[test]
    fn a_window_is_a_minute_or_a_sample_more() {
        let start = Duration::from_secs(1000);
        let mut window = Window::<Duration>::default();
        assert_eq!(recent(&window, start, 5), None, "there is no sample");
        let mut longest = 0;
        for second in 0..300 {
            let now = start + Duration::from_secs(second);
            if window.is_due(now) {
                window.push(now, vec![Sample::of(SLOT, &chosen(10 * second))]);
            }
            longest = longest.max(window.samples.len());
            let over = recent(&window, now, 10 * second);
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            if let Some((count, seconds)) = over.filter(|_| second > 0) {
                assert!((count as f64 - 10.0 * seconds).abs() < 1e-6);
                assert!(seconds < 75.0 && (seconds >= 60.0 || second < 60), "{seconds} at {second}");
            }
        }
        assert_eq!((longest, size_of::<Sample>()), (5, 160));
    }

    #[test]
    fn another_backend_in_the_slot_begins_anew_and_one_that_returns_goes_on() {
        let start = Duration::from_secs(1000);
        let later = start + Duration::from_secs(10);
        let mut window = Window::<Duration>::default();
        window.push(start, vec![Sample::of((3, 0), &chosen(100))]);
        assert_eq!(recent(&window, later, 7), Some((7, 10.0)));
        window.begin(SLOT, &chosen(1 << 40));
        assert_eq!(recent(&window, later, (1 << 40) + 7), Some((7, 10.0)));
        // Once it is in the oldest sample, that is what counts.
        for minute in 1..4 {
            let now = start + minute * WINDOW;
            window.push(now, vec![Sample::of(SLOT, &chosen((1 << 40) + 50))]);
        }
        assert_eq!(window.beginnings.len(), 0);
        assert_eq!(recent(&window, start + 4 * WINDOW, (1 << 40) + 60).map(|(count, _)| count), Some(10));
    }

    #[test]
    fn counts_are_off_when_two_samples_in_a_row_say_so() {
        let start = Duration::from_secs(1000);
        let mut window = Window::<Duration>::default();
        let mut push = |seconds, is_off| {
            let sample = Sample { is_off, ..Sample::of(SLOT, &chosen(1)) };
            window.push(start + Duration::from_secs(seconds), vec![sample]);
            window.is_off(SLOT)
        };
        assert_eq!(
            [push(0, true), push(15, false), push(30, true), push(45, true)],
            [false, false, false, true]
        );
    }
}
