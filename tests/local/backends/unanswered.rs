//! Connects that the application cancels. The state of the SYN determines whether a cancelled
//! connect counts against the backend.

use lb_view::backend::BackendStatus;
use lb_view::flows::FlowsDocument;
use stage::fixture::{Fixture, SERVICE, config, with_active_accounting};
use stage::probe::Probe;
use stage::protocol::SocketId;
use stage::router::{NOWHERE, Router};
use stage::{eventually, look};

const ACCOUNTINGS: [&str; 2] = ["full", "active"];

/// Starts a daemon with one service, which has one backend and these lines in the configuration.
fn start(accounting: &str, backend: &str, lines: &str) -> Fixture {
    let mut fixture = Fixture::without_daemon();
    let text = config(&fixture.cgroup, &format!("{{ static = [\"{backend}\"] }}"), lines);
    let text = if accounting == "active" { with_active_accounting(&text) } else { text };
    fixture.setup.write("socklb.toml", &text);
    fixture.start();
    fixture
}

/// A listener that drops all received packets.
fn unanswering() -> std::net::TcpListener {
    let listener = std::net::TcpListener::bind("127.0.0.1:8010").expect("listen");
    stage::filter::drop_all(&listener).expect("drop all packets");
    listener
}

fn backend(fixture: &Fixture) -> BackendStatus {
    fixture.setup.backends("web", "users").remove(0)
}

fn ended(fixture: &Fixture, ending: &str) -> u64 {
    backend(fixture).endings[ending]
}

/// Seconds since the one open flow was chosen.
fn age(fixture: &Fixture) -> f64 {
    fixture.setup.document::<FlowsDocument>(&["flows"]).flows[0].age_s
}

#[test]
fn a_connect_cancelled_after_an_answer_was_due_counts_against_the_backend() {
    in_both_accountings(|accounting| {
        let fixture = start(accounting, "127.0.0.1:8010", "unanswered_after = \"10ms\"");
        let _listener = unanswering();
        let mut probe = fixture.probe();
        let socket = probe.start_connect(SERVICE);
        // An answer is due after 10 ms. The slowest kernel clock adds up to two ticks of 10 ms.
        eventually("an answer was due", || age(&fixture), |age| *age > 0.030);
        probe.close(socket);
        fixture.setup.active_becomes(0);
        look(|| ended(&fixture, "unanswered")).becomes(1);
        let errors = || backend(&fixture).rates_60s.map_or(0.0, |rates| rates.errors);
        eventually("the cancelled connect counts as an error", errors, |errors| *errors > 0.0);
    });
}

#[test]
fn a_connect_cancelled_before_an_answer_is_due_counts_only_after_a_retransmission() {
    in_both_accountings(|accounting| {
        let fixture = start(accounting, "127.0.0.1:8010", "unanswered_after = \"60s\"");
        let _listener = unanswering();
        let mut probe = fixture.probe();
        // On a busy machine the SYN may be retransmitted before the socket is closed, and then the
        // flow has another ending.
        let give_up = || {
            let socket = probe.start_connect(SERVICE);
            probe.close(socket);
            ended(&fixture, "gave-up")
        };
        eventually("a socket is closed before its SYN is sent again", give_up, |gave_up| *gave_up > 0);
        fixture.setup.active_becomes(0);
        // A cancelled connect with a retransmitted SYN is unanswered.
        let before = (ended(&fixture, "unanswered"), ended(&fixture, "gave-up"));
        let socket = probe.start_connect(SERVICE);
        let retransmissions = || probe.retransmissions(socket);
        eventually("the socket's SYN is sent again", retransmissions, |times| *times > 0);
        probe.close(socket);
        look(|| (ended(&fixture, "unanswered"), ended(&fixture, "gave-up")))
            .becomes((before.0 + 1, before.1));
    });
}

/// The router's answer arrives while `connect()` still holds the socket: the kernel stores the
/// error and does not act on it, so that the socket is still connecting. Event loops clear the
/// error. Some kernels also queue the message (Linux 5.18, and Debian's 5.10). On these kernels,
/// the flow ends as unreachable even after the error was cleared.
#[test]
fn a_cancelled_connect_is_unreachable_while_an_icmp_error_is_stored() {
    for accounting in ACCOUNTINGS {
        let fixture = start(accounting, &format!("{NOWHERE}:80"), "unanswered_after = \"60s\"");
        let _router = Router::new();
        let mut probe = fixture.probe();
        let leave = || {
            let socket = probe.start_connect(SERVICE);
            probe.close(socket);
            ended(&fixture, "unreachable")
        };
        eventually("a socket with a stored error is closed", leave, |unreachable| *unreachable > 0);
        let look = || {
            let socket = take_error_of_new(&mut probe)?;
            let is_queued = probe.take_queued_error(socket);
            probe.close(socket);
            Some(is_queued)
        };
        let has_queue = eventually("the error of a socket is cleared", look, Option::is_some) == Some(true);
        let matches_logged = || {
            if has_queue {
                ended(&fixture, "unreachable")
            } else {
                ended(&fixture, "gave-up") + ended(&fixture, "unanswered")
            }
        };
        let give_up = || {
            let before = matches_logged();
            let Some(socket) = take_error_of_new(&mut probe) else { return false };
            probe.close(socket);
            matches_logged() > before
        };
        eventually("a socket without its error is closed", give_up, |gave_up| *gave_up);
        fixture.setup.active_becomes(0);
    }
}

/// Returns a new socket that is still connecting after its error was cleared. If softirqs are late,
/// the error arrives when no call holds the socket and ends the connect, or when the socket is
/// closed. Then returns `None`.
fn take_error_of_new(probe: &mut Probe) -> Option<SocketId> {
    let socket = probe.start_connect(SERVICE);
    if probe.take_error(socket) == Some(libc::EHOSTUNREACH) && probe.take_error(socket).is_none() {
        return Some(socket);
    }
    probe.close(socket);
    None
}

/// Runs a test once for each accounting.
fn in_both_accountings(test: impl Fn(&str)) {
    ACCOUNTINGS.into_iter().for_each(test);
}
