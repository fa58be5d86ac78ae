//! From the moment at which a push is sent to the word that connects read, on a host that does nothing else and on one whose
//! processors are busy.
//!
//! Who looks is a thread of real-time priority that sleeps 20 us between looks: so it finds the word at most that much too late, and
//! takes little of the processors that the daemon wants.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use lb_common::wire::Readiness;
use stage::{Setup, Stage, eventually};

use super::finding::{Finding, Times};
use super::host::{Host, Wanted};
use super::keys::ServiceKey;
use super::speaker::{Report, Speaker};
use super::verdicts::{Verdicts, registered};
use crate::pause;

/// Pushes of each measurement.
const PUSHES: u32 = 2_000;
/// How far apart they are.
const APART: Duration = Duration::from_millis(3);
/// What is needed of p99 on an idle host.
const NEEDED: Duration = Duration::from_millis(10);
/// One that takes longer is lost.
const LOST: Duration = Duration::from_secs(5);

/// Measures it.
pub fn run(stage: &Stage) -> Result<Vec<Finding>> {
    let backend: SocketAddr = "127.0.0.1:8001".parse()?;
    let key = ServiceKey::make(&Setup::new(stage, "stored"))?;
    let speaker = Speaker::start("127.0.0.1:9465".parse()?, key.id, [(backend, key.of_backend(backend))])?;
    let wanted = Wanted {
        health: "{ probe = \"report\", interval = \"1s\", idle_interval = \"1s\" }",
        key: Some(&key.path),
        listen: "127.0.0.1:0",
        backends: &[backend],
    };
    let host = Host::start(stage, "stored", &wanted);
    eventually("it is heard", || host.reported("ready").unwrap_or(0), |ready| *ready == 1);
    let (id, _) = registered(&host.setup, backend)?;
    let words = Verdicts::open(&host.setup)?;
    let mut counter = 1;
    let idle = measure(&speaker, backend, &words, id, &mut counter)?;
    let ends = AtomicBool::new(false);
    let processors = std::thread::available_parallelism()?.get();
    let busy = std::thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let busy = measure(&speaker, backend, &words, id, &mut counter);
        ends.store(true, Ordering::Relaxed);
        busy
    })?;
    let reached = idle.at(0.99) <= NEEDED;
    Ok(vec![
        Finding::judged("datagram to stored word, idle host", idle.to_string(), "p99 <= 10 ms", reached),
        Finding::shown(format!("the same, {processors} processors busy"), busy.to_string()),
    ])
}

/// Pushes lame duck and ready in turn.
fn measure(
    speaker: &Speaker,
    backend: SocketAddr,
    words: &Verdicts,
    id: u32,
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
            speaker.push(backend, Report { readiness, counter: *counter }, || sent = Instant::now())?;
            while (words.word(id) != 0) != (readiness == Readiness::LameDuck) {
                ensure!(sent.elapsed() < LOST, "push {number} was not stored in {LOST:?}");
                pause::pause(Duration::from_micros(20));
            }
            times.push(sent.elapsed());
        }
        Ok(Times::new(times))
    };
    // On a thread of its own, whose priority goes with it.
    std::thread::scope(|scope| scope.spawn(&mut push_all).join().expect("the measurement ends"))
}
