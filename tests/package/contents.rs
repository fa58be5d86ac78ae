//! Tests where the package puts its files on a machine without systemd, and that a purge removes
//! all of them.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use stage::Machine;

use crate::{PACKAGE, install};

/// The commands, as `socklb --help` lists them.
fn commands(machine: &Machine) -> Vec<String> {
    listed(&machine.good(&["socklb", "--help"]))
}

fn listed(help: &str) -> Vec<String> {
    let list = help.split("Commands:\n").nth(1).expect("the help has a list of commands");
    let names = list.lines().map_while(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

/// Files of the package, without folders.
fn files(machine: &Machine) -> BTreeSet<String> {
    let list = machine.good(&["dpkg-query", "--listfiles", "socklb"]);
    let is_file = |path: &&str| machine.file(path).is_file();
    list.lines().filter(is_file).map(str::to_owned).collect()
}

#[test]
fn every_file_is_at_its_place_and_owned_by_root() {
    let machine = Machine::without_systemd();
    install(&machine);
    let mut expected: BTreeSet<String> = [
        "/usr/bin/socklb",
        "/usr/bin/socklb-sim",
        "/usr/lib/systemd/system/socklb-agent.service",
        "/usr/lib/systemd/system/socklb.service",
        "/usr/lib/sysusers.d/socklb.conf",
        "/usr/lib/tmpfiles.d/socklb.conf",
        "/usr/share/bash-completion/completions/socklb",
        "/usr/share/bash-completion/completions/socklb-sim",
        "/usr/share/doc/socklb/CHANGELOG.md",
        "/usr/share/doc/socklb/LICENSE.object",
        "/usr/share/doc/socklb/README.Debian",
        "/usr/share/doc/socklb/README.md",
        "/usr/share/doc/socklb/changelog.gz",
        "/usr/share/doc/socklb/copyright",
        "/usr/share/doc/socklb/examples/agent.toml",
        "/usr/share/doc/socklb/examples/backend-service.conf",
        "/usr/share/doc/socklb/examples/balanced-service.conf",
        "/usr/share/doc/socklb/examples/grafana/socklb.json",
        "/usr/share/doc/socklb/examples/kubernetes/socklb.yaml",
        "/usr/share/doc/socklb/examples/other-namespaces.conf",
        "/usr/share/doc/socklb/examples/prometheus/alertmanager.yml",
        "/usr/share/doc/socklb/examples/prometheus/socklb.rules.yml",
        "/usr/share/doc/socklb/examples/socklb.toml",
        "/usr/share/doc/socklb/examples/users.toml",
        "/usr/share/fish/vendor_completions.d/socklb-sim.fish",
        "/usr/share/fish/vendor_completions.d/socklb.fish",
        "/usr/share/man/man1/socklb-sim.1.gz",
        "/usr/share/man/man1/socklb.1.gz",
        "/usr/share/man/man5/agent.toml.5.gz",
        "/usr/share/man/man5/socklb.toml.5.gz",
        "/usr/share/zsh/vendor-completions/_socklb",
        "/usr/share/zsh/vendor-completions/_socklb-sim",
    ]
    .map(str::to_owned)
    .into();
    expected.extend(commands(&machine).iter().map(|name| format!("/usr/share/man/man1/socklb-{name}.1.gz")));
    for command in ["agent", "load", "source"] {
        let below = listed(&machine.good(&["socklb", command, "--help"]));
        expected.extend(below.iter().map(|name| format!("/usr/share/man/man1/socklb-{command}-{name}.1.gz")));
    }
    let of_planner = listed(&machine.good(&["socklb-sim", "--help"]));
    expected.extend(of_planner.iter().map(|name| format!("/usr/share/man/man1/socklb-sim-{name}.1.gz")));
    for folder in ["docs", "docs/guide", "docs/reference", "docs/design"] {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder);
        let names =
            std::fs::read_dir(docs).expect("list the documents").flatten().map(|entry| entry.file_name());
        let pages =
            names.map(|name| name.to_string_lossy().into_owned()).filter(|name| name.ends_with(".md"));
        expected.extend(pages.map(|name| format!("/usr/share/doc/socklb/{folder}/{name}")));
    }
    let files = files(&machine);
    assert_eq!(files, expected);
    for file in &files {
        let metadata = machine.file(file).metadata().expect("the file is installed");
        let mode = if file.starts_with("/usr/bin/") { 0o755 } else { 0o644 };
        let seen = (metadata.uid(), metadata.gid(), metadata.mode() & 0o7777);
        assert_eq!(seen, (0, 0, mode), "{file}");
    }
}

#[test]
fn program_changelog_and_package_have_the_same_version() {
    let machine = Machine::without_systemd();
    install(&machine);
    let version = machine.good(&["dpkg-query", "--show", "--showformat", "${Version}", "socklb"]);
    assert_eq!(machine.good(&["socklb", "--version"]), format!("socklb {version}"));
    let changelog = machine.good(&["zcat", "/usr/share/doc/socklb/changelog.gz"]);
    assert!(changelog.starts_with(&format!("socklb ({version}) ")), "{changelog}");
}

#[test]
fn user_and_pin_directory_are_created_without_systemd() {
    let machine = Machine::without_systemd();
    install(&machine);
    let user = machine.good(&["getent", "passwd", "socklb"]);
    assert!(user.ends_with(":socklb connection balancing:/:/usr/sbin/nologin"), "{user}");
    let stat = |path| machine.good(&["stat", "--format", "%U:%G %a", path]);
    assert_eq!(stat("/sys/fs/bpf/socklb"), "socklb:socklb 750");
    let ours = machine.good(&[
        "setpriv",
        "--reuid",
        "socklb",
        "--regid",
        "socklb",
        "--clear-groups",
        "stat",
        "/sys/fs/bpf/socklb",
    ]);
    assert!(ours.contains("(0750/drwxr-x---)"), "the daemon's user may enter it: {ours}");
    assert_eq!(stat("/etc/socklb"), "root:root 755");
    // The package also creates its users on a machine without systemd's programs.
    let bare = Machine::without_systemd();
    bare.good(&["rm", "/usr/bin/systemd-sysusers", "/usr/bin/systemd-tmpfiles", "/usr/bin/systemctl"]);
    install(&bare);
    let user = bare.good(&["getent", "passwd", "socklb"]);
    assert!(user.ends_with(":socklb connection balancing:/:/usr/sbin/nologin"), "{user}");
    let user = bare.good(&["getent", "passwd", "socklb-agent"]);
    assert!(user.ends_with(":socklb agent:/:/usr/sbin/nologin"), "{user}");
    bare.good(&["dpkg", "--purge", "socklb"]);
}

#[test]
fn the_example_passes_the_check() {
    let machine = Machine::without_systemd();
    install(&machine);
    for name in ["socklb.toml", "users.toml"] {
        machine.good(&["cp", &format!("/usr/share/doc/socklb/examples/{name}"), "/etc/socklb/"]);
    }
    let message = machine.good(&["socklb", "check"]);
    // The service in the example configuration does not exist on the test machine.
    let note = "note: client frontend: cgroup system.slice/frontend.service does not exist yet; the daemon \
                attaches the client when the cgroup appears\n";
    assert_eq!(message, format!("{note}/etc/socklb/socklb.toml: ok"));
}

#[test]
fn units_and_drop_ins_pass_systemd_analyze() {
    let machine = Machine::without_systemd();
    install(&machine);
    let services = [("frontend", "balanced-service.conf"), ("users", "backend-service.conf")];
    let units = services.map(|(service, drop_in)| {
        let unit = format!("/etc/systemd/system/{service}.service");
        machine.write(&unit, "[Service]\nExecStart=/usr/bin/true\n");
        machine.good(&["mkdir", &format!("{unit}.d")]);
        let drop_in = format!("/usr/share/doc/socklb/examples/{drop_in}");
        machine.good(&["cp", &drop_in, &format!("{unit}.d/socklb.conf")]);
        unit
    });
    machine.good(&["mkdir", "-p", "/etc/systemd/system/socklb.service.d"]);
    let drop_in = "/usr/share/doc/socklb/examples/other-namespaces.conf";
    machine.good(&["cp", drop_in, "/etc/systemd/system/socklb.service.d/"]);
    for unit in units
        .iter()
        .map(String::as_str)
        .chain(["/usr/lib/systemd/system/socklb.service", "/usr/lib/systemd/system/socklb-agent.service"])
    {
        // systemd-analyze reports unknown keys and values, missing programs, and missing manual
        // pages. Without a finding it prints nothing.
        let output = machine.run(&["systemd-analyze", "verify", "--recursive-errors=one", "--man=yes", unit]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && message.is_empty(), "{unit}: {}: {message}", output.status);
    }
    machine.good(&["rm", "-r", "/etc/systemd/system/socklb.service.d"]);
    // The threshold is in tenths of a point; the unit scores 2.0 of 10. Comments at the end of the
    // unit give the reason for each open item.
    let unit = "/usr/lib/systemd/system/socklb.service";
    machine.good(&["systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", unit]);
    let unit = "/usr/lib/systemd/system/socklb-agent.service";
    machine.good(&["systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", unit]);
}

#[test]
fn manual_pages_are_formatted_without_a_warning() {
    let machine = Machine::without_systemd();
    install(&machine);
    for page in files(&machine).iter().filter(|file| file.starts_with("/usr/share/man/")) {
        let set = format!("zcat {page} | groff -man -ww -Tutf8 -P-cbou");
        let output = machine.run(&["bash", "-o", "pipefail", "-c", &set]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && message.is_empty(), "{page}: {message}");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("SEE ALSO"), "{page}: {text}");
    }
}

#[test]
fn bash_completes_the_commands() {
    let machine = Machine::without_systemd();
    install(&machine);
    // Calls the function that bash calls at `socklb <TAB>`.
    let script = "source /usr/share/bash-completion/completions/socklb || exit; COMP_WORDS=(socklb ''); COMP_CWORD=1; \
                  _socklb socklb '' socklb; printf '%s\\n' \"${COMPREPLY[@]}\"";
    let offered = machine.good(&["bash", "-c", script]);
    let offered: BTreeSet<&str> =
        offered.lines().filter(|word| !word.starts_with('-') && *word != "help").collect();
    assert_eq!(offered, commands(&machine).iter().map(String::as_str).collect());
}

#[test]
fn removal_and_purge_leave_only_the_user() {
    let machine = Machine::without_systemd();
    install(&machine);
    let files = files(&machine);
    machine.write("/var/lib/socklb/last-good/users.toml", "");
    machine.write("/run/socklb/socklb.sock.new", "");
    machine.good(&["dpkg", "--remove", "socklb"]);
    for path in
        files.iter().map(String::as_str).chain(["/run/socklb", "/sys/fs/bpf/socklb", "/usr/share/doc/socklb"])
    {
        assert!(!machine.file(path).exists(), "{path} is left after removal");
    }
    assert!(
        machine.file("/var/lib/socklb/last-good/users.toml").exists(),
        "removal without a purge does not delete the stored list"
    );
    machine.good(&["dpkg", "--purge", "socklb"]);
    let left = machine.good(&["find", "/etc", "/usr", "/var", "-xdev", "-name", "*socklb*"]);
    assert_eq!(left, "");
    machine.good(&["getent", "passwd", "socklb"]);
}

#[test]
fn a_purge_retains_files_of_the_administrator() {
    let machine = Machine::without_systemd();
    install(&machine);
    machine.write("/etc/socklb/socklb.toml", "# mine\n");
    machine.good(&["dpkg", "--purge", "socklb"]);
    assert!(machine.file("/etc/socklb/socklb.toml").exists());
    machine.good(&["dpkg", "--install", PACKAGE]);
    machine.good(&["rm", "/etc/socklb/socklb.toml"]);
    machine.good(&["dpkg", "--purge", "socklb"]);
    assert!(!machine.file("/etc/socklb").exists());
}
