//! The atomic instructions of the programs, in two sets.
//!
//! Linux 5.12 introduced atomic instructions that return a value. Linux 5.10 rejects a program that
//! contains such an instruction, even if it is never executed. The programs are generic over the
//! set of instructions, so the two versions of a program differ only in these functions.
//!
//! For a relaxed fetching add, LLVM 22 emits an add that returns nothing, and then uses the operand
//! in place of the old value. So use `Relaxed` only if the result is discarded.

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd};

use lb_common::abi::Cursor;
use lb_common::load::in_one_register;

/// A set of atomic instructions.
pub trait Instructions {
    /// Whether instructions can return the value that they replace.
    const CAN_FETCH: bool;

    /// Advances the CPU's cursor by one and returns its previous position.
    ///
    /// # Safety
    /// `cursor` must point to this CPU's value of a per-CPU map.
    unsafe fn step(cursor: *mut Cursor) -> Cursor;

    /// Writes `new` to `word` if the value of `word` is `old`. Returns whether `new` was written.
    ///
    /// # Safety
    /// `word` must point into a map value and be aligned.
    unsafe fn replace(word: *mut u64, old: u64, new: u64) -> bool;

    /// Like [`Instructions::replace`], but a plain store if the kernel has no compare-and-swap. Use
    /// this method only for words for which the loss of one of two simultaneous updates is
    /// acceptable.
    ///
    /// # Safety
    /// `word` must point into a map value and be aligned.
    unsafe fn update(word: *mut u64, old: u64, new: u64) -> bool;
}

/// The set of instructions with fetching adds and compare-and-swap.
pub struct Linux5_12;

impl Instructions for Linux5_12 {
    const CAN_FETCH: bool = true;

    #[inline(always)]
    unsafe fn step(cursor: *mut Cursor) -> Cursor {
        // Another connect on this CPU may preempt the program, so the add is atomic although the
        // value is per CPU. It adds only to the phase, which is the low half of the pair: an add to
        // the whole pair would carry into the start every 2^32 connects, and move the start by
        // 2^-32 of the table.
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
            let (before, _) =
                atomic_cxchg::<u64, { AtomicOrdering::AcqRel }, { AtomicOrdering::Acquire }>(word, old, new);
            // LLVM replaces a comparison of the result with the flag that the instruction returns,
            // makes a number of this flag, and then compares the number.
            in_one_register(before) == old
        }
    }

    #[inline(always)]
    unsafe fn update(word: *mut u64, old: u64, new: u64) -> bool {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::replace(word, old, new) }
    }
}

/// The set of instructions without fetching adds and without compare-and-swap.
pub struct Linux5_10;

impl Instructions for Linux5_10 {
    const CAN_FETCH: bool = false;

    #[inline(always)]
    unsafe fn step(cursor: *mut Cursor) -> Cursor {
        // Kernel fact: before 5.12 a program runs with preemption off (`migrate_disable` is
        // `preempt_disable` there), so no other code can run on this CPU between the load and the
        // store.
        // SAFETY: the caller's pointer points to a live map value.
        unsafe {
            let now = cursor.read_volatile();
            (&raw mut (*cursor).phase).write_volatile(now.phase.wrapping_add(1));
            now
        }
    }

    #[inline(always)]
    unsafe fn replace(_word: *mut u64, _old: u64, _new: u64) -> bool {
        // Without a compare-and-swap, no program can safely claim a bucket of the flow table, so
        // this method always fails: every record is in the overflow table, where insert and delete
        // are atomic. The overflow table is slower, because it is a kernel hash and not an array.
        false
    }

    #[inline(always)]
    unsafe fn update(word: *mut u64, _old: u64, new: u64) -> bool {
        // SAFETY: the caller's pointer points to an aligned word of a map value.
        unsafe { word.write_volatile(new) };
        true
    }
}

/// Like [`add`], adds 1 to a counter of 32 bits.
///
/// # Safety
/// `counter` must point into a map value and be aligned.
#[inline(always)]
pub unsafe fn increment(counter: *mut u32) {
    // SAFETY: the caller's pointer points to an aligned word of a map value.
    unsafe {
        atomic_xadd::<u32, u32, { AtomicOrdering::Relaxed }>(counter, 1);
    }
}

/// Adds to a counter to which other CPUs, or a run of this program that this run has preempted, may
/// add at the same time.
///
/// # Safety
/// `counter` must point into a map value and be aligned.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, amount: u64) {
    // Many amounts are 0, and an atomic instruction takes longer than the comparison. And for an
    // amount that the compiler knows to be 0, LLVM would emit an atomic "or", which Linux 5.10
    // lacks.
    if amount == 0 {
        return;
    }
    // SAFETY: the caller's pointer points to an aligned word of a map value.
    unsafe {
        atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counter, amount);
    }
}
