//! What a test asks of a probe, and the probe's answers: the types of both sides, which are `stage::probe` and the binary
//! `probe`. A call of the kernel that fails is an answer; what nobody can answer ends the probe with a message.
//!
//! Knows nothing of how requests travel (`rpc`) and of how they are carried out.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The kernel's error number, as `libc` names it. `EBADF` also stands for a socket that the probe does not have.
pub type Errno = i32;

/// What a request is answered with.
pub type Answer<T> = Result<T, Errno>;

/// A probe's socket. Sockets of one probe have different ids; a closed one's is not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SocketId(pub u32);

/// The family of a socket, which need not be that of the address that it dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// The family of an address.
    pub fn of(address: SocketAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

/// A way of its own that a socket asks for before it connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Oddity {
    /// Bound to the loopback device.
    Device,
    /// With a mark.
    Mark,
    /// Bound to an address of loopback.
    Source,
    /// `SO_DONTROUTE`.
    DontRoute,
    /// With a TTL.
    Ttl,
}

impl Oddity {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Device, Self::Mark, Self::Source, Self::DontRoute, Self::Ttl];
}

/// A socket that reached somebody.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dialled {
    /// The socket.
    pub socket: SocketId,
    /// Who answered.
    pub name: String,
    /// What getpeername(2) says.
    pub peer: SocketAddr,
}

/// A datagram that was received.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Received {
    /// Who answered: what the datagram says.
    pub name: String,
    /// Its source address.
    pub source: SocketAddr,
}

/// How often a backend answered, by its name, and how often a connect failed, by the name that [`failure`] makes.
pub type Counts = BTreeMap<String, u32>;

/// Results of the requests of HTTP clients that keep their connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    /// Answers with status 200, by the name of the server.
    pub answered: BTreeMap<String, u64>,
    /// Answers with `Connection: close`.
    pub announced: u64,
    /// Requests that were sent again.
    pub resent: u64,
    /// Requests without an answer of status 200, and failed connects, by error.
    pub failed: Counts,
}

/// The name under which connects that fail are counted.
pub fn failure(errno: Errno) -> String {
    format!("errno-{errno}")
}

/// A request. Unless something else is said, the answer is `()`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Run on one CPU only.
    Pin {
        /// Its number.
        cpu: usize,
    },
    /// Run a program and wait for it; answered with its exit code, which is -1 if a signal ended it.
    Run {
        /// Its path.
        program: PathBuf,
        /// Its arguments.
        arguments: Vec<String>,
    },
    /// Start another probe, which holds all sockets that are open now and does nothing with them.
    HoldInChild,
    /// Kill all such children.
    KillChildren,

    /// Open a TCP socket and do nothing with it; answered with its id.
    OpenStream(Family),
    /// Connect a new TCP socket and read who answers; answered with [`Dialled`].
    Dial(SocketAddr),
    /// The same with a socket of MPTCP.
    DialMptcp(SocketAddr),
    /// The same with a socket that exists.
    Redial(SocketId, SocketAddr),
    /// Begin to connect a new TCP socket, and leave it alone; answered with its id.
    StartConnect(SocketAddr),
    /// The same, with so many retransmissions of the SYN (`TCP_SYNCNT`) set before.
    StartConnectWithRetries(SocketAddr, u32),
    /// The same with a socket that asks for a way of its own, and waits until it is connected.
    ConnectOddly(SocketAddr, Oddity),
    /// The same from this address.
    ConnectFrom(SocketAddr, SocketAddr),
    /// Dial so often, and reset each connection at once; answered with [`Counts`].
    DialMany(SocketAddr, u32),
    /// The same until [`Request::Stop`] comes; only then answered, with [`Counts`].
    DialUntilStopped(SocketAddr),
    /// Disconnect and connect every socket again, one after the other, until [`Request::Stop`] comes; only then answered.
    RedialUntilStopped(SocketAddr),
    /// Start HTTP clients: their address and number, and whether they resend.
    StartRequests(SocketAddr, u32, bool),
    /// Their results so far: [`Served`].
    Served,
    /// Stop them; answered with [`Served`].
    StopRequests,
    /// Ends what goes on until it comes, and has no answer of its own. `EINVAL` if nothing does.
    Stop,
    /// Disconnect a socket: connect(2) to `AF_UNSPEC`.
    Disconnect(SocketId),
    /// Close a socket so that its connection is reset.
    Reset(SocketId),
    /// Write a byte and read one: the error of whichever fails.
    Provoke(SocketId),
    /// shutdown(2) in both directions.
    Shutdown(SocketId),
    /// Listen on a new TCP socket; answered with its id.
    Listen(SocketAddr),
    /// Bind a TCP socket that was connected, and listen on it.
    ListenAgain(SocketId, SocketAddr),
    /// Accept a connection, and keep its socket until the probe ends; answered with the address of its peer.
    Accept(SocketId),

    /// Close a socket.
    Close(SocketId),
    /// dup(2); answered with the id of the copy.
    Duplicate(SocketId),
    /// getpeername(2); answered with the address.
    Peer(SocketId),
    /// getsockname(2); answered with the address.
    LocalAddress(SocketId),

    /// Open a UDP socket; answered with its id.
    OpenDatagram(Family),
    /// Connect a UDP socket; answered with what getpeername(2) says then.
    ConnectDatagram(SocketId, SocketAddr),
    /// Send a datagram that names its destination.
    SendDatagram(SocketId, SocketAddr),
    /// Send a datagram to where the socket is connected.
    SendConnected(SocketId),
    /// Wait for a datagram; answered with [`Received`].
    ReceiveDatagram(SocketId),
    /// So often: open a UDP socket, and let two threads at once send a datagram to each address in turn.
    RaceDatagrams(u32, Vec<SocketAddr>),

    /// Connect a new TCP socket by io_uring; answered with its id.
    DialByRing(SocketAddr),
    /// Connect a new TCP socket by sending (`MSG_FASTOPEN`): data are in the SYN once the peer has given a cookie. Answered
    /// with the socket's id.
    DialFastOpen(SocketAddr),
    /// Connect a new TCP socket that puts its SYN off until the first write (`TCP_FASTOPEN_CONNECT`), if the peer has given a
    /// cookie; answered with its id.
    DialDeferred(SocketAddr),
    /// Write a byte.
    Write(SocketId),
    /// Read who answers; answered with the name.
    ReadName(SocketId),
    /// Answered with how often the SYN may be sent again (`TCP_SYNCNT`), as a `u32`.
    SynRetries(SocketId),
    /// Answered with how often the SYN was sent again, as a `u8`.
    Retransmissions(SocketId),
    /// Take the socket's error off (`SO_ERROR`); answered with it, or with `None`.
    TakeError(SocketId),
    /// Whether the queue of errors has a message, which is taken off.
    TakeQueuedError(SocketId),
    /// Have the kernel dial a file server (CIFS) and mount what it serves over a directory.
    MountShare(SocketAddr, PathBuf),
}
