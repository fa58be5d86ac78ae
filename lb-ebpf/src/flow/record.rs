//! Flow records: the backend to which each open socket was last sent. A socket has one record, from
//! the choice of the backend to the end of the flow.
//!
//! A record is in the flow table, at the socket's cookie modulo the table's length, or in the
//! overflow table if another socket uses that bucket. The program that removes a record, by one
//! compare-and-swap or one delete, counts the end of the flow, so no end is counted twice. No
//! function of this module makes a call fail: if there is no room for a record, the flow is
//! untracked.

use lb_common::abi::{Anomalies, Backend, Flow, FlowBucket, Phase};
use lb_common::ending::{self, Attempt, End, Ending};
use lb_common::load::without_bounds;

use crate::ejection::{self, Judges};
use crate::flow::tally::{self, TrafficTotals};
use crate::globals::{FLOW_MASK, FULL_ACCOUNTING};
use crate::kernel::atomic::{self, Instructions};
use crate::kernel::clock;
use crate::kernel::global_function::global_function;
use crate::maps::{ANOMALIES, FLOW_OVERFLOW, FLOWS, NO_FLOW};
use crate::rows;

/// `BPF_NOEXIST`.
pub const NEW: u64 = 1;

/// A reference to a socket's record. The record belongs to the socket until a program or the daemon
/// removes it.
#[derive(Clone, Copy)]
pub struct RecordRef {
    /// The bucket of the socket's cookie.
    bucket: *mut FlowBucket,
    flow: *mut Flow,
    /// Whether the flow is in the flow table at that bucket; if not, it is in the overflow table.
    is_in_table: bool,
}

impl RecordRef {
    #[inline(always)]
    pub fn flow(&self) -> Flow {
        // SAFETY: a live map value that belongs to the socket.
        unsafe { self.flow.read_volatile() }
    }

    #[inline(always)]
    pub fn slot(&self) -> u32 {
        // SAFETY: a live map value that belongs to the socket.
        unsafe { (&raw const (*self.flow).slot).read_volatile() }
    }

    #[inline(always)]
    pub fn phase(&self) -> u8 {
        // SAFETY: a live map value that belongs to the socket.
        unsafe { (&raw const (*self.flow).phase).read_volatile() }
    }

    /// The index of the service that the process dialled.
    #[inline(always)]
    pub fn service(&self) -> u32 {
        // SAFETY: a live map value that belongs to the socket.
        u32::from(unsafe { (&raw const (*self.flow).service).read_volatile() })
    }

    /// Why the backend was chosen, as [`Flow::why`].
    #[inline(always)]
    pub fn why(&self) -> u8 {
        // SAFETY: a live map value that belongs to the socket.
        unsafe { (&raw const (*self.flow).why).read_volatile() }
    }

    /// When the backend was chosen.
    #[inline(always)]
    pub fn start_ns(&self) -> u64 {
        // SAFETY: a live map value that belongs to the socket.
        unsafe { (&raw const (*self.flow).start_ns).read_volatile() }
    }

    /// Cookie of the flow's network namespace.
    #[inline(always)]
    pub fn namespace(&self) -> u64 {
        // SAFETY: a live map value that belongs to the socket.
        unsafe { (&raw const (*self.flow).namespace).read_volatile() }
    }

    /// The process that began the flow.
    #[inline(always)]
    pub fn process(&self) -> u32 {
        // SAFETY: a live map value that belongs to the socket.
        unsafe { (&raw const (*self.flow).process).read_volatile() }
    }

    #[inline(always)]
    pub fn set_phase(&self, phase: Phase) {
        // SAFETY: a live map value that belongs to the socket.
        unsafe { (&raw mut (*self.flow).phase).write_volatile(phase as u8) };
    }
}

/// The index of a cookie in the flow table.
#[inline(always)]
fn index(cookie: u64) -> u32 {
    cookie as u32 & FLOW_MASK.load()
}

#[inline(always)]
fn find(bucket: *mut FlowBucket, cookie: u64) -> Option<RecordRef> {
    // SAFETY: `bucket` is a live map value. Another socket may claim or free the bucket meanwhile,
    // so the loads are volatile. The stored cookie can become equal to `cookie` only by this
    // socket's own calls, which the socket lock serializes, or by the daemon, when the daemon
    // restores a claimed record.
    unsafe {
        if (&raw const (*bucket).cookie).read_volatile() == cookie {
            return Some(RecordRef { bucket, flow: &raw mut (*bucket).flow, is_in_table: true });
        }
        if FlowBucket::in_overflow((&raw const (*bucket).elsewhere).read_volatile()) != 0 {
            let flow = FLOW_OVERFLOW.get_ptr_mut(cookie)?;
            return Some(RecordRef { bucket, flow, is_in_table: false });
        }
    }
    None
}

#[inline(always)]
pub fn of(cookie: u64) -> Option<RecordRef> {
    // Cookie 0 marks a free bucket and belongs to no socket.
    if cookie == 0 {
        return None;
    }
    find(FLOWS.get_ptr_mut(index(cookie))?, cookie)
}

/// Whether any socket has the same bucket as this socket and an entry in `datagrams`. Without this
/// check, most sockets would require a hash lookup that finds nothing and takes as long as the rest
/// of the program.
#[inline(always)]
pub fn may_have_datagrams(cookie: u64) -> bool {
    // SAFETY: a live map value, to which other programs may add.
    FLOWS.get_ptr(index(cookie)).is_some_and(|bucket| unsafe {
        FlowBucket::in_datagrams((&raw const (*bucket).elsewhere).read_volatile()) != 0
    })
}

/// Adds `change` to the number of entries in `datagrams` that a socket's bucket counts: plus or
/// minus [`FlowBucket::IN_DATAGRAMS`].
#[inline(always)]
pub fn note_datagrams(cookie: u64, change: u64) {
    if let Some(bucket) = FLOWS.get_ptr_mut(index(cookie)) {
        // SAFETY: a live map value.
        unsafe { atomic::add(&raw mut (*bucket).elsewhere, change) };
    }
}

/// The memory for the record of a new flow.
pub struct Place {
    flow: *mut Flow,
    /// Whether the memory contains the socket's previous flow.
    is_taken: bool,
}

impl Place {
    /// The value for a socket that cannot have a record: the flow will be untracked.
    pub const NOWHERE: Self = Self { flow: core::ptr::null_mut(), is_taken: false };

    #[inline(always)]
    pub fn is_there(&self) -> bool {
        !self.flow.is_null()
    }

    /// Opens the flow to a backend. If the socket has a previous flow, replaces it and counts its
    /// end.
    #[inline(always)]
    pub fn open<I: Instructions>(self, backend: *const Backend, flow: impl Fn() -> Flow) {
        if self.flow.is_null() {
            return;
        }
        tally::opened(backend);
        let former = if self.is_taken { self.numbers_of_former() } else { (0, 0, 0) };
        // The record is written after the counters, except those of a previous flow, which is rare:
        // nothing has used this cache line lately, and every atomic instruction after this store
        // would wait for the store.
        // SAFETY: a live map value that belongs to the socket.
        unsafe { self.flow.write(flow()) };
        if self.is_taken {
            let (slot, word, start_ns) = former;
            end_former::<I>(slot, word, start_ns);
        }
    }

    /// The socket's previous flow: its slot, one word with the service, the reason for the choice
    /// and the phase, and its start. (A global function accepts only numbers.)
    #[inline(always)]
    fn numbers_of_former(&self) -> (u32, u32, u64) {
        // SAFETY: a live map value that belongs to the socket.
        let before = unsafe { self.flow.read_volatile() };
        let word = u32::from(before.service) | u32::from(before.why) << 16 | u32::from(before.phase) << 24;
        (before.slot, word, before.start_ns)
    }
}

/// Finds or claims the memory for the record of a socket that is being directed to a backend.
#[inline(always)]
pub fn begin<I: Instructions>(cookie: u64) -> Place {
    let Some(bucket) = FLOWS.get_ptr_mut(index(cookie)) else { return Place::NOWHERE };
    if let Some(record) = find(bucket, cookie) {
        return Place { flow: record.flow, is_taken: true };
    }
    // SAFETY: `bucket` is a live map value; the swap decides between sockets that claim it at the
    // same time.
    unsafe {
        if I::replace(&raw mut (*bucket).cookie, 0, cookie) {
            return Place { flow: &raw mut (*bucket).flow, is_taken: false };
        }
    }
    claim_overflow(cookie);
    Place { flow: FLOW_OVERFLOW.get_ptr_mut(cookie).unwrap_or(core::ptr::null_mut()), is_taken: false }
}

/// Creates an empty record in the overflow table, if there is room. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn claim_overflow(cookie: u64) -> u32 {
    let Some(bucket) = FLOWS.get_ptr_mut(index(cookie)) else { return 0 };
    let empty: &Flow = &NO_FLOW;
    if FLOW_OVERFLOW.insert(cookie, empty, NEW).is_ok() {
        // SAFETY: a live map value.
        unsafe { atomic::add(&raw mut (*bucket).elsewhere, FlowBucket::IN_OVERFLOW) };
    }
    0
}

global_function! {
    /// Counts the end of a socket's previous flow, with the numbers of
    /// [`Place::numbers_of_former`].
    fn end_former(slot: u32, word: u32, start_ns: u64) -> u32 = abandon_former, end_former_flow, end_former_flow_5_10;
}

#[inline(always)]
fn abandon_former<I: Instructions>(slot: u32, word: u32, start_ns: u64) -> u32 {
    abandon::<I>(&former(slot, word, start_ns));
    0
}

#[inline(always)]
fn former(slot: u32, word: u32, start_ns: u64) -> Flow {
    Flow {
        slot,
        start_ns,
        service: word as u16,
        why: (word >> 16) as u8,
        phase: (word >> 24) as u8,
        ..Flow::NONE
    }
}

/// Counts the end of a flow whose socket is directed to another destination.
#[inline(always)]
fn abandon<I: Instructions>(flow: &Flow) {
    ejection::abandoned::<I>(flow);
    tally::ended(flow.slot, flow.start_ns, ending_of_abandoned(flow.phase) as u32, TrafficTotals::NONE);
}

/// The ending of a flow whose socket is directed to another destination.
#[inline(always)]
fn ending_of_abandoned(phase: u8) -> Ending {
    if phase == Phase::Datagrams as u8 {
        Ending::Closed
    } else if phase == Phase::Chosen as u8 && FULL_ACCOUNTING.load() != 0 {
        // A flow whose SYN was sent has another phase, and ends when its connection is closed.
        Ending::NotSent
    } else {
        Ending::Unknown
    }
}

/// The ending of a connect that the application gave up.
#[inline(always)]
pub fn given_up(record: &RecordRef, reported_error: u32, retransmits: u32) -> Ending {
    ending_at(how_given_up(record.service(), record.start_ns(), reported_error, retransmits))
}

/// The ending of a flow whose socket has this error.
#[inline(always)]
pub fn of_error(error: u32, was_established: bool) -> Ending {
    ending_at(ending_of_error(error, u32::from(was_established)))
}

/// Returns `ending` as a value that is unknown to the verifier. If the verifier knew the ending, it
/// would follow the subsequent code once for each ending.
#[inline(always)]
pub fn opaque_to_verifier(ending: Ending, any: u64) -> Ending {
    ending_at(without_bounds(ending as u64, any) as u32)
}

/// The ending with a number that one of the global functions below returned.
#[inline(always)]
fn ending_at(number: u32) -> Ending {
    // SAFETY: the number is that of an ending.
    unsafe { core::mem::transmute::<u8, Ending>(number as u8) }
}

/// The body of [`given_up`], in a global function because it is a slow path. Returns the number of
/// an [`Ending`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn how_given_up(service: u32, start_ns: u64, reported_error: u32, retransmits: u32) -> u32 {
    let after = rows::unanswered_after(service);
    let is_due = after != 0 && clock::is_past(start_ns, after);
    Attempt { soft_error: reported_error, retransmits, is_due }.ending() as u32
}

/// The body of [`of_error`], in a global function like [`how_given_up`]. Returns the number of an
/// [`Ending`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn ending_of_error(error: u32, was_established: u32) -> u32 {
    ending::of_error(error, was_established != 0) as u32
}

/// Ends the flow of a socket, if there is one, because the socket is no longer directed to a
/// backend.
#[inline(always)]
pub fn leave<I: Instructions>(cookie: u64) {
    if of(cookie).is_some() {
        end_if_any::<I>(cookie);
    }
}

global_function! {
    /// The body of [`leave`], in a global function because it is a slow path and the hooks of
    /// connect need their stack for the fast path. Returns 0.
    fn end_if_any(cookie: u64) -> u32 = end_abandoned, leave_backend, leave_backend_5_10;
}

#[inline(always)]
fn end_abandoned<I: Instructions>(cookie: u64) -> u32 {
    let Some(record) = of(cookie) else { return 0 };
    let flow = record.flow();
    if take_out::<I>(cookie, record) {
        abandon::<I>(&flow);
    }
    0
}

/// Removes a socket's record. The caller must read the data of the flow before this call, because
/// the bucket may be reused afterwards. Returns whether the record still existed; the caller must
/// count the end of the flow only if the result is true.
#[inline(always)]
fn take_out<I: Instructions>(cookie: u64, record: RecordRef) -> bool {
    // SAFETY: `record` points to live map values.
    let taken = unsafe {
        if record.is_in_table {
            I::replace(&raw mut (*record.bucket).cookie, cookie, 0)
        } else {
            leave_overflow(cookie) != 0
        }
    };
    if !taken {
        anomaly(|anomalies| &raw mut anomalies.ended_twice);
    }
    taken
}

/// Removes a socket's record from the overflow table. Returns 1 if it was there, else 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn leave_overflow(cookie: u64) -> u32 {
    let Some(bucket) = FLOWS.get_ptr_mut(index(cookie)) else { return 0 };
    if !is_removed(|| FLOW_OVERFLOW.remove(cookie)) {
        return 0;
    }
    // SAFETY: a live map value.
    unsafe { atomic::add(&raw mut (*bucket).elsewhere, FlowBucket::IN_OVERFLOW.wrapping_neg()) };
    1
}

/// Removes a socket's record and counts the end of its flow. The end is first reported as evidence,
/// because the slot may get another backend when the active count decreases. `is_ordinary` must
/// return 1 if the socket requests no special route (see `kernel::socket::is_ordinary`); it is
/// called only if its result matters. The word of the end is made unknown to the verifier. If the
/// verifier knew the word, it would follow the subsequent code once for each possible end.
#[inline(always)]
pub fn end<I: Instructions>(
    cookie: u64,
    record: RecordRef,
    end: End,
    retransmits: u32,
    judges: Judges,
    is_ordinary: impl Fn() -> u32,
) {
    let word = without_bounds(u64::from(end.to_word()), cookie) as u32;
    let end = End::from_word(word, end.bytes_received, end.bytes_sent);
    if end.is_plain() ^ 1 | ejection::trial_bit(record.why()) != 0 {
        let (slot, service) = (record.slot(), record.service());
        ejection::report_end::<I>(cookie, slot, service, end, judges, is_ordinary());
    }
    let (slot, service, start_ns) = (record.slot(), record.service(), record.start_ns());
    if take_out::<I>(cookie, record) {
        if end.is_answered() != 0 {
            ejection::answered(service, slot);
        }
        let totals =
            TrafficTotals { bytes_received: end.bytes_received, bytes_sent: end.bytes_sent, retransmits };
        tally::ended(slot, start_ns, end.number(), totals);
    }
}

/// Removes an entry from a hash with `remove`, and returns whether the entry was there. Kernel
/// fact: from Linux 5.11 to 6.0 a hash rejects a change with EBUSY while this CPU is executing
/// another change of the same bucket, which takes only an instant.
#[inline(always)]
pub fn is_removed(remove: impl Fn() -> Result<(), i32>) -> bool {
    const EBUSY: i32 = -16;
    // Bound: four attempts.
    for _ in 0..4 {
        match remove() {
            Ok(()) => return true,
            Err(EBUSY) => {}
            Err(_) => return false,
        }
    }
    false
}

/// Counts an event that should not happen.
#[inline(always)]
pub fn anomaly(field: impl FnOnce(&mut Anomalies) -> *mut u64) {
    if let Some(anomalies) = ANOMALIES.get_ptr_mut(0) {
        // SAFETY: this CPU's map value; the closure only takes a field's address.
        unsafe { atomic::add(field(&mut *anomalies), 1) };
    }
}
