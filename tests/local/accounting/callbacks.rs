//! The callbacks that the programs request for a flow's socket, beside other programs that change
//! them.

use lb_view::status::AnomalyCounts;
use stage::fixture::{SERVICE, config};
use stage::foreign::Foreign;
use stage::{Backend, Cgroup, Daemon, Probe, Setup, Stage, eventually, look};

/// Another program may set its own callback flags, and so clear the flags of socklb. If socklb's
/// programs then missed the ends of connections, a service with `active_limit` would refuse all
/// connects even with no open connection.
#[test]
fn counts_stay_exact_if_another_program_clears_the_callbacks() {
    let stage = Stage::new();
    let parent = Cgroup::new();
    let cgroup = parent.child("service");
    let _backend = Backend::start("b1", "127.0.0.1:8001");
    let setup = Setup::new(&stage, "a");
    let lines = "active_limit = 20\noverflow = \"refuse\"";
    let _daemon = Daemon::start(&setup, &config(&cgroup, r#"{ static = ["127.0.0.1:8001"] }"#, lines));
    let foreign = Foreign::that_clears_callbacks(&parent);
    let mut probe = Probe::start(&cgroup);
    // No callback announces the end of the connection, so the flow ends with its socket.
    assert_eq!(probe.dial_many(SERVICE, 100), [("b1".to_owned(), 100)].into());
    let backend = || setup.backends("web", "users").remove(0);
    let found = backend();
    let counts = (found.active, found.endings["closed"], found.established, found.reclaimed);
    assert_eq!(counts, (0, 100, 100, 0), "{found:?}");
    assert_eq!(
        look(|| setup.client().anomalies)
            .now("an anomaly is counted when it happens, and the flows have ended"),
        AnomalyCounts::default()
    );
    drop(foreign);
    let socket = probe.dial(SERVICE).socket;
    probe.close(socket);
    eventually("the end of a new connection is counted", backend, |found| {
        (found.active, found.endings["closed"]) == (0, 101)
    });
}
