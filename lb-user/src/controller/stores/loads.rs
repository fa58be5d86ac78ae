//! The state of the control laws, stored in one file for the next start of the daemon: learnt
//! weights, switches that operators have set, and members in slow start.
//!
//! The daemon reads the file once, at its start, before it applies any list. If this read fails,
//! the daemon retries, and does not overwrite the file before a read succeeds, because it contains
//! the operators' switches. A file that cannot be parsed is renamed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use lb_core::control::factor::{Factor, Factors};
use lb_core::control::{ControlSnapshot, Mode, Switch};
use serde::{Deserialize, Serialize};

use super::files::{StoredFile, StoredRead};
use crate::controller::Controller;
use crate::controller::clock::unix_seconds;

/// The interval at which learnt weights are stored while they change.
const STORE_INTERVAL: Duration = Duration::from_secs(10);

/// The daemon stores learnt weights at least once in this time, even if they do not change. So the
/// times in the file are at most this much older than the weights of the last daemon.
const MAX_STORE_INTERVAL: Duration = Duration::from_mins(5);

/// A factor counts as changed if it has changed by more than this fraction of its value.
const MOVED: f64 = 0.02;

/// The stored states of services, keyed by service name.
type Services = BTreeMap<String, StoredService>;

/// The content of the file.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct StoredLoads {
    /// The version of the format.
    schema: u32,
    clients: BTreeMap<String, StoredClient>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct StoredClient {
    /// When this state was stored, in seconds since 1970.
    at: u64,
    services: Services,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct StoredService {
    switch: String,
    /// The mode, which shows whether tables followed the factors. Factors that were only computed
    /// (mode `observe`) must not take effect later.
    #[serde(default)]
    mode: String,
    /// Factors by member, in units of 1/65,536. A member that is not listed has factor 1.
    factors: BTreeMap<SocketAddr, u32>,
    /// Members in slow start, with the time at which each became available, in seconds since 1970.
    #[serde(default)]
    starting: BTreeMap<SocketAddr, u64>,
}

const SCHEMA: u32 = 1;

/// The state of the file, as known to the daemon.
#[derive(Default)]
pub struct LoadStore {
    /// The content of the file, keyed by client task.
    known: BTreeMap<String, StoredClient>,
    /// When the learnt weights were last compared with the file. `written`: when the file was last
    /// written.
    looked: Option<Instant>,
    written: Option<Instant>,
    /// Why the file could not be read; `None` once a read has succeeded.
    unread: Option<String>,
    /// Whether an operator has set a switch that is not in the file yet.
    is_urgent: bool,
}

impl StoredFile for StoredLoads {
    /// 64 client tasks with ten services of 256 members each need 6 MB; 64 client tasks with one
    /// service of 16,384 members, the maximum of a table, need 40 MB. For some minutes the file may
    /// also contain members that have left, at most the same number.
    const MAX_BYTES: u64 = 128 << 20;
    const SCHEMA: u32 = SCHEMA;
    const WHAT: &'static str = "learnt weights and operators' switches";
    const LOST: &'static str = "the file of learnt weights and operators' switches cannot be parsed; it was renamed; services start with \
                                their structural weights, and follow load as configured";
    const UNREAD: &'static str = "cannot read the learnt weights and the operators' switches; services start \
                                  with their structural weights; retrying; the file is not overwritten";
    const READ: &'static str = "the learnt weights were read";

    fn path(state: &Path) -> PathBuf {
        state.join("load").join("factors.json")
    }
}

impl StoredService {
    /// `at`: now, in seconds since 1970.
    fn of(snapshot: &ControlSnapshot, at: u64) -> Self {
        let moved = snapshot.factors.iter().filter(|(_, factor)| *factor != Factor::ONE);
        let factors = moved.map(|(address, factor)| (address, factor.units()));
        let (switch, mode) = (snapshot.switch.name().to_owned(), snapshot.mode.name().to_owned());
        let starting = snapshot.starting.iter();
        let starting =
            starting.map(|(address, ready_for)| (*address, at.saturating_sub(ready_for.as_secs())));
        Self { switch, mode, factors: factors.collect(), starting: starting.collect() }
    }

    /// `at`: now, in seconds since 1970.
    fn snapshot(&self, at: u64) -> ControlSnapshot {
        let switch = Switch::ALL.into_iter().find(|switch| switch.name() == self.switch).unwrap_or_default();
        let mode = Mode::ALL.into_iter().find(|mode| mode.name() == self.mode).unwrap_or_default();
        let factors: Factors =
            self.factors.iter().map(|(address, units)| (*address, Factor::of_units(*units))).collect();
        let starting = self.starting.iter();
        let starting =
            starting.map(|(address, since)| (*address, Duration::from_secs(at.saturating_sub(*since))));
        ControlSnapshot { switch, mode, factors, starting: starting.collect() }
    }

    /// Whether `other` differs from this state so much that the file must be written.
    fn differs(&self, other: &Self) -> bool {
        let units = |factors: &BTreeMap<SocketAddr, u32>, address| {
            f64::from(factors.get(address).copied().unwrap_or(Factor::ONE.units()))
        };
        let has_moved = |address| {
            let (before, now) = (units(&self.factors, address), units(&other.factors, address));
            (now - before).abs() > MOVED * before
        };
        self.switch != other.switch
            || self.mode != other.mode
            || !self.starting.keys().eq(other.starting.keys())
            || self.factors.keys().chain(other.factors.keys()).any(has_moved)
    }
}

fn differ(before: &Services, now: &Services) -> bool {
    before.len() != now.len()
        || now.iter().any(|(name, service)| before.get(name).is_none_or(|before| before.differs(service)))
}

impl LoadStore {
    /// Applies the result of reading the file.
    pub fn take(&mut self, file: StoredRead<StoredLoads>) {
        if let Some(stored) = file.content(&mut self.unread) {
            self.known = stored.clients;
        }
    }

    /// The learnt weights of a service of a client task, and their age.
    pub fn snapshot(
        &self,
        client: &str,
        service: &str,
        now: SystemTime,
    ) -> Option<(ControlSnapshot, Duration)> {
        let client = self.known.get(client)?;
        let now = unix_seconds(now);
        // If the clock was set back, the timestamp may be in the future; the age is then zero.
        let age = Duration::from_secs(now.saturating_sub(client.at));
        Some((client.services.get(service)?.snapshot(now), age))
    }

    /// Whether the file could not be read yet.
    pub const fn is_unread(&self) -> bool {
        self.unread.is_some()
    }

    /// Requests that an operator's switch is stored at once.
    pub fn hurry(&mut self) {
        self.is_urgent = true;
    }
}

impl Controller {
    /// Stores the learnt weights if they have changed, at most once per `STORE_INTERVAL`, and at
    /// least once per `MAX_STORE_INTERVAL`. An operator's new switch or a change of slow start is
    /// stored at once.
    pub fn store_loads(&mut self, now: Instant) {
        let has_passed =
            |last: Option<Instant>, time| last.is_none_or(|last| now.saturating_duration_since(last) >= time);
        // A change of slow start is stored at once, because the slow start may end before the next
        // comparison.
        for client_task in &mut self.clients.tasks {
            self.load_store.is_urgent |= client_task.take_slow_starts_changed();
        }
        if !self.load_store.is_urgent && !has_passed(self.load_store.looked, STORE_INTERVAL) {
            return;
        }
        self.load_store.looked = Some(now);
        if self.load_store.unread.is_some() {
            return;
        }
        let at = unix_seconds(self.wall);
        let mut clients = BTreeMap::new();
        let mut is_new = std::mem::take(&mut self.load_store.is_urgent);
        for client in &self.config.clients {
            let before = self.load_store.known.get(&client.name);
            // A client that does not run retains its stored state until it runs.
            let stored = match self.clients.task(&client.name) {
                None => before.cloned(),
                Some(client_task) => {
                    let services: Services = client_task
                        .snapshots(now)
                        .map(|(service, snapshot)| (service.to_owned(), StoredService::of(&snapshot, at)))
                        .collect();
                    let none = Services::new();
                    is_new |= differ(before.map_or(&none, |before| &before.services), &services);
                    (!services.is_empty()).then_some(StoredClient { at, services })
                }
            };
            clients.extend(stored.map(|stored| (client.name.clone(), stored)));
        }
        is_new |= clients.len() != self.load_store.known.len();
        let is_old = !clients.is_empty() && has_passed(self.load_store.written, MAX_STORE_INTERVAL);
        if !is_new && !is_old {
            return;
        }
        let file = StoredLoads { schema: SCHEMA, clients };
        if let Ok(text) = serde_json::to_vec(&file) {
            self.sources.files_to_store.add(StoredLoads::path(&self.config.paths.state), text.into());
        }
        self.load_store.known = file.clients;
        self.load_store.written = Some(now);
    }

    /// Why the learnt weights are not stored: the file cannot be read, or the last attempt to write
    /// it failed.
    pub fn loads_store_error(&self) -> Option<String> {
        let unread = self.load_store.unread.as_deref();
        let files = &self.sources.files_to_store;
        unread.or_else(|| files.error_of(&StoredLoads::path(&self.config.paths.state))).map(str::to_owned)
    }

    /// Handles the result of another attempt to read the file.
    pub fn apply_stored_loads(&mut self, file: StoredRead<StoredLoads>, now: Instant) {
        self.load_store.take(file);
        if self.load_store.unread.is_some() {
            return;
        }
        let clock = self.wall;
        let Self { clients, load_store, .. } = self;
        for client_task in &mut clients.tasks {
            let client = client_task.client.name.clone();
            client_task.adopt_late(|service| load_store.snapshot(&client, service, clock), now);
        }
        self.settle(now);
    }

    /// Creates the control laws and the subset sizes that follow load, for a client task that is
    /// new or was reconfigured.
    pub fn make_controls(&mut self, client: &str, now: Instant) {
        let clock = self.wall;
        let Self { clients, load_store, .. } = self;
        if let Some(client_task) = clients.task_mut(client) {
            client_task.make_sizes();
            client_task.make_controls(|service| load_store.snapshot(client, service, clock), now);
            // A switch is discarded together with its control law, even if a later reload
            // configures a control law again.
            let services = &client_task.client.services;
            let lost_it = |name: &str| {
                services.iter().any(|known| known.service.name == name && known.service.control.law.is_none())
            };
            if let Some(known) = load_store.known.get_mut(client) {
                known.services.retain(|name, _| !lost_it(name));
            }
        }
        self.apply_overrides(client, now);
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    fn snapshot(switch: Switch, number: f64) -> ControlSnapshot {
        let address: SocketAddr = "10.0.0.1:80".parse().unwrap();
        let factors = [(address, Factor::of(number))].into_iter().collect();
        ControlSnapshot { switch, mode: Mode::Enforce, factors, ..ControlSnapshot::default() }
    }

    fn stored(at: u64, snapshot: &ControlSnapshot) -> StoredLoads {
        let services = BTreeMap::from([("users".to_owned(), StoredService::of(snapshot, at))]);
        let clients = BTreeMap::from([("web".to_owned(), StoredClient { at, services })]);
        StoredLoads { schema: SCHEMA, clients }
    }

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// The state after a file with this text was read.
    fn known(text: &[u8]) -> LoadStore {
        let mut load_store = LoadStore::default();
        load_store.take(StoredRead::Read(StoredLoads::parse(text).unwrap()));
        load_store
    }

    #[test]
    fn stored_weights_are_read_with_their_age() {
        let snapshot = snapshot(Switch::Frozen, 1.25);
        let text = serde_json::to_vec(&stored(1_000, &snapshot)).unwrap();
        let known = known(&text);
        let of = |client, service, seconds| known.snapshot(client, service, at(seconds));
        assert_eq!(of("web", "users", 1_090), Some((snapshot.clone(), Duration::from_secs(90))));
        assert_eq!(of("web", "users", 900), Some((snapshot, Duration::ZERO)), "the clock was set back");
        assert_eq!((of("web", "mail", 900), of("batch", "users", 900)), (None, None));
    }

    #[test]
    fn a_slow_start_continues_while_no_daemon_runs() {
        let address: SocketAddr = "10.0.0.2:80".parse().unwrap();
        let starting = |ready_for| BTreeMap::from([(address, Duration::from_secs(ready_for))]);
        let snapshot = ControlSnapshot { starting: starting(5), ..snapshot(Switch::On, 1.0) };
        let known = known(&serde_json::to_vec(&stored(1_000, &snapshot)).unwrap());
        let starting_at =
            |seconds| known.snapshot("web", "users", at(seconds)).map(|(snapshot, _)| snapshot.starting);
        assert_eq!(starting_at(1_000), Some(starting(5)));
        assert_eq!(starting_at(1_090), Some(starting(95)));
        assert_eq!(starting_at(900), Some(starting(0)), "the clock was set back");
        let service = |snapshot| BTreeMap::from([("users".to_owned(), StoredService::of(snapshot, 1_000))]);
        let without = ControlSnapshot { starting: BTreeMap::new(), ..snapshot.clone() };
        let later = ControlSnapshot { starting: starting(9), ..snapshot.clone() };
        assert!(!differ(&service(&snapshot), &service(&later)), "a continuing slow start is no change");
        assert!(differ(&service(&snapshot), &service(&without)));
    }

    #[test]
    fn invalid_stored_values_are_rejected_or_bounded() {
        let text = serde_json::to_vec(&stored(1_000, &snapshot(Switch::On, 1.25))).unwrap();
        for cut in 0..text.len() {
            assert!(StoredLoads::parse(&text[..cut]).is_err(), "{cut}");
        }
        let of_another = StoredLoads::parse(br#"{"schema":2,"clients":[]}"#).unwrap_err();
        assert_eq!(of_another, "the file's schema is 2, but this socklb supports only 1");
        // An invalid time, an invalid switch and invalid factors.
        let text =
            br#"{"schema":1,"clients":{"web":{"at":18446744073709551615,"services":{"users":{"switch":"stop",
            "factors":{"10.0.0.1:80":4294967295,"10.0.0.2:80":0}}}}}}"#;
        let (snapshot, age) = known(text).snapshot("web", "users", at(5)).expect("the service is stored");
        assert_eq!((snapshot.switch, age), (Switch::On, Duration::ZERO));
        assert!(
            snapshot.factors.iter().all(|(_, factor)| factor.number() > 0.0 && factor.number() <= 1_024.0)
        );
        let negative = br#"{"schema":1,"clients":{"web":{"at":1,"services":{"users":{"switch":"on","factors":{"10.0.0.1:80":-1}}}}}}"#;
        let error = StoredLoads::parse(negative).unwrap_err();
        assert!(error.contains("-1") && error.contains("line 1 column"), "{error}");
    }

    #[test]
    fn only_changes_are_written() {
        let service = |switch, number| {
            BTreeMap::from([("users".to_owned(), StoredService::of(&snapshot(switch, number), 1_000))])
        };
        let before = service(Switch::On, 1.25);
        assert!(!differ(&before, &service(Switch::On, 1.26)) && differ(&before, &service(Switch::On, 1.3)));
        assert!(differ(&before, &service(Switch::Off, 1.25)) && differ(&before, &Services::new()));
        assert!(!differ(&service(Switch::On, 1.0), &service(Switch::On, 1.0)));
        assert!(service(Switch::On, 1.0)["users"].factors.is_empty(), "only changed factors are stored");
    }

    #[test]
    fn an_unreadable_file_does_not_count_as_missing() {
        let mut load_store = LoadStore::default();
        load_store.take(StoredRead::Unread("input/output error".to_owned()));
        assert!(load_store.unread.is_some());
        load_store.take(StoredRead::Read(stored(1_000, &snapshot(Switch::Off, 1.25))));
        assert!(load_store.unread.is_none() && load_store.snapshot("web", "users", at(1_000)).is_some());
    }
}
