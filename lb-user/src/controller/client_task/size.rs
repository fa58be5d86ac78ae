//! Subsets with a size that follows the client task's open flows. The sizes are checked once a
//! second. A subset grows or shrinks by one backend at a time, along the task's own order of
//! endpoints. This order was computed outside of the event loop; the loop changes only the number
//! of endpoints that are used.

use std::time::Instant;

use lb_core::balancer::{Fact, UnusableList};
use lb_core::ids::ServiceIndex;
use lb_core::load_band::{BandedSize, LoadBand};
use lb_core::membership::Assignment;
use lb_core::service::{Size, Subset};
use lb_kernel::Datapath;
use tracing::debug;

use super::ClientTask;
use crate::controller::Controller;

/// The size of one service's subset, and the assignment. The first members of the assignment are
/// the subset.
pub struct FollowedSize {
    band: LoadBand,
    size: BandedSize,
    /// `None` before there is a list.
    assignment: Option<Assignment>,
}

impl FollowedSize {
    /// Stores a new assignment. Returns the assignment with the present number of members.
    pub fn take(&mut self, assignment: Assignment) -> Assignment {
        let resized = assignment.resized(self.size.size());
        self.assignment = Some(assignment);
        resized
    }
}

impl Controller {
    /// For each subset with a size that follows load, adapts the size to the open flows of the
    /// client task.
    pub fn follow_flows(&mut self, now: Instant) {
        for client_task in &mut self.clients.tasks {
            if let Err(refused) = client_task.follow_flows(now) {
                debug!(client = %client_task.client.name, error = %refused, "cannot adapt the size of a subset to its load");
            }
        }
        self.settle_if_needed(now);
    }
}

impl ClientTask {
    /// Creates the sizes of the services with a subset that is configured to follow load. If the
    /// [`LoadBand`] of a service is unchanged, its size is retained. A new size continues from the
    /// size in the kernel's tables, if there is one.
    pub fn make_sizes(&mut self) {
        let applied = self.datapath.applied();
        let services = self.client.services.iter().zip(self.balancer.services()).zip(&mut self.services);
        for ((configured, (_, index, _)), service) in services {
            let known = service.size.take();
            let Subset::Sized { size: Size::Band(band), .. } = configured.service.subset else { continue };
            service.size = known.filter(|known| known.band == band).or_else(|| {
                let table = applied.services.get(&index).map(|service| &service.schedule);
                let members = table.map_or(0, |table| lb_core::plan::entries_by_slot(table).len());
                let size = BandedSize::of(band, u32::try_from(members).unwrap_or(u32::MAX));
                Some(FollowedSize { band, size, assignment: None })
            });
        }
    }

    /// For each subset with a size that follows load, adapts the size to the present number of open
    /// flows.
    ///
    /// # Errors
    /// The error of the first subset that does not fit; this subset is unchanged.
    pub fn follow_flows(&mut self, now: Instant) -> Result<(), UnusableList> {
        let at = self.clock.monotonic(now);
        let mut result = Ok(());
        for (position, service) in self.services.iter_mut().enumerate() {
            let Some(FollowedSize { size, assignment: Some(assignment), .. }) = &mut service.size else {
                continue;
            };
            let Some((_, index, _)) = self.balancer.services().nth(position) else { continue };
            let (before, open) = (size.size(), open_flows(&self.datapath, index));
            let most = u32::try_from(assignment.most()).unwrap_or(u32::MAX);
            if size.look(at, open, most) == before {
                continue;
            }
            let resized = assignment.resized(size.size());
            match self.balancer.handle(now, Fact::Endpoints(position, resized)) {
                Ok(true) => self.settled = None,
                Ok(false) => {}
                Err(refused) => {
                    // Restores the size, but retains the new observations.
                    *size = size.with_size(before);
                    result = result.and(Err(refused));
                }
            }
        }
        result
    }
}

/// The number of open flows to all backends of a service, including backends that are no longer in
/// its table.
fn open_flows(datapath: &Datapath, service: ServiceIndex) -> u32 {
    let tables = datapath.tables();
    let backends = datapath.applied().backends.iter().filter(|(_, backend)| backend.service == service);
    let open: u64 = backends.map(|(slot, _)| tables.active(*slot)).sum();
    u32::try_from(open).unwrap_or(u32::MAX)
}
