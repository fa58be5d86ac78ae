//! How an endpoint list comes into force: in which order its file is looked at and read, and what a
//! reading, a refusal or a reload changes about the list in force.
//!
//! File systems may not answer, the computation of what client tasks use of a list may take
//! seconds, and a list may find no room. All of this ends late and in any order. The feed receives
//! facts with their time and reading number, and returns effects for the caller to carry out. It
//! reads no clock and no file, and knows nothing of paths, of clients except their names, or of the
//! contents of lists.

use std::collections::BTreeMap;
use std::ops::Add;
use std::time::{Duration, Instant};

pub use self::progress::{Progress, ReadTurn, SETTLE, Version};

mod progress;

/// Why a reading of an endpoint file or of the configuration gave no usable result, as a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// The contents are wrong, or the file is missing. This stays so until the file changes.
    Faulty(String),
    /// The file cannot be read now, because a descriptor or memory is missing. This may change
    /// while the file does not.
    Unread(String),
    /// The file system does not answer.
    Silent(String),
}

/// What a feed must know about a list.
pub trait List: Clone {
    /// Whether the two lists have the same contents.
    fn says_the_same(&self, other: &Self) -> bool;

    /// Whether the two lists come from the same reading.
    fn is_of_the_same_reading(&self, other: &Self) -> bool;

    /// Takes over the results that were computed for an equal list.
    fn take_over(&mut self, other: &Self);
}

/// What the caller has to do after a reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect<L> {
    /// Deliver the list to every client that uses the service, and pass the result to
    /// [`Feed::delivered`].
    Deliver(L),
    /// Log that the file is good again, with the same contents as the list in force.
    GoodAgain,
    /// Log that the file cannot be used, with the reason.
    Failed(String),
}

/// The clients' reaction to a delivered list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Whether the result for some client still has to be computed.
    pub is_incomplete: bool,
    /// The clients that have no room for the list, and what each of them lacks.
    pub refused_by: BTreeMap<String, String>,
}

/// What the caller has to do after a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListDecision<L> {
    /// Compute what clients use of the list, and pass the result to [`Feed::computed`].
    Compute(L),
    /// The list is in force, and may be stored for later starts.
    Keep {
        /// Whether to log that it had been refused.
        was_refused: bool,
        /// A newer list that was refused, to be delivered again.
        refused: Option<L>,
    },
    /// Do nothing: the list waits for room.
    Wait,
}

/// What the caller has to do after a reload that named the file.
#[derive(Clone, Debug)]
pub struct Reloaded<L> {
    /// The effect of the reading.
    pub effect: Option<Effect<L>>,
    /// The list that was in force, to be delivered again, because the reading failed or is older.
    pub kept: Option<L>,
    /// Whether to deliver the list of an earlier run, if there is one, because no other list
    /// exists.
    pub wants_last_good: bool,
}

/// The state of one service's endpoint list that comes from a file, generic over the clock.
#[derive(Clone, Debug)]
pub struct Feed<S, L, T = Instant> {
    /// How far the file has been read.
    pub progress: Progress<S, T>,
    /// The number of the latest reading that counted. Readings that began earlier show an older
    /// version of the file.
    reading: u64,
    /// The last list that every client accepted.
    in_force: Option<L>,
    /// A list that waits for the computation of what client tasks use of it.
    computing: Option<L>,
    /// The newest list, if clients have no room for it. It is delivered again when there may be
    /// room.
    refused: Option<L>,
    /// The clients without room for it, and what each of them lacks.
    refused_by: BTreeMap<String, String>,
    good_since: Option<T>,
    /// Why the file cannot be used; `None` if it can.
    fault: Option<String>,
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
            is_refusal_counted: false,
            failures: 0,
        }
    }
}

impl<S: Copy + PartialEq, L: List, T: Copy + Ord + Add<Duration, Output = T>> Feed<S, L, T> {
    /// Applies the result of reading `number`; `None` means that the file has not changed. A result
    /// is ignored if a reading with a higher number has already ended.
    pub fn read(
        &mut self,
        now: T,
        number: u64,
        version: Version<S>,
        result: Option<Result<L, ReadFailure>>,
    ) -> Option<Effect<L>> {
        if number < self.reading {
            return None;
        }
        self.reading = number;
        let is_another = self.progress.done(version);
        match result? {
            Ok(list) => {
                let was_bad = self.good(now, is_another);
                let is_in_force = self.in_force.as_ref().is_some_and(|before| before.says_the_same(&list));
                // The file may have returned to the contents that are in force.
                let is_awaited = self.computing.take().is_some() | self.refused.take().is_some();
                if is_awaited || !is_in_force {
                    return Some(Effect::Deliver(list));
                }
                was_bad.then_some(Effect::GoodAgain)
            }
            Err(fault) => self.fail(fault, is_another),
        }
    }

    fn good(&mut self, now: T, is_another: bool) -> bool {
        self.is_refusal_counted &= !is_another;
        self.refused_by.clear();
        self.good_since = Some(now);
        self.fault.take().is_some()
    }

    /// Notes that the file's file system does not answer. Reports and counts this once.
    pub fn fell_silent(&mut self, fault: String) -> Option<Effect<L>> {
        let is_new = self.progress.fell_silent();
        is_new.then(|| {
            self.failures += 1;
            self.refused_by.clear();
            self.fault = Some(fault.clone());
            Effect::Failed(fault)
        })
    }

    /// Notes that the file cannot be used. Reports this once per fault, and counts it once per
    /// fault and version.
    fn fail(&mut self, fault: ReadFailure, is_another: bool) -> Option<Effect<L>> {
        let (fault, is_another) = match fault {
            ReadFailure::Silent(fault) => return self.fell_silent(fault),
            // Repeated attempts are one fault.
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
        is_new.then_some(Effect::Failed(fault))
    }

    /// Decides about a list after its delivery. It is in force once every client has accepted it;
    /// until then the earlier list is.
    pub fn delivered(&mut self, list: L, delivered: Delivered) -> ListDecision<L> {
        let is_the_list = |other: &mut L| other.is_of_the_same_reading(&list);
        self.computing.take_if(is_the_list);
        let Delivered { is_incomplete, refused_by } = delivered;
        if is_incomplete {
            // The delivery after the computation decides whether it is in force.
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
        ListDecision::Keep { was_refused, refused: self.room_appeared() }
    }

    /// Notes that the computation for a list has ended. Returns the list for delivery, unless
    /// another list has taken its place in the meantime.
    pub fn computed(&mut self, computed: &L) -> Option<L> {
        let list = self.computing.as_mut().filter(|list| list.is_of_the_same_reading(computed))?;
        list.take_over(computed);
        Some(list.clone())
    }

    /// To be called when there may be room. Returns the refused list for another delivery, if there
    /// is one and no computation is under way; the end of a computation leads here again.
    pub fn room_appeared(&self) -> Option<L> {
        self.refused.clone().filter(|_| self.computing.is_none())
    }

    /// Continues a feed after a reload of the configuration, which read the file as reading
    /// `number`. If that reading has no better result, the list in force is delivered again,
    /// because it is better than one of an earlier run.
    ///
    /// A version that cannot be used counts as one failure, however often the configuration is
    /// read.
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
        // In the meantime, a newer reading of the same file may have ended.
        if is_same_file && feed.reading > number {
            return (feed, Reloaded { effect: None, kept: newest, wants_last_good: false });
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
                Reloaded { effect: Some(Effect::Deliver(list)), kept: None, wants_last_good: false }
            }
            Err(fault) => {
                let effect = feed.fail(fault, is_another);
                Reloaded { effect, wants_last_good: newest.is_none(), kept: newest }
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

    /// Why the file's contents are not in force everywhere; `None` if they are.
    pub fn error(&self) -> Option<String> {
        let refusal = self.refused_by.first_key_value();
        self.fault.clone().or_else(|| refusal.map(|(client, refused)| format!("client {client}: {refused}")))
    }

    /// Why the file's contents are not in force at a client; `None` if they are.
    pub fn error_of(&self, client: &str) -> Option<&str> {
        self.refused_by.get(client).or(self.fault.as_ref()).map(String::as_str)
    }

    /// When a reading last had a good result; `None` if no reading has.
    pub fn good_since(&self) -> Option<T> {
        self.good_since
    }

    /// The number of versions that could not be used and of faults.
    pub fn failures(&self) -> u64 {
        self.failures
    }
}
