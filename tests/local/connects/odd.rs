//! Unusual ways to dial are balanced, and their flows are counted.

use lb_view::backend::BackendStatus;
use lb_view::flows::FlowsDocument;
use stage::{SocketId, address, eventually, kernel, look};

use stage::fixture::{Fixture, SERVICE, config};

/// Sum of a count over the backends of the one service.
fn sum(fixture: &Fixture, count: impl Fn(&BackendStatus) -> u64) -> u64 {
    let backends = fixture.setup.backends("web", "users");
    backends.iter().map(count).sum()
}

fn ended(fixture: &Fixture, ending: &str) -> u64 {
    sum(fixture, |backend| backend.endings[ending])
}

/// A process mounts a network file system: the kernel dials in the cgroup of this process. It must
/// not be balanced, because it is not a client of the service.
#[test]
fn sockets_opened_by_the_kernel_are_not_balanced() {
    // Without this helper the programs cannot distinguish MPTCP sockets from the kernel's own.
    if kernel::SKC_TO_MPTCP_SOCK.skips() {
        return;
    }
    let file_systems = std::fs::read_to_string("/proc/filesystems").expect("what can be mounted");
    let has_cifs = file_systems.lines().any(|line| line.trim() == "nodev\tcifs");
    if !has_cifs && !stage::in_a_guest() {
        kernel::print_line(
            "skipped: this host's kernel cannot mount CIFS, so only the runs in guests check that sockets of the kernel are not balanced",
        );
        return;
    }
    assert!(has_cifs, "guests load the module cifs: {file_systems}");
    let fixture = Fixture::new();
    assert!(fixture.setup.daemon().features["knows_kernel_sockets"]);
    let mut probe = fixture.probe();
    let folder = fixture.setup.folder.join("mounted");
    std::fs::create_dir(&folder).expect("create the mount point");
    // The address has no route, so a connect without balancing fails immediately. A balanced
    // connect would reach a backend.
    assert_eq!(probe.mount_share(SERVICE, &folder), Err(libc::ENETUNREACH));
    look(|| fixture.setup.status()).has(|status| status.clients[0].not_a_service, 1);
    assert_eq!(
        look(|| sum(&fixture, |backend| backend.started)).now("a connect is counted before it returns"),
        0
    );
    // The process's own sockets are balanced.
    probe.dial(SERVICE);
    fixture.setup.active_becomes(1);
    look(|| sum(&fixture, |backend| backend.started)).becomes(1);
}

#[test]
fn connects_through_io_uring_are_balanced_and_attributed_to_their_process() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    let sockets: Vec<SocketId> = (0..6).map(|_| probe.dial_by_ring(SERVICE)).collect();
    for socket in &sockets {
        assert!(probe.read_name(*socket).starts_with('b'));
        assert_eq!(probe.peer(*socket), address(SERVICE));
    }
    fixture.setup.active_becomes(6);
    look(|| sum(&fixture, |backend| backend.established)).becomes(6);
    let FlowsDocument { flows, .. } = fixture.setup.document(&["flows"]);
    assert!(flows.iter().all(|flow| flow.process == probe.pid()), "{flows:?}");
    assert_eq!(flows.len(), 6);
    for socket in sockets {
        probe.close(socket);
    }
    eventually("the flows end", || ended(&fixture, "closed"), |closed| *closed == 6);
}

/// Clients request cookies, and listeners with fast open send them.
fn allow_fast_open(fixture: &Fixture) {
    std::fs::write("/proc/sys/net/ipv4/tcp_fastopen", "3").expect("switch fast open on");
    for backend in &fixture.backends {
        backend.allow_fast_open();
    }
}

#[test]
fn tcp_fast_open_connects_and_deferred_ones_are_balanced_and_counted_once() {
    let fixture = Fixture::new();
    allow_fast_open(&fixture);
    let mut probe = fixture.probe();
    // The first connect to each backend requests a cookie. All later connects have data in their
    // SYN.
    for _ in 0..9 {
        let socket = probe.dial_fast_open(SERVICE);
        assert!(probe.read_name(socket).starts_with('b'));
        assert_eq!(probe.peer(socket), address(SERVICE));
        probe.close(socket);
    }
    eventually("the flows end", || fixture.setup.active(), |active| *active == 0);
    look(|| sum(&fixture, |backend| backend.started)).becomes(9);
    look(|| sum(&fixture, |backend| backend.connecting)).becomes(9);
    look(|| sum(&fixture, |backend| backend.established)).becomes(9);
    look(|| ended(&fixture, "closed") + ended(&fixture, "aborted")).becomes(9);
    // A deferred connect counts from the choice until its socket is closed.
    let with_data = probe.dial_deferred(SERVICE);
    let silent = probe.dial_deferred(SERVICE);
    // Both flows are active, although neither socket has sent a SYN.
    fixture.setup.active_becomes(2);
    look(|| sum(&fixture, |backend| backend.connecting)).becomes(9);
    probe.write(with_data);
    assert!(probe.read_name(with_data).starts_with('b'));
    look(|| sum(&fixture, |backend| backend.established)).becomes(10);
    probe.close(silent);
    fixture.setup.active_becomes(1);
    look(|| ended(&fixture, "not-sent")).becomes(1);
    probe.close(with_data);
    eventually("both flows have ended", || fixture.setup.active(), |active| *active == 0);
}

#[test]
fn a_connect_timeout_is_set_unless_the_application_has_set_one() {
    let mut fixture = Fixture::without_daemon();
    // Connects to a listener with a full queue stay in the handshake.
    let full = std::net::TcpListener::bind("127.0.0.1:8010").expect("listen");
    rustix::net::listen(&full, 0).expect("shorten the queue");
    let text = config(&fixture.cgroup, r#"{ static = ["127.0.0.1:8010"] }"#, "connect_timeout = \"7s\"");
    fixture.setup.write("socklb.toml", &text);
    fixture.start();
    assert!(
        fixture.setup.daemon().features["connect_timeouts"],
        "root may set timeouts, and every kernel here has them"
    );
    let mut probe = fixture.probe();
    let direct = probe.start_connect("127.0.0.1:8010");
    let usual = probe.syn_retries(direct);
    let balanced = probe.start_connect(SERVICE);
    assert_eq!(
        (usual, probe.syn_retries(balanced)),
        (6, 2),
        "a limit of 7 s permits two retransmissions of the SYN"
    );
    for own in [1, 4] {
        let socket = probe.start_connect_with_retries(SERVICE, own);
        assert_eq!(probe.syn_retries(socket), own, "the application's own value is unchanged");
    }
    // A change affects the next connect.
    fixture.setup.write("socklb.toml", &text.replace("7s", "3s"));
    fixture.daemon().signal(rustix::process::Signal::HUP);
    eventually(
        "the next connect fails sooner",
        || {
            let socket = probe.start_connect(SERVICE);
            probe.syn_retries(socket)
        },
        |count| *count == 1,
    );
}
