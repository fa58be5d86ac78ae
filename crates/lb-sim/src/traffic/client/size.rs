//! Adjusts the size of a client's subset to the client's own load, by the daemon's rule.
//!
//! This module must not decide when the size is adjusted.

use std::rc::Rc;
use std::time::Duration;

use lb_core::load_band::{BandedSize, LoadBand};

use super::SimulatedClient;
use crate::traffic::assignments::JobAssignments;

/// The size of a subset that follows load, and the newest assignments that the client has received.
#[derive(Debug)]
pub(super) struct GrowingSize {
    banded: BandedSize,
    assignments: Option<Rc<JobAssignments>>,
}

impl SimulatedClient {
    /// Makes the size of the client's subset follow the client's load from now on.
    pub fn follow_flows(&mut self, band: LoadBand) {
        self.growing = Some(GrowingSize { banded: BandedSize::new(band), assignments: None });
    }

    /// Stores these assignments, and returns how many members the client uses; `None` if the
    /// client's size does not follow load.
    pub fn size_in(&mut self, assignments: &Rc<JobAssignments>) -> Option<u32> {
        let growing = self.growing.as_mut()?;
        growing.assignments = Some(Rc::clone(assignments));
        Some(growing.banded.size())
    }

    /// Adjusts the size of the client's subset to the client's open flows. If the size changes,
    /// returns the assignments.
    pub fn look_at_flows(&mut self, now: Duration) -> Option<Rc<JobAssignments>> {
        let established: u32 = self.links.iter().flatten().map(|link| link.flows).sum();
        let open = established + self.pending.iter().sum::<u32>();
        let growing = self.growing.as_mut()?;
        let assignments = growing.assignments.as_ref()?;
        let before = growing.banded.size();
        let size = growing.banded.look(now, open, assignments.most(self.index));
        (size != before).then(|| Rc::clone(assignments))
    }
}
