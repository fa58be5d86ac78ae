//! The probe: opens sockets and uses them on request. Tests start it inside a cgroup.
//!
//! Each request of `stage::protocol` has a function in one of the modules `streams`, `requests`
//! (HTTP), `sockets` (of any kind), `datagrams` and `odd` (unusual ways to dial). The functions
//! return the kernel's errors and do not panic, so that the test can report which request failed.

mod streams;

mod requests;

mod sockets;

mod datagrams;

mod odd;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;
use serde_json::Value;
use stage::protocol::{Answer, Request, SocketId};
use stage::{Backend, Manner, rpc};

use crate::requests::Clients;

fn main() -> Result<()> {
    let cgroup = std::env::args().nth(1).context("usage: probe CGROUP")?;
    // The probe enters the cgroup before it opens a socket, because a socket belongs to the cgroup
    // in which it was created.
    std::fs::write(format!("{cgroup}/cgroup.procs"), std::process::id().to_string())
        .with_context(|| format!("enter {cgroup}"))?;
    // A test may need more sockets than the usual limit of 1,024.
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    let (sender, requests) = channel();
    // A separate thread reads requests, so that a loop that runs until the next request can check
    // for this request without waiting.
    std::thread::spawn(move || rpc::requests().try_for_each(|request| sender.send(request)));
    rpc::ready()?;
    let mut probe = Probe {
        sockets: BTreeMap::new(),
        next: 0,
        children: Vec::new(),
        clients: Clients::default(),
        backends: Vec::new(),
        requests,
    };
    while let Ok(request) = probe.requests.recv() {
        let answer = probe.carry_out(request?)?;
        rpc::answer(&answer)?;
    }
    Ok(())
}

/// The result of a request, before it becomes an answer.
type Outcome<T> = rustix::io::Result<T>;

struct Probe {
    sockets: BTreeMap<SocketId, OwnedFd>,
    next: u32,
    /// Children that hold the sockets that were open when they were started.
    children: Vec<Child>,
    clients: Clients,
    backends: Vec<Backend>,
    requests: Receiver<Result<Request>>,
}

impl Probe {
    fn carry_out(&mut self, request: Request) -> Result<Answer<Value>> {
        match request {
            Request::Pin { cpu } => answer(pin(cpu)),
            Request::Run { program, arguments } => answer(run(&program, &arguments)),
            Request::HoldInChild => answer(self.hold_in_child()),
            Request::KillChildren => answer(self.kill_children()),

            Request::OpenStream(family) => answer(self.open_stream(family)),
            Request::Dial(address) => answer(self.dial(address)),
            Request::DialMptcp(address) => answer(self.dial_mptcp(address)),
            Request::Redial(socket, address) => answer(self.redial(socket, address)),
            Request::StartConnect(address) => answer(self.start_connect(address)),
            Request::ConnectOddly(address, oddity) => answer(self.connect_oddly(address, oddity)),
            Request::ConnectFrom(source, address) => answer(self.connect_from(source, address)),
            Request::StartConnectWithRetries(address, retries) => {
                answer(self.start_connect_with_retries(address, retries))
            }
            Request::DialMany(address, count) => answer(Ok(streams::dial_many(address, count))),
            Request::DialUntilStopped(address) => answer(self.dial_until_stopped(address)),
            Request::RedialUntilStopped(address) => answer(self.redial_until_stopped(address)),
            Request::StartRequests(address, count, resends) => {
                self.clients = Clients::start(address, count, resends);
                answer(Ok(()))
            }
            Request::StartExchanges(address, count) => {
                self.clients = Clients::exchanging(address, count);
                answer(Ok(()))
            }
            Request::StartBackend(name, address) => {
                self.backends.push(Backend::with_manner(&name, &address.to_string(), Manner::Echoes));
                answer(Ok(()))
            }
            Request::Served => answer(Ok(self.clients.served())),
            Request::StopRequests => answer(Ok(std::mem::take(&mut self.clients).stop())),
            Request::Stop => answer::<()>(Err(Errno::INVAL)),
            Request::Disconnect(socket) => answer(self.disconnect(socket)),
            Request::Reset(socket) => answer(self.reset(socket)),
            Request::Provoke(socket) => answer(self.provoke(socket)),
            Request::Shutdown(socket) => answer(self.shut_down(socket)),
            Request::Listen(address) => answer(self.listen(address)),
            Request::ListenAgain(socket, address) => answer(self.listen_again(socket, address)),
            Request::Accept(socket) => answer(self.accept(socket)),

            Request::Close(socket) => answer(self.take(socket).map(drop)),
            Request::Duplicate(socket) => answer(self.duplicate(socket)),
            Request::Peer(socket) => answer(self.socket(socket).and_then(sockets::peer)),
            Request::LocalAddress(socket) => answer(self.socket(socket).and_then(sockets::local_address)),

            Request::OpenDatagram(family) => answer(self.open_datagram(family)),
            Request::ConnectDatagram(socket, address) => answer(self.connect_datagram(socket, address)),
            Request::SendDatagram(socket, address) => answer(self.send_datagram(socket, address)),
            Request::SendConnected(socket) => answer(self.send_connected(socket)),
            Request::ReceiveDatagram(socket) => answer(self.receive_datagram(socket)),
            Request::RaceDatagrams(rounds, addresses) => answer(datagrams::race(rounds, &addresses)),

            Request::DialByRing(address) => answer(self.dial_by_ring(address)),
            Request::DialFastOpen(address) => answer(self.dial_fast_open(address)),
            Request::DialDeferred(address) => answer(self.dial_deferred(address)),
            Request::Write(socket) => answer(self.write(socket)),
            Request::ReadName(socket) => answer(self.socket(socket).and_then(streams::read_name)),
            Request::SynRetries(socket) => answer(self.syn_retries(socket)),
            Request::Retransmissions(socket) => answer(self.retransmissions(socket)),
            Request::TakeError(socket) => answer(self.take_error(socket)),
            Request::TakeQueuedError(socket) => answer(self.take_queued_error(socket)),
            Request::MountShare(address, folder) => answer(odd::mount_share(address, &folder)),
        }
    }

    /// Starts a child probe that inherits all sockets. The child ends with this process, which has
    /// the only other end of the child's standard input.
    fn hold_in_child(&mut self) -> Outcome<()> {
        let program = std::env::current_exe().map_err(errno)?;
        let mut child = Command::new(program);
        child.args(std::env::args().skip(1)).stdin(Stdio::piped()).stdout(Stdio::piped());
        self.children.push(child.spawn().map_err(errno)?);
        Ok(())
    }

    fn kill_children(&mut self) -> Outcome<()> {
        for mut child in self.children.drain(..) {
            child.kill().and_then(|()| child.wait()).map_err(errno)?;
        }
        Ok(())
    }
}

fn answer<T: Serialize>(outcome: Outcome<T>) -> Result<Answer<Value>> {
    Ok(match outcome {
        Ok(value) => Ok(serde_json::to_value(value)?),
        Err(errno) => Err(errno.raw_os_error()),
    })
}

fn pin(cpu: usize) -> Outcome<()> {
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(cpu);
    rustix::thread::sched_setaffinity(None, &cpus)
}

/// Runs a command in the probe's cgroup.
fn run(program: &Path, arguments: &[String]) -> Outcome<i32> {
    let mut command = Command::new(program);
    let status = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).status();
    Ok(status.map_err(errno)?.code().unwrap_or(-1))
}

/// The kernel's error number of a call that the standard library made.
#[expect(clippy::needless_pass_by_value, reason = "it is for `map_err`, which gives the error away")]
fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
