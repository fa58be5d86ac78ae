//! How soon a backend that was dead for a while has its whole share again, with ten connects per
//! second. There are two outages: one is shorter than the first ejection, and the other one is so
//! long that trials fail.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::Result;
use lb_common::abi::Policy;
use lb_view::backend::BackendStatus;
use serde::Serialize;
use stage::Stage;

use super::caller::{Caller, Calls, Made};
use super::cell::daemon_name;
use super::clients::{self, Clients, MOST_CLIENTS, Wanted};
use super::outcome::backend;
use crate::pause::pause;
use crate::place::{Listener, Manner};
use crate::results::table;

/// The port of the live backends.
const LIVE: u16 = 8100;
/// The port of the backends that die.
const DIES: u16 = 8800;

/// The time between two connects: there are ten per second.
const APART: Duration = Duration::from_millis(100);
/// How long all backends work before the outage.
const BEFORE: Duration = Duration::from_secs(2);
/// The shortest ejection.
const BASE: Duration = Duration::from_secs(5);
/// How long the backend is dead: less than `BASE` in the first case, and long enough for two failed
/// trials in the second.
const OUTAGES: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(20)];
/// How late a connect may be on a busy machine.
const LATE: Duration = Duration::from_millis(300);
/// The number of connects after the recovery for the comparison of shares.
const FOR_SHARES: u64 = 7_500;
/// The largest allowed difference from the share, divided by the share.
const MOST_SHARE_OFF: f64 = 0.1;

/// The results of one client in one outage.
#[derive(Clone, Debug, Serialize)]
pub struct Seen {
    policy: &'static str,
    daemon: &'static str,
    outage_s: f64,
    failed: usize,
    trials: u64,
    /// Seconds from the backend's recovery to the first connect that chooses it.
    back_after_s: Option<f64>,
    /// The largest allowed value of `back_after_s`. It is `None` after a long outage of a backend
    /// that is not ejected: in this case recent errors add to the backend's load, so that few
    /// connects choose the backend until the errors have expired (`error_decay`).
    at_most_s: Option<f64>,
    /// The difference between the backend's part of the connects after its recovery and its share,
    /// divided by the share.
    share_off: f64,
}

impl Seen {
    /// Returns the requirement that is missed, if any.
    pub fn missed(&self) -> Option<String> {
        let Self { policy, daemon, outage_s, back_after_s, share_off, .. } = self;
        let at_most_s = self.at_most_s?;
        let is_late = back_after_s.is_none_or(|after| after > at_most_s);
        (is_late || *share_off > MOST_SHARE_OFF).then(|| {
            let back = after(*back_after_s);
            format!(
                "{policy}, daemon {daemon}, outage of {outage_s} s: back after {back}, at most {at_most_s:.2} s allowed; \
                 share {:.0} % off",
                share_off * 100.0
            )
        })
    }
}

/// A client of which the first backend dies.
struct Dialled<'p> {
    clients: &'p Clients,
    /// The client's number among those of its daemon.
    number: usize,
    dying: SocketAddr,
    caller: Caller,
}

impl Dialled<'_> {
    /// The backend that dies, as `socklb status` shows it.
    fn backend(&self) -> Result<BackendStatus> {
        let service = clients::of(&self.clients.status(), self.number)?;
        backend(&service, self.dying).cloned()
    }
}

/// Measures both outages, with and without a daemon, for all policies at the same time.
pub fn run(stage: &Stage, policies: &[Policy]) -> Result<Vec<Seen>> {
    let _live = Listener::start((Ipv4Addr::UNSPECIFIED, LIVE).into(), Manner::Greets)?;
    let mut seen = Vec::new();
    for outage in OUTAGES {
        seen.extend(outage_of(stage, policies, outage)?);
        eprintln!("an outage of {outage:?}: done");
    }
    Ok(seen)
}

fn outage_of(stage: &Stage, policies: &[Policy], outage: Duration) -> Result<Vec<Seen>> {
    let at = |network: usize, host, port| -> Result<SocketAddr> {
        Ok(([127, u8::try_from(network + 1)?, 0, host], port).into())
    };
    let mut halves = Vec::new();
    for (half, daemon) in [true, false].into_iter().enumerate() {
        let wanted = |(number, policy): (usize, &Policy)| {
            let network = half * MOST_CLIENTS + number;
            let live = (2..=5).map(|host| at(network, host, LIVE));
            let backends = std::iter::once(at(network, 1, DIES)).chain(live).collect::<Result<_>>()?;
            Ok(Wanted { policy: *policy, ejects: true, backends })
        };
        let wanted = policies.iter().enumerate().map(wanted).collect::<Result<Vec<_>>>()?;
        let dying: Vec<SocketAddr> = wanted.iter().map(|wanted| wanted.backends[0]).collect();
        halves.push((Clients::start(stage, daemon_name(daemon), &wanted, daemon)?, dying));
    }
    let mut dialled = Vec::new();
    for (clients, dying) in &halves {
        for (number, (caller, dying)) in clients.callers()?.into_iter().zip(dying).enumerate() {
            dialled.push(Dialled { clients, number, dying: *dying, caller });
        }
    }
    let start = |dialled: &Dialled<'_>| Listener::start(dialled.dying, Manner::Greets);
    let before = dialled.iter().map(start).collect::<Result<Vec<_>>>()?;
    // If a backend fails its trials, it is ejected for at most twice as long as the outage has
    // lasted.
    let within = BEFORE + outage + (outage * 3 / 2).max(BASE) + Duration::from_secs(6);
    for Dialled { number, caller, .. } in &mut dialled {
        let service = clients::address(*number);
        caller.begin(Calls::InTurn { service, connects: u64::MAX, apart: APART, within });
    }
    pause(BEFORE);
    drop(before);
    pause(outage);
    let limits = dialled.iter().map(|dialled| limit(dialled, outage)).collect::<Result<Vec<_>>>()?;
    let again = Instant::now();
    let after = dialled.iter().map(start).collect::<Result<Vec<_>>>()?;
    let made: Vec<Made> = dialled.iter_mut().map(|dialled| dialled.caller.made()).collect();
    let first: Vec<Option<Instant>> = after.iter().map(|listener| listener.accepted().first).collect();
    let shares = shares(&mut dialled)?;
    let mut seen = Vec::new();
    for (number, dialled) in dialled.iter().enumerate() {
        let is_daemon = number < policies.len();
        seen.push(Seen {
            policy: policies[dialled.number].name(),
            daemon: daemon_name(is_daemon),
            outage_s: outage.as_secs_f64(),
            failed: made[number].failed.len(),
            trials: dialled.backend()?.trials,
            back_after_s: first[number].map(|first| (first - again).as_secs_f64()),
            at_most_s: limits[number].map(|limit| limit.as_secs_f64()),
            share_off: shares[number],
        });
    }
    Ok(seen)
}

/// The largest allowed time until the backend is back. After a short outage, this is the shortest
/// ejection and a second. After a long outage, it is the remaining time of the ejection, as
/// `status` shows it when the backend recovers. No trial is under way at that time, because trials
/// are refused at once.
fn limit(dialled: &Dialled<'_>, outage: Duration) -> Result<Option<Duration>> {
    if outage < BASE {
        return Ok(Some(BASE + Duration::from_secs(1)));
    }
    let Some(ejection) = dialled.backend()?.ejection else { return Ok(None) };
    let left_s = ejection.trial_in_s.unwrap_or(0.0);
    Ok(Some(Duration::from_secs_f64(left_s) + APART + LATE))
}

/// For each backend, the difference between its part of many connects and its share, divided by the
/// share.
#[expect(clippy::cast_precision_loss, reason = "counts of connects")]
fn shares(dialled: &mut [Dialled<'_>]) -> Result<Vec<f64>> {
    let count = |dialled: &Dialled<'_>| Ok(dialled.backend()?.established);
    let before = dialled.iter().map(count).collect::<Result<Vec<_>>>()?;
    for Dialled { number, caller, .. } in dialled.iter_mut() {
        let (service, within) = (clients::address(*number), Duration::from_secs(30));
        caller.begin(Calls::InTurn { service, connects: FOR_SHARES, apart: Duration::ZERO, within });
    }
    let made: Vec<Made> = dialled.iter_mut().map(|dialled| dialled.caller.made()).collect();
    let after = dialled.iter().map(count).collect::<Result<Vec<_>>>()?;
    let off = made.iter().zip(before.iter().zip(&after)).map(|(made, (before, after))| {
        let share = (after - before) as f64 / made.connects as f64;
        (share * 5.0 - 1.0).abs()
    });
    Ok(off.collect())
}

fn after(time_s: Option<f64>) -> String {
    time_s.map_or("never".to_owned(), |time_s| format!("{time_s:.2} s"))
}

/// Formats a table.
pub fn print(seen: &[Seen]) -> String {
    let titles = ["outage", "policy", "daemon", "failed", "trials", "back after", "at most", "share off"];
    let row = |seen: &Seen| {
        vec![
            format!("{} s", seen.outage_s),
            seen.policy.to_owned(),
            seen.daemon.to_owned(),
            seen.failed.to_string(),
            seen.trials.to_string(),
            after(seen.back_after_s),
            seen.at_most_s.map_or("-".to_owned(), |most| format!("{most:.2} s")),
            format!("{:.1} %", seen.share_off * 100.0),
        ]
    };
    table(&titles, &seen.iter().map(row).collect::<Vec<_>>())
}
