//! The time from the sending of a push until its verdict is stored for the kernel programs, on an
//! idle host and on a host with busy processors.
//!
//! The observer sleeps for 20 us between two reads. So it reads the verdict at most 20 us late, and
//! uses little time of the processors that the daemon needs.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use lb_report::wire::Readiness;
use stage::router::Router;
use stage::{Setup, Stage, eventually};

use super::{Arm, LOST, NEEDED_OF_KERNEL, Needed, idle_and_busy};
use crate::lame_duck::verdicts::Verdicts;
use crate::pause;
use crate::place::{Announcer, Place, Report, ServiceKey, reported_each};
use crate::results::Finding;

/// The maximum that is required with the socket, on an idle host.
const NEEDED: Needed = (0.99, Duration::from_millis(10), "p99 <= 10 ms");

const ARMS: [Arm; 4] = [
    Arm::on_loopback("socket, loopback", None),
    Arm::on_loopback("kernel, generic, loopback", Some("lo")),
    Arm::over_veth("socket, veth", None),
    Arm::over_veth("kernel, native, veth", Some("near")),
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
    let announcer = if arm.agent == arm.host { start()? } else { router.within(start)? };
    let xdp = arm.xdp.map(|interface| format!("xdp = [{interface:?}]\n")).unwrap_or_default();
    let reports = key.reports(&format!("{}:9467", arm.host)) + &xdp;
    let place = Place::of_one_service(stage, arm.name, &[backend], &reported_each("1s"), &reports);
    place.wait_for("ready", 1);
    let by = || place.setup.status().interfaces.iter().filter(|one| one.why.is_none()).count();
    eventually("the kernel listens", by, |by| *by == usize::from(arm.xdp.is_some()));
    let verdicts = Verdicts::open(&place.setup, &[backend])?;
    let mut counter = 1;
    let needed = if arm.xdp.is_none() { [Some(NEEDED), None] } else { [None, Some(NEEDED_OF_KERNEL)] };
    // Pushes *lame duck* and *ready* in turn.
    idle_and_busy(&format!("datagram to stored verdict, {}", arm.name), needed, |number| {
        let readiness = if number % 2 == 0 { Readiness::LameDuck } else { Readiness::Ready };
        counter += 1;
        let mut sent = Instant::now();
        announcer.push(backend, Report { readiness, counter }, || sent = Instant::now())?;
        while verdicts.is_lame(0) != (readiness == Readiness::LameDuck) {
            ensure!(sent.elapsed() < LOST, "push {number} was not stored in {LOST:?}");
            pause::pause(Duration::from_micros(20));
        }
        Ok(sent.elapsed())
    })
}
