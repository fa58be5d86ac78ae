//! The agent's unit under a real systemd, and services with an agent.

use stage::{Machine, eventually};

use crate::install;

/// The address of the backend, in each machine's own network.
const BACKEND: &str = "127.0.0.1:8001";

/// A server of one line, from systemd's package: it sends `b1` on each connection and closes it.
const SERVER: &str =
    "/usr/bin/systemd-socket-activate --listen=127.0.0.1:8001 --accept --inetd /usr/bin/echo b1";

/// A machine with the package, keys, and an agent that checks the backend's health with these
/// lines.
fn machine(check: &str) -> Machine {
    let machine = Machine::with_systemd();
    install(&machine);
    // The modes are those that docs/reference/agent.md describes: the unit's user may read the key,
    // and members of its group may not.
    let script = format!(
        "umask 077 && cd /etc/socklb && socklb agent key > service.key && \
         socklb agent key --of service.key {BACKEND} > backend.key && \
         chown socklb-agent backend.key"
    );
    machine.good(&["sh", "-c", &script]);
    machine.write(
        "/etc/socklb/agent.toml",
        &format!("[[backend]]\naddress = \"{BACKEND}\"\nkey = \"backend.key\"\n{check}\n"),
    );
    machine.write("/etc/systemd/system/users.service", &format!("[Service]\nExecStart={SERVER}\n"));
    machine.good(&["systemctl", "daemon-reload"]);
    machine
}

fn property(machine: &Machine, unit: &str, name: &str) -> String {
    machine.good(&["systemctl", "show", "--value", "--property", name, unit])
}

/// The backend in the agent's status; null if the agent does not answer.
fn backend(machine: &Machine) -> serde_json::Value {
    let output = machine.run(&["socklb", "agent", "status", "--json"]).stdout;
    let status: Result<serde_json::Value, _> = serde_json::from_slice(&output);
    status.ok().and_then(|status| status.pointer("/backends/0").cloned()).unwrap_or_default()
}

fn readiness(machine: &Machine) -> String {
    backend(machine)["readiness"].as_str().unwrap_or("absent").to_owned()
}

#[track_caller]
fn until(machine: &Machine, expected: &str) {
    eventually("the backend's readiness", || readiness(machine), |seen| seen == expected);
}

#[test]
fn the_agent_runs_as_its_own_user_and_retains_lame_ducks_over_restarts() {
    let machine = machine("interval = \"200ms\"");
    machine.good(&["systemctl", "start", "users.service", "socklb-agent.service"]);
    until(&machine, "ready");
    let pid = property(&machine, "socklb-agent.service", "MainPID");
    let status = machine.good(&["cat", &format!("/proc/{pid}/status")]);
    let user = machine.good(&["id", "--user", "socklb-agent"]);
    assert!(status.contains(&format!("Uid:\t{user}\t{user}\t{user}\t{user}\n")), "{status}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert!(
            status.contains(&format!("{set}:\t0000000000000000\n")),
            "capability set {set} is empty: {status}"
        );
    }
    assert_eq!(property(&machine, "socklb-agent.service", "StatusText"), "1 of 1 backends ready");
    let page = || {
        let script =
            r"exec 3<>/dev/tcp/127.0.0.1/9465 && printf 'GET /readyz HTTP/1.0\r\n\r\n' >&3 && cat <&3";
        machine.good(&["bash", "-c", script])
    };
    assert!(page().starts_with("HTTP/1.0 200 OK"), "{}", page());
    // A backend that was made a lame duck remains a lame duck when the agent is restarted, in an
    // orderly way or after a kill.
    machine.good(&["socklb", "agent", "lame-duck"]);
    assert_eq!(readiness(&machine), "lame-duck");
    assert!(page().starts_with("HTTP/1.0 503 "), "{}", page());
    machine.good(&["systemctl", "restart", "socklb-agent.service"]);
    assert_eq!(readiness(&machine), "lame-duck");
    machine.good(&["systemctl", "kill", "--signal=KILL", "socklb-agent.service"]);
    let has_died = || property(&machine, "socklb-agent.service", "NRestarts");
    eventually("systemd starts the agent again", has_died, |restarts| restarts == "1");
    until(&machine, "lame-duck");
    machine.good(&["socklb", "agent", "ready"]);
    until(&machine, "ready");
    // The reload refuses a faulty file and changes nothing.
    machine.write("/etc/socklb/agent.toml", "[[backend]]\n");
    assert!(!machine.run(&["systemctl", "reload", "socklb-agent.service"]).status.success());
    assert_eq!(readiness(&machine), "ready");
    // The health check detects that the service has ended without a report.
    machine.good(&["systemctl", "stop", "users.service"]);
    until(&machine, "down");
}

/// The service has the drop-in that the package ships. The test replaces only the address and the
/// command in the drop-in, and the service runs as user `nobody`.
#[test]
fn a_service_with_the_drop_in_is_a_lame_duck_before_it_ends_and_ready_after_a_restart() {
    let machine = machine("check = \"off\"");
    let drop_in = machine.file("/usr/share/doc/socklb/examples/backend-service.conf");
    let drop_in = std::fs::read_to_string(drop_in).expect("the example is installed");
    let command = format!("/bin/sh -c 'systemd-notify --ready; exec {SERVER}'");
    let ours = drop_in.replace("10.0.0.1:8080", BACKEND).replace("/usr/bin/users --listen 8080", &command);
    assert!(ours.contains(SERVER) && !ours.contains("10.0.0.1"), "{drop_in}");
    machine.write("/etc/systemd/system/users.service.d/socklb.conf", &ours);
    // The start is complete when the server has notified systemd.
    let unit = "[Service]\nType=notify\nUser=nobody\nExecStart=/usr/bin/true\n";
    machine.write("/etc/systemd/system/users.service", unit);
    machine.good(&["systemctl", "daemon-reload"]);
    machine.good(&["systemctl", "start", "socklb-agent.service", "users.service"]);
    until(&machine, "ready");
    let load = || backend(&machine)["load"]["utilization"].as_f64();
    eventually("the service's cgroup is measured", load, Option::is_some);
    // A restarted agent receives the registration again without an operator.
    machine.good(&["systemctl", "restart", "socklb-agent.service"]);
    until(&machine, "ready");
    machine.good(&["systemctl", "restart", "users.service"]);
    until(&machine, "ready");
    // If `socklb agent run` is killed, systemd starts it again before the agent detects the end.
    let main = property(&machine, "users.service", "MainPID");
    machine.write("/etc/systemd/system/users.service.d/again.conf", "[Service]\nRestart=on-failure\n");
    machine.good(&["systemctl", "daemon-reload"]);
    machine.good(&["systemctl", "kill", "--kill-who=main", "--signal=KILL", "users.service"]);
    let another = || property(&machine, "users.service", "MainPID");
    eventually("systemd starts another process", another, |pid| *pid != main && pid != "0");
    let runner = || backend(&machine)["runner"]["process"].to_string();
    eventually("the agent registers the new process", runner, |process| *process == another());
    until(&machine, "ready");
    assert_eq!(property(&machine, "users.service", "NRestarts"), "1");
    machine.good(&["systemctl", "stop", "users.service"]);
    assert_eq!(property(&machine, "users.service", "Result"), "success");
    let journal = machine.good(&["journalctl", "--no-pager", "--output=cat", "--unit=users.service"]);
    for text in ["sent a signal to the application to end it signal=SIGTERM", "LameDuck", "Ready"] {
        assert!(journal.contains(text), "{text:?} is not in {journal}");
    }
}
