//! How a list comes into force, in virtual time: cases from practice, and properties that must hold
//! for any order in which operations end.
//!
//! The world around a feed consists of a file, a client that may have no room, and file reads,
//! reloads and computations that are running. The tests must not know how a feed stores its state.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use lb_core::feed::{Delivered, Feed, FeedAction, List, ListDecision, ReadFailure, ReadTurn, Version};
use proptest::prelude::*;

/// A list: its contents, the number of its file read, and whether the client's membership has been
/// computed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Listed {
    contents: u32,
    reading: u64,
    is_known: bool,
}

impl List for Listed {
    fn has_same_contents(&self, other: &Self) -> bool {
        self.contents == other.contents
    }

    fn is_of_the_same_reading(&self, other: &Self) -> bool {
        self.reading == other.reading
    }

    fn take_over(&mut self, other: &Self) {
        self.is_known |= other.is_known;
    }
}

type Tested = Feed<u32, Listed, Duration>;

const fn list(contents: u32, reading: u64) -> Listed {
    Listed { contents, reading, is_known: true }
}

fn version(stamp: u32) -> Version<u32> {
    Version { stamp: Some(stamp), is_settled: true }
}

fn faulty(text: &str) -> ReadFailure {
    ReadFailure::Faulty(text.to_owned())
}

fn refused() -> Delivered {
    Delivered {
        is_incomplete: false,
        refused_by: BTreeMap::from([("web/0".to_owned(), "no slot".to_owned())]),
    }
}

/// A feed with list 1 in force. File read 1 found this list in version 1 of the file.
fn in_force() -> Tested {
    let mut feed = Tested::default();
    let effect = feed.read(at(1), 1, version(1), Some(Ok(list(1, 1))));
    assert_eq!(effect, Some(FeedAction::Deliver(list(1, 1))));
    let next = feed.delivered(list(1, 1), Delivered::default());
    assert_eq!(next, ListDecision::InForce { was_refused: false, refused: None });
    feed
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn each_result_of_a_reading_has_its_effect() {
    let failed = |text: &str| Some(FeedAction::Failed(text.to_owned()));
    // For each file read: the version, the result, the effect, and the number of failures so far.
    let readings = [
        (1, None, None, 0),
        (2, Some(Ok(list(1, 2))), None, 0),
        (3, Some(Err(faulty("line 1"))), failed("line 1"), 1),
        (3, Some(Err(faulty("line 1"))), None, 1),
        (4, Some(Err(faulty("line 1"))), None, 2),
        (4, Some(Err(ReadFailure::Unread("EMFILE".to_owned()))), failed("EMFILE"), 3),
        (4, Some(Err(ReadFailure::Unread("EMFILE".to_owned()))), None, 3),
        (5, Some(Err(ReadFailure::Hung("hangs".to_owned()))), failed("hangs"), 4),
        (5, Some(Err(ReadFailure::Hung("hangs".to_owned()))), None, 4),
        (6, Some(Ok(list(1, 10))), Some(FeedAction::GoodAgain), 4),
        (7, Some(Ok(list(2, 11))), Some(FeedAction::Deliver(list(2, 11))), 4),
    ];
    let mut feed = in_force();
    for (number, (stamp, result, effect, failures)) in (2..).zip(readings) {
        assert_eq!(feed.read(at(number), number, version(stamp), result), effect, "file read {number}");
        assert_eq!(feed.failures(), failures, "file read {number}");
        assert_eq!(feed.newest(), Some(&list(1, 1)), "the list in force remains");
    }
}

#[test]
fn a_reading_that_ends_late_changes_nothing() {
    let mut feed = in_force();
    assert!(feed.read(at(2), 3, version(2), Some(Err(faulty("cut off")))).is_some());
    assert_eq!(feed.read(at(3), 2, version(1), Some(Ok(list(9, 2)))), None);
    assert_eq!((feed.error().as_deref(), feed.newest()), (Some("cut off"), Some(&list(1, 1))));
    let (feed, reloaded) = Tested::reload(Some(feed), true, at(4), 2, version(1), Ok(list(9, 2)));
    assert_eq!((reloaded.effect, reloaded.retained), (None, Some(list(1, 1))), "the list is delivered again");
    assert_eq!((feed.error().as_deref(), feed.failures()), (Some("cut off"), 1));
}

#[test]
fn a_refused_list_waits_for_room_and_is_counted_once() {
    let mut feed = in_force();
    feed.read(at(2), 2, version(2), Some(Ok(list(2, 2))));
    for _ in 0..3 {
        assert_eq!(feed.delivered(list(2, 2), refused()), ListDecision::Wait);
        assert_eq!((feed.failures(), feed.newest()), (1, Some(&list(1, 1))));
        assert_eq!((feed.error_of("web/0"), feed.error_of("web/1")), (Some("no slot"), None));
        assert_eq!(feed.room_appeared(), Some(list(2, 2)));
    }
    // A later fault of the file does not prevent the good list from coming into force.
    feed.read(at(3), 3, version(3), Some(Err(faulty("line 1"))));
    let next = feed.delivered(list(2, 2), Delivered::default());
    assert_eq!(next, ListDecision::InForce { was_refused: true, refused: None });
    assert_eq!((feed.error().as_deref(), feed.failures()), (Some("line 1"), 2));
    assert_eq!((feed.room_appeared(), feed.newest()), (None, Some(&list(2, 2))));
}

#[test]
fn a_list_refused_during_a_reload_is_delivered_again() {
    let mut feed = in_force();
    feed.read(at(3), 3, version(2), Some(Ok(list(2, 3))));
    assert_eq!(feed.delivered(list(2, 3), refused()), ListDecision::Wait);
    let (mut feed, reloaded) = Tested::reload(Some(feed), true, at(4), 2, version(1), Ok(list(1, 2)));
    assert_eq!((reloaded.effect, reloaded.retained), (None, Some(list(1, 1))));
    let next = feed.delivered(list(1, 1), Delivered::default());
    assert_eq!(next, ListDecision::InForce { was_refused: false, refused: Some(list(2, 3)) });
}

#[test]
fn a_reload_delivers_the_file_or_else_the_list_in_force() {
    let (feed, reloaded) = Tested::reload(Some(in_force()), true, at(2), 2, version(1), Ok(list(1, 2)));
    assert_eq!(reloaded.effect, Some(FeedAction::Deliver(list(1, 2))));
    let (feed, reloaded) = Tested::reload(Some(feed), true, at(3), 3, version(2), Err(faulty("gone")));
    assert_eq!((reloaded.retained, reloaded.wants_last_good), (Some(list(1, 1)), false));
    // This fault is counted as one failure, however often the configuration is read.
    let (feed, reloaded) = Tested::reload(Some(feed), true, at(4), 4, version(2), Err(faulty("gone")));
    assert_eq!((reloaded.effect, feed.failures()), (None, 1));
    let (_, reloaded) = Tested::reload(None, false, at(5), 5, version(2), Err(faulty("gone")));
    assert_eq!((reloaded.retained, reloaded.wants_last_good), (None, true));
}

#[test]
fn a_computation_for_a_replaced_list_is_dropped() {
    let mut feed = in_force();
    let unknown = |contents, reading| Listed { is_known: false, ..list(contents, reading) };
    let incomplete = Delivered { is_incomplete: true, ..Delivered::default() };
    feed.read(at(2), 2, version(2), Some(Ok(unknown(2, 2))));
    assert_eq!(feed.delivered(unknown(2, 2), incomplete.clone()), ListDecision::Compute(unknown(2, 2)));
    feed.read(at(3), 3, version(3), Some(Ok(unknown(3, 3))));
    assert_eq!(feed.delivered(unknown(3, 3), incomplete), ListDecision::Compute(unknown(3, 3)));
    assert_eq!(feed.computed(&list(2, 2)), None);
    assert_eq!(feed.computed(&list(3, 3)), Some(list(3, 3)));
}

/// The contents of the file: a list with this number of endpoints, or a fault.
#[derive(Clone, Copy, Debug)]
enum Content {
    Endpoints(u32),
    Faulty,
}

#[derive(Clone, Debug)]
enum Act {
    Write(Content),
    /// Checks the file's stamp, and begins a file read if one is due.
    Look,
    BeginReload,
    /// One of the running file reads, reloads or computations ends.
    EndReading(usize),
    EndReload(usize),
    EndComputing(usize),
    /// From now on there is room for this number of endpoints.
    Room(u32),
    /// Switches whether the client's membership for newly read lists is known at once.
    ClientChanged,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let content = prop_oneof![3 => (1..6_u32).prop_map(Content::Endpoints), 1 => Just(Content::Faulty)];
    let act = prop_oneof![
        4 => content.prop_map(Act::Write),
        4 => Just(Act::Look),
        1 => Just(Act::BeginReload),
        3 => (0..4_usize).prop_map(Act::EndReading),
        2 => (0..4_usize).prop_map(Act::EndReload),
        2 => (0..4_usize).prop_map(Act::EndComputing),
        2 => (1..6_u32).prop_map(Act::Room),
        1 => Just(Act::ClientChanged),
    ];
    prop::collection::vec(act, 1..80)
}

/// A running file read: its number, the version of the file, and the contents of the file.
type Reading = (u64, u32, Content);

struct World {
    feed: Tested,
    now: Duration,
    stamp: u32,
    content: Content,
    readings: u64,
    reading: Vec<Reading>,
    reloading: Vec<Reading>,
    computing: Vec<Listed>,
    room: u32,
    /// Whether the client's membership for newly read lists is known at once.
    is_known: bool,
    /// The file read that found the list that the client accepted last.
    taken: Option<u64>,
    /// Versions that were applied but could not be used.
    bad: BTreeSet<u32>,
    /// The version of every list.
    versions: BTreeMap<u64, u32>,
}

impl World {
    fn new(is_known: bool) -> Self {
        let first = (1, 1, Content::Endpoints(1));
        let mut world = Self {
            feed: Tested::default(),
            now: at(1),
            stamp: 1,
            content: Content::Endpoints(1),
            readings: 1,
            reading: Vec::new(),
            reloading: Vec::new(),
            computing: Vec::new(),
            room: 2,
            is_known: true,
            taken: None,
            bad: BTreeSet::new(),
            versions: BTreeMap::new(),
        };
        world.end_reload(first);
        world.is_known = is_known;
        world
    }

    fn result(&mut self, (number, stamp, content): Reading) -> Result<Listed, ReadFailure> {
        self.versions.insert(number, stamp);
        match content {
            Content::Endpoints(contents) => Ok(Listed { contents, reading: number, is_known: self.is_known }),
            Content::Faulty => Err(faulty(&format!("version {stamp}"))),
        }
    }

    fn step(&mut self, act: &Act) {
        self.now += Duration::from_millis(300);
        match act {
            Act::Write(content) => (self.stamp, self.content) = (self.stamp + 1, *content),
            Act::Look => {
                if self.feed.progress.begin_look() && self.feed.progress.looked(Some(self.stamp)) {
                    self.feed.progress.changed(self.now);
                }
                if self.feed.progress.begin(self.now + Duration::from_millis(200)).is_some() {
                    self.readings += 1;
                    self.reading.push((self.readings, self.stamp, self.content));
                }
            }
            Act::BeginReload => {
                self.readings += 1;
                self.reloading.push((self.readings, self.stamp, self.content));
            }
            Act::EndReading(nth) if *nth < self.reading.len() => {
                let reading = self.reading.remove(*nth);
                self.end_reading(reading);
            }
            Act::EndReload(nth) if *nth < self.reloading.len() => {
                let reading = self.reloading.remove(*nth);
                self.end_reload(reading);
            }
            Act::EndComputing(nth) if *nth < self.computing.len() => {
                let computed = Listed { is_known: true, ..self.computing.remove(*nth) };
                if let Some(list) = self.feed.computed(&computed) {
                    self.deliver(list);
                }
            }
            Act::EndReading(_) | Act::EndReload(_) | Act::EndComputing(_) => {}
            Act::Room(room) => {
                self.room = *room;
                if let Some(list) = self.feed.room_appeared() {
                    self.deliver(list);
                }
            }
            Act::ClientChanged => self.is_known = !self.is_known,
        }
    }

    fn end_reading(&mut self, reading: Reading) {
        let result = self.result(reading);
        let effect = self.feed.read(self.now, reading.0, version(reading.1), Some(result));
        self.carry_out(reading, effect);
    }

    fn end_reload(&mut self, reading: Reading) {
        let result = self.result(reading);
        let before = Some(std::mem::take(&mut self.feed));
        let (feed, reloaded) = Tested::reload(before, true, self.now, reading.0, version(reading.1), result);
        self.feed = feed;
        self.carry_out(reading, reloaded.effect);
        if let Some(list) = reloaded.retained {
            self.deliver(list);
        }
    }

    fn carry_out(&mut self, (_, stamp, _): Reading, effect: Option<FeedAction<Listed>>) {
        match effect {
            Some(FeedAction::Deliver(list)) => self.deliver(list),
            Some(FeedAction::Failed(_)) => {
                self.bad.insert(stamp);
            }
            Some(FeedAction::GoodAgain) | None => {}
        }
    }

    fn deliver(&mut self, list: Listed) {
        let mut next = Some(list);
        while let Some(list) = next.take() {
            // A list that the client already uses needs no further room.
            let fits = list.contents <= self.room || self.taken == Some(list.reading);
            let delivered = match (list.is_known, fits) {
                (false, _) => Delivered { is_incomplete: true, ..Delivered::default() },
                (true, true) => Delivered::default(),
                (true, false) => refused(),
            };
            let number = list.reading;
            match self.feed.delivered(list, delivered) {
                ListDecision::Compute(list) => self.computing.push(list),
                ListDecision::Wait => {
                    self.bad.insert(self.versions[&number]);
                }
                ListDecision::InForce { refused, .. } => {
                    self.taken = Some(number);
                    next = refused;
                }
            }
        }
    }

    /// Ends all running operations, with room for every list.
    fn settle(&mut self) {
        self.is_known = true;
        for _ in 0..8 {
            while let Some(reading) = self.reading.pop() {
                self.end_reading(reading);
            }
            while let Some(reading) = self.reloading.pop() {
                self.end_reload(reading);
            }
            while !self.computing.is_empty() {
                self.step(&Act::EndComputing(0));
            }
            self.step(&Act::Room(u32::MAX));
            self.step(&Act::Look);
        }
    }
}

proptest! {
    #[test]
    fn an_older_list_never_replaces_a_newer_list_in_force(
        acts in acts(), is_known: bool,
    ) {
        let mut world = World::new(is_known);
        let mut taken = world.taken;
        prop_assert_eq!(taken, Some(1));
        for act in acts {
            world.step(&act);
            prop_assert!(world.taken >= taken, "{:?} after {:?}, by {:?}", world.taken, taken, act);
            taken = world.taken;
            prop_assert_eq!(world.feed.in_force().map(|list| list.reading), taken);
        }
    }

    #[test]
    fn the_content_of_the_file_is_finally_in_force(acts in acts(), is_known: bool) {
        let mut world = World::new(is_known);
        let mut good = (1, 1);
        for act in acts {
            world.step(&act);
            if let Content::Endpoints(contents) = world.content {
                good = (world.stamp, contents);
            }
        }
        world.settle();
        let in_force = world.feed.in_force().map(|list| list.contents);
        if let Content::Endpoints(contents) = world.content {
            prop_assert_eq!(in_force, Some(contents));
            prop_assert_eq!(world.feed.error(), None);
        } else {
            prop_assert!(in_force.is_some() && world.feed.error().is_some(), "{:?}", good);
        }
        prop_assert_eq!(world.feed.room_appeared(), None, "no refused list is left");
    }

    #[test]
    fn each_unusable_version_is_counted_as_one_failure(acts in acts()) {
        let mut world = World::new(true);
        for act in acts {
            // A list that must be computed first may be refused after the next version was read.
            if !matches!(act, Act::ClientChanged) {
                world.step(&act);
            }
            prop_assert_eq!(world.feed.failures(), world.bad.len() as u64);
        }
    }

    #[test]
    fn every_request_of_an_operator_is_answered_by_a_reading_that_began_after_it(
        acts in prop::collection::vec(prop_oneof![Just(None), any::<bool>().prop_map(Some)], 1..40),
    ) {
        let mut turn = ReadTurn::default();
        // The start of the running file read, and the times of requests that wait for an answer.
        let (mut began, mut waiting) = (None, Vec::new());
        let end = (0..4).map(|_| None);
        for (now, act) in acts.into_iter().chain(end).enumerate() {
            if let Some(is_requested) = act {
                if is_requested {
                    waiting.push(now);
                }
                if turn.request(is_requested) {
                    prop_assert_eq!(began.replace(now), None, "one file read at a time");
                }
            } else if let Some(start) = began.take() {
                let (is_answer, next) = turn.ended();
                prop_assert_eq!(is_answer, waiting.iter().any(|requested_at| *requested_at <= start));
                waiting.retain(|requested_at| *requested_at > start);
                if let Some(is_requested) = next {
                    prop_assert!(turn.request(is_requested));
                    began = Some(now);
                }
            }
        }
        prop_assert_eq!(waiting, Vec::<usize>::new());
    }
}
