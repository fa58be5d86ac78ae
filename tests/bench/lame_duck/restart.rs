//! Restarts and crashes under load: backends are restarted one after the other, first while the
//! agent runs, and then while it is killed from time to time. Afterwards the backends' applications
//! are killed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use stage::{Setup, Stage, eventually};

use super::fleet::{Fleet, add_addresses, addresses};
use super::load::{Load, Query, now_ns};
use super::verdicts::Verdicts;
use crate::pause;
use crate::place::{Link, NEAR, Place, REPORTED, ServiceKey};
use crate::results::Finding;

/// The one-way travel time of a packet.
const DELAY: Duration = Duration::from_micros(500);
const BACKENDS: u8 = 20;
/// The maximum number of backends that are not ready at the same time. A connect examines at most
/// 16 entries. If none of them has a ready backend, it chooses a lame duck.
const OUT: usize = 5;
/// The minimum number of requests of each run.
const REQUESTS: u64 = 50_000;
/// The time between two restarts.
const APART: Duration = Duration::from_millis(300);
/// The number of client threads that open a connection for each request.
const FRESH: u32 = 8;
/// The number of client threads that reuse a connection.
const POOLED: u32 = 16;
/// How long a client pauses after a request.
const PAUSE: Duration = Duration::from_millis(4);
/// The number of applications that are killed.
const CRASHES: usize = 10;
/// The number of connects that may fail after each crash until the backend is ejected. Connects
/// that are in progress when the last of them fails may fail too.
const FAILED_CONNECTS: usize = 5;

pub fn run(stage: &Stage) -> Result<Vec<Finding>> {
    let backends = addresses(BACKENDS);
    let (link, ()) = Link::start(DELAY, || {
        add_addresses(&backends);
        Ok(())
    })?;
    let setup = Setup::new(stage, "restart");
    let key = ServiceKey::make(&setup)?;
    let fleet = Fleet::start(&setup, &link, &key, &backends)?;
    let place =
        Place::of_one_service(stage, "client", &backends, REPORTED, &key.reports(&format!("{NEAR}:9467")));
    place.wait_for("ready", backends.len());
    let verdicts = Verdicts::open(&place.setup, &backends)?;
    let mut scene = Scene { fleet, verdicts, backends: &backends };
    let mut findings = Vec::new();
    for (what, with_agent) in [("restarts", true), ("restarts, agent killed twice", false)] {
        let mut load = Load::start(&place, FRESH, POOLED, PAUSE)?;
        let restarts = scene.restart(&mut load, with_agent)?;
        findings.extend(judged(&format!("{restarts} {what}"), &load.end()));
    }
    let load = Load::start(&place, FRESH, POOLED, PAUSE)?;
    let crashes = scene.crash()?;
    findings.extend(crashed(&crashes, &load.end()));
    Ok(findings)
}

struct Scene<'l> {
    fleet: Fleet<'l>,
    verdicts: Verdicts,
    backends: &'l [SocketAddr],
}

impl Scene<'_> {
    /// Waits until a backend runs and is ready.
    fn until_back(&mut self, number: usize) {
        let Self { fleet, verdicts, .. } = self;
        let is_back = || {
            fleet.start_missing().is_ok()
                && verdicts.lame() < OUT
                && fleet.runs(number).unwrap_or(false)
                && !verdicts.is_lame(number)
        };
        eventually("the backend is ready again", is_back, |is_back| *is_back);
    }

    /// Restarts one backend after the other, until each was restarted and enough requests were
    /// sent. Returns the number of restarts.
    fn restart(&mut self, load: &mut Load, with_agent: bool) -> Result<usize> {
        let mut restarts = 0;
        while restarts < self.backends.len() || load.count() < REQUESTS {
            let began = Instant::now();
            let number = restarts % self.backends.len();
            // Without an agent, no backend becomes ready again, so the next backend is restarted
            // without waiting for its readiness.
            if !self.fleet.is_without_agent() {
                self.until_back(number);
            }
            self.fleet.terminate(number)?;
            restarts += 1;
            pause::until(began + APART);
            // The agent is dead during three restarts. Then a new agent starts, as with a service
            // manager.
            match restarts {
                5 | 15 if !with_agent => self.fleet.kill_agent(),
                8 | 18 if !with_agent => self.fleet.start_agent(),
                _ => {}
            }
        }
        for number in 0..self.backends.len() {
            self.until_back(number);
        }
        Ok(restarts)
    }

    /// Kills applications one after the other. Returns their backends, and when they were killed.
    fn crash(&mut self) -> Result<Vec<(SocketAddr, u64)>> {
        let mut crashes = Vec::new();
        for number in 0..CRASHES {
            self.until_back(number);
            pause::pause(APART);
            crashes.push((self.backends[number], now_ns()));
            self.fleet.crash(number)?;
            // The application is dead for a second, in which nothing else happens.
            pause::pause(Duration::from_secs(1));
        }
        Ok(crashes)
    }
}

/// The number of failures of each kind.
fn kinds<'a>(failed: impl Iterator<Item = &'a Query>) -> String {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for asked in failed {
        *kinds.entry(asked.failure.as_deref().unwrap_or_default()).or_default() += 1;
    }
    kinds.iter().map(|(kind, count)| format!("; {count} {kind}")).collect()
}

fn judged(what: &str, asked: &[Query]) -> Vec<Finding> {
    let of = |pooled: bool| {
        let of: Vec<&Query> = asked.iter().filter(|asked| asked.pooled == pooled).collect();
        let failed = || of.iter().copied().filter(|asked| asked.failure.is_some());
        let who = if pooled { "reused connections" } else { "a connection per request" };
        let measured = format!("{} of {}{}", failed().count(), of.len(), kinds(failed()));
        Finding::judged(format!("{what}: failed requests, {who}"), measured, "0", failed().count() == 0)
    };
    let count = asked.len().to_string();
    let is_enough = asked.len() as u64 >= REQUESTS;
    vec![of(false), of(true), Finding::judged(format!("{what}: requests"), count, ">= 50,000", is_enough)]
}

fn crashed(crashes: &[(SocketAddr, u64)], asked: &[Query]) -> Vec<Finding> {
    let failed: Vec<&Query> = asked.iter().filter(|asked| asked.failure.is_some()).collect();
    let is_connect =
        |asked: &Query| asked.failure.as_ref().is_some_and(|failure| failure.starts_with("connect"));
    // Requests that began in the second in which the application was dead.
    let after = |at_ns: u64| {
        let later =
            failed.iter().filter(move |asked| (at_ns..at_ns + 1_000_000_000).contains(&asked.began_ns));
        later.filter(|asked| is_connect(asked))
    };
    let most = crashes.iter().map(|(_, at_ns)| after(*at_ns).count()).max().unwrap_or(0);
    // Failed connects that began after the allowed number had failed. There must be none.
    let too_late = |at_ns: u64| {
        let mut ends: Vec<u64> = after(at_ns).map(|asked| asked.began_ns + asked.connect_ns).collect();
        ends.sort_unstable();
        let last = ends.get(FAILED_CONNECTS - 1).copied().unwrap_or(u64::MAX);
        after(at_ns).filter(move |asked| asked.began_ns > last).count()
    };
    let too_late: usize = crashes.iter().map(|(_, at_ns)| too_late(*at_ns)).sum();
    let under_way = failed.iter().filter(|asked| !is_connect(asked)).count();
    vec![
        Finding::judged(
            format!("{} crashes: failed connects that began after five had failed", crashes.len()),
            too_late.to_string(),
            "0",
            too_late == 0,
        ),
        Finding::shown(
            format!("{} crashes: largest number of failed connects after one crash", crashes.len()),
            most.to_string(),
        ),
        Finding::shown(
            format!("{} crashes: requests under way that failed", crashes.len()),
            under_way.to_string(),
        ),
        Finding::shown(
            format!("{} crashes: failed requests", crashes.len()),
            format!("{} of {}{}", failed.len(), asked.len(), kinds(failed.iter().copied())),
        ),
    ]
}
