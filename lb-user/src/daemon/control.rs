//! Weights that follow load, of all client tasks: once a second each looks at what is reported, and the tables that are most wrong are
//! made anew, as many as a tick has room for. What is learnt is kept for the next daemon.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lb_core::control::factor::{Factor, Factors};
use lb_core::control::publication::{Proposal, within_budget};
use lb_core::control::{Heard, Learnt, Switch};
use lb_core::service::Protocol;
use lb_http::peer::Peer;
use lb_view::load::{self, Switched, SwitchedClient};
use serde::{Deserialize, Serialize};
use tracing::info;

use super::Daemon;
use super::client_task::ClientTask;
use super::probing::{Probing, name_of};

/// What is learnt is kept this often while it changes,
const KEPT_EVERY: Duration = Duration::from_secs(10);

/// and this often in any case, so that its age shows how long no daemon has run.
const KEPT_AT_LEAST_EVERY: Duration = Duration::from_mins(5);

/// What was learnt for each service of each client task, by their names.
type ByName = BTreeMap<String, BTreeMap<String, KeptService>>;

/// The state of what is kept.
#[derive(Default)]
pub struct Kept {
    /// As an earlier daemon has left it, or a client that has left.
    known: ByName,
    /// When that was written.
    written: Option<SystemTime>,
    /// What was kept last, and when.
    last: ByName,
    kept: Option<Instant>,
}

/// The file.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct KeptFile {
    /// The version of its form.
    schema: u32,
    /// Seconds since 1970.
    written: u64,
    clients: ByName,
}

/// What is kept of one service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct KeptService {
    switch: String,
    factors: BTreeMap<SocketAddr, f64>,
}

const SCHEMA: u32 = 1;

impl KeptFile {
    /// Where it is.
    pub fn path(state: &std::path::Path) -> PathBuf {
        state.join("load").join("factors.json")
    }

    /// Reads what is kept; what cannot be understood is as good as nothing.
    pub fn parse(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok().filter(|file: &Self| file.schema == SCHEMA)
    }
}

impl KeptService {
    fn of(learnt: &Learnt) -> Self {
        let factors = learnt.factors.iter().map(|(address, factor)| (address, factor.number()));
        Self { switch: learnt.switch.name().to_owned(), factors: factors.collect() }
    }

    fn learnt(&self) -> Learnt {
        let switch = Switch::ALL.into_iter().find(|switch| switch.name() == self.switch).unwrap_or_default();
        let factors: Factors =
            self.factors.iter().map(|(address, number)| (*address, Factor::of(*number))).collect();
        Learnt { switch, factors }
    }
}

impl Kept {
    /// Takes in what an earlier daemon has left.
    pub fn take(&mut self, file: KeptFile) {
        self.written = Some(UNIX_EPOCH + Duration::from_secs(file.written));
        self.known = file.clients;
    }

    /// What was learnt for a service of a client task, and how long ago.
    pub fn learnt(&self, client: &str, service: &str, now: SystemTime) -> Option<(Learnt, Duration)> {
        let learnt = self.known.get(client)?.get(service)?.learnt();
        // A clock that went back says that it is new.
        let age = self.written.and_then(|written| now.duration_since(written).ok()).unwrap_or_default();
        Some((learnt, age))
    }
}

impl Daemon {
    /// Lets all weights follow what is reported, as far as there is room for tables.
    pub fn follow_load(&mut self, at: Instant) {
        let now = monotonic();
        let mut proposals: Vec<((usize, usize), Proposal)> = Vec::new();
        let Self { clients, probing, .. } = self;
        for (number, client_task) in clients.tasks.iter_mut().enumerate() {
            let hears = Hears::of(client_task, probing);
            let proposed = client_task.tick_controls(now, |position, address| hears.heard(position, address));
            proposals.extend(proposed.into_iter().map(|(position, proposal)| ((number, position), proposal)));
        }
        for ((number, position), proposal) in within_budget(proposals) {
            self.clients.tasks[number].publish_factors(position, proposal.factors, at);
        }
        if self.clients.tasks.iter().any(|client_task| !client_task.is_settled()) {
            self.settle(at);
        }
        self.keep_learnt(at);
    }

    /// Keeps what was learnt, if it is time to.
    fn keep_learnt(&mut self, at: Instant) {
        let since = self.kept.kept.map(|kept| at.saturating_duration_since(kept));
        if since.is_some_and(|since| since < KEPT_EVERY) {
            return;
        }
        let mut all = ByName::new();
        for client_task in &self.clients.tasks {
            let of_client: BTreeMap<String, KeptService> = client_task
                .learnt()
                .map(|(service, learnt)| (service.to_owned(), KeptService::of(&learnt)))
                .collect();
            if !of_client.is_empty() {
                all.insert(client_task.client.name.clone(), of_client);
            }
        }
        let is_old = since.is_none_or(|since| since >= KEPT_AT_LEAST_EVERY);
        if all == self.kept.last && (all.is_empty() || !is_old) {
            return;
        }
        let now = SystemTime::now();
        let written = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let file = KeptFile { schema: SCHEMA, written, clients: all };
        if let Ok(text) = serde_json::to_vec(&file) {
            self.sources.keeping.add(KeptFile::path(&self.config.paths.state), text.into());
        }
        self.kept.last = file.clients;
        self.kept.kept = Some(at);
        // A client that is opened anew while this daemon runs goes on from here.
        for (client, services) in &self.kept.last {
            self.kept.known.insert(client.clone(), services.clone());
        }
        self.kept.written = Some(now);
    }

    /// An operator says what becomes of a service's law, for one client task or all that have it.
    pub fn switch_load(
        &mut self,
        service: &str,
        switch: Switch,
        client: Option<&str>,
        who: &Peer,
        at: Instant,
    ) -> Switched {
        let (user, process) = (who.user, who.process);
        let mut clients = Vec::new();
        let tasks = self.clients.tasks.iter_mut();
        for client_task in tasks.filter(|task| client.is_none_or(|client| client == task.client.name)) {
            let Some(before) = client_task.switch_control(service, switch) else { continue };
            let client = client_task.client.name.clone();
            info!(%client, %service, switch = switch.name(), before = before.name(), user, process, "asked to switch what follows load");
            clients.push(SwitchedClient { client, before: before.name().to_owned() });
        }
        if clients.is_empty() {
            info!(?service, user, process, "asked to switch what no client has");
        } else {
            // The next tick follows it. Kept at once: what an operator has said holds whatever happens to this process.
            self.kept.kept = None;
            self.keep_learnt(at);
        }
        let (schema, switch) = (load::SCHEMA, switch.name().to_owned());
        Switched { schema, service: service.to_owned(), switch, clients }
    }

    /// Makes the controls of a client task that is new, or configured otherwise.
    pub fn make_controls(&mut self, client: &str, at: Instant) {
        let (now, clock) = (monotonic(), SystemTime::now());
        let Self { clients, kept, .. } = self;
        if let Some(client_task) = clients.task_mut(client) {
            client_task.make_controls(now, |service| kept.learnt(client, service, clock), at);
        }
    }
}

/// The clock of reports.
pub fn monotonic() -> Duration {
    Duration::from_nanos(lb_kernel::monotonic_ns())
}

/// What the backends of a client task's services have reported.
struct Hears(Vec<BTreeMap<SocketAddr, Heard>>);

impl Hears {
    /// Of those services whose weights follow load. Nobody who receives reports waits for longer than one service takes.
    fn of(client_task: &ClientTask, probing: &Probing) -> Self {
        let services = client_task.client.services.iter().enumerate();
        let of_service = |(position, configured): (usize, &crate::config::ClientService)| {
            let mut heard = BTreeMap::new();
            let service = &configured.service;
            if service.control.law.is_some()
                && let Some(listener) = probing.listener(&client_task.client.name, configured.probe.as_ref())
            {
                let members = client_task.balancer().weights(position);
                listener.look(|senders, _, _| {
                    for (address, _) in members {
                        heard.extend(one(*address, service.protocol, senders).map(|heard| (*address, heard)));
                    }
                });
            }
            heard
        };
        Self(services.map(of_service).collect())
    }

    fn heard(&self, position: usize, address: SocketAddr) -> Option<Heard> {
        self.0.get(position)?.get(&address).copied()
    }
}

/// The newest report of a backend.
fn one(
    address: SocketAddr,
    protocol: Protocol,
    senders: &lb_core::reports::senders::Senders<Duration>,
) -> Option<Heard> {
    let (_, reported) = senders.get(name_of(protocol, address))?;
    let report = reported.report()?;
    // It was half a round trip on its way.
    let transit = reported.round_trip().unwrap_or_default() / 2;
    Some(Heard { load: report.load, at: report.received.saturating_sub(transit) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_read_again_with_its_age() {
        let address: SocketAddr = "10.0.0.1:80".parse().unwrap();
        let learnt =
            Learnt { switch: Switch::Frozen, factors: [(address, Factor::of(1.25))].into_iter().collect() };
        let service = BTreeMap::from([("users".to_owned(), KeptService::of(&learnt))]);
        let file = KeptFile {
            schema: SCHEMA,
            written: 1_000,
            clients: BTreeMap::from([("web".to_owned(), service)]),
        };
        let text = serde_json::to_vec(&file).unwrap();
        let mut kept = Kept::default();
        kept.take(KeptFile::parse(&text).expect("it is whole"));
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(kept.learnt("web", "users", at(1_090)), Some((learnt.clone(), Duration::from_secs(90))));
        assert_eq!(
            kept.learnt("web", "users", at(900)),
            Some((learnt, Duration::ZERO)),
            "a clock that went back"
        );
        assert_eq!(
            (kept.learnt("web", "mail", at(900)), kept.learnt("batch", "users", at(900))),
            (None, None)
        );
        for cut in 0..text.len() {
            assert!(KeptFile::parse(&text[..cut]).is_none(), "{cut}");
        }
        assert!(KeptFile::parse(b"{\"schema\":2,\"written\":1,\"clients\":{}}").is_none());
    }
}
