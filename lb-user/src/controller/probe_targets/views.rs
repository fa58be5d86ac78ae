//! The part of status that shows the health of backends according to reports and connect probes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use lb_report::client::reported::{ReportState, Reported};
use lb_report::name::can_report;
use lb_view::backend;

use super::super::Controller;
use super::super::client_task::ClientTask;
use super::{connect_target, name_of};
use crate::config::{ProbeConfig, ProbeKind};
use crate::probes::Findings;

impl Controller {
    /// The health of a client task's backends according to probes and reports, keyed by service
    /// name and address.
    pub fn probe_views(
        &self,
        client_task: &ClientTask,
    ) -> BTreeMap<(String, SocketAddr), backend::BackendHealth> {
        let mut views = BTreeMap::new();
        for (position, configured) in client_task.client.services.iter().enumerate() {
            let Some(probe) = &configured.probe else { continue };
            let service = &configured.service;
            let addresses: Vec<SocketAddr> =
                client_task.candidates(position).iter().map(|candidate| candidate.address).collect();
            let mut add = |address, view| drop(views.insert((service.name.clone(), address), view));
            match (&probe.kind, self.probing.listener()) {
                (ProbeKind::Report { .. }, Some(listener)) => listener.look(|senders, _, now| {
                    for address in addresses {
                        let sender = senders.get(name_of(service.protocol, address));
                        let view = sender.map(|(_, reported)| report_view(reported, now));
                        let why = (!can_report(name_of(service.protocol, address)))
                            .then(|| "a backend with a link-local address cannot report".to_owned());
                        add(
                            address,
                            view.unwrap_or_else(|| backend::BackendHealth { why, ..unprobed(probe) }),
                        );
                    }
                }),
                (ProbeKind::Report { .. }, None) => {
                    addresses.into_iter().for_each(|address| add(address, unprobed(probe)));
                }
                (ProbeKind::Connect { .. }, _) => {
                    for address in addresses {
                        let target = connect_target(probe, address);
                        let findings = target.and_then(|target| self.probing.network.findings(&target));
                        let view = findings.map(|findings| connect_view(probe, findings));
                        add(address, view.unwrap_or_else(|| unprobed(probe)));
                    }
                }
            }
        }
        views
    }
}

/// The status of a backend that has not been probed yet.
fn unprobed(probe: &ProbeConfig) -> backend::BackendHealth {
    backend::BackendHealth::unprobed(probe.name())
}

/// The status of a backend according to its reports.
fn report_view(reported: &Reported<Duration>, now: Duration) -> backend::BackendHealth {
    let state = reported.state(now);
    let report = reported.report();
    let number = |thousandths: Option<u32>| thousandths.map(|number| f64::from(number) / 1e3);
    let load = report.map(|report| report.load).unwrap_or_default();
    let why = match state {
        ReportState::NeverReported if reported.unanswered() > 0 => {
            Some(format!("its agent has answered none of {} requests", reported.unanswered()))
        }
        ReportState::NeverReported => Some("no report has arrived yet".to_owned()),
        ReportState::Silent => Some(match reported.unanswered() {
            0 => "its agent is silent".to_owned(),
            count => format!("its agent has not answered the last {count} requests"),
        }),
        ReportState::Unknown => Some("its agent does not know the backend's state".to_owned()),
        ReportState::Ready | ReportState::LameDuck | ReportState::Down => None,
    };
    let until = match state {
        ReportState::LameDuck => reported.lame_until(),
        _ => None,
    };
    backend::BackendHealth {
        kind: "report".to_owned(),
        state: state.name().to_owned(),
        why,
        age_s: report.map(|report| now.saturating_sub(report.received).as_secs_f64()),
        lasts_s: until.map(|until| until.saturating_sub(now).as_secs_f64()),
        round_trip_ms: reported.round_trip().map(|time| time.as_secs_f64() * 1e3),
        qps: number(load.qps),
        eps: number(load.eps),
        utilization: number(load.utilization),
    }
}

/// The status of a backend according to connect probes.
fn connect_view(probe: &ProbeConfig, findings: Findings) -> backend::BackendHealth {
    let state = match (&findings.failure, findings.probes) {
        (_, 0) => return unprobed(probe),
        (Some(_), _) => "failing",
        (None, _) => "well",
    };
    backend::BackendHealth {
        state: state.to_owned(),
        why: findings.failure,
        round_trip_ms: findings.took.map(|time| time.as_secs_f64() * 1e3),
        ..unprobed(probe)
    }
}
