//! The actions of an operator on daemons: to switch load control, and to replace all daemons at
//! once.
//!
//! This module must not depend on a daemon's decisions.

use std::time::Duration;

use lb_core::control::Switch;

use super::Simulation;
use crate::traffic::client::SimulatedClient;

impl Simulation<'_> {
    fn of_each_client(&mut self, change: impl Fn(&mut SimulatedClient, Duration)) {
        let now = Duration::from_micros(self.now);
        self.clients.iter_mut().flatten().for_each(|client| change(client, now));
    }

    /// Applies an operator's setting to the load control of all clients.
    pub(super) fn switch_laws(&mut self, switch: Switch) {
        self.switch = switch;
        self.of_each_client(|client, _| client.switch(switch));
    }

    /// Makes all daemons save their learnt state.
    pub(super) fn save_state(&mut self) {
        self.of_each_client(SimulatedClient::save_state);
    }

    /// Replaces every client's daemon with a new one, which loads the saved state if there is one.
    /// Connections remain open, and the new daemons adopt all other state of their predecessors.
    pub(super) fn replace_daemons(&mut self, is_saved: bool) {
        // A daemon saves an operator's setting at once, so the setting is lost only if no state is
        // saved.
        self.switch = if is_saved { self.switch } else { Switch::On };
        let switch = self.switch;
        self.of_each_client(|client, now| client.replace_daemon(now, is_saved, switch));
    }
}
