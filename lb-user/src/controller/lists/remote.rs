//! Lists that servers send: the state of each server, and when its answers take effect.
//!
//! An answer without endpoints, or a failed query, changes nothing until the rules of the
//! configuration require a change. An answer that removes most endpoints takes effect once the
//! server has repeated it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lb_config::discovery::{OnEmpty, OnStale, Origin, RemoteRules};
use lb_core::feed::Version;
use lb_discovery::{DiscoveryRequest, Finding, HostName, HostTable, Latest};
use lb_view::status::RemoteStatus;
use tracing::{info, warn};

use super::addresses;
use super::sources::WatchedSource;
use crate::controller::clock::unix_seconds;
use crate::controller::{Controller, Effect};
use crate::error::chain;
use crate::source::hosts::{lasting, lasting_in_brackets};
use crate::source::{Guard, ListOrigin, PendingRemovals, SourceError, Stamp, Suspension};

/// How long a server's answers must be without endpoints before `on_empty = "refuse"` takes effect.
/// A rolling restart usually starts new endpoints within this time.
pub const EMPTY_FOR: Duration = Duration::from_mins(1);

/// The shortest time before the removal of most endpoints takes effect. After this time, the
/// controller queries the server again, because the server must repeat the removal.
pub const SHRINK_AFTER: Duration = Duration::from_secs(10);

/// The state of a server.
#[derive(Default)]
pub struct RemoteState {
    pub latest: Latest,
    /// The version and the number of endpoints of the newest list that the server has sent.
    newest: Option<(String, usize)>,
    /// When the server was first queried. The age of a list that the server has not confirmed yet
    /// is measured from this time.
    queried_since: Option<Instant>,
    /// The effect on connects while the server's list is suspended; `None` if it is not suspended.
    pub suspension: Option<Suspension>,
    /// The last list that was read, if that list is not valid.
    invalid: Option<InvalidAnswer>,
    /// The suspension that ended when the current read was requested. If this read fails, the
    /// suspension applies again.
    ended: Option<Suspension>,
    /// When the server last confirmed a valid list; `None` if this is not known.
    valid_at: Option<Instant>,
    /// Removals that have not taken effect yet, because the server must first repeat them.
    pub shrink: Option<Shrink>,
    /// Whether the newest answer must be read even if it was read before.
    pub must_read: bool,
    /// The number of the finding that was read last.
    pub number_read: u64,
}

/// What connects of a client use until the next list of a source.
pub enum PresentList {
    InForce,
    /// The tables that an earlier daemon has left in the kernel.
    OfEarlierRun,
    None,
}

/// An answer that is not a valid list. It does not confirm the earlier list, and does not end a
/// suspension.
struct InvalidAnswer {
    /// The number of the finding.
    number: u64,
    suspension: Option<Suspension>,
    why: String,
    /// When the first of the invalid answers was read, since the last valid one.
    since: Instant,
}

/// Removals that the server has not repeated yet.
pub struct Shrink {
    pub pending: PendingRemovals,
    pub since: Instant,
    /// How many answers the server had sent when the removals were first read.
    answers: u64,
    /// Whether another query was requested, so that the server can repeat the removals.
    is_queried: bool,
    /// Whether the server has repeated the removals.
    is_repeated: bool,
}

impl Shrink {
    /// Describes the pending removals.
    pub fn describe(&self) -> String {
        format!(
            "DNS answers for the list's host names lack {} of {} endpoints; the endpoints stay until the \
             answers are repeated",
            self.pending.removed.len(),
            self.pending.base.as_slice().len()
        )
    }
}

impl RemoteState {
    /// Returns [`Self::must_read`], and resets it.
    pub fn take_must_read(&mut self) -> bool {
        std::mem::take(&mut self.must_read)
    }

    /// When another query must be requested, so that the server can repeat the removals.
    pub fn due(&self) -> Option<Instant> {
        self.shrink.as_ref().filter(|shrink| !shrink.is_queried).map(|shrink| shrink.since + SHRINK_AFTER)
    }

    /// When the server last confirmed a valid list.
    pub fn confirmed(&self) -> Option<Instant> {
        if self.invalid().is_some() { self.valid_at } else { self.latest.confirmed }
    }

    /// Why the server's last answer is not a valid list; `None` if it is a valid list, or if there
    /// is no answer yet.
    pub fn trouble(&self, now: Instant, present: &PresentList) -> Option<String> {
        let next = match self.suspension {
            None => match present {
                PresentList::InForce => "the list in force stays",
                PresentList::OfEarlierRun => "the tables of an earlier run stay in force",
                PresentList::None => "no list is in force",
            },
            Some(Suspension::Refuse) => "connects fail",
            Some(Suspension::Pass) => "connects go to the service's own address",
        };
        match self.latest.finding.as_ref()? {
            Finding::List(_) => self.invalid().map(|invalid| {
                format!("{}{}; {next}", invalid.why, lasting_in_brackets(Some(invalid.since), now))
            }),
            Finding::Empty { why } => {
                Some(format!("empty answer ({why}){}; {next}", lasting(self.latest.empty_since, now)))
            }
            Finding::Failed(failure) => {
                let confirmed = match self.latest.confirmed {
                    Some(_) => format!("no list{}", lasting(self.latest.confirmed, now)),
                    None => "no list so far".to_owned(),
                };
                Some(format!("{confirmed}: {failure}; {next}"))
            }
        }
    }

    /// The newest list that the server has sent, if it is not valid.
    fn invalid(&self) -> Option<&InvalidAnswer> {
        let is_list = matches!(self.latest.finding, Some(Finding::List(_)));
        self.invalid.as_ref().filter(|invalid| !is_list || invalid.number == self.latest.number)
    }

    /// Stores whether the answer that was read is a valid list. Without a list in the answer,
    /// nothing changes.
    fn note_read(&mut self, error: Option<&SourceError>, now: Instant) {
        // While a list is suspended, the answer itself is not read.
        if self.suspension.is_some() || error.is_some_and(SourceError::is_without_list) {
            return;
        }
        let (number, ended) = (self.number_read, self.ended.take());
        let since = self.invalid.as_ref().map_or(now, |invalid| invalid.since);
        self.invalid = error.map(|why| InvalidAnswer { number, suspension: ended, why: chain(why), since });
        if error.is_none() && number == self.latest.number {
            self.valid_at = self.latest.confirmed;
        }
    }

    /// The state for another source with the same query: the rules or the service have changed, so
    /// the answer must be read again. Its removals remain deferred.
    pub fn of_same_query(self) -> Self {
        // A list that was refused does not confirm itself.
        let valid_at = self.valid_at.or(self.latest.confirmed.filter(|_| self.invalid.is_none()));
        let Self { latest, newest, queried_since, suspension, shrink, .. } = self;
        Self { valid_at, queried_since, ended: suspension, latest, newest, shrink, ..Self::default() }
    }

    /// The state of the server, as `status` shows it.
    pub fn status(&self, origin: &ListOrigin, now: Instant) -> RemoteStatus {
        let list = self.newest.as_ref();
        let is_dns = matches!(origin, ListOrigin::Remote(remote) if matches!(remote.origin, Origin::Dns(_)));
        // A failed query is repeated, and the server then answers at once.
        let waits = !is_dns && !matches!(self.latest.finding, Some(Finding::Failed(_)));
        let next = self.latest.next.filter(|next| !waits || *next > now);
        let seconds = |duration: Duration| duration.as_secs();
        RemoteStatus {
            origin: origin.to_string(),
            version: list.map(|(version, _)| version.clone()).unwrap_or_default(),
            endpoints: list.map(|(_, endpoints)| *endpoints as u64),
            lists: self.latest.number,
            next_s: next.map(|next| seconds(next.saturating_duration_since(now))),
            empty_s: self.latest.empty_since.map(|since| seconds(now.saturating_duration_since(since))),
            pending_removals: self.shrink.as_ref().map_or(0, |shrink| shrink.pending.removed.len() as u64),
            suspension: self.suspension.map(|suspension| suspension.name().to_owned()),
            certificate_expiry_s: self.latest.expires.map(unix_seconds),
        }
    }

    /// The suspension that the rules require at the time `now`.
    fn required(&self, rules: &RemoteRules, now: Instant) -> Option<Suspension> {
        let age = |since: Instant| now.saturating_duration_since(since);
        // A failed query does not show whether there are endpoints now, so it does not end a
        // suspension.
        let is_empty =
            matches!(self.latest.finding, Some(Finding::Empty { .. })) || self.suspension.is_some();
        if rules.on_empty == OnEmpty::Refuse
            && is_empty
            && self.latest.empty_since.is_some_and(|since| age(since) >= EMPTY_FOR)
        {
            return Some(Suspension::Refuse);
        }
        let otherwise = self.invalid().and_then(|invalid| invalid.suspension);
        let confirmed = self.confirmed().or(self.queried_since)?;
        if rules.stale_after.is_none_or(|stale_after| age(confirmed) < stale_after) {
            return otherwise;
        }
        match rules.on_stale {
            OnStale::Keep => otherwise,
            OnStale::Pass => Some(Suspension::Pass),
            OnStale::Refuse => Some(Suspension::Refuse),
        }
    }
}

impl WatchedSource {
    /// Stores the version of the list that was read, and whether a server's list is valid. `error`
    /// is `None` if the list was not read because its version was known.
    pub fn note_read(&mut self, version: Version<Stamp>, error: Option<Option<&SourceError>>, now: Instant) {
        let number = version.stamp.map_or(0, Stamp::number);
        // A newer answer may have been read while a configuration was loaded.
        if self.source.wanted().is_none() || number < self.remote.number_read {
            return;
        }
        self.remote.number_read = number;
        if let Some(error) = error {
            self.remote.note_read(error, now);
        }
    }

    /// The list with which the server's next answer is compared.
    pub fn guard(&self) -> Option<Guard> {
        // The list in use during a suspension is not the server's, so the server's next answer is
        // not compared with it.
        if !self.source.limits_shrink(&self.hosts) || self.remote.suspension.is_some() {
            return None;
        }
        let Some(shrink) = &self.remote.shrink else {
            let newest = self.feed.newest()?;
            return Some(Guard { base: newest.assignments.list().clone(), accepted: None });
        };
        let accepted = shrink.is_repeated.then(|| Arc::clone(&shrink.pending.removed));
        Some(Guard { base: Arc::clone(&shrink.pending.base), accepted })
    }

    /// Stores the removals of an answer that was read. They do not take effect yet.
    pub fn take_pending(&mut self, service: &str, pending: Option<PendingRemovals>, now: Instant) {
        let Some(pending) = pending else {
            self.remote.shrink = None;
            return;
        };
        // The server has repeated the removals only if they are equal. Other removals begin a new
        // wait.
        let before = self.remote.shrink.take().filter(|shrink| shrink.pending == pending);
        self.remote.shrink = Some(before.unwrap_or_else(|| {
            warn!(
                service,
                removed = pending.removed.len(),
                of = pending.base.as_slice().len(),
                "the answer removes most endpoints; these stay in force until the server repeats the answer \
                 after 10 s"
            );
            let answers = self.remote.latest.answers;
            Shrink { pending, since: now, answers, is_queried: false, is_repeated: false }
        }));
    }
}

impl Controller {
    /// Handles the answers of servers.
    pub fn answered(&mut self, answers: &[(DiscoveryRequest, Latest)], hosts: &Arc<HostTable>, now: Instant) {
        self.resolved(hosts, now);
        for watched in self.sources.watched.values_mut() {
            let Some(wanted) = watched.source.wanted() else { continue };
            let Some((_, latest)) = answers.iter().find(|(answered, _)| *answered == wanted) else {
                continue;
            };
            if latest.number != watched.remote.latest.number {
                watched.feed.progress.changed(now);
            }
            let remote = &mut watched.remote;
            remote.latest = latest.clone();
            if let Some(Finding::List(list)) = &latest.finding {
                remote.newest = Some((list.version.clone(), list.endpoints));
            }
            // An unchanged answer is not read again, so `note_read` is not called. The list is
            // still valid.
            if remote.number_read == latest.number && remote.suspension.is_none() && remote.invalid.is_none()
            {
                remote.valid_at = latest.confirmed;
            }
        }
        self.follow_servers(now);
        self.take_addresses(answers, now);
    }

    /// Applies the rules about lists that servers have not confirmed, and about removals.
    pub fn follow_servers(&mut self, now: Instant) {
        for (service, watched) in &mut self.sources.watched {
            let remote = &mut watched.remote;
            remote.queried_since.get_or_insert(now);
            let required = watched.source.rules().and_then(|rules| remote.required(rules, now));
            if required != remote.suspension {
                match required {
                    Some(Suspension::Refuse) => {
                        warn!(service, "the server's list is suspended: connects fail");
                    }
                    Some(Suspension::Pass) => {
                        warn!(
                            service,
                            "the server's list is suspended: connects go to the service's own address"
                        );
                    }
                    None => info!(service, "the server's list is no longer suspended"),
                }
                remote.ended = remote.suspension.filter(|_| required.is_none());
                remote.suspension = required;
                remote.shrink = None;
                remote.must_read = true;
                watched.feed.progress.changed(now);
            }
            let Some(shrink) = &mut remote.shrink else { continue };
            let is_due = now >= shrink.since + SHRINK_AFTER;
            if is_due && !shrink.is_queried {
                shrink.is_queried = true;
                self.effects.extend(watched.source.wanted().map(Effect::QueryAgain));
                self.effects.push(Effect::ResolveAgain(BTreeSet::clone(&watched.hosts)));
            }
            // If a later answer has other endpoints, it must first be read and compared.
            let is_repeated = if watched.source.rules().is_some() {
                remote.latest.answers > shrink.answers
                    && remote.latest.number == remote.number_read
                    && matches!(remote.latest.finding, Some(Finding::List(_)))
            } else {
                let due = shrink.since + SHRINK_AFTER;
                let answered = |host: &HostName| self.sources.hosts.table.0.get(host)?.answered;
                watched.hosts.iter().all(|host| answered(host).is_some_and(|answered| answered >= due))
            };
            if is_due && is_repeated && !std::mem::replace(&mut shrink.is_repeated, true) {
                remote.must_read = true;
                watched.feed.progress.changed(now);
            }
        }
    }

    /// From now on, queries only the servers of the present lists and of the services' addresses.
    pub fn query_servers(&mut self) {
        let wanted = self.sources.watched.values().filter_map(|watched| watched.source.wanted());
        let addresses = self.config.lookups.iter().map(addresses::wanted);
        self.effects.push(Effect::Query(wanted.chain(addresses).collect()));
    }
}
