//! `socklb drain`, `undrain`, `weight` and `overrides`: operators set, end and list the overrides
//! of this host.

mod close_drained;
pub(super) mod stored;
mod wait;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::anyhow;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use lb_document::parse_duration;
use lb_kernel::trust::Untrusted;
use lb_view::filter::Filter;
use lb_view::overrides::{
    Overridden, OverrideScope, OverridesDocument, SCHEMA, WRITE_A_TIME, check_duration, check_percent,
    check_reason,
};
use lb_view::status::StatusDocument;
use lb_view::text::{self, Style};

use self::close_drained::CloseResult;
use self::stored::WithoutDaemon;
pub(super) use self::wait::Interrupts;
use self::wait::WaitLimit;
use super::close::{self, CloseOptions, Rate};
use super::{DEGRADED, PathOptions, paths_of};
use crate::api::{self, Answer, DaemonEnded, OverrideAction, quoted};
use crate::close_jobs::IDLE;
use crate::config::Paths;
use crate::controller::unix_seconds;
use crate::error::{CommandFailure, is_permission};
use crate::output::names;
use crate::output::print;
use crate::output::status;

/// The flows that a drain closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CloseWhich {
    /// TCP connections without data in either direction for 30 s
    Idle,
    /// All flows
    All,
}

impl CloseWhich {
    const fn idle(self) -> Option<Duration> {
        match self {
            Self::Idle => Some(IDLE),
            Self::All => None,
        }
    }
}

/// Backends to drain, and for how long
#[derive(Clone, Debug, Args)]
pub struct DrainOptions {
    /// Service
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub service: String,
    /// Backends: addresses with ports, or indexes
    #[arg(value_name = "BACKEND", required = true, value_parser = backend)]
    pub backends: Vec<String>,
    /// Only for this client, instead of all clients that have the service
    #[arg(long)]
    pub client: Option<String>,
    /// End the drain after this time, for example 10m or 2h; at most a year
    #[arg(long = "for", value_name = "TIME", value_parser = time)]
    pub duration: Option<Duration>,
    /// Reason, which `socklb overrides` shows
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    pub reason: Option<String>,
    /// Wait until no backend has an open flow; ^C ends only the waiting
    #[arg(long, conflicts_with = "dry_run")]
    pub wait: bool,
    /// With --wait: stop waiting after this time
    #[arg(long, value_name = "TIME", value_parser = time, requires = "wait", default_value = "5m")]
    pub timeout: Duration,
    /// After the drain has begun, close the open flows of the backends, as `socklb close` does; not
    /// together with --dry-run or --json
    #[arg(long, value_name = "WHICH", conflicts_with_all = ["dry_run", "json"])]
    pub close: Option<CloseWhich>,
    /// With --close: before the closing, wait at most this long for the flows to end by themselves
    #[arg(long, value_name = "TIME", value_parser = time, requires = "close")]
    pub after: Option<Duration>,
    /// With --close: close at most this many connections per second on this host
    #[arg(long, value_name = "N/s", value_parser = close::rate, requires = "close", default_value_t = Rate::default())]
    pub rate: Rate,
    /// Only print what would change
    #[arg(long)]
    pub dry_run: bool,
    /// Drain even the last available backends
    #[arg(long)]
    pub force: bool,
    /// Print JSON; with --wait, print it at the end, and print the progress on standard error
    #[arg(long)]
    pub json: bool,
}

/// Backends to undrain
#[derive(Clone, Debug, Args)]
pub struct UndrainOptions {
    /// Service
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub service: String,
    /// Backends: addresses with ports, or indexes
    #[arg(value_name = "BACKEND", required = true, value_parser = backend)]
    pub backends: Vec<String>,
    /// Only the drains for this client, instead of all drains of the backends
    #[arg(long)]
    pub client: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Backend and percentage of its weight
#[derive(Clone, Debug, Args)]
pub struct WeightOptions {
    /// Service
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub service: String,
    /// Backend: address with port, or index
    #[arg(value_parser = backend)]
    pub backend: String,
    /// Percentage of the weight, from 1% to 1000%; 100% ends the override
    #[arg(value_name = "PERCENT%", value_parser = percent)]
    pub percent: u16,
    /// Only for this client, instead of all clients that have the service
    #[arg(long)]
    pub client: Option<String>,
    /// End the override after this time, for example 10m or 2h; at most a year
    #[arg(long = "for", value_name = "TIME", value_parser = time)]
    pub duration: Option<Duration>,
    /// Reason, which `socklb overrides` shows
    #[arg(long, value_name = "TEXT", value_parser = reason)]
    pub reason: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The error for a drain that ends before its connections are closed.
pub const ENDS_BEFORE_CLOSING: &str = "the drain would end before --close closes connections: write a time for --for that is longer than --after";

/// The error for `100%` with an end or a reason.
pub const ENDS_AT_ONCE: &str = "100% ends the override at once: --for and --reason are for other percentages";

impl WeightOptions {
    pub fn ends_with_a_time(&self) -> bool {
        self.percent == 100 && (self.duration.is_some() || self.reason.is_some())
    }
}

impl DrainOptions {
    /// Whether the drain ends before the command would close connections.
    pub fn ends_before_closing(&self) -> bool {
        self.close.is_some() && self.duration.is_some_and(|time| time <= self.after.unwrap_or_default())
    }

    fn change(&self) -> OverrideCommand<'_> {
        OverrideCommand {
            action: OverrideAction::Drain,
            service: &self.service,
            backends: &self.backends,
            client: self.client.as_deref(),
            duration: self.duration,
            reason: self.reason.as_deref(),
            percent: None,
            force: self.force,
            dry_run: self.dry_run,
            json: self.json,
        }
    }

    /// The connections of a drained backend that the command closes.
    fn closing(&self, backend: SocketAddr) -> CloseOptions {
        CloseOptions {
            service: self.service.clone(),
            backend: backend.to_string(),
            client: self.client.clone(),
            idle: self.close.and_then(CloseWhich::idle),
            rate: self.rate,
            dry_run: false,
            json: false,
        }
    }
}

pub fn backend(text: &str) -> Result<String, String> {
    if api::is_backend(text) {
        Ok(text.to_owned())
    } else {
        Err("write an address such as 10.0.0.1:80, or an index".to_owned())
    }
}

fn time(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text).ok_or(WRITE_A_TIME)?;
    check_duration(time).map(|()| time)
}

fn reason(text: &str) -> Result<String, String> {
    check_reason(text).map(|()| text.to_owned())
}

/// A number without `%` is rejected, because other load balancers read it as an absolute weight.
fn percent(text: &str) -> Result<u16, String> {
    let number = text.strip_suffix('%').ok_or("write a percentage of the weight in the list, such as 50%")?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let percent = number.parse().ok().filter(|_| is_number).ok_or("write a whole number from 1% to 1000%")?;
    check_percent(percent).map(|()| percent)
}

/// A change to request from the daemon.
struct OverrideCommand<'o> {
    action: OverrideAction,
    service: &'o str,
    backends: &'o [String],
    client: Option<&'o str>,
    duration: Option<Duration>,
    reason: Option<&'o str>,
    percent: Option<u16>,
    force: bool,
    dry_run: bool,
    json: bool,
}

/// Nothing was changed, for this reason.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Unchanged(String);

impl OverrideCommand<'_> {
    fn path(&self) -> String {
        let mut path = format!(
            "/v1/overrides/{}?action={}&backends={}",
            quoted(self.service),
            self.action.name(),
            quoted(&self.backends.join(","))
        );
        let seconds = self.duration.map(|time| time.as_secs().to_string());
        let percent = self.percent.map(|percent| percent.to_string());
        let values = [
            ("client", self.client),
            ("for", seconds.as_deref()),
            ("reason", self.reason),
            ("percent", percent.as_deref()),
            ("force", self.force.then_some("true")),
            ("dry_run", self.dry_run.then_some("true")),
        ];
        for (key, value) in values {
            if let Some(value) = value {
                path += &format!("&{key}={}", quoted(value));
            }
        }
        path
    }

    /// Requests the change. The answer may be a refusal. If an error means that nothing was
    /// changed, a JSON document also has the reason.
    ///
    /// # Errors
    /// If no daemon answers, or this user has no permission.
    fn request(&self, paths: &Paths) -> anyhow::Result<Overridden> {
        let error = match self.send(paths) {
            Ok(overridden) => return Ok(overridden),
            Err(error) => error,
        };
        if let Some(refusal) = self.refusal(&error).filter(|_| self.json) {
            print::json(&refusal)?;
        }
        Err(error)
    }

    /// The document for an error after which nothing is changed; `None` if this is not known.
    fn refusal(&self, error: &anyhow::Error) -> Option<Overridden> {
        let is_unchanged = error.is::<Unchanged>() || error.is::<Untrusted>() || is_permission(error);
        is_unchanged.then(|| Overridden {
            schema: SCHEMA,
            service: self.service.to_owned(),
            client: self.client.map(str::to_owned),
            refused: Some(format!("{error:#}")),
            is_dry_run: self.dry_run,
            changed: Vec::new(),
            overrides: Vec::new(),
            not_kept: None,
        })
    }

    fn send(&self, paths: &Paths) -> anyhow::Result<Overridden> {
        let path = self.path();
        if path.len() > api::MAX_PATH {
            let text = format!(
                "a request may have at most {} bytes, but this request for {} backends has {}: name fewer backends \
                 at a time, or name them by index; nothing was changed",
                api::MAX_PATH,
                self.backends.len(),
                path.len()
            );
            return Err(Unchanged(text).into());
        }
        let answer =
            if self.dry_run { api::post_to_daemon(paths, &path) } else { api::post_and_store(paths, &path) };
        let answer = match answer {
            Err(error) if error.is::<DaemonEnded>() => {
                return Err(anyhow!("{error}; `socklb overrides` shows the overrides that exist"));
            }
            answer => answer?,
        };
        match answer {
            Answer::Given(overridden) => Ok(overridden),
            Answer::NotRunning => {
                Err(Unchanged("the daemon is not running: nothing was changed".to_owned()).into())
            }
            Answer::NotResponding if self.dry_run => {
                Err(Unchanged(format!("{}: nothing was changed", api::not_responding(&paths.run))).into())
            }
            Answer::NotResponding => Err(anyhow!(
                "{}: the daemon may still make the change when it continues; `socklb overrides` shows the result",
                api::not_responding(&paths.run)
            )),
        }
    }
}

/// Drains backends, and waits for the end of their flows if requested.
///
/// # Errors
/// If no daemon answers, or the daemon refuses the drain.
pub fn drain(options: &DrainOptions, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let DrainOptions { wait, json, .. } = options;
    let change = options.change();
    let paths = paths_of(files)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if options.close.is_some() {
        // Checks first that the daemon and its kernel can close connections. If they cannot, the
        // command ends before it drains a backend.
        let planned = OverrideCommand { dry_run: true, ..change }.request(&paths)?;
        let known = planned.overrides.iter().map(|one| one.of.scope.backend);
        if let Some(backend) = planned.changed.iter().copied().chain(known).next() {
            runtime.block_on(close::check(&paths, options.closing(backend)))?;
        }
    }
    let overridden = change.request(&paths)?;
    let is_undone = overridden.is_undone(change.action.name());
    if !*wait && options.close.is_none() || overridden.refused.is_some() || is_undone {
        return show(&overridden, change.action, *json);
    }
    let text = overridden.describe(change.action.name(), now());
    if *json {
        print::message(text.trim_end());
    } else {
        print::text(&text)?;
    }
    let code = runtime.block_on(close_and_wait(&paths, options, overridden))?;
    Ok(ExitCode::from(code))
}

/// Closes the flows of drained backends and waits until no flow is open, as far as the options
/// request this. Returns the exit code.
///
/// # Errors
/// If the daemon is not trusted or refuses this user, or the output cannot be written.
async fn close_and_wait(
    paths: &Paths,
    options: &DrainOptions,
    mut overridden: Overridden,
) -> anyhow::Result<u8> {
    let json = options.json;
    let mut interrupts = Interrupts::new()?;
    let drains = overridden.overrides.iter().map(|one| &one.of);
    let scopes: Vec<OverrideScope> = drains
        .filter(|of| of.kind.is_drain() && of.scope.client == options.client)
        .map(|of| of.scope.clone())
        .collect();
    let mut is_complete = true;
    if options.close.is_some() {
        if let Some(after) = options.after {
            let code = wait::wait(paths, &scopes, WaitLimit::After(after), json, &mut interrupts).await?.code;
            if ![0, DEGRADED].contains(&code) {
                print::message("no connections are closed");
                return Ok(code);
            }
        }
        match close_drained::close(paths, options, &scopes, interrupts.next()).await? {
            CloseResult::Closed => {}
            CloseResult::Incomplete => is_complete = false,
            CloseResult::Early(code) => return Ok(code),
        }
    }
    let mut code = 0;
    if options.wait {
        let waited =
            wait::wait(paths, &scopes, WaitLimit::Timeout(options.timeout), json, &mut interrupts).await?;
        code = waited.code;
        if let Some(last) = waited.last {
            overridden.overrides = last.overrides;
            overridden.overrides.retain(|one| scopes.contains(&one.of.scope));
            overridden.not_kept = last.not_kept;
        }
    }
    if json {
        print::json(&overridden)?;
    }
    let is_degraded = (overridden.not_kept.is_some() || !is_complete) && code == 0;
    Ok(if is_degraded { DEGRADED } else { code })
}

/// Ends the drain of backends.
///
/// # Errors
/// If no daemon answers, or the daemon refuses the change.
pub fn undrain(options: &UndrainOptions, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let change = OverrideCommand {
        action: OverrideAction::Undrain,
        service: &options.service,
        backends: &options.backends,
        client: options.client.as_deref(),
        duration: None,
        reason: None,
        percent: None,
        force: false,
        dry_run: false,
        json: options.json,
    };
    show(&change.request(&paths_of(files)?)?, change.action, options.json)
}

/// Multiplies the weight of a backend.
///
/// # Errors
/// If no daemon answers, or the daemon refuses the change.
pub fn weigh(options: &WeightOptions, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let change = OverrideCommand {
        action: OverrideAction::Weight,
        service: &options.service,
        backends: std::slice::from_ref(&options.backend),
        client: options.client.as_deref(),
        duration: options.duration,
        reason: options.reason.as_deref(),
        percent: Some(options.percent),
        force: false,
        dry_run: false,
        json: options.json,
    };
    show(&change.request(&paths_of(files)?)?, change.action, options.json)
}

fn show(overridden: &Overridden, action: OverrideAction, json: bool) -> Result<ExitCode, CommandFailure> {
    if json {
        print::json(overridden)?;
    }
    match &overridden.refused {
        Some(_) if json => return Ok(ExitCode::FAILURE),
        Some(why) => return Err(anyhow!("{why}").into()),
        None if !json => drop(print::text(&overridden.describe(action.name(), now()))?),
        None => {}
    }
    if overridden.is_undone(action.name()) {
        return Err(anyhow!(
            "another command has undone this change; repeat this command if the change is still wanted"
        )
        .into());
    }
    Ok(if overridden.not_kept.is_some() { ExitCode::from(DEGRADED) } else { ExitCode::SUCCESS })
}

/// Prints the overrides of this host, or those of one service.
///
/// # Errors
/// If no daemon answers and the stored overrides cannot be read, or if the service does not exist.
pub fn list(service: Option<&str>, json: bool, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let paths = paths_of(files)?;
    let why = match api::query_daemon::<OverridesDocument>(&paths, "/v1/overrides")? {
        Answer::Given(document) => {
            let services = || match api::query_daemon::<StatusDocument>(&paths, "/v1/status")? {
                Answer::Given(status) => Ok(status),
                Answer::NotRunning | Answer::NotResponding => {
                    status::from_pins(&paths.pins, String::new()).map_err(Into::into)
                }
            };
            check_service(service, &document, services)?;
            return print_list(document, service, json, true);
        }
        Answer::NotRunning => "the daemon is not running".to_owned(),
        Answer::NotResponding => api::not_responding(&paths.run),
    };
    let WithoutDaemon { document, note, kernel } = stored::read(&paths, now())?;
    // Without the tables, it is not known which services exist.
    if let Some(kernel) = kernel {
        check_service(service, &document, || Ok(kernel))?;
    }
    print::message(format_args!("{why}; {note}"));
    print_list(document, service, json, false)
}

/// Checks that an override or a client has this service. A service with an override may have no
/// client any more.
///
/// # Errors
/// If neither an override nor a client has this service. The message lists the services that exist.
fn check_service(
    service: Option<&str>,
    document: &OverridesDocument,
    status: impl FnOnce() -> anyhow::Result<StatusDocument>,
) -> anyhow::Result<()> {
    let Some(service) = service else { return Ok(()) };
    if document.overrides.iter().any(|one| one.of.scope.service == service) {
        return Ok(());
    }
    let status = status()?;
    let services = status.clients.iter().flat_map(|client| &client.services);
    let services = services.map(|service| service.name.as_str());
    let overridden = document.overrides.iter().map(|one| one.of.scope.service.as_str());
    let services = || services.chain(overridden).map(|name| (name, BTreeSet::new())).collect();
    let filter = Filter { service: Some(service.to_owned()), ..Filter::default() };
    names::check(&filter, services).map_err(|text| anyhow!(text))
}

fn print_list(
    mut document: OverridesDocument,
    service: Option<&str>,
    json: bool,
    is_running: bool,
) -> Result<ExitCode, CommandFailure> {
    document.overrides.retain(|one| service.is_none_or(|service| one.of.scope.service == service));
    if json {
        print::json(&document)?;
    } else {
        print::text(&text::overrides(&document, service, now(), Style::for_stdout()))?;
    }
    let is_well = is_running && document.not_kept.is_none() && document.lost.is_none();
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::from(DEGRADED) })
}

/// The time in seconds since 1970.
fn now() -> u64 {
    unix_seconds(SystemTime::now())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use lb_view::overrides::{Override, OverrideKind, OverrideStatus};

    use super::super::{Cli, Command};
    use super::*;

    fn parsed(line: &str) -> Result<Command, String> {
        let words = line.split_whitespace();
        Cli::try_parse_from(words).map(|cli| cli.command).map_err(|error| error.to_string())
    }

    pub fn drained(line: &str) -> DrainOptions {
        match parsed(line) {
            Ok(Command::Drain(options)) => options,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn a_drain_has_a_request_with_all_its_options() {
        let options = drained(
            "socklb drain users 10.0.0.1:80 3 [2001:db8::1]:80 --client a/b --for 10m --reason new&kernel --force --dry-run",
        );
        assert_eq!(
            options.change().path(),
            "/v1/overrides/users?action=drain&backends=10.0.0.1:80,3,%5B2001:db8::1%5D:80\
             &client=a%2Fb&for=600&reason=new%26kernel&force=true&dry_run=true"
        );
        let waiting = drained("socklb drain users 0 --wait");
        assert_eq!((waiting.wait, waiting.timeout), (true, Duration::from_mins(5)));
        assert_eq!(drained("socklb drain users 0 --wait --timeout 90s").timeout, Duration::from_secs(90));
        let closes = drained("socklb drain users 0 --client a --close idle --after 60s --rate 50/s");
        assert_eq!(closes.after, Some(Duration::from_secs(60)));
        assert_eq!(
            close::path(&closes.closing("10.0.0.1:80".parse().unwrap())),
            "/v1/close/users?backend=10.0.0.1:80&rate=50&dry_run=false&client=a&idle_ms=30000"
        );
    }

    #[test]
    fn a_drain_must_last_until_its_connections_are_closed() {
        for (options, expected) in [
            ("--for 2s --close all --after 5s", true),
            ("--for 5s --close all --after 5s", true),
            ("--for 6s --close all --after 5s", false),
            ("--for 2s --close all", false),
            ("--close all --after 5s", false),
            ("--for 2s", false),
        ] {
            let options = drained(&format!("socklb drain users 0 {options}"));
            assert_eq!(options.ends_before_closing(), expected, "{options:?}");
        }
    }

    #[test]
    fn a_request_for_too_many_backends_is_refused_before_it_is_sent() {
        let folder = tempfile::tempdir().expect("create a folder");
        let paths =
            Paths { pins: folder.path().into(), run: folder.path().into(), state: folder.path().into() };
        let error = |count: usize| {
            let backends = vec!["192.168.100.100:65535"; count].join(" ");
            let options = drained(&format!("socklb drain users {backends}"));
            options.change().request(&paths).expect_err("no daemon runs").to_string()
        };
        assert!(error(350).contains("the daemon is not running"), "{}", error(350));
        let text = error(400);
        assert!(text.contains("name fewer backends at a time") && text.len() < 300, "{text}");
    }

    #[test]
    fn a_refusal_without_a_daemon_is_a_document() {
        let options = drained("socklb drain users 0 --client web --json");
        let change = options.change();
        let folder = tempfile::tempdir().expect("create a folder");
        let paths =
            Paths { pins: folder.path().into(), run: folder.path().into(), state: folder.path().into() };
        let error = change.send(&paths).expect_err("no daemon runs");
        let document = change.refusal(&error).map(|document| serde_json::to_value(document).expect("JSON"));
        let expected = serde_json::json!({
            "schema": SCHEMA,
            "service": "users",
            "client": "web",
            "refused": "the daemon is not running: nothing was changed",
            "is_dry_run": false,
            "changed": [],
            "overrides": [],
            "not_kept": null,
        });
        assert_eq!(document, Some(expected));
        // A change that may have been made is not refused.
        assert_eq!(change.refusal(&anyhow!(DaemonEnded)), None);
    }

    #[test]
    fn a_service_that_has_only_overrides_exists() {
        let of = |service: &str| Override {
            scope: OverrideScope {
                service: service.to_owned(),
                backend: ([10, 0, 0, 1], 80).into(),
                client: None,
            },
            kind: OverrideKind::Drain,
            reason: None,
            user: 0,
            process: 1,
            since: 1,
            until: None,
        };
        let status = |of| OverrideStatus { of, is_configured: false, is_listed: false, clients: Vec::new() };
        let document = OverridesDocument {
            schema: SCHEMA,
            overrides: vec![status(of("mail"))],
            not_kept: None,
            lost: None,
        };
        let folder = tempfile::tempdir().expect("create a folder");
        let kernel = || status::from_pins(folder.path(), String::new()).map_err(Into::into);
        let check = |service| check_service(service, &document, kernel).map_err(|error| error.to_string());
        assert_eq!((check(None), check(Some("mail"))), (Ok(()), Ok(())));
        let expected = "no client here dials a service \"users\"; services here are: mail";
        assert_eq!(check(Some("users")), Err(expected.to_owned()));
    }

    #[test]
    fn impossible_values_are_refused_with_what_would_be_right() {
        let long = format!("socklb drain users 0 --reason {}", "x".repeat(10_000));
        for (line, expected) in [
            ("socklb drain users", "<BACKEND>"),
            ("socklb drain users web1", "write an address such as 10.0.0.1:80, or an index"),
            ("socklb drain users 0 --for 0s", WRITE_A_TIME),
            ("socklb drain users 0 --for 500ms", WRITE_A_TIME),
            ("socklb drain users 0 --for 8761h", WRITE_A_TIME),
            ("socklb drain users 0 --for 400d", WRITE_A_TIME),
            ("socklb drain users 0 --for 1w", WRITE_A_TIME),
            ("socklb drain users 0 --for 10", WRITE_A_TIME),
            ("socklb drain users 0 --reason=", "the reason is empty: leave it out if there is none"),
            ("socklb drain users 0 --reason a\u{7}b", "the reason contains the control character U+0007"),
            ("socklb drain users 0 --reason a\u{202e}b", "the control character U+202E"),
            (&long, "the reason has 10000 characters; at most 200 are allowed"),
            ("socklb drain users 0 --timeout 10s", "--wait"),
            ("socklb drain users 0 --wait --dry-run", "cannot be used with"),
            ("socklb drain users 0 --close all --dry-run", "cannot be used with"),
            ("socklb drain users 0 --close all --json", "cannot be used with"),
            ("socklb drain users 0 --close busy", "idle, all"),
            ("socklb weight users 0 0%", "use `socklb drain`"),
            ("socklb weight users 0 1001%", "write 1% to 1000%"),
            ("socklb weight users 0 99999%", "write a whole number from 1% to 1000%"),
            ("socklb weight users 0 12.5%", "write a whole number from 1% to 1000%"),
            ("socklb weight users 0 %", "write a whole number from 1% to 1000%"),
            ("socklb weight users 0 50", "such as 50%"),
        ] {
            let error = parsed(line).map(|_| ()).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
        assert!(
            matches!(parsed("socklb weight users 10.0.0.1 50%"), Ok(Command::Weight(options)) if options.percent == 50)
        );
    }
}
