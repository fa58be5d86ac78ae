//! The endpoint file while the daemon runs: constant changes, and faulty content.

use std::collections::BTreeSet;
use std::fs;

use stage::{eventually, replace};

use stage::fixture::{Fixture, SERVICE, endpoints};

#[test]
fn a_constantly_rewritten_file_is_never_read_in_part() {
    let fixture = Fixture::new();
    let mut probe = fixture.probe();
    probe.start_dialling(SERVICE);
    // The file is written in place, so that a reader may find only a part of it. It is long, so
    // that this happens often.
    let list: Vec<(String, &str)> =
        (1..=2000).map(|n| (format!("127.0.{}.{}:8001", n / 250, n % 250 + 1), "weight = 0")).collect();
    let mut list: Vec<(&str, &str)> = list.iter().map(|(address, more)| (address.as_str(), *more)).collect();
    list.push(("127.0.0.1:8002", "weight = 1"));
    list.push(("127.0.0.1:8003", "weight = 1"));
    // Each version differs from all others, because reading an unchanged list changes nothing. (Two
    // alternating versions are not enough: a daemon that reads at every fourth write would always
    // read the same version.)
    let text = |version: u32| endpoints(&list).replace("weight = 1\n", &format!("weight = {version}\n"));
    let mut version = 0;
    let reads = || fixture.daemon().log().matches("endpoint list read").count();
    eventually(
        "the file is read several times",
        || {
            version += 1;
            fs::write(&fixture.file, text(version)).expect("write in place");
            reads()
        },
        |reads| *reads >= 4,
    );
    let counts = probe.stop_dialling();
    let names: BTreeSet<&str> = counts.keys().map(String::as_str).collect();
    assert!(names.iter().all(|name| ["b1", "b2", "b3"].contains(name)), "{counts:?}");
}

/// Ten services have faulty files of the maximum length at the same time.
#[test]
fn ten_faulty_files_at_once_take_little_memory() {
    const LONGEST: usize = 4 << 20;
    let mut fixture = Fixture::without_daemon();
    let mut text =
        format!("[[client]]\njob = \"web\"\ncgroup = \"{}\"\n", fixture.cgroup.relative().display());
    let name =
        |service: usize| format!("s{service}.{}", if service.is_multiple_of(2) { "toml" } else { "json" });
    let json = r#"[{"targets": ["127.0.0.1:8001"]}]"#;
    let good = |service: usize| {
        if service.is_multiple_of(2) { endpoints(&[("127.0.0.1:8001", "")]) } else { json.to_owned() }
    };
    for service in 0..10 {
        text += &format!(
            "[[service]]\nname = \"s{service}\"\naddress = \"10.96.1.{service}:80\"\nbackends = {{ file = \"{}\" }}\n",
            name(service)
        );
        fixture.setup.write(&name(service), &good(service));
    }
    fixture.setup.write("socklb.toml", &text);
    fixture.start();
    let peak = || {
        let status =
            stage::daemon::read(std::path::Path::new(&format!("/proc/{}/status", fixture.daemon().pid())));
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))
            .expect("the status has VmHWM")
            .to_owned();
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("the text is a number") >> 10
    };
    let before = peak();
    let shapes: [(&str, &str); 5] = [
        ("endpoint=[{address=\"x\"},", "[{\"targets\":[\"x\"]},"),
        ("[", "["),
        ("[[endpoint]]\naddress=\"x\"\n", "[{\"targets\":[],\"labels\":{\"a\":\"b\"}},"),
        ("a=1\n", "{\"a\":1,"),
        ("{a=", "1,"),
    ];
    let failures = |at_least: u64| {
        let status = fixture.setup.status();
        let services = status.clients.iter().flat_map(|client| &client.services);
        let failures = services.filter_map(|service| service.source.as_ref()).map(|source| source.failures);
        failures.filter(|failures| *failures >= at_least).count()
    };
    for (round, (toml, json)) in (1..).zip(shapes) {
        for service in 0..10_usize {
            let (first, more) = if service.is_multiple_of(2) { ("", toml) } else { ("[", json) };
            let whole = first.to_owned() + &more.repeat((LONGEST - 1) / more.len());
            replace(&fixture.setup.folder.join(name(service)), &whole[..whole.len().min(LONGEST)]);
        }
        let all = stage::within(6 * stage::patience(), || failures(round), |count| *count == 10);
        assert_eq!(all, Ok(10), "the daemon refuses all ten files: {toml} {json}");
    }
    let peak = peak();
    assert!(peak < 200, "peak memory: {peak} MiB, and {before} MiB before the reads");
    for service in 0..10 {
        replace(&fixture.setup.folder.join(name(service)), &good(service));
    }
    let code = || fixture.setup.run(&["status"]).status.code();
    eventually("status reports no fault", code, |code| *code == Some(0));
}
