//! Backends that report their own state, through a real agent. From the next connect on, a lame
//! duck is not chosen. It is chosen again once it is ready, even if agents and daemons restart in
//! between.

use lb_common::abi::host::{self, Sender, SenderName};
use lb_view::backend;
use rustix::process::Signal;
use stage::agent::{Agent, make_key};
use stage::eventually;
use stage::fixture::{Fixture, config};
use stage::maps::hash;

/// The addresses of the backends.
pub const ALL: [&str; 3] = ["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"];

/// Policies, each of which must skip a lame duck.
pub const POLICIES: [&str; 5] = ["round-robin", "weighted-round-robin", "least-loaded", "p2c", "random"];

/// A configuration with a service that requests reports.
pub fn text(fixture: &Fixture, policy: &str, health: &str) -> String {
    let lines = format!(
        "policy = \"{policy}\"\nsubset = {{ size = 3 }}\nhealth = {{ probe = \"report\", interval = \"100ms\", idle_interval = \"100ms\"{health} }}"
    );
    config(&fixture.cgroup, "{ file = \"users.toml\" }", &lines)
        + "[reports]\nlisten = \"127.0.0.1:0\"\nkey = \"service.key\"\n"
}

/// Three backends, an agent for the backends in `reporting`, and a daemon that sends requests to
/// the agent.
fn start(policy: &str, reporting: &[&str]) -> (Fixture, Agent) {
    let mut fixture = Fixture::without_daemon();
    let key = make_key(&fixture.setup, "service.key", 1);
    let agent = Agent::start(&fixture.setup, &key, reporting);
    fixture.setup.write("socklb.toml", &text(&fixture, policy, ""));
    fixture.start();
    for backend in reporting {
        eventually("the daemon shows the report", || reported(&fixture, backend), |state| state == "ready");
    }
    (fixture, agent)
}

fn seen(fixture: &Fixture, address: &str) -> backend::BackendStatus {
    fixture.setup.backend(address).expect("the backend has a slot")
}

/// The state that a backend has reported, as the status shows it.
pub fn reported(fixture: &Fixture, address: &str) -> String {
    seen(fixture, address).probe.map(|probe| probe.state).unwrap_or_default()
}

/// Whether the backend is a lame duck.
pub fn is_lame(fixture: &Fixture, address: &str) -> bool {
    seen(fixture, address).state == "lame-duck"
}

/// The daemon and the agent read changed key files at SIGHUP. `lb-user` and `lb-report` have the
/// steps that replace a key as scripts, in which no request is refused.
#[test]
fn changed_key_files_are_read_at_sighup() {
    let (fixture, agent) = start("round-robin", &ALL);
    let service = fixture.setup.folder.join("service.key");
    let old = std::fs::read_to_string(&service).expect("read the key");
    let new = std::fs::read_to_string(make_key(&fixture.setup, "new.key", 2)).expect("read the key");
    // The ids of the daemon's keys for each backend. The daemon sends requests under the first key.
    let polled = || {
        let map = hash::<SenderName, Sender>(&fixture.setup.host_map(host::map::SENDERS));
        let entries = map.iter().map(|entry| entry.expect("read a map entry").1.0.keys.map(|key| key.id));
        entries.collect::<Vec<_>>()
    };
    let has = || {
        let status = agent.status();
        let backends = status["backends"].as_array().expect("the status lists backends");
        backends.iter().map(|backend| backend["keys"].to_string()).collect::<Vec<_>>()
    };
    for (keys, ids, known) in [(old + &new, [1, 2], "[1,2]"), (new, [2, 0], "[2]")] {
        std::fs::write(&service, &keys).expect("write the keys");
        fixture.daemon().signal(Signal::HUP);
        eventually("the daemon uses these keys", polled, |all| *all == [ids; 3]);
        for backend in ALL {
            stage::agent::derive_key(&fixture.setup, &service, backend);
        }
        agent.signal(Signal::HUP);
        eventually("the agent has these keys", has, |all| *all == [known; 3]);
    }
    for address in ALL {
        eventually("the backend is ready", || reported(&fixture, address), |state| state == "ready");
    }
}

#[test]
fn agent_run_without_an_agent_answers_requests_and_announces_its_end() {
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
        // Another process listens at the backend's port, so the backend is ready at once.
        command.args(more).args(["--", "/usr/bin/sleep", "120"]);
        command.stderr(std::fs::File::create(fixture.setup.folder.join("run.log")).expect("open the log"));
        stage::daemon::ChildGuard::of(command.spawn().expect("start it"))
    };
    let log = || std::fs::read_to_string(fixture.setup.folder.join("run.log")).unwrap_or_default();
    let end = |child: &mut stage::daemon::ChildGuard| {
        let pid = i32::try_from(child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw)
            .expect("the child has a process id");
        rustix::process::kill_process(pid, Signal::TERM).expect("send the signal");
    };
    let mut child = run(&["--key", &key.display().to_string(), "--listen", "127.0.0.1:9465"]);
    eventually("the backend is ready", || reported(&fixture, ALL[0]), |state| state == "ready");
    end(&mut child);
    eventually("the backend is a lame duck", || is_lame(&fixture, ALL[0]), |is_lame| *is_lame);
    let status = child.wait().expect("the run ends");
    assert_eq!(status.signal(), Some(15), "the run ends by the same signal as its command: {}", log());
    assert!(is_lame(&fixture, ALL[0]), "the lame duck remains, because a restart follows");
    // Without keys and an agent the run cannot report the application, and waits. A signal ends the
    // run at once.
    let mut child = run(&[]);
    eventually("the run waits for an agent", log, |log| log.contains("cannot register with the agent yet"));
    end(&mut child);
    assert_eq!(child.wait().expect("the run ends").signal(), Some(15));
    assert!(log().contains("a signal arrived before the command was started"), "{}", log());
}

/// A push that reports the first backend as a lame duck, with a higher number than all accepted
/// reports, and with a MAC of zeros.
pub fn forged_push() -> [u8; 80] {
    let mut forged = [0_u8; 80];
    (forged[0], forged[1], forged[2], forged[3], forged[5]) = (1, 3, 2, 6, 1);
    forged[6..8].copy_from_slice(&8001_u16.to_be_bytes());
    forged[18..24].copy_from_slice(&[0xff, 0xff, 127, 0, 0, 1]);
    forged[24..28].copy_from_slice(&u32::MAX.to_be_bytes());
    forged
}
