//! Reads Consul's answer to `/v1/health/service/NAME`: a list of instances with their checks. This
//! works with Consul 1.8 and later.
//!
//! The answer to a request without `passing` also contains failing instances. They count as down,
//! and receive connections only while no other endpoint has a weight. So the list does not become
//! empty when all checks fail at once.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use lb_core::endpoint::{EndpointState, MAX_INDEXES};
use lb_document::diagnostic::{DiagnosticCollector, quote};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::json::JsonValue;
use super::shape::{OneService, merge};
use super::{Index, ListEntry, file_sd};

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", expecting = "an instance")]
struct Instance<'t> {
    #[serde(borrow)]
    node: Node<'t>,
    #[serde(borrow)]
    service: ConsulService<'t>,
    checks: Option<Vec<ConsulCheck>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", expecting = "a node")]
struct Node<'t> {
    #[serde(borrow)]
    address: Option<&'t RawValue>,
    meta: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", expecting = "a service")]
struct ConsulService<'t> {
    service: Option<String>,
    #[serde(borrow)]
    address: Option<&'t RawValue>,
    #[serde(default)]
    port: u16,
    #[serde(borrow)]
    meta: Option<BTreeMap<String, &'t RawValue>>,
    weights: Option<ConsulWeights>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", expecting = "weights")]
struct ConsulWeights {
    passing: u16,
    warning: u16,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", expecting = "a check")]
struct ConsulCheck {
    #[serde(rename = "CheckID")]
    id: Option<String>,
    status: String,
}

impl ConsulCheck {
    /// During maintenance, Consul adds a failing check with one of these names.
    fn is_maintenance(&self) -> bool {
        let id = self.id.as_deref().unwrap_or_default();
        id == "_node_maintenance" || id.starts_with("_service_maintenance:")
    }
}

/// Returns the entries of all instances. Adds a note about instances that appear more than once.
pub fn read(
    root: &JsonValue<'_>,
    report: &mut DiagnosticCollector<'_>,
    notes: &mut Vec<String>,
) -> Vec<ListEntry> {
    let mut service = OneService::default();
    let instances = root.whole_list("an instance", report).unwrap_or_default();
    let entries = instances.iter().filter_map(|instance| entry(instance, &mut service, report));
    merge(entries.collect(), notes)
}

fn entry(
    value: &JsonValue<'_>,
    one: &mut OneService,
    report: &mut DiagnosticCollector<'_>,
) -> Option<ListEntry> {
    let Instance { node, service, checks } = value.read(report)?;
    let name = service.service.as_deref().unwrap_or_default();
    if !one.accepts(value, name, "write the instances of one service", report) {
        return None;
    }
    // If an instance has no address, the address of its node applies.
    let is_named = |raw: &&RawValue| !matches!(raw.get(), "\"\"" | "null");
    let Some(raw) = service.address.filter(is_named).or(node.address) else {
        report.add_absent(value.span(), "an instance has no address", "write Service.Address".to_owned());
        return None;
    };
    let address = value.of_key("address", raw);
    let span = address.span();
    let address = address.ip(report).map(|ip| SocketAddr::new(ip, service.port));
    let checks = checks.unwrap_or_default();
    let is_any = |status: &str| checks.iter().any(|check| check.status == status);
    let weight = match &service.weights {
        _ if checks.iter().any(ConsulCheck::is_maintenance) => 0,
        // If a service sets only `Passing`, Consul returns 0 as the weight for warnings. In
        // Consul's SRV records such an instance still has a small chance, so it must have one here.
        Some(weights) if is_any("warning") => weights.warning.max(1),
        Some(weights) => weights.passing,
        None => 1,
    };
    let known = ["passing", "warning", "critical"];
    if let Some(check) = checks.iter().find(|check| !known.contains(&check.status.as_str())) {
        let message = format!("unknown status {} of a check", quote(&check.status));
        report.add(value.span(), message, format!("known are {}", known.join(", ")));
    }
    let state = if is_any("critical") { EndpointState::Down } else { EndpointState::Healthy };
    let index = match service.meta.and_then(|meta| meta.get("socklb_index").copied()) {
        Some(raw) => {
            let value = value.of_key("socklb_index", raw);
            let text = value.text_of("socklb_index", report);
            let number =
                text.and_then(|text| match file_sd::number(&text, MAX_INDEXES - 1, "socklb_index") {
                    Ok(number) => Some(number),
                    Err((message, help)) => {
                        report.add(value.span(), message, help);
                        None
                    }
                });
            Index::read(value.span(), number)
        }
        None => Index::Absent,
    };
    let zone = node.meta.and_then(|mut meta| meta.remove("zone"));
    Some(ListEntry { index, weight, state, zone, ..ListEntry::bare(span, address) })
}
