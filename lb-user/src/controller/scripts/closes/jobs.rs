//! Scripts of jobs that close connections. Tests on real sockets check which connections a job
//! closes.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use lb_http::peer::PeerCredentials;
use lb_view::close_result::{ClientClosed, CloseAnswer, CloseCounts, Closed, SCHEMA};
use tokio::sync::oneshot::Receiver;

use crate::api::{ControllerQuery, Reply};
use crate::close_jobs::{CloseCause, CloseJob, CloseOrder, CloseRequester};
use crate::controller::scripts::stage::{BACKENDS, Death, SECOND, Stage, address, script};
use crate::controller::{BackgroundWork, Event};

/// The answer of a job that has closed one connection and left `left` connections open.
fn closed(job: &CloseJob, left: u64) -> CloseAnswer {
    answer(job, CloseCounts { closed: 1, left, ..CloseCounts::default() })
}

/// The answer of a job that has counted the TCP flows of the client `web`.
pub fn answer(job: &CloseJob, tcp: CloseCounts) -> CloseAnswer {
    let client = ClientClosed { client: "web".to_owned(), tcp, ..ClientClosed::default() };
    let (service, backend) = (job.order.service.clone(), job.order.backend);
    CloseAnswer::Counted(Closed { schema: SCHEMA, service, backend, dry_run: false, clients: vec![client] })
}

pub fn is_close(work: &BackgroundWork) -> bool {
    matches!(work, BackgroundWork::Close(..))
}

/// The jobs that have begun and not ended.
pub fn jobs(stage: &Stage) -> impl Iterator<Item = (&CloseJob, &CloseRequester)> {
    stage.hung.iter().filter_map(|(_, work)| match work {
        BackgroundWork::Close(job, requester) => Some((job, requester)),
        _ => None,
    })
}

fn ask(stage: &mut Stage, process: u32, backend: &str) -> Receiver<CloseAnswer> {
    let (answer, reply) = Reply::new();
    let order = CloseOrder {
        service: "users".to_owned(),
        backend: address(backend),
        client: None,
        idle: None,
        rate: 100,
        is_dry_run: false,
        most: None,
    };
    let who = PeerCredentials { user: 0, groups: vec![0], process };
    stage.dispatch(Event::Query(ControllerQuery::Close { order, who, answer }));
    reply
}

/// The text of a refusal, or an empty text if the job has closed a connection.
fn refusal(mut reply: Receiver<CloseAnswer>) -> String {
    match reply.try_recv().expect("an answer") {
        CloseAnswer::Refused(refusal) => refusal.text,
        CloseAnswer::Counted(closed) => {
            assert_eq!(closed.sum(|counts| counts.closed), 1);
            String::new()
        }
    }
}

/// For each job that has begun and not ended: the number of its clients, and the latest start of
/// the flows that it closes, in nanoseconds.
fn running(stage: &Stage) -> Vec<(usize, u64)> {
    jobs(stage).map(|(job, _)| (job.targets.len(), job.begun_until_ns)).collect()
}

#[test]
fn one_job_at_a_time_closes_the_connections_of_a_backend() {
    script("", |stage| {
        stage.closes = |job| closed(job, 0);
        stage.hangs = is_close;
        let first = ask(stage, 11, BACKENDS[0]);
        let text = refusal(ask(stage, 12, BACKENDS[0]));
        assert!(text.contains("user 0 (process 11) is closing the connections of service users"), "{text}");
        // A second request of the same command would be another job, too.
        assert!(refusal(ask(stage, 11, BACKENDS[0])).contains("process 11"));
        let other = ask(stage, 12, BACKENDS[1]);
        assert_eq!(running(stage).iter().map(|(clients, _)| *clients).collect::<Vec<_>>(), [1, 1]);
        stage.finish_hung();
        assert_eq!([refusal(first), refusal(other)], ["", ""]);
        assert_eq!(refusal(ask(stage, 12, BACKENDS[0])), "", "the first job has ended");
    });
}

#[test]
fn a_listed_backend_without_connections_is_no_unknown_backend() {
    script("", |stage| {
        stage.closes = |job| closed(job, 0);
        stage.hangs = is_close;
        let (_first, _second) = (ask(stage, 7, BACKENDS[0]), ask(stage, 7, "10.0.0.99:80"));
        let jobs = stage.hung.iter().filter_map(|(_, work)| match work {
            BackgroundWork::Close(job, _) => Some((job.order.backend, job.is_known)),
            _ => None,
        });
        let expected = [(address(BACKENDS[0]), true), (address("10.0.0.99:80"), false)];
        assert_eq!(jobs.collect::<Vec<_>>(), expected);
        stage.finish_hung();
    });
}

/// An index and an IP address name backends of the list; an address with a port may be any.
#[test]
fn connections_are_closed_by_address_or_index() {
    script("", |stage| {
        let mut found_in = |service: &str, backend: &str| {
            let (answer, mut reply) = Reply::new();
            let (service, backend) = (service.to_owned(), backend.to_owned());
            stage.dispatch(Event::Query(ControllerQuery::FindBackend { service, backend, answer }));
            reply.try_recv().expect("an answer")
        };
        for backend in ["0", "10.0.0.1"] {
            let text =
                "no client here dials a service \"user\"; did you mean users? services here are: users";
            assert_eq!(found_in("user", backend), Err(text.to_owned()));
        }
        // Flows may outlive their service.
        assert_eq!(found_in("user", BACKENDS[0]), Ok(address(BACKENDS[0])));
        let mut found = |backend: &str| found_in("users", backend);
        for name in [BACKENDS[0], "12823", "10.0.0.1"] {
            assert_eq!(found(name), Ok(address(BACKENDS[0])), "{name}");
        }
        assert_eq!(found("10.0.0.99:80"), Ok(address("10.0.0.99:80")));
        let text = found("7").expect_err("there is none");
        assert!(
            text.starts_with("service users has no backend 7: it has 10.0.0.3:80 (index 1550)"),
            "{text}"
        );
    });
}

#[test]
fn a_command_continues_its_job_before_others_and_with_the_same_flows() {
    script("", |stage| {
        stage.closes = |job| closed(job, 7);
        assert_eq!(refusal(ask(stage, 11, BACKENDS[0])), "");
        stage.pass(SECOND);
        assert!(refusal(ask(stage, 12, BACKENDS[0])).contains("process 11"));
        stage.hangs = is_close;
        let again = ask(stage, 11, BACKENDS[0]);
        let began = running(stage)[0].1;
        stage.finish_hung();
        assert_eq!(refusal(again), "");
        // The command has ended and has not continued its job.
        stage.pass(2 * SECOND);
        stage.hangs = is_close;
        let other = ask(stage, 12, BACKENDS[0]);
        let now = running(stage)[0].1;
        assert!(now - began >= 3_000_000_000, "from {began} to {now}");
        stage.finish_hung();
        assert_eq!(refusal(other), "");
    });
}

#[test]
fn a_job_without_its_requester_is_not_continued() {
    script("", |stage| {
        stage.closes = |job| closed(job, 7);
        stage.hangs = is_close;
        drop(ask(stage, 11, BACKENDS[0]));
        assert_eq!(running(stage).len(), 1);
        stage.finish_hung();
        assert_eq!(refusal(ask(stage, 12, BACKENDS[0])), "");
    });
}

/// The daemon is killed at a step of a job, and its successor starts.
#[test]
fn after_a_kill_a_new_command_closes_at_once() {
    for steps in 0..2 {
        script("", |stage| {
            stage.closes = |job| closed(job, 7);
            stage.death = Death::AfterSteps(steps);
            drop(ask(stage, 11, BACKENDS[0]));
            assert!(stage.controller.is_none(), "killed after {steps} steps");
            stage.start(&BACKENDS);
            assert_eq!(refusal(ask(stage, 12, BACKENDS[0])), "");
            // The new command continues its job. The new daemon has no reservation for the first
            // command.
            stage.closes = |job| closed(job, 0);
            assert_eq!(refusal(ask(stage, 12, BACKENDS[0])), "");
        });
    }
}

#[test]
fn a_fifth_job_is_refused() {
    script("", |stage| {
        stage.closes = |job| closed(job, 0);
        stage.hangs = is_close;
        let jobs: Vec<_> = (1..=4).map(|n| ask(stage, n, &format!("10.0.0.{n}:80"))).collect();
        assert!(refusal(ask(stage, 5, "10.0.0.5:80")).contains("4 other jobs are closing connections"));
        stage.finish_hung();
        assert!(jobs.into_iter().map(refusal).all(|text| text.is_empty()));
        assert_eq!(refusal(ask(stage, 5, "10.0.0.5:80")), "");
    });
}

/// Opens connections until each backend has one.
fn connect_to_all(stage: &mut Stage) {
    let connected: BTreeSet<SocketAddr> = (0..60).filter_map(|_| stage.connect().ok()).collect();
    assert_eq!(connected.len(), BACKENDS.len());
}

/// The orders of the jobs that have begun and not ended.
fn orders(stage: &Stage) -> Vec<&CloseOrder> {
    let is_ours =
        |requester: &CloseRequester| matches!(requester, CloseRequester::Daemon(CloseCause::BackendLoss));
    jobs(stage).filter(|(_, requester)| is_ours(requester)).map(|(job, _)| &job.order).collect()
}

fn of_lost(backend: &str, idle: Option<Duration>) -> CloseOrder {
    CloseOrder {
        service: "users".to_owned(),
        backend: address(backend),
        client: Some("web".to_owned()),
        idle,
        rate: 100,
        is_dry_run: false,
        most: None,
    }
}

#[test]
fn connections_to_a_backend_that_left_the_list_are_closed_after_a_minute() {
    script("on_backend_loss = \"close-idle\"", |stage| {
        stage.closes = |job| closed(job, 7);
        stage.hangs = is_close;
        connect_to_all(stage);
        stage.pass(120 * SECOND);
        stage.list(&BACKENDS[..2]);
        stage.pass(55 * SECOND);
        assert_eq!(orders(stage).len(), 0);
        // The list may have been applied late, because operations fail.
        stage.pass(25 * SECOND);
        let expected = of_lost(BACKENDS[2], Some(30 * SECOND));
        assert_eq!(orders(stage), [&expected]);
        stage.finish_hung();
        assert_eq!(stage.task().closed[&("users".to_owned(), CloseCause::BackendLoss)], 1);
        // Connections are left, so the next job begins at once.
        stage.hangs = is_close;
        stage.closes = |job| closed(job, 0);
        stage.pass(2 * SECOND);
        assert_eq!(orders(stage), [&expected]);
        stage.finish_hung();
        // The connections that are still open were not idle. The daemon retries later.
        stage.hangs = is_close;
        stage.pass(20 * SECOND);
        assert_eq!(orders(stage).len(), 0);
        stage.pass(12 * SECOND);
        assert_eq!(orders(stage), [&expected]);
        stage.finish_hung();
        stage.list(&BACKENDS);
        stage.hangs = is_close;
        stage.pass(120 * SECOND);
        assert_eq!(orders(stage).len(), 0, "the backend is back");
    });
}

#[test]
fn connections_to_a_backend_that_refuses_connections_are_closed_after_a_minute() {
    script("on_backend_loss = \"close\"\nhealth = { probe = \"tcp\" }\nejection = \"off\"", |stage| {
        stage.closes = |job| closed(job, 0);
        stage.hangs = is_close;
        stage.find(&BACKENDS, true);
        connect_to_all(stage);
        stage.find(&BACKENDS[..1], false);
        stage.pass(55 * SECOND);
        assert_eq!(orders(stage).len(), 0);
        stage.pass(25 * SECOND);
        assert_eq!(orders(stage), [&of_lost(BACKENDS[0], None)]);
    });
}

#[test]
fn connections_stay_if_more_than_a_third_of_the_backends_are_lost() {
    script("on_backend_loss = \"close\"", |stage| {
        connect_to_all(stage);
        stage.list(&BACKENDS[..1]);
        stage.pass(120 * SECOND);
        let warning = "more than a third of the backends are lost together";
        assert_eq!((orders(stage).len(), stage.logged(warning)), (0, 1));
    });
}

#[test]
fn connections_stay_if_a_backend_leaves_only_the_subset_or_nothing_is_configured() {
    script("on_backend_loss = \"close\"", |stage| {
        connect_to_all(stage);
        stage.configure("on_backend_loss = \"close\"\nsubset = { size = 2 }");
        stage.pass(120 * SECOND);
        assert_eq!(stage.dialled(60).len(), 2, "one has left the subset");
        stage.configure("");
        stage.list(&BACKENDS[..2]);
        stage.pass(120 * SECOND);
        assert_eq!(orders(stage).len(), 0);
    });
}

/// When the daemon computes which part of the backends is lost, it does not count new endpoints,
/// even if it did not run when the list changed.
#[test]
fn connections_stay_if_a_list_replaces_all_backends() {
    let new = [
        "10.0.1.1:80",
        "10.0.1.2:80",
        "10.0.1.3:80",
        "10.0.1.4:80",
        "10.0.1.5:80",
        "10.0.1.6:80",
        "10.0.1.7:80",
    ];
    for is_down in [false, true] {
        script("on_backend_loss = \"close\"", |stage| {
            stage.connect().expect("a backend is usable");
            stage.pass(60 * SECOND);
            if is_down {
                stage.kill();
                stage.start(&new);
            } else {
                stage.list(&new);
            }
            stage.pass(120 * SECOND);
            assert_eq!(orders(stage).len(), 0);
        });
    }
}

/// No backend is missing before the new daemon has a list.
#[test]
fn the_minute_of_a_lost_backend_starts_again_with_the_daemon() {
    script("on_backend_loss = \"close\"", |stage| {
        stage.closes = |job| closed(job, 0);
        stage.hangs = is_close;
        connect_to_all(stage);
        stage.list(&BACKENDS[..2]);
        stage.pass(50 * SECOND);
        stage.kill();
        stage.pass(600 * SECOND);
        stage.start(&BACKENDS[..2]);
        stage.pass(55 * SECOND);
        assert_eq!(orders(stage).len(), 0);
        stage.pass(25 * SECOND);
        assert_eq!(orders(stage), [&of_lost(BACKENDS[2], None)]);
    });
}
