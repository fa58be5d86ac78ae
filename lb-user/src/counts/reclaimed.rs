//! The share of recently ended flows that were reclaimed, because no program recorded their end. If
//! this share is not small, something is wrong with the host: links were lost, or another program
//! clears callback flags. This module reads no clock.

use std::collections::VecDeque;
use std::ops::Sub;
use std::time::{Duration, Instant};

/// The time over which flows are counted.
const WINDOW: Duration = Duration::from_secs(600);
/// The smallest number of unrecorded flow ends that is a fault. A smaller number may be chance,
/// even if it is a large share of the ended flows.
const LEAST: u64 = 10;
/// One end without a record among this number of ended flows may be chance.
const ONE_IN: u64 = 100;

/// Counts of ended flows at a pass over the flow records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// The number of flows with an end that a program recorded, since the daemon started.
    pub seen: u64,
    /// The number of flows with records that this pass reclaimed.
    pub reclaimed: u64,
    /// The number of flows in `reclaimed` that were paths of MPTCP sockets. A kernel that does not
    /// distinguish these paths never reports their end to the programs.
    pub reclaimed_mptcp: u64,
}

/// The passes of the last ten minutes. `T` is a point in time on any clock.
#[derive(Debug)]
pub struct Reclaimed<T = Instant> {
    passes: VecDeque<(T, Ends)>,
}

impl<T> Default for Reclaimed<T> {
    fn default() -> Self {
        Self { passes: VecDeque::new() }
    }
}

impl<T: Copy + Sub<Output = Duration>> Reclaimed<T> {
    pub fn push(&mut self, now: T, ends: Ends) {
        self.passes.push_back((now, ends));
        // The oldest stored pass marks the beginning of the window: the flows that it reclaimed
        // ended earlier.
        while self.passes.get(1).is_some_and(|(time, _)| now - *time >= WINDOW) {
            self.passes.pop_front();
        }
    }

    /// The text of the client's fault; `None` unless the programs have recorded too few ends of
    /// flows.
    pub fn fault(&self) -> Option<String> {
        let (_, first) = self.passes.front()?;
        let (_, last) = self.passes.back()?;
        // Once the window is full, the first stored pass only marks the beginning of the window,
        // and is skipped. Before that, the first stored pass is the daemon's first pass, and is
        // included: the flows that it reclaimed ended under an earlier daemon, and no program
        // recorded their end.
        let passes = self.passes.iter().skip(usize::from(self.is_full()));
        let (reclaimed, mptcp) = passes
            .fold((0, 0), |(all, mptcp), (_, ends)| (all + ends.reclaimed, mptcp + ends.reclaimed_mptcp));
        let unseen = reclaimed - mptcp;
        let ended = last.seen - first.seen + reclaimed;
        if unseen < LEAST || unseen.saturating_mul(ONE_IN) <= ended {
            return None;
        }
        let besides = if mptcp > 0 {
            format!(" (and {mptcp} of MPTCP: this kernel does not report their end)")
        } else {
            String::new()
        };
        Some(format!(
            "no program saw the end of {unseen} of {ended} flows in the last ten minutes{besides}; these \
             flows were reclaimed. Links may have been lost (see the log), or another program changes the \
             callbacks of sockets (see `socklb doctor`)"
        ))
    }

    /// Whether the stored passes cover the whole window.
    fn is_full(&self) -> bool {
        let ends = self.passes.front().zip(self.passes.back());
        ends.is_some_and(|((first, _), (last, _))| *last - *first >= WINDOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns, for each of these passes, whether there is a fault after the pass. The passes are
    /// one minute apart. A pass consists of three numbers: flows with an end that a program
    /// recorded, reclaimed flows, and MPTCP paths among the reclaimed flows.
    fn faults(passes: impl IntoIterator<Item = (u64, u64, u64)>) -> Vec<bool> {
        let mut reclaimed = Reclaimed::<Duration>::default();
        let (mut now, mut seen) = (Duration::from_secs(1000), 0);
        let push = |(more, unseen, mptcp)| {
            now += Duration::from_secs(60);
            seen += more;
            reclaimed.push(now, Ends { seen, reclaimed: unseen, reclaimed_mptcp: mptcp });
            reclaimed.fault().is_some()
        };
        passes.into_iter().map(push).collect()
    }

    #[test]
    fn more_than_one_percent_and_at_least_ten_unseen_ends_are_a_fault() {
        assert_eq!(faults([(0, 0, 0), (0, 9, 0), (0, 1, 0)]), [false, false, true]);
        assert_eq!(faults([(0, 0, 0), (990, 10, 0)]), [false, false], "exactly one in a hundred is no fault");
        assert_eq!(faults([(0, 0, 0), (989, 10, 0)]), [false, true]);
        assert_eq!(faults([(0, 20, 0)]), [true], "flows that ended under an earlier daemon are included");
    }

    #[test]
    fn paths_of_mptcp_are_no_fault() {
        assert_eq!(faults([(0, 0, 0), (5, 20, 11), (0, 1, 0)]), [false, false, true]);
        let mut reclaimed = Reclaimed::<Duration>::default();
        reclaimed.push(Duration::ZERO, Ends { seen: 0, reclaimed: 30, reclaimed_mptcp: 20 });
        assert!(
            reclaimed
                .fault()
                .is_some_and(|fault| fault.contains("of 10 of 30 flows") && fault.contains("20 of MPTCP"))
        );
    }

    #[test]
    fn a_fault_ends_after_ten_minutes() {
        let passes = [(100, 50, 0)].into_iter().chain([(100, 0, 0); 11]);
        let found = faults(passes);
        assert_eq!(found.iter().position(|fault| !fault), Some(10), "{found:?}");
        assert!(found[10..].iter().all(|fault| !fault));
    }
}
