//! Statistical tests: random picks have the distribution of the schedule, and cursors that step
//! through the schedule pick each backend exactly as often as the schedule contains it.

use lb_common::abi::Policy;
use lb_common::pick::pick;

use super::host::{Cpu, Host, NOW, cpu_at, rules};
use super::weighted;

/// How often each slot is picked among `picks` picks, if no flow remains open.
fn counts(host: &Host, policy: Policy, cpu: &Cpu, picks: u32) -> Vec<u32> {
    let mut counts = vec![0; host.backends.len()];
    for _ in 0..picks {
        counts[pick(host, cpu, host.table(), rules(policy), NOW).0.slot as usize] += 1;
    }
    counts
}

/// Pearson's statistic against the shares of the schedule.
fn chi_square(host: &Host, counts: &[u32]) -> f64 {
    let picks = f64::from(counts.iter().sum::<u32>());
    let length = f64::from(u32::try_from(host.entries.len()).expect("the number is small"));
    let terms = host.shares.iter().zip(counts).map(|(share, count)| {
        let expected = picks * f64::from(*share) / length;
        (f64::from(*count) - expected).powi(2) / expected
    });
    terms.sum()
}

/// The bound that a random variable with nine degrees of freedom exceeds once in a thousand times
/// (chi-square, upper 0.001).
const ONCE_IN_A_THOUSAND: f64 = 27.877;
const WEIGHTS: [u64; 10] = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55];
const PICKS: u32 = 200_000;

/// The positions of ten CPUs' cursors, as samples. They are as far apart as on a host with ten
/// CPUs.
fn seeds() -> impl Iterator<Item = u32> {
    (0..10).map(|cpu| cpu * (u32::MAX / 10))
}

/// The samples are those of the kernel programs, so the result is the same in each run. If the
/// distribution is right, about one in fifty sets of twenty samples contains a sample beyond the
/// bound; this set contains none.
#[test]
fn random_picks_follow_the_schedule_by_chi_square() {
    for (name, host) in [("equal", Host::in_turn(10)), ("weighted", weighted(&WEIGHTS))] {
        for seed in seeds() {
            let statistic = chi_square(&host, &counts(&host, Policy::Random, &cpu_at(seed), PICKS));
            assert!(statistic < ONCE_IN_A_THOUSAND, "{name}, seed {seed}: chi-square {statistic}");
        }
    }
}

/// The chi-square test detects a share that is wrong by one fiftieth.
#[test]
fn the_gate_detects_a_slightly_wrong_share() {
    let host = weighted(&WEIGHTS);
    let mut slightly = host.clone();
    // Every 50th entry of the backend with the largest weight becomes an entry of the backend with
    // the next smaller weight.
    let heaviest = slightly.entries.iter_mut().filter(|slot| **slot == 9);
    heaviest.step_by(50).for_each(|slot| *slot = 8);
    for seed in seeds() {
        let statistic = chi_square(&host, &counts(&slightly, Policy::Random, &cpu_at(seed), 4 * PICKS));
        assert!(statistic > ONCE_IN_A_THOUSAND, "seed {seed}: chi-square {statistic}");
    }
}

/// Without load, each of two candidates wins equally often, so the shares are those of the
/// schedule.
#[test]
fn p2c_without_load_follows_the_schedule_by_chi_square() {
    let host = weighted(&WEIGHTS);
    for seed in seeds() {
        let statistic = chi_square(&host, &counts(&host, Policy::P2c, &cpu_at(seed), PICKS));
        assert!(statistic < ONCE_IN_A_THOUSAND, "seed {seed}: chi-square {statistic}");
    }
}

/// For any first candidate, every other backend is equally likely to be the second. To show which
/// backend is the second candidate, the test gives the first candidate so much load that the second
/// always wins.
#[test]
fn p2c_compares_each_backend_equally_often_with_all_others() {
    /// The upper 0.001 bounds of chi-square for 1, 2, 3 and more degrees of freedom.
    const BOUNDS: [f64; 11] =
        [10.828, 13.816, 16.266, 18.467, 20.515, 22.458, 24.322, 26.124, 27.877, 29.588, 31.264];
    const SAMPLES: u32 = 100_000;
    for backends in 3..=12_u32 {
        let mut host = weighted(&vec![1; backends as usize]);
        host.backends[0].flows = 1_000_000;
        for seed in seeds() {
            let cpu = cpu_at(seed);
            let mut partners = vec![0; backends as usize];
            for _ in 0..SAMPLES {
                let (picked, sample) = pick(&host, &cpu, host.table(), rules(Policy::P2c), NOW);
                if host.entries[(sample & 0xffff) as usize % host.entries.len()] == 0 {
                    partners[picked.slot as usize] += 1;
                }
            }
            assert_eq!(partners[0], 0, "no backend may be compared with itself");
            let expected = f64::from(partners.iter().sum::<u32>()) / f64::from(backends - 1);
            let terms = partners[1..].iter().map(|count| (f64::from(*count) - expected).powi(2) / expected);
            let statistic: f64 = terms.sum();
            let bound = BOUNDS[backends as usize - 3 + 1];
            assert!(
                statistic < bound,
                "{backends} backends, seed {seed}: chi-square {statistic}, partners {partners:?}"
            );
        }
    }
}

/// In any window of consecutive picks, each backend's number of picks differs from its share by
/// less than two. The order of entries causes a difference of less than one, and the start of the
/// window causes another difference of less than one.
#[test]
fn any_window_of_a_cursor_is_even() {
    for (policy, host) in [
        (Policy::RoundRobin, weighted(&[1; 10])),
        (Policy::WeightedRoundRobin, weighted(&WEIGHTS)),
        (Policy::WeightedRoundRobin, weighted(&[1, 1000])),
    ] {
        let length = f64::from(u32::try_from(host.entries.len()).expect("the number is small"));
        let cpu = cpu_at(u32::MAX / 7);
        for picks in [1, 2, 3, 10, 33, 100, 500, 1000, 1024, 1025] {
            for (count, share) in counts(&host, policy, &cpu, picks).into_iter().zip(&host.shares) {
                let wanted = f64::from(picks) * f64::from(*share) / length;
                assert!(
                    (f64::from(count) - wanted).abs() < 2.0,
                    "{count} of {picks} picks, expected {wanted}"
                );
            }
        }
    }
}

/// Each policy spreads flows that remain open. The test measures by how many flows the most loaded
/// backend exceeds its part.
#[test]
fn open_flows_are_spread_within_each_policys_bound() {
    let excess_from = |start, policy, host: Host| -> f64 {
        let (mut host, cpu) = (host, cpu_at(start));
        let flows = 20_000u32;
        for _ in 0..flows {
            assert!(host.connect(&cpu, rules(policy)).slot < 100);
        }
        let length = f64::from(u32::try_from(host.entries.len()).expect("the number is small"));
        let above = |(backend, share): (&super::host::Backend, &u32)| {
            f64::from(backend.flows) - f64::from(flows) * f64::from(*share) / length
        };
        host.backends.iter().zip(&host.shares).map(above).fold(0.0, f64::max)
    };
    let excess = |policy, host| excess_from(11, policy, host);
    let equal = || weighted(&[1; 100]);
    let uneven = || weighted(&(0..100).map(|i| 1 + i % 4).collect::<Vec<_>>());
    // Each backend has 200 flows on average. With random choice the standard deviation is 14, so
    // the most loaded of 100 backends has about 35 flows more than the mean. With two choices, the
    // most loaded backend has a few flows more than the mean.
    let by_chance = seeds().map(|start| excess_from(start, Policy::Random, equal())).sum::<f64>() / 10.0;
    assert!(
        (30.0..40.0).contains(&by_chance),
        "the most loaded backend has {by_chance} flows above the mean"
    );
    assert!(excess(Policy::P2c, equal()) < 5.0);
    assert!(excess(Policy::P2c, uneven()) < 8.0);
    assert!(excess(Policy::RoundRobin, equal()) < 2.0);
    assert!(excess(Policy::WeightedRoundRobin, uneven()) < 2.0);
    // In tables of 4,096 entries for 100 backends, some backends have one entry more than others. A
    // scan does not use the table, so this difference does not affect the scan.
    let mut host = equal();
    let cpu = cpu_at(11);
    for _ in 0..20_000 {
        assert!(host.connect(&cpu, rules(Policy::LeastLoaded)).slot < 100);
    }
    assert_eq!(host.flows(), [200; 100]);
}
