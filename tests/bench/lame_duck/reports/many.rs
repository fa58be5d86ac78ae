//! Thousands of backends: the daemon's cost of requests to the agents of 10,000 backends, with one
//! request to each backend every two seconds, and its cost of probes by connection.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use stage::{Setup, Stage};

use crate::pause;
use crate::place::{Announcer, Beside, Link, Place, QUEUE, ServiceKey, bound, reported_each};
use crate::results::Finding;

/// Backends that receive requests for reports.
const REPORTING: u16 = 10_000;
/// How long the benchmark measures the daemon during these requests.
const WATCHED: Duration = Duration::from_secs(20);
/// The maximum share of one processor that the daemon may use.
const NEEDED: f64 = 0.05;
/// Backends that the daemon probes by connection, each once a second.
const CONNECTED: u16 = 500;
/// How long the benchmark measures the daemon during these probes.
const CONNECTED_WATCHED: Duration = Duration::from_secs(10);
/// How long the listener waits for a connection before it checks whether it must end.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

const PORT: u16 = 8001;

pub fn run(stage: &Stage) -> Result<Vec<Finding>> {
    let mut findings = reports(stage)?;
    for probe in ["tcp", "http"] {
        findings.push(connects(stage, probe)?);
    }
    Ok(findings)
}

/// The prefix of loopback addresses; each backend has one address.
const HERE: [u8; 2] = [127, 1];
/// The prefix of addresses at the far end of a link.
const FAR: [u8; 2] = [10, 78];

/// The addresses of `count` backends with this prefix.
fn backends([a, b]: [u8; 2], count: u16) -> Vec<SocketAddr> {
    let address = |number: u16| [a, b, (number / 250).to_le_bytes()[0], (number % 250 + 1).to_le_bytes()[0]];
    (0..count).map(|number| SocketAddr::from((address(number), PORT))).collect()
}

/// Measures requests to agents on loopback, where the sender also does the receiver's work in the
/// kernel, and over a link, as if the agents were on other hosts. Also measures a daemon with the
/// same number of backends that sends no requests.
fn reports(stage: &Stage) -> Result<Vec<Finding>> {
    let key = ServiceKey::make(&Setup::new(stage, "keys"))?;
    let announcer = |backends: &[SocketAddr]| Announcer::start("0.0.0.0:9465", &key, backends);
    let here = backends(HERE, REPORTING);
    let unasked = {
        let health = "health = { panic_threshold = 50 }\n";
        let place = Place::of_one_service(stage, "unasked", &here, health, "");
        let (cpu, wall) = place.watch(|| pause::pause(WATCHED))?;
        cpu / wall
    };
    let loopback = {
        let announcer = announcer(&here)?;
        polled(stage, "loopback", &key, &here, &announcer)?
    };
    let far = backends(FAR, REPORTING);
    let (_link, announcer) = Link::start(Duration::ZERO, || announcer(&far))?;
    let link = polled(stage, "link", &key, &far, &announcer)?;
    Ok(vec![
        Finding::shown(
            format!("{REPORTING} backends without requests"),
            format!("{:.1} % of a processor", unasked * 100.0),
        ),
        Finding::shown(
            format!("{REPORTING} backends with a request every 2 s, on loopback"),
            loopback.to_string(),
        ),
        Finding::judged(
            format!("{REPORTING} backends with a request every 2 s, over a link"),
            link.to_string(),
            "<= 5 % of a processor",
            link.share() <= NEEDED,
        ),
    ])
}

/// The cost of requests in a period of time.
struct Cost {
    /// The processor time in seconds.
    cpu: f64,
    /// The length of the period in seconds.
    wall: f64,
    probes: u64,
}

impl Cost {
    fn share(&self) -> f64 {
        self.cpu / self.wall
    }
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.1} % of a processor, {:.1} us a probe ({:.0} a second)",
            self.share() * 100.0,
            self.cpu / self.probes as f64 * 1e6,
            self.probes as f64 / self.wall,
        )
    }
}

/// Measures a daemon that sends requests to all these backends, after each backend has reported.
fn polled(
    stage: &Stage,
    name: &str,
    key: &ServiceKey,
    backends: &[SocketAddr],
    announcer: &Announcer,
) -> Result<Cost> {
    let place = Place::of_one_service(stage, name, backends, &reported_each("2s"), &key.reports("[::]:9467"));
    place.wait_for("ready", backends.len());
    let before = announcer.answered();
    let (cpu, wall) = place.watch(|| pause::pause(WATCHED))?;
    Ok(Cost { cpu, wall, probes: announcer.answered() - before })
}

/// Accepts connections for all backends, answers HTTP requests, and counts the connections.
fn listen(accepted: &Arc<AtomicU64>) -> Result<Beside> {
    let listener = bound(([0, 0, 0, 0], PORT).into(), QUEUE)?;
    let accepted = Arc::clone(accepted);
    Ok(Beside::start(move |ends| {
        let mut request = [0; 1024];
        while !ends.load(Ordering::Relaxed) {
            let _ = poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&LOOK));
            let Ok((mut stream, _)) = listener.accept() else { continue };
            accepted.fetch_add(1, Ordering::Relaxed);
            // Connections are served one after the other, because each client sends its request at
            // once, or closes the connection.
            if stream.read(&mut request).is_ok_and(|length| length > 0) {
                let _ =
                    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            }
        }
    }))
}

fn connects(stage: &Stage, probe: &str) -> Result<Finding> {
    let count = Arc::new(AtomicU64::new(0));
    let _listener = listen(&count)?;
    let backends = backends(HERE, CONNECTED);
    let health = format!("health = {{ probe = \"{probe}\", interval = \"1s\" }}\n");
    let place = Place::of_one_service(stage, probe, &backends, &health, "");
    place.wait_for("well", backends.len());
    let accepted = || count.load(Ordering::Relaxed);
    let before = accepted();
    let (cpu, wall) = place.watch(|| pause::pause(CONNECTED_WATCHED))?;
    let probes = accepted() - before;
    let measured = format!(
        "{:.0} us a probe, {:.1} % of a processor at {:.0} probes a second",
        cpu / probes as f64 * 1e6,
        cpu / wall * 100.0,
        probes as f64 / wall
    );
    Ok(Finding::shown(format!("{CONNECTED} backends probed by {probe} every second"), measured))
}
