//! The decision about one call to a service. Each input that the flow's record or a counter depends
//! on is read only once, so that the choice, the record and the counters agree.

use lb_common::abi::{Backend, CpuService, Flow, Phase, Service, TableRef};
use lb_common::pick::{How, Pick};
use lb_common::ticks::tick;

use super::choose;
use super::service::Dialled;
use super::tables::{divert_from_lame, table_of};
use super::verdict::Verdict;
use crate::ejection;
use crate::flow::tally;
use crate::globals::HAS_SET_RETVAL;
use crate::kernel::atomic::Instructions;
use crate::kernel::clock;
use crate::kernel::context::Dial;
use crate::maps::CPU_SERVICES;
use crate::rows;

/// The result of a decision. Every field is written on every path, because without CAP_PERFMON the
/// verifier rejects copies of values that only some paths have written.
pub struct Decision {
    index: u32,
    service: *const Service,
    /// If a backend was chosen, this is the number of the [`Reason`](lb_common::abi::Reason).
    how: How,
    /// The chosen slot. If no backend was chosen, the number is past the end of all maps.
    pub slot: u32,
    /// The slot's row of `BACKENDS`; null if no backend was chosen.
    backend: *const Backend,
    /// The service's value of `CPU_SERVICES`; `None` if it must be looked up.
    on_cpu: Option<*mut CpuService>,
    sample: u32,
    table_generation: u16,
    policy: u8,
    /// [`Rules::syn_retries`](lb_common::abi::Rules::syn_retries).
    pub syn_retries: u8,
    now_ns: u64,
}

impl Decision {
    /// Decides on a call. `may_try`: whether the call may be the trial of an ejected backend.
    /// `on_cpu`: the service's value of `CPU_SERVICES`. If the caller has not looked it up, this
    /// function looks up all map values again that the choice has used, which takes more
    /// instructions of the call, but fewer of the verifier if much code follows.
    #[inline(always)]
    pub fn make<I: Instructions>(
        Dialled { index, row: service, .. }: Dialled,
        on_cpu: Option<*mut CpuService>,
        may_try: bool,
    ) -> Self {
        let table = table_of(service);
        // The clock is read once for the choice and the flow.
        let now_ns = clock::now_ns();
        // SAFETY: a live map value. The daemon stores the rules word by word, at any time.
        let (policy, syn_retries) = unsafe {
            let rules = &raw const (*service).rules;
            ((&raw const (*rules).policy).read_volatile(), (&raw const (*rules).syn_retries).read_volatile())
        };
        let now = tick(now_ns);
        let trial = if may_try { ejection::due_trial::<I>(index, service, now) } else { None };
        let (pick, sample, picked) = if let Some(slot) = trial {
            (Pick { how: How::Trial, slot }, 0, core::ptr::null())
        } else {
            let on_cpu = if on_cpu.is_some() { on_cpu } else { CPU_SERVICES.get_ptr_mut(index) };
            choose::here::<I>(index, service, on_cpu, table, policy, now)
        };
        let picked = if on_cpu.is_some() { picked } else { core::ptr::null() };
        let (Pick { how, slot }, backend) = unless_lame(index, table, pick, picked, sample, now_ns);
        let table_generation = table.generation;
        Self {
            index,
            service,
            how,
            slot,
            backend,
            on_cpu,
            sample,
            table_generation,
            policy,
            syn_retries,
            now_ns,
        }
    }

    /// The chosen backend, if there is one.
    #[inline(always)]
    pub fn backend(&self) -> Option<*const Backend> {
        if self.backend.is_null() { None } else { Some(self.backend) }
    }

    /// The content of the record of the flow that begins with this decision.
    #[inline(always)]
    pub fn flow(&self, dial: &Dial, backend: *const Backend, namespace: u64, phase: Phase) -> Flow {
        // SAFETY: a live map value.
        let (entries, generation) = unsafe {
            ((&raw const (*backend).entries).read_volatile(), (*rows::address_of(backend)).generation)
        };
        Flow {
            start_ns: self.now_ns,
            namespace,
            slot: self.slot,
            generation,
            process: dial.process(),
            sample: self.sample,
            table_generation: self.table_generation,
            entries: if entries > 0xffff { 0xffff } else { entries as u16 },
            service: self.index as u16,
            why: self.policy | (self.how as u8) << 4,
            phase: phase as u8,
        }
    }

    /// Counts the outcome of a call that goes to the chosen backend. `tracked`: whether the call's
    /// flow has a record.
    #[inline(always)]
    pub fn count(&self, tracked: bool) {
        if !tracked {
            tally::count(self.slot, |counts| &raw mut counts.untracked);
            tally::outcome(self.index, |outcomes| &raw mut outcomes.untracked);
            return;
        }
        if let Some(on_cpu) = self.on_cpu.or_else(|| CPU_SERVICES.get_ptr_mut(self.index)) {
            tally::sent(on_cpu, self.how);
        }
    }

    /// The verdict on a call for which no backend was chosen: the call is refused, or proceeds
    /// unchanged if the tables are broken. Counts the outcome.
    #[inline(always)]
    pub fn refuse(&self, dial: &Dial) -> Verdict {
        match self.how {
            How::Limited => tally::outcome(self.index, |outcomes| &raw mut outcomes.limited),
            How::Refused => tally::outcome(self.index, |outcomes| &raw mut outcomes.no_backend),
            How::Picked | How::Trial | How::Overflowed | How::Fallback | How::Diverted | How::Broken => {
                tally::outcome(self.index, |outcomes| &raw mut outcomes.passed);
                return Verdict::Proceed;
            }
        }
        if HAS_SET_RETVAL.load() != 0 {
            // SAFETY: a live map value.
            dial.set_errno(u32::from(unsafe { (&raw const (*self.service).errno).read_volatile() }));
        }
        Verdict::Refuse
    }
}

/// The pick, or a diversion from it if the picked backend is a lame duck by its own report. Also
/// returns the backend's row of `BACKENDS`, which is null if there is no backend.
#[inline(always)]
fn unless_lame(
    index: u32,
    table: TableRef,
    pick: Pick,
    picked: *const Backend,
    sample: u32,
    now_ns: u64,
) -> (Pick, *const Backend) {
    let backend = if picked.is_null() {
        match rows::backend(pick.slot) {
            Some(backend) => backend,
            None => return (pick, core::ptr::null()),
        }
    } else {
        picked
    };
    if !rows::is_lame(backend, now_ns) {
        return (pick, backend);
    }
    let pick = choose::from_word(divert_from_lame(index, table.to_word(), sample, choose::to_word(pick)));
    (pick, rows::backend(pick.slot).unwrap_or(core::ptr::null()))
}
