//! Weights that follow load, as they are shown: what is known of each member, what follows from it, and what holds it back.

use std::net::SocketAddr;

use lb_core::control::{Reporting, Switch};
use serde::{Deserialize, Serialize};

/// Version of the JSON form.
pub const SCHEMA: u32 = 1;

/// What changes the weights of a service of a client task while its list stays.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServiceLoadStatus {
    /// `feedback` or `a58`; `None` where weights do not follow load.
    pub control: Option<String>,
    /// `enforce` or `observe`.
    pub mode: String,
    /// What an operator has said: `on`, `freeze` or `off`.
    pub switch: String,
    /// Over how long a member that is new comes to its share; `None`: at once.
    pub slow_start_s: Option<f64>,
    /// How long a flow lives on average, by what is open and what begins.
    pub flows_live_s: f64,
    /// About how long it takes until a difference is made good; `None` without a control.
    pub settling_s: Option<f64>,
    /// Tables that were made because of it, since the daemon started or the service has had a control or slow start.
    pub tables: u64,
    /// Whether the task hardly uses the service: its backends are asked for reports seldom then, and nobody is expected to report.
    pub is_idle: bool,
    /// How many of the members that have a weight and are available have reported a utilization that is new,
    pub reporting: u32,
    /// of how many; none where the service is idle.
    pub expected: u32,
    /// Who is in the table, by address; empty before the first look.
    pub members: Vec<MemberLoadStatus>,
}

/// One member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberLoadStatus {
    /// Where it listens.
    pub address: SocketAddr,
    /// What it has reported: 1 is all that it can do.
    pub utilization: Option<f64>,
    /// How long ago that was measured.
    pub age_s: Option<f64>,
    /// By what the control would multiply its structural weight.
    pub wanted: f64,
    /// By what it is multiplied: `wanted`, unless that is only observed or switched off; slow start included.
    pub factor: f64,
    /// Whether the control cannot move it any further.
    pub is_at_clamp: bool,
    /// Its share of this task's connects by that.
    pub share: f64,
    /// Why it keeps its factor or gets no more: `operator`, `panic`, `unavailable`, `slow-start`, `active-limit`, `idle`,
    /// `no-report`, `errors`, `long-flows` or `few-reports`.
    pub held_by: Option<String>,
}

impl ServiceLoadStatus {
    /// Whether too few report for anything to be learnt.
    pub fn is_blind(&self) -> bool {
        let reporting = Reporting { fresh: self.reporting, members: self.expected };
        self.control.is_some() && self.switch == Switch::On.name() && reporting.is_blind()
    }
}

/// The weights that change of a host's client tasks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadDocument {
    /// [`SCHEMA`].
    pub schema: u32,
    /// By client task and service.
    pub services: Vec<ClientLoad>,
}

/// Those of one service of one client task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientLoad {
    /// The client task.
    pub client: String,
    /// The service.
    pub service: String,
    /// What is known, and what follows.
    #[serde(flatten)]
    pub load: ServiceLoadStatus,
}

/// What came of a switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switched {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The service.
    pub service: String,
    /// What it is switched to: `on`, `freeze` or `off`.
    pub switch: String,
    /// The client tasks that have it.
    pub clients: Vec<SwitchedClient>,
    /// Why a later daemon may not know of it yet; `None` if nothing is wrong with where it is kept.
    pub not_kept: Option<String>,
}

/// What came of it for one client task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchedClient {
    /// The client task.
    pub client: String,
    /// What it was.
    pub before: String,
}

impl Switched {
    /// For people: a line for each client task.
    pub fn describe(&self) -> String {
        let Self { service, switch, clients, not_kept, .. } = self;
        let what = match switch.as_str() {
            "freeze" => "weights stay as they are, whatever is reported",
            "off" => "weights are structural, whatever is reported",
            _ => "weights follow load",
        };
        let line = |SwitchedClient { client, before }: &SwitchedClient| {
            let news = if before == switch { "as before" } else { "from now on" };
            format!("client {client}, service {service}: {what}, {news}\n")
        };
        let lines = clients.iter().map(line);
        let not_kept = not_kept.as_ref().map(|why| {
            format!("it is not kept for a later daemon yet, which is tried again until it is: {why}\n")
        });
        lines.chain(not_kept).collect()
    }
}

#[cfg(test)]
/// Loads that are made up.
pub mod tests {
    use super::*;

    /// A member that reports so much and has that factor.
    pub fn member(port: u16, utilization: Option<f64>, factor: f64) -> MemberLoadStatus {
        MemberLoadStatus {
            address: ([10, 0, 0, 1], port).into(),
            utilization,
            age_s: utilization.map(|_| 1.25),
            wanted: factor,
            factor,
            is_at_clamp: false,
            share: 0.5,
            held_by: None,
        }
    }

    /// A service that follows feedback.
    pub fn service(members: Vec<MemberLoadStatus>) -> ServiceLoadStatus {
        ServiceLoadStatus {
            is_idle: false,
            control: Some("feedback".to_owned()),
            mode: "enforce".to_owned(),
            switch: "on".to_owned(),
            slow_start_s: None,
            flows_live_s: 30.0,
            settling_s: Some(120.0),
            tables: 7,
            reporting: u32::try_from(members.iter().filter(|member| member.utilization.is_some()).count())
                .unwrap(),
            expected: u32::try_from(members.len()).unwrap(),
            members,
        }
    }

    #[test]
    fn with_reports_of_fewer_than_half_nothing_is_learnt() {
        let of = |reporting, expected| ServiceLoadStatus { reporting, expected, ..service(Vec::new()) };
        assert!(of(1, 3).is_blind() && !of(1, 2).is_blind() && !of(0, 0).is_blind());
        assert!(!ServiceLoadStatus { control: None, ..of(0, 3) }.is_blind(), "it follows no load");
        assert!(
            !ServiceLoadStatus { switch: "freeze".to_owned(), ..of(0, 3) }.is_blind(),
            "nothing is to follow"
        );
    }

    #[test]
    fn each_client_is_told_of() {
        let client = |client: &str, before: &str| SwitchedClient {
            client: client.to_owned(),
            before: before.to_owned(),
        };
        let switched = Switched {
            schema: SCHEMA,
            service: "users".to_owned(),
            switch: "freeze".to_owned(),
            clients: vec![client("web", "on"), client("batch", "freeze")],
            not_kept: None,
        };
        let lines = "client web, service users: weights stay as they are, whatever is reported, from now on\n\
                     client batch, service users: weights stay as they are, whatever is reported, as before\n";
        assert_eq!(switched.describe(), lines);
        let not_kept = Some("No space left on device (os error 28)".to_owned());
        assert_eq!(
            Switched { not_kept, ..switched }.describe(),
            format!(
                "{lines}it is not kept for a later daemon yet, which is tried again until it is: No space left on device (os error 28)\n"
            )
        );
    }
}
