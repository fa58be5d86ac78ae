//! How observed errors increase the load of a backend with `p2c` and `least-loaded`. The kernel
//! programs observe the errors. A backend that fails each connect must get at most its share of
//! connects, even if other backends have many open flows, and even if connects are rare.
//!
//! The programs read neither how many open flows other backends have nor how many connects a
//! service receives. So the daemon writes the largest number of open flows per share to a map
//! ([`peak_flows`]). For a backend with an error, the programs compute a load above this number.
//!
//! The errors of a backend halve at most once for every four connects that its
//! [share](MemberLoad::share) entitles it to ([`hold`]), because connects may choose the backend
//! once after each halving. The daemon also limits errors when the largest number of open flows
//! falls ([`most_errors`]).

use std::time::Duration;

use lb_common::abi::{MAX_SCHEDULE_LOG2, Policy};
use lb_common::load::PEAK_FRACTION_BITS;

/// The state of a member of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberLoad {
    /// The member's open flows.
    pub flows: u64,
    /// The member's entries in the table. With `p2c` they are the member's share; with
    /// `least-loaded` all shares are equal.
    pub entries: u32,
    /// Whether a connect may choose the member.
    pub is_usable: bool,
}

/// A failing backend may receive one of this many connects that its share entitles it to.
const SHARES: u128 = 4;

impl MemberLoad {
    /// The member's share. The unit is arbitrary: only the ratio to the sum of all members' shares
    /// matters.
    pub fn share(&self, policy: Policy) -> u64 {
        if policy == Policy::LeastLoaded { 1 } else { self.entries.into() }
    }
}

/// The field [`peak_flows`](lb_common::abi::Service::peak_flows) of a service with a table of
/// `length` entries: the largest number of open flows per share of any member, but at most twice
/// the mean. Only usable members with open flows are included, because a backend that has just
/// begun to fail has no open flows. The result is 0 if there is no such member.
///
/// The mean is too low if members have very different numbers of flows per share: with `p2c` a
/// failing backend wins each draw against a member above the mean. With the bound of twice the
/// mean, the failing backend wins draws only against members above the bound. These members have
/// less than half of all shares, so the failing backend gets less than its share. The bound also
/// prevents a single member with very many flows from determining how long connects avoid a failing
/// backend.
pub fn peak_flows(policy: Policy, length: usize, members: impl IntoIterator<Item = MemberLoad>) -> u64 {
    let length = if policy == Policy::LeastLoaded { 1 } else { length as u128 };
    let per_share = |flows: u64, share: u64| {
        ((u128::from(flows) * length) << PEAK_FRACTION_BITS).checked_div(share.into()).unwrap_or(0)
    };
    let members = members.into_iter().filter(|member| member.is_usable && member.flows > 0);
    let (flows, all, most) = members.fold((0_u64, 0_u64, 0), |(flows, all, most), member| {
        let share = member.share(policy);
        (flows.saturating_add(member.flows), all + share, most.max(per_share(member.flows, share)))
    });
    let peak = most.min(2 * per_share(flows, all));
    // The product of the result and the entries of a member must fit into 64 bits.
    u64::try_from(peak).unwrap_or(u64::MAX).min(u64::MAX >> MAX_SCHEDULE_LOG2)
}

/// The time by which to delay the halvings of a member's errors, so that they halve at most once
/// for every four connects that its share entitles it to. `elapsed`: the time since the last call.
/// `connects`: the service's connects in that time. `all`: the sum of all members'
/// [shares](MemberLoad::share).
pub fn hold(elapsed: Duration, connects: u64, share: u64, all: u64, error_decay: Duration) -> Duration {
    let halvings = u128::from(connects) * u128::from(share);
    let allowed = (error_decay.as_nanos() * halvings).checked_div(SHARES * u128::from(all)).unwrap_or(0);
    elapsed.saturating_sub(Duration::from_nanos(u64::try_from(allowed).unwrap_or(u64::MAX)))
}

/// The largest number of errors that a member retains. `peak`: its part of [`peak_flows`]
/// ([`peak_of`](lb_common::load::peak_of)). Errors that were counted while other members had many
/// open flows must not weigh too much after these flows have ended.
pub fn most_errors(peak: u32) -> u32 {
    peak.saturating_mul(2).saturating_add(2)
}

#[cfg(test)]
mod tests {
    use lb_common::abi::RecentErrors;
    use lb_common::load::{HalfLife, decayed, peak_of, with_another};

    use super::*;

    const WELL: MemberLoad = MemberLoad { flows: 0, entries: 1, is_usable: true };

    #[test]
    fn the_peak_is_per_share_and_includes_only_usable_members() {
        let members = [
            MemberLoad { flows: 30, entries: 10, ..WELL },
            MemberLoad { flows: 60, entries: 20, ..WELL },
            MemberLoad { flows: 0, entries: 34, is_usable: false },
        ];
        let flows =
            |policy: Policy, entries| peak_of(policy as u8, peak_flows(policy, 64, members), entries, 6);
        assert_eq!([10, 20, 34].map(|entries| flows(Policy::P2c, entries)), [30, 60, 102]);
        assert_eq!([10, 20].map(|entries| flows(Policy::LeastLoaded, entries)), [60, 60]);
        let idle = MemberLoad { flows: 1, ..WELL };
        let one_of_many = [idle, idle, idle, MemberLoad { flows: 1_000, ..WELL }];
        let flows = |members| peak_of(Policy::P2c as u8, peak_flows(Policy::P2c, 4, members), 1, 2);
        assert_eq!(flows(one_of_many), 501, "the result is twice the mean, rounded down");
        assert_eq!(peak_flows(Policy::P2c, 64, []), 0);
        assert_eq!(peak_flows(Policy::P2c, 64, [MemberLoad { is_usable: false, ..WELL }]), 0);
        let most = peak_flows(Policy::LeastLoaded, 64, [MemberLoad { flows: u64::MAX, ..WELL }]);
        assert_eq!(
            peak_of(Policy::LeastLoaded as u8, most, 1, 6),
            u32::MAX,
            "the result is limited, without overflow"
        );
    }

    #[test]
    fn errors_halve_only_as_connects_arrive() {
        let second = Duration::from_secs(1);
        let decay = 5 * second;
        assert_eq!(hold(second, 0, 1, 3, decay), second);
        // With three equal members, twelve connects allow one halving.
        assert_eq!(hold(6 * second, 12, 1, 3, decay), second);
        assert_eq!(hold(second, 100, 1, 3, decay), Duration::ZERO);
        assert_eq!(hold(second, 1, 1, 10, second), Duration::from_millis(975));
        assert_eq!(hold(second, 1, 0, 0, decay), second);
    }

    /// The backends that a policy compares for connect number `turn`.
    fn compared(policy: Policy, entries: [u32; 3], turn: usize) -> Vec<usize> {
        if policy == Policy::LeastLoaded {
            return (0..3).map(|at| (at + turn) % 3).collect();
        }
        // All pairs of entries with different backends; each turn uses one pair.
        let named: Vec<usize> = (0..3).flat_map(|at| std::iter::repeat_n(at, entries[at] as usize)).collect();
        let pairs = named.iter().flat_map(|first| named.iter().map(|second| vec![*first, *second]));
        let mut pairs: Vec<Vec<usize>> = pairs.filter(|pair| pair[0] != pair[1]).collect();
        let turn = turn * 7 % pairs.len();
        pairs.swap_remove(turn)
    }

    /// How many of 300 connects go to the first of three backends with the shares in `entries`. The
    /// first backend fails each connect, while the other backends have the numbers of open flows in
    /// `held`. The daemon reads the members every second.
    fn failed(policy: Policy, entries: [u32; 3], held: [u64; 2], per_20_s: u64) -> u64 {
        const TICK_NS: u64 = 1 << 20;
        let decay = Duration::from_secs(5);
        let half_life = HalfLife::new(u32::try_from(5_000_000_000 / TICK_NS).unwrap());
        let tick = |ns: u64| u32::try_from(ns / TICK_NS).unwrap();
        let length: u64 = entries.iter().map(|entries| u64::from(*entries)).sum();
        let length_log2 = u8::try_from(length.ilog2()).unwrap();
        let flows = [0, held[0], held[1]];
        let member = |at: usize| MemberLoad { flows: flows[at], entries: entries[at], ..WELL };
        let (mut errors, mut peak, mut failed) = (RecentErrors::default(), 0, 0);
        let (mut looked, mut since) = (0, 0);
        for turn in 0..300 {
            let now_ns = 1_000_000_000 + turn * 20_000_000_000 / per_20_s;
            while looked + 1_000_000_000 <= now_ns {
                looked += 1_000_000_000;
                let members = [0, 1, 2].map(member);
                peak = peak_flows(policy, usize::try_from(length).unwrap(), members);
                let all = members.map(|member| member.share(policy)).iter().sum();
                let own = members[0].share(policy);
                let by = hold(Duration::from_secs(1), std::mem::take(&mut since), own, all, decay);
                let by = tick(u64::try_from(by.as_nanos()).unwrap());
                errors.since = errors.since.wrapping_add(by.min(tick(looked) - errors.since));
            }
            since += 1;
            let now = tick(now_ns);
            let load = |at: usize| {
                let errors = if at == 0 { decayed(errors, now, half_life) } else { 0 };
                (flows[at] + u64::from(errors)) * 1_000 / member(at).share(policy)
            };
            let compared = compared(policy, entries, usize::try_from(turn).unwrap());
            if compared.into_iter().min_by_key(|at| load(*at)) == Some(0) {
                failed += 1;
                let peak = peak_of(policy as u8, peak, entries[0], length_log2);
                errors = with_another(errors, 1, peak, now, half_life);
            }
        }
        failed
    }

    /// The other backends have equal or different numbers of flows per share. The rates are from
    /// one connect in 20 s to 200 connects per second.
    #[test]
    fn a_failing_backend_gets_at_most_its_share_at_any_rate() {
        for (policy, entries) in [
            (Policy::LeastLoaded, [1, 1, 1]),
            (Policy::P2c, [2, 1, 1]),
            (Policy::P2c, [2, 3, 3]),
            (Policy::P2c, [1, 3, 4]),
            (Policy::P2c, [6, 1, 1]),
        ] {
            let per_share = [0, 1, 20, 100, 1_000]
                .map(|held| [held * u64::from(entries[1]), held * u64::from(entries[2])]);
            for held in per_share.into_iter().chain([[20, 100], [100, 20], [1, 1_000], [0, 30]]) {
                for per_20_s in [1, 7, 80, 4_000] {
                    let failed = failed(policy, entries, held, per_20_s);
                    let share = match policy {
                        Policy::LeastLoaded => 100,
                        _ => 300 * u64::from(entries[0]) / u64::from(entries.iter().sum::<u32>()),
                    };
                    let why = format!(
                        "{policy:?}, entries {entries:?}, open flows {held:?}, {per_20_s} connects in 20 s"
                    );
                    assert!(
                        failed <= share + 3,
                        "{failed} of 300 connects to the failing backend, share {share}: {why}"
                    );
                    assert!(failed > 0, "no connect to the failing backend: {why}");
                }
            }
        }
    }
}
