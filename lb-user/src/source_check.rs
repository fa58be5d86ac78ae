//! Reads every file and queries every server in a configuration, for commands that run without the
//! daemon.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use lb_config::discovery::DnsSettings;
use lb_config::endpoints::MAX_HOSTS;
use lb_discovery::{DiscoveryRequest, Finding, HostTable, Hosts, Latest, ProviderContext, date_of, spawn};
use lb_view::source::CheckedSource;
use tokio::task::JoinSet;

use crate::config::{AddressLookup, ClusterIpOrigin, Config};
use crate::controller;
use crate::error::chain;
use crate::source::{self, ListSource, SourceError, read_whole};

/// How long a command waits for a server's answer. The provider's own time limits are shorter.
const PATIENCE: Duration = Duration::from_secs(15);

/// Checks the sources of all services at the same time. Returns the results in the order of the
/// services' names.
///
/// # Errors
/// If the kernel refuses a thread or a descriptor.
pub fn check(config: &Config) -> Result<Vec<CheckedSource>> {
    check_all(controller::sources(config), config)
}

/// Like [`check`], but returns only the results that depend on servers: lists and addresses from
/// servers, and lists with host names.
///
/// # Errors
/// The errors of [`check`].
pub fn check_servers(config: &Config) -> Result<Vec<CheckedSource>> {
    let sources = controller::sources(config);
    let local = sources.iter().filter(|(_, source)| source.wanted().is_none());
    let local: BTreeMap<String, String> =
        local.map(|(service, source)| (service.clone(), source.origin.to_string())).collect();
    let mut checked = check_all(sources, config)?;
    checked.retain(|one| one.host_names > 0 || local.get(&one.service) != Some(&one.origin));
    Ok(checked)
}

fn check_all(
    sources: BTreeMap<String, ListSource>,
    Config { lookups, dns, .. }: &Config,
) -> Result<Vec<CheckedSource>> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start a thread")?;
    let mut checked = runtime.block_on(async {
        let shared = Arc::new(ProviderContext::default());
        let hosts = Arc::new(Hosts::new(&shared, &Arc::default()));
        let mut checks = JoinSet::new();
        for AddressLookup { service, origin, .. } in lookups.iter().cloned() {
            checks.spawn(check_address(service, origin, Arc::clone(&shared)));
        }
        for (service, source) in sources {
            let resolving = (Arc::clone(&hosts), dns.clone());
            checks.spawn(check_one(service, source, Arc::clone(&shared), resolving));
        }
        checks.join_all().await
    });
    // A file system that does not answer must not delay the end of the command.
    runtime.shutdown_background();
    checked.sort_by(|a, b| a.service.cmp(&b.service));
    Ok(checked)
}

/// Queries the server of a service's address.
async fn check_address(
    service: String,
    origin: ClusterIpOrigin,
    shared: Arc<ProviderContext>,
) -> CheckedSource {
    let began = tokio::time::Instant::now();
    let place = origin.to_string();
    let running = spawn(DiscoveryRequest::Address(origin), &shared, Arc::default());
    let latest = answer(&mut running.latest.clone(), 1).await;
    let finding = latest.as_ref().and_then(|latest| latest.finding.as_ref());
    let mut notes: Vec<String> = expiry(latest.as_ref()).into_iter().collect();
    let error = match finding {
        Some(Finding::Empty { why }) => Some(why.clone()),
        Some(Finding::Failed(failure)) => Some(failure.to_string()),
        None => Some("no answer".to_owned()),
        Some(finding @ Finding::List(_)) => match controller::address(finding) {
            Some(address) => {
                notes.insert(0, format!("the address of the service is {address}"));
                None
            }
            None => Some("the answer has no address".to_owned()),
        },
    };
    let took_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    let (host_names, unresolved) = (0, None);
    CheckedSource { service, origin: place, endpoints: None, error, notes, host_names, unresolved, took_ms }
}

async fn check_one(
    service: String,
    source: ListSource,
    shared: Arc<ProviderContext>,
    (hosts, dns): (Arc<Hosts>, DnsSettings),
) -> CheckedSource {
    let origin = source.origin.to_string();
    let began = tokio::time::Instant::now();
    let mut again = Duration::ZERO;
    let (text, notes) = match source.wanted() {
        None => (read(&source).await, Vec::new()),
        Some(wanted) => query(wanted, &shared, &mut again).await,
    };
    let mut checked = CheckedSource {
        service,
        origin,
        endpoints: None,
        error: None,
        notes,
        host_names: 0,
        unresolved: None,
        took_ms: 0,
    };
    let result = match text {
        Ok(text) => parse(&source, text, &hosts, &dns, &mut checked).await,
        Err(error) => Err(error),
    };
    match result {
        Ok(endpoints) => checked.endpoints = Some(endpoints),
        // The errors of a server's list begin with the list's origin, which `checked` already
        // contains.
        Err(error) => {
            let without = error.strip_prefix(&format!("{}: ", checked.origin)).map(str::to_owned);
            checked.error = Some(without.unwrap_or(error));
        }
    }
    let took = began.elapsed().saturating_sub(again);
    checked.took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    checked
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

/// Returns the number of endpoints in a list. Resolves the list's host names, and adds the result
/// to `checked`.
async fn parse(
    source: &ListSource,
    text: Vec<u8>,
    hosts: &Hosts,
    dns: &DnsSettings,
    checked: &mut CheckedSource,
) -> Result<u64, String> {
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
    checked.notes.extend(source::hosts::resolved(&names, &table));
    checked.unresolved = source::hosts::unresolved(source, &names, &table, now, SystemTime::now());
    let contents = parsed.map_err(|error| chain(&error))?;
    checked.notes.extend(contents.notes.iter().cloned());
    Ok(contents.assignments.list().as_slice().len() as u64)
}

/// Queries a server twice, because some servers answer with a part of their list. Returns the text
/// of the first answer, and notes. `again` becomes the time of the second question, most of which
/// is the pause between two questions.
async fn query(
    wanted: DiscoveryRequest,
    shared: &Arc<ProviderContext>,
    again: &mut Duration,
) -> (Result<Vec<u8>, String>, Vec<String>) {
    let running = spawn(wanted, shared, Arc::default());
    let mut answers = running.latest.clone();
    let first = answer(&mut answers, 1).await;
    let (list, mut notes) = match first.as_ref().map(|latest| latest.finding.as_ref()) {
        Some(Some(Finding::List(list))) => (list.clone(), list.notes.clone()),
        Some(Some(Finding::Empty { why })) => return (Err(format!("empty answer ({why})")), Vec::new()),
        Some(Some(Finding::Failed(failure))) => return (Err(failure.to_string()), Vec::new()),
        Some(None) | None => return (Err("no answer".to_owned()), Vec::new()),
    };
    notes.extend(expiry(first.as_ref()));
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
    (Ok(list.text.to_vec()), notes)
}

/// A note on the first certificate that expires.
fn expiry(latest: Option<&Latest>) -> Option<String> {
    let since_epoch = latest?.expires?.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Some(format!("the earliest expiry of a certificate is on {}", date_of(since_epoch)))
}

/// Waits until the server has answered this number of queries.
async fn answer(answers: &mut tokio::sync::watch::Receiver<Latest>, count: u64) -> Option<Latest> {
    let wait = answers.wait_for(|latest| latest.answers >= count);
    Some(tokio::time::timeout(PATIENCE, wait).await.ok()?.ok()?.clone())
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, UdpSocket};

    use super::*;
    use crate::config::tests::good;

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
}
