//! The counts of the last minute: the difference between the counters now and in the oldest of
//! several samples. A sample contains the counters of every slot. The time between samples is
//! [`DISTANCE`].
//!
//! Reading the counters of ten thousand backends copies megabytes for each CPU. The counters are
//! therefore read rarely, and a sample stores only the values that are shown. This module reads no
//! clock and no map.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Sub;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lb_common::abi::{Histogram, SlotCounters, TIME_BUCKETS};
use lb_common::ending::Ending;
use lb_core::ids::{BackendRef, ServiceIndex};

/// The counts cover at least this time, and at most one [`DISTANCE`] more. They cover less only
/// until the daemon has run for this time.
pub const WINDOW: Duration = Duration::from_secs(60);
/// The time between samples. A sample of 10,000 backends occupies 1.7 MB, and there are at most
/// five samples.
pub const DISTANCE: Duration = Duration::from_secs(15);
/// The minimum time over which rates are computed. Rates over a shorter time, just after the start
/// of the daemon, have no meaning.
const SHORTEST: Duration = Duration::from_millis(100);

/// The smallest number of failed connects in the window that is evidence against a backend.
const FEWEST_FAILURES: u64 = 5;

const ENDINGS: usize = Ending::ALL.len();

/// The counts of one slot at one time. Only the low 32 bits of most counters are stored, because a
/// counter grows by far less than 2^32 per minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    pub backend: BackendRef,
    /// Flows sent to the backend.
    chosen: u32,
    /// Flows to the backend that were connected to another address, because another program rewrote
    /// their destination.
    diverted: u32,
    established: u32,
    endings: [u32; ENDINGS],
    connect: [u32; TIME_BUCKETS],
    connect_us: u64,
    /// Whether the counts were inconsistent. Small differences are allowed, because flows begin and
    /// end while the counts are read.
    pub is_off: bool,
    /// Whether every flow to the backend has ended, so that no count changes until the next flow is
    /// sent.
    pub is_settled: bool,
}

impl Sample {
    pub fn of(backend: BackendRef, counts: &SlotCounters) -> Self {
        Self {
            backend,
            chosen: low(counts.chosen),
            diverted: low(counts.diverted),
            established: low(counts.established),
            endings: std::array::from_fn(|ending| low(counts.endings[ending])),
            connect: counts.connect.buckets.map(low),
            connect_us: counts.connect.sum_us,
            is_off: false,
            is_settled: false,
        }
    }

    fn ended_since(&self, before: &Self) -> u64 {
        let endings = self.endings.iter().zip(&before.endings);
        endings.map(|(now, before)| u64::from(now.wrapping_sub(*before))).sum()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "only the low 32 bits are needed")]
fn low(count: u64) -> u32 {
    count as u32
}

/// The recent counts of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Recent {
    /// The seconds since the sample with which the counts are compared.
    pub seconds: f64,
    /// Flows sent to the backend.
    pub chosen: u64,
    /// Flows to the backend that were connected to another address.
    pub diverted: u64,
    pub established: u64,
    /// The numbers of ended flows, indexed by [`Ending`].
    pub endings: [u64; ENDINGS],
    /// The times from the choice of the backend until the flow was established.
    pub connect: Histogram,
}

impl Recent {
    /// The number of connects that failed, with or without a known cause. Endings of established
    /// flows are not included.
    pub fn failed(&self) -> u64 {
        let is_failure = |ending: Ending| match ending {
            Ending::Reset | Ending::DataTimeout => false,
            // With `accounting = "active"`, the programs record no causes, and count every failed
            // connect under this ending.
            Ending::Other => true,
            ending => ending.is_error(),
        };
        Ending::ALL.into_iter().filter(|ending| is_failure(*ending)).map(|e| self.endings[e as usize]).sum()
    }

    /// Whether a backend may be chosen (`usable`), and its recent connects show that the backend
    /// fails.
    pub fn is_failing_backend(usable: bool, recent: Option<&Self>) -> bool {
        usable && recent.is_some_and(Self::is_failing)
    }

    /// Whether the recent connects show that the backend fails: no flow is counted as established,
    /// at least `FEWEST_FAILURES` connects failed, and at least half of the flows failed. The
    /// other flows may be established and not yet counted as established, because for some flows
    /// the programs detect this only when the flow ends.
    pub fn is_failing(&self) -> bool {
        let failed = self.failed();
        failed >= FEWEST_FAILURES && self.established == 0 && failed.saturating_mul(2) >= self.chosen
    }
}

/// The samples of one client's slots. `T` is a point in time on any clock. A copy shares the
/// samples, and is therefore cheap to pass to another thread.
#[derive(Clone, Debug)]
pub struct Window<T = Instant> {
    /// Each sample is sorted by slot.
    samples: VecDeque<(T, Arc<[Sample]>)>,
    /// The counts that backends already had when they received their slots.
    beginnings: Arc<BTreeMap<BackendRef, Sample>>,
    /// One entry for each sample in `samples`. It contains the index of each service with an
    /// `active_limit`, and the number of connects that were refused because all backends were at
    /// the limit.
    limited: VecDeque<Arc<[(ServiceIndex, u64)]>>,
    /// The number of flows that ended between the very first sample, which may have been removed,
    /// and the last sample.
    ended: u64,
    /// The backends that were chosen between the last two samples. After the very first sample, and
    /// for a backend that is new in the last sample, includes backends that were chosen at any
    /// earlier time.
    chosen: Arc<BTreeSet<BackendRef>>,
}

impl<T> Default for Window<T> {
    fn default() -> Self {
        Self {
            samples: VecDeque::new(),
            beginnings: Arc::default(),
            limited: VecDeque::new(),
            ended: 0,
            chosen: Arc::default(),
        }
    }
}

impl<T: Copy + Sub<Output = Duration>> Window<T> {
    pub fn is_due(&self, now: T) -> bool {
        self.samples.back().is_none_or(|(last, _)| now - *last >= DISTANCE)
    }

    /// Adds a sample. `samples` contains the counts of each slot, sorted by slot. `limited`
    /// contains, for each service with an `active_limit`, the number of connects refused because of
    /// this limit.
    pub fn push(&mut self, now: T, samples: Vec<Sample>, limited: Vec<(ServiceIndex, u64)>) {
        let mut chosen = BTreeSet::new();
        for sample in &samples {
            let before = self.samples.back().and_then(|(_, before)| find(before, sample.backend));
            if let Some(before) = before {
                self.ended = self.ended.wrapping_add(sample.ended_since(before));
            }
            let before = before.or_else(|| self.beginnings.get(&sample.backend));
            if sample.chosen != before.map_or(0, |before| before.chosen) {
                chosen.insert(sample.backend);
            }
        }
        self.append(now, samples.into(), chosen, limited);
    }

    /// Like [`Window::push`], for `backends`, which are sorted by slot. For backends that are not
    /// in `counted`, the new sample contains the counts of the last sample.
    pub fn push_changes(
        &mut self,
        now: T,
        backends: &[BackendRef],
        counted: Vec<Sample>,
        limited: Vec<(ServiceIndex, u64)>,
    ) {
        let last = self.samples.back().map_or_else(Arc::default, |(_, last)| Arc::clone(last));
        if counted.is_empty() && last.len() == backends.len() {
            return self.append(now, last, BTreeSet::new(), limited);
        }
        let mut counted = counted.into_iter().peekable();
        let mut sample = |backend: &BackendRef| {
            counted.next_if(|sample| sample.backend == *backend).or_else(|| find(&last, *backend).copied())
        };
        let samples = backends.iter().filter_map(&mut sample).collect();
        self.push(now, samples, limited);
    }

    fn append(
        &mut self,
        now: T,
        samples: Arc<[Sample]>,
        chosen: BTreeSet<BackendRef>,
        limited: Vec<(ServiceIndex, u64)>,
    ) {
        self.chosen = Arc::new(chosen);
        self.samples.push_back((now, samples));
        self.limited.push_back(limited.into());
        // Removes the samples that are at least one window old, except the newest of them.
        while self.samples.get(1).is_some_and(|(time, _)| now - *time >= WINDOW) {
            self.samples.pop_front();
            self.limited.pop_front();
        }
        let Self { samples, beginnings, .. } = self;
        if let Some((_, oldest)) = samples.front().filter(|_| !beginnings.is_empty()) {
            Arc::make_mut(beginnings).retain(|backend, _| find(oldest, *backend).is_none());
        }
    }

    /// Whether the counts of a backend without open flows are the same as in the last sample.
    /// `chosen` is the number of flows sent to the backend, modulo 2^32.
    pub fn is_settled(&self, backend: BackendRef, chosen: u32) -> bool {
        let last = self.samples.back().and_then(|(_, last)| find(last, backend));
        last.is_some_and(|last| last.is_settled && last.chosen == chosen)
    }

    /// The low 32 bits of the number of connections established to a backend, according to the
    /// second-last sample. If there is only one sample, according to this sample.
    pub fn established(&self, backend: BackendRef) -> Option<u32> {
        let (_, sample) = self.samples.iter().rev().take(2).last()?;
        find(sample, backend).map(|sample| sample.established)
    }

    /// The number of flows with an end that a program recorded, from the very first sample to the
    /// last sample. Includes flows that ended before the window.
    pub fn ended(&self) -> u64 {
        self.ended
    }

    /// The backends that were chosen recently, that is, within the last two intervals between
    /// samples, or at an unknown time.
    pub fn chosen(&self) -> &BTreeSet<BackendRef> {
        &self.chosen
    }

    /// Records the counts that a backend already had when it received its slot.
    pub fn begin(&mut self, backend: BackendRef, counts: &SlotCounters) {
        // The previous backend of this slot no longer exists.
        let beginnings = Arc::make_mut(&mut self.beginnings);
        beginnings.retain(|other, _| other.slot != backend.slot);
        beginnings.insert(backend, Sample::of(backend, counts));
    }

    /// The counts since the oldest sample; `None` before the first sample.
    pub fn recent(&self, now: T, backend: BackendRef, counts: &SlotCounters) -> Option<Recent> {
        let (time, oldest) = self.samples.front()?;
        let seconds = (now - *time).max(SHORTEST).as_secs_f64();
        let fresh = Sample::of(backend, &SlotCounters::default());
        let before = find(oldest, backend).or_else(|| self.beginnings.get(&backend)).unwrap_or(&fresh);
        let since = |now: u64, before: u32| u64::from(low(now).wrapping_sub(before));
        Some(Recent {
            seconds,
            chosen: since(counts.chosen, before.chosen),
            diverted: since(counts.diverted, before.diverted),
            established: since(counts.established, before.established),
            endings: std::array::from_fn(|i| since(counts.endings[i], before.endings[i])),
            connect: Histogram {
                sum_us: counts.connect.sum_us.wrapping_sub(before.connect_us),
                buckets: std::array::from_fn(|i| since(counts.connect.buckets[i], before.connect[i])),
            },
        })
    }

    /// How many connects to the service with this index were refused since the oldest sample
    /// because all backends were at their limit. `count` is the present total. `None` before the
    /// first sample.
    pub fn limited(&self, index: ServiceIndex, count: u64) -> Option<u64> {
        self.limited.front()?;
        // If no sample contains the service, its limit was configured after the last sample, and
        // its count began at 0. If `count` is less than the count in a sample, another service has
        // received the index since, and its count also began at 0.
        let mut samples = self.limited.iter();
        let before = samples.find_map(|sample| sample.iter().find(|(other, _)| *other == index));
        Some(before.and_then(|(_, before)| count.checked_sub(*before)).unwrap_or(count))
    }

    /// Whether a backend's counts were inconsistent in each of the last two samples. The cause is
    /// then not temporary.
    pub fn is_off(&self, backend: BackendRef) -> bool {
        let mut last = self.samples.iter().rev().take(2);
        let is_off = |samples: &[Sample]| find(samples, backend).is_some_and(|sample| sample.is_off);
        last.len() == 2 && last.all(|(_, samples)| is_off(samples))
    }
}

/// A window, and the present moment, at which the last minute ends.
#[derive(Clone, Debug)]
pub struct Lately {
    pub window: Window,
    pub now: Instant,
}

impl Lately {
    /// See [`Window::recent`].
    pub fn recent(&self, backend: BackendRef, counts: &SlotCounters) -> Option<Recent> {
        self.window.recent(self.now, backend, counts)
    }
}

fn find(samples: &[Sample], backend: BackendRef) -> Option<&Sample> {
    samples.binary_search_by_key(&backend, |sample| sample.backend).ok().map(|at| &samples[at])
}

#[cfg(test)]
mod tests {
    use lb_core::ids::{Generation, Slot};

    use super::*;

    const BACKEND: BackendRef = backend(1);

    /// The backend of this generation in slot 3.
    const fn backend(generation: u32) -> BackendRef {
        BackendRef { slot: Slot::new(3).unwrap(), generation: Generation(generation) }
    }

    fn chosen(count: u64) -> SlotCounters {
        SlotCounters { chosen: count, ..SlotCounters::default() }
    }

    fn recent(window: &Window<Duration>, now: Duration, count: u64) -> Option<(u64, f64)> {
        window.recent(now, BACKEND, &chosen(count)).map(|recent| (recent.chosen, recent.seconds))
    }

    #[test]
    fn a_window_spans_a_minute_and_at_most_one_sample_more() {
        let start = Duration::from_secs(1000);
        let mut window = Window::<Duration>::default();
        assert_eq!(recent(&window, start, 5), None, "no counts exist before the first sample");
        let mut longest = 0;
        for second in 0..300 {
            let now = start + Duration::from_secs(second);
            if window.is_due(now) {
                window.push(now, vec![Sample::of(BACKEND, &chosen(10 * second))], Vec::new());
            }
            longest = longest.max(window.samples.len());
            let over = recent(&window, now, 10 * second);
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            if let Some((count, seconds)) = over.filter(|_| second > 0) {
                assert!((count as f64 - 10.0 * seconds).abs() < 1e-6);
                assert!(
                    seconds < 75.0 && (seconds >= 60.0 || second < 60),
                    "counts of {seconds} s at second {second}"
                );
            }
        }
        assert_eq!((longest, size_of::<Sample>()), (5, 168));
    }

    #[test]
    fn a_backend_was_chosen_recently_if_its_count_has_changed() {
        let mut window = Window::<Duration>::default();
        let mut is_chosen = |at, backend, count| {
            window.push(DISTANCE * at, vec![Sample::of(backend, &chosen(count))], Vec::new());
            window.chosen().contains(&backend)
        };
        assert!(is_chosen(0, BACKEND, 5), "a choice at an unknown time is recent");
        assert!(!is_chosen(1, BACKEND, 5));
        assert!(is_chosen(2, BACKEND, 6));
        assert!(!is_chosen(3, BACKEND, 6));
        assert!(is_chosen(4, backend(2), 6), "earlier choices of a new backend are recent");
        assert!(!is_chosen(5, backend(3), 0));
        window.begin(backend(4), &chosen(7));
        window.push(DISTANCE * 6, vec![Sample::of(backend(4), &chosen(7))], Vec::new());
        assert!(window.chosen().is_empty(), "choices before the backend received the slot are not included");
    }

    #[test]
    fn a_backend_without_flows_is_settled_until_the_next_flow() {
        let mut window = Window::<Duration>::default();
        assert!(!window.is_settled(BACKEND, 0), "no counts exist before the first sample");
        for is_settled in [true, false] {
            let sample = Sample { is_settled, ..Sample::of(BACKEND, &chosen(5)) };
            window.push(DISTANCE, vec![sample], Vec::new());
            assert_eq!(window.is_settled(BACKEND, 5), is_settled);
            assert!(!window.is_settled(BACKEND, 6));
            assert!(!window.is_settled(backend(2), 5), "a new backend in the slot is not settled");
        }
    }

    #[test]
    fn a_sample_has_changed_and_unchanged_counts() {
        let other = BackendRef { slot: Slot::new(7).unwrap(), generation: Generation(1) };
        let (first, later, of_other) =
            (Sample::of(BACKEND, &chosen(5)), Sample::of(BACKEND, &chosen(6)), Sample::of(other, &chosen(9)));
        let mut window = Window::<Duration>::default();
        let mut push = |at, backends: &[BackendRef], counted| {
            window.push_changes(DISTANCE * at, backends, counted, Vec::new());
            (window.samples.back().unwrap().1.to_vec(), window.chosen().iter().copied().collect::<Vec<_>>())
        };
        assert_eq!(
            push(0, &[BACKEND, other], vec![first, of_other]),
            (vec![first, of_other], vec![BACKEND, other])
        );
        assert_eq!(push(1, &[BACKEND, other], vec![]), (vec![first, of_other], vec![]));
        assert_eq!(push(2, &[BACKEND, other], vec![later]), (vec![later, of_other], vec![BACKEND]));
        assert_eq!(push(3, &[other], vec![]), (vec![of_other], vec![]), "a removed backend has no entry");
    }

    #[test]
    fn a_backend_is_failing_if_all_its_connects_failed() {
        let check = |chosen, established, endings: &[(Ending, u64)], expected| {
            let mut recent = Recent { chosen, established, ..Recent::default() };
            for (ending, count) in endings {
                recent.endings[*ending as usize] = *count;
            }
            assert_eq!(recent.is_failing(), expected, "{recent:?}");
        };
        check(4, 0, &[(Ending::Refused, 4)], false);
        check(5, 0, &[(Ending::Refused, 5)], true);
        check(5, 0, &[(Ending::Refused, 2), (Ending::TimedOut, 2), (Ending::Unreachable, 1)], true);
        check(100, 1, &[(Ending::Refused, 99)], false);
        // The other three flows still wait for an answer.
        check(8, 0, &[(Ending::TimedOut, 5)], true);
        // Some flows show only at their end that they were established. Here, most flows are still
        // open and may be established.
        check(100, 0, &[(Ending::Refused, 5)], false);
        check(6, 0, &[(Ending::Other, 6)], true);
        // An established flow that breaks, or an action of the application, is no evidence that
        // connects fail.
        check(5, 0, &[(Ending::Reset, 9), (Ending::DataTimeout, 9)], false);
        check(9, 0, &[(Ending::GaveUp, 9), (Ending::NotSent, 9)], false);
    }

    #[test]
    fn refusals_are_counted_since_the_oldest_sample() {
        const THREE: ServiceIndex = ServiceIndex(3);
        const FOUR: ServiceIndex = ServiceIndex(4);
        let mut window = Window::<Duration>::default();
        assert_eq!(window.limited(THREE, 5), None);
        let samples = [vec![(THREE, 100)], vec![(THREE, 130), (FOUR, 7)], vec![(THREE, 150), (FOUR, 7)]];
        for (second, limited) in (0..).zip(samples) {
            window.push(Duration::from_secs(1000 + 15 * second), Vec::new(), limited);
        }
        assert_eq!(
            [window.limited(THREE, 160), window.limited(FOUR, 9), window.limited(ServiceIndex(5), 9)],
            [Some(60), Some(2), Some(9)]
        );
        assert_eq!(window.limited(THREE, 6), Some(6), "counts of the index's previous service are ignored");
        // A minute later, the first sample is too old.
        window.push(Duration::from_secs(1075), Vec::new(), vec![(THREE, 150)]);
        assert_eq!(window.limited(THREE, 150), Some(20));
    }

    #[test]
    fn a_new_backend_in_a_slot_counts_from_zero_and_a_returning_one_continues() {
        let start = Duration::from_secs(1000);
        let later = start + Duration::from_secs(10);
        let mut window = Window::<Duration>::default();
        window.push(start, vec![Sample::of(backend(0), &chosen(100))], Vec::new());
        assert_eq!(recent(&window, later, 7), Some((7, 10.0)));
        window.begin(BACKEND, &chosen(1 << 40));
        assert_eq!(recent(&window, later, (1 << 40) + 7), Some((7, 10.0)));
        // Once the oldest sample contains the backend, counts are compared with that sample.
        for minute in 1..4 {
            let now = start + minute * WINDOW;
            window.push(now, vec![Sample::of(BACKEND, &chosen((1 << 40) + 50))], Vec::new());
        }
        assert_eq!(window.beginnings.len(), 0);
        assert_eq!(recent(&window, start + 4 * WINDOW, (1 << 40) + 60).map(|(count, _)| count), Some(10));
    }

    #[test]
    fn flows_that_ended_are_summed_over_all_samples() {
        let start = Duration::from_secs(1000);
        let mut window = Window::<Duration>::default();
        for sample in 0..20 {
            let mut counts = SlotCounters::default();
            counts.endings[0] = (1 << 32) - 50 + 10 * sample;
            counts.endings[1] = sample;
            // If another backend receives the slot, counting starts again.
            let generation = u32::from(sample >= 10);
            let now = start + u32::try_from(sample).unwrap() * DISTANCE;
            window.push(now, vec![Sample::of(backend(generation), &counts)], Vec::new());
        }
        assert_eq!(window.ended(), 18 * 11);
    }

    #[test]
    fn counts_are_off_only_after_two_samples_in_a_row() {
        let start = Duration::from_secs(1000);
        let mut window = Window::<Duration>::default();
        let mut push = |seconds, is_off| {
            let sample = Sample { is_off, ..Sample::of(BACKEND, &chosen(1)) };
            window.push(start + Duration::from_secs(seconds), vec![sample], Vec::new());
            window.is_off(BACKEND)
        };
        assert_eq!(
            [push(0, true), push(15, false), push(30, true), push(45, true)],
            [false, false, false, true]
        );
    }
}
