//! The metrics pages that the daemon sends on its socket and on the port.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Mutex;

use stage::backend::with_a_full_queue;
use stage::daemon::failure;
use stage::eventually;
use stage::fixture::{Fixture, SERVICE, config};

use crate::http::{self, OPEN_METRICS, TEXT};
use crate::prometheus::promtool;

/// The address of the port for metrics.
pub const LISTEN: &str = "127.0.0.1:9464";

/// A fixture with a port for metrics, and its running daemon.
pub fn listening() -> Fixture {
    let mut fixture = Fixture::without_daemon();
    with(&fixture, &format!("[metrics]\nlisten = \"{LISTEN}\"\n"));
    fixture.start();
    fixture
}

/// Adds lines to the configuration.
pub fn with(fixture: &Fixture, lines: &str) {
    let text = stage::daemon::read(&fixture.setup.folder.join("socklb.toml"));
    fixture.setup.write("socklb.toml", &(text + lines));
}

/// The lines of a page without the ages of sources, which change with time.
fn steady(page: &str) -> Vec<&str> {
    page.lines().filter(|line| !line.starts_with("socklb_source_age_seconds{")).collect()
}

#[test]
fn the_socket_and_the_port_serve_the_same_page() {
    let fixture = listening();
    assert_eq!(fixture.probe().dial_many(SERVICE, 9).len(), 3);
    let socket = fixture.setup.folder.join("run/socklb.sock");
    for (accept, kind) in [
        (OPEN_METRICS, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        (TEXT, "text/plain; version=0.0.4; charset=utf-8"),
    ] {
        let (by_socket, by_port) =
            (http::get_unix(&socket, "/metrics", accept), http::get(LISTEN, "/metrics", accept));
        for answer in [&by_socket, &by_port] {
            assert_eq!(answer.code, 200);
            assert!(answer.head.contains(&format!("content-type: {kind}\r\n")), "{}", answer.head);
            assert_eq!(answer.body.ends_with("# EOF\n"), accept == OPEN_METRICS);
        }
        assert_eq!(steady(&by_socket.body), steady(&by_port.body));
        let chosen = by_port.body.lines().filter(|line| line.starts_with("socklb_flows_started_total{"));
        let chosen: Vec<&str> = chosen.filter_map(|line| line.rsplit(' ').next()).collect();
        assert_eq!(chosen, ["3"; 3]);
    }
}

#[test]
fn the_port_serves_only_metrics() {
    let fixture = listening();
    for path in ["/", "/v1/status", "/v1/explain/users", "/v1/cover/web?cgroups=1", "/metrics/"] {
        assert_eq!(http::get(LISTEN, path, "*/*").code, 404, "{path}");
    }
    for method in ["POST", "PUT", "DELETE"] {
        let stream = TcpStream::connect(LISTEN).expect("connect to the port");
        assert_eq!(http::exchange(stream, method, "/metrics", "*/*").code, 405, "{method}");
    }
    drop(fixture);
}

#[test]
fn the_port_refuses_foreign_host_names() {
    let mut fixture = Fixture::without_daemon();
    with(&fixture, &format!("[metrics]\nlisten = \"{LISTEN}\"\nhosts = [\"Metrics.Example\"]\n"));
    fixture.start();
    let code = |fields: &str| {
        let mut stream = TcpStream::connect(LISTEN).expect("connect to the port");
        let request = format!("GET /metrics HTTP/1.1\r\nConnection: close\r\n{fields}\r\n");
        stream.write_all(request.as_bytes()).expect("send the request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("read the answer");
        answer.split(' ').nth(1).map(str::to_owned)
    };
    for name in [
        "localhost",
        "localhost:9464",
        "127.0.0.1:9464",
        "127.0.0.1",
        "metrics.example:80",
        "METRICS.example",
    ] {
        assert_eq!(code(&format!("Host: {name}\r\n")).as_deref(), Some("200"), "{name}");
    }
    for name in ["evil.example", "127.0.0.2", "localhost.evil.example", "[::1]", "metrics.example.", ""] {
        assert_eq!(code(&format!("Host: {name}\r\n")).as_deref(), Some("421"), "{name}");
    }
    assert_eq!(code("").as_deref(), Some("421"), "a request without a Host header is refused");
}

#[test]
fn a_start_with_an_occupied_port_fails_and_reports_it() {
    let fixture = Fixture::without_daemon();
    with(&fixture, &format!("[metrics]\nlisten = \"{LISTEN}\"\n"));
    let _taken = std::net::TcpListener::bind(LISTEN).expect("listen");
    let config = fixture.setup.folder.join("socklb.toml");
    let output = fixture.setup.run(&["run", "--config", config.to_str().expect("the path is UTF-8")]);
    let (code, text) = failure(&output);
    assert_eq!(code, Some(1));
    assert!(
        text.contains(&format!("listen on {LISTEN} ([metrics] listen): Address already in use")),
        "{text}"
    );
    assert!(!fixture.setup.pins_of("web").exists(), "the failed start has attached nothing");
}

#[test]
fn without_a_port_only_the_socket_serves_metrics() {
    let fixture = Fixture::new();
    assert!(TcpStream::connect(LISTEN).is_err());
    let socket = fixture.setup.folder.join("run/socklb.sock");
    assert_eq!(http::get_unix(&socket, "/metrics", TEXT).code, 200);
}

#[test]
fn promtool_accepts_the_page() {
    let fixture = listening();
    assert_eq!(fixture.probe().dial_many(SERVICE, 9).len(), 3);
    let page = fixture.setup.write("page", &http::get(LISTEN, "/metrics", TEXT).body);
    let file = std::fs::File::open(page).expect("open the page");
    let output = promtool(&["check", "metrics"], file.into());
    let error_text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && error_text.is_empty(), "{}: {error_text}", output.status);
}

#[test]
fn faults_of_files_and_cgroups_are_in_the_metrics() {
    let fixture = listening();
    let has = |lines: &[&str]| {
        let look = || http::get(LISTEN, "/metrics", TEXT).body;
        let fact = |page: &String| lines.iter().all(|line| page.lines().any(|found| found == *line));
        eventually(&lines.join(", "), look, fact);
    };
    let of = r#"{client="web",service="users"}"#;
    let error = |error: u8| format!("socklb_source_error{of} {error}");
    let failures = |count: u8| format!("socklb_source_failures_total{of} {count}");
    let reloads = |result: &str, count: u8| format!("socklb_reloads_total{{result=\"{result}\"}} {count}");
    let attached = |is: u8| format!("socklb_client_attached{{client=\"web\"}} {is}");
    has(&[
        &error(0),
        &failures(0),
        &reloads("ok", 0),
        &reloads("failed", 0),
        &attached(1),
        "socklb_config_faulty 0",
    ]);
    stage::replace(&fixture.file, "no list");
    has(&[&error(1), &failures(1), &format!("socklb_service_usable{of} 1")]);
    fixture.write_endpoints(&[]);
    has(&[&error(1), &failures(2)]);
    fixture.write_endpoints(&[("127.0.0.1:8001", "weight = 0")]);
    has(&[&error(0), &failures(2), &format!("socklb_service_usable{of} 0")]);
    let config = fixture.setup.folder.join("socklb.toml");
    let good = stage::daemon::read(&config);
    stage::replace(&config, "no configuration");
    has(&[&reloads("ok", 0), &reloads("failed", 1), "socklb_config_faulty 1"]);
    stage::replace(&config, &good.replace("service]]\n", "service]]\non_no_backend = \"ECONNREFUSED\"\n"));
    has(&[&reloads("ok", 1), &reloads("failed", 1), "socklb_config_faulty 0"]);
    fixture.cgroup.remove();
    has(&[&attached(0)]);
    fixture.cgroup.create();
    has(&[&attached(1)]);
}

/// One test at a time holds this lock, because the kernel's statistics are on or off for the whole
/// host.
pub static COUNTED: Mutex<()> = Mutex::new(());

#[test]
fn program_runs_are_exported_while_the_kernel_counts_them() {
    let _alone = COUNTED.lock();
    let fixture = listening();
    let runs = || {
        let page = http::get(LISTEN, "/metrics", OPEN_METRICS).body;
        let of = |name: &str| {
            let line = format!("{name}{{client=\"web\",program=\"connect4\"}} ");
            page.lines().find_map(|found| found.strip_prefix(&line)?.parse::<f64>().ok())
        };
        of("socklb_program_runs_total").zip(of("socklb_program_run_seconds_total"))
    };
    assert_eq!(fixture.probe().dial_many(SERVICE, 9).len(), 3);
    // The page has lines about runs only if the host's setting or another program turns statistics
    // on.
    let on =
        std::fs::read_to_string("/proc/sys/kernel/bpf_stats_enabled").is_ok_and(|text| text.trim() == "1");
    assert!(on || runs().is_none_or(|(count, _)| count > 0.0), "a program without counted runs has no line");
    let counting = stage::sys::count_runs();
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    let (count, seconds) = runs().expect("the page has the program's runs");
    // The programs have also run for other calls, at least for calls to addresses that are no
    // service.
    assert!(count >= 30.0 && seconds > 0.0 && seconds / count < 1e-3, "{count} runs in {seconds} s");
    drop(counting);
    // Without further connects, the numbers do not change.
    assert_eq!(runs(), Some((count, seconds)));
}

/// The listener's queue is full, so it drops the first SYN. The kernel sends the SYN again after a
/// second.
#[test]
fn a_handshake_with_a_retransmitted_syn_has_only_the_time_of_its_connect() {
    const BACKEND: &str = "127.0.0.1:8010";
    let mut fixture = Fixture::without_daemon();
    fixture
        .setup
        .write("socklb.toml", &config(&fixture.cgroup, &format!("{{ static = [\"{BACKEND}\"] }}"), ""));
    fixture.start();
    let (listener, _queued) = with_a_full_queue(BACKEND);
    let mut probe = fixture.probe();
    let socket = probe.start_connect(SERVICE);
    eventually("the SYN is sent again", || probe.retransmissions(socket), |times| *times > 0);
    let accept = || listener.accept().expect("a connection is in the queue").0;
    let mut accepted = vec![accept()];
    let backend = || fixture.setup.backends("web", "users").remove(0);
    let counts = || {
        let backend = backend();
        (backend.established, backend.rtt.count, backend.connect.count)
    };
    eventually("the connection is established", counts, |counts| *counts == (1, 0, 1));
    // The upper bound of the last of these buckets is half a second.
    assert_eq!(backend().connect.buckets[..16].iter().sum::<u64>(), 0);
    accepted.push(accept());
    probe.start_connect(SERVICE);
    eventually("another connection is established", counts, |counts| *counts == (2, 1, 2));
    let page = http::get_unix(&fixture.setup.folder.join("run/socklb.sock"), "/metrics", TEXT).body;
    let series =
        |name: &str| page.lines().find(|line| line.starts_with(name)).expect("the page has the series");
    assert!(series("socklb_rtt_seconds_count{").ends_with(" 1"), "{page}");
    assert!(series("socklb_connect_seconds_count{").ends_with(" 2"), "{page}");
}
