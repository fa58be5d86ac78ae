//! Weights that follow load, for all client tasks. Once a second each client task evaluates the
//! reports of its backends. Then it rebuilds the tables that differ most from the wanted weights,
//! up to the maximum number per tick.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use lb_core::control::publication::{Proposal, within_budget};
use lb_core::control::{ReceivedReport, Switch};
use lb_core::service::Protocol;
use lb_http::peer::PeerCredentials;
use lb_report::client::senders::Senders;
use lb_view::load::{self, Switched, SwitchedClient};
use tracing::{debug, info};

use super::Controller;
use super::client_task::{ClientTask, error_decay};
use super::probing::{Probing, name_of};
use crate::config::{ClientService, ProbeConfig};

impl Controller {
    /// Adapts the sizes of the subsets whose size follows load to the open flows of their client
    /// tasks.
    pub fn follow_flows(&mut self, now: Instant) {
        for client_task in &mut self.clients.tasks {
            if let Err(refused) = client_task.follow_flows(now) {
                debug!(client = %client_task.client.name, error = %refused, "a subset cannot change its size with its load");
            }
        }
        self.settle_if_needed(now);
    }

    /// Adapts weights to the reports, and rebuilds tables, up to the maximum number per tick.
    pub fn follow_load(&mut self, now: Instant) {
        let mut proposals: Vec<((usize, usize), Proposal)> = Vec::new();
        let Self { clients, probing, ticks, .. } = self;
        for (number, client_task) in clients.tasks.iter_mut().enumerate() {
            let member_reports = MemberReports::of(client_task, probing);
            let report_of = |position, member| member_reports.report_of(position, member);
            // The number is added so that clients count their failed flows in different ticks.
            let tick = ticks.wrapping_add(u32::try_from(number).unwrap_or_default());
            client_task.weigh_errors(now);
            client_task.count_reported_errors(report_of, now);
            let proposed = client_task.tick_controls(tick, report_of, now);
            proposals.extend(proposed.into_iter().map(|(position, proposal)| ((number, position), proposal)));
        }
        for ((number, position), proposal) in within_budget(proposals) {
            self.clients.tasks[number].publish_factors(position, proposal.factors, now);
        }
        self.settle_if_needed(now);
        // The regions of replaced tables are free only when no program reads them any more.
        self.wait_for_readers();
        self.store_loads(now);
    }

    /// Sets the switch of a service's law, as an operator has requested, for one client task or for
    /// all client tasks that have the service.
    pub fn switch_load(
        &mut self,
        service: &str,
        switch: Switch,
        client: Option<&str>,
        who: &PeerCredentials,
        now: Instant,
    ) -> Switched {
        let (user, process) = (who.user, who.process);
        let (mut clients, mut not_kept) = (Vec::new(), None);
        let tasks = self.clients.tasks.iter_mut();
        for client_task in tasks.filter(|task| client.is_none_or(|client| client == task.client.name)) {
            let Some(before) = client_task.switch_control(service, switch) else { continue };
            let client = client_task.client.name.clone();
            info!(%client, %service, switch = switch.name(), before = before.name(), user, process, "an operator changed whether weights follow load");
            clients.push(SwitchedClient { client, before: before.name().to_owned() });
        }
        if clients.is_empty() {
            info!(
                ?service,
                user,
                process,
                "a change of load control was requested, but no client has this service with weights that \
                 follow load"
            );
        } else {
            // The next tick applies the switch. It is stored as soon as possible, so that it
            // remains in effect even if this process ends.
            not_kept = self.loads_store_error();
            self.load_store.hurry();
            self.sources.files_to_store.hurry();
            self.store_loads(now);
        }
        let (schema, switch) = (load::SCHEMA, switch.name().to_owned());
        Switched { schema, service: service.to_owned(), switch, clients, not_kept }
    }
}

/// The reports of a client task's backends: by service, in the order of the table's members.
struct MemberReports(Vec<Vec<Option<ReceivedReport>>>);

impl MemberReports {
    /// Collects reports for services whose weights follow load, or whose policy counts reported
    /// errors as load. The reports are locked for only one service at a time, so that the thread
    /// that receives reports does not wait long.
    fn of(client_task: &ClientTask, probing: &Probing) -> Self {
        let services = client_task.client.services.iter().enumerate();
        let of_service = |(position, configured): (usize, &ClientService)| {
            let mut reports = Vec::new();
            let service = &configured.service;
            if (service.control.law.is_some() || error_decay(service).is_some())
                && let Some(probe) = configured.probe.as_ref().filter(|probe| probe.is_by_report())
                && let Some(listener) = probing.listener()
            {
                let members = client_task.balancer().weights(position);
                listener.look(|senders, _, _| {
                    reports = members
                        .iter()
                        .map(|(address, _)| one(*address, service.protocol, probe, senders))
                        .collect();
                });
            }
            reports
        };
        Self(services.map(of_service).collect())
    }

    fn report_of(&self, position: usize, member: usize) -> Option<ReceivedReport> {
        *self.0.get(position)?.get(member)?
    }
}

/// The newest report of a backend; `None` if no report has arrived.
fn one(
    address: SocketAddr,
    protocol: Protocol,
    probe: &ProbeConfig,
    senders: &Senders<Duration>,
) -> Option<ReceivedReport> {
    let (_, reported) = senders.get(name_of(protocol, address))?;
    let report = reported.report()?;
    // The report was sent half a round trip before it arrived.
    let transit = reported.round_trip().unwrap_or_default() / 2;
    let at = report.received.saturating_sub(transit);
    Some(ReceivedReport { load: report.load, at, interval: probe.interval })
}
