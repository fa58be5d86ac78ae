//! The time from SIGTERM to the last connect that chose the backend, over a link with a delay of 10
//! ms in each direction, with and without loss.
//!
//! Each shutdown is pushed to two hosts of clients. The *active* host connects all the time, so its
//! choices show when it has received the report, but the connects to one backend are some
//! milliseconds apart. The *idle* host makes no connects. For both hosts, the benchmark also
//! measures when the verdict is stored for the kernel programs. No connect that begins later
//! chooses the backend.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use stage::{Setup, Stage, eventually};

use super::fleet::{Fleet, add_addresses, addresses};
use super::load::{Load, Query, now_ns};
use super::verdicts::Verdicts;
use crate::pause;
use crate::place::{Link, NEAR, Place, REPORTED, ServiceKey};
use crate::results::{Finding, Times};

/// The one-way travel time of a packet.
const DELAY: Duration = Duration::from_millis(10);
/// The maximum time that is allowed: two round trips and 10 ms.
const NEEDED: Duration = Duration::from_millis(50);
const BACKENDS: u8 = 20;
/// The maximum number of backends that are not ready at the same time. A connect examines at most
/// 16 entries. If none of them has a ready backend, it chooses a lame duck.
const OUT: usize = 5;
/// The number of shutdowns with loss, which is also the number without loss.
const SHUTDOWNS: usize = 200;
/// The time between two shutdowns. A backend takes about two seconds to become ready again.
const APART: Duration = Duration::from_millis(300);
/// The share of packets that are lost in each direction, in the case with loss.
const LOSS: f64 = 0.05;
/// The number of connections that the active client makes at the same time.
const AT_A_TIME: u32 = 40;
/// How long the benchmark waits before the shutdowns: longer than the idle interval. The second
/// request, which is sent within this time, makes the idle host a subscriber of the agent.
const IDLE_INTERVAL: Duration = Duration::from_secs(17);
/// If a shutdown has not reached both hosts after this time, it is considered lost.
const LOST: Duration = Duration::from_secs(3);
/// The kernel sends a SYN again after a second. A connect that takes longer than this has lost its
/// SYN.
const RESENT_NS: u64 = 900_000_000;

struct Shutdown {
    backend: SocketAddr,
    at_ns: u64,
    /// The times until the verdict was stored: on the active host, and on the idle host.
    stored: [Duration; 2],
}

pub fn run(stage: &Stage) -> Result<Vec<Finding>> {
    let backends = addresses(BACKENDS);
    let (link, ()) = Link::start(DELAY, || {
        add_addresses(&backends);
        Ok(())
    })?;
    let setup = Setup::new(stage, "shutdown");
    let key = ServiceKey::make(&setup)?;
    let mut fleet = Fleet::start(&setup, &link, &key, &backends)?;
    let host = |name: &str, port: u16| {
        let place =
            Place::of_one_service(stage, name, &backends, REPORTED, &key.reports(&format!("{NEAR}:{port}")));
        place.wait_for("ready", backends.len());
        place
    };
    let hosts = [host("active", 9467), host("idle", 9468)];
    pause::pause(IDLE_INTERVAL);
    let verdicts = [Verdicts::open(&hosts[0].setup, &backends)?, Verdicts::open(&hosts[1].setup, &backends)?];
    let mut findings = Vec::new();
    for share in [0.0, LOSS] {
        link.lose(share);
        let load = Load::start(&hosts[0], AT_A_TIME, 0, Duration::ZERO)?;
        let shutdowns = shut_down(&mut fleet, &verdicts, &backends);
        let asked = load.end();
        link.lose(0.0);
        findings.extend(judged(share, &shutdowns?, &asked));
    }
    Ok(findings)
}

/// Shuts backends down one after the other, and starts them again.
fn shut_down(
    fleet: &mut Fleet<'_>,
    verdicts: &[Verdicts; 2],
    backends: &[SocketAddr],
) -> Result<Vec<Shutdown>> {
    let mut shutdowns = Vec::new();
    for turn in 0..SHUTDOWNS {
        let began = Instant::now();
        let number = turn % backends.len();
        let mut is_back = || {
            let is_out = |of: &Verdicts| of.is_lame(number) || of.lame() >= OUT;
            fleet.start_missing().is_ok() && !verdicts.iter().any(is_out)
        };
        eventually("the backend is ready again", &mut is_back, |is_back| *is_back);
        let at_ns = now_ns();
        fleet.terminate(number)?;
        let stored = pause::in_front(|| stored(verdicts, number, at_ns))?;
        shutdowns.push(Shutdown { backend: backends[number], at_ns, stored });
        pause::until(began + APART);
    }
    Ok(shutdowns)
}

/// Polls until both hosts have stored the verdict.
fn stored(verdicts: &[Verdicts; 2], number: usize, at_ns: u64) -> Result<[Duration; 2]> {
    let mut stored = [None; 2];
    loop {
        let since = Duration::from_nanos(now_ns() - at_ns);
        for (stored, verdicts) in stored.iter_mut().zip(verdicts) {
            if stored.is_none() && verdicts.is_lame(number) {
                *stored = Some(since);
            }
        }
        if let [Some(active), Some(idle)] = stored {
            return Ok([active, idle]);
        }
        ensure!(since < LOST, "a host has not stored a shutdown in {LOST:?}: {stored:?}");
        pause::pause(Duration::from_micros(50));
    }
}

fn judged(share: f64, shutdowns: &[Shutdown], asked: &[Query]) -> Vec<Finding> {
    let with = format!("{:.0} % lost", share * 100.0);
    let last = |shutdown: &Shutdown| {
        let chose_it = asked.iter().filter(|asked| asked.backend == Some(shutdown.backend));
        let since = chose_it.filter_map(|asked| asked.began_ns.checked_sub(shutdown.at_ns));
        let since = since.map(Duration::from_nanos).filter(|since| *since < Duration::from_secs(1));
        since.max().unwrap_or(Duration::ZERO)
    };
    let resent = |shutdown: &Shutdown| {
        let chose_it = asked.iter().filter(|asked| asked.backend == Some(shutdown.backend));
        let later = chose_it.filter(|asked| {
            let established = asked.began_ns + asked.connect_ns;
            asked.connect_ns > RESENT_NS && (asked.began_ns..established).contains(&shutdown.at_ns)
        });
        later.count()
    };
    let times = |stored: fn(&Shutdown) -> Duration| Times::new(shutdowns.iter().map(stored));
    let last = Times::new(shutdowns.iter().map(last));
    let judged = |what: &str, times: &Times| {
        let is_reached = times.at(0.99) <= NEEDED;
        Finding::judged(format!("{what}, {with}"), times.to_string(), "p99 <= 50 ms", is_reached)
    };
    let failures: Vec<&str> = asked.iter().filter_map(|asked| asked.failure.as_deref()).collect();
    for failure in failures.iter().take(10) {
        eprintln!("failed: {failure}");
    }
    vec![
        judged("SIGTERM to the last connect that chose the backend, active", &last),
        judged("SIGTERM to the stored verdict, active", &times(|shutdown| shutdown.stored[0])),
        judged("SIGTERM to the stored verdict, idle", &times(|shutdown| shutdown.stored[1])),
        Finding::shown(
            format!("connects before SIGTERM with a SYN that was sent again after it, {with}"),
            shutdowns.iter().map(resent).sum::<usize>().to_string(),
        ),
        Finding::judged(
            format!("failed requests, {with}"),
            format!("{} of {}", failures.len(), asked.len()),
            "0",
            failures.is_empty(),
        ),
    ]
}
