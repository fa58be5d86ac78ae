//! The types of requests to a probe and of its answers, which `stage::probe` and the binary `probe`
//! share. A failed system call is an answer; a request that the probe cannot process ends the probe
//! with a message.
//!
//! `rpc` transports the requests, and the binary `probe` carries them out.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The kernel's error number, as `libc` names it. `EBADF` is also the answer if the probe does not
/// have the socket.
pub type Errno = i32;

/// The answer to a request.
pub type Answer<T> = Result<T, Errno>;

/// A probe's socket. Sockets of one probe have different ids; the id of a closed socket is not used
/// again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SocketId(pub u32);

/// The family of a socket, which may differ from that of the address that it dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub fn of(address: SocketAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

/// A routing option that a socket sets before it connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Oddity {
    /// The socket is bound to the loopback device.
    Device,
    /// The socket has a mark.
    Mark,
    /// The socket is bound to an address of loopback.
    Source,
    /// `SO_DONTROUTE`.
    DontRoute,
    /// The socket has a TTL.
    Ttl,
}

impl Oddity {
    pub const ALL: [Self; 5] = [Self::Device, Self::Mark, Self::Source, Self::DontRoute, Self::Ttl];
}

/// A socket that reached a backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dialled {
    pub socket: SocketId,
    /// The name of the backend that answered.
    pub name: String,
    /// The result of getpeername(2).
    pub peer: SocketAddr,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Received {
    /// The name in the datagram.
    pub name: String,
    pub source: SocketAddr,
}

/// Number of answers, keyed by backend, and of failed connects, keyed by the text of [`failure`].
pub type Counts = BTreeMap<String, u32>;

/// The results of clients. For HTTP clients, which reuse their connections, the fields count
/// requests. For clients that exchange lines, the fields count connections: complete ones in
/// `answered`, and cut ones in `failed`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    /// Number of answers with status 200, keyed by the server's name.
    pub answered: BTreeMap<String, u64>,
    /// Number of answers with `Connection: close`.
    pub announced: u64,
    /// Number of requests that were sent a second time.
    pub resent: u64,
    /// Number of failed connects and of requests without an answer of status 200, keyed by error.
    pub failed: Counts,
}

/// The name under which failed connects are counted.
pub fn failure(errno: Errno) -> String {
    format!("errno-{errno}")
}

/// A request. The answer is `()` unless stated otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Run on one CPU only.
    Pin {
        /// The CPU's number.
        cpu: usize,
    },
    /// Run a program and wait for it; answered with its exit code, which is -1 if a signal ended
    /// it.
    Run {
        program: PathBuf,
        arguments: Vec<String>,
    },
    /// Start another probe, which holds all sockets that are open now and does nothing with them.
    HoldInChild,
    /// Kill the probes that `HoldInChild` has started.
    KillChildren,

    /// Open a TCP socket and do nothing with it; answered with its id.
    OpenStream(Family),
    /// Connect a new TCP socket and read the name that answers; answered with [`Dialled`].
    Dial(SocketAddr),
    /// As `Dial`, with an MPTCP socket.
    DialMptcp(SocketAddr),
    /// As `Dial`, with an existing socket.
    Redial(SocketId, SocketAddr),
    /// Begin to connect a new TCP socket, and do not wait; answered with its id.
    StartConnect(SocketAddr),
    /// As `StartConnect`, with a maximum number of SYN retransmissions (`TCP_SYNCNT`).
    StartConnectWithRetries(SocketAddr, u32),
    /// As `StartConnect`, with a socket that has a special routing option; waits until the socket
    /// is connected.
    ConnectOddly(SocketAddr, Oddity),
    /// As `StartConnect`, from the first address to the second; waits until the socket is
    /// connected.
    ConnectFrom(SocketAddr, SocketAddr),
    /// Dial this many times, and reset each connection at once; answered with [`Counts`].
    DialMany(SocketAddr, u32),
    /// As `DialMany`, until [`Request::Stop`] arrives. The answer follows then: [`Counts`].
    DialUntilStopped(SocketAddr),
    /// Disconnect and reconnect the sockets in turn, until [`Request::Stop`] arrives. This request
    /// is answered only then.
    RedialUntilStopped(SocketAddr),
    /// Start HTTP clients: address, number of clients, and whether they resend.
    StartRequests(SocketAddr, u32, bool),
    /// Start this number of clients that dial, exchange lines with the backend for about 0.3 s,
    /// close the connection, and dial again.
    StartExchanges(SocketAddr, u32),
    /// Start a backend with this name that echoes the data that it receives. It ends with the
    /// probe.
    StartBackend(String, SocketAddr),
    /// The results of the clients so far: [`Served`].
    Served,
    /// Stop the clients; answered with [`Served`].
    StopRequests,
    /// End a request that runs until `Stop` arrives; `Stop` itself has no answer. `EINVAL` if no
    /// such request runs.
    Stop,
    /// Disconnect a socket with connect(2) to `AF_UNSPEC`.
    Disconnect(SocketId),
    /// Close a socket so that its connection is reset.
    Reset(SocketId),
    /// Write a byte and read one; answered with the error of the call that fails.
    Provoke(SocketId),
    /// shutdown(2) in both directions.
    Shutdown(SocketId),
    /// Listen on a new TCP socket; answered with its id.
    Listen(SocketAddr),
    /// Bind a previously connected TCP socket, and listen on it.
    ListenAgain(SocketId, SocketAddr),
    /// Accept a connection, and hold its socket until the probe ends; answered with its peer's
    /// address.
    Accept(SocketId),

    Close(SocketId),
    /// dup(2); answered with the id of the copy.
    Duplicate(SocketId),
    /// getpeername(2); answered with the address.
    Peer(SocketId),
    /// getsockname(2); answered with the address.
    LocalAddress(SocketId),

    /// Open a UDP socket; answered with its id.
    OpenDatagram(Family),
    /// Connect a UDP socket; answered with the result of getpeername(2) afterwards.
    ConnectDatagram(SocketId, SocketAddr),
    /// Send a datagram that names its destination.
    SendDatagram(SocketId, SocketAddr),
    /// Send a datagram on a connected socket.
    SendConnected(SocketId),
    /// Wait for a datagram; answered with [`Received`].
    ReceiveDatagram(SocketId),
    /// In each round, open a UDP socket, and start two threads, each of which sends a datagram to
    /// each address in turn.
    RaceDatagrams(u32, Vec<SocketAddr>),

    /// Connect a new TCP socket through io_uring; answered with its id.
    DialByRing(SocketAddr),
    /// Connect a new TCP socket with `MSG_FASTOPEN`; answered with its id. The SYN contains data if
    /// the peer has sent a cookie earlier.
    DialFastOpen(SocketAddr),
    /// Connect a new TCP socket with `TCP_FASTOPEN_CONNECT`; answered with its id. If the peer has
    /// sent a cookie earlier, the SYN is sent with the first write.
    DialDeferred(SocketAddr),
    /// Write a byte.
    Write(SocketId),
    /// Read the name that answers; answered with the name.
    ReadName(SocketId),
    /// Get the maximum number of SYN retransmissions (`TCP_SYNCNT`); answered with a `u32`.
    SynRetries(SocketId),
    /// Get the number of SYN retransmissions so far; answered with a `u8`.
    Retransmissions(SocketId),
    /// Read and clear the socket's error (`SO_ERROR`); answered with the error, or with `None`.
    TakeError(SocketId),
    /// Remove a message from the error queue; answered with `true` if the queue had a message.
    TakeQueuedError(SocketId),
    /// Make the kernel dial a file server (CIFS) and mount its share over a directory.
    MountShare(SocketAddr, PathBuf),
}
