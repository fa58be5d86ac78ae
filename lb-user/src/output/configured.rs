//! A configuration as keys and values, for comparison with another configuration. The values come
//! from a parsed configuration file, or from the pinned maps.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use ipnet::IpNet;
use lb_common::abi::{Overflow, Policy};
use lb_core::control::ControlRules;
use lb_core::endpoint::Endpoint;
use lb_core::load_band::LoadBand;
use lb_core::rebalance::RebalanceRules;
use lb_core::service::{Ejection, HealthRules, Protocol, Service, Size, Subset};
use lb_kernel::{DatapathError, Pins, ServiceView, Tables};
use lb_view::configured::{Configured, Keys, NONE, SCHEMA};

use crate::config::discovery::{
    ConsulOrigin, ConsulSettings, DnsOrigin, DnsSettings, KubernetesOrigin, KubernetesSettings, Origin,
    RemoteRules, RemoteSource, TlsSettings,
};
use crate::config::keys::ERRNOS;
use crate::config::{
    ClientConfig, ClientService, Config, EndpointSource, ListFile, NamedList, ProbeConfig, ProbeKind,
    ReportsConfig,
};
use lb_document::in_units;

const OFF: &str = "off";

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

fn or_off(value: Option<Duration>) -> String {
    value.map_or_else(|| OFF.to_owned(), in_units)
}

fn of_client(client: &ClientConfig) -> Keys {
    let ClientConfig { job, name: _, cgroup, task, services, accounting } = client;
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

/// The seed has no key here, because it is derived from the names of the job and the service.
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
        rebalance,
        rebind,
        subset,
        seed: _,
        errno,
    } = &configured.service;
    let mut all = keys([
        ("address", address.to_string()),
        ("protocol", protocol.name().to_owned()),
        ("policy", policy.name().to_owned()),
        ("active_limit", or_none(*active_limit)),
        ("overflow", overflow.name().to_owned()),
        ("error_decay", or_off(*error_decay)),
        ("slow_start", or_off(control.slow_start)),
        ("on_no_backend", errno_text(*errno)),
    ]);
    all.extend(health_keys(*health, configured.probe.as_ref()));
    all.extend(load_keys(*control));
    all.extend(subset_keys(*subset));
    all.extend(source_keys(&configured.source));
    // Keys that exist only for one protocol.
    match protocol {
        Protocol::Tcp => {
            all.extend(keys([
                ("connect_timeout", or_none(connect_timeout.map(in_units))),
                ("unanswered_after", in_units(*unanswered_after)),
            ]));
            all.extend(ejection_keys(*ejection));
            all.extend(rebalance_keys(*rebalance));
        }
        Protocol::Udp => all.extend(keys([("udp.rebind", or_none(rebind.map(in_units)))])),
    }
    all
}

fn ejection_keys(ejection: Option<Ejection>) -> Keys {
    let Some(Ejection { failures, base, max, hangs }) = ejection else {
        return keys([("ejection", OFF.to_owned())]);
    };
    keys([
        ("ejection", "on".to_owned()),
        ("ejection.failures", failures.to_string()),
        ("ejection.base", in_units(base)),
        ("ejection.max", in_units(max)),
        ("ejection.hangs", hangs.to_string()),
    ])
}

fn rebalance_keys(rules: Option<RebalanceRules>) -> Keys {
    let Some(RebalanceRules { rate, idle, below_thousandths }) = rules else {
        return keys([("rebalance", OFF.to_owned())]);
    };
    keys([
        ("rebalance", "on".to_owned()),
        ("rebalance.rate", rate.to_string()),
        ("rebalance.idle", in_units(idle)),
        ("rebalance.below", (f64::from(below_thousandths) / 1000.0).to_string()),
    ])
}

fn load_keys(ControlRules { law, mode, .. }: ControlRules) -> Keys {
    let Some(law) = law else { return keys([("load", NONE.to_owned())]) };
    keys([
        ("load", "on".to_owned()),
        ("load.control", law.name().to_owned()),
        ("load.mode", mode.name().to_owned()),
    ])
}

fn health_keys(health: HealthRules, probe: Option<&ProbeConfig>) -> Keys {
    // The ignored fields are derived from the probe, which has its own keys.
    let HealthRules {
        panic_threshold,
        replace_after,
        drain_fallback,
        on_backend_loss,
        first_look: _,
        heeds_reports: _,
    } = health;
    let mut all = keys([
        ("health.panic_threshold", panic_threshold.to_string()),
        ("health.replace_after", in_units(replace_after)),
        ("health.drain_fallback", drain_fallback.to_string()),
        ("on_backend_loss", on_backend_loss.name().to_owned()),
        ("health.probe", or_none(probe.map(ProbeConfig::name))),
    ]);
    let Some(ProbeConfig { kind, port, interval }) = probe else { return all };
    all.extend(keys([("health.interval", in_units(*interval)), ("health.port", or_none(*port))]));
    match kind {
        // The keys that authenticate reports are secret. The value therefore contains only the ids
        // of the keys.
        ProbeKind::Report { keys: known, idle_interval } => {
            let ids: Vec<String> = known.all().iter().map(|key| key.id.to_string()).collect();
            all.extend(keys([
                ("health.idle_interval", in_units(*idle_interval)),
                ("health.key", format!("number {}", ids.join(" and "))),
            ]));
        }
        ProbeKind::Connect { path, timeout, rise, fall } => all.extend(keys([
            ("health.path", or_none(path.as_ref())),
            ("health.timeout", in_units(*timeout)),
            ("health.rise", rise.to_string()),
            ("health.fall", fall.to_string()),
        ])),
    }
    all
}

fn subset_keys(subset: Subset) -> Keys {
    let Subset::Sized { algorithm, size } = subset else { return keys([("subset", "all".to_owned())]) };
    let mut all = keys([("subset", "sized".to_owned()), ("subset.algorithm", algorithm.name().to_owned())]);
    all.extend(match size {
        Size::Fixed(size) => keys([("subset.size", size.to_string())]),
        Size::Auto { min } => keys([("subset.size", "auto".to_owned()), ("subset.min", min.to_string())]),
        Size::Band(LoadBand { low_thousandths, high_thousandths, min }) => {
            let flows = |thousandths: u32| (f64::from(thousandths) / 1000.0).to_string();
            keys([
                ("subset.size", "by load".to_owned()),
                ("subset.low", flows(low_thousandths)),
                ("subset.high", flows(high_thousandths)),
                ("subset.min", min.to_string()),
            ])
        }
    });
    all
}

fn errno_text(errno: u16) -> String {
    let known = ERRNOS.iter().find(|(_, number)| *number == i32::from(errno));
    known.map_or_else(|| errno.to_string(), |(name, _)| (*name).to_owned())
}

/// The keys of a source. A list in the configuration itself has a key for each endpoint.
fn source_keys(source: &EndpointSource) -> Keys {
    match source {
        EndpointSource::File(ListFile { path, port_name, protocol: _ }) => keys([
            ("backends", "file".to_owned()),
            ("backends.file", path.display().to_string()),
            ("backends.port_name", or_none(port_name.as_ref())),
        ]),
        EndpointSource::Remote(remote) => {
            let RemoteSource { origin, rules } = &**remote;
            let RemoteRules { allow, on_empty, on_stale, stale_after, limits_shrink } = rules;
            let networks =
                |allow: &Vec<IpNet>| allow.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let mut all = keys([
                ("backends.allow", or_none(allow.as_ref().map(networks))),
                ("backends.on_empty", on_empty.name().to_owned()),
                ("backends.on_stale", on_stale.name().to_owned()),
                ("backends.stale_after", or_none(stale_after.map(in_units))),
                ("backends.max_shrink", if *limits_shrink { "half" } else { "off" }.to_owned()),
            ]);
            all.extend(origin_keys(origin));
            all
        }
        EndpointSource::Named(NamedList { text }) => {
            keys([("backends", "static".to_owned()), ("backends.static", text.to_string())])
        }
        EndpointSource::Static(list) => {
            let of = |endpoint: &Endpoint| {
                let keys = endpoint_keys(endpoint).into_iter();
                let text = keys.map(|(key, value)| format!("{key} {value}")).collect::<Vec<_>>().join(", ");
                (format!("backends.{}", endpoint.address), text)
            };
            let mut all = keys([("backends", "static".to_owned())]);
            all.extend(list.as_slice().iter().map(of));
            all
        }
    }
}

fn origin_keys(origin: &Origin) -> Keys {
    match origin {
        Origin::Dns(DnsOrigin { name, port, settings }) => {
            let mut all = keys([
                ("backends", "dns".to_owned()),
                ("backends.dns", name.clone()),
                ("backends.port", or_none(*port)),
            ]);
            all.extend(dns_keys(settings));
            all
        }
        Origin::Consul(ConsulOrigin { service, tag, settings: ConsulSettings { address, token, tls } }) => {
            let mut all = keys([
                ("backends", "consul".to_owned()),
                ("backends.consul", service.clone()),
                ("backends.tag", or_none(tag.as_ref())),
                ("consul.address", address.to_string()),
                ("consul.token", or_none(token.as_ref().map(|token| token.display()))),
            ]);
            all.extend(tls_keys("consul", tls.as_ref()));
            all
        }
        Origin::Kubernetes(KubernetesOrigin { namespace, service, port, settings }) => {
            let KubernetesSettings { server, token, tls } = settings;
            let mut all = keys([
                ("backends", "kubernetes".to_owned()),
                ("backends.kubernetes", format!("{namespace}/{service}")),
                ("backends.port", or_none(port.as_ref())),
                ("kubernetes.server", server.clone()),
                ("kubernetes.token", or_none(token.as_ref().map(|token| token.display()))),
            ]);
            all.extend(tls_keys("kubernetes", tls.as_ref()));
            all
        }
    }
}

fn tls_keys(section: &str, tls: Option<&TlsSettings>) -> Keys {
    let ca = tls.map(|tls| tls.ca.display());
    let client = tls.and_then(|tls| tls.client.as_ref());
    let values = [
        ("ca", or_none(ca)),
        ("server_name", or_none(tls.and_then(|tls| tls.server_name.as_ref()))),
        ("certificate", or_none(client.map(|(certificate, _)| certificate.display()))),
        ("key", or_none(client.map(|(_, key)| key.display()))),
    ];
    values.into_iter().map(|(key, value)| (format!("{section}.{key}"), value)).collect()
}

/// The values of an endpoint in a list, without its address.
pub fn endpoint_keys(endpoint: &Endpoint) -> Keys {
    let Endpoint { address: _, index, weight, state, zone, agent } = endpoint;
    keys([
        ("index", index.to_string()),
        ("weight", weight.to_string()),
        ("state", state.name().to_owned()),
        ("zone", or_none(zone.as_ref())),
        ("agent", or_none(*agent)),
    ])
}

fn dns_keys(settings: &DnsSettings) -> Keys {
    let DnsSettings { servers, transport, min_ttl, max_ttl } = settings;
    let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    keys([
        ("dns.servers", if servers.is_empty() { "/etc/resolv.conf".to_owned() } else { servers.join(", ") }),
        ("dns.transport", transport.name().to_owned()),
        ("dns.min_ttl", in_units(*min_ttl)),
        ("dns.max_ttl", in_units(*max_ttl)),
    ])
}

fn host(config: &Config) -> Keys {
    let Config {
        path: _,
        clients: _,
        addresses: _,
        lookups: _,
        paths,
        limits,
        daemon,
        metrics,
        admins,
        reclaim_interval,
        reports,
        dns,
        envoy,
    } = config;
    let mut all = keys([
        ("paths.pins", paths.pins.display().to_string()),
        ("paths.run", paths.run.display().to_string()),
        ("paths.state", paths.state.display().to_string()),
        ("limits.schedule_entries", limits.schedule_entries.to_string()),
        ("limits.flow_records", limits.flow_records.to_string()),
        ("limits.slots", limits.slots.to_string()),
        ("metrics.listen", or_none(metrics.listen)),
        ("daemon.watch", daemon.watch.to_string()),
        ("daemon.log_format", daemon.log_format.name().to_owned()),
        ("metrics.hosts", or_none(Some(metrics.hosts.join(", ")).filter(|hosts| !hosts.is_empty()))),
        ("reports.listen", reports.listen.unwrap_or(ReportsConfig::ANY).to_string()),
        ("reports.xdp", or_none(Some(reports.xdp.join(", ")).filter(|interfaces| !interfaces.is_empty()))),
        ("reports.xdp_generic", reports.xdp_generic.to_string()),
        ("envoy.directory", or_none(envoy.as_ref().map(|directory| directory.display()))),
        ("admin.group", or_none(admins.as_ref())),
        ("accounting.reclaim_interval", in_units(*reclaim_interval)),
    ]);
    all.extend(dns_keys(dns));
    all
}

/// The configuration in the pinned maps. It has fewer keys than the configuration file, because the
/// maps contain only the values that the kernel programs need.
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
                "backends = static",
                "backends.10.0.0.1:80 = agent none, index 12823, state healthy, weight 1, zone none",
                "connect_timeout = none",
                "ejection = on",
                "ejection.base = 5s",
                "ejection.failures = 5",
                "ejection.hangs = true",
                "ejection.max = 5m",
                "error_decay = 5s",
                "health.drain_fallback = false",
                "health.panic_threshold = 50",
                "health.probe = none",
                "health.replace_after = 10s",
                "load = none",
                "on_backend_loss = keep",
                "on_no_backend = EHOSTUNREACH",
                "overflow = least-loaded",
                "policy = weighted-round-robin",
                "protocol = tcp",
                "rebalance = off",
                "slow_start = off",
                "subset = sized",
                "subset.algorithm = rocksteadier",
                "subset.size = 20",
                "unanswered_after = 200ms",
            ]
        );
        assert_eq!(services["dns"]["udp.rebind"], "30s");
        assert_eq!(services["dns"]["backends.file"], "/etc/socklb/dns.toml");
        let sizes = ["subset.size", "subset.min"].map(|key| services["dns"][key].as_str());
        assert_eq!(sizes, ["auto", "12"]);
        assert_eq!((host["limits.slots"].as_str(), host["metrics.listen"].as_str()), ("4096", NONE));
    }
}
