//! Scenarios of sockets with several connects, with several owners, or without a connection.

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, connect_unspec};
use stage::ending::Seen;
use stage::stress::{ANSWERS, CLOSED, Service};

use crate::failed::UNROUTED;
use crate::play::{Player, Scenario};
use crate::serve::ECHO;
use crate::socket::{dial, direct, exchange, fails, linger_not, reach, tcp};

/// All scenarios of this file. Scenarios that start processes have a low weight.
pub const SCENARIOS: [Scenario; 6] = [
    Scenario { name: "retried", weight: 500, play: retried },
    Scenario { name: "moved", weight: 400, play: moved },
    Scenario { name: "copied", weight: 300, play: copied },
    Scenario { name: "inherited", weight: 6, play: inherited },
    Scenario { name: "killed", weight: 6, play: killed },
    Scenario { name: "datagram", weight: 700, play: datagram },
];

/// Makes one or more connects that fail in different ways. Each connect chooses a backend.
fn fail(player: &mut Player, socket: &OwnedFd) -> Result<()> {
    for _ in 0..=player.random.u32(..4) {
        if player.random.bool() {
            fails(connect(socket, &Service::of("retried-refused").address()), &[Errno::CONNREFUSED])?;
            player.ledger.ended("retried-refused", Seen::Refused);
        } else {
            fails(connect(socket, &Service::of("retried-unrouted").address()), &UNROUTED)?;
            player.ledger.ended("retried-unrouted", Seen::NotSent);
        }
    }
    Ok(())
}

/// Several connects on one socket, the last of which may succeed.
fn retried(player: &mut Player) -> Result<()> {
    let service = Service::of("retried");
    let socket = tcp(service.address(), SocketFlags::empty())?;
    fail(player, &socket)?;
    match player.random.u32(..3) {
        0 => {}
        1 => {
            reach(&socket, service.address())?;
            player.ledger.ended(service.name, Seen::Closed);
        }
        _ => {
            reach(&socket, service.address())?;
            exchange(&socket, ECHO)?;
            linger_not(&socket)?;
            player.ledger.ended(service.name, Seen::Lingered);
        }
    }
    Ok(())
}

/// A socket dials a service and then an address that is not a service, or in the reverse order.
fn moved(player: &mut Player) -> Result<()> {
    let service = Service::of("retried");
    let socket = tcp(service.address(), SocketFlags::empty())?;
    match player.random.u32(..3) {
        0 => {
            fail(player, &socket)?;
            reach(&socket, direct(ANSWERS))?;
            exchange(&socket, ECHO)?;
            player.ledger.elsewhere(Seen::Closed);
        }
        1 => {
            fail(player, &socket)?;
            fails(connect(&socket, &direct(CLOSED)), &[Errno::CONNREFUSED])?;
            player.ledger.elsewhere(Seen::Refused);
        }
        _ => {
            reach(&socket, direct(ANSWERS))?;
            exchange(&socket, ECHO)?;
            connect_unspec(&socket)?;
            player.ledger.elsewhere(Seen::Disconnected);
            reach(&socket, service.address())?;
            player.ledger.ended(service.name, Seen::Closed);
        }
    }
    Ok(())
}

/// Only the last close of a copied socket ends its flow.
fn copied(player: &mut Player) -> Result<()> {
    let first = dial(Service::of("copied"))?;
    let second = first.try_clone()?;
    drop(first);
    exchange(&second, ECHO)?;
    player.ledger.ended("copied", Seen::Closed);
    Ok(())
}

/// A child still has the socket after this process has closed it. Then the child is killed.
fn inherited(player: &mut Player) -> Result<()> {
    let socket = dial(Service::of("copied"))?;
    exchange(&socket, ECHO)?;
    // The command owns this process's descriptor, and closes it after the child has started.
    let child = itself()?.arg("keep").stdin(socket).spawn().context("start a child")?;
    end(child)?;
    player.ledger.ended("copied", Seen::Closed);
    Ok(())
}

/// A child opens sockets and is killed.
fn killed(player: &mut Player) -> Result<()> {
    let mut command = itself()?;
    command.arg("child").arg("--sockets").arg(player.batch.div_ceil(4).to_string());
    let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().context("start a child")?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("piped")?).read_line(&mut line)?;
    let ledger = serde_json::from_str(&line).with_context(|| format!("the child prints {line:?}"))?;
    end(child)?;
    player.ledger.merge(ledger);
    Ok(())
}

fn itself() -> Result<Command> {
    Ok(Command::new(std::env::current_exe()?))
}

fn end(mut child: Child) -> Result<()> {
    child.kill().context("kill a child")?;
    let status = child.wait()?;
    ensure!(status.code().is_none(), "the child ended before it was killed: {status}");
    Ok(())
}

/// Connects a UDP socket one or more times. Between two connects, it may disconnect the socket or
/// connect it to another address.
fn datagram(player: &mut Player) -> Result<()> {
    let service = Service::of("datagram");
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    for _ in 0..=player.random.u32(..4) {
        reach(&socket, service.address())?;
        player.ledger.datagram(service.name);
        match player.random.u32(..4) {
            0 => connect_unspec(&socket)?,
            1 => reach(&socket, direct(ANSWERS))?,
            _ => ensure!(rustix::io::write(&socket, b"word")? == 4, "only a part of a datagram was sent"),
        }
    }
    Ok(())
}
