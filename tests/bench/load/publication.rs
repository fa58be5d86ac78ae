//! The daemon's cost of load control, on a host with the maximum number of clients. Each client
//! uses ten services with 20 members each. The reports of the members change each second. Meanwhile
//! all clients connect, so that the weights have an effect.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use stage::{Cgroup, Setup, Stage, eventually};

use super::arm::{Arm, load_line};
use super::sender::{Pace, Sender};
use crate::pause;
use crate::place::process::{self, part};
use crate::place::{Announcer, Place, ServiceKey, cgroups, client, fixed, reported_each, service};
use crate::results::Finding;

const CLIENTS: usize = 64;
const SERVICES: u8 = 10;
/// The number of backends of each service. Each client uses all of them.
const BACKENDS: u8 = 20;
const PORT: u16 = 8080;
/// The number of connects per second of each client, to all services in turn.
const CONNECTS_A_SECOND: f64 = 10.0;
/// How long the benchmark waits until weights have settled.
const SETTLES: Duration = Duration::from_secs(10);
/// How long the benchmark measures the daemon.
const WATCHED: Duration = Duration::from_secs(30);
/// The number of rounds. Each round measures the daemon with and without load control, because the
/// speed of a machine changes from one minute to the next.
const ROUNDS: usize = 3;
/// The maximum share of one processor that the daemon may use.
const NEEDED: f64 = 0.02;

/// How a daemon uses reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heeds {
    /// The daemon sends no requests for reports.
    Nothing,
    /// Reports decide whether backends may be chosen.
    Readiness,
    /// Reports decide whether backends may be chosen, and weights follow the reported load.
    Load,
}

/// The cost of a daemon.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// The share of one processor that the daemon uses.
    share: f64,
    /// Tables per second that the daemon builds because weights follow load.
    tables: f64,
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} % of a processor, {:.0} tables a second", self.share * 100.0, self.tables)
    }
}

/// Measures the daemon without load control. If one of the arms has load control, also measures the
/// daemon with it.
pub fn run(arms: &[Arm]) -> Result<Vec<Finding>> {
    let fleet = format!("{CLIENTS} clients, {SERVICES} services of {BACKENDS} backends each");
    let shown = |how: &str, costs: &[Cost]| {
        let costs: Vec<String> = costs.iter().map(Cost::to_string).collect();
        Finding::shown(format!("{fleet}, {how}"), costs.join("; "))
    };
    let (nothing, _) = measure(Heeds::Nothing)?;
    let follows = arms.iter().any(|arm| arm.is_judged());
    let (mut without, mut even, mut uneven) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..if follows { ROUNDS } else { 1 } {
        without.push(measure(Heeds::Readiness)?.0);
        if follows {
            let (settled, moving) = measure(Heeds::Load)?;
            even.push(settled);
            uneven.extend(moving);
        }
    }
    let mut findings = vec![shown("without reports", &[nothing]), shown("with reports", &without)];
    for (how, costs) in [("even", even), ("uneven, whatever the weights are", uneven)] {
        if costs.is_empty() {
            continue;
        }
        findings.push(shown(&format!("weights follow load, which is {how}"), &costs));
        let more = mean(&costs) - mean(&without);
        findings.push(Finding::judged(
            format!("{fleet}, load is {how}: mean cost of weights that follow load"),
            format!("{:.2} % of a processor", more * 100.0),
            "<= 2 %",
            more <= NEEDED,
        ));
    }
    Ok(findings)
}

/// The mean share of a processor in these measurements.
fn mean(costs: &[Cost]) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a few rounds")]
    let rounds = costs.len() as f64;
    costs.iter().map(|cost| cost.share).sum::<f64>() / rounds
}

fn backends(service: u8) -> impl Iterator<Item = SocketAddr> {
    (1..=BACKENDS).map(move |last| SocketAddr::from(([127, 20, service, last], PORT)))
}

fn address(service: u8) -> SocketAddr {
    SocketAddr::from(([10, 96, 1, service], 80))
}

/// Returns the daemon's cost while all backends have about the same load. If the daemon follows
/// load, also returns the cost while the backends' loads are different and stay different. This is
/// the expensive case, because all weights change all the time.
fn measure(heeds: Heeds) -> Result<(Cost, Option<Cost>)> {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "publication");
    let key = ServiceKey::make(&setup)?;
    let all: Vec<SocketAddr> = (1..=SERVICES).flat_map(backends).collect();
    let announcer = Announcer::start("0.0.0.0:9465", &key, &all)?;
    // One process listens for all backends.
    let _server = process::start(part("serve-load")?.arg(format!("0.0.0.0:{PORT}")))?;
    let cgroups = cgroups(CLIENTS);
    let text = configuration(&key, &cgroups, heeds);
    watched(&Place::start(&setup, cgroups, &text), heeds, &announcer, &all)
}

fn configuration(key: &ServiceKey, cgroups: &[Cgroup], heeds: Heeds) -> String {
    let mut text = "[limits]\nflow_records = 8192\nslots = 1024\nschedule_entries = 65536\n".to_owned()
        + &key.reports("127.0.0.1:9467");
    for (number, cgroup) in cgroups.iter().enumerate() {
        let task = format!("name = \"web-{number}\"\nindex = {number}\ncount = {CLIENTS}\n");
        text += &client("web", cgroup, &task);
    }
    // The daemon sends a request to each backend once a second.
    let requests = if heeds == Heeds::Nothing { String::new() } else { reported_each("1s") };
    let load = load_line((heeds == Heeds::Load).then_some("feedback"));
    let more = format!("subset = \"all\"\npolicy = \"weighted-round-robin\"\n{requests}{load}");
    for number in 1..=SERVICES {
        text += &service(&format!("service-{number}"), address(number), &fixed(backends(number)), &more);
    }
    text
}

/// Returns the cost of a daemon while it processes reports.
fn watched(
    place: &Place,
    heeds: Heeds,
    announcer: &Announcer,
    all: &[SocketAddr],
) -> Result<(Cost, Option<Cost>)> {
    if heeds != Heeds::Nothing {
        let asked = announcer.answered() + all.len() as u64;
        eventually(
            "requests are sent to all backends",
            || announcer.answered(),
            |answered| *answered >= asked,
        );
    }
    let services: Vec<SocketAddr> = (1..=SERVICES).map(address).collect();
    let pace = Pace { connections: CONNECTS_A_SECOND, life: Duration::ZERO, pause: Duration::ZERO };
    let senders = place
        .cgroups
        .iter()
        .enumerate()
        .map(|(number, cgroup)| Sender::start(cgroup, &services, &pace, number));
    let mut senders = senders.collect::<Result<Vec<_>>>()?;
    let mut random = fastrand::Rng::with_seed(1);
    let uneven: Vec<f64> = all.iter().map(|_| 0.4 + 0.4 * random.f64()).collect();
    let even = vec![0.6; all.len()];
    // Each report differs from the previous one, because the reported load has a tenth of noise.
    let mut say = |uses: &[f64], time: Duration| {
        let (start, mut next) = (Instant::now(), Instant::now());
        while next < start + time {
            for (backend, uses) in all.iter().zip(uses) {
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "thousandths")]
                announcer.load(*backend, (uses * (950.0 + 100.0 * random.f64())) as u32);
            }
            next += Duration::from_secs(1);
            pause::until(next);
        }
    };
    let mut watch = |uses: &[f64]| -> Result<Cost> {
        say(uses, SETTLES);
        // The page of metrics is read before the measurement begins, so that the cost of reading it
        // is not measured.
        let tables = tables(&place.setup);
        let (used, time) = place.watch(|| say(uses, WATCHED))?;
        Ok(Cost { share: used / time, tables: (self::tables(&place.setup) - tables) / time })
    };
    let costs = (watch(&even)?, if heeds == Heeds::Load { Some(watch(&uneven)?) } else { None });
    for sender in &mut senders {
        let sent = sender.sent();
        anyhow::ensure!(sent.failed == 0, "{} requests failed: {:?}", sent.failed, sent.why);
    }
    Ok(costs)
}

/// The number of tables that the daemon has built because weights follow load.
fn tables(setup: &Setup) -> f64 {
    let page = setup.metrics();
    let lines = page.lines().filter(|line| line.starts_with("socklb_load_tables_total{"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}
