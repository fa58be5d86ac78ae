//! The shapes of a list in JSON or YAML, told apart by what is in it, and what they have in common.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::net::SocketAddr;

use lb_document::diagnostic::{Report, quote};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::json::Value;
use super::{Entry, Reading, consul, envoy, file_sd, slices};

/// What tells the shape of an object, the whole file or the first of a list.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Marks {
    kind: Option<String>,
    endpoints: Option<IgnoredAny>,
    #[serde(alias = "clusterName")]
    cluster_name: Option<IgnoredAny>,
    resources: Option<IgnoredAny>,
    #[serde(rename = "Service")]
    service: Option<IgnoredAny>,
    #[serde(rename = "Node")]
    node: Option<IgnoredAny>,
    #[serde(rename = "ServiceAddress", alias = "AggregatedStatus")]
    other_of_consul: Option<IgnoredAny>,
    targets: Option<IgnoredAny>,
}

impl Marks {
    /// Of a value that has none there is nothing to tell; what is wrong with one is told by the reader of its shape.
    fn of(value: &Value<'_>) -> Self {
        serde_json::from_str(value.raw.get()).unwrap_or_default()
    }

    const fn is_of_envoy(&self) -> bool {
        self.resources.is_some() || self.cluster_name.is_some()
    }
}

/// The entries of a list of any shape. Adds to `notes` what is left out or ignored, and why.
pub fn read(
    root: &Value<'_>,
    reading: &Reading<'_>,
    report: &mut Report<'_>,
    notes: &mut Vec<String>,
) -> Vec<Entry> {
    let is_object = root.kind() == "an object";
    let elements = if is_object { Vec::new() } else { root.list(report).unwrap_or_default() };
    let Some(first) = (if is_object { Some(root) } else { elements.first() }) else { return Vec::new() };
    let marks = Marks::of(first);
    let mut refuse = |message: String, help: &str| {
        report.add(first.span(), message, help.to_owned());
        Vec::new()
    };
    if let (true, Some(kind)) = (is_object, &marks.kind) {
        return match kind.as_str() {
            _ if marks.is_of_envoy() => {
                refuse("the file is an object of Kubernetes and one of Envoy".to_owned(), "write one of them")
            }
            "EndpointSlice" | "EndpointSliceList" | "List" => slices::read(root, reading, report, notes),
            kind => refuse(
                format!("an object of the kind {} is no list of endpoints", quote(kind)),
                "take kubectl get endpointslices -l kubernetes.io/service-name=NAME -o json",
            ),
        };
    }
    let entries = if is_object && (marks.is_of_envoy() || marks.endpoints.is_some()) {
        envoy::read(root, marks.resources.is_some(), report, notes)
    } else if is_object {
        refuse(
            "the file is an object that is no list of endpoints".to_owned(),
            "take a list of addresses or of groups of targets, what Consul answers to /v1/health/service, EndpointSlices of Kubernetes, \
             or a ClusterLoadAssignment of Envoy",
        )
    } else if marks.service.is_some() && marks.node.is_some() && marks.targets.is_none() {
        consul::read(&elements, report, notes)
    } else if marks.other_of_consul.is_some() {
        let message = "this is what Consul answers to /v1/catalog/service or /v1/agent/health";
        refuse(message.to_owned(), "take the answer to /v1/health/service, with nodes and checks")
    } else if first.kind() == "a string" {
        file_sd::addresses(&elements, report)
    } else {
        file_sd::groups(&elements, report, notes)
    };
    reading.note_port_name(&entries, notes);
    entries
}

/// What is left out of a list, by reason: an example, and how many there are.
#[derive(Default)]
pub struct LeftOut(BTreeMap<String, (String, usize)>);

/// An example, and how many more there are.
fn example(what: &str, count: usize) -> String {
    if count > 1 { format!("{what} and {} more", count - 1) } else { what.to_owned() }
}

impl LeftOut {
    pub fn add(&mut self, why: impl Into<String>, what: impl Display) {
        let (_, count) = self.0.entry(why.into()).or_insert_with(|| (what.to_string(), 0));
        *count += 1;
    }

    /// One note for each reason.
    pub fn tell(self, notes: &mut Vec<String>) {
        for (why, (what, count)) in self.0 {
            notes.push(format!("left out: {}: {why}", example(&what, count)));
        }
    }
}

/// Leaves one entry for each address, the best: producers name an endpoint twice while it moves from one of their parts to another.
/// Which one that is does not depend on their order.
pub fn merge(entries: Vec<Entry>, notes: &mut Vec<String>) -> Vec<Entry> {
    let rank = |entry: &Entry| {
        (entry.weight == 0, entry.state, entry.index.number(), entry.weight, entry.zone.clone())
    };
    let mut merged: Vec<Entry> = Vec::with_capacity(entries.len());
    let mut by_address: BTreeMap<SocketAddr, usize> = BTreeMap::new();
    let mut doubles: BTreeSet<SocketAddr> = BTreeSet::new();
    for entry in entries {
        let known = entry.address.and_then(|address| Some((address, *by_address.get(&address)?)));
        let Some((address, at)) = known else {
            by_address.extend(entry.address.map(|address| (address, merged.len())));
            merged.push(entry);
            continue;
        };
        doubles.insert(address);
        if rank(&entry) < rank(&merged[at]) {
            merged[at] = entry;
        }
    }
    if let Some(first) = doubles.first() {
        let doubles = example(&first.to_string(), doubles.len());
        notes.push(format!("more than once in the list: {doubles}: the best entry counts"));
    }
    merged
}
