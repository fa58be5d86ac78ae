//! What `status` tells of a backend's flows: how they end, how long connects take, and that the counts are the backend's,
//! whatever becomes of its slot.

use lb_common::abi::{Anomalies, Backend, map};
use serde_json::Value;
use stage::eventually;
use stage::maps::{Raw, array, per_cpu};

use stage::fixture::{Fixture, SERVICE};

/// The backend of this address, or null.
fn backend(fixture: &Fixture, address: &str) -> Value {
    let mut backends = fixture.setup.backends("web", "users").into_iter();
    backends.find(|backend| backend["address"] == address).unwrap_or_default()
}

/// Chosen is what ended, what is open, what was reclaimed, and what is not tracked.
#[track_caller]
fn assert_adds_up(backend: &Value) {
    let count = |value: &Value| value.as_u64().expect("a count");
    let ended: u64 = backend["endings"].as_object().expect("endings").values().map(count).sum();
    let [active, reclaimed, untracked] =
        ["active", "reclaimed", "untracked"].map(|name| count(&backend[name]));
    assert_eq!(count(&backend["started"]), ended + active + reclaimed + untracked, "{backend}");
    assert_eq!(backend["unaccounted"], 0);
}

#[test]
fn what_flows_end_of_and_how_long_they_took_is_told() {
    let mut fixture = Fixture::without_daemon();
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8009", "")]);
    fixture.start();
    let mut probe = fixture.probe();
    let counts = probe.dial_many(SERVICE, 200);
    assert_eq!(counts["b1"], 100);
    // One of them stays open.
    let more = [probe.try_dial(SERVICE), probe.try_dial(SERVICE)];
    assert_eq!(more.iter().filter(|dialled| dialled.is_ok()).count(), 1);
    let look = || (backend(&fixture, "127.0.0.1:8001"), backend(&fixture, "127.0.0.1:8009"));
    let rate = |backend: &Value| backend["rates_60s"]["started"].as_f64() > Some(0.0);
    let (good, bad) = eventually("rates are known", look, |(good, bad)| rate(good) && rate(bad));
    assert_adds_up(&good);
    assert_adds_up(&bad);
    // The probe resets what it has opened, which is no failure of the backend.
    assert_eq!((&good["endings"]["aborted"], &bad["endings"]["refused"]), (&100.into(), &101.into()));
    for times in ["rtt", "connect"] {
        assert_eq!(good[times]["count"], good["established"]);
        let buckets = good[times]["buckets"].as_array().expect("buckets");
        assert_eq!(buckets.len(), 20);
        assert_eq!(
            buckets.iter().map(|count| count.as_u64().expect("a count")).sum::<u64>(),
            good[times]["count"]
        );
        assert_eq!(bad[times]["count"], 0);
    }
    for latency in ["latency", "latency_60s"] {
        let [mean, p50, p99] =
            ["mean_us", "p50_us", "p99_us"].map(|name| good[latency][name].as_f64().expect("a time"));
        assert!(mean > 0.0 && p50 > 0.0 && p50 <= p99 && p99 < 1e6, "{}", good[latency]);
        assert_eq!(bad[latency], Value::Null);
    }
    assert!(
        good["lifetime_s"].as_f64() >= Some(0.0) && good["bytes_received"].as_u64() >= Some(300),
        "{good}"
    );
    let [refused, errors] = ["refused", "errors"].map(|name| match name {
        "errors" => bad["rates_60s"][name].as_f64().expect("a rate"),
        name => bad["rates_60s"]["endings"][name].as_f64().expect("a rate"),
    });
    assert!(refused > 0.0 && (refused - errors).abs() < 1e-9, "{bad}");
    assert_eq!(good["rates_60s"]["errors"], 0.0);
    let text =
        |fixture: &Fixture| String::from_utf8_lossy(&fixture.setup.run(&["status"]).stdout).into_owned();
    let with = text(&fixture);
    assert!(with.contains("flows/s") && with.contains("    refused ") && with.contains("/s\n"), "{with}");
    fixture.stop();
    let without = text(&fixture);
    assert!(without.contains("started") && without.contains("    refused 101\n"), "{without}");
    assert_eq!(backend(&fixture, "127.0.0.1:8001")["rates_60s"], Value::Null);
}

/// Another backend has its slot by then.
#[test]
fn a_backend_that_leaves_and_returns_goes_on_with_its_counts() {
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    probe.dial_many(SERVICE, 300);
    let before = backend(&fixture, "127.0.0.1:8003");
    let had = before["started"].as_u64().expect("a count");
    assert!((99..=101).contains(&had), "{before}");
    let there = |fixture: &Fixture, address: &str| !backend(fixture, address).is_null();
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", "")]);
    eventually("it leaves", || there(&fixture, "127.0.0.1:8003"), |there| !there);
    // Another backend takes the slot, a new daemon the maps.
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8002", ""), ("127.0.0.1:8009", "")]);
    eventually("another comes", || there(&fixture, "127.0.0.1:8009"), |there| *there);
    let other = backend(&fixture, "127.0.0.1:8009");
    assert_eq!((&other["slot"], &other["started"]), (&before["slot"], &0.into()), "{other}");
    fixture.stop();
    fixture.start();
    let all =
        [("127.0.0.1:8001", ""), ("127.0.0.1:8002", ""), ("127.0.0.1:8009", ""), ("127.0.0.1:8003", "")];
    fixture.write_endpoints(&all);
    eventually("it returns", || there(&fixture, "127.0.0.1:8003"), |there| *there);
    let after = backend(&fixture, "127.0.0.1:8003");
    assert_ne!(after["slot"], before["slot"]);
    for field in ["started", "endings", "connect", "rtt", "bytes_received", "established", "lifetime_s"] {
        assert_eq!(after[field], before[field], "{field}");
    }
    assert_adds_up(&after);
    // The counts that it goes on with are none of the last minute.
    assert!(after["rates_60s"].is_null() || after["rates_60s"]["started"] == 0.0, "{after}");
    probe.dial_many(SERVICE, 40);
    let now = backend(&fixture, "127.0.0.1:8003")["started"].as_u64().expect("a count");
    assert!((had + 9..=had + 11).contains(&now), "{had}, {now}");
}

/// A count that is off is told, and not taken for what is under way.
#[test]
fn counts_that_do_not_add_up_are_a_fault() {
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    probe.dial_many(SERVICE, 30);
    fixture.stop();
    let said = |fixture: &Fixture| stage::faults_of(&fixture.setup.status()).join("\n");
    assert!(!said(&fixture).contains("add up"), "{}", said(&fixture));
    let slot = u32::try_from(backend(&fixture, "127.0.0.1:8002")["slot"].as_u64().expect("a slot"))
        .expect("32 bits");
    let mut active = array::<Backend>(&fixture.setup.map("web", map::BACKENDS));
    let Raw(mut row) = active.get(&slot, 0).expect("a slot");
    row.flows += 2;
    active.set(slot, Raw(row), 0).expect("two flows that never were");
    let expected =
        "service users, backend 127.0.0.1:8002: its counts do not add up: 2 flows too many ended or active";
    assert!(said(&fixture).contains(expected), "{}", said(&fixture));
    assert_eq!(backend(&fixture, "127.0.0.1:8002")["unaccounted"], -2);
    // Under way all the time, and nothing is wrong.
    row.flows -= 2;
    active.set(slot, Raw(row), 0).expect("as it was");
    probe.start_dialling(SERVICE);
    for _ in 0..10 {
        assert!(!said(&fixture).contains("add up"), "{}", said(&fixture));
    }
    probe.stop_dialling();
}

#[test]
fn anomalies_are_a_note_of_the_doctor() {
    let fixture = Fixture::new();
    let anomalies = || fixture.setup.status()["clients"][0]["anomalies"].clone();
    assert!(anomalies().as_object().expect("counts").values().all(|count| *count == 0));
    let mut counters = per_cpu::<Anomalies>(&fixture.setup.map("web", map::ANOMALIES));
    let mut cpus: Vec<Raw<Anomalies>> = counters.get(&0, 0).expect("the counters").to_vec();
    cpus[0].0.ended_twice = 3;
    let cpus = aya::maps::PerCpuValues::try_from(cpus).expect("of all CPUs");
    counters.set(0, cpus, 0).expect("store them");
    assert_eq!(anomalies()["ended_twice"], 3);
    let path = fixture.setup.folder.join("socklb.toml");
    let output = fixture.setup.run(&["doctor", "--json", "--config", path.to_str().expect("UTF-8")]);
    let diagnosis: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let findings = diagnosis["findings"].as_array().expect("findings");
    let of = |check: &str| {
        findings.iter().filter(|finding| finding["check"] == check).cloned().collect::<Vec<_>>()
    };
    let [found] = &of("anomalies")[..] else { panic!("{findings:?}") };
    assert_eq!(
        (&found["state"], &found["text"]),
        (&"note".into(), &"client web: 3 records were ended twice at a time".into())
    );
    let limits: Vec<String> = of("limits").iter().map(|finding| finding["text"].to_string()).collect();
    for part in ["client web: 0 of 131072 flow_overflow", "client web: 0 of 131072 datagrams"] {
        assert!(limits.iter().any(|text| text.contains(part)), "{limits:?}");
    }
}
