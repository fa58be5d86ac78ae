//! The agent's side: the reports of its backends. The module uses no socket, clock or random
//! number; datagrams, times and the secret are arguments.
//!
//! In reading order: the health of a backend by its checks ([`streak`]) and its load ([`load`]);
//! the clients that receive pushes (`subscribers`) and the times of pushes (`pushes`); one backend
//! with all of these, and its readiness ([`entry`]); and the processing of datagrams (this file;
//! [`crate::answer`] makes the answers). Only monotonic times are compared, so a jump of the host's
//! clock changes nothing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lb_common::abi::responder::REFUSALS;
use lb_common::net::Be16;

use crate::answer::{Refused, answer};
use crate::keys::{BackendKey, Keys};
use crate::wire::{self, Cookies, Datagram, Key, Kind, Malformed, Readiness};

pub mod name;

pub mod streak;

pub mod load;

mod subscribers;

mod pushes;

pub mod entry;

#[cfg(test)]
mod tests;

use entry::{Entry, Rules};
use name::Name;
use pushes::Pace;
pub use subscribers::{MAX_SUBSCRIBERS, Requester, Via};

/// Maximum number of backends of an agent. Together with [`MAX_SUBSCRIBERS`] it limits the agent's
/// memory.
pub const MAX_BACKENDS: usize = 64;

/// Counters since the start of the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that were answered.
    pub answered: u64,
    /// Number of datagrams that were not answered, for each [`Refused::number`].
    pub refused: [u64; REFUSALS],
    /// Pushes sent; each repetition counts.
    pub pushed: u64,
    /// Subscribers that were removed to make room for new ones.
    pub replaced: u64,
}

/// All backends of an agent, with their subscribers.
pub struct Reports {
    entries: BTreeMap<Name, Entry>,
    /// The secret of the cookies, and when it was drawn.
    secret: ([u8; 16], Instant),
    pace: Pace,
    incarnation: u32,
    /// The version at which the reports of a new backend begin. A backend that was removed and
    /// returns continues after its last version, because clients reject a push that is not later
    /// than their last report.
    version: u64,
    /// The number at which the changes of a new backend begin. It is above all numbers that clients
    /// may have acknowledged, because the cookies of clients remain valid for minutes.
    change: u16,
    counts: Counts,
}

impl Reports {
    /// An agent without backends. `secret` must be random, and drawn again at each start of the
    /// agent.
    pub fn new(incarnation: u32, secret: [u8; 16], now: Instant) -> Self {
        Self {
            entries: BTreeMap::new(),
            secret: (secret, now),
            pace: Pace::new(now),
            incarnation,
            version: u64::from(incarnation) << 32,
            change: 0,
            counts: Counts::default(),
        }
    }

    /// Adds a backend, or replaces the keys and rules of an existing one.
    pub fn set(&mut self, name: Name, keys: Keys<BackendKey>, rules: Rules, now: Instant) {
        match self.entries.get_mut(&name) {
            Some(entry) => entry.set(keys, rules, now),
            None => {
                let entry = Entry::new(name, keys, rules, (self.version, self.change), now);
                self.entries.insert(name, entry);
            }
        }
    }

    /// Removes a backend. After that, requests for this backend are refused like requests for an
    /// unknown name.
    pub fn remove(&mut self, name: Name) {
        if let Some(entry) = self.entries.remove(&name) {
            self.version = self.version.max(entry.version());
            self.change = self.change.max(entry.change().wrapping_add(1));
        }
    }

    /// The backend with this name.
    pub fn get(&self, name: Name) -> Option<&Entry> {
        self.entries.get(&name)
    }

    /// The backend with this name, for updates.
    pub fn get_mut(&mut self, name: Name) -> Option<&mut Entry> {
        self.entries.get_mut(&name)
    }

    /// All backends, ordered by name.
    pub fn iter(&self) -> impl Iterator<Item = (Name, &Entry)> {
        self.entries.iter().map(|(name, entry)| (*name, entry))
    }

    /// The counters since the start of the agent.
    pub const fn counts(&self) -> &Counts {
        &self.counts
    }

    /// The incarnation: the number of this start of the agent.
    pub const fn incarnation(&self) -> u32 {
        self.incarnation
    }

    /// The answer to a packet with these bytes; the answer has the same length. `None` if the
    /// packet is refused. Counts the packet in either case.
    pub fn answer(&mut self, bytes: &[u8], requester: Requester, now: Instant) -> Option<Datagram> {
        match self.answer_to(bytes, requester, now) {
            Ok(answer) => {
                self.counts.answered += 1;
                Some(answer)
            }
            Err(refused) => {
                self.counts.refused[refused.number()] += 1;
                None
            }
        }
    }

    fn answer_to(&mut self, bytes: &[u8], requester: Requester, now: Instant) -> Result<Datagram, Refused> {
        let request = Datagram::parse(bytes).map_err(Refused::Malformed)?;
        let name = Name::of(&request).ok_or(Refused::Malformed(Malformed::Name))?;
        let cookies = self.cookies(now);
        let entry = self.entries.get_mut(&name).ok_or(Refused::UnknownName)?;
        entry.expire(now);
        let mut prepared = entry.prepared(now, 0);
        let acknowledged = answer(&request, &requester.on_wire(), &mut prepared, &cookies, 0)?;
        if let Some(acknowledged) = acknowledged {
            let key_id = request.key_id.to_host();
            self.counts.replaced += u64::from(entry.subscribe(requester, key_id, acknowledged, now));
        }
        Ok(*Datagram::in_words(&prepared.report))
    }

    /// Records a subscriber that the responder has answered. `acknowledged` is the number of the
    /// change that the client acknowledged with its cookie.
    pub fn subscribe(
        &mut self,
        name: Name,
        requester: Requester,
        key_id: u16,
        acknowledged: u16,
        requested_at: Instant,
    ) {
        if let Some(entry) = self.entries.get_mut(&name) {
            self.counts.replaced +=
                u64::from(entry.subscribe_late(requester, key_id, acknowledged, requested_at));
        }
    }

    fn cookies(&self, now: Instant) -> Cookies {
        let (secret, drawn) = self.secret;
        let age = now.saturating_duration_since(drawn).as_nanos();
        Cookies::new(Key::from_bytes(secret), u64::try_from(age).unwrap_or(u64::MAX))
    }

    /// Applies the effects of elapsed time: if a backend's last health check is too old, its health
    /// becomes unknown, and subscribers that have not sent a request for an hour are removed.
    pub fn expire(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            entry.expire(now);
        }
    }

    /// Calls `send` with the pushes that are due, as many as the pace allows. The backends take
    /// turns, so that no backend delays another.
    pub fn push(&mut self, now: Instant, mut send: impl FnMut(Requester, &Datagram)) {
        let mut left = self.pace.allowed(now);
        let mut pushed = 0;
        let cookies = self.cookies(now);
        // Bound: each iteration sends at least one push, or is the last.
        while left > 0 {
            let before = left;
            for (name, entry) in &mut self.entries {
                let Some((requester, key_id)) = (if left > 0 { entry.next_push(now) } else { None }) else {
                    continue;
                };
                let cookie = cookies.cookie(&name.to_sender(), &requester.on_wire(), entry.change());
                let mut push = entry.report(Kind::Push, now);
                push.cookie = cookie;
                send(requester, &entry.sealed(push, key_id));
                left -= 1;
                pushed += 1;
            }
            if left == before {
                break;
            }
        }
        self.pace.spend(pushed);
        self.counts.pushed += u64::from(pushed);
    }

    /// Whether any push must still be sent.
    pub fn is_pushing(&self) -> bool {
        self.entries.values().any(|entry| entry.push_at().is_some())
    }

    /// When [`Reports::push`] or [`Reports::expire`] must be called next, if no datagram arrives
    /// until then.
    pub fn next_at(&self, now: Instant) -> Option<Instant> {
        let pushes = self.entries.values().filter_map(Entry::push_at).min();
        let pushes = pushes.map(|at| at.max(self.pace.allowed_at(now)));
        let expiries = self.entries.values().filter_map(Entry::expires_at).min();
        pushes.into_iter().chain(expiries).min()
    }
}

impl Requester {
    /// The requester in the form that cookies use.
    fn on_wire(self) -> wire::RequestSource {
        wire::RequestSource { address: self.address.ip().into(), port: Be16::from_host(self.address.port()) }
    }
}

/// The word for a readiness in status, metrics and commands.
pub const fn word(readiness: Readiness) -> &'static str {
    match readiness {
        Readiness::Unknown => "unknown",
        Readiness::Ready => "ready",
        Readiness::LameDuck => "lame-duck",
        Readiness::Down => "down",
    }
}

/// The readiness with this word; `None` if the word is unknown.
pub fn readiness_of(word_of_it: &str) -> Option<Readiness> {
    let all = [Readiness::Unknown, Readiness::Ready, Readiness::LameDuck, Readiness::Down];
    all.into_iter().find(|readiness| word(*readiness) == word_of_it)
}

/// Milliseconds as in a datagram; longer durations become the largest number.
fn ms32(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// Milliseconds as in a datagram; longer durations become the largest number.
fn ms16(duration: Duration) -> u16 {
    u16::try_from(duration.as_millis()).unwrap_or(u16::MAX)
}
