//! Scripts of `rebalance`: when the daemon closes idle connections of a pool, and to which backend.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use lb_view::close_result::{CloseAnswer, CloseCounts, CloseRefusal};
use lb_view::text::{self, Style};

use super::jobs::{self, answer, is_close};
use crate::close_jobs::{CloseCause, CloseJob, CloseRequester};
use crate::controller::scripts::stage::{BACKENDS, SECOND, Stage, address, script};

const REBALANCE: &str = "rebalance = { rate = \"100/s\", idle = \"7s\" }\nejection = \"off\"";
/// `rebalance` with the default ejection.
const EJECTING: &str = "rebalance = { rate = \"100/s\", idle = \"7s\" }";
/// Longer than a daemon needs to apply a list while operations of the kernel fail.
const APPLIED: Duration = Duration::from_secs(30);

/// The answer of a job that has closed as many connections as its order permits.
fn closed(job: &CloseJob) -> CloseAnswer {
    answer(
        job,
        CloseCounts { closed: job.order.most.expect("the order has a limit"), ..CloseCounts::default() },
    )
}

/// The answer of a job that has found only busy connections.
fn busy(job: &CloseJob) -> CloseAnswer {
    answer(job, CloseCounts { not_idle: 10, ..CloseCounts::default() })
}

fn refused(_: &CloseJob) -> CloseAnswer {
    CloseAnswer::Refused(CloseRefusal {
        is_permission: true,
        is_busy: false,
        text: "the kernel refuses".to_owned(),
    })
}

/// Opens a pool of 30 connections to the first two backends. Then adds the third backend to the
/// list.
fn add_a_backend(stage: &mut Stage) {
    stage.list(&BACKENDS[..2]);
    stage.pass(APPLIED);
    // Bound: each connect opens a connection.
    while stage.open.len() < 30 {
        stage.connect().expect("all backends accept connects");
    }
    stage.pass(120 * SECOND);
    assert_eq!(jobs(stage).len(), 0, "the pool is even");
    stage.list(&BACKENDS);
    stage.pass(APPLIED);
}

/// The jobs of `rebalance` that have begun and not ended.
fn jobs(stage: &Stage) -> Vec<CloseJob> {
    let is_ours =
        |requester: &CloseRequester| matches!(requester, CloseRequester::Daemon(CloseCause::Rebalance));
    let jobs = jobs::jobs(stage).filter(|(_, requester)| is_ours(requester));
    jobs.map(|(job, _)| job.clone()).collect()
}

/// Waits at most `within` seconds for the next job. The job then hangs until [`finish`].
fn next_job(stage: &mut Stage, within: u32) -> Option<CloseJob> {
    stage.hangs = is_close;
    for _ in 0..within {
        stage.pass(SECOND);
        if let Some(job) = jobs(stage).pop() {
            return Some(job);
        }
    }
    None
}

/// Ends a job: closes as many connections of the pool as the job's order permits, and dials as many
/// again.
fn finish(stage: &mut Stage, job: &CloseJob) {
    let most = usize::try_from(job.order.most.expect("the order has a limit")).expect("the number is small");
    let mut others = Vec::new();
    let mut ended = Vec::new();
    for flow in std::mem::take(&mut stage.open) {
        let is_ended = flow.backend == job.order.backend && ended.len() < most;
        if is_ended { ended.push(flow) } else { others.push(flow) }
    }
    let count = ended.len();
    stage.open = ended;
    stage.close_all();
    stage.open = others;
    for _ in 0..count {
        // A trial may fail.
        assert!((0..2).any(|_| stage.connect().is_ok()));
    }
    stage.finish_hung();
}

/// Opens a pool of 30 connections to all three backends. Then the third backend stops, the programs
/// eject it, and the pool dials the other backends.
fn lose_a_backend(stage: &mut Stage) {
    stage.stop_faults();
    while stage.open.len() < 30 {
        stage.connect().expect("all backends accept connects");
    }
    stage.pass(120 * SECOND);
    assert_eq!(jobs(stage).len(), 0, "the pool is even");
    let lost = address(BACKENDS[2]);
    let (ended, others) = std::mem::take(&mut stage.open).into_iter().partition(|flow| flow.backend == lost);
    stage.open = ended;
    stage.close_all();
    stage.open = others;
    stage.dead.insert(lost);
    assert_eq!(stage.dial(60), 5);
    while stage.open.len() < 30 {
        stage.connect().expect("the other backends accept connects");
    }
}

/// The state of `rebalance` in status: its name, and the backends that it lists.
fn shown(stage: &Stage) -> (String, Vec<SocketAddr>) {
    let rebalance = stage.service().rebalance.expect("the service has `rebalance`");
    (rebalance.state, rebalance.backends.into_iter().map(|short| short.address).collect())
}

fn open(stage: &Stage) -> BTreeMap<SocketAddr, usize> {
    let mut open = BTreeMap::new();
    stage.open.iter().for_each(|flow| *open.entry(flow.backend).or_default() += 1);
    open
}

#[test]
fn a_new_backend_gets_connections_of_the_others_until_it_has_enough() {
    script(REBALANCE, |stage| {
        stage.closes = closed;
        stage.hangs = is_close;
        add_a_backend(stage);
        let mut sum = 0;
        while let Some(job) = jobs(stage).pop().or_else(|| next_job(stage, 60)) {
            let order = &job.order;
            assert_ne!(order.backend, address(BACKENDS[2]));
            assert_eq!((order.service.as_str(), order.client.as_deref()), ("users", Some("web")));
            assert_eq!((order.idle, order.is_dry_run), (Some(7 * SECOND), false));
            let most = order.most.expect("the order has a limit");
            // Each backend's share is about 10 connections. After the job, the backend has at most
            // one connection less than its share.
            let before = u64::try_from(open(stage)[&order.backend]).expect("the number is small");
            assert!((1..=before - 9).contains(&most), "{most} of {before} connections");
            sum += most;
            finish(stage, &job);
        }
        let open = open(stage);
        // The other backends may have one connection less than their share.
        assert!(open.values().all(|open| (8..=11).contains(open)), "{open:?}");
        assert!((8..=40).contains(&sum), "{sum} closed");
        assert_eq!(stage.task().closed[&("users".to_owned(), CloseCause::Rebalance)], sum);
    });
}

#[test]
fn connections_that_are_younger_than_a_minute_are_not_closed() {
    script(REBALANCE, |stage| {
        stage.closes = closed;
        stage.hangs = is_close;
        add_a_backend(stage);
        stage.finish_hung();
        let before = stage.controller().environment.kernel.now_ns();
        let job = next_job(stage, 60).expect("a job begins");
        let after = stage.controller().environment.kernel.now_ns();
        let age = 60_000_000_000;
        assert!((before.saturating_sub(age)..=after - age).contains(&job.begun_until_ns), "{job:?}");
    });
}

#[test]
fn a_backend_in_slow_start_is_not_refilled() {
    script(&format!("{REBALANCE}\nslow_start = \"10m\""), |stage| {
        stage.closes = closed;
        add_a_backend(stage);
        assert!(next_job(stage, 400).is_none());
        assert!(next_job(stage, 200).is_some(), "slow start is over");
    });
}

#[test]
fn busy_connections_are_tried_again_only_after_a_while() {
    script(REBALANCE, |stage| {
        stage.closes = busy;
        stage.hangs = is_close;
        add_a_backend(stage);
        stage.finish_hung();
        let mut tried = Vec::new();
        while tried.len() < 4 {
            let Some(job) = next_job(stage, 60) else { break };
            tried.push((stage.now, job.order.backend));
            stage.finish_hung();
        }
        for pair in tried.windows(3) {
            assert!(pair[2].0 - pair[0].0 >= 29 * SECOND && pair[0].1 == pair[2].1, "{tried:?}");
        }
        assert_eq!(tried.len(), 4);
    });
}

#[test]
fn a_daemon_that_cannot_close_connections_pauses() {
    script(REBALANCE, |stage| {
        stage.closes = refused;
        stage.hangs = is_close;
        add_a_backend(stage);
        let job = jobs(stage).pop().or_else(|| next_job(stage, 60));
        assert!(job.is_some());
        stage.finish_hung();
        assert!(next_job(stage, 590).is_none());
        assert!(next_job(stage, 60).is_some());
        assert_eq!(stage.logged("cannot close connections"), 1);
    });
}

#[test]
fn a_connection_is_closed_for_the_trial_of_an_ejected_backend_and_then_it_is_refilled() {
    script(EJECTING, |stage| {
        stage.closes = closed;
        stage.hangs = is_close;
        lose_a_backend(stage);
        let lost = address(BACKENDS[2]);
        stage.dead.clear();
        stage.pass(2 * SECOND);
        assert_eq!(shown(stage), ("even".to_owned(), Vec::new()));
        let job = next_job(stage, 10).expect("a job begins after the ejection");
        assert_eq!((job.order.most, job.order.backend == lost), (Some(1), false));
        assert_eq!(shown(stage), ("trial".to_owned(), vec![lost]));
        assert!(stage.slot(lost).is_ejected);
        finish(stage, &job);
        assert_eq!(open(stage)[&lost], 1, "the redial is the trial");
        assert!(!stage.slot(lost).is_ejected);
        let mut sum = 1;
        while let Some(job) = next_job(stage, 60) {
            assert_eq!(shown(stage), ("refilling".to_owned(), vec![lost]));
            sum += job.order.most.expect("the order has a limit");
            finish(stage, &job);
        }
        let open = open(stage);
        assert!(open.values().all(|open| (8..=11).contains(open)), "{open:?}");
        let text = text::status(&stage.status(), Style::default());
        let line = format!("  rebalance: no backend has too few flows; {sum} connections closed\n");
        assert!(text.contains(&line), "{text}");
    });
}

#[test]
fn trials_that_fail_cost_one_connection_each_and_come_more_and_more_rarely() {
    script(EJECTING, |stage| {
        stage.closes = closed;
        stage.hangs = is_close;
        lose_a_backend(stage);
        let lost = address(BACKENDS[2]);
        let (start, mut begun) = (stage.now, Vec::new());
        while stage.now < start + 1_800 * SECOND {
            let Some(job) = next_job(stage, 400) else { break };
            begun.push((stage.now - start).as_secs());
            assert_eq!(job.order.most, Some(1));
            finish(stage, &job);
            // Each redial is a trial at once: the programs do not wait for other connects first.
            assert_eq!(stage.backend(BACKENDS[2]).trials, begun.len() as u64);
            let open = open(stage);
            assert!(open.len() == 2 && open.values().all(|open| (14..=16).contains(open)), "{open:?}");
        }
        // The ejections last 5 s, 10 s, 20 s, ... 300 s, and closings are at least a minute apart.
        assert!((6..=12).contains(&begun.len()), "{begun:?}");
        assert!(begun.windows(2).all(|pair| pair[1] - pair[0] >= 60), "{begun:?}");
        let last = begun.windows(2).next_back().expect("several jobs have begun");
        assert!((270..=340).contains(&(last[1] - last[0])), "{begun:?}");
        // When the backend works again, the next trial readmits it.
        stage.dead.clear();
        let job = next_job(stage, 400).expect("a job begins");
        finish(stage, &job);
        assert!(!stage.slot(lost).is_ejected);
    });
}

#[test]
fn a_pool_that_does_not_dial_again_loses_one_connection_for_a_trial() {
    script(EJECTING, |stage| {
        stage.closes = closed;
        stage.hangs = is_close;
        lose_a_backend(stage);
        assert!(next_job(stage, 60).is_some());
        stage.finish_hung();
        assert!(next_job(stage, 1_200).is_none());
        assert_eq!(shown(stage), ("awaits-trial".to_owned(), vec![address(BACKENDS[2])]));
    });
}

#[test]
fn no_connection_is_closed_for_the_trial_of_a_backend_that_fails_its_probe() {
    script(&format!("{EJECTING}\nhealth = {{ probe = \"tcp\" }}"), |stage| {
        stage.closes = closed;
        stage.hangs = is_close;
        stage.find(&BACKENDS, true);
        stage.stop_faults();
        let lost = address(BACKENDS[2]);
        stage.dead.insert(lost);
        while stage.open.len() < 30 || !stage.slot(lost).is_ejected {
            // Bound: each third connect reaches the backend until it is ejected.
            let _ = stage.connect();
        }
        stage.find(&BACKENDS[2..], false);
        assert!(next_job(stage, 900).is_none());
        stage.dead.clear();
        stage.find(&BACKENDS[2..], true);
        let job = next_job(stage, 60).expect("a job begins after the probe succeeds");
        assert_eq!(job.order.most, Some(1));
        finish(stage, &job);
        assert!(!stage.slot(lost).is_ejected);
    });
}

#[test]
fn nothing_is_closed_unless_it_is_configured() {
    script("ejection = \"off\"", |stage| {
        add_a_backend(stage);
        assert!(next_job(stage, 120).is_none());
        stage.configure(REBALANCE);
        stage.closes = closed;
        assert!(next_job(stage, 120).is_some());
        stage.finish_hung();
        stage.configure("ejection = \"off\"");
        stage.pass(APPLIED);
        stage.finish_hung();
        assert!(next_job(stage, 120).is_none());
        stage.stop_faults();
        assert_eq!(stage.service().rebalance, None);
    });
}
