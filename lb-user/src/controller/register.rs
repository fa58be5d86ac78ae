//! The register of reporting backends, in the kernel's host maps: for each backend its id and keys,
//! the last report that was accepted, and the time until which the backend is a lame duck.
//!
//! The register outlives the daemon. Only the event loop creates and removes entries. The thread
//! that receives reports ([`ReportStore`]), and the receiver program of network interfaces if it is
//! attached, store reports in existing entries. A later report replaces an earlier one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lb_common::abi::host::{NO_REPORT, SenderName};
use lb_core::balancer::ReportIdMap;
use lb_core::reports::Name;
use lb_core::service::Protocol;
use lb_kernel::{DatapathError, HostMaps, Kernel};
use lb_report::client::reported::Base;
use lb_report::ids::ReportIds;
use lb_report::keys::{BackendKey, Keys};
use lb_report::receive::Words as _;
use lb_report::wire::MAX_HOLD;
use tracing::warn;

use super::exchange::{ReportStore, key_of, sender, share_a_key};

pub struct Register {
    maps: Arc<HostMaps>,
    storing: Arc<Mutex<()>>,
    ids: ReportIds,
    /// The keys of each entry that this daemon has written.
    written: BTreeMap<Name, Keys<BackendKey>>,
    /// Backends that have an entry but are no longer polled, each with the time at which polling
    /// ended.
    absent: BTreeMap<Name, Instant>,
}

/// How long a backend retains its entry when it is no longer polled. A daemon that starts does not
/// have its lists at once, and a backend may soon return to a subset.
const RETENTION: Duration = Duration::from_mins(1);

/// The longest time for which a report can declare its backend a lame duck, in nanoseconds.
#[expect(clippy::cast_possible_truncation, reason = "`MAX_HOLD` is an hour")]
const MAX_HOLD_NS: u64 = MAX_HOLD.as_nanos() as u64;

impl Register {
    /// Adopts the maps that are pinned below this directory, or creates them. Removes entries that
    /// contradict another entry.
    ///
    /// # Errors
    /// If the maps cannot be created or read.
    pub fn open(kernel: &dyn Kernel, pins: &Path) -> Result<Self, DatapathError> {
        let maps = kernel.host_maps(pins)?;
        let mut ids = ReportIds::default();
        let latest = kernel.now_ns().saturating_add(MAX_HOLD_NS);
        for (key, sender) in maps.senders()? {
            let name = name_of(&key);
            let taken = name.map(|name| ids.adopt(name, sender.id));
            match taken {
                Some(Ok(())) => {
                    // A time this late is invalid, because no report can set it. It is cleared
                    // here, because later reports do not clear it.
                    if maps.lame_until_ns(sender.id) > latest {
                        maps.set_lame_until_ns(sender.id, 0);
                    }
                }
                Some(Err(error)) => {
                    warn!(%error, "removed an invalid entry from the register of reporting backends");
                    maps.remove_sender(&key)?;
                }
                None => drop(maps.remove_sender(&key)?),
            }
        }
        let (maps, storing) = (Arc::new(maps), Arc::default());
        Ok(Self { maps, storing, ids, written: BTreeMap::new(), absent: BTreeMap::new() })
    }

    /// The handle through which the thread that receives reports stores them.
    pub fn store(&self) -> ReportStore {
        ReportStore::new(Arc::clone(&self.maps), Arc::clone(&self.storing))
    }

    pub fn maps(&self) -> &Arc<HostMaps> {
        &self.maps
    }

    /// Returns the id of a backend. Creates the backend's entry if there is none, and rewrites it
    /// if the keys differ. Returns [`NO_REPORT`] if no id is free.
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
        // The last accepted report remains stored, except in two cases. If the old and the new keys
        // have no key in common, another party sent the report. If the name is new, the report may
        // belong to an earlier backend with this id, because an earlier daemon may have ended
        // before it could clear the id.
        let before = if is_known { self.maps.sender(&key_of(name))? } else { None };
        let sender = sender(id, keys);
        if before.is_none_or(|before| !share_a_key(&before, &sender)) {
            self.maps.forget(id);
        }
        self.maps.set_sender(&key_of(name), &sender)?;
        self.written.insert(name, keys.clone());
        Ok(id)
    }

    /// For a backend whose polling begins now: the last report that was accepted, and the time
    /// until which the backend is a lame duck. They were stored by an earlier daemon, or by this
    /// daemon when it polled the backend before. Each value is `None` if the kernel's maps do not
    /// contain it.
    pub fn adopted(&self, name: Name) -> (Option<Base>, Option<Duration>) {
        let _storing = self.storing.lock();
        let Some(id) = self.ids.get(name) else { return (None, None) };
        let until = Some(self.maps.lame_until_ns(id)).filter(|ns| *ns != 0);
        (Base::of(self.maps.base(id)), until.map(Duration::from_nanos))
    }

    /// `names` are the backends that are polled from now on. Returns the report ids to write into
    /// the client tasks' maps `backends`, and the backends to remove from the register once none of
    /// these maps contains their id any more.
    pub fn renew(&mut self, names: &BTreeSet<Name>, now: Instant) -> (ReportIdMap, Vec<Name>) {
        self.ids.retain_uncovered(|name| names.contains(name));
        self.absent.retain(|name, _| !names.contains(name));
        for (name, _) in self.ids.iter().filter(|(name, _)| !names.contains(name)) {
            self.absent.entry(name).or_insert(now);
        }
        let gone = self.absent.iter().filter(|(_, since)| now.duration_since(**since) >= RETENTION);
        let gone: Vec<Name> = gone.map(|(name, _)| *name).collect();
        let mut ids: BTreeMap<Name, u32> = self.ids.iter().collect();
        // `gone` is sorted, as `absent` is.
        ids.retain(|name, _| gone.binary_search(name).is_err());
        (Arc::new(ids), gone)
    }

    /// Removes these entries. The caller must ensure that no map `backends` and no thread uses the
    /// entries any more.
    ///
    /// # Errors
    /// If the kernel refuses. A later call removes the remaining entries.
    pub fn remove(&mut self, gone: Vec<Name>) -> Result<(), DatapathError> {
        for name in gone {
            self.maps.remove_sender(&key_of(name))?;
            self.ids.release(name);
            self.written.remove(&name);
            self.absent.remove(&name);
        }
        Ok(())
    }

    /// Whether every backend with an entry is polled, and every polled backend has an entry. If
    /// `true`, later calls have no work to do.
    pub fn is_steady(&self) -> bool {
        self.absent.is_empty() && self.ids.uncovered() == 0
    }

    /// How many polled backends have no id because all ids are in use.
    pub fn uncovered(&self) -> usize {
        self.ids.uncovered()
    }

    /// Whether a released id waits for the end of running programs.
    pub fn wants_wait(&self) -> bool {
        self.ids.wants_wait()
    }

    /// Call this before a wait for readers starts.
    pub fn before_wait(&mut self) {
        self.ids.before_wait();
    }

    /// Call this when the wait for readers that followed [`Self::before_wait`] has ended.
    pub fn after_wait(&mut self) {
        let over = self.ids.after_wait();
        for id in &over {
            self.maps.forget(*id);
        }
        self.ids.cleared(&over);
    }
}

fn name_of(key: &SenderName) -> Option<Name> {
    let protocol = Protocol::of_number(key.protocol)?;
    Some(Name { protocol, address: lb_common::net::socket_addr(key.address, key.port) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_survives_its_encoding_for_the_kernel() {
        for (protocol, address) in [(Protocol::Tcp, "10.0.0.1:80"), (Protocol::Udp, "[2001:db8::1]:53")] {
            let name = Name { protocol, address: address.parse().unwrap() };
            assert_eq!(name_of(&key_of(name)), Some(name));
        }
        assert_eq!(name_of(&SenderName { protocol: 1, ..key_of(any()) }), None);
    }

    fn any() -> Name {
        Name { protocol: Protocol::Tcp, address: "10.0.0.1:80".parse().unwrap() }
    }
}
