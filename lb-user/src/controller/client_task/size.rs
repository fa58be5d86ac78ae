//! Subsets whose size follows this client task's open flows: they are checked once a second, and
//! grow or shrink by one backend at a time along the task's own order. The order was computed
//! beside the loop; here it is only cut at another place.

use std::collections::BTreeMap;
use std::time::Instant;

use lb_core::balancer::{Fact, UnusableList};
use lb_core::load_band::{BandedSize, LoadBand};
use lb_core::service::{Size, Subset};

use super::ClientTask;
use crate::assignments::Assignment;

/// The size of one service's subset, and the assignment that it is cut from.
pub struct FollowedSize {
    band: LoadBand,
    size: BandedSize,
    /// `None` before there is a list.
    assignment: Option<Assignment>,
}

impl ClientTask {
    /// Creates the sizes of the services whose subset is configured to follow load. A size with
    /// an unchanged band is retained. A new one continues from the size in the kernel's tables,
    /// if there is one.
    pub fn make_sizes(&mut self) {
        let mut before: BTreeMap<String, FollowedSize> =
            std::mem::take(&mut self.sizes).into_iter().flatten().collect();
        for (configured, (_, index, _)) in self.client.services.iter().zip(self.balancer.services()) {
            let service = &configured.service;
            let Subset::Sized { size: Size::Band(band), .. } = service.subset else {
                self.sizes.push(None);
                continue;
            };
            let known = before.remove(&service.name).filter(|known| known.band == band);
            let followed = known.unwrap_or_else(|| {
                let applied = self.datapath.applied();
                let table = applied.services.get(&index).map(|service| &service.schedule);
                let members = table.map_or(0, |table| lb_core::plan::entries_by_slot(table).len());
                let size = BandedSize::of(band, u32::try_from(members).unwrap_or(u32::MAX));
                FollowedSize { band, size, assignment: None }
            });
            self.sizes.push(Some((service.name.clone(), followed)));
        }
    }

    /// The fact of a new assignment; if the size follows load, with as many members as the size is
    /// now.
    pub(super) fn sized(&mut self, position: usize, assignment: Assignment) -> Fact {
        match self.sizes.get_mut(position) {
            Some(Some((_, followed))) => {
                let fact = followed.fact(position, &assignment);
                followed.assignment = Some(assignment);
                fact
            }
            Some(None) | None => assignment.fact(position),
        }
    }

    /// Adapts the subsets that follow load to the current numbers of open flows.
    ///
    /// # Errors
    /// The first subset that would not fit; it stays as it is.
    pub fn follow_flows(&mut self, now: Instant) -> Result<(), UnusableList> {
        if self.sizes.iter().all(Option::is_none) {
            return Ok(());
        }
        let at = self.clock.monotonic(now);
        let mut sizes = std::mem::take(&mut self.sizes);
        let mut result = Ok(());
        for (position, followed) in sizes.iter_mut().enumerate() {
            let Some((_, followed)) = followed else { continue };
            let Some(assignment) = followed.assignment.clone() else { continue };
            let (before, open) = (followed.size, self.open_flows_of(position));
            let most = u32::try_from(assignment.most()).unwrap_or(u32::MAX);
            if followed.size.look(at, open, most) == before.size() {
                continue;
            }
            match self.balancer.handle(now, followed.fact(position, &assignment)) {
                Ok(true) => self.settled = None,
                Ok(false) => {}
                Err(refused) => {
                    // Restores the size, but retains the new observations.
                    followed.size = followed.size.with_size(before.size());
                    result = result.and(Err(refused));
                }
            }
        }
        self.sizes = sizes;
        result
    }

    /// Open flows to all backends of a service, including those that have left its table.
    fn open_flows_of(&self, position: usize) -> u32 {
        let Some((_, index, _)) = self.balancer.services().nth(position) else { return 0 };
        let tables = self.datapath.tables();
        let backends = self.datapath.applied().backends.iter();
        let open: u64 = backends
            .filter(|(_, backend)| backend.service == index)
            .map(|(slot, _)| tables.active(*slot))
            .sum();
        u32::try_from(open).unwrap_or(u32::MAX)
    }
}

impl FollowedSize {
    fn fact(&self, position: usize, assignment: &Assignment) -> Fact {
        assignment.resized(self.size.size()).fact(position)
    }
}
