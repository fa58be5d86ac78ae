//! Ejection: what a dead backend costs, who is tried when, and that none of it needs a daemon.

use std::collections::BTreeMap;
use std::time::Duration;

use aya::maps::{Array, MapData};
use lb_common::abi::{self, EjectionRules, NextTrial, Policy, Service, map};
use lb_view::backend;
use lb_view::status::StatusDocument;
use rustix::process::Signal;
use stage::backend::Manner;
use stage::chance::likely;
use stage::daemon::failure;
use stage::fixture::{Fixture, SERVICE, config, with_active_accounting};
use stage::maps::{Raw, array};
use stage::{Backend, Probe, SocketId, eventually, kernel, look, replace, window};

/// A daemon whose service has these lines, before endpoints at these addresses.
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
/// Nobody listens there.
pub const DEAD: [&str; 3] = ["127.0.0.1:9001", "127.0.0.1:9002", "127.0.0.1:9003"];
/// Nobody is tried again while a test runs.
const FOR_LONG: &str = "ejection = { base = \"1h\", max = \"1h\" }";
/// A trial is due before a test is over. Failures further apart than `max` do not count as consecutive.
pub fn briefly() -> String {
    format!("ejection = {{ base = \"{}\", max = \"{}\" }}", window("200ms"), window("400ms"))
}

/// Who answered how often; the errors by their numbers.
pub fn dial(probe: &mut Probe, count: u32) -> BTreeMap<String, u32> {
    dial_and(probe, count, |probe, socket| probe.close(socket))
}

/// As [`dial`], and keeps the connections: a policy that looks at active flows then samples no end that is not counted yet.
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
    fixture.setup.backend(address).expect("the backend")
}

/// The rows of the services, as the maps of the client hold them.
fn services_of(fixture: &Fixture) -> Array<MapData, Raw<Service>> {
    array(&fixture.setup.map("web", map::SERVICES))
}

/// As [`services_of`], of the backends.
fn backends_of(fixture: &Fixture) -> Array<MapData, Raw<abi::Backend>> {
    array(&fixture.setup.map("web", map::BACKENDS))
}

fn is_ejected(fixture: &Fixture, address: &str) -> bool {
    at(fixture, address).ejection.is_some()
}

#[test]
fn a_dead_backend_costs_five_connects_whether_a_daemon_runs_or_not() {
    for policy in Policy::ALL {
        for daemon in [true, false] {
            // A start takes seconds in a guest, and the daemon is the same everywhere.
            if stage::in_a_guest() && daemon && policy != Policy::ALL[0] {
                continue;
            }
            // Errors that count as load would let a dead backend seem busy, and be chosen less often than five times.
            let lines = format!("policy = \"{}\"\nerror_decay = \"off\"\n{FOR_LONG}", policy.name());
            let mut fixture = start(&[DEAD[0], THREE[0], THREE[1], THREE[2]], &lines);
            if !daemon {
                fixture.stop();
            }
            let mut probe = fixture.probe();
            let counts = hold(&mut probe, 400);
            assert_eq!(failed(&counts), 5, "{policy:?}, daemon {daemon}: {counts:?}");
            // What it does not get goes to all others.
            // Cursors start at a hash of the host's name, which is the same on every stage.
            let likely = match policy {
                Policy::Random | Policy::P2c => likely(395, 1.0 / 3.0),
                Policy::LeastLoaded => 131..=132,
                Policy::RoundRobin | Policy::WeightedRoundRobin => 105..=157,
            };
            for name in ["b1", "b2", "b3"] {
                assert!(likely.contains(&counts[name]), "{policy:?}, daemon {daemon}: {counts:?}");
            }
            let dead = at(&fixture, DEAD[0]);
            let ejection = dead.ejection.clone().expect("it is ejected");
            assert_eq!((dead.state.as_str(), dead.usable), ("ejected", false));
            assert_eq!((ejection.failures, ejection.cause.as_str(), ejection.times), (5, "refused", 1));
            assert!(ejection.trial_in_s.is_some_and(|seconds| (3000.0..4000.0).contains(&seconds)));
            assert_eq!((dead.ejections, dead.trials, dead.readmissions, dead.withheld), (1, 0, 0, 0));
        }
    }
}

#[test]
fn connects_that_are_under_way_fail_and_no_more() {
    let fixture = start(&[DEAD[0], THREE[0], THREE[1], THREE[2]], FOR_LONG);
    let mut probes: Vec<Probe> = (0..4).map(|_| Probe::start(&fixture.cgroup)).collect();
    for probe in &mut probes {
        probe.start_dialling(SERVICE);
    }
    eventually("it is ejected", || is_ejected(&fixture, DEAD[0]), |ejected| *ejected);
    let before = at(&fixture, DEAD[0]).started;
    eventually("others go on", || at(&fixture, THREE[0]).started, |started| *started > 2_000);
    for probe in &mut probes {
        probe.stop_dialling();
    }
    let dead = look(|| at(&fixture, DEAD[0])).now("no process dials any more");
    assert_eq!(dead.started, before, "no connect was sent there since");
    assert!(dead.started <= 5 + 4, "{dead:?}");
}

#[test]
fn who_accepts_and_resets_at_once_is_ejected_after_four_connects() {
    let fixture = start(&["127.0.0.1:8010", THREE[0], THREE[1], THREE[2]], FOR_LONG);
    let sinkhole = Backend::with_manner("sink", "127.0.0.1:8010", Manner::ResetsAtOnce);
    let counts = dial(&mut fixture.probe(), 200);
    assert_eq!(sinkhole.accepted(), 4, "{counts:?}");
    let cause = || at(&fixture, "127.0.0.1:8010").ejection.map(|ejection| ejection.cause);
    look(cause).becomes(Some("reset".to_owned()));
}

#[test]
fn who_is_well_again_is_found_by_one_trial_and_has_its_share_at_once() {
    for daemon in [true, false] {
        // Failures that are further apart than the longest ejection are no run, and others would follow.
        let lines = format!("ejection = {{ base = \"{}\", max = \"{}\" }}", window("200ms"), window("4s"));
        let mut fixture = start(&[DEAD[0], THREE[0], THREE[1]], &lines);
        if !daemon {
            fixture.stop();
        }
        let mut probe = fixture.probe();
        eventually("it is ejected", || dial(&mut probe, 30), |_| is_ejected(&fixture, DEAD[0]));
        let back = Backend::start("back", DEAD[0]);
        let is_back = |fixture: &Fixture| !is_ejected(fixture, DEAD[0]);
        eventually("a trial takes it back", || dial(&mut probe, 1), |_| is_back(&fixture));
        let counts = dial(&mut probe, 300);
        assert!(["b1", "b2", "back"].iter().all(|name| counts[*name].abs_diff(100) <= 2), "{counts:?}");
        let backend = look(|| at(&fixture, DEAD[0])).has(|backend| backend.readmissions, 1);
        // Each connect that it failed was one of the first five or a trial.
        let trials_failed = backend.trials - 1;
        assert_eq!(backend.endings["refused"], 5 + trials_failed, "{backend:?}");
        assert_eq!(backend.ejections, 1 + trials_failed);
        look(|| fixture.setup.service()).has(|service| service.outcomes["trial"], backend.trials);
        drop(back);
    }
}

/// One of three is less than half, but it serves: that is no panic, in which the dead ones would be chosen again.
#[test]
fn two_of_three_that_are_dead_cost_five_connects_each_while_the_daemon_looks_on() {
    let fixture = start(&[DEAD[0], DEAD[1], THREE[0]], "ejection = { base = \"1h\", max = \"1h\" }");
    let mut probe = fixture.probe();
    assert_eq!(failed(&dial(&mut probe, 100)), 10);
    let told = || (dial(&mut probe, 3), fixture.daemon().log().matches("backend health changed").count());
    let (counts, _) = eventually("the daemon has seen it", told, |(_, told)| *told == 2);
    assert_eq!(failed(&counts), 0);
    assert_eq!(failed(&dial(&mut probe, 100)), 0);
    assert!(!look(|| fixture.setup.service().is_panic).now("one serves"));
}

/// All members die while no daemon runs: each costs as many connects as eject it, the last one as well.
#[test]
fn without_a_daemon_a_lame_duck_of_the_list_serves_where_no_member_does() {
    for policy in ["weighted-round-robin", "p2c", "least-loaded"] {
        let mut fixture = Fixture::without_daemon();
        let list = [(DEAD[0], ""), (DEAD[1], ""), (THREE[0], "state = \"lame-duck\"")];
        fixture.write_endpoints(&list);
        let lines = format!("policy = \"{policy}\"\n{FOR_LONG}");
        replace(&fixture.setup.folder.join("socklb.toml"), &text(&fixture, &lines));
        fixture.start();
        fixture.stop();
        let lame_duck = at(&fixture, THREE[0]);
        assert_eq!((lame_duck.state.as_str(), lame_duck.share_wanted), ("lame-duck", 0.0));
        let counts = dial(&mut fixture.probe(), 100);
        assert_eq!((failed(&counts), counts["b1"]), (10, 90), "{policy}: {counts:?}");
        let ejections = || [DEAD[0], DEAD[1]].map(|address| at(&fixture, address).ejections);
        look(ejections).becomes([1, 1]);
    }
}

#[test]
fn of_more_than_can_be_listed_the_dead_are_ejected_and_found_again() {
    let mut fixture = Fixture::without_daemon();
    let _many = Backend::start("many", "0.0.0.0:8100");
    let addresses: Vec<String> = (0..300)
        .map(|n| format!("127.0.{}.{}:{}", 1 + n / 200, 1 + n % 200, if n % 30 == 0 { 9100 } else { 8100 }))
        .collect();
    let list: Vec<(&str, &str)> = addresses.iter().map(|address| (address.as_str(), "")).collect();
    fixture.write_endpoints(&list);
    let lines =
        "policy = \"random\"\nsubset = \"all\"\nejection = { failures = 1, base = \"1s\", max = \"1s\" }";
    replace(
        &fixture.setup.folder.join("socklb.toml"),
        &config(&fixture.cgroup, r#"{ file = "users.toml" }"#, lines),
    );
    fixture.start();
    fixture.stop();
    let mut probe = fixture.probe();
    let dead = || {
        let backends = fixture.setup.backends("web", "users");
        backends.into_iter().filter(|backend| backend.address.port() == 9100).collect::<Vec<_>>()
    };
    eventually(
        "all ten are ejected",
        || {
            dial(&mut probe, 500);
            dead().iter().filter(|backend| backend.ejections > 0).count()
        },
        |ejected| *ejected == 10,
    );
    let _back = Backend::start("back", "0.0.0.0:9100");
    eventually(
        "all ten are taken back",
        || {
            dial(&mut probe, 500);
            dead().iter().filter(|backend| backend.ejection.is_some()).count()
        },
        |ejected| *ejected == 0,
    );
}

#[test]
fn what_the_programs_found_outlives_lists_restarts_and_kills() {
    let mut fixture = start(&[DEAD[0], THREE[0], THREE[1]], FOR_LONG);
    let mut probe = fixture.probe();
    assert_eq!(failed(&dial(&mut probe, 60)), 5);
    // Other endpoints come, weights change, and then the policy.
    write(&fixture, &[DEAD[0], THREE[0], THREE[1], THREE[2]]);
    eventually("the list is in force", || fixture.setup.backend(THREE[2]), Option::is_some);
    fixture.write_endpoints(&[(DEAD[0], "weight = 3"), (THREE[0], "weight = 2"), (THREE[1], "")]);
    eventually("the weights are in force", || at(&fixture, DEAD[0]).weight, |weight| *weight == 3);
    let policy = format!("policy = \"random\"\n{FOR_LONG}");
    replace(&fixture.setup.folder.join("socklb.toml"), &text(&fixture, &policy));
    let rules = || services_of(&fixture).get(&0, 0).expect("the service").0.rules;
    eventually("the kernel has the policy", rules, |rules| rules.policy == Policy::Random as u8);
    assert!(is_ejected(&fixture, DEAD[0]));
    fixture.stop();
    fixture.start();
    assert!(is_ejected(&fixture, DEAD[0]));
    fixture.daemon.take().expect("a daemon runs").kill();
    fixture.start();
    assert!(is_ejected(&fixture, DEAD[0]));
    assert_eq!(failed(&dial(&mut probe, 60)), 0);
    // No daemon logs as a change what one before it has logged.
    look(|| fixture.daemon().log().matches("backend health changed").count())
        .stays(1, Duration::from_secs(1));
}

/// A daemon that was killed while it turned ejection off has stored the rules, and has taken nobody back yet.
#[test]
fn who_is_still_ejected_where_ejection_is_off_comes_back() {
    let mut fixture = start(&[DEAD[0], THREE[0], THREE[1]], FOR_LONG);
    assert_eq!(failed(&dial(&mut fixture.probe(), 60)), 5);
    fixture.stop();
    let mut services = services_of(&fixture);
    let mut row = services.get(&0, 0).expect("the service").0;
    row.ejection = EjectionRules::default();
    services.set(0, Raw(row), 0).expect("store the rules");
    replace(&fixture.setup.folder.join("socklb.toml"), &text(&fixture, "ejection = \"off\""));
    fixture.start();
    eventually("it is back", || is_ejected(&fixture, DEAD[0]), |ejected| !ejected);
}

/// What is named for the next trial may have left since, and its slot may be another service's.
#[test]
fn a_trial_never_goes_to_a_backend_of_another_service() {
    let mut fixture = Fixture::without_daemon();
    let others = format!(
        "{}\n[[service]]\nname = \"orders\"\naddress = \"10.96.0.11:80\"\nbackends = {{ static = [\"{}\", \"{}\"] }}\n{}\n",
        text(&fixture, ""),
        DEAD[1],
        THREE[1],
        briefly(),
    );
    write(&fixture, &[DEAD[0], THREE[0]]);
    replace(&fixture.setup.folder.join("socklb.toml"), &others);
    fixture.start();
    let mut probe = fixture.probe();
    let orders = (0..20).filter(|_| probe.try_dial("10.96.0.11:80").is_err()).count();
    assert!(orders >= 5, "{orders}");
    fixture.stop();
    let mut services = services_of(&fixture);
    let of = |name: &str| {
        (0..2).find(|index| services.get(index, 0).expect("a row").0.name.starts_with(name.as_bytes()))
    };
    let (users, orders) = (of("users").expect("users"), of("orders").expect("orders"));
    let backends = backends_of(&fixture);
    let ejected = (0..4).find(|slot| backends.get(slot, 0).expect("a row").0.state.ejected != 0);
    let slot = ejected.expect("an ejected backend");
    assert_eq!(u32::from(backends.get(&slot, 0).expect("its row").0.endpoint.service), orders);
    let mut row = services.get(&users, 0).expect("the service").0;
    row.next_trial = NextTrial::of(slot, 0, 0);
    services.set(users, Raw(row), 0).expect("store the next trial");
    // Its backend listens meanwhile: a connect that is sent there succeeds.
    let _stranger = Backend::start("stranger", DEAD[1]);
    let counts = dial(&mut probe, 20);
    assert_eq!(counts.get("stranger"), None, "{counts:?}");
    assert_eq!(failed(&counts), 5, "{counts:?}");
}

/// The end of such a connection is not seen, so a trial by it would never be decided.
#[test]
fn a_connect_of_an_mptcp_socket_is_never_a_trial() {
    if kernel::SKC_TO_MPTCP_SOCK.skips() {
        return;
    }
    let fixture = start(&[DEAD[0], THREE[0], THREE[1]], &briefly());
    let mut probe = fixture.probe();
    eventually("it is ejected", || dial(&mut probe, 30), |_| is_ejected(&fixture, DEAD[0]));
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
    eventually("a connect of TCP is", || dial(&mut probe, 1), |_| at(&fixture, DEAD[0]).trials > trials);
}

#[test]
fn with_active_accounting_nobody_is_ejected_unless_that_is_asked_for() {
    for (lines, expected) in [("", 20), (FOR_LONG, 20)] {
        let mut fixture = Fixture::without_daemon();
        write(&fixture, &[DEAD[0], THREE[0], THREE[1]]);
        let text = with_active_accounting(&text(&fixture, lines));
        replace(&fixture.setup.folder.join("socklb.toml"), &text);
        fixture.start();
        // A blocking connect that fails has cleared its error: it is no failure that can be told.
        assert_eq!(failed(&dial(&mut fixture.probe(), 60)), expected, "{lines}");
    }
}

/// Of ten endpoints a subset of four: one that stays ejected is replaced, keeps its trials, and comes back to its place.
#[test]
fn a_member_that_stays_ejected_is_replaced_and_tried_on() {
    let mut fixture = Fixture::without_daemon();
    let _many = Backend::start("many", "0.0.0.0:8100");
    let addresses: Vec<String> = (1..=10).map(|n| format!("127.0.1.{n}:8100")).collect();
    let list = |dead: &str| {
        let port = |address: &str| address.replace(":8100", if address == dead { ":9100" } else { ":8100" });
        addresses.iter().map(|address| port(address)).collect::<Vec<_>>()
    };
    let time = window("500ms");
    let lines = format!(
        "subset = {{ size = 4 }}\nejection = {{ failures = 2, base = \"{time}\", max = \"{time}\" }}\n\
         health = {{ replace_after = \"1s\" }}"
    );
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, &lines)
        .replace("[[client]]\n", "[[client]]\nindex = 1\ncount = 3\n");
    replace(&fixture.setup.folder.join("socklb.toml"), &text);
    let all = list("");
    write(&fixture, &all.iter().map(String::as_str).collect::<Vec<_>>());
    fixture.start();
    let setup = fixture.setup.clone();
    let members = || {
        let backends = setup.backends("web", "users");
        let members = backends.into_iter().filter(|backend| backend.share_wanted > 0.0);
        members.map(|backend| backend.address.to_string()).collect::<Vec<_>>()
    };
    let before = members();
    assert_eq!(before.len(), 4);
    // Its address stays the same, and nobody listens there any more: another list with another port.
    let lost = before[0].replace(":8100", ":9100");
    let with_dead = list(&before[0]);
    write(&fixture, &with_dead.iter().map(String::as_str).collect::<Vec<_>>());
    eventually("the list is in force", || members().contains(&lost), |there| *there);
    let mut probe = fixture.probe();
    eventually(
        "another one stands in",
        || {
            dial(&mut probe, 8);
            (members(), at(&fixture, &lost).state)
        },
        |(members, _)| members.len() == 4 && !members.contains(&lost),
    );
    let others: Vec<&String> = before.iter().filter(|address| **address != before[0]).collect();
    assert!(others.iter().all(|address| members().contains(address)), "one loss is one change");
    let faults = || fixture.setup.faults().join("\n");
    eventually("it is told", faults, |faults| faults.contains("ejected: ") && faults.contains(&lost));
    let explained = String::from_utf8_lossy(&fixture.setup.run(&["explain", "users"]).stdout).into_owned();
    // A terminal's width may have broken its lines.
    let explained = explained.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        explained
            .contains(&format!("replaced, and tried until they are well: {lost} (ejected, says the kernel)"))
    );
    assert!(explained.contains("the next of the order in their place: 127."), "{explained}");
    // It is in no table, and is tried.
    let trials = at(&fixture, &lost).trials;
    eventually(
        "it is tried",
        || {
            dial(&mut probe, 2);
            at(&fixture, &lost).trials
        },
        |now| *now > trials,
    );
    // The same without a daemon, and found again.
    fixture.daemon.take().expect("a daemon runs").kill();
    let _back = Backend::start("back", &lost);
    eventually("it is found again", || dial(&mut probe, 1), |counts| counts.contains_key("back"));
    assert_eq!(at(&fixture, &lost).membership, "replaced");
    // A daemon that starts goes on from there.
    fixture.start();
    assert!(!members().contains(&lost), "{:?}", members());
}

/// `socklb readmit`: the backend is taken back at once and with a clean record, here or everywhere; what cannot be done is
/// said, and changes nothing.
#[test]
fn an_ejection_is_lifted_before_its_time() {
    let mut fixture = start(&[DEAD[0], THREE[0], THREE[1]], FOR_LONG);
    let mut probe = fixture.probe();
    dial(&mut probe, 40);
    assert!(is_ejected(&fixture, DEAD[0]));
    let readmit = |arguments: &[&str]| {
        let mut all = vec!["readmit"];
        all.extend(arguments);
        let output = fixture.setup.run(&all);
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        (output.status.code(), text)
    };
    for (arguments, expected) in [
        (&["users", THREE[0]][..], "client web, service users: 127.0.0.1:8001 was not ejected"),
        (&["users", "127.0.0.1:1"], "no client here has a backend 127.0.0.1:1 of a service users"),
        (&["orders", DEAD[0]], "of a service orders: see `socklb status`"),
        (&["users", DEAD[0], "--client", "batch"], "no client batch here has a backend"),
    ] {
        let (code, text) = readmit(arguments);
        assert!(code == Some(1) && text.contains(expected), "{arguments:?}: {code:?} {text}");
    }
    let (code, text) = readmit(&["users", "nonsense"]);
    assert!(code == Some(2) && text.contains("nonsense"), "{code:?} {text}");
    assert!(is_ejected(&fixture, DEAD[0]), "what failed changed nothing");
    let back = Backend::start("back", DEAD[0]);
    let expected = format!("client web, service users: {} is taken back\n", DEAD[0]);
    assert_eq!(readmit(&["users", DEAD[0], "--client", "web"]), (Some(0), expected));
    let after = at(&fixture, DEAD[0]);
    assert!(after.ejection.is_none() && after.trials == 0, "{after:?}");
    let counts = dial(&mut probe, 30);
    assert_eq!((failed(&counts), counts.get("back")), (0, Some(&10)), "its whole share: {counts:?}");
    // Its record is clean: four failures do not eject it, the fifth does, for as long as at first.
    drop(back);
    dial(&mut probe, 40);
    let again = at(&fixture, DEAD[0]).ejection.expect("it is ejected again");
    assert_eq!(again.times, 1, "{again:?}");
    // Without a daemon there is nobody to ask.
    fixture.stop();
    let output = fixture.setup.run(&["readmit", "users", DEAD[0]]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(1) && text.contains("the daemon is not running, so nothing is lifted"),
        "{text}"
    );
    assert!(is_ejected(&fixture, DEAD[0]));
}

/// What was asked is in its socket, so it may do it when it goes on, or see that nobody waits for the answer.
#[test]
fn a_daemon_that_does_not_answer_may_lift_an_ejection_later() {
    let fixture = start(&THREE, FOR_LONG);
    fixture.daemon().signal(Signal::STOP);
    let (code, text) = failure(&fixture.setup.run(&["readmit", "users", THREE[0]]));
    let expected = "does not answer: it may lift the ejection when it goes on (`socklb status`)";
    assert!(code == Some(1) && text.contains(expected), "{code:?} {text}");
    fixture.daemon().signal(Signal::CONT);
    eventually("it answers again", || fixture.setup.status(), |status| status.daemon.is_some());
}

/// What the maps do not hold is only what the list says of endpoints without a slot.
#[test]
fn status_shows_the_same_states_and_reasons_with_and_without_a_daemon() {
    let mut fixture = start(&[THREE[0], THREE[1], DEAD[0]], FOR_LONG);
    let mut probe = fixture.probe();
    let held = hold(&mut probe, 40);
    assert_eq!(failed(&held), 5, "{held:?}");
    let list = [(THREE[0], "state = \"lame-duck\""), (THREE[1], "weight = 0"), (DEAD[0], ""), (THREE[2], "")];
    let unused = [(DEAD[1], "weight = 0"), (DEAD[2], "state = \"down\"")];
    fixture.write_endpoints(&[&list[..], &unused[..]].concat());
    let states = || {
        let backends = fixture.setup.backends("web", "users").into_iter();
        let text = |text: Option<String>| text.unwrap_or_default();
        let mut all: Vec<_> = backends
            .map(|one| {
                (one.address.to_string(), one.state, text(one.witness), text(one.reason), one.membership)
            })
            .collect();
        all.sort();
        all
    };
    let row = |address: &str, words: [&str; 4]| {
        let [state, witness, reason, membership] = words.map(str::to_owned);
        (address.to_owned(), state, witness, reason, membership)
    };
    let expected = vec![
        // The backup, which is no member.
        row(THREE[0], ["lame-duck", "list", "list: lame duck", "member"]),
        row(THREE[1], ["drained", "list", "list: weight 0", "leaving"]),
        row(THREE[2], ["healthy", "", "", "member"]),
        row(DEAD[0], ["ejected", "kernel", "5 refused in a row", "member"]),
    ];
    eventually("the list is in force", states, |states| *states == expected);
    let configuration = fixture.setup.folder.join("socklb.toml");
    let status = ["--config", configuration.to_str().expect("UTF-8"), "status"];
    let not_chosen = || {
        let StatusDocument { mut clients, .. } = fixture.setup.document(&status);
        let all = clients[0].services.remove(0).not_chosen.into_iter();
        all.map(|one| (one.address.to_string(), one.state, one.witness)).collect::<Vec<_>>()
    };
    look(not_chosen).becomes(
        [(DEAD[1], "drained"), (DEAD[2], "refusing")]
            .map(|(address, state)| (address.to_owned(), state.to_owned(), "list".to_owned()))
            .to_vec(),
    );
    let line = format!(
        "backend={} from=\"healthy\" to=\"ejected\" witness=\"kernel\" reason=\"5 refused in a row\"",
        DEAD[0]
    );
    look(|| fixture.daemon().log().contains(&line)).becomes(true);
    let text = String::from_utf8_lossy(&fixture.setup.run(&["status"]).stdout).into_owned();
    let told = format!("not chosen: {} drained (list), {} refusing (list)", DEAD[1], DEAD[2]);
    assert!(text.contains(&told), "{text}");
    let chosen_by_none = not_chosen();
    fixture.daemon.take().expect("a daemon runs").kill();
    assert_eq!(not_chosen(), chosen_by_none, "without a daemon");
    let backends = fixture.setup.backends("web", "users");
    assert_eq!(backends.len(), 4);
    let without = backends.into_iter().map(|one| (one.address.to_string(), one.state, one.reason));
    let mut without: Vec<_> = without.collect();
    without.sort();
    let expected = expected.into_iter().map(|(address, state, _, reason, _)| {
        (address, state, Some(reason).filter(|reason| !reason.is_empty()))
    });
    assert_eq!(without, expected.collect::<Vec<_>>());
}
