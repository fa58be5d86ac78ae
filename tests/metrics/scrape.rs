//! A real Prometheus scrapes the daemon and must store the values of `status`.

use lb_common::abi::{SlotCounters, map};
use lb_common::ending::Ending;
use lb_view::backend::BackendStatus;
use stage::eventually;
use stage::fixture::{Fixture, SERVICE};
use stage::maps::{Raw, per_cpu};

use crate::http;
use crate::page::{LISTEN, listening};
use crate::prometheus::{Prometheus, only_text};

/// The address at which the daemon's page is available only in the older form.
const ONLY_TEXT: &str = "127.0.0.1:9465";
/// One job for each form of the page.
const JOBS: [&str; 2] = ["openmetrics", "text"];

fn scraped(fixture: &Fixture) -> Prometheus {
    only_text(ONLY_TEXT, LISTEN);
    Prometheus::start(&fixture.setup.folder, &[(JOBS[0], LISTEN), (JOBS[1], ONLY_TEXT)])
}

/// The value of a backend's series, for each job.
fn of_backend(prometheus: &Prometheus, name: &str, labels: &str, address: &str) -> Vec<f64> {
    let query = format!(r#"{name}{{client="web",service="users",backend="{address}"{labels}}}"#);
    prometheus.query(&query).into_iter().map(|(_, value)| value).collect()
}

/// The names of a backend's series, each with its value in `status`.
#[expect(clippy::cast_precision_loss, reason = "small counts")]
fn series(backend: &BackendStatus) -> [(&'static str, f64); 9] {
    [
        ("socklb_flows_started_total", backend.started as f64),
        ("socklb_flows_untracked_total", backend.untracked as f64),
        ("socklb_flows_active", backend.active as f64),
        ("socklb_flows_reclaimed_total", backend.reclaimed as f64),
        ("socklb_flows_connecting_total", backend.connecting as f64),
        ("socklb_flows_established_total", backend.established as f64),
        ("socklb_flows_diverted_total", backend.diverted as f64),
        ("socklb_backend_weight", backend.weight.into()),
        ("socklb_backend_share_wanted", backend.share_wanted),
    ]
}

/// Waits until Prometheus has the values of `status` for every backend and for the service.
#[track_caller]
#[expect(clippy::cast_precision_loss, reason = "small counts")]
fn agrees(prometheus: &Prometheus, fixture: &Fixture) {
    let service = fixture.setup.service();
    for backend in &service.backends {
        let address = backend.address.to_string();
        let same = |name: &str, labels: &str, value: f64| {
            let look = || of_backend(prometheus, name, labels, &address);
            eventually(&format!("{name} of {address}{labels} is {value}"), look, |seen| *seen == [value; 2]);
        };
        for (name, value) in series(backend) {
            same(name, "", value);
        }
        for ending in Ending::ALL.map(Ending::name) {
            let labels = format!(r#",ending="{ending}""#);
            same("socklb_flows_ended_total", &labels, backend.endings[ending] as f64);
        }
    }
    for (outcome, count) in &service.outcomes {
        let query = format!(r#"socklb_outcomes_total{{client="web",service="users",outcome="{outcome}"}}"#);
        let look = || prometheus.query(&query).into_iter().map(|(_, value)| value).collect::<Vec<_>>();
        eventually(&query, look, |seen| *seen == [*count as f64; 2]);
    }
}

/// Asserts that every scrape was complete and valid.
#[track_caller]
fn no_fault(prometheus: &Prometheus) {
    // On a busy machine a scrape may exceed its timeout.
    let targets = || prometheus.api("/api/v1/targets")["activeTargets"].as_array().expect("targets").clone();
    let is_up = |target: &serde_json::Value| {
        (target["health"].as_str(), target["lastError"].as_str()) == (Some("up"), Some(""))
    };
    eventually("both scrapes succeed", targets, |active| active.len() == 2 && active.iter().all(is_up));
    eventually("both successes are stored", || prometheus.value("sum(up)"), |up| *up == 2.0);
    let failed = "count_over_time((up == 0 and scrape_duration_seconds < 0.9)[10m:1s])";
    assert_eq!(prometheus.query(failed), [], "every scrape before its timeout succeeded");
    for fault in [
        "sample_duplicate_timestamp",
        "sample_out_of_order",
        "sample_out_of_bounds",
        "exceeded_sample_limit",
        "exceeded_body_size_limit",
    ] {
        assert_eq!(prometheus.own(&format!("prometheus_target_scrapes_{fault}_total")), 0.0, "{fault}");
    }
    let scraped = || {
        prometheus.query("scrape_samples_scraped").into_iter().map(|(_, count)| count).collect::<Vec<f64>>()
    };
    // The two scrapes happen at different times, and a backend may appear or leave between them.
    eventually("both scrapes have the same number of series", scraped, |counts| {
        counts.len() == 2 && counts[0] == counts[1]
    });
}

#[test]
fn prometheus_has_the_values_of_status() {
    let fixture = listening();
    let prometheus = scraped(&fixture);
    let mut probe = fixture.probe();
    assert_eq!(probe.dial_many(SERVICE, 60).len(), 3);
    let open: Vec<_> = (0..6).map(|_| probe.dial(SERVICE)).collect();
    // One connect to an address that is no service, and one to a backend that refuses.
    probe.dial("127.0.0.1:8001");
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8009", "weight = 2")]);
    eventually(
        "the new backend has a slot",
        || fixture.setup.backends("web", "users").len(),
        |count| *count >= 4,
    );
    let mut refused = 0;
    for _ in 0..30 {
        refused += u32::from(probe.try_dial(SERVICE).is_err());
    }
    assert!(refused > 0, "connects to port 8009 are refused");
    agrees(&prometheus, &fixture);
    let of = |labels: &str| format!(r#"socklb_flows_ended_total{{job="text",{labels}}}"#);
    assert_eq!(prometheus.value(&of(r#"backend="127.0.0.1:8009",ending="refused""#)), f64::from(refused));
    let elsewhere = prometheus.query("socklb_not_a_service_total");
    assert!(elsewhere.len() == 2 && elsewhere.iter().all(|(_, count)| *count == 1.0), "{elsewhere:?}");
    for dialled in &open {
        probe.close(dialled.socket);
    }
    // When the slots of removed backends are freed, the backends' series end.
    let left = || fixture.setup.backends("web", "users").len();
    eventually("only backends of the list have slots", left, |count| *count == 2);
    agrees(&prometheus, &fixture);
    no_fault(&prometheus);
}

#[test]
fn a_quantile_of_the_handshakes_lies_in_the_bucket_of_the_maps() {
    let fixture = listening();
    let prometheus = scraped(&fixture);
    assert_eq!(fixture.probe().dial_many(SERVICE, 90).len(), 3);
    // The kernel's sums over all backends and CPUs.
    let counts = per_cpu::<SlotCounters>(&fixture.setup.map("web", map::COUNTS));
    let mut buckets = [0; lb_common::abi::TIME_BUCKETS];
    for backend in fixture.setup.backends("web", "users") {
        for Raw(cpu) in counts.get(&backend.slot, 0).expect("read the counts of the slot").iter() {
            for (sum, count) in buckets.iter_mut().zip(cpu.rtt.buckets) {
                *sum += count;
            }
        }
    }
    let total: u64 = buckets.iter().sum();
    assert_eq!(total, 90);
    let mut below = 0;
    let median = buckets.iter().position(|count| {
        below += count;
        2 * below >= total
    });
    let median =
        i32::try_from(median.expect("90 handshakes have a median")).expect("a bucket's index is small");
    let upper = 16e-6 * 2f64.powi(median);
    let lower = if median == 0 { 0.0 } else { upper / 2.0 };
    for job in JOBS {
        let all = format!(r#"sum(socklb_rtt_seconds_count{{job="{job}"}}) or vector(0)"#);
        eventually("Prometheus has all handshakes", || prometheus.value(&all), |count| *count == 90.0);
        let query =
            format!(r#"histogram_quantile(0.5, sum by (le) (socklb_rtt_seconds_bucket{{job="{job}"}}))"#);
        let quantile = prometheus.value(&query);
        assert!(lower < quantile && quantile <= upper, "{job}: {lower} < {quantile} <= {upper}: {buckets:?}");
    }
    // Checks the types that Prometheus has read in each form.
    for (metric, kind) in [("socklb_flows_started", "counter"), ("socklb_flows_started_total", "counter")] {
        let metadata = prometheus.api(&format!("/api/v1/targets/metadata?metric={metric}"));
        assert_eq!(metadata[0]["type"], kind, "{metadata}");
    }
    let metadata = prometheus.api("/api/v1/targets/metadata?metric=socklb_rtt_seconds");
    assert!(
        metadata
            .as_array()
            .is_some_and(|all| all.len() == 2 && all.iter().all(|of| of["type"] == "histogram"))
    );
    no_fault(&prometheus);
}

#[test]
fn counters_continue_over_a_restart_and_end_with_their_slot() {
    let mut fixture = listening();
    let prometheus = scraped(&fixture);
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    agrees(&prometheus, &fixture);
    fixture.stop();
    fixture.start();
    assert_eq!(fixture.probe().dial_many(SERVICE, 30).len(), 3);
    agrees(&prometheus, &fixture);
    let chosen = prometheus.value(r#"sum(socklb_flows_started_total{job="text"})"#);
    assert_eq!(chosen, 60.0);
    assert_eq!(prometheus.value("max(resets(socklb_flows_started_total[10m]))"), 0.0);
    fixture.write_endpoints(&[("127.0.0.1:8001", "")]);
    let look = || http::get(LISTEN, "/metrics", http::OPEN_METRICS).body;
    let gone = |page: &String| !page.contains("127.0.0.1:8002") && page.contains("127.0.0.1:8001");
    eventually("the series of a backend end when its slot is freed", look, gone);
    let left = || prometheus.query("socklb_flows_started_total").len();
    eventually("Prometheus sees the series end", left, |count| *count == 2);
}
