//! How an endpoint list comes into force: in which order its file is looked at and read, and what a reading, a refusal and
//! a reload do to the list that is in force.
//!
//! Files may not answer, what client tasks use of a list may take seconds to compute, and a list may find no room: all of
//! that ends late and in any order. Facts come in with their time and their numbers, effects go out to be carried out.
//! It reads no clock and no file, and knows nothing of paths, of clients but their names, or of what a list says.

use std::collections::BTreeMap;
use std::ops::Add;
use std::time::{Duration, Instant};

pub use self::progress::{Progress, ReadTurn, SETTLE, Version};

mod progress;

/// Why a reading of a file gave nothing to use, in words: of an endpoint file, or of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// What was read is wrong, or nothing is there: that stays so until the file changes.
    Faulty(String),
    /// It cannot be read now, for want of a descriptor or of memory: that may change while the file does not.
    Unread(String),
    /// Its file system does not answer.
    Silent(String),
}

/// What a feed must know of a list.
pub trait List: Clone {
    /// Whether it says the same as another.
    fn says_the_same(&self, other: &Self) -> bool;

    /// Whether it is not only equal to another, but comes of the same reading.
    fn is_of_the_same_reading(&self, other: &Self) -> bool;

    /// Takes over what was computed for an equal list.
    fn take_over(&mut self, other: &Self);
}

/// What to do about a reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect<L> {
    /// Deliver the list to every client that uses the service; what comes of it is for [`Feed::delivered`].
    Deliver(L),
    /// Log that the file is good again, and says what is in force.
    GoodAgain,
    /// Log that the file cannot be used, and why.
    Failed(String),
}

/// What clients made of a list that was delivered to them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Whether what a client uses of it is still to be computed.
    pub is_incomplete: bool,
    /// Which clients have no room for it, and what each of them lacks.
    pub refused_by: BTreeMap<String, String>,
}

/// What to do about a list that was delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListDecision<L> {
    /// Compute what clients use of it; the result is for [`Feed::computed`].
    Compute(L),
    /// It is in force, and may be kept for later starts.
    Keep {
        /// Whether to log that it had been refused.
        was_refused: bool,
        /// A newer list that was refused, to be delivered again.
        refused: Option<L>,
    },
    /// It waits for room.
    Wait,
}

/// What to do about a file that another configuration names, too.
#[derive(Clone, Debug)]
pub struct Reloaded<L> {
    /// What follows from the reading.
    pub effect: Option<Effect<L>>,
    /// The list that was in force, to be delivered anew, for the reading gave none or is older.
    pub kept: Option<L>,
    /// Whether the list of an earlier run is to be delivered if there is one: there is no other.
    pub wants_last_good: bool,
}

/// How the endpoint list of one service fares that comes from a file, by any clock.
#[derive(Clone, Debug)]
pub struct Feed<S, L, T = Instant> {
    /// How far the file has been read.
    pub progress: Progress<S, T>,
    /// The number of the last reading that was taken in. One that was begun before it says what the file said earlier.
    reading: u64,
    /// The list that every client took last.
    in_force: Option<L>,
    /// A list of which it is being computed what client tasks use.
    computing: Option<L>,
    /// The newest list, if clients have no room for it: delivered again when there is some.
    refused: Option<L>,
    /// Which clients have none, and what each of them lacks.
    refused_by: BTreeMap<String, String>,
    good_since: Option<T>,
    /// Why the file cannot be used, if it cannot.
    fault: Option<String>,
    /// Whether a refusal of the version that was read last is among the failures.
    is_refusal_counted: bool,
    failures: u64,
}

impl<S, L, T> Default for Feed<S, L, T> {
    /// Of a file that was never read.
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
    /// A reading has ended; without a result the file was as it is known. Of two, the one that was begun later counts.
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
                // What is in force may be what the file has gone back to.
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

    /// The file's file system does not answer. Reported and counted once.
    pub fn fell_silent(&mut self, fault: String) -> Option<Effect<L>> {
        let is_new = self.progress.fell_silent();
        is_new.then(|| {
            self.failures += 1;
            self.refused_by.clear();
            self.fault = Some(fault.clone());
            Effect::Failed(fault)
        })
    }

    /// The file cannot be used: reported once per fault, counted once per fault and version.
    fn fail(&mut self, fault: ReadFailure, is_another: bool) -> Option<Effect<L>> {
        let (fault, is_another) = match fault {
            ReadFailure::Silent(fault) => return self.fell_silent(fault),
            // One fault, however often it is tried again.
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

    /// The list was delivered. It is in force once every client took it; until then the one before is.
    pub fn delivered(&mut self, list: L, delivered: Delivered) -> ListDecision<L> {
        let is_the_list = |other: &mut L| other.is_of_the_same_reading(&list);
        self.computing.take_if(is_the_list);
        let Delivered { is_incomplete, refused_by } = delivered;
        if is_incomplete {
            // Whether it is in force is decided when it comes back.
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

    /// What client tasks use of a list was computed. Returns the list to be delivered, if this is the one that waits for it:
    /// another may have come since.
    pub fn computed(&mut self, computed: &L) -> Option<L> {
        let list = self.computing.as_mut().filter(|list| list.is_of_the_same_reading(computed))?;
        list.take_over(computed);
        Some(list.clone())
    }

    /// There may be room. Returns the list to be delivered again, if one was refused and nothing is being computed: what
    /// comes of that brings it up again.
    pub fn room_appeared(&self) -> Option<L> {
        self.refused.clone().filter(|_| self.computing.is_none())
    }

    /// Another configuration names the service, and has read its file as reading `number`. What was in force is delivered
    /// anew where the reading gives nothing better: a list that is in force is better than one of an earlier run.
    ///
    /// A version that cannot be used is one failure, however often the configuration is read.
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
        // The same file may have been read again meanwhile, and then says something newer.
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

    /// The newest list that is in force, or will be once it is computed.
    pub fn newest(&self) -> Option<&L> {
        self.computing.as_ref().or(self.in_force.as_ref())
    }

    /// The list in force.
    pub fn in_force(&mut self) -> Option<&mut L> {
        self.in_force.as_mut()
    }

    /// All lists that it remembers.
    pub fn lists(&mut self) -> impl Iterator<Item = &mut L> {
        self.in_force.iter_mut().chain(&mut self.computing).chain(&mut self.refused)
    }

    /// Why what the file says is not in force everywhere, if it is not.
    pub fn error(&self) -> Option<String> {
        let refusal = self.refused_by.first_key_value();
        self.fault.clone().or_else(|| refusal.map(|(client, refused)| format!("client {client}: {refused}")))
    }

    /// Why what the file says is not in force at a client, if it is not.
    pub fn error_of(&self, client: &str) -> Option<&str> {
        self.refused_by.get(client).or(self.fault.as_ref()).map(String::as_str)
    }

    /// Since when the file is known to be good; `None` if it never was.
    pub fn good_since(&self) -> Option<T> {
        self.good_since
    }

    /// How many versions could not be used, or faults came up.
    pub fn failures(&self) -> u64 {
        self.failures
    }
}
