//! The commands, one function each: they put the parts together and decide the exit code.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::{Context, Result};
use lb_core::balancer::{Balancer, Event, Refused};
use lb_core::plan::Plan;
use lb_core::service::Service;
use thiserror::Error;

use crate::api::{self, Answer};
use crate::cli::{Cli, Command, Place};
use crate::config::{self, Client, Config, ConfigError, Host, Paths, Source};
use crate::daemon::Unusable;
use crate::diagnostic::Faults;
use crate::explain::{self, Dials, Explanation};
use crate::flows::{self, Wanted};
use crate::offer::{self, Dialler, Offers};
use crate::render::{self, Style};
use crate::source::{FileSource, SourceError, Stamp};
use crate::status::{self, Status};
use crate::{check, cover, daemon, doctor, print};
use lb_kernel::trust::{self, Untrusted};
use lb_kernel::{self, DatapathError, Pins};

/// Degraded: something works, and somebody should look.
const DEGRADED: u8 = 3;

/// Why a command failed.
pub enum Failure {
    /// Faults of files, shown with the lines they are in.
    Faults(Faults),
    /// Anything else.
    Other(anyhow::Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Faults(faults) => write!(f, "{faults}"),
            Self::Other(error) => write!(f, "{error:#}"),
        }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = match error.into().downcast::<ConfigError>() {
            Ok(ConfigError::Faulty(faults)) => return Self::Faults(faults),
            Ok(error) => anyhow::Error::new(error),
            Err(error) => error,
        };
        match error.downcast::<SourceError>() {
            Ok(SourceError::Invalid(faults)) => Self::Faults(faults),
            Ok(error) => Self::Other(anyhow::Error::new(error)),
            Err(error) => Self::Other(error),
        }
    }
}

/// Whether more privilege is what it would take.
pub fn is_permission(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<DatapathError>().is_some_and(DatapathError::is_permission)
            || cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::PermissionDenied)
    })
}

/// Runs a command.
pub fn run(cli: Cli) -> Result<ExitCode, Failure> {
    let place = cli.place;
    match cli.command {
        Command::Run => run_daemon(&place),
        Command::Check { file } => check::run(file.as_deref().unwrap_or(place.file())),
        Command::Status { client, json, watch } => show_status(client.as_deref(), json, watch, &place),
        Command::Flows { client, service, backend, json } => {
            show_flows(&Wanted { client, service, backend }, json, &place)
        }
        Command::Explain { service, client, json } => {
            show_explanation(&service, client.as_deref(), json, &place)
        }
        Command::Wait { client, timeout } => {
            cover::wait(&client, &paths_of(&place)?, Duration::from_secs(timeout.into()))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Exec { client, timeout, command } => {
            let paths = paths_of(&place)?;
            Ok(cover::exec(&client, &command, &paths, Duration::from_secs(timeout.into()))?)
        }
        Command::Doctor { json } => examine(json, &place),
        Command::Detach { client, all: _ } => detach(client.as_deref(), &place),
    }
}

fn read_config(place: &Place) -> Result<Config, Failure> {
    // Paths in it are relative to it, and are compared with what the kernel reports, which is absolute.
    let mut config = config::read(&std::path::absolute(place.file())?, &Host)?;
    config.paths = place.over(config.paths)?;
    Ok(config)
}

/// What a daemon that runs makes of it that its configuration cannot be read again.
fn unusable(failure: &Failure) -> Unusable {
    let is_missing = |error: &(dyn std::error::Error + 'static)| {
        error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    match failure {
        Failure::Other(error) if !error.chain().any(is_missing) => Unusable::Unread(failure.to_string()),
        Failure::Other(_) | Failure::Faults(_) => Unusable::Faulty(failure.to_string()),
    }
}

/// The paths of commands that need nothing else of the configuration: they work whatever else is wrong with it.
fn paths_of(place: &Place) -> Result<Paths, Failure> {
    let paths = match &place.config {
        Some(file) => config::read_paths(&std::path::absolute(file)?)?,
        // There may be none, or none for this user: then everything has its usual place.
        None => config::read_paths(place.file()).unwrap_or_default(),
    };
    Ok(place.over(paths)?)
}

fn run_daemon(place: &Place) -> Result<ExitCode, Failure> {
    // Before it is read: what changes from here on is seen as a change.
    let (read, waiting) = mpsc::channel::<()>();
    let name = place.file().to_owned();
    // It may be on a file system that does not answer. Without a configuration there is nothing else to do.
    let tell = move || {
        if waiting.recv_timeout(Duration::from_secs(2)) == Err(mpsc::RecvTimeoutError::Timeout) {
            print::message(format_args!("{} does not answer yet; waiting for it", name.display()));
        }
    };
    // Without a thread nobody is told.
    let _ = std::thread::Builder::new().name("waiting".to_owned()).spawn(tell);
    let stamp = Stamp::at(place.file());
    let config = read_config(place)?;
    drop(read);
    check_state(&config.paths.state)?;
    let filter = tracing_subscriber::EnvFilter::builder()
        .with_default_directive(tracing_subscriber::filter::LevelFilter::INFO.into())
        .from_env_lossy();
    let style = Style::for_stderr();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(style.colour).init();
    let again = place.clone();
    let reread = move || read_config(&again).map_err(|failure| unusable(&failure));
    match daemon::run(config, stamp, Arc::new(reread)) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        // Who starts the daemon does not try again where a privilege is missing: of anything else that was refused, such as a
        // hook or a directory that somebody else has, that must not be said.
        Err(error) if is_permission(&error) && !lb_kernel::lacks_privilege() => {
            Err(anyhow::anyhow!("{error:#}").into())
        }
        Err(error) => Err(error.into()),
    }
}

/// What lies in the directory of the state is served where a file cannot be used: it must be ours. That it cannot be made
/// is told when something is to be kept there; and one that does not answer has nothing to serve.
fn check_state(directory: &Path) -> Result<(), Untrusted> {
    fn look(path: &Path) -> Result<(), Untrusted> {
        match trust::make_directory(path) {
            Ok(()) => trust::check_directory(path, "--state"),
            Err(_) => Ok(()),
        }
    }
    let (seen, looked) = mpsc::channel();
    let path = directory.to_owned();
    let apart = std::thread::Builder::new().name("state".to_owned()).spawn(move || {
        let _ = seen.send(look(&path));
    });
    if apart.is_err() {
        return look(directory);
    }
    looked.recv_timeout(Duration::from_secs(2)).unwrap_or(Ok(()))
}

/// The sources of all services that come from files, each once.
pub fn file_sources(config: &Config) -> Vec<FileSource> {
    let services: Vec<_> = config.clients.iter().flat_map(|client| &client.services).collect();
    let mut sources: Vec<FileSource> = Vec::new();
    for configured in services {
        let Source::File(path) = &configured.source else { continue };
        let service = &configured.service;
        if sources.iter().any(|source| source.service == service.address && source.path == *path) {
            continue;
        }
        sources.push(FileSource::new(service, path.clone(), config));
    }
    sources
}

/// The status, from the daemon if one runs and answers, else from the pins.
fn status(place: &Place) -> Result<Status, Failure> {
    let paths = paths_of(place)?;
    let why = match api::ask_daemon::<Status>(&paths, "/v1/status")? {
        Answer::Given(status) => match other_pins(&status, place) {
            None => return Ok(status),
            Some(other) => format!(
                "the daemon at {} has its pins in {}; this is what lies in {}",
                api::socket(&paths.run).display(),
                other.display(),
                paths.pins.display()
            ),
        },
        Answer::NotRunning => "the daemon is not running: tables stay as they are".to_owned(),
        Answer::Silent => format!("{}: tables stay as they are", api::silent(&paths.run)),
    };
    Ok(status::from_pins(&paths.pins, why.clone()).context(why)?)
}

/// Where the daemon has its pins, if others were asked for.
fn other_pins(status: &Status, place: &Place) -> Option<PathBuf> {
    let (wanted, daemon) = (place.pins.as_ref()?, status.daemon.as_ref()?.pins.as_ref()?);
    let real = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path)).ok();
    (real(wanted) != real(daemon)).then(|| daemon.clone())
}

fn show_status(
    client: Option<&str>,
    json: bool,
    watch: Option<u32>,
    place: &Place,
) -> Result<ExitCode, Failure> {
    let once = || -> Result<Status, Failure> {
        let mut status = status(place)?;
        if let Some(client) = client {
            status.clients.retain(|other| other.name == client);
            if status.clients.is_empty() {
                return Err(anyhow::anyhow!("no client {client} is running here").into());
            }
        }
        Ok(status)
    };
    let Some(seconds) = watch else {
        let status = once()?;
        if json {
            print::text(&(serde_json::to_string_pretty(&status)? + "\n"))?;
        } else {
            print::text(&render::status(&status, Style::for_stdout()))?;
        }
        let degraded = !status.degraded.is_empty();
        return Ok(if degraded { ExitCode::from(DEGRADED) } else { ExitCode::SUCCESS });
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut tick =
        runtime.block_on(async { tokio::time::interval(Duration::from_secs(seconds.max(1).into())) });
    let style = Style::for_stdout();
    // Ends with the process: by ^C, or when nobody reads any more.
    loop {
        runtime.block_on(tick.tick());
        let text = render::status(&once()?, style);
        // Home and clear to the end, rather than clear and redraw: that would flicker.
        let frame =
            if style.colour { format!("\x1b[H{}\x1b[J", text.replace('\n', "\x1b[K\n")) } else { text };
        if !print::text(&frame)? {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

fn show_flows(wanted: &Wanted, json: bool, place: &Place) -> Result<ExitCode, Failure> {
    let found = flows::find(&paths_of(place)?.pins, wanted)?;
    if json {
        print::json(&found)?;
    } else {
        print::text(&render::flows(&found, wanted, Style::for_stdout()))?;
    }
    Ok(if found.unreadable.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(DEGRADED) })
}

fn show_explanation(
    service: &str,
    client: Option<&str>,
    json: bool,
    place: &Place,
) -> Result<ExitCode, Failure> {
    let paths = paths_of(place)?;
    let query = client.map_or_else(String::new, |client| format!("?client={}", api::quoted(client)));
    let from_config = || -> Result<(Vec<Explanation>, Vec<Dials>), Failure> {
        let config = read_config(place)?;
        let dials = config.clients.iter().map(Dials::of_config).collect();
        Ok((explain_from_config(&config, service, client)?, dials))
    };
    let (explanations, dials) =
        match api::ask_daemon(&paths, &format!("/v1/explain/{}{query}", api::quoted(service)))? {
            Answer::Given(explanations) => (explanations, Vec::new()),
            Answer::NotRunning => from_config()?,
            Answer::Silent => {
                print::message(format_args!(
                    "{}; explaining {} instead",
                    api::silent(&paths.run),
                    place.file().display()
                ));
                from_config()?
            }
        };
    if explanations.is_empty() {
        let dials = if dials.is_empty() { Dials::of_status(&status(place)?) } else { dials };
        return Err(anyhow::anyhow!(explain::why_none(service, client, &dials)).into());
    }
    if json {
        print::text(&(serde_json::to_string_pretty(&explanations)? + "\n"))?;
    } else {
        let style = Style::for_stdout();
        let texts: Vec<String> = explanations.iter().map(|one| render::explanation(one, style)).collect();
        print::text(&texts.join("\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The explanation that a daemon started now, on an empty kernel, would give.
fn explain_from_config(
    config: &Config,
    service: &str,
    client: Option<&str>,
) -> Result<Vec<Explanation>, Failure> {
    let mut clients = config.clients.clone();
    clients.retain(|other| client.is_none_or(|client| client == other.name));
    let offers = offers(&clients, &file_sources(config))?;
    let mut explanations = Vec::new();
    for configured in &clients {
        let balancer = balancer_of(config, configured, &offers)?;
        explanations.extend(explain::explain(configured, &balancer, Some(service), false));
    }
    Ok(explanations)
}

/// The lists of all services that these clients dial, and what each of them uses of them.
pub fn offers(clients: &[Client], sources: &[FileSource]) -> Result<Offers, Failure> {
    let mut offers = offer::statics(clients, &Offers::new());
    for configured in clients.iter().flat_map(|client| &client.services) {
        let Source::File(path) = &configured.source else { continue };
        let Service { name, address, .. } = &configured.service;
        if !offers.contains_key(name) {
            let mut sources = sources.iter();
            let source = sources.find(|source| source.path == *path && source.service == *address);
            let mut offer = source.context("every file has a source")?.read()?.offer;
            offer.complete(&offer::diallers(clients, name));
            offers.insert(name.clone(), offer);
        }
    }
    Ok(offers)
}

/// A list that a client task has no room for.
#[derive(Debug, Error)]
#[error("client {client}, service {service}")]
pub struct DoesNotFit {
    client: String,
    service: String,
    /// The service's address.
    pub address: SocketAddr,
    /// What it lacks.
    #[source]
    pub refused: Refused,
}

/// The mind of a client as a daemon would have it that started now, on an empty kernel.
pub fn balancer_of(config: &Config, client: &Client, offers: &Offers) -> Result<Balancer, Failure> {
    let limits = config.limits;
    let services = client.services.iter().map(|service| service.service.clone()).collect();
    let mut balancer = Balancer::new(services, limits, Plan::default())?;
    for (position, configured) in client.services.iter().enumerate() {
        let service = configured.service.clone();
        let offer = offers.get(&service.name).context("every service has a list")?;
        let dialler = Dialler { service, task: client.task };
        let membership = offer.membership(&dialler).context("every client was asked for")?.clone();
        let delivered = balancer.handle(Event::Endpoints(position, offer.list().clone(), membership));
        delivered.map_err(|refused| DoesNotFit {
            client: client.name.clone(),
            service: configured.service.name.clone(),
            address: configured.service.address,
            refused,
        })?;
    }
    Ok(balancer)
}

fn examine(json: bool, place: &Place) -> Result<ExitCode, Failure> {
    let mut place = place.clone();
    // The daemon that runs knows which configuration is its own.
    if place.config.is_none()
        && let Ok(Answer::Given(status)) = api::ask_daemon::<Status>(&paths_of(&place)?, "/v1/status")
    {
        place.config = status.daemon.map(|daemon| daemon.config);
    }
    let config = read_config(&place).map_err(|failure| failure.to_string());
    let paths = match &config {
        Ok(config) => config.paths.clone(),
        // What is wrong with it is told below.
        Err(_) => paths_of(&place).or_else(|_| place.over(Paths::default()))?,
    };
    let diagnosis = doctor::examine(&paths, place.file(), config.as_ref());
    if json {
        print::text(&(serde_json::to_string_pretty(&diagnosis)? + "\n"))?;
    } else {
        print::text(&render::diagnosis(&diagnosis, Style::for_stdout()))?;
    }
    Ok(if diagnosis.is_degraded() { ExitCode::from(DEGRADED) } else { ExitCode::SUCCESS })
}

fn detach(client: Option<&str>, place: &Place) -> Result<ExitCode, Failure> {
    let directory = paths_of(place)?.pins;
    // Of every version: what an upgrade has left to its last flows goes as well.
    let mut clients = Pins::all_versions(&directory)?;
    if let Some(client) = client {
        clients.retain(|pins| pins.client == client);
        if clients.is_empty() {
            return Err(anyhow::anyhow!("client {client} has no pins below {}", directory.display()).into());
        }
    }
    if clients.is_empty() {
        print::text(&format!("nothing is attached below {}\n", directory.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    for pins in &clients {
        let _lock = pins.lock_to_remove()?;
        lb_kernel::detach(pins)?;
        print::text(&format!("client {}: detached, its maps and pins are removed\n", pins.client))?;
    }
    // As far as nothing is left in them.
    lb_kernel::remove_roots(&directory);
    Ok(ExitCode::SUCCESS)
}
