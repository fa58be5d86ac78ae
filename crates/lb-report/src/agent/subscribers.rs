//! Who is told when a backend's readiness changes: those that have shown that they read what is sent to their address.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// Subscribers of a backend: some ten times the clients of the largest fleets that are planned for. About 10 MiB.
pub const MAX_SUBSCRIBERS: usize = 65_536;

/// A subscriber that has not asked for so long is forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_hours(1);

/// Who has asked within this is waited for when a backend ends: four times the longest interval at which clients ask by
/// default. A client that is gone holds up no end for longer.
const LATELY: Duration = Duration::from_mins(1);

/// The way back to an asker: the socket, by its number, that it asked, and the address of this host that it asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Via {
    /// The number of the socket.
    pub socket: usize,
    /// The address, where the socket has several.
    pub local: Option<IpAddr>,
}

/// Who sent a request: where to answer, and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    /// Its address, as the packet has it.
    pub address: SocketAddr,
    /// The way back.
    pub via: Via,
}

#[derive(Clone, Copy, Debug)]
struct Subscriber {
    via: Via,
    key_id: u16,
    /// Its place in the order of silence.
    turn: u64,
    asked: Instant,
}

/// The subscribers of a backend.
#[derive(Debug)]
pub struct Subscribers {
    limit: usize,
    by_address: HashMap<SocketAddr, Subscriber>,
    /// The longest silent one first.
    by_silence: BTreeMap<u64, SocketAddr>,
    turns: u64,
    /// The number of the last change.
    change: u16,
    /// Those that have not heard of it.
    unheard: HashSet<SocketAddr>,
}

impl Subscribers {
    /// None yet, and never more than `limit`.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            by_address: HashMap::new(),
            by_silence: BTreeMap::new(),
            turns: 0,
            change: 0,
            unheard: HashSet::new(),
        }
    }

    /// How many they are.
    pub fn len(&self) -> usize {
        self.by_address.len()
    }

    /// Whether somebody at this address is one.
    pub fn has(&self, address: SocketAddr) -> bool {
        self.by_address.contains_key(&address)
    }

    /// An asker has returned a cookie, by which it has heard of a change. Returns whether another made room for it.
    pub fn asked(&mut self, asker: Asker, key_id: u16, heard: u16, now: Instant) -> bool {
        self.turns += 1;
        let turn = self.turns;
        if let Some(known) = self.by_address.get_mut(&asker.address) {
            self.by_silence.remove(&known.turn);
            self.by_silence.insert(turn, asker.address);
            *known = Subscriber { via: asker.via, key_id, turn, asked: now };
            // A request that comes late has an older cookie, and takes nothing back.
            if heard == self.change {
                self.unheard.remove(&asker.address);
            }
            return false;
        }
        let is_full = self.by_address.len() >= self.limit;
        if is_full && let Some((_, silent)) = self.by_silence.pop_first() {
            self.by_address.remove(&silent);
            self.unheard.remove(&silent);
        }
        self.by_silence.insert(turn, asker.address);
        self.by_address.insert(asker.address, Subscriber { via: asker.via, key_id, turn, asked: now });
        if heard != self.change {
            self.unheard.insert(asker.address);
        }
        is_full
    }

    /// Forgets those that have not asked for long.
    pub fn forget(&mut self, now: Instant) {
        // Bound: each turn removes one.
        while let Some((turn, address)) = self.by_silence.first_key_value() {
            let asked = self.by_address.get(address).map(|subscriber| subscriber.asked);
            if asked.is_some_and(|asked| now.saturating_duration_since(asked) < FORGOTTEN_AFTER) {
                return;
            }
            let (turn, address) = (*turn, *address);
            self.by_silence.remove(&turn);
            self.by_address.remove(&address);
            self.unheard.remove(&address);
        }
    }

    /// When the next one may be forgotten.
    pub fn forget_at(&self) -> Option<Instant> {
        let (_, address) = self.by_silence.first_key_value()?;
        Some(self.by_address.get(address)?.asked + FORGOTTEN_AFTER)
    }

    /// There is another change, of which none of them has heard. Who asked last comes first.
    pub fn changed(&mut self, change: u16) -> impl Iterator<Item = SocketAddr> {
        self.change = change;
        self.unheard = self.by_address.keys().copied().collect();
        self.by_silence.values().rev().copied()
    }

    /// How to reach a subscriber, and the number of its key, if it has not heard of the last change.
    pub fn unheard_by(&self, address: SocketAddr) -> Option<(Asker, u16)> {
        let subscriber = self.by_address.get(&address).filter(|_| self.unheard.contains(&address))?;
        Some((Asker { address, via: subscriber.via }, subscriber.key_id))
    }

    /// How many that have asked lately have not heard of the last change. Looks at those that have not heard alone: this is asked often.
    pub fn unheard_lately(&self, now: Instant) -> usize {
        let unheard = self.unheard.iter().filter_map(|address| self.by_address.get(address));
        unheard.filter(|subscriber| now.saturating_duration_since(subscriber.asked) < LATELY).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moment::moment;

    fn asker(n: u32) -> Asker {
        let address = SocketAddr::new(IpAddr::from(n.to_be_bytes()), 9467);
        Asker { address, via: Via { socket: 0, local: None } }
    }

    fn addresses(subscribers: &mut Subscribers) -> Vec<SocketAddr> {
        subscribers.changed(99).collect()
    }

    #[test]
    fn at_the_limit_the_longest_silent_one_makes_room() {
        let now = moment();
        let mut subscribers = Subscribers::new(3);
        for n in 1..=3 {
            assert!(!subscribers.asked(asker(n), 1, 0, now));
        }
        assert!(!subscribers.asked(asker(1), 1, 0, now), "it is there already");
        assert!(subscribers.asked(asker(4), 1, 0, now));
        assert_eq!(addresses(&mut subscribers), [4, 1, 3].map(|n| asker(n).address));
    }

    #[test]
    fn the_limit_is_65536() {
        let now = moment();
        let mut subscribers = Subscribers::new(MAX_SUBSCRIBERS);
        let replaced = (0..65_536).filter(|n| subscribers.asked(asker(*n), 1, 0, now)).count();
        assert_eq!((subscribers.len(), replaced), (65_536, 0));
        assert!(subscribers.asked(asker(65_536), 1, 0, now));
        assert_eq!((subscribers.len(), subscribers.by_silence.len()), (65_536, 65_536));
        assert_eq!(subscribers.unheard_by(asker(0).address), None);
    }

    #[test]
    fn who_has_not_asked_for_an_hour_is_forgotten() {
        let now = moment();
        let mut subscribers = Subscribers::new(3);
        subscribers.asked(asker(1), 1, 0, now);
        subscribers.asked(asker(2), 1, 0, now + Duration::from_secs(1));
        assert_eq!(subscribers.forget_at(), Some(now + FORGOTTEN_AFTER));
        subscribers.forget(now + FORGOTTEN_AFTER - Duration::from_nanos(1));
        assert_eq!(subscribers.len(), 2);
        subscribers.forget(now + FORGOTTEN_AFTER);
        assert_eq!(addresses(&mut subscribers), [asker(2).address]);
    }

    #[test]
    fn what_was_heard_is_not_unheard_by_a_request_that_comes_late() {
        let now = moment();
        let mut subscribers = Subscribers::new(3);
        subscribers.asked(asker(1), 1, 0, now);
        for (change, before) in [(1, 0), (2, 1), (u16::MAX, 2), (0, u16::MAX)] {
            assert_eq!(subscribers.changed(change).count(), 1);
            let mut unheard = |heard| {
                subscribers.asked(asker(1), 1, heard, now);
                (subscribers.unheard_lately(now), subscribers.unheard_by(asker(1).address).is_some())
            };
            assert_eq!(
                [unheard(before), unheard(change), unheard(before)],
                [(1, true), (0, false), (0, false)]
            );
        }
    }

    #[test]
    fn who_comes_with_an_older_cookie_has_not_heard_of_the_last_change() {
        let now = moment();
        let mut subscribers = Subscribers::new(1);
        assert_eq!(subscribers.changed(1).count(), 0);
        subscribers.asked(asker(1), 1, 0, now);
        assert_eq!(subscribers.unheard_lately(now), 1);
        subscribers.asked(asker(2), 1, 1, now);
        assert_eq!((subscribers.len(), subscribers.unheard_lately(now)), (1, 0), "it has made room");
    }

    #[test]
    fn who_has_not_asked_lately_is_not_waited_for_and_still_told() {
        let now = moment();
        let mut subscribers = Subscribers::new(3);
        subscribers.asked(asker(1), 1, 0, now);
        assert_eq!(addresses(&mut subscribers), [asker(1).address]);
        assert_eq!([now, now + LATELY].map(|now| subscribers.unheard_lately(now)), [1, 0]);
        assert!(subscribers.unheard_by(asker(1).address).is_some());
    }
}
