//! Faults: conditions that an operator should look at. A fault has a code for programs, a subject,
//! and a sentence for people.
//!
//! This file also derives the faults that can be seen in a client's status, whether the daemon or
//! a command built that status.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::backend::BackendStatus;
use crate::load::ServiceLoadStatus;
use crate::status::{ClientStatus, RemoteStatus, ServiceStatus, SourceStatus};
use crate::text::counted;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    pub code: FaultCode,
    #[serde(flatten)]
    pub subject: Subject,
    /// A sentence that states the fault and, if there is one, the remedy. The sentence does not
    /// repeat the subject.
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultCode {
    /// No daemon runs or answers: the status comes from the maps only.
    NoDaemon,
    /// The pin directory is empty.
    NoClients,
    Configuration,
    /// The configuration file has changes that need a restart.
    RestartNeeded,
    /// The daemon's limit of open files is too low.
    OpenFiles,
    /// The daemon cannot read whether unconfigured clients have pins.
    Pins,
    NotStarted,
    /// A client's programs are not attached to its cgroup.
    NotAttached,
    MapsUnreadable,
    /// The maps of a client differ from the plan.
    TablesBehind,
    /// A client is attached but not configured.
    NotConfigured,
    /// A client cannot be detached from a cgroup, or removed from the kernel.
    CannotLeave,
    /// Another socklb is attached to a client's cgroup or to an ancestor of it.
    AnotherSocklb,
    /// So many flow records were reclaimed that active counts had been wrong.
    EndsUnseen,
    /// Flow records cannot be compared with the kernel's sockets.
    RecordsUnchecked,
    /// The daemon cannot probe some or all backends.
    Probes,
    /// A service's endpoints cannot be used.
    Source,
    /// The newest list of a server removes most endpoints, and does not take effect yet.
    ListShrunk,
    /// The address of a service is not known, or its server does not confirm it.
    ServiceAddress,
    /// Files for Envoy cannot be written or removed.
    EnvoyFiles,
    /// Operators' overrides cannot be read or stored, so a restart could lose some.
    OverridesNotStored,
    /// Stored overrides could not be parsed, and their file was renamed.
    OverridesSetAside,
    /// No backend of a service is usable.
    NoUsableBackend,
    /// No backend of a service is available, and an operator has drained at least one.
    OnlyDrained,
    /// Connects were refused because all backends were at their limit.
    AllAtLimit,
    /// Every connect to a backend failed.
    BackendFailing,
    /// A backend has been ejected for at least the time after which it is replaced.
    BackendEjected,
    /// A backend fails but is not ejected because it is the last available backend.
    EjectionWithheld,
    /// So few backends are available that connects may also choose ejected backends.
    Panic,
    /// Weights should follow load, but fewer than half of the members report their load.
    LoadUnknown,
    /// A member's weight differs from its structural weight by the largest factor that load may
    /// cause.
    LoadAtClamp,
    /// The median handshake takes more than half of the time after which a SYN is counted as
    /// unanswered.
    SlowHandshakes,
    /// Another program rewrites destinations after socklb's programs.
    Diverted,
    /// The numbers of started, active and ended flows to a backend do not add up.
    CountsOff,
}

/// The subject of a fault. All fields are `None` if the fault concerns the whole host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<SocketAddr>,
}

impl Subject {
    pub fn host() -> Self {
        Self::default()
    }

    pub fn client(client: &str) -> Self {
        Self { client: Some(client.to_owned()), ..Self::default() }
    }

    pub fn service(client: &str, service: &str) -> Self {
        Self { service: Some(service.to_owned()), ..Self::client(client) }
    }
}

impl Fault {
    pub fn of_host(code: FaultCode, text: impl Into<String>) -> Self {
        Self { code, subject: Subject::host(), text: text.into() }
    }

    pub fn of_client(code: FaultCode, client: &str, text: impl Into<String>) -> Self {
        Self { code, subject: Subject::client(client), text: text.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Subject { client, service, backend } = &self.subject;
        let mut separator = "";
        for (kind, name) in [("client", client), ("service", service)] {
            if let Some(name) = name {
                write!(f, "{separator}{kind} {name}")?;
                separator = ", ";
            }
        }
        if let Some(backend) = backend {
            write!(f, "{separator}backend {backend}")?;
            separator = ", ";
        }
        write!(f, "{}{}", if separator.is_empty() { "" } else { ": " }, self.text)
    }
}

/// The faults that can be seen in the status of the clients.
pub fn of(clients: &[ClientStatus]) -> Vec<Fault> {
    let mut faults = Vec::new();
    for client in clients {
        for service in client.services.iter().filter(|service| service.open) {
            faults.extend(of_service(&client.name, service));
        }
        faults.extend(another_socklb(client));
    }
    faults
}

fn of_service(client: &str, service: &ServiceStatus) -> Vec<Fault> {
    let subject = || Subject::service(client, &service.name);
    let fault = |code, text| Fault { code, subject: subject(), text };
    let of_backend = |code, backend: &BackendStatus, text| Fault {
        code,
        subject: Subject { backend: Some(backend.address), ..subject() },
        text,
    };
    let mut faults = Vec::new();
    if let Some(text) = only_drained(service) {
        faults.push(fault(FaultCode::OnlyDrained, text));
    } else if service.fallback.is_none() {
        let text = "no usable backend, connects are refused".to_owned();
        faults.push(fault(FaultCode::NoUsableBackend, text));
    }
    if let Some(limited) = service.limited_60s.filter(|limited| *limited > 0) {
        let text = format!(
            "refused {} in the last minute: every backend was at its `active_limit`",
            counted(limited, "connect")
        );
        faults.push(fault(FaultCode::AllAtLimit, text));
    }
    if service.is_panic {
        let mut states: BTreeMap<&str, usize> = BTreeMap::new();
        let bad = service.backends.iter().filter(|backend| backend.is_failing() && !backend.is_leaving());
        bad.for_each(|backend| *states.entry(backend.state_in_words()).or_default() += 1);
        let states: Vec<String> = states.iter().map(|(state, count)| format!("{count} {state}")).collect();
        let states = if states.is_empty() { String::new() } else { format!(" ({})", states.join(", ")) };
        let text = format!(
            "panic: too few backends are available{states}, so connects may choose ejected backends unless a \
             lame duck serves; first check what the backends have in common: the network, this host, shared dependencies"
        );
        faults.push(fault(FaultCode::Panic, text));
    }
    for backend in service.backends.iter().filter(|backend| backend.has_withheld_ejection()) {
        let text = format!(
            "connects failed; the backend was not ejected, because it was then the last available one; {} failures so far",
            backend.withheld
        );
        faults.push(of_backend(FaultCode::EjectionWithheld, backend, text));
    }
    for backend in &service.backends {
        let Some(ejection) = backend.ejection_in_words() else { continue };
        let (Some(seconds), Some(replace_after)) = (backend.unavailable_s, service.replace_after_s) else {
            continue;
        };
        if seconds >= replace_after {
            faults.push(of_backend(
                FaultCode::BackendEjected,
                backend,
                format!("{ejection}; unavailable for {seconds:.0} s"),
            ));
        }
    }
    let failing = |backend: &&BackendStatus| {
        backend.failing && backend.ejection.is_none() && !backend.has_withheld_ejection()
    };
    for backend in service.backends.iter().filter(failing) {
        let failed = backend.failed_60s.unwrap_or(0);
        let text = format!("every connect of the last minute failed ({failed} in total)");
        faults.push(of_backend(FaultCode::BackendFailing, backend, text));
    }
    if let Some(load) = &service.load {
        faults.extend(of_load(load, &subject()));
    }
    faults.extend(slow_handshakes(service).map(|text| fault(FaultCode::SlowHandshakes, text)));
    let diverted: u64 = service.backends.iter().filter_map(|backend| backend.diverted_60s).sum();
    if diverted > 0 {
        let text = format!(
            "another program rewrites destinations after socklb: {} of the last minute went to another address than the \
             backend's; see `socklb doctor`",
            counted(diverted, "flow")
        );
        faults.push(fault(FaultCode::Diverted, text));
    }
    for backend in service.backends.iter().filter(|backend| backend.unaccounted != 0) {
        let few_or_many = if backend.unaccounted > 0 { "few" } else { "many" };
        let flows = backend.unaccounted.unsigned_abs();
        let text = format!(
            "the counts of ended and active flows do not add up: {} too {few_or_many}",
            counted(flows, "flow")
        );
        faults.push(of_backend(FaultCode::CountsOff, backend, text));
    }
    if let Some(SourceStatus { error: Some(error), .. }) = &service.source {
        faults.push(fault(FaultCode::Source, error.clone()));
    }
    let remote = service.source.as_ref().and_then(|source| source.remote.as_ref());
    if let Some(RemoteStatus { pending_removals: pending @ 1.., origin, .. }) = remote {
        let text = format!(
            "the newest list from {origin} removes {}, more than half: these stay in force until the server \
             repeats the list after 10 s",
            counted(*pending, "endpoint")
        );
        faults.push(fault(FaultCode::ListShrunk, text));
    }
    faults
}

/// The text of the fault if no backend is available, and operators have drained at least one.
fn only_drained(service: &ServiceStatus) -> Option<String> {
    let mut present = service.backends.iter().filter(|backend| !backend.is_leaving());
    let drained = present.clone().filter(|backend| backend.is_drained_by_operator()).count();
    if drained == 0 || present.any(BackendStatus::is_available) {
        return None;
    }
    let serves =
        service.fallback.and_then(|address| service.backends.iter().find(|one| one.address == address));
    let effect = match serves {
        None => "connects are refused".to_owned(),
        Some(backend) if backend.is_drained_by_operator() => {
            "connects go to drained backends, because `drain_fallback` is on".to_owned()
        }
        Some(backend) => format!("connects go to a backend that is {}", backend.state_in_words()),
    };
    Some(format!(
        "{drained} drained by an operator, and no other backend is available: {effect}; `socklb overrides` lists the \
         drains, `socklb undrain` ends them"
    ))
}

/// The faults of weights that follow load.
fn of_load(load: &ServiceLoadStatus, subject: &Subject) -> Vec<Fault> {
    let mut faults = Vec::new();
    if load.is_blind() {
        let (reporting, expected) = (load.reporting, load.expected);
        let text = format!(
            "weights should follow load, but only {reporting} of {expected} members report their utilization, fewer than half: \
             weights do not change, and learnt weights expire after three minutes without reports; see `socklb load`"
        );
        faults.push(Fault { code: FaultCode::LoadUnknown, subject: subject.clone(), text });
    }
    for member in load.members.iter().filter(|member| member.is_at_clamp) {
        let subject = Subject { backend: Some(member.address), ..subject.clone() };
        let utilization =
            member.utilization.map_or_else(String::new, |used| format!(" at a utilization of {used:.2}"));
        let text = format!(
            "load has moved the weight to {:.2} times the structural weight{utilization}, which is the \
             limit: check the backend's reports, its weight in the list, and whether another host does this \
             backend's work",
            member.wanted
        );
        faults.push(Fault { code: FaultCode::LoadAtClamp, subject, text });
    }
    faults
}

/// The text of the fault if handshakes take so long that SYNs may be counted as unanswered although
/// the backend answers every SYN.
fn slow_handshakes(service: &ServiceStatus) -> Option<String> {
    let (Some(due_ms), Some(took)) = (service.unanswered_after_ms, service.handshake_60s) else {
        return None;
    };
    #[expect(clippy::cast_precision_loss, reason = "at most a minute")]
    let due_us = due_ms as f64 * 1000.0;
    (took.p50_us > due_us / 2.0).then(|| {
        format!(
            "half of the handshakes of the last minute took more than {:.0} ms, and a SYN counts as \
             unanswered after {due_ms} ms: a connect that the application cancels may count against a \
             backend that does answer; set `unanswered_after` to more than twice the time of a handshake",
            took.p50_us / 1000.0
        )
    })
}

/// The fault if another socklb is attached to the client's cgroup or to an ancestor of it. If both
/// have the same service, only the socklb that runs first balances connects to this service.
fn another_socklb(client: &ClientStatus) -> Option<Fault> {
    let others = client.neighbours.iter().flatten().filter(|neighbour| neighbour.is_socklb);
    let others: Vec<_> = others.filter(|neighbour| neighbour.hook.starts_with("connect")).collect();
    // A socklb that runs first balances connects that this socklb should balance, so it is reported
    // in preference to a socklb that runs later.
    let other = others.iter().find(|other| !other.runs_after_ours).or(others.first())?;
    let what_happens = if other.runs_after_ours {
        "runs after this socklb, so this socklb balances the connects to services that both have"
    } else {
        "runs before this socklb, so the other socklb balances the connects to services that both have"
    };
    let text = format!(
        "another socklb is attached to {} and {what_happens}; `socklb doctor` shows how to find it",
        other.cgroup.display()
    );
    Some(Fault::of_client(FaultCode::AnotherSocklb, &client.name, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::ConnectLatency;
    use crate::status::{AnomalyCounts, NeighbourProgram};

    #[test]
    fn a_fault_names_its_service_and_backend() {
        let address = "10.0.0.1:80".parse().expect("the address is valid");
        let failing =
            BackendStatus { failing: true, failed_60s: Some(7), ..BackendStatus::unused(address, 0) };
        let mut service = ServiceStatus {
            fallback: Some(address),
            limited_60s: Some(3),
            unanswered_after_ms: Some(200),
            ..ServiceStatus::with_backends(vec![failing])
        };
        let of_service = |service: &ServiceStatus| -> Vec<(FaultCode, String)> {
            of_service("web", service).iter().map(|fault| (fault.code, fault.to_string())).collect()
        };
        let limited = "client web, service users: refused 3 connects in the last minute: every backend was \
                       at its `active_limit`";
        let failing = "client web, service users, backend 10.0.0.1:80: every connect of the last minute failed (7 in total)";
        let expected =
            [(FaultCode::AllAtLimit, limited.to_owned()), (FaultCode::BackendFailing, failing.to_owned())];
        assert_eq!(of_service(&service), expected);
        service.limited_60s = Some(0);
        service.backends[0].failing = false;
        assert_eq!(of_service(&service), []);
        let latency = |p50_us| ConnectLatency { mean_us: p50_us, p50_us, p99_us: p50_us };
        service.handshake_60s = Some(latency(100_000.0));
        assert_eq!(of_service(&service), []);
        service.handshake_60s = Some(latency(101_000.0));
        let [(FaultCode::SlowHandshakes, slow)] = &of_service(&service)[..] else {
            panic!("expected one fault")
        };
        let expected =
            "client web, service users: half of the handshakes of the last minute took more than 101 ms, and";
        assert!(slow.starts_with(expected), "{slow}");
        service.unanswered_after_ms = None;
        assert_eq!(of_service(&service), [], "a UDP service has no handshakes");
    }

    /// The other backends refuse, and the last available one fails.
    #[test]
    fn a_withheld_ejection_is_called_failing_and_never_ejected() {
        let backend = |host: u8, state: &str| BackendStatus {
            state: state.to_owned(),
            is_withheld: state == "ejected",
            withheld: 7,
            ..BackendStatus::unused(([10, 0, 0, host], 80).into(), host.into())
        };
        let service = ServiceStatus {
            is_panic: true,
            fallback: Some(([10, 0, 0, 1], 80).into()),
            ..ServiceStatus::with_backends(vec![
                backend(1, "ejected"),
                backend(2, "refusing"),
                backend(3, "refusing"),
            ])
        };
        assert_eq!(service.backends[0].state_in_words(), "failing");
        let faults: Vec<_> =
            of_service("web", &service).into_iter().map(|fault| (fault.code, fault.text)).collect();
        let [(FaultCode::Panic, panic), (FaultCode::EjectionWithheld, withheld)] = &faults[..] else {
            panic!("{faults:?}")
        };
        let expected =
            "panic: too few backends are available (1 failing, 2 refusing), so connects may choose";
        assert!(panic.starts_with(expected), "{panic}");
        let expected = "connects failed; the backend was not ejected, because it was then the last available one; 7 failures so far";
        assert_eq!(withheld, expected);
    }

    /// Its failures are a fault only as those of any backend.
    #[test]
    fn a_refusing_backend_has_no_withheld_ejection() {
        let faults = |failing: bool| -> Vec<(FaultCode, String)> {
            let backend = BackendStatus {
                state: "refusing".to_owned(),
                is_withheld: true,
                failing,
                failed_60s: Some(7),
                withheld: 7,
                ..BackendStatus::unused(([10, 0, 0, 1], 80).into(), 1)
            };
            assert_eq!(backend.state_in_words(), "refusing");
            let service = ServiceStatus {
                fallback: Some(backend.address),
                ..ServiceStatus::with_backends(vec![backend])
            };
            of_service("web", &service).into_iter().map(|fault| (fault.code, fault.text)).collect()
        };
        let text = "every connect of the last minute failed (7 in total)";
        assert_eq!(faults(true), [(FaultCode::BackendFailing, text.to_owned())]);
        assert_eq!(faults(false), []);
    }

    #[test]
    fn drained_backends_are_the_fault_if_no_other_backend_is_available() {
        let backend = |host: u8, state: &str, witness: &str| BackendStatus {
            state: state.to_owned(),
            witness: Some(witness.to_owned()),
            ..BackendStatus::unused(([10, 0, 0, host], 80).into(), host.into())
        };
        let faults = |states: &[(&str, &str)], fallback: Option<u8>| -> Vec<(FaultCode, String)> {
            let backends = (1..).zip(states).map(|(host, (state, witness))| backend(host, state, witness));
            let service = ServiceStatus {
                fallback: fallback.map(|host| ([10, 0, 0, host], 80).into()),
                ..ServiceStatus::with_backends(backends.collect())
            };
            of_service("web", &service).into_iter().map(|fault| (fault.code, fault.text)).collect()
        };
        let drained = ("drained", "operator");
        let text = |count: u32, effect: &str| {
            let text = format!(
                "{count} drained by an operator, and no other backend is available: {effect}; `socklb overrides` lists the \
                 drains, `socklb undrain` ends them"
            );
            vec![(FaultCode::OnlyDrained, text)]
        };
        assert_eq!(faults(&[drained, drained], None), text(2, "connects are refused"));
        let fallback = "connects go to drained backends, because `drain_fallback` is on";
        assert_eq!(faults(&[drained, ("drained", "list")], Some(1)), text(1, fallback));
        let ejected = "connects go to a backend that is ejected";
        assert_eq!(faults(&[drained, ("ejected", "kernel")], Some(2)), text(1, ejected));
        assert_eq!(faults(&[drained, ("unproven", "probe")], Some(2)), []);
        let codes: Vec<FaultCode> =
            faults(&[("drained", "list")], None).into_iter().map(|(code, _)| code).collect();
        assert_eq!(codes, [FaultCode::NoUsableBackend], "no operator has drained the backend");
    }

    #[test]
    fn a_fault_is_one_flat_object_in_json() {
        let fault = Fault::of_client(FaultCode::NotAttached, "web", "there is no cgroup");
        let json = r#"{"code":"not-attached","client":"web","text":"there is no cgroup"}"#;
        assert_eq!(serde_json::to_string(&fault).expect("a fault has a JSON form"), json);
        assert_eq!(serde_json::from_str::<Fault>(json).expect("the JSON is a fault"), fault);
        let host = Fault::of_host(FaultCode::NoClients, "no client has pins");
        assert_eq!(host.to_string(), "no client has pins");
    }

    #[test]
    fn the_fault_names_the_socklb_that_runs_first() {
        let neighbour = |cgroup: &str, hook: &str, is_socklb, runs_after_ours| NeighbourProgram {
            cgroup: cgroup.into(),
            hook: hook.to_owned(),
            program: 1,
            name: None,
            is_socklb,
            runs_after_ours,
        };
        let fault = |neighbours: Vec<NeighbourProgram>| {
            another_socklb(&ClientStatus {
                name: "web".to_owned(),
                configured_cgroup: None,
                cgroup: None,
                cgroup_id: None,
                neighbours: Some(neighbours),
                reclaim: None,
                not_a_service: 0,
                anomalies: AnomalyCounts::default(),
                services: Vec::new(),
            })
        };
        assert_eq!(fault(vec![neighbour("/c", "connect4", false, false)]), None);
        assert_eq!(fault(vec![neighbour("/c", "sock_release", true, false)]), None);
        let after = neighbour("/", "connect4", true, true);
        let text = fault(vec![after.clone()]).expect("there is a fault").to_string();
        assert!(
            text.starts_with("client web: another socklb is attached to / and runs after this socklb"),
            "{text}"
        );
        let text = fault(vec![after, neighbour("/c", "connect6", true, false)])
            .expect("there is a fault")
            .to_string();
        assert!(
            text.starts_with("client web: another socklb is attached to /c and runs before this socklb"),
            "{text}"
        );
    }
}
