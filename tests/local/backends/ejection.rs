//! Ejection: the cost of a dead backend, the order of trials, and that ejection works without a
//! daemon.

use std::collections::BTreeMap;

use lb_common::abi::Policy;
use lb_view::backend;
use rustix::process::Signal;
use stage::backend::Manner;
use stage::daemon::failure;
use stage::fixture::{Fixture, SERVICE, config};
use stage::{Backend, Probe, SocketId, eventually, kernel, look, replace, window};

/// Starts a daemon. Its service has these lines in the configuration, and these addresses as
/// endpoints.
pub fn start(endpoints: &[&str], lines: &str) -> Fixture {
    let mut fixture = Fixture::without_daemon();
    write(&fixture, endpoints);
    replace(&fixture.setup.folder.join("socklb.toml"), &text(&fixture, lines));
    fixture.start();
    fixture
}

pub fn write(fixture: &Fixture, endpoints: &[&str]) {
    let list: Vec<(&str, &str)> = endpoints.iter().map(|address| (*address, "")).collect();
    fixture.write_endpoints(&list);
}

pub fn text(fixture: &Fixture, lines: &str) -> String {
    config(&fixture.cgroup, r#"{ file = "users.toml" }"#, &format!("subset = {{ size = 20 }}\n{lines}"))
}

pub const THREE: [&str; 3] = ["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"];
/// Addresses without a listener.
pub const DEAD: [&str; 3] = ["127.0.0.1:9001", "127.0.0.1:9002", "127.0.0.1:9003"];
/// An ejection that outlasts a test, so that no trial happens.
const FOR_LONG: &str = "ejection = { base = \"1h\", max = \"1h\" }";
/// A short ejection, so that a trial is due before a test ends. Failures further apart than `max`
/// do not count as consecutive.
pub fn briefly() -> String {
    format!("ejection = {{ base = \"{}\", max = \"{}\" }}", window("200ms"), window("400ms"))
}

/// Dials and closes. Counts answers by name, and errors by number.
pub fn dial(probe: &mut Probe, count: u32) -> BTreeMap<String, u32> {
    dial_and(probe, count, |probe, socket| probe.close(socket))
}

/// As [`dial`], but holds the connections. A policy that compares active flows then never reads an
/// outdated count.
#[track_caller]
pub fn hold(probe: &mut Probe, count: u32) -> BTreeMap<String, u32> {
    dial_and(probe, count, |_, _| {})
}

#[track_caller]
fn dial_and(probe: &mut Probe, count: u32, then: impl Fn(&mut Probe, SocketId)) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    for _ in 0..count {
        let name = match probe.try_dial(SERVICE) {
            Ok(dialled) => {
                then(probe, dialled.socket);
                dialled.name
            }
            Err(errno) => errno.to_string(),
        };
        *counts.entry(name).or_insert(0) += 1;
    }
    counts
}

pub fn failed(counts: &BTreeMap<String, u32>) -> u32 {
    counts.get(&libc::ECONNREFUSED.to_string()).copied().unwrap_or(0)
}

pub fn at(fixture: &Fixture, address: &str) -> backend::BackendStatus {
    fixture.setup.backend(address).expect("the backend has a slot")
}

fn is_ejected(fixture: &Fixture, address: &str) -> bool {
    at(fixture, address).ejection.is_some()
}

/// Each kind of policy has its own programs: the first uses consecutive entries, the second
/// samples, the third scans. `lb-user` has the shares and the status as scripts, for every policy.
#[test]
fn a_dead_backend_costs_five_connects_with_and_without_a_daemon() {
    for (policy, daemon) in
        [(Policy::WeightedRoundRobin, true), (Policy::P2c, false), (Policy::LeastLoaded, false)]
    {
        // If errors counted as load, a dead backend would seem busy and be chosen fewer than
        // five times.
        let lines = format!("policy = \"{}\"\nerror_decay = \"off\"\n{FOR_LONG}", policy.name());
        let mut fixture = start(&[DEAD[0], THREE[0], THREE[1], THREE[2]], &lines);
        if !daemon {
            fixture.stop();
        }
        let counts = hold(&mut fixture.probe(), 400);
        assert_eq!((failed(&counts), counts.len()), (5, 4), "{policy:?}, daemon {daemon}: {counts:?}");
    }
}

#[test]
fn after_an_ejection_no_further_connect_reaches_the_backend() {
    let fixture = start(&[DEAD[0], THREE[0], THREE[1], THREE[2]], FOR_LONG);
    let mut probes: Vec<Probe> = (0..4).map(|_| Probe::start(&fixture.cgroup)).collect();
    for probe in &mut probes {
        probe.start_dialling(SERVICE);
    }
    eventually("the backend is ejected", || is_ejected(&fixture, DEAD[0]), |ejected| *ejected);
    let before = at(&fixture, DEAD[0]).started;
    eventually("other backends get connects", || at(&fixture, THREE[0]).started, |started| *started > 2_000);
    for probe in &mut probes {
        probe.stop_dialling();
    }
    let dead = look(|| at(&fixture, DEAD[0])).now("no process dials any more");
    assert_eq!(dead.started, before, "no connect has chosen the ejected backend");
    assert!(dead.started <= 5 + 4, "{dead:?}");
}

#[test]
fn a_backend_that_resets_at_once_is_ejected_after_four_connects() {
    let fixture = start(&["127.0.0.1:8010", THREE[0], THREE[1], THREE[2]], FOR_LONG);
    let sinkhole = Backend::with_manner("sink", "127.0.0.1:8010", Manner::ResetsAtOnce);
    let counts = dial(&mut fixture.probe(), 200);
    assert_eq!(sinkhole.accepted(), 4, "{counts:?}");
    let cause = || at(&fixture, "127.0.0.1:8010").ejection.map(|ejection| ejection.cause);
    look(cause).becomes(Some("reset".to_owned()));
}

/// No program sees the end of an MPTCP connection, so a trial on it would never have a result.
#[test]
fn mptcp_connects_are_never_trials() {
    if kernel::SKC_TO_MPTCP_SOCK.skips() {
        return;
    }
    let fixture = start(&[DEAD[0], THREE[0], THREE[1]], &briefly());
    let mut probe = fixture.probe();
    eventually("the backend is ejected", || dial(&mut probe, 30), |_| is_ejected(&fixture, DEAD[0]));
    let trial_in_s = || at(&fixture, DEAD[0]).ejection.and_then(|ejection| ejection.trial_in_s);
    eventually("a trial is due", trial_in_s, |seconds| *seconds == Some(0.0));
    let trials = at(&fixture, DEAD[0]).trials;
    for _ in 0..6 {
        let dialled = probe.dial_mptcp(SERVICE);
        probe.close(dialled.socket);
    }
    assert_eq!(
        look(|| at(&fixture, DEAD[0]).trials).now("a trial is counted before its connect returns"),
        trials
    );
    eventually(
        "an ordinary connect is a trial",
        || dial(&mut probe, 1),
        |_| at(&fixture, DEAD[0]).trials > trials,
    );
}

/// The command waits for the daemon's answer. If the daemon hangs, the request stays in the socket:
/// when the daemon continues, it may execute the request, or detect that the client of the socket
/// is gone. Without a daemon, no process can execute the request.
#[test]
fn readmit_ends_an_ejection_or_reports_why_it_may_not_have() {
    let mut fixture = start(&[DEAD[0], THREE[0], THREE[1]], FOR_LONG);
    dial(&mut fixture.probe(), 40);
    assert!(is_ejected(&fixture, DEAD[0]));
    let readmit = |fixture: &Fixture, arguments: &[&str]| {
        let output = fixture.setup.run(&[&["readmit"], arguments].concat());
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned(), failure(&output).1)
    };
    let (code, _, text) = readmit(&fixture, &["users", DEAD[0], "--client", "batch"]);
    assert!(code == Some(1) && text.contains("no client \"batch\" here has a backend"), "{text}");
    assert!(is_ejected(&fixture, DEAD[0]), "a failed attempt changes nothing");
    let expected = format!("client web, service users: {} is readmitted\n", DEAD[0]);
    let again = expected.replace("is readmitted", "was not ejected");
    let (done, nothing) = ((Some(0), expected, String::new()), (Some(1), again, String::new()));
    assert_eq!(readmit(&fixture, &["users", DEAD[0], "--client", "web"]), done);
    assert!(!is_ejected(&fixture, DEAD[0]));
    assert_eq!(readmit(&fixture, &["users", DEAD[0]]), nothing);
    fixture.daemon().signal(Signal::STOP);
    let (code, _, text) = readmit(&fixture, &["users", DEAD[0]]);
    let expected = "does not answer: the daemon may still end the ejection when it continues; `socklb status` \
                    shows the result";
    assert!(code == Some(1) && text.contains(expected), "exit code {code:?}: {text}");
    fixture.daemon().signal(Signal::CONT);
    eventually("the daemon answers again", || fixture.setup.status(), |status| status.daemon.is_some());
    fixture.stop();
    let (code, _, text) = readmit(&fixture, &["users", DEAD[0]]);
    let expected = "the daemon is not running, so the ejection stays";
    assert!(code == Some(1) && text.contains(expected), "exit code {code:?}: {text}");
}
