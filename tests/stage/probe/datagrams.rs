//! What a probe does with UDP sockets.

use std::net::SocketAddr;

use super::{Probe, succeeded};
use crate::address;
use crate::protocol::{Answer, Family, Received, Request, SocketId};

impl Probe {
    /// A new UDP socket.
    #[track_caller]
    pub fn open_datagram(&mut self, family: Family) -> SocketId {
        self.must(&Request::OpenDatagram(family))
    }

    /// Connects a socket; what getpeername(2) says then.
    #[track_caller]
    pub fn try_connect_datagram(&mut self, socket: SocketId, to: &str) -> Answer<SocketAddr> {
        self.ask(&Request::ConnectDatagram(socket, address(to)))
    }

    /// Connects a socket, and checks that it sees the address that it named.
    #[track_caller]
    pub fn connect_datagram(&mut self, socket: SocketId, to: &str) {
        assert_eq!(self.try_connect_datagram(socket, to), Ok(address(to)));
    }

    /// Sends a datagram that names its destination.
    #[track_caller]
    pub fn send_datagram(&mut self, socket: SocketId, to: &str) -> Answer<()> {
        self.ask(&Request::SendDatagram(socket, address(to)))
    }

    /// Waits for a datagram.
    #[track_caller]
    pub fn receive_datagram(&mut self, socket: SocketId) -> Received {
        self.must(&Request::ReceiveDatagram(socket))
    }

    /// Sends a datagram that names its destination, and returns who answers, which must be under that address.
    #[track_caller]
    pub fn query(&mut self, socket: SocketId, to: &str) -> String {
        succeeded(&format!("sending to {to}"), self.send_datagram(socket, to));
        self.name_of_answer(socket, to)
    }

    /// Sends a datagram to where the socket is connected, and returns who answers, which must be under that address.
    #[track_caller]
    pub fn query_connected(&mut self, socket: SocketId, peer: &str) -> String {
        self.perform(&Request::SendConnected(socket));
        self.name_of_answer(socket, peer)
    }

    #[track_caller]
    fn name_of_answer(&mut self, socket: SocketId, asked: &str) -> String {
        let Received { name, source } = self.receive_datagram(socket);
        assert_eq!(source, address(asked), "the source of what {name} answers");
        name
    }

    /// So often: a new socket, and two threads that send at once to each address in turn.
    #[track_caller]
    pub fn race_datagrams(&mut self, rounds: u32, to: &[&str]) {
        self.perform(&Request::RaceDatagrams(rounds, to.iter().map(|to| address(to)).collect()));
    }
}
