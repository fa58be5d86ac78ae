//! The callbacks that the programs request for a flow's socket: how other programs affect them, and
//! how long they last.

use lb_view::status::AnomalyCounts;
use stage::fixture::{Fixture, SERVICE, config};
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

/// The callbacks on a socket must not outlive its flow: the socket may then dial another address,
/// or listen, and the sockets that it accepts inherit the callbacks.
#[test]
fn callbacks_do_not_outlive_the_flow() {
    let fixture = Fixture::new();
    let _elsewhere = Backend::start("elsewhere", "127.0.0.1:8005");
    let mut probe = fixture.probe();
    let socket = probe.dial(SERVICE).socket;
    probe.disconnect(socket);
    probe.try_redial(socket, "127.0.0.1:8005").expect("connect to the listener");
    probe.close(socket);
    let socket = probe.dial(SERVICE).socket;
    probe.disconnect(socket);
    probe.listen_again(socket, "127.0.0.1:8006");
    let caller = std::net::TcpStream::connect("127.0.0.1:8006").expect("connect to the listener");
    probe.accept(socket);
    drop(caller);
    probe.kill();
    eventually("all flows have ended", || fixture.setup.active(), |active| *active == 0);
    assert_eq!(
        look(|| fixture.setup.client().anomalies)
            .now("an anomaly is counted when it happens, and the flows have ended"),
        AnomalyCounts::default()
    );
}
