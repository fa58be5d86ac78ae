//! The fuzz targets. Each target is a reader of external text or datagrams, and checks properties
//! for every input. No reader may panic, loop forever or contradict itself, and its messages must
//! not contain terminal control sequences. If a target reads datagrams, its text determines a
//! sequence of them, because a fault may need many datagrams.
//!
//! The answers to HTTP probes are not a target: hyper reads them, and socklb only compares the
//! status.
//!
//! `cargo xtask fuzz` runs a fuzzer, which calls these functions with new texts for a given time.
//! The test `corpora` calls them with the committed corpus, and with a fixed number of variations
//! of it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use lb_config::endpoints::{self, ListContext};
use lb_document::control::is_obeyed;
use lb_document::diagnostic::{Diagnostics, utf8};
use lb_report::keys::{BackendKey, Keys, ServiceKey};
use lb_user::config::{self, ProcessEnvironment};

mod agent;
mod dns;
mod frames;
mod http;
mod keys;
mod kubernetes;
mod operations;
mod reports;
mod shapes;
pub mod variation;

/// A fuzz target.
pub struct Target {
    /// The name of the reader, of its corpus and of its dictionary.
    pub name: &'static str,
    /// Reads a text. Panics if a property does not hold.
    pub read: fn(&[u8]),
}

/// All fuzz targets.
pub const TARGETS: [Target; 16] = [
    Target { name: "agent", read: agent::agent },
    Target { name: "agent_configuration", read: agent_configuration },
    Target { name: "configuration", read: configuration },
    Target { name: "dns", read: dns::answers },
    Target { name: "endpoints_toml", read: |text| endpoint_file(text, Path::new("users.toml")) },
    Target { name: "endpoints_json", read: |text| endpoint_file(text, Path::new("users.json")) },
    Target { name: "endpoints_yaml", read: |text| endpoint_file(text, Path::new("users.yaml")) },
    Target { name: "endpoints_slices", read: |text| endpoint_file(text, Path::new("slices.json")) },
    Target { name: "endpoints_consul", read: consul },
    Target { name: "endpoints_envoy", read: |text| endpoint_file(text, Path::new("assignment.json")) },
    Target { name: "frames", read: frames::frames },
    Target { name: "http", read: http::requests },
    Target { name: "keys", read: keys::keys },
    Target { name: "kubernetes_service", read: kubernetes::service },
    Target { name: "kubernetes_watch", read: kubernetes::watch },
    Target { name: "reports", read: reports::senders },
];

pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// An environment that is the same on every machine.
struct Nowhere;

impl ProcessEnvironment for Nowhere {
    fn variable(&self, name: &str) -> Option<String> {
        // A variable exists if its name begins with `S`. Its value is the length of the name.
        name.starts_with('S').then(|| name.len().to_string())
    }

    fn host_name(&self) -> Option<String> {
        Some("web-7".to_owned())
    }

    fn service_keys(&self, path: &Path) -> Result<Keys<ServiceKey>, String> {
        Keys::parse(&path.to_string_lossy().replace('/', "0")).map_err(|error| error.to_string())
    }
}

fn configuration(text: &[u8]) {
    let path = Path::new("socklb.toml");
    let read = || utf8(text, path).and_then(|text| config::parse(text, path, &Nowhere));
    match read() {
        Ok(config) => {
            assert!(!config.clients.is_empty(), "a configuration has a client");
            assert_eq!(format!("{config:?}"), format!("{:?}", read().expect("the first reading succeeded")));
        }
        Err(faults) => {
            can_be_shown(&faults);
            assert_eq!(read().expect_err("the first reading failed"), faults);
        }
    }
}

fn agent_configuration(text: &[u8]) {
    let path = Path::new("agent.toml");
    let key_file = |path: &Path| -> Result<Keys<BackendKey>, String> {
        // A path that consists of digits is a file with one key. No other file can be read.
        let name = path.to_string_lossy();
        let is_key = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
        let line = if is_key { format!("1 {}", "0f".repeat(16)) } else { String::new() };
        Keys::parse(&line).map_err(|error| error.to_string())
    };
    let read =
        || utf8(text, path).and_then(|text| lb_agent::config::parse(text, path, &mut |path| key_file(path)));
    match read() {
        Ok(config) => {
            assert!(config.backends.len() <= lb_report::agent::MAX_BACKENDS);
            let mut names: Vec<_> = config.backends.iter().map(|backend| backend.name).collect();
            names.sort();
            assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "no two backends have the same name");
            for backend in &config.backends {
                // This is the longest hold that a client's host accepts, see reports.md.
                assert!(backend.hold <= lb_report::wire::MAX_HOLD);
                if let Some(check) = &backend.check {
                    assert!(
                        check.stale_after() > check.interval,
                        "while a check runs at its interval, its result never becomes stale"
                    );
                }
            }
            assert_eq!(read().expect("the first reading succeeded"), config);
        }
        Err(faults) => {
            can_be_shown(&faults);
            assert_eq!(read().expect_err("the first reading failed"), faults);
        }
    }
}

fn endpoint_file(text: &[u8], path: &Path) {
    let service = SocketAddr::from(([10, 96, 0, 10], 80));
    let services = [service];
    let bare = ListContext {
        port_name: Some("http"),
        service: Some(service),
        services: &services,
        ..ListContext::of(path)
    };
    // Every host name has two addresses: one is the same for all names, and the first byte of the
    // name determines the other.
    let names = endpoints::parse(text, &bare).map(|parsed| parsed.hosts).unwrap_or_default();
    let addresses = |name: String| -> (Arc<str>, Arc<[IpAddr]>) {
        let first = name.bytes().next().unwrap_or_default();
        (name.into(), [[10, 0, 0, 1].into(), [10, 1, 0, first].into()].into())
    };
    let hosts = names.into_iter().map(addresses).collect();
    let reading = ListContext { hosts: &hosts, ..bare };
    let read = || endpoints::parse(text, &reading);
    match read() {
        Ok(parsed) => {
            let list = &parsed.list;
            assert!(!list.as_slice().is_empty(), "an empty list is refused");
            assert!(
                list.as_slice().iter().all(|endpoint| endpoint.address != service),
                "no endpoint is the service itself"
            );
            parsed.notes.iter().for_each(|note| cannot_be_obeyed(note));
            assert_eq!(read().expect("the first reading succeeded"), parsed);
        }
        Err(faults) => {
            can_be_shown(&faults);
            assert_eq!(read().expect_err("the first reading failed"), faults);
        }
    }
}

/// Reads an answer of Consul twice: as an endpoint file, and as an answer to a request.
fn consul(text: &[u8]) {
    endpoint_file(text, Path::new("consul.json"));
    for is_ipv6 in [false, true] {
        match endpoints::read_instances(text, "users", is_ipv6) {
            Ok((entries, notes)) => {
                let targets: BTreeSet<&endpoints::ListedAddress> =
                    entries.iter().filter_map(|one| one.target.as_ref()).collect();
                assert_eq!(targets.len(), entries.len(), "no two entries have the same address or name");
                assert!(targets.iter().all(|target| match target {
                    endpoints::ListedAddress::Address(address) =>
                        address.is_ipv6() == is_ipv6 && address.port() > 0,
                    endpoints::ListedAddress::Host(_, port) => *port > 0,
                }));
                notes.iter().for_each(|note| cannot_be_obeyed(note));
            }
            Err(faults) => can_be_shown(&faults),
        }
    }
}

/// Checks that faults can be shown on a terminal and in a log.
fn can_be_shown(faults: &Diagnostics) {
    for text in [faults.to_string(), faults.terminal(false).to_string()] {
        assert!(!text.is_empty());
        cannot_be_obeyed(&text);
    }
}

/// Checks that a text contains no terminal control sequences.
fn cannot_be_obeyed(text: &str) {
    let obeyed = text.chars().find(|c| is_obeyed(*c) && *c != '\n');
    assert_eq!(obeyed, None, "{text:?}");
}
