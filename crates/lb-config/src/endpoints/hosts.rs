//! Host names in lists. An entry with a host name becomes one endpoint for each address of the
//! name.
//!
//! This module resolves no name: the caller passes the addresses that are known, and reads the list
//! again when these addresses have changed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use lb_common::abi::MAX_BACKENDS;
use lb_document::diagnostic::DiagnosticCollector;

use super::shape::{example, is_better, some_of};
use super::{Index, ListEntry, ListedAddress};

/// The maximum number of host names in the lists of one host. A name that is needed for both
/// address families is counted twice, because it needs two queries.
pub const MAX_HOSTS: usize = 1024;

/// The addresses of host names, all of the address family of the service. A name without addresses
/// is not in the map.
pub type HostAddresses = BTreeMap<Arc<str>, Arc<[IpAddr]>>;

/// The beginning of the note on host names without addresses; the names follow.
pub const WITHOUT_ADDRESSES: &str = "host names without known addresses were left out";

/// The value for callers that resolve no host names.
pub static NO_HOSTS: HostAddresses = BTreeMap::new();

/// The host names that [`expand`] has replaced by addresses.
#[derive(Default)]
pub struct Expanded {
    /// The host names of the entries.
    pub hosts: BTreeSet<String>,
    /// The addresses that come only from host names, each with the first host name that resolves to
    /// it.
    pub resolved: BTreeMap<SocketAddr, String>,
}

/// Replaces each entry that has a host name by one entry for each address of the name. The new
/// entries follow all entries with addresses. A name without addresses yields no entry. If a new
/// entry has the same address as another entry, only the better of the two remains ([`is_better`]).
/// Reports a fault if a name with several addresses has an index.
pub fn expand(
    entries: &mut Vec<ListEntry>,
    addresses: &HostAddresses,
    report: &DiagnosticCollector<'_>,
    notes: &mut Vec<String>,
) -> Expanded {
    let mut expanded = Expanded::default();
    let mut by_address: BTreeMap<SocketAddr, usize> = BTreeMap::new();
    let (mut doubles, mut missing) = (BTreeSet::new(), BTreeSet::new());
    let is_named = |entry: &mut ListEntry| matches!(entry.target, Some(ListedAddress::Host(..)));
    let named: Vec<ListEntry> = entries.extract_if(.., is_named).collect();
    for (at, entry) in entries.iter().enumerate() {
        if let Some(ListedAddress::Address(address)) = entry.target {
            by_address.entry(address).or_insert(at);
        }
    }
    for entry in named {
        let Some(ListedAddress::Host(name, port)) = &entry.target else { continue };
        expanded.hosts.insert(name.clone());
        // The list is too long already, and will be refused.
        if entries.len() > MAX_BACKENDS as usize {
            continue;
        }
        let found: &[IpAddr] = addresses.get(&**name).map_or(&[], |found| found);
        if found.is_empty() {
            missing.insert(name.clone());
        }
        if let (Index::Given(span, index), 2..) = (&entry.index, found.len()) {
            let message = format!("index {index} belongs to {name}, which has {} addresses", found.len());
            let help = "give indexes only to names with one address, or to no endpoint".to_owned();
            report.add(span.clone(), message, help);
            continue;
        }
        for ip in found {
            let address = SocketAddr::new(*ip, *port);
            let one = ListEntry { target: Some(ListedAddress::Address(address)), ..entry.clone() };
            match by_address.get(&address) {
                None => {
                    expanded.resolved.insert(address, name.clone());
                    by_address.insert(address, entries.len());
                    entries.push(one);
                }
                Some(at) => {
                    doubles.insert(address);
                    if is_better(&one, &entries[*at]) {
                        entries[*at] = one;
                    }
                }
            }
        }
    }
    if let Some(first) = doubles.first() {
        let doubles = example(&first.to_string(), doubles.len());
        notes.push(format!(
            "addresses that belong to several entries with host names: {doubles}: only the best entry is used"
        ));
    }
    if !missing.is_empty() {
        notes.push(format!("{WITHOUT_ADDRESSES}: {}", some_of(missing)));
    }
    expanded
}
