//! Flow records whose end nobody saw: found by comparison with the kernel's lists of sockets, and nothing else is touched.

use lb_common::abi::{Flow, Listed, map};
use stage::maps::hash;
use stage::{Backend, Dialled, Manner, Probe, eventually, kernel};

use stage::fixture::{Fixture, SERVICE, config, with_active_accounting};

fn listed(fixture: &Fixture) -> usize {
    hash::<u64, Listed>(&fixture.setup.map("web", map::LISTED)).keys().filter(Result::is_ok).count()
}

fn repair(fixture: &Fixture) -> [u64; 3] {
    let repair = fixture.setup.status()["clients"][0]["repair"].clone();
    ["removed", "kept_never_listed", "kept_elsewhere"].map(|count| repair[count].as_u64().expect("a count"))
}

/// Starts the daemon again and waits until it has looked at the records.
fn look(fixture: &mut Fixture, what: &str, expected: [u64; 3]) {
    fixture.stop();
    fixture.start();
    eventually(what, || repair(fixture), |found| *found == expected);
}

/// One record that is kept: because no list has shown its socket, or where namespaces do not tell their cookies, because
/// nobody knows which list would have to.
fn kept() -> [u64; 3] {
    if kernel::NAMESPACE_COOKIES.is_here() { [0, 1, 0] } else { [0, 0, 1] }
}

/// Removes the programs that see flows end.
fn without_ends(fixture: &Fixture) {
    without_hooks(fixture, &["sock_release", "tcp_events"]);
}

fn without_hooks(fixture: &Fixture, hooks: &[&str]) {
    for link in std::fs::read_dir(fixture.setup.pins_of("web").join("links")).expect("links") {
        let link = link.expect("a link").path();
        let name = link.to_string_lossy().into_owned();
        if hooks.iter().any(|hook| name.contains(hook)) {
            stage::sys::remove_link(&link);
        }
    }
}

/// With the daemon stopped: nobody sees the first four of six sockets end. The next daemon ends their flows, and those of
/// the others are whole and end as ever.
#[track_caller]
fn four_of_six_end_unseen(fixture: &mut Fixture, probe: &mut Probe, open: &[Dialled]) {
    without_ends(fixture);
    for dialled in &open[..4] {
        probe.close(dialled.socket);
    }
    assert_eq!(fixture.setup.active(), 6, "nobody saw them end");
    fixture.start();
    eventually("four are ended", || fixture.setup.active(), |active| *active == 2);
    assert_eq!(repair(fixture), [4, 0, 0]);
    for dialled in &open[4..] {
        assert_eq!(probe.ask(&format!("peer {}", dialled.socket)), SERVICE);
        probe.close(dialled.socket);
    }
    assert_eq!(fixture.setup.active(), 0);
}

#[test]
fn flows_whose_end_was_not_seen_are_ended() {
    if kernel::NAMESPACE_COOKIES.skips() {
        return;
    }
    let mut fixture = Fixture::with_active_accounting();
    fixture.start();
    let mut probe = fixture.probe();
    let open: Vec<_> = (0..6).map(|_| probe.dial(SERVICE)).collect();
    fixture.stop();
    fixture.start();
    eventually("the lists show all of them", || listed(&fixture), |count| *count == 6);
    fixture.stop();
    four_of_six_end_unseen(&mut fixture, &mut probe, &open);
    assert!(fixture.daemon().log().contains("flow records of sockets that are gone were removed"));
    look(&mut fixture, "nothing is left to do", [0, 0, 0]);
}

/// A connection that a program has seen begin was in the lists then: no list needs to have shown it to a daemon.
#[test]
fn flows_that_were_followed_are_ended_at_the_first_look() {
    if kernel::NAMESPACE_COOKIES.skips() {
        return;
    }
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    let open: Vec<_> = (0..6).map(|_| probe.dial(SERVICE)).collect();
    fixture.stop();
    four_of_six_end_unseen(&mut fixture, &mut probe, &open);
    let backends = fixture.setup.backends("web", "users");
    let sum =
        |name: &str| backends.iter().map(|backend| backend[name].as_u64().expect("a count")).sum::<u64>();
    let closed = |backend: &serde_json::Value| backend["endings"]["closed"].as_u64().expect("a count");
    assert_eq!([sum("chosen"), sum("active"), sum("swept")], [6, 0, 4]);
    assert_eq!(backends.iter().map(closed).sum::<u64>(), 2, "chosen = ended + active + swept");
}

/// A connection whose end no program saw, while its socket is still open: its release ends the flow.
#[test]
fn a_flow_whose_end_was_missed_ends_with_its_socket() {
    let mut fixture = Fixture::without_daemon();
    fixture.backends.clear();
    fixture.backends = vec![Backend::with_manner("resets", "127.0.0.1:8003", Manner::Resets)];
    fixture.write_endpoints(&[("127.0.0.1:8003", "")]);
    fixture.start();
    let mut probe = fixture.probe();
    let socket = probe.dial(SERVICE).socket;
    fixture.stop();
    without_hooks(&fixture, &["tcp_events"]);
    assert_eq!(probe.ask(&format!("provoke {socket}")), format!("err {}", libc::ECONNRESET));
    assert_eq!(fixture.setup.active(), 1, "nobody saw it end");
    probe.close(socket);
    assert_eq!(fixture.setup.active(), 0);
    let status = fixture.setup.status();
    assert_eq!(status["clients"][0]["anomalies"]["release_out_of_turn"], 1, "{status}");
    let backend = fixture.setup.backends("web", "users")[0].clone();
    let endings = backend["endings"].as_object().expect("endings").values();
    let ended: u64 = endings.map(|count| count.as_u64().expect("a count")).sum();
    assert_eq!([&backend["chosen"], &backend["established"], &backend["swept"]], [1, 1, 0]);
    assert_eq!(ended, 1, "{backend}");
}

/// The same where every record lies in the overflow table or fights for its place.
#[test]
fn flows_in_the_overflow_table_are_ended_as_well() {
    if kernel::NAMESPACE_COOKIES.skips() {
        return;
    }
    let mut fixture = Fixture::without_daemon();
    let text = with_active_accounting(&config(&fixture.cgroup, r#"{ file = "users.toml" }"#, ""));
    fixture.setup.write("socklb.toml", &(text + "[limits]\nflow_records = 64\n"));
    fixture.start();
    let mut probes: Vec<Probe> = (0..2).map(|_| fixture.probe()).collect();
    let open: Vec<_> = (0..90).map(|i| (i % 2, probes[i % 2].dial(SERVICE).socket)).collect();
    let overflow = hash::<u64, Flow>(&fixture.setup.map("web", map::FLOW_OVERFLOW));
    assert!(overflow.keys().count() >= 26, "90 sockets in 64 places");
    // The first ones found room in the table, unless two met at one place; of those that stay, most had to go elsewhere.
    for (probe, socket) in &open[..30] {
        probes[*probe].close(*socket);
    }
    assert!(overflow.keys().count() > 0, "some of those that stay are in the overflow table");
    fixture.stop();
    fixture.start();
    eventually("the lists show all of them", || listed(&fixture), |count| *count == 60);
    fixture.stop();
    without_ends(&fixture);
    for (probe, socket) in &open[30..70] {
        probes[*probe].close(*socket);
    }
    fixture.start();
    eventually("forty are ended", || fixture.setup.active(), |active| *active == 20);
    for (probe, socket) in &open[70..] {
        probes[*probe].close(*socket);
    }
    assert_eq!(fixture.setup.active(), 0);
}

/// A socket whose connect failed is open and in no list: it must not be taken for one that is gone.
#[test]
fn a_socket_that_no_list_has_shown_is_kept_and_counted() {
    let mut fixture = Fixture::with_active_accounting();
    fixture.write_endpoints(&[("127.0.0.1:8009", "")]);
    fixture.start();
    let mut probe = fixture.probe();
    assert_eq!(probe.try_dial(SERVICE).map(|dialled| dialled.name), Err(libc::ECONNREFUSED));
    assert_eq!(fixture.setup.active(), 1);
    look(&mut fixture, "it is kept", kept());
    assert_eq!(fixture.setup.active(), 1);
    let doctor = fixture.setup.run(&["doctor", "--config", "socklb.toml"]);
    let text = String::from_utf8_lossy(&doctor.stdout).into_owned();
    let [_, never_listed, elsewhere] = kept();
    assert!(text.contains(&format!("kept: {never_listed} whose sockets no list has shown")), "{text}");
    assert!(text.contains(&format!("{elsewhere} in network namespaces")), "{text}");
    probe.close(0);
    assert_eq!(fixture.setup.active(), 0);
}

/// Sockets of another network namespace are looked for in the lists of that namespace, and not in ours.
#[test]
fn sockets_of_other_namespaces_are_looked_for_there() {
    let mut fixture = Fixture::new();
    let mut elsewhere = Probe::start_with(&fixture.cgroup, stage::namespace::in_a_network_of_its_own);
    // Nothing is reachable there: the socket is open, and in a list only if it listens.
    assert!(elsewhere.try_dial(SERVICE).is_err());
    assert_eq!(fixture.setup.active(), 1);
    look(&mut fixture, "its namespace was looked into", kept());
    drop(elsewhere);
    assert_eq!(fixture.setup.active(), 0);
}

/// Sockets that dial again while they are looked at, to backends that refuse: in no list at any moment, and open.
#[test]
fn sockets_that_dial_again_meanwhile_are_counted_exactly() {
    if kernel::NAMESPACE_COOKIES.skips() {
        return;
    }
    let mut fixture = Fixture::with_active_accounting();
    fixture.start();
    let mut probes: Vec<Probe> = (0..3).map(|_| fixture.probe()).collect();
    for probe in &mut probes {
        for _ in 0..7 {
            probe.dial(SERVICE);
        }
    }
    fixture.stop();
    fixture.start();
    eventually("the lists show all of them", || listed(&fixture), |count| *count == 21);
    // From here on everybody refuses.
    fixture.write_endpoints(&[("127.0.0.1:8009", ""), ("127.0.0.1:8010", "")]);
    let mut other = fixture.probe();
    let refused = format!("errno-{}", libc::ECONNREFUSED);
    eventually("nobody answers", || other.dial_many(SERVICE, 6), |counts| counts.get(&refused) == Some(&6));
    for probe in &mut probes {
        probe.send(&format!("redialling {SERVICE}"));
    }
    for _ in 0..4 {
        fixture.stop();
        fixture.start();
        let repairs = || fixture.setup.status()["clients"][0]["repair"]["kept_never_listed"].as_u64();
        eventually("they were looked at", repairs, |kept| *kept > Some(0));
    }
    for probe in &mut probes {
        assert_eq!(probe.ask("enough"), "ok");
    }
    let counts = || -> Vec<u64> {
        let backends = fixture.setup.backends("web", "users");
        backends.iter().map(|backend| backend["active"].as_u64().expect("a count")).collect()
    };
    assert!(counts().iter().sum::<u64>() <= 21, "{:?}", counts());
    drop(probes);
    eventually("every count returns to zero", counts, |counts| counts.iter().all(|count| *count == 0));
}
