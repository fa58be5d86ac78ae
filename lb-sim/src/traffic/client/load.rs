//! A client's weights follow load: what the daemon does once a second, with its own law.
//!
//! Must not know how reports travel.

use std::collections::BTreeMap;
use std::time::Duration;

use lb_common::abi::NO_SLOT;
use lb_core::balancer::Fact;
use lb_core::control::{Control, Flows, Heard, Law, Seen, SeenRow};

use super::{Client, index_of};

/// What a client knows of its own flows, for its law.
#[derive(Debug)]
pub(super) struct Following {
    control: Control,
    /// Flows that began since the last look, and the rate of that.
    begun: u32,
    begun_smoothed: f64,
    open_smoothed: f64,
    /// How long a flow lives by that.
    life_seconds: f64,
    /// To the backend in each slot, of late: flows that began, and those that failed.
    of_late: Vec<(f64, f64)>,
}

/// What is left after one look of what was counted: the last minute or so counts.
const LATE: f64 = 0.98;

/// The shortest time over which the life of a flow is measured; otherwise over one life.
const LEAST_SECONDS: f64 = 10.0;

/// A life that is longer than a day, or that no flow has shown, counts as a day.
const MOST_SECONDS: f64 = 86_400.0;

/// So many flows show what part of them fails.
const ENOUGH: f64 = 20.0;

impl Following {
    pub(super) fn new(law: Law) -> Self {
        let control = Control::new(law);
        Self {
            control,
            begun: 0,
            begun_smoothed: 0.0,
            open_smoothed: 0.0,
            life_seconds: 0.0,
            of_late: Vec::new(),
        }
    }

    pub(super) fn begin(&mut self, slot: u32) {
        if slot != NO_SLOT {
            self.begun += 1;
            self.at(slot).0 += 1.0;
        }
    }

    pub(super) fn fail(&mut self, slot: u32) {
        self.at(slot).1 += 1.0;
    }

    fn at(&mut self, slot: u32) -> &mut (f64, f64) {
        let slot = slot as usize;
        if self.of_late.len() <= slot {
            self.of_late.resize(slot + 1, (0.0, 0.0));
        }
        &mut self.of_late[slot]
    }

    /// Another backend is in a slot.
    pub(super) fn forget(&mut self, slot: u32) {
        *self.at(slot) = (0.0, 0.0);
    }

    /// What has begun until now was there before anybody looked.
    pub(super) fn forget_begun(&mut self) {
        self.begun = 0;
    }

    /// The mean life of a flow (Little's law), after one look more.
    fn flows(&mut self, open: u32) -> Flows {
        let begun = f64::from(std::mem::take(&mut self.begun));
        // Both are smoothed alike, so their ratio is right from the first look on.
        let part = 1.0 / LEAST_SECONDS.max(self.life_seconds);
        self.begun_smoothed += (begun - self.begun_smoothed) * part;
        self.open_smoothed += (f64::from(open) - self.open_smoothed) * part;
        self.life_seconds = if self.open_smoothed == 0.0 {
            0.0
        } else {
            (self.open_smoothed / self.begun_smoothed).min(MOST_SECONDS)
        };
        Flows { life: Duration::from_secs_f64(self.life_seconds) }
    }
}

impl Client {
    /// Looks at the newest reports that have come, and brings its tables up to date if that is worth it.
    pub fn follow_load(&mut self, now: Duration, heard: impl Fn(u32) -> Option<Heard>) {
        let Some(mut following) = self.following.take() else { return };
        let slots: BTreeMap<u32, u32> =
            (0..).zip(&self.slots).filter_map(|(slot, of)| Some((of.as_ref()?.backend, slot))).collect();
        let seen = |&(address, weight): &(_, u64)| {
            let backend = index_of(address);
            let slot = slots[&backend];
            let (begun, failed) = following.of_late.get(slot as usize).copied().unwrap_or_default();
            // One that began long ago may fail late.
            let errors = (begun >= ENOUGH).then(|| (failed / begun).min(1.0));
            (
                address,
                Seen {
                    weight,
                    heard: heard(backend),
                    errors,
                    // Who leaves the list and returns is somebody else here.
                    ready_since: Duration::ZERO,
                    is_frozen: self.is_frozen(slot),
                },
            )
        };
        let row: SeenRow = self.balancer.weights(0).iter().map(seen).collect();
        let open = self.links.iter().flatten().map(|link| link.flows).sum();
        let flows = following.flows(open);
        following
            .of_late
            .iter_mut()
            .for_each(|(begun, failed)| (*begun, *failed) = (*begun * LATE, *failed * LATE));
        let entries = u32::try_from(self.schedule.len()).expect("a table's length has 32 bits");
        if let Some(factors) = following.control.tick(now, &row, flows, entries) {
            self.balancer.handle(now, Fact::Factors(0, factors)).expect("it takes no room");
            self.publish();
        }
        self.following = Some(following);
    }

    /// Whether something else than load decides now how much the backend in a slot gets.
    fn is_frozen(&self, slot: u32) -> bool {
        let at = slot as usize;
        let limit = self.rules.active_limit;
        let is_ejected = self.ejector.as_ref().is_some_and(|ejector| ejector.state(slot).is_held_back() != 0);
        self.lame[at] || is_ejected || (limit != 0 && self.flows(slot) >= limit)
    }
}
