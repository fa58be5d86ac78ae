//! Tests of members and substitutes: which endpoints they are, and their shares and loads.

use super::*;
use crate::members::load_band::LoadBand;
use crate::service::Policy;

fn service(subset: Subset) -> Service {
    service_by(Policy::WeightedRoundRobin, subset)
}

fn service_by(policy: Policy, subset: Subset) -> Service {
    Service { policy, ..Service::new("users", "10.96.0.10:80".parse().unwrap(), subset, 7) }
}

/// The endpoints of a pattern. The character at each index is `h` healthy, `l` lame duck, `d` down,
/// `0` weight 0, `.` hole.
fn endpoints(pattern: &str) -> EndpointList {
    let endpoint = |index: usize, kind: char| Endpoint {
        address: format!("10.0.{}.{}:80", index / 250, index % 250 + 1).parse().unwrap(),
        index: u32::try_from(index).unwrap(),
        weight: u16::from(kind != '0'),
        state: match kind {
            'l' => EndpointState::LameDuck,
            'd' => EndpointState::Down,
            _ => EndpointState::Healthy,
        },
        zone: None,
        agent: None,
    };
    let list = pattern.chars().enumerate().filter(|(_, kind)| *kind != '.');
    let list = list.map(|(index, kind)| endpoint(index, kind)).collect();
    EndpointList::new(list, "10.96.0.10:80".parse().unwrap(), &[]).unwrap()
}

#[track_caller]
fn check(subset: Subset, pattern: &str, members: &[u32]) {
    let task = Task { index: 3, count: 10 };
    let membership = Membership::of(&service(subset), task, &endpoints(pattern));
    let indexes: Vec<_> = membership.members.iter().map(|member| member.endpoint.index).collect();
    assert_eq!(indexes, members, "{pattern}");
    let taken = membership.order.iter().filter(|(_, verdict)| *verdict == MembershipVerdict::Member);
    assert_eq!(taken.map(|(index, _)| *index).collect::<Vec<_>>(), members);
}

#[test]
fn subset_all_contains_every_healthy_endpoint_with_a_weight() {
    check(Subset::All, "hhh", &[0, 1, 2]);
    check(Subset::All, "h.0lh", &[0, 4]);
    check(Subset::All, "", &[]);
}

#[test]
fn lame_ducks_are_members_only_without_healthy_endpoints() {
    check(Subset::All, "ll0.", &[0, 1]);
    check(Subset::All, "00", &[]);
    check(Subset::All, "ll0h", &[3]);
}

#[test]
fn a_down_endpoint_is_a_last_resort_and_never_a_substitute() {
    check(Subset::All, "dd0.", &[0, 1]);
    check(Subset::All, "dl0d", &[1]);
    check(Subset::All, "dlhd", &[2]);
    for subset in [Subset::All, Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(2) }] {
        let task = Task { index: 3, count: 10 };
        let membership = Membership::of(&service(subset), task, &endpoints("hdlhdhdlhd"));
        let others = membership.next.iter().chain(&membership.lame_ducks).chain(&membership.members);
        assert!(others.map(|member| member.endpoint.state).all(|state| state != EndpointState::Down));
        assert!(!membership.lame_ducks.is_empty());
    }
}

#[test]
fn a_load_is_the_sum_over_all_tasks() {
    let list = endpoints("hhhhh.hhhlhh0hhhhhhh");
    let policies = [Policy::WeightedRoundRobin, Policy::RoundRobin];
    for (algorithm, policy) in Algorithm::ALL.into_iter().flat_map(|a| policies.map(|p| (a, p))) {
        let service = service_by(policy, Subset::Sized { algorithm, size: Size::Fixed(4) });
        let memberships = Memberships::new(&service, 10, &list);
        let tasks: Vec<_> = (0..10).map(|index| memberships.of(index)).collect();
        let mut sent = vec![(0, 0.0); list.index_space() as usize];
        for member in tasks.iter().flat_map(|task| &task.members) {
            let (connections, load) = &mut sent[member.endpoint.index as usize];
            *connections += 1;
            *load += member.share;
        }
        for (task, index) in tasks.iter().zip(0..) {
            assert_eq!(*task, Membership::of(&service, Task { index, count: 10 }, &list), "{algorithm}");
            assert!((task.members.iter().map(|member| member.share).sum::<f64>() - 1.0).abs() < 1e-9);
            for member in &task.members {
                let (connections, load) = sent[member.endpoint.index as usize];
                assert_eq!(member.connections, connections, "{algorithm}");
                assert!((member.load - load).abs() < 1e-9, "{algorithm}: {member:?}");
                assert!(member.weight > 0);
            }
        }
    }
}

#[test]
fn round_robin_gives_all_members_equal_shares() {
    let weighted: Vec<Endpoint> = endpoints("hhhhh.hhhlhh0hhhhhhh").as_slice().to_vec();
    let weighted: Vec<Endpoint> = (1..)
        .zip(weighted)
        .map(|(n, endpoint)| Endpoint { weight: endpoint.weight * n * n, ..endpoint })
        .collect();
    let list = EndpointList::new(weighted, "10.96.0.10:80".parse().unwrap(), &[]).unwrap();
    let sized = |algorithm| Subset::Sized { algorithm, size: Size::Fixed(4) };
    let subsets = std::iter::once(Subset::All).chain(Algorithm::ALL.map(sized));
    for (subset, count) in subsets.flat_map(|subset| [1, 10].map(|count| (subset, count))) {
        let task = Task { index: 0, count };
        let of = |policy| Membership::of(&service_by(policy, subset), task, &list).members;
        let (equal, by_weight) = (of(Policy::RoundRobin), of(Policy::WeightedRoundRobin));
        let first = equal.first().unwrap().clone();
        for (member, weighted) in equal.iter().zip(&by_weight) {
            assert_eq!(
                member.endpoint, weighted.endpoint,
                "{subset:?}: the policy must not change the subset"
            );
            assert_eq!((member.weight, member.share), (first.weight, first.share), "{subset:?}");
        }
        assert!((equal.iter().map(|member| member.share).sum::<f64>() - 1.0).abs() < 1e-9);
        assert_eq!(equal.len(), by_weight.len());
        assert!(by_weight.iter().any(|member| member.share < first.share), "{subset:?}");
        // With the other policies, the table follows the weights.
        for policy in [Policy::LeastLoaded, Policy::P2c, Policy::Random] {
            assert_eq!(of(policy), by_weight, "{subset:?}");
        }
    }
}

#[test]
fn a_subset_never_exceeds_its_maximum_number_of_members() {
    let list = endpoints(&"h".repeat(600));
    for algorithm in Algorithm::ALL {
        for size in [Size::Fixed(1), Size::Fixed(256), Size::Auto { min: 12 }] {
            let subset = Subset::Sized { algorithm, size };
            for count in [1, 3, 2000] {
                let members = Membership::of(&service(subset), Task { index: 0, count }, &list).members;
                assert!(members.len() <= subset.most_members() as usize, "{subset:?}, {count} tasks");
            }
        }
        // `most_members` is above the size only for subsets that really have more members.
        let subset = Subset::Sized { algorithm, size: Size::Fixed(256) };
        let alone = Membership::of(&service(subset), Task { index: 0, count: 1 }, &list).members;
        assert_eq!(alone.len() > 256, subset.most_members() > 256, "{algorithm}");
    }
}

#[test]
fn auto_reports_the_sizes_that_it_tried() {
    let service = service(Subset::Sized { algorithm: Algorithm::Random, size: Size::Auto { min: 12 } });
    let membership = Membership::of(&service, Task { index: 0, count: 40 }, &endpoints(&"h".repeat(200)));
    let (chosen, before) = membership.tried.split_last().unwrap();
    assert_eq!(membership.size, Some(chosen.0));
    assert!(chosen.1 >= 0.99 && !before.is_empty() && before.iter().all(|(_, part)| *part < 0.99));
    let alone = Membership::of(&service, Task { index: 0, count: 1 }, &endpoints(&"h".repeat(20)));
    assert_eq!((alone.members.len(), alone.tried), (20, Vec::new()));
}

#[test]
fn a_subset_that_follows_load_grows_and_shrinks_along_its_order() {
    let list = endpoints("hhhhh.hhhlhh0hhhhhhhhhhhhhhhh");
    let band = LoadBand { min: 3, ..LoadBand::default() };
    let sized = |size| Subset::Sized { algorithm: Algorithm::Random, size };
    for policy in [Policy::WeightedRoundRobin, Policy::RoundRobin] {
        let task = Task { index: 3, count: 10 };
        let idle = Membership::of(&service_by(policy, sized(Size::Band(band))), task, &list);
        let indexes = |membership: &Membership| {
            membership.members.iter().map(|member| member.endpoint.index).collect::<Vec<_>>()
        };
        // At every size, and after any sequence of sizes, the members are those of a subset with
        // this fixed size.
        let mut membership = idle.clone();
        for size in (3..=26).chain((3..26).rev()).chain([20, 5, 40]) {
            membership = membership.resized(size);
            let fixed = Membership::of(&service_by(policy, sized(Size::Fixed(size))), task, &list);
            assert_eq!(indexes(&membership), indexes(&fixed), "size {size}");
            let sum: f64 = membership.members.iter().map(|member| member.share).sum();
            assert!((sum - 1.0).abs() < 1e-9 && membership.members.iter().all(|member| member.weight == 1));
            let next = |membership: &Membership| {
                membership.next.iter().map(|member| member.endpoint.index).collect::<Vec<_>>()
            };
            assert_eq!(next(&membership), next(&fixed), "size {size}");
            assert_eq!(membership.members.len() + membership.reserve.len(), 26, "size {size}");
        }
        assert_eq!(membership.resized(3), idle);
    }
}

#[test]
fn auto_counts_endpoints_and_not_indexes() {
    let auto = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Auto { min: 12 } };
    let dense = endpoints(&"h".repeat(300)).as_slice().to_vec();
    let sparse: Vec<Endpoint> =
        dense.iter().map(|one| Endpoint { index: one.index * 218, ..one.clone() }).collect();
    let sparse = EndpointList::new(sparse, "10.96.0.10:80".parse().unwrap(), &[]).unwrap();
    assert_eq!((sparse.count(), sparse.index_space()), (300, 65_183));
    let of = |list: &EndpointList| {
        let membership = Memberships::new(&service(auto), 300, list).of(7);
        (membership.size, membership.tried.clone(), membership.members.len(), membership.unused)
    };
    assert_eq!(of(&sparse), of(&endpoints(&"h".repeat(300))));
    assert_eq!(of(&sparse).0, Some(12));
}

#[test]
fn unused_endpoints_are_counted_with_the_size_that_uses_all() {
    let list = endpoints("hhhhhlhhhhhhhh.hhhhhhhh0hhhhhhhhhhhhhhhhhhhh");
    for (algorithm, policy) in
        Algorithm::ALL.into_iter().flat_map(|a| [Policy::Random, Policy::RoundRobin].map(|p| (a, p)))
    {
        let of = |size| {
            let subset = Subset::Sized { algorithm, size: Size::Fixed(size) };
            let memberships = Memberships::new(&service_by(policy, subset), 3, &list);
            let tasks: Vec<_> = (0..3).map(|index| memberships.of(index)).collect();
            let used: BTreeSet<u32> =
                tasks.iter().flat_map(|task| &task.members).map(|member| member.endpoint.index).collect();
            assert!(tasks.iter().all(|task| task.unused == tasks[0].unused));
            // The members' load is compared with a target over the whole list.
            let target = 3.0 / 41.0;
            assert!(tasks[0].members.iter().all(|member| (member.target - target).abs() < 1e-12));
            (u32::try_from(used.len()).unwrap(), tasks[0].unused)
        };
        let (used, unused) = of(4);
        if algorithm.is_aperture() {
            // Arcs cover all endpoints.
            assert_eq!((used, unused), (41, None), "{algorithm}");
            continue;
        }
        let Unused { endpoints, of: all, size } = unused.unwrap();
        assert_eq!((endpoints + used, all), (41, 41), "{algorithm}");
        let size = size.unwrap();
        assert_eq!(of(size), (41, None), "{algorithm}: size {size}");
        assert!(of(size - 1).1.is_some(), "{algorithm}: all endpoints are used at size {size} - 1");
    }
}

#[test]
fn no_size_is_proposed_if_none_is_large_enough() {
    let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(4) };
    let membership =
        Membership::of(&service(subset), Task { index: 0, count: 2 }, &endpoints(&"h".repeat(600)));
    assert_eq!(membership.unused, Some(Unused { endpoints: 592, of: 600, size: None }));
    let alone = Membership::of(&service(subset), Task { index: 0, count: 1 }, &endpoints(&"h".repeat(40)));
    assert_eq!(alone.unused, Some(Unused { endpoints: 36, of: 40, size: Some(40) }));
    let by_weight = alone.members.iter().map(|member| member.load / member.target);
    assert!(by_weight.into_iter().all(|load| (load - 10.0).abs() < 1e-9));
}

#[test]
fn a_lost_member_is_replaced_by_the_next_of_the_order() {
    let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(4) };
    let task = Task { index: 3, count: 10 };
    let whole = "h".repeat(20);
    let before = Membership::of(&service(subset), task, &endpoints(&whole)).members;
    for lost in &before {
        for kind in ['.', 'l', '0'] {
            let mut pattern: Vec<char> = whole.chars().collect();
            pattern[lost.endpoint.index as usize] = kind;
            let pattern: String = pattern.into_iter().collect();
            let after = Membership::of(&service(subset), task, &endpoints(&pattern)).members;
            let still = |member: &&Member| after.iter().any(|now| now.endpoint == member.endpoint);
            let retained = before.iter().filter(still).count();
            assert_eq!((after.len(), retained), (4, 3), "{pattern}");
        }
    }
}

fn consumer(index: u32, count: u32, seed: u64) -> Consumer {
    let service = {
        let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(3) };
        Service::new("users", "10.96.0.10:80".parse().unwrap(), subset, seed)
    };
    Consumer { task: Task { index, count }, service }
}

/// Computes the missing memberships.
fn complete(assignments: &mut Assignments, consumers: &[Consumer]) {
    for job in assignments.missing(consumers) {
        assignments.compute(job);
    }
}

#[test]
fn tasks_computed_together_get_the_same_memberships_as_alone() {
    let consumers =
        [consumer(0, 5, 7), consumer(4, 5, 7), consumer(4, 6, 7), consumer(4, 5, 8), consumer(0, 5, 7)];
    let mut assignments = Assignments::new(endpoints("hhhhhhh"));
    complete(&mut assignments, &consumers);
    assert_eq!(assignments.memberships.len(), 4, "one membership for each distinct consumer");
    for consumer in &consumers {
        let alone = Membership::of(&consumer.service, consumer.task, assignments.list());
        let assignment = assignments.assignment(&consumer.service, consumer.task).unwrap();
        assert_eq!((&*assignment.membership, &assignment.list), (&alone, assignments.list()));
    }
}

#[test]
fn an_assignment_is_only_for_its_service_and_task() {
    let mut assignments = Assignments::new(endpoints("hhhhhhh"));
    complete(&mut assignments, &[consumer(0, 5, 7)]);
    for other in [consumer(1, 5, 7), consumer(0, 6, 7), consumer(0, 5, 8)] {
        assert_eq!(assignments.assignment(&other.service, other.task), None);
    }
    let mut resized = consumer(0, 5, 7);
    resized.service.subset = Subset::All;
    assert_eq!(assignments.assignment(&resized.service, resized.task), None);
}

#[test]
fn known_memberships_are_reused_and_unused_ones_dropped() {
    let mut before = Assignments::new(endpoints("hhhhhhh"));
    complete(&mut before, &[consumer(0, 5, 7), consumer(1, 5, 7)]);
    let mut after = Assignments::new(endpoints("hhhhhhh"));
    assert!(!after.is_of_the_same_reading(&before) && before.clone().is_of_the_same_reading(&before));
    after.follow(&before);
    assert!(after.is_of_the_same_reading(&before), "both readings share one list object");
    complete(&mut after, &[consumer(1, 5, 7), consumer(2, 5, 7)]);
    let at = |assignments: &Assignments, index| {
        assignments.memberships.iter().position(|(d, _)| d.task.index == index)
    };
    assert_eq!([0, 1, 2].map(|index| at(&after, index)), [None, Some(0), Some(1)]);
    assert!(Arc::ptr_eq(&after.memberships[0].1, &before.memberships[1].1), "the membership is reused");
    // Assignments with another list have no memberships yet.
    let mut longer = Assignments::new(endpoints("hhhhhhhh"));
    longer.take_over(&before);
    assert!(longer.memberships.is_empty());
}
