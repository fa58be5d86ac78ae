//! Of whom a service's table is made at a moment, and who of all that it knows may be chosen: the row of one client task, by its
//! membership and how the backends stand. Knows no slot.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Add;
use std::time::{Duration, Instant};

use lb_common::abi::{MAX_SUBSET, Usable};

use crate::health::replacement::{InOrder, replacement};
use crate::health::tiers::{self, Tier, TierCandidate};
use crate::health::{self, BackendEvidence, Health};
use crate::membership::{Member, Membership};
use crate::service::HealthRules;

/// A row, by any clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row<T = Instant> {
    /// Who is in the table, with the weight that they have there.
    pub members: Vec<(SocketAddr, u64)>,
    /// The backends that others stand in for, and since when: members, and substitutes that failed.
    pub replaced: BTreeMap<SocketAddr, T>,
    /// Whether each of these, in the table or replaced, may be chosen, and how it is.
    pub usable: BTreeMap<SocketAddr, (Usable, Health)>,
    /// The lame duck that connects fall back on if the programs find no member available before the daemon does. It is in no table.
    pub backup: Option<SocketAddr>,
    /// Who serves.
    pub tier: Tier,
    /// How many of all that are in the table or replaced are available, of how many.
    pub available: (usize, usize),
    /// Whether that is below `panic_threshold`.
    pub is_below_threshold: bool,
    /// Whether it is, and no available one serves: then every backend is tried that may accept connections.
    pub is_panic: bool,
    /// Whether nothing is known yet of any of them, and all are used alike.
    is_fresh: bool,
}

/// What a row goes by, beside its membership and how the backends stand.
#[derive(Clone, Debug)]
pub struct Circumstances<T> {
    /// What the configuration says.
    pub rules: HealthRules,
    /// The backends that others stand in for until now, and since when.
    pub replaced: BTreeMap<SocketAddr, T>,
    /// The backends in the table until now.
    pub used: BTreeSet<SocketAddr>,
    /// Whether a backend that is not ejected has established connections lately.
    pub is_serving: bool,
    /// Whether the first probes of all are still under way.
    pub is_fresh: bool,
}

/// The row of a membership. `standing`: what is known of a backend, if anything is.
pub fn row<'s, T: Copy + Ord + Add<Duration, Output = T> + 's>(
    membership: &Membership,
    Circumstances { rules, replaced, used: used_before, is_serving, is_fresh }: &Circumstances<T>,
    standing: impl Fn(SocketAddr) -> Option<&'s BackendEvidence<T>>,
    now: T,
) -> Row<T> {
    let members = &membership.members;
    let wants_proof = rules.first_look.is_some() && !is_fresh;
    let candidate = |member: &Member| candidate(member, standing(member.endpoint.address), wants_proof);
    let in_order: Vec<InOrder<T>> = members
        .iter()
        .chain(&membership.next)
        .map(|member| {
            let standing = standing(member.endpoint.address);
            InOrder {
                unavailable_since: standing.and_then(BackendEvidence::unavailable_since),
                available_since: standing.and_then(BackendEvidence::available_since),
                replaced_since: replaced.get(&member.endpoint.address).copied(),
                is_unproven: rules.first_look.is_some() && !standing.is_some_and(BackendEvidence::is_proven),
                is_used: used_before.contains(&member.endpoint.address),
            }
        })
        .collect();
    let changed = replacement(&in_order, members.len(), rules.replace_after, now);
    let is_replaced = |at: &usize| changed.replaced.contains(at);
    let mut used: Vec<&Member> =
        (0..members.len()).filter(|at| !is_replaced(at)).map(|at| &members[at]).collect();
    used.extend(changed.substitutes.iter().map(|at| &membership.next[at - members.len()]));
    let mut out: Vec<&Member> = changed.replaced.iter().map(|at| &members[*at]).collect();
    out.extend(changed.failed.iter().map(|at| &membership.next[at - members.len()]));
    let tried = used.len() + out.len();
    let is_available = |member: &&&Member| candidate(member).health <= Health::Unproven;
    let available = used.iter().chain(&out).filter(is_available).count();
    let is_below_threshold = tiers::is_below_threshold(available, tried, rules.panic_threshold);
    let is_panic = is_below_threshold && !is_serving;
    if !used.iter().any(|member| is_available(&member)) {
        let room = (MAX_SUBSET as usize).saturating_sub(used.len());
        used.extend(membership.lame_ducks.iter().take(room));
    }
    let tier = tiers::tier(used.iter().map(|member| candidate(member)), is_panic);
    let is_backup = |member: &&Member| candidate(member).health == Health::LameDuck;
    let backup = membership.lame_ducks.iter().find(is_backup).filter(|_| tier < Tier::LameDucks);
    let usable = used.iter().chain(&out).copied().chain(backup).map(|member| {
        let address = member.endpoint.address;
        let without = without_own_word(member, standing(address), wants_proof);
        (address, (tiers::usable(without, tier), candidate(member).health))
    });
    let since = |address| replaced.get(&address).copied().unwrap_or(now);
    Row {
        tier,
        usable: usable.collect(),
        members: used.iter().map(|member| (member.endpoint.address, member.weight)).collect(),
        backup: backup.map(|member| member.endpoint.address),
        replaced: out.iter().map(|member| member.endpoint.address).map(|one| (one, since(one))).collect(),
        available: (available, tried),
        is_below_threshold,
        is_panic,
        is_fresh: *is_fresh,
    }
}

/// A member as the tiers see it. `wants_proof`: whether it is unproven until a probe of it has ended.
fn candidate<T: Copy + Ord>(
    member: &Member,
    standing: Option<&BackendEvidence<T>>,
    wants_proof: bool,
) -> TierCandidate {
    let said = standing.map(|standing| (standing.health(), standing.is_lame_duck()));
    candidate_by(said, member, standing, wants_proof)
}

/// As [`candidate`], but for its own word that it is a lame duck: what of it goes into its state word.
fn without_own_word<T: Copy + Ord>(
    member: &Member,
    standing: Option<&BackendEvidence<T>>,
    wants_proof: bool,
) -> TierCandidate {
    candidate_by(standing.map(BackendEvidence::without_own_word), member, standing, wants_proof)
}

/// A member by its list and by what else is said of it: its health, and whether it is a lame duck.
fn candidate_by<T: Copy + Ord>(
    said: Option<(Health, bool)>,
    member: &Member,
    standing: Option<&BackendEvidence<T>>,
    wants_proof: bool,
) -> TierCandidate {
    let listed = listed(member, wants_proof && !standing.is_some_and(BackendEvidence::is_proven));
    let (health, is_lame_duck) = said.unwrap_or((Health::Healthy, false));
    TierCandidate {
        health: health.max(listed.health),
        is_lame_duck: is_lame_duck || listed.is_lame_duck,
        accepts: listed.accepts && standing.is_none_or(BackendEvidence::accepts),
    }
}

/// A member by the list alone. Of one that has no slot yet the standing does not have that.
fn listed(member: &Member, is_unproven: bool) -> TierCandidate {
    let least = if is_unproven { Health::Unproven } else { Health::Healthy };
    let health = health::said_of::<()>(&member.endpoint).map_or(least, |said| said.health);
    TierCandidate { health, is_lame_duck: health == Health::LameDuck, accepts: health != Health::Refusing }
}

impl<T> Row<T> {
    /// Whether time alone may change it: a backend is unavailable or replaced, or the first probes are under way.
    pub fn is_unsettled(&self) -> bool {
        let (available, tried) = self.available;
        available < tried || !self.replaced.is_empty() || self.is_fresh
    }

    /// Does without the backup.
    pub fn drop_backup(&mut self) {
        if let Some(address) = self.backup.take() {
            self.usable.remove(&address);
        }
    }

    /// The backend that connects go to if every pick was unusable: the backup, or of those that may be chosen the one that is best, with
    /// the largest weight.
    pub fn fallback(&self) -> Option<SocketAddr> {
        let rank = |(at, (address, weight)): (usize, &(SocketAddr, u64))| {
            let (usable, health) = self.usable[address];
            // Of equal ones the first.
            usable.is_usable().then_some(((Reverse(health), *weight, Reverse(at)), *address))
        };
        let best = self.members.iter().enumerate().filter_map(rank).max_by_key(|(rank, _)| *rank);
        self.backup.or(best.map(|(_, address)| address))
    }
}
