//! Health checks of an application: the methods, and one attempt of a check within its timeout.
//!
//! The outcome `Impossible` means that the check could not run. The state of the application is
//! then unknown. If the application fails the check, the outcome contains the reason.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use lb_document::diagnostic::chain;
use lb_http::probe::probe;
use lb_report::agent::name::Name;
use lb_report::agent::streak::Outcome;
use tokio::net::TcpStream;

mod command;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckMethod {
    /// Connects, and closes the connection at once.
    Tcp(SocketAddr),
    /// Requests a page. A status from 200 to 299 passes.
    Http {
        at: SocketAddr,
        /// Path of the page, with its query.
        path: String,
    },
    /// Runs a command. Exit code 0 passes.
    Command(Vec<String>),
}

impl CheckMethod {
    /// Parses a check from the command line: `tcp`, `tcp:ADDRESS`, a path on the backend itself
    /// such as `/healthz`, `http://ADDRESS/healthz`, or `exec:COMMAND` with arguments separated by
    /// blanks.
    ///
    /// # Errors
    /// If the text has none of these forms. The error lists the valid forms.
    pub fn parse(text: &str, backend: Name) -> Result<Self, String> {
        const HELP: &str = "write tcp, tcp:ADDRESS, /PATH, http://ADDRESS/PATH or exec:COMMAND";
        let address = |text: &str| {
            lb_document::parse_address(text).map_err(|no| format!("{text:?} {} ({})", no.why, no.help))
        };
        if text == "tcp" {
            return Ok(Self::Tcp(backend.address()));
        }
        if let Some(at) = text.strip_prefix("tcp:") {
            return Ok(Self::Tcp(address(at)?));
        }
        if let Some(command) = text.strip_prefix("exec:") {
            let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
            return if words.is_empty() {
                Err(format!("no command: {HELP}"))
            } else {
                Ok(Self::Command(words))
            };
        }
        let (at, path) = match text.strip_prefix("http://") {
            Some(rest) => {
                let at = rest.find('/').unwrap_or(rest.len());
                let (at, path) = rest.split_at(at);
                (address(at)?, if path.is_empty() { "/" } else { path })
            }
            None if text.starts_with('/') => (backend.address(), text),
            None => return Err(format!("{text:?} is not a check: {HELP}")),
        };
        if path.parse::<hyper::Uri>().is_err() {
            return Err(format!("{path:?} is not the path of a page: {HELP}"));
        }
        Ok(Self::Http { at, path: path.to_owned() })
    }

    /// Runs the check once. Takes at most `timeout`, plus the time to kill a command.
    pub async fn run(&self, timeout: Duration) -> Outcome {
        match self {
            Self::Tcp(at) => within(timeout, "accept a connection", tcp(*at)).await,
            Self::Http { at, path } => within(timeout, "answer", http(*at, path)).await,
            Self::Command(words) => command::run(words, timeout).await,
        }
    }
}

impl fmt::Display for CheckMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(at) => write!(f, "tcp {at}"),
            Self::Http { at, path } => write!(f, "http://{at}{path}"),
            Self::Command(words) => write!(f, "command {}", words.join(" ")),
        }
    }
}

async fn within(timeout: Duration, what: &str, run: impl Future<Output = Outcome>) -> Outcome {
    let late = || {
        Outcome::Failed(format!("the application did not {what} within {}", lb_document::in_units(timeout)))
    };
    tokio::time::timeout(timeout, run).await.unwrap_or_else(|_| late())
}

async fn tcp(at: SocketAddr) -> Outcome {
    match connect(at).await {
        Ok(_) => Outcome::Passed,
        Err(error) => unconnected(at, &error),
    }
}

/// Connects to `at`. Refuses a connection of the socket to itself, which TCP may create if `at` is
/// an ephemeral port of this host and nothing listens there.
///
/// # Errors
/// If no process accepts the connection.
pub async fn connect(at: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(at).await?;
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}

async fn http(at: SocketAddr, path: &str) -> Outcome {
    let stream = match connect(at).await {
        Ok(stream) => stream,
        Err(error) => return unconnected(at, &error),
    };
    match probe(stream, at, path, "socklb-agent").await {
        Ok(()) => Outcome::Passed,
        Err(error) => Outcome::Failed(format!("http://{at}{path}: {}", chain(&error))),
    }
}

/// Decides from a connect error whether the application has failed the check, or whether this host
/// could not run the check.
fn unconnected(at: SocketAddr, error: &io::Error) -> Outcome {
    use io::ErrorKind::{ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable, TimedOut};
    match error.kind() {
        ConnectionRefused => Outcome::Failed(format!("no process listens at {at}: connection refused")),
        ConnectionReset | HostUnreachable | NetworkUnreachable | TimedOut => {
            Outcome::Failed(format!("connect to {at}: {error}"))
        }
        _ => Outcome::Impossible(format!("connect to {at}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_of_the_command_line_parse() {
        let backend = crate::name::parse("10.0.0.1:80").unwrap();
        let at = |text: &str| text.parse().unwrap();
        let http = |text, path: &str| Ok(CheckMethod::Http { at: at(text), path: path.to_owned() });
        for (text, expected) in [
            ("tcp", Ok(CheckMethod::Tcp(at("10.0.0.1:80")))),
            ("tcp:127.0.0.1:8", Ok(CheckMethod::Tcp(at("127.0.0.1:8")))),
            ("/ok?a", http("10.0.0.1:80", "/ok?a")),
            ("http://[::1]:8/ok", http("[::1]:8", "/ok")),
            ("http://[::1]:8", http("[::1]:8", "/")),
            ("exec:a  b", Ok(CheckMethod::Command(vec!["a".to_owned(), "b".to_owned()]))),
        ] {
            assert_eq!(CheckMethod::parse(text, backend), expected, "{text}");
        }
        for text in ["", "http", "https://10.0.0.1:80/", "exec: ", "tcp:x", "http://localhost:80/", "/a b"] {
            assert!(CheckMethod::parse(text, backend).is_err(), "{text}");
        }
    }
}
