//! `socklb flows`: lists every open socket once, with its destination and the reason, even if
//! processes end or change sockets during the read.

use std::collections::BTreeSet;

use lb_common::abi::{self, ABI_VERSION, FlowBucket, Phase, Policy, map};
use lb_view::flows::{ActiveFlow, FlowsDocument};
use stage::daemon::failure;
use stage::maps::{set_all, values};
use stage::{Probe, address, eventually, look};

use stage::fixture::{Fixture, SERVICE, config};

/// The list of `flows --json`.
#[track_caller]
fn flows(fixture: &Fixture, arguments: &[&str]) -> Vec<ActiveFlow<'static>> {
    let output = fixture.setup.run(&[&["flows", "--json"], arguments].concat());
    let FlowsDocument { schema, flows, .. } = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!((output.status.code(), schema), (Some(0), 3));
    flows
}

fn count(flows: &[ActiveFlow<'_>], is_counted: impl Fn(&ActiveFlow<'_>) -> bool) -> usize {
    flows.iter().filter(|flow| is_counted(flow)).count()
}

fn cookies(flows: &[ActiveFlow<'_>]) -> BTreeSet<u64> {
    flows.iter().map(|flow| flow.cookie).collect()
}

#[test]
fn each_open_socket_is_shown_once_with_its_process_its_phase_and_the_reason() {
    let mut fixture = Fixture::without_daemon();
    let full = stage::backend::with_a_queue_of_one("127.0.0.1:8010");
    let slow = "\n[[service]]\nname = \"slow\"\naddress = \"10.96.0.11:80\"\n\
                backends = { static = [\"127.0.0.1:8010\"] }\n";
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "") + slow;
    fixture.setup.write("socklb.toml", &text);
    fixture.start();
    let text = fixture.setup.run(&["flows"]);
    assert_eq!(
        (text.status.code(), String::from_utf8_lossy(&text.stdout).as_ref()),
        (Some(0), "no active flows\n")
    );
    let mut probe = fixture.probe();
    let open: Vec<_> = (0..9).map(|_| probe.dial(SERVICE)).collect();
    let shown = flows(&fixture, &[]);
    assert_eq!((shown.len(), cookies(&shown).len()), (9, 9));
    for backend in &fixture.backends {
        assert_eq!(count(&shown, |flow| flow.backend == Some(backend.address())), 3);
    }
    for flow in &shown {
        assert_eq!(
            (&*flow.client, flow.service.as_deref(), flow.address),
            ("web", Some("users"), Some(address(SERVICE)))
        );
        assert_eq!((flow.process, flow.process_name.as_deref()), (probe.pid(), Some("probe")));
        assert_eq!((&*flow.phase, &*flow.state), ("established", "healthy"));
        assert_eq!((&*flow.policy, &*flow.reason), ("weighted-round-robin", "picked"));
        assert_eq!(flow.table_generation, 1);
        let share = flow.table_share.expect("the flow has a share of the current table");
        assert!((share - 1.0 / 3.0).abs() < 1e-3, "{flow:?}");
    }
    let ages: Vec<f64> = shown.iter().map(|flow| flow.age_s).collect();
    assert!(ages.is_sorted_by(|older, younger| older >= younger), "the oldest first: {ages:?}");
    let grown = || flows(&fixture, &[]).iter().map(|flow| flow.age_s).collect();
    eventually("ages grow", grown, |now: &Vec<f64>| now.iter().zip(&ages).all(|(now, then)| now > then));
    let text = String::from_utf8_lossy(&fixture.setup.run(&["flows"]).stdout).into_owned();
    let process = format!("probe ({})", probe.pid());
    for part in ["age", "process", "backend", "why", &process, "weighted-round-robin, 33.", "of table 1"] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    for dialled in &open[..4] {
        probe.close(dialled.socket);
    }
    let left = flows(&fixture, &[]);
    assert!(left.len() == 5 && cookies(&left).is_subset(&cookies(&shown)), "{left:?}");
    for _ in 0..10 {
        probe.start_connect("10.96.0.11:80");
    }
    // Connections that fit into the listener's queue are established immediately.
    let look = || flows(&fixture, &["--service", "slow"]);
    let phases = |shown: &Vec<ActiveFlow<'static>>| {
        let of_phase = |phase| count(shown, |flow| flow.phase == phase);
        (of_phase("established"), of_phase("connecting"))
    };
    let shown =
        eventually("all flows have their phases", look, |shown| phases(shown).0 + phases(shown).1 == 10);
    assert!(phases(&shown).0 >= 1 && phases(&shown).1 >= 5, "{:?}", phases(&shown));
    drop(full);
}

#[test]
fn flows_are_filtered_by_client_service_and_backend() {
    let mut fixture = Fixture::without_daemon();
    let mail = "\n[[service]]\nname = \"mail\"\naddress = \"10.96.0.11:25\"\n\
                backends = { static = [\"127.0.0.1:8001\"] }\n";
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "") + mail;
    fixture.setup.write("socklb.toml", &text);
    fixture.start();
    let mut probe = fixture.probe();
    for _ in 0..6 {
        probe.dial(SERVICE);
    }
    probe.dial("10.96.0.11:25");
    let number = |arguments: &[&str]| flows(&fixture, arguments).len();
    assert_eq!((number(&[]), number(&["--client", "web"])), (7, 7));
    assert_eq!((number(&["-s", "users"]), number(&["--service", "mail"])), (6, 1));
    assert_eq!((number(&["--backend", "127.0.0.1:8001"]), number(&["--backend", "127.0.0.1:8002"])), (3, 2));
    assert_eq!(number(&["--service", "mail", "--backend", "127.0.0.1:8001"]), 1);
    for (arguments, expected) in [
        (&["--client", "cron"][..], format!("there is no client \"cron\" below {}; clients here are: web", fixture.setup.pins.display())),
        (&["--service", "chat"], "no client here dials a service \"chat\"; services here are: mail, users".to_owned()),
        (&["--client", "web", "--service", "chat"], "client \"web\" does not dial service \"chat\"; services here are: mail, users".to_owned()),
        (
            &["--backend", "127.0.0.1:9"],
            "there is no backend 127.0.0.1:9; backends here are: 127.0.0.1:8001, 127.0.0.1:8002, 127.0.0.1:8003".to_owned(),
        ),
        (
            &["--service", "mail", "--backend", "127.0.0.1:8002"],
            "there is no backend 127.0.0.1:8002 of service \"mail\"; backends here are: 127.0.0.1:8001".to_owned(),
        ),
    ] {
        let output = fixture.setup.run(&[&["flows"], arguments].concat());
        assert_eq!(failure(&output), (Some(1), format!("socklb: {expected}")));
    }
    assert_eq!(fixture.setup.run(&["flows", "--backend", "users"]).status.code(), Some(2));
    let shown = fixture.setup.run(&["flows", "--service", "mail", "--backend", "127.0.0.1:8001"]);
    assert_eq!(
        String::from_utf8_lossy(&shown.stdout).lines().count(),
        2,
        "the output is a header and one flow"
    );
    drop(probe);
    eventually("all flows have ended", || fixture.setup.active(), |active| *active == 0);
    // With several clients, the output has a column for the client.
    fixture.stop();
    let other = stage::Cgroup::new();
    let second = format!("[[client]]\njob = \"mail\"\ncgroup = \"{}\"\n\n", other.relative().display());
    fixture.setup.write("socklb.toml", &(second + &text));
    fixture.start();
    let (mut web, mut mail) = (fixture.probe(), Probe::start(&other));
    web.dial(SERVICE);
    mail.dial(SERVICE);
    mail.dial(SERVICE);
    let shown = flows(&fixture, &[]);
    assert_eq!(["web", "mail"].map(|client| count(&shown, |flow| flow.client == client)), [1, 2]);
    let text = String::from_utf8_lossy(&fixture.setup.run(&["flows"]).stdout).into_owned();
    assert!(text.lines().next().is_some_and(|header| header.contains("client")), "{text}");
    assert_eq!(flows(&fixture, &["--client", "mail"]).len(), 2);
}

/// The command reads flows from the kernel's maps, so no process has to store them.
#[test]
fn flows_are_shown_without_a_daemon_after_a_restart_and_of_another_version() {
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    for _ in 0..3 {
        probe.dial(SERVICE);
    }
    let before = flows(&fixture, &[]);
    fixture.stop();
    let of = |shown: &[ActiveFlow<'_>]| {
        (cookies(shown), shown.iter().map(|flow| flow.backend).collect::<Vec<_>>())
    };
    assert_eq!(of(&flows(&fixture, &[])), of(&before), "the flows are the same without a daemon");
    // The next daemon publishes no table, so the flows still belong to the current one.
    fixture.start();
    let after = flows(&fixture, &[]);
    assert_eq!(of(&after), of(&before));
    assert_eq!(count(&after, |flow| flow.process_name.as_deref() == Some("probe")), 3);
    probe.kill();
    eventually("the flows end with the process", || flows(&fixture, &[]), Vec::is_empty);
    // `flows` shows the number of another version's open flows, and reads nothing else from that
    // version's maps.
    let mut probe = fixture.probe();
    probe.dial(SERVICE);
    fixture.stop();
    let (ours, theirs) = (format!("v{ABI_VERSION}"), format!("v{}", ABI_VERSION + 1));
    std::fs::rename(fixture.setup.pins.join(ours), fixture.setup.pins.join(&theirs))
        .expect("rename in bpffs");
    let output = fixture.setup.run(&["flows"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let row_text = |how: &str| {
        format!("client web of another version (ABI {}) is {how}: 1 active flows", ABI_VERSION + 1)
    };
    assert!(output.status.code() == Some(0) && text.contains(&row_text("balancing connects")), "{text}");
    // A daemon of another version first detaches the programs that start flows.
    for link in std::fs::read_dir(fixture.setup.pins.join(&theirs).join("web/links")).expect("list the links")
    {
        let link = link.expect("read a directory entry").path();
        let name = link.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("connect") || name.starts_with("sendmsg") {
            stage::sys::remove_link(&link);
        }
    }
    let output = fixture.setup.run(&["flows"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains(&row_text("leaving")), "{text}");
}

#[test]
fn a_flow_to_a_removed_backend_is_shown_as_leaving() {
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    let open: Vec<_> = (0..3).map(|_| probe.dial(SERVICE)).collect();
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", "")]);
    let left = || flows(&fixture, &["--backend", "127.0.0.1:8003"]);
    // The backend's state changes first, and the table later. A flow record contains the number of
    // the backend's entries in the table from which it was chosen. Only the length of the current
    // table is known, so no share is shown.
    let has_left = |shown: &Vec<ActiveFlow<'static>>| {
        count(shown, |flow| flow.state == "leaving") == 1
            && shown.iter().all(|flow| flow.table_share.is_none())
    };
    let shown = eventually("the backend is shown as leaving", left, has_left);
    assert_eq!((shown.len(), shown[0].table_generation), (1, 1));
    assert!(shown[0].table_entries >= 341, "{shown:?}");
    assert_eq!(flows(&fixture, &[]).len(), 3);
    let leaver = open.iter().find(|dialled| dialled.name == "b3").expect("one connection goes to b3");
    fixture.stop();
    probe.close(leaver.socket);
    fixture.setup.active_becomes(2);
    let slot = look(|| fixture.setup.backend("127.0.0.1:8003")).now("only a daemon frees slots");
    assert!(slot.is_some_and(|backend| backend.membership == "leaving"), "the slot is not free yet");
    fixture.start();
    // When its last flow has ended, the daemon removes the backend, and requests for it fail.
    let status_code = || fixture.setup.run(&["flows", "--backend", "127.0.0.1:8003"]).status.code();
    eventually("the backend's slot is freed", status_code, |code| *code == Some(1));
}

/// The test writes the flow records of a busy host into the map.
#[test]
fn each_of_a_hundred_thousand_flows_is_shown_once() {
    let mut fixture = Fixture::new();
    let many = if stage::in_a_guest() { 10_000 } else { 100_000 };
    fixture.stop();
    let pin = fixture.setup.map("web", map::FLOWS);
    let mut buckets = values::<FlowBucket>(&pin);
    for (number, bucket) in (1u32..).zip(buckets.iter_mut().take(many)) {
        bucket.cookie = (1 << 32) + u64::from(number);
        bucket.flow = abi::Flow {
            start_ns: 1_000 * u64::from(number * 7919 % 1_000_003),
            slot: number % 3,
            generation: 0,
            process: std::process::id(),
            sample: number,
            table_generation: 1,
            entries: 341,
            service: 0,
            why: Policy::WeightedRoundRobin as u8,
            phase: Phase::Established as u8,
            ..bytemuck::Zeroable::zeroed()
        };
    }
    set_all(&pin, &mut buckets);
    let shown = flows(&fixture, &[]);
    assert_eq!((shown.len(), cookies(&shown).len()), (many, many));
    assert!(shown.is_sorted_by(|older, younger| older.age_s >= younger.age_s));
    assert!(flows(&fixture, &["--backend", "127.0.0.1:8001"]).len().abs_diff(many / 3) <= 1);
    // The flows in the records began at the boot of the host. This process is younger, so it cannot
    // be the process that dialled.
    assert_eq!(shown[0].process_name, None);
    let text = String::from_utf8_lossy(&fixture.setup.run(&["flows"]).stdout).into_owned();
    assert_eq!(text.lines().count(), many + 1);
}
