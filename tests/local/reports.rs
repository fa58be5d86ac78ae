//! Backends that say of themselves how they are, by a real agent: from the next connect on a lame duck is not chosen, and ready
//! it is again, whatever becomes of agents and daemons meanwhile.

use std::collections::BTreeMap;
use std::net::UdpSocket;

use aya::maps::{Array, MapData};
use lb_common::abi::host::{self, Sender, SenderName};
use lb_common::abi::{self, map};
use lb_view::backend;
use lb_view::diagnosis::Diagnosis;
use rustix::process::Signal;
use stage::agent::{Agent, make_key};
use stage::daemon::failure;
use stage::fixture::{Fixture, SERVICE, config, endpoints};
use stage::maps::{Raw, array, hash};
use stage::protocol::Dialled;
use stage::{Backend, eventually, replace};

/// The backends.
pub const ALL: [&str; 3] = ["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"];

/// Policies, each of which must pass a lame duck over.
pub const POLICIES: [&str; 5] = ["round-robin", "weighted-round-robin", "least-loaded", "p2c", "random"];

/// A configuration whose service asks agents.
pub fn text(fixture: &Fixture, policy: &str, health: &str) -> String {
    let lines = format!(
        "policy = \"{policy}\"\nsubset = {{ size = 3 }}\nhealth = {{ probe = \"report\", interval = \"100ms\", idle_interval = \"100ms\"{health} }}"
    );
    config(&fixture.cgroup, "{ file = \"users.toml\" }", &lines)
        + "[reports]\nlisten = \"127.0.0.1:0\"\nkey = \"service.key\"\n"
}

/// Three backends, an agent that speaks for these, and a daemon that asks it.
fn start(policy: &str, spoken_for: &[&str]) -> (Fixture, Agent) {
    let mut fixture = Fixture::without_daemon();
    let key = make_key(&fixture.setup, "service.key", 1);
    let agent = Agent::start(&fixture.setup, &key, spoken_for);
    fixture.setup.write("socklb.toml", &text(&fixture, policy, ""));
    fixture.start();
    for backend in spoken_for {
        eventually("it is heard", || reported(&fixture, backend), |state| state == "ready");
    }
    (fixture, agent)
}

fn seen(fixture: &Fixture, address: &str) -> backend::BackendStatus {
    fixture.setup.backend(address).expect("the backend")
}

/// How a backend is by what is known of it.
pub fn reported(fixture: &Fixture, address: &str) -> String {
    seen(fixture, address).probe.map(|probe| probe.state).unwrap_or_default()
}

/// Whether it is a lame duck.
pub fn is_lame(fixture: &Fixture, address: &str) -> bool {
    seen(fixture, address).state == "lame-duck"
}

/// It answers every request with an error at once, so that it never has an open flow.
#[test]
fn a_backend_that_reports_errors_does_not_look_idle() {
    for policy in ["p2c", "least-loaded"] {
        let (fixture, agent) = start(&format!("{policy}\"\nerror_decay = \"1h"), &ALL);
        let requests = ["--qps", "100", "--valid-for", "300000"];
        agent.tell(&[&["report", "--backend", ALL[0], "--eps", "100"], &requests[..]].concat());
        let backends: Array<MapData, Raw<abi::Backend>> = array(&fixture.setup.map("web", map::BACKENDS));
        let errors = || {
            let rows = backends.iter().map(|row| row.expect("a row").0);
            let first = rows.into_iter().find(|row| row.endpoint.port.to_host() == 8001);
            first.expect("the row of the first backend").errors.count
        };
        let mut probe = fixture.probe();
        let reported_count = || {
            probe.dial_many(SERVICE, 9);
            errors()
        };
        eventually("as many errors count as the others get flows below", reported_count, |count| *count > 40);
        let mut counts = BTreeMap::new();
        for _ in 0..40 {
            let Dialled { name, .. } = probe.dial(SERVICE);
            *counts.entry(name).or_insert(0) += 1;
        }
        // Two draws of `p2c` may both be the same backend, but hardly ever of 13 in 40 connects, which would be its share.
        assert!(counts.get("b1").copied().unwrap_or_default() < 13, "{policy}: {counts:?}");
    }
}

/// The interval of polls is long, so that only the first look can have found it.
#[test]
fn a_standing_lame_duck_gets_no_connect_from_a_fresh_host() {
    let mut fixture = Fixture::without_daemon();
    let key = make_key(&fixture.setup, "service.key", 1);
    let agent = Agent::start(&fixture.setup, &key, &ALL);
    agent.tell(&["lame-duck", ALL[0]]);
    let text = text(&fixture, "round-robin", "").replace("100ms", "30s");
    fixture.setup.write("socklb.toml", &text);
    fixture.start();
    let mut probe = fixture.probe();
    let counts = probe.dial_many(SERVICE, 300);
    assert!(counts.keys().eq(["b2", "b3"]), "{counts:?}");
}

/// Its probes are its reports, which said nothing against it while it was dead; its ejection would last an hour.
#[test]
fn an_ejected_backend_whose_agent_starts_again_is_tried_by_the_next_connect() {
    let mut fixture = Fixture::without_daemon();
    let key = make_key(&fixture.setup, "service.key", 1);
    let agent = Agent::start(&fixture.setup, &key, &ALL);
    let lines = "ejection = { base = \"1h\", max = \"1h\" }\npolicy =";
    fixture.setup.write("socklb.toml", &text(&fixture, "round-robin", "").replacen("policy =", lines, 1));
    fixture.start();
    eventually("it is heard", || reported(&fixture, ALL[0]), |state| state == "ready");
    drop(fixture.backends.remove(0));
    let mut probe = fixture.probe();
    eventually(
        "it is ejected",
        || {
            let _ = probe.try_dial(SERVICE);
            seen(&fixture, ALL[0]).state
        },
        |state| state == "ejected",
    );
    drop(agent);
    let _back = Backend::start("b1", ALL[0]);
    let _agent = Agent::start_again(&fixture.setup);
    eventually("it is back", || probe.dial_many(SERVICE, 3), |counts| counts.contains_key("b1"));
    eventually("its state follows", || seen(&fixture, ALL[0]).state, |state| state == "healthy");
}

#[test]
fn a_lame_duck_is_passed_over_from_then_on_and_back_when_it_is_ready() {
    // In slow guests one is enough: what the programs do is tested there for each (`verdicts`).
    let policies = if stage::in_a_guest() { &POLICIES[..1] } else { &POLICIES[..] };
    for policy in policies {
        let (fixture, agent) = start(policy, &ALL);
        let mut probe = fixture.probe();
        assert_eq!(probe.dial_many(SERVICE, 60).values().sum::<u32>(), 60);
        agent.tell(&["lame-duck", ALL[0]]);
        eventually("it is heard", || is_lame(&fixture, ALL[0]), |is_lame| *is_lame);
        let counts = probe.dial_many(SERVICE, 300);
        assert!(!counts.contains_key("b1"), "{policy}: {counts:?}");
        assert_eq!(counts.values().sum::<u32>(), 300);
        agent.tell(&["ready", ALL[0]]);
        eventually("it is back", || is_lame(&fixture, ALL[0]), |is_lame| !*is_lame);
        let counts = probe.dial_many(SERVICE, 300);
        assert!(counts.contains_key("b1"), "{policy}: {counts:?}");
    }
}

#[test]
fn a_lame_duck_stays_one_while_agent_and_daemon_are_dead_and_a_new_daemon_takes_that_over() {
    let (mut fixture, agent) = start("round-robin", &ALL);
    agent.tell(&["lame-duck", ALL[1]]);
    eventually("it is heard", || is_lame(&fixture, ALL[1]), |is_lame| *is_lame);
    agent.signal(Signal::KILL);
    drop(agent);
    fixture.daemon.take().expect("a daemon").kill();
    let mut probe = fixture.probe();
    assert!(!probe.dial_many(SERVICE, 100).contains_key("b2"), "connects know by themselves");
    assert!(is_lame(&fixture, ALL[1]), "and so does status, without a daemon");
    fixture.start();
    eventually("the daemon has taken it over", || reported(&fixture, ALL[1]), |state| state == "lame-duck");
    assert!(!probe.dial_many(SERVICE, 100).contains_key("b2"));
    // The agent has lost nothing: it was said by the operator, and is said on.
    let agent = Agent::start_again(&fixture.setup);
    eventually("it is heard", || reported(&fixture, ALL[0]), |state| state == "ready");
    assert!(is_lame(&fixture, ALL[1]));
    agent.tell(&["ready", ALL[1]]);
    eventually("it is back", || is_lame(&fixture, ALL[1]), |is_lame| !*is_lame);
    assert!(probe.dial_many(SERVICE, 100).contains_key("b2"));
}

#[test]
fn who_is_silent_is_shown_as_that_and_stays_available() {
    let (fixture, agent) = start("round-robin", &ALL);
    agent.signal(Signal::STOP);
    eventually("it is silent", || reported(&fixture, ALL[0]), |state| state == "silent");
    assert_eq!(fixture.probe().dial_many(SERVICE, 60).len(), 3);
    let why = seen(&fixture, ALL[0]).probe.and_then(|probe| probe.why).expect("a reason");
    assert!(why.contains("has not answered the last"), "{why}");
    let file = fixture.setup.folder.join("socklb.toml").display().to_string();
    let diagnosis: Diagnosis = fixture.setup.document(&["doctor", "--config", &file]);
    let mut findings = diagnosis.findings.iter().filter(|finding| finding.check == "probes");
    let finding = findings.next().expect("it is looked at");
    assert!(finding.text.contains("nothing is known of 127.0.0.1:8001 (its agent has not"), "{finding:?}");
    let check = fixture.setup.run(&["check", &file]);
    let said = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(said.contains("service users: 3 backends probed by report every 100ms"), "{said}");
    agent.signal(Signal::CONT);
    eventually("it is heard", || reported(&fixture, ALL[0]), |state| state == "ready");
}

#[test]
fn a_key_is_replaced_without_a_gap() {
    let (fixture, agent) = start("round-robin", &ALL);
    let old = std::fs::read_to_string(fixture.setup.folder.join("service.key")).expect("the key");
    let new = std::fs::read_to_string(make_key(&fixture.setup, "new.key", 2)).expect("the key");
    let refused = || {
        let status = agent.status();
        let by_agent = ["unknown-key", "forged"].map(|why| status["datagrams"]["refused"][why].to_string());
        (by_agent, ["unknown-key", "forged"].map(|why| datagrams(&fixture, why)))
    };
    // Under which keys the daemon asks, the first to send with, and which the agent has.
    let asks = || {
        let map = hash::<SenderName, Sender>(&fixture.setup.host_map(host::map::SENDERS));
        let entries = map.iter().map(|entry| entry.expect("an entry").1.0.keys.map(|key| key.id));
        entries.collect::<Vec<_>>()
    };
    let has = || {
        let status = agent.status();
        let backends = status["backends"].as_array().expect("a list");
        backends.iter().map(|backend| backend["keys"].to_string()).collect::<Vec<_>>()
    };
    // Agents know both, then clients; then clients send with the new one and forget the old one, then agents forget it.
    for (keys, ids) in [(old.clone() + &new, [1, 2]), (new.clone() + &old, [2, 1]), (new, [2, 0])] {
        std::fs::write(fixture.setup.folder.join("service.key"), &keys).expect("write the keys");
        fixture.daemon().signal(Signal::HUP);
        eventually("the daemon asks so", asks, |all| all.len() == 3 && all.iter().all(|of| *of == ids));
        let service = fixture.setup.folder.join("service.key");
        for backend in ALL {
            stage::agent::derive_key(&fixture.setup, &service, backend);
        }
        agent.signal(Signal::HUP);
        let known: Vec<String> = ids.iter().filter(|id| **id != 0).map(ToString::to_string).collect();
        let known = format!("[{}]", known.join(","));
        eventually("the agent has them", has, |all| all.iter().all(|of| *of == known));
        for address in ALL {
            eventually("it is ready", || reported(&fixture, address), |state| state == "ready");
        }
    }
    assert_eq!(refused(), (["0".to_owned(), "0".to_owned()], [0, 0]), "each was under a key that both have");
}

/// How many datagrams have come to the daemon of which this became.
fn datagrams(fixture: &Fixture, what: &str) -> u64 {
    let page = fixture.setup.metrics();
    let name = format!("socklb_report_datagrams_total{{result=\"{what}\"}} ");
    let line = page.lines().find_map(|line| line.strip_prefix(&name).map(str::to_owned));
    line.expect("a series").parse().expect("a number")
}

#[test]
fn an_agent_that_has_lost_its_disk_and_had_a_fast_clock_is_believed_again() {
    let (fixture, agent) = start("round-robin", &ALL);
    let state = fixture.setup.folder.join("agent/state");
    drop(agent);
    // As a clock would have left it that is decades ahead.
    std::fs::write(state.join("incarnation"), "4000000000\n").expect("write the number");
    let incarnation = |agent: &Agent| {
        let status = agent.status();
        status["incarnation"].as_u64().expect("a number")
    };
    let agent = Agent::start_again(&fixture.setup);
    assert_eq!(incarnation(&agent), 4_000_000_001);
    agent.tell(&["lame-duck", ALL[0]]);
    eventually("it is heard", || is_lame(&fixture, ALL[0]), |is_lame| *is_lame);
    drop(agent);
    std::fs::remove_dir_all(&state).expect("lose the disk");
    // Its numbers are below those that were believed, and it does not know that the operator has said something.
    let agent = Agent::start_again(&fixture.setup);
    assert!(incarnation(&agent) < 4_000_000_000);
    eventually("it is ready", || reported(&fixture, ALL[0]), |state| state == "ready");
    assert!(fixture.probe().dial_many(SERVICE, 60).contains_key("b1"), "connects know as well");
    agent.tell(&["lame-duck", ALL[0]]);
    eventually("it is heard", || is_lame(&fixture, ALL[0]), |is_lame| *is_lame);
}

#[test]
fn a_run_without_an_agent_answers_by_itself_and_leaves_before_it_ends() {
    use std::os::unix::process::ExitStatusExt as _;
    let mut fixture = Fixture::without_daemon();
    let service = make_key(&fixture.setup, "service.key", 1);
    let key = stage::agent::derive_key(&fixture.setup, &service, ALL[0]);
    fixture.setup.write("socklb.toml", &text(&fixture, "round-robin", ""));
    fixture.start();
    let run = |more: &[&str]| {
        let mut command = std::process::Command::new(stage::program("socklb"));
        command.arg("--run").arg(fixture.setup.folder.join("nobody")).args([
            "agent",
            "run",
            "--backend",
            ALL[0],
        ]);
        // The port is served by another process: it is ready at once.
        command.args(more).args(["--", "/usr/bin/sleep", "120"]);
        command.stderr(std::fs::File::create(fixture.setup.folder.join("run.log")).expect("open the log"));
        stage::daemon::Kept::of(command.spawn().expect("start it"))
    };
    let log = || std::fs::read_to_string(fixture.setup.folder.join("run.log")).unwrap_or_default();
    let end = |child: &mut stage::daemon::Kept| {
        let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw).expect("a process");
        rustix::process::kill_process(pid, Signal::TERM).expect("send the signal");
    };
    let mut child = run(&["--key", &key.display().to_string(), "--listen", "127.0.0.1:9465"]);
    eventually("it is ready", || reported(&fixture, ALL[0]), |state| state == "ready");
    end(&mut child);
    eventually("it leaves", || is_lame(&fixture, ALL[0]), |is_lame| *is_lame);
    let status = child.wait().expect("it ends");
    assert_eq!(status.signal(), Some(15), "as the command did: {}", log());
    assert!(is_lame(&fixture, ALL[0]), "a restart is to follow");
    // Nobody can speak for it without keys and an agent. Asked to end meanwhile, it does at once.
    let mut child = run(&[]);
    eventually("it waits for an agent", log, |log| log.contains("not registered yet"));
    end(&mut child);
    assert_eq!(child.wait().expect("it ends").signal(), Some(15));
    assert!(log().contains("asked to end before anything was started"), "{}", log());
}

/// A push of the first backend that it is a lame duck, later than all that was believed, with a MAC of zeros.
pub fn forged_push() -> [u8; 80] {
    let mut forged = [0_u8; 80];
    (forged[0], forged[1], forged[2], forged[3], forged[5]) = (1, 3, 2, 6, 1);
    forged[6..8].copy_from_slice(&8001_u16.to_be_bytes());
    forged[18..24].copy_from_slice(&[0xff, 0xff, 127, 0, 0, 1]);
    forged[24..28].copy_from_slice(&u32::MAX.to_be_bytes());
    forged
}

#[test]
fn what_strangers_send_changes_nothing_and_is_counted() {
    let (fixture, _agent) = start("round-robin", &ALL);
    let log = fixture.daemon().log();
    let at =
        log.lines().find_map(|line| line.split("address=").nth(1).filter(|_| line.contains("asking agents")));
    let daemon: std::net::SocketAddr = at.expect("it says where").trim().parse().expect("an address");
    let stranger = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let forged = forged_push();
    for _ in 0..1_000 {
        stranger.send_to(&forged, daemon).expect("send");
        stranger.send_to(&forged[..40], daemon).expect("send");
    }
    eventually(
        "all are counted",
        || (datagrams(&fixture, "forged"), datagrams(&fixture, "malformed")),
        |counts| *counts == (1_000, 1_000),
    );
    assert!(!is_lame(&fixture, ALL[0]));
    assert_eq!(fixture.probe().dial_many(SERVICE, 60).len(), 3);
}

#[test]
fn a_service_hears_of_its_backends_by_its_own_key_alone() {
    const OTHER: &str = "10.96.0.2:80";
    let (fixture, agent) = start("round-robin", &ALL);
    make_key(&fixture.setup, "other.key", 1);
    fixture.setup.write("other.toml", &endpoints(&[(ALL[0], "")]));
    let with_other = |lines: &str| {
        let other = format!(
            "[[service]]\nname = \"other\"\naddress = \"{OTHER}\"\nbackends = {{ file = \"other.toml\" }}\n{lines}\n"
        );
        let path = fixture.setup.folder.join("socklb.toml");
        replace(&path, &(text(&fixture, "round-robin", "") + &other));
        fixture.daemon().signal(Signal::HUP);
    };
    agent.tell(&["lame-duck", ALL[0]]);
    eventually("it is heard", || is_lame(&fixture, ALL[0]), |is_lame| *is_lame);
    // It asks nobody, so it has to do with what the list says, though another service of the client knows more.
    with_other("");
    let reaches = || fixture.probe().dial_many(OTHER, 10).contains_key("b1");
    eventually("the other service serves", reaches, |reaches| *reaches);
    let counts = fixture.probe().dial_many(SERVICE, 60);
    assert!(counts.len() == 2 && !counts.contains_key("b1"), "{counts:?}");
    // Whoever may write a list and has a key of his own could otherwise speak for a backend of `users`.
    with_other("health = { probe = \"report\", interval = \"100ms\", key = \"other.key\" }");
    let faults = || fixture.setup.faults().join("\n");
    eventually("the daemon says so", faults, |faults| {
        faults.contains("services give 127.0.0.1:8001 different keys: nobody is asked for its reports")
    });
    with_other("");
    eventually("the fault is over", faults, |faults| !faults.contains("different keys"));
    eventually("it is heard", || is_lame(&fixture, ALL[0]), |is_lame| *is_lame);
    // Another agent that is named for it is not asked, and that is told.
    fixture.setup.write("other.toml", &endpoints(&[(ALL[0], "agent = \"127.0.0.1:9\"")]));
    with_other("health = { probe = \"report\", interval = \"100ms\" }");
    eventually("the daemon says so", faults, |faults| {
        faults
            .contains("services, or their lists, name different agents of 127.0.0.1:8001: the first is asked")
    });
    agent.tell(&["ready", ALL[0]]);
    eventually("it is heard", || reported(&fixture, ALL[0]), |state| state == "ready");
}

#[test]
fn a_key_that_everybody_may_read_and_a_port_that_is_taken_are_named() {
    let (mut fixture, agent) = start("round-robin", &ALL);
    let key = fixture.setup.folder.join("service.key");
    let set = |mode| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(&key, mode).expect("change the mode");
    };
    set(0o644);
    let path = fixture.setup.folder.join("socklb.toml").display().to_string();
    let (code, said) = failure(&fixture.setup.run(&["check", &path]));
    assert!(code == Some(1) && said.contains("is open to others (mode 0644)"), "{code:?} {said}");
    fixture.daemon().signal(Signal::HUP);
    let faults = || fixture.setup.faults().join("\n");
    eventually("the daemon says so", faults, |faults| faults.contains("is open to others (mode 0644)"));
    let ages = || ALL.map(|address| seen(&fixture, address).probe.and_then(|probe| probe.age_s));
    eventually("the keys before hold", ages, |ages| ages.iter().all(|age| age.is_some_and(|age| age < 2.0)));
    set(0o600);
    agent.tell(&["lame-duck", ALL[1]]);
    eventually("it is heard", || is_lame(&fixture, ALL[1]), |is_lame| *is_lame);
    fixture.stop();
    let taken = UdpSocket::bind("127.0.0.1:9467").expect("a socket");
    let other = text(&fixture, "round-robin", "").replace("127.0.0.1:0", "127.0.0.1:9467");
    replace(&fixture.setup.folder.join("socklb.toml"), &other);
    fixture.start();
    let faults = || fixture.setup.faults().join("\n");
    eventually("the daemon says so", faults, |faults| {
        faults.contains("reports cannot be received at 127.0.0.1:9467")
    });
    let counts = fixture.probe().dial_many(SERVICE, 60);
    assert_eq!(counts.len(), 2, "connects go on, and what the daemon before has heard holds: {counts:?}");
    assert!(!counts.contains_key("b2"), "{counts:?}");
    drop(taken);
    eventually("it is tried again", || reported(&fixture, ALL[0]), |state| state == "ready");
}
