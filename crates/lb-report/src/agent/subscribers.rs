//! The clients that receive pushes when a backend's readiness changes. Each client has proved, by
//! returning a cookie, that it receives packets at its address.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// Maximum number of subscribers of a backend: about ten times the number of clients of the largest
/// planned fleets. They need about 10 MiB.
pub const MAX_SUBSCRIBERS: usize = 65_536;

/// A subscriber is removed after it has sent no request for this time.
const FORGOTTEN_AFTER: Duration = Duration::from_hours(1);

/// A stopping backend waits for the acknowledgements of subscribers that have sent a request within
/// this time: four times the longest default interval of requests. So a client that no longer
/// exists delays the stop for at most this time.
const LATELY: Duration = Duration::from_mins(1);

/// The way back to the sender of a request: the socket that received the request, and the address
/// of this host to which it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Via {
    /// The index of the socket.
    pub socket: usize,
    /// The address of this host, if the socket has several.
    pub local: Option<IpAddr>,
}

/// The sender of a request: the information that is needed to answer it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requester {
    /// The source address of the packet.
    pub address: SocketAddr,
    /// The way back.
    pub via: Via,
}

#[derive(Clone, Copy, Debug)]
struct Subscriber {
    via: Via,
    key_id: u16,
    /// The subscriber's key in `by_silence`: the value of `turns` at its last request.
    turn: u64,
    requested_at: Instant,
}

/// The subscribers of a backend.
#[derive(Debug)]
pub struct Subscribers {
    limit: usize,
    by_address: HashMap<SocketAddr, Subscriber>,
    /// The subscribers, ordered by their last request, the oldest request first.
    by_silence: BTreeMap<u64, SocketAddr>,
    turns: u64,
    /// The number of the last change.
    change: u16,
    /// The subscribers that have not acknowledged the last change.
    unacknowledged: HashSet<SocketAddr>,
}

impl Subscribers {
    /// Creates an empty set, to which at most `limit` subscribers can be added.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            by_address: HashMap::new(),
            by_silence: BTreeMap::new(),
            turns: 0,
            change: 0,
            unacknowledged: HashSet::new(),
        }
    }

    /// The number of subscribers.
    pub fn len(&self) -> usize {
        self.by_address.len()
    }

    /// Whether this address is a subscriber.
    pub fn has(&self, address: SocketAddr) -> bool {
        self.by_address.contains_key(&address)
    }

    /// Records a request with a cookie, which acknowledges the change with the number
    /// `acknowledged`. Returns whether another subscriber was removed to make room.
    pub fn on_request(&mut self, requester: Requester, key_id: u16, acknowledged: u16, now: Instant) -> bool {
        self.turns += 1;
        let turn = self.turns;
        if let Some(known) = self.by_address.get_mut(&requester.address) {
            self.by_silence.remove(&known.turn);
            self.by_silence.insert(turn, requester.address);
            *known = Subscriber { via: requester.via, key_id, turn, requested_at: now };
            // A delayed request has an older cookie and must not undo an acknowledgement.
            if acknowledged == self.change {
                self.unacknowledged.remove(&requester.address);
            }
            return false;
        }
        let is_full = self.by_address.len() >= self.limit;
        if is_full && let Some((_, oldest)) = self.by_silence.pop_first() {
            self.by_address.remove(&oldest);
            self.unacknowledged.remove(&oldest);
        }
        self.by_silence.insert(turn, requester.address);
        self.by_address
            .insert(requester.address, Subscriber { via: requester.via, key_id, turn, requested_at: now });
        if acknowledged != self.change {
            self.unacknowledged.insert(requester.address);
        }
        is_full
    }

    /// Removes subscribers that have sent no request for an hour.
    pub fn forget(&mut self, now: Instant) {
        // Bound: each iteration removes one subscriber.
        while let Some((turn, address)) = self.by_silence.first_key_value() {
            let requested_at = self.by_address.get(address).map(|subscriber| subscriber.requested_at);
            if requested_at
                .is_some_and(|requested_at| now.saturating_duration_since(requested_at) < FORGOTTEN_AFTER)
            {
                return;
            }
            let (turn, address) = (*turn, *address);
            self.by_silence.remove(&turn);
            self.by_address.remove(&address);
            self.unacknowledged.remove(&address);
        }
    }

    /// When the next subscriber is removed if it remains silent.
    pub fn forget_at(&self) -> Option<Instant> {
        let (_, address) = self.by_silence.first_key_value()?;
        Some(self.by_address.get(address)?.requested_at + FORGOTTEN_AFTER)
    }

    /// Starts a change, which no subscriber has acknowledged yet. Returns the addresses of all
    /// subscribers, ordered by their last request, the latest request first.
    pub fn changed(&mut self, change: u16) -> impl Iterator<Item = SocketAddr> {
        self.change = change;
        self.unacknowledged = self.by_address.keys().copied().collect();
        self.by_silence.values().rev().copied()
    }

    /// The way back to a subscriber, and the number of its key, if the subscriber has not
    /// acknowledged the last change.
    pub fn unacknowledged_by(&self, address: SocketAddr) -> Option<(Requester, u16)> {
        let subscriber = self.by_address.get(&address).filter(|_| self.unacknowledged.contains(&address))?;
        Some((Requester { address, via: subscriber.via }, subscriber.key_id))
    }

    /// The number of subscribers with a recent request that have not acknowledged the last change.
    /// This method is called often, so it examines only subscribers without an acknowledgement.
    pub fn recent_unacknowledged(&self, now: Instant) -> usize {
        let unacknowledged = self.unacknowledged.iter().filter_map(|address| self.by_address.get(address));
        unacknowledged
            .filter(|subscriber| now.saturating_duration_since(subscriber.requested_at) < LATELY)
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moment::moment;

    fn requester(n: u32) -> Requester {
        let address = SocketAddr::new(IpAddr::from(n.to_be_bytes()), 9467);
        Requester { address, via: Via { socket: 0, local: None } }
    }

    fn addresses(subscribers: &mut Subscribers) -> Vec<SocketAddr> {
        subscribers.changed(99).collect()
    }

    #[test]
    fn at_the_limit_the_longest_silent_subscriber_is_removed() {
        let now = moment();
        let mut subscribers = Subscribers::new(3);
        for n in 1..=3 {
            assert!(!subscribers.on_request(requester(n), 1, 0, now));
        }
        assert!(!subscribers.on_request(requester(1), 1, 0, now), "the client is a subscriber already");
        assert!(subscribers.on_request(requester(4), 1, 0, now));
        assert_eq!(addresses(&mut subscribers), [4, 1, 3].map(|n| requester(n).address));
    }

    #[test]
    fn the_limit_is_65536() {
        let now = moment();
        let mut subscribers = Subscribers::new(MAX_SUBSCRIBERS);
        let replaced = (0..65_536).filter(|n| subscribers.on_request(requester(*n), 1, 0, now)).count();
        assert_eq!((subscribers.len(), replaced), (65_536, 0));
        assert!(subscribers.on_request(requester(65_536), 1, 0, now));
        assert_eq!((subscribers.len(), subscribers.by_silence.len()), (65_536, 65_536));
        assert_eq!(subscribers.unacknowledged_by(requester(0).address), None);
    }

    #[test]
    fn subscribers_without_a_request_for_an_hour_are_removed() {
        let now = moment();
        let mut subscribers = Subscribers::new(3);
        subscribers.on_request(requester(1), 1, 0, now);
        subscribers.on_request(requester(2), 1, 0, now + Duration::from_secs(1));
        assert_eq!(subscribers.forget_at(), Some(now + FORGOTTEN_AFTER));
        subscribers.forget(now + FORGOTTEN_AFTER - Duration::from_nanos(1));
        assert_eq!(subscribers.len(), 2);
        subscribers.forget(now + FORGOTTEN_AFTER);
        assert_eq!(addresses(&mut subscribers), [requester(2).address]);
    }

    #[test]
    fn a_delayed_request_does_not_undo_an_acknowledgement() {
        let now = moment();
        let mut subscribers = Subscribers::new(3);
        subscribers.on_request(requester(1), 1, 0, now);
        for (change, before) in [(1, 0), (2, 1), (u16::MAX, 2), (0, u16::MAX)] {
            assert_eq!(subscribers.changed(change).count(), 1);
            let mut unacknowledged = |acknowledged| {
                subscribers.on_request(requester(1), 1, acknowledged, now);
                (
                    subscribers.recent_unacknowledged(now),
                    subscribers.unacknowledged_by(requester(1).address).is_some(),
                )
            };
            assert_eq!(
                [unacknowledged(before), unacknowledged(change), unacknowledged(before)],
                [(1, true), (0, false), (0, false)]
            );
        }
    }

    #[test]
    fn a_subscriber_with_an_older_cookie_has_not_acknowledged_the_last_change() {
        let now = moment();
        let mut subscribers = Subscribers::new(1);
        assert_eq!(subscribers.changed(1).count(), 0);
        subscribers.on_request(requester(1), 1, 0, now);
        assert_eq!(subscribers.recent_unacknowledged(now), 1);
        subscribers.on_request(requester(2), 1, 1, now);
        assert_eq!(
            (subscribers.len(), subscribers.recent_unacknowledged(now)),
            (1, 0),
            "the first subscriber was removed"
        );
    }

    #[test]
    fn inactive_subscribers_still_receive_pushes_but_do_not_delay_shutdown() {
        let now = moment();
        let mut subscribers = Subscribers::new(3);
        subscribers.on_request(requester(1), 1, 0, now);
        assert_eq!(addresses(&mut subscribers), [requester(1).address]);
        assert_eq!([now, now + LATELY].map(|now| subscribers.recent_unacknowledged(now)), [1, 0]);
        assert!(subscribers.unacknowledged_by(requester(1).address).is_some());
    }
}
