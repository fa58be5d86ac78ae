//! The operations of a worker on one socket, and the results that the worker must see.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, sockopt};
use stage::stress::Service;

/// A time limit that exceeds every successful wait, even in a guest.
const PATIENCE: Timespec = Timespec { tv_sec: 120, tv_nsec: 0 };

/// A TCP socket for an address.
pub fn tcp(to: SocketAddr, flags: SocketFlags) -> Result<OwnedFd> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    Ok(rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | flags, None)?)
}

/// A connection to a service.
pub fn dial(service: Service) -> Result<OwnedFd> {
    let socket = tcp(service.address(), SocketFlags::empty())?;
    reach(&socket, service.address())?;
    Ok(socket)
}

/// Connects a socket.
pub fn reach(socket: impl AsFd, to: SocketAddr) -> Result<()> {
    connect(socket, &to).with_context(|| format!("connect to {to}"))
}

/// Begins to connect a new socket, and does not wait.
pub fn begin(service: Service) -> Result<OwnedFd> {
    let socket = tcp(service.address(), SocketFlags::NONBLOCK)?;
    begin_again(&socket, service.address())?;
    Ok(socket)
}

/// As [`begin`], with an existing non-blocking socket.
pub fn begin_again(socket: impl AsFd, to: SocketAddr) -> Result<()> {
    fails(connect(socket, &to), &[Errno::INPROGRESS])
}

/// Fails unless the result is an error in `with`.
pub fn fails(result: rustix::io::Result<()>, with: &[Errno]) -> Result<()> {
    match result {
        Err(errno) if with.contains(&errno) => Ok(()),
        Err(errno) => bail!("failed with {errno:?}, not with {with:?}"),
        Ok(()) => bail!("did not fail with {with:?}"),
    }
}

/// Sends a byte to the server.
pub fn send_word(socket: impl AsFd, word: u8) -> Result<()> {
    ensure!(rustix::io::write(socket, &[word])? == 1, "the byte was not written");
    Ok(())
}

/// Sends a byte and receives it back. After this, the server has accepted the connection.
pub fn exchange(socket: impl AsFd, word: u8) -> Result<()> {
    send_word(&socket, word)?;
    wait(&socket, PollFlags::IN)?;
    let mut received = [0];
    ensure!(rustix::io::read(&socket, &mut received)? == 1 && received == [word], "received {received:?}");
    Ok(())
}

/// Reads until the server's end of the stream.
pub fn read_end(socket: impl AsFd) -> Result<()> {
    wait(&socket, PollFlags::IN)?;
    ensure!(rustix::io::read(&socket, &mut [0; 1])? == 0, "the server sends more");
    Ok(())
}

/// Waits for an event, or for an error.
pub fn wait(socket: impl AsFd, what: PollFlags) -> Result<()> {
    let mut polled = [PollFd::new(&socket, what)];
    ensure!(poll(&mut polled, Some(&PATIENCE))? == 1, "no event arrives");
    Ok(())
}

/// Waits until all of these sockets have finished connecting. Kernel fact: an error does not prove
/// that a socket has finished. An ICMP error may arrive while connect(2) still holds the socket.
/// The error can then be read, but the socket is still connecting.
pub fn wait_until_over(sockets: &[OwnedFd]) -> Result<()> {
    for socket in sockets {
        let look = || {
            let mut polled = [PollFd::new(socket, PollFlags::OUT)];
            poll(&mut polled, Some(&PATIENCE)).map(|_| polled[0].revents())
        };
        let over = |events: &rustix::io::Result<PollFlags>| {
            events.is_err() || events.is_ok_and(|events| events.contains(PollFlags::HUP))
        };
        if let Err(events) = stage::within(stage::patience(), look, over) {
            bail!("still connecting: {events:?}");
        }
    }
    Ok(())
}

/// Reads and clears the error of a socket.
pub fn error(socket: impl AsFd) -> Result<Errno> {
    sockopt::socket_error(socket)?.err().context("the socket has no error")
}

/// Reads and clears the error of a socket. Fails unless the error is `with`.
pub fn has_failed(socket: impl AsFd, with: Errno) -> Result<()> {
    let errno = error(socket)?;
    ensure!(errno == with, "failed with {errno:?}, not with {with:?}");
    Ok(())
}

/// Makes the next close reset the connection.
pub fn linger_not(socket: impl AsFd) -> Result<()> {
    Ok(sockopt::set_socket_linger(socket, Some(Duration::ZERO))?)
}

/// Makes a connection fail soon: if data is unacknowledged after its first retransmission, the
/// connection ends with an error.
pub fn impatient(socket: impl AsFd) -> Result<()> {
    const SOON_MS: u32 = 20;
    Ok(sockopt::set_tcp_user_timeout(socket, SOON_MS)?)
}

/// The address at which the server answers direct dials. It is not the address of a service.
pub fn direct(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}
