//! When other factors are worth a new table: where somebody's share has moved by enough to be seen in it.

use std::cmp::Reverse;
use std::net::SocketAddr;

use super::by_address::Next;
use super::factor::Factors;
use super::{MemberObservation, SeenRow};

/// The part of a share that it has to move by.
const PART: f64 = 0.02;

/// Tables that a host makes in one tick for all its client tasks. Following load takes 1.6 % of a processor where these are always as
/// many, and shall take 2 % at most (docs/design/performance.md).
pub const TABLES: usize = 60;

/// Factors that are worth a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// What they are.
    pub factors: Factors,
    /// How far a member's share is from them, as a part of it: the furthest.
    pub off_by: f64,
}

/// How far shares are from what they should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distance {
    /// As a part of a share.
    pub part: f64,
    /// As a part of all, where that of a share is [`PART`] at least.
    whole: f64,
}

impl Distance {
    /// Whether it is more than so much of all.
    pub fn is_over(self, least: f64) -> bool {
        if least == 0.0 { self.part > 0.0 } else { self.whole >= least }
    }
}

/// The least part of all by which a share moves in a table of so many entries: one of them.
pub fn threshold(entries: u32) -> f64 {
    1.0 / f64::from(entries.max(1))
}

/// How far the shares of a row are from what they should be; `None` if nobody is there.
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
        // Who has none keeps none.
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

/// Of proposals those for which there is room in this tick: the most wrong first.
pub fn within_budget<W>(mut proposals: Vec<(W, Proposal)>) -> Vec<(W, Proposal)> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank")]
    let rank = |proposal: &Proposal| Reverse((proposal.off_by * 1e6) as u64);
    proposals.sort_by_key(|(_, proposal)| rank(proposal));
    proposals.truncate(TABLES);
    proposals
}
