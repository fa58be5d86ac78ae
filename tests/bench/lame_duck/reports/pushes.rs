//! Pushes from one agent to many clients: the time until the last client has received the report of
//! a lame duck. The clients are sockets of the benchmark, which acknowledge pushes as daemons do.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lb_common::net::Be16;
use lb_report::wire::{BYTES, Datagram, Key, Kind, Readiness};
use rustix::event::epoll;
use rustix::process::{Resource, Rlimit, setrlimit};
use stage::agent::Agent;
use stage::{Setup, Stage};

use crate::place::ServiceKey;
use crate::results::Finding;

const CLIENTS: [usize; 2] = [1_000, 10_000];
/// The number of changes that are pushed to each set of clients. The backend becomes a lame duck
/// and ready in turn.
const CHANGES: usize = 6;
/// If the push of a change has not reached a client after this time, it is considered lost.
const LOST: Duration = Duration::from_secs(10);

pub fn run(stage: &Stage) -> Result<Vec<Finding>> {
    let most = Some(CLIENTS[1] as u64 + 1_000);
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })
        .context("raise the limit of open files")?;
    let setup = Setup::new(stage, "pushes");
    let key = ServiceKey::make(&setup)?;
    let backend: SocketAddr = "127.0.0.1:8001".parse()?;
    // The agent's health check connects to this listener.
    let _listener = TcpListener::bind(backend)?;
    let agent = Agent::start(&setup, &key.path, &[&backend.to_string()]);
    let mut clients = Clients { key_id: key.id, key: key.of_backend(backend), backend, sockets: Vec::new() };
    let mut findings = Vec::new();
    for count in CLIENTS {
        clients.subscribe(count)?;
        let mut received = Vec::new();
        for change in 0..CHANGES {
            let (verb, readiness) = match change % 2 {
                0 => ("lame-duck", Readiness::LameDuck),
                _ => ("ready", Readiness::Ready),
            };
            received.push(clients.receive(readiness, &agent, verb)?);
        }
        let list = |of: fn(&Received) -> Duration| {
            let mut times: Vec<u128> = received.iter().map(|received| of(received).as_millis()).collect();
            times.sort_unstable();
            format!("{} to {} ms", times[0], times[times.len() - 1])
        };
        let again: usize = received.iter().map(|received| received.again).sum();
        findings.push(Finding::shown(
            format!("{count} clients, {CHANGES} changes: time from the first client to the last"),
            format!("{}, {again} duplicate pushes", list(|received| received.last - received.first)),
        ));
        findings.push(Finding::shown(
            format!("{count} clients: time from the command to the last client"),
            list(|received| received.last),
        ));
    }
    Ok(findings)
}

/// When the first and the last client received the push, since the start of the command.
struct Received {
    first: Duration,
    last: Duration,
    /// The number of pushes to clients that had already received one.
    again: usize,
}

struct Clients {
    key_id: u16,
    key: Key,
    backend: SocketAddr,
    sockets: Vec<UdpSocket>,
}

impl Clients {
    fn request(&self, cookie: u64) -> Datagram {
        let mut request = Datagram::about(Kind::Request, 6, self.backend);
        request.key_id = Be16::from_host(self.key_id);
        (request.nonce, request.cookie) = (fastrand::u64(1..), cookie);
        request.sealed(self.key)
    }

    /// Makes `count` clients return a cookie, which makes them subscribers.
    fn subscribe(&mut self, count: usize) -> Result<()> {
        while self.sockets.len() < count {
            let socket = UdpSocket::bind("127.0.0.1:0")?;
            socket.connect("127.0.0.1:9465")?;
            socket.set_read_timeout(Some(LOST))?;
            let mut cookie = 0;
            for _ in 0..2 {
                socket.send(self.request(cookie).bytes())?;
                let mut bytes = [0; BYTES];
                let length = socket.recv(&mut bytes).context("the agent does not answer")?;
                let answer =
                    Datagram::parse(&bytes[..length]).ok().context("the bytes are not a datagram")?;
                ensure!(answer.is_authentic(self.key), "the answer is not signed with the backend's key");
                cookie = answer.cookie;
            }
            socket.set_nonblocking(true)?;
            self.sockets.push(socket);
        }
        Ok(())
    }

    /// Runs a command of the agent, and waits until all clients have received the new readiness.
    fn receive(&self, readiness: Readiness, agent: &Agent, verb: &str) -> Result<Received> {
        let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (socket, number) in self.sockets.iter().zip(0..) {
            epoll::add(&all, socket.as_fd(), epoll::EventData::new_u64(number), epoll::EventFlags::IN)?;
        }
        let began = Instant::now();
        std::thread::scope(|scope| {
            let command = scope.spawn(|| agent.run(&[verb]).status.success());
            let received = self.take(&all, readiness, began)?;
            ensure!(command.join().expect("the command does not panic"), "socklb agent {verb} failed");
            Ok(received)
        })
    }

    fn take(&self, all: &impl AsFd, readiness: Readiness, began: Instant) -> Result<Received> {
        let mut has_received = vec![false; self.sockets.len()];
        let (mut first, mut last, mut received, mut again) = (None, Duration::ZERO, 0, 0);
        // When the last client has received its push, the loop continues for a while, because
        // pushes may be repeated.
        while received < has_received.len() || began.elapsed() < last + Duration::from_millis(100) {
            ensure!(
                began.elapsed() < LOST,
                "{received} of {} clients have received the push in {LOST:?}",
                has_received.len()
            );
            let mut events = Vec::with_capacity(256);
            let wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
            epoll::wait(all, rustix::buffer::spare_capacity(&mut events), Some(&wait))?;
            for event in &events {
                let number = usize::try_from(event.data.u64())?;
                let mut bytes = [0; BYTES];
                while let Ok(length) = self.sockets[number].recv(&mut bytes) {
                    let report =
                        Datagram::parse(&bytes[..length]).ok().context("the bytes are not a datagram")?;
                    if report.kind() != Some(Kind::Push) || report.readiness() != Some(readiness) {
                        continue;
                    }
                    // Acknowledges each push, as daemons do.
                    self.sockets[number].send(self.request(report.cookie).bytes())?;
                    if std::mem::replace(&mut has_received[number], true) {
                        again += 1;
                        continue;
                    }
                    received += 1;
                    last = began.elapsed();
                    first.get_or_insert(last);
                }
            }
        }
        Ok(Received { first: first.context("no client has received the push")?, last, again })
    }
}
