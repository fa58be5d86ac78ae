//! Indexes that are derived from addresses: nothing depends on the order of a list, and adding or
//! removing an endpoint moves a bounded part of the subsets. Seeds are fixed, so that the results
//! are the same in each run.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};

use lb_core::endpoint::address_indexes::{MAX_WITHOUT_INDEXES, PLACES, indexes};
use lb_core::endpoint::{Endpoint, EndpointFault, EndpointList, EndpointState};
use lb_core::membership::{Membership, Memberships};
use lb_core::service::{Service, Size, Subset};
use lb_core::subset::Algorithm;
use lb_core::subset::random::{SplitMix64, shuffle};
use proptest::prelude::*;

fn endpoint(address: SocketAddr) -> Endpoint {
    Endpoint { address, index: 0, weight: 1, state: EndpointState::Healthy, zone: None, agent: None }
}

fn addresses(count: u32, seed: u64) -> Vec<SocketAddr> {
    let mut random = SplitMix64::new(seed);
    let mut chosen = BTreeSet::new();
    while chosen.len() < count as usize {
        let host = u32::try_from(random.below(1 << 20)).expect("the number is below 2^20");
        chosen.insert(SocketAddr::from((Ipv4Addr::from_bits(0x0a00_0000 + host), 8080)));
    }
    chosen.into_iter().collect()
}

fn list(addresses: &[SocketAddr]) -> EndpointList {
    let endpoints = addresses.iter().copied().map(endpoint).collect();
    EndpointList::without_indexes(endpoints, ([192, 0, 2, 1], 80).into(), &[]).expect("the list is valid")
}

fn service(algorithm: Algorithm, size: u32) -> Service {
    let subset = Subset::Sized { algorithm, size: Size::Fixed(size) };
    Service::new("users", "192.0.2.1:80".parse().expect("the address is valid"), subset, 7)
}

/// The members of every task, as addresses.
fn members(service: &Service, tasks: u32, addresses: &[SocketAddr]) -> Vec<BTreeSet<SocketAddr>> {
    let list = list(addresses);
    let memberships = Memberships::new(service, tasks, &list);
    let of = |Membership { members, .. }: Membership| {
        members.iter().map(|member| member.endpoint.address).collect()
    };
    (0..tasks).map(|task| of(memberships.of(task))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_order_of_a_list_does_not_matter(count in 1_u32..400, seed: u64) {
        let sorted = addresses(count, seed);
        let mut shuffled = sorted.clone();
        shuffle(&mut shuffled, &mut SplitMix64::new(seed ^ 1));
        prop_assert_eq!(list(&sorted), list(&shuffled));
        let unique: BTreeSet<u32> = indexes(&shuffled).into_iter().collect();
        prop_assert_eq!(unique.len(), count as usize);
        prop_assert!(unique.iter().all(|index| *index < PLACES));
    }
}

#[test]
fn one_endpoint_more_or_less_moves_at_most_two_of_n_members() {
    const ENDPOINTS: u32 = 300;
    for algorithm in [Algorithm::Rocksteadier, Algorithm::Rendezvous] {
        let service = service(algorithm, 20);
        let (mut moved, mut all) = (0, 0);
        for round in 0..8 {
            let with = addresses(ENDPOINTS, round);
            let mut without = with.clone();
            let gone = SplitMix64::new(round).below(ENDPOINTS.into());
            without.remove(usize::try_from(gone).expect("the position fits into a usize"));
            let (before, after) = (members(&service, 50, &with), members(&service, 50, &without));
            all += before.iter().map(BTreeSet::len).sum::<usize>();
            moved += before
                .iter()
                .zip(&after)
                .map(|(before, after)| before.difference(after).count())
                .sum::<usize>();
        }
        // The removed endpoint is a member of one subset in N / k, which is 1/N of all members. The
        // same number of members may move because the indexes of other endpoints change with the
        // removal.
        assert!(moved * ENDPOINTS as usize <= 2 * all, "{algorithm}: {moved} of {all} members moved");
    }
}

#[test]
fn weights_make_loads_even_and_evenness_of_connections_is_reported() {
    let list = list(&addresses(300, 7));
    let memberships = Memberships::new(&service(Algorithm::Rocksteadier, 20), 300, &list);
    let tasks: Vec<Membership> = (0..300).map(|task| memberships.of(task)).collect();
    for member in tasks.iter().flat_map(|task| &task.members) {
        assert!((member.load / member.target - 1.0).abs() < 1e-3, "{member:?}");
    }
    let evenness = tasks[0].evenness.expect("the list has no indexes");
    assert!((0.67..0.85).contains(&evenness.by_address), "{evenness:?}");
    assert!((0.83..=1.0).contains(&evenness.dense), "{evenness:?}");
}

#[test]
fn one_address_more_changes_few_other_indexes_even_of_the_longest_list() {
    const ROUNDS: u32 = 100;
    let others = |count: u32| {
        let changed = |seed: u32| {
            let all = addresses(count, seed.into());
            let gone = usize::try_from(SplitMix64::new(seed.into()).below(count.into()))
                .expect("the position fits into a usize");
            let (before, after) = ([&all[..gone], &all[gone + 1..]].concat(), indexes(&all));
            let unchanged = indexes(&before);
            let after = after.iter().enumerate().filter(|(position, _)| *position != gone);
            after.zip(&unchanged).filter(|((_, after), before)| after != before).count()
        };
        (0..ROUNDS).map(changed).sum::<usize>()
    };
    let most = [(1000, 1), (PLACES / 2, 1), (10_000, 2), (MAX_WITHOUT_INDEXES, 3)];
    for (count, mean) in most {
        let changed = others(count);
        println!("{count} addresses: {changed} other indexes in {ROUNDS} rounds");
        assert!(changed <= mean * ROUNDS as usize, "{count} addresses: {changed} other indexes changed");
    }
}

#[test]
fn a_list_of_three_quarters_of_the_places_is_the_longest() {
    let service = ([192, 0, 2, 1], 80).into();
    let of = |count| {
        let endpoints = addresses(count, 1).into_iter().map(endpoint).collect();
        EndpointList::without_indexes(endpoints, service, &[]).map(|list| list.count())
    };
    assert_eq!(of(MAX_WITHOUT_INDEXES), Ok(12_288));
    assert_eq!(
        of(MAX_WITHOUT_INDEXES + 1),
        Err(vec![(12_288, EndpointFault::TooManyWithoutIndexes { position: 12_288 })])
    );
}

#[test]
fn a_v4_mapped_address_has_the_index_of_its_ipv4_form() {
    let of = |text: &str| indexes(&[text.parse().expect("the address is valid")]);
    assert_eq!(of("[::ffff:10.0.0.1]:8080"), of("10.0.0.1:8080"));
    assert_ne!(of("[::ffff:0:10.0.0.1]:8080"), of("10.0.0.1:8080"));
}
