//! Tables and cursors in memory, with content that a test determines.

use std::cell::Cell;

use lb_common::abi::{
    BackendState, Cursor, EjectionState, MIN_SCHEDULE_LOG2, NO_SLOT, Policy, RecentErrors, Rules, StateWord,
    TableRef,
};
use lb_common::pick::{How, Pick, Tables, pick};

/// The part of a backend's state that a choice reads.
#[derive(Clone, Copy, Debug)]
pub struct Backend {
    pub usable: bool,
    pub is_ejected: bool,
    pub flows: u32,
    pub errors: RecentErrors,
    pub ejection: EjectionState,
}

/// The tables of one service. A slot is an index into the list of backends.
#[derive(Clone, Debug)]
pub struct Host {
    pub entries: Vec<u32>,
    pub backends: Vec<Backend>,
    /// Whether members are listed.
    pub listed: bool,
    pub fallback: u32,
    pub shares: Vec<u32>,
    pub members: Vec<u32>,
}

impl Host {
    /// Idle backends that may all be chosen, with a schedule.
    pub fn new(entries: Vec<u32>, backends: usize) -> Self {
        let idle = Backend {
            usable: true,
            is_ejected: false,
            flows: 0,
            errors: RecentErrors::default(),
            ejection: EjectionState::default(),
        };
        let mut shares = vec![0; backends];
        for slot in &entries {
            if let Some(share) = shares.get_mut(*slot as usize) {
                *share += 1;
            }
        }
        let mut members = entries.clone();
        members.sort_unstable();
        members.dedup();
        Self { entries, backends: vec![idle; backends], listed: true, fallback: NO_SLOT, shares, members }
    }

    /// A table of the shortest length, in which this number of backends have entries in turn.
    pub fn in_turn(backends: u32) -> Self {
        Self::new((0..LENGTH).map(|entry| entry % backends).collect(), backends as usize)
    }

    /// Sets the number of open flows of each backend.
    pub fn with_flows(mut self, flows: &[u32]) -> Self {
        for (backend, flows) in self.backends.iter_mut().zip(flows) {
            backend.flows = *flows;
        }
        self
    }

    /// Makes the backends in these slots unusable.
    pub fn without(mut self, unusable: &[usize]) -> Self {
        for slot in unusable {
            self.backends[*slot].usable = false;
        }
        self
    }

    /// The number of open flows of each backend.
    pub fn flows(&self) -> Vec<u32> {
        self.backends.iter().map(|backend| backend.flows).collect()
    }

    /// The table, which begins at the first entry.
    pub fn table(&self) -> TableRef {
        let length_log2 = u8::try_from(self.entries.len().ilog2()).expect("the logarithm fits in a byte");
        TableRef { base: 0, generation: 0, length_log2, members: 1 }
    }

    /// Picks a backend, and opens a flow to it if there is one.
    pub fn connect(&mut self, cpu: &Cpu, rules: Rules) -> Pick {
        let (picked, _) = pick(self, cpu, self.table(), rules, NOW);
        if picked.slot != NO_SLOT {
            self.backends[picked.slot as usize].flows += 1;
        }
        picked
    }
}

/// The shortest table.
pub const LENGTH: u32 = 1 << MIN_SCHEDULE_LOG2;
/// The tick of all picks.
pub const NOW: u32 = 1_000_000;

/// The rules of a policy without a limit.
pub fn rules(policy: Policy) -> Rules {
    Rules { policy: policy as u8, ..Rules::default() }
}

/// The pick if the policy picked this slot.
pub fn picked(slot: u32) -> Pick {
    Pick { how: How::Picked, slot }
}

impl Tables for Host {
    type Backend = usize;
    type Members = ();
    type Position = usize;

    fn entry(&self, entry: u32) -> Option<u32> {
        self.entries.get(entry as usize).copied()
    }

    fn backend(&self, slot: u32) -> Option<usize> {
        self.backends.get(slot as usize).map(|_| slot as usize)
    }

    fn state(&self, backend: usize) -> StateWord {
        let Backend { usable, is_ejected, .. } = self.backends[backend];
        StateWord { ejected: is_ejected.into(), ..StateWord::new(usable.into(), BackendState::Member) }
    }

    fn flows(&self, backend: usize) -> u32 {
        self.backends[backend].flows
    }

    fn errors(&self, backend: usize) -> RecentErrors {
        self.backends[backend].errors
    }

    fn ejection(&self, backend: usize) -> EjectionState {
        self.backends[backend].ejection
    }

    fn entries(&self, backend: usize) -> u32 {
        self.shares[backend]
    }

    fn members(&self, _: TableRef) -> Option<()> {
        self.listed.then_some(())
    }

    fn list(&self, (): ()) -> Option<(u32, u32, usize)> {
        let count = u32::try_from(self.members.len()).expect("the number of members fits in 32 bits");
        Some((count, count, 0))
    }

    fn position(&self, (): (), number: u32) -> Option<usize> {
        Some(number as usize)
    }

    fn member(&self, place: usize) -> (u32, usize) {
        (self.members[place], place + 1)
    }

    fn fallback(&self) -> u32 {
        self.fallback
    }
}

/// A CPU, which has only a cursor.
pub type Cpu = Cell<Cursor>;

/// A CPU whose cursor starts at this fraction of the table, in units of 2^-32.
pub fn cpu_at(start: u32) -> Cpu {
    Cell::new(Cursor { phase: 0, start })
}
