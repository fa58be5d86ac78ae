//! Estimates the cost of probes, for the host that sends them and for a backend that many hosts
//! probe. `check` prints the estimate.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use lb_core::balancer::Balancer;
use lb_document::in_units;

use crate::config::{ClientConfig, ProbeConfig, ProbeKind};
use crate::probes::probed;
use lb_view::text::counted;

/// The processor time of one probe including its answer, rounded up. `cargo xtask bench lame-duck
/// many` measures this time on loopback.
fn time_of(kind: &ProbeKind) -> Duration {
    match kind {
        ProbeKind::Report { .. } => Duration::from_micros(12),
        ProbeKind::Connect { path: None, .. } => Duration::from_micros(100),
        ProbeKind::Connect { path: Some(_), .. } => Duration::from_micros(140),
    }
}

/// The probes of one service by all client tasks of a host.
struct ProbedService<'a> {
    probe: &'a ProbeConfig,
    /// The probed backends. A backend is probed once, even if several client tasks of the host use
    /// it.
    backends: BTreeSet<SocketAddr>,
    /// The number of backends that one client task probes.
    of_task: usize,
    /// The number of endpoints in the list.
    listed: usize,
    tasks: u32,
}

/// Returns one line for each probed service: the cost of its probes.
pub fn notes(clients: &[(&ClientConfig, Balancer<Duration>)]) -> Vec<String> {
    let mut services: BTreeMap<&str, ProbedService<'_>> = BTreeMap::new();
    for (client, balancer) in clients {
        for (configured, (_, _, in_use)) in client.services.iter().zip(balancer.services()) {
            let (Some(probe), Some((list, membership))) = (&configured.probe, in_use) else { continue };
            let probed = probed(membership, |_| false);
            let backends: BTreeSet<SocketAddr> = probed.map(|member| member.endpoint.address).collect();
            let (of_task, listed) = (backends.len(), list.as_slice().len());
            let tasks = client.task.count;
            let new = ProbedService { probe, backends: BTreeSet::new(), of_task, listed, tasks };
            // A service that several clients dial is counted once.
            services.entry(&configured.service.name).or_insert(new).backends.extend(backends);
        }
    }
    services.iter().map(|(name, probed)| format!("service {name}: {}", probed.text())).collect()
}

impl ProbedService<'_> {
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
    fn text(&self) -> String {
        let Self { probe, backends, of_task, listed, tasks } = self;
        let each = |count: f64| count / probe.interval.as_secs_f64();
        let rate = each(backends.len() as f64);
        let share = rate * time_of(&probe.kind).as_secs_f64() * 100.0;
        let interval = in_units(probe.interval);
        let idle = match &probe.kind {
            ProbeKind::Report { idle_interval, .. } => {
                format!(" (every {} while the service is idle)", in_units(*idle_interval))
            }
            ProbeKind::Connect { .. } => String::new(),
        };
        let mut text = format!(
            "{} probed by {} every {interval}{idle}: at most {} probes per second, about {} % of a processor",
            counted(backends.len(), "backend"),
            probe.name(),
            rounded(rate),
            rounded(share),
        );
        if *tasks > 1 && *listed > 0 {
            let askers = f64::from(*tasks) * *of_task as f64 / *listed as f64;
            text += &format!(
                "; with {tasks} client tasks on as many hosts, a backend is probed {} times per second",
                rounded(each(askers))
            );
        }
        text
    }
}

/// Rounds to two significant digits.
fn rounded(number: f64) -> String {
    let digits = match number {
        0.0 => 0,
        _ if number >= 10.0 => 0,
        _ if number >= 1.0 => 1,
        _ if number >= 0.1 => 2,
        _ => 3,
    };
    format!("{number:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_an_interval_covers_this_host_and_a_backend() {
        let kind = ProbeKind::Connect { path: None, timeout: Duration::from_secs(1), rise: 2, fall: 3 };
        let probe = ProbeConfig { kind, port: None, interval: Duration::from_secs(2) };
        let backends = (1..=24).map(|port| SocketAddr::from(([10, 0, 0, 1], port))).collect();
        let mut probed = ProbedService { probe: &probe, backends, of_task: 24, listed: 1000, tasks: 1 };
        assert_eq!(
            probed.text(),
            "24 backends probed by tcp every 2s: at most 12 probes per second, about 0.12 % of a processor"
        );
        probed.tasks = 10_000;
        assert!(
            probed.text().ends_with(
                "; with 10000 client tasks on as many hosts, a backend is probed 120 times per second"
            ),
            "{}",
            probed.text()
        );
    }

    #[test]
    fn numbers_have_two_significant_digits() {
        for (number, text) in [(0.0, "0"), (0.0123, "0.012"), (0.5, "0.50"), (1.25, "1.2"), (12.6, "13")] {
            assert_eq!(rounded(number), text);
        }
    }
}
