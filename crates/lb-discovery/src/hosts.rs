//! Resolves the host names in lists, all of them in one task.
//!
//! A name is queried once, even if several lists contain it. A name retains the addresses of its
//! last answer with addresses, so an empty, missing or refused answer removes no address. If an
//! earlier daemon has stored addresses of a name, they are used until the name's first answer with
//! addresses. At most [`IN_FLIGHT`] queries are in flight, so that the queries of other providers
//! are sent between them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use lb_config::discovery::{self, DnsSettings};
use lb_config::endpoints::{HostAddresses, MAX_HOSTS};
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};

use crate::dns::{ConnectionGuard, IN_FLIGHT, Lookup, Resolver};
use crate::retry::Retry;
use crate::runner::SPREAD;
use crate::{Failure, ProviderContext};

/// The shortest time until a name is queried again after an answer. A host has up to [`MAX_HOSTS`]
/// names, which take 20 s at 50 queries per second.
const MIN_TTL: Duration = Duration::from_secs(30);

/// The longest time until a name is queried again after an answer.
const MAX_TTL: Duration = Duration::from_mins(5);

/// A query that is due within this time is sent together with a query that is due now, so that both
/// queries need only one connection.
const TOGETHER: Duration = Duration::from_secs(3);

/// The maximum number of names that are queried: the names of lists, the names that an earlier
/// daemon has stored, and the names of a new list, which are queried before the list is accepted.
const MOST: usize = 3 * MAX_HOSTS;

/// The largest number of addresses of a name.
pub const MAX_ADDRESSES: usize = 1000;

/// The number of answers with addresses that are not allowed that a name retains. If a list's
/// `allow` contains only the addresses of the older one, the newer one does not replace them.
pub const MAX_REFUSED: usize = 2;

/// A host name, and the address family that its list needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostName {
    /// The name in lower case, without a dot at its end.
    pub name: Arc<str>,
    pub is_ipv6: bool,
}

/// The results of the queries for a host name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostState {
    /// The addresses in the last answer with only allowed addresses; empty if there was none.
    pub addresses: Arc<[IpAddr]>,
    /// When an earlier daemon received the addresses; `None` if there are no addresses, or if this
    /// daemon received them.
    pub stored: Option<SystemTime>,
    /// When the last query ended; `None` before the end of the first one.
    pub answered: Option<Instant>,
    /// Why the last query returned no usable addresses; `None` if the query returned addresses.
    pub missing: Option<MissingAddresses>,
    /// The addresses in later answers that have an address that is not allowed, the newest answer
    /// first. Only a list whose `allow` contains all addresses of an answer uses them.
    pub refused: Arc<[Arc<[IpAddr]>]>,
}

/// The reason why a host name does not resolve, and when this began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingAddresses {
    pub why: Arc<str>,
    pub since: Instant,
    /// Whether the last answer has an address that is not allowed.
    pub is_refusal: bool,
}

impl HostState {
    /// Whether a list with this name can be computed: the name has addresses, or its first query
    /// has ended.
    pub fn is_known(&self) -> bool {
        self.answered.is_some() || self.has_addresses()
    }

    /// Whether any list can use addresses of the name.
    pub fn has_addresses(&self) -> bool {
        !(self.addresses.is_empty() && self.refused.is_empty())
    }

    /// Takes over the addresses that an earlier daemon has stored, if this daemon has received no
    /// allowed ones.
    pub fn adopt(&mut self, stored: Self) {
        if self.addresses.is_empty() {
            let older = stored.refused.iter().filter(|older| !self.refused.contains(older));
            let refused = self.refused.iter().chain(older).take(MAX_REFUSED).cloned().collect();
            (self.addresses, self.refused, self.stored) = (stored.addresses, refused, stored.stored);
        }
    }

    /// Applies the result of a query: addresses, or the reason why there are none. If one of the
    /// addresses is not allowed, the name retains its last addresses, so that no wrong answer
    /// replaces them.
    pub fn take(&mut self, result: Result<BTreeSet<IpAddr>, String>, now: Instant) {
        self.answered = Some(now);
        let refusal = |ips: &BTreeSet<IpAddr>| {
            let (ip, why) = ips.iter().find_map(|ip| Some((*ip, discovery::host_refusal(*ip)?)))?;
            Some(format!("{ip} is not allowed: {why}"))
        };
        let (why, is_refusal) = match result {
            // The set is sorted, so that answers with the same addresses are equal.
            Ok(addresses) => match refusal(&addresses) {
                None => {
                    (self.stored, self.missing, self.refused) = Default::default();
                    if !self.addresses.iter().eq(&addresses) {
                        self.addresses = addresses.into_iter().collect();
                    }
                    return;
                }
                Some(why) => {
                    let newest: Arc<[IpAddr]> = addresses.into_iter().collect();
                    let older = self.refused.iter().filter(|older| **older != newest).cloned();
                    self.refused =
                        std::iter::once(Arc::clone(&newest)).chain(older).take(MAX_REFUSED).collect();
                    (why, true)
                }
            },
            Err(why) => (why, false),
        };
        let since = self.missing.as_ref().map_or(now, |before| before.since);
        self.missing = Some(MissingAddresses { why: why.into(), since, is_refusal });
    }

    /// The addresses that a list uses, which allows the addresses for which `allows` is true.
    pub fn addresses_for(&self, allows: impl Fn(IpAddr) -> bool) -> &Arc<[IpAddr]> {
        self.refused.iter().find(|refused| refused.iter().all(|ip| allows(*ip))).unwrap_or(&self.addresses)
    }

    /// Why the name does not resolve, for a list that allows the addresses for which `allows` is
    /// true; `None` if the name resolves.
    pub fn missing_for(&self, allows: impl Fn(IpAddr) -> bool) -> Option<&MissingAddresses> {
        let newest = self.refused.first();
        let is_allowed = newest.is_some_and(|newest| newest.iter().all(|ip| allows(*ip)));
        self.missing.as_ref().filter(|missing| !missing.is_refusal || !is_allowed)
    }
}

/// The addresses that an earlier daemon has stored, and when that daemon received them. All other
/// fields of the states are empty.
pub type StoredAddresses = BTreeMap<HostName, HostState>;

/// The states of all host names of the lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostTable(pub BTreeMap<HostName, HostState>);

impl HostTable {
    /// The addresses of all names of one address family. Addresses that are otherwise refused are
    /// included if `allows` is true for all addresses of the name.
    pub fn addresses(&self, is_ipv6: bool, allows: impl Fn(IpAddr) -> bool) -> HostAddresses {
        let of_family = self.0.iter().filter(|(host, _)| host.is_ipv6 == is_ipv6);
        let found =
            of_family.map(|(host, state)| (Arc::clone(&host.name), Arc::clone(state.addresses_for(&allows))));
        found.filter(|(_, addresses)| !addresses.is_empty()).collect()
    }

    /// Whether the table contains this name, and [`HostState::is_known`] is true for it.
    pub fn is_known(&self, host: &HostName) -> bool {
        self.0.get(host).is_some_and(HostState::is_known)
    }

    /// Whether a query for this name has ended, with or without addresses.
    pub fn is_answered(&self, host: &HostName) -> bool {
        self.0.get(host).is_some_and(|state| state.answered.is_some())
    }
}

/// Decides when each name is queried, and how answers change the name's state. The caller passes
/// the time.
#[derive(Default)]
struct Schedule(BTreeMap<HostName, ScheduledHost>);

struct ScheduledHost {
    state: HostState,
    retry: Retry,
    /// When the next query is due; `None` while a query is in flight.
    due: Option<Instant>,
}

impl Schedule {
    /// Adds names, up to [`MOST`] names in total. The first queries for the new names are due
    /// immediately.
    fn add(&mut self, hosts: BTreeSet<HostName>, now: Instant) {
        for host in hosts {
            if self.0.len() < MOST {
                let new =
                    || ScheduledHost { state: HostState::default(), retry: Retry::default(), due: Some(now) };
                self.0.entry(host).or_insert_with(new);
            }
        }
    }

    /// Adds the names like [`Schedule::add`]. Names without addresses get the addresses that an
    /// earlier daemon has stored.
    fn adopt(&mut self, stored: StoredAddresses, now: Instant) {
        self.add(stored.keys().cloned().collect(), now);
        for (host, stored) in stored {
            if let Some(entry) = self.0.get_mut(&host) {
                entry.state.adopt(stored);
            }
        }
    }

    /// Starts the query that is due first, and returns the queried name; `None` if no query is due.
    /// While other queries are in flight (`has_others`), a query starts up to [`TOGETHER`] early.
    fn begin(&mut self, now: Instant, has_others: bool) -> Option<HostName> {
        let due = |(_, entry): &(&HostName, &mut ScheduledHost)| entry.due;
        let first = self.0.iter_mut().filter(|(_, entry)| entry.due.is_some()).min_by_key(due);
        let (host, entry) = first?;
        // After a query without addresses, the next query does not start early.
        let early = if has_others && entry.state.missing.is_none() { TOGETHER } else { Duration::ZERO };
        if entry.due.is_none_or(|due| due > now + early) {
            return None;
        }
        entry.due = None;
        Some(host.clone())
    }

    /// When the next query is due.
    fn due(&self) -> Option<Instant> {
        self.0.values().filter_map(|entry| entry.due).min()
    }

    /// Stores the result of a query, and decides when the next one is due. `draw` is a random
    /// number in 0..1.
    fn answered(
        &mut self,
        host: &HostName,
        result: Result<Lookup<IpAddr>, Failure>,
        now: Instant,
        draw: f64,
    ) {
        // The name may have been removed in the meantime.
        let Some(ScheduledHost { state, retry, due }) = self.0.get_mut(host) else { return };
        let found = result.and_then(|answer| match answer {
            Lookup::Records(records) if records.records.len() > MAX_ADDRESSES => {
                let count = records.records.len();
                Err(Failure::TooLarge(format!("{count} addresses, but at most {MAX_ADDRESSES}")))
            }
            answer => Ok(answer),
        });
        let (delay, result) = match found {
            Ok(Lookup::Records(records)) => {
                retry.answered();
                let delay = later(records.ttl.clamp(MIN_TTL, MAX_TTL), draw);
                (delay, Ok(records.records.into_iter().collect()))
            }
            Ok(Lookup::Empty { why }) => {
                retry.answered();
                (later(MIN_TTL, draw), Err(why))
            }
            Err(failure) => (retry.failed(draw), Err(failure.to_string())),
        };
        *due = Some(now + delay);
        state.take(result, now);
    }

    fn table(&self) -> Arc<HostTable> {
        let known = self.0.iter().map(|(host, entry)| (host.clone(), entry.state.clone()));
        Arc::new(HostTable(known.collect()))
    }
}

/// The time until the next query for a name: the TTL, a random part, and [`TOGETHER`]. The random
/// part spreads the queries of many hosts. [`TOGETHER`] is added because a query may start earlier
/// by this time. `draw` is a random number in 0..1.
fn later(ttl: Duration, draw: f64) -> Duration {
    ttl.mul_f64(1.0 + SPREAD * draw) + TOGETHER
}

/// Resolves host names in a task that starts with the first name, and ends when this value is
/// dropped.
pub struct Hosts {
    inner: Arc<Inner>,
    task: Mutex<Option<AbortHandle>>,
}

struct Inner {
    shared: Arc<ProviderContext>,
    state: Mutex<ResolutionState>,
    /// Notified when queries may have become due.
    wake: Notify,
    table: watch::Sender<Arc<HostTable>>,
    /// Notified after each result.
    news: Arc<Notify>,
}

#[derive(Default)]
struct ResolutionState {
    schedule: Schedule,
    /// The settings, and the resolver with these settings.
    resolver: Option<(DnsSettings, Arc<Resolver>)>,
}

impl Drop for Hosts {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }
}

impl Hosts {
    /// Creates a resolver without names. It notifies `news` after each result.
    pub fn new(shared: &Arc<ProviderContext>, news: &Arc<Notify>) -> Self {
        let (shared, news) = (Arc::clone(shared), Arc::clone(news));
        let (state, wake, table) = (Mutex::default(), Notify::new(), watch::Sender::default());
        Self { inner: Arc::new(Inner { shared, state, wake, table, news }), task: Mutex::default() }
    }

    /// The present states of all names.
    pub fn table(&self) -> Arc<HostTable> {
        Arc::clone(&self.inner.table.borrow())
    }

    /// Resolves only these names from now on.
    pub fn resolve_only(&self, hosts: BTreeSet<HostName>, settings: &DnsSettings) {
        self.resolve(hosts, settings, true);
    }

    /// Resolves these names in addition to the previous ones. Returns a receiver for the present
    /// and later states of the table. Must be called on a Tokio runtime.
    pub fn resolve_too(
        &self,
        hosts: BTreeSet<HostName>,
        settings: &DnsSettings,
    ) -> watch::Receiver<Arc<HostTable>> {
        self.resolve(hosts, settings, false);
        self.inner.table.subscribe()
    }

    /// Resolves the names of `stored` in addition to the previous ones. A name retains its stored
    /// addresses until its first answer with addresses. Must be called on a Tokio runtime.
    pub fn adopt(&self, stored: StoredAddresses, settings: &DnsSettings) {
        let hosts = stored.keys().cloned().collect();
        let now = tokio::time::Instant::now().into_std();
        self.inner.state().schedule.adopt(stored, now);
        self.resolve(hosts, settings, false);
        self.inner.news.notify_one();
    }

    /// Queries these names at once, except the names with a query in flight.
    pub fn resolve_again(&self, hosts: &BTreeSet<HostName>) {
        let now = tokio::time::Instant::now().into_std();
        let mut state = self.inner.state();
        for (host, entry) in &mut state.schedule.0 {
            if hosts.contains(host) && entry.due.is_some() {
                entry.due = Some(now);
            }
        }
        self.inner.wake.notify_one();
    }

    fn resolve(&self, hosts: BTreeSet<HostName>, settings: &DnsSettings, is_all: bool) {
        let now = tokio::time::Instant::now().into_std();
        let mut state = self.inner.state();
        if is_all {
            state.schedule.0.retain(|host, _| hosts.contains(host));
        }
        if state.resolver.as_ref().is_none_or(|(before, _)| before != settings) {
            let resolver = self.inner.shared.dns.get(settings);
            state.resolver = Some((settings.clone(), resolver));
            let waiting = state.schedule.0.values_mut().filter(|entry| entry.due.is_some());
            waiting.for_each(|entry| entry.due = Some(now));
        }
        let has_any = !hosts.is_empty();
        state.schedule.add(hosts, now);
        self.inner.publish(&state);
        drop(state);
        self.inner.wake.notify_one();
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if has_any && task.is_none() {
            let work = run(Arc::clone(&self.inner), fastrand::Rng::new());
            *task = Some(tokio::spawn(work).abort_handle());
        }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, ResolutionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, state: &ResolutionState) {
        self.table.send_replace(state.schedule.table());
    }
}

async fn run(inner: Arc<Inner>, mut random: fastrand::Rng) {
    let mut questions = JoinSet::new();
    // While this guard exists, the connection is not closed between consecutive queries.
    let mut hold = None;
    loop {
        let due = begin(&inner, &mut questions);
        if questions.is_empty() {
            hold = None;
        } else if hold.is_none() {
            hold = inner.state().resolver.clone().map(|(_, resolver)| ConnectionGuard::of(resolver));
        }
        // If the maximum number is in flight, the next query starts after another one has ended.
        let is_full = questions.len() >= IN_FLIGHT;
        tokio::select! {
            Some(result) = questions.join_next() => {
                // A panic in a query ends the process.
                let Ok((host, answer)) = result else { continue };
                let mut state = inner.state();
                let now = tokio::time::Instant::now().into_std();
                state.schedule.answered(&host, answer, now, random.f64());
                inner.publish(&state);
                drop(state);
                inner.news.notify_one();
            }
            () = inner.wake.notified() => {}
            () = sleep_until(due), if !is_full => {}
        }
    }
}

/// Begins the queries that are due, up to the maximum number in flight. Returns when the next query
/// is due.
fn begin(
    inner: &Inner,
    questions: &mut JoinSet<(HostName, Result<Lookup<IpAddr>, Failure>)>,
) -> Option<Instant> {
    let mut state = inner.state();
    let (_, resolver) = state.resolver.clone()?;
    let now = tokio::time::Instant::now().into_std();
    while questions.len() < IN_FLIGHT
        && let Some(host) = state.schedule.begin(now, !questions.is_empty())
    {
        let resolver = Arc::clone(&resolver);
        questions.spawn(async move {
            let answer = resolver.addresses(&host.name, host.is_ipv6).await;
            (host, answer)
        });
    }
    state.schedule.due()
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
