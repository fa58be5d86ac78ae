//! The status of an agent and its backends, as JSON and as a table for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use lb_view::status::InterfaceStatus;
use lb_view::text::{ALWAYS, Column, Style, TableRow, table};
use serde::{Deserialize, Serialize};

/// The version of [`AgentStatus`] as JSON. The version rises when a key is removed or changes its
/// meaning.
pub const SCHEMA: u32 = 1;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentStatus {
    pub schema: u32,
    /// The agent's version.
    pub version: String,
    /// The number of this start of the agent.
    pub incarnation: u32,
    /// The addresses at which the agent listens.
    pub listen: Vec<String>,
    /// Faults that an operator should look at.
    pub faults: Vec<String>,
    /// The configuration file, if there is one.
    pub configuration: Option<Configuration>,
    /// The network interfaces on which the kernel should answer in the agent's place.
    pub interfaces: Vec<InterfaceStatus>,
    pub backends: Vec<ServedBackendStatus>,
    pub datagrams: DatagramCounts,
}

/// The configuration in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Configuration {
    pub path: String,
    /// The reason why the current file cannot be used; `None` if it can be used. While there is a
    /// reason, the earlier configuration stays in force.
    pub error: Option<String>,
    /// Keys that have changed in the file and need a restart.
    pub takes_a_restart: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServedBackendStatus {
    /// The name of the backend.
    pub backend: String,
    /// `ready`, `lame-duck`, `down` or `unknown`.
    pub readiness: String,
    /// The reason of the readiness, in words.
    pub why: String,
    /// Seconds since the readiness changed.
    pub since_seconds: f64,
    /// Whether the operator has made the backend a lame duck.
    pub operator_lame_duck: bool,
    pub check: Option<HealthCheckStatus>,
    /// The program that runs the backend and reports its readiness.
    pub runner: Option<Runner>,
    pub load: Option<ReportedLoadStatus>,
    /// Clients that are notified of changes.
    pub subscribers: usize,
    /// The subscribers that have sent a request recently but have not acknowledged the last change.
    pub unheard: usize,
    /// The IDs of the backend's keys, with the key in use first.
    pub keys: Vec<u16>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HealthCheckStatus {
    /// The method of the check.
    pub check: String,
    /// The reason why the last check failed; `None` if it passed, or if no check has ended yet.
    pub failure: Option<String>,
    /// Seconds since the last check ended.
    pub ago_seconds: Option<f64>,
}

/// A program that runs a backend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Runner {
    /// Process ID; `None` if the program has not registered since the agent restarted.
    pub process: Option<u32>,
    /// The user of the process.
    pub user: Option<u32>,
    /// Whether the program has renewed its registration in time.
    pub alive: bool,
    /// How often other programs have claimed the backend.
    pub others_refused: u64,
}

/// The load of a backend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReportedLoadStatus {
    /// Requests per second.
    pub qps: Option<f64>,
    /// Errors per second.
    pub eps: Option<f64>,
    /// Used part of the capacity.
    pub utilization: Option<f64>,
    /// Seconds since the load was measured.
    pub age_seconds: f64,
    /// Whether the application has reported the load.
    pub by_application: bool,
}

/// Numbers of datagrams since the start of the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatagramCounts {
    /// Requests that were answered.
    pub answered: u64,
    /// How many of the `answered` requests the kernel answered.
    pub answered_by_kernel: u64,
    /// Number of datagrams that were not answered, for each reason.
    pub refused: BTreeMap<String, u64>,
    /// Pushes that were sent; each repetition is counted.
    pub pushed: u64,
    /// Answers and pushes that the kernel refused to send.
    pub unsent: u64,
    /// Subscribers that were dropped to make room for other clients.
    pub replaced: u64,
}

impl AgentStatus {
    /// Whether there are no faults and all backends are ready.
    pub fn is_good(&self) -> bool {
        self.faults.is_empty() && self.backends.iter().all(|backend| backend.readiness == "ready")
    }

    /// The status as text for people.
    pub fn text(&self, style: Style) -> String {
        let mut text = format!(
            "agent {} at {}, incarnation {}\n",
            self.version,
            self.listen.join(", "),
            self.incarnation
        );
        if let Some(configuration) = &self.configuration {
            let _ = writeln!(text, "configuration {}", configuration.path);
        }
        if !self.interfaces.is_empty() {
            let each = self.interfaces.iter().map(|one| format!("{} {}", one.name, one.mode));
            let _ = writeln!(text, "answered on {}", each.collect::<Vec<_>>().join(", "));
        }
        for fault in &self.faults {
            let _ = writeln!(text, "! {fault}");
        }
        text.push('\n');
        if self.backends.is_empty() {
            text.push_str("no backend\n");
            return text;
        }
        let columns = [
            Column::left("backend", ALWAYS),
            Column::left("readiness", ALWAYS),
            Column::right("for", 6),
            Column::right("utilization", 5),
            Column::right("qps", 3),
            Column::right("eps", 2),
            Column::right("clients", 4),
            Column::right("unheard", 1),
            Column::left("check", 0),
        ];
        let number =
            |number: Option<f64>| number.map_or_else(|| "-".to_owned(), |number| format!("{number:.1}"));
        let row = |at: usize| {
            let backend = &self.backends[at];
            let load = backend.load.as_ref();
            let percent =
                load.and_then(|load| load.utilization).map(|share| format!("{:.0} %", share * 100.0));
            let cells = vec![
                backend.backend.clone(),
                backend.readiness.clone(),
                seconds(backend.since_seconds),
                percent.unwrap_or_else(|| "-".to_owned()),
                number(load.and_then(|load| load.qps)),
                number(load.and_then(|load| load.eps)),
                backend.subscribers.to_string(),
                backend.unheard.to_string(),
                backend.check.as_ref().map_or_else(|| "-".to_owned(), |check| check.check.clone()),
            ];
            let is_bad = backend.readiness != "ready";
            TableRow { cells, is_bad, note: is_bad.then(|| backend.why.clone()) }
        };
        text + &table(&columns, self.backends.len(), row, style).text
    }
}

/// Formats a time for people, in one unit.
fn seconds(seconds: f64) -> String {
    let units = [(86_400.0, "d"), (3600.0, "h"), (60.0, "m")];
    let unit = units.into_iter().find(|(unit, _)| seconds >= 2.0 * unit);
    unit.map_or_else(
        || format!("{seconds:.0}s"),
        |(unit, name)| format!("{:.0}{name}", (seconds / unit).floor()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> AgentStatus {
        let backend = |readiness: &str, why: &str| ServedBackendStatus {
            backend: "10.0.0.1:80".to_owned(),
            readiness: readiness.to_owned(),
            why: why.to_owned(),
            since_seconds: 130.0,
            operator_lame_duck: false,
            check: Some(HealthCheckStatus {
                check: "tcp 10.0.0.1:80".to_owned(),
                failure: None,
                ago_seconds: Some(1.0),
            }),
            runner: None,
            load: Some(ReportedLoadStatus {
                qps: Some(100.0),
                eps: None,
                utilization: Some(0.6),
                age_seconds: 1.0,
                by_application: true,
            }),
            subscribers: 12,
            unheard: 1,
            keys: vec![1],
        };
        AgentStatus {
            schema: SCHEMA,
            version: "1".to_owned(),
            incarnation: 7,
            listen: vec!["[::]:9465".to_owned()],
            faults: vec!["the file is wrong".to_owned()],
            configuration: None,
            interfaces: vec![InterfaceStatus {
                name: "eth0".to_owned(),
                mode: "native".to_owned(),
                why: None,
            }],
            backends: vec![backend("ready", ""), backend("down", "no process listens there")],
            datagrams: DatagramCounts::default(),
        }
    }

    #[test]
    fn the_text_is_a_table_with_faults() {
        let expected = "\
agent 1 at [::]:9465, incarnation 7
answered on eth0 native
! the file is wrong

  backend      readiness  for  utilization    qps  eps  clients  unheard  check
  10.0.0.1:80  ready       2m         60 %  100.0    -       12        1  tcp 10.0.0.1:80
! 10.0.0.1:80  down        2m         60 %  100.0    -       12        1  tcp 10.0.0.1:80
no process listens there
";
        let text = status().text(Style::default());
        let lines = |text: &str| text.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>();
        assert_eq!(lines(&text), lines(expected), "{text}");
        let narrow = status().text(Style { colour: false, width: Some(40) });
        assert!(narrow.lines().skip(3).all(|line| line.chars().count() <= 40), "{narrow}");
        assert!(!status().is_good());
    }

    #[test]
    fn json_has_its_schema_and_parses_back() {
        let json = serde_json::to_value(status()).unwrap();
        assert_eq!(json["schema"], 1);
        assert_eq!(serde_json::from_value::<AgentStatus>(json).unwrap(), status());
    }
}
