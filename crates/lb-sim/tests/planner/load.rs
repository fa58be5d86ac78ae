//! How costs, machines and the clients' rules change load and latency, compared with calculations
//! by hand.

mod faults;
mod operator;

use lb_sim::traffic::figures::RunFigures;
use lb_sim::traffic::tally::{RequestErrors, TrafficCounts};
use lb_sim::traffic::{TrafficReport, play};
use proptest::prelude::*;

use super::{played, scenario};

fn figures(report: &TrafficReport, run: usize) -> &RunFigures {
    &report.figures.as_ref().expect("there are figures, because requests cost CPU time").runs[run]
}

fn counts(report: &TrafficReport) -> TrafficCounts {
    report.summary.runs[0].counts
}

#[track_caller]
fn near(value: f64, expected: f64, part: f64) {
    assert!((value - expected).abs() <= part * expected, "{value}, expected {expected}");
}

/// A hundred requests per second to two backends in turn. Each request takes a millisecond of CPU
/// time.
const STEADY: &str = r#"
title = "steady"
duration = "20s"
step = "5s"
[backends]
count = 2
[[job]]
name = "one"
tasks = 1
size = 2
traffic = "connections"
policy = "round-robin"
rate = 100.0
arrivals = "even"
cost = { mean = "1ms", exact = true }
"#;

#[test]
fn utilization_is_rate_times_cost_over_capacity() {
    let report = played(&STEADY.replace("count = 2", "count = 2\ncores = 2\nspeed = [1.0, 0.5]"));
    let figures = figures(&report, 0);
    // Each backend gets 50 requests per second on two cores; one backend needs 1 ms for each, the
    // other 2 ms.
    near(figures.cpu[0], 0.025, 0.01);
    near(figures.cpu[1], 0.05, 0.01);
    near(figures.evenness.cpu_max_over_min.mean, 2.0, 0.01);
    near(figures.evenness.cpu_max_over_mean.mean, 4.0 / 3.0, 0.01);
    near(figures.evenness.raw_utilization.mean, 0.75, 0.01);
    // Half of the requests take 1 ms, and half take 2 ms.
    near(figures.latency_ms.p50.mean, 1.0, 0.01);
    near(figures.latency_ms.p99.mean, 2.0, 0.01);
    assert_eq!(figures.errors.mean, 0.0);
}

#[test]
fn a_wait_uses_no_cpu() {
    let report = played(&format!("{STEADY}wait = \"30ms\"\nlives = \"even\"\n"));
    near(figures(&report, 0).cpu[0], 0.05, 0.01);
    near(figures(&report, 0).latency_ms.p50.mean, 31.0, 0.01);
}

#[test]
fn utilization_is_relative_to_the_quota_and_excess_work_waits() {
    let quota = |cost: &str| {
        let quota = "count = 2\nquota = { cores = [0.04, 0.08], period = \"25ms\" }";
        played(&STEADY.replace("count = 2", quota).replace("mean = \"1ms\"", &format!("mean = \"{cost}\"")))
    };
    // Each backend gets 50 requests per second, one after the other. The quota of a period is
    // enough for two of them.
    let report = quota("500us");
    near(figures(&report, 0).cpu[0], 0.625, 0.01);
    near(figures(&report, 0).cpu[1], 0.3125, 0.01);
    near(figures(&report, 0).latency_ms.p99.mean, 0.5, 0.01);
    // If a request takes 1.5 ms, one backend needs nearly twice its quota, and the other 15/16 of
    // its quota.
    let report = quota("1500us");
    near(figures(&report, 0).cpu[0], 1.0, 0.01);
    near(figures(&report, 0).cpu[1], 0.9375, 0.01);
    assert!(figures(&report, 0).latency_ms.p99.mean > 1_000.0, "{:?}", figures(&report, 0).latency_ms);
}

#[test]
fn every_policy_applies_weights_and_shares() {
    for policy in ["weighted-round-robin", "least-loaded", "p2c", "random"] {
        let text = STEADY
            .replace("round-robin", policy)
            .replace("count = 2", "count = 4")
            .replace("size = 2", "size = 4");
        let report = played(&text);
        assert_eq!(counts(&report).served, counts(&report).arrivals, "{policy}");
        assert!(figures(&report, 0).cpu.iter().all(|cpu| *cpu > 0.01), "{policy}");
    }
    // Round robin ignores the weights of the backends.
    let weights = "count = 2\nweights = [{ from = 0, to = 0, weight = 3 }]";
    for (policy, ratio) in [("round-robin", 1.0), ("weighted-round-robin", 3.0)] {
        let report = played(&STEADY.replace("round-robin", policy).replace("count = 2", weights));
        near(figures(&report, 0).evenness.cpu_max_over_min.mean, ratio, 0.01);
    }
}

#[test]
fn the_least_loaded_backend_is_the_faster_one() {
    // The slow backend is so slow that a request is still in progress when the next one arrives.
    let text = STEADY
        .replace("count = 2", "count = 2\nspeed = [1.0, 0.1]")
        .replace("mean = \"1ms\"", "mean = \"4ms\"");
    let slow = |policy: &str| {
        let report = played(&text.replace("round-robin", policy));
        let figures = figures(&report, 0);
        (figures.cpu[1], figures.latency_ms.p99.mean)
    };
    let (cpu, latency) = slow("round-robin");
    assert!(
        cpu > 0.99 && latency > 1_000.0,
        "50 requests of 40 ms must overload the backend: CPU {cpu}, p99 {latency} ms"
    );
    for policy in ["least-loaded", "p2c"] {
        let (_, latency) = slow(policy);
        assert!(latency < 200.0, "{policy}: {latency}");
    }
}

#[test]
fn a_backend_that_resets_at_once_looks_idle_unless_errors_count() {
    let text = STEADY
        .replace("round-robin", "least-loaded")
        .replace("count = 2", "count = 4")
        .replace("size = 2", "size = 4")
        + "wait = \"100ms\"\n[[fail]]\nat = \"2s\"\nfor = \"10s\"\nbackends = 1\nmode = \"reset_at_once\"\n\
           [[run]]\nname = \"heeds\"\n[[run]]\nname = \"not\"\nerror_decay = \"off\"\n";
    let report = played(&text);
    let cut = report.summary.runs.iter().map(|total| total.counts.errors.cut).collect::<Vec<_>>();
    // If errors do not add to load, most connects during the ten seconds are cut. If they do, only
    // connections that are open when the failure begins and those of occasional attempts are cut.
    assert!(cut[1] > 700 && cut[0] < 30, "{cut:?}");
}

#[test]
fn a_limit_protects_a_slow_backend_and_may_refuse_requests() {
    let busy = STEADY.replace("count = 2", "count = 2\nspeed = [1.0, 0.01]");
    let errors = |lines: &str| counts(&played(&format!("{busy}{lines}"))).errors;
    assert_eq!(
        errors("active_limit = 5\n"),
        RequestErrors::default(),
        "the fast backend accepts the other requests"
    );
    // Every backend reaches its limit: there are 100 requests per second, each lasts 31 ms, and a
    // backend may have one at a time.
    let long = "wait = \"30ms\"\nlives = \"even\"\nactive_limit = 1\n";
    assert_eq!(errors(&format!("{long}overflow = \"least-loaded\"\n")), RequestErrors::default());
    let refused = errors(&format!("{long}overflow = \"refuse\"\n"));
    assert!(refused.limited > 1_000 && refused.sum() == refused.limited, "{refused:?}");
}

#[test]
fn a_backend_continues_a_request_that_its_client_gave_up() {
    // The slow backend gets 50 requests per second, and needs 100 ms for each.
    let text = STEADY.replace("count = 2", "count = 2\nspeed = [1.0, 0.01]") + "timeout = \"500ms\"\n";
    let report = played(&text);
    let counted = counts(&report);
    assert!(
        counted.errors.timed_out > 800 && counted.errors.sum() == counted.errors.timed_out,
        "{counted:?}"
    );
    assert!(figures(&report, 0).cpu[1] > 0.97, "the backend must continue requests that clients gave up");
    assert!(figures(&report, 0).latency_ms.p999.mean <= 501.0);
}

#[test]
fn failed_requests_are_retried() {
    let fail = "[[fail]]\nat = \"2s\"\nfor = \"10s\"\nbackends = 1\nmode = \"MODE\"\n";
    for mode in ["refuse", "reset_at_once", "errors", "blackhole"] {
        let of = |more: &str| counts(&played(&format!("{STEADY}{more}{}", fail.replace("MODE", mode))));
        let (once, again) = (of(""), of("retries = 1\n"));
        let failed = once.errors;
        assert!(
            failed.sum() >= 490 && failed.sum() <= 510,
            "{mode}: half of the requests of ten seconds must fail: {failed:?}"
        );
        let (answered, down, cut) = (failed.answered, failed.down, failed.cut);
        assert!([answered, down, cut].iter().filter(|count| **count > 5).count() == 1, "{mode}: {failed:?}");
        // The client uses the two backends in turn, so a retry without delay reaches the healthy
        // backend. An unanswered connect is retried after three seconds, and then the next backend
        // may be either of the two.
        let most = if mode == "blackhole" { 200 } else { 10 };
        assert!(again.errors.sum() < most && again.retries > 490, "{mode}: {again:?}");
    }
}

#[test]
fn a_slow_backend_serves_slowly_while_it_fails() {
    let text = format!(
        "{STEADY}[[fail]]\nat = \"5s\"\nfor = \"5s\"\nbackends = 1\nmode = \"slow\"\nslowdown = 5.0\n"
    );
    let report = played(&text);
    let means: Vec<f64> = report.steps.iter().map(|row| row.cpu.expect("requests have a cost").max).collect();
    for (mean, expected) in means.iter().zip([0.05, 0.25, 0.05, 0.05]) {
        near(*mean, expected, 0.03);
    }
    assert_eq!(counts(&report).errors, RequestErrors::default());
}

#[test]
fn a_started_backend_is_slower_for_a_while() {
    let text = STEADY.replace("count = 2", "count = 2\nrestart_cost = { factor = 4.0, for = \"5s\" }")
        + "[[restart]]\nat = \"4s\"\nbatch = 1\nlame_duck = \"500ms\"\ndown = \"500ms\"\npause = \"20s\"\n";
    let report = played(&text);
    let busiest =
        report.steps.iter().map(|row| row.cpu.expect("requests have a cost").max).collect::<Vec<_>>();
    near(busiest[2], 0.05, 0.05);
    let all: Vec<f64> = report.steps.iter().map(|row| row.cpu.expect("requests have a cost").mean).collect();
    // From 5 to 10 s, one of the two backends is four times slower.
    assert!(figures(&report, 0).cpu[0] > 0.06, "{all:?} {:?}", figures(&report, 0).cpu);
}

#[test]
fn neighbours_make_a_machine_slower() {
    let text = STEADY.replace("count = 2", "count = 2\nantagonist = { share = 50, every = \"100ms\" }");
    let cpu = &played(&text);
    let cpu = &figures(cpu, 0).cpu;
    // Half of the time there are no neighbours. Otherwise they use 0 to 50 % of the machine, which
    // makes requests 2 ln 2 times as long on average.
    for cpu in cpu {
        near(*cpu, 0.05 * (1.0 + 2.0 * std::f64::consts::LN_2) / 2.0, 0.05);
    }
}

#[test]
fn waiting_users_send_no_more_than_is_served() {
    let closed = "closed = { clients = 10, think = \"90ms\" }";
    let text = STEADY.replace("rate = 100.0", closed);
    // Each of the ten users takes about 91 ms from one request to the next.
    let counted = counts(&played(&text));
    near(f64::from(u32::try_from(counted.arrivals).expect("fits into u32")), 20.0 / 0.091 * 10.0, 0.02);
    // The two machines together process only 20 requests per second, so the users cannot send more.
    let slow = counts(&played(&text.replace("count = 2", "count = 2\nspeed = 0.01")));
    near(f64::from(u32::try_from(slow.served).expect("fits into u32")), 20.0 * 20.0, 0.05);
    assert_eq!(slow.errors, RequestErrors::default());
}

#[test]
fn tasks_may_be_absent_unequal_and_send_in_bursts() {
    let many = STEADY.replace("tasks = 1", "tasks = 100").replace("rate = 100.0", "rate = 10.0");
    let arrivals = |more: &str| counts(&played(&format!("{many}{more}"))).arrivals;
    let all = arrivals("");
    near(f64::from(u32::try_from(all).expect("fits into u32")), 20_000.0, 0.01);
    near(f64::from(u32::try_from(arrivals("missing = 30\n")).expect("fits into u32")), 14_000.0, 0.01);
    near(f64::from(u32::try_from(arrivals("skew = 1.0\n")).expect("fits into u32")), 20_000.0, 0.02);
    near(
        f64::from(u32::try_from(arrivals("skew = { zipf = 1.0 }\n")).expect("fits into u32")),
        20_000.0,
        0.02,
    );
    // Bursts begin after the first 5 s. From then on the rate is five times as high for a fifth of
    // the time. So for 5 s the rate is normal, and for 15 s it is on average 1.8 times the normal
    // rate.
    let burst = "burst = { factor = 5.0, every = \"5s\", for = \"1s\" }\n";
    near(
        f64::from(u32::try_from(arrivals(burst)).expect("fits into u32")),
        1_000.0 * (5.0 + 15.0 * 1.8),
        0.02,
    );
}

#[test]
fn requests_beyond_capacity_are_rejected_when_queues_are_full() {
    let text = STEADY.replace("count = 2", "count = 2\nspeed = 0.02\nqueue = 10");
    let report = played(&text);
    near(figures(&report, 0).offered.mean, 2.5, 0.01);
    // The backends can serve 40 of the 100 requests per second.
    let counted = counts(&report);
    near(f64::from(u32::try_from(counted.errors.rejected).expect("fits into u32")), 1_200.0, 0.03);
    assert!(figures(&report, 0).cpu.iter().all(|cpu| *cpu > 0.98));
}

#[test]
fn clients_leave_lame_ducks_that_report_their_state_in_time() {
    let restart =
        "[[restart]]\nat = \"4s\"\nbatch = 1\nlame_duck = \"500ms\"\ndown = \"2s\"\npause = \"1s\"\n";
    let down = |lines: &str| {
        let text = STEADY.replace("duration", &format!("{lines}\nduration"))
            + "wait = \"50ms\"\nlives = \"even\"\n"
            + restart;
        counts(&played(&text)).errors
    };
    // The list marks the lame duck too late, because clients receive a changed list only after a
    // second.
    let late = down("notice = { delay = \"1s\" }");
    assert!(late.down > 20, "{late:?}");
    let with_reports = down("notice = { delay = \"1s\" }\nreports = { delay = \"2ms\", spread = \"20ms\" }");
    assert_eq!(with_reports, RequestErrors::default());
}

#[test]
fn a_report_overtaken_by_a_newer_one_is_dropped() {
    let restart =
        "[[restart]]\nat = \"1s\"\nbatch = 1\nlame_duck = \"100ms\"\ndown = \"0s\"\npause = \"20s\"\n";
    let text = STEADY
        .replace("duration", "reports = { spread = \"5s\" }\nduration")
        .replace("tasks = 1", "tasks = 20");
    let report = played(&(text + restart));
    let last = report.steps.last().expect("the report has steps");
    assert!(
        last.load.min > 0.9 * last.load.max,
        "a client still considers the backend a lame duck: {:?}",
        last.load
    );
}

#[test]
fn a_new_client_receives_existing_lame_ducks() {
    let text = STEADY
        .replace("duration", "notice = { delay = \"10s\" }\nreports = { delay = \"2ms\" }\nduration")
        + "[[resize]]\nat = \"5s\"\njob = \"one\"\ntasks = 3\n"
        + "[[restart]]\nat = \"4s\"\nbatch = 1\nlame_duck = \"2s\"\ndown = \"20s\"\n";
    assert_eq!(counts(&played(&text)).errors, RequestErrors::default());
}

#[test]
fn a_client_that_gives_up_early_ejects_no_backend() {
    let ejections = |timeout: &str| {
        let fail = "[[fail]]\nat = \"4s\"\nfor = \"10s\"\nbackends = 1\nmode = \"blackhole\"\n";
        let report = played(&format!("{STEADY}timeout = \"{timeout}\"\nejection = {{}}\n{fail}"));
        assert!(report.summary.runs[0].counts.errors.timed_out > 0);
        report.ejection.expect("the scenario permits ejections").runs[0].counts.ejections
    };
    assert_eq!(ejections("150ms"), 0);
    assert!(ejections("250ms") > 0);
}

#[test]
fn cursors_of_several_cpus_spread_the_load_like_one() {
    for cpus in [1, 4, 64] {
        let report = played(&format!("{STEADY}cpus = {cpus}\n"));
        near(figures(&report, 0).evenness.cpu_max_over_min.mean, 1.0, 0.1);
    }
}

/// The SRE book's fleet, simulated for 12 seconds. The command `socklb-sim traffic --scenario
/// book-load` prints the full numbers.
#[test]
fn the_book_s_fleet_is_as_uneven_as_in_the_book() {
    let text = lb_sim::traffic::shipped::text("book-load").expect("book-load is shipped");
    let text =
        text.replace("\"160s\"", "\"12s\"").replace("\"60s\"", "\"4s\"").replace("seeds = 3", "seeds = 2");
    let report = played(&text);
    let ratios: Vec<(String, f64)> = (0..4)
        .map(|run| (figures(&report, run).run.clone(), figures(&report, run).evenness.cpu_max_over_min.mean))
        .collect();
    for (run, ratio) in &ratios {
        assert!((1.8..3.5).contains(ratio), "{run}: {ratios:?}");
    }
    let floor = figures(&report, 0).floor.cpu_max_over_min;
    assert!(
        floor.mean < ratios[0].1 && floor.low < floor.high,
        "chance alone causes as much unevenness: {floor:?}"
    );
    assert!(ratios[1].1 < ratios[0].1, "{ratios:?}");
}

/// A fleet with different machines, clients and subsets, but without unevenness by chance,
/// simulated for two minutes.
fn unequal() -> String {
    let fleet = include_str!("fleet/fleet.toml").replace("180s", "120s").replace("130s", "60s");
    fleet + include_str!("fleet/runs.toml")
}

#[test]
fn feedback_evens_out_utilization_for_every_cause_of_unevenness() {
    let report = played(&unequal());
    let ratio = |run: usize| figures(&report, run).evenness.cpu_max_over_min.mean;
    // Half of the machines have less than half of the capacity of the others. A58 does not consider
    // subsets and clients.
    assert!(ratio(0) > 2.0 && ratio(1) > 1.4, "{} {}", ratio(0), ratio(1));
    assert!(ratio(2) < 1.1 && ratio(3) < 1.1, "{} {}", ratio(2), ratio(3));
    assert_eq!(figures(&report, 2).moved_connections.mean, 0.0, "feedback must not move connections");
}

#[test]
fn feedback_settles_within_a_minute_of_a_change_of_speed() {
    let fail = "[[fail]]\nat = \"60s\"\nfor = \"1h\"\nshare = 30\nmode = \"slow\"\nslowdown = 2.0\n";
    let text = unequal().replace("120s", "180s").replace("rate = 60.0", "rate = 45.0") + fail;
    let report = played(&text);
    let steps = report.steps.iter().filter(|row| row.run == "feedback");
    let rsd: Vec<(u64, f64)> = steps.map(|row| (row.at_us / 1_000_000, row.cpu.unwrap().rsd)).collect();
    for (at, rsd) in &rsd {
        match at {
            70 => assert!(*rsd > 0.15, "the loads must be uneven at {at} s: {rsd}"),
            50..=60 | 120.. => assert!(*rsd < 0.08, "the loads must be even at {at} s: {rsd}"),
            _ => {}
        }
    }
}

#[test]
fn late_and_lost_reports_make_feedback_slower_and_never_worse_than_no_reports() {
    for reports in ["delay = \"10s\"", "delay = \"30s\"", "loss = 50", "window = \"10s\""] {
        let report = played(&unequal().replace("delay = \"5ms\", spread = \"10ms\"", reports));
        let raw = |run: usize| figures(&report, run).evenness.raw_utilization.mean;
        assert!(raw(2) >= raw(0) - 0.02, "{reports}: {} {}", raw(2), raw(0));
    }
}

#[test]
fn late_and_lost_reports_cause_no_oscillation_in_an_even_fleet() {
    let even = unequal()
        .replace("{ alternate = [1.0, 2.5] }", "1.75")
        .replace("skew = 0.5\n", "")
        .replace("arrivals = \"random\"", "")
        .replace("\"random\"", "\"rocksteadier\"")
        .replace("120s", "240s");
    for reports in ["delay = \"10ms\"", "delay = \"30s\"", "loss = 50", "window = \"10s\""] {
        let report = played(&even.replace("delay = \"5ms\", spread = \"10ms\"", reports));
        let rsd = |run: &str| {
            let rows = report.steps.iter().filter(|row| row.run == run && row.at_us > 60_000_000);
            rows.map(|row| row.cpu.unwrap().rsd).fold(0.0, f64::max)
        };
        // With any policy, chance makes loads in a step of ten seconds uneven by some percent.
        assert!(
            rsd("feedback") < rsd("structural") + 0.02,
            "{reports}: {} {}",
            rsd("feedback"),
            rsd("structural")
        );
    }
}

#[test]
fn feedback_settles_within_five_lifetimes_of_long_connections() {
    // Each task has about 200 connections, and each connection carries a request about every three
    // seconds. So a task sends 60 requests per second, as in the unchanged fleet.
    let persistent = "rate = 10.0\nconnection_life = \"20s\"\npause = \"3200ms\"";
    let text =
        unequal().replace("rate = 60.0", persistent).replace("120s", "200s").replace("\"60s\"", "\"100s\"");
    let report = played(&text);
    let ratio = |run: usize| figures(&report, run).evenness.cpu_max_over_min.mean;
    assert!(ratio(0) > 2.0 && ratio(2) < 1.2, "{} {}", ratio(0), ratio(2));
    let opened = |run: usize| report.summary.runs[run].counts.opened;
    assert_eq!(opened(0), opened(2), "feedback must not open connections");
}

#[test]
fn a_blackholed_backend_is_no_sinkhole_for_feedback() {
    let fail = "[[fail]]\nat = \"40s\"\nfor = \"1h\"\nbackends = 2\nmode = \"blackhole\"\n";
    let report = played(&(unequal() + fail));
    let steps = report.steps.iter().filter(|row| row.run == "feedback");
    let steps: Vec<(u64, u64)> = steps.map(|row| (row.counts.errors.sum(), row.counts.arrivals)).collect();
    let share = |step: usize| 1000 * steps[step].0 / steps[step].1;
    // The backend does nothing, but its agent continues to send reports.
    assert!(share(3) == 0 && share(5) > 50 && share(11) <= share(5) + 15, "{steps:?}");
}

#[test]
fn fast_errors_make_no_sinkhole_for_feedback() {
    let fail = "[[fail]]\nat = \"40s\"\nfor = \"1h\"\nbackends = 2\nmode = \"errors\"\n";
    let report = played(&(unequal() + fail));
    let steps = report.steps.iter().filter(|row| row.run == "feedback");
    let steps: Vec<(u64, u64)> = steps.map(|row| (row.counts.errors.answered, row.counts.arrivals)).collect();
    let share = |step: usize| 1000 * steps[step].0 / steps[step].1;
    // A failing backend uses no CPU time, so it seems to have free capacity. This must not raise
    // the share of errors.
    assert!(share(3) == 0 && share(4) > 50 && share(11) <= share(4) + 5, "{steps:?}");
}

/// Backends with different quotas, and four clients with unequal rates. A request costs more than
/// the smallest quota allows in one period.
const QUOTAS: &str = r#"
title = "quotas"
seeds = 2
duration = "120s"
measure_from = "60s"
step = "60s"
reports = { spread = "1s", window = "2s", interval = "2s" }
[backends]
count = 8
quota = { cores = [0.04, 0.04, 0.04, 0.08, 0.08, 0.08, 0.16, 0.16], period = "25ms" }
[[job]]
name = "web"
tasks = 4
size = 8
skew = 0.5
traffic = "connections"
rate = 68.0
cost = { mean = "1500us", exact = true }
[[run]]
name = "structural"
[[run]]
name = "a58"
load = "a58"
[[run]]
name = "feedback"
load = "feedback"
"#;

/// If all backends use the same part of their quotas, requests wait longer at a backend with a
/// small quota. Load control makes the reported utilization even, which includes this waiting time.
#[test]
fn laws_even_out_waiting_time_caused_by_quotas() {
    let uneven = |text: &str| {
        let report = played(text);
        let uneven = |run: usize| figures(&report, run).evenness.cpu_max_over_mean.mean;
        assert!(report.summary.runs.iter().all(|run| run.counts.errors.sum() == 0));
        [0, 1, 2].map(uneven)
    };
    let [structural, a58, feedback] = uneven(QUOTAS);
    assert!(
        structural > 1.4 && (1.08..1.2).contains(&a58) && feedback < 1.1,
        "{structural} {a58} {feedback}"
    );
    let [_, a58, feedback] = uneven(&QUOTAS.replace("spread", "pressure = false, spread"));
    assert!(a58 < 1.06 && feedback < 1.06, "{a58} {feedback}");
}

/// A scenario with all kinds of events that affect requests.
fn busy() -> impl Strategy<Value = String> {
    let job = (
        prop::sample::select(vec!["round-robin", "weighted-round-robin", "least-loaded", "p2c", "random"]),
        prop::sample::select(vec!["connections", "requests"]),
        prop::sample::select(vec![
            "rate = 20.0",
            "interval = \"40ms\"",
            "closed = { clients = 3, think = \"50ms\" }",
        ]),
        prop::sample::select(vec!["", "active_limit = 2\noverflow = \"refuse\"\n", "active_limit = 3\n"]),
        prop::sample::select(vec![
            "",
            "timeout = \"150ms\"\n",
            "timeout = \"150ms\"\nretries = 2\n",
            "retries = 3\n",
        ]),
        prop::sample::select(vec!["", "skew = 0.7\nmissing = 20\n", "cpus = 3\n"]),
        prop::sample::select(vec![
            "lasts = \"300ms\"\n",
            "cost = { mean = \"20ms\", sigma = 1.5 }\nwait = \"100ms\"\n",
        ]),
    );
    let fail =
        (prop::sample::select(vec!["refuse", "reset_at_once", "blackhole", "slow", "errors"]), 1u32..80);
    let quota = prop::sample::select(vec!["", "quota = { cores = 0.3, period = \"20ms\" }\n"]);
    let machines = (1u32..8, quota);
    (prop::collection::vec(job, 1..3), fail, 0u32..2, machines).prop_map(|(jobs, (mode, share), is_reported, machines)| {
        let reports = if is_reported == 1 { "reports = { spread = \"20ms\" }\n" } else { "" };
        let (queue, quota) = machines;
        let mut text = format!(
            "title = \"busy\"\nduration = \"16s\"\nstep = \"2s\"\nnotice = {{ spread = \"1s\" }}\n{reports}\
             [backends]\ncount = 12\nqueue = {queue}\n{quota}speed = {{ alternate = [1.0, 3.0] }}\n\
             antagonist = {{ share = 30, every = \"1s\" }}\nrestart_cost = {{ factor = 2.0, for = \"1s\" }}\n"
        );
        for (number, (policy, traffic, sends, limit, given_up, tasks, lasts)) in jobs.into_iter().enumerate() {
            text += &format!(
                "[[job]]\nname = \"job-{number}\"\ntasks = 9\nsize = 4\ntraffic = \"{traffic}\"\npolicy = \"{policy}\"\n\
                 {sends}\n{limit}{given_up}{tasks}{lasts}"
            );
            if traffic == "connections" {
                text += "ejection = {}\n";
            }
        }
        text + &format!(
            "[[fail]]\nat = \"2s\"\nfor = \"3s\"\nshare = {share}\nmode = \"{mode}\"\n\
             [[resize]]\nat = \"3s\"\nbackends = 9\n[[resize]]\nat = \"4s\"\njob = \"job-0\"\ntasks = 5\n\
             [[restart]]\nat = \"7s\"\nbatch = 5\nlame_duck = \"300ms\"\ndown = \"400ms\"\npause = \"200ms\"\n"
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The program itself asserts that every request and every connection ends once, and that each
    /// sent request is on one connection.
    #[test]
    fn everything_is_counted_once(text in busy(), seed in any::<u64>()) {
        let scenario = scenario(&text);
        let report = play(&scenario, seed);
        let total = &report.summary.runs[0];
        let TrafficCounts { arrivals, served, abandoned, errors, .. } = total.counts;
        prop_assert_eq!(arrivals, served + abandoned + errors.sum() + total.under_way);
        if let Some(figures) = &report.figures {
            prop_assert!(figures.runs[0].cpu.iter().all(|cpu| (0.0..=1.000_001).contains(cpu)));
        }
        prop_assert_eq!(play(&scenario, seed), report);
    }
}
