//! Tests of the times at which host names are queried, and of the effect of answers.

use std::collections::BTreeMap;

use super::*;
use crate::dns::RecordSet;

fn host(name: &str) -> HostName {
    HostName { name: name.into(), is_ipv6: false }
}

fn records(ips: &[&str], ttl: u64) -> Result<Lookup<IpAddr>, Failure> {
    let records = ips.iter().map(|ip| ip.parse().unwrap()).collect();
    let ttl = Duration::from_secs(ttl);
    Ok(Lookup::Records(RecordSet { records, ttl, serial: None, additional: BTreeMap::new() }))
}

fn empty() -> Result<Lookup<IpAddr>, Failure> {
    Ok(Lookup::Empty { why: "NXDOMAIN".to_owned() })
}

fn failed() -> Result<Lookup<IpAddr>, Failure> {
    Err(Failure::Unreachable("no answer".to_owned()))
}

fn schedule(names: &[&str], now: Instant) -> Schedule {
    let mut schedule = Schedule::default();
    schedule.add(names.iter().map(|name| host(name)).collect(), now);
    schedule
}

#[test]
fn a_name_is_queried_again_after_its_ttl_but_not_before_30_s_or_after_5_min() {
    let now = Instant::now();
    for (ttl, least, most) in [(0, 30, 36), (29, 30, 36), (60, 60, 69), (300, 300, 333), (86_400, 300, 333)] {
        for draw in [0.0, 0.5, 1.0] {
            let mut schedule = schedule(&["a"], now);
            assert_eq!(schedule.begin(now, false), Some(host("a")));
            assert_eq!(schedule.due(), None, "a query is in flight");
            schedule.answered(&host("a"), records(&["10.0.0.1"], ttl), now, draw);
            let wait = schedule.due().unwrap() - now;
            // A query can start `TOGETHER` early, so that it shares a connection.
            assert!(wait - TOGETHER >= Duration::from_secs(least), "TTL {ttl}: wait {wait:?}");
            assert!(wait <= Duration::from_secs(most), "TTL {ttl}: wait {wait:?}");
        }
    }
}

#[test]
fn an_answer_without_addresses_retains_the_last_ones_and_notes_since_when() {
    let now = Instant::now();
    let mut schedule = schedule(&["a"], now);
    schedule.answered(&host("a"), records(&["10.0.0.2", "10.0.0.1"], 60), now, 0.5);
    let addresses = |schedule: &Schedule| schedule.table().0[&host("a")].addresses.to_vec();
    let before = addresses(&schedule);
    assert_eq!(before, ["10.0.0.1", "10.0.0.2"].map(|ip| ip.parse::<IpAddr>().unwrap()));
    for (second, result) in [(1, empty()), (2, failed()), (3, empty())] {
        schedule.answered(&host("a"), result, now + Duration::from_secs(second), 0.5);
        assert_eq!(addresses(&schedule), before);
        let missing = schedule.table().0[&host("a")].missing.clone().unwrap();
        assert_eq!(missing.since, now + Duration::from_secs(1));
    }
    let many: Vec<String> =
        (0..=MAX_ADDRESSES).map(|n| format!("10.1.{}.{}", n / 250, n % 250 + 1)).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    schedule.answered(&host("a"), records(&many, 60), now, 0.5);
    assert_eq!(addresses(&schedule), before, "an answer with too many addresses is a failure");
    schedule.answered(&host("a"), records(&["10.0.0.3"], 60), now, 0.5);
    let state = schedule.table().0[&host("a")].clone();
    assert_eq!((state.missing, state.addresses.len()), (None, 1));
}

#[test]
fn an_answer_with_an_address_that_is_not_allowed_retains_the_last_ones() {
    let now = Instant::now();
    let ips = |ips: &[&str]| -> Arc<[IpAddr]> { ips.iter().map(|ip| ip.parse().unwrap()).collect() };
    let sorted = |mut texts: [&'static str; 2]| {
        texts.sort_by_key(|ip| ip.parse::<IpAddr>().unwrap());
        texts
    };
    for (refused, why) in [
        ("127.0.0.1", "127.0.0.1 is not allowed: it is a loopback address"),
        ("169.254.1.1", "169.254.1.1 is not allowed: it is a link-local address"),
        ("224.0.0.1", "224.0.0.1 is not allowed: it is a multicast address"),
        ("0.0.0.0", "0.0.0.0 is not allowed: it is the unspecified address"),
    ] {
        let mut schedule = schedule(&["a"], now);
        schedule.answered(&host("a"), records(&["10.0.0.1"], 60), now, 0.5);
        let at = now + Duration::from_secs(1);
        schedule.answered(&host("a"), records(&[refused, "200.0.0.2"], 60), at, 0.5);
        let table = schedule.table();
        let expected = HostState {
            addresses: ips(&["10.0.0.1"]),
            stored: None,
            answered: Some(at),
            missing: Some(MissingAddresses { why: why.into(), since: at, is_refusal: true }),
            refused: [ips(&sorted([refused, "200.0.0.2"]))].into(),
        };
        assert_eq!(table.0[&host("a")], expected);
        assert_eq!(table.addresses(false, |_| false)["a"], ips(&["10.0.0.1"]));
        // A list whose `allow` contains the addresses uses them.
        assert_eq!(table.addresses(false, |_| true)["a"].len(), 2);
        assert_eq!(table.0[&host("a")].missing_for(|_| true), None);
        schedule.answered(&host("a"), failed(), at, 0.5);
        assert_eq!(schedule.table().addresses(false, |_| false)["a"], ips(&["10.0.0.1"]));
        schedule.answered(&host("a"), records(&["10.0.0.3"], 60), at, 0.5);
        assert_eq!(schedule.table().addresses(false, |_| true)["a"], ips(&["10.0.0.3"]));
    }
}

#[test]
fn the_addresses_that_only_an_allow_contains_outlast_other_refused_answers_and_failures() {
    let now = Instant::now();
    let mut schedule = schedule(&["a"], now);
    let loopback = |ip: IpAddr| ip.is_loopback();
    let used = |schedule: &Schedule| schedule.table().addresses(false, loopback).get("a").cloned();
    for (result, is_resolved) in [
        (records(&["127.0.0.1"], 60), true),
        (records(&["169.254.1.1"], 60), false),
        (failed(), false),
        (empty(), false),
        (records(&["127.0.0.1"], 60), true),
    ] {
        schedule.answered(&host("a"), result, now, 0.5);
        assert_eq!(used(&schedule).as_deref(), Some(&["127.0.0.1".parse().unwrap()][..]));
        assert_eq!(schedule.table().0[&host("a")].missing_for(loopback).is_none(), is_resolved);
        assert!(schedule.table().addresses(false, |_| false).is_empty());
    }
    let mut next = HostState::default();
    next.adopt(schedule.table().0[&host("a")].clone());
    assert_eq!(**next.addresses_for(loopback), ["127.0.0.1".parse::<IpAddr>().unwrap()]);
}

#[test]
fn failed_questions_are_repeated_with_growing_pauses_and_never_earlier() {
    let mut now = Instant::now();
    let mut schedule = schedule(&["a", "b"], now);
    schedule.answered(&host("b"), records(&["10.0.0.1"], 60), now, 0.0);
    let mut pauses = Vec::new();
    for _ in 0..10 {
        assert_eq!(schedule.begin(now, true), Some(host("a")));
        schedule.answered(&host("a"), failed(), now, 0.5);
        let due = schedule.due().unwrap();
        pauses.push((due - now).as_millis());
        assert_eq!(schedule.begin(due - Duration::from_millis(1), true), None);
        now = due;
        // Moves the query for `b` to a later time, so that only `a` is due.
        schedule.0.get_mut(&host("b")).unwrap().due = Some(now + Duration::from_mins(1));
    }
    assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_000, 25_000]);
}

#[test]
fn questions_that_are_due_soon_begin_together() {
    let now = Instant::now();
    let mut schedule = schedule(&["a", "b", "c"], now);
    for (name, ttl) in [("a", 30), ("b", 32), ("c", 60)] {
        schedule.answered(&host(name), records(&["10.0.0.1"], ttl), now, 0.0);
    }
    let due = schedule.due().unwrap();
    assert_eq!(schedule.begin(due - Duration::from_secs(1), false), None);
    assert_eq!(schedule.begin(due, false), Some(host("a")));
    assert_eq!(schedule.begin(due, false), None);
    assert_eq!(schedule.begin(due, true), Some(host("b")));
    assert_eq!(schedule.begin(due, true), None);
}

#[test]
fn the_answer_to_a_name_that_is_no_longer_needed_is_ignored() {
    let now = Instant::now();
    let mut schedule = schedule(&["a"], now);
    schedule.0.clear();
    schedule.answered(&host("a"), records(&["10.0.0.1"], 60), now, 0.5);
    assert_eq!(*schedule.table(), HostTable::default());
}

#[test]
fn stored_addresses_count_until_a_name_resolves_and_never_replace_later_ones() {
    let (now, at) = (Instant::now(), SystemTime::UNIX_EPOCH);
    let mut schedule = schedule(&["a", "b"], now);
    schedule.answered(&host("a"), records(&["10.0.0.1"], 60), now, 0.5);
    schedule.answered(&host("b"), failed(), now, 0.5);
    let old: Arc<[IpAddr]> = ["10.0.0.9".parse().unwrap()].into();
    let stored = HostState { addresses: Arc::clone(&old), stored: Some(at), ..HostState::default() };
    let names = ["a", "b", "c"].map(|name| (host(name), stored.clone()));
    schedule.adopt(names.into(), now);
    let state = |schedule: &Schedule, name| schedule.table().0[&host(name)].clone();
    assert_eq!((state(&schedule, "a").stored, state(&schedule, "a").addresses.len()), (None, 1));
    assert_ne!(state(&schedule, "a").addresses, old);
    for name in ["b", "c"] {
        assert_eq!(
            (state(&schedule, name).addresses, state(&schedule, name).stored),
            (old.clone(), Some(at))
        );
    }
    let table = schedule.table();
    assert!(
        table.is_known(&host("c")) && !table.is_answered(&host("c")),
        "stored addresses are sufficient for a list"
    );
    // An answer without addresses changes nothing.
    for result in [empty(), failed()] {
        schedule.answered(&host("c"), result, now, 0.5);
        assert_eq!((state(&schedule, "c").addresses, state(&schedule, "c").stored), (old.clone(), Some(at)));
    }
    schedule.answered(&host("c"), records(&["10.0.0.3"], 60), now, 0.5);
    assert_eq!(
        (state(&schedule, "c").addresses.to_vec(), state(&schedule, "c").stored),
        (vec!["10.0.0.3".parse::<IpAddr>().unwrap()], None)
    );
    // Stored addresses cannot raise the number of names above the maximum.
    let many = (0..2 * MOST).map(|n| (host(&format!("n{n}")), stored.clone())).collect();
    schedule.adopt(many, now);
    assert_eq!(schedule.0.len(), MOST);
}
