//! Settling: makes each client's maps match its plan. One turn of the loop settles one client.
//!
//! Steps that are not possible yet (reuse of a region that a program may still read, freeing of a
//! slot with open flows) are left for a later call. A wait for readers ends when every program that
//! may read replaced data has ended. The data may be overwritten after the wait.
//!
//! A fault of one client is logged once and retried; other clients are not affected.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::time::Instant;

use lb_core::balancer::Fact;
use lb_core::ids::Slot;
use lb_kernel::DatapathError;
use tracing::error;

use super::ClientTask;
use crate::controller::clients::Clients;
use crate::controller::{BackgroundWork, Controller};

impl Controller {
    /// Settles clients if any client is not settled.
    pub fn settle_if_needed(&mut self, now: Instant) {
        if self.clients.tasks.iter().any(|client_task| !client_task.is_settled()) {
            self.settle(now);
        }
    }

    /// Settles one client now, and each other client in a later turn. Settling a client with many
    /// services takes milliseconds; the service manager, operators and probes must not wait until
    /// all clients are settled.
    pub fn settle(&mut self, now: Instant) {
        self.clients.find_unsettled(now);
        // One turn settles at most one client, even if the turn handles several changes.
        if !self.clients.has_settled {
            self.settle_next(now);
        }
        self.clients.is_settling |= !self.clients.to_settle.is_empty();
    }

    /// Settles all clients in one turn of the event loop. At the start, nothing else waits for the
    /// loop.
    pub fn settle_all(&mut self, now: Instant) {
        self.settle(now);
        // Bound: each turn settles one client.
        while !self.clients.to_settle.is_empty() {
            self.settle_next(now);
        }
        self.clients.is_settling = false;
    }

    /// Settles the next client, in a separate turn of the loop.
    pub fn go_on_settling(&mut self, now: Instant) {
        self.settle_next(now);
        if self.clients.to_settle.is_empty() {
            self.clients.is_settling = false;
            self.all_settled(now);
        }
    }

    /// Settles the next unsettled client, if there is one. After the last one, logs changes of
    /// health and starts a wait for readers.
    fn settle_next(&mut self, now: Instant) {
        let next = self.clients.to_settle.pop_first();
        // A reload may have removed the client.
        if let Some(client_task) = next.and_then(|name| self.clients.task_mut(&name)) {
            let before = client_task.trouble().map(str::to_owned);
            let result = client_task.settle(now);
            // An error is logged once, not at each attempt.
            if let Err(error) = result
                && client_task.trouble() != before.as_deref()
            {
                error!(client = %client_task.client.name, error = %crate::error::chain(&error), "cannot make the maps match the plan; retrying");
            }
            self.clients.has_settled = true;
        }
        if self.clients.to_settle.is_empty() {
            for client_task in &mut self.clients.tasks {
                client_task.log_health(self.probing.network());
            }
            self.wait_for_readers();
        }
    }

    /// Starts a wait for readers if any client or report id needs one, unless a wait is under way.
    pub fn wait_for_readers(&mut self) {
        let wants_wait = self.probing.wants_wait() || self.clients.tasks.iter().any(ClientTask::wants_wait);
        if self.clients.waiting_for_readers || !wants_wait {
            return;
        }
        self.clients.waiting_for_readers = true;
        self.probing.before_wait();
        for client_task in &mut self.clients.tasks {
            client_task.before_wait();
        }
        self.effects.push(BackgroundWork::WaitForReaders.into());
    }

    pub fn readers_gone(&mut self, result: Result<(), DatapathError>, now: Instant) {
        self.clients.waiting_for_readers = false;
        if let Err(error) = result {
            // Programs may still read the data that a new table overwrites, so no table is replaced
            // until a wait succeeds.
            let error = crate::error::chain(&error);
            if self.clients.readers_error.as_ref() != Some(&error) {
                error!(
                    error,
                    "cannot wait for running programs; no table is replaced until a wait succeeds; retrying"
                );
            }
            self.clients.readers_error = Some(error);
            return;
        }
        self.clients.readers_error = None;
        self.probing.after_wait();
        let mut freed = false;
        for client_task in &mut self.clients.tasks {
            client_task.after_wait();
            freed |= client_task.free_idle(now);
        }
        if freed {
            self.assign_again(now);
        }
        self.settle(now);
    }
}

impl Clients {
    /// Collects the clients whose maps do not match their plans.
    fn find_unsettled(&mut self, now: Instant) {
        for client_task in &mut self.tasks {
            client_task.apply_kernel_verdicts(now);
            if !client_task.is_settled() {
                self.to_settle.insert(client_task.client.name.clone());
            }
        }
    }
}

impl ClientTask {
    /// Makes the maps match the plan, as far as possible now.
    ///
    /// # Errors
    /// If the kernel refuses a step.
    pub fn settle(&mut self, now: Instant) -> Result<(), DatapathError> {
        self.apply_kernel_verdicts(now);
        if self.settled.is_some() {
            return Ok(());
        }
        self.start_slowly(now);
        let result = self.datapath.apply(&self.balancer.plan(), &self.cursor_seed);
        for (backend, counts) in self.datapath.returned() {
            self.window.begin(backend, &counts);
        }
        let unneeded = self.find_unneeded();
        self.grace_periods.retain(&unneeded);
        self.trouble = match &result {
            Ok(true) => None,
            Ok(false) => Some("a new table is waiting for room in the schedule map".to_owned()),
            Err(error) => Some(crate::error::chain(error)),
        };
        self.has_failed = result.is_err();
        self.logged.is_stale = true;
        self.publish_peak_flows();
        self.settled = matches!(result, Ok(true)).then_some(unneeded);
        result.map(drop)
    }

    /// The slots that neither the plan nor the maps use. The maps may still use a slot that the
    /// plan has dropped, because an old table stays in the maps while the new one waits for room.
    fn unneeded(&self) -> Cow<'_, BTreeSet<Slot>> {
        match &self.settled {
            Some(unneeded) => Cow::Borrowed(unneeded),
            None => Cow::Owned(self.find_unneeded()),
        }
    }

    fn find_unneeded(&self) -> BTreeSet<Slot> {
        let unneeded = self.balancer.unneeded();
        &unneeded - &self.datapath.named(&unneeded)
    }

    /// Whether any step has to wait for the end of running programs.
    pub fn wants_wait(&self) -> bool {
        self.datapath.is_waiting_for_readers()
            || self.overrides_want_wait()
            || self.grace_periods.wants_wait(&self.unneeded())
    }

    /// Call this before a wait for readers starts.
    pub fn before_wait(&mut self) {
        self.datapath.before_wait();
        self.before_override_wait();
        let unneeded = self.unneeded().into_owned();
        self.grace_periods.before_wait(&unneeded);
    }

    /// Call this when the wait for readers that followed [`ClientTask::before_wait`] has ended.
    pub fn after_wait(&mut self) {
        self.datapath.readers_are_gone();
        self.after_override_wait();
        self.grace_periods.after_wait();
    }

    /// Frees each unneeded slot that has no open flow, after its grace period. Returns whether a
    /// slot was freed.
    pub fn free_idle(&mut self, now: Instant) -> bool {
        let tables = self.datapath.tables();
        let idle = self.grace_periods.take_idle(|slot| tables.active(slot) != 0);
        if idle.is_empty() {
            return false;
        }
        self.settled = None;
        self.balancer.handle(now, Fact::Idle(idle)).expect("only a list can be refused");
        true
    }
}
