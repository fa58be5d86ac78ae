//! Host names in lists. An entry with a host name becomes one endpoint for each address of the
//! name.
//!
//! This module resolves no name: the caller passes the addresses that are known, and reads the list
//! again when they have changed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use lb_common::abi::MAX_BACKENDS;
use lb_document::diagnostic::{DiagnosticCollector, quote};
use lb_document::kind::Refusal;
use lb_document::{NotAnAddress, parse_address};

use super::shape::{example, is_better, some_of};
use super::{Index, ListEntry};
use crate::discovery::dns_name;

/// The maximum number of host names in the lists of one host. A name that is needed for both
/// address families counts twice, because it needs two queries.
pub const MAX_HOSTS: usize = 1024;

/// The addresses of host names, all of the address family of the service. A name without addresses
/// is left out.
pub type HostAddresses = BTreeMap<Arc<str>, Arc<[IpAddr]>>;

/// For readers that resolve no names.
pub static NO_HOSTS: HostAddresses = BTreeMap::new();

/// The place in a list at which an endpoint listens: an address or a host name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ListedAddress {
    Address(SocketAddr),
    /// A host name in lower case, without a dot at its end, and a port.
    Host(String, u16),
}

impl fmt::Display for ListedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Host(name, port) => write!(f, "{name}:{port}"),
        }
    }
}

impl ListedAddress {
    /// Parses `IP:port`, `[IPv6]:port` or `name:port`.
    ///
    /// # Errors
    /// If the text is none of them.
    pub fn parse(text: &str) -> Result<Self, NotAnAddress> {
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address));
        }
        let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
        match (host_name(host), port.parse()) {
            (Some(name), _) if is_localhost(&name) => Err(NotAnAddress {
                why: LOCALHOST,
                help: "write \"127.0.0.1:8080\" or \"[::1]:8080\", with the right port".to_owned(),
            }),
            (Some(name), Ok(port)) if port > 0 => Ok(Self::Host(name, port)),
            (Some(name), _) if port.is_empty() => Err(NotAnAddress {
                why: "has no port",
                help: format!("write \"{name}:8080\", with the right port"),
            }),
            (Some(_), _) => {
                Err(NotAnAddress { why: "has a wrong port", help: "write 1 to 65535".to_owned() })
            }
            (None, _) => parse_address(text).map(Self::Address).map_err(|refusal| {
                // The text looks like a host name, but is not a valid one.
                let is_like_name = refusal.why.starts_with("is a host name");
                let why = if is_like_name { "is not an address" } else { refusal.why };
                NotAnAddress { why, ..refusal }
            }),
        }
    }

    /// Reads an IP address or a host name that is written apart from its port. The port is not
    /// checked.
    ///
    /// # Errors
    /// Why it is neither. In a message, the reason follows the quoted text.
    pub fn of(host: &str, port: u16) -> Result<Self, &'static str> {
        match (host.parse(), host_name(host)) {
            (Ok(ip), _) => Ok(Self::Address(SocketAddr::new(ip, port))),
            (Err(_), Some(name)) if is_localhost(&name) => Err(LOCALHOST),
            (Err(_), Some(name)) => Ok(Self::Host(name, port)),
            (Err(_), None) => Err("is neither an IP address nor a host name"),
        }
    }
}

/// As [`ListedAddress::parse`], but the message begins with the quoted text.
pub fn target(text: &str) -> Result<ListedAddress, Refusal> {
    ListedAddress::parse(text)
        .map_err(|NotAnAddress { why, help }| (format!("{} {why}", quote(text)), Some(help)))
}

const LOCALHOST: &str = "is this host itself, which DNS servers do not know";

/// The name in lower case, if the text is a host name. The last label of a host name is not a
/// number (RFC 1123 section 2.1), so a mistyped IP address is not read as a host name.
fn host_name(text: &str) -> Option<String> {
    let name = dns_name(text).ok()?;
    let last = name.rsplit('.').next()?;
    (!last.bytes().all(|byte| byte.is_ascii_digit())).then_some(name)
}

/// RFC 6761 section 6.3: these names mean the loopback addresses.
fn is_localhost(name: &str) -> bool {
    name == "localhost" || name.ends_with(".localhost")
}

/// The endpoints of entries, with host names replaced by their addresses.
#[derive(Default)]
pub struct Expanded {
    pub entries: Vec<ListEntry>,
    /// The host names of the entries.
    pub hosts: BTreeSet<String>,
    /// The addresses that come only from a host name, each with the first such name.
    pub resolved: BTreeMap<SocketAddr, String>,
}

/// Replaces each entry that has a host name by one entry for each address of the name. A name
/// without addresses yields none. If two names have the same address, or if it is listed as well,
/// the best entry counts, as in lists that other programs write. Reports an index that is given to
/// a name with several addresses.
pub fn expand(
    entries: Vec<ListEntry>,
    addresses: &HostAddresses,
    report: &mut DiagnosticCollector<'_>,
    notes: &mut Vec<String>,
) -> Expanded {
    let mut expanded = Expanded::default();
    let mut by_address: BTreeMap<SocketAddr, usize> = BTreeMap::new();
    let (mut doubles, mut missing) = (BTreeSet::new(), BTreeSet::new());
    let (named, listed): (Vec<ListEntry>, Vec<ListEntry>) =
        entries.into_iter().partition(|entry| matches!(entry.target, Some(ListedAddress::Host(..))));
    for entry in listed {
        if let Some(ListedAddress::Address(address)) = entry.target {
            by_address.entry(address).or_insert(expanded.entries.len());
        }
        expanded.entries.push(entry);
    }
    for entry in named {
        let Some(ListedAddress::Host(name, port)) = &entry.target else { continue };
        expanded.hosts.insert(name.clone());
        // The list is refused because of its length.
        if expanded.entries.len() > MAX_BACKENDS as usize {
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
                    by_address.insert(address, expanded.entries.len());
                    expanded.entries.push(one);
                }
                Some(at) => {
                    doubles.insert(address);
                    if is_better(&one, &expanded.entries[*at]) {
                        expanded.entries[*at] = one;
                    }
                }
            }
        }
    }
    if let Some(first) = doubles.first() {
        let doubles = example(&first.to_string(), doubles.len());
        notes.push(format!(
            "addresses that several entries with host names have: {doubles}: the best entry counts"
        ));
    }
    if !missing.is_empty() {
        notes.push(format!("host names without known addresses were left out: {}", some_of(missing)));
    }
    expanded
}
