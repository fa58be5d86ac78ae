//! Reads a ClusterLoadAssignment of Envoy (xDS v3), bare or as the one resource of a DiscoveryResponse, in the JSON form of protobuf:
//! names of fields in either spelling, 32-bit numbers also as text, enumerations by name in any case or by number.

use std::net::SocketAddr;

use lb_core::endpoint::{EndpointState, MAX_INDEXES};
use lb_document::diagnostic::{Report, quote};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Number;
use serde_json::value::RawValue;

use super::json::Value;
use super::shape::{LeftOut, merge};
use super::{Entry, Index};

const TYPE: &str = "envoy.config.endpoint.v3.ClusterLoadAssignment";

#[derive(Deserialize)]
struct Response<'t> {
    #[serde(borrow)]
    resources: Option<&'t RawValue>,
}

#[derive(Deserialize)]
struct Resource {
    #[serde(rename = "@type", default)]
    of_type: String,
}

#[derive(Deserialize)]
struct Assignment<'t> {
    #[serde(borrow)]
    endpoints: Option<&'t RawValue>,
}

#[derive(Deserialize)]
struct Group<'t> {
    locality: Option<Locality>,
    #[serde(borrow, alias = "lbEndpoints")]
    lb_endpoints: Option<&'t RawValue>,
    #[serde(default, alias = "loadBalancingWeight", deserialize_with = "number")]
    load_balancing_weight: Option<u32>,
    #[serde(default, deserialize_with = "number")]
    priority: Option<u32>,
}

#[derive(Deserialize)]
struct Locality {
    zone: Option<String>,
}

#[derive(Deserialize)]
struct LbEndpoint<'t> {
    #[serde(borrow)]
    endpoint: Option<Endpoint<'t>>,
    #[serde(alias = "healthStatus")]
    health_status: Option<Status>,
    #[serde(default, alias = "loadBalancingWeight", deserialize_with = "number")]
    load_balancing_weight: Option<u32>,
    #[serde(borrow)]
    metadata: Option<Metadata<'t>>,
}

#[derive(Deserialize)]
struct Endpoint<'t> {
    #[serde(borrow)]
    address: Option<Address<'t>>,
}

#[derive(Deserialize)]
struct Address<'t> {
    #[serde(borrow, alias = "socketAddress")]
    socket_address: Option<SocketAddress<'t>>,
}

#[derive(Deserialize)]
struct SocketAddress<'t> {
    #[serde(borrow)]
    address: Option<&'t RawValue>,
    #[serde(default, alias = "portValue", deserialize_with = "number")]
    port_value: Option<u32>,
}

#[derive(Deserialize)]
struct Metadata<'t> {
    #[serde(borrow, alias = "filterMetadata")]
    filter_metadata: Option<FilterMetadata<'t>>,
}

#[derive(Deserialize)]
struct FilterMetadata<'t> {
    #[serde(borrow)]
    socklb: Option<Own<'t>>,
}

#[derive(Deserialize)]
struct Own<'t> {
    #[serde(borrow)]
    index: Option<&'t RawValue>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Status {
    Name(String),
    Number(usize),
}

/// By number.
const STATUSES: [&str; 6] = ["UNKNOWN", "HEALTHY", "UNHEALTHY", "DRAINING", "TIMEOUT", "DEGRADED"];

/// A 32-bit number, as protobuf reads it in JSON: also as text, and wrapped.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Number(Number),
        Text(String),
        Wrapped { value: Number },
    }
    let Some(written) = Option::<Written>::deserialize(deserializer)? else { return Ok(None) };
    let text = match written {
        Written::Number(number) | Written::Wrapped { value: number } => number.to_string(),
        Written::Text(text) => text,
    };
    let number = whole(&text, u32::MAX);
    number
        .map(Some)
        .ok_or_else(|| D::Error::custom(format!("{} is no whole number below 2^32", quote(&text))))
}

/// A whole number up to `max`, perhaps written as 7.0.
fn whole(text: &str, max: u32) -> Option<u32> {
    text.strip_suffix(".0").unwrap_or(text).parse().ok().filter(|number| *number <= max)
}

/// The entries of the assignment. Adds to `notes` what is left out, and why.
pub fn read(
    root: &Value<'_>,
    is_response: bool,
    report: &mut Report<'_>,
    notes: &mut Vec<String>,
) -> Vec<Entry> {
    let assignment = if is_response { resource(root, report) } else { Some(*root) };
    let groups = assignment.and_then(|value| {
        let Assignment { endpoints } = value.read(report)?;
        Value { name: "endpoints", raw: endpoints?, ..value }.list(report)
    });
    let groups: Vec<(Value<'_>, Group<'_>)> = groups
        .unwrap_or_default()
        .into_iter()
        .filter_map(|value| Some((value, value.read(report)?)))
        .collect();
    let mut left_out = LeftOut::default();
    let mut found = Vec::new();
    // Envoy falls back to the others while too few of the first are healthy; here lame ducks and ejection do that.
    let first = groups.iter().map(|(_, group)| group.priority.unwrap_or(0)).min();
    for (value, group) in groups {
        let endpoints = group.lb_endpoints.map(|raw| Value { name: "lb_endpoints", raw, ..value });
        let priority = group.priority.unwrap_or(0);
        let zone = group.locality.and_then(|locality| locality.zone).filter(|zone| !zone.is_empty());
        for value in endpoints.and_then(|endpoints| endpoints.list(report)).unwrap_or_default() {
            // Envoy prints 0 where none is set, and takes none from a file.
            let of_locality = group.load_balancing_weight.filter(|weight| *weight > 0);
            let Some(mut endpoint) = endpoint(&value, of_locality, report, &mut left_out) else {
                continue;
            };
            if Some(priority) != first {
                left_out.add(format!("priority {priority}"), endpoint.what());
                continue;
            }
            endpoint.entry.zone.clone_from(&zone);
            found.push(endpoint);
        }
    }
    left_out.tell(notes);
    merge(scaled(found, notes), notes)
}

/// The one assignment of a response.
fn resource<'t>(root: &Value<'t>, report: &mut Report<'_>) -> Option<Value<'t>> {
    let Response { resources } = root.read(report)?;
    let resources = Value { name: "resources", raw: resources?, ..*root }.list(report)?;
    let [resource] = &*resources else {
        if let Some(second) = resources.get(1) {
            let message = format!("the response has {} resources", resources.len());
            report.add(second.span(), message, "write a file for each cluster".to_owned());
        }
        return None;
    };
    let Resource { of_type } = resource.read(report)?;
    if of_type.rsplit('/').next() != Some(TYPE) {
        let message = format!("a resource of the type {}", quote(&of_type));
        report.add(resource.span(), message, format!("write \"type.googleapis.com/{TYPE}\""));
        return None;
    }
    Some(*resource)
}

/// An entry and its weight, which may be larger than ours.
struct Found {
    entry: Entry,
    weight: u64,
}

impl Found {
    fn what(&self) -> String {
        self.entry.address.map_or_else(|| "an endpoint".to_owned(), |address| address.to_string())
    }
}

fn endpoint(
    value: &Value<'_>,
    of_locality: Option<u32>,
    report: &mut Report<'_>,
    left_out: &mut LeftOut,
) -> Option<Found> {
    let LbEndpoint { endpoint, health_status, load_balancing_weight, metadata } = value.read(report)?;
    let address = endpoint.and_then(|endpoint| endpoint.address).and_then(|address| address.socket_address);
    let Some(SocketAddress { address: Some(raw), port_value }) = address else {
        let help = "write \"socket_address\": {\"address\": \"10.0.0.1\", \"port_value\": 8080}".to_owned();
        report.add_absent(value.span(), "an endpoint without a socket_address", help);
        return None;
    };
    let address = Value { name: "address", raw, ..*value };
    let span = address.span();
    let port = u16::try_from(port_value.unwrap_or(0));
    if port.is_err() {
        report.add(value.span(), "port_value is no port", "write 1 to 65535".to_owned());
    }
    let address = address.ip(report).map(|ip| SocketAddr::new(ip, port.unwrap_or(0)));
    let status = match health_status {
        None => STATUSES[0].to_owned(),
        Some(Status::Name(name)) => name.to_ascii_uppercase(),
        Some(Status::Number(number)) => {
            STATUSES.get(number).map_or_else(|| number.to_string(), |name| (*name).to_owned())
        }
    };
    let state = match &*status {
        "UNKNOWN" | "HEALTHY" => EndpointState::Healthy,
        // Envoy, too, takes those that are degraded once healthy ones do not suffice.
        "DRAINING" | "DEGRADED" => EndpointState::LameDuck,
        "UNHEALTHY" | "TIMEOUT" => {
            let what = address.map_or_else(|| "an endpoint".to_owned(), |address| address.to_string());
            left_out.add(format!("health status {status}"), what);
            return None;
        }
        unknown => {
            let message = format!("unknown health_status {}", quote(unknown));
            report.add(value.span(), message, format!("known are {}", STATUSES.join(", ")));
            return None;
        }
    };
    let index = metadata.and_then(|all| all.filter_metadata).and_then(|filters| filters.socklb?.index);
    let index = match index {
        Some(raw) => {
            let value = Value { name: "index", raw, ..*value };
            // A number of a protobuf Struct is a double.
            let number = whole(raw.get(), MAX_INDEXES - 1);
            if number.is_none() {
                report.add(
                    value.span(),
                    format!("index is {}", raw.get()),
                    format!("write 0 to {}", MAX_INDEXES - 1),
                );
            }
            Index::read(value.span(), number)
        }
        None => Index::Absent,
    };
    // One that sets no weight has that of 1 in its locality.
    let weight = u64::from(load_balancing_weight.unwrap_or(1)) * u64::from(of_locality.unwrap_or(1));
    Some(Found { entry: Entry { index, state, ..Entry::bare(span, address) }, weight })
}

/// Gives each its weight; if one is too large, all are scaled.
fn scaled(found: Vec<Found>, notes: &mut Vec<String>) -> Vec<Entry> {
    let most = u64::from(u16::MAX);
    let largest = found.iter().map(|found| found.weight).max().unwrap_or(0).max(most);
    if largest > most {
        notes.push(format!(
            "weights are divided by {largest} / {most}, because none may be larger than {most}"
        ));
    }
    let scaled = |Found { entry, weight }: Found| {
        let whole = (u128::from(weight) * u128::from(most)).div_ceil(u128::from(largest));
        Entry { weight: u16::try_from(whole).unwrap_or(u16::MAX), ..entry }
    };
    found.into_iter().map(scaled).collect()
}
