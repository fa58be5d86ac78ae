//! The unit under a real systemd: it starts, is restricted as it declares, balances, and survives
//! the usual events of a service.

use lb_common::abi::ABI_VERSION;
use stage::{Machine, eventually};

use crate::{PACKAGE, install};

/// One client, with the cgroup of frontend.service, and one backend.
const CONFIG: &str = r#"
[[client]]
job    = "frontend"
cgroup = "system.slice/frontend.service"

[[service]]
name     = "users"
address  = "10.96.0.10:80"
backends = { static = ["127.0.0.1:8001"] }
"#;

/// A machine with the package and its configuration, on which the backend and frontend.service run.
fn machine() -> Machine {
    let machine = Machine::with_systemd();
    install(&machine);
    // systemd listens, and starts `echo` for each connection: a backend of three lines.
    machine
        .write("/etc/systemd/system/backend.socket", "[Socket]\nListenStream=127.0.0.1:8001\nAccept=yes\n");
    machine.write(
        "/etc/systemd/system/backend@.service",
        "[Service]\nExecStart=/usr/bin/echo b1\nStandardOutput=socket\n",
    );
    machine.write("/etc/systemd/system/frontend.service", "[Service]\nExecStart=/usr/bin/sleep infinity\n");
    machine.write("/etc/socklb/socklb.toml", CONFIG);
    machine.good(&["systemctl", "daemon-reload"]);
    machine.good(&["systemctl", "start", "backend.socket", "frontend.service"]);
    machine
}

/// A machine with a running daemon that balances.
fn balanced() -> Machine {
    let machine = machine();
    machine.good(&["systemctl", "start", "socklb.service"]);
    until_balanced(&machine);
    machine
}

/// The result of a dial by a process of frontend.service: the backend's name, or the error of bash.
fn dial(machine: &Machine) -> String {
    let script = "echo $$ > /sys/fs/cgroup/system.slice/frontend.service/cgroup.procs && \
                  exec 3<>/dev/tcp/10.96.0.10/80 && cat <&3";
    let output = machine.run(&["bash", "-c", script]);
    let text = if output.status.success() { output.stdout } else { output.stderr };
    String::from_utf8_lossy(&text).trim().to_owned()
}

#[track_caller]
fn until_balanced(machine: &Machine) {
    eventually("connects reach the backend", || dial(machine), |answer| answer == "b1");
}

fn property(machine: &Machine, name: &str) -> String {
    machine.good(&["systemctl", "show", "--value", "--property", name, "socklb.service"])
}

#[test]
fn without_a_configuration_the_unit_is_enabled_and_skipped() {
    let machine = Machine::with_systemd();
    install(&machine);
    machine.good(&["systemctl", "is-enabled", "socklb.service"]);
    machine.good(&["systemctl", "start", "socklb.service"]);
    assert_eq!(property(&machine, "ActiveState"), "inactive");
    assert_eq!(property(&machine, "ConditionResult"), "no");
}

#[test]
fn the_daemon_has_exactly_the_privileges_of_its_unit() {
    let machine = balanced();
    let pid = property(&machine, "MainPID");
    let status = machine.good(&["cat", &format!("/proc/{pid}/status")]);
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
        line.unwrap_or_else(|| panic!("no {name} in {status}")).to_owned()
    };
    let user = machine.good(&["id", "--user", "socklb"]);
    assert_eq!(field("Uid"), [user.as_str(); 4].join("\t"));
    // CAP_NET_ADMIN is 12, CAP_PERFMON 38, CAP_BPF 39.
    let capabilities = format!("{:016x}", 1_u64 << 12 | 1 << 38 | 1 << 39);
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(set), capabilities, "{set}");
    }
    assert_eq!(field("NoNewPrivs"), "1");
    // 2 means that the daemon's system calls are filtered.
    assert_eq!(field("Seccomp"), "2");
    // Below `/sys`, the daemon can write only to its pin directory.
    let mounts = machine.good(&["cat", &format!("/proc/{pid}/mounts")]);
    let writable = mounts.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split(' ').collect();
        let writable = fields[3].split(',').any(|option| option == "rw");
        (fields[1].starts_with("/sys") && writable).then(|| fields[1].to_owned())
    });
    assert_eq!(writable.collect::<Vec<_>>(), ["/sys/fs/bpf/socklb"]);
    // Only the group of the socket may connect to it.
    let stat = machine.good(&["stat", "--format", "%U:%G %a", "/run/socklb", "/run/socklb/socklb.sock"]);
    assert_eq!(stat, "socklb:socklb 750\nsocklb:socklb 660");
}

/// The unprivileged daemon must reopen its maps for each page.
#[test]
fn metrics_are_served_at_the_configured_port() {
    let machine = machine();
    machine.write("/etc/socklb/socklb.toml", &format!("{CONFIG}\n[metrics]\nlisten = \"127.0.0.1:9464\"\n"));
    machine.good(&["systemctl", "start", "socklb.service"]);
    until_balanced(&machine);
    let script = r"exec 3<>/dev/tcp/127.0.0.1/9464 && printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3 && cat <&3";
    let page = machine.good(&["bash", "-c", script]);
    for line in [
        r#"socklb_client_attached{client="frontend"} 1"#,
        r#"socklb_client_readable{client="frontend"} 1"#,
        r#"socklb_backend_usable{client="frontend",service="users",backend="127.0.0.1:8001"} 1"#,
    ] {
        assert!(page.lines().any(|found| found == line), "{line} is not in {page}");
    }
    let chosen = r#"socklb_flows_started_total{client="frontend",service="users",backend="127.0.0.1:8001"} "#;
    let chosen = page.lines().find_map(|line| line.strip_prefix(chosen)?.parse::<u64>().ok());
    assert!(chosen.is_some_and(|count| count > 0), "{page}");
}

#[test]
fn a_restarted_service_is_balanced_again() {
    let machine = balanced();
    // systemd removes the cgroup and creates it again.
    machine.good(&["systemctl", "restart", "frontend.service"]);
    until_balanced(&machine);
}

/// Uses the drop-in that the package ships; the first action of the service is a dial.
#[test]
fn the_first_connect_of_a_restarted_service_is_balanced() {
    let machine = balanced();
    let drop_in = "/usr/share/doc/socklb/examples/balanced-service.conf";
    let drop_in = std::fs::read_to_string(machine.file(drop_in)).expect("the example is installed");
    machine.write("/etc/systemd/system/frontend.service.d/socklb.conf", &drop_in);
    let dials = "[Unit]\nStartLimitIntervalSec=0\n[Service]\nExecStart=/usr/bin/bash -c 'exec 3<>/dev/tcp/10.96.0.10/80 && cat <&3 >> /run/answers; \
                 exec sleep infinity'\n";
    machine.write("/etc/systemd/system/frontend.service", dials);
    machine.good(&["systemctl", "daemon-reload"]);
    let answers = || machine.run(&["cat", "/run/answers"]).stdout;
    for restart in 1..=10 {
        machine.good(&["systemctl", "restart", "frontend.service"]);
        // systemctl returns when the service has been started. The next restart must not kill the
        // service before its dial returns.
        eventually("the first connect was balanced", answers, |answers| {
            answers == "b1\n".repeat(restart).as_bytes()
        });
    }
    let status = machine.good(&["socklb", "status", "--json"]);
    let status: lb_view::status::StatusDocument = serde_json::from_str(&status).expect("the text is JSON");
    assert_eq!(status.clients[0].not_a_service, 0);
}

#[test]
fn the_unit_is_ready_with_its_daemon_and_shows_how_many_clients_are_attached() {
    let machine = machine();
    // The command returns after the daemon has notified that it is ready.
    machine.good(&["systemctl", "start", "socklb.service"]);
    assert_eq!(dial(&machine), "b1");
    assert_eq!(property(&machine, "StatusText"), "1 of 1 clients attached");
    machine.good(&["systemctl", "reload", "socklb.service"]);
    eventually(
        "the service is active again",
        || property(&machine, "ActiveState"),
        |state| state == "active",
    );
    machine.good(&["systemctl", "stop", "frontend.service"]);
    let text = || property(&machine, "StatusText");
    eventually("the status text shows the clients", text, |text| text == "0 of 1 clients attached");
}

#[test]
fn each_journal_line_has_its_priority() {
    let machine = machine();
    machine.good(&["systemctl", "start", "socklb.service"]);
    // The daemon watches the file.
    machine.good(&["sh", "-c", "echo nonsense >> /etc/socklb/socklb.toml"]);
    let journal = |priority: &str| {
        let unit = ["--no-pager", "--output=cat", "--unit=socklb.service", "--identifier=socklb"];
        machine.good(&[&["journalctl"], &unit[..], &[priority]].concat())
    };
    let warnings = || journal("--priority=warning");
    let warnings = eventually("the fault is logged as a warning", warnings, |text| {
        text.contains("the configuration cannot be used")
    });
    assert!(!warnings.contains("INFO"), "{warnings}");
    let all = journal("--priority=info");
    let running =
        all.lines().find(|line| line.contains("running pins=")).expect("the log has the line of the start");
    assert!(running.starts_with(" INFO lb_user::"), "the line has neither a time nor a prefix: {running}");
}

#[test]
fn a_killed_daemon_is_restarted_and_connects_continue() {
    let machine = balanced();
    let before = property(&machine, "MainPID");
    machine.good(&["systemctl", "kill", "--signal=KILL", "socklb.service"]);
    assert_eq!(dial(&machine), "b1");
    let pid = || property(&machine, "MainPID");
    eventually("another daemon runs", pid, |pid| *pid != before && pid != "0");
    assert_eq!(dial(&machine), "b1");
}

#[test]
fn an_upgrade_restarts_the_daemon_and_retains_the_programs() {
    let machine = balanced();
    let before = property(&machine, "MainPID");
    let links =
        || machine.good(&["ls", "--inode", &format!("/sys/fs/bpf/socklb/v{ABI_VERSION}/frontend/links")]);
    let made = links();
    machine.good(&["dpkg", "--install", PACKAGE]);
    let pid = property(&machine, "MainPID");
    assert!(pid != before && pid != "0", "process {before}, then {pid}");
    assert_eq!(links(), made);
    assert_eq!(dial(&machine), "b1");
    // The installed version refuses the configuration, so the running daemon is not restarted.
    machine.write("/etc/socklb/socklb.toml", "[[client]]\n");
    let upgrade = machine.run(&["dpkg", "--install", PACKAGE]);
    let error_text = String::from_utf8_lossy(&upgrade.stderr).into_owned();
    assert!(
        upgrade.status.success() && error_text.contains("socklb.service is not restarted"),
        "{error_text}"
    );
    assert!(error_text.contains("/etc/socklb/socklb.toml:1"), "the text names the fault: {error_text}");
    assert_eq!(property(&machine, "MainPID"), pid);
    assert_eq!(dial(&machine), "b1");
    machine.write("/etc/socklb/socklb.toml", CONFIG);
    // A daemon that the administrator has stopped stays stopped, and its programs stay in place.
    machine.good(&["systemctl", "stop", "socklb.service"]);
    machine.good(&["dpkg", "--install", PACKAGE]);
    assert_eq!(property(&machine, "ActiveState"), "inactive");
    assert_eq!(dial(&machine), "b1");
}

#[test]
fn a_reload_with_a_faulty_file_fails_and_changes_nothing() {
    let machine = balanced();
    machine.good(&["systemctl", "reload", "socklb.service"]);
    machine.write("/etc/socklb/socklb.toml", "[[client]]\n");
    assert!(!machine.run(&["systemctl", "reload", "socklb.service"]).status.success());
    assert_eq!(property(&machine, "ActiveState"), "active");
    assert_eq!(dial(&machine), "b1");
}

#[test]
fn after_detach_the_service_starts_again() {
    let machine = balanced();
    machine.good(&["systemctl", "stop", "socklb.service"]);
    machine.good(&["socklb", "detach", "--all"]);
    assert!(!machine.file("/sys/fs/bpf/socklb").exists());
    assert!(dial(&machine).contains("unreachable"));
    machine.good(&["systemctl", "start", "socklb.service"]);
    until_balanced(&machine);
}

#[test]
fn removal_stops_the_daemon_and_detaches_the_programs() {
    let machine = balanced();
    let pid = property(&machine, "MainPID");
    machine.good(&["dpkg", "--remove", "socklb"]);
    assert!(!machine.file(&format!("/proc/{pid}")).exists());
    for path in ["/sys/fs/bpf/socklb", "/run/socklb"] {
        assert!(!machine.file(path).exists(), "{path} is removed");
    }
    // The dial fails, because the machine has no route to the service's address.
    assert!(dial(&machine).contains("unreachable"));
    machine.good(&["dpkg", "--purge", "socklb"]);
    assert!(!machine.file("/var/lib/socklb").exists());
    assert!(machine.file("/etc/socklb/socklb.toml").exists());
}

#[test]
fn a_start_without_a_privilege_is_not_retried() {
    let machine = machine();
    let drop_in = "[Service]\nAmbientCapabilities=\nAmbientCapabilities=CAP_BPF\n";
    machine.write("/etc/systemd/system/socklb.service.d/caps.conf", drop_in);
    machine.good(&["systemctl", "daemon-reload"]);
    machine.run(&["systemctl", "start", "socklb.service"]);
    let state = || property(&machine, "ActiveState");
    eventually("the unit has failed", state, |state| state == "failed");
    assert_eq!(property(&machine, "ExecMainStatus"), "4");
}
