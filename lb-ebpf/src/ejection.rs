//! Ejection: the programs store the results of flows as evidence about their backends, eject
//! failing backends, and use one connect at a time to test whether a backend works again.
//! `lb_common::ejection` contains the decisions and the steps. This file implements their access to
//! the maps, and the global functions into which the steps are split for the verifier.
//!
//! Ejection works without the daemon. Linux before 5.12 has no compare-and-swap: if two CPUs judge
//! the same backend at the same moment on such a kernel, a failure may be lost, or two trials may
//! begin.

use core::marker::PhantomData;

use lb_common::abi::{
    Backend, EjectionRules, EjectionState, Flow, NO_MEMBERS, NO_SLOT, NextTrial, Phase, Reason, Service,
    StateWord,
};
use lb_common::ejection::steps::{self, Counted, EjectionStore, Unjudged};
use lb_common::ejection::{Event, Evidence, FailureSource, SendFailures};
use lb_common::ending::End;
use lb_common::load::is_not_zero;
use lb_common::pick::{self, Survey, Tables as _};
use lb_common::ticks::tick;

use crate::decide::tables::{KernelTables, cursor_number, table_of};
use crate::flow::{record, tally};
use crate::kernel::atomic::{Instructions, Linux5_10};
use crate::kernel::clock;
use crate::kernel::global_function::global_function;
use crate::maps::{BACKENDS, SERVICES};
use crate::rows;

// The results of a judgement, each of which is the next action of the caller. (The judgement does
// not call this action itself, because functions that call each other share 512 bytes of stack.)
/// Nothing remains to be done.
const DONE: u32 = 0;
/// Judge again, because another CPU changed the ejection word first.
const AGAIN: u32 = 1;
/// Judge again, after a survey of whether one more backend may be ejected.
const WANTS_ROOM: u32 = 2;
/// Schedule the next trial. The result is this number plus the number of an [`Event`].
const SCHEDULE: u32 = 3;

// Whether one more backend may be ejected.
const UNKNOWN: u32 = 0;
const ROOM: u32 = 1;
const NO_ROOM: u32 = 2;

// Bits that are added to the word of a flow's [`End`], above the bits that the end itself uses.
/// The flow was established and has not ended.
const ESTABLISHED: u32 = 1 << 16;
/// The evidence of the flow may count for or against the backend.
const COUNTS: u32 = 1 << 17;
/// The flow may change the backend's ejection word. Without this bit the flow can only count as
/// load.
const JUDGES: u32 = 1 << 18;

/// Reports that the flow of a socket was established. `reaches_backend` must return 1 if the other
/// end of the connection is the backend; it is called only if its result matters.
#[inline(always)]
pub fn report_established<I: Instructions>(
    cookie: u64,
    slot: u32,
    service: u32,
    why: u8,
    reaches_backend: impl Fn() -> u32,
) {
    // For most backends nothing changes, because their ejection words are zero. A single load
    // detects this case.
    let Some(backend) = BACKENDS.get_ptr(slot) else { return };
    if Evidence::established(is_trial(why)).matters(load(backend)) {
        let word = ESTABLISHED | JUDGES | (reaches_backend() * COUNTS);
        report::<I>(slot, service, evidence_of(cookie, word, 0, 0));
    }
}

/// Reports how the flow of a socket ended. The socket must still have its record. The end may count
/// as load, and it is evidence if `judges` includes it. `is_ordinary` is 1 if the socket requests
/// no special route; if it is 0, a failure is no evidence.
#[inline(always)]
pub fn report_end<I: Instructions>(
    cookie: u64,
    slot: u32,
    service: u32,
    end: End,
    judges: Judges,
    is_ordinary: u32,
) {
    let evidence = evidence_of_end(cookie, end, judges, is_ordinary);
    match judges {
        Judges::Nothing => {}
        Judges::All => report::<I>(slot, service, evidence),
        Judges::SendFailures if evidence == 0 => {}
        Judges::SendFailures => {
            judge_send_failure::<I>(slot, service, evidence);
        }
    }
}

/// The evidence of a flow's end as a word; 0 if there is none. If the end counts as load of the
/// backend, this function adds it to the backend's recent errors. The arguments are those of
/// [`report_end`], which also reports the evidence.
#[inline(always)]
pub fn evidence_of_end(cookie: u64, end: End, judges: Judges, is_ordinary: u32) -> u32 {
    // `judges` depends only on constants that the verifier knows, so the verifier skips the branch
    // that is not taken.
    let judge = if matches!(judges, Judges::Nothing) { 0 } else { JUDGES };
    let word = end.to_word() | (is_ordinary * COUNTS) | judge;
    evidence_of(cookie, word, end.bytes_received, end.bytes_sent)
}

/// The ends of flows that a program uses as evidence about backends.
#[derive(Clone, Copy)]
pub enum Judges {
    /// None: ends can only count as load.
    Nothing,
    /// Only the ends of flows whose SYN could not be sent.
    SendFailures,
    /// All ends.
    All,
}

/// Whether a flow is a trial, according to [`Flow::why`].
#[inline(always)]
pub fn is_trial(why: u8) -> bool {
    trial_bit(why) != 0
}

/// 1 if a flow is a trial, according to [`Flow::why`], else 0. The result is computed without a
/// branch.
#[inline(always)]
pub fn trial_bit(why: u8) -> u32 {
    const { assert!(Reason::Trial as u32 == 3 && (Reason::Diverted as u32) < 7) };
    let reason = u32::from(why) >> 4;
    reason & (reason >> 1) & 1
}

/// Reports that a socket is directed to another destination while its flow is open. This is no
/// evidence about the backend; but if the flow was a trial, another connect must become the trial.
#[inline(always)]
pub fn abandoned<I: Instructions>(flow: &Flow) {
    if is_trial(flow.why) && flow.phase != Phase::Established as u8 {
        pass_on::<I>(flow.slot);
    }
}

global_function! {
    fn pass_on(slot: u32) -> u32 = give_trial_up, pass_trial_on, pass_trial_on_5_10;
}

/// Judges the backend in a slot by evidence, and schedules the next trial if necessary. `evidence`
/// is the word of an [`Evidence`]; 0 if there is none.
#[inline(always)]
pub fn report<I: Instructions>(slot: u32, service: u32, evidence: u32) {
    if evidence == 0 {
        return;
    }
    let left = judge_with_retries::<I>(slot, service, evidence);
    // The trial is scheduled here and not in the called function, because functions that call each
    // other share 512 bytes of stack.
    if left >= SCHEDULE {
        schedule_trial(service, left - SCHEDULE, tick(clock::now_ns()));
    }
}

global_function! {
    fn judge_with_retries(slot: u32, service: u32, evidence: u32) -> u32 = retry, take_evidence, take_evidence_5_10;
}

global_function! {
    fn judge_send_failure(slot: u32, service: u32, evidence: u32) -> u32 = judge_by_samples,
    take_send_failure, take_send_failure_5_10;
}

global_function! {
    fn judge_once(slot: u32, service: u32, evidence: u32, room: u32, now: u32) -> u32 = judge,
    judge_backend, judge_backend_5_10;
}

/// Judges the backend, and retries if another CPU changed the ejection word first. Returns [`DONE`]
/// or one of the numbers after it.
#[inline(always)]
fn retry<I: Instructions>(slot: u32, service: u32, evidence: u32) -> u32 {
    let now = tick(clock::now_ns());
    let attempt = |(left, room)| match left {
        AGAIN | WANTS_ROOM => {
            let room = if left == WANTS_ROOM { room_for(service, now) } else { room };
            (judge_once::<I>(slot, service, evidence, room, now), room)
        }
        _ => (left, room),
    };
    // Three attempts. They are not in a loop, because without CAP_PERFMON the verifier cannot prove
    // that a loop with a call in it ends.
    let (left, _) = attempt(attempt(attempt((AGAIN, UNKNOWN))));
    left
}

/// Like [`retry`], but with less code for the verifier to follow: it examines some scattered
/// entries, and not all members, to find whether one more backend may be ejected. Returns 0.
#[inline(always)]
fn judge_by_samples<I: Instructions>(slot: u32, service: u32, evidence: u32) -> u32 {
    let now = tick(clock::now_ns());
    let attempt = |room| judge_once::<I>(slot, service, evidence, room, now);
    let mut left = attempt(UNKNOWN);
    if left == WANTS_ROOM {
        left = attempt(if other_entry(service, slot, now) != NO_SLOT { ROOM } else { NO_ROOM });
    }
    if left >= SCHEDULE {
        name_for_trial(service, slot, now);
    }
    0
}

#[inline(always)]
fn room_for(index: u32, now: u32) -> u32 {
    if Survey::from_word(survey_service(index, now)).has_room() { ROOM } else { NO_ROOM }
}

/// Records that the kernel is about to send a SYN of a flow, so it has found a route and a port.
/// This clears the stored send failures.
#[inline(always)]
pub fn sent(service: u32) {
    let Some(service) = SERVICES.get_ptr_mut(service) else { return };
    // SAFETY: a live map value; while the service is configured, only the programs write these
    // fields.
    unsafe {
        if (&raw const (*service).awaits_syn).read_volatile() != 0 {
            (&raw mut (*service).send_failures).write_volatile(SendFailures::NONE.0);
            (&raw mut (*service).awaits_syn).write_volatile(0);
        }
    }
}

/// Records that a backend has answered a client's data.
#[inline(always)]
pub fn answered(service: u32, slot: u32) {
    let Some(service) = SERVICES.get_ptr_mut(service) else { return };
    // SAFETY: a live map value; while the service is configured, only the programs write these
    // fields.
    unsafe {
        if (&raw const (*service).awaits_answer).read_volatile() != 0 {
            (&raw mut (*service).answered_at).write_volatile(tick(clock::now_ns()));
            (&raw mut (*service).answered).write_volatile(slot as u16 + 1);
            (&raw mut (*service).awaits_answer).write_volatile(0);
        }
    }
}

/// The slot of the ejected backend for which this connect is the trial, if a trial is due.
///
/// The next trial is scheduled when the SYN is sent ([`trial_begun`]) and not here, because a
/// survey of all members here would double the verifier's work for each connect program.
#[inline(always)]
pub fn due_trial<I: Instructions>(index: u32, service: *const Service, now: u32) -> Option<u32> {
    // SAFETY: a live map value. This loads only a part of the word; `take_if_due` loads the word.
    if unsafe { (&raw const (*service).next_trial.slot).read_volatile() } == 0 {
        return None;
    }
    let slot = take_if_due::<I>(index, now);
    if slot == NO_SLOT { None } else { Some(slot) }
}

#[inline(always)]
fn next_trial(service: *const Service) -> NextTrial {
    // SAFETY: a live map value; one word.
    NextTrial::from_word(unsafe { (&raw const (*service).next_trial).cast::<u64>().read_volatile() })
}

global_function! {
    fn take_if_due(index: u32, now: u32) -> u32 = take, take_trial, take_trial_5_10;
}

#[inline(always)]
fn take<I: Instructions>(index: u32, now: u32) -> u32 {
    let Some(service) = SERVICES.get_ptr_mut(index) else { return NO_SLOT };
    steps::take_trial(&MapStore::<I>::new(index, service), now)
}

/// Schedules the next trial if this flow is a trial. Call this function when the SYN is about to be
/// sent.
#[inline(always)]
pub fn trial_begun(service: u32, why: u8) {
    if is_trial(why) {
        schedule_trial(service, Event::TrialBegan as u32, tick(clock::now_ns()));
    }
}

global_function! {
    /// Begins the trial of the backend in a slot, if the trial is due. Returns the slot, or
    /// [`NO_SLOT`] if no trial begins.
    pub fn begin_trial(index: u32, slot: u32, now: u32) -> u32 = claim, claim_trial, claim_trial_5_10;
}

// The rest of this file contains global functions that the programs with either set of instructions
// call, and bodies of global functions.

/// The evidence from a socket's flow about its backend, as the word of an [`Evidence`]; 0 if there
/// is none. `word` contains the [`End`] of the flow, or [`ESTABLISHED`], and the bits [`COUNTS`]
/// and [`JUDGES`]; `received` and `sent` are the bytes of the end. If the end counts as load of the
/// backend, this function adds it to the backend's recent errors.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn evidence_of(cookie: u64, word: u32, received: u64, sent: u64) -> u32 {
    let Some(record) = record::of(cookie) else { return 0 };
    // All fields of the record are read here: the record may be in either of two tables, and the
    // verifier follows both paths for as long as the record is used.
    let (slot, index, why) = (record.slot(), record.service(), record.why());
    let (start_ns, process, namespace) = (record.start_ns(), record.process(), record.namespace());
    let Some(service) = SERVICES.get_ptr_mut(index) else { return 0 };
    // SAFETY: a live map value. The daemon may store both fields at any time, each with a single
    // store.
    let (several, clients) = unsafe {
        (
            (&raw const (*service).several_processes).read_volatile(),
            (&raw const (*service).namespace).read_volatile(),
        )
    };
    let is_trial = trial_bit(why);
    let counts = (word / COUNTS) & 1;
    let now_ns = clock::now_ns();
    let mut evidence = Evidence::established(false).to_word() | is_trial << 3;
    if word & ESTABLISHED == 0 {
        let end = End::from_word(word, received, sent);
        let failure_source = FailureSource::among(process, several);
        evidence = Evidence::word_of_end(end, is_trial, failure_source, now_ns.wrapping_sub(start_ns));
        if end.is_error() | end.is_load() & counts != 0 {
            tally::remember_error(slot, index, tick(now_ns));
        }
    }
    if word & JUDGES == 0 {
        return 0;
    }
    // Failures of flows in a network namespace other than the client's are no evidence about the
    // backends, because a process may have created that namespace itself.
    let is_foreign = is_not_zero(clients) & is_not_zero(clients ^ namespace);
    evidence &= !(Evidence::KIND & 0u32.wrapping_sub(is_foreign | counts ^ 1));
    steps::weigh(&MapStore::<Linux5_10>::new(index, service), slot, evidence, tick(start_ns))
}

/// The result of [`pick::usable_other`] for the current table of a service: the slot of a backend
/// that may be chosen and is not the one in `slot`, or [`NO_SLOT`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn other_entry(index: u32, slot: u32, now: u32) -> u32 {
    let Some(service) = rows::service(index) else { return NO_SLOT };
    let tables = KernelTables::<Linux5_10>::new(index, service);
    pick::usable_other(&tables, table_of(service), slot, now.wrapping_add(cursor_number(index)))
}

/// Plans the trial of the ejected backend in a slot, if its service has no next trial yet. Returns
/// 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn name_for_trial(index: u32, slot: u32, now: u32) -> u32 {
    let Some(service) = SERVICES.get_ptr_mut(index) else { return 0 };
    steps::name_for_trial(&MapStore::<Linux5_10>::new(index, service), slot, now);
    0
}

/// The survey of a service's current table, as a word.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn survey_service(index: u32, now: u32) -> u64 {
    let Some(service) = rows::service(index) else { return Survey::EMPTY.to_word() };
    let tables = KernelTables::<Linux5_10>::new(index, service);
    pick::survey(&tables, rules(service), |group| survey_some(index, group, now)).to_word()
}

/// The survey of a group of parts, as a word.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn survey_some(index: u32, group: u32, now: u32) -> u64 {
    let Some(service) = rows::service(index) else { return Survey::EMPTY.to_word() };
    if table_of(service).members == NO_MEMBERS {
        pick::survey_group(group, |part| survey_entries(index, part, now))
    } else {
        pick::survey_group(group, |part| survey_members(index, part, now))
    }
}

/// The survey of a part of the service's members, as a word.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn survey_members(index: u32, part: u32, now: u32) -> u64 {
    let Some(service) = rows::service(index) else { return Survey::EMPTY.to_word() };
    let tables = KernelTables::<Linux5_10>::new(index, service);
    let Some(members) = tables.members(table_of(service)) else { return Survey::EMPTY.to_word() };
    pick::survey_members(&tables, members, part, rules(service), now)
}

/// The survey of a part of the table's entries, as a word.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn survey_entries(index: u32, part: u32, now: u32) -> u64 {
    let Some(service) = rows::service(index) else { return Survey::EMPTY.to_word() };
    let tables = KernelTables::<Linux5_10>::new(index, service);
    pick::survey_entries(&tables, table_of(service), part, rules(service), now)
}

/// Schedules the next trial of a service, if its members are listed. `event` is the number of an
/// [`Event`]. Returns 0.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn schedule_trial(index: u32, event: u32, now: u32) -> u32 {
    let Some(service) = SERVICES.get_ptr_mut(index) else { return 0 };
    steps::schedule_trial(&MapStore::<Linux5_10>::new(index, service), Event::from_u32(event), now);
    0
}

/// Judges a backend by evidence, once. Returns [`DONE`] or one of the numbers after it.
#[inline(always)]
fn judge<I: Instructions>(slot: u32, index: u32, evidence: u32, room: u32, now: u32) -> u32 {
    let Some(service) = SERVICES.get_ptr_mut(index) else { return DONE };
    let store = MapStore::<I>::new(index, service);
    let has_room = if room == UNKNOWN { None } else { Some(room == ROOM) };
    match steps::judge(&store, slot, Evidence::from_word(evidence), has_room, now) {
        Err(Unjudged::Contended) => AGAIN,
        Err(Unjudged::WantsRoom) => WANTS_ROOM,
        Ok(judgement) => match judgement.event() {
            None => DONE,
            Some(event) => SCHEDULE + event as u32,
        },
    }
}

/// Ends the running trial of the backend in a slot without a result, so that another trial follows
/// soon. Returns 0.
#[inline(always)]
fn give_trial_up<I: Instructions>(slot: u32) -> u32 {
    let Some(backend) = BACKENDS.get_ptr(slot) else { return 0 };
    // SAFETY: a live map value; the slot's service does not change while flows refer to the slot.
    let index = u32::from(unsafe { (&raw const (*backend).endpoint.service).read_volatile() });
    let Some(service) = SERVICES.get_ptr_mut(index) else { return 0 };
    steps::give_trial_up(&MapStore::<I>::new(index, service), slot, tick(clock::now_ns()));
    0
}

/// The body of [`begin_trial`].
#[inline(always)]
fn claim<I: Instructions>(index: u32, slot: u32, now: u32) -> u32 {
    let Some(service) = SERVICES.get_ptr_mut(index) else { return NO_SLOT };
    steps::begin_trial(&MapStore::<I>::new(index, service), slot, now)
}

/// The ejection words of a service in this client task's maps.
struct MapStore<I> {
    index: u32,
    service: *mut Service,
    instructions: PhantomData<I>,
}

impl<I> MapStore<I> {
    #[inline(always)]
    const fn new(index: u32, service: *mut Service) -> Self {
        Self { index, service, instructions: PhantomData }
    }

    #[inline(always)]
    fn trial_word(&self) -> *mut u64 {
        // SAFETY: a field of a live map value.
        unsafe { (&raw mut (*self.service).next_trial).cast() }
    }
}

impl<I: Instructions> EjectionStore for MapStore<I> {
    type Backend = *mut Backend;

    #[inline(always)]
    fn backend(&self, slot: u32) -> Option<*mut Backend> {
        let backend = BACKENDS.get_ptr_mut(slot)?;
        // SAFETY: a live map value. The slot may belong to another service's backend by now.
        let service = unsafe { (&raw const (*backend).endpoint.service).read_volatile() };
        if u32::from(service) == self.index { Some(backend) } else { None }
    }

    #[inline(always)]
    fn rules(&self) -> EjectionRules {
        rules(self.service)
    }

    #[inline(always)]
    fn lists_members(&self) -> bool {
        table_of(self.service).members != NO_MEMBERS
    }

    #[inline(always)]
    fn survey(&self, now: u32) -> Survey {
        Survey::from_word(survey_service(self.index, now))
    }

    #[inline(always)]
    fn random(&self) -> u32 {
        cursor_number(self.index)
    }

    #[inline(always)]
    fn state(&self, backend: *mut Backend) -> StateWord {
        rows::state(backend)
    }

    #[inline(always)]
    fn set_failure_source(&self, backend: *mut Backend, failure_source: FailureSource) {
        // SAFETY: a live map value; only the programs write the byte.
        unsafe { (&raw mut (*backend).state.failure_source).write_volatile(failure_source.0) };
    }

    #[inline(always)]
    fn send_failures(&self) -> SendFailures {
        // SAFETY: a live map value.
        SendFailures(unsafe { (&raw const (*self.service).send_failures).read_volatile() })
    }

    #[inline(always)]
    fn set_send_failures(&self, send_failures: SendFailures) {
        // SAFETY: a live map value; while the service is configured, only the programs write these
        // fields.
        unsafe {
            (&raw mut (*self.service).send_failures).write_volatile(send_failures.0);
            (&raw mut (*self.service).awaits_syn).write_volatile(1);
        }
    }

    #[inline(always)]
    fn answered(&self) -> (u32, u32) {
        // SAFETY: a live map value.
        let (slot, at) = unsafe {
            (
                (&raw const (*self.service).answered).read_volatile(),
                (&raw const (*self.service).answered_at).read_volatile(),
            )
        };
        (u32::from(slot).wrapping_sub(1), at)
    }

    #[inline(always)]
    fn awaits_answer(&self) -> bool {
        // SAFETY: a live map value.
        unsafe { (&raw const (*self.service).awaits_answer).read_volatile() != 0 }
    }

    #[inline(always)]
    fn await_answer(&self) {
        // SAFETY: a live map value.
        unsafe { (&raw mut (*self.service).awaits_answer).write_volatile(1) };
    }

    #[inline(always)]
    fn set_ejected(&self, backend: *mut Backend, ejected: u8) {
        // SAFETY: a live map value. The daemon may also store this byte, with a single store.
        unsafe { (&raw mut (*backend).state.ejected).write_volatile(ejected) };
    }

    #[inline(always)]
    fn standing(&self, backend: *mut Backend) -> EjectionState {
        load(backend)
    }

    #[inline(always)]
    fn replace_standing(&self, backend: *mut Backend, before: EjectionState, after: EjectionState) -> bool {
        // SAFETY: a live map value; one aligned word.
        unsafe { I::update((&raw mut (*backend).ejection).cast(), before.to_word(), after.to_word()) }
    }

    #[inline(always)]
    fn forget_errors(&self, backend: *mut Backend) {
        // SAFETY: a live map value; the errors are one word.
        unsafe { (&raw mut (*backend).errors).cast::<u64>().write_volatile(0) };
    }

    #[inline(always)]
    fn takes_trials(&self, backend: *mut Backend) -> bool {
        // A lame duck requests that clients open no new connections, so its trial is postponed.
        !is_at_limit(backend, self.service) && !rows::is_lame(backend, clock::now_ns())
    }

    #[inline(always)]
    fn count(&self, slot: u32, counted: Counted) {
        match counted {
            Counted::Ejection => tally::count(slot, |counts| &raw mut counts.ejections),
            Counted::Withheld => tally::count(slot, |counts| &raw mut counts.withheld),
            Counted::Trial => tally::count(slot, |counts| &raw mut counts.trials),
            Counted::Readmission => tally::count(slot, |counts| &raw mut counts.readmissions),
        }
    }

    #[inline(always)]
    fn next_trial(&self) -> NextTrial {
        next_trial(self.service)
    }

    #[inline(always)]
    fn set_next_trial(&self, next: NextTrial) {
        // SAFETY: a live map value; one word.
        unsafe { self.trial_word().write_volatile(next.to_word()) };
    }

    #[inline(always)]
    fn replace_next_trial(&self, before: NextTrial, after: NextTrial) {
        // SAFETY: a live map value; one word.
        unsafe { I::update(self.trial_word(), before.to_word(), after.to_word()) };
    }

    #[inline(always)]
    fn set_others(&self, others: u16) {
        // SAFETY: a live map value; the field is part of one word.
        unsafe { (&raw mut (*self.service).next_trial.others).write_volatile(others) };
    }
}

/// Whether a backend is at the service's limit of open flows, which not even a trial may exceed.
#[inline(always)]
fn is_at_limit(backend: *const Backend, service: *const Service) -> bool {
    // SAFETY: live map values.
    let (limit, flows) = unsafe {
        (
            (&raw const (*service).rules.active_limit).read_volatile(),
            (&raw const (*backend).flows).read_volatile(),
        )
    };
    limit != 0 && flows >= u64::from(limit)
}

#[inline(always)]
fn load(backend: *const Backend) -> EjectionState {
    // SAFETY: a live map value; one word.
    EjectionState::from_word(unsafe { (&raw const (*backend).ejection).cast::<u64>().read_volatile() })
}

/// The ejection rules of a service. The daemon stores them word by word, at any time.
#[inline(always)]
fn rules(service: *const Service) -> EjectionRules {
    // SAFETY: a live map value.
    unsafe {
        let rules = &raw const (*service).ejection;
        EjectionRules {
            base: (&raw const (*rules).base).read_volatile(),
            max: (&raw const (*rules).max).read_volatile(),
            failures: (&raw const (*rules).failures).read_volatile(),
            hangs: (&raw const (*rules).hangs).read_volatile(),
            _reserved: [0; 2],
        }
    }
}
