//! Reports that the kernel processes on a network interface: the reports affect the next connects,
//! even while the daemon does not run.

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::path::PathBuf;
use std::time::Duration;

use lb_common::abi::host::{Listener, map};
use lb_common::abi::{self, Service};
use lb_common::net::Address;
use lb_view::diagnosis::Diagnosis;
use rustix::process::Signal;
use rustix::thread::CapabilitySet;
use stage::agent::{Agent, derive_key, make_key};
use stage::daemon::{Daemon, failure};
use stage::fixture::{Fixture, SERVICE};
use stage::maps::{array, hash};
use stage::probe::without;
use stage::router::Router;
use stage::sys::XdpMode;
use stage::{Probe, eventually, look, replace, window};

use crate::agents::reports::{ALL, POLICIES, forged_push, is_lame, reported, text};

/// The daemon's address. It is the same after a restart, because agents send reports to it.
pub const LISTEN: &str = "127.0.0.1:9467";

/// The configuration with interfaces on which the kernel processes reports.
fn with_interfaces(fixture: &Fixture, policy: &str, interfaces: &str) -> String {
    text(fixture, policy, "").replace("127.0.0.1:0", LISTEN) + &format!("xdp = [{interfaces}]\n")
}

/// Three backends, an agent for them, and a daemon that sends requests to it and makes the kernel
/// process reports.
pub fn start(policy: &str) -> (Fixture, Agent) {
    let mut fixture = Fixture::without_daemon();
    let key = make_key(&fixture.setup, "service.key", 1);
    let agent = Agent::start(&fixture.setup, &key, &ALL);
    fixture.setup.write("socklb.toml", &with_interfaces(&fixture, policy, "\"lo\""));
    fixture.start();
    eventually("the kernel listens", || modes(&fixture), |modes| modes["lo"] == "generic");
    for backend in ALL {
        eventually("the daemon shows the report", || reported(&fixture, backend), |state| state == "ready");
    }
    // A push goes to clients that have returned the cookie of an answer.
    eventually(
        "the daemon is a subscriber of the agent",
        || subscribers(&agent),
        |all| all.iter().all(|count| *count == 1),
    );
    (fixture, agent)
}

/// The mode in which reports are received, keyed by interface.
fn modes(fixture: &Fixture) -> BTreeMap<String, String> {
    let interfaces = fixture.setup.status().interfaces.into_iter();
    let mut modes: BTreeMap<String, String> = interfaces.map(|one| (one.name, one.mode)).collect();
    modes.entry("lo".to_owned()).or_default();
    modes
}

/// The number of subscribers of each backend.
fn subscribers(agent: &Agent) -> Vec<u64> {
    let status = agent.status();
    let backends = status["backends"].as_array().expect("the status lists backends");
    backends.iter().map(|backend| backend["subscribers"].as_u64().unwrap_or_default()).collect()
}

/// Number of datagrams that the kernel has processed, for each kind of reception.
fn taken_in(fixture: &Fixture) -> BTreeMap<String, u64> {
    let page = fixture.setup.metrics();
    let of = |line: &str| {
        let (result, count) =
            line.strip_prefix("socklb_xdp_datagrams_total{result=\"")?.split_once("\"} ")?;
        Some((result.to_owned(), count.parse().ok()?))
    };
    page.lines().filter_map(of).collect()
}

/// The number of datagrams that the daemon's socket has received and not accepted, and the number
/// of those that the daemon had not requested: on a slow machine these include late answers.
fn not_believed_by_the_daemon(fixture: &Fixture) -> (u64, u64) {
    let page = fixture.setup.metrics();
    let of = |line: &str| {
        let counted = line.strip_prefix("socklb_report_datagrams_total{result=\"")?;
        let (result, count) = counted.split_once("\"} ")?;
        Some((result.to_owned(), count.parse::<u64>().ok()?))
    };
    let counts: BTreeMap<String, u64> = page.lines().filter_map(of).collect();
    let all: u64 = counts.values().sum();
    let unasked = counts["unasked"];
    (all - counts["believed"] - unasked, unasked)
}

/// The pins of the program on interfaces.
pub fn links(fixture: &Fixture) -> Vec<PathBuf> {
    let folder = fixture.setup.host_map("");
    let entries = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .map(|entry| entry.expect("read a directory entry").path());
    entries.filter(|path| path.to_string_lossy().contains("receive-")).collect()
}

/// Whether connects of the client reach this backend.
fn is_chosen(probe: &mut Probe, backend: &str) -> bool {
    probe.dial_many(SERVICE, 60).contains_key(backend)
}

#[test]
fn a_lame_duck_is_skipped_without_a_running_daemon_until_it_is_ready() {
    let policies = if stage::in_a_guest() { &POLICIES[..1] } else { &POLICIES[..] };
    for policy in policies {
        let (mut fixture, agent) = start(policy);
        let mut probe = fixture.probe();
        assert!(is_chosen(&mut probe, "b1"));
        fixture.daemon().signal(Signal::STOP);
        agent.run_checked(&["lame-duck", ALL[0]]);
        eventually("the report affects connects", || is_chosen(&mut probe, "b1"), |chosen| !*chosen);
        agent.run_checked(&["ready", ALL[0]]);
        eventually("the report affects connects", || is_chosen(&mut probe, "b1"), |chosen| *chosen);
        fixture.daemon.take().expect("a daemon runs").kill();
        agent.run_checked(&["lame-duck", ALL[1]]);
        eventually("the report affects connects", || is_chosen(&mut probe, "b2"), |chosen| !*chosen);
        assert!(is_lame(&fixture, ALL[1]), "status shows the report without a daemon");
        assert_eq!(modes(&fixture)["lo"], "generic", "status shows the mode without a daemon");
        fixture.start();
        eventually(
            "the new daemon shows the report",
            || reported(&fixture, ALL[1]),
            |state| state == "lame-duck",
        );
        agent.run_checked(&["ready", ALL[1]]);
        eventually("the report affects connects", || is_chosen(&mut probe, "b2"), |chosen| *chosen);
    }
}

#[test]
fn a_receiver_outlives_restarts_and_leaves_with_its_interface_or_by_detach() {
    let (mut fixture, agent) = start("round-robin");
    let [link] = &links(&fixture)[..] else { panic!("expected one link: {:?}", links(&fixture)) };
    let before = stage::sys::link(link);
    fixture.stop();
    assert_eq!(stage::sys::link(link), before, "the link is unchanged");
    fixture.start();
    let program = || stage::sys::link(link).program;
    eventually("the link's program is replaced", program, |program| *program != before.program);
    assert_eq!(stage::sys::link(link).id, before.id, "the link is the same");
    let shown = doctor_output(&fixture);
    assert!(shown.contains("lo: loopback, MTU 65536; the kernel receives reports, generic"), "{shown}");
    // The test moves the link to the path at which another version would have left it.
    fixture.stop();
    let other = fixture.setup.pins.join("host-v1");
    std::fs::create_dir(&other).expect("make the directory");
    std::fs::rename(link, other.join("receive-generic@1")).expect("move the link");
    fixture.start();
    eventually("the new daemon uses the moved link", || other.exists(), |exists| !*exists);
    assert_eq!(stage::sys::link(link).id, before.id, "the link is the same");
    a_start_without_its_port_leaves_the_receiver(&mut fixture, &agent);
    // The interface is removed from the configuration while no daemon runs, and then added again.
    fixture.daemon.take().expect("a daemon runs").kill();
    assert_eq!(links(&fixture).len(), 1);
    let path = fixture.setup.folder.join("socklb.toml");
    replace(&path, &text(&fixture, "round-robin", "").replace("127.0.0.1:0", LISTEN));
    fixture.start();
    eventually("the receiver is detached", || links(&fixture), Vec::is_empty);
    let reload = |interfaces: &str| {
        replace(&path, &with_interfaces(&fixture, "round-robin", interfaces));
        fixture.daemon().signal(Signal::HUP);
    };
    reload("\"lo\"");
    eventually("the receiver is attached", || modes(&fixture), |modes| modes["lo"] == "generic");
    // The same while the daemon runs.
    reload("");
    eventually("the receiver is detached", || links(&fixture), Vec::is_empty);
    reload("\"lo\", \"absent0\"");
    eventually("the receiver is attached", || modes(&fixture), |modes| modes["lo"] == "generic");
    look(|| modes(&fixture)["absent0"].clone()).becomes("socket");
    let faults = || fixture.setup.faults().join("\n");
    eventually("the missing interface is reported", faults, |faults| {
        faults.contains("interface absent0: the kernel does not receive reports there")
    });
    fixture.stop();
    let output = fixture.setup.run(&["detach", "--all"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(links(&fixture).is_empty() && !fixture.setup.host_map("").exists());
}

#[track_caller]
fn a_start_without_its_port_leaves_the_receiver(fixture: &mut Fixture, agent: &Agent) {
    fixture.stop();
    let taken = UdpSocket::bind(LISTEN).expect("bind the daemon's port");
    fixture.start();
    let faults = || fixture.setup.faults().join("\n");
    eventually("the daemon cannot receive reports", faults, |faults| {
        faults.contains("reports cannot be received at 127.0.0.1:9467")
    });
    assert_eq!(links(fixture).len(), 1);
    let mut probe = fixture.probe();
    agent.run_checked(&["lame-duck", ALL[0]]);
    eventually("the report affects connects", || is_chosen(&mut probe, "b1"), |chosen| !*chosen);
    drop(taken);
    eventually(
        "the daemon receives reports again",
        || reported(fixture, ALL[0]),
        |state| state == "lame-duck",
    );
    eventually("status shows the mode", || modes(fixture), |modes| modes["lo"] == "generic");
}

/// The doctor's findings about interfaces.
fn doctor_output(fixture: &Fixture) -> String {
    let file = fixture.setup.folder.join("socklb.toml").display().to_string();
    let diagnosis: Diagnosis = fixture.setup.document(&["doctor", "--config", &file]);
    let findings = diagnosis.findings.into_iter().filter(|finding| finding.check == "interfaces");
    findings.map(|finding| finding.text + "\n").collect()
}

#[test]
fn a_foreign_program_is_reported_and_never_replaced() {
    let mut fixture = Fixture::without_daemon();
    let key = make_key(&fixture.setup, "service.key", 1);
    let agent = Agent::start(&fixture.setup, &key, &ALL);
    let other = stage::sys::attach_xdp("lo", XdpMode::Generic);
    fixture.setup.write("socklb.toml", &with_interfaces(&fixture, "round-robin", "\"lo\""));
    fixture.start();
    let faults = || fixture.setup.faults().join("\n");
    eventually("the foreign program is reported", faults, |faults| {
        faults.contains("interface lo") && faults.contains("another program is attached, ")
    });
    let shown = doctor_output(&fixture);
    assert!(
        shown.contains("the kernel accepts") && shown.contains("another program is attached, "),
        "{shown}"
    );
    fixture.stop();
    let shown = doctor_output(&fixture);
    assert!(
        shown.contains("and an interface accepts only one"),
        "`doctor` reports the limit before a start: {shown}"
    );
    fixture.start();
    // The daemon's socket receives the reports.
    agent.run_checked(&["lame-duck", ALL[0]]);
    eventually("the daemon shows the report", || is_lame(&fixture, ALL[0]), |is_lame| *is_lame);
    eventually(
        "status shows that the socket receives reports",
        || modes(&fixture),
        |modes| modes["lo"] == "socket",
    );
    assert!(links(&fixture).is_empty());
    drop(other);
    eventually(
        "the receiver replaces the detached program",
        || modes(&fixture),
        |modes| modes["lo"] == "generic",
    );
}

#[test]
fn datagrams_of_strangers_are_dropped_and_counted() {
    let (fixture, _agent) = start("round-robin");
    let stranger = UdpSocket::bind("127.0.0.1:0").expect("open a socket");
    let forged = forged_push();
    let (mut replayed, mut unrequested, mut unknown, mut request_frame) = (forged, forged, forged, forged);
    replayed[24..28].copy_from_slice(&1_u32.to_be_bytes());
    unrequested[1] = 2;
    unknown[7] = 0;
    request_frame[1] = 1;
    let kinds: [(&str, &[u8]); 6] = [
        ("forged", &forged),
        ("malformed", &forged[..79]),
        ("replayed", &replayed),
        ("unasked", &unrequested),
        ("unknown-name", &unknown),
        ("not-a-report", &request_frame),
    ];
    let (before, (others, unasked)) = (taken_in(&fixture), not_believed_by_the_daemon(&fixture));
    for (_, datagram) in kinds {
        for _ in 0..100 {
            stranger.send_to(datagram, LISTEN).expect("send");
        }
    }
    for (kind, _) in kinds {
        let count = || taken_in(&fixture)[kind] - before[kind];
        // On a slow machine, an answer of the agent may come too late and count as unasked as well.
        eventually("all datagrams are counted", count, |count| *count >= 100);
    }
    assert!(taken_in(&fixture)["believed"] > 0);
    let after = not_believed_by_the_daemon(&fixture);
    assert_eq!(after.0, others, "the daemon has received none of them");
    assert!(after.1 < unasked + 100, "the daemon has received none of those that it had not requested");
    // The state does not change during two ticks of the daemon, which are one second apart.
    look(|| is_lame(&fixture, ALL[0])).stays(false, Duration::from_secs(2));
    assert_eq!(fixture.probe().dial_many(SERVICE, 60).len(), 3);
}

/// Runs `ip` in the test's network.
#[track_caller]
fn ip(arguments: &str) {
    let status = std::process::Command::new("ip").args(arguments.split(' ')).status().expect("run ip");
    assert!(status.success(), "ip {arguments}");
}

/// The addresses at which the kernel processes reports.
fn listens_at(fixture: &Fixture) -> Vec<std::net::IpAddr> {
    let listeners = hash::<Address, Listener>(&fixture.setup.host_map(map::LISTENERS));
    listeners.keys().map(|key| key.expect("read a map entry").0.into()).collect()
}

#[test]
fn changes_of_interfaces_and_addresses_are_applied() {
    const AGENT: &str = "10.77.0.2:9465";
    let mut fixture = Fixture::without_daemon();
    let router = Router::new();
    let service = make_key(&fixture.setup, "service.key", 1);
    let key = derive_key(&fixture.setup, &service, ALL[0]);
    // Behind the link, the agent can check only its own port.
    let text_of_agent = format!(
        "listen = [\"{AGENT}\"]\n[[backend]]\naddress = \"{}\"\nkey = \"{}\"\ncheck = {{ tcp = \"{AGENT}\" }}\n",
        ALL[0],
        key.display()
    );
    fixture.setup.write("agent.toml", &text_of_agent);
    let agent = Agent::start_with(&fixture.setup, |command| router.place(command));
    fixture.write_endpoints(&[(ALL[0], "agent = \"10.77.0.2:9465\""), (ALL[1], "")]);
    let configured = text(&fixture, "round-robin", "").replace("127.0.0.1:0", "[::]:9467");
    fixture.setup.write("socklb.toml", &(configured + "xdp = [\"near\"]\n"));
    fixture.start();
    let mode = || modes(&fixture).remove("near").unwrap_or_default();
    eventually("the kernel listens", mode, |mode| mode == "native");
    eventually("the daemon shows the report", || reported(&fixture, ALL[0]), |state| state == "ready");
    eventually("the daemon is a subscriber of the agent", || subscribers(&agent), |all| all == &[1]);
    let near: std::net::IpAddr = "10.77.0.1".parse().expect("the text is an address");
    assert!(listens_at(&fixture).contains(&near));
    let mut probe = fixture.probe();
    fixture.daemon().signal(Signal::STOP);
    agent.run_checked(&["lame-duck"]);
    eventually("the report affects connects", || is_chosen(&mut probe, "b1"), |chosen| !*chosen);
    fixture.daemon().signal(Signal::CONT);
    agent.run_checked(&["ready"]);
    eventually("the report affects connects", || is_chosen(&mut probe, "b1"), |chosen| *chosen);
    assert!(taken_in(&fixture)["believed"] >= 3);

    let other: std::net::IpAddr = "10.77.0.7".parse().expect("the text is an address");
    ip("address add 10.77.0.7/24 dev near");
    eventually(
        "the kernel's list of addresses is current",
        || listens_at(&fixture),
        |all| all.contains(&other),
    );
    ip("address del 10.77.0.7/24 dev near");
    eventually(
        "the kernel's list of addresses is current",
        || listens_at(&fixture),
        |all| !all.contains(&other),
    );
    ip("link set near down");
    ip("link set near name elsewhere");
    eventually(
        "the receiver is detached",
        || (mode(), links(&fixture)),
        |(mode, links)| mode == "socket" && links.is_empty(),
    );
    ip("link set elsewhere name near");
    eventually("the receiver is attached", mode, |mode| mode == "native");
    ip("link del near");
    eventually(
        "the interface is gone",
        || (mode(), links(&fixture)),
        |(mode, links)| mode == "socket" && links.is_empty(),
    );
    ip("link add near type veth peer name nobody");
    eventually("the receiver is attached", mode, |mode| mode == "native");
}

/// This test runs only on kernels that accept the daemon's other programs without CAP_PERFMON. A
/// program of another version would read that version's maps, in which the answers to this
/// version's requests count as unrequested.
#[test]
fn a_receiver_that_needs_cap_perfmon_is_a_fault_and_one_of_another_version_is_detached() {
    if !stage::kernel::SPECULATION_BARRIERS.is_here() {
        // On this kernel, no daemon starts without CAP_PERFMON. The module `faults` tests these
        // starts.
        return stage::kernel::print_line("before Linux 6.17 no program is accepted without CAP_PERFMON");
    }
    let (mut fixture, agent) = start("round-robin");
    fixture.stop();
    let [link] = &links(&fixture)[..] else { panic!("expected one link") };
    let other = fixture.setup.pins.join("host-v1");
    std::fs::create_dir(&other).expect("make the directory");
    std::fs::rename(link, other.join("receive-generic@1")).expect("move the link");
    // `all` also contains bits that no kernel has yet.
    let all: CapabilitySet = CapabilitySet::all().iter_names().map(|(_, capability)| capability).collect();
    let daemon = Daemon::spawn_with(&fixture.setup, |command| {
        without(command, all - CapabilitySet::BPF - CapabilitySet::NET_ADMIN);
    });
    fixture.daemon = Some(daemon);
    let mode = || fixture.setup.status().daemon.and_then(|_| modes(&fixture).remove("lo"));
    eventually("the socket receives reports", mode, |mode| mode.as_deref() == Some("socket"));
    let faults = || fixture.setup.faults().join("\n");
    eventually("the fault is reported", faults, |faults| {
        faults.contains("interface lo") && faults.contains("CAP_PERFMON")
    });
    eventually("the link of the other version is removed", || other.exists(), |exists| !*exists);
    assert!(links(&fixture).is_empty() && stage::sys::xdp_programs("lo").is_empty());
    agent.run_checked(&["lame-duck", ALL[0]]);
    eventually("the daemon shows the report", || is_lame(&fixture, ALL[0]), |is_lame| *is_lame);
    fixture.stop();
}

/// The new daemon is stopped either before its first action, or after its program is attached and
/// before the daemon uses it.
#[test]
fn an_interrupted_upgrade_delays_no_verdict() {
    for has_begun in [false, true] {
        let (mut fixture, agent) = start("round-robin");
        let [link] = &links(&fixture)[..] else { panic!("expected one link") };
        let before = stage::sys::link(link).program;
        let mut probe = fixture.probe();
        fixture.stop();
        let daemon = Daemon::spawn(&fixture.setup);
        if has_begun {
            eventually(
                "the new daemon's program is attached",
                || stage::sys::link(link).program,
                |program| *program != before,
            );
        }
        daemon.signal(Signal::STOP);
        agent.run_checked(&["lame-duck", ALL[0]]);
        eventually("the report affects connects", || is_chosen(&mut probe, "b1"), |chosen| !*chosen);
        agent.run_checked(&["ready", ALL[0]]);
        eventually("the report affects connects", || is_chosen(&mut probe, "b1"), |chosen| *chosen);
        agent.run_checked(&["lame-duck", ALL[1]]);
        eventually("the report affects connects", || is_chosen(&mut probe, "b2"), |chosen| !*chosen);
        daemon.signal(Signal::CONT);
        fixture.daemon = Some(daemon);
        let is_current =
            || fixture.setup.status().daemon.is_some() && reported(&fixture, ALL[1]) == "lame-duck";
        eventually("the daemon continues", is_current, |is_current| *is_current);
        assert!(!is_chosen(&mut probe, "b2"), "the report received while the daemon was stopped is in force");
    }
}

/// A build with equal ABI version and another layout may leave such a map.
#[test]
fn a_host_map_of_another_size_or_kind_is_reported_and_not_replaced() {
    let mut fixture = Fixture::without_daemon();
    let key = make_key(&fixture.setup, "service.key", 1);
    let _agent = Agent::start(&fixture.setup, &key, &ALL);
    let pin = fixture.setup.host_map(map::LISTENERS);
    std::fs::create_dir_all(pin.parent().expect("the pin has a folder")).expect("make the folder");
    let made = std::process::Command::new("bpftool")
        .args(["map", "create"])
        .arg(&pin)
        .args(["type", "hash", "key", "16", "value", "4", "entries", "7", "name", "listeners", "flags", "1"])
        .status();
    assert!(made.expect("run bpftool").success());
    fixture.setup.write("socklb.toml", &with_interfaces(&fixture, "round-robin", "\"lo\""));
    let daemon = Daemon::spawn(&fixture.setup);
    let log = || daemon.log();
    eventually("the map is reported", log, |log| {
        log.contains("host-v2/listeners") && log.contains("7 entries")
    });
    drop(daemon);
    assert!(pin.exists(), "the map is not removed");
    std::fs::remove_file(&pin).expect("remove it");
    fixture.start();
    eventually("the kernel listens", || modes(&fixture), |modes| modes["lo"] == "generic");
    assert!(is_chosen(&mut fixture.probe(), "b1"));
    // The pin of another map has the name of a host map.
    fixture.stop();
    let verdicts = fixture.setup.host_map(map::VERDICTS);
    std::fs::remove_file(&verdicts).expect("remove the pin");
    let services = array::<Service>(&fixture.setup.map("web", abi::map::SERVICES));
    services.pin(&verdicts).expect("pin another map");
    let path = fixture.setup.folder.join("socklb.toml").display().to_string();
    let (code, text) = failure(&fixture.setup.run(&["run", "--config", &path]));
    assert!(code != Some(0) && text.contains("host ABI 2") && text.contains("verdicts"), "{text}");
    assert!(verdicts.exists(), "the map is not removed");
}

#[test]
fn a_silent_lame_duck_remains_one_until_its_hold_ends() {
    let mut fixture = Fixture::without_daemon();
    let key = make_key(&fixture.setup, "service.key", 1);
    drop(Agent::start(&fixture.setup, &key, &ALL));
    let path = fixture.setup.folder.join("agent.toml");
    let configured = std::fs::read_to_string(&path).expect("read it");
    let hold = window("3s");
    let briefly = configured
        .replace("hold = \"10m\"", &format!("hold = \"{hold}\""))
        .replace(&format!("\"{}\"", window("5s")), &format!("\"{hold}\""));
    fixture.setup.write("agent.toml", &briefly);
    let agent = Agent::start_again(&fixture.setup);
    fixture.setup.write("socklb.toml", &with_interfaces(&fixture, "round-robin", "\"lo\""));
    fixture.start();
    eventually("the kernel listens", || modes(&fixture), |modes| modes["lo"] == "generic");
    eventually("the daemon is a subscriber of the agent", || subscribers(&agent), |all| *all == [1, 1, 1]);
    let mut probe = fixture.probe();
    fixture.daemon.take().expect("a daemon runs").kill();
    agent.run_checked(&["lame-duck", ALL[0]]);
    eventually("the report affects connects", || is_chosen(&mut probe, "b1"), |chosen| !*chosen);
    agent.signal(Signal::KILL);
    assert!(!is_chosen(&mut probe, "b1"), "a silent lame duck remains a lame duck");
    eventually("the hold of the lame duck is over", || is_chosen(&mut probe, "b1"), |chosen| *chosen);
}
