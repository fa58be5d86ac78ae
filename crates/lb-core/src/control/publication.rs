//! Whether changed factors require a new table: the share of some member must change enough to be
//! visible in the table.

use std::cmp::Reverse;
use std::net::SocketAddr;

use super::by_address::Next;
use super::factor::Factors;
use super::{MemberObservation, SeenRow};

/// Smaller relative changes of a share do not cause a new table.
const PART: f64 = 0.02;

/// The largest number of tables that a host computes in one tick for all its client tasks. If the
/// daemon computes this many in every tick, weights that follow load take 1.6 % of a processor; the
/// limit is 2 % (docs/design/performance.md).
pub const TABLES: usize = 60;

/// Factors that require a new table.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// The proposed factors.
    pub factors: Factors,
    /// The largest relative difference between a member's share in force and its share with these
    /// factors.
    pub off_by: f64,
}

/// How much a change of factors changes the members' shares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distance {
    /// The largest difference, relative to the share.
    pub part: f64,
    /// The largest difference as a part of all connects, among shares that change by at least
    /// [`PART`].
    whole: f64,
}

impl Distance {
    /// Whether a share changes by at least `least`, a part of all connects. If `least` is 0,
    /// whether any share changes.
    pub fn is_over(self, least: f64) -> bool {
        if least == 0.0 { self.part > 0.0 } else { self.whole >= least }
    }
}

/// The smallest part of all connects by which a share can change in a table of `entries` entries:
/// one entry.
pub fn threshold(entries: u32) -> f64 {
    1.0 / f64::from(entries.max(1))
}

/// The differences between the members' shares with the factors `before` and with the factors
/// `after`; `None` if no member has a share.
pub fn distance(row: &SeenRow, before: &Factors, after: &Factors) -> Option<Distance> {
    let shares = |factors: &Factors| -> Vec<f64> {
        let mut next = Next::default();
        #[expect(clippy::cast_precision_loss, reason = "shares need no more than 53 bits")]
        let weight = |(address, seen): (&SocketAddr, &MemberObservation)| {
            factors.of_next(&mut next, *address).times(seen.weight) as f64
        };
        let weights: Vec<f64> = row.iter().map(weight).collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum).collect()
    };
    let mut furthest = None;
    for (before, after) in shares(before).into_iter().zip(shares(after)) {
        // A share of 0 remains 0.
        if before <= 0.0 || !before.is_finite() {
            continue;
        }
        let Distance { part, whole } = furthest.unwrap_or(Distance { part: 0.0, whole: 0.0 });
        let moved = (after - before).abs();
        let counts = if moved >= PART * before { moved } else { 0.0 };
        furthest = Some(Distance { part: part.max(moved / before), whole: whole.max(counts) });
    }
    furthest
}

/// The proposals to publish in this tick: at most [`TABLES`], those with the largest differences.
pub fn within_budget<W>(mut proposals: Vec<(W, Proposal)>) -> Vec<(W, Proposal)> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank")]
    let rank = |proposal: &Proposal| Reverse((proposal.off_by * 1e6) as u64);
    proposals.sort_by_key(|(_, proposal)| rank(proposal));
    proposals.truncate(TABLES);
    proposals
}
