//! A probe's unusual ways to dial, and the kernel's state of such sockets.

use std::path::Path;

use super::Probe;
use crate::address;
use crate::protocol::{Answer, Errno, Oddity, Request, SocketId};

impl Probe {
    /// Connects a new TCP socket through io_uring.
    #[track_caller]
    pub fn dial_by_ring(&mut self, to: &str) -> SocketId {
        self.must(&Request::DialByRing(address(to)))
    }

    /// Connects a new TCP socket with `MSG_FASTOPEN`. The SYN contains data if the peer has sent a
    /// cookie earlier.
    #[track_caller]
    pub fn dial_fast_open(&mut self, to: &str) -> SocketId {
        self.must(&Request::DialFastOpen(address(to)))
    }

    /// Connects a new TCP socket. If the peer has sent a cookie earlier, the SYN is sent with the
    /// first write.
    #[track_caller]
    pub fn dial_deferred(&mut self, to: &str) -> SocketId {
        self.must(&Request::DialDeferred(address(to)))
    }

    /// Begins to connect a new TCP socket that retransmits its SYN at most `retries` times, and
    /// does not wait.
    #[track_caller]
    pub fn start_connect_with_retries(&mut self, to: &str, retries: u32) -> SocketId {
        self.must(&Request::StartConnectWithRetries(address(to), retries))
    }

    /// Connects a new TCP socket with a special routing option.
    pub fn connect_oddly(&mut self, to: &str, oddity: Oddity) -> Answer<SocketId> {
        self.call(&Request::ConnectOddly(address(to), oddity))
    }

    /// Connects a new TCP socket from the address `source`.
    pub fn connect_from(&mut self, source: &str, to: &str) -> Answer<SocketId> {
        self.call(&Request::ConnectFrom(address(source), address(to)))
    }

    #[track_caller]
    pub fn write(&mut self, socket: SocketId) {
        self.perform(&Request::Write(socket));
    }

    /// Reads the name with which the backend answers.
    #[track_caller]
    pub fn read_name(&mut self, socket: SocketId) -> String {
        self.must(&Request::ReadName(socket))
    }

    /// The maximum number of SYN retransmissions.
    #[track_caller]
    pub fn syn_retries(&mut self, socket: SocketId) -> u32 {
        self.must(&Request::SynRetries(socket))
    }

    /// The number of SYN retransmissions so far.
    #[track_caller]
    pub fn retransmissions(&mut self, socket: SocketId) -> u8 {
        self.must(&Request::Retransmissions(socket))
    }

    /// Reads and clears the socket's error, if it has one.
    #[track_caller]
    pub fn take_error(&mut self, socket: SocketId) -> Option<Errno> {
        self.must(&Request::TakeError(socket))
    }

    /// Removes a message from the error queue; returns whether there was one.
    #[track_caller]
    pub fn take_queued_error(&mut self, socket: SocketId) -> bool {
        self.must(&Request::TakeQueuedError(socket))
    }

    /// Makes the kernel dial a file server and mount its share over a directory.
    #[track_caller]
    pub fn mount_share(&mut self, server: &str, folder: &Path) -> Answer<()> {
        self.call(&Request::MountShare(address(server), folder.to_owned()))
    }
}
