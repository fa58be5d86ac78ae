//! Tests of the page of metrics in both formats, with example counts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use lb_common::abi::{
    ABI_VERSION, Anomalies, BackendState, EjectionRules, EjectionState, HealthReason, Outcomes, Rules,
    TableRef, Usable,
};
use lb_common::ending::Ending;
use lb_core::ids::{BackendRef, Generation, ServiceIndex, Slot};
use lb_core::service::Protocol;
use lb_kernel::{
    BackendSnapshot, Counts, Fullness, Pins, Runs, ServiceSnapshot, ServiceView, SlotView, Snapshot,
};

use super::super::collect::MapMetrics;
use super::super::families::ALL;
use super::*;
use crate::close_jobs::CloseCause;
use crate::output::facts::{ClientFacts, Reloads, ReportCounts};
use lb_view::backend::BackendHealth;
use lb_view::load::{MemberLoadStatus, ServiceLoadStatus};
use lb_view::overrides::{Override, OverrideKind, OverrideScope};
use lb_view::status::{DaemonStatus, InterfaceStatus, Reclaim, RemoteStatus, SourceStatus};

fn facts() -> Facts {
    let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
    Facts {
        reports: ReportCounts {
            requests: 5,
            unsent: 0,
            datagrams: vec![("believed", 4), ("forged", 1)],
            by_kernel: vec![("believed", 3)],
        },
        interfaces: vec![InterfaceStatus { name: "eth0".to_owned(), mode: "native".to_owned(), why: None }],
        daemon: DaemonStatus {
            pid: 1,
            version: "1".to_owned(),
            config: "/etc/socklb.toml".into(),
            pins: None,
            features: BTreeMap::new(),
            offsets: BTreeMap::new(),
        },
        started: at(1_700_000_000),
        faults: Vec::new(),
        leaving: Vec::new(),
        reloads: Reloads { taken_on: 2, refused: 1, in_force_since: at(1_700_000_060), is_faulty: true },
        clients: Vec::new(),
        unstarted: vec!["late".to_owned()],
    }
}

fn at(generation: u32) -> BackendRef {
    BackendRef { slot: Slot::new(0).unwrap(), generation: Generation(generation) }
}

fn backend() -> BackendSnapshot {
    let mut sums: lb_common::abi::SlotCounters = bytemuck::Zeroable::zeroed();
    sums.chosen = 7;
    sums.endings[Ending::Refused as usize] = 3;
    sums.rtt.sum_us = 1_500_000;
    (sums.rtt.buckets[0], sums.rtt.buckets[2], sums.rtt.buckets[TIME_BUCKETS - 1]) = (1, 4, 1);
    sums.lifetime_ns = 2_500_000_000;
    BackendSnapshot {
        slot: SlotView {
            at: at(1),
            service: ServiceIndex(0),
            address: "[2001:db8::1]:80".parse().unwrap(),
            weight: 3,
            state: BackendState::Member,
            usable: Usable::No,
            reason: HealthReason::ListLameDuck,
            is_probed_healthy: false,
            is_ejected: false,
            is_withheld: false,
            ejection: EjectionState::default(),
            entries: 256,
            report: 0,
            lame_until_ns: 0,
        },
        address: "[2001:db8::1]:80".to_owned(),
        share_wanted: 0.25,
        counts: Counts { sums, active: 4, reclaimed: 0 },
    }
}

fn probe() -> BackendHealth {
    let (age_s, round_trip_ms, utilization) = (Some(0.5), Some(2.0), Some(0.25));
    let state = "ready".to_owned();
    BackendHealth { state, age_s, round_trip_ms, utilization, ..BackendHealth::unprobed("report") }
}

fn load() -> ServiceLoadStatus {
    let member = MemberLoadStatus {
        address: "[2001:db8::1]:80".parse().unwrap(),
        utilization: Some(0.25),
        age_s: Some(0.5),
        wanted: 1.5,
        factor: 1.25,
        is_at_clamp: false,
        share: 1.0,
        held_by: None,
    };
    ServiceLoadStatus {
        is_idle: false,
        control: Some("feedback".to_owned()),
        mode: "enforce".to_owned(),
        switch: "on".to_owned(),
        slow_start_s: None,
        flows_live_s: 1.0,
        settling_s: Some(30.0),
        tables: 3,
        reporting: 1,
        expected: 1,
        members: vec![member],
    }
}

fn client() -> ClientMetrics {
    let source = SourceStatus {
        file: None,
        good_for_s: Some(5),
        error: None,
        failures: 0,
        notes: Vec::new(),
        remote: Some(RemoteStatus {
            origin: "dns users.example.com port 80".to_owned(),
            version: String::new(),
            endpoints: Some(2),
            lists: 1,
            next_s: Some(3),
            empty_s: None,
            pending_removals: 0,
            suspension: None,
            certificate_expiry_s: Some(1_800_000_000),
        }),
        address_certificate_expiry_s: Some(1_900_000_000),
    };
    let service = ServiceSnapshot {
        view: ServiceView {
            index: ServiceIndex(0),
            name: "users".to_owned(),
            address: "10.96.0.10:80".parse().unwrap(),
            protocol: Protocol::Tcp,
            open: true,
            errno: 113,
            fallback: 0,
            rules: Rules::default(),
            ejection: EjectionRules::default(),
            table: TableRef { base: 0, generation: 9, length_log2: 10, members: 1 },
        },
        is_usable: true,
        outcomes: Outcomes { forwarded: 7, ..Outcomes::default() },
        backends: vec![backend()],
    };
    let fullness = ["schedule_entries", "slots", "flow_records", "flow_overflow", "datagrams"];
    ClientMetrics {
        facts: ClientFacts {
            pins: Pins::of(Path::new("/pins"), "web"),
            is_unpinned: false,
            configured: "/sys/fs/cgroup/web".into(),
            cgroup: None,
            attached: None,
            is_attached: true,
            reclaim: Reclaim::default(),
            without_causes: BTreeSet::new(),
            panics: BTreeSet::new(),
            unused: BTreeMap::new(),
            lists: BTreeMap::new(),
            replace_after: BTreeMap::new(),
            unavailable: BTreeMap::new(),
            probes: BTreeMap::from([(("users".to_owned(), "[2001:db8::1]:80".parse().unwrap()), probe())]),
            sources: BTreeMap::from([("users".to_owned(), source)]),
            loads: BTreeMap::from([("users".to_owned(), load())]),
            rebalances: BTreeMap::new(),
            overrides: Vec::new(),
            closed: [(("users".to_owned(), CloseCause::Operator), 48)].into(),
            runs: vec![("connect4", Runs { time_ns: 1_000, count: 2 })],
            lately: None,
        },
        maps: Some(MapMetrics {
            fullness: fullness.map(|map| Fullness { map, used: 1, capacity: 64 }),
            snapshot: Snapshot {
                not_a_service: 11,
                anomalies: Anomalies::default(),
                services: vec![service],
            },
            failing: BTreeSet::new(),
        }),
    }
}

fn page(form: ExpositionFormat, clients: Vec<ClientMetrics>) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(MetricsPage { facts: facts(), clients, form }));
    let mut text = String::new();
    text::encode_registry(&mut text, &registry).unwrap();
    text
}

/// The lines that begin with the name of a metric.
fn lines<'p>(page: &'p str, name: &str) -> Vec<&'p str> {
    page.lines().filter(|line| line.starts_with(name)).collect()
}

#[test]
fn a_backend_that_fails_every_connect_is_marked() {
    for (failing, expected) in [(BTreeSet::from([at(1)]), 1), (BTreeSet::from([at(0)]), 0)] {
        let mut client = client();
        client.maps.as_mut().expect("the maps were read").failing = failing;
        let page = page(ExpositionFormat::Text, vec![client]);
        let labels = r#"{client="web",service="users",backend="[2001:db8::1]:80"}"#;
        let line = format!("socklb_backend_failing{labels} {expected}");
        assert_eq!(lines(&page, "socklb_backend_failing{"), [line]);
    }
}

#[test]
fn the_accept_header_selects_the_format() {
    let cases = [
        (None, ExpositionFormat::Text),
        (Some("*/*"), ExpositionFormat::Text),
        (Some("text/plain;version=0.0.4"), ExpositionFormat::Text),
        (Some("application/openmetrics-text;version=1.0.0"), ExpositionFormat::OpenMetrics),
        (
            Some(
                "text/plain;version=0.0.4;q=0.5, application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1",
            ),
            ExpositionFormat::OpenMetrics,
        ),
    ];
    for (header, form) in cases {
        assert_eq!(ExpositionFormat::accepted(header), form, "{header:?}");
    }
}

#[test]
fn a_daemon_without_clients_has_a_page_in_both_formats() {
    let described: String = page(ExpositionFormat::OpenMetrics, Vec::new())
        .lines()
        .filter(|line| !line.starts_with("# HELP"))
        .take(26)
        .map(|line| line.to_owned() + "\n")
        .collect();
    let version = env!("CARGO_PKG_VERSION");
    let expected = format!(
        "# TYPE socklb_build info\nsocklb_build_info{{version=\"{version}\",abi=\"{ABI_VERSION}\"}} 1\n\
         # TYPE socklb_start_time_seconds gauge\n# UNIT socklb_start_time_seconds seconds\n\
         socklb_start_time_seconds 1700000000.0\n\
         # TYPE socklb_reloads counter\nsocklb_reloads_total{{result=\"ok\"}} 2\n\
         socklb_reloads_total{{result=\"failed\"}} 1\n\
         # TYPE socklb_config_time_seconds gauge\n# UNIT socklb_config_time_seconds seconds\n\
         socklb_config_time_seconds 1700000060.0\n\
         # TYPE socklb_config_faulty gauge\nsocklb_config_faulty 1\n\
         # TYPE socklb_report_requests counter\nsocklb_report_requests_total{{result=\"sent\"}} 5\n\
         socklb_report_requests_total{{result=\"unsent\"}} 0\n\
         # TYPE socklb_report_datagrams counter\nsocklb_report_datagrams_total{{result=\"believed\"}} 4\n\
         socklb_report_datagrams_total{{result=\"forged\"}} 1\n\
         # TYPE socklb_xdp_datagrams counter\nsocklb_xdp_datagrams_total{{result=\"believed\"}} 3\n\
         # TYPE socklb_xdp_interface gauge\nsocklb_xdp_interface{{interface=\"eth0\",mode=\"native\"}} 1\n\
         # TYPE socklb_client_attached gauge\nsocklb_client_attached{{client=\"late\"}} 0\n\
         # TYPE socklb_client_readable gauge\n"
    );
    assert_eq!(described, expected);
    let text = page(ExpositionFormat::Text, Vec::new());
    assert!(!text.contains("# UNIT"), "the text format has no units: {text}");
    let found = lines(&text, "# TYPE socklb_build");
    assert_eq!(found, ["# TYPE socklb_build_info gauge"]);
    assert_eq!(lines(&text, "# TYPE socklb_reloads"), ["# TYPE socklb_reloads_total counter"]);
    assert_eq!(lines(&text, "socklb_reloads"), lines(&expected, "socklb_reloads"));
}

#[test]
fn every_defined_metric_has_a_series_on_the_page() {
    for form in [ExpositionFormat::OpenMetrics, ExpositionFormat::Text] {
        let page = page(form, vec![client()]);
        let described = lines(&page, "# TYPE ");
        let described: Vec<&str> = described.iter().filter_map(|line| line.split(' ').nth(2)).collect();
        let suffix = |kind| match (form, kind) {
            (ExpositionFormat::Text, FamilyType::Counter) => "_total",
            (ExpositionFormat::Text, FamilyType::Info) => "_info",
            _ => "",
        };
        let defined: Vec<String> =
            ALL.iter().map(|family| format!("{}{}", family.name, suffix(family.kind))).collect();
        assert_eq!(described, defined);
        for family in ALL {
            assert!(!lines(&page, family.name).is_empty(), "{} has no series", family.name);
        }
    }
}

#[test]
fn a_histogram_is_cumulative_and_its_bounds_double() {
    for form in [ExpositionFormat::OpenMetrics, ExpositionFormat::Text] {
        let page = page(form, vec![client()]);
        let lines = lines(&page, "socklb_rtt_seconds");
        let of = r#"client="web",service="users",backend="[2001:db8::1]:80""#;
        assert_eq!(lines.len(), TIME_BUCKETS + 2);
        assert_eq!(lines[0], format!("socklb_rtt_seconds_sum{{{of}}} 1.5"));
        assert_eq!(lines[1], format!("socklb_rtt_seconds_count{{{of}}} 6"));
        assert_eq!(lines[2], format!(r#"socklb_rtt_seconds_bucket{{le="0.000016",{of}}} 1"#));
        assert_eq!(lines[3], format!(r#"socklb_rtt_seconds_bucket{{le="0.000032",{of}}} 1"#));
        assert_eq!(lines[4], format!(r#"socklb_rtt_seconds_bucket{{le="0.000064",{of}}} 5"#));
        assert_eq!(lines[20], format!(r#"socklb_rtt_seconds_bucket{{le="4.194304",{of}}} 5"#));
        assert_eq!(lines[21], format!(r#"socklb_rtt_seconds_bucket{{le="+Inf",{of}}} 6"#));
    }
}

#[test]
fn a_backend_has_one_state_and_every_ending() {
    let page = page(ExpositionFormat::OpenMetrics, vec![client()]);
    let value = |line: &&str| line.ends_with(" 1");
    let states = lines(&page, "socklb_backend_state{");
    assert_eq!(states.len(), 6);
    let [one] = states.iter().filter(|line| value(line)).collect::<Vec<_>>()[..] else {
        panic!("{states:?}")
    };
    assert!(one.contains("state=\"lame-duck\""), "{one}");
    let endings = lines(&page, "socklb_flows_ended_total{");
    assert_eq!(endings.len(), Ending::ALL.len());
    let of = r#"client="web",service="users",backend="[2001:db8::1]:80",ending="refused""#;
    assert!(endings.contains(&format!("socklb_flows_ended_total{{{of}}} 3").as_str()), "{endings:?}");
    assert!(page.contains("\nsocklb_flows_lifetime_seconds_total{") && page.contains("} 2.5\n"));
}

#[test]
fn a_page_shows_weights_that_follow_load() {
    let page = page(ExpositionFormat::Text, vec![client()]);
    let of = r#"{client="web",service="users",backend="[2001:db8::1]:80"}"#;
    assert_eq!(lines(&page, "socklb_backend_load_factor{"), [format!("socklb_backend_load_factor{of} 1.25")]);
    assert_eq!(
        lines(&page, "socklb_backend_load_factor_wanted{"),
        [format!("socklb_backend_load_factor_wanted{of} 1.5")]
    );
    let of = r#"{client="web",service="users"}"#;
    assert_eq!(lines(&page, "socklb_load_members{"), [format!("socklb_load_members{of} 1")]);
    assert_eq!(
        lines(&page, "socklb_load_members_reporting{"),
        [format!("socklb_load_members_reporting{of} 1")]
    );
    let switched = lines(&page, "socklb_load_switched{");
    let on: Vec<&&str> = switched.iter().filter(|line| line.ends_with(" 1")).collect();
    assert!(switched.len() == 3 && on.len() == 1 && on[0].contains("switch=\"on\""), "{switched:?}");
    let slow = ServiceLoadStatus { control: None, ..load() };
    let mut client = client();
    client.facts.loads = BTreeMap::from([("users".to_owned(), slow)]);
    let page = self::page(ExpositionFormat::Text, vec![client]);
    assert!(
        lines(&page, "socklb_load_members{").is_empty(),
        "weights with only slow start do not follow load"
    );
    assert!(!lines(&page, "socklb_backend_load_factor{").is_empty());
}

#[test]
fn closed_connections_count_by_cause() {
    let page = page(ExpositionFormat::Text, vec![client()]);
    assert_eq!(
        lines(&page, "socklb_closed_connections_total{"),
        [
            r#"socklb_closed_connections_total{client="web",service="users",cause="operator"} 48"#,
            r#"socklb_closed_connections_total{client="web",service="users",cause="backend-loss"} 0"#,
            r#"socklb_closed_connections_total{client="web",service="users",cause="rebalance"} 0"#
        ]
    );
}

#[test]
fn an_override_for_all_clients_counts_once() {
    let scope = |host: u8| OverrideScope {
        service: "users".to_owned(),
        backend: ([10, 0, 0, host], 80).into(),
        client: None,
    };
    let of = |host: u8, kind| {
        let (user, process, since) = (0, 1, 1_700_000_000);
        Override { scope: scope(host), kind, reason: None, user, process, since, until: None }
    };
    let weight = OverrideKind::Weight { percent: 50 };
    let overrides = vec![of(1, OverrideKind::Drain), of(2, OverrideKind::Drain), of(2, weight)];
    let clients = ["web", "batch"].map(|name| {
        let mut client = client();
        client.facts.pins = Pins::of(Path::new("/pins"), name);
        client.facts.overrides.clone_from(&overrides);
        client
    });
    let page = page(ExpositionFormat::Text, clients.into());
    assert_eq!(
        lines(&page, "socklb_overrides{"),
        [
            r#"socklb_overrides{service="users",kind="drain"} 2"#,
            r#"socklb_overrides{service="users",kind="weight"} 1"#
        ]
    );
}

#[test]
fn a_client_with_unreadable_maps_has_no_other_series() {
    let client = ClientMetrics { maps: None, ..client() };
    let page = page(ExpositionFormat::Text, vec![client]);
    assert_eq!(lines(&page, "socklb_client_readable"), [r#"socklb_client_readable{client="web"} 0"#]);
    assert!(lines(&page, "socklb_flows").is_empty() && lines(&page, "socklb_map").is_empty());
}
