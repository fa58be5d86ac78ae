//! The backends of a client task as its maps hold them, by slot: read into views, and written step by step.
//!
//! A slot whose backend leaves keeps its generation for the next one, and what was counted of the backend is kept under
//! its name (see `retired`), for when it returns.

use std::mem::offset_of;
use std::net::SocketAddr;

use lb_common::abi::{self, Backend, BackendAddress, BackendState, StateWord, map};
use lb_common::load;
use lb_common::net::{Address, Be16, socket_addr};
use lb_core::plan::BackendPlan;

use super::services::name_of;
use super::{Counts, Tables};
use crate::error::DatapathError;
use crate::retired;

/// A slot as the maps show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotView {
    pub slot: u32,
    pub generation: u32,
    pub service: u16,
    pub address: SocketAddr,
    pub weight: u32,
    pub state: BackendState,
    pub usable: bool,
    /// Entries that it has in its service's table.
    pub entries: u32,
}

impl Tables {
    /// The occupied slots.
    pub fn slots(&self) -> Vec<SlotView> {
        let slots = 0..u32::try_from(self.maps.backends.len()).unwrap_or(u32::MAX);
        slots.filter_map(|slot| self.slot(slot)).collect()
    }

    /// A slot, if it is occupied.
    pub fn slot(&self, slot: u32) -> Option<SlotView> {
        let Backend { state, share, endpoint, .. } = self.maps.backends.get(slot as usize);
        let known = BackendState::from_u8(state.state).filter(|state| *state != BackendState::Free)?;
        Some(SlotView {
            slot,
            generation: endpoint.generation,
            service: endpoint.service,
            address: socket_addr(endpoint.address, endpoint.port),
            weight: endpoint.weight,
            state: known,
            usable: state.is_usable(),
            entries: share,
        })
    }

    /// The generation that the next backend of each free slot gets, where it is not the first.
    pub fn next_generations(&self) -> Vec<(u32, u32)> {
        let slots = 0..u32::try_from(self.maps.backends.len()).unwrap_or(u32::MAX);
        let free = slots
            .filter(|slot| self.maps.backends.get(*slot as usize).state.state == BackendState::Free as u8);
        let generations = free.map(|slot| (slot, self.maps.backends.get(slot as usize).endpoint.generation));
        generations.filter(|(_, generation)| *generation != 0).collect()
    }

    /// Open flows of a slot's backend.
    pub fn active(&self, slot: u32) -> u64 {
        self.maps.backends.get(slot as usize).flows
    }

    /// Takes a slot's errors away if they are long past, at the programs' tick `now`. One that is added meanwhile stays.
    pub fn forget_errors(&self, slot: u32, now: u32) {
        let (slot, errors) = (slot as usize, offset_of!(Backend, errors));
        let word = self.maps.backends.load64(slot, errors);
        if load::are_stale(bytemuck::cast(word), now) {
            self.maps.backends.replace64(slot, errors, word, 0);
        }
    }

    /// A backend that was here before goes on with its counts. They are written first, and forgotten elsewhere last.
    pub(super) fn write_backend(
        &mut self,
        slot: u32,
        backend: &BackendPlan,
        service: &str,
    ) -> Result<(), DatapathError> {
        let who = retired::name(service, backend.address);
        let fail = |error| self.fail_io(map::DEPARTED, "read", error);
        let departed = self.maps.departed.of(&who).map_err(fail)?;
        let (counts, swept) =
            departed.map_or_else(Default::default, |departed| (departed.counts, departed.swept));
        self.maps.counts.set(slot, &counts).map_err(|error| self.fail_io(map::COUNTS, "write", error))?;
        self.maps.backends.set_part(
            slot as usize,
            offset_of!(Backend, endpoint),
            &BackendAddress {
                address: Address::from(backend.address.ip()),
                port: Be16::from_host(backend.address.port()),
                service: backend.service,
                _reserved: 0,
                generation: backend.generation,
                weight: u32::from(backend.weight),
            },
        );
        // No flow is open, so nobody else writes.
        self.maps.backends.store64(slot as usize, offset_of!(Backend, errors), 0);
        self.maps.backends.store64(slot as usize, offset_of!(Backend, swept), swept);
        self.set_share(slot, 0);
        self.set_state(slot, StateWord::new(backend.usable, backend.state));
        if departed.is_some() {
            self.maps.departed.forget(&who).map_err(|error| self.fail_io(map::DEPARTED, "write", error))?;
            self.returned.push(((slot, backend.generation), counts));
        }
        Ok(())
    }

    pub(super) fn free_backend(&mut self, slot: u32) -> Result<(), DatapathError> {
        if let Some(view) = self.slot(slot) {
            let Counts { sums, active: _, swept } = self.counts(slot)?;
            let service = name_of(&self.maps.services.get(usize::from(view.service)));
            let who = retired::name(&service, view.address);
            let kept = self.maps.departed.keep(&who, sums, swept);
            kept.map_err(|error| self.fail_io(map::DEPARTED, "write", error))?;
        }
        // A free row keeps the generation that the slot's next backend gets.
        let mut row: BackendAddress = bytemuck::Zeroable::zeroed();
        row.generation = self.maps.backends.get(slot as usize).endpoint.generation.wrapping_add(1);
        self.set_state(slot, StateWord::new(false, BackendState::Free));
        self.maps.backends.set_part(slot as usize, offset_of!(Backend, endpoint), &row);
        Ok(())
    }

    /// Backends that have returned since this was last asked.
    pub(crate) fn returned(&mut self) -> Vec<((u32, u32), abi::SlotCounters)> {
        std::mem::take(&mut self.returned)
    }

    pub(super) fn set_state(&mut self, slot: u32, state: StateWord) {
        self.maps.backends.store32(slot as usize, offset_of!(Backend, state), state.to_word());
    }

    pub(super) fn set_share(&mut self, slot: u32, entries: u32) {
        self.maps.backends.store32(slot as usize, offset_of!(Backend, share), entries);
    }
}
