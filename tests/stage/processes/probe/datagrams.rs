//! A probe's operations on UDP sockets.

use std::net::SocketAddr;

use super::{Probe, succeeded};
use crate::address;
use crate::protocol::{Answer, Family, Received, Request, SocketId};

impl Probe {
    #[track_caller]
    pub fn open_datagram(&mut self, family: Family) -> SocketId {
        self.must(&Request::OpenDatagram(family))
    }

    /// Connects a socket; returns the result of getpeername(2) afterwards.
    #[track_caller]
    pub fn try_connect_datagram(&mut self, socket: SocketId, to: &str) -> Answer<SocketAddr> {
        self.call(&Request::ConnectDatagram(socket, address(to)))
    }

    /// Connects a socket, and checks that getpeername(2) returns the address that it connected to.
    #[track_caller]
    pub fn connect_datagram(&mut self, socket: SocketId, to: &str) {
        assert_eq!(self.try_connect_datagram(socket, to), Ok(address(to)));
    }

    /// Sends a datagram that names its destination.
    #[track_caller]
    pub fn send_datagram(&mut self, socket: SocketId, to: &str) -> Answer<()> {
        self.call(&Request::SendDatagram(socket, address(to)))
    }

    #[track_caller]
    pub fn receive_datagram(&mut self, socket: SocketId) -> Received {
        self.must(&Request::ReceiveDatagram(socket))
    }

    /// Sends a datagram that names its destination, and returns the name that answers. The answer
    /// must come from the address `to`.
    #[track_caller]
    pub fn query(&mut self, socket: SocketId, to: &str) -> String {
        succeeded(&format!("sending to {to}"), self.send_datagram(socket, to));
        self.name_of_answer(socket, to)
    }

    /// Sends a datagram on a connected socket, and returns the name that answers. The answer must
    /// come from `peer`.
    #[track_caller]
    pub fn query_connected(&mut self, socket: SocketId, peer: &str) -> String {
        self.perform(&Request::SendConnected(socket));
        self.name_of_answer(socket, peer)
    }

    #[track_caller]
    fn name_of_answer(&mut self, socket: SocketId, target: &str) -> String {
        let Received { name, source } = self.receive_datagram(socket);
        assert_eq!(source, address(target), "the source of the answer of {name}");
        name
    }

    /// In each round, opens a new socket, and two threads send at the same time to each address in
    /// turn.
    #[track_caller]
    pub fn race_datagrams(&mut self, rounds: u32, to: &[&str]) {
        self.perform(&Request::RaceDatagrams(rounds, to.iter().map(|to| address(to)).collect()));
    }
}
