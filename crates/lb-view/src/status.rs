//! The status of the balancer as one value: client tasks, their services, and faults.
//!
//! The daemon builds it from the maps and its own state. Without a daemon, commands build it from
//! the maps, which contain names, addresses, weights and counts.

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
use crate::text::counted;

pub const SCHEMA: u32 = 8;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusDocument {
    pub schema: u32,
    /// `None` without a running daemon.
    pub daemon: Option<DaemonStatus>,
    /// Empty if there is no fault.
    pub faults: Vec<Fault>,
    /// In the order of their names.
    pub clients: Vec<ClientStatus>,
    /// Clients that were removed but still have flows, and clients with maps of another version of
    /// socklb.
    pub leaving: Vec<LeavingClient>,
    /// The network interfaces on which the kernel receives reports, according to the configuration.
    #[serde(default)]
    pub interfaces: Vec<InterfaceStatus>,
}

/// How a daemon or an agent receives datagrams on a network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceStatus {
    pub name: String,
    /// `native`: the kernel receives datagrams in the interface's driver. `generic`: the kernel
    /// receives them in the network stack. `socket`: only the process receives them, on its socket.
    pub mode: String,
    /// Why `mode` is `socket`.
    pub why: Option<String>,
}

lb_core::named! {
    /// The order in which backends are shown. Failing backends always come first.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum SortBy {
        Address = "address",
        /// The largest share of the flows of the last minute first; without a daemon, of all flows.
        Share = "share",
        /// The most flows of the last minute first; without a daemon, of all flows.
        Flows = "flows",
        /// The most active flows first.
        Active = "active",
        /// The most failed connects of the last minute first.
        Failed = "failed",
        /// The slowest median connect first.
        Latency = "latency",
    }
}

impl SortBy {
    /// The sort key. Larger numbers come first.
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
    /// Removes everything that the filter excludes. If `only_failing` is set, only failing backends
    /// remain, with their services and clients. A fault remains if the filter
    /// [concerns](Filter::concerns) its subject.
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

    /// Sorts the backends of each service. Failing services, and clients with failing services,
    /// come first.
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

    pub fn client(&self, name: &str) -> Option<&ClientStatus> {
        self.clients.iter().find(|client| client.name == name)
    }
}

/// A client that is leaving, or a client with maps of another version of socklb, which this version
/// cannot read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeavingClient {
    pub client: String,
    /// The kernel ABI version of the client's maps.
    pub abi: u32,
    /// Whether the programs of the client's version are still attached, so that flows still start.
    pub in_force: bool,
    /// Active flows; `None` if they cannot be counted.
    pub active: Option<u64>,
}

impl LeavingClient {
    /// The client's state in words, to be printed after the client's name.
    pub fn describe(&self) -> String {
        let open = self.active.map_or_else(|| "?".to_owned(), |active| active.to_string());
        let what = if self.in_force { "is balancing connects" } else { "is leaving" };
        format!("{what}: {open} active flows")
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DaemonStatus {
    pub pid: u32,
    pub version: String,
    pub config: PathBuf,
    /// The directory of the daemon's pins. `None` for an older daemon, which does not report it.
    #[serde(default)]
    pub pins: Option<PathBuf>,
    /// Whether the kernel has each optional feature, keyed by the feature's name.
    pub features: BTreeMap<String, bool>,
    /// The offsets in bytes of the kernel structures' fields that the programs read, keyed by name
    /// (`sk_kern_sock_mask` is a mask). Empty if the kernel does not describe its types.
    pub offsets: BTreeMap<String, u32>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    pub name: String,
    /// The cgroup in the configuration; `None` without a daemon.
    pub configured_cgroup: Option<PathBuf>,
    /// The cgroup to which the client's programs are attached; `None` if they are not attached or
    /// the cgroup no longer exists.
    pub cgroup: Option<PathBuf>,
    /// The kernel's id of `cgroup`. A cgroup that is created again has another id.
    pub cgroup_id: Option<u64>,
    /// Other programs that run for the same sockets, in the order in which they run; `None` without
    /// a daemon.
    pub neighbours: Option<Vec<NeighbourProgram>>,
    /// The result of comparing flow records with the kernel's lists of sockets; `None` without a
    /// daemon.
    pub reclaim: Option<Reclaim>,
    /// Connects of the cgroup to addresses that are not services.
    pub not_a_service: u64,
    pub anomalies: AnomalyCounts,
    /// Services in the order of their indexes.
    pub services: Vec<ServiceStatus>,
}

impl ClientStatus {
    pub fn service(&self, name: &str) -> Option<&ServiceStatus> {
        self.services.iter().find(|service| service.name == name)
    }
}

/// The results of the daemon's passes over flow records. A pass searches for records of sockets
/// that are in none of the kernel's lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reclaim {
    /// Passes since the daemon started. The daemon makes no pass while no flow is open.
    pub passes: u64,
    /// Records reclaimed since the daemon started. No program saw the end of their flows.
    pub reclaimed: u64,
    /// Suspected records. The next pass reclaims a record if its socket is still missing.
    pub suspected: u64,
    /// Records that were not reclaimed because a process has the socket open. The socket is not
    /// connected.
    pub kept_open: u64,
    /// Records that were not reclaimed because the socket is in a network namespace that the daemon
    /// cannot inspect. No process is known to have the socket open.
    pub kept_elsewhere: u64,
}

/// Counts of events that should not happen, since the client's maps were created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnomalyCounts {
    /// Sockets of flows that closed without a record, including sockets that dialled another
    /// address after the flow began.
    pub close_without_record: u64,
    /// Flows that were established before a program saw their SYN.
    pub established_out_of_turn: u64,
    /// Records that two calls have ended at the same time.
    pub ended_twice: u64,
    /// Sockets that were released in a phase in which a program should already have seen the end of
    /// the flow.
    pub release_out_of_turn: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServiceStatus {
    pub name: String,
    /// The address that processes dial.
    pub address: SocketAddr,
    pub protocol: String,
    /// Whether connects are balanced. `false` if the service was removed and is only waiting for
    /// its last flow to end.
    pub open: bool,
    /// The number of times that the service's table was published, modulo 65,536.
    pub table_generation: u16,
    /// The number of entries of the service's table.
    pub table_entries: u32,
    /// The backend that a connect uses if it finds no entry and no member that is usable.
    pub fallback: Option<SocketAddr>,
    /// Outcomes of connects and addressed datagrams, keyed by
    /// [`Outcome::name`](abi::Outcome::name). Each call is counted once.
    pub outcomes: BTreeMap<String, u64>,
    /// Connects of the last minute that were refused because all backends had reached
    /// `active_limit`; `None` without a daemon, or if no `active_limit` is configured.
    #[serde(default)]
    pub limited_60s: Option<u64>,
    /// The duration of handshakes with the service's backends in the last minute; `None` without a
    /// daemon, without handshakes, or for a service over UDP.
    #[serde(default)]
    pub handshake_60s: Option<ConnectLatency>,
    /// Milliseconds after which a SYN is counted as unanswered, rounded to ticks of 1.05 ms; `None`
    /// for a service over UDP.
    #[serde(default)]
    pub unanswered_after_ms: Option<u64>,
    /// Whether so few backends are available that connects may choose ejected backends. Without a
    /// daemon: whether connects may choose them for any reason.
    #[serde(default)]
    pub is_panic: bool,
    #[serde(default)]
    pub ejection: EjectionMode,
    /// Seconds after which an unavailable backend is replaced; `None` without a daemon.
    #[serde(default)]
    pub replace_after_s: Option<f64>,
    /// The largest ratio of the actual share of a backend to its wanted share; `None` if the
    /// service has had at most ten connects per backend.
    pub skew: Option<f64>,
    /// The source of the service's endpoints; `None` without a daemon.
    pub source: Option<SourceStatus>,
    /// Endpoints that no task of the job uses; `None` without a daemon, or if every endpoint is
    /// used.
    #[serde(default)]
    pub unused: Option<UnusedEndpoints>,
    /// Endpoints that the list excludes from every connect, and that are therefore not among
    /// `backends`; empty without a daemon.
    #[serde(default)]
    pub not_chosen: Vec<NotChosen>,
    /// Load control and slow start, which change weights while the list is unchanged. `None` if the
    /// service has neither, or without a daemon.
    #[serde(default)]
    pub load: Option<ServiceLoadStatus>,
    /// The state of `rebalance`; `None` if `rebalance` is not configured, without a daemon, and
    /// before the daemon has first read the flows.
    #[serde(default)]
    pub rebalance: Option<RebalanceStatus>,
    /// In the order of their slots.
    pub backends: Vec<BackendStatus>,
}

impl ServiceStatus {
    /// Whether a backend fails, no backend may be chosen, or the list cannot be used. An operator
    /// should look at such services first.
    pub fn is_failing(&self) -> bool {
        let has_faulty_list = self.source.as_ref().is_some_and(|source| source.error.is_some());
        has_faulty_list
            || self.open && self.fallback.is_none()
            || self.backends.iter().any(BackendStatus::is_failing)
    }
}

#[cfg(test)]
impl ServiceStatus {
    /// An open TCP service with these backends, and defaults for everything else.
    pub fn with_backends(backends: Vec<BackendStatus>) -> Self {
        Self {
            name: "users".to_owned(),
            address: "10.96.0.10:80".parse().expect("the address is valid"),
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
            rebalance: None,
            backends,
        }
    }
}

/// The activity of `rebalance` for one service at one client task, or the reason why it closes
/// nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RebalanceStatus {
    /// The [name](lb_core::rebalance::RebalanceState::name) of the state.
    pub state: String,
    /// The backends that should get connections, or the ejected backend with a due trial.
    pub backends: Vec<ShortBackend>,
    /// Seconds until the next attempt; `None` if the next attempt does not wait for a time.
    pub retry_s: Option<u64>,
    /// The connections that `rebalance` has closed since the daemon started.
    pub closed: u64,
}

/// A backend with fewer connections than its share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShortBackend {
    pub address: SocketAddr,
    /// The task's open flows to the backend.
    pub open: u32,
    /// The backend's share of the task's open flows, in flows.
    pub share: f64,
}

/// An endpoint that no connect may choose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotChosen {
    pub address: SocketAddr,
    /// The name of the endpoint's health, from [`Health::name`](lb_core::health::Health::name).
    pub state: String,
    /// The source of this state: always `list`.
    pub witness: String,
}

impl fmt::Display for NotChosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, state, witness } = self;
        write!(f, "{address} {state} ({witness})")
    }
}

/// Endpoints that accept connections but that no task of a job uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnusedEndpoints {
    /// The number of unused endpoints.
    pub endpoints: u32,
    /// The number of endpoints that accept connections.
    pub of: u32,
    /// The smallest subset size with which every endpoint has a task; `None` if no allowed size is
    /// large enough.
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
        write!(f, "{endpoints} of {of} endpoints are used by no task of the job: set ")?;
        match size {
            Some(size) => write!(f, "size = {size} or more"),
            None => f.write_str("size = \"auto\""),
        }
    }
}

/// Whether failing backends are ejected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EjectionMode {
    On,
    /// Ejection is not configured.
    #[default]
    Off,
    /// Ejection is configured but has no effect, because the programs cannot read the causes of
    /// failures from the kernel. Only the daemon reports this state.
    CausesUnknown,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceStatus {
    /// The file; `None` for a static list, and for a list that a server sends.
    pub file: Option<PathBuf>,
    /// Seconds since the last read of the file without faults, or since the server last confirmed a
    /// list; `None` before the first such read or confirmation.
    pub good_for_s: Option<u64>,
    /// Why the last read of the list failed; `None` if the read succeeded.
    pub error: Option<String>,
    /// How many reads of the list have failed since the daemon started.
    pub failures: u64,
    /// The ignored parts of the list, each with the reason.
    #[serde(default)]
    pub notes: Vec<String>,
    /// The state of the server that sends the list; `None` for a file or a static list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteStatus>,
    /// Like [`RemoteStatus::certificate_expiry_s`], but for connections to the server that sends
    /// the address of the service; `None` also if the address is in the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address_certificate_expiry_s: Option<u64>,
}

impl SourceStatus {
    /// The earliest expiry of the certificates for the list's server and the address's server, in
    /// seconds since 1970.
    pub fn certificate_expiry_s(&self) -> Option<u64> {
        let of_list = self.remote.as_ref().and_then(|remote| remote.certificate_expiry_s);
        of_list.into_iter().chain(self.address_certificate_expiry_s).min()
    }
}

/// The state of a server that sends a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteStatus {
    /// The request, such as `dns users.example.com port 80`.
    pub origin: String,
    /// The version of the server's newest list, as the server reports it; empty if it reports none.
    pub version: String,
    /// The number of endpoints of the server's newest list, even if the list is not in force;
    /// `None` before the first list.
    pub endpoints: Option<u64>,
    /// The number of different answers of the server since the daemon started.
    pub lists: u64,
    /// Seconds until the next query; `None` while a query is under way. The query may wait for a
    /// change.
    pub next_s: Option<u64>,
    /// The number of seconds for which the server has answered that there are no endpoints; `None`
    /// if its last answer was a list.
    pub empty_s: Option<u64>,
    /// The number of endpoints that the server's newest list removes, and that remain in force
    /// until the server repeats this list.
    pub pending_removals: u64,
    /// The treatment of connects while the server's list is suspended: `refuse` or `pass`; `None`
    /// if the list is not suspended.
    pub suspension: Option<String>,
    /// The earliest expiry of the certificates that connections to the server require, in seconds
    /// since 1970; `None` without TLS, or before the first connection.
    #[serde(default)]
    pub certificate_expiry_s: Option<u64>,
}

impl RemoteStatus {
    /// A line for people. `confirmed_s`: seconds since the server last confirmed a list.
    /// `has_fault`: whether the source has a fault; then the query may repeat a failed one.
    pub fn describe(&self, confirmed_s: Option<u64>, has_fault: bool) -> String {
        let Self { origin, version, endpoints, next_s, .. } = self;
        let version = if version.is_empty() { String::new() } else { format!(", version {version}") };
        let endpoints =
            endpoints.map_or_else(String::new, |endpoints| format!(", {}", counted(endpoints, "endpoint")));
        let confirmed = confirmed_s
            .map_or_else(|| ", not confirmed".to_owned(), |seconds| format!(", confirmed {seconds} s ago"));
        let next = match next_s {
            Some(seconds) => format!(", next query in {seconds} s"),
            // A DNS server answers at once; the other servers delay their answers, except to a
            // query that repeats a failed one.
            None if !has_fault && self.endpoints.is_some() && !origin.starts_with("dns ") => {
                ", waits for a change".to_owned()
            }
            None => String::new(),
        };
        format!("from {origin}{version}{endpoints}{confirmed}{next}")
    }
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

/// A program that runs for this client's sockets but does not belong to this client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeighbourProgram {
    /// The cgroup to which the program is attached.
    pub cgroup: PathBuf,
    pub hook: String,
    /// The kernel's id of the program.
    pub program: u32,
    /// The program's name; `None` without the privilege to read it (CAP_SYS_ADMIN).
    pub name: Option<String>,
    /// Whether the program belongs to a socklb, according to its name. If names cannot be read, the
    /// program is assumed to belong to a socklb if there is an unnamed program at every hook that
    /// socklb uses.
    #[serde(default)]
    pub is_socklb: bool,
    /// Whether the program runs after socklb's program. A program that runs after it reads the
    /// destination that socklb's program has written, and may replace the destination.
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

    /// Checks which backends of each client and service remain, and the number of faults.
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
    fn a_filter_retains_its_faults_and_those_of_the_host() {
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
    fn failing_backends_come_first_in_every_order() {
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

    #[test]
    fn the_line_of_a_server_shows_whether_a_query_waits_for_a_change() {
        let remote = RemoteStatus {
            origin: "consul users".to_owned(),
            version: "7".to_owned(),
            endpoints: Some(3),
            lists: 1,
            next_s: None,
            empty_s: None,
            pending_removals: 0,
            suspension: None,
            certificate_expiry_s: None,
        };
        let text = "from consul users, version 7, 3 endpoints, confirmed 4 s ago";
        assert_eq!(remote.describe(Some(4), false), format!("{text}, waits for a change"));
        assert_eq!(remote.describe(Some(4), true), text);
        let next = RemoteStatus { next_s: Some(2), ..remote.clone() };
        assert_eq!(next.describe(Some(4), true), format!("{text}, next query in 2 s"));
        let dns = RemoteStatus { origin: "dns users.example.com port 80".to_owned(), ..remote.clone() };
        assert!(dns.describe(Some(4), false).ends_with("confirmed 4 s ago"));
        let unanswered = RemoteStatus { endpoints: None, version: String::new(), ..remote };
        assert_eq!(unanswered.describe(None, false), "from consul users, not confirmed");
    }
}
