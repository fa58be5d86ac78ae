//! What operators do with daemons: they switch what moves weights, and replace all of them at once.
//!
//! Must not know what a daemon decides.

use std::time::Duration;

use lb_core::control::Switch;

use super::World;
use crate::traffic::client::SimulatedClient;

impl World<'_> {
    fn of_each_client(&mut self, change: impl Fn(&mut SimulatedClient, Duration)) {
        let now = Duration::from_micros(self.now);
        self.clients.iter_mut().flatten().for_each(|client| change(client, now));
    }

    /// An operator says what becomes of all laws.
    pub(super) fn switch_laws(&mut self, switch: Switch) {
        self.switch = switch;
        self.of_each_client(|client, _| client.switch(switch));
    }

    /// All daemons keep what they have learnt.
    pub(super) fn keep_learnt(&mut self) {
        self.of_each_client(SimulatedClient::keep_learnt);
    }

    /// Another daemon for every client, which takes up what was kept, if anything was. Connections and the rest of what one knows go on.
    pub(super) fn replace_daemons(&mut self, is_kept: bool) {
        // What an operator has said is kept at once.
        self.switch = if is_kept { self.switch } else { Switch::On };
        let switch = self.switch;
        self.of_each_client(|client, now| client.replace_daemon(now, is_kept, switch));
    }
}
