//! Detects the shape of a list in JSON or YAML from its content. Also contains the code that the
//! readers of all shapes share.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use lb_document::diagnostic::{DiagnosticCollector, quote};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::json::JsonValue;
use super::{ListContext, ListEntry, ListedAddress, consul, envoy, file_sd, slices};

/// The keys that identify the shape of a list. If the file is a list, these keys are in its first
/// element; if the file is an object, they are in this object.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Marks<'t> {
    #[serde(borrow)]
    kind: Option<&'t RawValue>,
    #[serde(rename = "addressType", deserialize_with = "is_there")]
    address_type: bool,
    #[serde(deserialize_with = "is_there")]
    cluster_name: bool,
    #[serde(rename = "clusterName", deserialize_with = "is_there")]
    camel_cluster_name: bool,
    #[serde(deserialize_with = "is_there")]
    resources: bool,
    #[serde(rename = "Service", deserialize_with = "is_there")]
    service: bool,
    #[serde(rename = "Node", deserialize_with = "is_there")]
    node: bool,
    #[serde(rename = "ServiceAddress", deserialize_with = "is_there")]
    service_address: bool,
    #[serde(rename = "AggregatedStatus", deserialize_with = "is_there")]
    aggregated_status: bool,
    #[serde(deserialize_with = "is_there")]
    targets: bool,
}

/// Returns true for every value, because only the existence of the key matters.
fn is_there<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    IgnoredAny::deserialize(deserializer).map(|_| true)
}

impl<'t> Marks<'t> {
    /// Returns no marks for a value that has none of these keys or has faults. The reader of the
    /// shape reports the faults later.
    fn of(value: &JsonValue<'t>) -> Self {
        serde_json::from_str(value.raw.get()).unwrap_or_default()
    }

    const fn is_of_envoy(&self) -> bool {
        self.resources || self.cluster_name || self.camel_cluster_name
    }

    /// The kind of a Kubernetes object. In a list, the API leaves the kind out.
    fn kind(&self) -> Option<String> {
        let kind = self.kind.and_then(|kind| serde_json::from_str(kind.get()).ok());
        kind.or_else(|| self.address_type.then(|| slices::KIND.to_owned()))
    }
}

/// Returns the entries of a list of any shape. Adds notes about the parts that are left out or
/// ignored, with the reasons.
pub fn read(
    root: &JsonValue<'_>,
    reading: &ListContext<'_>,
    report: &DiagnosticCollector<'_>,
    notes: &mut Vec<String>,
) -> Vec<ListEntry> {
    let is_object = root.kind() == "an object";
    let elements = if is_object { Vec::new() } else { root.list(report).unwrap_or_default() };
    let Some(first) = (if is_object { Some(root) } else { elements.first() }) else { return Vec::new() };
    let marks = Marks::of(first);
    let refuse = |message: String, help: &str| {
        report.add(first.span(), message, help.to_owned());
        Vec::new()
    };
    let kind = marks.kind().filter(|kind| is_object || kind == slices::KIND);
    let entries = if kind.is_some() && marks.is_of_envoy() {
        refuse(
            "the file contains both a Kubernetes object and an Envoy object".to_owned(),
            "write one of them",
        )
    } else if let Some(kind) = kind {
        return match &*kind {
            slices::KIND | "EndpointSliceList" | "List" => slices::read(root, reading, report, notes),
            kind => refuse(
                format!("an object of kind {} is not a list of endpoints", quote(kind)),
                "use the output of kubectl get endpointslices -l kubernetes.io/service-name=NAME -o json",
            ),
        };
    } else if is_object && marks.is_of_envoy() {
        envoy::read(root, marks.resources, report, notes)
    } else if is_object {
        refuse(
            "the file is an object that is not a list of endpoints".to_owned(),
            "write a list of addresses or of groups of targets, Consul's answer to /v1/health/service, EndpointSlices of Kubernetes, \
             or a ClusterLoadAssignment of Envoy",
        )
    } else if marks.service && marks.node && !marks.targets {
        consul::read(root, report, notes)
    } else if marks.service_address || marks.aggregated_status {
        let message = "this is Consul's answer to /v1/catalog/service or /v1/agent/health";
        refuse(message.to_owned(), "use the answer to /v1/health/service, with nodes and checks")
    } else if first.kind() == "a string" {
        file_sd::addresses(&elements, report)
    } else {
        file_sd::groups(&elements, report, notes)
    };
    reading.note_port_name(&entries, notes);
    entries
}

/// The parts of a list that are left out: for each reason, an example and the number of parts.
#[derive(Default)]
pub struct LeftOut(BTreeMap<String, (String, usize)>);

/// The maximum number of different reasons. Parts with further reasons are counted together.
const MAX_REASONS: usize = 16;

/// The first few of these names as text, and the number of the other names.
pub fn some_of(names: impl IntoIterator<Item = String>) -> String {
    const SHOWN: usize = 8;
    let names: Vec<String> = names.into_iter().collect();
    let more = names.len().saturating_sub(SHOWN);
    let shown = names[..names.len() - more].join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}

/// The text `what`, and the number of the other parts if `count` is above 1.
pub fn example(what: &str, count: usize) -> String {
    if count > 1 { format!("{what} and {} more", count - 1) } else { what.to_owned() }
}

impl LeftOut {
    pub fn add(&mut self, why: impl Into<String>, what: impl Display) {
        // The number of reasons must be limited, because a reason may contain words of the file.
        let why = Some(why.into()).filter(|why| self.0.len() < MAX_REASONS || self.0.contains_key(why));
        let why = why.unwrap_or_else(|| "for other reasons".to_owned());
        let (_, count) = self.0.entry(why).or_insert_with(|| (what.to_string(), 0));
        *count += 1;
    }

    /// Adds one note for each reason.
    pub fn add_notes(self, notes: &mut Vec<String>) {
        for (why, (what, count)) in self.0 {
            notes.push(format!("left out: {}: {why}", example(&what, count)));
        }
    }
}

/// Checks that all endpoints of a list belong to one service. Stores the service of the first part,
/// and its line.
#[derive(Default)]
pub struct OneService(Option<(String, usize)>);

impl OneService {
    /// Returns whether a part of the list belongs to the same service as the parts before it.
    /// Reports a fault if it does not.
    pub fn accepts(
        &mut self,
        part: &JsonValue<'_>,
        service: &str,
        help: &str,
        report: &DiagnosticCollector<'_>,
    ) -> bool {
        let line = report.line(&part.span());
        let (first, at) = self.0.get_or_insert_with(|| (service.to_owned(), line));
        let is_same = *first == service;
        if !is_same {
            let (name, first) = (quote(service), quote(first));
            let message = format!(
                "{} belongs to service {name}, but the first entry (line {at}) belongs to {first}",
                part.name
            );
            report.add(part.span(), message, help.to_owned());
        }
        is_same
    }
}

/// Whether an entry is better than another entry with the same address. The result does not depend
/// on the order of the entries.
pub fn is_better(entry: &ListEntry, other: &ListEntry) -> bool {
    let rank = |entry: &ListEntry| {
        let index = entry.index.number();
        (entry.weight == 0, entry.state, index.is_none(), index, Reverse(entry.weight), entry.zone.clone())
    };
    rank(entry) < rank(other)
}

/// Retains only the best entry for each address or host name. A program that writes a list may list
/// an endpoint twice while the endpoint moves from one part of the list to another.
pub fn merge(entries: Vec<ListEntry>, notes: &mut Vec<String>) -> Vec<ListEntry> {
    let mut merged: Vec<ListEntry> = Vec::with_capacity(entries.len());
    let mut by_target: BTreeMap<ListedAddress, usize> = BTreeMap::new();
    let mut doubles: BTreeSet<ListedAddress> = BTreeSet::new();
    for entry in entries {
        let known = entry.target.as_ref().and_then(|target| by_target.get_key_value(target));
        let Some((target, at)) = known.map(|(target, at)| (target.clone(), *at)) else {
            by_target.extend(entry.target.clone().map(|target| (target, merged.len())));
            merged.push(entry);
            continue;
        };
        doubles.insert(target);
        if is_better(&entry, &merged[at]) {
            merged[at] = entry;
        }
    }
    if let Some(first) = doubles.first() {
        let doubles = example(&first.to_string(), doubles.len());
        notes.push(format!("more than once in the list: {doubles}: only the best entry is used"));
    }
    merged
}
