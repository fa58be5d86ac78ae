//! Reads an Envoy ClusterLoadAssignment (xDS v3), either alone or as the only resource of a
//! DiscoveryResponse. The format is protobuf's JSON form: field names in snake case or camel case,
//! 32-bit numbers also as text, and enumerations by name in any case or by number.

use lb_core::endpoint::{EndpointState, MAX_INDEXES};
use lb_document::diagnostic::{DiagnosticCollector, quote};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Number;
use serde_json::value::RawValue;

use super::json::JsonValue;
use super::shape::{LeftOut, merge};
use super::{Index, ListEntry, ListedAddress};

const TYPE: &str = "envoy.config.endpoint.v3.ClusterLoadAssignment";

#[derive(Deserialize)]
#[serde(expecting = "a response")]
struct DiscoveryResponse<'t> {
    #[serde(borrow)]
    resources: Option<&'t RawValue>,
}

#[derive(Deserialize)]
#[serde(expecting = "a resource")]
struct Resource {
    #[serde(rename = "@type", default)]
    of_type: String,
}

#[derive(Deserialize)]
#[serde(expecting = "an assignment")]
struct ClusterLoadAssignment<'t> {
    #[serde(borrow)]
    endpoints: Option<&'t RawValue>,
}

#[derive(Deserialize)]
#[serde(expecting = "endpoints of a locality")]
struct LocalityLbEndpoints<'t> {
    locality: Option<Locality>,
    #[serde(borrow, alias = "lbEndpoints")]
    lb_endpoints: Option<&'t RawValue>,
    #[serde(default, alias = "loadBalancingWeight", deserialize_with = "number")]
    load_balancing_weight: Option<u32>,
    #[serde(default, deserialize_with = "number")]
    priority: Option<u32>,
}

#[derive(Deserialize)]
#[serde(expecting = "a locality")]
struct Locality {
    zone: Option<String>,
}

#[derive(Deserialize)]
#[serde(expecting = "an endpoint")]
struct LbEndpoint<'t> {
    #[serde(borrow)]
    endpoint: Option<EnvoyEndpoint<'t>>,
    #[serde(alias = "healthStatus")]
    health_status: Option<HealthStatus>,
    #[serde(default, alias = "loadBalancingWeight", deserialize_with = "number")]
    load_balancing_weight: Option<u32>,
    #[serde(borrow)]
    metadata: Option<EnvoyMetadata<'t>>,
}

#[derive(Deserialize)]
#[serde(expecting = "an endpoint")]
struct EnvoyEndpoint<'t> {
    #[serde(borrow)]
    address: Option<EnvoyAddress<'t>>,
}

#[derive(Deserialize)]
#[serde(expecting = "an address")]
struct EnvoyAddress<'t> {
    #[serde(borrow, alias = "socketAddress")]
    socket_address: Option<SocketAddress<'t>>,
}

#[derive(Deserialize)]
#[serde(expecting = "a socket address")]
struct SocketAddress<'t> {
    #[serde(borrow)]
    address: Option<&'t RawValue>,
    #[serde(borrow, alias = "portValue")]
    port_value: Option<&'t RawValue>,
}

#[derive(Deserialize)]
#[serde(transparent)]
struct PortValue(#[serde(deserialize_with = "number")] Option<u32>);

#[derive(Deserialize)]
#[serde(expecting = "metadata")]
struct EnvoyMetadata<'t> {
    #[serde(borrow, alias = "filterMetadata")]
    filter_metadata: Option<FilterMetadata<'t>>,
}

#[derive(Deserialize)]
#[serde(expecting = "metadata")]
struct FilterMetadata<'t> {
    #[serde(borrow)]
    socklb: Option<Own<'t>>,
}

#[derive(Deserialize)]
#[serde(expecting = "metadata")]
struct Own<'t> {
    #[serde(borrow)]
    index: Option<&'t RawValue>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a status by name or number")]
enum HealthStatus {
    Name(String),
    Number(usize),
}

/// The names of Envoy's enumeration `HealthStatus`, indexed by number.
const STATUSES: [&str; 6] = ["UNKNOWN", "HEALTHY", "UNHEALTHY", "DRAINING", "TIMEOUT", "DEGRADED"];

/// A 32-bit number as protobuf reads it from JSON: a number, a text, or an object with the value.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a number")]
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
        .ok_or_else(|| D::Error::custom(format!("{} is not a whole number below 2^32", quote(&text))))
}

/// A whole number up to `max`. The number may have a fraction of zero, as in 7.0.
fn whole(text: &str, max: u32) -> Option<u32> {
    text.strip_suffix(".0").unwrap_or(text).parse().ok().filter(|number| *number <= max)
}

/// Returns the entries of the assignment. Adds notes about the endpoints that are left out, with
/// the reasons.
pub fn read(
    root: &JsonValue<'_>,
    is_response: bool,
    report: &DiagnosticCollector<'_>,
    notes: &mut Vec<String>,
) -> Vec<ListEntry> {
    let assignment = if is_response { resource(root, report) } else { Some(*root) };
    let groups = assignment.and_then(|value| {
        let ClusterLoadAssignment { endpoints } = value.read(report)?;
        value.of_key("endpoints", endpoints?).whole_list("endpoints of a locality", report)
    });
    let mut left_out = LeftOut::default();
    let groups = groups.unwrap_or_default();
    let groups = groups.iter().filter_map(|value| group(value, report, &mut left_out));
    let groups: Vec<(u32, WeightedLocality)> =
        groups.filter(|(_, found)| !found.entries.is_empty()).collect();
    // Envoy also uses the next priority if a priority has too few healthy endpoints. Envoy skips a
    // priority without endpoints.
    let first = groups.iter().map(|(priority, _)| *priority).min();
    let (used, spare): (Vec<_>, Vec<_>) =
        groups.into_iter().partition(|(priority, _)| Some(*priority) == first);
    for entry in spare.iter().flat_map(|(_, found)| &found.entries) {
        left_out.add("Envoy uses a higher priority first", shown(entry.0.target.as_ref()));
    }
    left_out.add_notes(notes);
    let used: Vec<WeightedLocality> = used.into_iter().map(|(_, found)| found).collect();
    merge(weighted(used, notes), notes)
}

/// The text for an endpoint in a note.
fn shown(target: Option<&ListedAddress>) -> String {
    target.map_or_else(|| "an endpoint".to_owned(), ListedAddress::to_string)
}

/// The endpoints of a locality, each with its weight, and the weight of the locality itself if it
/// has one.
struct WeightedLocality {
    entries: Vec<(ListEntry, u32)>,
    weight: Option<u32>,
}

/// Reads a locality and its priority.
fn group(
    value: &JsonValue<'_>,
    report: &DiagnosticCollector<'_>,
    left_out: &mut LeftOut,
) -> Option<(u32, WeightedLocality)> {
    let LocalityLbEndpoints { locality, lb_endpoints, load_balancing_weight, priority } =
        value.read(report)?;
    let endpoints = value.of_key("lb_endpoints", lb_endpoints?).whole_list("an endpoint", report)?;
    let zone = locality.and_then(|locality| locality.zone).filter(|zone| !zone.is_empty());
    let entries = endpoints.iter().filter_map(|value| {
        let (entry, weight) = endpoint(value, report, left_out)?;
        Some((ListEntry { zone: zone.clone(), ..entry }, weight))
    });
    // If no weight is set, Envoy prints 0, but Envoy does not accept 0 from a file.
    let weight = load_balancing_weight.filter(|weight| *weight > 0);
    Some((priority.unwrap_or(0), WeightedLocality { entries: entries.collect(), weight }))
}

/// Returns the only assignment of a response.
fn resource<'t>(root: &JsonValue<'t>, report: &DiagnosticCollector<'_>) -> Option<JsonValue<'t>> {
    let DiscoveryResponse { resources } = root.read(report)?;
    let resources = root.of_key("resources", resources?).whole_list("a resource", report)?;
    let [resource] = &*resources else {
        if let Some(second) = resources.get(1) {
            let message = format!("the response has {} resources", resources.len());
            report.add(second.span(), message, "write a file for each cluster".to_owned());
        }
        return None;
    };
    let Resource { of_type } = resource.read(report)?;
    if of_type.rsplit('/').next() != Some(TYPE) {
        let message = format!("the resource has the type {}", quote(&of_type));
        report.add(resource.span(), message, format!("write \"type.googleapis.com/{TYPE}\""));
        return None;
    }
    Some(*resource)
}

/// Reads an endpoint and its own weight.
fn endpoint(
    value: &JsonValue<'_>,
    report: &DiagnosticCollector<'_>,
    left_out: &mut LeftOut,
) -> Option<(ListEntry, u32)> {
    let LbEndpoint { endpoint, health_status, load_balancing_weight, metadata } = value.read(report)?;
    let address = endpoint.and_then(|endpoint| endpoint.address).and_then(|address| address.socket_address);
    let (raw, port) = match address {
        Some(SocketAddress { address: Some(raw), port_value: Some(port) }) => {
            let port = value.of_key("port_value", port);
            let PortValue(number) = port.read_any(report)?;
            (Some(raw), number.map(|number| (number, port.span())))
        }
        Some(_) | None => (None, None),
    };
    let (Some(raw), Some((port, port_span))) = (raw, port) else {
        let help = "write \"socket_address\": {\"address\": \"10.0.0.1\", \"port_value\": 8080}".to_owned();
        report.add_absent(value.span(), "an endpoint has no socket_address with a port_value", help);
        return None;
    };
    let Ok(port) = u16::try_from(port) else {
        report.add(port_span, format!("port_value is {port}"), "write 1 to 65535".to_owned());
        return None;
    };
    let address = value.of_key("address", raw);
    let span = address.span();
    let target = address.target_at(port, report);
    let by_number = |number: usize| STATUSES.get(number).map(|name| (*name).to_owned());
    let status = match health_status {
        None => STATUSES[0].to_owned(),
        Some(HealthStatus::Number(number)) => by_number(number).unwrap_or_else(|| number.to_string()),
        Some(HealthStatus::Name(name)) => {
            name.parse().ok().and_then(by_number).unwrap_or_else(|| name.to_ascii_uppercase())
        }
    };
    let state = match &*status {
        "UNKNOWN" | "HEALTHY" => EndpointState::Healthy,
        // If there are too few healthy endpoints, Envoy also uses degraded ones.
        "DRAINING" | "DEGRADED" => EndpointState::LameDuck,
        "UNHEALTHY" | "TIMEOUT" => {
            left_out.add(format!("health status {status}"), shown(target.as_ref()));
            return None;
        }
        unknown => {
            let message = format!("unknown health_status {}", quote(unknown));
            report.add(value.span(), message, format!("known: {}", STATUSES.join(", ")));
            return None;
        }
    };
    let index = metadata.and_then(|all| all.filter_metadata).and_then(|filters| filters.socklb?.index);
    let index = match index {
        Some(raw) => {
            let value = value.of_key("index", raw);
            // A number in a protobuf Struct is a double.
            let number = whole(raw.get(), MAX_INDEXES - 1);
            if number.is_none() {
                let help = format!("write 0 to {}", MAX_INDEXES - 1);
                report.add(value.span(), format!("index is {}", quote(raw.get())), help);
            }
            Index::read(value.span(), number)
        }
        None => Index::Absent,
    };
    // An endpoint without a weight has weight 1 in its locality.
    let weight = load_balancing_weight.unwrap_or(1);
    Some((ListEntry { index, state, ..ListEntry::bare(span, target) }, weight))
}

/// Computes the weights of the entries as Envoy does. If every locality has a weight, the weight is
/// divided among the endpoints of the locality, in proportion to their own weights. If a locality
/// has no weight, each endpoint of the list has its own weight. Weights that are not whole numbers,
/// or that exceed our maximum, are scaled so that the largest is the maximum.
fn weighted(found: Vec<WeightedLocality>, notes: &mut Vec<String>) -> Vec<ListEntry> {
    const MOST: f64 = 65_535.0;
    let by_locality = found.iter().all(|found| found.weight.is_some());
    let locality = |WeightedLocality { entries, weight }: WeightedLocality| {
        let sum: f64 = entries.iter().map(|(_, weight)| f64::from(*weight)).sum();
        let factor =
            weight.filter(|_| by_locality && sum > 0.0).map_or(1.0, |weight| f64::from(weight) / sum);
        entries.into_iter().map(move |(entry, weight)| (entry, f64::from(weight) * factor))
    };
    let weights: Vec<(ListEntry, f64)> = found.into_iter().flat_map(locality).collect();
    let largest = weights.iter().map(|(_, weight)| *weight).fold(0.0, f64::max);
    let is_whole = weights.iter().all(|(_, weight)| (weight - weight.round()).abs() < 1e-6);
    let scale = if is_whole && largest <= MOST { 1.0 } else { MOST / largest };
    if largest > MOST {
        notes.push(format!("weights are scaled so that the largest is {MOST}, the maximum"));
    }
    let entry = |(entry, weight): (ListEntry, f64)| {
        let least = if weight > 0.0 { 1.0 } else { 0.0 };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 65,535")]
        let weight = (weight * scale).round().clamp(least, MOST) as u16;
        ListEntry { weight, ..entry }
    };
    weights.into_iter().map(entry).collect()
}
