//! Reads every file and queries every server in a configuration, for commands that run without the
//! daemon.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use lb_config::discovery::{DnsSettings, IpFamily};
use lb_config::endpoints::MAX_HOSTS;
use lb_core::endpoint::EndpointList;
use lb_core::membership::Assignments;
use lb_discovery::{
    DiscoveryRequest, Finding, HostName, HostTable, Hosts, Latest, ProviderContext, date_of, spawn,
};
use lb_view::source::CheckedSource;
use tokio::task::JoinSet;

use super::assignments::{self, AssignmentsByService};
use crate::config::addresses::{AddressSource, KnownAddresses, WithAddresses};
use crate::config::{self, AddressLookup, ClusterIpOrigin, Config, HostEnvironment};
use crate::controller;
use crate::error::{CommandFailure, chain};
use crate::output::dry_run::{self, DoesNotFit};
use crate::source::{self, Contents, ListSource, SourceError, complete_assignments, read_whole};

/// How long a command waits for a server's answer. The provider's own time limits are shorter.
const PATIENCE: Duration = Duration::from_secs(15);

/// Checks the sources of all services: first the services' addresses, because the lists of services
/// without an address are not part of a configuration, and then all lists at the same time. Returns
/// the results in the order of the services' names.
///
/// # Errors
/// If the kernel refuses a thread or a descriptor, or the configuration cannot be read again.
pub fn check(config: &Config) -> Result<Vec<CheckedSource>> {
    check_all(config, false)
}

/// Like [`check`], but returns only the results that depend on servers: lists and addresses from
/// servers, and lists with host names.
///
/// # Errors
/// The errors of [`check`].
pub fn check_servers(config: &Config) -> Result<Vec<CheckedSource>> {
    check_all(config, true)
}

fn check_all(config: &Config, is_only_servers: bool) -> Result<Vec<CheckedSource>> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start a thread")?;
    let mut checked = runtime.block_on(async {
        let shared = Arc::new(ProviderContext::default());
        let mut checks = JoinSet::new();
        for AddressLookup { service, origin, .. } in config.lookups.iter().cloned() {
            checks.spawn(check_address(service, origin, Arc::clone(&shared)));
        }
        let (mut checked, mut known) = (Vec::new(), KnownAddresses::new());
        for (one, address) in checks.join_all().await {
            known.extend(address.map(|address| (one.origin.clone(), address)));
            checked.push(one);
        }
        let (config, unknown) = complete(config, known)?;
        let hosts = Arc::new(Hosts::new(&shared, &Arc::default()));
        let mut checks = JoinSet::new();
        for (service, source) in controller::sources(&config) {
            let (is_local, shared) = (source.wanted().is_none(), Arc::clone(&shared));
            let is_unknown = unknown.contains(&service);
            let resolving = (Arc::clone(&hosts), config.dns.clone());
            checks.spawn(async move {
                let (mut checked, contents) = check_one(service, source, shared, resolving).await;
                if is_unknown {
                    let note = "the address of the service is not known; the list was checked without it";
                    checked.notes.push(note.to_owned());
                }
                CheckedList { checked, contents, is_local }
            });
        }
        let mut lists = checks.join_all().await;
        lists.sort_by(|a, b| a.checked.service.cmp(&b.checked.service));
        refuse_too_many_hosts(&mut lists);
        refuse_misfits(&config, &mut lists)?;
        let is_shown = |list: &CheckedList| !is_only_servers || !list.is_local || list.checked.host_names > 0;
        checked.extend(lists.into_iter().filter(is_shown).map(|list| list.checked));
        anyhow::Ok(checked)
    })?;
    // A file system that does not answer must not delay the end of the command.
    runtime.shutdown_background();
    checked.sort_by(|a, b| (&a.service, a.endpoints).cmp(&(&b.service, b.endpoints)));
    Ok(checked)
}

/// The result for a list.
struct CheckedList {
    checked: CheckedSource,
    /// `None` if the list cannot be used.
    contents: Option<Contents>,
    /// Whether the list comes from a file or from the configuration.
    is_local: bool,
}

impl CheckedList {
    fn refuse(&mut self, error: String) {
        (self.checked.error, self.checked.endpoints, self.contents) = (Some(error), None, None);
    }
}

/// Refuses each list whose host names would exceed the limit for all lists together.
fn refuse_too_many_hosts(lists: &mut [CheckedList]) {
    let mut all = BTreeSet::new();
    for list in lists {
        let Some(contents) = &list.contents else { continue };
        let more: BTreeSet<HostName> = all.union(&contents.hosts).cloned().collect();
        if more.len() > MAX_HOSTS {
            let (place, own) = (list.checked.origin.clone().into(), contents.hosts.len());
            let error = chain(&SourceError::TooManyHosts { place, own, all: more.len() });
            list.refuse(without_origin(&list.checked.origin, error));
        } else {
            all = more;
        }
    }
}

/// Refuses the first list of each client that does not fit the limits of the client's maps.
fn refuse_misfits(config: &Config, lists: &mut [CheckedList]) -> Result<()> {
    let mut by_service = assignments::statics(&config.clients, &AssignmentsByService::new());
    for list in &mut *lists {
        let service = &list.checked.service;
        let mut assignments = match &list.contents {
            Some(contents) => contents.assignments.clone(),
            None => Assignments::new(EndpointList::default()),
        };
        complete_assignments(&mut assignments, &assignments::consumers(&config.clients, service));
        by_service.insert(service.clone(), assignments);
    }
    for client in &config.clients {
        let Err(CommandFailure::Other(error)) = dry_run::balancer(config, client, &by_service) else {
            continue;
        };
        let Some(misfit) = error.downcast_ref::<DoesNotFit>() else { return Err(error) };
        if let Some(list) = lists.iter_mut().find(|list| list.checked.service == misfit.service) {
            list.refuse(chain(misfit));
        }
    }
    Ok(())
}

/// The error without the list's origin at its beginning, because [`CheckedSource`] contains the
/// origin.
fn without_origin(origin: &str, error: String) -> String {
    let without = error.strip_prefix(&format!("{origin}: ")).map(str::to_owned);
    without.unwrap_or(error)
}

/// The configuration with the services' addresses that servers have sent (`known`), or else with
/// the stored addresses. A service without either gets an address that stands for any address, so
/// that its list can be checked; the second value contains the names of these services.
fn complete(config: &Config, mut known: KnownAddresses) -> Result<(Config, BTreeSet<String>)> {
    let mut unknown = BTreeSet::new();
    for lookup in &config.lookups {
        let origin = lookup.origin.to_string();
        if let Some(address) = lookup.address.filter(|_| !known.contains_key(&origin)) {
            known.insert(origin, address);
        }
    }
    let is_equal = |lookup: &AddressLookup| {
        lookup.address.is_some() && lookup.address == known.get(&lookup.origin.to_string()).copied()
    };
    if config.lookups.iter().all(is_equal) {
        return Ok((config.clone(), unknown));
    }
    let read = |known: &KnownAddresses| {
        let read = config::read(
            &config.path,
            &WithAddresses { env: &HostEnvironment, addresses: AddressSource::Known(known) },
        );
        read.map(|read| Config { paths: config.paths.clone(), ..read })
    };
    let mut read_now = read(&known)?;
    // Another service may have the address that a server has sent.
    for (port, lookup) in (1..).zip(&read_now.lookups).filter(|(_, lookup)| lookup.address.is_none()) {
        // RFC 5737, RFC 3849: addresses for documentation, which are never in use.
        let ip: IpAddr = match lookup.origin.family {
            Some(IpFamily::Ipv6) => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
            Some(IpFamily::Ipv4) | None => Ipv4Addr::new(192, 0, 2, 1).into(),
        };
        known.insert(lookup.origin.to_string(), SocketAddr::new(ip, port));
        unknown.insert(lookup.service.clone());
    }
    if !unknown.is_empty() {
        read_now = read(&known)?;
    }
    Ok((read_now, unknown))
}

/// Queries the server of a service's address. Also returns the address.
async fn check_address(
    service: String,
    origin: ClusterIpOrigin,
    shared: Arc<ProviderContext>,
) -> (CheckedSource, Option<SocketAddr>) {
    let began = tokio::time::Instant::now();
    let place = origin.to_string();
    let running = spawn(DiscoveryRequest::Address(origin), &shared, Arc::default());
    let latest = answer(&mut running.latest.clone(), 1).await;
    let finding = latest.as_ref().and_then(|latest| latest.finding.as_ref());
    let mut notes = Vec::new();
    let expired = expiry(latest.as_ref(), SystemTime::now(), &mut notes);
    let address = finding.and_then(controller::address);
    let error = match finding {
        Some(Finding::Empty { why }) => Some(why.clone()),
        Some(Finding::Failed(failure)) => Some(failure.to_string()),
        None => Some("no answer".to_owned()),
        Some(Finding::List(_)) => match address {
            Some(address) => {
                notes.insert(0, format!("the address of the service is {address}"));
                None
            }
            None => Some("the answer has no address".to_owned()),
        },
    };
    let took_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    let (host_names, unresolved) = (0, None);
    let checked = CheckedSource {
        service,
        origin: place,
        endpoints: None,
        error,
        notes,
        expired,
        host_names,
        unresolved,
        took_ms,
    };
    (checked, address)
}

async fn check_one(
    service: String,
    source: ListSource,
    shared: Arc<ProviderContext>,
    (hosts, dns): (Arc<Hosts>, DnsSettings),
) -> (CheckedSource, Option<Contents>) {
    let origin = source.origin.to_string();
    let began = tokio::time::Instant::now();
    let mut again = Duration::ZERO;
    let (text, notes, expired) = match source.wanted() {
        None => (read(&source).await, Vec::new(), None),
        Some(wanted) => query(wanted, &shared, &mut again).await,
    };
    let mut checked = CheckedSource {
        service,
        origin,
        endpoints: None,
        error: None,
        notes,
        expired,
        host_names: 0,
        unresolved: None,
        took_ms: 0,
    };
    let result = match text {
        Ok(text) => parse(&source, text, &hosts, &dns, &mut checked).await,
        Err(error) => Err(error),
    };
    let contents = match result {
        Ok(contents) => {
            checked.endpoints = Some(contents.assignments.list().as_slice().len() as u64);
            Some(contents)
        }
        Err(error) => {
            checked.error = Some(without_origin(&checked.origin, error));
            None
        }
    };
    let took = began.elapsed().saturating_sub(again);
    checked.took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    (checked, contents)
}

/// Reads the text of a list from a file or from the configuration.
async fn read(source: &ListSource) -> Result<Vec<u8>, String> {
    let path = match source.static_text() {
        Some(text) => return Ok(text),
        None => source.place(),
    };
    let read = tokio::task::spawn_blocking(move || read_whole(&path));
    match tokio::time::timeout(PATIENCE, read).await {
        Ok(Ok(result)) => result.map_err(|error| chain(&error)),
        Ok(Err(_)) | Err(_) => Err("the file system does not answer".to_owned()),
    }
}

/// Returns the content of a list. Resolves the list's host names, and adds the result to `checked`.
async fn parse(
    source: &ListSource,
    text: Vec<u8>,
    hosts: &Hosts,
    dns: &DnsSettings,
    checked: &mut CheckedSource,
) -> Result<Contents, String> {
    let place = source.place();
    let mut parsed = source.parse(&place, text.clone(), Some(&hosts.table()));
    let unanswered = parsed.as_ref().err().and_then(SourceError::unanswered).cloned();
    if let Some(names) = unanswered {
        if names.len() > MAX_HOSTS {
            let (own, all) = (names.len(), names.len());
            return Err(chain(&SourceError::TooManyHosts { place, own, all }));
        }
        let mut table = hosts.resolve_too(names.clone(), dns);
        let is_known = |table: &Arc<HostTable>| names.iter().all(|host| table.is_known(host));
        // If names have no answer after this time, `parse` refuses the list and reports this.
        let _ = tokio::time::timeout(PATIENCE, table.wait_for(is_known)).await;
        parsed = source.parse(&place, text, Some(&hosts.table()));
    }
    let names = match &parsed {
        Ok(contents) => Arc::clone(&contents.hosts),
        Err(SourceError::Hosts { hosts, .. }) => Arc::clone(hosts),
        Err(_) => Arc::default(),
    };
    let (table, now) = (hosts.table(), tokio::time::Instant::now().into_std());
    checked.host_names = names.len() as u64;
    checked.notes.extend(source::hosts::resolved(source, &names, &table));
    checked.unresolved = source::hosts::unresolved(source, &names, &table, now, SystemTime::now());
    let contents = parsed.map_err(|error| chain(&error))?;
    checked.notes.extend(contents.notes.iter().cloned());
    Ok(contents)
}

/// Queries a server twice, because some servers answer with a part of their list. Returns the text
/// of the first answer, and notes. `again` becomes the time of the second question, most of which
/// is the pause between two questions.
async fn query(
    wanted: DiscoveryRequest,
    shared: &Arc<ProviderContext>,
    again: &mut Duration,
) -> (Result<Vec<u8>, String>, Vec<String>, Option<String>) {
    let running = spawn(wanted, shared, Arc::default());
    let mut answers = running.latest.clone();
    let first = answer(&mut answers, 1).await;
    let mut notes = Vec::new();
    let expired = expiry(first.as_ref(), SystemTime::now(), &mut notes);
    let list = match first.as_ref().and_then(|latest| latest.finding.as_ref()) {
        Some(Finding::List(list)) => Ok(list.clone()),
        Some(Finding::Empty { why }) => Err(format!("empty answer ({why})")),
        Some(Finding::Failed(failure)) => Err(failure.to_string()),
        None => Err("no answer".to_owned()),
    };
    let list = match list {
        Ok(list) => list,
        Err(error) => return (Err(error), Vec::new(), expired),
    };
    notes.splice(0..0, list.notes.iter().cloned());
    let first_answer = tokio::time::Instant::now();
    running.refresh();
    if let Some(second) = answer(&mut answers, 2).await
        && second.number != first.map_or(0, |first| first.number)
    {
        notes.push(
            "the second answer differed from the first: the list has just changed, or the server sends only a part of it"
                .to_owned(),
        );
    }
    *again = first_answer.elapsed();
    (Ok(list.text.to_vec()), notes, expired)
}

/// Describes the first certificate that expires: returns the text if the certificate has expired at
/// `now`, and otherwise adds it to `notes`.
fn expiry(latest: Option<&Latest>, now: SystemTime, notes: &mut Vec<String>) -> Option<String> {
    let expires = latest?.expires?;
    let date = date_of(expires.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
    if expires <= now {
        return Some(format!("a certificate for this connection expired on {date}"));
    }
    notes.push(format!("the earliest expiry of a certificate is on {date}"));
    None
}

/// Waits until the server has answered this number of queries.
async fn answer(answers: &mut tokio::sync::watch::Receiver<Latest>, count: u64) -> Option<Latest> {
    let wait = answers.wait_for(|latest| latest.answers >= count);
    Some(tokio::time::timeout(PATIENCE, wait).await.ok()?.ok()?.clone())
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::path::Path;

    use lb_config::ListFile;
    use lb_core::service::{Service, Subset};
    use lb_discovery::HostState;

    use super::*;
    use crate::config::tests::good;
    use crate::source::ListOrigin;

    /// Answers every query with NXDOMAIN until the test ends.
    fn without_names() -> (SocketAddr, Arc<UdpSocket>) {
        let socket = Arc::new(UdpSocket::bind("127.0.0.1:0").unwrap());
        let (at, server) = (socket.local_addr().unwrap(), Arc::downgrade(&socket));
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        std::thread::spawn(move || {
            let mut query = [0; 1_500];
            while let Some(socket) = server.upgrade() {
                let Ok((length, from)) = socket.recv_from(&mut query) else { continue };
                // A response (QR) with RCODE 3.
                (query[2], query[3]) = (query[2] | 0x80, 3);
                let _ = socket.send_to(&query[..length], from);
            }
        });
        (at, socket)
    }

    #[test]
    fn the_check_of_servers_includes_the_host_names_in_files_and_omits_lists_without_names() {
        let folder = tempfile::tempdir().unwrap();
        let (at, _server) = without_names();
        let named = folder.path().join("named.toml");
        std::fs::write(
            &named,
            "[[endpoint]]\naddress = \"10.0.0.1:80\"\n[[endpoint]]\naddress = \"a.example:80\"\n",
        )
        .unwrap();
        let plain = folder.path().join("plain.toml");
        std::fs::write(&plain, "[[endpoint]]\naddress = \"10.0.0.1:80\"\n").unwrap();
        let service = |name: &str, n: u8, backends: String| {
            format!("[[service]]\nname = \"{name}\"\naddress = \"10.96.0.{n}:80\"\nbackends = {backends}\n")
        };
        let text = [
            "[[client]]\njob = \"web\"\ncgroup = \"web\"\n".to_owned(),
            service("named", 1, format!("{{ file = {named:?} }}")),
            service("plain", 2, format!("{{ file = {plain:?} }}")),
            service("static", 3, "{ static = [\"b.example:80\"] }".to_owned()),
            format!("[dns]\nservers = [\"{at}\"]\ntransport = \"udp\"\n"),
        ];
        let config = good(&text.concat());
        let checked = check_servers(&config).unwrap();
        let found: Vec<(&str, u64, Option<u64>)> =
            checked.iter().map(|one| (&*one.service, one.host_names, one.endpoints)).collect();
        assert_eq!(found, [("named", 1, Some(1)), ("static", 1, None)]);
        let why = checked[0].unresolved.as_deref().unwrap();
        assert!(why.starts_with("1 of 1 host names do not resolve: a.example"), "{why}");
        let why = checked[1].error.as_deref().unwrap();
        assert!(why.contains("none of its 1 host names resolves"), "{why}");
        assert!(!why.starts_with(&checked[1].origin), "{why}: the caller prints the origin before this text");
        assert_eq!(check(&config).unwrap().len(), 3);
    }

    #[test]
    fn the_list_of_a_service_without_a_known_address_is_checked() {
        let folder = tempfile::tempdir().unwrap();
        let (list, file) = (folder.path().join("users.toml"), folder.path().join("socklb.toml"));
        std::fs::write(&list, "[[endpoint]]\naddress = \"10.0.0.1:80\"\n").unwrap();
        // Nothing listens on port 1.
        let text = format!(
            "[[client]]\njob = 'web'\ncgroup = 'web'\n[[service]]\nname = 'users'\n\
             address = {{ kubernetes = 'shop/users' }}\nbackends = {{ file = {list:?} }}\n\
             [kubernetes]\nserver = 'http://127.0.0.1:1'\n[paths]\nstate = {:?}\n",
            folder.path()
        );
        std::fs::write(&file, text).unwrap();
        let check = || {
            let checked = check(&config::read(&file, &HostEnvironment).unwrap()).unwrap();
            let facts = |one: &CheckedSource| (one.error.is_some(), one.endpoints, one.notes.clone());
            checked.iter().map(facts).collect::<Vec<_>>()
        };
        let note = "the address of the service is not known; the list was checked without it".to_owned();
        assert_eq!(check(), [(true, None, vec![]), (false, Some(1), vec![note])]);
        let known = [("kubernetes shop/users cluster IP tcp".to_owned(), "10.96.0.10:80".parse().unwrap())];
        let stored = config::addresses::path(folder.path());
        source::last_good::save(&stored, &config::addresses::render(&known.into())).unwrap();
        assert_eq!(check(), [(true, None, vec![]), (false, Some(1), vec![])]);
    }

    #[test]
    fn an_expired_certificate_is_a_warning_and_a_later_expiry_is_a_note() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let latest = Latest { expires: Some(at(1_800_000_000)), ..Latest::default() };
        let mut notes = Vec::new();
        assert_eq!(expiry(Some(&latest), at(1_799_999_999), &mut notes), None);
        assert_eq!(notes, ["the earliest expiry of a certificate is on 2027-01-15T08:00:00Z"]);
        notes.clear();
        let expired = expiry(Some(&latest), at(1_800_000_000), &mut notes);
        let text = "a certificate for this connection expired on 2027-01-15T08:00:00Z";
        assert_eq!((expired.as_deref(), notes.len()), (Some(text), 0));
        assert_eq!(expiry(None, at(0), &mut notes), None);
    }

    #[test]
    fn a_list_that_does_not_fit_the_limits_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("users.json");
        let address = |n: u32| format!("{}:80", Ipv4Addr::from(0x0a00_0000 + n));
        let targets: Vec<String> = (1..=5_000).map(address).collect();
        std::fs::write(&path, serde_json::to_string(&targets).unwrap()).unwrap();
        let text = format!(
            "[[client]]\njob = \"web\"\ncgroup = \"web\"\n[[service]]\nname = \"users\"\naddress = \"10.96.0.1:80\"\n\
             backends = {{ file = {path:?} }}\nsubset = \"all\"\n"
        );
        let [one] = &check(&good(&text)).unwrap()[..] else { panic!("there is one list") };
        let error = one.error.as_deref().unwrap();
        assert!(error.starts_with("client web, service users: "), "{error}");
        assert_eq!(one.endpoints, None);
    }

    #[test]
    fn lists_that_together_have_too_many_host_names_are_refused() {
        let service = Service::new("users", "10.96.0.10:80".parse().unwrap(), Subset::All, 0);
        let file = |name: &str| ListFile { path: name.into(), port_name: None, protocol: None };
        let list = |name: &str, from: usize| {
            let source = ListSource::new(&service, ListOrigin::File(file(name)), &[], Path::new("/"));
            let names = (from..from + MAX_HOSTS / 2 + 1).map(|n| format!("n{n}.example"));
            let targets: Vec<String> =
                names.clone().map(|name| format!("{name}:80")).chain(["10.9.0.1:80".to_owned()]).collect();
            let answered = Some(std::time::Instant::now());
            let state = |name: String| {
                let host = HostName { name: name.into(), is_ipv6: false };
                (host, HostState { answered, ..HostState::default() })
            };
            let table = Arc::new(HostTable(names.map(state).collect()));
            let text = serde_json::to_vec(&targets).unwrap();
            let contents = source.parse(Path::new(name), text, Some(&table)).unwrap();
            let checked = CheckedSource {
                service: name.to_owned(),
                origin: source.origin.to_string(),
                endpoints: Some(1),
                error: None,
                notes: Vec::new(),
                expired: None,
                host_names: contents.hosts.len() as u64,
                unresolved: None,
                took_ms: 0,
            };
            CheckedList { checked, contents: Some(contents), is_local: true }
        };
        // The first and the third list have the same names.
        let mut lists = [list("a.json", 0), list("b.json", MAX_HOSTS), list("c.json", 0)];
        refuse_too_many_hosts(&mut lists);
        let errors = lists.map(|list| list.checked.error);
        let error = "the list has 513 host names, and all lists of this host have 1026, but at most 1024 are resolved";
        assert_eq!(errors, [None, Some(error.to_owned()), None]);
    }
}
