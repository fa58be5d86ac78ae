//! `socklb doctor`: finds faults of this host, and suggests a command for each fault that a command
//! can correct.
//!
//! Even if a daemon runs, doctor examines the host itself, with the privileges of the user that
//! runs the command. It reports which data this user has no permission to read.

mod host;
mod interfaces;
pub mod load;
mod maps;
mod probes;
mod process;
mod programs;
mod sockets;

use std::collections::BTreeSet;
use std::path::Path;

use lb_kernel::{Cgroup, Features, Pins};
use lb_view::diagnosis::{Diagnosis, SCHEMA, Severity};
use lb_view::status::Reclaim;

pub use process::examine as examine_process;

use crate::api::{self, Answer};
use crate::config::{Config, Paths};
use crate::descriptors;
use crate::source::check;
use lb_view::source::CheckedSource;
use lb_view::status::StatusDocument;
use lb_view::text::counted;

/// The help for findings that need more permissions.
const AS_ROOT: &str = "run socklb doctor as root";

/// Examines the host, the daemon and every client. `config` is the configuration, or the reason why
/// it cannot be used.
pub fn examine(paths: &Paths, file: &Path, config: Result<&Config, &String>) -> Diagnosis {
    let mut diagnosis = Diagnosis { schema: SCHEMA, findings: Vec::new() };
    let features = host::examine(&mut diagnosis, paths);
    match &config {
        Ok(config) => configuration(&mut diagnosis, config),
        Err(error) => diagnosis.add(
            "configuration",
            Severity::Warning,
            error.as_str(),
            // If the file does not exist, `socklb check` would only report the same fault.
            file.exists().then(|| format!("socklb check {}", file.display())).as_deref(),
        ),
    }
    let status = daemon(&mut diagnosis, paths);
    pins(&mut diagnosis, paths, config.as_ref().ok().copied(), status.as_ref());
    probes::examine(&mut diagnosis, config.as_ref().ok().copied(), status.as_ref());
    interfaces::examine(&mut diagnosis, paths, config.as_ref().ok().copied(), status.as_ref(), features);
    load::examine(&mut diagnosis, config.as_ref().ok().copied(), status.as_ref());
    config.as_ref().ok().into_iter().for_each(|config| servers(&mut diagnosis, config));
    open_files(&mut diagnosis, config.as_ref().ok().copied(), status.as_ref());
    for client in clients(config.as_ref().ok().copied(), status.as_ref()) {
        one_client(&mut diagnosis, paths, &client, features);
    }
    diagnosis
}

fn configuration(diagnosis: &mut Diagnosis, config: &Config) {
    diagnosis.ok(
        "configuration",
        format!("{}: {}", config.path.display(), counted(config.clients.len(), "client")),
    );
    let clients = config.clients.len() as u64;
    let each = lb_kernel::memory_of_client(&config.limits);
    diagnosis.ok(
        "memory",
        format!(
            "{} KiB of kernel memory for each client, {} MiB for {}",
            each >> 10,
            (each * clients) >> 20,
            counted(config.clients.len(), "client")
        ),
    );
}

/// Queries the servers in the configuration, and resolves the host names in lists, with the
/// settings that the daemon uses.
fn servers(diagnosis: &mut Diagnosis, config: &Config) {
    let checked = match check::check_servers(config) {
        Ok(checked) => checked,
        Err(error) => return diagnosis.add("lists", Severity::Warning, format!("{error:#}"), None),
    };
    for CheckedSource {
        service,
        origin,
        endpoints,
        error,
        notes,
        expired,
        host_names: _,
        unresolved,
        took_ms,
    } in checked
    {
        let place = format!("{service}: {origin}");
        match error {
            Some(error) => diagnosis.add("lists", Severity::Warning, format!("{place}: {error}"), None),
            None => {
                let endpoints = endpoints.map(|endpoints| counted(endpoints, "endpoint") + " ");
                diagnosis.ok("lists", format!("{place}: {}in {took_ms} ms", endpoints.unwrap_or_default()));
            }
        }
        for warning in expired.into_iter().chain(unresolved) {
            diagnosis.add("lists", Severity::Warning, format!("{place}: {warning}"), None);
        }
        for note in notes {
            diagnosis.add("lists", Severity::Note, format!("{place}: {note}"), None);
        }
    }
}

/// Examines whether the running daemon may open as many files as its clients need.
fn open_files(diagnosis: &mut Diagnosis, config: Option<&Config>, status: Option<&StatusDocument>) {
    let pid = status.and_then(|status| status.daemon.as_ref()).map(|daemon| daemon.pid);
    let (Some(config), Some(limit)) = (config, pid.and_then(lb_kernel::open_files_of)) else { return };
    let clients = config.clients.len() as u64;
    let wanted = descriptors::wanted(clients);
    let text = format!(
        "the daemon may open {limit} files, and needs up to {wanted} with {}",
        counted(config.clients.len(), "client")
    );
    if limit < wanted {
        let help = format!(
            "set LimitNOFILE={wanted} in the daemon's unit, or run `ulimit -n {wanted}` before `socklb run`"
        );
        diagnosis.add("open files", Severity::Warning, text, Some(&help));
    } else {
        diagnosis.ok("open files", text);
    }
}

fn daemon(diagnosis: &mut Diagnosis, paths: &Paths) -> Option<StatusDocument> {
    match api::query_daemon::<StatusDocument>(paths, "/v1/status") {
        Ok(Answer::Given(status)) => {
            let pid = status.daemon.as_ref().map_or(0, |daemon| daemon.pid);
            diagnosis.ok("daemon", format!("running (pid {pid})"));
            for fault in &status.faults {
                diagnosis.add("daemon", Severity::Warning, fault.to_string(), None);
            }
            for client in &status.clients {
                let Some(reclaim) = client.reclaim else { continue };
                let Reclaim { passes: _, reclaimed, suspected, kept_open, kept_elsewhere } = reclaim;
                let state = if kept_open + kept_elsewhere > 0 { Severity::Note } else { Severity::Ok };
                let text = format!(
                    "client {}: {reclaimed} records of sockets that no longer exist were reclaimed, {suspected} are suspected; retained: \
                     {kept_open} with an open socket that is not connected, {kept_elsewhere} in network namespaces that the \
                     daemon cannot inspect",
                    client.name
                );
                diagnosis.add("flow records", state, text, None);
            }
            Some(status)
        }
        Ok(Answer::NotResponding) => {
            let text = format!(
                "{}: the daemon is stopped or hangs; the tables do not change",
                api::not_responding(&paths.run)
            );
            diagnosis.add(
                "daemon",
                Severity::Warning,
                text,
                Some("systemctl restart socklb, or kill the daemon and start it again"),
            );
            None
        }
        Ok(Answer::NotRunning) => {
            let text = format!(
                "no daemon answers at {}; the tables do not change",
                api::socket(&paths.run).display()
            );
            diagnosis.add("daemon", Severity::Warning, text, Some("systemctl start socklb, or socklb run"));
            None
        }
        Err(error) => {
            diagnosis.add("daemon", Severity::Warning, format!("{error:#}"), Some(AS_ROOT));
            None
        }
    }
}

fn pins(diagnosis: &mut Diagnosis, paths: &Paths, config: Option<&Config>, status: Option<&StatusDocument>) {
    let all = match Pins::all_versions(&paths.pins) {
        Ok(all) => all,
        Err(error) => {
            diagnosis.add("pins", Severity::Warning, crate::error::chain(&error), Some(AS_ROOT));
            return;
        }
    };
    let before = diagnosis.findings.len();
    for pins in &all {
        if let Some((state, text, help)) = stale(pins, config, status) {
            diagnosis.add("pins", state, text, help.as_deref());
        }
    }
    if diagnosis.findings.len() == before {
        diagnosis.ok("pins", format!("nothing stale below {}", paths.pins.display()));
    }
}

/// The fault of a client's pins with its severity, and the command that corrects it. `None` if the
/// pins have no fault.
fn stale(
    pins: &Pins,
    config: Option<&Config>,
    status: Option<&StatusDocument>,
) -> Option<(Severity, String, Option<String>)> {
    let name = &pins.client;
    let detach = Some(pins.detach_command());
    let mut leaving = status.into_iter().flat_map(|status| &status.leaving);
    if let Some(leaving) = leaving.find(|leaving| leaving.client == *name && leaving.abi == pins.version) {
        let text = format!("client {name} (ABI version {}) {}", pins.version, leaving.describe());
        return Some((Severity::Note, text, None));
    }
    if !pins.is_of_this_version() {
        let text =
            format!("client {name} has pins of ABI version {}, which belong to another socklb", pins.version);
        return Some((Severity::Warning, text, detach));
    }
    let config = config?;
    if !config.clients.iter().any(|client| client.name == *name) {
        return Some((Severity::Warning, format!("client {name} has pins, but is not configured"), detach));
    }
    match lb_kernel::check_pins(pins, &config.limits) {
        Ok(()) => None,
        Err(error) if error.is_permission() => {
            let text = format!("client {name}: {}", crate::error::chain(&error));
            Some((Severity::Note, text, Some(AS_ROOT.to_owned())))
        }
        Err(error) => Some((Severity::Problem, crate::error::chain(&error), detach)),
    }
}

/// A client to examine. The path of its cgroup is relative to the mount of cgroup2.
struct KnownClient {
    name: String,
    cgroup: std::path::PathBuf,
}

fn clients(config: Option<&Config>, status: Option<&StatusDocument>) -> Vec<KnownClient> {
    let configured = config.into_iter().flat_map(|config| &config.clients);
    let mut known: Vec<KnownClient> = configured
        .map(|client| KnownClient { name: client.name.clone(), cgroup: client.cgroup.clone() })
        .collect();
    let names: BTreeSet<String> = known.iter().map(|client| client.name.clone()).collect();
    for client in status.into_iter().flat_map(|status| &status.clients) {
        if let Some(cgroup) = client.configured_cgroup.as_ref().or(client.cgroup.as_ref())
            && !names.contains(&client.name)
        {
            known.push(KnownClient { name: client.name.clone(), cgroup: cgroup.clone() });
        }
    }
    known
}

fn one_client(diagnosis: &mut Diagnosis, paths: &Paths, client: &KnownClient, features: Option<Features>) {
    let name = &client.name;
    let cgroup = match lb_kernel::cgroup2_mount().and_then(|mount| Cgroup::at(&mount.join(&client.cgroup))) {
        Ok(cgroup) => cgroup,
        Err(error) => {
            let text = format!("client {name}: {}", crate::error::chain(&error));
            diagnosis.add("attachment", Severity::Warning, text, None);
            return;
        }
    };
    let pins = Pins::of(&paths.pins, name);
    match lb_kernel::is_balanced(&pins, cgroup.id) {
        Ok(true) => {
            diagnosis
                .ok("attachment", format!("client {name}: {} (id {})", cgroup.path.display(), cgroup.id));
        }
        Ok(false) => {
            let text = format!("client {name}: no programs are attached to {}", cgroup.path.display());
            diagnosis.add("attachment", Severity::Problem, text, Some("start the daemon, or see its log"));
        }
        Err(error) => {
            let text = format!("client {name}: {}", crate::error::chain(&error));
            diagnosis.add("attachment", Severity::Note, text, Some(AS_ROOT));
        }
    }
    programs::others(diagnosis, name, paths, &pins, &cgroup);
    sockets::uncovered(diagnosis, name, &lb_kernel::uncovered(&cgroup));
    maps::usage(diagnosis, name, &pins, features.is_some_and(|features| features.fetching_atomics));
    maps::anomalies(diagnosis, name, &pins);
}
