//! The probe's datagram sockets.
//!
//! Requests: `udp4` and `udp6` (an open socket), `connect SOCKET ADDRESS`, `tell SOCKET ADDRESS` (one datagram that names
//! its destination), `say SOCKET` (one to where the socket is connected), `hear SOCKET` (who answers, and from where), `ask SOCKET
//! ADDRESS` and `inquire SOCKET` (both in one), `local SOCKET`, `race COUNT ADDRESS...` (as often: a new socket, and two
//! threads at once that send to each address), `fork` (a child that holds every socket) and `reap`.

use std::io::IoSliceMut;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Barrier;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType};

use crate::{Probe, number, outcome, parse, peer};

/// Longer than any answer takes, also in a guest: an answer that does not come is an error, not a hang.
const PATIENCE: Duration = Duration::from_secs(10);

/// Answers a request about datagrams; `None` if it is about something else.
pub fn answer(probe: &mut Probe, words: &[&str]) -> Option<String> {
    Some(match words {
        ["udp4"] => format!("ok {}", probe.keep(open(AddressFamily::INET))),
        ["udp6"] => format!("ok {}", probe.keep(open(AddressFamily::INET6))),
        ["connect", socket, address] => {
            let socket = &probe.sockets[&number(socket)];
            match rustix::net::connect(socket, &parse(address)) {
                Ok(()) => format!("ok {}", peer(socket)),
                Err(errno) => format!("err {}", errno.raw_os_error()),
            }
        }
        ["tell", socket, address] => outcome(tell(&probe.sockets[&number(socket)], parse(address))),
        ["say", socket] => outcome(say(&probe.sockets[&number(socket)])),
        ["hear", socket] => heard(hear(&probe.sockets[&number(socket)])),
        ["ask", socket, address] => {
            let socket = &probe.sockets[&number(socket)];
            heard(tell(socket, parse(address)).and_then(|()| hear(socket)))
        }
        ["inquire", socket] => {
            let socket = &probe.sockets[&number(socket)];
            heard(say(socket).and_then(|()| hear(socket)))
        }
        ["local", socket] => {
            let name = rustix::net::getsockname(&probe.sockets[&number(socket)]).expect("an address");
            SocketAddr::try_from(name).expect("an IP address").to_string()
        }
        ["fork"] => {
            // Another probe, which ends with us: nobody else has the other end of its standard input.
            let itself = std::env::current_exe().expect("a path");
            let mut child = std::process::Command::new(itself);
            let pipe = std::process::Stdio::piped;
            child.args(std::env::args().skip(1)).stdin(pipe()).stdout(pipe());
            probe.children.push(child.spawn().expect("start a child"));
            "ok".to_owned()
        }
        ["reap"] => {
            for mut child in probe.children.drain(..) {
                child.kill().and_then(|()| child.wait()).expect("a child that lives");
            }
            "ok".to_owned()
        }
        ["race", count, addresses @ ..] => {
            let addresses: Vec<SocketAddr> = addresses.iter().map(|address| parse(address)).collect();
            for _ in 0..number::<u32>(count) {
                race(&addresses);
            }
            "ok".to_owned()
        }
        _ => return None,
    })
}

fn open(family: AddressFamily) -> OwnedFd {
    let socket = rustix::net::socket(family, SocketType::DGRAM, None).expect("a socket");
    rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, Some(PATIENCE))
        .expect("a limit of patience");
    socket
}

fn tell(socket: impl AsFd, address: SocketAddr) -> Result<(), Errno> {
    rustix::net::sendto(socket, b"?", SendFlags::empty(), &address).map(drop)
}

fn say(socket: impl AsFd) -> Result<(), Errno> {
    rustix::net::send(socket, b"?", SendFlags::empty()).map(drop)
}

/// Who answers, and from where.
fn hear(socket: impl AsFd) -> Result<(String, SocketAddr), Errno> {
    let mut buffer = [0; 64];
    let mut control = rustix::net::RecvAncillaryBuffer::default();
    let heard =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, RecvFlags::empty())?;
    let source = heard.address.and_then(|source| SocketAddr::try_from(source).ok()).expect("a source");
    Ok((String::from_utf8_lossy(&buffer[..heard.bytes]).into_owned(), source))
}

fn heard(result: Result<(String, SocketAddr), Errno>) -> String {
    match result {
        Ok((name, source)) => format!("ok {name} {source}"),
        Err(errno) => format!("err {}", errno.raw_os_error()),
    }
}

fn race(addresses: &[SocketAddr]) {
    let socket = open(if addresses[0].is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 });
    let start = Barrier::new(2);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                start.wait();
                for address in addresses {
                    tell(&socket, *address).expect("sent");
                }
            });
        }
    });
}
