//! What the balancer is doing, as one value: client tasks, their services and what is wrong.
//!
//! The daemon makes it from the maps and its own state; without a daemon the commands make it from the maps alone,
//! which hold names, addresses, weights and counts.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use lb_common::abi;
use lb_core::membership;
use serde::{Deserialize, Serialize};

use crate::backend::{BackendStatus, ConnectLatency};
use crate::fault::Fault;
use crate::filter::Filter;
use crate::load::ServiceLoadStatus;

/// Version of the JSON form.
pub const SCHEMA: u32 = 7;

/// The status of the balancer on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusDocument {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The daemon, if it runs.
    pub daemon: Option<DaemonStatus>,
    /// What an operator should look at; empty if all is well.
    pub faults: Vec<Fault>,
    /// Client tasks by name.
    pub clients: Vec<ClientStatus>,
    /// Clients that were removed, or taken over by this version from another, and have flows left.
    pub leaving: Vec<LeavingClient>,
    /// Network interfaces on which the kernel is to take reports in by itself.
    #[serde(default)]
    pub interfaces: Vec<InterfaceStatus>,
}

/// Who takes in on a network interface what comes for a daemon or an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceStatus {
    /// Its name.
    pub name: String,
    /// The kernel, by the interface's driver (`native`) or in the network stack (`generic`), or their `socket` alone.
    pub mode: String,
    /// Why it is the socket.
    pub why: Option<String>,
}

/// In which order backends are shown, those that fail always first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SortBy {
    /// By address.
    Address,
    /// The largest share of the flows of the last minute first; without a daemon, of all flows.
    Share,
    /// The most flows of the last minute first; without a daemon, of all flows.
    Flows,
    /// The most active flows first.
    Active,
    /// The most failed connects of the last minute first.
    Failed,
    /// The slowest median of connects first.
    Latency,
}

impl SortBy {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Address, Self::Share, Self::Flows, Self::Active, Self::Failed, Self::Latency];

    /// The word for it on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Share => "share",
            Self::Flows => "flows",
            Self::Active => "active",
            Self::Failed => "failed",
            Self::Latency => "latency",
        }
    }

    /// The number by which backends are in descending order.
    fn number_of(self, backend: &BackendStatus) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "an order for people")]
        let number = |count: u64| count as f64;
        match self {
            Self::Address => 0.0,
            Self::Share => backend.share_60s.or(backend.share).unwrap_or(0.0),
            Self::Flows => backend.rates_60s.as_ref().map_or(number(backend.started), |rates| rates.started),
            Self::Active => number(backend.active),
            Self::Failed => number(backend.failed_60s.unwrap_or(0)),
            Self::Latency => backend.latency_60s.or(backend.latency).map_or(0.0, |latency| latency.p50_us),
        }
    }
}

impl StatusDocument {
    /// Leaves what is asked for, and of backends only those that fail if `only_failing`: then also only the services and
    /// clients that have such. Faults stay that concern it.
    pub fn retain(&mut self, filter: &Filter, only_failing: bool) {
        let names_backends = filter.backend.is_some() || only_failing;
        for client in &mut self.clients {
            for service in &mut client.services {
                service.backends.retain(|backend| {
                    filter.has_backend(backend.address) && (backend.is_failing() || !only_failing)
                });
            }
            client.services.retain(|service| {
                filter.has_service(&service.name) && !(names_backends && service.backends.is_empty())
            });
        }
        let names_services = filter.service.is_some() || names_backends;
        self.clients.retain(|client| {
            filter.has_client(&client.name) && !(names_services && client.services.is_empty())
        });
        self.leaving.retain(|leaving| filter.has_client(&leaving.client));
        self.faults.retain(|fault| filter.concerns(&fault.subject));
    }

    /// Brings the backends of each service into an order. Services with failing backends come first, and so do their clients.
    pub fn sort(&mut self, by: SortBy) {
        for client in &mut self.clients {
            client.services.sort_by_key(|service| !service.is_failing());
        }
        self.clients.sort_by_key(|client| !client.services.iter().any(ServiceStatus::is_failing));
        let services = self.clients.iter_mut().flat_map(|client| &mut client.services);
        for service in services {
            service.backends.sort_by(|a, b| {
                let most_first = by.number_of(b).total_cmp(&by.number_of(a));
                let failing_first = b.is_failing().cmp(&a.is_failing());
                failing_first.then(most_first).then((a.address, a.slot).cmp(&(b.address, b.slot)))
            });
        }
    }

    /// The client of a name.
    pub fn client(&self, name: &str) -> Option<&ClientStatus> {
        self.clients.iter().find(|client| client.name == name)
    }
}

/// A client on its way out, or one of another version of socklb: its maps cannot be read here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeavingClient {
    /// Its name.
    pub client: String,
    /// The version of the kernel ABI that its maps are of.
    pub abi: u32,
    /// Whether flows still begin there, because the version that made it is still in force.
    pub in_force: bool,
    /// Active flows; `None` if they cannot be counted.
    pub active: Option<u64>,
}

impl LeavingClient {
    /// How it is, for people: what follows its name.
    pub fn describe(&self) -> String {
        let open = self.active.map_or_else(|| "?".to_owned(), |active| active.to_string());
        let what = if self.in_force { "is in force" } else { "is leaving" };
        format!("{what}: {open} active flows")
    }
}

/// The running daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Process id.
    pub pid: u32,
    /// Version of the program.
    pub version: String,
    /// The configuration file.
    pub config: PathBuf,
    /// Where its pins are; `None` from an older daemon, which does not tell.
    #[serde(default)]
    pub pins: Option<PathBuf>,
    /// Optional features of the kernel, by name: whether it has them.
    pub features: BTreeMap<String, bool>,
    /// Offsets of the fields of kernel structures that the programs read, in bytes, by name (`sk_kern_sock_mask` is a
    /// mask); empty if the kernel does not describe its types.
    pub offsets: BTreeMap<String, u32>,
}

/// One client task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Name.
    pub name: String,
    /// The cgroup that it is configured for; only from the daemon.
    pub configured_cgroup: Option<PathBuf>,
    /// The cgroup that its programs are attached to, if they are and it exists.
    pub cgroup: Option<PathBuf>,
    /// The kernel's id of that cgroup: another one each time the cgroup is made.
    pub cgroup_id: Option<u64>,
    /// Other programs that run for the same sockets, in the order in which they run; only from the daemon.
    pub neighbours: Option<Vec<NeighbourProgram>>,
    /// Flow records that were compared with the kernel's lists of sockets; only from the daemon.
    pub reclaim: Option<Reclaim>,
    /// Connects of the cgroup to addresses that are no service.
    pub not_a_service: u64,
    /// What should not happen.
    pub anomalies: AnomalyCounts,
    /// Services in the order of their indexes.
    pub services: Vec<ServiceStatus>,
}

impl ClientStatus {
    /// The service of a name.
    pub fn service(&self, name: &str) -> Option<&ServiceStatus> {
        self.services.iter().find(|service| service.name == name)
    }
}

/// What became of open flows whose sockets are in no list of the kernel, as the last pass over the records found it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reclaim {
    /// Passes over the records since the daemon started; none is made while no flow is open.
    pub passes: u64,
    /// Reclaimed since the daemon started: the flows had ended, and no program had seen it.
    pub reclaimed: u64,
    /// Suspected: reclaimed by the next pass if that finds the same.
    pub suspected: u64,
    /// Kept: a process holds the socket, which is not connected.
    pub kept_open: u64,
    /// Kept: in network namespaces that the daemon could not look into, and not known to be held by a process.
    pub kept_elsewhere: u64,
}

/// Counts of what should not happen, since the client's maps were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnomalyCounts {
    /// Sockets of flows that closed and had no record. A socket that dialled elsewhere since counts, too.
    pub close_without_record: u64,
    /// Flows that were established before a SYN was seen.
    pub established_out_of_turn: u64,
    /// Records that two calls ended at the same moment.
    pub ended_twice: u64,
    /// Sockets that were closed in a phase in which their end should have been seen.
    pub release_out_of_turn: u64,
}

/// One service of a client task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServiceStatus {
    /// Name.
    pub name: String,
    /// The address that processes dial.
    pub address: SocketAddr,
    /// The protocol.
    pub protocol: String,
    /// Whether connects are balanced; a removed service only waits for its last flow to end.
    pub open: bool,
    /// Publications of its table so far, modulo 65,536.
    pub table_generation: u16,
    /// Entries of its table.
    pub table_entries: u32,
    /// The backend that is taken when every pick is unusable.
    pub fallback: Option<SocketAddr>,
    /// How connects and addressed datagrams ended, by [`Outcome::name`](abi::Outcome::name): each counts once.
    pub outcomes: BTreeMap<String, u64>,
    /// Connects of the last minute that were refused because all backends were at their limit; only from the daemon,
    /// and of a service with an `active_limit`.
    #[serde(default)]
    pub limited_60s: Option<u64>,
    /// How long handshakes with its backends took in the last minute; only from the daemon, and of a service over TCP.
    #[serde(default)]
    pub handshake_60s: Option<ConnectLatency>,
    /// After how many milliseconds an answer to a SYN is due, to a tick of 1.05 ms; `None` of a service over UDP.
    #[serde(default)]
    pub unanswered_after_ms: Option<u64>,
    /// Whether so few backends are available that ejected ones are chosen as well; without a daemon, whether they are chosen for
    /// whatever reason.
    #[serde(default)]
    pub is_panic: bool,
    /// Whether backends that fail are ejected.
    #[serde(default)]
    pub ejection: EjectionMode,
    /// After how many seconds a backend that is unavailable is replaced; only from the daemon.
    #[serde(default)]
    pub replace_after_s: Option<f64>,
    /// The largest ratio of share to share wanted; only above ten connects per backend.
    pub skew: Option<f64>,
    /// Where its endpoints come from; only from the daemon.
    pub source: Option<SourceStatus>,
    /// Endpoints that no task of the job uses, if there are some; only from the daemon.
    #[serde(default)]
    pub unused: Option<UnusedEndpoints>,
    /// Endpoints of the list that no connect may choose because the list says so, and that are not among `backends`; only from the
    /// daemon.
    #[serde(default)]
    pub not_chosen: Vec<NotChosen>,
    /// What changes weights while the list stays; `None` if nothing does, or without a daemon.
    #[serde(default)]
    pub load: Option<ServiceLoadStatus>,
    /// Backends by slot.
    pub backends: Vec<BackendStatus>,
}

impl ServiceStatus {
    /// Whether it is to be looked at first: a backend fails, or none may be chosen.
    pub fn is_failing(&self) -> bool {
        let has_faulty_list = self.source.as_ref().is_some_and(|source| source.error.is_some());
        has_faulty_list
            || self.open && self.fallback.is_none()
            || self.backends.iter().any(BackendStatus::is_failing)
    }
}

#[cfg(test)]
impl ServiceStatus {
    /// A service over TCP that is open and of which nothing is known but its backends.
    pub fn with_backends(backends: Vec<BackendStatus>) -> Self {
        Self {
            name: "users".to_owned(),
            address: "10.96.0.10:80".parse().expect("an address"),
            protocol: "tcp".to_owned(),
            open: true,
            table_generation: 1,
            table_entries: 1024,
            is_panic: false,
            ejection: EjectionMode::On,
            replace_after_s: None,
            fallback: None,
            outcomes: BTreeMap::new(),
            limited_60s: None,
            handshake_60s: None,
            unanswered_after_ms: None,
            skew: None,
            source: None,
            unused: None,
            not_chosen: Vec::new(),
            load: None,
            backends,
        }
    }
}

/// An endpoint that no connect may choose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotChosen {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its health, by [`Health::name`](lb_core::health::Health::name).
    pub state: String,
    /// Where that comes from: `list`.
    pub witness: String,
}

impl fmt::Display for NotChosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, state, witness } = self;
        write!(f, "{address} {state} ({witness})")
    }
}

/// Endpoints that take connections, and that no task of a job uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnusedEndpoints {
    /// How many.
    pub endpoints: u32,
    /// Of how many that take connections.
    pub of: u32,
    /// The smallest size of a subset with which each endpoint has a task; `None` if that is larger than a subset can be.
    pub size: Option<u32>,
}

impl From<membership::Unused> for UnusedEndpoints {
    fn from(unused: membership::Unused) -> Self {
        let membership::Unused { endpoints, of, size } = unused;
        Self { endpoints, of, size }
    }
}

impl fmt::Display for UnusedEndpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { endpoints, of, size } = self;
        write!(f, "{endpoints} of {of} endpoints are used by no task of the job: take ")?;
        match size {
            Some(size) => write!(f, "size = {size} or more"),
            None => f.write_str("size = \"auto\""),
        }
    }
}

/// Whether backends that fail are ejected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EjectionMode {
    /// They are.
    On,
    /// Nobody asked for it.
    #[default]
    Off,
    /// It is configured, and they are not: the kernel does not tell the programs why flows fail. Only from the daemon.
    CausesUnknown,
}

/// A source of endpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceStatus {
    /// The file, or `None` for a static list.
    pub file: Option<PathBuf>,
    /// Seconds since the file was last read and found good; `None` if it never was.
    pub good_for_s: Option<u64>,
    /// Why it could not be used when it was last read.
    pub error: Option<String>,
    /// How often it could not be used since the daemon started.
    pub failures: u64,
    /// What of the file is ignored, and why.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl From<abi::Anomalies> for AnomalyCounts {
    fn from(anomalies: abi::Anomalies) -> Self {
        let abi::Anomalies {
            close_without_record,
            established_out_of_turn,
            ended_twice,
            release_out_of_turn,
        } = anomalies;
        Self { close_without_record, established_out_of_turn, ended_twice, release_out_of_turn }
    }
}

/// A program that is not this client's and runs for its sockets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeighbourProgram {
    /// Where it is attached.
    pub cgroup: PathBuf,
    /// The hook.
    pub hook: String,
    /// The kernel's id of the program.
    pub program: u32,
    /// Its name, as far as privileges tell (CAP_SYS_ADMIN).
    pub name: Option<String>,
    /// Whether it is socklb's: by its name, or, where names are not told, because unnamed programs are on every hook
    /// that a socklb takes.
    #[serde(default)]
    pub is_socklb: bool,
    /// Whether it sees the destination that our program has written, and may write another.
    pub runs_after_ours: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::{FaultCode, Subject};

    fn backend(last: u8) -> BackendStatus {
        BackendStatus::unused(([10, 0, 0, last], 80).into(), last.into())
    }

    fn status(services: Vec<ServiceStatus>) -> StatusDocument {
        let client = ClientStatus {
            name: "web".to_owned(),
            configured_cgroup: None,
            cgroup: None,
            cgroup_id: None,
            neighbours: None,
            reclaim: None,
            not_a_service: 0,
            anomalies: AnomalyCounts::default(),
            services,
        };
        let other = ClientStatus { name: "batch".to_owned(), services: Vec::new(), ..client.clone() };
        let of = |subject: Subject| Fault { code: FaultCode::Source, subject, text: String::new() };
        let faults = vec![
            Fault::of_host(FaultCode::OpenFiles, ""),
            Fault::of_client(FaultCode::NotAttached, "batch", ""),
            of(Subject::service("web", "users")),
            of(Subject::service("web", "mail")),
        ];
        StatusDocument {
            schema: SCHEMA,
            daemon: None,
            faults,
            clients: vec![client, other],
            leaving: Vec::new(),
            interfaces: Vec::new(),
        }
    }

    /// What is left: backends by client and service, and how many faults.
    #[track_caller]
    fn check(filter: &Filter, only_failing: bool, expected: &[(&str, &str, &[u32])], faults: usize) {
        let failing = BackendStatus { failing: true, ..backend(2) };
        let mail =
            ServiceStatus { name: "mail".to_owned(), ..ServiceStatus::with_backends(vec![backend(1)]) };
        let mut status = status(vec![ServiceStatus::with_backends(vec![backend(1), failing]), mail]);
        status.retain(filter, only_failing);
        let left: Vec<(&str, &str, Vec<u32>)> = status
            .clients
            .iter()
            .flat_map(|client| client.services.iter().map(move |service| (client, service)))
            .map(|(client, service)| {
                let slots = service.backends.iter().map(|backend| backend.slot).collect();
                (client.name.as_str(), service.name.as_str(), slots)
            })
            .collect();
        let expected: Vec<(&str, &str, Vec<u32>)> =
            expected.iter().map(|(client, service, slots)| (*client, *service, slots.to_vec())).collect();
        assert_eq!((left, status.faults.len()), (expected, faults), "{filter:?}");
    }

    #[test]
    fn what_is_asked_for_stays_with_its_faults_and_those_of_the_host() {
        let all = Filter::default();
        check(&all, false, &[("web", "users", &[1, 2]), ("web", "mail", &[1])], 4);
        let users = Filter { service: Some("users".to_owned()), ..Filter::default() };
        check(&users, false, &[("web", "users", &[1, 2])], 3);
        let web = Filter { client: Some("web".to_owned()), ..Filter::default() };
        check(&web, false, &[("web", "users", &[1, 2]), ("web", "mail", &[1])], 3);
        let first = Filter { backend: Some(([10, 0, 0, 1], 80).into()), ..Filter::default() };
        check(&first, false, &[("web", "users", &[1]), ("web", "mail", &[1])], 4);
        check(&all, true, &[("web", "users", &[2])], 4);
        check(&first, true, &[], 4);
    }

    #[test]
    fn backends_that_fail_come_first_in_every_order() {
        let failing = BackendStatus { failing: true, ..backend(9) };
        let busy = BackendStatus { active: 7, share: Some(0.1), ..backend(5) };
        let slow = BackendStatus { share: Some(0.9), started: 3, failed_60s: Some(1), ..backend(3) };
        let mut status = status(vec![ServiceStatus::with_backends(vec![backend(1), slow, busy, failing])]);
        let mut order = |by| {
            status.sort(by);
            status.clients[0].services[0].backends.iter().map(|backend| backend.slot).collect::<Vec<_>>()
        };
        assert_eq!(order(SortBy::Address), [9, 1, 3, 5]);
        assert_eq!(order(SortBy::Active), [9, 5, 1, 3]);
        assert_eq!(order(SortBy::Share), [9, 3, 5, 1]);
        assert_eq!(order(SortBy::Flows), [9, 3, 1, 5]);
        assert_eq!(order(SortBy::Failed), [9, 3, 1, 5]);
        assert_eq!(order(SortBy::Latency), [9, 1, 3, 5]);
    }
}
