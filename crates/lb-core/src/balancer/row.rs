//! The row of one client task: which backends are in a service's table now, and which of them a
//! connect may choose. Both follow from the task's membership and the evidence on the backends.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Add;
use std::time::{Duration, Instant};

use lb_common::abi::{MAX_SUBSET, Usable};

use crate::health::replacement::{InOrder, replacement};
use crate::health::tiers::{self, Tier, TierCandidate};
use crate::health::{self, BackendEvidence, Health};
use crate::members::membership::{Member, Membership};
use crate::service::HealthRules;

/// The backends that a service uses now. `T` is a time of any clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row<T = Instant> {
    /// The backends in the table, with their structural weights.
    pub members: Vec<(SocketAddr, u64)>,
    /// The replaced backends (members, and substitutes that failed), each with the time since which
    /// it has been replaced.
    pub replaced: BTreeMap<SocketAddr, T>,
    /// For each backend in the table, each replaced backend, and the backup: whether a connect may
    /// choose it, and its health.
    pub usable: BTreeMap<SocketAddr, (Usable, Health)>,
    /// The lame duck that connects use after the programs have ejected every member, until the
    /// daemon reacts. The backup is in no table.
    pub backup: Option<SocketAddr>,
    /// The tier that serves: connects choose its backends.
    pub tier: Tier,
    /// The number of available backends and the number of all backends, among those that are in the
    /// table or replaced. Drained backends are not counted: a drain is no failure, so it must not
    /// lead to panic. Lame ducks that serve because no other backend is available are not counted
    /// either.
    pub available: (usize, usize),
    /// Whether the available part is below `panic_threshold`.
    pub is_below_threshold: bool,
    /// Whether the service is in panic: the available part is below the threshold, and no recently
    /// established connection shows that a backend serves. Connects may then choose every backend
    /// that may accept connections.
    pub is_panic: bool,
    /// Whether the first probes of all backends are still running, so that all are treated alike.
    is_fresh: bool,
}

/// The inputs of [`row`] in addition to the membership and the evidence on the backends.
#[derive(Clone, Debug)]
pub struct Circumstances<T> {
    /// The service's configuration.
    pub rules: HealthRules,
    /// The replaced backends of the previous row, each with the time since which it has been
    /// replaced.
    pub replaced: BTreeMap<SocketAddr, T>,
    /// The backends in the table of the previous row.
    pub used: BTreeSet<SocketAddr>,
    /// Whether connections to a backend that is not ejected were established recently.
    pub is_serving: bool,
    /// Whether the first probes of all backends are still running.
    pub is_fresh: bool,
}

/// Computes the row for a membership. `standing` returns the evidence on a backend, if there is
/// any.
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
    let is_drained = |member: &&&Member| candidate(member).health == Health::Drained;
    let tried = used.iter().chain(&out).filter(|member| !is_drained(member)).count();
    let is_available = |member: &&&Member| candidate(member).health <= Health::Unproven;
    let available = used.iter().chain(&out).filter(is_available).count();
    let is_below_threshold = tiers::is_below_threshold(available, tried, rules.panic_threshold);
    let is_panic = is_below_threshold && !is_serving;
    if !used.iter().any(|member| is_available(&member)) {
        let room = (MAX_SUBSET as usize).saturating_sub(used.len());
        used.extend(membership.lame_ducks.iter().take(room));
    }
    let tier = tiers::tier(used.iter().map(|member| candidate(member)), is_panic, rules.drain_fallback);
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

/// The facts that determine a member's tier. With `wants_proof`, the member is unproven until its
/// first probe has ended.
fn candidate<T: Copy + Ord>(
    member: &Member,
    standing: Option<&BackendEvidence<T>>,
    wants_proof: bool,
) -> TierCandidate {
    let found = standing.map(|standing| (standing.health(), standing.is_lame_duck()));
    candidate_by(found, member, standing, wants_proof)
}

/// Like [`candidate`], but without the member's own report that it is a lame duck, because the
/// state word must not depend on that report.
fn without_own_word<T: Copy + Ord>(
    member: &Member,
    standing: Option<&BackendEvidence<T>>,
    wants_proof: bool,
) -> TierCandidate {
    candidate_by(standing.map(BackendEvidence::without_own_word), member, standing, wants_proof)
}

/// Combines a member's list entry with other evidence. `found`: the health according to the other
/// evidence, and whether this evidence shows a lame duck.
fn candidate_by<T: Copy + Ord>(
    found: Option<(Health, bool)>,
    member: &Member,
    standing: Option<&BackendEvidence<T>>,
    wants_proof: bool,
) -> TierCandidate {
    let listed = listed(member, wants_proof && !standing.is_some_and(BackendEvidence::is_proven));
    let (health, is_lame_duck) = found.unwrap_or((Health::Healthy, false));
    TierCandidate {
        health: health.max(listed.health),
        is_lame_duck: is_lame_duck || listed.is_lame_duck,
        accepts: listed.accepts && standing.is_none_or(BackendEvidence::accepts),
    }
}

/// The facts of a member's list entry. These facts are needed because the evidence on a backend
/// without a slot does not include the list's verdict.
fn listed(member: &Member, is_unproven: bool) -> TierCandidate {
    let least = if is_unproven { Health::Unproven } else { Health::Healthy };
    let health = health::list_verdict::<()>(&member.endpoint).map_or(least, |verdict| verdict.health);
    TierCandidate { health, is_lame_duck: health == Health::LameDuck, accepts: health != Health::Refusing }
}

impl<T> Row<T> {
    /// Whether the row may change because time passes: a backend is unavailable or replaced, or the
    /// first probes are still running.
    pub fn is_unsettled(&self) -> bool {
        let (available, tried) = self.available;
        available < tried || self.drained() > 0 || !self.replaced.is_empty() || self.is_fresh
    }

    /// The number of drained backends that are in the table or replaced.
    pub fn drained(&self) -> usize {
        self.usable.values().filter(|(_, health)| *health == Health::Drained).count()
    }

    /// Removes the backup.
    pub fn drop_backup(&mut self) {
        if let Some(address) = self.backup.take() {
            self.usable.remove(&address);
        }
    }

    /// The backend that connects use if every backend that they examined was unusable. It is the
    /// backup or, without a backup, the usable member with the best health. Of equally healthy
    /// members, it is the member with the largest weight.
    pub fn fallback(&self) -> Option<SocketAddr> {
        let rank = |(at, (address, weight)): (usize, &(SocketAddr, u64))| {
            let (usable, health) = self.usable[address];
            // If members are equal, the first in the table is chosen.
            usable.is_usable().then_some(((Reverse(health), *weight, Reverse(at)), *address))
        };
        let best = self.members.iter().enumerate().filter_map(rank).max_by_key(|(rank, _)| *rank);
        self.backup.or(best.map(|(_, address)| address))
    }
}
