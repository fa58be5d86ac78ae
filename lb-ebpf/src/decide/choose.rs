//! The choice of a backend: inlined in the hooks of connect; for those of sendmsg, whose programs are long, a global
//! function, which the verifier follows once, for any arguments.

use lb_common::abi::{NO_SLOT, Service, TableRef};
use lb_common::pick::{How, Pick, pick};

use super::tables::{KernelCursor, KernelTables, rules};
use crate::kernel::atomic::{Instructions, Linux5_10, Linux5_12};
use crate::maps::CURSORS;
use crate::rows;

const BROKEN: Pick = Pick { how: How::Broken, slot: NO_SLOT };

/// Chooses a backend of a service from one of its tables, at a tick. Returns the sample as well.
#[inline(always)]
pub fn here<I: Instructions>(
    index: u32,
    service: *const Service,
    table: TableRef,
    policy: u8,
    now: u32,
) -> (Pick, u32) {
    let Some(cursor) = CURSORS.get_ptr_mut(index) else { return (BROKEN, 0) };
    let tables = KernelTables::<I>::new(index, service);
    pick(&tables, &KernelCursor::<I>::new(cursor), table, rules(service, policy), now)
}

/// As [`here`], by a global function.
#[inline(always)]
pub fn by_call<I: Instructions>(index: u32, table: TableRef, policy: u8, now: u32) -> (Pick, u32) {
    let (table, policy) = (table.to_word(), u32::from(policy));
    // Known when this is compiled.
    let word = if I::CAN_FETCH {
        choose_backend(index, table, policy, now)
    } else {
        choose_backend_5_10(index, table, policy, now)
    };
    from_word(word)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn choose_backend(index: u32, table: u64, policy: u32, now: u32) -> u64 {
    as_word::<Linux5_12>(index, table, policy, now)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn choose_backend_5_10(index: u32, table: u64, policy: u32, now: u32) -> u64 {
    as_word::<Linux5_10>(index, table, policy, now)
}

const HOW_BIT: u32 = 16;
const SAMPLE_BIT: u32 = 32;

/// A pick and its sample in one word, which is what a function can return.
#[inline(always)]
fn as_word<I: Instructions>(index: u32, table: u64, policy: u32, now: u32) -> u64 {
    let (pick, sample) = match rows::service(index) {
        Some(service) => here::<I>(index, service, TableRef::from_word(table), policy as u8, now),
        None => (BROKEN, 0),
    };
    u64::from(sample) << SAMPLE_BIT | (pick.how as u64) << HOW_BIT | u64::from(pick.slot & NO_SLOT)
}

#[inline(always)]
fn from_word(word: u64) -> (Pick, u32) {
    const PICKED: u16 = How::Picked as u16;
    const TRIAL: u16 = How::Trial as u16;
    const OVERFLOWED: u16 = How::Overflowed as u16;
    const FALLBACK: u16 = How::Fallback as u16;
    const LIMITED: u16 = How::Limited as u16;
    const REFUSED: u16 = How::Refused as u16;
    let how = match (word >> HOW_BIT) as u16 {
        PICKED => How::Picked,
        TRIAL => How::Trial,
        OVERFLOWED => How::Overflowed,
        FALLBACK => How::Fallback,
        LIMITED => How::Limited,
        REFUSED => How::Refused,
        _ => How::Broken,
    };
    (Pick { how, slot: word as u32 & NO_SLOT }, (word >> SAMPLE_BIT) as u32)
}
