//! The sources of endpoint lists: files, and servers. A list is always read, checked and delivered
//! as a whole, never as a difference from the previous list.
//!
//! The daemon watches the directory of each file, and therefore detects a file that is renamed into
//! place. If a file cannot be used, the daemon reports this and changes nothing. It also stores the
//! last good list on disk, for a start at which the file cannot be used.

pub mod assignments;
pub mod check;
pub mod hosts;
pub mod last_good;
mod shrink;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use lb_config::discovery::{self, RemoteRules};
use lb_config::endpoints::{self, ListContext, MAX_HOSTS, NO_HOSTS, Parsed};
use lb_config::{EndpointSource, ListFile, NamedList, RemoteSource};
use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::feed::{List, ReadFailure, Version};
use lb_core::membership::{Assignments, Consumer};
use lb_core::service::Service;
use lb_core::subset::Algorithm;
use lb_discovery::{DiscoveryRequest, Failure, Finding, HostName, HostTable, Latest, render_list};
use lb_host::regular_file;
use lb_kernel::trust::Untrusted;
use thiserror::Error;

pub use self::shrink::{Guard, PendingRemovals};
use lb_document::diagnostic::Diagnostics;

/// The maximum size of a file with a list, in bytes.
pub const MAX_BYTES: u64 = endpoints::MAX_FILE_BYTES as u64;

/// The maximum number of threads that calls on files may occupy at the same time: one for each of
/// 256 services, and 64 for files of an earlier configuration, the configuration itself, and stored
/// lists.
pub const MAX_THREADS: usize = 320;

/// Why a call on a file returned no result in time.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NoAnswer {
    /// Another call on this file has not returned, and its thread waits for the file system.
    #[error("{} does not answer: its file system hangs or is very slow; retrying as soon as it answers", .0.display())]
    Hung(PathBuf),
    /// Calls on other files occupy all threads.
    #[error("{} is not checked: {MAX_THREADS} other files do not answer", .0.display())]
    NoThread(PathBuf),
}

/// Why no list could be read from a file.
#[derive(Debug, Error)]
pub enum SourceError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is larger than {} MiB, the largest size that is valid for this file", .0.display(), .1 >> 20)]
    TooLarge(PathBuf, u64),
    #[error("{} changed during each read: write the file under another name and rename it into place", .0.display())]
    AlwaysChanging(PathBuf),
    #[error("{} is truncated: it does not have the end of a complete stored list", .0.display())]
    CutOff(PathBuf),
    #[error("{}: {address} is not allowed: {why}", place.display())]
    NotAllowed { place: PathBuf, address: SocketAddr, why: String },
    #[error("{}: empty answer ({why})", place.display())]
    Empty { place: PathBuf, why: String },
    #[error("{}: {failure}", place.display())]
    Failed { place: PathBuf, failure: Failure },
    #[error("{}: no answer yet", .0.display())]
    NoAnswerYet(PathBuf),
    /// A fault of a list with these host names.
    #[error("{}", crate::error::chain(&**error))]
    Hosts { hosts: Arc<BTreeSet<HostName>>, error: Box<SourceError> },
    #[error("{}: {count} of the list's host names have no answer yet, such as {first}", place.display())]
    Unanswered { place: PathBuf, count: usize, first: Arc<str> },
    #[error("{}: no endpoint is left: {why}", place.display())]
    Unresolved { place: PathBuf, why: String },
    #[error("{}: the list has {own} host names, and all lists of this host have {all}, but at most {MAX_HOSTS} are resolved", place.display())]
    TooManyHosts { place: PathBuf, own: usize, all: usize },
    #[error(transparent)]
    Untrusted(#[from] Untrusted),
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    #[error(transparent)]
    Invalid(#[from] Diagnostics),
    /// The faults of a text that no operator can see: the positions of the faults have no meaning.
    #[error("{}: {}", place.display(), faults.without_positions())]
    InvalidAnswer { place: PathBuf, faults: Diagnostics },
}

impl SourceError {
    /// Converts the error to a failure for `lb_core::feed`. After a read error, for example a lack
    /// of descriptors or memory, the feed reads the same version of the file again. It reads a
    /// missing file when the file appears.
    pub fn into_failure(self) -> ReadFailure {
        let (text, is_absent) = (crate::error::chain(&self), self.is_absent());
        match self {
            Self::NoAnswer(no_answer) => ReadFailure::Hung(no_answer.to_string()),
            Self::Read { .. } if !is_absent => ReadFailure::Unread(text),
            Self::Read { .. }
            | Self::TooLarge(..)
            | Self::AlwaysChanging(_)
            | Self::CutOff(_)
            | Self::NotAllowed { .. }
            | Self::Empty { .. }
            | Self::Failed { .. }
            | Self::NoAnswerYet(_)
            | Self::Hosts { .. }
            | Self::Unanswered { .. }
            | Self::Unresolved { .. }
            | Self::TooManyHosts { .. }
            | Self::Untrusted(_)
            | Self::Invalid(_)
            | Self::InvalidAnswer { .. } => ReadFailure::Faulty(text),
        }
    }

    /// Whether there is no list to read: the server's answer has no list, or there is no answer.
    pub const fn is_without_list(&self) -> bool {
        matches!(self, Self::Empty { .. } | Self::Failed { .. } | Self::NoAnswerYet(_))
    }

    /// The host names of the list, if the fault is that some of them have no answer yet.
    pub fn unanswered(&self) -> Option<&BTreeSet<HostName>> {
        match self {
            Self::Hosts { hosts, error } if matches!(**error, Self::Unanswered { .. }) => Some(hosts),
            _ => None,
        }
    }

    /// Whether there is no file.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Identifies the version of a file, without reading the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether every later change of the file changes the stamp. Kernels before 6.13 use the time
    /// of the last tick as the time of a change. Two changes within one tick may therefore result
    /// in equal stamps.
    pub fn is_settled(self) -> bool {
        /// Two ticks of the slowest clock, 100 Hz.
        const TICKS: Duration = Duration::from_millis(20);
        let changed = Duration::from_secs(self.changed.0.cast_unsigned())
            + Duration::from_nanos(self.changed.1.cast_unsigned());
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // If the clock was set back, the time of the change is in the future. The file is then
        // treated as settled.
        now.checked_sub(changed).is_none_or(|age| age >= TICKS)
    }

    /// The version of a file that has this stamp now.
    pub fn version(stamp: Option<Self>) -> Version<Self> {
        Version { stamp, is_settled: stamp.is_none_or(Self::is_settled) }
    }

    /// The stamp of a server's answer: different for each number.
    pub fn numbered(number: u64) -> Self {
        Self { device: 0, inode: number, bytes: 0, modified: (0, 0), changed: (0, 0) }
    }

    /// The version of a server's answer.
    pub fn version_of(answer: &Latest) -> Version<Self> {
        Version { stamp: Some(Self::numbered(answer.number)), is_settled: true }
    }

    /// The number of a stamp that [`Stamp::numbered`] has returned.
    pub fn number(self) -> u64 {
        self.inode
    }

    /// The stamp of the file at a path; `None` if there is no file.
    pub fn at(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().as_ref().map(Self::of)
    }
}

/// The version of a file that could not be read.
pub const NO_VERSION: Version<Stamp> = Version { stamp: None, is_settled: true };

/// Opens a file, which blocks until the file system answers. Returns the version of the file.
pub fn answers(path: &Path) -> Version<Stamp> {
    let version = Stamp::version(Stamp::at(path));
    // Without this flag, opening a pipe would wait for a writer.
    drop(File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path));
    version
}

/// The origin of a service's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListOrigin {
    /// The list is in the configuration itself, and contains host names.
    Static(NamedList),
    File(ListFile),
    Remote(Arc<RemoteSource>),
}

impl ListOrigin {
    /// Returns `None` if the list is in the configuration itself and contains no host names.
    pub fn of(source: &EndpointSource) -> Option<Self> {
        match source {
            EndpointSource::Static(_) => None,
            EndpointSource::Named(list) => Some(Self::Static(list.clone())),
            EndpointSource::File(file) => Some(Self::File(file.clone())),
            EndpointSource::Remote(remote) => Some(Self::Remote(Arc::clone(remote))),
        }
    }
}

impl fmt::Display for ListOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Static(_) => f.write_str("the configuration"),
            Self::File(file) => write!(f, "file {}", file.path.display()),
            Self::Remote(remote) => remote.origin.fmt(f),
        }
    }
}

lb_core::named! {
    /// The effect on connects while a server's list is suspended, because the list is stale or
    /// empty.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Suspension {
        /// The service has no endpoints, and connects fail.
        Refuse = "refuse",
        /// The only endpoint is the service's own address, and connects are not balanced.
        Pass = "pass",
    }
}

/// The list of a service: its origin, and the properties of the service that the list must match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListSource {
    pub origin: ListOrigin,
    /// The service's address.
    pub service: SocketAddr,
    /// The addresses of all services.
    pub services: Vec<SocketAddr>,
    /// The service's algorithm, if the algorithm needs indexes in the list.
    pub needs_indexes: Option<Algorithm>,
    /// The file in which the last good list is stored.
    pub last_good: PathBuf,
}

impl ListSource {
    /// Describes the source of a service's list. The last good list is stored below the directory
    /// `state`. `services` are the addresses of all services; no endpoint may have one of these
    /// addresses.
    pub fn new(service: &Service, origin: ListOrigin, services: &[SocketAddr], state: &Path) -> Self {
        // The stored file has the extension of the list's format, because the parser does not
        // recognize every list in JSON or YAML by its text.
        let format = match &origin {
            ListOrigin::File(file) => endpoints::format_of(&file.path),
            ListOrigin::Static(_) | ListOrigin::Remote(_) => "json",
        };
        let last_good = state.join("last-good").join(format!("{}.{format}", service.name));
        Self {
            origin,
            service: service.address,
            services: services.to_vec(),
            needs_indexes: service.subset.needs_indexes(),
            last_good,
        }
    }

    /// The endpoint file; `None` if the list does not come from a file.
    pub fn file(&self) -> Option<&Path> {
        match &self.origin {
            ListOrigin::File(file) => Some(&file.path),
            ListOrigin::Static(_) | ListOrigin::Remote(_) => None,
        }
    }

    /// The rules for the answers of the list's server; `None` if the list does not come from a
    /// server.
    pub fn rules(&self) -> Option<&RemoteRules> {
        match &self.origin {
            ListOrigin::Static(_) | ListOrigin::File(_) => None,
            ListOrigin::Remote(remote) => Some(&remote.rules),
        }
    }

    /// Whether removals of most endpoints from this list are deferred. In the configuration and in
    /// files, this concerns only lists with `hosts`: DNS may answer from a part of its data.
    pub fn limits_shrink(&self, hosts: &BTreeSet<HostName>) -> bool {
        self.rules().map_or(!hosts.is_empty(), |rules| rules.limits_shrink)
    }

    /// Whether `allow` of the list contains this address.
    pub fn allows(&self, ip: IpAddr) -> bool {
        self.rules().is_some_and(|rules| rules.allows(ip))
    }

    /// The query for the list's server; `None` if the list does not come from a server.
    pub fn wanted(&self) -> Option<DiscoveryRequest> {
        match &self.origin {
            ListOrigin::Static(_) | ListOrigin::File(_) => None,
            ListOrigin::Remote(remote) => Some(DiscoveryRequest::List {
                origin: remote.origin.clone(),
                is_ipv6: self.service.is_ipv6(),
            }),
        }
    }

    /// The name of the source in messages: for a file its path.
    pub fn place(&self) -> PathBuf {
        match &self.origin {
            ListOrigin::Static(_) => self.origin.to_string().into(),
            ListOrigin::File(file) => file.path.clone(),
            ListOrigin::Remote(remote) => remote.origin.to_string().into(),
        }
    }

    /// The text of the list, if the list is in the configuration itself.
    pub fn static_text(&self) -> Option<Vec<u8>> {
        match &self.origin {
            ListOrigin::Static(list) => Some(list.text.as_bytes().to_vec()),
            ListOrigin::File(_) | ListOrigin::Remote(_) => None,
        }
    }

    /// Reads the list in the endpoint file or in the configuration; changes nothing. Blocks until
    /// the file's file system answers. Returns `None` if the list comes from a server. See
    /// [`ListSource::parse`] for `hosts`.
    ///
    /// # Errors
    /// If the file cannot be read completely, or is not a valid list.
    pub fn read(&self, hosts: Option<&Arc<HostTable>>) -> Option<Result<Contents, SourceError>> {
        if let Some(text) = self.static_text() {
            return Some(self.parse(&self.place(), text, hosts));
        }
        let path = self.file()?;
        Some(read_whole(path).and_then(|text| self.parse(path, text, hosts)))
    }

    /// Reads the stored last good list; changes nothing.
    ///
    /// # Errors
    /// The errors of [`ListSource::read`]. Also if another user may write to the state directory.
    pub fn stored(&self) -> Result<Contents, SourceError> {
        self.parse(&self.last_good, last_good::read(&self.last_good)?, None)
    }

    /// The list in the server's answer or in the configuration. While the list is suspended, the
    /// answer has no effect.
    ///
    /// # Errors
    /// If the server has not sent a list, and the errors of [`ListSource::parse`].
    pub fn answered(
        &self,
        latest: Latest,
        suspension: Option<Suspension>,
        hosts: &Arc<HostTable>,
    ) -> Result<Contents, SourceError> {
        let place = self.place();
        let (text, notes) = match latest.finding {
            _ if let Some(suspension) = suspension => return Ok(self.suspended(suspension)),
            _ if let Some(text) = self.static_text() => (text, Vec::new()),
            Some(Finding::List(snapshot)) => (snapshot.text.to_vec(), snapshot.notes),
            Some(Finding::Empty { why }) => return Err(SourceError::Empty { place, why }),
            Some(Finding::Failed(failure)) => return Err(SourceError::Failed { place, failure }),
            None => return Err(SourceError::NoAnswerYet(place)),
        };
        let mut contents = self.parse(&place, text, Some(hosts))?;
        contents.notes = notes.iter().chain(contents.notes.iter()).cloned().collect();
        Ok(contents)
    }

    /// Parses the text of a list. `path` is the endpoint file, the file of the stored last good
    /// list, or the name of the server's list. `hosts` contains the known addresses of host names.
    /// If `hosts` is `None`, entries with host names are skipped.
    ///
    /// # Errors
    /// If the list is not valid for this configuration, the stored list is not complete, host names
    /// have no answer yet, or no endpoint has an address.
    pub fn parse(
        &self,
        path: &Path,
        text: Vec<u8>,
        hosts: Option<&Arc<HostTable>>,
    ) -> Result<Contents, SourceError> {
        if path == self.last_good && !last_good::is_whole(&text) {
            return Err(SourceError::CutOff(path.to_owned()));
        }
        let (port_name, protocol) = match &self.origin {
            ListOrigin::File(file) => (file.port_name.as_deref(), file.protocol),
            ListOrigin::Static(_) | ListOrigin::Remote(_) => (None, None),
        };
        let is_ipv6 = self.service.is_ipv6();
        let addresses = hosts.map(|hosts| hosts.addresses(is_ipv6, |ip| self.allows(ip))).unwrap_or_default();
        let (service, services) = (Some(self.service), &*self.services);
        let reading = ListContext { path, port_name, protocol, service, services, hosts: &addresses };
        let named = |names: BTreeSet<String>| -> Arc<BTreeSet<HostName>> {
            let host = |name: String| HostName { name: name.into(), is_ipv6 };
            Arc::new(names.into_iter().map(host).collect())
        };
        let parsed = endpoints::parse(&text, &reading).map_err(|faults| {
            // Parses the text again without addresses, only to find its host names. This fails only
            // if a fault does not depend on addresses.
            let bare = ListContext { hosts: &NO_HOSTS, ..reading };
            let names = endpoints::parse(&text, &bare).map(|parsed| parsed.hosts);
            at_hosts(&names.map(named).unwrap_or_default(), self.invalid(path, faults))
        })?;
        let Parsed { list, hosts: names, resolved, notes } = parsed;
        let names = named(names);
        let checked = hosts.map_or(Ok(()), |hosts| self.check_hosts(&names, &list, hosts));
        let checked = checked.and_then(|()| {
            let checked = endpoints::check_indexes(&list, self.needs_indexes, path);
            checked.map_err(|faults| self.invalid(path, faults))
        });
        checked
            .and_then(|()| self.check_addresses(&list, &resolved))
            .map_err(|error| at_hosts(&names, error))?;
        // The stored list has addresses in place of host names.
        let text = if names.is_empty() { text.into() } else { render_list(&list) };
        Ok(Contents {
            assignments: Assignments::new(list),
            table: hosts.filter(|_| !names.is_empty()).cloned().unwrap_or_default(),
            hosts: names,
            notes: notes.into(),
            text,
            pending: None,
        })
    }

    /// The error for the faults of the text at `path`.
    fn invalid(&self, path: &Path, faults: Diagnostics) -> SourceError {
        if self.file().is_some() || path == self.last_good {
            return faults.into();
        }
        SourceError::InvalidAnswer { place: self.place(), faults }
    }

    /// Refuses a list without any endpoint. Also refuses a list with host names that have no answer
    /// yet, so that no list takes effect with only a part of its endpoints.
    fn check_hosts(
        &self,
        names: &BTreeSet<HostName>,
        list: &EndpointList,
        hosts: &HostTable,
    ) -> Result<(), SourceError> {
        let mut unknown = names.iter().filter(|host| !hosts.is_known(host));
        if let Some(first) = unknown.next() {
            let (first, count) = (Arc::clone(&first.name), unknown.count() + 1);
            return Err(SourceError::Unanswered { place: self.place(), count, first });
        }
        if list.as_slice().is_empty() {
            let why = |host: &HostName| Some(hosts.0.get(host)?.missing.as_ref()?.why.to_string());
            let first = names.iter().find_map(why).unwrap_or_default();
            let why = format!("none of its {} host names resolves ({first})", names.len());
            return Err(SourceError::Unresolved { place: self.place(), why });
        }
        Ok(())
    }

    /// The list that is in force while the server's list is suspended. It is not stored.
    pub fn suspended(&self, suspension: Suspension) -> Contents {
        let list = match suspension {
            Suspension::Refuse => EndpointList::default(),
            Suspension::Pass => {
                let endpoint = Endpoint {
                    address: self.service,
                    index: 0,
                    weight: 1,
                    state: EndpointState::Healthy,
                    zone: None,
                    agent: None,
                };
                EndpointList::new(vec![endpoint], self.service, &[]).expect("a service's address is valid")
            }
        };
        Contents {
            assignments: Assignments::new(list),
            hosts: Arc::default(),
            table: Arc::default(),
            notes: [].into(),
            text: [].into(),
            pending: None,
        }
    }

    /// Refuses a list with an address that comes from a server and is not allowed. `resolved`
    /// contains the addresses that come only from host names, each with its host name.
    fn check_addresses(
        &self,
        list: &EndpointList,
        resolved: &BTreeMap<SocketAddr, String>,
    ) -> Result<(), SourceError> {
        let refusal = |address: SocketAddr| {
            let host = resolved.get(&address);
            let why = match self.rules() {
                Some(rules) => rules.refusal(address.ip())?,
                None => host.and_then(|_| discovery::refusal(address.ip()))?.to_owned(),
            };
            let of = host.map_or_else(String::new, |host| format!(" (an address of {host})"));
            Some(SourceError::NotAllowed { place: self.place(), address, why: why + &of })
        };
        let refused = list.as_slice().iter().find_map(|endpoint| refusal(endpoint.address));
        refused.map_or(Ok(()), Err)
    }
}

/// The host names of a list that must be read again after they have an answer; `None` if all have
/// one. Addresses that an earlier daemon stored are not answers.
pub fn unanswered(read: &Result<Contents, SourceError>) -> Option<&BTreeSet<HostName>> {
    match read {
        Ok(Contents { hosts, table, .. }) => {
            Some(&**hosts).filter(|hosts| hosts.iter().any(|host| !table.is_answered(host)))
        }
        Err(error) => error.unanswered(),
    }
}

/// Adds the host names of the list to its error.
fn at_hosts(hosts: &Arc<BTreeSet<HostName>>, error: SourceError) -> SourceError {
    if hosts.is_empty() {
        return error;
    }
    SourceError::Hosts { hosts: Arc::clone(hosts), error: Box::new(error) }
}

/// The content of a valid list: its endpoints, without assignments yet, and the text.
#[derive(Clone, Debug)]
pub struct Contents {
    pub assignments: Assignments,
    /// The host names in the text.
    pub hosts: Arc<BTreeSet<HostName>>,
    /// The table of host names with which the text was parsed; empty if the list has no host names,
    /// and after the event loop has compared the table with the present one.
    pub table: Arc<HostTable>,
    /// The ignored parts of the text, with reasons.
    pub notes: Arc<[String]>,
    /// The text of the list; empty once it is stored.
    pub text: Arc<[u8]>,
    /// The removals in the server's answer that do not take effect yet; `None` if the list equals
    /// the answer.
    pub pending: Option<PendingRemovals>,
}

impl Contents {
    /// This list with complete assignments, and with deferred removals if it removes most endpoints
    /// of `guard`. Reuses assignments in `before` if the lists are equal. May take seconds for a
    /// job with many tasks and endpoints.
    #[must_use]
    pub fn completed(
        mut self,
        guard: Option<&Guard>,
        before: Option<&Assignments>,
        consumers: &[Consumer],
    ) -> Self {
        if let Some(guard) = guard {
            self.defer_removals(guard);
        }
        if let Some(before) = before {
            self.assignments.follow(before);
        }
        complete_assignments(&mut self.assignments, consumers);
        self
    }

    /// If the list removes most endpoints, defers the removals. The list is then not stored on
    /// disk, because the server has not sent the list in this form.
    fn defer_removals(&mut self, guard: &Guard) {
        let Some((pending, joined)) = guard.defer_removals(self.assignments.list()) else { return };
        self.assignments = Assignments::new(joined);
        self.text = [].into();
        self.pending = Some(pending);
    }
}

/// Computes the missing memberships of these tasks, and drops the memberships of all other tasks.
/// May take seconds for the largest jobs.
pub fn complete_assignments(assignments: &mut Assignments, consumers: &[Consumer]) {
    /// Only one large job is computed at a time, with all threads: each large job may need 200 MB
    /// of memory and a whole CPU.
    static TURN: Mutex<()> = Mutex::new(());
    for job in assignments.missing(consumers) {
        // A job with only one task needs no subsets of other tasks. It is computed quickly, and
        // does not wait for other jobs.
        let is_large = job.iter().any(|consumer| consumer.task.count > 1);
        let _turn = is_large.then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
        assignments.compute(job);
    }
}

impl List for Contents {
    fn has_same_contents(&self, other: &Self) -> bool {
        self.assignments.list() == other.assignments.list()
    }

    fn is_of_the_same_reading(&self, other: &Self) -> bool {
        self.assignments.is_of_the_same_reading(&other.assignments)
    }

    fn take_over(&mut self, other: &Self) {
        self.assignments.take_over(&other.assignments);
    }
}

/// Reads the list in a file. `service` is the address of the file's service, if it is known;
/// `services` are the addresses of all services.
///
/// # Errors
/// If the file cannot be read completely, or is not a valid list.
pub fn read_list(
    file: &ListFile,
    service: Option<SocketAddr>,
    services: &[SocketAddr],
) -> Result<Parsed, SourceError> {
    Ok(file.parse(&read_whole(&file.path)?, service, services)?)
}

/// Reads a whole file. If the file changes during the read, reads it again.
///
/// # Errors
/// If the file cannot be read, is too large, changes during each read, or is not a regular file.
pub fn read_whole(path: &Path) -> Result<Vec<u8>, SourceError> {
    read_at_most(path, MAX_BYTES)
}

/// Like [`read_whole`], for a file of at most `most` bytes.
fn read_at_most(path: &Path, most: u64) -> Result<Vec<u8>, SourceError> {
    /// The maximum number of attempts. If a file changes during each attempt, its writer does not
    /// rename the file into place.
    const ATTEMPTS: usize = 3;
    let fail = |source| SourceError::Read { path: path.to_owned(), source };
    for _ in 0..ATTEMPTS {
        let (mut file, before) = regular_file::open(path).map_err(fail)?;
        if before.size() > most {
            return Err(SourceError::TooLarge(path.to_owned(), most));
        }
        let mut text = Vec::new();
        // Reads up to one byte more than allowed, so that a file that grows during the read is
        // rejected, not truncated.
        file.by_ref().take(most + 1).read_to_end(&mut text).map_err(fail)?;
        let after = file.metadata().map_err(fail)?;
        if Stamp::of(&before) == Stamp::of(&after) && after.size() == text.len() as u64 {
            return Ok(text);
        }
    }
    Err(SourceError::AlwaysChanging(path.to_owned()))
}

/// The directory to watch for changes of a file.
pub fn directory_of(file: &Path) -> PathBuf {
    match file.parent() {
        Some(directory) if directory != Path::new("") => directory.to_owned(),
        _ => PathBuf::from("."),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_file_longer_than_any_list_is_not_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(MAX_BYTES).unwrap();
        assert_eq!(read_whole(file.path()).unwrap().len() as u64, MAX_BYTES);
        file.as_file().set_len(MAX_BYTES + 1).unwrap();
        let error = read_whole(file.path()).unwrap_err().to_string();
        assert!(error.contains("is larger than 4 MiB"), "{error}");
    }
    /// Kubernetes mounts files in this way: a file is a link through a link to a directory, which
    /// is replaced. If the clock was set back, a later content has an earlier time.
    #[test]
    fn a_stamp_changes_with_a_switched_link_and_an_earlier_time() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for version in ["v1", "v2"] {
            fs::create_dir(at(version)).unwrap();
            fs::write(at(version).join("users.toml"), "").unwrap();
        }
        symlink("v1", at("current")).unwrap();
        symlink("current/users.toml", at("users.toml")).unwrap();
        let before = Stamp::at(&at("users.toml"));
        assert!(before.is_some() && before == Stamp::at(&at("v1/users.toml")));
        symlink("v2", at("next")).unwrap();
        fs::rename(at("next"), at("current")).unwrap();
        let after = Stamp::at(&at("users.toml"));
        assert!(after != before && after == Stamp::at(&at("v2/users.toml")));
        let file = File::options().write(true).open(at("users.toml")).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
        assert_ne!(Stamp::at(&at("users.toml")), after);
    }
}
