//! The choice of a backend. The fast path is inlined in the hooks, because a function call would
//! take about ten nanoseconds. The slow path is a global function, which the verifier follows once,
//! for any arguments.

use lb_common::abi::{Backend, CpuService, NO_SLOT, Service, TableRef};
use lb_common::pick::{self, How, Pick, pick};

use super::tables::{KernelCursor, KernelTables, first_rules, rules_of};
use crate::kernel::atomic::Instructions;
use crate::kernel::global_function::global_function;
use crate::rows;

const BROKEN: Pick = Pick { how: How::Broken, slot: NO_SLOT };

/// Chooses a backend of a service from `table`, with this CPU's value of `CPU_SERVICES`, at the
/// tick `now`. Also returns the sample, and the backend's row of `BACKENDS`, or null if it must be
/// looked up.
#[inline(always)]
pub fn here<I: Instructions>(
    index: u32,
    service: *const Service,
    on_cpu: Option<*mut CpuService>,
    table: TableRef,
    policy: u8,
    now: u32,
) -> (Pick, u32, *const Backend) {
    let Some(on_cpu) = on_cpu else { return (BROKEN, 0, core::ptr::null()) };
    // SAFETY: this CPU's map value.
    let cursor = KernelCursor::<I>::new(unsafe { &raw mut (*on_cpu).cursor });
    let tables = KernelTables::<I>::new(index, service);
    let rules = first_rules(service, policy);
    let (pick, sample) = pick(&tables, &cursor, table, rules, now);
    (pick, sample, tables.picked.get())
}

/// The pick if a backend at the sample's positions in the schedule is not eligible or is ejected,
/// or if the table is invalid or missing.
#[inline(always)]
pub fn slow_path<I: Instructions>(index: u32, table: TableRef, sample: u32, now: u32) -> Pick {
    from_word(slow_word::<I>(index, table.to_word(), sample, now))
}

global_function! {
    fn slow_word(index: u32, table: u64, sample: u32, now: u32) -> u32 = choose_slowly,
    choose_slow_path, choose_slow_path_5_10;
}

#[inline(always)]
fn choose_slowly<I: Instructions>(index: u32, table: u64, sample: u32, now: u32) -> u32 {
    let pick = match rows::service(index) {
        Some(service) => {
            let tables = KernelTables::<I>::new(index, service);
            pick::slow_path(&tables, TableRef::from_word(table), rules_of(service), sample, now)
        }
        None => BROKEN,
    };
    to_word(pick)
}

const HOW_BIT: u32 = 16;

/// A pick in one word, which a global function can accept and return.
#[inline(always)]
pub fn to_word(pick: Pick) -> u32 {
    (pick.how as u32) << HOW_BIT | pick.slot & NO_SLOT
}

/// The pick in a word from [`to_word`].
#[inline(always)]
pub fn from_word(word: u32) -> Pick {
    const PICKED: u16 = How::Picked as u16;
    const TRIAL: u16 = How::Trial as u16;
    const OVERFLOWED: u16 = How::Overflowed as u16;
    const FALLBACK: u16 = How::Fallback as u16;
    const DIVERTED: u16 = How::Diverted as u16;
    const LIMITED: u16 = How::Limited as u16;
    const REFUSED: u16 = How::Refused as u16;
    let how = match (word >> HOW_BIT) as u16 {
        PICKED => How::Picked,
        TRIAL => How::Trial,
        OVERFLOWED => How::Overflowed,
        FALLBACK => How::Fallback,
        DIVERTED => How::Diverted,
        LIMITED => How::Limited,
        REFUSED => How::Refused,
        _ => How::Broken,
    };
    Pick { how, slot: word & NO_SLOT }
}
