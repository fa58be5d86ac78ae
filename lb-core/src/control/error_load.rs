//! How much the errors that the kernel programs see weigh, with `p2c` and `least-loaded`: a backend that fails each connect gets at most
//! its share, whatever the other backends have open and however rare connects are.
//!
//! The programs know neither what the other backends have open nor how many connects a service gets. So the daemon stores the mean of the
//! open flows for them ([`mean_flows`]): an error makes its backend more loaded than that. The daemon lets errors halve at most once per
//! four [shares](MemberLoad::share) of connects ([`hold`]), because after each halving the backend may be chosen once. And it limits errors
//! if the mean falls ([`most_errors`]).

use std::time::Duration;

use lb_common::abi::{MAX_SCHEDULE_LOG2, Policy};
use lb_common::load::MEAN_FRACTION_BITS;

/// What is read of a member of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberLoad {
    /// Its open flows.
    pub flows: u64,
    /// Entries of the table that name it: its share, with `p2c`. With `least-loaded` all shares are equal.
    pub entries: u32,
    /// Whether it may be chosen.
    pub is_usable: bool,
}

/// Shares of connects of which a backend that fails may get one.
const SHARES: u128 = 4;

impl MemberLoad {
    /// Its share, of the sum of all shares.
    pub fn share(&self, policy: Policy) -> u64 {
        if policy == Policy::LeastLoaded { 1 } else { self.entries.into() }
    }
}

/// The field [`mean_flows`](lb_common::abi::Service::mean_flows) of a service whose table has so many entries, over the members that may
/// be chosen and have flows: one that has just begun to fail has none. 0 if there is no such member.
pub fn mean_flows(policy: Policy, length: usize, members: impl IntoIterator<Item = MemberLoad>) -> u64 {
    let members = members.into_iter().filter(|member| member.is_usable && member.flows > 0);
    let (flows, all) = members.fold((0_u128, 0_u128), |(flows, all), member| {
        (flows + u128::from(member.flows), all + u128::from(member.share(policy)))
    });
    let length = if policy == Policy::LeastLoaded { 1 } else { length as u128 };
    let mean = ((flows * length) << MEAN_FRACTION_BITS).checked_div(all).unwrap_or(0);
    // Times the entries of a member, it is to fit into 64 bits.
    u64::try_from(mean).unwrap_or(u64::MAX).min(u64::MAX >> MAX_SCHEDULE_LOG2)
}

/// By how much the halvings of a member's errors are to be late, so that they halve at most once per four shares of connects.
/// `elapsed`: since the last time. `connects`: of the service, meanwhile. `all`: the sum of all members' [shares](MemberLoad::share).
pub fn hold(elapsed: Duration, connects: u64, share: u64, all: u64, error_decay: Duration) -> Duration {
    let halvings = u128::from(connects) * u128::from(share);
    let allowed = (error_decay.as_nanos() * halvings).checked_div(SHARES * u128::from(all)).unwrap_or(0);
    elapsed.saturating_sub(Duration::from_nanos(u64::try_from(allowed).unwrap_or(u64::MAX)))
}

/// The most errors that a member keeps. `mean`: the flows that it has if it has the mean ([`mean_of`](lb_common::load::mean_of)). If the
/// flows of other members end, an error that was counted while they were open must not outweigh what is left.
pub fn most_errors(mean: u32) -> u32 {
    mean.saturating_mul(2).saturating_add(2)
}

#[cfg(test)]
mod tests {
    use lb_common::abi::RecentErrors;
    use lb_common::load::{HalfLife, decayed, mean_of, with_another};

    use super::*;

    const WELL: MemberLoad = MemberLoad { flows: 0, entries: 1, is_usable: true };

    #[test]
    fn the_mean_is_of_members_that_may_be_chosen_and_per_share() {
        let members = [
            MemberLoad { flows: 30, entries: 10, ..WELL },
            MemberLoad { flows: 60, entries: 20, ..WELL },
            MemberLoad { flows: 0, entries: 34, is_usable: false },
        ];
        let flows =
            |policy: Policy, entries| mean_of(policy as u8, mean_flows(policy, 64, members), entries, 6);
        assert_eq!([10, 20, 34].map(|entries| flows(Policy::P2c, entries)), [30, 60, 102]);
        assert_eq!([10, 20].map(|entries| flows(Policy::LeastLoaded, entries)), [45, 45]);
        assert_eq!(mean_flows(Policy::P2c, 64, []), 0);
        assert_eq!(mean_flows(Policy::P2c, 64, [MemberLoad { is_usable: false, ..WELL }]), 0);
        let most = mean_flows(Policy::LeastLoaded, 64, [MemberLoad { flows: u64::MAX, ..WELL }]);
        assert_eq!(mean_of(Policy::LeastLoaded as u8, most, 1, 6), u32::MAX, "a bound, no overflow");
    }

    #[test]
    fn errors_are_held_until_connects_have_come() {
        let second = Duration::from_secs(1);
        let decay = 5 * second;
        assert_eq!(hold(second, 0, 1, 3, decay), second);
        // Twelve connects allow one halving.
        assert_eq!(hold(6 * second, 12, 1, 3, decay), second);
        assert_eq!(hold(second, 100, 1, 3, decay), Duration::ZERO);
        assert_eq!(hold(second, 1, 1, 10, second), Duration::from_millis(975));
        assert_eq!(hold(second, 1, 0, 0, decay), second);
    }

    /// One backend that fails each connect among two that keep as many open as in `held`, at rates from one connect in 20 s to 200 in
    /// one second. The daemon looks every second.
    #[test]
    fn a_backend_that_fails_gets_at_most_its_share_at_any_rate() {
        const TICK_NS: u64 = 1 << 20;
        let decay = Duration::from_secs(5);
        let half_life = HalfLife::new(u32::try_from(5_000_000_000 / TICK_NS).unwrap());
        for (entries, policy) in [
            ([1, 1, 1], Policy::LeastLoaded),
            ([2, 1, 1], Policy::P2c),
            ([1, 3, 4], Policy::P2c),
            ([6, 1, 1], Policy::P2c),
        ] {
            let all: u64 = entries.iter().map(|entries| u64::from(*entries)).sum();
            for held in [0, 1, 20, 100, 1_000] {
                for per_20_s in [1_u64, 7, 100, 4_000] {
                    let flows = [0, held * u64::from(entries[1]), held * u64::from(entries[2])];
                    let (mut errors, mut mean, mut failed) = (RecentErrors::default(), 0, 0);
                    let (mut looked, mut since) = (0, 0);
                    let connects = 300;
                    for i in 0..connects {
                        let now_ns = 1_000_000_000 + i * 20_000_000_000 / per_20_s;
                        let tick = |ns: u64| u32::try_from(ns / TICK_NS).unwrap();
                        while looked + 1_000_000_000 <= now_ns {
                            looked += 1_000_000_000;
                            let now = tick(looked);
                            let member =
                                |(flows, entries): (&u64, u32)| MemberLoad { flows: *flows, entries, ..WELL };
                            let members = flows.iter().zip(entries).map(member);
                            mean = mean_flows(policy, usize::try_from(all).unwrap(), members);
                            let (own, all) = match policy {
                                Policy::LeastLoaded => (1, 3),
                                _ => (entries[0].into(), all),
                            };
                            let by =
                                hold(Duration::from_secs(1), std::mem::take(&mut since), own, all, decay);
                            let by = u64::try_from(by.as_nanos()).unwrap();
                            errors.since = errors.since.wrapping_add(tick(by).min(now - errors.since));
                        }
                        since += 1;
                        let now = tick(now_ns);
                        let share =
                            |member: usize| MemberLoad { entries: entries[member], ..WELL }.share(policy);
                        let load = |member: usize| {
                            let errors = if member == 0 { decayed(errors, now, half_life) } else { 0 };
                            (flows[member] + u64::from(errors)) * 1_000 / share(member)
                        };
                        // Of all the least loaded, not of two: the worst that can be.
                        let order = (0..3_usize).map(|at| (at + usize::try_from(i).unwrap()) % 3);
                        if order.min_by_key(|member| load(*member)) == Some(0) {
                            failed += 1;
                            let mean =
                                mean_of(policy as u8, mean, entries[0], u8::try_from(all.ilog2()).unwrap());
                            errors = with_another(errors, 1, mean, now, half_life);
                        }
                    }
                    let share = match policy {
                        Policy::LeastLoaded => connects / 3,
                        _ => connects * u64::from(entries[0]) / all,
                    };
                    let why = format!("{policy:?} {entries:?}, {held} held, {per_20_s} in 20 s");
                    assert!(failed <= share + 3, "{failed} of {connects}, share {share}: {why}");
                    assert!(failed > 0, "it is tried: {why}");
                }
            }
        }
    }
}
