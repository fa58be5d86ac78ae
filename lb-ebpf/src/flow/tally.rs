//! Counters: the outcome of each call, and the events of the flows of each slot's backend.
//!
//! When a flow ends, all its counters are updated before the active count decreases, because after
//! the decrease the slot may get another backend with its own counters.

use core::mem::offset_of;

use lb_common::abi::{
    Backend, CpuService, ENDING_ROWS, Histogram, Outcomes, RecentErrors, SlotCounters, TIME_BUCKETS, bucket,
};
use lb_common::load::{self, HalfLife, without_bounds};
use lb_common::pick::How;

use crate::kernel::atomic;
use crate::kernel::clock;
use crate::maps::{BACKENDS, COUNTS, CPU_SERVICES, SERVICES};

/// The traffic of a connection.
#[derive(Clone, Copy)]
pub struct TrafficTotals {
    pub bytes_received: u64,
    pub bytes_sent: u64,
    pub retransmits: u32,
}

impl TrafficTotals {
    /// No traffic, or unknown traffic.
    pub const NONE: Self = Self { bytes_received: 0, bytes_sent: 0, retransmits: 0 };
}

/// Counts the outcome of a call to the service with this index, or of a call to another address
/// ([`NOT_A_SERVICE`](lb_common::abi::NOT_A_SERVICE)).
#[inline(always)]
pub fn outcome(index: u32, field: impl FnOnce(&mut Outcomes) -> *mut u64) {
    if let Some(service) = CPU_SERVICES.get_ptr_mut(index) {
        // SAFETY: this CPU's map value; the closure only takes a field's address.
        unsafe { atomic::add(field(&mut (*service).outcomes), 1) };
    }
}

/// Counts a call that is sent to a backend, by how the backend was chosen.
#[inline(always)]
pub fn sent(service: *mut CpuService, how: How) {
    /// The position of each outcome's field in [`Outcomes`], in the four bits that begin at four
    /// times the number of [`How`].
    const FIELDS: u64 = field(How::Picked, offset_of!(Outcomes, forwarded))
        | field(How::Diverted, offset_of!(Outcomes, forwarded))
        | field(How::Fallback, offset_of!(Outcomes, fallback))
        | field(How::Overflowed, offset_of!(Outcomes, overflowed))
        | field(How::Trial, offset_of!(Outcomes, trial));
    const fn field(how: How, offset: usize) -> u64 {
        assert!(offset / 8 < 8);
        (offset as u64 / 8) << (4 * how as u32)
    }
    // SAFETY: this CPU's map value, which has more than eight outcomes.
    unsafe {
        // The position is unknown to the verifier, because without CAP_PERFMON the verifier rejects
        // an offset that differs by path.
        let any = u64::from((&raw const (*service).cursor.phase).read_volatile());
        let position = without_bounds(FIELDS >> (4 * how as u32), any) & 7;
        atomic::add((&raw mut (*service).outcomes).cast::<u64>().add(position as usize), 1);
    }
}

/// Increments one field of a slot's counters on this CPU.
#[inline(always)]
pub fn count(slot: u32, field: impl FnOnce(&mut SlotCounters) -> *mut u64) {
    if let Some(counts) = COUNTS.get_ptr_mut(slot) {
        // SAFETY: this CPU's map value; the closure only takes a field's address.
        unsafe { atomic::add(field(&mut *counts), 1) };
    }
}

/// Counts a flow that is sent to a backend.
#[inline(always)]
pub fn chosen(backend: *const Backend) {
    // SAFETY: a live map value.
    unsafe { atomic::increment((&raw const (*backend).chosen).cast_mut()) };
}

/// Returns `number` as a value that is unknown to the verifier: without CAP_PERFMON the verifier
/// rejects arithmetic with offsets that differ by path. In the map, `chosen` is always 0, but the
/// verifier assumes that a value from a map can be any number.
///
/// # Safety
/// `counts` must be a live map value.
#[inline(always)]
unsafe fn opaque_to_verifier(counts: *const SlotCounters, number: usize) -> usize {
    // SAFETY: guaranteed by the caller.
    let nothing = unsafe { (&raw const (*counts).chosen).read_volatile() };
    (number as u64).wrapping_add(nothing) as usize
}

/// Counts a flow that was established by the answer to its first SYN, and the round-trip time of
/// its handshake, which is also the time of its connect.
#[inline(always)]
pub fn established_at_once(slot: u32, rtt: u32) {
    if let Some(counts) = COUNTS.get_ptr_mut(slot) {
        // SAFETY: this CPU's map value.
        unsafe { add_time(counts, &raw mut (*counts).rtt, rtt) };
    }
}

/// Counts a flow that was established after a retransmission of its SYN, and the time of its
/// connect.
#[inline(always)]
pub fn established_late(slot: u32, connect: u32) {
    if let Some(counts) = COUNTS.get_ptr_mut(slot) {
        // SAFETY: this CPU's map value.
        unsafe {
            atomic::add(&raw mut (*counts).established, 1);
            add_time(counts, &raw mut (*counts).connect, connect);
        }
    }
}

/// Adds a time to a histogram of `counts`.
///
/// # Safety
/// `counts` must be a live map value, and `times` a part of it.
#[inline(always)]
unsafe fn add_time(counts: *const SlotCounters, times: *mut Histogram, us: u32) {
    // SAFETY: guaranteed by the caller; within the array by the comparison.
    unsafe {
        let bucket = opaque_to_verifier(counts, bucket(us));
        if bucket < TIME_BUCKETS {
            atomic::add((&raw mut (*times).buckets).cast::<u64>().add(bucket), 1);
            atomic::add(&raw mut (*times).sum_us, u64::from(us));
        }
    }
}

/// Adds one to the active flows of a backend.
#[inline(always)]
pub fn opened(backend: *const Backend) {
    // SAFETY: a live map value.
    unsafe { atomic::add((&raw const (*backend).flows).cast_mut(), 1) };
}

/// Subtracts one from the active flows of the backend in a slot.
#[inline(always)]
fn closed(slot: u32) {
    if let Some(backend) = BACKENDS.get_ptr_mut(slot) {
        // SAFETY: a live map value. Adding -1 in two's complement subtracts one.
        unsafe { atomic::add(&raw mut (*backend).flows, u64::MAX) };
    }
}

/// Counts the end of a flow under the number of its ending, and subtracts the flow from the
/// backend's active count. Before this call, the caller must remove or overwrite the flow's record.
#[inline(always)]
pub fn ended(slot: u32, start_ns: u64, ending: u32, totals: TrafficTotals) {
    let now = clock::now_ns();
    if let Some(counts) = COUNTS.get_ptr_mut(slot) {
        // SAFETY: this CPU's map value; the index is masked to the array.
        unsafe {
            let row = opaque_to_verifier(counts, ending as usize) & (ENDING_ROWS - 1);
            atomic::add((&raw mut (*counts).endings).cast::<u64>().add(row), 1);
            atomic::add(&raw mut (*counts).lifetime_ns, now.wrapping_sub(start_ns));
            atomic::add(&raw mut (*counts).bytes_received, totals.bytes_received);
            atomic::add(&raw mut (*counts).bytes_sent, totals.bytes_sent);
            atomic::add(&raw mut (*counts).retransmits, u64::from(totals.retransmits));
        }
    }
    closed(slot);
}

/// Adds a recent error to a backend. This is a slow path, and therefore a global function. Returns
/// 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn remember_error(slot: u32, service: u32, now: u32) -> u32 {
    let Some(backend) = BACKENDS.get_ptr_mut(slot) else { return 0 };
    // The service is looked up last, so that no call follows and its pointer need not be saved on
    // the stack.
    let Some(service) = SERVICES.get_ptr(service) else { return 0 };
    // SAFETY: live map values; the daemon may change the fields at any time, and the errors are one
    // word.
    unsafe {
        let half_life = (&raw const (*service).rules.error_half_life).read_volatile();
        if half_life == 0 {
            return 0;
        }
        let peak = load::peak_of(
            (&raw const (*service).rules.policy).read_volatile(),
            (&raw const (*service).peak_flows).read_volatile(),
            (&raw const (*backend).entries).read_volatile(),
            (&raw const (*service).table.length_log2).read_volatile(),
        );
        // The low half of the number is enough: no backend has 2^32 flows.
        let flows = (&raw const (*backend).flows).cast::<u32>().read_volatile();
        let word = (&raw mut (*backend).errors).cast::<u64>();
        let before = RecentErrors::from_word(word.read_volatile());
        word.write_volatile(load::with_another(before, flows, peak, now, HalfLife::new(half_life)).to_word());
    }
    0
}
