//! The stage of the scripts: a daemon without a host. It consists of the controller, the code of
//! `crate::daemon` that reads files, and a kernel, a disk and a network in memory, all in virtual
//! time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use lb_common::abi::BackendState;
use lb_common::ending::Ending;
use lb_common::net::{Be16, Be32, socket_addr};
use lb_config::discovery::DnsSettings;
use lb_core::endpoint::EndpointList;
use lb_core::feed::{ReadFailure, Version};
use lb_core::health::{Health, Why};
use lb_core::limits::Limits;
use lb_core::membership::Assignments;
use lb_core::service::Protocol;
use lb_discovery::{
    DiscoveredList, DiscoveryRequest, Failure, Finding, HostName, HostTable, Latest, StoredAddresses,
};
use lb_fake::{Connect, FakeCgroup, FakeFlow, FakeKernel};
use lb_host::store::StoreError;
use lb_kernel::{Features, Kernel as _, Pass, Pins, ServiceView, SlotView, Suspects};
use lb_report::keys::{Keys, Numbered, ServiceKey};
use lb_report::wire::{Datagram, Kind, Readiness, UNKNOWN};
use lb_view::backend::BackendStatus;
use lb_view::close_result::CloseAnswer;
use lb_view::explanation::Explanation;
use lb_view::status::{ClientStatus, ServiceStatus, StatusDocument};
use lb_view::text::Style;
use tokio::sync::watch;

use crate::close_jobs::{CloseCause, CloseJob, CloseRequester};
use crate::config::addresses::{self, AddressSource, KnownAddresses, WithAddresses};
use crate::config::{self, Config};
use crate::controller::client_task::ClientTask;
use crate::controller::exchange::{Exchange, ReportStore};
use crate::controller::{
    BackgroundWork, Clock, Controller, Effect, Environment, Event, Loaded, NamespaceFound, Network, Notice,
    OverridesRead, ReceiveAt, StoreFailures, StoredRead, StoredState, Tried, WorkResult,
};
use crate::daemon::{FileIo, Files, ListReader, Servers, Watches, Worker};
use crate::output::status;
use crate::probes::{ConnectTarget, Findings, ProbedHealth};
use crate::reports::{ReportExchanger, SharedExchange};
use crate::source::{Contents, NoAnswer, SourceError, Stamp, last_good};

/// The service that the client dials, and its backends at the start.
pub const SERVICE: &str = "10.96.0.10:80";
pub const BACKENDS: [&str; 3] = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"];
pub const FAULTS_PER_MILLE: u64 = 100;
pub const SEED: u64 = 20_261_127;
/// The paths of the configuration, the list and the pins.
pub const CONFIG: &str = "/etc/socklb/socklb.toml";
pub const LIST: &str = "/lists/users.toml";
pub const PINS: &str = "/sys/fs/bpf";
/// Once the faults have stopped, the daemon completes all work that is possible within this number
/// of wake-ups, one per second: the longest pause after failures is 60 s.
const SETTLED: u32 = 64;
/// The number of wake-ups after a script without faults. Then only work that waits for a time is
/// left.
const CALM: u32 = 8;
/// The maximum number of attempts to start. The probability that all of them fail is negligible.
const STARTS: u32 = 100;

/// The limits are small, so that checking all of the maps is cheap.
const LIMITS: Limits = Limits { schedule_entries: 1 << 15, flow_records: 64, slots: 512 };

pub const SECOND: Duration = Duration::from_secs(1);

/// The pins of a client.
pub fn pins_of(client: &str) -> Pins {
    Pins::of(Path::new(PINS), client)
}

/// The text of a file with a list of these backends.
pub fn list_of(backends: &[&str]) -> String {
    backends.iter().map(|backend| format!("[[endpoint]]\naddress = \"{backend}\"\n")).collect()
}

pub fn address(text: &str) -> SocketAddr {
    text.parse().expect("the text is an address")
}

/// The files of a host.
#[derive(Default)]
pub struct Disk(Mutex<DiskState>);

#[derive(Default)]
struct DiskState {
    /// Keyed by path: the number of changes of the disk up to the file's last write, and the file's
    /// content.
    files: BTreeMap<PathBuf, (u64, Vec<u8>)>,
    changes: u64,
    /// Paths that can be neither read nor written. This includes files below them.
    broken: BTreeSet<PathBuf>,
    /// Paths whose file system does not answer; this includes files below them.
    hung_paths: BTreeSet<PathBuf>,
}

impl Disk {
    fn state(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn write(&self, path: impl AsRef<Path>, text: impl AsRef<[u8]>) {
        let mut state = self.state();
        state.changes += 1;
        let version = state.changes;
        state.files.insert(path.as_ref().to_owned(), (version, text.as_ref().to_owned()));
    }

    pub fn remove(&self, path: impl AsRef<Path>) {
        self.state().files.remove(path.as_ref());
    }

    /// Makes all access to a path and to files below it fail from now on, or work again.
    pub fn set_broken(&self, path: impl AsRef<Path>, is_broken: bool) {
        let (mut state, path) = (self.state(), path.as_ref().to_owned());
        if is_broken {
            state.broken.insert(path)
        } else {
            state.broken.remove(&path)
        };
    }

    /// Makes the file system of a path and of files below it stop answering, or answer again.
    pub fn set_hung(&self, path: impl AsRef<Path>, is_hung: bool) {
        let (mut state, path) = (self.state(), path.as_ref().to_owned());
        if is_hung {
            state.hung_paths.insert(path)
        } else {
            state.hung_paths.remove(&path)
        };
    }

    fn access(&self, path: &Path) -> Result<(), NoAnswer> {
        let is_hung = self.state().hung_paths.iter().any(|hung_paths| path.starts_with(hung_paths));
        if is_hung { Err(NoAnswer::Hung(path.to_owned())) } else { Ok(()) }
    }

    /// Reads the stamp of a path, as `crate::daemon` does.
    fn look(&self, path: &Path) -> Result<Option<Stamp>, NoAnswer> {
        self.access(path).map(|()| self.stamp(path))
    }

    pub fn content(&self, path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
        let state = self.state();
        if state.broken.iter().any(|broken| path.as_ref().starts_with(broken)) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let file = state.files.get(path.as_ref());
        file.map(|(_, text)| text.clone()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn try_to_write(&self, path: &Path, text: impl AsRef<[u8]>) -> Result<(), StoreError> {
        match self.content(path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(StoreError::Write { path: path.to_owned(), source })
            }
            _ => {
                self.write(path, text);
                Ok(())
            }
        }
    }

    pub fn below(&self, directory: &str) -> Vec<PathBuf> {
        self.state().files.keys().filter(|path| path.starts_with(directory)).cloned().collect()
    }
}

impl Files for Disk {
    fn stamp(&self, path: &Path) -> Option<Stamp> {
        self.state().files.get(path).map(|(version, _)| Stamp::numbered(*version))
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        match self.content(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            found => found.map(|_| true),
        }
    }

    fn version(&self, path: &Path) -> Version<Stamp> {
        Version { stamp: self.stamp(path), is_settled: true }
    }

    fn read(&self, path: &Path) -> Result<Vec<u8>, SourceError> {
        self.access(path)?;
        self.content(path).map_err(|source| SourceError::Read { path: path.to_owned(), source })
    }

    fn read_stored(&self, path: &Path, most: u64) -> Result<Vec<u8>, SourceError> {
        let text = self.read(path)?;
        if text.len() as u64 > most { Err(SourceError::TooLarge(path.to_owned(), most)) } else { Ok(text) }
    }

    fn rename_stored(&self, path: &Path, to: &Path) -> Result<(), StoreError> {
        let fail = |source| StoreError::Write { path: to.to_owned(), source };
        let text = self.content(path).map_err(fail)?;
        self.remove(path);
        self.write(to, text);
        Ok(())
    }

    fn remove_stored(&self, path: &Path) -> Result<(), StoreError> {
        self.try_to_write(path, "")?;
        self.remove(path);
        Ok(())
    }

    fn store(&self, path: &Path, text: &[u8]) -> Result<(), StoreError> {
        self.try_to_write(path, last_good::whole(text))
    }

    /// Unlike on a host, a file with equal content is written again, so that scripts detect
    /// unnecessary writes.
    fn publish(&self, directory: &Path, name: &Path, text: &[u8]) -> Result<(), StoreError> {
        self.try_to_write(&directory.join(name), text)
    }

    fn withdraw(&self, directory: &Path, name: &Path) -> Result<(), StoreError> {
        let path = directory.join(name);
        self.try_to_write(&path, "")?;
        self.remove(path);
        Ok(())
    }
}

/// Servers with the answers that a script sets. Until a script sets an answer, queries fail.
pub struct ScriptedServers(Mutex<ServersState>);

struct ServersState {
    finding: Finding,
    queried: Vec<(DiscoveryRequest, watch::Sender<Latest>)>,
    /// The server's answers about host names: addresses, or why there are none. For a name with
    /// `None` there is no answer; for a name that is not in the map the answer is NXDOMAIN.
    named: BTreeMap<String, Option<Result<Vec<IpAddr>, String>>>,
    /// When a certificate for the server expires; `None` without TLS.
    expires: Option<SystemTime>,
    hosts: watch::Sender<Arc<HostTable>>,
    now: Instant,
}

impl ServersState {
    /// Answers queries for these host names.
    fn resolve(&mut self, hosts: &BTreeSet<HostName>) {
        let mut table = HostTable::clone(&self.hosts.borrow());
        for host in hosts {
            let state = table.0.entry(host.clone()).or_default();
            let nothing = Some(Err("NXDOMAIN".to_owned()));
            let answer = self.named.get(&*host.name).unwrap_or(&nothing);
            let Some(answer) = answer else { continue };
            let answer = answer.clone().map(|addresses| addresses.into_iter().collect());
            state.take(answer, self.now);
        }
        self.hosts.send_replace(Arc::new(table));
    }
}

impl ScriptedServers {
    fn new(now: Instant) -> Self {
        let finding = Finding::Failed(Failure::Unreachable("10.0.0.53:53: no answer".to_owned()));
        let (queried, named, hosts, expires) = Default::default();
        Self(Mutex::new(ServersState { finding, queried, named, expires, hosts, now }))
    }

    fn state(&self) -> MutexGuard<'_, ServersState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets every server answer once, at this time.
    fn answer(&self, finding: Finding, now: Instant) {
        let mut state = self.state();
        state.now = now;
        for (_, sender) in &state.queried {
            sender.send_modify(|latest| {
                latest.take(finding.clone(), None, now);
                latest.expires = state.expires;
            });
        }
        state.finding = finding;
    }

    fn query_only(&self, wanted: &[DiscoveryRequest]) {
        self.state().queried.retain(|(other, _)| wanted.contains(other));
        wanted.iter().for_each(|wanted| drop(self.query(wanted.clone())));
    }

    fn answers(&self) -> Event {
        let state = self.state();
        let latest = |(wanted, sender): &(DiscoveryRequest, watch::Sender<Latest>)| {
            (wanted.clone(), sender.borrow().clone())
        };
        let hosts = Arc::clone(&state.hosts.borrow());
        Event::Answered(state.queried.iter().map(latest).collect(), hosts)
    }

    fn resolve_only(&self, hosts: &BTreeSet<HostName>) {
        let mut state = self.state();
        let mut table = HostTable::clone(&state.hosts.borrow());
        table.0.retain(|host, _| hosts.contains(host));
        let new = hosts.iter().filter(|host| !table.0.contains_key(host)).cloned().collect();
        state.hosts.send_replace(Arc::new(table));
        state.resolve(&new);
    }

    fn resolve_again(&self, hosts: &BTreeSet<HostName>, now: Instant) {
        let mut state = self.state();
        state.now = now;
        state.resolve(hosts);
    }

    /// Changes the server's answer for a host name, as if each query for it had been answered once.
    fn name(&self, name: &str, answer: Option<Result<Vec<IpAddr>, String>>, now: Instant) {
        let mut state = self.state();
        state.now = now;
        state.named.insert(name.to_owned(), answer);
        let asked = state.hosts.borrow().0.keys().filter(|host| &*host.name == name).cloned().collect();
        state.resolve(&asked);
    }
}

impl Servers for ScriptedServers {
    fn query(&self, wanted: DiscoveryRequest) -> watch::Receiver<Latest> {
        let mut state = self.state();
        if let Some((_, sender)) = state.queried.iter().find(|(other, _)| *other == wanted) {
            return sender.subscribe();
        }
        let mut latest = Latest::default();
        latest.take(state.finding.clone(), None, state.now);
        let (sender, receiver) = watch::channel(latest);
        state.queried.push((wanted, sender));
        receiver
    }

    fn host_table(&self) -> Arc<HostTable> {
        Arc::clone(&self.state().hosts.borrow())
    }

    fn resolve(&self, hosts: BTreeSet<HostName>, _: &DnsSettings) -> watch::Receiver<Arc<HostTable>> {
        let mut state = self.state();
        state.resolve(&hosts);
        state.hosts.subscribe()
    }

    fn adopt(&self, stored: StoredAddresses, _: &DnsSettings) {
        let mut state = self.state();
        let mut table = HostTable::clone(&state.hosts.borrow());
        let hosts = stored.keys().cloned().collect();
        for (host, stored) in stored {
            table.0.entry(host).or_default().adopt(stored);
        }
        state.hosts.send_replace(Arc::new(table));
        state.resolve(&hosts);
    }
}

/// A network in which connect probes have the results that a script sets. Agents answer at once, or
/// not at all.
#[derive(Clone, Default)]
pub struct Wire(Arc<Mutex<WireState>>);

#[derive(Default)]
struct WireState {
    /// The CLOCK_MONOTONIC time.
    now: Duration,
    targets: BTreeSet<ConnectTarget>,
    found: BTreeMap<SocketAddr, ProbedHealth>,
    version: u64,
    /// Whether another process uses the port for reports.
    is_taken: bool,
    /// The daemon's side of the exchange with agents, if the daemon listens.
    listener: Option<Arc<Mutex<SharedExchange>>>,
    /// The agents, keyed by backend.
    agents: BTreeMap<SocketAddr, ScriptedAgent>,
}

/// The report of an agent about its backend.
#[derive(Clone, Copy, Debug)]
pub struct ScriptedAgent {
    pub readiness: Readiness,
    /// Requests per second, errors per second, and utilization, all in thousandths.
    pub load: [u32; 3],
    /// The id of the agent's key.
    pub key: u16,
    /// Rises with each start of the agent; `counter` rises with each change.
    pub incarnation: u32,
    pub counter: u32,
    /// Whether the agent does not answer.
    pub is_silent: bool,
}

impl Default for ScriptedAgent {
    fn default() -> Self {
        let load = [UNKNOWN; 3];
        Self { readiness: Readiness::Ready, load, key: 1, incarnation: 1, counter: 1, is_silent: false }
    }
}

impl ScriptedAgent {
    /// The agent's answer to a request; `None` if the request does not parse.
    fn answer(&self, request: &[u8]) -> Option<Datagram> {
        let mut report = Datagram::parse(request).ok()?;
        let backend = socket_addr(report.address, report.port);
        let key = Keys::new(key(self.key), None).of_backend(Protocol::Tcp, backend).current().key.wire();
        report.kind = Kind::Answer as u8;
        report.readiness = self.readiness as u8;
        report.key_id = Be16::from_host(self.key);
        report.incarnation = Be32::from_host(self.incarnation);
        report.counter = Be32::from_host(self.counter);
        [report.qps, report.eps, report.utilization] = self.load.map(Be32::from_host);
        report.hold = Be32::from_host(60_000);
        report.valid_for = Be32::from_host(10_000);
        Some(report.sealed(key))
    }
}

/// A service key with this id.
fn key(id: u16) -> Numbered<ServiceKey> {
    Numbered { id, key: ServiceKey::from_bytes([id.to_be_bytes()[1]; 32]) }
}

impl Wire {
    fn with<T>(&self, act: impl FnOnce(&mut WireState) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Polls the agents that are due, and handles their answers. Returns when the next agent is
    /// due, and whether the health of a backend has changed; `None` if the daemon does not listen.
    fn poll_agents(&self) -> Option<(Duration, bool)> {
        let (shared, agents, now) =
            self.with(|state| (state.listener.clone(), state.agents.clone(), state.now));
        let shared = shared?;
        let exchange = &mut shared.lock().unwrap_or_else(PoisonError::into_inner).exchange;
        let mut is_news = false;
        // Bound: each agent that is due is polled once, in batches.
        loop {
            let turn = exchange.turn(now);
            is_news |= turn.is_news;
            for (_, request) in &turn.requests {
                exchange.counts.requests += 1;
                let datagram = Datagram::parse(request).expect("the request is valid");
                let agent = agents.get(&socket_addr(datagram.address, datagram.port));
                let answer = agent.filter(|agent| !agent.is_silent).and_then(|agent| agent.answer(request));
                if let Some(answer) = answer {
                    is_news |= exchange.take(answer.bytes(), now);
                }
            }
            if turn.requests.is_empty() {
                return Some((now + turn.next, is_news));
            }
        }
    }

    /// Makes another process use the port for reports, or frees the port again.
    pub fn take_port(&self, is_taken: bool) {
        self.with(|state| state.is_taken = is_taken);
    }

    /// The backends that the daemon probes.
    pub fn probed(&self) -> BTreeSet<SocketAddr> {
        self.with(|state| state.targets.iter().map(|target| target.at).collect())
    }
}

impl Network for Wire {
    fn probe(&mut self, targets: &BTreeMap<ConnectTarget, String>) {
        self.with(|state| {
            state.targets = targets.keys().cloned().collect();
            state.version += 1;
        });
    }

    fn hold_back(&self, _: Duration) {}

    fn version(&self) -> u64 {
        self.with(|state| state.version)
    }

    fn results(&self) -> BTreeMap<ConnectTarget, ProbedHealth> {
        self.with(|state| {
            let targets = state.targets.iter();
            targets.filter_map(|target| Some((target.clone(), *state.found.get(&target.at)?))).collect()
        })
    }

    fn findings(&self, target: &ConnectTarget) -> Option<Findings> {
        let found = self.with(|state| state.found.get(&target.at).copied())?;
        let mut findings = Findings::default();
        findings.probes = 1;
        findings.failure = (found.health != Health::Healthy).then(|| "connection refused".to_owned());
        Some(findings)
    }

    fn listen(&mut self, _: SocketAddr, store: ReportStore) -> io::Result<ReportExchanger> {
        if self.with(|state| state.is_taken) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let mut nonces = 0;
        let nonce = move || {
            nonces += 1;
            nonces
        };
        let shared = SharedExchange::new(Exchange::new(SEED, store, Box::new(nonce)));
        self.with(|state| state.listener = Some(Arc::clone(&shared)));
        let wire = self.clone();
        let now = Box::new(move || wire.with(|state| state.now));
        ReportExchanger::over(shared, Arc::default(), address("10.0.9.9:9467"), now)
    }

    fn receive(&mut self, _: Option<ReceiveAt>) {}

    fn interfaces(&self) -> Vec<lb_view::status::InterfaceStatus> {
        Vec::new()
    }

    fn interface_faults(&self) -> Vec<String> {
        Vec::new()
    }
}

/// An environment without variables and files, in which a configuration is read.
struct Nothing;

impl config::ProcessEnvironment for Nothing {
    /// The name of a key file consists of the ids of its keys, for example `2-1`.
    fn service_keys(&self, path: &Path) -> Result<Keys<ServiceKey>, String> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let mut keys = name.split('-').map(str::parse).map_while(Result::ok).map(key);
        let first = keys.next().ok_or_else(|| format!("{}: there is no such file", path.display()))?;
        Ok(Keys::new(first, keys.next()))
    }
}

fn read_config(disk: &Disk, known: &KnownAddresses) -> Result<Config, ReadFailure> {
    disk.access(Path::new(CONFIG)).map_err(|no_answer| ReadFailure::Hung(no_answer.to_string()))?;
    let text = disk.content(CONFIG).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => ReadFailure::Faulty(error.to_string()),
        _ => ReadFailure::Unread(error.to_string()),
    })?;
    let text = String::from_utf8(text).map_err(|error| ReadFailure::Faulty(error.to_string()))?;
    let parsed = config::parse(
        &text,
        Path::new(CONFIG),
        &WithAddresses { env: &Nothing, addresses: AddressSource::Known(known) },
    );
    let mut config = parsed.map_err(|faults| ReadFailure::Faulty(faults.to_string()))?;
    if !text.contains("[limits]") {
        config.limits = LIMITS;
    }
    config.paths.pins = PathBuf::from(PINS);
    Ok(config)
}

/// The lines that all daemons of a stage have logged.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// When a script's daemon is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    Never,
    /// After this number of further steps. A step is an event that the controller handles, or an
    /// effect that is executed.
    AfterSteps(u32),
    /// After the step in which an operation of the kernel fails for the first time: no effect of
    /// that step is executed.
    AtFailure,
}

/// A client that makes connects, and a daemon that may or may not run.
pub struct Stage {
    pub kernel: FakeKernel,
    pub disk: Arc<Disk>,
    pub wire: Wire,
    servers: Arc<ScriptedServers>,
    /// The lists for which the daemon has queried again.
    pub queried_again: Vec<DiscoveryRequest>,
    /// The cgroup of the client `web`.
    pub place: FakeCgroup,
    pub controller: Option<Controller>,
    /// Additional lines of the service.
    lines: String,
    /// The names of the clients, each with its cgroup.
    clients: Vec<(String, String)>,
    start: Instant,
    pub now: Instant,
    /// For how long the host has been suspended, and by how much its wall clock was set ahead.
    pub suspended: Duration,
    pub wall_ahead: Duration,
    clock: Clock,
    worker: Worker,
    runtime: tokio::runtime::Runtime,
    /// Events that the controller has not handled yet.
    inbox: VecDeque<Event>,
    /// Whether each event except queries and SIGHUP arrives twice, and a result of the last work of
    /// each kind (`late`, with the number of the work) once more after the next reload.
    pub repeats: bool,
    late: Vec<(u64, WorkResult)>,
    /// Selects the work that hangs for now. `hung` contains the work that was selected and is not
    /// done yet.
    pub hangs: fn(&BackgroundWork) -> bool,
    /// Returns the answer to a job that closes connections, because the simulated kernel has no
    /// sockets.
    pub closes: fn(&CloseJob) -> CloseAnswer,
    pub hung: Vec<(u64, BackgroundWork)>,
    /// The notifications to the service manager without status lines; `state_line` is the last
    /// status line.
    pub notices: Vec<Notice>,
    pub state_line: String,
    /// The directories that are watched for changes of files.
    pub watched: BTreeSet<PathBuf>,
    /// Why the last daemon could not start.
    pub refused: String,
    /// The backends that any list has contained.
    listed: BTreeSet<SocketAddr>,
    /// The backends in the daemon's plans that do not leave. Until the maps match the plans, also
    /// those in all plans since the maps last matched.
    in_force: BTreeSet<SocketAddr>,
    /// The backends that refuse connects.
    pub dead: BTreeSet<SocketAddr>,
    /// The number of connects that were sent to each backend.
    pub sent: BTreeMap<SocketAddr, u64>,
    pub open: Vec<FakeFlow>,
    /// When the daemon is killed.
    pub death: Death,
    /// Whether `sent` and `open` contain all flows that the maps of the client `web` have counted.
    pub is_counted: bool,
    log: Log,
    _logs: tracing::subscriber::DefaultGuard,
}

/// Runs a script without faults, and again with a failure of every tenth kernel operation on
/// average and with repeated and late events. Then the faults stop, and within `SETTLED` wake-ups
/// the state must be the same as without faults.
pub fn script(lines: &str, act: impl Fn(&mut Stage)) {
    script_except(lines, |_| false, act);
}

/// Like [`script`], but the lines of the final state that `differs` selects may differ.
#[expect(clippy::print_stdout, reason = "it is shown if the script fails")]
pub fn script_except(lines: &str, differs: fn(&str) -> bool, act: impl Fn(&mut Stage)) {
    let mut expected = None;
    for per_mille in [0, FAULTS_PER_MILLE] {
        let mut stage = Stage::new(lines);
        println!("{per_mille} of 1,000 operations fail, seed {SEED}");
        if per_mille != 0 {
            stage.kernel.faults().fail_some(per_mille, SEED);
            stage.repeats = true;
        }
        stage.start(&BACKENDS);
        act(&mut stage);
        stage.check();
        if per_mille != 0 {
            assert!(stage.kernel.faults().failed() > 0, "no operation failed in the script");
        }
        let state = stage.end(differs, expected.as_ref());
        let expected = expected.get_or_insert_with(|| state.clone());
        assert_eq!(state, *expected, "the state after the faults");
    }
}

/// A second arrival of an event.
fn repeated(event: &Event) -> Option<Event> {
    match event {
        Event::Changed(paths) => Some(Event::Changed(paths.clone())),
        Event::Watched => Some(Event::Watched),
        Event::Wakeup => Some(Event::Wakeup),
        Event::Answered(answers, hosts) => Some(Event::Answered(answers.clone(), Arc::clone(hosts))),
        Event::HealthChanged => Some(Event::HealthChanged),
        Event::Done(number, result) => Some(Event::Done(*number, another(result))),
        // Each query and each SIGHUP is another one.
        Event::Query(_) | Event::Hangup => None,
    }
}

/// Another result of the same work: a failure if the work can fail. The controller must ignore a
/// result that arrives after the first one.
fn another(result: &WorkResult) -> WorkResult {
    let late = || "a late result".to_owned();
    match result {
        WorkResult::Looked { service, source, .. } => {
            let result = Err(NoAnswer::Hung(PathBuf::from(LIST)));
            WorkResult::Looked { service: service.clone(), source: source.clone(), result }
        }
        WorkResult::LookedAtConfig { is_due, .. } => {
            WorkResult::LookedAtConfig { is_due: *is_due, result: Err(NoAnswer::Hung(PathBuf::from(CONFIG))) }
        }
        WorkResult::Read { service, source, begun, version, .. } => WorkResult::Read {
            service: service.clone(),
            source: source.clone(),
            begun: *begun,
            version: *version,
            result: Some(Err(SourceError::CutOff(PathBuf::from(LIST)))),
        },
        WorkResult::StoredRead(stored) => {
            let StoredState { loads, overrides, overrides_aside, hosts } = &**stored;
            WorkResult::StoredRead(Box::new(StoredState {
                loads: loads.as_ref().map(|_| StoredRead::Unread(late())),
                overrides: overrides
                    .as_ref()
                    .map(|_| OverridesRead::of(StoredRead::Unread(late()), Err(late()))),
                overrides_aside: overrides_aside.as_ref().map(|_| Vec::new()),
                hosts: hosts.as_ref().map(|_| StoredRead::Unread(late())),
            }))
        }
        WorkResult::Stored(_) => {
            WorkResult::Stored(StoreFailures { error: Some(late()), ..StoreFailures::default() })
        }
        WorkResult::EnvoyFilesWritten(results) => {
            WorkResult::EnvoyFilesWritten(results.keys().map(|file| (file.clone(), Some(late()))).collect())
        }
        WorkResult::Computed { service, contents } => {
            let assignments = Assignments::new(EndpointList::default());
            let contents = Contents { assignments, ..contents.clone() };
            WorkResult::Computed { service: service.clone(), contents }
        }
        WorkResult::Loaded(loaded) => {
            let config = Err(ReadFailure::Faulty(late()));
            WorkResult::Loaded(Box::new(Loaded::of(loaded.version, config, loaded.begun)))
        }
        WorkResult::Opened(tried) => {
            let (clients, by_service) = (tried.clients.clone(), tried.by_service.clone());
            WorkResult::Opened(Box::new(Tried { clients, opened: Vec::new(), by_service }))
        }
        WorkResult::ReadersGone(_) => WorkResult::ReadersGone(Ok(())),
        WorkResult::Reclaimed(..) => {
            WorkResult::Reclaimed(Pass { clients: Vec::new(), holders: Ok(()) }, Suspects::default())
        }
        WorkResult::NamespacesFound(_) => WorkResult::NamespacesFound(Vec::new()),
        WorkResult::FlowsClosed(order, answer, requester) => {
            let cause = match requester {
                CloseRequester::Operator(..) => CloseCause::Operator,
                CloseRequester::Daemon(cause) => *cause,
            };
            WorkResult::FlowsClosed(order.clone(), answer.clone(), CloseRequester::Daemon(cause))
        }
    }
}

pub fn cgroup_path(name: &str) -> PathBuf {
    Path::new("/sys/fs/cgroup").join(name)
}

impl Stage {
    /// A host on which no daemon has run. Its client `web` has a service with these lines.
    pub fn new(lines: &str) -> Self {
        let kernel = FakeKernel::new().expect("memory is available");
        let (now, disk) = (Instant::now(), Arc::new(Disk::default()));
        let (reread, servers) = (Arc::clone(&disk), Arc::new(ScriptedServers::new(now)));
        let worker = Worker::new(
            ListReader::new(
                FileIo::new(Arc::clone(&disk) as Arc<dyn Files>),
                Arc::clone(&servers) as Arc<dyn Servers>,
            ),
            PathBuf::from(CONFIG),
            Arc::new(move |known| read_config(&reread, known)),
            PathBuf::from("/var/lib/socklb"),
            Watches::default(),
            Arc::new(kernel.clone()),
            true,
        );
        let log = Log::default();
        let writer = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("the runtime starts");
        let mut stage = Self {
            place: kernel.make_cgroup(&cgroup_path("web")),
            controller: None,
            lines: String::new(),
            clients: vec![("web".to_owned(), "web".to_owned())],
            start: now,
            now,
            clock: Clock::new(now, SECOND),
            suspended: Duration::ZERO,
            wall_ahead: Duration::ZERO,
            worker,
            runtime,
            inbox: VecDeque::new(),
            repeats: false,
            late: Vec::new(),
            hangs: |_| false,
            closes: |job| panic!("a job closes connections, but the script has not set `closes`: {job:?}"),
            hung: Vec::new(),
            notices: Vec::new(),
            state_line: String::new(),
            watched: BTreeSet::new(),
            refused: String::new(),
            listed: BTreeSet::new(),
            in_force: BTreeSet::new(),
            dead: BTreeSet::new(),
            sent: BTreeMap::new(),
            open: Vec::new(),
            death: Death::Never,
            is_counted: true,
            _logs: tracing::subscriber::set_default(subscriber),
            log,
            kernel,
            disk,
            wire: Wire::default(),
            servers,
            queried_again: Vec::new(),
        };
        stage.write_config(lines);
        stage
    }

    /// Writes the configuration; the service has these lines.
    pub fn write_config(&mut self, lines: &str) {
        lines.clone_into(&mut self.lines);
        let client = |(name, cgroup): &(String, String)| {
            format!("[[client]]\njob = \"{name}\"\ncgroup = \"{cgroup}\"\n")
        };
        let clients: String = self.clients.iter().map(client).collect();
        let unless = |key: &str, line| if lines.contains(key) { "" } else { line };
        let source = unless("backends", "backends = { file = \"/lists/users.toml\" }\n");
        let subset = unless("subset", "subset = { size = 256 }\n");
        let service =
            format!("[[service]]\nname = \"users\"\naddress = \"{SERVICE}\"\n{source}{subset}{lines}\n");
        self.disk.write(CONFIG, clients + &service);
    }

    /// Writes the configuration with these clients, each with its cgroup.
    pub fn write_clients(&mut self, clients: &[(&str, &str)]) {
        let owned = |(name, cgroup): &(&str, &str)| ((*name).to_owned(), (*cgroup).to_owned());
        self.clients = clients.iter().map(owned).collect();
        let lines = self.lines.clone();
        self.write_config(&lines);
    }

    pub fn config_text(&self) -> String {
        String::from_utf8(self.disk.content(CONFIG).expect("the file exists")).expect("the file is text")
    }

    /// Replaces a text in the configuration, and lets the daemon reload it.
    pub fn reconfigure(&mut self, text: &str, instead: &str) {
        let before = self.config_text();
        assert!(before.contains(text), "{text} is not in {before}");
        self.write_text(&before.replace(text, instead));
        self.dispatch(Event::Hangup);
        self.settle();
    }

    pub fn write_text(&mut self, text: &str) {
        self.disk.write(CONFIG, text);
    }

    /// Writes a list of these backends.
    pub fn write_list(&mut self, backends: &[&str]) {
        self.listed.extend(backends.iter().filter_map(|backend| backend.parse::<SocketAddr>().ok()));
        self.disk.write(LIST, list_of(backends));
    }

    /// Writes this list and starts a daemon, after killing any earlier daemon. Repeats this until
    /// the start succeeds.
    pub fn start(&mut self, backends: &[&str]) {
        self.write_list(backends);
        self.try_to_start(STARTS);
        assert!(self.controller.is_some(), "the daemon did not start");
        self.settle();
    }

    /// Starts a daemon, with at most `starts` attempts.
    pub fn try_to_start(&mut self, starts: u32) {
        for _ in 0..starts {
            self.kill();
            let stored = self.disk.content(addresses::path(Path::new("/var/lib/socklb"))).unwrap_or_default();
            let known = addresses::parse(&stored);
            let config = read_config(&self.disk, &known).unwrap_or_else(|failure| panic!("{failure:?}"));
            let version = self.disk.version(Path::new(CONFIG));
            let network = Box::new(self.wire.clone());
            let mut controller = Controller::new(&config, version, self.environment(), network, self.wall());
            let effects = controller.begin(config, self.now);
            self.controller = Some(controller);
            self.follow_plans();
            self.carry_out(effects);
            self.run();
            if self.controller.as_ref().is_some_and(Controller::is_open) {
                return;
            }
        }
    }

    /// Kills the daemon. Its pending work is discarded.
    pub fn kill(&mut self) {
        self.wire.with(|state| {
            let WireState { agents, now, is_taken, .. } = std::mem::take(state);
            *state = WireState { agents, now, is_taken, ..WireState::default() };
        });
        self.controller = None;
        self.servers.query_only(&[]);
        self.servers.resolve_only(&BTreeSet::new());
        self.inbox.clear();
        self.late.clear();
        self.hung.clear();
    }

    fn environment(&self) -> Environment {
        Environment {
            kernel: Arc::new(self.kernel.clone()),
            features: Features { socket_errors: true, outcomes_at_release: true, ..Features::default() },
            clock: self.clock,
            host: "host".to_owned(),
            pid: 1,
            descriptors: u64::MAX,
            namespace_warning: None,
            jitter: 0,
            threads: 1,
            stopping: Arc::default(),
        }
    }

    fn wall(&self) -> SystemTime {
        let running = self.clock.monotonic(self.now) + self.suspended + self.wall_ahead;
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000) + running
    }

    /// Passes an event to the controller, and carries out its effects.
    pub fn dispatch(&mut self, event: Event) {
        self.inbox.push_back(event);
        self.run();
    }

    /// Lets the controller handle all events.
    fn run(&mut self) {
        while !self.dies() {
            let Some(event) = self.inbox.pop_front() else { return };
            let repeated = self.repeats.then(|| repeated(&event)).flatten();
            if self.repeats
                && let Event::Done(number, result) = &event
            {
                let kind = std::mem::discriminant(result);
                self.late.retain(|(_, other)| std::mem::discriminant(other) != kind);
                self.late.push((*number, another(result)));
            }
            let is_load = matches!(event, Event::Done(_, WorkResult::Loaded(_)));
            self.handle(event);
            if let Some(event) = repeated {
                self.handle(event);
            }
            if is_load {
                let late = std::mem::take(&mut self.late);
                late.into_iter().for_each(|(number, result)| self.handle(Event::Done(number, result)));
            }
        }
    }

    fn handle(&mut self, event: Event) {
        let (now, wall) = (self.now, self.wall());
        let boot = self.clock.monotonic(now) + self.suspended;
        let Some(controller) = &mut self.controller else { return };
        let result = controller.handle(event, now, wall, boot);
        self.follow_plans();
        match result {
            Ok(effects) => self.carry_out(effects),
            Err(error) => {
                self.refused = format!("{error:#}");
                self.kill();
            }
        }
    }

    /// Updates `in_force` after an event.
    fn follow_plans(&mut self) {
        let Some(Controller { clients, .. }) = &self.controller else { return };
        let mut tasks = clients.tasks.iter();
        let has_others =
            clients.tasks.is_empty() || !clients.leaving.is_empty() || !clients.unstarted.is_empty();
        if !has_others && tasks.all(ClientTask::is_settled) {
            self.in_force.clear();
        }
        for task in &clients.tasks {
            // A plan takes long to compute.
            let plan = (!task.is_settled()).then(|| task.balancer().plan());
            let plan = plan.as_ref().unwrap_or(task.datapath().applied());
            let stay = plan.backends.values().filter(|backend| backend.state != BackendState::Leaving);
            self.in_force.extend(stay.map(|backend| backend.address));
        }
    }

    /// Kills the daemon if its last step is over. Returns whether the daemon was killed.
    fn dies(&mut self) -> bool {
        let is_over = match &mut self.death {
            Death::Never => false,
            Death::AfterSteps(0) => true,
            Death::AfterSteps(left) => {
                *left -= 1;
                false
            }
            Death::AtFailure => self.kernel.faults().failed() > 0,
        };
        if is_over {
            if self.death == Death::AtFailure {
                self.kernel.faults().stop();
            }
            self.death = Death::Never;
            self.kill();
        }
        is_over
    }

    fn carry_out(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            if self.dies() {
                return;
            }
            match effect {
                Effect::Watch { directories, .. } => {
                    self.watched = directories;
                    self.inbox.push_back(Event::Watched);
                }
                Effect::Query(wanted) => {
                    self.servers.query_only(&wanted);
                    self.inbox.push_back(self.servers.answers());
                }
                Effect::QueryAgain(wanted) => self.queried_again.push(wanted),
                Effect::Resolve(hosts, _) => {
                    self.servers.resolve_only(&hosts);
                    self.inbox.push_back(self.servers.answers());
                }
                Effect::ResolveAgain(hosts) => {
                    self.servers.resolve_again(&hosts, self.now);
                    self.inbox.push_back(self.servers.answers());
                }
                Effect::Notify(Notice::Status(line)) => self.state_line = line,
                Effect::Notify(notice) => self.notices.push(notice),
                Effect::Work(number, work) if (self.hangs)(&work) || self.is_held(&work) => {
                    self.hung.push((number, *work));
                }
                Effect::Work(number, work) => self.work(number, *work),
            }
        }
    }

    /// Whether the work waits for the end of a program that still runs.
    fn is_held(&self, work: &BackgroundWork) -> bool {
        matches!(work, BackgroundWork::WaitForReaders) && self.kernel.is_held()
    }

    fn work(&mut self, number: u64, work: BackgroundWork) {
        let result = match work {
            // The simulated kernel has no network namespaces.
            BackgroundWork::SearchNamespaces(wanted) => WorkResult::NamespacesFound(
                wanted
                    .into_iter()
                    .map(|(client, search)| NamespaceFound {
                        client,
                        path: search.path,
                        result: Ok(None),
                        recorded: None,
                    })
                    .collect(),
            ),
            BackgroundWork::Close(job, requester) => {
                let result = (self.closes)(&job);
                WorkResult::FlowsClosed(job.order, result, requester)
            }
            // Checks of files are done without a thread, because there are two of them per second.
            BackgroundWork::Look { service, source, path } => {
                let result = self.disk.look(&path);
                WorkResult::Looked { service, source, result }
            }
            BackgroundWork::LookAtConfig { is_due } => {
                WorkResult::LookedAtConfig { is_due, result: self.disk.look(Path::new(CONFIG)) }
            }
            work => self.runtime.block_on(self.worker.clone().carry_out(work)),
        };
        self.inbox.push_back(Event::Done(number, result));
    }

    /// Ends the oldest work that hangs with this result.
    pub fn end_hung(&mut self, result: WorkResult) {
        let (number, _) = self.hung.remove(0);
        self.dispatch(Event::Done(number, result));
    }

    /// Does all the work that has hung until now.
    pub fn finish_hung(&mut self) {
        self.inbox = self.results_of_hung();
        self.run();
    }

    /// Does all the work that has hung until now. The controller has not handled the results yet.
    pub fn results_of_hung(&mut self) -> VecDeque<Event> {
        self.hangs = |_| false;
        for (number, work) in std::mem::take(&mut self.hung) {
            self.work(number, work);
        }
        std::mem::take(&mut self.inbox)
    }

    /// Lets time pass. If a daemon runs, it acts in the meantime.
    pub fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        self.run();
        loop {
            let polls = self.wire.poll_agents().map(|(next, is_news)| {
                if is_news {
                    self.dispatch(Event::HealthChanged);
                }
                self.start + next.saturating_sub(SECOND)
            });
            let wakeup = self.controller.as_ref().and_then(|controller| controller.next_wakeup(self.now));
            match wakeup.filter(|at| *at <= until) {
                Some(at) if polls.is_none_or(|polls| at <= polls) => self.pass_one(at),
                _ => match polls.filter(|polls| *polls <= until) {
                    Some(polls) => self.advance(polls),
                    None => break,
                },
            }
        }
        self.advance(until);
    }

    /// Advances to this time and passes the wake-up.
    pub fn pass_one(&mut self, at: Instant) {
        self.advance(at);
        self.dispatch(Event::Wakeup);
    }

    fn advance(&mut self, to: Instant) {
        let time = to.saturating_duration_since(self.now);
        self.kernel.pass(time);
        self.now += time;
        let now = self.clock.monotonic(self.now);
        self.wire.with(|state| state.now = now);
    }

    /// Changes the report of a backend's agent.
    pub fn report(&mut self, backend: &str, change: impl FnOnce(&mut ScriptedAgent)) {
        self.wire.with(|state| {
            let agent = state.agents.entry(address(backend)).or_default();
            agent.counter += 1;
            change(agent);
        });
    }

    /// Changes the readiness that a backend's agent reports.
    pub fn announce(&mut self, backend: &str, readiness: Readiness) {
        self.report(backend, |agent| agent.readiness = readiness);
    }

    /// Lets a second pass, and checks the maps.
    pub fn tick(&mut self) {
        self.pass(SECOND);
        self.check();
    }

    /// Makes probes of these backends succeed, or find that the backends refuse connections.
    pub fn find(&mut self, backends: &[&str], is_well: bool) {
        let health = if is_well { Health::Healthy } else { Health::Refusing };
        self.found(backends, ProbedHealth { health, why: Why::Probe, is_unconfirmed: false });
    }

    /// Makes the first probe of these backends fail, as if by chance. No second probe has corrected
    /// this result yet.
    pub fn lose_first_probe(&mut self, backends: &[&str]) {
        self.found(
            backends,
            ProbedHealth { health: Health::Refusing, why: Why::Probe, is_unconfirmed: true },
        );
    }

    fn found(&mut self, backends: &[&str], found: ProbedHealth) {
        self.wire.with(|state| {
            state.version += 1;
            state.found.extend(backends.iter().map(|backend| (address(backend), found)));
        });
        self.dispatch(Event::HealthChanged);
    }

    /// Writes another list, and lets the daemon read it.
    pub fn list(&mut self, backends: &[&str]) {
        self.write_list(backends);
        self.changed(LIST);
    }

    /// Writes this text as the list, and lets the daemon read it. The text must not contain a new
    /// backend.
    pub fn list_text(&mut self, text: &str) {
        self.disk.write(LIST, text);
        self.changed(LIST);
    }

    /// From now on, connects may also reach this address.
    pub fn expect(&mut self, backend: &str) {
        self.listed.insert(address(backend));
    }

    /// Lets the server answer once with a list of these backends, which may be host names, and lets
    /// the daemon read it.
    pub fn answer(&mut self, backends: &[&str]) {
        self.listed.extend(backends.iter().filter_map(|backend| backend.parse::<SocketAddr>().ok()));
        let groups: Vec<String> =
            backends.iter().map(|backend| format!("{{\"targets\": [\"{backend}\"]}}")).collect();
        self.find_out(Finding::List(DiscoveredList {
            text: format!("[{}]", groups.join(",")).into_bytes().into(),
            endpoints: backends.len(),
            version: String::new(),
            notes: Vec::new(),
        }));
    }

    /// From now on, connections to the server need a certificate that expires at this time.
    pub fn set_certificate_expiry(&mut self, at: SystemTime) {
        self.servers.state().expires = Some(at);
    }

    /// Lets the server answer once that there are no endpoints.
    pub fn answer_nothing(&mut self) {
        self.find_out(Finding::Empty { why: "NXDOMAIN".to_owned() });
    }

    /// Lets a query to the server fail.
    pub fn fail_query(&mut self) {
        self.find_out(Finding::Failed(Failure::Unreachable("10.0.0.53:53: no answer".to_owned())));
    }

    /// Lets the server answer once with the address of a service.
    pub fn answer_address(&mut self, address: &str) {
        let text = address.as_bytes().into();
        self.find_out(Finding::List(DiscoveredList {
            text,
            endpoints: 1,
            version: String::new(),
            notes: Vec::new(),
        }));
    }

    fn find_out(&mut self, finding: Finding) {
        self.servers.answer(finding, self.now);
        let answers = self.servers.answers();
        self.dispatch(answers);
        self.pass(lb_core::feed::SETTLE);
    }

    /// Changes the addresses of a host name, and lets the daemon query them and read its lists.
    pub fn name(&mut self, name: &str, addresses: &[&str]) {
        let addresses: Vec<IpAddr> =
            addresses.iter().map(|ip| ip.parse().expect("the text is an address")).collect();
        self.listed.extend(addresses.iter().map(|ip| SocketAddr::new(*ip, 80)));
        self.found_out_about(name, Some(Ok(addresses)));
    }

    /// Like [`Stage::name`], for a name that does not resolve.
    pub fn lose_name(&mut self, name: &str, why: &str) {
        self.found_out_about(name, Some(Err(why.to_owned())));
    }

    /// From now on, the server does not answer queries for a name.
    pub fn ignore_name(&mut self, name: &str) {
        self.found_out_about(name, None);
    }

    fn found_out_about(&mut self, name: &str, answer: Option<Result<Vec<IpAddr>, String>>) {
        self.servers.name(name, answer, self.now);
        if self.controller.is_some() {
            let answers = self.servers.answers();
            self.dispatch(answers);
            self.pass(lb_core::feed::SETTLE);
        }
    }

    /// Reports a change at this path, as a watch does, and lets the time pass after which the
    /// daemon assumes that the file has stopped changing.
    pub fn changed(&mut self, path: impl AsRef<Path>) {
        self.dispatch(Event::Changed([path.as_ref().to_owned()].into()));
        self.pass(lb_core::feed::SETTLE);
    }

    /// Writes these lines of the service, and makes the daemon reload the configuration.
    pub fn configure(&mut self, lines: &str) {
        self.write_config(lines);
        self.dispatch(Event::Hangup);
        self.settle();
    }

    /// Lets seconds pass until all client tasks are settled and have cgroups.
    pub fn settle(&mut self) {
        // While faults are on, several attempts after long pauses may fail.
        for _ in 0..4 * SETTLED {
            self.tick();
            let is_settled = |task: &ClientTask| task.is_settled() && task.cgroup().is_some();
            if self
                .controller
                .as_ref()
                .is_none_or(|controller| controller.clients.tasks.iter().all(is_settled))
            {
                self.check_plans();
                return;
            }
        }
        let task = self.task();
        panic!("the controller does not settle: {:?}, {:?}", task.trouble(), self.faults());
    }

    /// Checks that a client task that is settled has applied its plan.
    fn check_plans(&self) {
        let tasks = self.controller.iter().flat_map(|controller| &controller.clients.tasks);
        for task in tasks.filter(|task| task.is_settled()) {
            assert_eq!(task.datapath().applied().backends, task.balancer().plan().backends);
        }
    }

    /// Stops all faults of the kernel, and lets the daemon finish its work.
    pub fn stop_faults(&mut self) {
        self.kernel.faults().stop();
        for _ in 0..SETTLED {
            self.tick();
        }
    }

    /// How many lines of the log contain this text.
    pub fn logged(&self, what: &str) -> usize {
        let lines = self.log.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&lines).lines().filter(|line| line.contains(what)).count()
    }

    pub fn controller(&self) -> &Controller {
        self.controller.as_ref().expect("a daemon runs")
    }

    /// The client task of the client `web`.
    pub fn task(&self) -> &ClientTask {
        self.controller().clients.task("web").expect("the client runs")
    }

    pub fn faults(&self) -> Vec<String> {
        let faults = self.controller().facts(self.now).faults;
        faults.into_iter().map(|fault| fault.text).collect()
    }

    pub fn status(&self) -> StatusDocument {
        self.kernel.faults().paused(|| status::of(&self.kernel, self.controller().facts(self.now)))
    }

    /// The client `web` in `status`.
    pub fn client(&self) -> ClientStatus {
        self.client_named("web")
    }

    pub fn client_named(&self, name: &str) -> ClientStatus {
        let mut clients = self.status().clients.into_iter();
        clients.find(|client| client.name == name).expect("the client runs")
    }

    /// The service of the client `web` in `status`.
    pub fn service(&self) -> ServiceStatus {
        self.client().services.swap_remove(0)
    }

    /// A backend of the service of the client `web` in `status`.
    pub fn backend(&self, backend: &str) -> BackendStatus {
        let mut backends = self.service().backends.into_iter();
        backends.find(|one| one.address == address(backend)).expect("the backend has a slot")
    }

    /// All faults in `status`.
    pub fn degraded(&self) -> Vec<String> {
        self.status().faults.iter().map(ToString::to_string).collect()
    }

    /// The explanation of the service.
    pub fn explanation(&self) -> Explanation {
        self.explanation_for("web")
    }

    /// The explanation of the service for a client.
    pub fn explanation_for(&self, client: &str) -> Explanation {
        let mut all = self.controller().explanations(client, "users");
        all.pop().expect("the client runs, and the service has a list")
    }

    /// The explanation of the service as text.
    pub fn explained(&self) -> String {
        lb_view::text::explanation(&self.explanation(), Style::default())
    }

    /// Begins a connection, up to its SYN.
    pub fn begin(&mut self) -> Result<FakeFlow, u16> {
        let flow = self.choose()?;
        self.kernel.send_syn(&flow);
        Ok(flow)
    }

    /// Calls connect(): a backend is chosen, and no SYN is sent yet.
    pub fn choose(&mut self) -> Result<FakeFlow, u16> {
        match self.kernel.connect(self.place, 1, address(SERVICE)) {
            Connect::Unchanged => Err(0),
            Connect::Refused(errno) => Err(errno),
            Connect::Sent(flow) => {
                assert!(self.listed.contains(&flow.backend), "{} is in no list", flow.backend);
                self.assert_in_force(flow.backend);
                *self.sent.entry(flow.backend).or_default() += 1;
                Ok(flow)
            }
        }
    }

    /// A backend that was removed must get no connect. While the daemon replaces tables, the
    /// backends of the tables before and after are valid.
    fn assert_in_force(&self, backend: SocketAddr) {
        assert!(self.in_force.contains(&backend), "{backend} was removed; in force: {:?}", self.in_force);
    }

    /// Opens a connection. A dead backend refuses it.
    pub fn connect(&mut self) -> Result<SocketAddr, u16> {
        let mut flow = self.begin()?;
        if self.dead.contains(&flow.backend) {
            self.kernel.end(flow, Ending::Refused, 0, 0);
            return Err(111);
        }
        self.kernel.establish(&mut flow);
        self.open.push(flow);
        Ok(flow.backend)
    }

    /// Opens a connection from this cgroup to an address, ends it at once, and returns its backend;
    /// `None` if the connection is not balanced.
    pub fn reached(&mut self, from: FakeCgroup, to: &str) -> Option<SocketAddr> {
        match self.kernel.connect(from, 1, address(to)) {
            Connect::Unchanged | Connect::Refused(_) => None,
            Connect::Sent(mut flow) => {
                self.assert_in_force(flow.backend);
                if from == self.place && self.listed.contains(&flow.backend) {
                    *self.sent.entry(flow.backend).or_default() += 1;
                }
                self.kernel.send_syn(&flow);
                self.kernel.establish(&mut flow);
                self.kernel.end(flow, Ending::Closed, 100, 100);
                Some(flow.backend)
            }
        }
    }

    /// Opens this number of connections and ends each at once. Returns how many failed.
    pub fn dial(&mut self, count: u32) -> u32 {
        let held = std::mem::take(&mut self.open);
        let mut failed = 0;
        for _ in 0..count {
            match self.connect() {
                Ok(_) => self.close_all(),
                Err(_) => failed += 1,
            }
        }
        self.open = held;
        failed
    }

    /// Dials this number of times, and returns the backends that were reached.
    pub fn dialled(&mut self, count: u32) -> BTreeSet<SocketAddr> {
        let before = self.sent.clone();
        self.dial(count);
        let grown = self.sent.iter().filter(|(backend, sent)| before.get(backend) != Some(sent));
        grown.map(|(backend, _)| *backend).collect()
    }

    pub fn close_all(&mut self) {
        for flow in std::mem::take(&mut self.open) {
            self.kernel.end(flow, Ending::Closed, 100, 100);
        }
    }

    /// Checks that the daemon has every listed backend that the maps contain, and that the counts
    /// in the maps are exact: each backend has as many sent and open flows as the script has
    /// counted.
    pub fn check(&mut self) {
        let task = self.controller.as_ref().and_then(|controller| controller.clients.task("web"));
        let Some(task) = task.filter(|task| self.is_counted && !task.is_unpinned()) else { return };
        let tables = task.datapath().tables();
        for slot in tables.slots().into_iter().filter(|slot| self.listed.contains(&slot.address)) {
            let known = task.datapath().applied().backends.get(&slot.at.slot).map(|backend| backend.address);
            assert_eq!(known, Some(slot.address), "backend of {:?}", slot.at);
            let open = self.open.iter().filter(|flow| flow.backend == slot.address).count() as u64;
            assert_eq!(tables.active(slot.at.slot), open, "open flows to {}", slot.address);
            let counts = self.kernel.faults().paused(|| tables.counts(slot.at.slot)).expect("faults are off");
            let sent = self.sent.get(&slot.address).copied().unwrap_or(0);
            assert_eq!(counts.sums.chosen, sent, "connects to {}", slot.address);
        }
    }

    pub fn slot(&self, backend: SocketAddr) -> SlotView {
        let slots = self.task().datapath().tables().slots();
        slots.into_iter().find(|slot| slot.address == backend).expect("the backend has a slot")
    }

    /// For each backend that has a slot: its state, and whether it is ejected.
    pub fn states(&self) -> BTreeMap<SocketAddr, (BackendState, bool)> {
        let slots = self.task().datapath().tables().slots();
        slots.into_iter().map(|slot| (slot.address, (slot.state, slot.is_ejected))).collect()
    }

    /// Stops all faults of the kernel, and lets the daemon finish its work. Ends as soon as the
    /// state is as expected.
    fn end(&mut self, differs: fn(&str) -> bool, expected: Option<&BTreeSet<String>>) -> BTreeSet<String> {
        self.kernel.faults().stop();
        let state = |stage: &Self| {
            let mut lines = stage.final_state();
            lines.retain(|line| !differs(line));
            lines
        };
        for _ in 0..if expected.is_some() { SETTLED } else { CALM } {
            if expected.is_some_and(|expected| state(self) == *expected) {
                break;
            }
            self.pass(SECOND);
        }
        self.check();
        self.check_plans();
        state(self)
    }

    /// The state of the kernel and of the daemon as lines of text: where flows begin, services,
    /// backends with their states and weights, lists, and faults.
    fn final_state(&self) -> BTreeSet<String> {
        let mut lines = BTreeSet::new();
        for pins in self.kernel.clients(Path::new(PINS)).expect("faults are off") {
            let client = &pins.client;
            let begins = self.kernel.begins_at(&pins).expect("faults are off");
            lines.insert(format!("{client}: flows begin in cgroups {begins:?}"));
            let tables = self.kernel.tables(&pins).expect("faults are off");
            let services = tables.services();
            for service in &services {
                let ServiceView { name, address, open, .. } = service;
                lines.insert(format!("{client}: service {name} at {address}, open: {open}"));
            }
            for slot in tables.slots() {
                let service = services.iter().find(|service| service.index == slot.service);
                let service = service.map(|service| &service.name);
                let SlotView { address, weight, state, reason, usable, is_ejected, entries, .. } = slot;
                let backend = format!("{client}: {address} of {service:?}");
                lines.insert(format!(
                    "{backend}: {state:?}, {usable:?}, {reason:?}, ejected: {is_ejected}, weight {weight}"
                ));
                lines.insert(format!("{backend}: {entries} entries"));
            }
        }
        if self.controller.is_some() {
            lines.extend(self.in_force.iter().map(|backend| format!("in force: {backend}")));
            lines.extend(self.faults().into_iter().map(|fault| format!("fault: {fault}")));
        }
        lines
    }

    /// The pins of the client `web`.
    pub fn pins(&self) -> Pins {
        pins_of("web")
    }

    /// The names of the clients that have pins.
    pub fn pinned(&self) -> Vec<String> {
        let pinned = self.kernel.clients(Path::new(PINS)).expect("faults are off");
        pinned.into_iter().map(|pins| pins.client).collect()
    }
}
