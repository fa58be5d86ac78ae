//! Of whom a service's table is made at a moment, and who of all that it knows may be chosen: the row of one client task, by its
//! membership and how the backends stand. Knows no slot.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Add;
use std::time::Duration;

use lb_common::abi::{MAX_SUBSET, Usable};

use crate::health::replacement::{InOrder, replacement};
use crate::health::tiers::{self, Candidate, Tier};
use crate::health::{self, Health, Standing};
use crate::membership::{Member, Membership};
use crate::service::HealthRules;

/// A row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Who is in the table, with the weight that they have there.
    pub members: Vec<(SocketAddr, u64)>,
    /// Those whom others stand in for: members, and who had stood in for them and failed.
    pub replaced: BTreeSet<SocketAddr>,
    /// Whether each of these, in the table or replaced, may be chosen, and how it is.
    pub usable: BTreeMap<SocketAddr, (Usable, Health)>,
    /// Who serves.
    pub tier: Tier,
    /// How many of the task's first members are available, of how many.
    pub available: (usize, usize),
    /// Whether these are so few that nobody is replaced and everybody is tried.
    pub is_panic: bool,
}

/// The row of a membership. `replaced`: who is, until now. `standing`: what is known of a backend, if anything is.
pub fn row<'s, T: Copy + Ord + Add<Duration, Output = T> + 's>(
    membership: &Membership,
    rules: HealthRules,
    replaced: &BTreeSet<SocketAddr>,
    standing: impl Fn(SocketAddr) -> Option<&'s Standing<T>>,
    now: T,
) -> Row {
    let members = &membership.members;
    let candidate = |member: &Member| candidate(member, standing(member.endpoint.address));
    let available = members.iter().filter(|member| candidate(member).health == Health::Healthy).count();
    let is_panic = tiers::is_panic(available, members.len(), rules.panic_threshold);
    let in_order: Vec<InOrder<T>> = members
        .iter()
        .chain(&membership.next)
        .map(|member| {
            let standing = standing(member.endpoint.address);
            InOrder {
                unavailable_since: standing.and_then(Standing::unavailable_since),
                available_since: standing.and_then(Standing::available_since),
                is_replaced: replaced.contains(&member.endpoint.address),
            }
        })
        .collect();
    let changed = replacement(&in_order, members.len(), rules.replace_after, is_panic, now);
    let is_replaced = |at: &usize| changed.replaced.contains(at);
    let mut used: Vec<&Member> =
        (0..members.len()).filter(|at| !is_replaced(at)).map(|at| &members[at]).collect();
    used.extend(changed.substitutes.iter().map(|at| &membership.next[at - members.len()]));
    if used.iter().all(|member| candidate(member).health != Health::Healthy) {
        let room = (MAX_SUBSET as usize).saturating_sub(used.len());
        used.extend(membership.lame_ducks.iter().take(room));
    }
    let tier = tiers::tier(used.iter().map(|member| candidate(member)), is_panic);
    let mut replaced: Vec<&Member> = changed.replaced.iter().map(|at| &members[*at]).collect();
    replaced.extend(changed.failed.iter().map(|at| &membership.next[at - members.len()]));
    let usable = used.iter().chain(&replaced).map(|member| {
        let address = member.endpoint.address;
        let without = without_own_word(member, standing(address));
        (address, (tiers::usable(without, tier), candidate(member).health))
    });
    Row {
        tier,
        usable: usable.collect(),
        members: used.iter().map(|member| (member.endpoint.address, member.weight)).collect(),
        replaced: replaced.iter().map(|member| member.endpoint.address).collect(),
        available: (available, members.len()),
        is_panic,
    }
}

/// A member as the tiers see it.
fn candidate<T: Copy + Ord>(member: &Member, standing: Option<&Standing<T>>) -> Candidate {
    let listed = listed(member);
    let Some(standing) = standing else { return listed };
    Candidate {
        health: standing.health().max(listed.health),
        is_lame_duck: standing.is_lame_duck() || listed.is_lame_duck,
    }
}

/// As [`candidate`], but for its own word that it is a lame duck: what of it goes into its state word.
fn without_own_word<T: Copy + Ord>(member: &Member, standing: Option<&Standing<T>>) -> Candidate {
    let listed = listed(member);
    let Some(standing) = standing else { return listed };
    let (health, is_lame_duck) = standing.without_own_word();
    Candidate { health: health.max(listed.health), is_lame_duck: is_lame_duck || listed.is_lame_duck }
}

/// A member by the list alone. Of one that has no slot yet the standing does not have that.
fn listed(member: &Member) -> Candidate {
    let health = health::said_of::<()>(&member.endpoint).map_or(Health::Healthy, |said| said.health);
    Candidate { health, is_lame_duck: health == Health::LameDuck }
}

impl Row {
    /// Whether time alone may change it: somebody is unavailable, or others stand in for somebody.
    pub fn is_unsettled(&self) -> bool {
        let (available, members) = self.available;
        available < members || !self.replaced.is_empty()
    }

    /// Who is taken where every pick was unusable: of those that may be chosen the one that is best, with the largest weight. As
    /// position among the members.
    pub fn fallback(&self) -> Option<usize> {
        let rank = |(at, (address, weight)): (usize, &(SocketAddr, u64))| {
            let (usable, health) = self.usable[address];
            usable.is_usable().then_some(((Reverse(health), *weight), at))
        };
        let ranked = self.members.iter().enumerate().filter_map(rank);
        // Of equal ones the first.
        ranked.max_by(|(a, first), (b, second)| a.cmp(b).then(second.cmp(first))).map(|(_, at)| at)
    }
}
