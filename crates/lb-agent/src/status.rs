//! How an agent and its backends are, as JSON and as a table for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use lb_view::status::InterfaceStatus;
use lb_view::text::{ALWAYS, Column, Style, TableRow, table};
use serde::{Deserialize, Serialize};

/// The version of [`AgentStatus`] as JSON. It rises when a key goes or means something else.
pub const SCHEMA: u32 = 1;

/// How an agent is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentStatus {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The agent's version.
    pub version: String,
    /// Which start of the agent this is.
    pub incarnation: u32,
    /// Where it listens.
    pub listen: Vec<String>,
    /// What an operator should look at.
    pub faults: Vec<String>,
    /// The file that it is configured by, if there is one.
    pub configuration: Option<Configuration>,
    /// The network interfaces on which the kernel is to answer in its place.
    pub interfaces: Vec<InterfaceStatus>,
    /// Its backends.
    pub backends: Vec<ServedBackendStatus>,
    /// What has come and gone.
    pub datagrams: DatagramCounts,
}

/// The configuration in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Configuration {
    /// The file.
    pub path: String,
    /// Why the file as it is now cannot be used, if it cannot: what was in force before stays.
    pub error: Option<String>,
    /// Keys of which the file says something else, which takes a restart.
    pub takes_a_restart: Vec<String>,
}

/// A backend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServedBackendStatus {
    /// Its name.
    pub backend: String,
    /// `ready`, `lame-duck`, `down` or `unknown`.
    pub readiness: String,
    /// Why, in words.
    pub why: String,
    /// For how long.
    pub since_seconds: f64,
    /// Whether the operator calls it a lame duck.
    pub operator_lame_duck: bool,
    /// How its health is checked.
    pub check: Option<HealthCheckStatus>,
    /// Who runs it and speaks for it.
    pub runner: Option<Runner>,
    /// How loaded it is.
    pub load: Option<ReportedLoadStatus>,
    /// Clients that are told of changes.
    pub subscribers: usize,
    /// Of these, those that have asked lately and not acknowledged the last change.
    pub unheard: usize,
    /// The numbers of its keys, that in use first.
    pub keys: Vec<u16>,
}

/// A health check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HealthCheckStatus {
    /// What is done.
    pub check: String,
    /// What came of it last: nothing if it has passed, else why not.
    pub failure: Option<String>,
    /// When that was.
    pub ago_seconds: Option<f64>,
}

/// A program that runs a backend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Runner {
    /// The process; nothing if it has registered with an earlier start of the agent alone.
    pub process: Option<u32>,
    /// Its user.
    pub user: Option<u32>,
    /// Whether it has shown itself in time.
    pub alive: bool,
    /// How often others wanted the backend.
    pub others_refused: u64,
}

/// How loaded a backend is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReportedLoadStatus {
    /// Requests a second.
    pub qps: Option<f64>,
    /// Errors a second.
    pub eps: Option<f64>,
    /// Of what it can do.
    pub utilization: Option<f64>,
    /// How long ago that was.
    pub age_seconds: f64,
    /// Whether the application says so.
    pub by_application: bool,
}

/// Datagrams since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatagramCounts {
    /// Requests that were answered.
    pub answered: u64,
    /// Of these, those that the kernel answered.
    pub answered_by_kernel: u64,
    /// Those that were not, by why.
    pub refused: BTreeMap<String, u64>,
    /// Pushes, each repetition once.
    pub pushed: u64,
    /// Answers and pushes that the kernel did not take.
    pub unsent: u64,
    /// Clients that made room for others.
    pub replaced: u64,
}

impl AgentStatus {
    /// Whether nothing is wrong, and all backends are ready.
    pub fn is_good(&self) -> bool {
        self.faults.is_empty() && self.backends.iter().all(|backend| backend.readiness == "ready")
    }

    /// For people.
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

/// A time for people, in one unit.
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
            backends: vec![backend("ready", ""), backend("down", "nobody listens there")],
            datagrams: DatagramCounts::default(),
        }
    }

    #[test]
    fn people_see_a_table_with_what_is_wrong() {
        let expected = "\
agent 1 at [::]:9465, incarnation 7
answered on eth0 native
! the file is wrong

  backend      readiness  for  utilization    qps  eps  clients  unheard  check
  10.0.0.1:80  ready       2m         60 %  100.0    -       12        1  tcp 10.0.0.1:80
! 10.0.0.1:80  down        2m         60 %  100.0    -       12        1  tcp 10.0.0.1:80
nobody listens there
";
        let text = status().text(Style::default());
        let lines = |text: &str| text.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>();
        assert_eq!(lines(&text), lines(expected), "{text}");
        let narrow = status().text(Style { colour: false, width: Some(40) });
        assert!(narrow.lines().skip(3).all(|line| line.chars().count() <= 40), "{narrow}");
        assert!(!status().is_good());
    }

    #[test]
    fn json_says_its_version_and_is_read_back() {
        let json = serde_json::to_value(status()).unwrap();
        assert_eq!(json["schema"], 1);
        assert_eq!(serde_json::from_value::<AgentStatus>(json).unwrap(), status());
    }
}
