//! The time from a request to its answer. The answer comes from the agent through its socket, or
//! from the kernel in place of the agent; the host is idle, or its processors are busy.

use std::net::{SocketAddr, UdpSocket};
use std::time::Instant;

use anyhow::{Result, ensure};
use lb_common::net::{Be16, IPPROTO_TCP};
use lb_report::wire::{BYTES, Datagram, Kind};
use stage::agent::Agent;
use stage::router::Router;
use stage::sys::XdpMode;
use stage::{Setup, Stage, eventually};

use super::{Arm, LOST, NEEDED_OF_KERNEL, idle_and_busy};
use crate::place::ServiceKey;
use crate::results::Finding;

const ARMS: [Arm; 4] = [
    Arm::on_loopback("socket, loopback", None),
    Arm::on_loopback("kernel, loopback", Some("lo")),
    Arm::over_veth("socket, veth", None),
    Arm::over_veth("kernel, veth", Some("far")),
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
        if arm.agent != arm.host {
            router.place(command);
        }
    });
    let mode = || agent.status()["interfaces"][0]["mode"].as_str().unwrap_or_default().to_owned();
    let wanted = match arm.xdp {
        None => "",
        Some("lo") => "generic",
        Some(_) => "native",
    };
    eventually("the agent answers", mode, |mode| mode == wanted);
    let socket = UdpSocket::bind((arm.host, 0))?;
    socket.connect(at)?;
    socket.set_read_timeout(Some(LOST))?;
    let key = service.of_backend(backend);
    let (mut nonce, mut cookie) = (0, 0);
    let needed = [None, arm.xdp.map(|_| NEEDED_OF_KERNEL)];
    idle_and_busy(&format!("request to answer, {}", arm.name), needed, |_| {
        nonce += 1;
        let mut request = Datagram::about(Kind::Request, IPPROTO_TCP, backend);
        request.key_id = Be16::from_host(service.id);
        (request.nonce, request.cookie) = (nonce, cookie);
        let request = request.sealed(key);
        let sent = Instant::now();
        socket.send(request.bytes())?;
        let mut bytes = [0; BYTES];
        let length = socket.recv(&mut bytes)?;
        let took = sent.elapsed();
        let answer = Datagram::parse(&bytes[..length]).map_err(|what| anyhow::anyhow!("{what:?}"))?;
        let is_ours = answer.is_authentic(key) && answer.nonce == nonce;
        ensure!(is_ours, "the answer does not belong to request {nonce}");
        cookie = answer.cookie;
        Ok(took)
    })
}
