//! `socklb check --against-running` over the socket of a daemon, and with the maps of a daemon that
//! has stopped. Scripts of `lb-user` compare the predicted changes of a file with its real changes.

use lb_view::comparison::Comparison;
use stage::daemon::failure;
use stage::fixture::{Fixture, config, endpoints};

/// Writes a configuration with another policy, another list, and one more client than the
/// configuration in force.
fn write_another(fixture: &Fixture) {
    let list = [("127.0.0.1:8001", "weight = 3"), ("127.0.0.1:8002", ""), ("127.0.0.1:8004", "")];
    fixture.setup.write("other.toml", &endpoints(&list));
    let text = config(&fixture.cgroup, r#"{ file = "other.toml" }"#, "policy = \"p2c\"");
    let batch = "[[client]]\njob = \"batch\"\ncgroup = \"socklb-test-nowhere\"\n";
    fixture.setup.write("new.toml", &(text + batch));
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

/// `--endpoints` compares a new list with the list in use. Without a daemon, `check` compares the
/// file with the maps, which contain only some of the keys.
#[test]
fn a_file_is_compared_with_the_running_daemon_and_without_one_with_the_maps() {
    let mut fixture = Fixture::new();
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
    let same = fixture.setup.run(&["check", path, "--against-running"]);
    let text = String::from_utf8_lossy(&same.stdout);
    assert!(text.ends_with("compared with the running daemon\nnothing would change\n"), "{same:?}");
    write_another(&fixture);
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
