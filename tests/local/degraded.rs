//! Failures of backends that an operator must see without looking for them: in the exit code, the row and the metrics.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use stage::fixture::{Fixture, SERVICE, config};
use stage::{Backend, look};

/// Exit code of `status`, its text, and the line of the metrics page that begins so.
pub fn seen(fixture: &Fixture, metric: &str) -> (Option<i32>, String, String) {
    let output = fixture.setup.run(&["status"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut stream = UnixStream::connect(fixture.setup.folder.join("run/socklb.sock")).expect("connect");
    let question = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    stream.write_all(question).expect("ask");
    let mut page = Vec::new();
    stream.read_to_end(&mut page).expect("read the page");
    let page = String::from_utf8_lossy(&page).into_owned();
    let line = page.lines().find(|line| line.starts_with(metric)).unwrap_or_default().to_owned();
    (output.status.code(), text, line)
}

#[test]
fn a_backend_whose_every_connect_fails_is_marked_until_one_succeeds() {
    let mut fixture = Fixture::without_ejection();
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", ""), ("127.0.0.1:8009", "")]);
    fixture.start();
    let mut probe = fixture.probe();
    let mut fail = |times: usize| {
        let mut refused = 0;
        while refused < times {
            match probe.try_dial(SERVICE) {
                Ok(dialled) => probe.close(dialled.socket),
                Err(_) => refused += 1,
            }
        }
    };
    let metric = r#"socklb_backend_failing{client="web",service="users",backend="127.0.0.1:8009"}"#;
    fail(4);
    let (code, text, line) = seen(&fixture, metric);
    assert_eq!((code, line.as_str()), (Some(0), &*format!("{metric} 0")), "four may be chance: {text}");
    fail(1);
    let (code, text, line) = seen(&fixture, metric);
    assert_eq!((code, line.as_str()), (Some(3), &*format!("{metric} 1")), "{text}");
    let fault = "degraded: client web, service users, backend 127.0.0.1:8009: every connect of the last minute failed";
    assert!(text.contains("\n! 127.0.0.1:8009 ") && text.contains(fault), "{text}");
    assert!(text.contains("\n  127.0.0.1:8001 ") && !text.contains('\x1b'), "{text}");
    let backends = fixture.setup.backends("web", "users");
    let failing = backends.iter().filter(|backend| backend.failing);
    assert_eq!(failing.map(|backend| backend.failed_60s).collect::<Vec<_>>(), [Some(5)]);
    // A backend that answers once does not fail every connect.
    let _back = Backend::start("back", "127.0.0.1:8009");
    assert_eq!(probe.dial_many(SERVICE, 3).len(), 3);
    let (code, text, line) = seen(&fixture, metric);
    assert_eq!((code, line.as_str()), (Some(0), &*format!("{metric} 0")), "{text}");
}

#[test]
fn refusals_at_the_limit_are_told() {
    let fixture = Fixture::without_daemon();
    let lines = "active_limit = 1\noverflow = \"refuse\"";
    let text = config(&fixture.cgroup, r#"{ static = ["127.0.0.1:8001"] }"#, lines);
    let _daemon = stage::Daemon::start(&fixture.setup, &text);
    let mut probe = fixture.probe();
    let first = probe.dial(SERVICE);
    look(|| fixture.setup.status().faults).becomes([]);
    for _ in 0..3 {
        assert!(probe.try_dial(SERVICE).is_err());
    }
    probe.close(first.socket);
    let status = fixture.setup.status();
    let fault = "client web, service users: refused 3 connects of the last minute: every backend was at its active_limit";
    assert_eq!(stage::faults_of(&status), [fault]);
    assert_eq!(status.clients[0].services[0].limited_60s, Some(3));
}
