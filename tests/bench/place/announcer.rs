//! An agent with reports that the benchmark chooses. It answers requests for any number of
//! backends. Its datagrams can be replayed, reordered and reflected.

use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use lb_common::net::{Be16, Be32};
use lb_report::wire::{BYTES, Datagram, Key, Kind, Readiness, UNKNOWN};

use super::keys::ServiceKey;
use super::thread::Beside;

/// How long a report is valid, which is longer than any part of the benchmark takes.
const VALID_FOR_MS: u32 = 300_000;
/// The time over which load is measured, according to the reports.
const WINDOW_MS: u16 = 1_000;
/// How long a backend remains a lame duck after its report.
const HOLD_MS: u32 = 600_000;

#[derive(Clone, Copy, Debug)]
pub struct Report {
    pub readiness: Readiness,
    /// The report's counter.
    pub counter: u32,
}

impl Report {
    /// Returns the report as the answer to a request.
    pub fn answer(self, request: &Datagram, key: Key) -> Datagram {
        let mut datagram = *request;
        datagram.kind = Kind::Answer as u8;
        self.filled_in(datagram).sealed(key)
    }

    /// Returns the report as a push.
    pub fn push(self, backend: SocketAddr, key_id: u16, key: Key) -> Datagram {
        let mut datagram = Datagram::about(Kind::Push, 6, backend);
        datagram.key_id = Be16::from_host(key_id);
        self.filled_in(datagram).sealed(key)
    }

    fn filled_in(self, mut datagram: Datagram) -> Datagram {
        datagram.readiness = self.readiness as u8;
        datagram.incarnation = Be32::from_host(1_000);
        datagram.counter = Be32::from_host(self.counter);
        datagram.valid_for = Be32::from_host(VALID_FOR_MS);
        datagram.hold = Be32::from_host(HOLD_MS);
        datagram
    }
}

/// A backend for which the announcer reports.
#[derive(Clone, Copy)]
pub struct Announced {
    key: Key,
    key_id: u16,
    report: Report,
    /// Utilization in thousandths; `None` if it is not reported.
    utilization: Option<u32>,
    /// The last request for the backend, and its answer.
    pub last: Option<(Datagram, Datagram)>,
}

struct Shared {
    socket: UdpSocket,
    announced: Mutex<(HashMap<SocketAddr, Announced>, Option<SocketAddr>)>,
    answered: AtomicU64,
    is_silent: AtomicBool,
}

/// The agent. It stops on drop.
pub struct Announcer {
    shared: Arc<Shared>,
    _thread: Beside,
}

impl Announcer {
    /// Starts an agent at `address` for these backends, all of them ready.
    pub fn start(address: &str, service: &ServiceKey, backends: &[SocketAddr]) -> Result<Self> {
        let socket = UdpSocket::bind(address)?;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        let report = Report { readiness: Readiness::Ready, counter: 1 };
        let announced = |backend: &SocketAddr| {
            let (key, key_id) = (service.of_backend(*backend), service.id);
            (*backend, Announced { key, key_id, report, utilization: None, last: None })
        };
        let announced = backends.iter().map(announced).collect();
        let shared = Arc::new(Shared {
            socket,
            announced: Mutex::new((announced, None)),
            answered: AtomicU64::new(0),
            is_silent: AtomicBool::new(false),
        });
        let its = Arc::clone(&shared);
        Ok(Self { shared, _thread: Beside::start(move |ends| its.answer(ends)) })
    }

    /// The number of answered requests.
    pub fn answered(&self) -> u64 {
        self.shared.answered.load(Ordering::Relaxed)
    }

    /// Stops the agent from sending. It still receives requests.
    pub fn fall_silent(&self) {
        self.shared.is_silent.store(true, Ordering::Relaxed);
        // The thread holds the lock while it answers, so afterwards no answer is under way.
        drop(self.shared.announced());
    }

    /// The state of a backend: its report, and the last request for it.
    pub fn announced(&self, backend: SocketAddr) -> Option<Announced> {
        self.shared.announced().0.get(&backend).copied()
    }

    /// Sets the utilization in later reports of a backend, in thousandths.
    pub fn load(&self, backend: SocketAddr, utilization: u32) {
        if let Some(announced) = self.shared.announced().0.get_mut(&backend) {
            announced.utilization = Some(utilization);
        }
    }

    /// Sets the report of a backend, and pushes it to the sender of the last request. Returns the
    /// datagram that was sent. Calls `sending` immediately before it is sent.
    pub fn push(&self, backend: SocketAddr, report: Report, sending: impl FnOnce()) -> Result<Datagram> {
        let mut shared = self.shared.announced();
        let (announced, client) = &mut *shared;
        let client = client.ok_or_else(|| anyhow::anyhow!("no request has arrived"))?;
        let announced = announced
            .get_mut(&backend)
            .ok_or_else(|| anyhow::anyhow!("the announcer has no backend {backend}"))?;
        announced.report = report;
        let push = report.push(backend, announced.key_id, announced.key);
        sending();
        self.shared.socket.send_to(push.bytes(), client)?;
        Ok(push)
    }
}

impl Shared {
    fn announced(&self) -> MutexGuard<'_, (HashMap<SocketAddr, Announced>, Option<SocketAddr>)> {
        self.announced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, ends: &AtomicBool) {
        let mut bytes = [0; BYTES];
        while !ends.load(Ordering::Relaxed) {
            let Ok((length, from)) = self.socket.recv_from(&mut bytes) else { continue };
            let Ok(request) = Datagram::parse(&bytes[..length]) else { continue };
            // The lock is held until the datagram is sent, so that datagrams stay in order.
            let mut shared = self.announced();
            let (announced, client) = &mut *shared;
            let Some(announced) = announced.get_mut(&request.backend()) else { continue };
            if self.is_silent.load(Ordering::Relaxed) {
                continue;
            }
            *client = Some(from);
            let mut loaded = request;
            if let Some(utilization) = announced.utilization {
                (loaded.utilization, loaded.window) =
                    (Be32::from_host(utilization), Be16::from_host(WINDOW_MS));
                (loaded.qps, loaded.eps) = (Be32::from_host(UNKNOWN), Be32::from_host(UNKNOWN));
            }
            let answer = announced.report.answer(&loaded, announced.key);
            announced.last = Some((request, answer));
            if self.socket.send_to(answer.bytes(), from).is_ok() {
                self.answered.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}
