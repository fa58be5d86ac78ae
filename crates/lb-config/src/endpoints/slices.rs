//! Reads EndpointSlices of Kubernetes (discovery.k8s.io/v1): either one slice, or a list of slices
//! as the API, kubectl or jq prints it, or slices that arrived one by one from a watch.
//!
//! The rules are those of kube-proxy. An endpoint is ready unless the slice states otherwise. An
//! endpoint that is terminating and still serving is a lame duck. Only the first address of an
//! endpoint counts. The API does not guarantee an order, and may list an endpoint in two slices
//! while it moves the endpoint from one slice to the other. Slices of host names (addressType FQDN)
//! are used in addition to slices of the service's family.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::path::Path;

use lb_common::abi::MAX_BACKENDS;
use lb_core::endpoint::{EndpointState, MAX_INDEXES};
use lb_core::service::Protocol;
use lb_document::diagnostic::{DiagnosticCollector, Diagnostics, quote};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::json::{JsonDocument, JsonValue};
use super::shape::{LeftOut, OneService, merge, some_of};
use super::{Index, ListContext, ListEntry, ListedAddress};

/// The `kind` of a slice.
pub const KIND: &str = "EndpointSlice";

/// The address type of a slice whose endpoints have host names.
const NAMES: &str = "FQDN";

const VERSION: &str = "discovery.k8s.io/v1";
const SERVICE_NAME: &str = "kubernetes.io/service-name";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an object")]
struct Root<'t> {
    api_version: Option<String>,
    #[serde(borrow)]
    items: Option<&'t RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a slice")]
struct EndpointSlice<'t> {
    kind: Option<String>,
    api_version: Option<String>,
    metadata: Option<ObjectMeta>,
    address_type: Option<String>,
    #[serde(borrow)]
    endpoints: Option<&'t RawValue>,
    #[serde(borrow)]
    ports: Option<Vec<Port<'t>>>,
}

#[derive(Default, Deserialize)]
#[serde(expecting = "metadata")]
struct ObjectMeta {
    name: Option<String>,
    namespace: Option<String>,
    labels: Option<Labels>,
}

#[derive(Deserialize)]
#[serde(expecting = "labels")]
struct Labels {
    #[serde(rename = "kubernetes.io/service-name")]
    service_name: Option<String>,
}

#[derive(Deserialize)]
#[serde(expecting = "a port")]
struct Port<'t> {
    name: Option<String>,
    // The number is parsed only if the port is wanted: a wrong number of another port has no effect
    // on the endpoints.
    #[serde(borrow)]
    port: Option<&'t RawValue>,
    protocol: Option<String>,
}

impl Port<'_> {
    /// In the API, the default protocol of a port is TCP.
    fn protocol(&self) -> &str {
        self.protocol.as_deref().unwrap_or("TCP")
    }
}

#[derive(Deserialize)]
#[serde(expecting = "an endpoint")]
struct SliceEndpoint<'t> {
    #[serde(borrow)]
    addresses: Option<&'t RawValue>,
    conditions: Option<Conditions>,
    hostname: Option<String>,
    zone: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(expecting = "conditions")]
struct Conditions {
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

impl Conditions {
    /// Absent conditions have the API's defaults: ready, serving, not terminating.
    fn state(&self) -> Option<EndpointState> {
        let is_ready = self.ready.unwrap_or(true);
        let is_leaving = self.terminating.unwrap_or(false) && self.serving.unwrap_or(true);
        match (is_ready, is_leaving) {
            (true, _) => Some(EndpointState::Healthy),
            (false, true) => Some(EndpointState::LameDuck),
            (false, false) => None,
        }
    }
}

/// Returns the entries of a slice, of an object with a list of slices, or of a plain list of
/// slices. Adds notes about the parts that are left out, with the reasons.
pub fn read(
    root: &JsonValue<'_>,
    reading: &ListContext<'_>,
    report: &DiagnosticCollector<'_>,
    notes: &mut Vec<String>,
) -> Vec<ListEntry> {
    let (version, values) = if root.kind() == "a list" {
        (None, root.whole_list("a slice", report))
    } else {
        let Some(Root { api_version, items }) = root.read(report) else { return Vec::new() };
        let items = items.map(|raw| root.of_key("items", raw).whole_list("a slice", report));
        // In a list that kubectl prints, the version `v1` is the version of the list, not of the
        // slices.
        let one = || Some(vec![JsonValue { name: "a slice", ..*root }]);
        (api_version.filter(|version| version != "v1"), items.unwrap_or_else(one))
    };
    let values = values.unwrap_or_default().into_iter();
    let slices: Vec<(JsonValue<'_>, EndpointSlice<'_>)> =
        values.filter_map(|value| Some((value, value.read(report)?))).collect();
    // If the address of the service is not known, IPv4 is preferred to IPv6, because the order of
    // the slices has no meaning.
    let is_v4 = slices.iter().any(|(_, slice)| slice.address_type.as_deref() == Some("IPv4"));
    let is_v4 = reading.service.map_or(is_v4, |service| service.is_ipv4());
    let help = "name one of them beside file, as in { file = \"users.json\", port_name = \"http\" }";
    let port = WantedPort { name: reading.port_name, protocol: reading.protocol, key: "port_name", help };
    let mut reader = EndpointSliceReader::new(port, is_v4, version);
    for (value, slice) in slices {
        reader.slice(&value, slice, report);
    }
    reader.finish(notes)
}

/// The reason why slices cannot be read.
#[derive(Debug)]
pub enum SlicesError {
    /// The faults of the first faulty slice. The path of each fault is the name of the slice.
    Faults(Diagnostics),
    /// There are more than twice as many endpoints as a service may have. (An endpoint may be in
    /// two slices.)
    TooMany,
}

/// Reads slices of one service from separate texts, each with a name for faults. `port` is the
/// value of the key `port` beside `kubernetes` in the configuration. Returns the entries (possibly
/// none), and notes about the parts that are left out. An entry's span is a position in the text of
/// its slice.
///
/// # Errors
/// If a text is not a slice, or has a wrong value, or if there are too many endpoints.
pub fn read_slices<'t>(
    slices: impl IntoIterator<Item = (&'t str, &'t str)>,
    port: Option<&str>,
    is_ipv6: bool,
) -> Result<(Vec<ListEntry>, Vec<String>), SlicesError> {
    let help = "name one of them, as in { kubernetes = \"shop/users\", port = \"http\" }";
    let port = WantedPort { name: port, protocol: None, key: "port", help };
    let mut reader = EndpointSliceReader::new(port, !is_ipv6, None);
    for (name, text) in slices {
        let report = DiagnosticCollector::new(Path::new(name), text);
        let document = JsonDocument::json(text, false);
        match document.root() {
            Ok(root) => {
                let value = root.map(|root| JsonValue { name: "a slice", ..root });
                if let Some((value, slice)) = value.and_then(|value| Some((value, value.read(&report)?))) {
                    reader.slice(&value, slice, &report);
                }
            }
            Err(error) => document.report_syntax(&error, &report, None),
        }
        report.finish(Some(())).map_err(SlicesError::Faults)?;
        if reader.entries.len() > 2 * MAX_BACKENDS as usize {
            return Err(SlicesError::TooMany);
        }
    }
    let mut notes = Vec::new();
    Ok((reader.finish(&mut notes), notes))
}

/// The port that the configuration names.
#[derive(Clone, Copy)]
struct WantedPort<'a> {
    /// `None`: the configuration has no port.
    name: Option<&'a str>,
    /// The protocol of the service; `None` if it is not known.
    protocol: Option<Protocol>,
    /// The configuration key that names the port.
    key: &'static str,
    /// A help text that shows how to name the port.
    help: &'static str,
}

struct EndpointSliceReader<'a> {
    wanted_port: WantedPort<'a>,
    /// The address type of the slices to use: `IPv4` or `IPv6`.
    family: &'static str,
    /// The version of slices that do not state a version.
    version: Option<String>,
    service: OneService,
    /// The host names of endpoints without the numbers at their ends.
    stems: BTreeSet<String>,
    entries: Vec<ListEntry>,
    /// The addresses that a slice lists as not ready. Another slice may list them as ready.
    not_ready: Vec<ListedAddress>,
    left_out: LeftOut,
}

impl<'a> EndpointSliceReader<'a> {
    fn new(wanted_port: WantedPort<'a>, is_v4: bool, version: Option<String>) -> Self {
        Self {
            wanted_port,
            family: if is_v4 { "IPv4" } else { "IPv6" },
            version,
            service: OneService::default(),
            stems: BTreeSet::new(),
            entries: Vec::new(),
            not_ready: Vec::new(),
            left_out: LeftOut::default(),
        }
    }

    fn finish(self, notes: &mut Vec<String>) -> Vec<ListEntry> {
        let Self { stems, entries, not_ready, mut left_out, .. } = self;
        let used: BTreeSet<&ListedAddress> =
            entries.iter().filter_map(|entry| entry.target.as_ref()).collect();
        let mut counted = BTreeSet::new();
        for target in &not_ready {
            if !used.contains(target) && counted.insert(target) {
                left_out.add("not ready", target);
            }
        }
        left_out.add_notes(notes);
        let mut entries = merge(entries, notes);
        let numbers: BTreeSet<u32> = entries.iter().filter_map(|entry| entry.index.number()).collect();
        if stems.len() > 1 || numbers.len() < entries.len() {
            if !numbers.is_empty() {
                let note = "pod names are not used as indexes: the pods do not all belong to one StatefulSet";
                notes.push(note.to_owned());
            }
            entries.iter_mut().for_each(|entry| entry.index = Index::Absent);
        }
        entries
    }

    fn slice(
        &mut self,
        value: &JsonValue<'_>,
        slice: EndpointSlice<'_>,
        report: &DiagnosticCollector<'_>,
    ) -> Option<()> {
        let kind = slice.kind.as_deref().unwrap_or(KIND);
        let version = slice.api_version.as_ref().or(self.version.as_ref());
        let help = || format!("write an {KIND} of {VERSION}");
        if kind != KIND {
            report.add(value.span(), format!("an item has the kind {}", quote(kind)), help());
            return None;
        }
        if let Some(version) = version.filter(|version| *version != VERSION) {
            report.add(value.span(), format!("a slice has the version {}", quote(version)), help());
            return None;
        }
        let ObjectMeta { name, namespace, labels } = slice.metadata.unwrap_or_default();
        let service = labels.and_then(|labels| labels.service_name).unwrap_or_default();
        let service = format!("{}/{service}", namespace.as_deref().unwrap_or("default"));
        let select = format!("select one service, as with -l {SERVICE_NAME}=NAME");
        if !self.service.accepts(value, &service, &select, report) {
            return None;
        }
        let name = name
            .map_or_else(|| format!("the slice on line {}", report.line(&value.span())), |name| quote(&name));
        let Some(of) = slice.address_type else {
            let help = "write \"addressType\": \"IPv4\"".to_owned();
            report.add_absent(value.span(), "addressType is missing in a slice", help);
            return None;
        };
        let endpoints = slice.endpoints.map(|raw| value.of_key("endpoints", raw));
        let endpoints = endpoints.and_then(|endpoints| endpoints.whole_list("an endpoint", report));
        let endpoints = endpoints.unwrap_or_default();
        if of != self.family && of != NAMES {
            let why =
                format!("a slice of addressType {}, but the service is {}", quote(&of), quote(self.family));
            self.left_out.add(why, name);
        } else if !endpoints.is_empty()
            && let Some(port) = self.port(&slice.ports.unwrap_or_default(), &name, value, report)
        {
            for endpoint in endpoints {
                self.endpoint(&endpoint, port, of == NAMES, report);
            }
        }
        Some(())
    }

    /// Returns the port to use. If no port matches, leaves the slice out and returns `None`. If
    /// several ports match, or if a matching port has a wrong number, reports a fault and returns
    /// `None`.
    fn port(
        &mut self,
        ports: &[Port<'_>],
        slice: &str,
        value: &JsonValue<'_>,
        report: &DiagnosticCollector<'_>,
    ) -> Option<u16> {
        let name = |port: &Port<'_>| quote(port.name.as_deref().unwrap_or_default());
        let WantedPort { name: wanted, protocol, key, help } = self.wanted_port;
        let is_meant = |port: &&&Port<'_>| {
            wanted.is_none_or(|wanted| wanted == port.name.as_deref().unwrap_or_default())
        };
        let all: Vec<&Port<'_>> = ports.iter().filter(|port| port.port.is_some()).collect();
        let mut meant = BTreeMap::new();
        let mut other = None;
        for port in all.iter().filter(is_meant) {
            if protocol.is_some_and(|protocol| !port.protocol().eq_ignore_ascii_case(protocol.name())) {
                other.get_or_insert(*port);
                continue;
            }
            let number: NonZeroU16 = value.of_key("port", port.port?).read_any(report)?;
            meant.insert(number.get(), name(port));
        }
        let mut numbers = meant.keys();
        match (numbers.next(), numbers.next(), wanted) {
            (Some(port), None, _) => return Some(*port),
            (None, ..) if let (Some(other), Some(protocol)) = (other, protocol) => {
                let (name, of) = (name(other), quote(other.protocol()));
                let why =
                    format!("its port {name} has protocol {of}, but the service has {}", protocol.name());
                self.left_out.add(why, slice);
            }
            (None, _, Some(wanted)) if !all.is_empty() => {
                let names: BTreeSet<String> = all.into_iter().map(name).collect();
                let why = format!("its ports are {}, but {key} is {}", some_of(names), quote(wanted));
                self.left_out.add(why, slice);
            }
            (None, ..) => self.left_out.add("a slice without ports", slice),
            (Some(_), Some(_), _) => {
                let ports = meant.iter().map(|(port, name)| format!("{port} ({name})"));
                let message = format!("a slice has the ports {}", some_of(ports));
                report.add(value.span(), message, help.to_owned());
            }
        }
        None
    }

    fn endpoint(
        &mut self,
        value: &JsonValue<'_>,
        port: u16,
        is_name: bool,
        report: &DiagnosticCollector<'_>,
    ) -> Option<()> {
        let SliceEndpoint { addresses, conditions, hostname, zone } = value.read(report)?;
        let addresses = addresses.map(|raw| value.of_key("addresses", raw).list(report));
        let Some(first) = addresses.unwrap_or_else(|| Some(Vec::new()))?.first().copied() else {
            self.left_out.add("no address", format!("the endpoint on line {}", report.line(&value.span())));
            return None;
        };
        let first = JsonValue { name: "address", ..first };
        let target = if is_name {
            first.target_at(port, report)?
        } else {
            ListedAddress::Address(SocketAddr::new(first.ip(report)?, port))
        };
        let Some(state) = conditions.unwrap_or_default().state() else {
            self.not_ready.push(target);
            return None;
        };
        let span = first.span();
        // Kubernetes writes numbers without leading zeros.
        let number =
            |number: &str| number.parse().ok().filter(|n: &u32| *n < MAX_INDEXES && n.to_string() == number);
        let ordinal = hostname.as_deref().and_then(|name| name.rsplit_once('-'));
        let index = ordinal.and_then(|(_, text)| number(text));
        let index = index.map_or(Index::Absent, |number| Index::Given(span.clone(), number));
        self.stems.extend(ordinal.map(|(stem, _)| stem.to_owned()));
        self.entries.push(ListEntry { index, state, zone, ..ListEntry::bare(span, Some(target)) });
        Some(())
    }
}
