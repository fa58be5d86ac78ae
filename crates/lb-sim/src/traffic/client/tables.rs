//! The input of [`SimulatedClient::pick`]: the client's tables with the content of the kernel's
//! maps.
//!
//! If a service ejects backends, the state words and the members come from the ejector. With
//! traffic `requests`, the client can choose only backends with an established connection. This
//! module reads the client's state, and changes it only when a trial begins.

use lb_common::abi::{BackendState, EjectionState, RecentErrors, StateWord, TableRef};
use lb_common::pick::Tables;

use super::{LinkState, SimulatedClient};

pub(super) struct ClientTables<'a> {
    pub(super) client: &'a SimulatedClient,
}

impl Tables for ClientTables<'_> {
    type Backend = u32;
    type Members = ();
    type Position = usize;

    fn entry(&self, entry: u32) -> Option<u32> {
        self.client.schedule.get(entry as usize).map(|slot| slot.number())
    }

    fn backend(&self, slot: u32) -> Option<u32> {
        self.client.slots.get(slot as usize)?.map(|_| slot)
    }

    fn state(&self, slot: u32) -> StateWord {
        let (client, at) = (self.client, slot as usize);
        if let Some(ejector) = &client.ejector {
            return ejector.state(slot);
        }
        let is_ready = client.links[at].is_some_and(|link| link.state == LinkState::Ready);
        let usable = client.slots[at].is_some_and(|slot| slot.usable) && (is_ready || !client.needs_links);
        StateWord::new(usable.into(), BackendState::Member)
    }

    fn flows(&self, slot: u32) -> u32 {
        self.client.flows(slot)
    }

    fn errors(&self, slot: u32) -> RecentErrors {
        self.client.errors[slot as usize]
    }

    fn ejection(&self, slot: u32) -> EjectionState {
        self.client.ejector.as_ref().map_or_else(EjectionState::default, |ejector| ejector.standing(slot))
    }

    fn entries(&self, slot: u32) -> u32 {
        self.client.entries[slot as usize]
    }

    fn members(&self, _: TableRef) -> Option<()> {
        self.client.members.as_ref().map(|_| ())
    }

    fn list(&self, (): ()) -> Option<(u32, u32, usize)> {
        let count = u32::try_from(self.client.members.as_ref()?.len());
        let count = count.expect("at most `MAX_SUBSET` members are listed");
        Some((count, count, 0))
    }

    fn position(&self, (): (), number: u32) -> Option<usize> {
        Some(number as usize)
    }

    fn member(&self, position: usize) -> (u32, usize) {
        let members = self.client.members.as_ref();
        (members.expect("requested members are listed")[position], position + 1)
    }

    fn begin_trial(&self, slot: u32, now: u32) -> bool {
        self.client.ejector.as_ref().is_some_and(|ejector| ejector.begin_trial(slot, now))
    }

    fn fallback(&self) -> u32 {
        self.client.fallback
    }
}
