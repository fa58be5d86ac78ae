//! The options of `socklb agent run`, and the parsers of their values.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::time::Duration;

use lb_document::{in_units, parse_duration};

use super::signal::Signal;

/// The range of the grace, 10 to 150 seconds, is from "Site Reliability Engineering", chapter 20.
const GRACE: RangeInclusive<Duration> = Duration::from_secs(10)..=Duration::from_secs(150);
/// The idle time is at most the longest grace, because a longer idle time would make no difference.
const IDLE: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(150);
/// The maximum, an hour, is longer than a service manager waits.
const KILL_AFTER: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(3600);

/// Options of a run
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Run CMD with /bin/sh when the application can serve, and announce it as ready after exit
    /// code 0
    ///
    /// If CMD fails, it runs again after 5 s.
    #[arg(long, value_name = "CMD")]
    pub prewarm: Option<String>,
    /// How the application shows that it can serve: tcp:PORT (accepts a connection), http:PORT/PATH
    /// (answers with 2xx) or cmd:CMD (CMD ends with exit code 0) [default: tcp at the backend's
    /// port]
    #[arg(long, value_name = "CHECK", value_parser = check)]
    pub ready: Option<ReadinessMethod>,
    /// How long connections may take to end after SIGTERM (10s to 150s)
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = grace)]
    pub grace: Duration,
    /// Do not wait for connections that have had no traffic for this time; the time should be
    /// longer than the application takes to process a request
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = idle)]
    pub idle: Duration,
    /// Notify the application that it is a lame duck: with a signal, such as USR1, or with a
    /// command that /bin/sh runs with SOCKLB_PID, the application's process ID
    #[arg(long, value_name = "CMD|SIGNAL", value_parser = lame_duck_hook)]
    pub on_lame_duck: Option<LameDuckHook>,
    /// How long the application may take to end after it has received SIGTERM, before it is killed
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = kill_after)]
    pub kill_after: Duration,
    /// Port at which the application listens on this host, if clients use another port
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: Option<u16>,
    /// Command and its arguments
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}

/// How an application shows that it can serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadinessMethod {
    /// The application accepts a TCP connection at this port.
    Tcp(u16),
    /// The application answers a GET of the path, which begins with a slash, with a status from 200
    /// to 299. Redirects are not followed.
    Http(u16, String),
    /// This shell command ends with exit code 0.
    Command(String),
}

/// How an application is notified that it is a lame duck.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LameDuckHook {
    /// `socklb agent run` sends this signal to the command.
    Signal(Signal),
    /// `socklb agent run` executes this shell command.
    Command(String),
}

fn check(text: &str) -> Result<ReadinessMethod, String> {
    let port = |text: &str| match text.parse() {
        Ok(0) | Err(_) => Err(format!("`{text}` is not a port")),
        Ok(port) => Ok(port),
    };
    match text.split_once(':') {
        Some(("tcp", rest)) => Ok(ReadinessMethod::Tcp(port(rest)?)),
        Some(("http", rest)) => {
            let (number, path) = rest.split_once('/').unwrap_or((rest, ""));
            // The path becomes part of the request line.
            if path.bytes().any(|byte| !byte.is_ascii_graphic()) {
                return Err("a path may contain only printable ASCII characters without blanks".to_owned());
            }
            Ok(ReadinessMethod::Http(port(number)?, format!("/{path}")))
        }
        Some(("cmd", command)) if !command.trim().is_empty() => {
            Ok(ReadinessMethod::Command(command.to_owned()))
        }
        _ => Err("write tcp:PORT, http:PORT/PATH or cmd:CMD".to_owned()),
    }
}

fn lame_duck_hook(text: &str) -> Result<LameDuckHook, String> {
    match Signal::from_name(text) {
        Some(signal) if [Signal::KILL, Signal::STOP, Signal::TERM, Signal::INT].contains(&signal) => {
            Err(format!("{signal} would end or stop the application before its connections have ended"))
        }
        Some(signal) => Ok(LameDuckHook::Signal(signal)),
        None if text.trim().is_empty() => Err("write the name of a signal, or a command".to_owned()),
        None => Ok(LameDuckHook::Command(text.to_owned())),
    }
}

fn grace(text: &str) -> Result<Duration, String> {
    time(text, &GRACE)
}

fn idle(text: &str) -> Result<Duration, String> {
    time(text, &IDLE)
}

fn kill_after(text: &str) -> Result<Duration, String> {
    time(text, &KILL_AFTER)
}

fn time(text: &str, range: &RangeInclusive<Duration>) -> Result<Duration, String> {
    let time = parse_duration(text).ok_or_else(|| "write a number with its unit, as in 30s".to_owned())?;
    if range.contains(&time) {
        Ok(time)
    } else {
        Err(format!("write a time from {} to {}", in_units(*range.start()), in_units(*range.end())))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(options: &[&str]) -> Result<Args, String> {
        let all = [&["run"], options, &["--", "app", "--verbose"]].concat();
        Cli::try_parse_from(all).map(|cli| cli.args).map_err(|error| error.to_string())
    }

    #[test]
    fn missing_options_have_their_documented_defaults() {
        let args = parse(&[]).unwrap();
        let times = [args.grace, args.idle, args.kill_after].map(|time| time.as_secs());
        assert_eq!(times, [30, 5, 10]);
        assert_eq!((args.ready, args.prewarm, args.on_lame_duck, args.port), (None, None, None, None));
        assert_eq!(args.command, ["app", "--verbose"]);
    }

    #[test]
    fn times_outside_their_limits_are_refused() {
        for good in [["--grace", "10s"], ["--grace", "150s"], ["--idle", "100ms"], ["--kill-after", "0s"]] {
            assert!(parse(&good).is_ok(), "{good:?}");
        }
        for (bad, message) in [
            (["--grace", "9999ms"], "from 10s to 150s"),
            (["--grace", "151s"], "from 10s to 150s"),
            (["--idle", "99ms"], "from 100ms to 150s"),
            (["--kill-after", "61m"], "from 0s to 1h"),
            (["--grace", "30"], "a number with its unit"),
            (["--port", "0"], "0"),
        ] {
            let error = parse(&bad).unwrap_err();
            assert!(error.contains(message), "{bad:?}: {error}");
        }
    }

    #[test]
    fn checks_parse_by_kind() {
        for (text, expected) in [
            ("tcp:80", ReadinessMethod::Tcp(80)),
            ("http:8080/", ReadinessMethod::Http(8080, "/".to_owned())),
            ("http:8080", ReadinessMethod::Http(8080, "/".to_owned())),
            ("http:8080/ready?full=1", ReadinessMethod::Http(8080, "/ready?full=1".to_owned())),
            ("cmd:test -e /run/app: ready", ReadinessMethod::Command("test -e /run/app: ready".to_owned())),
        ] {
            assert_eq!(check(text), Ok(expected), "{text}");
        }
        for text in ["tcp:0", "tcp:65536", "tcp:", "http:/ready", "http:80/a b", "cmd: ", "udp:80", "80", ""]
        {
            assert!(check(text).is_err(), "{text}");
        }
    }

    #[test]
    fn on_lame_duck_is_a_signal_or_a_command() {
        assert_eq!(lame_duck_hook("USR1"), Ok(LameDuckHook::Signal(Signal::USR1)));
        assert_eq!(lame_duck_hook("SIGHUP"), Ok(LameDuckHook::Signal(Signal::HUP)));
        assert_eq!(
            lame_duck_hook("touch /run/lame"),
            Ok(LameDuckHook::Command("touch /run/lame".to_owned()))
        );
        for text in ["TERM", "SIGKILL", "STOP", "INT", " "] {
            assert!(lame_duck_hook(text).is_err(), "{text}");
        }
    }
}
