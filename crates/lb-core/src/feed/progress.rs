//! How far a file has been looked at and read, and whose turn it is to read: both without overlap, and nothing is missed.
//!
//! A watch says that something has changed, not what; a stamp distinguishes one version of a file from the next, if the clock that
//! it was made by is fine enough. It reads no clock and no file.

use std::ops::Add;
use std::time::{Duration, Instant};

/// A file is read this long after the first change of a burst.
pub const SETTLE: Duration = Duration::from_millis(200);

/// Which version of a file was looked at or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version<S> {
    /// Its stamp; `None` if no file could be found.
    pub stamp: Option<S>,
    /// Whether the stamp distinguishes it from a later version.
    pub is_settled: bool,
}

/// How far a file that may change has been read, by any clock.
#[derive(Clone, Copy, Debug)]
pub struct Progress<S, T = Instant> {
    /// The version that was read last.
    seen: Version<S>,
    /// When it is to be read.
    due: Option<T>,
    /// Whether it is being looked at, or read, now.
    is_busy: bool,
    /// Whether its file system does not answer. Once it does, the file is read whatever its version.
    is_silent: bool,
}

impl<S, T> Default for Progress<S, T> {
    /// Of a file of which nothing is known: whatever is found is another version.
    fn default() -> Self {
        Self { seen: Version { stamp: None, is_settled: false }, due: None, is_busy: false, is_silent: false }
    }
}

impl<S: Copy + PartialEq, T: Copy + Ord + Add<Duration, Output = T>> Progress<S, T> {
    /// Of a file of which this version was read.
    pub fn of(seen: Version<S>) -> Self {
        Self { seen, ..Self::default() }
    }

    /// Something changed. The first change of a burst sets the time of reading; later ones do not move it.
    pub fn changed(&mut self, now: T) {
        self.due.get_or_insert(now + SETTLE);
    }

    /// Whether to look now which version it is: a watch can be lost without a word. What was seen is for
    /// [`Progress::looked`].
    pub fn begin_look(&mut self) -> bool {
        !std::mem::replace(&mut self.is_busy, true)
    }

    /// A look has found what lies there. Returns whether that is another version than was read.
    pub fn looked(&mut self, stamp: Option<S>) -> bool {
        self.is_busy = false;
        self.answers();
        !self.seen.is_settled || stamp != self.seen.stamp
    }

    /// Its file system answers, as far as is known.
    pub fn answers(&mut self) {
        self.is_silent = false;
    }

    /// A look has found nothing out. Whatever is found next is another version.
    pub fn found_nothing(&mut self) {
        *self = Self { due: self.due, is_silent: self.is_silent, ..Self::default() };
    }

    /// Its file system does not answer. Returns whether that is new.
    pub fn fell_silent(&mut self) -> bool {
        self.found_nothing();
        !std::mem::replace(&mut self.is_silent, true)
    }

    /// When it is to be read next.
    pub fn due(&self) -> Option<T> {
        self.due.filter(|_| !self.is_busy)
    }

    /// Begins to read if it is time, and returns the version that need not be read again, if that is certain. What changes
    /// from here on starts the next period.
    pub fn begin(&mut self, now: T) -> Option<Option<Option<S>>> {
        if self.is_busy || self.due.is_none_or(|due| due > now) {
            return None;
        }
        self.due = None;
        self.is_busy = true;
        Some(self.seen.is_settled.then_some(self.seen.stamp))
    }

    /// Reading of a version has ended. Returns whether it is another one than was read before.
    pub fn done(&mut self, version: Version<S>) -> bool {
        let is_another = version.stamp != self.seen.stamp;
        *self = Self { due: self.due, is_silent: self.is_silent, ..Self::of(version) };
        is_another
    }
}

/// Whose turn it is to read something that is read once at a time, and on request: a request that comes while it is being
/// read is for another reading after that one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadTurn {
    /// It is not being read.
    #[default]
    Idle,
    /// It is being read.
    Reading {
        /// Whether an operator asked for it, who wants an answer.
        is_asked: bool,
        /// The request for the next reading, and whether an operator is among those who made it.
        next: Option<bool>,
    },
}

impl ReadTurn {
    /// It is to be read. Returns whether to begin at once.
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

    /// The reading has ended. Returns whether it is an answer to an operator, and the request that came meanwhile.
    pub fn ended(&mut self) -> (bool, Option<bool>) {
        match std::mem::take(self) {
            Self::Idle => (false, None),
            Self::Reading { is_asked, next } => (is_asked, next),
        }
    }

    /// Whether it is being read.
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
        // What changes while it is read is for the next time.
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
