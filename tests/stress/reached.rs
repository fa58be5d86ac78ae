//! Scenarios in which a connect succeeds.

use std::os::fd::OwnedFd;

use anyhow::Result;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, connect, connect_unspec, shutdown};
use stage::ending::Seen;
use stage::stress::Service;

use crate::netlink;
use crate::play::{Player, Scenario};
use crate::serve::{CLOSE, ECHO, MUTE, RESET};
use crate::socket::{
    dial, exchange, fails, has_failed, impatient, linger_not, reach, read_end, send_word, tcp, wait,
};

/// All scenarios of this file. Scenarios that wait for the kernel's timers have a low weight.
pub const SCENARIOS: [Scenario; 11] = [
    Scenario { name: "closed", weight: 2000, play: |player| closed(player, "closed") },
    Scenario { name: "closed, IPv6", weight: 400, play: |player| closed(player, "closed-6") },
    Scenario { name: "closed by the server", weight: 900, play: closed_by_server },
    Scenario { name: "reset", weight: 800, play: reset },
    Scenario { name: "lingered", weight: 1000, play: lingered },
    Scenario { name: "unread", weight: 700, play: unread },
    Scenario { name: "shut", weight: 600, play: shut },
    Scenario { name: "disconnected", weight: 400, play: disconnected },
    Scenario { name: "doubled, late", weight: 200, play: doubled_late },
    Scenario { name: "destroyed", weight: 200, play: destroyed },
    Scenario { name: "data timeout", weight: 6, play: data_timeout },
];

/// The client closes the connection, with or without an exchange of data.
fn closed(player: &mut Player, service: &str) -> Result<()> {
    let socket = dial(Service::of(service))?;
    match player.random.u32(..3) {
        0 => {}
        1 => send_word(&socket, 0)?,
        _ => exchange(&socket, ECHO)?,
    }
    player.ledger.ended(service, Seen::Closed);
    Ok(())
}

/// The server closes the connection. The client waits for the close, or closes at about the same
/// time.
fn closed_by_server(player: &mut Player) -> Result<()> {
    let socket = dial(Service::of("closed-by-server"))?;
    exchange(&socket, CLOSE)?;
    if player.random.u32(..4) > 0 {
        read_end(&socket)?;
    }
    player.ledger.ended("closed-by-server", Seen::Closed);
    Ok(())
}

/// The server resets the connection. The client reads the error, clears it, or ignores it.
fn reset(player: &mut Player) -> Result<()> {
    let socket = dial(Service::of("reset"))?;
    send_word(&socket, RESET)?;
    match player.random.u32(..3) {
        0 => fails(rustix::io::read(&socket, &mut [0; 1]).map(drop), &[Errno::CONNRESET])?,
        1 => {
            wait(&socket, PollFlags::IN)?;
            has_failed(&socket, Errno::CONNRESET)?;
        }
        _ => wait(&socket, PollFlags::IN)?,
    }
    player.ledger.ended("reset", Seen::Reset);
    Ok(())
}

fn lingered(player: &mut Player) -> Result<()> {
    let socket = dial(Service::of("lingered"))?;
    if player.random.bool() {
        exchange(&socket, ECHO)?;
    } else {
        player.ledger.hastily();
    }
    linger_not(&socket)?;
    player.ledger.ended("lingered", Seen::Lingered);
    Ok(())
}

/// The client closes with unread data.
fn unread(player: &mut Player) -> Result<()> {
    drop(with_unread_data("unread")?);
    player.ledger.ended("unread", Seen::Unread);
    Ok(())
}

/// A connection with a byte that the client has not read.
pub fn with_unread_data(service: &str) -> Result<OwnedFd> {
    let socket = dial(Service::of(service))?;
    send_word(&socket, ECHO)?;
    wait(&socket, PollFlags::IN)?;
    Ok(socket)
}

/// Shuts down both directions, together or one after the other, and closes the socket immediately
/// or later.
fn shut(player: &mut Player) -> Result<()> {
    let socket = dial(Service::of("shut"))?;
    exchange(&socket, ECHO)?;
    match player.random.u32(..3) {
        0 => shutdown(&socket, Shutdown::Both)?,
        1 => {
            shutdown(&socket, Shutdown::Both)?;
            wait(&socket, PollFlags::HUP)?;
        }
        _ => {
            shutdown(&socket, Shutdown::Write)?;
            read_end(&socket)?;
        }
    }
    player.ledger.ended("shut", Seen::Closed);
    Ok(())
}

/// Disconnects and connects again, one or more times.
fn disconnected(player: &mut Player) -> Result<()> {
    let service = Service::of("disconnected");
    let socket = dial(service)?;
    for _ in 0..=player.random.u32(..3) {
        if player.random.bool() {
            exchange(&socket, ECHO)?;
        } else {
            player.ledger.hastily();
        }
        connect_unspec(&socket)?;
        player.ledger.ended(service.name, Seen::Disconnected);
        reach(&socket, service.address())?;
    }
    player.ledger.ended(service.name, Seen::Closed);
    Ok(())
}

/// Connects a connected socket again. The second call chooses no backend.
fn doubled_late(player: &mut Player) -> Result<()> {
    let service = Service::of("doubled-late");
    let socket = tcp(service.address(), SocketFlags::NONBLOCK)?;
    fails(connect(&socket, &service.address()), &[Errno::INPROGRESS])?;
    wait(&socket, PollFlags::OUT)?;
    reach(&socket, service.address())?;
    for _ in 0..player.random.u32(..3) {
        fails(connect(&socket, &service.address()), &[Errno::ISCONN])?;
    }
    player.ledger.ended(service.name, Seen::Closed);
    Ok(())
}

/// An administrator destroys the connection. The client reads or ignores the error.
fn destroyed(player: &mut Player) -> Result<()> {
    let service = Service::of("destroyed");
    let socket = dial(service)?;
    exchange(&socket, ECHO)?;
    let [backend] = service.backends()[..] else { unreachable!("it has one backend") };
    netlink::destroy(&socket, backend)?;
    if player.random.bool() {
        has_failed(&socket, Errno::CONNABORTED)?;
    }
    player.ledger.ended(service.name, Seen::Destroyed);
    Ok(())
}

/// The connection drops all data, so the client's data times out. The clients read or ignore the
/// error.
fn data_timeout(player: &mut Player) -> Result<()> {
    let service = Service::of("data-timeout");
    let mut sockets = Vec::new();
    for _ in 0..player.batch {
        let socket = dial(service)?;
        exchange(&socket, MUTE)?;
        impatient(&socket)?;
        send_word(&socket, 0)?;
        sockets.push(socket);
    }
    for socket in sockets {
        wait(&socket, PollFlags::IN)?;
        if player.random.bool() {
            has_failed(&socket, Errno::TIMEDOUT)?;
        }
        player.ledger.ended(service.name, Seen::DataTimeout);
    }
    Ok(())
}
