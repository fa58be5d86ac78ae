//! What the programs need of atomic instructions, in two sets.
//!
//! Linux 5.12 brought atomic instructions that return a value; 5.10 refuses a program that merely contains one. The
//! programs are generic over the set, so the difference is these few functions and nothing else.
//!
//! LLVM 22 emits a plain add for a relaxed fetching add and then returns the operand instead of the old value, so
//! `Relaxed` is for discarded results only.

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd};

use lb_common::abi::Cursor;

/// A set of atomic instructions.
pub trait Instructions {
    /// Whether an instruction may return what it replaces.
    const CAN_FETCH: bool;

    /// Takes the CPU's cursor one step on and returns where it stood.
    ///
    /// # Safety
    /// `cursor` points to this CPU's value of a per-CPU map.
    unsafe fn step(cursor: *mut Cursor) -> Cursor;

    /// Writes `new` to `word` if it holds `old`, and says whether it did.
    ///
    /// # Safety
    /// `word` points into a map value and is aligned.
    unsafe fn replace(word: *mut u64, old: u64, new: u64) -> bool;

    /// As [`Instructions::replace`], for a word where it does little harm if two CPUs write at the same moment and one of them
    /// is lost: without a compare-and-swap it is a store.
    ///
    /// # Safety
    /// `word` points into a map value and is aligned.
    unsafe fn update(word: *mut u64, old: u64, new: u64) -> bool;
}

/// Fetching adds and compare-and-swap.
pub struct Linux5_12;

impl Instructions for Linux5_12 {
    const CAN_FETCH: bool = true;

    #[inline(always)]
    unsafe fn step(cursor: *mut Cursor) -> Cursor {
        // The program may be preempted by another connect on this CPU, hence an atomic add on a per-CPU value. It adds
        // to the low half of the pair: a carry out of the phase would move the start by one 2^-32 of the table every
        // 2^32 connects, so the phase alone is added to.
        // SAFETY: the caller's pointer is to a live map value; the phase is its first, aligned word.
        unsafe {
            let start = (&raw const (*cursor).start).read_volatile();
            let phase = atomic_xadd::<u32, u32, { AtomicOrdering::AcqRel }>(&raw mut (*cursor).phase, 1);
            Cursor { phase, start }
        }
    }

    #[inline(always)]
    unsafe fn replace(word: *mut u64, old: u64, new: u64) -> bool {
        // SAFETY: the caller's pointer is to an aligned word of a map value.
        unsafe {
            atomic_cxchg::<u64, { AtomicOrdering::AcqRel }, { AtomicOrdering::Acquire }>(word, old, new).1
        }
    }

    #[inline(always)]
    unsafe fn update(word: *mut u64, old: u64, new: u64) -> bool {
        // SAFETY: the caller's.
        unsafe { Self::replace(word, old, new) }
    }
}

/// Neither fetching adds nor compare-and-swap.
pub struct Linux5_10;

impl Instructions for Linux5_10 {
    const CAN_FETCH: bool = false;

    #[inline(always)]
    unsafe fn step(cursor: *mut Cursor) -> Cursor {
        // Kernel fact: before 5.12 a program runs with preemption off (`migrate_disable` is `preempt_disable` there),
        // so nothing can step in between on this CPU.
        // SAFETY: the caller's pointer is to a live map value.
        unsafe {
            let now = cursor.read_volatile();
            (&raw mut (*cursor).phase).write_volatile(now.phase.wrapping_add(1));
            now
        }
    }

    #[inline(always)]
    unsafe fn replace(_word: *mut u64, _old: u64, _new: u64) -> bool {
        // No bucket of the flow table can be claimed safely against another CPU, so none ever is: every flow goes to
        // the overflow table, whose insert and delete are atomic. Exact, and dearer: a hash of the kernel's in place
        // of an array.
        false
    }

    #[inline(always)]
    unsafe fn update(word: *mut u64, _old: u64, new: u64) -> bool {
        // SAFETY: the caller's pointer is to an aligned word of a map value.
        unsafe { word.write_volatile(new) };
        true
    }
}

/// Adds to a counter that other CPUs or a preempted run of this program may be adding to.
///
/// # Safety
/// `counter` points into a map value and is aligned.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, amount: u64) {
    // Where the amount is known to be 0, LLVM makes an atomic "or" of it, which 5.10 has not.
    if amount == 0 {
        return;
    }
    // SAFETY: the caller's pointer is to an aligned word of a map value.
    unsafe {
        atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counter, amount);
    }
}
