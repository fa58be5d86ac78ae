//! The counts of a backend's flows in `status`: how flows end, and how long connects take. A
//! backend's counts do not change if its slot changes.

use lb_view::backend::{BackendStatus, ConnectLatency};
use stage::{eventually, look};

use stage::fixture::{Fixture, SERVICE};

#[track_caller]
fn backend(fixture: &Fixture, address: &str) -> BackendStatus {
    fixture.setup.backend(address).expect("the backend has a slot")
}

/// Asserts that the started flows are the sum of the ended, active, reclaimed and untracked flows.
#[track_caller]
fn assert_adds_up(backend: &BackendStatus) {
    let BackendStatus { started, active, reclaimed, untracked, endings, .. } = backend;
    assert_eq!(*started, endings.values().sum::<u64>() + active + reclaimed + untracked, "{backend:?}");
    assert_eq!(backend.unaccounted, 0);
}

#[test]
fn status_shows_endings_and_latencies_of_flows() {
    let mut fixture = Fixture::without_ejection();
    fixture.write_endpoints(&[("127.0.0.1:8001", ""), ("127.0.0.1:8009", "")]);
    fixture.start();
    let mut probe = fixture.probe();
    let counts = probe.dial_many(SERVICE, 200);
    assert_eq!(counts["b1"], 100);
    // One of these connects succeeds, and its connection stays open.
    let more = [probe.try_dial(SERVICE), probe.try_dial(SERVICE)];
    assert_eq!(more.iter().filter(|dialled| dialled.is_ok()).count(), 1);
    let both = || (backend(&fixture, "127.0.0.1:8001"), backend(&fixture, "127.0.0.1:8009"));
    let has_rate =
        |backend: &BackendStatus| backend.rates_60s.as_ref().is_some_and(|rates| rates.started > 0.0);
    let (good, bad) =
        eventually("both backends have rates", both, |(good, bad)| has_rate(good) && has_rate(bad));
    assert_adds_up(&good);
    assert_adds_up(&bad);
    // The probe resets the connections that it has opened, which does not count as a failure of the
    // backend.
    assert_eq!((good.endings["aborted"], bad.endings["refused"]), (100, 101));
    for (good_times, bad_times) in [(&good.rtt, &bad.rtt), (&good.connect, &bad.connect)] {
        assert_eq!(good_times.count, good.established);
        assert_eq!(good_times.buckets.len(), 20);
        assert_eq!(good_times.buckets.iter().sum::<u64>(), good_times.count);
        assert_eq!(bad_times.count, 0);
    }
    for (good, bad) in [(good.latency, bad.latency), (good.latency_60s, bad.latency_60s)] {
        let ConnectLatency { mean_us, p50_us, p99_us } = good.expect("the backend has latencies");
        assert!(mean_us > 0.0 && p50_us > 0.0 && p50_us <= p99_us && p99_us < 1e6, "{good:?}");
        assert_eq!(bad, None);
    }
    assert!(good.lifetime_s >= 0.0 && good.bytes_received >= 300, "{good:?}");
    let (good_rates, bad_rates) =
        (good.rates_60s.expect("the daemon shows rates"), bad.rates_60s.expect("the daemon shows rates"));
    let refused = bad_rates.endings["refused"];
    assert!(refused > 0.0 && (refused - bad_rates.errors).abs() < 1e-9, "{bad_rates:?}");
    assert_eq!(good_rates.errors, 0.0);
    let text =
        |fixture: &Fixture| String::from_utf8_lossy(&fixture.setup.run(&["status"]).stdout).into_owned();
    let with = text(&fixture);
    assert!(with.contains("flows/s") && with.contains("    refused ") && with.contains("/s\n"), "{with}");
    fixture.stop();
    let without = text(&fixture);
    assert!(without.contains("started") && without.contains("    refused 101\n"), "{without}");
    assert_eq!(look(|| backend(&fixture, "127.0.0.1:8001").rates_60s).now("no daemon runs"), None);
    // Flows that begin and end while a command reads the counts cause differences, which are no
    // fault.
    let started = || fixture.setup.service().backends.iter().map(|backend| backend.started).sum::<u64>();
    let before = started();
    probe.start_dialling(SERVICE);
    eventually("the probe dials", started, |started| *started > before + 100);
    for _ in 0..10 {
        let faults = stage::faults_of(&fixture.setup.status()).join("\n");
        assert!(!faults.contains("add up"), "{faults}");
    }
    probe.stop_dialling();
}

/// An offline CPU of a guest. The CPU is online again after drop.
struct Offline(String);

impl Offline {
    fn take(cpu: usize) -> Self {
        let file = format!("/sys/devices/system/cpu/cpu{cpu}/online");
        std::fs::write(&file, "0").expect("switch the CPU off");
        Self(file)
    }
}

impl Drop for Offline {
    fn drop(&mut self) {
        std::fs::write(&self.0, "1").expect("switch the CPU on");
    }
}

/// Each CPU has separate counters. This test takes a CPU offline only in a guest, never on a host.
#[test]
fn counts_of_an_offline_cpu_are_not_lost() {
    let mut fixture = Fixture::new();
    let mut probe = fixture.probe();
    probe.pin(1);
    probe.dial_many(SERVICE, 30);
    let open: Vec<_> = (0..6).map(|_| probe.dial(SERVICE).socket).collect();
    probe.pin(0);
    let offline = stage::in_a_guest().then(|| Offline::take(1));
    let started = |fixture: &Fixture| {
        let backends = fixture.setup.service().backends;
        backends.iter().for_each(assert_adds_up);
        backends.iter().map(|backend| backend.started).sum::<u64>()
    };
    assert_eq!(started(&fixture), 36);
    probe.dial_many(SERVICE, 30);
    for socket in open {
        probe.close(socket);
    }
    fixture.setup.active_becomes(0);
    assert_eq!(started(&fixture), 66);
    // The daemon starts and adopts its clients while one CPU is offline.
    fixture.stop();
    fixture.start();
    drop(offline);
    probe.pin(1);
    probe.dial_many(SERVICE, 30);
    fixture.setup.active_becomes(0);
    assert_eq!(started(&fixture), 96);
}
