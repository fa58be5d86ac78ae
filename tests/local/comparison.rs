//! `socklb check --against-running`: the predicted changes of a file match the real changes.

use std::collections::BTreeMap;

use lb_view::comparison::{ChangeKind, Comparison};
use stage::daemon::failure;
use stage::fixture::{Fixture, SERVICE, config, endpoints};

/// A configuration with another policy, another list, and one more client than the configuration in
/// force.
fn another(fixture: &Fixture) -> String {
    let list = [("127.0.0.1:8001", "weight = 3"), ("127.0.0.1:8002", ""), ("127.0.0.1:8004", "")];
    fixture.setup.write("other.toml", &endpoints(&list));
    let text = config(&fixture.cgroup, r#"{ file = "other.toml" }"#, "policy = \"p2c\"");
    let batch = "[[client]]\njob = \"batch\"\ncgroup = \"socklb-test-nowhere\"\n";
    fixture.setup.write("new.toml", &(text.clone() + batch));
    text + batch
}

/// The result of `check --against-running` for a file in the folder of the configuration.
fn compared(fixture: &Fixture, file: &str) -> Comparison {
    let path = fixture.setup.folder.join(file);
    fixture.setup.document(&["check", path.to_str().expect("the path is UTF-8"), "--against-running"])
}

/// A comparison as lines: clients, services and their keys, backends with their open flows.
fn shown(comparison: &Comparison) -> Vec<String> {
    let mut lines = Vec::new();
    for change in comparison.clients.iter().chain(&comparison.services) {
        let keys: Vec<&str> = change.keys.iter().map(|change| change.key.as_str()).collect();
        lines
            .push(format!("{} {} {}", change.name, change.kind.name(), keys.join(" ")).trim_end().to_owned());
    }
    for shares in comparison.shares.iter().filter(|shares| shares.client == "web") {
        for backend in &shares.backends {
            lines.push(format!("{} {} {}", backend.address, backend.kind.name(), backend.active));
        }
    }
    lines
}

#[test]
fn the_predicted_changes_of_a_file_are_its_real_changes() {
    let fixture = Fixture::new();
    let text = another(&fixture);
    let mut probe = fixture.probe();
    for _ in 0..3 {
        probe.dial(SERVICE);
    }
    let comparison = compared(&fixture, "new.toml");
    assert!(comparison.from_daemon && comparison.unchangeable.is_empty() && comparison.host.is_empty());
    let expected = [
        "batch added",
        "users changed backends.file policy",
        "127.0.0.1:8001 changed 1",
        "127.0.0.1:8003 removed 1",
        "127.0.0.1:8004 added 0",
    ];
    let mut seen = shown(&comparison);
    // The weight of this backend does not change, but its share does.
    seen.retain(|line| !line.starts_with("127.0.0.1:8002 changed"));
    assert_eq!(seen, expected);
    // When the file is in force, the shares are as predicted.
    let predicted: BTreeMap<_, _> = comparison
        .shares
        .iter()
        .filter(|shares| shares.client == "web")
        .flat_map(|shares| &shares.backends)
        .filter(|backend| backend.kind != ChangeKind::Removed)
        .map(|backend| (backend.address, backend.after.expect("the new list has the backend")))
        .collect();
    fixture.setup.write("socklb.toml", &text);
    let shares = || -> BTreeMap<_, _> {
        let backends = fixture.setup.backends("web", "users").into_iter();
        backends.filter(|b| !b.is_leaving()).map(|b| (b.address, b.share_wanted)).collect()
    };
    stage::eventually("the new file is in force", shares, |shares| *shares == predicted);
    let log = || fixture.daemon().log();
    let line = "changed=\"clients added: batch; services changed: users (backends.file, policy)\"";
    stage::eventually("the log names the changes", log, |log| log.contains(line));
    let after = compared(&fixture, "new.toml");
    assert!(after.is_empty(), "{after:#?}");
}

/// `--endpoints` compares a new list with the list in use, and reports faults of the new list.
#[test]
fn an_endpoint_list_is_previewed_against_the_one_in_use() {
    let fixture = Fixture::new();
    let path = fixture.setup.folder.join("socklb.toml");
    let path = path.to_str().expect("the path is UTF-8");
    let preview = |list: &str| {
        let list = format!("{list}={}", fixture.setup.folder.join("next.toml").display());
        let mut command = vec!["check", path, "--against-running", "--endpoints"];
        command.push(&list);
        fixture.setup.run(&command)
    };
    fixture.setup.write("next.toml", &endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8004", "weight = 3")]));
    let output = preview("users");
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<String> =
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    let expected = [
        "client web, service users: backends 1 added, 2 removed, 1 changed, 0 as before",
        "backend change before after weight active",
        "127.0.0.1:8001 changed 33.3 % 25.0 % 1 0",
        "127.0.0.1:8002 removed 33.3 % - 1 0",
        "127.0.0.1:8003 removed 33.4 % - 1 0",
        "127.0.0.1:8004 added - 75.0 % 3 -",
    ];
    assert_eq!(lines[lines.len() - expected.len()..], expected, "{text}");
    assert!(!text.contains("backends.file"), "only the list differs: {text}");
    std::fs::remove_file(fixture.setup.folder.join("next.toml")).expect("remove it");
    let (code, text) = failure(&preview("users"));
    assert!(
        code == Some(1) && text.contains("--endpoints: cannot read") && !text.contains("socklb.toml:"),
        "{text}"
    );
    for (service, list, expected) in [
        (
            "user",
            "",
            "no client dials a service \"user\" with endpoints from a file or a server (did you mean users? services with a file or a server: users)",
        ),
        ("users", "[[endpoint]]\naddress = 5\n", "next.toml:2:11"),
    ] {
        fixture.setup.write("next.toml", list);
        let (code, text) = failure(&preview(service));
        assert!(code == Some(1) && text.contains(expected), "{text}");
    }
}

/// Without a daemon, `check` compares the file with the maps, which contain only some of the keys.
#[test]
fn without_a_daemon_a_file_is_compared_with_the_maps() {
    let mut fixture = Fixture::new();
    another(&fixture);
    fixture.stop();
    let comparison = compared(&fixture, "new.toml");
    assert!(!comparison.from_daemon);
    let expected = ["batch added", "users changed policy", "127.0.0.1:8001 changed 0"];
    assert_eq!(shown(&comparison)[..3], expected);
    let same = compared(&fixture, "socklb.toml");
    assert!(same.is_empty(), "{same:#?}");
    // A change of the limits needs new maps.
    let text = stage::daemon::read(&fixture.setup.folder.join("socklb.toml"));
    fixture.setup.write("new.toml", &(text + "[limits]\nslots = 64\n"));
    let unchangeable = compared(&fixture, "new.toml").unchangeable;
    assert!(unchangeable.len() == 1 && unchangeable[0].contains("4096 entries"), "{unchangeable:?}");
    assert!(fixture.setup.run(&["detach", "--all"]).status.success());
    let path = fixture.setup.folder.join("new.toml");
    let path = path.to_str().expect("the path is UTF-8");
    let (code, text) = failure(&fixture.setup.run(&["check", path, "--against-running"]));
    assert!(code == Some(1) && text.contains("nothing to compare with: no daemon answers at"), "{text}");
}

#[test]
fn changes_that_need_a_restart_are_reported_in_advance() {
    let fixture = Fixture::new();
    let path = fixture.setup.folder.join("socklb.toml");
    let text = stage::daemon::read(&path);
    let check = |file: &str| {
        let path = fixture.setup.folder.join(file);
        let output =
            fixture.setup.run(&["check", path.to_str().expect("the path is UTF-8"), "--against-running"]);
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (code, same) = check("socklb.toml");
    assert!(
        code == Some(0) && same.ends_with("compared with the running daemon\nnothing would change\n"),
        "{same}"
    );
    fixture.setup.write("new.toml", &(text.clone() + "[metrics]\nlisten = \"127.0.0.1:9464\"\n"));
    let (code, other) = check("new.toml");
    assert_eq!(code, Some(0));
    for line in [
        "metrics.listen: none -> 127.0.0.1:9464",
        "not while running: metrics.listen cannot change while the daemon runs; restart socklb to apply the \
         new value",
    ] {
        assert!(other.lines().any(|other| other == line), "{other}");
    }
    fixture.setup.write("new.toml", &(text + "polcy = 1\n"));
    assert_eq!(check("new.toml"), (Some(1), String::new()));
}
