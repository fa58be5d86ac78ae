//! Examines, in the status of a running daemon, whether probes and reports arrive. If no daemon
//! runs, examines whether a daemon could listen for reports.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};

use lb_kernel::{ClientNamespace, cgroup2_mount};
use lb_report::client::reported::ReportState;
use lb_view::backend::BackendHealth;
use lb_view::diagnosis::{Diagnosis, Severity};
use lb_view::status::StatusDocument;
use lb_view::text::counted;

use crate::config::{ClientConfig, Config, ProbeConfig, ReportsConfig};

/// The maximum number of backends that one finding lists.
const NAMED: usize = 3;

/// The help if agents do not answer.
const NO_REPORT: &str = "on the backend's host run `socklb agent status`; check the agent's key, and whether \
                         firewalls let UDP through to the agent's port";

/// The help if probes and the client's connects come from different network namespaces.
const GUESSES: &str = "use an agent in that namespace (probe = \"report\"); to see the namespace of another user's process the \
                       daemon needs CAP_SYS_PTRACE: see docs/reference/reports.md";

/// Examines the probes and reports of all services.
pub fn examine(diagnosis: &mut Diagnosis, config: Option<&Config>, status: Option<&StatusDocument>) {
    match (status, config) {
        (Some(status), _) => of_daemon(diagnosis, status),
        (None, Some(config)) => port(diagnosis, config),
        (None, None) => {}
    }
    for client in config.into_iter().flat_map(|config| &config.clients) {
        namespace(diagnosis, client);
    }
}

/// Reports a client that has backends with connect probes, and is in a different network namespace
/// from this process. If the namespace cannot be examined, there is no finding, because missing
/// privileges have findings of their own.
fn namespace(diagnosis: &mut Diagnosis, client: &ClientConfig) {
    let connects = |probe: &ProbeConfig| !probe.is_by_report();
    let probed = client.services.iter().filter(|service| service.probe.as_ref().is_some_and(connects));
    let probed: Vec<&str> = probed.map(|service| service.service.name.as_str()).collect();
    let Ok(mount) = cgroup2_mount() else { return };
    if let Ok(Some(namespace)) = ClientNamespace::find(&mount.join(&client.cgroup), None)
        && !namespace.is_ours
        && !probed.is_empty()
    {
        let text = format!(
            "client {}: its oldest process (PID {}) is in another network namespace, so tcp and http probes of {} may fail although the client's connects succeed",
            client.name,
            namespace.pid(),
            probed.join(", ")
        );
        diagnosis.add("probes", Severity::Note, text, Some(GUESSES));
    }
}

fn of_daemon(diagnosis: &mut Diagnosis, status: &StatusDocument) {
    for client in &status.clients {
        for service in &client.services {
            let subject = format!("client {}, service {}", client.name, service.name);
            let probed = service.backends.iter();
            let probed = probed.filter_map(|backend| Some((backend.address, backend.probe.as_ref()?)));
            of_service(diagnosis, &subject, &probed.collect::<Vec<_>>());
        }
    }
}

/// Reports the number of a service's backends in each state, and backends with an unknown state.
fn of_service(diagnosis: &mut Diagnosis, subject: &str, probed: &[(SocketAddr, &BackendHealth)]) {
    let Some((_, first)) = probed.first() else { return };
    let mut states: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, probe) in probed {
        *states.entry(&probe.state).or_default() += 1;
    }
    let states: Vec<String> = states.iter().map(|(state, count)| format!("{count} {state}")).collect();
    let text = format!(
        "{subject}: {} probed by {}: {}",
        counted(probed.len(), "backend"),
        first.kind,
        states.join(", ")
    );
    // A bad state that a backend reports is not listed here: the state is known.
    let unknown =
        [ReportState::NeverReported, ReportState::Silent, ReportState::Unknown].map(ReportState::name);
    let is_unknown = |probe: &BackendHealth| unknown.contains(&probe.state.as_str());
    let mut unknown: Vec<&(SocketAddr, &BackendHealth)> =
        probed.iter().filter(|(_, probe)| is_unknown(probe)).collect();
    unknown.sort_by_key(|(address, _)| *address);
    if unknown.is_empty() {
        return diagnosis.ok("probes", text);
    }
    let named = unknown.iter().take(NAMED).map(|(address, probe)| match &probe.why {
        Some(why) => format!("{address} ({why})"),
        None => address.to_string(),
    });
    let named: Vec<String> = named.collect();
    let more = match unknown.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let text = format!("{text}; unknown: {}{more}", named.join(", "));
    diagnosis.add("probes", Severity::Warning, text, Some(NO_REPORT));
}

fn probes(config: &Config) -> impl Iterator<Item = &ProbeConfig> {
    let services = config.clients.iter().flat_map(|client| &client.services);
    services.filter_map(|service| service.probe.as_ref())
}

/// Reports whether a daemon could listen for reports.
fn port(diagnosis: &mut Diagnosis, config: &Config) {
    if !probes(config).any(ProbeConfig::is_by_report) {
        return;
    }
    let address = config.reports.listen.unwrap_or(ReportsConfig::ANY);
    match UdpSocket::bind(address) {
        Ok(_) => diagnosis.ok("probes", format!("{address} is free for receiving reports")),
        Err(error) => diagnosis.add(
            "probes",
            Severity::Warning,
            format!("reports cannot be received at {address}: {error}"),
            Some("set `listen` in [reports] to another address or port; `ss -ulnp` shows which process uses this one"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(states: &[(&str, Option<&str>)]) -> Vec<(Severity, String)> {
        let probes = states.iter().map(|(state, why)| BackendHealth {
            state: (*state).to_owned(),
            why: why.map(str::to_owned),
            ..BackendHealth::unprobed("report")
        });
        let probes: Vec<BackendHealth> = probes.collect();
        let addresses = (1..).map(|port| SocketAddr::from(([10, 0, 0, 1], port)));
        let probed: Vec<(SocketAddr, &BackendHealth)> = addresses.zip(&probes).collect();
        let mut diagnosis = Diagnosis { schema: 1, findings: Vec::new() };
        of_service(&mut diagnosis, "client web, service users", &probed);
        diagnosis.findings.into_iter().map(|finding| (finding.state, finding.text)).collect()
    }

    #[test]
    fn backends_are_counted_by_state_and_silent_ones_named() {
        assert_eq!(finding(&[]), []);
        let good = "client web, service users: 2 backends probed by report: 1 lame-duck, 1 ready";
        assert_eq!(finding(&[("ready", None), ("lame-duck", None)]), [(Severity::Ok, good.to_owned())]);
        let silent = ("silent", Some("its agent is silent"));
        let [(state, text)] = &finding(&[silent; 5])[..] else { panic!("there is not exactly one finding") };
        assert_eq!(*state, Severity::Warning);
        let named = "unknown: 10.0.0.1:1 (its agent is silent), 10.0.0.1:2 (its agent is silent), \
                     10.0.0.1:3 (its agent is silent) and 2 more";
        assert!(text.ends_with(named), "{text}");
    }
}
