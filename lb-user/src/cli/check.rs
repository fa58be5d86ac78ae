//! `socklb check`: reads a configuration and its endpoint files. Reports faults in these files,
//! lists that do not fit the limits, and values that have no effect. The command changes nothing.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use lb_config::endpoints::{MAX_HOSTS, WITHOUT_ADDRESSES};
use lb_core::balancer::{Balancer, UnusableList};
use lb_core::control::Law;
use lb_core::membership::Membership;
use lb_core::service::{Accounting, Service};

use super::{PathOptions, paths_of};
use crate::config::addresses::{AddressSource, WithAddresses};
use crate::config::{
    self, ClientConfig, Config, ConfigFileError, EndpointSource, HostEnvironment, ListFile, NamedFile,
};
use crate::error::CommandFailure;
use crate::output::comparison;
use crate::output::doctor::load::WITH_RATES;
use crate::output::dry_run::{self, DoesNotFit, list_sources};
use crate::output::print;
use crate::probes::cost;
use crate::source::assignments::AssignmentsByService;
use crate::source::{self, ListSource, SourceError};
use lb_document::diagnostic::{DiagnosticCollector, Diagnostics};
use lb_document::did_you_mean;
use lb_view::explanation::TaskEvenness;
use lb_view::status::UnusedEndpoints;
use lb_view::text::{self, Style};

pub enum OutputFormat {
    /// Text for people, printed after the notes on the file.
    Text,
    /// Only JSON.
    Json,
}

/// Checks the configuration at `file`; if `file` is `None`, at the path in `files`. Prints all
/// faults at once. If there are no faults, prints notes on values that are valid but may not be
/// intended. If `compared` is set, also prints what would change in the running configuration. A
/// preview consists of the name of a service, and of an endpoint file that the command reads
/// instead of the service's configured file.
///
/// # Errors
/// If a file cannot be read, a list does not fit the limits, there is no running configuration to
/// compare with, or a preview is for a service that no client dials with a list from a file or a
/// server.
pub fn run(
    file: Option<&Path>,
    compared: Option<OutputFormat>,
    previews: &[(String, PathBuf)],
    files: &PathOptions,
) -> Result<ExitCode, CommandFailure> {
    let is_named = file.is_some();
    let file = file.unwrap_or(files.file());
    let path = std::path::absolute(file)?;
    let mut faulty: Vec<Diagnostics> = Vec::new();
    let (mut named, mut ignored, mut unread) = (Vec::new(), BTreeSet::new(), Vec::new());
    let look = |files: &[NamedFile], services: &[SocketAddr], report: &DiagnosticCollector<'_>| {
        for NamedFile { name, service, file, span } in files {
            named.extend(service.map(|service| (service, report.line(span))));
            let file = &previewed(name.as_deref(), file, previews);
            match source::read_list(file, *service, services) {
                Ok(parsed) => {
                    let notes = parsed.notes.into_iter();
                    ignored.extend(notes.map(|note| format!("{}: {}", file.path.display(), of_check(&note))));
                }
                // Several services may have the same file, for example TCP and UDP at one address.
                // Equal faults are reported once.
                Err(SourceError::Invalid(faults)) if faulty.contains(&faults) => {}
                Err(SourceError::Invalid(faults)) => faulty.push(faults),
                // If a file cannot be read, the error refers to the line of the configuration, or
                // to the option, that contains the file's path.
                Err(error) if previews.iter().any(|(_, path)| *path == file.path) => {
                    unread.push(format!("--endpoints: {}", crate::error::chain(&error)));
                }
                Err(error) => report.add(span.clone(), crate::error::chain(&error), None),
            }
        }
    };
    let env =
        WithAddresses { env: &HostEnvironment, addresses: AddressSource::Below(files.state.as_deref()) };
    let config = match config::read_with(&path, &env, look) {
        Ok(config) => Some(config),
        Err(ConfigFileError::Faulty(faults)) => {
            faulty.insert(0, faults);
            None
        }
        Err(error) => return Err(error.into()),
    };
    faulty.iter().for_each(print::faults);
    if !unread.is_empty() {
        return Err(anyhow::anyhow!(unread.join("\n")).into());
    }
    let Some(config) = config.filter(|_| faulty.is_empty()) else { return Ok(ExitCode::FAILURE) };
    // The lists in the endpoint files must fit the limits in `[limits]`.
    let lists = with_previews(&config, previews)?;
    let sources = list_sources(&lists);
    check_hosts(&sources)?;
    let by_service = dry_run::assignments(&lists.clients, &sources)?;
    let mut balancers = Vec::new();
    for client in &config.clients {
        let balancer = dry_run::balancer(&config, client, &by_service);
        balancers.push((client, balancer.map_err(|failure| located(failure, &path, &named))?));
    }
    let mut notes = notes(&config, &by_service);
    notes.extend(ignored);
    for source in sources.iter().filter(|source| source.static_text().is_some()) {
        let list = source.read(None).and_then(Result::ok);
        notes.extend(list.iter().flat_map(|list| list.notes.iter().map(|note| of_check(note))));
    }
    for source in sources.iter().filter(|source| source.wanted().is_some()) {
        let origin = &source.origin;
        notes.push(match dry_run::stored(source) {
            Some(_) => format!(
                "{origin}: checked the list that the daemon stored last, not the server's present list"
            ),
            None => format!(
                "{origin}: not checked, because no stored list can be read; `socklb source check` queries \
                 the server"
            ),
        });
    }
    notes.extend(subsets(&balancers));
    notes.extend(cost::notes(&balancers));
    let mut text: String = notes.iter().map(|note| format!("note: {note}\n")).collect();
    text.push_str(&format!("{}: ok\n", file.display()));
    if let Some(form) = compared {
        let paths = match (&files.config, is_named) {
            (None, true) => files.over(config.paths.clone())?,
            _ => paths_of(files)?,
        };
        // The options on the command line override the file, as they do when a daemon starts.
        let config = Config { paths: files.over(config.paths.clone())?, ..config };
        let comparison = comparison::compare(&config, &by_service, &paths)?;
        match form {
            OutputFormat::Json => {
                return print::json(&comparison).map(|_| ExitCode::SUCCESS).map_err(CommandFailure::from);
            }
            OutputFormat::Text => text.push_str(&text::comparison(&comparison, Style::for_stdout())),
        }
    }
    print::text(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// A note on a list, as this command prints it: the command resolves no host names, so it knows no
/// addresses.
fn of_check(note: &str) -> String {
    match note.strip_prefix(WITHOUT_ADDRESSES) {
        Some(names) => format!("this command does not resolve host names{names}"),
        None => note.to_owned(),
    }
}

/// Refuses lists that together have more host names than the daemon resolves. The names in lists
/// from servers are not known here.
fn check_hosts(sources: &[ListSource]) -> Result<(), CommandFailure> {
    let mut hosts = BTreeSet::new();
    for source in sources {
        let Some(Ok(list)) = source.read(None) else { continue };
        hosts.extend(list.hosts.iter().cloned());
        if hosts.len() > MAX_HOSTS {
            let (place, own, all) = (source.place(), list.hosts.len(), hosts.len());
            return Err(anyhow::Error::new(SourceError::TooManyHosts { place, own, all }).into());
        }
    }
    Ok(())
}

/// The endpoint file of a service: the file of the last preview for the service; without a preview,
/// the file in the configuration.
fn previewed(service: Option<&str>, file: &ListFile, previews: &[(String, PathBuf)]) -> ListFile {
    let preview = previews.iter().rfind(|(of, _)| service == Some(of.as_str()));
    preview.map_or_else(|| file.clone(), |(_, path)| ListFile { path: path.clone(), ..file.clone() })
}

/// For each preview, replaces the service's file or server with the file of the preview.
///
/// # Errors
/// If a preview is for a service that no client dials with a list from a file or a server.
fn with_previews(config: &Config, previews: &[(String, PathBuf)]) -> Result<Config, CommandFailure> {
    let mut config = config.clone();
    let mut names = BTreeSet::new();
    for configured in config.clients.iter_mut().flat_map(|client| &mut client.services) {
        let name = &configured.service.name;
        match &mut configured.source {
            EndpointSource::Static(_) | EndpointSource::Named(_) => continue,
            EndpointSource::File(file) => *file = previewed(Some(name), file, previews),
            EndpointSource::Remote(_) => {
                if let Some((_, path)) = previews.iter().rfind(|(of, _)| of == name) {
                    let file = ListFile {
                        path: path.clone(),
                        port_name: None,
                        protocol: Some(configured.service.protocol),
                    };
                    configured.source = EndpointSource::File(file);
                }
            }
        }
        names.insert(name.clone());
    }
    let Some((stray, _)) = previews.iter().find(|(service, _)| !names.contains(service)) else {
        return Ok(config);
    };
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let text = format!(
        "--endpoints: no client dials a service {stray:?} with endpoints from a file or a server ({}services with a file or a server: {})",
        did_you_mean(stray, &names),
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    );
    Err(anyhow::anyhow!(text).into())
}

/// If a list does not fit the limits, adds the list's line in the configuration and a remedy to the
/// failure.
fn located(failure: CommandFailure, path: &Path, named: &[(SocketAddr, usize)]) -> CommandFailure {
    let CommandFailure::Other(error) = &failure else { return failure };
    let Some(misfit) = error.downcast_ref::<DoesNotFit>() else { return failure };
    let line = named.iter().find(|(service, _)| *service == misfit.address).map_or(1, |(_, line)| *line);
    let help = match misfit.refused {
        UnusableList::Slots(_) => "raise slots in [limits], or use a smaller subset",
        UnusableList::Schedule { .. } => {
            "raise schedule_entries in [limits], or use smaller subsets or fewer services"
        }
        UnusableList::Services => "configure fewer services for this client",
    };
    let text = format!("{}:{line}: {} ({help})", path.display(), crate::error::chain(misfit));
    CommandFailure::Other(anyhow::anyhow!(text))
}

/// Notes on endpoints that no task uses, and on lists that need indexes for an even spread of
/// connections. The notes on a service are the same for all tasks of a job, and appear once.
fn subsets(balancers: &[(&ClientConfig, Balancer<Duration>)]) -> BTreeSet<String> {
    let of_client = |(client, balancer): &(&ClientConfig, Balancer<Duration>)| {
        let of_service = |(service, _, in_use): (&Service, _, Option<(&_, &Membership)>)| {
            let (_, membership) = in_use?;
            let unused = membership.unused.map(|unused| UnusedEndpoints::from(unused).to_string());
            let evenness = membership.evenness.map(TaskEvenness::from).filter(TaskEvenness::is_low);
            let evenness = evenness.map(|evenness| evenness.describe(service.policy.is_weighted()));
            let notes = unused.into_iter().chain(evenness);
            Some(
                notes
                    .map(|note| format!("job {}, service {}: {note}", client.job, service.name))
                    .collect::<Vec<_>>(),
            )
        };
        balancer.services().filter_map(of_service).flatten().collect::<Vec<_>>()
    };
    balancers.iter().flat_map(of_client).collect()
}

/// Notes on values that are valid but may not be intended.
fn notes(config: &Config, by_service: &AssignmentsByService) -> Vec<String> {
    let mut notes = Vec::new();
    // If this host has no cgroup2, the configuration is meant for another host.
    if let Ok(mount) = lb_kernel::cgroup2_mount() {
        let absent = config.clients.iter().filter(|client| !mount.join(&client.cgroup).exists());
        notes.extend(absent.map(|client| {
            format!(
                "client {}: cgroup {} does not exist yet; the daemon attaches the client when the cgroup \
                 appears",
                client.name,
                client.cgroup.display()
            )
        }));
    }
    for client in config.clients.iter().filter(|client| client.accounting == Accounting::Active) {
        let ejecting = client.services.iter().filter(|configured| configured.service.ejection.is_some());
        notes.extend(ejecting.map(|configured| {
            format!(
                "client {}, service {}: with accounting = \"active\" ejection counts `unanswered` connects and errors that are \
                 pending at a close, but no failed blocking connects; with accounting = \"full\" it counts all failures",
                client.name, configured.service.name
            )
        }));
    }
    let services = config.clients.iter().flat_map(|client| &client.services);
    let by_rates = services.filter(|configured| configured.service.control.law == Some(Law::A58));
    let by_rates: BTreeSet<&str> = by_rates.map(|configured| configured.service.name.as_str()).collect();
    notes.extend(by_rates.into_iter().map(|service| {
        format!(
            "service {service}: control = \"a58\" needs requests per second, which an agent that measures a cgroup does not report: {WITH_RATES}"
        )
    }));
    for (service, assignments) in by_service {
        let zoned = assignments.list().as_slice().iter().filter(|endpoint| endpoint.zone.is_some()).count();
        if zoned > 0 {
            notes.push(format!(
                "service {service}: `zone` has no effect yet, but is set for {}",
                text::counted(zoned, "endpoint")
            ));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    #[test]
    fn the_note_on_host_names_states_that_the_command_does_not_resolve_them() {
        let note = format!("{WITHOUT_ADDRESSES}: a.example, b.example");
        assert_eq!(of_check(&note), "this command does not resolve host names: a.example, b.example");
        assert_eq!(of_check("other"), "other");
    }

    #[test]
    fn more_host_names_than_the_daemon_resolves_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (list, file) = (folder.path().join("users.toml"), folder.path().join("socklb.toml"));
        let text = format!(
            "[[client]]\njob = 'web'\ncgroup = 'web'\n[[service]]\nname = 'users'\naddress = '10.96.0.10:80'\n\
             backends = {{ file = {list:?} }}\n[paths]\nstate = {:?}\n",
            folder.path()
        );
        std::fs::write(&file, text).unwrap();
        let files = PathOptions { config: Some(file), pins: None, run: None, state: None };
        for (count, is_refused) in [(MAX_HOSTS, false), (MAX_HOSTS + 1, true)] {
            let mut names = String::new();
            for n in 0..count {
                writeln!(names, "[[endpoint]]\naddress = \"n{n}.example:80\"").unwrap();
            }
            std::fs::write(&list, names).unwrap();
            let error = run(None, None, &[], &files).err().map(|failure| failure.to_string());
            let text = format!(
                "{}: the list has 1025 host names, and all lists of this host have 1025, but at most 1024 are resolved",
                list.display()
            );
            assert_eq!(error, is_refused.then_some(text));
        }
    }
}
