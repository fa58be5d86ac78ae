//! Upgrades and downgrades between builds with different programs, and between builds of different
//! ABI versions.

use stage::{Daemon, address, amount, eventually, look};

use crate::restarts::{all_reached, busy, connects, elsewhere, open_flows_become, some_connects};
use stage::fixture::{Fixture, SERVICE};

/// A build with other programs and equal maps.
const CHANGED: &str = "socklb-changed";
/// A build of another ABI version.
const NEXT: &str = "socklb-next";

/// Stops or kills the daemon, and starts the daemon of another build.
fn upgrade(fixture: &mut Fixture, build: &'static str, kill: bool) {
    let daemon = fixture.daemon.take().expect("a daemon runs");
    if kill {
        daemon.kill();
    } else {
        assert_eq!(daemon.stop(), Some(0));
    }
    fixture.setup.build = stage::program(build);
    fixture.daemon = Some(Daemon::start_again(&fixture.setup));
}

#[test]
fn upgrades_to_other_programs_and_back_fail_no_connect_and_lose_no_count() {
    let rounds = amount(4, 20);
    let mut fixture = Fixture::new();
    let mut held = fixture.probe();
    let mut open: Vec<_> = (0..30).map(|_| held.dial(SERVICE)).collect();
    let mut clients = [busy(&fixture, 0), busy(&fixture, 1)];
    for round in 0..rounds {
        some_connects(&fixture.setup);
        upgrade(&mut fixture, [CHANGED, "socklb"][round % 2], round % 3 == 0);
        // The programs of each build read the flow records of the previous build's programs.
        let dialled = held.dial(SERVICE);
        let socket = open[round].socket;
        assert_eq!(held.peer(socket), address(SERVICE));
        held.close(socket);
        open.push(dialled);
    }
    let made: u64 = clients.iter_mut().map(all_reached).sum();
    assert_eq!(connects(&fixture.setup), made + 30 + rounds as u64, "every connect was counted once");
    open_flows_become(&fixture.setup, 30);
    for dialled in &open[rounds..] {
        held.close(dialled.socket);
    }
    open_flows_become(&fixture.setup, 0);
    assert_eq!(elsewhere(&fixture.setup), 0);
    assert_eq!(fixture.setup.run(&["status"]).status.code(), Some(0));
}

#[test]
fn upgrades_to_another_abi_and_back_fail_no_connect_and_lose_no_flow() {
    let rounds = amount(4, 20);
    let mut fixture = Fixture::new();
    let mut held = fixture.probe();
    let mut open = vec![held.dial(SERVICE)];
    let mut clients = [busy(&fixture, 0), busy(&fixture, 1)];
    for round in 0..rounds {
        some_connects(&fixture.setup);
        upgrade(&mut fixture, [NEXT, "socklb"][round % 2], round % 3 == 0);
        // Flows of both versions are open, and each still shows the address that was dialled.
        let leaving = fixture.setup.status().leaving;
        assert!(leaving[0].active >= Some(1), "round {round}: {leaving:?}");
        open.push(held.dial(SERVICE));
        for dialled in &open {
            assert_eq!(held.peer(dialled.socket), address(SERVICE), "round {round}");
        }
    }
    for client in &mut clients {
        all_reached(client);
    }
    // By now the busy clients' flows have ended: only the held flows are open, in the flow tables
    // of both versions together.
    open_flows_become(&fixture.setup, rounds as u64 + 1);
    for dialled in &open {
        held.close(dialled.socket);
    }
    open_flows_become(&fixture.setup, 0);
    let leaving = || fixture.setup.status().leaving.len();
    eventually("the other version is removed", leaving, |count| *count == 0);
    let versions = std::fs::read_dir(&fixture.setup.pins).expect("list the pins");
    // The folder also contains the maps that all clients share. They are not a version.
    let versions = versions.map(|version| version.expect("read a directory entry"));
    let of_clients = versions.filter(|version| version.file_name().to_string_lossy().starts_with('v'));
    let clients: usize =
        of_clients.map(|version| std::fs::read_dir(version.path()).expect("list the clients").count()).sum();
    assert_eq!(clients, 1, "the client of one version remains");
    // `not_a_service` is not checked: for a moment both versions' programs run, and the second
    // program finds the rewritten address, which is no service. A connect without balancing would
    // have failed. Next, a client is removed from the configuration while another version of the
    // client is leaving, and then added again. The daemon still holds the client's lock.
    let held_here = held.dial(SERVICE);
    upgrade(&mut fixture, NEXT, false);
    let file = fixture.setup.folder.join("socklb.toml");
    let whole = stage::daemon::read(&file);
    let elsewhere = stage::Cgroup::new();
    let other = whole.replace("job = \"web\"", "job = \"other\"").replace(
        &fixture.cgroup.relative().display().to_string(),
        &elsewhere.relative().display().to_string(),
    );
    for text in [&other, &whole] {
        stage::replace(&file, text);
        let name = if *text == other { "other" } else { "web" };
        let named = || fixture.setup.status().clients.into_iter().map(|client| client.name).collect();
        eventually("the daemon applies the configuration", named, |found: &Vec<String>| *found == [name]);
    }
    look(|| fixture.setup.status().faults).becomes([]);
    assert_eq!(held.peer(held_here.socket), address(SERVICE));
    upgrade(&mut fixture, "socklb", false);
    held.close(held_here.socket);
    // `detach --all` during an upgrade removes both versions.
    let dialled = held.dial(SERVICE);
    upgrade(&mut fixture, NEXT, false);
    fixture.stop();
    assert!(fixture.setup.run(&["detach", "--all"]).status.success());
    assert!(!fixture.setup.pins.exists());
    held.close(dialled.socket);
}
