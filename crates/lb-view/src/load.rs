//! Weights that follow load, as socklb shows them. Each member has its reported load, the resulting
//! factor and, if the factor is held, the reason.

use std::net::SocketAddr;

use lb_core::control::{Reporting, Switch};
use serde::{Deserialize, Serialize};

pub const SCHEMA: u32 = 1;

/// Load control and slow start of one service at one client task. Both change weights while the
/// list is unchanged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServiceLoadStatus {
    /// `feedback` or `a58`; `None` if weights do not follow load.
    pub control: Option<String>,
    /// `enforce` or `observe`.
    pub mode: String,
    /// The operator's switch: `on`, `freeze` or `off`.
    pub switch: String,
    /// Seconds in which a new member reaches its full share; `None` if a new member has its full
    /// share at once.
    pub slow_start_s: Option<f64>,
    /// The mean lifetime of a flow in seconds, estimated from the open flows and the rate of new
    /// flows.
    pub flows_live_s: f64,
    /// The approximate number of seconds in which load control corrects a difference in load;
    /// `None` without load control.
    pub settling_s: Option<f64>,
    /// The number of tables that were published because factors had changed. Counting began when
    /// the daemon started or when load control or slow start was configured for the service,
    /// whichever was later.
    pub tables: u64,
    /// Whether the task uses this service so little that the service is idle. The daemon then
    /// rarely requests reports from the backends, and missing reports are no fault.
    pub is_idle: bool,
    /// How many of the `expected` members have a recent report of their utilization.
    pub reporting: u32,
    /// The number of available members with a positive weight; 0 if the service is idle.
    pub expected: u32,
    /// The backends of the table, in the order of their addresses; empty before the first step of
    /// load control.
    pub members: Vec<MemberLoadStatus>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberLoadStatus {
    pub address: SocketAddr,
    /// The reported utilization; 1 is full capacity.
    pub utilization: Option<f64>,
    /// Seconds since the utilization was measured.
    pub age_s: Option<f64>,
    /// The factor that load control has computed. The structural weight is multiplied by `factor`,
    /// not by this factor.
    pub wanted: f64,
    /// The factor in force. It differs from `wanted` during slow start, and if load control only
    /// observes or is switched off.
    pub factor: f64,
    /// Whether the factor has reached a limit of load control.
    pub is_at_clamp: bool,
    /// The resulting share of this task's connects.
    pub share: f64,
    /// Why the factor does not change or may not rise: `operator`, `panic`, `unavailable`,
    /// `slow-start`, `active-limit`, `idle`, `no-report`, `errors`, `long-flows` or `few-reports`.
    pub held_by: Option<String>,
}

impl ServiceLoadStatus {
    /// Whether load control cannot work because too few members report.
    pub fn is_blind(&self) -> bool {
        let reporting = Reporting { fresh: self.reporting, members: self.expected };
        self.control.is_some() && self.switch == Switch::On.name() && reporting.is_blind()
    }
}

/// The services with load control or slow start, for all client tasks of a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadDocument {
    pub schema: u32,
    /// In the order of client task and service.
    pub services: Vec<ClientLoad>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientLoad {
    pub client: String,
    pub service: String,
    #[serde(flatten)]
    pub load: ServiceLoadStatus,
}

/// The result of a command that switches a service's load control.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switched {
    pub schema: u32,
    pub service: String,
    /// The new setting: `on`, `freeze` or `off`.
    pub switch: String,
    /// The client tasks that have the service.
    pub clients: Vec<SwitchedClient>,
    /// Why the new setting could not be stored. A restarted daemon may then use the previous
    /// setting. `None` if the new setting was stored.
    pub not_kept: Option<String>,
}

/// The result for one client task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchedClient {
    pub client: String,
    /// The previous setting.
    pub before: String,
}

impl Switched {
    /// The result for people: one line for each client task.
    pub fn describe(&self) -> String {
        let Self { service, switch, clients, not_kept, .. } = self;
        let what = match switch.as_str() {
            "freeze" => "weights are frozen and ignore reports",
            "off" => "weights are structural and ignore reports",
            _ => "weights follow load",
        };
        let line = |SwitchedClient { client, before }: &SwitchedClient| {
            let news = if before == switch { "as before" } else { "from now on" };
            format!("client {client}, service {service}: {what}, {news}\n")
        };
        let lines = clients.iter().map(line);
        let not_kept = not_kept.as_ref().map(|why| {
            format!("cannot store the setting yet; a daemon restart would lose it; retrying: {why}\n")
        });
        lines.chain(not_kept).collect()
    }
}

#[cfg(test)]
/// Example loads for tests.
pub mod tests {
    use super::*;

    /// A member with this utilization and factor.
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

    /// A service with weights that follow feedback.
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
    fn weights_are_blind_if_fewer_than_half_of_the_members_report() {
        let of = |reporting, expected| ServiceLoadStatus { reporting, expected, ..service(Vec::new()) };
        assert!(of(1, 3).is_blind() && !of(1, 2).is_blind() && !of(0, 0).is_blind());
        assert!(
            !ServiceLoadStatus { control: None, ..of(0, 3) }.is_blind(),
            "load control is not configured"
        );
        assert!(
            !ServiceLoadStatus { switch: "freeze".to_owned(), ..of(0, 3) }.is_blind(),
            "an operator has frozen the weights"
        );
    }

    #[test]
    fn a_switch_reports_each_client_and_a_failed_store() {
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
        let lines = "client web, service users: weights are frozen and ignore reports, from now on\n\
                     client batch, service users: weights are frozen and ignore reports, as before\n";
        assert_eq!(switched.describe(), lines);
        let not_kept = Some("No space left on device (os error 28)".to_owned());
        assert_eq!(
            Switched { not_kept, ..switched }.describe(),
            format!(
                "{lines}cannot store the setting yet; a daemon restart would lose it; retrying: No space left on device (os error 28)\n"
            )
        );
    }
}
