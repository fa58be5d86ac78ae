//! Examines services with weights that follow load: whether reports contain the data that the
//! control law needs, and whether the policy also considers open flows.

use lb_core::control::Law;
use lb_core::service::Policy;
use lb_view::diagnosis::{Diagnosis, Severity};
use lb_view::status::{ServiceStatus, StatusDocument};
use lb_view::text::load_in_words;

use crate::config::Config;

/// Examines the configuration of each service once, and its status for each client that dials it.
pub fn examine(diagnosis: &mut Diagnosis, config: Option<&Config>, status: Option<&StatusDocument>) {
    let configured =
        config.into_iter().flat_map(|config| &config.clients).flat_map(|client| &client.services);
    let mut described = Vec::new();
    for service in configured.map(|configured| &configured.service) {
        let Some(law) = service.control.law.filter(|_| !described.contains(&service.name)) else { continue };
        described.push(service.name.clone());
        if law == Law::Feedback && service.policy != Policy::P2c {
            let text = format!(
                "service {}: with policy {:?} a connect considers only weights; p2c also considers open \
                 flows, so a backend that hangs gets few connects even before a report shows the problem",
                service.name,
                service.policy.name()
            );
            diagnosis.add("load", Severity::Note, text, Some("policy = \"p2c\" in its [[service]]"));
        }
        let running = status.into_iter().flat_map(|status| &status.clients);
        let running =
            running.flat_map(|client| client.services.iter().map(|known| (client.name.as_str(), known)));
        for (client, known) in running.filter(|(_, known)| known.name == service.name) {
            one(diagnosis, client, known, law);
        }
    }
}

fn one(diagnosis: &mut Diagnosis, client: &str, service: &ServiceStatus, law: Law) {
    let Some(load) = &service.load else { return };
    let name = &service.name;
    // If load control does not work, the status also has a fault. This finding is therefore only a
    // note.
    let state = if load.is_blind() { Severity::Note } else { Severity::Ok };
    diagnosis.add("load", state, format!("client {client}, service {name}: {}", load_in_words(load)), None);
    let probes = service.backends.iter().filter_map(|backend| backend.probe.as_ref());
    let reporting: Vec<_> = probes.filter(|probe| probe.utilization.is_some()).collect();
    let without_rates = reporting.iter().filter(|probe| probe.qps.is_none()).count();
    if law == Law::A58 && without_rates > 0 {
        let text = format!(
            "client {client}, service {name}: {without_rates} of {} reporting backends do not report how many requests they serve, \
             and a58 computes no weight for them",
            reporting.len()
        );
        diagnosis.add("load", Severity::Warning, text, Some(WITH_RATES));
    }
}

/// The help for applications that report no rates.
pub const WITH_RATES: &str = "let the applications report their rates (socklb agent report --qps RATE --eps RATE), or write control = \"feedback\"";
