//! Decides which operations fail: none, a certain one, all from a certain one on, or a random part
//! with a fixed seed.

use std::io;
use std::sync::{Mutex, PoisonError};

/// Decides which operations fail. Each operation that may fail is one step.
#[derive(Debug, Default)]
pub struct FaultInjection {
    state: Mutex<FaultInjectionState>,
}

#[derive(Debug, Default)]
struct FaultInjectionState {
    steps: u64,
    failed: u64,
    plan: FaultPlan,
    /// Whether operations neither fail nor count.
    is_paused: bool,
}

#[derive(Clone, Copy, Debug, Default)]
enum FaultPlan {
    #[default]
    Never,
    At(u64),
    From(u64),
    Some {
        per_mille: u64,
        state: u64,
    },
}

impl FaultInjection {
    /// Makes no further operation fail.
    pub fn stop(&self) {
        self.change(|state| state.plan = FaultPlan::Never);
    }

    /// Makes exactly one operation fail, after `others` operations that succeed.
    pub fn fail_after(&self, others: u64) {
        self.change(|state| state.plan = FaultPlan::At(state.steps + others));
    }

    /// Makes all operations fail after `others` operations that succeed, as if the calling process
    /// had been killed.
    pub fn fail_from(&self, others: u64) {
        self.change(|state| state.plan = FaultPlan::From(state.steps + others));
    }

    /// Makes `per_mille` of a thousand operations fail; the seed determines which ones.
    pub fn fail_some(&self, per_mille: u64, seed: u64) {
        self.change(|state| state.plan = FaultPlan::Some { per_mille, state: seed });
    }

    /// The number of operations so far that could have failed.
    pub fn steps(&self) -> u64 {
        self.change(|state| state.steps)
    }

    /// The number of operations so far that have failed.
    pub fn failed(&self) -> u64 {
        self.change(|state| state.failed)
    }

    /// Calls `act`, whose operations neither fail nor count as steps.
    pub fn paused<T>(&self, act: impl FnOnce() -> T) -> T {
        self.change(|state| state.is_paused = true);
        let result = act();
        self.change(|state| state.is_paused = false);
        result
    }

    /// Counts one step, and decides whether it fails.
    ///
    /// # Errors
    /// ENOMEM, if this operation must fail.
    pub(crate) fn step(&self) -> io::Result<()> {
        self.change(|state| {
            if state.is_paused {
                return Ok(());
            }
            let fails = match &mut state.plan {
                FaultPlan::Never => false,
                FaultPlan::At(step) => *step == state.steps,
                FaultPlan::From(step) => *step <= state.steps,
                FaultPlan::Some { per_mille, state } => random(state) % 1000 < *per_mille,
            };
            state.steps += 1;
            state.failed += u64::from(fails);
            if fails { Err(io::Error::from_raw_os_error(libc::ENOMEM)) } else { Ok(()) }
        })
    }

    fn change<T>(&self, change: impl FnOnce(&mut FaultInjectionState) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The next number of the generator "SplitMix64" of Steele, Lea and Flood.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
