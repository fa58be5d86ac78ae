//! How the endpoint list in a file comes into force: when the file is examined and read, and how a
//! file read, a refusal or a reload changes the list in force.
//!
//! File systems may not answer, the computation of memberships may take seconds, and clients may
//! have no room for a list. So results arrive late and in any order. The feed receives facts with
//! their time and the number of the file read, and returns effects, which the caller executes. It
//! reads no clock and no file, and does not depend on the contents of lists.

use std::collections::BTreeMap;
use std::ops::Add;
use std::time::{Duration, Instant};

pub use self::read_turn::ReadTurn;

mod read_turn;

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

/// When a file that may change is examined and read: never twice at the same time, and without
/// missing a change. The configuration file has a progress, too. `S` is the file's stamp, `T` a
/// time of any clock.
///
/// A watch of the file system reports that there was a change, but not which file has changed. So
/// each file is examined by a *stamp check*. Two versions of a file have different stamps, unless
/// the clock of the stamps is too coarse.
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

/// Why an endpoint file or the configuration file was not read with a usable result, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// The contents are faulty, or the file is missing. A retry is useful only after the file has
    /// changed.
    Faulty(String),
    /// The file cannot be read now, because a file descriptor or memory is not available. A retry
    /// may succeed even if the file does not change.
    Unread(String),
    /// The file system does not answer.
    Hung(String),
}

/// The operations on a list that a feed needs.
pub trait List: Clone {
    /// Whether the two lists have the same contents.
    fn has_same_contents(&self, other: &Self) -> bool;

    /// Whether the two lists come from the same file read.
    fn is_of_the_same_reading(&self, other: &Self) -> bool;

    /// Copies to this list the results that were computed for `other`, an equal list.
    fn take_over(&mut self, other: &Self);
}

/// The action that the caller must take after a file read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FeedAction<L> {
    /// Deliver the list to every client that uses the service, and pass the result to
    /// [`Feed::delivered`].
    Deliver(L),
    /// Log that the file is usable again. Its contents are those of the list in force.
    GoodAgain,
    /// Log that the file cannot be used, with the reason.
    Failed(String),
}

/// The clients' reaction to a delivered list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Whether the membership of some client must be computed first.
    pub is_incomplete: bool,
    /// The clients that have no room for the list, each with the reason.
    pub refused_by: BTreeMap<String, String>,
}

/// The action that the caller must take after a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListDecision<L> {
    /// Compute the memberships of clients for the list, and pass the result to
    /// [`Feed::computed`].
    Compute(L),
    /// The list is in force, and may be stored for later starts.
    InForce {
        /// Whether the list had been refused before. The caller then logs that it is in force now.
        was_refused: bool,
        /// A newer list that was refused, to be delivered again.
        refused: Option<L>,
    },
    /// Do nothing: the list waits until all clients have room.
    Wait,
}

/// The action that the caller must take after a reload of the configuration. The reload has read
/// the file.
#[derive(Clone, Debug)]
pub struct Reloaded<L> {
    /// The effect of the file read during the reload.
    pub effect: Option<FeedAction<L>>,
    /// The newest list so far, which the caller delivers again. It is set if the file read during
    /// the reload failed, or began before another file read that has ended.
    pub retained: Option<L>,
    /// Whether no list exists, so that the caller delivers the list that an earlier daemon has
    /// stored, if there is one.
    pub wants_last_good: bool,
}

/// The state of one service's endpoint list, which comes from a file. `S` is the file's stamp, `T`
/// a time of any clock.
#[derive(Clone, Debug)]
pub struct Feed<S, L, T = Instant> {
    /// The version of the file that was read last, and when to read the file again.
    pub progress: Progress<S, T>,
    /// The highest number of all file reads with an applied result. A file read with a lower number
    /// began earlier, and may have found an older version of the file.
    reading: u64,
    /// The last list that every client accepted.
    in_force: Option<L>,
    /// A list that waits until the memberships of clients are computed.
    computing: Option<L>,
    /// The newest list, if clients have no room for it. The list is delivered again when clients
    /// may have room.
    refused: Option<L>,
    /// The clients without room for the newest list, each with the reason.
    refused_by: BTreeMap<String, String>,
    good_since: Option<T>,
    /// Why the file cannot be used; `None` if it can be used.
    fault: Option<String>,
    /// When the file could first not be used, since it was last usable.
    fault_since: Option<T>,
    /// Whether `failures` includes a refusal of the version that was read last.
    is_refusal_counted: bool,
    failures: u64,
}

impl<S, L, T> Default for Feed<S, L, T> {
    /// The feed of a file that was never read.
    fn default() -> Self {
        Self {
            progress: Progress::default(),
            reading: 0,
            in_force: None,
            computing: None,
            refused: None,
            refused_by: BTreeMap::new(),
            good_since: None,
            fault: None,
            fault_since: None,
            is_refusal_counted: false,
            failures: 0,
        }
    }
}

impl<S: Copy + PartialEq, L: List, T: Copy + Ord + Add<Duration, Output = T>> Feed<S, L, T> {
    /// Applies the result of the file read with this number; `None` means that the file has not
    /// changed. The result is ignored if a file read with a higher number has ended already.
    pub fn read(
        &mut self,
        now: T,
        number: u64,
        version: Version<S>,
        result: Option<Result<L, ReadFailure>>,
    ) -> Option<FeedAction<L>> {
        if self.is_superseded(number) {
            return None;
        }
        self.reading = number;
        let is_another = self.progress.done(version);
        match result? {
            Ok(list) => {
                let was_bad = self.good(now, is_another);
                let is_in_force =
                    self.in_force.as_ref().is_some_and(|before| before.has_same_contents(&list));
                // If another list is waiting, this list is delivered even if it equals the list in
                // force, to replace the waiting list.
                let is_awaited = self.computing.take().is_some() | self.refused.take().is_some();
                if is_awaited || !is_in_force {
                    return Some(FeedAction::Deliver(list));
                }
                was_bad.then_some(FeedAction::GoodAgain)
            }
            Err(fault) => self.fail(now, fault, is_another),
        }
    }

    /// Whether a file read with a higher number than this one has ended already.
    pub fn is_superseded(&self, number: u64) -> bool {
        number < self.reading
    }

    fn good(&mut self, now: T, is_another: bool) -> bool {
        self.is_refusal_counted &= !is_another;
        self.refused_by.clear();
        self.good_since = Some(now);
        self.fault_since = None;
        self.fault.take().is_some()
    }

    /// Notes that the file system does not answer. Until the file system answers again, only the
    /// first call is reported and counted.
    pub fn mark_hung(&mut self, now: T, fault: String) -> Option<FeedAction<L>> {
        self.fault_since.get_or_insert(now);
        let is_new = self.progress.mark_hung();
        is_new.then(|| {
            self.failures += 1;
            self.refused_by.clear();
            self.fault = Some(fault.clone());
            FeedAction::Failed(fault)
        })
    }

    /// Notes that the file cannot be used. A fault is logged once, and counted once per version of
    /// the file.
    fn fail(&mut self, now: T, fault: ReadFailure, is_another: bool) -> Option<FeedAction<L>> {
        self.fault_since.get_or_insert(now);
        let (fault, is_another) = match fault {
            ReadFailure::Hung(fault) => return self.mark_hung(now, fault),
            // Repeated attempts are counted as one fault.
            ReadFailure::Unread(fault) => {
                self.progress.found_nothing();
                (fault, false)
            }
            ReadFailure::Faulty(fault) => (fault, is_another),
        };
        let is_new = self.fault.as_ref() != Some(&fault);
        self.failures += u64::from(is_new || is_another);
        self.refused_by.clear();
        self.fault = Some(fault.clone());
        is_new.then_some(FeedAction::Failed(fault))
    }

    /// Determines the next action for a list after its delivery. The list is in force when every
    /// client has accepted it; until then the previous list remains in force.
    pub fn delivered(&mut self, list: L, delivered: Delivered) -> ListDecision<L> {
        let is_the_list = |other: &mut L| other.is_of_the_same_reading(&list);
        self.computing.take_if(is_the_list);
        let Delivered { is_incomplete, refused_by } = delivered;
        if is_incomplete {
            // Another delivery after the computation decides whether the list is in force.
            self.computing = Some(list.clone());
            return ListDecision::Compute(list);
        }
        if !refused_by.is_empty() {
            self.failures += u64::from(!std::mem::replace(&mut self.is_refusal_counted, true));
            self.refused_by = refused_by;
            self.refused = Some(list);
            return ListDecision::Wait;
        }
        let was_refused = self.refused.take_if(is_the_list).is_some();
        if was_refused {
            self.refused_by.clear();
        }
        self.in_force = Some(list);
        ListDecision::InForce { was_refused, refused: self.room_appeared() }
    }

    /// Notes that the computation for a list has ended. Returns the list for another delivery,
    /// unless a different list has replaced it in the meantime.
    pub fn computed(&mut self, computed: &L) -> Option<L> {
        let list = self.computing.as_mut().filter(|list| list.is_of_the_same_reading(computed))?;
        list.take_over(computed);
        Some(list.clone())
    }

    /// Call this when clients may have room for a refused list. Returns the refused list for
    /// another delivery. Returns nothing while a computation is running: after it,
    /// [`Feed::delivered`] returns the refused list.
    pub fn room_appeared(&self) -> Option<L> {
        self.refused.clone().filter(|_| self.computing.is_none())
    }

    /// Continues a feed after a reload of the configuration. The reload has read the file as file
    /// read number `number`. If this file read failed, or began before another file read that has
    /// ended, the newest list so far is delivered again.
    ///
    /// A version of the file that cannot be used is counted as one failure, however often the
    /// configuration is read.
    pub fn reload(
        before: Option<Self>,
        is_same_file: bool,
        now: T,
        number: u64,
        version: Version<S>,
        result: Result<L, ReadFailure>,
    ) -> (Self, Reloaded<L>) {
        let mut feed = before.unwrap_or_default();
        let newest = feed.newest().cloned();
        // A newer file read may have ended in the meantime.
        if is_same_file && feed.is_superseded(number) {
            return (feed, Reloaded { effect: None, retained: newest, wants_last_good: false });
        }
        feed.reading = number;
        if !is_same_file {
            feed.progress = Progress::default();
        }
        feed.progress.answers();
        let is_another = feed.progress.done(version);
        let reloaded = match result {
            Ok(list) => {
                feed.good(now, is_another);
                (feed.computing, feed.refused) = (None, None);
                Reloaded { effect: Some(FeedAction::Deliver(list)), retained: None, wants_last_good: false }
            }
            Err(fault) => {
                let effect = feed.fail(now, fault, is_another);
                Reloaded { effect, wants_last_good: newest.is_none(), retained: newest }
            }
        };
        (feed, reloaded)
    }

    /// The newest list that is in force, or will be after its computation.
    pub fn newest(&self) -> Option<&L> {
        self.computing.as_ref().or(self.in_force.as_ref())
    }

    /// The list in force.
    pub fn in_force(&mut self) -> Option<&mut L> {
        self.in_force.as_mut()
    }

    /// All lists that the feed stores.
    pub fn lists(&mut self) -> impl Iterator<Item = &mut L> {
        self.in_force.iter_mut().chain(&mut self.computing).chain(&mut self.refused)
    }

    /// Why the file's contents are not in force at all clients; `None` if they are.
    pub fn error(&self) -> Option<String> {
        let refusal = self.refused_by.first_key_value();
        self.fault.clone().or_else(|| refusal.map(|(client, refused)| format!("client {client}: {refused}")))
    }

    /// Why the file's contents are not in force at a client; `None` if they are.
    pub fn error_of(&self, client: &str) -> Option<&str> {
        self.refused_by.get(client).or(self.fault.as_ref()).map(String::as_str)
    }

    /// Since when the file cannot be used; `None` if it can be used.
    pub fn fault_since(&self) -> Option<T> {
        self.fault_since
    }

    /// The time of the last file read with a usable result; `None` if there was none.
    pub fn good_since(&self) -> Option<T> {
        self.good_since
    }

    /// The number of faults and refusals so far.
    pub fn failures(&self) -> u64 {
        self.failures
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
}
