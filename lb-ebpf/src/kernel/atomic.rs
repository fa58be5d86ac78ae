//! The atomic instructions of the programs, in two sets.
//!
//! Linux 5.12 introduced atomic instructions that return a value; 5.10 rejects a program that
//! merely contains one. The programs are generic over the set, so they differ only in these few
//! functions.
//!
//! LLVM 22 emits a plain add for a relaxed fetching add and then returns the operand instead of the
//! old value, so use `Relaxed` only if the result is discarded.

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd};

use lb_common::abi::Cursor;

/// A set of atomic instructions.
pub trait Instructions {
    /// Whether instructions can return the value that they replace.
    const CAN_FETCH: bool;

    /// Advances the CPU's cursor by one and returns its previous position.
    ///
    /// # Safety
    /// `cursor` must point to this CPU's value of a per-CPU map.
    unsafe fn step(cursor: *mut Cursor) -> Cursor;

    /// Writes `new` to `word` if its value is `old`, and returns whether it did.
    ///
    /// # Safety
    /// `word` must point into a map value and be aligned.
    unsafe fn replace(word: *mut u64, old: u64, new: u64) -> bool;

    /// Like [`Instructions::replace`], for a word for which a lost update does little harm when two
    /// CPUs write at the same moment: without a compare-and-swap it is a plain store.
    ///
    /// # Safety
    /// `word` must point into a map value and be aligned.
    unsafe fn update(word: *mut u64, old: u64, new: u64) -> bool;
}

/// Fetching adds and compare-and-swap.
pub struct Linux5_12;

impl Instructions for Linux5_12 {
    const CAN_FETCH: bool = true;

    #[inline(always)]
    unsafe fn step(cursor: *mut Cursor) -> Cursor {
        // The program may be preempted by another connect on this CPU, hence an atomic add on a
        // per-CPU value. It adds to the phase alone, the low half of the pair: adding to the whole
        // pair would carry into the start every 2^32 connects, and move it by 2^-32 of the table.
        // SAFETY: the caller's pointer points to a live map value; the phase is its first, aligned
        // word.
        unsafe {
            let start = (&raw const (*cursor).start).read_volatile();
            let phase = atomic_xadd::<u32, u32, { AtomicOrdering::AcqRel }>(&raw mut (*cursor).phase, 1);
            Cursor { phase, start }
        }
    }

    #[inline(always)]
    unsafe fn replace(word: *mut u64, old: u64, new: u64) -> bool {
        // SAFETY: the caller's pointer points to an aligned word of a map value.
        unsafe {
            atomic_cxchg::<u64, { AtomicOrdering::AcqRel }, { AtomicOrdering::Acquire }>(word, old, new).1
        }
    }

    #[inline(always)]
    unsafe fn update(word: *mut u64, old: u64, new: u64) -> bool {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::replace(word, old, new) }
    }
}

/// Neither fetching adds nor compare-and-swap.
pub struct Linux5_10;

impl Instructions for Linux5_10 {
    const CAN_FETCH: bool = false;

    #[inline(always)]
    unsafe fn step(cursor: *mut Cursor) -> Cursor {
        // Kernel fact: before 5.12 a program runs with preemption off (`migrate_disable` is
        // `preempt_disable` there), so no other code can run in between on this CPU.
        // SAFETY: the caller's pointer points to a live map value.
        unsafe {
            let now = cursor.read_volatile();
            (&raw mut (*cursor).phase).write_volatile(now.phase.wrapping_add(1));
            now
        }
    }

    #[inline(always)]
    unsafe fn replace(_word: *mut u64, _old: u64, _new: u64) -> bool {
        // No bucket of the flow table can be claimed safely against another CPU, so none ever is:
        // every flow goes to the overflow table, whose insert and delete are atomic. That is exact
        // but more expensive, because a kernel hash replaces an array.
        false
    }

    #[inline(always)]
    unsafe fn update(word: *mut u64, _old: u64, new: u64) -> bool {
        // SAFETY: the caller's pointer points to an aligned word of a map value.
        unsafe { word.write_volatile(new) };
        true
    }
}

/// Adds to a counter to which other CPUs or a preempted run of this program may add at the same
/// time.
///
/// # Safety
/// `counter` must point into a map value and be aligned.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, amount: u64) {
    // If the amount is known to be 0, LLVM emits an atomic "or", which 5.10 lacks.
    if amount == 0 {
        return;
    }
    // SAFETY: the caller's pointer points to an aligned word of a map value.
    unsafe {
        atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counter, amount);
    }
}
