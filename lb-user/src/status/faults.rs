//! What an operator should look at, told from a client's status alone: one sentence for each fault.

use super::{Backend, Client, Service, Source};

/// What is wrong, as far as the clients' status shows it.
pub fn of(clients: &[Client]) -> Vec<String> {
    let mut faults = Vec::new();
    for client in clients {
        for service in client.services.iter().filter(|service| service.open) {
            let at = format!("client {}, service {}", client.name, service.name);
            faults.extend(of_service(service).into_iter().map(|fault| format!("{at}: {fault}")));
        }
        faults.extend(another_socklb(client));
    }
    faults
}

fn of_service(service: &Service) -> Vec<String> {
    let mut faults = Vec::new();
    if service.fallback.is_none() {
        faults.push("no usable backend, connects are refused".to_owned());
    }
    if let Some(limited) = service.limited_60s.filter(|limited| *limited > 0) {
        faults.push(format!(
            "{limited} connects of the last minute were refused: every backend was at its active_limit"
        ));
    }
    faults.extend(service.backends.iter().filter(|backend| backend.failing).map(failing));
    faults.extend(slow_handshakes(service));
    let diverted: u64 = service.backends.iter().filter_map(|backend| backend.diverted_60s).sum();
    if diverted > 0 {
        faults.push(format!(
            "{diverted} flows of the last minute went to another address than their backend's: another program rewrites \
             after ours, see `socklb doctor`"
        ));
    }
    let off = service.backends.iter().filter(|backend| backend.unaccounted != 0);
    faults.extend(off.map(|backend| {
        format!(
            "the counts of {} do not add up: {} flows too {}",
            backend.address,
            backend.unaccounted.unsigned_abs(),
            if backend.unaccounted > 0 { "few ended or open" } else { "many ended or open" }
        )
    }));
    if let Some(Source { error: Some(error), .. }) = &service.source {
        faults.push(error.clone());
    }
    faults
}

/// Handshakes that take so long that a backend which answers all of them may look as if it did not.
fn slow_handshakes(service: &Service) -> Option<String> {
    let (Some(due_ms), Some(took)) = (service.unanswered_after_ms, service.handshake_60s) else {
        return None;
    };
    #[expect(clippy::cast_precision_loss, reason = "at most a minute")]
    let due_us = due_ms as f64 * 1000.0;
    (took.p50_us > due_us / 2.0).then(|| {
        format!(
            "half of the handshakes of the last minute took more than {:.0} ms, and an answer is due after {due_ms} ms: \
             connects that are given up may be counted against backends that do answer; set unanswered_after to more than \
             twice that time",
            took.p50_us / 1000.0
        )
    })
}

/// A backend that answers no connect.
fn failing(backend: &Backend) -> String {
    let failed = backend.failed_60s.unwrap_or(0);
    format!("backend {}: every connect of the last minute failed, {failed} of them", backend.address)
}

/// Another socklb on the client's cgroup or above it: only the one whose programs run first sees the services.
fn another_socklb(client: &Client) -> Option<String> {
    let others = client.neighbours.iter().flatten().filter(|neighbour| neighbour.is_socklb);
    let others: Vec<_> = others.filter(|neighbour| neighbour.hook.starts_with("connect")).collect();
    // Whoever runs before ours is what matters most.
    let other = others.iter().find(|other| !other.runs_after_ours).or(others.first())?;
    let what_happens = if other.runs_after_ours {
        "runs after ours: its services see nothing"
    } else {
        "runs before ours: our services see nothing that is one of its services as well"
    };
    Some(format!(
        "client {}: another socklb is attached to {} and {what_happens}; `socklb doctor` tells how to find it",
        client.name,
        other.cgroup.display()
    ))
}

#[cfg(test)]
mod tests {
    use lb_common::abi::BackendState;
    use lb_common::ending::Ending;

    use super::*;
    use crate::status::{Anomalies, Latency};
    use crate::window::Recent;
    use lb_kernel::{Counts, Neighbour, SlotView};

    #[test]
    fn what_fails_is_told_by_service_and_backend() {
        let mut recent = Recent { seconds: 60.0, chosen: 9, ..Recent::default() };
        recent.endings[Ending::Refused as usize] = 7;
        let slot = SlotView {
            slot: 0,
            generation: 0,
            service: 0,
            address: "10.0.0.1:80".parse().unwrap(),
            weight: 1,
            entries: 1,
            state: BackendState::Healthy,
            usable: true,
        };
        let failing = Backend::of(&slot, &Counts::default(), Some(&recent));
        let mut service = Service {
            fallback: Some(failing.address),
            limited_60s: Some(3),
            unanswered_after_ms: Some(200),
            ..Service::with_backends(vec![failing])
        };
        let limited = "3 connects of the last minute were refused: every backend was at its active_limit";
        let failing = "backend 10.0.0.1:80: every connect of the last minute failed, 7 of them";
        assert_eq!(of_service(&service), [limited, failing]);
        service.limited_60s = Some(0);
        service.backends[0].failing = false;
        assert_eq!(of_service(&service), Vec::<String>::new());
        let latency = |p50_us| Latency { mean_us: p50_us, p50_us, p99_us: p50_us };
        service.handshake_60s = Some(latency(100_000.0));
        assert_eq!(of_service(&service), Vec::<String>::new());
        service.handshake_60s = Some(latency(101_000.0));
        let [slow] = &of_service(&service)[..] else { panic!("one fault") };
        assert!(
            slow.starts_with("half of the handshakes of the last minute took more than 101 ms, and"),
            "{slow}"
        );
        service.unanswered_after_ms = None;
        assert_eq!(of_service(&service), Vec::<String>::new(), "over UDP nothing is answered");
    }

    #[test]
    fn the_other_socklb_that_runs_first_is_named() {
        let neighbour = |cgroup: &str, hook: &str, is_socklb, runs_after_ours| Neighbour {
            cgroup: cgroup.into(),
            hook: hook.to_owned(),
            program: 1,
            name: None,
            is_socklb,
            runs_after_ours,
        };
        let fault = |neighbours: Vec<Neighbour>| {
            another_socklb(&Client {
                name: "web".to_owned(),
                configured_cgroup: None,
                cgroup: None,
                cgroup_id: None,
                neighbours: Some(neighbours),
                repair: None,
                not_a_service: 0,
                anomalies: Anomalies::default(),
                services: Vec::new(),
            })
        };
        assert_eq!(fault(vec![neighbour("/c", "connect4", false, false)]), None);
        assert_eq!(fault(vec![neighbour("/c", "sock_release", true, false)]), None);
        let after = neighbour("/", "connect4", true, true);
        let text = fault(vec![after.clone()]).unwrap();
        assert!(
            text.starts_with("client web: another socklb is attached to / and runs after ours"),
            "{text}"
        );
        let text = fault(vec![after, neighbour("/c", "connect6", true, false)]).unwrap();
        assert!(
            text.starts_with("client web: another socklb is attached to /c and runs before ours"),
            "{text}"
        );
    }
}
