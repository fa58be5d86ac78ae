//! The cost of the daemon: when it starts, while it is idle, and when it reloads its configuration.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::process::Signal;
use stage::{Cgroup, Daemon, Setup, Stage};

use crate::pause::pause;
use crate::place::process::cpu_ticks;
use crate::place::{Place, SERVICE, cgroups, client, listed, service};
use crate::results::{Finding, median, show};

/// How long the benchmark measures the idle daemon.
const IDLE: Duration = Duration::from_secs(30);

/// `bench daemon`.
pub fn run() -> Result<()> {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "bench");
    let mut findings = one(&setup)?;
    findings.extend(many(&setup)?);
    show(&findings);
    Ok(())
}

/// The time from the start of a daemon to its first answer with attached programs, in milliseconds.
fn start(setup: &Setup, text: &str) -> f64 {
    let started = Instant::now();
    let daemon = Daemon::start(setup, text);
    let took = started.elapsed().as_secs_f64() * 1000.0;
    daemon.stop();
    took
}

/// The configuration with the service of all clients.
fn with_service(clients: &str, backends: &str) -> String {
    clients.to_owned() + &service("bench", SERVICE, backends, "")
}

/// Measures a host with one client.
fn one(setup: &Setup) -> Result<Vec<Finding>> {
    let cgroup = Cgroup::new();
    let backends: Vec<SocketAddr> = (1..=8).map(|port| ([127, 0, 0, 1], port).into()).collect();
    let text = with_service(&client("bench", &cgroup, ""), &listed(setup, "list.toml", &backends));
    let (mut first, mut again) = (Vec::new(), Vec::new());
    for _ in 0..7 {
        for times in [&mut first, &mut again] {
            times.push(start(setup, &text));
        }
        setup.run(&["detach", "--all"]);
    }
    let started = |what: &str, times: &[f64]| {
        Finding::shown(
            format!("{what} to the first answer with attached programs, median of 7"),
            format!("{:.1} ms", median(times).value),
        )
    };
    let (first, again) = (started("first start", &first), started("start over pinned maps", &again));
    Ok(vec![first, again, idle("idle", &Place::start(setup, vec![cgroup], &text))?])
}

/// Measures a host with the maximum number of client tasks: the cost of adding one client, and the
/// cost of all clients while the daemon is idle.
fn many(setup: &Setup) -> Result<Vec<Finding>> {
    const CLIENTS: usize = 64;
    let cgroups = cgroups(CLIENTS);
    let limits = "[limits]\nflow_records = 8192\nslots = 1024\nschedule_entries = 32768\n";
    let text = |clients: usize| {
        limits.to_owned() + &with_service(&jobs(&cgroups[..clients]), "{ file = \"list.toml\" }")
    };
    let (mut one, mut all) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        for (times, clients) in [(&mut one, 1), (&mut all, CLIENTS)] {
            times.push(start(setup, &text(clients)));
            setup.run(&["detach", "--all"]);
        }
    }
    let (one, all) = (median(&one).value, median(&all).value);
    let mut findings = vec![
        Finding::shown(
            format!("first start with {CLIENTS} clients, median of 3"),
            format!("{all:.1} ms; with 1 client: {one:.1} ms"),
        ),
        Finding::shown("each further client", format!("{:.1} ms", (all - one) / (CLIENTS - 1) as f64)),
        idle(&format!("idle with {CLIENTS} clients"), &Place::start(setup, Vec::new(), &text(CLIENTS)))?,
    ];
    findings.extend(reloads(setup, &cgroups)?);
    Ok(findings)
}

/// The configuration of a client in each of these cgroups.
fn jobs(cgroups: &[Cgroup]) -> String {
    cgroups.iter().enumerate().map(|(number, cgroup)| client(&format!("job-{number}"), cgroup, "")).collect()
}

/// Measures the cost of unchanged clients when the configuration is reloaded, with default limits
/// and with long lists.
fn reloads(setup: &Setup, cgroups: &[Cgroup]) -> Result<[Finding; 3]> {
    const TIMES: u32 = 20;
    const ADDED: u32 = 5;
    let backends: Vec<SocketAddr> = (8000..8100).map(|port| ([127, 0, 0, 1], port).into()).collect();
    let list = listed(setup, "list.toml", &backends);
    let text = |clients: usize| with_service(&jobs(&cgroups[..clients]), &list);
    let fewer = cgroups.len() - 1;
    let started = Instant::now();
    let place = Place::start(setup, Vec::new(), &text(fewer));
    let (took, daemon) = (started.elapsed().as_secs_f64(), place.daemon());
    let first = format!("{took:.2} s, {} ms of CPU time", 10 * cpu_ticks(daemon.pid())?);
    let taken_on = |act: &dyn Fn()| {
        let count = || daemon.log().matches("configuration applied").count();
        let before = count();
        act();
        stage::eventually("the configuration is in force", count, |count| *count > before);
    };
    let reload = || (0..TIMES).for_each(|_| taken_on(&|| daemon.signal(Signal::HUP)));
    let (unchanged, _) = place.watch(reload)?;
    let mut added = 0.0;
    for _ in 0..ADDED {
        let reload =
            |clients: usize| taken_on(&|| stage::replace(&setup.folder.join("socklb.toml"), &text(clients)));
        added += place.watch(|| reload(cgroups.len()))?.0;
        reload(fewer);
    }
    let mean = |what: String, seconds: f64, times: u32| {
        let each = 1000.0 * seconds / f64::from(times);
        Finding::shown(format!("{what}, mean of {times}"), format!("{each:.1} ms of CPU time"))
    };
    Ok([
        Finding::shown(format!("first start with {fewer} clients with default limits"), first),
        mean(format!("a SIGHUP that changes nothing, {fewer} clients"), unchanged, TIMES),
        mean(format!("one more client than {fewer}"), added, ADDED),
    ])
}

/// The CPU time that an idle daemon uses within [`IDLE`].
fn idle(what: &str, place: &Place) -> Result<Finding> {
    let (used, _) = place.watch(|| pause(IDLE))?;
    Ok(Finding::shown(format!("{what} for {} s", IDLE.as_secs()), format!("{used:.2} s of CPU time")))
}
