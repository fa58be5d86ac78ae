//! Commands that need neither a daemon nor privileges: their output and their exit codes. Each test
//! runs the program in a folder of its own, without pins. The local tests (`tests/local`) run the
//! commands that need a daemon.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use lb_view::explanation::Explanation;

/// A client of one service with the endpoints in `users.toml`.
const CONFIG: &str = "[[client]]\njob = \"web\"\ncgroup = \"socklb-test-nowhere\"\n\n[[service]]\nname = \
                      \"users\"\naddress = \"10.96.0.10:80\"\nbackends = { file = \"users.toml\" }\n";

/// A folder with the files and directories of a host.
struct Folder(tempfile::TempDir);

impl Folder {
    /// A folder with [`CONFIG`] and a list of one endpoint.
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().expect("make a folder"));
        folder.write("socklb.toml", CONFIG);
        folder.list(&[("127.0.0.1:8001", "")]);
        folder
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, text).expect("write the file");
        path
    }

    /// Writes the list of the service: addresses, each with further lines.
    fn list(&self, endpoints: &[(&str, &str)]) {
        let entry =
            |(address, more): &(&str, &str)| format!("[[endpoint]]\naddress = \"{address}\"\n{more}\n");
        self.write("users.toml", &endpoints.iter().map(entry).collect::<String>());
    }

    fn socklb(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_socklb"));
        command.current_dir(self.0.path()).env_remove("SOCKLB_CONFIG").stdin(Stdio::null());
        command.args(["--pins", "pins", "--run", "run", "--state", "state"]).args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.socklb(arguments).output().expect("start the command")
    }

    /// The exit code, and the texts on standard output and standard error.
    fn texts(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let output = self.run(arguments);
        let [out, errors] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
        (output.status.code(), out, errors)
    }

    fn check(&self) -> (Option<i32>, String, String) {
        self.texts(&["check", "socklb.toml"])
    }

    /// Asserts that a command fails, and that its error contains these texts.
    #[track_caller]
    fn fails(&self, arguments: &[&str], parts: &[&str]) {
        let (code, _, text) = self.texts(arguments);
        assert_eq!(code, Some(1), "{text}");
        for part in parts {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
    }

    #[track_caller]
    fn check_fails(&self, parts: &[&str]) {
        self.fails(&["check", "socklb.toml"], parts);
    }
}

#[test]
fn check_covers_the_configuration_and_its_files() {
    let folder = Folder::new();
    let (code, text, _) = folder.check();
    assert!(code == Some(0) && text.ends_with("socklb.toml: ok\n"), "{text}");
    folder.list(&[("127.0.0.1:8001", "weight = 70000"), ("[::1]:80", "")]);
    folder.check_fails(&["users.toml:3:10", "70000", "[::1]:80"]);
    // This list exceeds the limits.
    let many: Vec<String> = (1..=65).map(|n| format!("127.0.0.{n}:80")).collect();
    folder.list(&many.iter().map(|address| (address.as_str(), "")).collect::<Vec<_>>());
    folder.write("socklb.toml", &format!("{CONFIG}[limits]\nslots = 64\n"));
    let expected = "socklb.toml:8: client web, service users: all 64 slots";
    folder.check_fails(&[expected, "raise slots in [limits]"]);
    folder.write("socklb.toml", &format!("{CONFIG}[limits]\nschedule_entries = 1024\n"));
    folder.list(&many[..33].iter().map(|address| (address.as_str(), "")).collect::<Vec<_>>());
    folder.check_fails(&["would have 2048 entries, but limits.schedule_entries allows only 1024"]);
    folder.fails(&["check", "/nowhere/socklb.toml"], &["/nowhere/socklb.toml"]);
    let pipe = folder.0.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).expect("make a pipe");
    folder.fails(&["check", "pipe"], &["it is not a regular file"]);
    assert!(!folder.0.path().join("pins").exists(), "check changes nothing");
}

/// `check` notes settings that are valid but may not be intended.
#[test]
fn check_notes_settings_without_effect() {
    let folder = Folder::new();
    let absent = "note: client web: cgroup socklb-test-nowhere does not exist yet; the daemon attaches the \
                  client when the cgroup appears\n";
    // If the host has no cgroup2, the configuration is meant for another host.
    let absent = if lb_kernel::cgroup2_mount().is_ok() { absent } else { "" };
    let noted = |note: &str| (Some(0), format!("{absent}{note}socklb.toml: ok\n"), String::new());
    assert_eq!(folder.check(), noted(""));
    folder.list(&[("127.0.0.1:8001", "zone = \"a\""), ("127.0.0.1:8002", "")]);
    let note = "note: service users: `zone` has no effect yet, but is set for 1 endpoint\n";
    assert_eq!(folder.check(), noted(note));
    let active = CONFIG.replacen("\n\n", "\naccounting = \"active\"\n\n", 1);
    folder.write("socklb.toml", &format!("{active}ejection = {{}}\n"));
    folder.list(&[("127.0.0.1:8001", "")]);
    let note = "note: client web, service users: with accounting = \"active\" ejection counts `unanswered` \
                connects and errors that are pending at a close, but no failed blocking connects; with \
                accounting = \"full\" it counts all failures\n";
    assert_eq!(folder.check(), noted(note));
    folder.write("socklb.toml", &CONFIG.replace("users.toml", "users"));
    let list = r#"[{"targets": ["127.0.0.1:8001"], "labels": {"state": "running"}}]"#;
    let file = folder.write("users", list);
    let note =
        "label state is ignored: unknown state \"running\" on line 1; write a label socklb_state instead";
    let (code, text, _) = folder.check();
    assert!(code == Some(0) && text.contains(&format!("{}: {note}", file.display())), "{text}");
}

/// `check` reports all faults at once, so that an operator need not run it once per fault.
#[test]
fn check_reports_all_faults_of_the_configuration_and_its_files_at_once() {
    let folder = Folder::new();
    let more = "polcy = 1\n\n[[service]]\nname = \"mail\"\naddress = \"mail:25\"\nbackends = { file = \"gone.toml\" }\n";
    folder.write("socklb.toml", &format!("{CONFIG}{more}"));
    folder.list(&[("127.0.0.1:0", "weight = 70000")]);
    folder.check_fails(&[
        "unknown key \"polcy\"",
        "address \"mail:25\" is a host name",
        "gone.toml: No such file",
        "socklb.toml:14:21",
        "users.toml:3:10",
        "127.0.0.1:0 cannot be connected to: port 0",
    ]);
    // The daemon refuses the configuration with the same messages.
    let parts = ["socklb.toml:9:", "unknown key \"polcy\"", "address \"mail:25\" is a host name"];
    folder.fails(&["run", "--config", "socklb.toml"], &parts);
}

/// A TCP and a UDP service at one address share a file. `check` reports the faults of the file
/// once.
#[test]
fn check_reports_faults_of_a_shared_file_once() {
    let folder = Folder::new();
    let service = &CONFIG[CONFIG.find("[[service]]").expect("a service")..];
    let second = service.replacen("users", "users-udp", 1) + "protocol = \"udp\"\n";
    folder.write("socklb.toml", &format!("{CONFIG}{second}"));
    let good = folder.check();
    assert_eq!(good.0, Some(0), "{good:?}");
    folder.list(&[("127.0.0.1:8001", "weight = 70000")]);
    let (code, _, faults) = folder.check();
    assert_eq!((code, faults.matches("users.toml:3:10").count()), (Some(1), 1), "{faults}");
}

#[test]
fn check_refuses_a_policy_that_the_kernel_cannot_run() {
    let folder = Folder::new();
    let text = format!("{CONFIG}policy = \"least-loaded\"\n");
    folder.write("socklb.toml", &text);
    let expected = "policy \"least-loaded\" examines every backend of the subset, at most 256";
    folder.check_fails(&[expected, "write subset = { size = N }, N at most 256"]);
    folder.write("socklb.toml", &format!("{text}subset = {{ size = 3 }}\n"));
    let good = folder.check();
    assert_eq!(good.0, Some(0), "{good:?}");
}

#[test]
fn check_refuses_a_key_that_other_users_can_read() {
    let folder = Folder::new();
    let key = folder.write("service.key", &format!("1 {}\n", "5a".repeat(32)));
    folder
        .write("socklb.toml", &format!("{CONFIG}health = {{ probe = \"report\", key = \"service.key\" }}\n"));
    fs::set_permissions(&key, Permissions::from_mode(0o644)).expect("change the mode");
    folder.check_fails(&["is accessible to other users (mode 0644)"]);
    fs::set_permissions(&key, Permissions::from_mode(0o600)).expect("change the mode");
    let good = folder.check();
    assert_eq!(good.0, Some(0), "{good:?}");
}

/// A list that `--endpoints` names takes the place of the service's list. Its faults are reported
/// before anything is compared.
#[test]
fn a_preview_that_cannot_be_used_is_reported_with_its_reason() {
    let folder = Folder::new();
    let preview = |list| ["check", "socklb.toml", "--against-running", "--endpoints", list];
    folder.fails(&preview("users=next.toml"), &["--endpoints: cannot read"]);
    folder.write("next.toml", "[[endpoint]]\naddress = 5\n");
    folder.fails(&preview("users=next.toml"), &["next.toml:2:11"]);
    folder.write("next.toml", "");
    let expected = "no client dials a service \"user\" with endpoints from a file or a server (did you mean users? \
                    services with a file or a server: users)";
    folder.fails(&preview("user=next.toml"), &[expected]);
    folder.fails(
        &["check", "socklb.toml", "--against-running"],
        &["nothing to compare with: no daemon answers at", "no client has pins below"],
    );
}

#[test]
fn commands_that_change_nothing_without_a_daemon_print_json() {
    let folder = Folder::new();
    let commands: [&[&str]; 4] = [
        &["drain", "users", "0"],
        &["undrain", "users", "0"],
        &["weight", "users", "0", "50%"],
        &["close", "users", "0"],
    ];
    for arguments in commands {
        let (code, text, _) = folder.texts(&[arguments, &["--json"]].concat());
        let document: serde_json::Value = serde_json::from_str(&text).expect("the text is JSON");
        let refused = document["refused"].as_str().expect("a reason");
        assert!(code == Some(1) && refused.starts_with("the daemon is not running"), "{arguments:?}: {text}");
    }
}

/// A full disk is an error with a message. A closed pipe is not an error.
#[test]
fn a_full_output_device_is_an_error_and_not_a_panic() {
    let folder = Folder::new();
    let commands: [&[&str]; 9] = [
        &["status"],
        &["status", "--json"],
        &["status", "--watch"],
        &["flows"],
        &["flows", "--json"],
        &["explain", "users", "--config", "socklb.toml"],
        &["doctor", "--config", "socklb.toml"],
        &["doctor", "--json"],
        &["check", "socklb.toml"],
    ];
    let full = || File::options().write(true).open("/dev/full").expect("open /dev/full");
    for arguments in commands {
        let output = folder.socklb(arguments).stdout(full()).output().expect("start the command");
        let text = String::from_utf8_lossy(&output.stderr);
        let is_reported = text.contains("socklb: write to standard output: ");
        assert!(output.status.code() == Some(1) && is_reported, "{arguments:?}: {output:?}");
        // If standard error is also full, only the exit code shows the failure.
        let ended =
            folder.socklb(arguments).stdout(full()).stderr(full()).status().expect("start the command");
        assert_eq!(ended.code(), Some(1), "{arguments:?}");
    }
}

/// Without a daemon, `explain` reads the configuration and its lists.
#[test]
fn explain_shows_inputs_order_and_formula() {
    let folder = Folder::new();
    let text = CONFIG.replace("job = \"web\"", "job = \"web\"\nindex = 3\ncount = 10");
    folder.write("socklb.toml", &format!("{text}subset = {{ algorithm = \"rocksteadier\", size = 2 }}\n"));
    let (first, third) = (("127.0.0.1:8001", "weight = 3\nindex = 0"), ("127.0.0.1:8003", "index = 2"));
    folder.list(&[first, ("127.0.0.1:8002", "state = \"lame-duck\"\nindex = 1"), third]);
    let explain = ["explain", "users", "--config", "socklb.toml"];
    let output = folder.run(&[&explain[..], &["--json"]].concat());
    let explained: Vec<Explanation> = serde_json::from_slice(&output.stdout).expect("the text is JSON");
    let [Explanation { from_daemon: false, inputs, members, .. }] = &explained[..] else {
        panic!("{explained:?}")
    };
    assert_eq!((inputs.index, inputs.count, inputs.backends, inputs.size), (3, 10, 3, Some(2)));
    let mut members: Vec<String> = members.iter().map(|member| member.address.to_string()).collect();
    members.sort();
    assert_eq!(members, [first.0, third.0], "a lame duck is not in the table");
    let (_, text, _) = folder.texts(&explain);
    for part in ["task 3 of 10 in job web", "seed", "quota", "(2j + 1) / 2c", "fallback"] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    let unknown = ["explain", "user", "--config", "socklb.toml"];
    let known = "no client here dials a service \"user\"; did you mean users? services here are: users";
    folder.fails(&unknown, &[known]);
}

#[test]
fn a_wrong_command_line_exits_with_2() {
    let folder = Folder::new();
    for arguments in [
        &["detach"][..],
        &["frobnicate"],
        &["status", "--json", "--watch"],
        &["status", "--sort", "size"],
        &["detach", "a", "--all"],
        &["readmit", "users", "nonsense"],
        // `--config` is an option of the daemon's commands, and `agent key` would ignore it.
        &["agent", "key", "--config", "agent.toml"],
    ] {
        assert_eq!(folder.run(arguments).status.code(), Some(2), "{arguments:?}");
    }
    // The variable with the configuration file does not appear in the usage.
    for (arguments, usage) in [
        (&["drain", "users"][..], "drain <SERVICE> <BACKEND>..."),
        (
            &["drain", "users", "0", "--for", "2s", "--close", "all", "--after", "5s"],
            "drain [OPTIONS] <SERVICE> <BACKEND>...",
        ),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_socklb"));
        let output = command.args(arguments).env("SOCKLB_CONFIG", "/nowhere.toml").output();
        let output = output.expect("start the command");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(&format!("Usage: socklb {usage}\n")), "{text}");
    }
}
