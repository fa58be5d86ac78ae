//! Weights that follow load: how much more or less than its structural share each member of one client task gets, from what
//! backends report.
//!
//! In reading order: how much that is ([`factor`]), what is known of a member ([`Seen`]), the two laws, gRPC's ([`a58`]) and our own
//! ([`feedback`]), and when a change is worth a table ([`publication`]). A law knows one row: the members of one service that this task
//! uses. It needs neither other tasks nor their subsets, because a report is of all that a backend gets. Reads no clock, and no
//! function whose last bit differs from one machine to the next.

pub mod factor;

pub mod a58;

pub mod feedback;

pub mod publication;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use crate::reports::Load;

use a58::A58;
use factor::Factors;
use feedback::Feedback;
use publication::is_worth_a_table;

/// From one look at the reports to the next.
pub const TICK: Duration = Duration::from_secs(1);

/// Which law decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Law {
    /// That of gRPC's `weighted_round_robin` (gRFC A58), for comparison.
    A58,
    /// Our own: [`feedback`].
    Feedback,
}

impl Law {
    /// Both.
    pub const ALL: [Self; 2] = [Self::A58, Self::Feedback];

    /// The word for it in configurations and scenarios.
    pub const fn name(self) -> &'static str {
        match self {
            Self::A58 => "a58",
            Self::Feedback => "feedback",
        }
    }
}

/// What a backend has reported, and since when this host knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// What.
    pub load: Load,
    /// When, by the caller's clock.
    pub at: Duration,
}

impl Heard {
    /// The report's age: when what it tells was measured.
    fn age(&self, now: Duration) -> Duration {
        now.saturating_sub(self.at) + self.load.age
    }
}

/// What is known of a member when a law looks at it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// Its structural weight: without any control.
    pub weight: u64,
    /// Its newest report, if there is one.
    pub heard: Option<Heard>,
    /// The part of this task's own flows to it that failed, of those that began of late, if these are enough.
    pub errors: Option<f64>,
    /// Since when it can be chosen without a break.
    pub ready_since: Duration,
    /// Whether something else decides now how much it gets: it is in slow start, ejected, on trial, a lame duck, at its limit.
    pub is_frozen: bool,
}

/// The members of a row by their addresses.
pub type SeenRow = BTreeMap<SocketAddr, Seen>;

/// How the flows of a row behave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flows {
    /// How long one lives on average: open flows over connects a second. Weights act on new ones alone.
    pub life: Duration,
}

/// A law at work on the row of one service, with what it remembers.
#[derive(Clone, Debug)]
pub struct Control {
    law: LawState,
    in_force: Factors,
}

#[derive(Clone, Debug)]
enum LawState {
    A58(A58),
    Feedback(Feedback),
}

impl Control {
    /// Nothing is known yet, and everybody has their structural share.
    pub fn new(law: Law) -> Self {
        let law = match law {
            Law::A58 => LawState::A58(A58::default()),
            Law::Feedback => LawState::Feedback(Feedback::default()),
        };
        Self { law, in_force: Factors::default() }
    }

    /// Looks at the reports, [`TICK`] after the last time. Returns the factors that shall be in force from now on if they differ enough
    /// from those before to be worth a table of so many `entries`.
    pub fn tick(&mut self, now: Duration, row: &SeenRow, flows: Flows, entries: u32) -> Option<Factors> {
        let wanted = match &mut self.law {
            LawState::A58(a58) => a58.factors(now, row),
            LawState::Feedback(feedback) => feedback.tick(now, row, flows),
        };
        // The yardstick makes its tables as often as its source does.
        let is_published = match self.law {
            LawState::A58(_) => wanted != self.in_force,
            LawState::Feedback(_) => is_worth_a_table(row, &self.in_force, &wanted, entries),
        };
        if !is_published {
            return None;
        }
        self.in_force = wanted;
        Some(self.in_force.clone())
    }

    /// The factors that are in force.
    pub const fn in_force(&self) -> &Factors {
        &self.in_force
    }
}

/// A number of a report.
fn thousandths(number: u32) -> f64 {
    f64::from(number) / 1000.0
}

#[expect(clippy::cast_precision_loss, reason = "structural weights are below 2^33")]
fn float(weight: u64) -> f64 {
    weight as f64
}

#[cfg(test)]
mod tests;
