//! Measures cells, at most as many at a time as a daemon may have clients. Cells that connect in
//! turn all run at the same time, because they mostly wait. Cells that connect fifty at a time run
//! one after the other.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use anyhow::{Context, Result};
use stage::Stage;

use super::caller::{Caller, Calls, Made};
use super::cell::{Cell, Fault, Manner};
use super::clients::{self, Clients, MOST_CLIENTS, Wanted};
use super::outcome::{Backends, Figures, IN_TURN, IN_TURN_WITHIN};
use super::slow;
use crate::place::{Link, Listener, Manner as Does, QUEUE, bound};

/// The one-way travel time of a packet.
const DELAY: Duration = Duration::from_millis(2);

const LIVE: u16 = 8100;
const RESETS: u16 = 8200;
const BLACKHOLE: u16 = 8300;
const SLOW: u16 = 8400;
/// No process listens at this port.
const REFUSES: u16 = 9100;

/// The time between the starts of two connects in turn. All connects of a cell take as long as the
/// shortest ejection, so some of them are trials.
const APART: Duration = Duration::from_millis(5);
/// The number of connects of a cell with fifty at a time.
const AT_ONCE: u64 = 6_000;
/// The time within which [`AT_ONCE`] connects must end.
const AT_ONCE_WITHIN: Duration = Duration::from_secs(3);
const FIFTY: u32 = 50;
/// The number of connects per backend for the comparison of shares. With so many connects, chance
/// makes shares differ by far less than a tenth.
const FOR_SHARES: u64 = 1_500;
/// The time within which the connects for the comparison of shares must end.
const SHARES_WITHIN: Duration = Duration::from_secs(10);

/// The listeners of all cells.
struct Listeners {
    _live: Listener,
    _resets: Listener,
    _blackhole: TcpListener,
}

impl Listeners {
    fn start() -> Result<Self> {
        let any = |port| SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
        let blackhole = bound(any(BLACKHOLE), QUEUE)?;
        stage::filter::drop_all(&blackhole).context("drop all packets")?;
        Ok(Self {
            _live: Listener::start(any(LIVE), Does::Greets)?,
            _resets: Listener::start(any(RESETS), Does::Resets)?,
            _blackhole: blackhole,
        })
    }
}

/// Measures all cells, and prints progress.
pub fn play(stage: &Stage, cells: &[Cell]) -> Result<Vec<(Cell, Figures)>> {
    let _here = Listeners::start()?;
    let (_link, _there) = Link::start(DELAY, Listeners::start)?;
    let mut measured = Vec::new();
    for daemon in [true, false] {
        let of: Vec<Cell> = cells.iter().copied().filter(|cell| cell.daemon == daemon).collect();
        for batch in of.chunks(MOST_CLIENTS) {
            measured.extend(play_together(stage, batch, daemon)?);
            eprintln!("{} of {} cells measured", measured.len(), cells.len());
        }
    }
    // Restores the requested order.
    let place = |cell: &Cell| cells.iter().position(|other| other == cell);
    measured.sort_by_key(|(cell, _)| place(cell));
    Ok(measured)
}

/// The addresses of a cell's backends, which no other cell uses.
fn backends(number: usize, cell: Cell) -> Result<Backends> {
    let number = u8::try_from(number)?;
    let port = match cell.fault {
        Fault::Refuse => REFUSES,
        Fault::Blackhole => BLACKHOLE,
        Fault::Reset => RESETS,
        Fault::SlowAccept => SLOW,
    };
    let network = match cell.manner {
        Manner::InTurn => [127, number + 1, 0],
        Manner::Fifty => [10, 78, number],
    };
    let at = |host: usize| -> Result<SocketAddr> {
        let port = if host < cell.fleet.dead { port } else { LIVE };
        let [first, second, third] = network;
        Ok(([first, second, third, u8::try_from(host + 1)?], port).into())
    };
    let mut dead = (0..cell.fleet.of).map(at).collect::<Result<Vec<_>>>()?;
    let live = dead.split_off(cell.fleet.dead);
    Ok(Backends { dead, live })
}

/// Measures cells that either all have a running daemon, or all have a stopped one.
fn play_together(stage: &Stage, cells: &[Cell], daemon: bool) -> Result<Vec<(Cell, Figures)>> {
    let backends =
        cells.iter().enumerate().map(|(number, cell)| backends(number, *cell)).collect::<Result<Vec<_>>>()?;
    let both = || cells.iter().zip(&backends);
    let accept_slowly = both().filter(|(cell, _)| cell.fault == Fault::SlowAccept);
    let accept_slowly: Vec<SocketAddr> =
        accept_slowly.flat_map(|(_, backends)| backends.dead.iter().copied()).collect();
    let _slow = slow::start(&accept_slowly)?;
    let wanted = both().map(|(cell, backends)| Wanted {
        policy: cell.policy,
        ejects: cell.ejects,
        backends: backends.dead.iter().chain(&backends.live).copied().collect(),
    });
    let clients = Clients::start(stage, "failover", &wanted.collect::<Vec<_>>(), daemon)?;
    let mut callers = clients.callers()?;
    let made = call(cells, &mut callers)?;
    let first = clients.status();
    let mut figures = Vec::new();
    for (number, (cell, backends)) in both().enumerate() {
        figures.push(Figures::of(*cell, backends, &made[number], &clients::of(&first, number)?)?);
    }
    let in_turn = (0..cells.len()).filter(|number| cells[*number].manner == Manner::InTurn);
    let judged: Vec<usize> =
        in_turn.filter(|number| shows_shares(cells[*number], &figures[*number])).collect();
    for &number in &judged {
        let connects = FOR_SHARES * u64::try_from(cells[number].fleet.of)?;
        let (service, apart, within) = (clients::address(number), Duration::ZERO, SHARES_WITHIN);
        callers[number].begin(Calls::InTurn { service, connects, apart, within });
    }
    for &number in &judged {
        callers[number].made();
    }
    let second = clients.status();
    for (number, (cell, backends)) in both().enumerate() {
        let (first, second) = (clients::of(&first, number)?, clients::of(&second, number)?);
        let before = (cell.manner == Manner::InTurn).then_some(&first);
        figures[number].compare_shares(&backends.live, before, &second)?;
    }
    Ok(cells.iter().copied().zip(figures).collect())
}

/// Makes the client of every cell connect as the cell states.
fn call(cells: &[Cell], callers: &mut [Caller]) -> Result<Vec<Made>> {
    let (in_turn, fifty): (Vec<usize>, Vec<usize>) =
        (0..cells.len()).partition(|number| cells[*number].manner == Manner::InTurn);
    let mut made = vec![Made::default(); cells.len()];
    for &number in &in_turn {
        let (service, apart, within) = (clients::address(number), APART, IN_TURN_WITHIN);
        callers[number].begin(Calls::InTurn { service, connects: IN_TURN, apart, within });
    }
    for &number in &in_turn {
        made[number] = callers[number].made();
    }
    for &number in &fifty {
        let (service, threads, within) = (clients::address(number), FIFTY, AT_ONCE_WITHIN);
        callers[number].begin(Calls::AtOnce { service, connects: AT_ONCE, threads, within });
        made[number] = callers[number].made();
    }
    Ok(made)
}

/// Returns whether a cell can make enough connects to compare shares. For this, some connects must
/// succeed, and none may wait for its timeout.
fn shows_shares(cell: Cell, figures: &Figures) -> bool {
    let waits = cell.fault.is_silent() && figures.ejected < cell.fleet.dead;
    cell.fleet.dead < cell.fleet.of && !waits
}
