//! 100,000 datagrams of senders without a key and of eavesdroppers: forged, replayed, truncated,
//! oversized, reordered and reflected ones. They must change nothing, and each must be counted
//! under its own reason.
//!
//! The agent sends nothing during the attack, because its answers would be counted too.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};

use anyhow::{Context, Result, ensure};
use lb_common::net::Be16;
use lb_report::wire::{BYTES, Datagram, Kind, Readiness};
use stage::{Setup, Stage, eventually};

use crate::lame_duck::verdicts::{State, Verdicts};
use crate::place::{Announcer, Place, Report, ServiceKey, metric, reported_each, service_of};
use crate::results::Finding;

const DATAGRAMS: usize = 100_000;
/// The number of datagrams that are sent at a time. The receive buffer of the daemon's socket has
/// room for this number of datagrams.
const AT_A_TIME: usize = 1_000;

/// A datagram: its kind, the counter that must count it, and its bytes.
type Made = (&'static str, &'static str, Vec<u8>);

pub fn run(stage: &Stage) -> Result<Vec<Finding>> {
    let scene = Scene::start(stage)?;
    let datagrams = scene.datagrams()?;
    ensure!(datagrams.len() == DATAGRAMS, "{} datagrams", datagrams.len());
    let before = (scene.seen()?, scene.counts());
    let stranger = UdpSocket::bind("127.0.0.1:0")?;
    let to = scene.queries_from()?;
    let refused = |counts: &BTreeMap<String, u64>| -> u64 {
        counts.iter().filter(|(result, _)| *result != "believed").map(|(_, count)| count).sum()
    };
    let mut expected = refused(&before.1);
    for batch in datagrams.chunks(AT_A_TIME) {
        for (_, _, bytes) in batch {
            stranger.send_to(bytes, to)?;
        }
        expected += batch.len() as u64;
        eventually("all datagrams are counted", || refused(&scene.counts()), |count| *count >= expected);
    }
    let after = (scene.seen()?, scene.counts());
    let mut due: BTreeMap<String, u64> = before.1.clone();
    let mut kinds: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (kind, result, _) in &datagrams {
        *due.entry((*result).to_owned()).or_default() += 1;
        *kinds.entry((result, kind)).or_default() += 1;
    }
    let mut findings: Vec<Finding> = kinds
        .iter()
        .map(|((result, kind), count)| {
            Finding::shown(format!("{kind}, counted as {result}"), count.to_string())
        })
        .collect();
    for (result, due) in &due {
        let (before, after) = (before.1.get(result).unwrap_or(&0), after.1.get(result).unwrap_or(&0));
        let (counted, due) = (after - before, due - before);
        findings.push(Finding::judged(
            format!("counted as {result}"),
            counted.to_string(),
            due.to_string(),
            counted == due,
        ));
    }
    let is_same = before.0 == after.0;
    if !is_same {
        eprintln!("before: {:?}\nafter: {:?}", before.0, after.0);
    }
    let words = if is_same { "none" } else { "some" };
    findings.push(Finding::judged("states, verdicts and bases that have changed", words, "none", is_same));
    Ok(findings)
}

/// The state that must not change.
#[derive(Debug, PartialEq)]
struct Seen {
    verdicts: State,
    states: Vec<(SocketAddr, String, Option<String>)>,
}

struct Scene {
    place: Place,
    key: ServiceKey,
    verdicts: Verdicts,
    announcer: Announcer,
    backends: Vec<SocketAddr>,
    /// The last push of the first backend, which made the backend a lame duck.
    push: Datagram,
}

impl Scene {
    /// Starts a host with four backends. Three have reported, and the first of these is a lame
    /// duck. The fourth has not reported.
    fn start(stage: &Stage) -> Result<Self> {
        let key = ServiceKey::make(&Setup::new(stage, "hostile"))?;
        let backends = (1..=4).map(|number| SocketAddr::from(([127, 0, 0, 1], 8000 + number)));
        let backends: Vec<SocketAddr> = backends.collect();
        let announcer = Announcer::start("127.0.0.1:9465", &key, &backends[..3])?;
        let reports = key.reports("127.0.0.1:0");
        let place = Place::of_one_service(stage, "hostile", &backends, &reported_each("500ms"), &reports);
        place.wait_for("ready", 3);
        let lame = Report { readiness: Readiness::LameDuck, counter: 10 };
        let push = announcer.push(backends[0], lame, || {})?;
        place.wait_for("lame-duck", 1);
        // When the daemon sends the next requests, it has processed the answers to all earlier
        // requests.
        let answered = announcer.answered();
        eventually("requests are sent again", || announcer.answered(), |count| *count >= answered + 6);
        announcer.fall_silent();
        let verdicts = Verdicts::open(&place.setup, &backends)?;
        let scene = Self { place, key, verdicts, announcer, backends, push };
        let believed = || scene.counts().get("believed").copied().unwrap_or(0);
        // The count of accepted reports also includes the push.
        eventually("all answers are processed", believed, |believed| *believed > scene.announcer.answered());
        Ok(scene)
    }

    fn seen(&self) -> Result<Seen> {
        let service = service_of(&self.place.setup.status(), "web")?;
        let backends = service.backends.iter();
        let state = |backend: &lb_view::backend::BackendStatus| {
            let probe = backend.probe.as_ref().map(|probe| probe.state.clone());
            (backend.address, backend.state.clone(), probe)
        };
        Ok(Seen { verdicts: self.verdicts.state(&self.place.setup)?, states: backends.map(state).collect() })
    }

    /// The address from which the daemon sends requests.
    fn queries_from(&self) -> Result<SocketAddr> {
        let log = self.place.daemon().log();
        let lines = log.lines().filter(|line| line.contains("polling agents"));
        let at = lines.filter_map(|line| line.split("address=").nth(1)).next_back();
        Ok(at.context("the log does not show the address of requests")?.trim().parse()?)
    }

    fn counts(&self) -> BTreeMap<String, u64> {
        let page = self.place.setup.metrics();
        let prefix = "socklb_report_datagrams_total{result=\"";
        let result = |line: &str| Some(line.strip_prefix(prefix)?.split_once('"')?.0.to_owned());
        let results = page.lines().filter_map(result);
        results.map(|result| (result.clone(), metric(&page, &format!("{prefix}{result}\"}}")))).collect()
    }

    /// All datagrams, in a random order that is the same in each run.
    fn datagrams(&self) -> Result<Vec<Made>> {
        let mut random = fastrand::Rng::with_seed(14);
        let [lame, ready, _, unheard] = self.backends[..] else {
            anyhow::bail!("there are not four backends")
        };
        let keys = |backend| (self.key.id, self.key.of_backend(backend));
        let (id, key) = keys(lame);
        let (_, other) = keys(ready);
        let (request, answer) = self
            .announcer
            .announced(lame)
            .and_then(|announced| announced.last)
            .context("no request has arrived")?;
        // A forger has two aims: to make the lame duck ready, and to make a ready backend a lame
        // duck.
        let back = Report { readiness: Readiness::Ready, counter: 99 };
        let mut all: Vec<Made> = Vec::with_capacity(DATAGRAMS);
        let mut add = |kind, result, count: usize, make: &mut dyn FnMut() -> Vec<u8>| {
            all.extend((0..count).map(|_| (kind, result, make())));
        };
        add("random MAC", "forged", 10_000, &mut || {
            let mut bytes = back.push(lame, id, key).bytes().to_vec();
            bytes[BYTES - 8..].copy_from_slice(&random.u64(..).to_ne_bytes());
            bytes
        });
        add("a push under another backend's key", "forged", 10_000, &mut || {
            back.push(lame, id, other).bytes().to_vec()
        });
        add("one bit of a push changed", "forged", 10_000, &mut || {
            // A replay is detected before the MAC is checked. The number is higher than that of
            // every accepted report, and the changed bit comes after the number, so only the MAC
            // shows the change.
            let mut bytes = back.push(lame, id, key).bytes().to_vec();
            bytes[random.usize(32..BYTES)] ^= 1 << random.u8(0..8);
            bytes
        });
        add("a push under a key that is not valid", "unknown-key", 10_000, &mut || {
            back.push(lame, id + random.u16(1..100), key).bytes().to_vec()
        });
        add("truncated", "malformed", 10_000, &mut || self.push.bytes()[..random.usize(0..BYTES)].to_vec());
        add("oversized", "malformed", 10_000, &mut || {
            let mut bytes = self.push.bytes().to_vec();
            bytes.resize(random.usize(BYTES + 1..1_400), 0);
            bytes
        });
        add("invalid version, kind, readiness or name", "malformed", 10_000, &mut || {
            let mut wrong = back.push(lame, id, key);
            match random.u8(0..4) {
                0 => wrong.version = 0,
                1 => wrong.kind = 7,
                2 => wrong.readiness = 9,
                _ => wrong.port = Be16::from_host(0),
            }
            wrong.sealed(key).bytes().to_vec()
        });
        add("a push replayed", "replayed", 10_000, &mut || self.push.bytes().to_vec());
        add("an answer replayed", "unasked", 10_000, &mut || answer.bytes().to_vec());
        add("a push that comes late", "replayed", 2_500, &mut || {
            let older = Report { readiness: Readiness::Ready, counter: random.u32(0..10) };
            older.push(lame, id, key).bytes().to_vec()
        });
        add("an answer to another request", "unasked", 2_500, &mut || {
            let mut other = request;
            other.nonce = random.u64(..);
            back.answer(&other, key).bytes().to_vec()
        });
        add("the request sent back", "not-a-report", 2_500, &mut || request.bytes().to_vec());
        add("a push of a backend that receives no requests", "unknown-name", 1_500, &mut || {
            let stranger = SocketAddr::from(([127, 0, 0, 2], random.u16(1..)));
            back.push(stranger, id, self.key.of_backend(stranger)).bytes().to_vec()
        });
        add("a push of a backend that has never answered", "premature", 1_000, &mut || {
            let (id, key) = keys(unheard);
            let push = Report { readiness: Readiness::LameDuck, counter: random.u32(..) };
            push.push(unheard, id, key).bytes().to_vec()
        });
        ensure!(request.kind() == Some(Kind::Request), "the last request has another kind");
        random.shuffle(&mut all);
        Ok(all)
    }
}
