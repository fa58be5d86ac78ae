//! The provider of lists from DNS: a name's SRV records with the addresses of their targets, or its
//! A or AAAA records with a port from the configuration.
//!
//! An answer is the complete list. Where the RFCs permit several interpretations, this provider
//! does the following:
//! * Of SRV records (RFC 2782), only the records with the lowest priority value are used. Weight 0
//!   becomes 1, because the RFC gives such a target a small share instead of none. If several
//!   records lead to the same address and port, their weights are added, because under the RFC
//!   their shares add up.
//! * The time until the next query is the shortest TTL, within `min_ttl` and `max_ttl`. A record
//!   remains in use after its TTL has ended.
//! * If the query for a target's addresses fails, or its answer contains no address, the target
//!   retains its previous addresses as long as an SRV record names it. A target that never had
//!   addresses is left out.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use lb_config::discovery::{DnsOrigin, DnsSettings};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

mod message;
mod resolver;

#[cfg(test)]
mod tests;

pub use self::message::{Additional, Lookup, RecordSet, Srv};
pub use self::resolver::{ConnectionGuard, QueryLimits, Resolver, Resolvers};

use self::message::Question;
pub use self::resolver::IN_FLIGHT;
use crate::{Again, DiscoveredList, Failure, Finding, Listed, ProviderContext, Queried, render};

/// The largest number of different targets in the SRV records of a name.
const MAX_TARGETS: usize = 1000;

/// The time limit for all queries for the addresses of a name's targets. A host can send
/// [`MAX_TARGETS`] queries in a third of this time ([`QueryLimits`]). Queries without an answer by
/// then are treated as failed.
const TARGETS_TIME: Duration = Duration::from_secs(60);

/// The largest number of targets that a note names.
const NAMES_IN_NOTE: usize = 5;

/// Requests the list of one service.
pub struct Dns {
    origin: DnsOrigin,
    is_ipv6: bool,
    resolver: Arc<Resolver>,
    /// The addresses of the targets that the last SRV records named, keyed by target.
    known: BTreeMap<String, Known>,
}

/// The addresses of a target, from the last answer that contained any.
struct Known {
    addresses: BTreeSet<IpAddr>,
    resolved: Instant,
    ttl: Duration,
}

impl Known {
    /// Whether the addresses need not be queried again. The SRV records may be requested again a
    /// tenth before the end of their TTL. Therefore the addresses are requested again after three
    /// quarters of the addresses' TTL.
    fn is_fresh(&self, now: Instant) -> bool {
        now < self.resolved + self.ttl * 3 / 4
    }
}

/// Why a target has no addresses now.
#[derive(Clone, Debug)]
enum UnresolvedTarget {
    /// The server answered that the target has no addresses. The text is the reason.
    Empty(String),
    Failed(Failure),
}

impl Dns {
    pub fn new(origin: &DnsOrigin, is_ipv6: bool, shared: &Arc<ProviderContext>) -> Self {
        let resolver = shared.dns.get(&origin.settings);
        Self { origin: origin.clone(), is_ipv6, resolver, known: BTreeMap::new() }
    }

    /// Queries once: for A or AAAA records, or for SRV records and then for the addresses of their
    /// targets.
    pub async fn query(&mut self) -> Queried {
        let found = match self.origin.port {
            Some(port) => self.address_records(port).await,
            None => self.service_records().await,
        };
        let (finding, ttl) = found.unwrap_or_else(|failure| (Finding::Failed(failure), Duration::ZERO));
        Queried { finding, again: Again::After(clamp(ttl, &self.origin.settings)) }
    }

    async fn address_records(&self, port: u16) -> Result<(Finding, Duration), Failure> {
        Ok(match self.resolver.addresses(&self.origin.name, self.is_ipv6).await? {
            Lookup::Empty { why } => (Finding::Empty { why }, Duration::ZERO),
            Lookup::Records(records) => (address_list(&records, port), records.ttl),
        })
    }

    async fn service_records(&mut self) -> Result<(Finding, Duration), Failure> {
        let resolver = Arc::clone(&self.resolver);
        let _hold = ConnectionGuard::of(Arc::clone(&resolver));
        let records = match resolver.srv(&self.origin.name).await? {
            Lookup::Empty { why } => return Ok((Finding::Empty { why }, Duration::ZERO)),
            Lookup::Records(records) => records,
        };
        let used = Used::of(&records.records)
            .map_err(|failure| failure.map(|text| format!("dns {} SRV: {text}", self.origin.name)))?;
        let now = Instant::now();
        self.known.retain(|target, _| used.targets.contains(target));
        for (target, addresses) in used.added(&records, self.is_ipv6) {
            let ttl = records.additional[&target].ttl;
            self.store(target, addresses, ttl, now);
        }
        let is_due = |target: &&String| self.known.get(*target).is_none_or(|known| !known.is_fresh(now));
        let due = used.targets.iter().filter(is_due).cloned().collect();
        let missing = self.resolve_all(due, now).await;

        let lost: Vec<&Failure> =
            missing
                .iter()
                .filter(|(target, _)| !self.known.contains_key(*target))
                .filter_map(|(_, missing)| {
                    if let UnresolvedTarget::Failed(failure) = missing { Some(failure) } else { None }
                })
                .collect();
        // If the server fails after its answer with SRV records, only few targets are resolved. A
        // list of these targets would look like the complete list.
        if let Some(failure) = lost.first().filter(|_| lost.len() >= self.known.len()) {
            return Err((*failure).clone());
        }
        let left = |known: &Known| (known.resolved + known.ttl).saturating_duration_since(now);
        let shortest = self.known.values().map(left).chain([records.ttl]).min().unwrap_or_default();
        let ttl = if missing.is_empty() { shortest } else { Duration::ZERO };
        let known = self.known.iter().map(|(target, known)| (target.as_str(), &known.addresses)).collect();
        Ok((used.list(&known, &missing, records.serial), ttl))
    }

    /// Requests the addresses of targets, at most [`IN_FLIGHT`] at a time, so that queries for
    /// other names need not wait for all of them. Returns the targets without addresses.
    async fn resolve_all(
        &mut self,
        targets: BTreeSet<String>,
        now: Instant,
    ) -> BTreeMap<String, UnresolvedTarget> {
        let late =
            || UnresolvedTarget::Failed(Failure::Unreachable("no time was left for this query".to_owned()));
        let mut missing: BTreeMap<String, UnresolvedTarget> =
            targets.iter().map(|target| (target.clone(), late())).collect();
        let (mut waiting, mut questions) = (targets.into_iter(), JoinSet::new());
        loop {
            for target in waiting.by_ref().take(IN_FLIGHT - questions.len()) {
                let (resolver, is_ipv6) = (Arc::clone(&self.resolver), self.is_ipv6);
                questions.spawn(async move {
                    let answer = resolver.addresses(&target, is_ipv6).await;
                    (target, answer)
                });
            }
            let Ok(Some(result)) = timeout_at(now + TARGETS_TIME, questions.join_next()).await else {
                return missing;
            };
            match result {
                Ok((target, Ok(Lookup::Records(records)))) => {
                    missing.remove(&target);
                    self.store(target, records.records.into_iter().collect(), records.ttl, now);
                }
                Ok((target, Ok(Lookup::Empty { why }))) => {
                    missing.insert(target, UnresolvedTarget::Empty(why));
                }
                Ok((target, Err(failure))) => {
                    missing.insert(target, UnresolvedTarget::Failed(failure));
                }
                // If the task of a query panics, its target remains in `missing`.
                Err(_) => {}
            }
        }
    }

    fn store(&mut self, target: String, addresses: BTreeSet<IpAddr>, ttl: Duration, resolved: Instant) {
        let ttl = clamp(ttl, &self.origin.settings);
        self.known.insert(target, Known { addresses, resolved, ttl });
    }
}

fn clamp(ttl: Duration, settings: &DnsSettings) -> Duration {
    ttl.min(settings.max_ttl).max(settings.min_ttl)
}

/// Reads one answer of a server as a list, without queries for addresses that the answer does not
/// contain.
pub fn read_list(message: &[u8], origin: &DnsOrigin, is_ipv6: bool) -> Finding {
    read_answer(message, origin, is_ipv6).unwrap_or_else(Finding::Failed)
}

fn read_answer(message: &[u8], origin: &DnsOrigin, is_ipv6: bool) -> Result<Finding, Failure> {
    if let Some(port) = origin.port {
        return Ok(match message::read(message, &Question::addresses(&origin.name, is_ipv6)?)? {
            Lookup::Empty { why } => Finding::Empty { why },
            Lookup::Records(records) => address_list(&records, port),
        });
    }
    let records = match message::read(message, &Question::srv(&origin.name)?)? {
        Lookup::Empty { why } => return Ok(Finding::Empty { why }),
        Lookup::Records(records) => records,
    };
    let used = Used::of(&records.records)?;
    let added = used.added(&records, is_ipv6);
    let missing = |target: &&String| !added.contains_key(*target);
    let why = || UnresolvedTarget::Empty("not in the answer".to_owned());
    let missing = used.targets.iter().filter(missing).map(|target| (target.clone(), why())).collect();
    let added = added.iter().map(|(target, addresses)| (target.as_str(), addresses)).collect();
    Ok(used.list(&added, &missing, records.serial))
}

fn address_list(records: &RecordSet<IpAddr>, port: u16) -> Finding {
    let endpoints = records.records.iter().map(|ip| (SocketAddr::new(*ip, port), Listed::default()));
    list(&endpoints.collect(), records.serial, Vec::new())
}

fn list(endpoints: &BTreeMap<SocketAddr, Listed>, serial: Option<u32>, notes: Vec<String>) -> Finding {
    let version = serial.map(|serial| serial.to_string()).unwrap_or_default();
    Finding::List(DiscoveredList { text: render(endpoints), endpoints: endpoints.len(), version, notes })
}

/// The SRV records of an answer that have the lowest priority value.
struct Used {
    /// A record that the answer contains more than once is used once.
    records: BTreeSet<Srv>,
    targets: BTreeSet<String>,
    /// The number of records with other priorities, and the priority value that is used.
    unused: (usize, u16),
}

impl Used {
    /// # Errors
    /// If there are more than [`MAX_TARGETS`] targets, or if a port is 0. The complete list is then
    /// rejected.
    fn of(records: &[Srv]) -> Result<Self, Failure> {
        let lowest = records.iter().map(|srv| srv.priority).min().unwrap_or_default();
        let (used, unused): (Vec<&Srv>, Vec<&Srv>) = records.iter().partition(|srv| srv.priority == lowest);
        // `.` as a target means that there is no such service, on any port.
        let records: BTreeSet<Srv> = used.into_iter().filter(|srv| srv.target != ".").cloned().collect();
        if let Some(Srv { target, .. }) = records.iter().find(|srv| srv.port == 0) {
            return Err(Failure::Malformed(format!("the record for {target} has port 0")));
        }
        let targets: BTreeSet<String> = records.iter().map(|srv| srv.target.clone()).collect();
        if targets.len() > MAX_TARGETS {
            let count = targets.len();
            return Err(Failure::TooLarge(format!("{count} different targets, but at most {MAX_TARGETS}")));
        }
        Ok(Self { records, targets, unused: (unused.len(), lowest) })
    }

    /// The addresses that the answer itself contains, keyed by target.
    fn added(&self, records: &RecordSet<Srv>, is_ipv6: bool) -> BTreeMap<String, BTreeSet<IpAddr>> {
        let added = self.targets.iter().filter_map(|target| {
            let all = &records.additional.get(target)?.addresses;
            let addresses: BTreeSet<IpAddr> =
                all.iter().filter(|address| address.is_ipv6() == is_ipv6).copied().collect();
            (!addresses.is_empty()).then(|| (target.clone(), addresses))
        });
        added.collect()
    }

    /// Builds the list from the addresses of the targets. A target in `missing` can still have
    /// addresses from an earlier answer.
    fn list(
        &self,
        addresses: &BTreeMap<&str, &BTreeSet<IpAddr>>,
        missing: &BTreeMap<String, UnresolvedTarget>,
        serial: Option<u32>,
    ) -> Finding {
        let mut endpoints: BTreeMap<SocketAddr, Listed> = BTreeMap::new();
        let mut summed: BTreeSet<SocketAddr> = BTreeSet::new();
        for Srv { weight, port, target, .. } in &self.records {
            for ip in addresses.get(target.as_str()).into_iter().copied().flatten() {
                let address = SocketAddr::new(*ip, *port);
                if endpoints.contains_key(&address) {
                    summed.insert(address);
                }
                let endpoint = endpoints.entry(address);
                let endpoint = endpoint.or_insert_with(|| Listed { weight: 0, ..Listed::default() });
                endpoint.weight = endpoint.weight.saturating_add((*weight).max(1));
            }
        }
        let (kept, left_out): (Vec<_>, Vec<_>) =
            missing.iter().partition(|(target, _)| addresses.contains_key(target.as_str()));
        let mut notes = Vec::new();
        if self.unused.0 > 0 {
            let (count, lowest) = self.unused;
            notes.push(format!(
                "unused: {count} SRV record{} with a priority value above {lowest}",
                plural(count)
            ));
        }
        if let Some(first) = summed.first() {
            let more = match summed.len() - 1 {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            notes.push(format!("in several SRV records: {first}{more}: the weights are added"));
        }
        notes.extend(note("without addresses, left out", &left_out));
        notes.extend(note("with earlier addresses", &kept));
        match (endpoints.is_empty(), notes.is_empty()) {
            (false, _) => list(&endpoints, serial, notes),
            (true, false) => Finding::Empty { why: notes.join("; ") },
            (true, true) => {
                Finding::Empty { why: "the SRV record's target is \".\": no such service".to_owned() }
            }
        }
    }
}

/// A note that names targets, each with the reason.
fn note(what: &str, targets: &[(&String, &UnresolvedTarget)]) -> Option<String> {
    let reasons = targets.iter().take(NAMES_IN_NOTE).map(|(target, missing)| match missing {
        UnresolvedTarget::Empty(why) => format!("{target} ({why})"),
        UnresolvedTarget::Failed(failure) => format!("{target} ({failure})"),
    });
    let reasons = reasons.collect::<Vec<_>>().join(", ");
    let more = match targets.len().saturating_sub(NAMES_IN_NOTE) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let count = targets.len();
    (count > 0).then(|| format!("{count} target{} {what}: {reasons}{more}", plural(count)))
}

const fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}
