//! When a file is examined and read: never twice at the same time, and without missing a change.
//!
//! A watch of the file system reports that there was a change, but not which file has changed. So
//! each file is examined by a *stamp check*. Two versions of a file have different stamps, unless
//! the clock of the stamps is too coarse.

use std::ops::Add;
use std::time::{Duration, Instant};

/// The delay between the first change of a burst and the file read.
pub const SETTLE: Duration = Duration::from_millis(200);

/// The version of a file that a stamp check or a file read found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version<S> {
    /// The file's stamp; `None` if no file was found.
    pub stamp: Option<S>,
    /// Whether every later version will have another stamp.
    pub is_settled: bool,
}

/// The progress of reading a file that may change. `S` is the file's stamp, `T` a time of any
/// clock.
#[derive(Clone, Copy, Debug)]
pub struct Progress<S, T = Instant> {
    /// The version that was read last.
    seen: Version<S>,
    /// When the file must be read next.
    due: Option<T>,
    /// Whether a stamp check or a file read is running.
    is_busy: bool,
    /// Whether the file system does not answer. When it answers again, the file is read, even if
    /// its stamp has not changed.
    is_hung: bool,
}

impl<S, T> Default for Progress<S, T> {
    /// A file of which no version is known, so that every version is treated as new.
    fn default() -> Self {
        Self { seen: Version { stamp: None, is_settled: false }, due: None, is_busy: false, is_hung: false }
    }
}

impl<S: Copy + PartialEq, T: Copy + Ord + Add<Duration, Output = T>> Progress<S, T> {
    /// A file of which this version has been read.
    pub fn of(seen: Version<S>) -> Self {
        Self { seen, ..Self::default() }
    }

    /// Notes a change. The first change of a burst sets the time of the file read; later changes do
    /// not delay it.
    pub fn changed(&mut self, now: T) {
        self.due.get_or_insert(now + SETTLE);
    }

    /// Begins a stamp check, unless a stamp check or a file read is running. Returns whether the
    /// check has begun; the caller passes its result to [`Progress::looked`]. Stamp checks are
    /// necessary because a watch can stop working without notice.
    pub fn begin_look(&mut self) -> bool {
        !std::mem::replace(&mut self.is_busy, true)
    }

    /// Ends a stamp check that found this stamp. Returns whether the file may have changed since it
    /// was read: the stamp differs, or the version that was read is not settled.
    pub fn looked(&mut self, stamp: Option<S>) -> bool {
        self.is_busy = false;
        self.answers();
        !self.seen.is_settled || stamp != self.seen.stamp
    }

    /// Notes that the file system answers.
    pub fn answers(&mut self) {
        self.is_hung = false;
    }

    /// Ends a stamp check or a file read without a result. The next version that is found is
    /// treated as changed.
    pub fn found_nothing(&mut self) {
        *self = Self { due: self.due, is_hung: self.is_hung, ..Self::default() };
    }

    /// Notes that the file system does not answer. Returns whether it answered before.
    pub fn mark_hung(&mut self) -> bool {
        self.found_nothing();
        !std::mem::replace(&mut self.is_hung, true)
    }

    /// When the file must be read next; `None` while a stamp check or a file read is running.
    pub fn due(&self) -> Option<T> {
        self.due.filter(|_| !self.is_busy)
    }

    /// Begins a file read if one is due. Returns `None` if no file read is due; `Some(Some(stamp))`
    /// if the version with this stamp need not be read again; `Some(None)` if every version must be
    /// read. Changes after this call belong to the next file read.
    pub fn begin(&mut self, now: T) -> Option<Option<Option<S>>> {
        if self.is_busy || self.due.is_none_or(|due| due > now) {
            return None;
        }
        self.due = None;
        self.is_busy = true;
        Some(self.seen.is_settled.then_some(self.seen.stamp))
    }

    /// Ends a file read that found this version. Returns whether the stamp differs from that of the
    /// previous version.
    pub fn done(&mut self, version: Version<S>) -> bool {
        let is_another = version.stamp != self.seen.stamp;
        *self = Self { due: self.due, is_hung: self.is_hung, ..Self::of(version) };
        is_another
    }
}

/// Serialises requested file reads. A request during a file read starts another file read after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadTurn {
    /// No file read is running.
    #[default]
    Idle,
    /// A file read is running.
    Reading {
        /// Whether an operator requested the file read and waits for its result.
        is_requested: bool,
        /// `None` if no further file read was requested, else whether an operator has requested it.
        next: Option<bool>,
    },
}

impl ReadTurn {
    /// Requests a file read. Returns whether to begin it at once.
    pub fn request(&mut self, is_requested: bool) -> bool {
        match self {
            Self::Idle => {
                *self = Self::Reading { is_requested, next: None };
                true
            }
            Self::Reading { next, .. } => {
                *next = Some(next.unwrap_or(false) || is_requested);
                false
            }
        }
    }

    /// Ends the file read. Returns whether an operator waits for its result. The second value is
    /// `None` if no further file read was requested in the meantime, else whether an operator has
    /// requested it.
    pub fn ended(&mut self) -> (bool, Option<bool>) {
        match std::mem::take(self) {
            Self::Idle => (false, None),
            Self::Reading { is_requested, next } => (is_requested, next),
        }
    }

    /// Whether a file read is running.
    pub fn is_reading(self) -> bool {
        self != Self::Idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Clocked = Progress<u32, Duration>;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn settled(stamp: Option<u32>) -> Version<u32> {
        Version { stamp, is_settled: true }
    }

    #[test]
    fn a_burst_of_changes_is_read_once_and_in_time() {
        let mut progress = Clocked::of(settled(Some(1)));
        for now in [0, 50, 150, 199] {
            progress.changed(ms(now));
            assert_eq!(progress.begin(ms(now)), None, "at {now} ms");
        }
        assert_eq!(progress.due(), Some(SETTLE));
        assert_eq!(progress.begin(SETTLE), Some(Some(Some(1))), "version 1 need not be read again");
        // A change during a file read belongs to the next file read.
        progress.changed(ms(210));
        assert_eq!((progress.due(), progress.begin(ms(999))), (None, None), "a file read is running");
        assert!(progress.done(settled(Some(2))));
        assert_eq!(progress.due(), Some(ms(410)));
        assert_eq!(progress.begin(ms(410)), Some(Some(Some(2))));
        assert!(!progress.done(settled(Some(2))));
    }

    #[test]
    fn a_changed_stamp_or_an_unsettled_version_means_another_version() {
        let cases = [
            (settled(Some(1)), Some(1), false),
            (settled(Some(1)), Some(2), true),
            (settled(Some(1)), None, true),
            (settled(None), None, false),
            (settled(None), Some(1), true),
            (Version { stamp: Some(1), is_settled: false }, Some(1), true),
        ];
        for (read, found, is_another) in cases {
            let mut progress = Clocked::of(read);
            assert!(
                progress.begin_look() && !progress.begin_look(),
                "only one stamp check may run at a time"
            );
            assert_eq!(progress.looked(found), is_another, "{read:?}, then {found:?}");
            assert!(progress.begin_look());
        }
    }

    #[test]
    fn a_file_is_read_when_its_file_system_answers_again() {
        let mut progress = Clocked::of(settled(Some(1)));
        assert_eq!(
            [progress.mark_hung(), progress.mark_hung()],
            [true, false],
            "a hung file system is reported once"
        );
        assert!(progress.looked(Some(1)));
        assert!(progress.mark_hung());
    }

    #[test]
    fn a_request_during_a_reading_starts_another_reading() {
        let mut turn = ReadTurn::default();
        assert!(!turn.is_reading() && turn.request(false) && turn.is_reading());
        assert_eq!([turn.request(false), turn.request(true), turn.request(false)], [false; 3]);
        assert_eq!(turn.ended(), (false, Some(true)), "an operator has requested the next file read");
        assert!(turn.request(true));
        assert_eq!(turn.ended(), (true, None));
    }
}
