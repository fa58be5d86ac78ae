//! The keys of `health` for probes, by which the daemon checks the health of a service's backends.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use lb_core::service::Protocol;
use lb_document::in_units;
use lb_document::kind::Refusal;
use lb_document::{Table, fill};
use lb_report::keys::{Keys, ServiceKey};

use crate::ProcessEnvironment;
use crate::keys::health::{FALL, IDLE_INTERVAL, INTERVAL, KEY, PATH, PORT, PROBE, RISE, TIMEOUT};
use crate::settings::reports::{self, ReportsConfig};

/// The agents' default port.
pub const AGENT_PORT: u16 = 9465;

lb_core::named! {
    /// The kinds of probes, as the configuration spells them.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ProbeWord {
        /// Requests a report from the agent.
        Report = "report",
        /// Opens a connection.
        Tcp = "tcp",
        /// Requests a path by HTTP.
        Http = "http",
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeConfig {
    pub kind: ProbeKind,
    /// The port to probe; `None` means the backend's own port.
    pub port: Option<u16>,
    /// Time between two probes of a backend.
    pub interval: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeKind {
    /// Requests reports from the backends' agents.
    Report {
        /// The keys of the service.
        keys: Keys<ServiceKey>,
        /// Time between two requests to an idle backend. A backend is idle if no client task has an
        /// open flow to it or has chosen it recently.
        idle_interval: Duration,
    },
    /// Opens a connection, and may send an HTTP request on it.
    Connect {
        /// The path of the HTTP request; `None` if the probe sends none.
        path: Option<String>,
        /// Time after which a probe without an answer fails.
        timeout: Duration,
        /// Number of successes in a row after which the backend is healthy again.
        rise: u32,
        /// Number of failures in a row after which the backend is refusing.
        fall: u32,
    },
}

impl ProbeConfig {
    /// The address to probe for this backend.
    pub fn at(&self, backend: SocketAddr) -> SocketAddr {
        SocketAddr::new(backend.ip(), self.port.unwrap_or(backend.port()))
    }

    /// Returns whether the daemon requests reports from the backends' agents.
    pub fn is_by_report(&self) -> bool {
        matches!(self.kind, ProbeKind::Report { .. })
    }

    pub fn name(&self) -> &'static str {
        match &self.kind {
            ProbeKind::Report { .. } => "report",
            ProbeKind::Connect { path: None, .. } => "tcp",
            ProbeKind::Connect { path: Some(_), .. } => "http",
        }
    }
}

/// The settings outside of the `health` table that affect its keys for probes.
#[derive(Clone, Copy)]
pub struct Around<'a> {
    /// Relative paths are relative to this directory.
    pub directory: &'a Path,
    pub env: &'a dyn ProcessEnvironment,
    /// The settings of the table `[reports]`.
    pub reports: &'a ReportsConfig,
}

/// Reads the keys for probes of a `health` table. The inner `None` means that there are no such
/// keys, the outer `None` that a value is wrong.
pub fn read(keys: &Table<'_>, protocol: Option<Protocol>, around: Around<'_>) -> Option<Option<ProbeConfig>> {
    let Some(word) = PROBE.take_written(keys)? else {
        let unused = [PORT.name, PATH.name, INTERVAL.name, TIMEOUT.name, RISE.name, FALL.name];
        check_unused(keys, &unused, "it needs probe");
        check_unused(keys, &[KEY.name, IDLE_INTERVAL.name], "it needs probe");
        return Some(None);
    };
    let port = PORT.take_written(keys);
    let interval = INTERVAL.take(keys);
    let (kind, port) = match word {
        ProbeWord::Report => {
            let unused = [PATH.name, TIMEOUT.name, RISE.name, FALL.name];
            check_unused(keys, &unused, "it is only for probe = \"tcp\" or \"http\"");
            let idle_interval = read_idle(keys, interval);
            let own = KEY.item(keys);
            let service_keys = match own {
                Some(item) => reports::read_keys(&item, around.directory, around.env),
                None if around.reports.keys.is_none() => {
                    let help = "write key = \"FILE\" in [reports] or here; `socklb agent key` creates one"
                        .to_owned();
                    let span = PROBE.item(keys).map_or_else(|| keys.span(), |item| item.span());
                    keys.report().add_absent(
                        span,
                        "probe = \"report\" needs a key that authenticates reports",
                        help,
                    );
                    None
                }
                None => around.reports.keys.clone(),
            };
            let kind = ProbeKind::Report { keys: service_keys?, idle_interval: idle_interval? };
            (kind, Some(port?.unwrap_or(AGENT_PORT)))
        }
        ProbeWord::Tcp | ProbeWord::Http => {
            let mut unused = vec![KEY.name, IDLE_INTERVAL.name];
            if word == ProbeWord::Tcp {
                unused.push(PATH.name);
            }
            check_unused(keys, &unused, &format!("probe = \"{}\" does not use it", word.name()));
            let path = PATH.take_written(keys);
            let path =
                path.map(|path| (word == ProbeWord::Http).then(|| path.unwrap_or_else(|| "/".to_owned())));
            let kind =
                fill!(keys, ProbeKind::Connect { path: (path), timeout: TIMEOUT, rise: RISE, fall: FALL });
            let port = port?;
            if protocol == Some(Protocol::Udp) && port.is_none() {
                let span = PROBE.item(keys).map_or_else(|| keys.span(), |item| item.span());
                let message =
                    format!("probe = \"{}\" opens TCP connections, but the service is over udp", word.name());
                let help =
                    "write port = the port where the backends accept connections, or probe = \"report\"";
                keys.report().add(span, message, help.to_owned());
                return None;
            }
            (kind?, port)
        }
    };
    Some(Some(ProbeConfig { kind, port, interval: interval? }))
}

/// Refuses an `idle_interval` below `interval`, because an idle backend must not receive more
/// requests than a backend in use.
fn read_idle(keys: &Table<'_>, interval: Option<Duration>) -> Option<Duration> {
    let (idle, interval) = (IDLE_INTERVAL.take(keys)?, interval?);
    match IDLE_INTERVAL.item(keys) {
        Some(item) if idle < interval => {
            let (idle, interval) = (in_units(idle), in_units(interval));
            let message =
                format!("`idle_interval` is \"{idle}\", which is less than `interval`, \"{interval}\"");
            item.fault(message, format!("write at least \"{interval}\""));
            None
        }
        // If only `interval` is written, the idle interval is its default or `interval`, whichever
        // is longer.
        _ => Some(idle.max(interval)),
    }
}

fn check_unused(keys: &Table<'_>, names: &[&'static str], why: &str) {
    for name in names {
        if let Some(item) = keys.get(name) {
            item.fault(format!("{name} has no effect"), format!("leave the key out: {why}"));
        }
    }
}

/// Reads the path of an HTTP request.
pub fn request_path(text: &str) -> Result<String, Refusal> {
    let is_path = text.starts_with('/')
        && text.len() <= 1_024
        && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
    if is_path {
        return Ok(text.to_owned());
    }
    let why = format!("{} is not the path of a request", lb_document::diagnostic::quote(text));
    Err((why, Some("write it as in \"/healthz\", without spaces".to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{check, faults, key, services, with_line};

    fn probe(line: &str) -> Option<ProbeConfig> {
        services(&with_line(line)).remove(0).probe
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn backends_are_probed_only_if_configured() {
        assert_eq!([probe(""), probe("health = {}")], [None, None]);
        let connect = |path: Option<&str>| ProbeKind::Connect {
            path: path.map(str::to_owned),
            timeout: SECOND,
            rise: 2,
            fall: 3,
        };
        let of = |kind, port| Some(ProbeConfig { kind, port, interval: 2 * SECOND });
        assert_eq!(probe("health = { probe = 'tcp' }"), of(connect(None), None));
        assert_eq!(probe("health = { probe = 'http', port = 81 }"), of(connect(Some("/")), Some(81)));
        let line =
            "health = { probe = 'http', path = '/healthz?x=1', timeout = '100ms', rise = 1, fall = 9 }";
        let kind = ProbeKind::Connect {
            path: Some("/healthz?x=1".to_owned()),
            timeout: SECOND / 10,
            rise: 1,
            fall: 9,
        };
        assert_eq!(probe(line), of(kind, None));
        let report = ProbeKind::Report { keys: key(3), idle_interval: 15 * SECOND };
        assert_eq!(
            probe("health = { probe = 'report', key = 'key-3.txt' }"),
            of(report.clone(), Some(AGENT_PORT))
        );
        let line = "health = { probe = 'report' }\n[reports]\nkey = '/x/key-3'";
        assert_eq!(probe(line), of(report, Some(AGENT_PORT)));
        let own = "health = { probe = 'report', key = 'key-4' }\n[reports]\nkey = 'key-3'";
        let kind = ProbeKind::Report { keys: key(4), idle_interval: 15 * SECOND };
        assert_eq!(probe(own), of(kind, Some(AGENT_PORT)));
        let slow = probe("health = { probe = 'report', key = 'key-3', interval = '30s' }")
            .expect("the service is probed");
        let kind = ProbeKind::Report { keys: key(3), idle_interval: 30 * SECOND };
        assert_eq!(
            (slow.kind, slow.interval),
            (kind, 30 * SECOND),
            "an idle backend is not polled more often than a backend in use"
        );
        assert!(probe("protocol = 'udp'\nhealth = { probe = 'tcp', port = 8080 }").is_some());
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let cases = [
            (
                "health = { probe = 'grpc' }",
                "8:20: unknown probe \"grpc\" (write \"report\" or \"tcp\" or \"http\")",
            ),
            (
                "health = { probe = 'report' }",
                "8:20: probe = \"report\" needs a key that authenticates reports (write key = \"FILE\" in [reports] or \
                 here; `socklb agent key` creates one)",
            ),
            (
                "health = { probe = 'report', key = 'none' }",
                "8:36: /etc/socklb/none: there is no such file (`socklb agent key` creates a key; mode 0640 at most)",
            ),
            (
                "health = { probe = 'tcp', path = '/' }",
                "8:34: path has no effect (leave the key out: probe = \"tcp\" does not use it)",
            ),
            (
                "health = { interval = '1s' }",
                "8:23: interval has no effect (leave the key out: it needs probe)",
            ),
            (
                "health = { probe = 'report', key = 'key-1', fall = 3 }",
                "8:52: fall has no effect (leave the key out: it is only for probe = \"tcp\" or \"http\")",
            ),
            (
                "health = { probe = 'http', path = 'healthz' }",
                "8:35: path \"healthz\" is not the path of a request (write it as in \"/healthz\", without spaces)",
            ),
            (
                "health = { probe = 'report', key = 'key-1', interval = '5s', idle_interval = '1s' }",
                "8:78: `idle_interval` is \"1s\", which is less than `interval`, \"5s\" (write at least \
                 \"5s\")",
            ),
            (
                "protocol = 'udp'\nhealth = { probe = 'http' }",
                "9:20: probe = \"http\" opens TCP connections, but the service is over udp (write port = the port where the backends accept \
                 connections, or probe = \"report\")",
            ),
            ("health = { probe = 'tcp', port = 0 }", "8:34: port is 0 (write 1 to 65535)"),
            (
                "health = { probe = 'tcp', probe_from = 'client' }",
                "8:27: former key \"probe_from\" in health (leave the key out: for backends that only the \
                 client's network namespace reaches, run an agent there and write probe = \"report\", or \
                 rely on ejection)",
            ),
        ];
        for (line, expected) in cases {
            check(&with_line(line), &[expected]);
        }
        let all = "health = { probe = 'http', port = 0, path = '', timeout = '1h', rise = 0, fall = 0 }";
        assert_eq!(faults(&with_line(all)).len(), 5);
    }
}
