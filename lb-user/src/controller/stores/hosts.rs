//! Stores the addresses of host names for the next start of the daemon, in one file.
//!
//! A later daemon uses these addresses for names that do not resolve, so that the endpoints of
//! these names are not removed. When every list has been read, the daemon drops stored names that
//! are in no list. If no list has host names with addresses, the file is removed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use lb_config::endpoints::MAX_HOSTS;
use lb_discovery::{HostName, HostState, HostTable, MAX_ADDRESSES, MAX_REFUSED, StoredAddresses};
use serde::{Deserialize, Serialize};

use super::files::{StoredFile, StoredRead};
use crate::controller::Controller;
use crate::controller::clock::unix_seconds;

/// The daemon writes the file at least once in this time, even if no address changes. So the times
/// in the file are at most this much older than the last answers of the DNS servers.
const MAX_STORE_INTERVAL: Duration = Duration::from_mins(5);

const SCHEMA: u32 = 1;

/// The content of the file.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct StoredHosts {
    /// The version of the format.
    schema: u32,
    hosts: Vec<StoredHost>,
}

/// The addresses of a name, all of one address family. A name that is needed for both families has
/// two entries.
#[derive(Debug, Serialize, Deserialize)]
struct StoredHost {
    name: String,
    /// When a server sent the addresses, in seconds since 1970.
    at: u64,
    addresses: Vec<IpAddr>,
    /// See [`HostState::refused`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    refused: Vec<Vec<IpAddr>>,
}

impl StoredFile for StoredHosts {
    /// 1,024 names with three times 1,000 IPv6 addresses each need 129 MB.
    const MAX_BYTES: u64 = 160 << 20;
    const SCHEMA: u32 = SCHEMA;
    const WHAT: &'static str = "the addresses of host names";
    const LOST: &'static str = "the file of the addresses of host names cannot be parsed; it was renamed; host names that do not resolve \
                                have no addresses";
    const UNREAD: &'static str = "cannot read the stored addresses of host names; host names that do not \
                                  resolve have no addresses; retrying; the file is not overwritten";
    const READ: &'static str = "the stored addresses of host names were read";

    fn path(state: &Path) -> PathBuf {
        state.join("hosts").join("hosts.json")
    }
}

impl StoredHosts {
    /// The addresses in the file. Entries that no daemon can have written are omitted.
    pub fn addresses(&self) -> StoredAddresses {
        let valid = |host: &StoredHost| {
            let lists = || [&host.addresses].into_iter().chain(&host.refused);
            let is_ipv6 = lists().flatten().next()?.is_ipv6();
            let is_valid = host.refused.len() <= MAX_REFUSED
                && host.refused.iter().all(|refused| !refused.is_empty())
                && lists().all(|list| list.len() <= MAX_ADDRESSES)
                && lists().flatten().all(|address| address.is_ipv6() == is_ipv6);
            // A time that `SystemTime` cannot represent is replaced by the oldest time.
            let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(host.at));
            let value = HostState {
                addresses: host.addresses.as_slice().into(),
                refused: host.refused.iter().map(|refused| refused.as_slice().into()).collect(),
                stored: Some(at.unwrap_or(SystemTime::UNIX_EPOCH)),
                ..HostState::default()
            };
            is_valid.then(|| (HostName { name: host.name.as_str().into(), is_ipv6 }, value))
        };
        self.hosts.iter().filter_map(valid).take(MAX_HOSTS).collect()
    }
}

/// The addresses of a name, and its refused addresses, see [`HostState::refused`].
type KnownHost = (Arc<[IpAddr]>, Arc<[Arc<[IpAddr]>]>);

/// The state of the file, as known to the daemon.
#[derive(Default)]
pub struct HostStore {
    /// The names in the file of an earlier daemon, until every list has been read.
    pub earlier: BTreeSet<HostName>,
    /// The names in the file, until [`HostTable`] contains their addresses.
    adopted: BTreeSet<HostName>,
    /// The addresses that were written last.
    known: BTreeMap<HostName, KnownHost>,
    /// When the addresses were written last; `None` if no addresses were written.
    written: Option<Instant>,
    /// Whether the file exists.
    is_there: bool,
    /// Why the file could not be read; `None` once a read has succeeded.
    unread: Option<String>,
}

impl HostStore {
    /// Applies the result of reading the file.
    pub fn take(&mut self, file: StoredRead<StoredHosts>) {
        if let Some(stored) = file.content(&mut self.unread) {
            self.earlier = stored.addresses().into_keys().collect();
            self.adopted.clone_from(&self.earlier);
            self.is_there = true;
        }
    }

    /// Whether the file could not be read yet.
    pub const fn is_unread(&self) -> bool {
        self.unread.is_some()
    }
}

/// The names in `hosts` that have addresses in `table`.
fn with_addresses<'t>(
    hosts: &'t BTreeSet<HostName>,
    table: &'t HostTable,
) -> impl Iterator<Item = (&'t HostName, &'t HostState)> {
    let state = |host| Some((host, table.0.get(host)?));
    hosts.iter().filter_map(state).filter(|(_, state)| state.has_addresses())
}

/// When the addresses of a name were last received. `wall` is the wall-clock time at `now`.
fn received(state: &HostState, now: Instant, wall: SystemTime) -> SystemTime {
    let last = state.missing.as_ref().map(|missing| missing.since).or(state.answered);
    let age = last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
    state.stored.or_else(|| wall.checked_sub(age)).unwrap_or(SystemTime::UNIX_EPOCH)
}

impl Controller {
    /// Stores the addresses of the host names, if they have changed or were stored
    /// `MAX_STORE_INTERVAL` ago.
    pub fn store_hosts(&mut self, now: Instant) {
        let hosts = &mut self.sources.hosts;
        let (table, store) = (&hosts.table, &mut hosts.store);
        // After the set of names has changed, the new names appear in the table with a delay.
        let is_late = |host: &HostName| match table.0.get(host) {
            Some(state) => !state.has_addresses() && store.adopted.contains(host),
            None => true,
        };
        if store.unread.is_some() || hosts.resolving.iter().any(is_late) {
            return;
        }
        store.adopted.clear();
        let found = || with_addresses(&hosts.resolving, table);
        let before = store.known.iter().map(|(host, (addresses, refused))| (host, addresses, refused));
        let is_equal = found().map(|(host, state)| (host, &state.addresses, &state.refused)).eq(before);
        let is_old =
            store.written.is_none_or(|written| now.saturating_duration_since(written) >= MAX_STORE_INTERVAL);
        let path = StoredHosts::path(&self.config.paths.state);
        if found().next().is_none() {
            store.known.clear();
            if std::mem::take(&mut store.is_there) {
                self.sources.files_to_store.remove(path);
            }
        } else if !is_equal || is_old {
            let of = |(host, state): (&HostName, &HostState)| StoredHost {
                name: host.name.to_string(),
                at: unix_seconds(received(state, now, self.wall)),
                addresses: state.addresses.to_vec(),
                refused: state.refused.iter().map(|refused| refused.to_vec()).collect(),
            };
            let file = StoredHosts { schema: SCHEMA, hosts: found().map(of).collect() };
            let known = |(host, state): (&HostName, &HostState)| {
                (host.clone(), (Arc::clone(&state.addresses), Arc::clone(&state.refused)))
            };
            store.known = found().map(known).collect();
            (store.written, store.is_there) = (Some(now), true);
            if let Ok(text) = serde_json::to_vec(&file) {
                self.sources.files_to_store.add(path, text.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] =
        br#"{"schema":1,"hosts":[{"name":"a.example","at":1700000000,"addresses":["10.0.0.1","10.0.0.2"]},
        {"name":"a.example","at":1700000000,"addresses":["fd00::1"]}]}"#;

    #[test]
    fn stored_addresses_are_read_by_name_and_family() {
        let read = StoredHosts::parse(TEXT).unwrap().addresses();
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let host = |is_ipv6| HostName { name: "a.example".into(), is_ipv6 };
        let of = |ips: &[&str]| HostState {
            addresses: ips.iter().map(|ip| ip.parse().unwrap()).collect(),
            stored: Some(at),
            ..HostState::default()
        };
        let expected = [(host(false), of(&["10.0.0.1", "10.0.0.2"])), (host(true), of(&["fd00::1"]))];
        assert_eq!(read, expected.into());
    }

    #[test]
    fn a_file_that_is_cut_or_of_a_later_version_is_refused() {
        for cut in 0..TEXT.len() {
            assert!(StoredHosts::parse(&TEXT[..cut]).is_err(), "{cut}");
        }
        let later = StoredHosts::parse(br#"{"schema":2,"hosts":{}}"#).unwrap_err();
        assert_eq!(later, "the file's schema is 2, but this socklb supports only 1");
    }

    #[test]
    fn invalid_entries_are_left_out_and_their_number_is_bounded() {
        let stored =
            |name: &str, at, addresses| StoredHost { name: name.to_owned(), at, addresses, refused: vec![] };
        let ip = |n: u32| IpAddr::from(std::net::Ipv4Addr::from(n));
        let many = (0..2 * MAX_HOSTS).map(|n| stored(&format!("n{n}"), 1, vec![ip(1)]));
        let invalid = [
            stored("none", 1, vec![]),
            stored("mixed", 1, vec![ip(1), "fd00::1".parse().unwrap()]),
            stored("long", 1, (0..=1_000).map(ip).collect()),
            stored("late", u64::MAX, vec![ip(1)]),
        ];
        let file = StoredHosts { schema: SCHEMA, hosts: invalid.into_iter().chain(many).collect() };
        let read = file.addresses();
        assert_eq!(read.len(), MAX_HOSTS);
        let late = HostName { name: "late".into(), is_ipv6: false };
        assert_eq!(read[&late].stored, Some(SystemTime::UNIX_EPOCH));
        assert!(read.keys().all(|host| host.name.starts_with('n') && &*host.name != "none" || *host == late));
    }
}
