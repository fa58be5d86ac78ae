//! Reads EndpointSlices of Kubernetes (discovery.k8s.io/v1): one, or a list as the API or kubectl gives it.
//!
//! As kube-proxy reads them: an endpoint is ready unless it says that it is not; one that is terminating and still serves is a lame duck;
//! of its addresses the first counts. The API promises no order, and may name an endpoint in two slices while it moves.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use lb_core::endpoint::{EndpointState, MAX_INDEXES};
use lb_document::diagnostic::{Report, quote};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::json::Value;
use super::shape::{LeftOut, merge};
use super::{Entry, Index, Reading};

const VERSION: &str = "discovery.k8s.io/v1";
const SERVICE_NAME: &str = "kubernetes.io/service-name";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Root<'t> {
    api_version: Option<String>,
    #[serde(borrow)]
    items: Option<&'t RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Slice<'t> {
    kind: Option<String>,
    api_version: Option<String>,
    metadata: Option<Metadata>,
    address_type: Option<String>,
    #[serde(borrow)]
    endpoints: Option<&'t RawValue>,
    ports: Option<Vec<Port>>,
}

#[derive(Deserialize)]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    labels: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct Port {
    name: Option<String>,
    port: Option<u16>,
}

#[derive(Deserialize)]
struct Endpoint<'t> {
    #[serde(borrow)]
    addresses: Option<&'t RawValue>,
    conditions: Option<Conditions>,
    hostname: Option<String>,
    zone: Option<String>,
}

#[derive(Default, Deserialize)]
struct Conditions {
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

impl Conditions {
    /// What nothing means is the API's word: ready, serving, not terminating.
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

/// The entries of all slices. Adds to `notes` what is left out, and why.
pub fn read(
    root: &Value<'_>,
    reading: &Reading<'_>,
    report: &mut Report<'_>,
    notes: &mut Vec<String>,
) -> Vec<Entry> {
    let Some(Root { api_version, items }) = root.read(report) else { return Vec::new() };
    let slices = match items {
        Some(items) => Value { name: "items", raw: items, ..*root }.list(report).unwrap_or_default(),
        None => vec![*root],
    };
    let mut reader = Reader {
        port_name: reading.port_name,
        family: reading.service.map(family),
        version: api_version.filter(|version| version != "v1"),
        service: None,
        stems: BTreeSet::new(),
        entries: Vec::new(),
        left_out: LeftOut::default(),
    };
    for slice in slices {
        reader.slice(&Value { name: "a slice", ..slice }, report);
    }
    let Reader { stems, entries, left_out, .. } = reader;
    left_out.tell(notes);
    let mut entries = merge(entries, notes);
    let numbers: BTreeSet<u32> = entries.iter().filter_map(|entry| entry.index.number()).collect();
    if stems.len() > 1 || numbers.len() < entries.len() {
        if !numbers.is_empty() {
            notes.push("host names give no indexes: they are not all those of one StatefulSet".to_owned());
        }
        entries.iter_mut().for_each(|entry| entry.index = Index::Absent);
    }
    entries
}

/// The type of the addresses, as slices call it.
const fn family(address: SocketAddr) -> &'static str {
    if address.is_ipv4() { "IPv4" } else { "IPv6" }
}

struct Reader<'a> {
    port_name: Option<&'a str>,
    /// The type of the addresses that are read; without a service that of the first slice.
    family: Option<&'static str>,
    /// That of slices that do not say it.
    version: Option<String>,
    /// Whose slices these are, and the line of the first.
    service: Option<(String, usize)>,
    /// Host names without their numbers.
    stems: BTreeSet<String>,
    entries: Vec<Entry>,
    left_out: LeftOut,
}

impl Reader<'_> {
    fn slice(&mut self, value: &Value<'_>, report: &mut Report<'_>) -> Option<()> {
        let slice: Slice<'_> = value.read(report)?;
        let kind = slice.kind.as_deref().unwrap_or("EndpointSlice");
        let version = slice.api_version.as_ref().or(self.version.as_ref());
        let help = || format!("write an EndpointSlice of {VERSION}");
        if kind != "EndpointSlice" {
            report.add(value.span(), format!("an item of the kind {}", quote(kind)), help());
            return None;
        }
        if let Some(version) = version.filter(|version| *version != VERSION) {
            report.add(value.span(), format!("a slice of version {}", quote(version)), help());
            return None;
        }
        let name = self.check_service(slice.metadata.as_ref(), value, report)?;
        let of = slice.address_type.as_deref();
        let family = *self.family.get_or_insert(if of == Some("IPv6") { "IPv6" } else { "IPv4" });
        match of {
            Some("FQDN") => self.left_out.add("a slice of host names, which are not resolved yet", name),
            Some(of) if of != family => {
                let why =
                    format!("a slice of addressType {}, and the service is {}", quote(of), quote(family));
                self.left_out.add(why, name);
            }
            Some(_) => {
                let port = self.port(&slice.ports.unwrap_or_default(), &name, value, report)?;
                let endpoints = slice.endpoints.map(|raw| Value { name: "endpoints", raw, ..*value });
                for endpoint in endpoints.and_then(|endpoints| endpoints.list(report)).unwrap_or_default() {
                    self.endpoint(&Value { name: "an endpoint", ..endpoint }, port, report);
                }
            }
            None => report.add_absent(
                value.span(),
                "addressType is missing in a slice",
                "write \"addressType\": \"IPv4\"".to_owned(),
            ),
        }
        Some(())
    }

    /// The slice's name, if it belongs to the service of the slices before.
    fn check_service(
        &mut self,
        metadata: Option<&Metadata>,
        value: &Value<'_>,
        report: &mut Report<'_>,
    ) -> Option<String> {
        let namespace = metadata.and_then(|metadata| metadata.namespace.as_deref()).unwrap_or("default");
        let labels = metadata.and_then(|metadata| metadata.labels.as_ref());
        if let Some(service) = labels.and_then(|labels| labels.get(SERVICE_NAME)) {
            let service = format!("{namespace}/{service}");
            let line = report.line(&value.span());
            let (first, at) = self.service.get_or_insert_with(|| (service.clone(), line));
            if *first != service {
                let message = format!(
                    "a slice of service {}, and the one on line {at} is of {}",
                    quote(&service),
                    quote(first)
                );
                report.add(
                    value.span(),
                    message,
                    format!("select one service, as with -l {SERVICE_NAME}=NAME"),
                );
                return None;
            }
        }
        let name = metadata.and_then(|metadata| metadata.name.as_deref());
        Some(name.map_or_else(|| format!("the slice on line {}", report.line(&value.span())), quote))
    }

    /// The one port that is meant; `None` if there is none, or if that is not clear, which is reported.
    fn port(
        &mut self,
        ports: &[Port],
        slice: &str,
        value: &Value<'_>,
        report: &mut Report<'_>,
    ) -> Option<u16> {
        let name = |port: &Port| port.name.clone().unwrap_or_default();
        let all: BTreeMap<u16, String> =
            ports.iter().filter_map(|port| Some((port.port?, name(port)))).collect();
        let is_meant = |of: &str| self.port_name.is_none_or(|wanted| wanted == of);
        let meant: BTreeMap<&u16, &String> = all.iter().filter(|(_, of)| is_meant(of)).collect();
        let mut numbers = meant.keys();
        match (numbers.next(), numbers.next(), self.port_name) {
            (Some(port), None, _) => return Some(**port),
            (None, _, Some(wanted)) if !all.is_empty() => {
                let names: Vec<String> = all.values().map(|name| quote(name)).collect();
                let why = format!("its ports are {}, and port_name is {}", names.join(", "), quote(wanted));
                self.left_out.add(why, slice);
            }
            (None, ..) => self.left_out.add("a slice without ports", slice),
            (Some(_), Some(_), _) => {
                let ports: Vec<String> =
                    all.iter().map(|(port, name)| format!("{port} ({})", quote(name))).collect();
                let message = format!("a slice has the ports {}", ports.join(", "));
                let help =
                    "write which is meant beside file, as in { file = \"users.json\", port_name = \"http\" }";
                report.add(value.span(), message, help.to_owned());
            }
        }
        None
    }

    fn endpoint(&mut self, value: &Value<'_>, port: u16, report: &mut Report<'_>) -> Option<()> {
        let Endpoint { addresses, conditions, hostname, zone } = value.read(report)?;
        let addresses = addresses.map(|raw| Value { name: "addresses", raw, ..*value }.list(report));
        let Some(first) = addresses.unwrap_or_else(|| Some(Vec::new()))?.first().copied() else {
            self.left_out.add("no address", format!("the endpoint on line {}", report.line(&value.span())));
            return None;
        };
        let first = Value { name: "address", ..first };
        let ip: IpAddr = first.ip(report)?;
        let address = SocketAddr::new(ip, port);
        let Some(state) = conditions.unwrap_or_default().state() else {
            self.left_out.add("not ready", address);
            return None;
        };
        let span = first.span();
        let ordinal = hostname.as_deref().and_then(|name| name.rsplit_once('-'));
        let number =
            ordinal.and_then(|(_, number)| number.parse().ok().filter(|number| *number < MAX_INDEXES));
        let index = number.map_or(Index::Absent, |number| Index::Given(span.clone(), number));
        self.stems.extend(ordinal.map(|(stem, _)| stem.to_owned()));
        self.entries.push(Entry { index, state, zone, ..Entry::bare(span, Some(address)) });
        Some(())
    }
}
