//! The weights of a client task that change while its lists stay: with load, and in slow start. What is known of each row goes to its
//! [`Control`], and what that makes of it becomes a fact for the balancer.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use lb_common::ending::Ending;
use lb_core::balancer::Fact;
use lb_core::control::factor::Factors;
use lb_core::control::flows::{Lives, OfLate};
use lb_core::control::publication::Proposal;
use lb_core::control::{Control, Heard, Learnt, Look, Seen, SeenRow, Switch};
use lb_core::health::Health;
use lb_core::ids::{BackendRef, Slot};
use lb_view::load;

use super::ClientTask;

/// The control of one service, and what is counted for it.
pub struct Controlled {
    control: Control,
    lives: Lives,
    counted: BTreeMap<SocketAddr, Counted>,
    /// What the last tick has seen.
    look: Look,
    /// When that was, by the clock of reports.
    looked: Duration,
    /// Tables that were made because of it.
    tables: u64,
}

/// Flows to one backend, as of the last tick.
struct Counted {
    at: BackendRef,
    begun: u64,
    failed: u64,
    of_late: OfLate,
}

/// What reports say of the load of a backend.
pub type Hears<'a> = &'a dyn Fn(SocketAddr) -> Option<Heard>;

impl Controlled {
    fn new(control: Control) -> Self {
        Self {
            control,
            lives: Lives::default(),
            counted: BTreeMap::new(),
            look: Look::default(),
            looked: Duration::ZERO,
            tables: 0,
        }
    }
}

impl ClientTask {
    /// Makes the controls that the configuration asks for. `learnt` tells what was learnt for a service before, and how long ago.
    pub fn make_controls(
        &mut self,
        now: Duration,
        learnt: impl Fn(&str) -> Option<(Learnt, Duration)>,
        at: Instant,
    ) {
        let before: BTreeMap<String, Controlled> =
            std::mem::take(&mut self.controls).into_iter().flatten().collect();
        let mut before = before;
        for position in 0..self.client.services.len() {
            let service = &self.client.services[position].service;
            let (rules, name) = (service.control, service.name.clone());
            if rules.law.is_none() && rules.slow_start.is_none() {
                self.controls.push(None);
                continue;
            }
            let known = before.remove(&name);
            let controlled = match known {
                Some(known) if known.control.rules() == rules => known,
                known => {
                    let mut control = Control::new(rules);
                    // What was learnt under other rules holds under these.
                    let learnt =
                        known.map(|known| (known.control.learnt(), Duration::ZERO)).or_else(|| learnt(&name));
                    if let Some((learnt, age)) = learnt {
                        control.adopt(&learnt, now, age);
                    }
                    Controlled::new(control)
                }
            };
            // A balancer that is new knows none.
            self.apply_factors(position, controlled.control.in_force().clone(), at);
            self.controls.push(Some((name, controlled)));
        }
    }

    /// Lets the laws look at what is reported and counted, a tick after the last time. Returns what is worth a table, by position.
    /// `heard`: what reports say of a backend of the service at a position.
    pub fn tick_controls(
        &mut self,
        now: Duration,
        heard: impl Fn(usize, SocketAddr) -> Option<Heard>,
    ) -> Vec<(usize, Proposal)> {
        let mut controls = std::mem::take(&mut self.controls);
        let mut proposals = Vec::new();
        for (position, controlled) in controls.iter_mut().enumerate() {
            let Some((_, controlled)) = controlled else { continue };
            let follows_load = controlled.control.rules().law.is_some();
            if follows_load {
                self.count(position, controlled);
            }
            let Some(look) = self.look(position, controlled, &|address| heard(position, address)) else {
                continue;
            };
            (controlled.look, controlled.looked) = (look, now);
            let proposal = controlled.control.tick(now, &controlled.look);
            proposals.extend(proposal.map(|proposal| (position, proposal)));
        }
        self.controls = controls;
        proposals
    }

    /// Whoever is new, or available again or no longer, starts slowly from now on, where that is configured.
    pub fn start_slowly(&mut self, now: Duration, at: Instant) {
        let mut controls = std::mem::take(&mut self.controls);
        for (position, controlled) in controls.iter_mut().enumerate() {
            let Some((_, controlled)) = controlled else { continue };
            if controlled.control.rules().slow_start.is_none() {
                continue;
            }
            let Some(look) = self.look(position, controlled, &|_| None) else { continue };
            if let Some(factors) = controlled.control.arrange(now, &look) {
                controlled.control.publish(factors.clone());
                controlled.tables += 1;
                self.apply_factors(position, factors, at);
            }
        }
        self.controls = controls;
    }

    /// The table of the service at a position follows these factors from now on.
    pub fn publish_factors(&mut self, position: usize, factors: Factors, at: Instant) {
        if let Some(Some((_, controlled))) = self.controls.get_mut(position) {
            controlled.control.publish(factors.clone());
            controlled.tables += 1;
        }
        self.apply_factors(position, factors, at);
    }

    fn apply_factors(&mut self, position: usize, factors: Factors, at: Instant) {
        if self.balancer.handle(at, Fact::Factors(position, factors)).expect("it takes no room") {
            self.settled = None;
        }
    }

    /// What is known of a row; `None` before there is a list.
    fn look(&self, position: usize, controlled: &Controlled, heard: Hears<'_>) -> Option<Look> {
        let row = self.balancer.row(position)?;
        let limit = self.client.services[position].service.active_limit;
        let tables = self.datapath.tables();
        let seen = |&(address, weight): &(SocketAddr, u64)| {
            let open = || self.balancer.slot(position, address).map_or(0, |at| tables.active(at.slot));
            let seen = Seen {
                weight,
                heard: heard(address),
                errors: controlled.counted.get(&address).and_then(|counted| counted.of_late.errors()),
                is_available: row.usable.get(&address).is_none_or(|(_, health)| *health == Health::Healthy),
                is_at_limit: limit.is_some_and(|limit| open() >= limit.into()),
            };
            (address, seen)
        };
        let seen: SeenRow = row.members.iter().map(seen).collect();
        Some(Look {
            row: seen,
            flows: controlled.lives.flows(),
            is_panic: row.is_panic,
            entries: u32::try_from(self.balancer.entries(position)).unwrap_or(u32::MAX),
        })
    }

    /// Takes in how many flows have begun and failed since the last tick, and how many are open.
    fn count(&self, position: usize, Controlled { lives, counted, .. }: &mut Controlled) {
        let members = self.balancer.weights(position).iter();
        let slots: BTreeMap<Slot, (SocketAddr, BackendRef)> = members
            .filter_map(|(address, _)| {
                let at = self.balancer.slot(position, *address)?;
                Some((at.slot, (*address, at)))
            })
            .collect();
        let mut before = std::mem::take(counted);
        let is_counted = !before.is_empty();
        let (mut begun, mut open) = (0, 0);
        let order: Vec<Slot> = slots.keys().copied().collect();
        // What cannot be read now is read at the next tick; the log has it from `sample`.
        let _ = self.datapath.tables().visit_counts(&order, |slot, counts| {
            let (address, at) = slots[&slot];
            let failed = Ending::ALL.into_iter().filter(|ending| ending.is_error());
            let failed: u64 = failed.map(|ending| counts.sums.endings[ending as usize]).sum();
            let now = (counts.sums.chosen, failed);
            let known = before.remove(&address).filter(|known| known.at == at);
            // What was counted before anybody looked says nothing of now.
            let mut of_late = known.as_ref().map_or_else(OfLate::default, |known| known.of_late);
            let since = |now: u64, before: Option<u64>| now.saturating_sub(before.unwrap_or(now));
            let new = since(now.0, known.as_ref().map(|known| known.begun));
            of_late.tick();
            of_late.add(float(new), float(since(now.1, known.as_ref().map(|known| known.failed))));
            begun += new;
            open += counts.active;
            counted.insert(address, Counted { at, begun: now.0, failed: now.1, of_late });
        });
        // Of flows that were there before anybody looked it is not known when they began.
        if is_counted {
            lives.tick(float(begun), float(open));
        }
    }

    /// An operator says what becomes of the law of a service. Returns what it was; `None` if the service has none here.
    pub fn switch_control(&mut self, service: &str, switch: Switch) -> Option<Switch> {
        let mut controls = self.controls.iter_mut().flatten();
        let (_, controlled) = controls
            .find(|(name, controlled)| name == service && controlled.control.rules().law.is_some())?;
        let before = controlled.control.switch();
        controlled.control.set_switch(switch);
        Some(before)
    }

    /// What laws have learnt, by service name.
    pub fn learnt(&self) -> impl Iterator<Item = (&str, Learnt)> {
        self.controls.iter().flatten().filter_map(|(name, controlled)| {
            let has_law = controlled.control.rules().law.is_some();
            has_law.then(|| (name.as_str(), controlled.control.learnt()))
        })
    }

    /// What is shown of weights that change, by service name.
    pub fn loads(&self) -> BTreeMap<String, load::ServiceLoad> {
        let controls = self.controls.iter().flatten();
        controls.map(|(name, controlled)| (name.clone(), controlled.view())).collect()
    }
}

impl Controlled {
    fn view(&self) -> load::ServiceLoad {
        let (rules, flows) = (self.control.rules(), self.look.flows);
        let weighed = |factors: &Factors, address: &SocketAddr, seen: &Seen| {
            float(factors.of(*address).times(seen.weight))
        };
        let sum: f64 =
            self.look.row.iter().map(|(address, seen)| weighed(self.control.in_force(), address, seen)).sum();
        let member = |(address, seen): (&SocketAddr, &Seen)| load::MemberLoad {
            address: *address,
            utilization: seen.heard.and_then(|heard| heard.utilization()),
            age_s: seen.heard.map(|heard| heard.age(self.looked).as_secs_f64()),
            wanted: self.control.wanted().of(*address).number(),
            factor: self.control.in_force().of(*address).number(),
            share: if sum > 0.0 { weighed(self.control.in_force(), address, seen) / sum } else { 0.0 },
            held_by: self.control.hold(*address).map(|hold| hold.name().to_owned()),
        };
        load::ServiceLoad {
            control: rules.law.map(|law| law.name().to_owned()),
            mode: rules.mode.name().to_owned(),
            switch: self.control.switch().name().to_owned(),
            slow_start_s: rules.slow_start.map(|time| time.as_secs_f64()),
            flows_live_s: flows.life.as_secs_f64(),
            settling_s: self.control.settling(flows).map(|time| time.as_secs_f64()),
            tables: self.tables,
            members: self.look.row.iter().map(member).collect(),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of a second, and weights of which ratios are shown")]
fn float(number: u64) -> f64 {
    number as f64
}
