//! Attached programs remain attached: an error is no reason to replace a link, and a link is
//! removed only after its successor exists.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use lb_common::abi::map;
use stage::fixture::{Fixture, SERVICE, config};
use stage::{Cgroup, address, eventually, replace};

/// The pinned links of the client, each with the pin's inode number, which distinguishes a new link
/// from the old one.
fn links(fixture: &Fixture) -> Vec<(String, u64)> {
    let entries = std::fs::read_dir(fixture.setup.pins_of("web").join("links")).expect("list the links");
    let link = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.expect("read a directory entry");
        (
            entry.file_name().to_string_lossy().into_owned(),
            entry.metadata().expect("read the pin's metadata").ino(),
        )
    };
    let mut links: Vec<(String, u64)> = entries.map(link).collect();
    links.sort();
    links
}

fn link(fixture: &Fixture, hook: &str) -> PathBuf {
    let name = format!("{hook}@{}", fixture.cgroup.id());
    fixture.setup.pins_of("web").join("links").join(name)
}

/// With one free descriptor the daemon can open the cgroup but not inspect a link: the daemon must
/// not replace the link because of this error.
#[test]
fn links_that_cannot_be_inspected_are_not_replaced() {
    let fixture = Fixture::new();
    let before = links(&fixture);
    assert_eq!(before.len(), 10);
    let attach_failures =
        |daemon: &stage::Daemon| daemon.log().matches("cannot attach to the cgroup").count();
    // Another thread may close descriptors after they were counted, so each check sets the limit
    // again.
    let starve = || {
        fixture.daemon().leave_descriptors(Some(0));
        attach_failures(fixture.daemon())
    };
    eventually("the fault is logged", starve, |times| *times > 0);
    assert_eq!(links(&fixture), before);
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    fixture.daemon().leave_descriptors(None);
    eventually("status reports no fault", || fixture.setup.faults(), Vec::is_empty);
    assert_eq!(links(&fixture), before);
    // The daemon retries, and logs the fault only once.
    assert_eq!(attach_failures(fixture.daemon()), 1, "{}", fixture.daemon().log());
}

/// A daemon was killed after it had created a link and before it renamed the link.
#[track_caller]
fn a_start_completes_the_interrupted_rename_of_a_link(fixture: &mut Fixture) {
    let before = links(fixture);
    fixture.stop();
    let pin = link(fixture, "connect4");
    let mut waiting = pin.clone().into_os_string();
    waiting.push("+new");
    std::fs::rename(&pin, &waiting).expect("rename in bpffs");
    let mut probe = fixture.probe();
    probe.start_dialling(SERVICE);
    fixture.start();
    let counts = probe.stop_dialling();
    assert!(counts.keys().all(|name| name.starts_with('b')), "{counts:?}");
    assert_eq!(links(fixture), before, "the link is the same");
}

/// If a link has the program of another owner, the daemon restores its own program. After an
/// attachment that an error interrupted, the link is in the same state.
#[test]
fn a_link_with_another_name_or_program_is_restored_and_a_detached_one_is_replaced() {
    let mut fixture = Fixture::new();
    a_start_completes_the_interrupted_rename_of_a_link(&mut fixture);
    let before = links(&fixture);
    let mut probe = fixture.probe();
    assert_eq!(probe.dial_many(SERVICE, 3).len(), 3);
    stage::sys::disable_connect4(&link(&fixture, "connect4"));
    let balanced = || probe.dial_many(SERVICE, 3).keys().all(|name| name.starts_with('b'));
    eventually("the client is balanced again", balanced, |balanced| *balanced);
    assert_eq!(links(&fixture), before, "no link was replaced");
    // A link that was detached by hand still has its pin, but attaches no program.
    stage::sys::detach_link(&link(&fixture, "connect4"));
    eventually("the link is replaced", || links(&fixture), |now| *now != before);
    let balanced = || probe.dial_many(SERVICE, 3).keys().all(|name| name.starts_with('b'));
    eventually("the client is balanced again", balanced, |balanced| *balanced);
    let changed: Vec<String> =
        links(&fixture).into_iter().filter(|link| !before.contains(link)).map(|(name, _)| name).collect();
    assert_eq!(changed, [format!("connect4@{}", fixture.cgroup.id())]);
}

/// A client leaves, and its open flows cannot be counted, because the map with the counts was
/// removed by hand. A missing map does not mean that no flow is open.
#[test]
fn a_leaving_client_is_not_removed_while_its_flows_cannot_be_counted() {
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    let open = probe.dial(SERVICE);
    std::fs::remove_file(fixture.setup.map("web", map::BACKENDS)).expect("remove the pin");
    let elsewhere = Cgroup::new();
    let other = config(&elsewhere, r#"{ file = "users.toml" }"#, "")
        .replace("job = \"web\"", "job = \"web\"\nname = \"other\"");
    replace(&fixture.setup.folder.join("socklb.toml"), &other);
    let is_named = |faults: &Vec<String>| faults.iter().any(|fault| fault.contains("`socklb detach web "));
    eventually("the fault names the command that removes the client", || fixture.setup.faults(), is_named);
    assert_eq!(probe.peer(open.socket), address(SERVICE));
    fixture.stop();
    assert!(fixture.setup.run(&["detach", "web"]).status.success());
    assert!(!fixture.setup.pins_of("web").exists());
}
