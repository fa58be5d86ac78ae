//! Backends that fail while they are still in the list: the results of connects, compared with
//! calculations by hand.

use lb_sim::traffic::TrafficReport;
use lb_sim::traffic::tally::{RequestErrors, TrafficCounts};

use super::played;

/// One client, which connects once per second to two backends in turn, for 12 seconds. Each
/// connection lasts two seconds.
fn one_client(lines: &str) -> String {
    format!(
        "title = \"one client\"\nduration = \"12s\"\nstep = \"4s\"\nbackends = {{ count = 2 }}\n\
         [[job]]\nname = \"one\"\ntasks = 1\nsize = 2\ntraffic = \"connections\"\ninterval = \"1s\"\narrivals = \"even\"\n\
         lasts = \"2s\"\nlives = \"even\"\n{lines}"
    )
}

fn steps(report: &TrafficReport) -> Vec<(u32, TrafficCounts)> {
    report.steps.iter().map(|row| (row.backends, row.counts)).collect()
}

const NONE: RequestErrors = RequestErrors {
    refused: 0,
    unready: 0,
    down: 0,
    cut: 0,
    limited: 0,
    rejected: 0,
    answered: 0,
    timed_out: 0,
};

/// The counts of a step without failures.
const WELL: TrafficCounts = TrafficCounts {
    arrivals: 4,
    served: 4,
    abandoned: 0,
    errors: NONE,
    retries: 0,
    opened: 4,
    closed: 4,
    moved: 0,
    dropped: 0,
};

#[test]
fn a_refusing_backend_fails_half_of_the_connects() {
    let report = played(&one_client("[[fail]]\nat = \"4s\"\nfor = \"4s\"\nshare = 1\n"));
    // When the failure begins, there is one open connection to each backend. One of the two is cut.
    // Two of four connects fail. The other open connection ends within the step. Of the two
    // connections that are established in the step, the first one also ends in it.
    let first = TrafficCounts { served: 2, closed: 2, ..WELL };
    let second = TrafficCounts {
        served: 2,
        errors: RequestErrors { cut: 1, down: 2, ..RequestErrors::default() },
        opened: 2,
        closed: 2,
        dropped: 1,
        ..WELL
    };
    let third = TrafficCounts { served: 3, closed: 3, ..WELL };
    assert_eq!(steps(&report), [(2, first), (1, second), (2, third)]);
    // No client is notified, so no connection is moved.
    assert_eq!(report.summary.runs[0].counts.moved, 0);
}

#[test]
fn connects_to_a_silent_backend_stay_open_until_they_are_given_up() {
    let report = played(&one_client(
        "[[fail]]\nat = \"4s\"\nfor = \"4s\"\nbackends = 1\nmode = \"blackhole\"\ntimeout = \"2s\"\n",
    ));
    let errors: Vec<RequestErrors> = report.steps.iter().map(|row| row.counts.errors).collect();
    // Two connects are unanswered. The client gives one up before the backend recovers, and one
    // after.
    let cut = RequestErrors { cut: 1, ..RequestErrors::default() };
    assert_eq!(
        errors,
        [
            RequestErrors::default(),
            RequestErrors { down: 1, ..cut },
            RequestErrors { down: 1, ..RequestErrors::default() }
        ]
    );
}

#[test]
fn connects_to_a_resetting_backend_are_established_first() {
    let report =
        played(&one_client("[[fail]]\nat = \"4s\"\nfor = \"4s\"\nbackends = 1\nmode = \"reset_at_once\"\n"));
    let counts = report.steps[1].counts;
    assert_eq!((counts.opened, counts.dropped, counts.errors.cut, counts.errors.down), (4, 3, 3, 0));
}

#[test]
fn a_failure_repeats_as_configured_at_the_same_backend() {
    let report =
        played(&one_client("[[fail]]\nat = \"1s\"\nfor = \"2s\"\nbackends = 1\nevery = \"4s\"\ntimes = 3\n"));
    let down: Vec<u64> = report.steps.iter().map(|row| row.counts.errors.down).collect();
    assert_eq!(down, [1, 1, 1]);
    assert_eq!(report.steps.iter().map(|row| row.backends).collect::<Vec<_>>(), [2, 2, 2]);
}

#[test]
fn held_connections_are_re_established_when_the_backend_recovers() {
    let report = played(
        &one_client("[[fail]]\nat = \"4s\"\nfor = \"4s\"\nbackends = 1\n").replace("connections", "requests"),
    );
    let opened: Vec<(u64, u64)> =
        report.steps.iter().map(|row| (row.counts.opened, row.counts.dropped)).collect();
    assert_eq!(opened, [(0, 0), (0, 1), (1, 0)]);
    let errors: u64 = report.steps.iter().map(|row| row.counts.errors.sum()).sum();
    assert_eq!(errors, 1, "only the request in progress fails");
}

#[test]
fn a_restart_does_not_end_a_failure() {
    let text = one_client(
        "[[fail]]\nat = \"3s\"\nfor = \"6s\"\nbackends = 2\n[[restart]]\nat = \"4s\"\nbatch = 2\ndown = \"1s\"\n",
    );
    let report = played(&text);
    assert_eq!(report.steps.iter().map(|row| row.backends).collect::<Vec<_>>(), [0, 0, 2]);
    let total = &report.summary.runs[0];
    // The failure lasts from the third second to the ninth. While the backends restart, the client
    // has no backend to choose.
    assert_eq!(total.counts.errors.down + total.counts.errors.refused, 6);
}
