//! When a file is to be looked at and read: never twice at the same time, and without missing a
//! change.
//!
//! A watch reports that something has changed, but not what. A stamp distinguishes a version of a
//! file from the next one, if the clock behind the stamp is fine enough. This file reads no clock
//! and no file.

use std::ops::Add;
use std::time::{Duration, Instant};

/// The delay between the first change of a burst and the reading.
pub const SETTLE: Duration = Duration::from_millis(200);

/// The version of a file at a look or a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version<S> {
    /// Its stamp; `None` if no file was found.
    pub stamp: Option<S>,
    /// Whether the stamp distinguishes it from a later version.
    pub is_settled: bool,
}

/// How far a file that may change has been read, generic over the clock.
#[derive(Clone, Copy, Debug)]
pub struct Progress<S, T = Instant> {
    /// The version that was read last.
    seen: Version<S>,
    /// When the file is to be read.
    due: Option<T>,
    /// Whether a look or a reading is under way.
    is_busy: bool,
    /// Whether the file system does not answer. Once it answers, the file is read whatever its
    /// version is.
    is_silent: bool,
}

impl<S, T> Default for Progress<S, T> {
    /// An unknown file: any version that is found is a new one.
    fn default() -> Self {
        Self { seen: Version { stamp: None, is_settled: false }, due: None, is_busy: false, is_silent: false }
    }
}

impl<S: Copy + PartialEq, T: Copy + Ord + Add<Duration, Output = T>> Progress<S, T> {
    /// A file of which this version was read.
    pub fn of(seen: Version<S>) -> Self {
        Self { seen, ..Self::default() }
    }

    /// Notes a change. The first change of a burst sets the time of reading; later ones do not move
    /// it.
    pub fn changed(&mut self, now: T) {
        self.due.get_or_insert(now + SETTLE);
    }

    /// Begins a look at the file's version, unless a look or a reading is under way. Returns
    /// whether it has begun; its result is for [`Progress::looked`]. Looks are necessary because a
    /// watch can be lost without notice.
    pub fn begin_look(&mut self) -> bool {
        !std::mem::replace(&mut self.is_busy, true)
    }

    /// Ends a look that found this stamp. Returns whether the file may have changed since it was
    /// read: the stamp differs, or the earlier one is not settled.
    pub fn looked(&mut self, stamp: Option<S>) -> bool {
        self.is_busy = false;
        self.answers();
        !self.seen.is_settled || stamp != self.seen.stamp
    }

    /// Notes that the file system answers, as far as is known.
    pub fn answers(&mut self) {
        self.is_silent = false;
    }

    /// Ends a look without a result. Whatever is found next counts as another version.
    pub fn found_nothing(&mut self) {
        *self = Self { due: self.due, is_silent: self.is_silent, ..Self::default() };
    }

    /// Notes that the file system does not answer. Returns whether this is new.
    pub fn fell_silent(&mut self) -> bool {
        self.found_nothing();
        !std::mem::replace(&mut self.is_silent, true)
    }

    /// When the file is to be read next; `None` while a look or a reading is under way.
    pub fn due(&self) -> Option<T> {
        self.due.filter(|_| !self.is_busy)
    }

    /// Begins a reading if it is due; `None` if it is not. Otherwise returns the stamp of the
    /// version that need not be read again, or `Some(None)` if every version must be read. Changes
    /// from here on belong to the next reading.
    pub fn begin(&mut self, now: T) -> Option<Option<Option<S>>> {
        if self.is_busy || self.due.is_none_or(|due| due > now) {
            return None;
        }
        self.due = None;
        self.is_busy = true;
        Some(self.seen.is_settled.then_some(self.seen.stamp))
    }

    /// Ends the reading of a version. Returns whether it differs from the version read before.
    pub fn done(&mut self, version: Version<S>) -> bool {
        let is_another = version.stamp != self.seen.stamp;
        *self = Self { due: self.due, is_silent: self.is_silent, ..Self::of(version) };
        is_another
    }
}

/// Serialises the readings of something that is read on request. A request during a reading starts
/// another reading after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadTurn {
    /// No reading is under way.
    #[default]
    Idle,
    /// A reading is under way.
    Reading {
        /// Whether an operator requested it and waits for the result.
        is_asked: bool,
        /// The request for the next reading, if any: whether an operator is among the requesters.
        next: Option<bool>,
    },
}

impl ReadTurn {
    /// Requests a reading. Returns whether to begin it at once.
    pub fn request(&mut self, is_asked: bool) -> bool {
        match self {
            Self::Idle => {
                *self = Self::Reading { is_asked, next: None };
                true
            }
            Self::Reading { next, .. } => {
                *next = Some(next.unwrap_or(false) || is_asked);
                false
            }
        }
    }

    /// Ends the reading. Returns whether an operator waits for its result, and the request that
    /// arrived in the meantime.
    pub fn ended(&mut self) -> (bool, Option<bool>) {
        match std::mem::take(self) {
            Self::Idle => (false, None),
            Self::Reading { is_asked, next } => (is_asked, next),
        }
    }

    /// Whether a reading is under way.
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
            assert_eq!(progress.begin(ms(now)), None, "at {now}");
        }
        assert_eq!(progress.due(), Some(SETTLE));
        assert_eq!(progress.begin(SETTLE), Some(Some(Some(1))), "version 1 need not be read again");
        // A change during a reading belongs to the next reading.
        progress.changed(ms(210));
        assert_eq!((progress.due(), progress.begin(ms(999))), (None, None), "it is being read");
        assert!(progress.done(settled(Some(2))));
        assert_eq!(progress.due(), Some(ms(410)));
        assert_eq!(progress.begin(ms(410)), Some(Some(Some(2))));
        assert!(!progress.done(settled(Some(2))));
    }

    #[test]
    fn another_version_is_seen_by_its_stamp_if_the_stamp_can_tell() {
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
            assert!(progress.begin_look() && !progress.begin_look(), "one look at a time");
            assert_eq!(progress.looked(found), is_another, "{read:?}, then {found:?}");
            assert!(progress.begin_look());
        }
    }

    #[test]
    fn a_file_system_that_answers_again_is_read_whatever_lies_there() {
        let mut progress = Clocked::of(settled(Some(1)));
        assert_eq!([progress.fell_silent(), progress.fell_silent()], [true, false], "reported once");
        assert!(progress.looked(Some(1)));
        assert!(progress.fell_silent());
    }

    #[test]
    fn a_request_during_a_reading_is_for_the_next_one() {
        let mut turn = ReadTurn::default();
        assert!(!turn.is_reading() && turn.request(false) && turn.is_reading());
        assert_eq!([turn.request(false), turn.request(true), turn.request(false)], [false; 3]);
        assert_eq!(turn.ended(), (false, Some(true)), "an operator asked meanwhile");
        assert!(turn.request(true));
        assert_eq!(turn.ended(), (true, None));
    }
}
