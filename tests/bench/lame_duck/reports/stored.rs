//! The time from the sending of a push until its verdict is stored for the kernel programs, on an
//! idle host and on a host with busy processors.
//!
//! The observer is a thread with real-time priority that sleeps for 20 us between two reads. So it
//! reads the verdict at most 20 us late, and uses little time of the processors that the daemon
//! needs.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use lb_report::wire::Readiness;
use stage::router::Router;
use stage::{Setup, Stage, eventually};

use crate::lame_duck::verdicts::Verdicts;
use crate::pause;
use crate::place::announcer::{Announcer, Report};
use crate::place::keys::ServiceKey;
use crate::place::{Place, reported_each};
use crate::results::finding::{Finding, Times};

/// The number of pushes of each measurement.
const PUSHES: u32 = 10_000;
/// The time between two pushes.
const APART: Duration = Duration::from_millis(1);
/// The maximum p99 that is required with the socket, on an idle host.
const NEEDED: Duration = Duration::from_millis(10);
/// The maximum p99.9 that is required with the kernel, on a busy host.
const NEEDED_OF_KERNEL: Duration = Duration::from_millis(1);
/// A push that takes longer than this is considered lost.
const LOST: Duration = Duration::from_secs(5);

/// The receiver of reports (the socket or the kernel), and the link over which they arrive.
struct Arm {
    name: &'static str,
    /// The address on which the agent listens. The backend has this address too.
    agent: &'static str,
    daemon: &'static str,
    xdp: Option<&'static str>,
}

const ARMS: [Arm; 4] = [
    Arm { name: "socket, loopback", agent: "127.0.0.1", daemon: "127.0.0.1", xdp: None },
    Arm { name: "kernel, generic, loopback", agent: "127.0.0.1", daemon: "127.0.0.1", xdp: Some("lo") },
    Arm { name: "socket, veth", agent: "10.77.0.2", daemon: "10.77.0.1", xdp: None },
    Arm { name: "kernel, native, veth", agent: "10.77.0.2", daemon: "10.77.0.1", xdp: Some("near") },
];

/// Measures the arms, one after the other.
pub fn run(stage: &Stage) -> Result<Vec<Finding>> {
    let router = Router::new();
    let mut findings = Vec::new();
    for arm in &ARMS {
        findings.extend(run_arm(stage, arm, &router)?);
    }
    Ok(findings)
}

fn run_arm(stage: &Stage, arm: &Arm, router: &Router) -> Result<[Finding; 2]> {
    let key = ServiceKey::make(&Setup::new(stage, arm.name))?;
    let (agent, backend) = (format!("{}:9465", arm.agent), format!("{}:8001", arm.agent).parse()?);
    let start = || Announcer::start(&agent, &key, &[backend]);
    let announcer = if arm.agent == arm.daemon { start()? } else { router.within(start)? };
    let xdp = arm.xdp.map(|interface| format!("xdp = [{interface:?}]\n")).unwrap_or_default();
    let reports = key.reports(&format!("{}:9467", arm.daemon)) + &xdp;
    let place = Place::of_one_service(stage, arm.name, &[backend], &reported_each("1s"), &reports);
    place.wait_for("ready", 1);
    let by = || place.setup.status().interfaces.iter().filter(|one| one.why.is_none()).count();
    eventually("the kernel listens", by, |by| *by == usize::from(arm.xdp.is_some()));
    let verdicts = Verdicts::open(&place.setup, &[backend])?;
    let mut counter = 1;
    let idle = measure(&announcer, backend, &verdicts, &mut counter)?;
    let (busy, processors) = pause::while_busy(|| measure(&announcer, backend, &verdicts, &mut counter));
    let busy = busy?;
    let name = arm.name;
    let idle_name = format!("datagram to stored verdict, {name}, idle host");
    let busy_name = format!("datagram to stored verdict, {name}, {processors} processors busy");
    Ok(if arm.xdp.is_none() {
        let reached = idle.at(0.99) <= NEEDED;
        [
            Finding::judged(idle_name, idle.to_string(), "p99 <= 10 ms", reached),
            Finding::shown(busy_name, busy.to_string()),
        ]
    } else {
        let reached = busy.at(0.999) <= NEEDED_OF_KERNEL;
        [
            Finding::shown(idle_name, idle.to_string()),
            Finding::judged(busy_name, busy.to_string(), "p99.9 <= 1 ms", reached),
        ]
    })
}

/// Pushes *lame duck* and *ready* in turn, and measures the time of each push.
fn measure(
    announcer: &Announcer,
    backend: SocketAddr,
    verdicts: &Verdicts,
    counter: &mut u32,
) -> Result<Times> {
    let mut push_all = || {
        pause::without_slack()?;
        pause::before_all_others()?;
        let mut times = Vec::new();
        for number in 0..PUSHES {
            pause::pause(APART);
            let readiness = if number % 2 == 0 { Readiness::LameDuck } else { Readiness::Ready };
            *counter += 1;
            let mut sent = Instant::now();
            announcer.push(backend, Report { readiness, counter: *counter }, || sent = Instant::now())?;
            while verdicts.is_lame(0) != (readiness == Readiness::LameDuck) {
                ensure!(sent.elapsed() < LOST, "push {number} was not stored in {LOST:?}");
                pause::pause(Duration::from_micros(20));
            }
            times.push(sent.elapsed());
        }
        Ok(Times::new(times))
    };
    // The measurement has a separate thread, because the priority ends with the thread.
    std::thread::scope(|scope| scope.spawn(&mut push_all).join().expect("the measurement does not panic"))
}
