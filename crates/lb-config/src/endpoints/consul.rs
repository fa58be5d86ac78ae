//! Reads Consul's answer to `/v1/health/service/NAME`: a list of instances with their checks. The
//! reader supports Consul 1.8 and later.
//!
//! The answer to a request without `passing` also contains failing instances. A failing instance
//! gets the state `down`, and receives connections only while no other endpoint has a weight. So
//! the list does not become empty when all checks fail at once.
//!
//! The answer comes from a file, or directly from Consul. In an answer directly from Consul, an
//! instance with an unusable address or port is left out and is not a fault: Consul accepts any
//! address and port, so one host could prevent all changes of the list.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;

use lb_core::endpoint::{EndpointState, MAX_INDEXES};
use lb_document::diagnostic::{DiagnosticCollector, Diagnostics, quote, utf8};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::json::{JsonDocument, JsonValue};
use super::shape::{LeftOut, OneService, merge};
use super::{Index, ListEntry, ListedAddress, MAX_FILE_BYTES, file_sd};

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
    meta: Option<NodeMeta>,
}

#[derive(Deserialize)]
#[serde(expecting = "metadata")]
struct NodeMeta {
    zone: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", expecting = "a service")]
struct ConsulService<'t> {
    service: Option<String>,
    #[serde(borrow)]
    address: Option<&'t RawValue>,
    #[serde(borrow)]
    port: Option<&'t RawValue>,
    #[serde(borrow)]
    meta: Option<ServiceMeta<'t>>,
    weights: Option<ConsulWeights>,
}

#[derive(Deserialize)]
#[serde(expecting = "metadata")]
struct ServiceMeta<'t> {
    #[serde(borrow)]
    socklb_index: Option<&'t RawValue>,
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

/// Returns the entries of all instances in a file. Adds a note about instances that appear more
/// than once.
pub fn read(
    root: &JsonValue<'_>,
    report: &DiagnosticCollector<'_>,
    notes: &mut Vec<String>,
) -> Vec<ListEntry> {
    InstanceReader::default().read(root, report, notes)
}

/// Reads an answer as Consul has sent it. Returns the entries (possibly none) of the instances with
/// usable addresses of one address family, and notes about the other instances. An entry's span is
/// a position in the text. The caller limits the length of the text.
///
/// # Errors
/// If the text is not an answer of this form, has a wrong value, or is about another service.
pub fn read_instances(
    text: &[u8],
    service: &str,
    is_ipv6: bool,
) -> Result<(Vec<ListEntry>, Vec<String>), Diagnostics> {
    let path = Path::new("answer");
    let text = utf8(text, path)?;
    // The collector stores the position of every line. To bound its memory, faults of a longer text
    // have no positions.
    let report = DiagnosticCollector::new(path, if text.len() > MAX_FILE_BYTES { "" } else { text });
    let document = JsonDocument::json(text, false);
    let mut notes = Vec::new();
    let reader = InstanceReader { wanted: Some((service, is_ipv6)), ..InstanceReader::default() };
    let entries = match document.root() {
        Ok(Some(root)) => reader.read(&JsonValue { name: "the answer", ..root }, &report, &mut notes),
        Ok(None) => {
            report.add(0..0, "the answer has no text", None);
            Vec::new()
        }
        Err(error) => {
            document.report_syntax(&error, &report, None);
            Vec::new()
        }
    };
    report.finish(Some((entries, notes)))
}

#[derive(Default)]
struct InstanceReader<'a> {
    /// The service whose instances were requested from Consul, and whether it has an IPv6 address.
    /// `None`: the answer is in a file.
    wanted: Option<(&'a str, bool)>,
    /// The service of the instances in a file.
    service: OneService,
    left_out: LeftOut,
}

impl InstanceReader<'_> {
    fn read(
        mut self,
        root: &JsonValue<'_>,
        report: &DiagnosticCollector<'_>,
        notes: &mut Vec<String>,
    ) -> Vec<ListEntry> {
        let instances = root.whole_list("an instance", report).unwrap_or_default();
        let entries = instances.iter().filter_map(|instance| self.entry(instance, report)).collect();
        self.left_out.add_notes(notes);
        merge(entries, notes)
    }

    fn entry(&mut self, value: &JsonValue<'_>, report: &DiagnosticCollector<'_>) -> Option<ListEntry> {
        let Instance { node, service, checks } = value.read(report)?;
        self.check_service(value, service.service.as_deref().unwrap_or_default(), report)?;
        // If an instance has no address, the address of its node applies.
        let is_named = |raw: &&RawValue| !matches!(raw.get(), "\"\"" | "null");
        let Some(raw) = service.address.filter(is_named).or(node.address) else {
            report.add_absent(value.span(), "an instance has no address", "write Service.Address".to_owned());
            return None;
        };
        let address = value.of_key("address", raw);
        let span = address.span();
        let port = service.port.map(|raw| value.of_key("Port", raw));
        let port_span = port.map_or_else(|| value.span(), |port| port.span());
        let port: i64 = port.map_or(Some(0), |port| port.read_any(report))?;
        let target = match self.wanted {
            Some((_, is_ipv6)) => Some(self.usable(&address, port, is_ipv6, report)?),
            None => target_in_file(port_span, &address, port, report),
        };
        let checks = checks.unwrap_or_default();
        let is_any = |status: &str| checks.iter().any(|check| check.status == status);
        let weight = match &service.weights {
            _ if checks.iter().any(ConsulCheck::is_maintenance) => 0,
            // If a service sets only `Passing`, Consul returns 0 as the weight for warnings.
            // Clients of Consul's SRV records still choose such an instance occasionally, so the
            // instance has a small weight here.
            Some(weights) if is_any("warning") => weights.warning.max(1),
            Some(weights) => weights.passing,
            None => 1,
        };
        let known = ["passing", "warning", "critical"];
        if let Some(check) = checks.iter().find(|check| !known.contains(&check.status.as_str())) {
            let message = format!("unknown status {} of a check", quote(&check.status));
            report.add(value.span(), message, format!("known: {}", known.join(", ")));
        }
        let state = if is_any("critical") { EndpointState::Down } else { EndpointState::Healthy };
        let index = match service.meta.and_then(|meta| meta.socklb_index) {
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
        let zone = node.meta.and_then(|meta| meta.zone);
        Some(ListEntry { index, weight, state, zone, ..ListEntry::bare(span, target) })
    }

    /// Checks that an instance belongs to the right service. If it does not, reports a fault and
    /// returns `None`.
    fn check_service(
        &mut self,
        value: &JsonValue<'_>,
        name: &str,
        report: &DiagnosticCollector<'_>,
    ) -> Option<()> {
        let Some((wanted, _)) = self.wanted else {
            let help = "write the instances of a single service";
            return self.service.accepts(value, name, help, report).then_some(());
        };
        // Consul ignores upper and lower case in the names of services.
        if name.eq_ignore_ascii_case(wanted) {
            return Some(());
        }
        let message = format!("an instance belongs to service {}, not to {}", quote(name), quote(wanted));
        report.add(value.span(), message, None);
        None
    }

    /// Returns the address of an instance. If the address or the port is not usable, leaves the
    /// instance out and returns `None`.
    fn usable(
        &mut self,
        value: &JsonValue<'_>,
        port: i64,
        is_ipv6: bool,
        report: &DiagnosticCollector<'_>,
    ) -> Option<ListedAddress> {
        let text = value.text_of(value.name, report)?;
        let number = u16::try_from(port).unwrap_or(0);
        let why = match ListedAddress::of(&text, number) {
            Err(_) => "not an IP address or a host name",
            Ok(ListedAddress::Address(SocketAddr::V4(_))) if is_ipv6 => {
                "an IPv4 address, but the service has an IPv6 address"
            }
            Ok(ListedAddress::Address(SocketAddr::V6(_))) if !is_ipv6 => {
                "an IPv6 address, but the service has an IPv4 address"
            }
            Ok(target) if number > 0 => return Some(target),
            Ok(_) => "not a port from 1 to 65535",
        };
        self.left_out.add(why, format!("{} port {port}", quote(&text)));
        None
    }
}

fn target_in_file(
    port_span: Range<usize>,
    address: &JsonValue<'_>,
    port: i64,
    report: &DiagnosticCollector<'_>,
) -> Option<ListedAddress> {
    let number = u16::try_from(port);
    let target = address.target_at(number.unwrap_or(0), report);
    if number.is_err() {
        let message = format!("an instance has the port {port}");
        report.add(port_span, message, "write 1 to 65535".to_owned());
        return None;
    }
    target
}
