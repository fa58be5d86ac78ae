//! Parses the endpoints of one service from a file. The file is in socklb's own TOML format, or in
//! JSON or YAML that other programs write.
//!
//! A file is accepted as a whole or refused as a whole, so that a half-written file cannot remove
//! backends from the service. This module only parses text. The caller decides when to read the
//! file, and retains the last valid list if this module refuses the new one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::path::Path;

use lb_common::abi::MAX_BACKENDS;
use lb_core::endpoint::{Endpoint, EndpointFault, EndpointList, EndpointState, MAX_INDEXES};
use lb_core::service::Protocol;
use lb_core::subset::Algorithm;

use lb_document::diagnostic::{DiagnosticCollector, Diagnostics, quote, utf8};
use lb_document::key::Unset::{Is, Means, Required};
use lb_document::kind::{Keyword, Number, Refusal, Text, ValueKind as _};
use lb_document::{self, NotAnAddress, Table, address, parse_address};
use lb_document::{
    key::{ConfigKey, Section},
    section,
};

mod consul;
mod entries;
mod envoy;
mod file_sd;
mod hosts;
mod json;
mod shape;
mod slices;
mod yaml;

use hosts::Expanded;
use json::JsonDocument;

use crate::discovery::dns_name;

pub use consul::read_instances;
pub use hosts::{HostAddresses, MAX_HOSTS, NO_HOSTS, WITHOUT_ADDRESSES};
pub use json::not_json;
pub use slices::{SlicesError, read_slices};

/// The maximum size of an endpoint file in bytes: 16,384 endpoints in TOML need about 2 MiB. The
/// limit bounds memory and time if the operator writes the path of a wrong file.
pub const MAX_FILE_BYTES: usize = 4 << 20;

section! {
    keys, "[[endpoint]]", "an endpoint", "in an endpoint file, one for each endpoint of the service";

    ADDRESS "address": Text<ListedAddress>(&["10.0.0.1:8080", "users.example.com:8080"], target), Required,
        "IP address and port, of the same address family as the service; or host name and port, which \
         become one endpoint for each address of the name";
    INDEX "index": Number(0..=MAX_INDEXES - 1), Means("a hash of the address"),
        "the endpoint's number in the service; either all endpoints have an index, or none has one";
    WEIGHT "weight": Number<u16>(0..=0xffff), Is(1), "capacity relative to the other endpoints; 0: no new connections";
    STATE "state": Keyword<EndpointState>(&EndpointState::ALL, EndpointState::name), Is(EndpointState::Healthy),
        "a lame duck serves, but requests that clients open no new connections; an endpoint that is down \
         gets no new connections while a healthy endpoint or a lame duck has a weight above 0";
    ZONE "zone": Text<String>(&["b"], |text| Ok(text.to_owned())), Means("none"), "where the endpoint runs; has no effect yet";
    AGENT "agent": Text<SocketAddr>(&["10.0.0.1:9465"], address), Means("the endpoint's IP address, with the `port` of the service's `health`"),
        "the address at which the endpoint's agent listens";
}

/// The address of an endpoint as written in a list: an IP address or a host name, with a port.
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
    /// If the text has none of these forms.
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
                // The text looks like a host name, but is not a valid host name.
                let is_like_name = refusal.why.starts_with("is a host name");
                let why = match (is_like_name, host.starts_with('[') && host.contains('%')) {
                    (true, _) => "is not an address",
                    (false, true) => "has a zone index, which is valid on one host only",
                    (false, false) => refusal.why,
                };
                NotAnAddress { why, ..refusal }
            }),
        }
    }

    /// Reads an IP address or a host name that is written apart from its port. The port is not
    /// checked.
    ///
    /// # Errors
    /// The reason for the refusal. In a message, the reason follows the quoted text.
    pub fn of(host: &str, port: u16) -> Result<Self, &'static str> {
        match (host.parse(), host_name(host)) {
            (Ok(ip), _) => Ok(Self::Address(SocketAddr::new(ip, port))),
            (Err(_), Some(name)) if is_localhost(&name) => Err(LOCALHOST),
            (Err(_), Some(name)) => Ok(Self::Host(name, port)),
            (Err(_), None) => Err("is neither an IP address nor a host name"),
        }
    }
}

/// Like [`ListedAddress::parse`], but the message begins with the quoted text.
pub fn target(text: &str) -> Result<ListedAddress, Refusal> {
    ListedAddress::parse(text)
        .map_err(|NotAnAddress { why, help }| (format!("{} {why}", quote(text)), Some(help)))
}

pub(crate) const LOCALHOST: &str = "is a name of this host itself, which DNS servers do not resolve";

/// The name in lower case, if the text is a host name. The last label of a host name is not a
/// number (RFC 1123 section 2.1), so a mistyped IP address is not read as a host name.
fn host_name(text: &str) -> Option<String> {
    let name = dns_name(text).ok()?;
    let last = name.rsplit('.').next()?;
    (!last.bytes().all(|byte| byte.is_ascii_digit())).then_some(name)
}

/// Whether a name resolves to the loopback addresses (RFC 6761 section 6.3).
pub(crate) fn is_localhost(name: &str) -> bool {
    name == "localhost" || name.ends_with(".localhost")
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    /// The endpoints. Empty only if the file has host names, and none of them has an address.
    pub list: EndpointList,
    /// The host names in the file.
    pub hosts: BTreeSet<String>,
    /// The addresses that the file does not contain, each with the host name that resolves to it.
    pub resolved: BTreeMap<SocketAddr, String>,
    /// One note for each ignored part of the file, with the reason. A note is a sentence without a
    /// full stop.
    pub notes: Vec<String>,
}

/// Returns whether a text is JSON, by its first non-blank bytes. No list in TOML begins in this
/// way: `[[endpoint]]` has two brackets.
pub fn is_json(text: &[u8]) -> bool {
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    let mut bytes = text.iter().filter(|byte| !byte.is_ascii_whitespace());
    match bytes.next() {
        Some(b'{') => true,
        Some(b'[') => matches!(bytes.next(), Some(b'{' | b'"' | b']')),
        _ => false,
    }
}

/// Returns whether a text is YAML, by its first line that is neither blank nor a comment. In TOML,
/// that line has neither `- ` nor `key: `.
fn is_yaml(text: &str) -> bool {
    let lines = text.trim_start_matches('\u{feff}').lines().map(str::trim);
    let first = lines.clone().find(|line| !line.is_empty() && !line.starts_with('#')).unwrap_or_default();
    let key = first.split_once(':').filter(|(_, value)| value.is_empty() || value.starts_with(' '));
    let is_key = |key: &str| !key.contains(['=', '[', '{']);
    first == "-"
        || ["- ", "---", "%"].iter().any(|start| first.starts_with(start))
        || key.is_some_and(|(key, _)| is_key(key))
}

/// The path of an endpoint file, and the facts about its service that the parser needs.
#[derive(Clone, Copy, Debug)]
pub struct ListContext<'a> {
    /// The path of the file. If the text does not show its format, the ending `.json`, `.yaml` or
    /// `.yml` of the path decides.
    pub path: &'a Path,
    /// The name of the port to use if the endpoints have several named ports.
    pub port_name: Option<&'a str>,
    /// The protocol of the service, if it is known.
    pub protocol: Option<Protocol>,
    /// The address at which clients dial the service, if it is known.
    pub service: Option<SocketAddr>,
    /// The addresses at which clients dial all services.
    pub services: &'a [SocketAddr],
    /// The addresses of host names, as far as they are known.
    pub hosts: &'a HostAddresses,
}

impl<'a> ListContext<'a> {
    /// The context of a file about whose service nothing is known.
    pub const fn of(path: &'a Path) -> Self {
        Self { path, port_name: None, protocol: None, service: None, services: &[], hosts: &NO_HOSTS }
    }

    /// Adds a note that `port_name` has no effect for these entries, because their ports have no
    /// names.
    fn note_port_name(&self, entries: &[ListEntry], notes: &mut Vec<String>) {
        if let Some(port_name) = self.port_name.filter(|_| !entries.is_empty()) {
            notes.push(format!(
                "`port_name` {} has no effect: only EndpointSlices name ports",
                quote(port_name)
            ));
        }
    }
}

/// Parses the content of an endpoint file. The beginning of the text usually shows whether the text
/// is JSON or YAML. If the beginning does not show this, the file name decides. In all other cases
/// the text is TOML.
///
/// # Errors
/// All faults of the file. A file without any endpoint is a fault.
pub fn parse(text: &[u8], reading: &ListContext<'_>) -> Result<Parsed, Diagnostics> {
    let path = reading.path;
    if text.len() > MAX_FILE_BYTES {
        let report = DiagnosticCollector::new(path, "");
        let message = format!("the file is longer than {MAX_FILE_BYTES} bytes");
        let help = "write the file without blanks and without fields that socklb does not read";
        report.add_absent(0..0, message, help.to_owned());
        return report.finish(None);
    }
    let text = utf8(text, path)?;
    let report = DiagnosticCollector::new(path, text);
    let mut notes = Vec::new();
    let entries = match document(text, path, &report) {
        Some(document) => read_document(&document, reading, &report, &mut notes),
        None if report.is_clean() => {
            let entries = read_toml(text, &report);
            reading.note_port_name(&entries, &mut notes);
            entries
        }
        None => Vec::new(),
    };
    if entries.is_empty() && report.is_clean() {
        let why =
            notes.iter().map(|note| note.trim_start_matches("left out: ")).collect::<Vec<_>>().join("; ");
        let (message, help) = if why.is_empty() {
            let empty = "the file has no endpoint; an empty list is refused so that a truncated file does \
                         not take the service down";
            (empty.to_owned(), "to stop all traffic, write weight = 0 for every endpoint")
        } else {
            (
                format!("no endpoint is left: {why}"),
                "the earlier list stays in force until the file has an endpoint",
            )
        };
        report.add_absent(0..0, message, help.to_owned());
    }
    let checked = check(entries, reading, &report, &mut notes);
    report.finish(checked.map(|parsed| Parsed { notes, ..parsed }))
}

/// Returns the text as JSON if it is JSON or YAML. Returns `None` if the text is TOML, or if it is
/// YAML with faults, which this function reports.
fn document<'t>(text: &'t str, path: &Path, report: &DiagnosticCollector<'_>) -> Option<JsonDocument<'t>> {
    let named_yaml = format_of(path) == "yaml";
    let json = JsonDocument::json(text, named_yaml);
    // JSON is also valid YAML, but the reader of JSON describes faults of JSON better.
    if is_json(text.as_bytes()) && !(named_yaml && json.root().is_err()) {
        Some(json)
    } else if named_yaml || is_yaml(text) {
        JsonDocument::yaml(text, report)
    } else {
        (format_of(path) == "json").then_some(json)
    }
}

/// The format that a file name implies: `json`, `yaml`, or else `toml`.
pub fn format_of(path: &Path) -> &'static str {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    match ending.to_ascii_lowercase().as_str() {
        "json" => "json",
        "yaml" | "yml" => "yaml",
        _ => "toml",
    }
}

fn read_document(
    document: &JsonDocument<'_>,
    reading: &ListContext<'_>,
    report: &DiagnosticCollector<'_>,
    notes: &mut Vec<String>,
) -> Vec<ListEntry> {
    match document.root() {
        Ok(Some(root)) => return shape::read(&root, reading, report, notes),
        Ok(None) => {}
        Err(error) => {
            let is_known = format_of(reading.path) == "json";
            let help = (!is_known)
                .then(|| "if the file is YAML, rename it so that its name ends in .yaml".to_owned());
            document.report_syntax(&error, report, help);
        }
    }
    Vec::new()
}

/// Refuses a list without indexes for an algorithm that needs them, see
/// [`lb_core::service::Subset::needs_indexes`].
///
/// # Errors
/// The fault, reported for the file at `path`.
pub fn check_indexes(list: &EndpointList, needs: Option<Algorithm>, path: &Path) -> Result<(), Diagnostics> {
    let Some((message, help)) = without_indexes(list, needs) else { return Ok(()) };
    let report = DiagnosticCollector::new(path, "");
    report.add_absent(0..0, message, help);
    report.finish(Some(()))
}

/// Returns the reason why an algorithm cannot compute subsets of a list, and a correction.
pub fn without_indexes(list: &EndpointList, needs: Option<Algorithm>) -> Option<(String, String)> {
    let algorithm = needs.filter(|_| list.has_address_indexes())?;
    let message = format!("the endpoints have no indexes, which algorithm \"{algorithm}\" needs");
    Some((message, "give every endpoint an index, or write algorithm = \"rocksteadier\"".to_owned()))
}

fn read_toml(text: &str, report: &DiagnosticCollector<'_>) -> Vec<ListEntry> {
    let root = entries::read(text, MAX_BACKENDS as usize, report);
    let root = Table::root("an endpoint file", &root, report);
    root.check_keys(&[keys::SECTION.name()]);
    let tables = root.tables(&keys::SECTION, MAX_BACKENDS as usize);
    tables.iter().filter_map(read_table).collect()
}

// A fault of one part of an entry does not hide other faults: every part that can be read is
// checked. An entry with neither address nor index, as at the end of a truncated file, causes no
// further fault.
fn read_table(table: &Table<'_>) -> Option<ListEntry> {
    let listed = keys::ADDRESS.item(table);
    let is_cut = listed.is_none() && table.get(keys::INDEX.name).is_none();
    let span = listed.as_ref().map_or(table.span(), lb_document::Item::span);
    let listed = listed.and_then(|item| keys::ADDRESS.kind.read(&item));
    let index = match keys::INDEX.item(table) {
        Some(item) => Index::read(item.span(), keys::INDEX.kind.read(&item)),
        None => Index::Absent,
    };
    let weight = keys::WEIGHT.take_or_default(table);
    let state = keys::STATE.take_or_default(table);
    let zone = keys::ZONE.take_written(table).flatten();
    let agent = keys::AGENT.take_written(table).flatten();
    (!is_cut).then_some(ListEntry { span, target: listed, index, weight, state, zone, agent })
}

/// The index of an endpoint in a file.
#[derive(Clone)]
pub enum Index {
    /// The entry has no index.
    Absent,
    /// The value is not an index. This fault has been reported.
    Wrong(Range<usize>),
    /// The index, and its position in the file.
    Given(Range<usize>, u32),
}

impl Index {
    /// An index at `span`; `value` is `None` if the index could not be read.
    pub fn read(span: Range<usize>, value: Option<u32>) -> Self {
        match value {
            Some(value) => Self::Given(span, value),
            None => Self::Wrong(span),
        }
    }

    pub const fn number(&self) -> Option<u32> {
        match self {
            Self::Absent | Self::Wrong(_) => None,
            Self::Given(_, number) => Some(*number),
        }
    }

    fn span(&self) -> Option<&Range<usize>> {
        match self {
            Self::Absent => None,
            Self::Wrong(span) | Self::Given(span, _) => Some(span),
        }
    }
}

/// An endpoint as written in a file. If a part could not be read, its fault has been reported, and
/// the entry contains the default of the part ([`Index::Wrong`] for an index).
#[derive(Clone)]
pub struct ListEntry {
    /// The position of the entry's address, or of the whole entry if the entry has no address.
    pub span: Range<usize>,
    /// The address at which the endpoint listens, or its host name.
    pub target: Option<ListedAddress>,
    pub index: Index,
    pub weight: u16,
    /// The state of the endpoint in the list.
    pub state: EndpointState,
    pub zone: Option<String>,
    /// The address at which the endpoint's agent listens.
    pub agent: Option<SocketAddr>,
}

impl ListEntry {
    /// An endpoint with this address and default values.
    pub fn bare(span: Range<usize>, target: Option<ListedAddress>) -> Self {
        Self {
            span,
            target,
            index: Index::Absent,
            weight: 1,
            state: EndpointState::Healthy,
            zone: None,
            agent: None,
        }
    }
}

/// Checks the entries of a file or a static list together, and replaces host names with their
/// addresses. If the entries do not form a valid list, reports the faults and returns `None`. If
/// the address of the service is not known, address families are not checked. New notes are added
/// to `notes`; the notes in the result are empty.
pub fn check(
    mut entries: Vec<ListEntry>,
    reading: &ListContext<'_>,
    report: &DiagnosticCollector<'_>,
    notes: &mut Vec<String>,
) -> Option<Parsed> {
    let indexed = entries.iter().find_map(|entry| entry.index.span().cloned());
    if let Some(index) = &indexed
        && let Some(entry) = entries.iter().find(|entry| entry.index.span().is_none())
    {
        let place = report.place(index, &entry.span);
        let which = entry.target.as_ref().map_or_else(String::new, |target| format!(" {target}"));
        let message = format!("endpoint{which} has no index, but the endpoint {place} has one");
        report.add(entry.span.clone(), message, "give every endpoint an index, or none".to_owned());
    }
    check_names(&entries, report);
    let is_clean = report.is_clean();
    let Expanded { hosts, resolved } = hosts::expand(&mut entries, reading.hosts, report, notes);
    if !is_clean {
        // Drops entries with addresses of host names, because duplicate indexes of these entries
        // have already been reported.
        entries.retain(|entry| !entry.target.as_ref().is_some_and(|target| is_resolved(target, &resolved)));
    }
    let given: BTreeSet<u32> = entries.iter().filter_map(|entry| entry.index.number()).collect();
    // An entry with a reported fault still needs an index, so that the remaining entries can be
    // checked. The entry receives an index that no other entry has. If no entry has an index, the
    // endpoint list assigns all indexes later.
    let mut free = (0..MAX_INDEXES).filter(|index| !given.contains(index));
    let mut spans = Vec::with_capacity(entries.len());
    let mut endpoints = Vec::with_capacity(entries.len());
    for ListEntry { span, target, index, weight, state, zone, agent } in entries {
        let Some(ListedAddress::Address(address)) = target else { continue };
        let (index_span, index) = match index {
            Index::Given(span, index) => (span, index),
            Index::Absent | Index::Wrong(_) => (span.clone(), free.next().unwrap_or(MAX_INDEXES)),
        };
        endpoints.push(Endpoint { address, index, weight, state, zone, agent });
        spans.push((span, index_span));
    }
    match new_list(endpoints, indexed.is_some(), reading.service, reading.services) {
        Ok(list) => Some(Parsed { list, hosts, resolved, notes: Vec::new() }),
        Err(faults) => {
            faults.iter().for_each(|(position, fault)| add_fault(*position, fault, &spans, report));
            None
        }
    }
}

fn is_resolved(target: &ListedAddress, resolved: &BTreeMap<SocketAddr, String>) -> bool {
    matches!(target, ListedAddress::Address(address) if resolved.contains_key(address))
}

// `EndpointList` detects duplicates only among entries with addresses. This function detects
// duplicate host names, and duplicate indexes of entries with a host name or an unreadable address.
fn check_names(entries: &[ListEntry], report: &DiagnosticCollector<'_>) {
    let mut named: BTreeMap<&ListedAddress, &Range<usize>> = BTreeMap::new();
    for entry in entries {
        let Some(target @ ListedAddress::Host(..)) = &entry.target else { continue };
        match named.get(target) {
            Some(first) => {
                let message = format!("{target} is already {}", report.place(first, &entry.span));
                report.add(entry.span.clone(), message, None);
            }
            None => drop(named.insert(target, &entry.span)),
        }
    }
    check_indexes_without_address(entries, report);
}

fn check_indexes_without_address(entries: &[ListEntry], report: &DiagnosticCollector<'_>) {
    // For each index: its first position, and whether an entry with an address has the index.
    let mut seen: BTreeMap<u32, (&Range<usize>, bool)> = BTreeMap::new();
    for entry in entries {
        let Index::Given(span, index) = &entry.index else { continue };
        let has_address = matches!(entry.target, Some(ListedAddress::Address(_)));
        let Some((first, is_listed)) = seen.get_mut(index) else {
            seen.insert(*index, (span, has_address));
            continue;
        };
        if !(has_address && *is_listed) {
            let message = format!("index {index} is already {}", report.place(first, span));
            report.add(span.clone(), message, None);
        }
        *is_listed |= has_address;
    }
}

fn new_list(
    endpoints: Vec<Endpoint>,
    has_indexes: bool,
    service: Option<SocketAddr>,
    services: &[SocketAddr],
) -> Result<EndpointList, Vec<(usize, EndpointFault)>> {
    let make = if has_indexes { EndpointList::new } else { EndpointList::without_indexes };
    if let Some(service) = service {
        return make(endpoints, service, services);
    }
    // If the family of an address differs from the service's family, `EndpointList` makes no other
    // check of the address. So all addresses are checked twice: as if the service had an IPv4
    // address, and as if it had an IPv6 address. Faults that do not depend on the family are
    // reported once.
    let v4 = make(endpoints.clone(), (Ipv4Addr::LOCALHOST, 0).into(), services);
    let v6 = make(endpoints, (Ipv6Addr::LOCALHOST, 0).into(), services);
    let (mut faults, of_v6) = match (v4, v6) {
        (Ok(list), _) | (_, Ok(list)) => return Ok(list),
        (Err(v4), Err(v6)) => (v4, v6),
    };
    faults.retain(|(_, fault)| !matches!(fault, EndpointFault::OtherFamily { .. }));
    let is_v6 = |fault: &EndpointFault| match fault {
        EndpointFault::IsAService { address } | EndpointFault::Unreachable { address, .. } => {
            address.is_ipv6()
        }
        EndpointFault::DuplicateAddress { .. }
        | EndpointFault::DuplicateIndex { .. }
        | EndpointFault::IndexTooLarge { .. }
        | EndpointFault::OtherFamily { .. }
        | EndpointFault::TooMany { .. }
        | EndpointFault::TooManyWithoutIndexes { .. } => false,
    };
    faults.extend(of_v6.into_iter().filter(|(_, fault)| is_v6(fault)));
    Err(faults)
}

// The message names the line instead of the position in the list, because operators see only lines.
fn add_fault(
    position: usize,
    fault: &EndpointFault,
    spans: &[(Range<usize>, Range<usize>)],
    report: &DiagnosticCollector<'_>,
) {
    let (address_span, index_span) = spans[position].clone();
    let mut help = None;
    let (span, message) = match fault {
        EndpointFault::DuplicateAddress { address, first } => {
            let place = report.place(&spans[*first].0, &address_span);
            (address_span, format!("address {address} is already {place}"))
        }
        EndpointFault::DuplicateIndex { index, first } => {
            let place = report.place(&spans[*first].1, &index_span);
            (index_span, format!("index {index} is already {place}"))
        }
        EndpointFault::Unreachable { address, .. } if address.port() == 0 => {
            help = Some("write 1 to 65535".to_owned());
            (address_span, fault.to_string())
        }
        EndpointFault::IndexTooLarge { .. } => (index_span, fault.to_string()),
        EndpointFault::OtherFamily { .. }
        | EndpointFault::IsAService { .. }
        | EndpointFault::Unreachable { .. }
        | EndpointFault::TooMany { .. }
        | EndpointFault::TooManyWithoutIndexes { .. } => (address_span, fault.to_string()),
    };
    report.add(span, message, help);
}

#[cfg(test)]
mod tests;
