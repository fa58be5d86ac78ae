//! The time from a request to its answer. The answer comes from the agent through its socket, or
//! from the kernel in place of the agent; the host is idle, or its processors are busy.
//!
//! The requester is a thread with real-time priority, so that busy processors delay only the agent.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use lb_common::net::{Be16, IPPROTO_TCP};
use lb_report::wire::{BYTES, Datagram, Key, Kind};
use stage::agent::Agent;
use stage::router::Router;
use stage::sys::XdpMode;
use stage::{Setup, Stage, eventually};

use crate::pause;
use crate::place::keys::ServiceKey;
use crate::results::finding::{Finding, Times};

/// The number of requests of each measurement.
const REQUESTS: u64 = 10_000;
/// The time between two requests.
const APART: Duration = Duration::from_millis(1);
/// The maximum p99.9 that is required of answers from the kernel on a busy host.
const NEEDED: Duration = Duration::from_millis(1);
/// An answer that takes longer than this is considered lost.
const LOST: Duration = Duration::from_secs(5);

/// The sender of the answers (the agent or the kernel), and the link to it.
struct Arm {
    name: &'static str,
    agent: &'static str,
    client: &'static str,
    xdp: Option<&'static str>,
    mode: &'static str,
}

const ARMS: [Arm; 4] = [
    Arm { name: "socket, loopback", agent: "127.0.0.1", client: "127.0.0.1", xdp: None, mode: "" },
    Arm {
        name: "kernel, loopback",
        agent: "127.0.0.1",
        client: "127.0.0.1",
        xdp: Some("lo"),
        mode: "generic",
    },
    Arm { name: "socket, veth", agent: "10.77.0.2", client: "10.77.0.1", xdp: None, mode: "" },
    Arm { name: "kernel, veth", agent: "10.77.0.2", client: "10.77.0.1", xdp: Some("far"), mode: "native" },
];

/// Measures the arms, one after the other.
pub fn run(stage: &Stage) -> Result<Vec<Finding>> {
    let router = Router::new();
    // A virtual Ethernet device receives frames that its peer's program sends back only if the
    // device has a program too.
    let _peer = stage::sys::attach_xdp("near", XdpMode::Native);
    let mut findings = Vec::new();
    for arm in &ARMS {
        findings.extend(run_arm(stage, arm, &router)?);
    }
    Ok(findings)
}

fn run_arm(stage: &Stage, arm: &Arm, router: &Router) -> Result<[Finding; 2]> {
    let setup = Setup::new(stage, arm.name);
    let service = ServiceKey::make(&setup)?;
    let backend: SocketAddr = format!("{}:8001", arm.agent).parse()?;
    let at: SocketAddr = format!("{}:9465", arm.agent).parse()?;
    let xdp = arm.xdp.map(|name| format!("[xdp]\ninterfaces = [\"{name}\"]\n")).unwrap_or_default();
    let unchecked = (backend, "check = \"off\"\n".to_owned());
    service.configure_agent(&setup, &format!("listen = \"{at}\"\n{xdp}"), [unchecked]);
    let agent = Agent::start_with(&setup, |command| {
        if arm.agent != arm.client {
            router.place(command);
        }
    });
    let mode = || agent.status()["interfaces"][0]["mode"].as_str().unwrap_or_default().to_owned();
    eventually("the agent answers", mode, |mode| mode == arm.mode);
    let socket = UdpSocket::bind((arm.client, 0))?;
    socket.connect(at)?;
    socket.set_read_timeout(Some(LOST))?;
    let (key, id) = (service.of_backend(backend), service.id);
    let idle = measure(&socket, backend, key, id)?;
    let (busy, processors) = pause::while_busy(|| measure(&socket, backend, key, id));
    let busy = busy?;
    let idle_name = format!("request to answer, {}, idle host", arm.name);
    let busy_name = format!("request to answer, {processors} processors busy");
    let busy_finding = if arm.xdp.is_some() {
        let reached = busy.at(0.999) <= NEEDED;
        Finding::judged(busy_name, busy.to_string(), "p99.9 <= 1 ms", reached)
    } else {
        Finding::shown(busy_name, busy.to_string())
    };
    Ok([Finding::shown(idle_name, idle.to_string()), busy_finding])
}

fn measure(socket: &UdpSocket, backend: SocketAddr, key: Key, id: u16) -> Result<Times> {
    let query_all = || {
        pause::without_slack()?;
        pause::before_all_others()?;
        let mut times = Vec::new();
        let mut cookie = 0;
        for nonce in 1..=REQUESTS {
            pause::pause(APART);
            let mut request = Datagram::about(Kind::Request, IPPROTO_TCP, backend);
            request.key_id = Be16::from_host(id);
            (request.nonce, request.cookie) = (nonce, cookie);
            let request = request.sealed(key);
            let sent = Instant::now();
            socket.send(request.bytes())?;
            let mut bytes = [0; BYTES];
            let length = socket.recv(&mut bytes)?;
            times.push(sent.elapsed());
            let answer = Datagram::parse(&bytes[..length]).map_err(|what| anyhow::anyhow!("{what:?}"))?;
            ensure!(
                answer.is_authentic(key) && answer.nonce == nonce,
                "the answer does not belong to request {nonce}"
            );
            cookie = answer.cookie;
        }
        Ok(Times::new(times))
    };
    // The measurement has a separate thread, because the priority ends with the thread.
    std::thread::scope(|scope| scope.spawn(query_all).join().expect("the measurement does not panic"))
}
