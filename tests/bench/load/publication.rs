//! What it costs a daemon to follow load: as many clients as a host may have, each with rows of 20 members in ten services, whose
//! reports say something else each second. All of them connect meanwhile, so that weights act.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use stage::daemon::Kept;
use stage::probe::die_with_us;
use stage::{Cgroup, Daemon, Setup, Stage, eventually};

use super::arm::{Arm, load_line};
use super::sender::{Pace, Sender};
use crate::daemon::cpu_ticks;
use crate::lame_duck::finding::Finding;
use crate::lame_duck::keys::ServiceKey;
use crate::lame_duck::speaker::Speaker;
use crate::pause;

const CLIENTS: usize = 64;
const SERVICES: u8 = 10;
/// Of each service, and of each row.
const BACKENDS: u8 = 20;
const PORT: u16 = 8080;
/// Each is asked once a second.
const ASKS: &str = "health = { probe = \"report\", interval = \"1s\", idle_interval = \"1s\" }\n";
/// Of each client, to all services in turn.
const CONNECTS_A_SECOND: f64 = 10.0;
/// Until weights have moved.
const SETTLES: Duration = Duration::from_secs(10);
/// How long the daemon is watched.
const WATCHED: Duration = Duration::from_secs(30);
/// What is needed: of one processor.
const NEEDED: f64 = 0.02;
/// The kernel counts processor time in hundredths of a second.
const TICKS: f64 = 100.0;

/// What a daemon does with reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heeds {
    /// Nobody is asked for any
    Nothing,
    /// They say whether backends may be chosen
    Readiness,
    /// Weights follow them, too
    Load,
}

/// Measures it: with control of load, if an arm has it, and without.
pub fn run(arms: &[Arm]) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for heeds in [Heeds::Nothing, Heeds::Readiness, Heeds::Load] {
        if heeds == Heeds::Load && !arms.iter().any(|arm| arm.is_judged()) {
            continue;
        }
        let share = measure(heeds)?;
        let how = match heeds {
            Heeds::Nothing => "without reports",
            Heeds::Readiness => "with reports",
            Heeds::Load => "weights follow load",
        };
        let what = format!(
            "{CLIENTS} clients, {SERVICES} services, rows of {BACKENDS}, {how}: CPU time of the daemon"
        );
        let measured = format!("{:.2} % of a processor", share * 100.0);
        findings.push(match heeds {
            Heeds::Nothing | Heeds::Readiness => Finding::shown(what, measured),
            Heeds::Load => Finding::judged(what, measured, "<= 2 %", share <= NEEDED),
        });
    }
    Ok(findings)
}

fn backends(service: u8) -> impl Iterator<Item = SocketAddr> {
    (1..=BACKENDS).map(move |last| SocketAddr::from(([127, 20, service, last], PORT)))
}

fn address(service: u8) -> SocketAddr {
    SocketAddr::from(([10, 96, 1, service], 80))
}

/// Which part of a processor the daemon takes.
fn measure(heeds: Heeds) -> Result<f64> {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "publication");
    let key = ServiceKey::make(&setup)?;
    let all: Vec<SocketAddr> = (1..=SERVICES).flat_map(backends).collect();
    let speaker = Speaker::start(
        "0.0.0.0:9465".parse()?,
        key.id,
        all.iter().map(|backend| (*backend, key.of_backend(*backend))),
    )?;
    // One process listens for all.
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["serve-load", &SocketAddr::from(([0, 0, 0, 0], PORT)).to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    die_with_us(&mut command);
    let _server = Kept::of(command.spawn().context("start the backends")?);
    let cgroups: Vec<Cgroup> = (0..CLIENTS).map(|_| Cgroup::new()).collect();
    let daemon = Daemon::start(&setup, &configuration(&key, &cgroups, heeds));
    let share = watched(&daemon, heeds, &speaker, &all, &cgroups);
    drop(daemon);
    setup.run(&["detach", "--all"]);
    share
}

fn configuration(key: &ServiceKey, cgroups: &[Cgroup], heeds: Heeds) -> String {
    let mut text = format!(
        "[limits]\nflow_records = 8192\nslots = 1024\nschedule_entries = 65536\n\
         [reports]\nlisten = \"127.0.0.1:9467\"\nkey = \"{}\"\n",
        key.path.display()
    );
    for (number, cgroup) in cgroups.iter().enumerate() {
        text += &format!(
            "[[client]]\njob = \"web\"\nname = \"web-{number}\"\nindex = {number}\ncount = {CLIENTS}\ncgroup = \"{}\"\n",
            cgroup.relative().display()
        );
    }
    for service in 1..=SERVICES {
        let addresses: Vec<String> = backends(service).map(|backend| backend.to_string()).collect();
        text += &(format!(
            "[[service]]\nname = \"service-{service}\"\naddress = \"{}\"\nsubset = \"all\"\n\
             policy = \"weighted-round-robin\"\nbackends = {{ static = {addresses:?} }}\n{}",
            address(service),
            if heeds == Heeds::Nothing { "" } else { ASKS },
        ) + &load_line((heeds == Heeds::Load).then_some("feedback")));
    }
    text
}

/// The same while it follows them.
fn watched(
    daemon: &Daemon,
    heeds: Heeds,
    speaker: &Speaker,
    all: &[SocketAddr],
    cgroups: &[Cgroup],
) -> Result<f64> {
    if heeds != Heeds::Nothing {
        let asked = speaker.answered() + all.len() as u64;
        eventually("all backends are asked", || speaker.answered(), |answered| *answered >= asked);
    }
    let services: Vec<SocketAddr> = (1..=SERVICES).map(address).collect();
    let pace = Pace { connections: CONNECTS_A_SECOND, life: Duration::ZERO, pause: Duration::ZERO };
    let senders =
        cgroups.iter().enumerate().map(|(number, cgroup)| Sender::start(cgroup, &services, &pace, number));
    let mut senders = senders.collect::<Result<Vec<_>>>()?;
    // What each uses, and a tenth of noise: as machines that differ, and never the same.
    let mut random = fastrand::Rng::with_seed(1);
    let uses: Vec<f64> = all.iter().map(|_| 0.4 + 0.4 * random.f64()).collect();
    let mut say = |time: Duration| {
        let (start, mut next) = (Instant::now(), Instant::now());
        while next < start + time {
            for (backend, uses) in all.iter().zip(&uses) {
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "thousandths")]
                speaker.load(*backend, (uses * (950.0 + 100.0 * random.f64())) as u32);
            }
            next += Duration::from_secs(1);
            pause::until(next);
        }
    };
    say(SETTLES);
    let (before, since) = (cpu_ticks(daemon.pid())?, Instant::now());
    say(WATCHED);
    let share = (cpu_ticks(daemon.pid())? - before) as f64 / TICKS / since.elapsed().as_secs_f64();
    for sender in &mut senders {
        let sent = sender.sent();
        anyhow::ensure!(sent.failed == 0, "{} requests failed: {:?}", sent.failed, sent.why);
    }
    Ok(share)
}
