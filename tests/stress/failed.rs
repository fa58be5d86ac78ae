//! Scenarios with a connect that fails or is cancelled.

use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::Result;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, connect, connect_unspec, shutdown, sockopt};
use stage::ending::Seen;
use stage::stress::Service;

use crate::netlink;
use crate::play::{Player, Scenario};
use crate::socket::{
    begin, begin_again, direct, fails, has_failed, impatient, linger_not, reach, tcp, wait, wait_until_over,
};

/// All scenarios of this file. Scenarios that wait for the kernel's timers have a low weight.
pub const SCENARIOS: [Scenario; 9] = [
    Scenario { name: "refused", weight: 1000, play: refused },
    Scenario { name: "refused, IPv6", weight: 300, play: refused_6 },
    Scenario { name: "no route", weight: 500, play: no_route },
    Scenario { name: "no port", weight: 200, play: no_port },
    Scenario { name: "cancelled", weight: 600, play: cancelled },
    Scenario { name: "doubled", weight: 200, play: doubled },
    Scenario { name: "destroyed early", weight: 100, play: destroyed_early },
    Scenario { name: "timed out", weight: 4, play: timed_out },
    Scenario { name: "rejected by ICMP", weight: 10, play: rejected },
];

/// The errors of connects to [`stage::stress::UNROUTED`].
pub const UNROUTED: [Errno; 4] = [Errno::NETUNREACH, Errno::HOSTUNREACH, Errno::ACCESS, Errno::INVAL];

fn refused(player: &mut Player) -> Result<()> {
    let service = Service::of("refused");
    let mut flows = 1;
    if player.random.bool() {
        let socket = tcp(service.address(), SocketFlags::empty())?;
        fails(connect(&socket, &service.address()), &[Errno::CONNREFUSED])?;
    } else {
        let socket = begin(service)?;
        wait(&socket, PollFlags::OUT)?;
        match player.random.u32(..4) {
            // The worker does not read the error.
            0 => {}
            // The next connect returns the error and chooses no backend. The connect after it
            // chooses one.
            1 => {
                fails(connect(&socket, &service.address()), &[Errno::CONNREFUSED])?;
                begin_again(&socket, service.address())?;
                wait(&socket, PollFlags::OUT)?;
                flows += 1;
            }
            // The worker has read the error, so the next connect returns another error.
            2 => {
                has_failed(&socket, Errno::CONNREFUSED)?;
                fails(connect(&socket, &service.address()), &[Errno::CONNABORTED])?;
                begin_again(&socket, service.address())?;
                wait(&socket, PollFlags::OUT)?;
                flows += 1;
            }
            _ => has_failed(&socket, Errno::CONNREFUSED)?,
        }
    }
    for _ in 0..flows {
        player.ledger.ended(service.name, Seen::Refused);
    }
    Ok(())
}

fn refused_6(player: &mut Player) -> Result<()> {
    let service = Service::of("refused-6");
    let socket = tcp(service.address(), SocketFlags::empty())?;
    fails(connect(&socket, &service.address()), &[Errno::CONNREFUSED])?;
    player.ledger.ended(service.name, Seen::Refused);
    Ok(())
}

/// Connects once, or several times on one socket.
fn no_route(player: &mut Player) -> Result<()> {
    let service = Service::of("no-route");
    let socket = tcp(service.address(), SocketFlags::empty())?;
    for _ in 0..=player.random.u32(..3) {
        fails(connect(&socket, &service.address()), &UNROUTED)?;
        player.ledger.ended(service.name, Seen::NotSent);
    }
    Ok(())
}

/// The only local port of the socket already has a connection to this backend. For half of the
/// sockets, another service has refused a connect earlier.
fn no_port(player: &mut Player) -> Result<()> {
    let (service, closed) = (Service::of("no-port"), Service::of("no-port-refused"));
    let bound = |port: u16| -> Result<OwnedFd> {
        let socket = tcp(service.address(), SocketFlags::empty())?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        rustix::net::bind(&socket, &direct(port))?;
        Ok(socket)
    };
    let first = bound(0)?;
    reach(&first, service.address())?;
    let port = std::net::SocketAddr::try_from(rustix::net::getsockname(&first)?)?.port();
    for _ in 0..=player.random.u32(..2) {
        let socket = bound(port)?;
        if player.random.bool() {
            fails(connect(&socket, &closed.address()), &[Errno::CONNREFUSED])?;
            player.ledger.ended(closed.name, Seen::Refused);
        }
        fails(connect(&socket, &service.address()), &[Errno::ADDRNOTAVAIL])?;
        player.ledger.ended(service.name, Seen::NotSent);
    }
    // A reset frees the port at once.
    linger_not(&first)?;
    player.ledger.hastily();
    player.ledger.ended(service.name, Seen::Lingered);
    Ok(())
}

/// Cancels an unanswered connect, in one of several ways.
fn cancelled(player: &mut Player) -> Result<()> {
    let service = Service::of("cancelled");
    let socket = begin(service)?;
    match player.random.u32(..4) {
        0 => {}
        1 => {
            connect_unspec(&socket)?;
            player.ledger.ended(service.name, Seen::GaveUp);
            begin_again(&socket, service.address())?;
        }
        2 => shutdown(&socket, Shutdown::Both)?,
        _ => {
            let blocking = tcp(service.address(), SocketFlags::empty())?;
            sockopt::set_socket_timeout(&blocking, sockopt::Timeout::Send, Some(Duration::from_millis(1)))?;
            fails(connect(&blocking, &service.address()), &[Errno::INPROGRESS])?;
            player.ledger.ended(service.name, Seen::GaveUp);
        }
    }
    player.ledger.ended(service.name, Seen::GaveUp);
    Ok(())
}

/// Connects a connecting socket again. The second call chooses no backend.
fn doubled(player: &mut Player) -> Result<()> {
    let service = Service::of("doubled");
    let socket = begin(service)?;
    for _ in 0..=player.random.u32(..3) {
        fails(connect(&socket, &service.address()), &[Errno::ALREADY])?;
    }
    player.ledger.ended(service.name, Seen::GaveUp);
    Ok(())
}

/// An administrator destroys the socket of an unanswered connect.
fn destroyed_early(player: &mut Player) -> Result<()> {
    let service = Service::of("destroyed-early");
    let socket = begin(service)?;
    let [backend] = service.backends()[..] else { unreachable!("it has one backend") };
    netlink::destroy(&socket, backend)?;
    if player.random.bool() {
        has_failed(&socket, Errno::CONNABORTED)?;
    }
    player.ledger.ended(service.name, Seen::DestroyedEarly);
    Ok(())
}

/// The connect times out. The clients wait in connect(2), read the error, or ignore it.
fn timed_out(player: &mut Player) -> Result<()> {
    let service = Service::of("timed-out");
    let mut sockets = Vec::new();
    for _ in 1..player.batch {
        let socket = tcp(service.address(), SocketFlags::NONBLOCK)?;
        impatient(&socket)?;
        begin_again(&socket, service.address())?;
        sockets.push(socket);
    }
    let waiting = tcp(service.address(), SocketFlags::empty())?;
    impatient(&waiting)?;
    fails(connect(&waiting, &service.address()), &[Errno::TIMEDOUT])?;
    player.ledger.ended(service.name, Seen::TimedOut);
    wait_until_over(&sockets)?;
    for socket in sockets {
        if player.random.bool() {
            has_failed(&socket, Errno::TIMEDOUT)?;
        }
        player.ledger.ended(service.name, Seen::TimedOut);
    }
    Ok(())
}

/// An ICMP error answers the SYN.
fn rejected(player: &mut Player) -> Result<()> {
    let kinds = [
        ("icmp-host", Errno::HOSTUNREACH, Seen::Unreachable),
        ("icmp-port", Errno::CONNREFUSED, Seen::Refused),
        ("icmp-protocol", Errno::NOPROTOOPT, Seen::Unreachable),
        ("icmp-network", Errno::NETUNREACH, Seen::Unreachable),
    ];
    for (name, errno, seen) in kinds {
        let service = Service::of(name);
        let sockets = (0..player.batch.div_ceil(4)).map(|_| begin(service)).collect::<Result<Vec<_>>>()?;
        wait_until_over(&sockets)?;
        for socket in sockets {
            if player.random.bool() {
                has_failed(&socket, errno)?;
            }
            player.ledger.ended(name, seen);
        }
        if player.random.u32(..4) == 0 {
            let socket = tcp(service.address(), SocketFlags::empty())?;
            fails(connect(&socket, &service.address()), &[errno])?;
            player.ledger.ended(name, seen);
        }
    }
    Ok(())
}
