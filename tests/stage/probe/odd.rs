//! A probe's odd ways to dial, and what the kernel says of such sockets.

use std::path::Path;

use super::Probe;
use crate::address;
use crate::protocol::{Answer, Errno, Oddity, Request, SocketId};

impl Probe {
    /// Connects a new TCP socket by io_uring.
    #[track_caller]
    pub fn dial_by_ring(&mut self, to: &str) -> SocketId {
        self.must(&Request::DialByRing(address(to)))
    }

    /// Connects a new TCP socket by sending: data are in the SYN once the peer has given a cookie.
    #[track_caller]
    pub fn dial_fast_open(&mut self, to: &str) -> SocketId {
        self.must(&Request::DialFastOpen(address(to)))
    }

    /// Connects a new TCP socket that puts its SYN off until the first write, if the peer has given a cookie.
    #[track_caller]
    pub fn dial_deferred(&mut self, to: &str) -> SocketId {
        self.must(&Request::DialDeferred(address(to)))
    }

    /// Begins to connect a new TCP socket whose SYN is sent again so often, and leaves it alone.
    #[track_caller]
    pub fn start_connect_with_retries(&mut self, to: &str, retries: u32) -> SocketId {
        self.must(&Request::StartConnectWithRetries(address(to), retries))
    }

    /// Connects a new TCP socket that asks for a way of its own.
    pub fn connect_oddly(&mut self, to: &str, oddity: Oddity) -> Answer<SocketId> {
        self.ask(&Request::ConnectOddly(address(to), oddity))
    }

    /// Connects a new TCP socket that is bound to an address before.
    pub fn connect_from(&mut self, source: &str, to: &str) -> Answer<SocketId> {
        self.ask(&Request::ConnectFrom(address(source), address(to)))
    }

    /// Writes a byte.
    #[track_caller]
    pub fn write(&mut self, socket: SocketId) {
        self.perform(&Request::Write(socket));
    }

    /// Reads who answers.
    #[track_caller]
    pub fn read_name(&mut self, socket: SocketId) -> String {
        self.must(&Request::ReadName(socket))
    }

    /// How often the SYN may be sent again.
    #[track_caller]
    pub fn syn_retries(&mut self, socket: SocketId) -> u32 {
        self.must(&Request::SynRetries(socket))
    }

    /// How often the SYN was sent again.
    #[track_caller]
    pub fn retransmissions(&mut self, socket: SocketId) -> u8 {
        self.must(&Request::Retransmissions(socket))
    }

    /// Takes the socket's error off, if it has one.
    #[track_caller]
    pub fn take_error(&mut self, socket: SocketId) -> Option<Errno> {
        self.must(&Request::TakeError(socket))
    }

    /// Takes a message off the queue of errors, and says whether there was one.
    #[track_caller]
    pub fn take_queued_error(&mut self, socket: SocketId) -> bool {
        self.must(&Request::TakeQueuedError(socket))
    }

    /// Has the kernel dial a file server and mount what it serves over a directory.
    #[track_caller]
    pub fn mount_share(&mut self, server: &str, folder: &Path) -> Answer<()> {
        self.ask(&Request::MountShare(address(server), folder.to_owned()))
    }
}
