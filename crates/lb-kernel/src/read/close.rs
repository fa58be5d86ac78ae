//! Closes connections of flows to one backend, through the kernel's lists of sockets.
//!
//! A connection is closed only if a flow record has its socket's cookie, and a list shows that this
//! socket is connected to the record's backend. So connections without a record are never closed,
//! regardless of their addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::time::Duration;

use lb_common::abi::Phase;
use lb_core::ids::ServiceIndex;
use lb_core::service::Protocol;
use lb_diag::{Connection, SocketEntry, SocketLists};

use super::flows::{OpenFlow, flows};
use super::reclaim::ReclaimTarget;
use super::snapshot::FlowSnapshot;
use crate::error::DatapathError;

/// The selection of flows to close.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloseRequest {
    pub service: String,
    pub backend: SocketAddr,
    /// The latest start of a flow to close, in nanoseconds of `CLOCK_MONOTONIC`. Later flows remain
    /// open.
    pub begun_until_ns: u64,
    /// Close only TCP connections without data in either direction for this time, and without
    /// unread, unsent or unacknowledged data.
    pub idle: Option<Duration>,
    /// Only count the flows, and close none.
    pub is_dry_run: bool,
}

/// The result for one flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// The flow's connection was closed or, in a dry run, was selected.
    Closed,
    /// The flow's connection had ended, or its process had closed it.
    Gone,
    /// The flow's connection was not idle. UDP sockets are never idle, because the kernel does not
    /// record when they were last used.
    NotIdle,
    /// The flow's UDP socket is not connected, so that it may have flows to other backends.
    Unconnected,
    /// The flow's socket is in a network namespace that this process cannot enter. Before Linux
    /// 5.14, this is also the result if the socket is in no list.
    Elsewhere,
    /// The list of the flow's network namespace shows no connection of the socket to the backend.
    Unlisted,
    /// The close job ended before it reached this flow.
    Left,
    /// The kernel refused with this errno.
    Failed(i32),
}

/// The number of flows with each protocol and fate.
pub type Fates = BTreeMap<(Protocol, Fate), u64>;

/// Checks that the kernel can close connections and that this process has the necessary privilege.
/// Closes no connection.
///
/// # Errors
/// If the kernel was built without `CONFIG_INET_DIAG_DESTROY`, or CAP_NET_ADMIN is missing.
pub fn try_close() -> Result<(), DatapathError> {
    let result = SocketLists::open().and_then(|lists| lists.try_destroy());
    match result.as_ref().err().and_then(std::io::Error::raw_os_error) {
        Some(libc::EOPNOTSUPP) => Err(DatapathError::NoSocketDestroy),
        Some(libc::EPERM) => result.map_err(DatapathError::MayNotDestroySockets),
        // Any other error concerns only the socket of this attempt, and is ignored.
        _ => Ok(()),
    }
}

/// Closes the connections of the client's flows that `request` selects, and returns the results.
/// Before the function closes a connection, it calls `turn`, which may block. If `turn` returns
/// `false`, the remaining connections are not closed.
///
/// May enter network namespaces, and waits for `turn`: do not call this in the event loop.
///
/// # Errors
/// If the lists of sockets or the flow records cannot be read.
pub fn close(
    target: &ReclaimTarget,
    snapshot: &FlowSnapshot,
    request: &CloseRequest,
    mut turn: impl FnMut() -> bool + Send,
) -> Result<Fates, DatapathError> {
    let mut closing = Closing::of(snapshot, request);
    if !closing.wanted.is_empty() {
        let visit = |lists: &SocketLists| {
            closing.close_in(lists, &mut turn);
            if closing.wanted.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        target.namespaces(0).visit(visit).map_err(DatapathError::SocketLists)?;
    }
    if !closing.wanted.is_empty() {
        closing.find_missing(&flows(&target.pins)?);
    }
    Ok(closing.fates)
}

/// A flow whose socket has not been found yet.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    protocol: Protocol,
    namespace: u64,
    start_ns: u64,
}

struct Closing<'r> {
    request: &'r CloseRequest,
    /// The flows to close, keyed by the cookie of the socket.
    wanted: BTreeMap<u64, Wanted>,
    /// The cookies of the namespaces that were examined.
    examined: BTreeSet<u64>,
    fates: Fates,
}

impl<'r> Closing<'r> {
    fn of(snapshot: &FlowSnapshot, request: &'r CloseRequest) -> Self {
        let mut closing =
            Self { request, wanted: BTreeMap::new(), examined: BTreeSet::new(), fates: BTreeMap::new() };
        for open in &snapshot.flows {
            let OpenFlow { cookie, flow, is_connected } = *open;
            let service = snapshot.services.get(&ServiceIndex(flow.service));
            let is_meant = service.is_some_and(|service| service.name == request.service)
                && snapshot.slot(open).is_some_and(|slot| slot.address == request.backend)
                && flow.start_ns <= request.begun_until_ns;
            if !is_meant {
                continue;
            }
            let is_udp = flow.phase == Phase::Datagrams as u8;
            let protocol = if is_udp { Protocol::Udp } else { Protocol::Tcp };
            if is_connected {
                let wanted = Wanted { protocol, namespace: flow.namespace, start_ns: flow.start_ns };
                closing.wanted.insert(cookie, wanted);
            } else {
                closing.count(protocol, Fate::Unconnected);
            }
        }
        closing
    }

    fn count(&mut self, protocol: Protocol, fate: Fate) {
        *self.fates.entry((protocol, fate)).or_default() += 1;
    }

    /// Closes the wanted connections in one namespace.
    fn close_in(&mut self, lists: &SocketLists, turn: &mut impl FnMut() -> bool) {
        let namespace = lists.namespace().ok();
        for protocol in Protocol::ALL {
            let may_be_here = |wanted: &Wanted| {
                wanted.protocol == protocol && namespace.is_none_or(|namespace| namespace == wanted.namespace)
            };
            if !self.wanted.values().any(may_be_here) {
                continue;
            }
            let mut found = Vec::new();
            let each = |socket: SocketEntry| {
                if self.wanted.get(&socket.cookie).is_some_and(|wanted| wanted.protocol == protocol) {
                    found.push(socket);
                }
            };
            let listed = match protocol {
                Protocol::Tcp => lists.each_tcp(each),
                Protocol::Udp => lists.each_udp(each),
            };
            for socket in found {
                self.wanted.remove(&socket.cookie);
                let fate = self.close_one(lists, protocol, &socket, turn);
                self.count(protocol, fate);
            }
            if let Err(error) = listed {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                let left: Vec<u64> = self
                    .wanted
                    .iter()
                    .filter(|(_, wanted)| may_be_here(wanted))
                    .map(|(cookie, _)| *cookie)
                    .collect();
                for cookie in left {
                    self.wanted.remove(&cookie);
                    self.count(protocol, Fate::Failed(errno));
                }
            }
        }
        self.examined.extend(namespace);
    }

    fn close_one(
        &self,
        lists: &SocketLists,
        protocol: Protocol,
        socket: &SocketEntry,
        turn: &mut impl FnMut() -> bool,
    ) -> Fate {
        let connection = match self.select(protocol, socket) {
            Err(fate) => return fate,
            Ok(_) if self.request.is_dry_run => return Fate::Closed,
            Ok(_) if !turn() => return Fate::Left,
            Ok(connection) => connection,
        };
        let closed = || {
            // The list may be seconds old, so the socket is read again.
            if protocol == Protocol::Tcp {
                let Some(socket) = lists.read_tcp(&connection)? else { return Ok(Fate::Gone) };
                if let Err(fate) = self.select(protocol, &socket) {
                    return Ok(fate);
                }
            }
            Ok(if lists.destroy(&connection)? { Fate::Closed } else { Fate::Gone })
        };
        closed()
            .unwrap_or_else(|error: std::io::Error| Fate::Failed(error.raw_os_error().unwrap_or(libc::EIO)))
    }

    /// The connection of a socket with a wanted cookie if the connection must be closed, else the
    /// flow's fate.
    fn select(&self, protocol: Protocol, socket: &SocketEntry) -> Result<Connection, Fate> {
        let Some(connection) = socket.connection.filter(|_| socket.peer == self.request.backend) else {
            return Err(if protocol == Protocol::Udp { Fate::Unconnected } else { Fate::Unlisted });
        };
        if socket.is_closed {
            return Err(Fate::Gone);
        }
        match self.request.idle {
            Some(idle) if !is_idle(socket, idle) => Err(Fate::NotIdle),
            _ => Ok(connection),
        }
    }

    /// Determines the fates of flows whose sockets were not found. Such flows may have ended
    /// meanwhile.
    fn find_missing(&mut self, open_now: &[OpenFlow]) {
        let open_now: BTreeSet<(u64, u64)> =
            open_now.iter().map(|open| (open.cookie, open.flow.start_ns)).collect();
        for (cookie, Wanted { protocol, namespace, start_ns }) in std::mem::take(&mut self.wanted) {
            let fate = if !open_now.contains(&(cookie, start_ns)) {
                Fate::Gone
            } else if self.examined.contains(&namespace) {
                Fate::Unlisted
            } else {
                Fate::Elsewhere
            };
            self.count(protocol, fate);
        }
    }
}

/// Whether no data was sent or received on a TCP connection for this time, and no data is queued.
/// The send queue contains unsent and unacknowledged bytes, including those of a SYN and of a FIN,
/// so a connection in its handshake is not idle.
fn is_idle(socket: &SocketEntry, time: Duration) -> bool {
    socket.queued == 0 && socket.idle.is_some_and(|idle| idle >= time)
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use lb_common::abi::Flow;

    use super::*;

    const HOUR: Duration = Duration::from_hours(1);

    fn request(backend: SocketAddr, idle: Option<Duration>, is_dry_run: bool) -> CloseRequest {
        CloseRequest { service: "users".to_owned(), backend, begun_until_ns: 0, idle, is_dry_run }
    }

    fn cookie(socket: impl std::os::fd::AsFd) -> u64 {
        rustix::net::sockopt::socket_cookie(socket).expect("the socket is open")
    }

    fn closing<'r>(request: &'r CloseRequest, wanted: &[(Protocol, u64)]) -> Closing<'r> {
        let namespace = SocketLists::open().and_then(|lists| lists.namespace()).unwrap_or_default();
        let wanted = wanted.iter().map(|(protocol, cookie)| {
            (*cookie, Wanted { protocol: *protocol, namespace, start_ns: *cookie })
        });
        Closing { request, wanted: wanted.collect(), examined: BTreeSet::new(), fates: BTreeMap::new() }
    }

    fn is_open(stream: &TcpStream) -> bool {
        stream.set_nonblocking(true).expect("the socket is open");
        stream.peek(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }

    fn fates<const N: usize>(fates: [(Protocol, Fate, u64); N]) -> Fates {
        fates.into_iter().map(|(protocol, fate, count)| ((protocol, fate), count)).collect()
    }

    #[test]
    fn only_recorded_connections_to_the_backend_are_closed() {
        let [backend, other] = ["127.0.0.1:0", "127.0.0.1:0"].map(|at| TcpListener::bind(at).unwrap());
        let [to, elsewhere] = [&backend, &other].map(|listener| listener.local_addr().unwrap());
        let recorded: Vec<TcpStream> = (0..5).map(|_| TcpStream::connect(to).unwrap()).collect();
        let direct = TcpStream::connect(to).unwrap();
        // This socket has a record, but has connected to another address since.
        let moved = TcpStream::connect(elsewhere).unwrap();
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        let wanted: Vec<(Protocol, u64)> = recorded
            .iter()
            .map(|stream| (Protocol::Tcp, cookie(stream)))
            .chain([(Protocol::Tcp, cookie(&moved)), (Protocol::Udp, cookie(&datagrams))])
            .collect();
        let lists = SocketLists::open().unwrap();
        let others = [(Protocol::Tcp, Fate::Unlisted, 1), (Protocol::Udp, Fate::Unconnected, 1)];
        let counted = |fate, count| fates([(Protocol::Tcp, fate, count), others[0], others[1]]);
        let dry = request(to, None, true);
        let mut job = closing(&dry, &wanted);
        job.close_in(&lists, &mut || panic!("a dry run must close nothing"));
        assert_eq!(job.fates, counted(Fate::Closed, 5));
        assert!(recorded.iter().all(is_open));
        // `turn` permits three closes.
        let (all, mut turns) = (request(to, None, false), 0..3);
        let mut job = closing(&all, &wanted);
        job.close_in(&lists, &mut || turns.next().is_some());
        assert_eq!(job.fates.remove(&(Protocol::Tcp, Fate::Left)), Some(2));
        assert_eq!((job.fates, job.wanted.len()), (counted(Fate::Closed, 3), 0));
        assert_eq!(recorded.iter().filter(|stream| is_open(stream)).count(), 2);
        assert!(is_open(&direct) && is_open(&moved));
        datagrams.send_to(b"x", to).expect("the UDP socket can still send");
    }

    #[test]
    fn a_connection_that_becomes_busy_before_its_turn_stays() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let mut stream = TcpStream::connect(to).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        let lists = SocketLists::open().unwrap();
        // The required idle time is zero, which every connection without queued data fulfills.
        let idle = request(to, Some(Duration::ZERO), false);
        let mut job = closing(&idle, &[(Protocol::Tcp, cookie(&stream))]);
        job.close_in(&lists, &mut || {
            peer.write_all(b"unread").unwrap();
            true
        });
        assert_eq!(job.fates, fates([(Protocol::Tcp, Fate::NotIdle, 1)]));
        stream.read_exact(&mut [0; 6]).unwrap();
        assert!(is_open(&stream));
        let mut job = closing(&idle, &[(Protocol::Tcp, cookie(&stream))]);
        job.close_in(&lists, &mut || true);
        assert_eq!(job.fates, fates([(Protocol::Tcp, Fate::Closed, 1)]));
        assert!(!is_open(&stream));
    }

    #[test]
    fn a_connection_is_idle_without_data_in_queues_and_on_the_way() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut listed, wanted) = (None, cookie(&stream));
        let mut each = |socket: SocketEntry| {
            if socket.cookie == wanted {
                listed = Some(socket);
            }
        };
        SocketLists::open().unwrap().each_tcp(&mut each).unwrap();
        let idle = SocketEntry { queued: 0, idle: Some(HOUR), ..listed.expect("the socket is in the list") };
        let (backend, later) = (idle.peer, HOUR + Duration::from_millis(1));
        let fate = |socket: SocketEntry, limit| {
            let request = request(backend, limit, false);
            closing(&request, &[]).select(Protocol::Tcp, &socket).err()
        };
        assert_eq!(fate(idle, Some(HOUR)), None);
        assert_eq!(fate(idle, Some(later)), Some(Fate::NotIdle));
        let queued = SocketEntry { queued: 1, ..idle };
        assert_eq!((fate(queued, Some(HOUR)), fate(queued, None)), (Some(Fate::NotIdle), None));
        // A datagram socket: the kernel does not record when the socket was last used.
        let unknown = SocketEntry { idle: None, ..idle };
        assert_eq!((fate(unknown, Some(HOUR)), fate(unknown, None)), (Some(Fate::NotIdle), None));
        assert_eq!(fate(SocketEntry { is_closed: true, ..idle }, None), Some(Fate::Gone));
        assert_eq!(fate(SocketEntry { connection: None, ..idle }, None), Some(Fate::Unlisted));
    }

    #[test]
    fn a_missing_socket_is_elsewhere_unlisted_or_gone() {
        let all = request(([10, 0, 0, 1], 80).into(), None, false);
        let mut job = closing(&all, &[]);
        let open =
            |cookie, start_ns| OpenFlow { cookie, flow: Flow { start_ns, ..Flow::NONE }, is_connected: true };
        for (cookie, namespace) in [(1, 7), (2, 7), (3, 8), (4, 7)] {
            job.wanted.insert(cookie, Wanted { protocol: Protocol::Tcp, namespace, start_ns: 10 });
        }
        job.examined.insert(7);
        // The second flow has ended, and the socket of the fourth flow has begun another flow.
        job.find_missing(&[open(1, 10), open(3, 10), open(4, 11)]);
        let expected = [(Fate::Gone, 2), (Fate::Elsewhere, 1), (Fate::Unlisted, 1)];
        assert_eq!(job.fates, fates(expected.map(|(fate, count)| (Protocol::Tcp, fate, count))));
    }
}
