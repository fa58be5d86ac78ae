//! `socklb close`: closes the connections of a backend's flows.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::builder::NonEmptyStringValueParser;
use lb_document::{in_units, parse_duration};
use lb_kernel::trust::Untrusted;
use lb_view::close_result::{CloseAnswer, Closed, ClosingRefused, SCHEMA};

use super::overrides::{Interrupts, backend};
use super::{DEGRADED, PathOptions, paths_of};
use crate::api::{self, Answer, DaemonEnded, quoted};
use crate::close_jobs::{DEFAULT_RATE, IDLE_TIMES, RATES};
use crate::config::Paths;
use crate::error::{CommandFailure, is_permission};
use crate::output::print;

/// Flows to close
#[derive(Clone, Debug, clap::Args)]
pub struct CloseOptions {
    /// Service
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub service: String,
    /// Backend: address with port, or index
    #[arg(value_name = "BACKEND", value_parser = backend)]
    pub backend: String,
    /// Only flows of this client, instead of all clients that have the backend
    #[arg(long)]
    pub client: Option<String>,
    /// Only TCP connections without data in either direction for this time, and without unread,
    /// unsent or unacknowledged data
    ///
    /// A request that begins between the check and the closing (tens of microseconds) still fails.
    #[arg(long, value_name = "TIME", value_parser = idle_time)]
    pub idle: Option<Duration>,
    /// Close at most this many connections per second on this host
    #[arg(long, value_name = "N/s", value_parser = rate, default_value_t = Rate::default())]
    pub rate: Rate,
    /// Count the flows, but close none
    #[arg(long)]
    pub dry_run: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A number of connections per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate(u32);

impl Default for Rate {
    fn default() -> Self {
        Self(DEFAULT_RATE)
    }
}

impl std::fmt::Display for Rate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/s", self.0)
    }
}

pub fn rate(text: &str) -> Result<Rate, String> {
    let number = text.strip_suffix("/s").and_then(|number| number.parse().ok());
    let rate = number.filter(|number| RATES.contains(number)).map(Rate);
    rate.ok_or_else(|| {
        format!("write a number per second from {}/s to {}/s, such as 100/s", RATES.start(), RATES.end())
    })
}

fn idle_time(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text).filter(|time| IDLE_TIMES.contains(time));
    time.ok_or_else(|| {
        let [least, most] = [*IDLE_TIMES.start(), *IDLE_TIMES.end()].map(in_units);
        format!("write a time from {least} to {most}, such as 30s")
    })
}

/// The maximum number of requests of one command. A request takes at most ten seconds, and the
/// command therefore at most an hour.
const REQUESTS: u32 = 360;

/// `socklb close`.
///
/// # Errors
/// The errors of [`close`].
pub fn run(options: &CloseOptions, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let paths = paths_of(files)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let code = runtime.block_on(async {
        let mut interrupts = Interrupts::new()?;
        close_until(&paths, options, interrupts.next()).await
    })?;
    Ok(ExitCode::from(code))
}

/// Closes the connections, or stops when `interrupted` returns an exit code. Returns the exit code.
async fn close_until(
    paths: &Paths,
    options: &CloseOptions,
    interrupted: impl Future<Output = u8>,
) -> Result<u8> {
    tokio::select! {
        closed = close(paths, options) => Ok(if closed? { 0 } else { DEGRADED }),
        code = interrupted => {
            print::message(if options.dry_run {
                "stopped counting; nothing was closed"
            } else {
                "stopped closing; connections that are closed stay closed, and the daemon's log has their number"
            });
            Ok(code)
        }
    }
}

/// Why a request has closed nothing, or why its result is unknown. Another attempt may succeed.
#[derive(Debug, thiserror::Error)]
pub enum NotClosed {
    /// Other commands are closing connections.
    #[error("{0}")]
    Busy(String),
    /// No daemon runs.
    #[error("the daemon is not running, so nothing was closed: only the daemon closes connections")]
    NotRunning,
    /// The daemon refuses for another reason.
    #[error("{0}")]
    Refused(String),
    /// The daemon hangs, or ended before it answered or between two requests.
    #[error("{0}")]
    NoAnswer(String),
}

/// Closes the connections by repeated requests to the daemon, and prints how many are closed and
/// how many are left. Returns `true` if no selected connection is left. If the future is dropped,
/// the daemon ends the close job within a second. A JSON document also has the reason if nothing
/// was closed, or the numbers so far if a later request fails.
///
/// # Errors
/// If no daemon answers, the daemon refuses this user, no client has the backend, another job
/// closes the same connections, or the daemon or its kernel cannot close connections.
pub async fn close(paths: &Paths, options: &CloseOptions) -> Result<bool> {
    let mut all = match request(paths, options).await {
        Ok(first) => first,
        Err(error) => {
            if options.json && (options.dry_run || is_unchanged(&error)) {
                let (service, backend, refused) = (&options.service, &options.backend, format!("{error:#}"));
                print::json(&ClosingRefused { schema: SCHEMA, service, backend, refused: &refused })?;
            }
            return Err(error);
        }
    };
    // The list may give the index to another backend.
    let again = CloseOptions { backend: all.backend.to_string(), ..options.clone() };
    for _ in 1..REQUESTS {
        let [closed, left] = [all.sum(|counts| counts.closed), all.sum(|counts| counts.left)];
        if left == 0 {
            break;
        }
        if !options.json {
            print::message(format_args!("{closed} closed, {left} left"));
        }
        match request(paths, &again).await {
            Ok(later) => all.followed_by(later),
            Err(error) => {
                if options.json {
                    print::json(&all)?;
                }
                if matches!(error.downcast_ref(), Some(NotClosed::NotRunning)) {
                    let text = format!("the daemon ended: {closed} closed, {left} left");
                    return Err(NotClosed::NoAnswer(text).into());
                }
                return Err(error);
            }
        }
    }
    if options.json {
        print::json(&all)?;
    } else {
        print::text(&all.describe())?;
    }
    Ok(all.is_complete())
}

/// Whether it is known that a request with this error has closed nothing.
fn is_unchanged(error: &anyhow::Error) -> bool {
    let refused = error.downcast_ref();
    matches!(refused, Some(NotClosed::Busy(_) | NotClosed::NotRunning | NotClosed::Refused(_)))
        || error.is::<Untrusted>()
        || is_permission(error)
}

pub(super) fn path(options: &CloseOptions) -> String {
    let CloseOptions { service, backend, client, idle, rate, dry_run, json: _ } = options;
    let mut path = format!(
        "/v1/close/{}?backend={}&rate={}&dry_run={dry_run}",
        quoted(service),
        quoted(backend),
        rate.0
    );
    if let Some(client) = client {
        path += &format!("&client={}", quoted(client));
    }
    if let Some(idle) = idle {
        path += &format!("&idle_ms={}", idle.as_millis());
    }
    path
}

/// Checks by a dry run that the daemon and its kernel can close connections.
///
/// # Errors
/// The errors of [`close`], except the error that another job closes the same connections.
pub async fn check(paths: &Paths, options: CloseOptions) -> Result<()> {
    match request(paths, &CloseOptions { dry_run: true, ..options }).await {
        Err(error) if matches!(error.downcast_ref(), Some(NotClosed::Busy(_))) => Ok(()),
        counted => counted.map(drop),
    }
}

/// Why a dry run without an answer needs no attention.
const NOTHING_CLOSED: &str = "nothing was closed, because this is a dry run";

/// Sends one request to the daemon.
async fn request(paths: &Paths, options: &CloseOptions) -> Result<Closed> {
    let no_answer = |text: String| Err(NotClosed::NoAnswer(text).into());
    match api::post_cancellable::<CloseAnswer>(paths, &path(options)).await {
        Ok(Answer::Given(CloseAnswer::Counted(closed))) => Ok(closed),
        Ok(Answer::Given(CloseAnswer::Refused(refusal))) if refusal.is_permission => {
            Err(std::io::Error::new(std::io::ErrorKind::PermissionDenied, refusal.text).into())
        }
        Ok(Answer::Given(CloseAnswer::Refused(refusal))) if refusal.is_busy => {
            Err(NotClosed::Busy(refusal.text).into())
        }
        Ok(Answer::Given(CloseAnswer::Refused(refusal))) => Err(NotClosed::Refused(refusal.text).into()),
        Ok(Answer::NotRunning) => Err(NotClosed::NotRunning.into()),
        Ok(Answer::NotResponding) if options.dry_run => {
            no_answer(format!("{}: {NOTHING_CLOSED}", api::not_responding(&paths.run)))
        }
        Err(error) if error.is::<DaemonEnded>() && options.dry_run => {
            no_answer(format!("the daemon ended before it answered: {NOTHING_CLOSED}"))
        }
        Ok(Answer::NotResponding) => no_answer(format!(
            "{}: some connections may have been closed (the daemon's log has their number); the daemon ends the job \
             when it notices that this command has ended",
            api::not_responding(&paths.run)
        )),
        Err(error) if error.is::<DaemonEnded>() => no_answer(
            "the daemon ended before it answered: some connections may have been closed, and their number is not known"
                .to_owned(),
        ),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use clap::Parser;
    use lb_view::close_result::{ClientClosed, CloseCounts, CloseRefusal};

    use super::super::{Cli, Command};
    use super::*;

    /// Directories without a daemon.
    fn paths(folder: &tempfile::TempDir) -> Paths {
        let [pins, run, state] = std::array::from_fn(|_| folder.path().to_owned());
        Paths { pins, run, state }
    }

    fn options(line: &str) -> CloseOptions {
        match Cli::try_parse_from(line.split(' ')).expect(line).command {
            Command::Close(options) => options,
            other => panic!("{other:?}"),
        }
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(future)
    }

    #[test]
    fn without_a_daemon_nothing_is_closed_for_certain() {
        let folder = tempfile::tempdir().expect("a folder");
        let (paths, options) = (paths(&folder), options("socklb close users 0"));
        let error = block_on(close(&paths, &options)).expect_err("no daemon runs");
        assert!(is_unchanged(&error) && error.to_string().starts_with("the daemon is not running"));
        // What a daemon that hangs has closed is not known.
        assert!(!is_unchanged(&NotClosed::NoAnswer("the daemon hangs".to_owned()).into()));
    }

    /// The error of the command if the daemon gives this answer and ends.
    fn answered(answer: String) -> anyhow::Error {
        let folder = tempfile::tempdir().expect("a folder");
        let paths = paths(&folder);
        let listener = UnixListener::bind(api::socket(&paths.run)).expect("bind");
        let daemon = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("the command connects");
            // A second request finds no daemon.
            drop(listener);
            assert!(stream.read(&mut [0; 1024]).expect("read the request") > 0);
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", answer.len());
            stream.write_all((head + &answer).as_bytes()).expect("answer");
        });
        let error = block_on(close(&paths, &options("socklb close users 0"))).expect_err("an error");
        daemon.join().expect("no panic");
        error
    }

    #[test]
    fn an_answer_that_cannot_be_parsed_does_not_mean_that_nothing_was_closed() {
        let error = answered("{}".to_owned());
        assert!(!is_unchanged(&error) && error.to_string().contains("the format of another version"));
        for (is_permission, is_busy) in [(true, false), (false, true), (false, false)] {
            let refusal = CloseRefusal { is_permission, is_busy, text: "no".to_owned() };
            let refusal = serde_json::to_string(&CloseAnswer::Refused(refusal)).expect("JSON");
            let error = answered(refusal);
            assert!(is_unchanged(&error) && error.to_string() == "no", "{error}");
        }
    }

    #[test]
    fn a_daemon_that_ends_between_two_requests_has_closed_connections() {
        let tcp = CloseCounts { closed: 3, left: 5, ..CloseCounts::default() };
        let client = ClientClosed { client: "web".to_owned(), tcp, udp: CloseCounts::default(), error: None };
        let counted = Closed {
            schema: SCHEMA,
            service: "users".to_owned(),
            backend: ([10, 0, 0, 1], 80).into(),
            dry_run: false,
            clients: vec![client],
        };
        let error = answered(serde_json::to_string(&CloseAnswer::Counted(counted)).expect("JSON"));
        assert_eq!(error.to_string(), "the daemon ended: 3 closed, 5 left");
        assert!(!is_unchanged(&error));
    }

    #[test]
    fn a_signal_ends_the_closing_with_its_own_code() {
        let folder = tempfile::tempdir().expect("a folder");
        let _daemon = UnixListener::bind(api::socket(folder.path())).expect("bind");
        let paths = paths(&folder);
        for line in ["socklb close users 0", "socklb close users 0 --dry-run"] {
            let options = options(line);
            let closing = close_until(&paths, &options, std::future::ready(143));
            assert_eq!(block_on(closing).expect("no error"), 143);
        }
    }

    #[test]
    fn rates_and_idle_times_have_limits() {
        for text in ["1/s", "100/s", "10000/s"] {
            assert_eq!(rate(text).expect(text).to_string(), text);
        }
        for text in ["100", "0/s", "10001/s", "-1/s", "1/m", "/s", ""] {
            assert!(rate(text).is_err_and(|text| text.contains("1/s to 10000/s")), "{text}");
        }
        assert_eq!(idle_time("30s"), Ok(Duration::from_secs(30)));
        for text in ["30", "99ms", "25h", "0s", "-1s", ""] {
            assert!(idle_time(text).is_err_and(|text| text.contains("100ms to 24h")), "{text}");
        }
    }

    #[test]
    fn a_dry_run_without_an_answer_has_closed_nothing() {
        let folder = tempfile::tempdir().expect("a directory");
        let paths = paths(&folder);
        let answers = |is_stopped: bool, line: &str| {
            block_on(async {
                let _ = std::fs::remove_file(api::socket(&paths.run));
                let listener = tokio::net::UnixListener::bind(api::socket(&paths.run)).expect("a socket");
                let options = options(line);
                let daemon = async {
                    let (stream, _) = listener.accept().await.expect("the command connects");
                    let _open = is_stopped.then_some(stream);
                    std::future::pending::<()>().await;
                };
                tokio::select! {
                    answer = request(&paths, &options) => answer.expect_err("there is no answer").to_string(),
                    () = daemon => unreachable!("the daemon does not end"),
                }
            })
        };
        let (socket, dry) = (api::socket(&paths.run), "socklb close users 0 --dry-run");
        assert_eq!(
            [answers(true, dry), answers(false, dry)],
            [
                format!("the daemon at {} does not answer: {NOTHING_CLOSED}", socket.display()),
                format!("the daemon ended before it answered: {NOTHING_CLOSED}")
            ]
        );
        assert!(answers(false, "socklb close users 0").contains("some connections may have been closed"));
    }
}
