//! A configuration as names and values, to be compared with another: of the file that was read, or what the pinned maps
//! tell of the one that made them.

use std::collections::BTreeMap;
use std::path::Path;

use lb_common::abi::{Overflow, Policy};
use lb_core::control::ControlRules;
use lb_core::endpoint::{Endpoint, EndpointState};
use lb_core::load_band::LoadBand;
use lb_core::service::{Ejection, HealthRules, Protocol, Service, Size, Subset};
use lb_kernel::{DatapathError, Pins, ServiceView, Tables};
use lb_view::configured::{Configured, Keys, SCHEMA};

use crate::config::keys::ERRNOS;
use crate::config::{Client, ClientService, Config, ListFile, Probe, ProbeKind, Reports, Source};
use lb_document::in_units;

/// A value that is not given, of a key that has none by default.
const NONE: &str = "none";

/// What a configuration says.
pub fn configured(config: &Config) -> Configured {
    let clients = config.clients.iter().map(|client| (client.name.clone(), of_client(client)));
    let mut services = BTreeMap::new();
    for configured in config.clients.iter().flat_map(|client| &client.services) {
        services.entry(configured.service.name.clone()).or_insert_with(|| of_service(configured));
    }
    Configured { schema: SCHEMA, clients: clients.collect(), services, host: host(config) }
}

fn keys<const N: usize>(values: [(&str, String); N]) -> Keys {
    values.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn or_none(value: Option<impl ToString>) -> String {
    value.map_or_else(|| NONE.to_owned(), |value| value.to_string())
}

fn of_client(client: &Client) -> Keys {
    let Client { job, name: _, cgroup, task, services, accounting } = client;
    let services: Vec<&str> = services.iter().map(|service| service.service.name.as_str()).collect();
    keys([
        ("job", job.clone()),
        ("cgroup", cgroup.display().to_string()),
        ("index", task.index.to_string()),
        ("count", task.count.to_string()),
        ("services", services.join(", ")),
        ("accounting", accounting.name().to_owned()),
    ])
}

/// The seed is no key: it follows from the names of job and service.
fn of_service(configured: &ClientService) -> Keys {
    let Service {
        name: _,
        address,
        protocol,
        policy,
        active_limit,
        overflow,
        error_decay,
        connect_timeout,
        unanswered_after,
        ejection,
        health,
        control,
        rebind,
        subset,
        seed: _,
        errno,
    } = &configured.service;
    let mut keys = keys([
        ("address", address.to_string()),
        ("protocol", protocol.name().to_owned()),
        ("policy", policy.name().to_owned()),
        ("active_limit", or_none(*active_limit)),
        ("overflow", overflow.name().to_owned()),
        ("error_decay", error_decay.map_or_else(|| "off".to_owned(), in_units)),
        ("health", health_text(*health, configured.probe.as_ref())),
        ("load", load_text(*control)),
        ("slow_start", control.slow_start.map_or_else(|| "off".to_owned(), in_units)),
        ("subset", subset_text(*subset)),
        ("on_no_backend", errno_text(*errno)),
        ("backends", source(&configured.source)),
    ]);
    // Of the other protocol they are no keys.
    keys.extend(match protocol {
        Protocol::Tcp => vec![
            ("connect_timeout".to_owned(), or_none(connect_timeout.map(in_units))),
            ("unanswered_after".to_owned(), in_units(*unanswered_after)),
            ("ejection".to_owned(), ejection.map_or_else(|| "off".to_owned(), ejection_text)),
        ],
        Protocol::Udp => vec![("udp.rebind".to_owned(), or_none(rebind.map(in_units)))],
    });
    keys
}

fn ejection_text(ejection: Ejection) -> String {
    let Ejection { failures, base, max, hangs } = ejection;
    format!("failures {failures}, base {}, max {}, hangs {hangs}", in_units(base), in_units(max))
}

fn load_text(ControlRules { law, mode, .. }: ControlRules) -> String {
    law.map_or_else(|| NONE.to_owned(), |law| format!("control {}, mode {}", law.name(), mode.name()))
}

fn health_text(health: HealthRules, probe: Option<&Probe>) -> String {
    // The rest is told with the probe.
    let HealthRules { panic_threshold, replace_after, first_look: _, heeds_reports: _ } = health;
    let probe = probe.map_or_else(String::new, |probe| format!(", {}", probe_text(probe)));
    format!("panic_threshold {panic_threshold}, replace_after {}{probe}", in_units(replace_after))
}

fn probe_text(probe: &Probe) -> String {
    let Probe { kind, port, interval } = probe;
    let port = port.map_or_else(String::new, |port| format!(" port {port}"));
    let how = match kind {
        // Of keys only the numbers are told.
        ProbeKind::Report { keys, idle_interval } => {
            let ids: Vec<String> = keys.all().iter().map(|key| key.id.to_string()).collect();
            format!("idle_interval {}, keys {}", in_units(*idle_interval), ids.join(" and "))
        }
        ProbeKind::Connect { path, timeout, rise, fall } => {
            let path = path.as_ref().map_or_else(String::new, |path| format!("path {path}, "));
            format!("{path}timeout {}, rise {rise}, fall {fall}", in_units(*timeout))
        }
    };
    format!("probe {}{port}, interval {}, {how}", probe.name(), in_units(*interval))
}

fn subset_text(subset: Subset) -> String {
    match subset {
        Subset::All => "all".to_owned(),
        Subset::Sized { algorithm, size: Size::Fixed(size) } => format!("{}, size {size}", algorithm.name()),
        Subset::Sized { algorithm, size: Size::Auto { min } } => {
            format!("{}, size auto, min {min}", algorithm.name())
        }
        Subset::Sized {
            algorithm,
            size: Size::Band(LoadBand { low_thousandths, high_thousandths, min }),
        } => {
            let flows = |thousandths: u32| f64::from(thousandths) / 1000.0;
            let (low, high) = (flows(low_thousandths), flows(high_thousandths));
            format!("{}, size by load, low {low}, high {high}, min {min}", algorithm.name())
        }
    }
}

fn errno_text(errno: u16) -> String {
    let known = ERRNOS.iter().find(|(_, number)| *number == i32::from(errno));
    known.map_or_else(|| errno.to_string(), |(name, _)| (*name).to_owned())
}

/// Where endpoints come from. A list that stands in the configuration is told whole, because it is compared.
fn source(source: &Source) -> String {
    match source {
        Source::File(ListFile { path, port_name: None }) => format!("file {}", path.display()),
        Source::File(ListFile { path, port_name: Some(name) }) => {
            format!("file {} port_name {name}", path.display())
        }
        Source::Static(list) => {
            let endpoints: Vec<String> = list.as_slice().iter().map(endpoint).collect();
            format!("static [{}]", endpoints.join(", "))
        }
    }
}

fn endpoint(endpoint: &Endpoint) -> String {
    let Endpoint { address, index, weight, state, zone, agent } = endpoint;
    let state = match state {
        EndpointState::Healthy => "",
        EndpointState::LameDuck => " lame-duck",
        EndpointState::Down => " down",
    };
    let zone = zone.as_ref().map_or_else(String::new, |zone| format!(" zone {zone}"));
    let agent = agent.map_or_else(String::new, |agent| format!(" agent {agent}"));
    format!("{address} index {index} weight {weight}{state}{zone}{agent}")
}

fn host(config: &Config) -> Keys {
    let Config {
        path: _,
        clients: _,
        addresses: _,
        paths,
        limits,
        metrics,
        admins,
        reclaim_interval,
        reports,
    } = config;
    keys([
        ("paths.pins", paths.pins.display().to_string()),
        ("paths.run", paths.run.display().to_string()),
        ("paths.state", paths.state.display().to_string()),
        ("limits.schedule_entries", limits.schedule_entries.to_string()),
        ("limits.flow_records", limits.flow_records.to_string()),
        ("limits.slots", limits.slots.to_string()),
        ("metrics.listen", or_none(metrics.listen)),
        ("metrics.hosts", metrics.hosts.join(", ")),
        ("reports.listen", reports.listen.unwrap_or(Reports::ANY).to_string()),
        ("reports.xdp", reports.xdp.join(", ")),
        ("reports.xdp_generic", reports.xdp_generic.to_string()),
        ("admin.group", or_none(admins.as_ref())),
        ("accounting.reclaim_interval", in_units(*reclaim_interval)),
    ])
}

/// What the pinned maps tell of the configuration that made them: fewer keys, for the kernel needs no more.
///
/// # Errors
/// If the maps cannot be read.
pub fn from_pins(directory: &Path) -> Result<Configured, DatapathError> {
    let mount = lb_kernel::cgroup2_mount()?;
    let mut configured = Configured { schema: SCHEMA, ..Configured::default() };
    for pins in Pins::all_versions(directory)?.into_iter().filter(Pins::is_of_this_version) {
        let attached = lb_kernel::balanced_cgroup(&pins)?.and_then(lb_kernel::cgroup_of_id);
        let cgroup = attached.and_then(|path| Some(path.strip_prefix(&mount).ok()?.display().to_string()));
        configured.clients.insert(
            pins.client.clone(),
            cgroup.into_iter().map(|path| ("cgroup".to_owned(), path)).collect(),
        );
        for view in Tables::open(&pins, false)?.services().into_iter().filter(|view| view.open) {
            configured.services.entry(view.name.clone()).or_insert_with(|| of_view(&view));
        }
    }
    Ok(configured)
}

fn of_view(view: &ServiceView) -> Keys {
    let ServiceView { address, protocol, errno, rules, .. } = view;
    let mut keys = keys([
        ("address", address.to_string()),
        ("protocol", protocol.name().to_owned()),
        ("active_limit", or_none(Some(rules.active_limit).filter(|limit| *limit > 0))),
        ("on_no_backend", errno_text(*errno)),
    ]);
    let policy = Policy::from_u8(rules.policy).map(Policy::name);
    let overflow = Overflow::ALL.into_iter().find(|overflow| *overflow as u8 == rules.overflow);
    for (key, name) in [("policy", policy), ("overflow", overflow.map(Overflow::name))] {
        keys.extend(name.map(|name| (key.to_owned(), name.to_owned())));
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::good;

    #[test]
    fn every_key_has_its_value_in_words() {
        let config = good(
            "[[client]]\njob = 'web'\ncgroup = 'a/b'\nindex = 3\ncount = 8\n[[service]]\nname = 'users'\n\
             address = '10.96.0.10:80'\nactive_limit = 9\nsubset = { size = 20 }\n\
             backends = { static = ['10.0.0.1:80'] }\n[[service]]\nname = 'dns'\naddress = '10.96.0.11:53'\n\
             protocol = 'udp'\nudp = { rebind = '30s' }\nbackends = { file = 'dns.toml' }\n",
        );
        let Configured { schema: _, clients, services, host } = configured(&config);
        let text =
            |keys: &Keys| keys.iter().map(|(key, value)| format!("{key} = {value}")).collect::<Vec<_>>();
        assert_eq!(
            text(&clients["web"]),
            [
                "accounting = full",
                "cgroup = a/b",
                "count = 8",
                "index = 3",
                "job = web",
                "services = users, dns"
            ]
        );
        assert_eq!(
            text(&services["users"]),
            [
                "active_limit = 9",
                "address = 10.96.0.10:80",
                "backends = static [10.0.0.1:80 index 12823 weight 1]",
                "connect_timeout = none",
                "ejection = failures 5, base 5s, max 5m, hangs true",
                "error_decay = 5s",
                "health = panic_threshold 50, replace_after 10s",
                "load = none",
                "on_no_backend = EHOSTUNREACH",
                "overflow = least-loaded",
                "policy = weighted-round-robin",
                "protocol = tcp",
                "slow_start = off",
                "subset = rocksteadier, size 20",
                "unanswered_after = 200ms",
            ]
        );
        assert_eq!(services["dns"]["udp.rebind"], "30s");
        assert_eq!(services["dns"]["backends"], "file /etc/socklb/dns.toml");
        assert_eq!(services["dns"]["subset"], "rocksteadier, size auto, min 12");
        assert_eq!((host["limits.slots"].as_str(), host["metrics.listen"].as_str()), ("4096", NONE));
    }
}
