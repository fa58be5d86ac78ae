//! What the agent says of the backends beside it, decided without a socket, a clock or a random number: those come in.
//!
//! In reading order: how a backend is, by all who say something of it ([`readiness`], [`streak`]), how loaded ([`load`]); who may be
//! told without having asked (`subscribers`) and when (`pushes`); all of that for one backend ([`entry`]); and
//! what follows of a datagram (this file; what is answered is decided by [`crate::answer`]). Only monotonic times are compared: a host's clock that jumps changes nothing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lb_common::abi::responder::REFUSALS;
use lb_common::net::Be16;

use crate::answer::{Refused, answer};
use crate::keys::{BackendKey, Keys};
use crate::wire::{self, Cookies, Datagram, Key, Kind, Malformed, Readiness};

pub mod name;

pub mod readiness;

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
pub use subscribers::{Asker, MAX_SUBSCRIBERS, Via};

/// Backends of an agent. Each has its subscribers, which bound the agent's memory with this.
pub const MAX_BACKENDS: usize = 64;

/// What was counted since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that were answered.
    pub answered: u64,
    /// Datagrams that were not, by [`Refused::number`].
    pub refused: [u64; REFUSALS],
    /// Pushes, each repetition once.
    pub pushed: u64,
    /// Subscribers that made room for others.
    pub replaced: u64,
}

/// All backends of an agent, and who asks for them.
pub struct Reports {
    entries: BTreeMap<Name, Entry>,
    /// Of the cookies, and when it was drawn.
    secret: ([u8; 16], Instant),
    pace: Pace,
    incarnation: u32,
    /// Where the reports of a new backend begin: a backend that was removed and comes back goes on where it was, because those that
    /// have heard of it take no push that is not later than what they know.
    version: u64,
    /// Where the numbers of its changes begin: above those that clients may have acknowledged, whose cookies are valid for minutes.
    change: u16,
    counts: Counts,
}

impl Reports {
    /// Of no backend yet. The secret is the agent's own, made anew at each start.
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

    /// Has a backend from now on, or gives one that there is other keys and rules.
    pub fn set(&mut self, name: Name, keys: Keys<BackendKey>, rules: Rules, now: Instant) {
        match self.entries.get_mut(&name) {
            Some(entry) => entry.set(keys, rules, now),
            None => {
                let entry = Entry::new(name, keys, rules, (self.version, self.change), now);
                self.entries.insert(name, entry);
            }
        }
    }

    /// Has this backend no more: requests for it are those for an unknown name.
    pub fn remove(&mut self, name: Name) {
        if let Some(entry) = self.entries.remove(&name) {
            self.version = self.version.max(entry.version());
            self.change = self.change.max(entry.change().wrapping_add(1));
        }
    }

    /// The backend of this name.
    pub fn get(&self, name: Name) -> Option<&Entry> {
        self.entries.get(&name)
    }

    /// The backend of this name, to say something of it.
    pub fn get_mut(&mut self, name: Name) -> Option<&mut Entry> {
        self.entries.get_mut(&name)
    }

    /// All backends, in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (Name, &Entry)> {
        self.entries.iter().map(|(name, entry)| (*name, entry))
    }

    /// What was counted.
    pub const fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Which start of the agent this is.
    pub const fn incarnation(&self) -> u32 {
        self.incarnation
    }

    /// What to send back for the bytes of a packet: as many, or nothing, which is counted.
    pub fn answer(&mut self, bytes: &[u8], asker: Asker, now: Instant) -> Option<Datagram> {
        match self.answer_to(bytes, asker, now) {
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

    fn answer_to(&mut self, bytes: &[u8], asker: Asker, now: Instant) -> Result<Datagram, Refused> {
        let request = Datagram::parse(bytes).map_err(Refused::Malformed)?;
        let name = Name::of(&request).ok_or(Refused::Malformed(Malformed::Name))?;
        let cookies = self.cookies(now);
        let entry = self.entries.get_mut(&name).ok_or(Refused::UnknownName)?;
        entry.expire(now);
        let mut prepared = entry.prepared(now, 0);
        let heard = answer(&request, &asker.on_wire(), &mut prepared, &cookies, 0)?;
        if let Some(heard) = heard {
            let key_id = request.key_id.to_host();
            self.counts.replaced += u64::from(entry.subscribe(asker, key_id, heard, now));
        }
        Ok(*Datagram::in_words(&prepared.report))
    }

    /// Somebody has been answered in the agent's place, by what was prepared, and has shown that it has heard of a change.
    pub fn subscribe(&mut self, name: Name, asker: Asker, key_id: u16, heard: u16, asked: Instant) {
        if let Some(entry) = self.entries.get_mut(&name) {
            self.counts.replaced += u64::from(entry.subscribe_late(asker, key_id, heard, asked));
        }
    }

    fn cookies(&self, now: Instant) -> Cookies {
        let (secret, drawn) = self.secret;
        let age = now.saturating_duration_since(drawn).as_nanos();
        Cookies::new(Key::from_bytes(secret), u64::try_from(age).unwrap_or(u64::MAX))
    }

    /// Lets time pass: what was not confirmed in time is unknown, who has not asked for long is forgotten.
    pub fn expire(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            entry.expire(now);
        }
    }

    /// Gives the pushes that are due to `send`, as many as the pace allows. One backend does not hold up another.
    pub fn push(&mut self, now: Instant, mut send: impl FnMut(Asker, &Datagram)) {
        let mut left = self.pace.allowed(now);
        let mut pushed = 0;
        let cookies = self.cookies(now);
        // Bound: each turn sends one push at least, or is the last.
        while left > 0 {
            let before = left;
            for (name, entry) in &mut self.entries {
                let Some((asker, key_id)) = (if left > 0 { entry.next_push(now) } else { None }) else {
                    continue;
                };
                let cookie = cookies.cookie(&name.to_sender(), &asker.on_wire(), entry.change());
                let mut push = entry.report(Kind::Push, now);
                push.cookie = cookie;
                send(asker, &entry.sealed(push, key_id));
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

    /// Whether somebody has to be told of a change.
    pub fn is_pushing(&self) -> bool {
        self.entries.values().any(|entry| entry.push_at().is_some())
    }

    /// When [`Reports::push`] or [`Reports::expire`] has something to do next, if nothing comes in before.
    pub fn next_at(&self, now: Instant) -> Option<Instant> {
        let pushes = self.entries.values().filter_map(Entry::push_at).min();
        let pushes = pushes.map(|at| at.max(self.pace.allowed_at(now)));
        let expiries = self.entries.values().filter_map(Entry::expires_at).min();
        pushes.into_iter().chain(expiries).min()
    }
}

impl Asker {
    /// As cookies have it.
    fn on_wire(self) -> wire::Asker {
        wire::Asker { address: self.address.ip().into(), port: Be16::from_host(self.address.port()) }
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

/// The readiness of a word, if it is one.
pub fn readiness_of(word_of_it: &str) -> Option<Readiness> {
    let all = [Readiness::Unknown, Readiness::Ready, Readiness::LameDuck, Readiness::Down];
    all.into_iter().find(|readiness| word(*readiness) == word_of_it)
}

/// Milliseconds as they lie on the wire.
fn ms32(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// Milliseconds as they lie on the wire; the largest is that or more.
fn ms16(duration: Duration) -> u16 {
    u16::try_from(duration.as_millis()).unwrap_or(u16::MAX)
}
