//! Tests in which the host names of lists are resolved by servers on the loopback interface.

use std::sync::atomic::{AtomicUsize, Ordering};

use lb_config::endpoints::MAX_HOSTS;
use tokio::time::timeout;

use super::*;
use crate::{HostName, HostState, HostTable, Hosts};

fn named(name: &str, is_ipv6: bool) -> HostName {
    HostName { name: name.into(), is_ipv6 }
}

fn names(range: std::ops::Range<usize>) -> BTreeSet<HostName> {
    range.map(|number| named(&format!("n{number}.example.com"), false)).collect()
}

fn resolving(per_second: usize) -> Hosts {
    let dns = Resolvers::new(Path::new("/none"), QueryLimits { whole: DEADLINE, per_second });
    Hosts::new(&Arc::new(ProviderContext { dns }), &Arc::default())
}

/// Waits until all these names are known. Returns the states of all names.
async fn known(hosts: &Hosts, wanted: &BTreeSet<HostName>, at: &DnsSettings) -> Arc<HostTable> {
    let mut table = hosts.resolve_too(wanted.clone(), at);
    let is_known = |table: &Arc<HostTable>| wanted.iter().all(|host| table.is_known(host));
    let known = timeout(4 * DEADLINE, table.wait_for(is_known)).await.expect("all names are known in time");
    Arc::clone(&known.expect("the table still exists"))
}

fn why(state: &HostState) -> String {
    state.missing.as_ref().map(|missing| missing.why.to_string()).unwrap_or_default()
}

fn answer(seen: &Seen, ips: &[&str]) -> Then {
    let rtype = if seen.rtype == Rtype::A { "A" } else { "AAAA" };
    let records: Vec<String> = ips.iter().map(|ip| format!("{} 60 {rtype} {ip}", seen.name)).collect();
    let records: Vec<&str> = records.iter().map(String::as_str).collect();
    Then::Answer(Reply::to(&seen.name, seen.rtype, &records))
}

fn failure(seen: &Seen) -> Then {
    Then::Answer(Reply { rcode: Rcode::SERVFAIL, ..Reply::to(&seen.name, seen.rtype, &[]) })
}

#[tokio::test]
async fn each_name_and_family_is_queried_once_for_all_lists() {
    let server = Server::start(|seen| match &*seen.name {
        "both.example.com" if seen.rtype == Rtype::A => answer(seen, &["10.0.0.2", "10.0.0.1", "10.0.0.2"]),
        "both.example.com" => answer(seen, &["2001:db8::1"]),
        "empty.example.com" => answer(seen, &[]),
        _ => failure(seen),
    })
    .await;
    let hosts = resolving(1000);
    let settings = settings(&[server.address], DnsTransport::Tcp);
    let wanted: BTreeSet<HostName> = [("both", false), ("both", true), ("empty", false), ("closed", false)]
        .map(|(name, is_ipv6)| named(&format!("{name}.example.com"), is_ipv6))
        .into();
    for _ in 0..2 {
        let table = known(&hosts, &wanted, &settings).await;
        let state = |name: &str, is_ipv6| table.0[&named(name, is_ipv6)].clone();
        let ips = |texts: &[&str]| texts.iter().map(|ip| ip.parse().unwrap()).collect::<Arc<[IpAddr]>>();
        assert_eq!(state("both.example.com", false).addresses, ips(&["10.0.0.1", "10.0.0.2"]));
        assert_eq!(state("both.example.com", true).addresses, ips(&["2001:db8::1"]));
        assert_eq!(why(&state("empty.example.com", false)), "no A records");
        assert!(why(&state("closed.example.com", false)).contains("SERVFAIL"));
        assert_eq!(table.addresses(false, |_| false).len(), 1, "names without addresses are left out");
    }
    let asked = |name: &str| server.seen().iter().filter(|seen| seen.name == name).count();
    assert_eq!((asked("both.example.com"), asked("empty.example.com")), (2, 1));
}

#[tokio::test]
async fn a_name_whose_query_fails_retains_its_addresses_and_other_names_change() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let server = Server::start(move |seen| {
        let is_later = count.fetch_add(1, Ordering::Relaxed) >= 2;
        match &*seen.name {
            "n0.example.com" if is_later => failure(seen),
            "n1.example.com" if is_later => answer(seen, &["10.0.0.9"]),
            _ => answer(seen, &["10.0.0.1"]),
        }
    })
    .await;
    let (hosts, wanted) = (resolving(1000), names(0..2));
    let settings = settings(&[server.address], DnsTransport::Tcp);
    let before = known(&hosts, &wanted, &settings).await;
    hosts.resolve_again(&wanted);
    let mut table = hosts.resolve_too(BTreeSet::new(), &settings);
    let [first, second] = [0, 1].map(|number| named(&format!("n{number}.example.com"), false));
    let is_over = |table: &Arc<HostTable>| {
        table.0[&first].missing.is_some() && table.0[&second].addresses != before.0[&second].addresses
    };
    let after =
        timeout(DEADLINE, table.wait_for(is_over)).await.expect("the table changes in time").unwrap().clone();
    assert_eq!(after.0[&first].addresses, before.0[&first].addresses);
    assert!(why(&after.0[&first]).contains("SERVFAIL"), "{}", why(&after.0[&first]));
}

#[tokio::test]
async fn names_share_the_questions_per_second_of_the_host() {
    let server = Server::start(|seen| answer(seen, &["10.0.0.1"])).await;
    let (hosts, wanted) = (resolving(100), names(0..150));
    let start = Instant::now();
    let table = known(&hosts, &wanted, &settings(&[server.address], DnsTransport::Tcp)).await;
    assert!(
        start.elapsed() >= Duration::from_secs(1),
        "150 names must take more than a second at 100 queries per second"
    );
    assert_eq!((table.0.len(), server.seen().len(), server.connections.borrow().1), (150, 150, 1));
}

#[tokio::test]
async fn more_names_than_three_times_those_of_all_lists_are_not_queried() {
    let server = Server::start(|seen| answer(seen, &["10.0.0.1"])).await;
    let (hosts, settings) = (resolving(100_000), settings(&[server.address], DnsTransport::Tcp));
    let all = names(0..4 * MAX_HOSTS);
    let first: BTreeSet<HostName> = all.iter().take(3 * MAX_HOSTS).cloned().collect();
    drop(hosts.resolve_too(all.clone(), &settings));
    let table = known(&hosts, &first, &settings).await;
    assert_eq!(table.0.len(), 3 * MAX_HOSTS);
    // Names that are no longer needed are removed, and new names can be added.
    hosts.resolve_only(names(0..1), &settings);
    assert_eq!(hosts.table().0.len(), 1);
    assert_eq!(known(&hosts, &names(0..3), &settings).await.0.len(), 3);
}

#[tokio::test]
async fn new_servers_are_queried_at_once() {
    let servers =
        [Server::start(|seen| answer(seen, &["10.0.0.1"])).await, Server::answering(Then::Close).await];
    let (hosts, wanted) = (resolving(1000), names(0..1));
    let host = wanted.first().unwrap();
    let bad = known(&hosts, &wanted, &settings(&[servers[1].address], DnsTransport::Tcp)).await;
    assert!(bad.0[host].addresses.is_empty());
    let mut table = hosts.resolve_too(BTreeSet::new(), &settings(&[servers[0].address], DnsTransport::Tcp));
    let has_any = |table: &Arc<HostTable>| !table.0[host].addresses.is_empty();
    timeout(DEADLINE, table.wait_for(has_any)).await.expect("the table changes in time").unwrap();
}
