//! The register of backends that report, in the kernel: their ids and keys, what was believed of them last, and until when each is
//! a lame duck.
//!
//! It outlives the daemon, and so does what it says. The event loop alone makes and removes entries. A thread ([`Stores`]), and the
//! program of network interfaces if there is one, store reports in existing entries; of two reports the later one counts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lb_common::abi::host::{NO_REPORT, Sender, SenderKey, SenderName};
use lb_common::net::Be16;
use lb_core::balancer::ReportIdMap;
use lb_core::reports::Name;
use lb_core::service::Protocol;
use lb_kernel::{DatapathError, HostMaps, Kernel};
use lb_report::client::reported::Base;
use lb_report::client::senders::ToStore;
use lb_report::ids::ReportIds;
use lb_report::keys::{BackendKey, Keys};
use lb_report::receive::{Words as _, store_lame_until};
use lb_report::wire::MAX_HOLD;
use tracing::warn;

use crate::reports::ReportStore as Entries;

/// The register.
pub struct Register {
    maps: Arc<HostMaps>,
    storing: Arc<Mutex<()>>,
    ids: ReportIds,
    /// The keys of the entries, as they were written.
    written: BTreeMap<Name, Keys<BackendKey>>,
    /// Since when those that have an entry are not asked.
    absent: BTreeMap<Name, Instant>,
}

/// For how long a backend that is not asked keeps its entry: a daemon that starts does not know its lists at once, and whoever comes
/// back to a subset soon is known.
const KEPT: Duration = Duration::from_mins(1);

/// For as long as a report can ask at most that its backend is a lame duck.
#[expect(clippy::cast_possible_truncation, reason = "it is an hour")]
const MAX_HOLD_NS: u64 = MAX_HOLD.as_nanos() as u64;

impl Register {
    /// Takes over what lies below these pins, or makes it. Entries that contradict others are removed.
    ///
    /// # Errors
    /// If the maps cannot be made or read.
    pub fn open(kernel: &dyn Kernel, pins: &Path) -> Result<Self, DatapathError> {
        let maps = kernel.host_maps(pins)?;
        let mut ids = ReportIds::default();
        let latest = kernel.now_ns().saturating_add(MAX_HOLD_NS);
        for (key, sender) in maps.senders()? {
            let name = name_of(&key);
            let taken = name.map(|name| ids.adopt(name, sender.id));
            match taken {
                Some(Ok(())) => {
                    // No report asks for that long: whatever wrote it was none, and nobody would take it back.
                    if maps.lame_until_ns(sender.id) > latest {
                        maps.set_lame_until_ns(sender.id, 0);
                    }
                }
                Some(Err(error)) => {
                    warn!(%error, "removed from the register of backends that report");
                    maps.remove_sender(&key)?;
                }
                None => drop(maps.remove_sender(&key)?),
            }
        }
        let (maps, storing) = (Arc::new(maps), Arc::default());
        Ok(Self { maps, storing, ids, written: BTreeMap::new(), absent: BTreeMap::new() })
    }

    /// What the thread that takes in reports stores by.
    pub fn stores(&self) -> Stores {
        Stores { maps: Arc::clone(&self.maps), storing: Arc::clone(&self.storing) }
    }

    /// The maps.
    pub fn maps(&self) -> &Arc<HostMaps> {
        &self.maps
    }

    /// The id of a backend, whose entry is made if there is none, or if its keys are others; [`NO_REPORT`] if none is left.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn hold(&mut self, name: Name, keys: &Keys<BackendKey>) -> Result<u32, DatapathError> {
        let is_known = self.ids.get(name).is_some();
        if is_known && self.written.get(&name) == Some(keys) {
            return Ok(self.ids.hold(name));
        }
        let id = self.ids.hold(name);
        if id == NO_REPORT {
            return Ok(id);
        }
        let _storing = self.storing.lock();
        // What was believed last stays, whichever daemon has stored it. What was believed under other keys alone was another party's
        // word, and where the name is new an earlier daemon may not have lived to clear it.
        let before = if is_known { self.maps.sender(&key_of(name))? } else { None };
        let sender = sender(id, keys);
        if before.is_none_or(|before| !share_a_key(&before, &sender)) {
            self.maps.forget(id);
        }
        self.maps.set_sender(&key_of(name), &sender)?;
        self.written.insert(name, keys.clone());
        Ok(id)
    }

    /// What was believed of a backend that is asked from now on, by an earlier daemon or by this one when it asked it before: the last
    /// report, and until when it is a lame duck. Where the kernel does not say, an answer has to come first.
    pub fn adopted(&self, name: Name) -> (Option<Base>, Option<Duration>) {
        let _storing = self.storing.lock();
        let Some(id) = self.ids.get(name) else { return (None, None) };
        let until = Some(self.maps.lame_until_ns(id)).filter(|ns| *ns != 0);
        (Base::of(self.maps.base(id)), until.map(Duration::from_nanos))
    }

    /// The ids that rows of backends are to have, where these are asked; and those whose entries are to go once no row has their
    /// id any more.
    pub fn renew(&mut self, asked: &BTreeSet<Name>, now: Instant) -> (ReportIdMap, Vec<Name>) {
        self.ids.retain_uncovered(|name| asked.contains(name));
        self.absent.retain(|name, _| !asked.contains(name));
        for (name, _) in self.ids.iter().filter(|(name, _)| !asked.contains(name)) {
            self.absent.entry(name).or_insert(now);
        }
        let gone = self.absent.iter().filter(|(_, since)| now.duration_since(**since) >= KEPT);
        let gone: Vec<Name> = gone.map(|(name, _)| *name).collect();
        let mut ids: BTreeMap<Name, u32> = self.ids.iter().collect();
        ids.retain(|name, _| !gone.contains(name));
        (Arc::new(ids), gone)
    }

    /// Removes entries that no row names any more and in which nobody stores.
    ///
    /// # Errors
    /// If the kernel refuses; the others are removed another time.
    pub fn remove(&mut self, gone: Vec<Name>) -> Result<(), DatapathError> {
        for name in gone {
            self.maps.remove_sender(&key_of(name))?;
            self.ids.release(name);
            self.written.remove(&name);
            self.absent.remove(&name);
        }
        Ok(())
    }

    /// Whether all that have an entry are asked, and all that are asked have one: nothing changes by time.
    pub fn is_steady(&self) -> bool {
        self.absent.is_empty() && self.ids.uncovered() == 0
    }

    /// How many backends have no id, because there are no more.
    pub fn uncovered(&self) -> usize {
        self.ids.uncovered()
    }

    /// Whether something waits for readers.
    pub fn wants_wait(&self) -> bool {
        self.ids.wants_wait()
    }

    /// A wait for readers begins.
    pub fn before_wait(&mut self) {
        self.ids.before_wait();
    }

    /// The wait has ended.
    pub fn after_wait(&mut self) {
        let over = self.ids.after_wait();
        for id in &over {
            self.maps.forget(*id);
        }
        self.ids.cleared(&over);
    }
}

/// Stores what is believed.
pub struct Stores {
    maps: Arc<HostMaps>,
    /// Held from a look at an entry until it is written: others store by theirs, and the loop writes other keys.
    storing: Arc<Mutex<()>>,
}

impl Entries for Stores {
    fn store(&mut self, what: &ToStore<'_, Duration>) {
        let ToStore { target, base, before, lame_until } = *what;
        if target.id == NO_REPORT {
            return;
        }
        let _storing = self.storing.lock();
        let known = self.maps.sender(&key_of(target.name)).unwrap_or_default();
        // The loop has given it the keys of another party, which this listener is about to be told.
        if known.as_ref().is_some_and(|known| !share_a_key(known, &sender(target.id, &target.keys))) {
            return;
        }
        let known = self.maps.base(target.id);
        let number = Base::number(Some(base));
        let is_stored = if known == number {
            // The program has, or another listener, when the report came: it is late here, and its times begin no second time.
            before == Some(base)
        } else {
            !is_old(base, Base::of(known), before) && self.maps.replace_base(target.id, known, number)
        };
        if is_stored {
            let ns = lame_until.map_or(0, |until| u64::try_from(until.as_nanos()).unwrap_or(u64::MAX));
            store_lame_until(&*self.maps, target.id, number, |_| ns);
        }
    }

    fn asked(&mut self, id: u32, nonce: u64) {
        if id != NO_REPORT {
            self.maps.set_nonce(id, nonce);
        }
    }
}

fn sender(id: u32, keys: &Keys<BackendKey>) -> Sender {
    let mut sender: Sender = bytemuck::Zeroable::zeroed();
    sender.id = id;
    for (place, key) in sender.keys.iter_mut().zip(keys.all()) {
        *place = SenderKey { id: key.id, key: key.key.bytes(), ..SenderKey::default() };
    }
    sender
}

fn share_a_key(one: &Sender, other: &Sender) -> bool {
    one.keys.iter().any(|key| key.id != 0 && other.keys.contains(key))
}

/// Whether another listener has stored what the same life of an agent said later than this. Of two lives nobody can tell: a clock may
/// have jumped. What this listener has stored itself `before` is no such thing: the answer to its last request is believed whatever its
/// number is.
fn is_old(base: Base, known: Option<Base>, before: Option<Base>) -> bool {
    let of_another = known.filter(|known| Some(*known) != before);
    of_another.is_some_and(|known| known.incarnation == base.incarnation && known.counter > base.counter)
}

fn key_of(name: Name) -> SenderName {
    SenderName {
        address: name.address.ip().into(),
        port: Be16::from_host(name.address.port()),
        protocol: name.protocol.number(),
        _reserved: 0,
    }
}

fn name_of(key: &SenderName) -> Option<Name> {
    let protocol = Protocol::of_number(key.protocol)?;
    Some(Name { protocol, address: lb_common::net::socket_addr(key.address, key.port) })
}

#[cfg(test)]
mod tests {
    use lb_report::keys::{Numbered, ServiceKey};

    use super::*;

    #[test]
    fn a_name_is_the_same_in_the_kernel() {
        for (protocol, address) in [(Protocol::Tcp, "10.0.0.1:80"), (Protocol::Udp, "[2001:db8::1]:53")] {
            let name = Name { protocol, address: address.parse().unwrap() };
            assert_eq!(name_of(&key_of(name)), Some(name));
        }
        assert_eq!(name_of(&SenderName { protocol: 1, ..key_of(any()) }), None);
    }

    #[test]
    fn entries_of_keys_that_follow_each_other_are_one_partys() {
        let numbered = |id, byte| {
            Numbered { id, key: ServiceKey::from_bytes([byte; 32]) }.of_backend(Protocol::Tcp, any().address)
        };
        let [old, new, other] = [numbered(1, 7), numbered(2, 8), numbered(1, 9)];
        let entry = |first, second| sender(5, &Keys::new(first, second));
        assert!(share_a_key(&entry(old, None), &entry(new, Some(old))));
        assert!(share_a_key(&entry(new, Some(old)), &entry(new, None)));
        assert!(!share_a_key(&entry(old, None), &entry(new, None)));
        assert!(!share_a_key(&entry(old, None), &entry(other, None)));
    }

    #[test]
    fn what_another_listener_has_heard_later_stays() {
        let base = |incarnation, counter| Base { incarnation, counter };
        for (known, before, expected) in [
            (Some(base(7, 9)), None, true),
            (Some(base(7, 9)), Some(base(7, 3)), true),
            // It was stored by this one, or there is nothing later, or nobody can tell.
            (Some(base(7, 9)), Some(base(7, 9)), false),
            (Some(base(7, 8)), None, false),
            (Some(base(8, 9)), None, false),
            (None, None, false),
        ] {
            assert_eq!(is_old(base(7, 8), known, before), expected, "{known:?} {before:?}");
        }
    }

    fn any() -> Name {
        Name { protocol: Protocol::Tcp, address: "10.0.0.1:80".parse().unwrap() }
    }
}
