//! connect(2): look the address up, pick a backend, remember the flow, rewrite the destination.
//!
//! Each call counts exactly one outcome. Whatever is unknown or contradictory lets the call through unchanged; only a
//! known service without a usable backend is refused.

use lb_common::abi::{
    Backend, BackendAddress, Flow, NOT_A_SERVICE, Outcomes, Phase, Reason, Service, TableRef, VipCell,
};
use lb_common::net::Address;
use lb_common::pick::How;
use lb_common::ticks::tick;
use lb_common::vip_table::{Destination, VipTable, find};

use crate::PROCEED;
use crate::decide::choose::{Chooser, Chosen, choose_here};
use crate::decide::tables::endpoint_of;
use crate::flow::record::{self, Recorded};
use crate::flow::tally;
use crate::globals::HAS_SET_RETVAL;
use crate::kernel::atomic::{self, Instructions};
use crate::kernel::clock;
use crate::kernel::context::{Dial, Opener, TCP, UDP};
use crate::maps::{BACKENDS, DIALLED, OUTCOMES, SERVICES};

/// The verdict that fails the call.
const REFUSE: i32 = 0;

/// How a call ends, before the socket is touched.
pub enum Verdict {
    Forward(*const BackendAddress),
    Proceed,
    Refuse,
}

impl Verdict {
    /// As a hook of IPv4 returns it.
    #[inline(always)]
    pub fn apply_v4(self, dial: &Dial) -> i32 {
        match self {
            Self::Forward(backend) => {
                // SAFETY: a live map value; only its weight changes while something refers to the slot.
                unsafe {
                    let [_, _, _, v4] = (*backend).address.words;
                    dial.redirect4(v4, (*backend).port);
                }
                PROCEED
            }
            Self::Proceed => PROCEED,
            Self::Refuse => REFUSE,
        }
    }

    /// As a hook of IPv6 returns it.
    #[inline(always)]
    pub fn apply_v6(self, dial: &Dial) -> i32 {
        match self {
            Self::Forward(backend) => {
                // SAFETY: a live map value; only its weight changes while something refers to the slot.
                unsafe { dial.redirect6((*backend).address, (*backend).port) };
                PROCEED
            }
            Self::Proceed => PROCEED,
            Self::Refuse => REFUSE,
        }
    }
}

#[inline(always)]
pub fn connect4<I: Instructions>(dial: &Dial) -> i32 {
    balance::<I>(dial, service_at(dial, Address::mapped(dial.ip4()))).apply_v4(dial)
}

/// Also of a v4-mapped address, which dials an IPv4 service, whose backends are IPv4, which are kept v4-mapped.
#[inline(always)]
pub fn connect6<I: Instructions>(dial: &Dial) -> i32 {
    balance::<I>(dial, service_at(dial, dial.ip6())).apply_v6(dial)
}

/// The index of the service at an address, if there is one.
#[inline(always)]
pub fn service_at(dial: &Dial, address: Address) -> Option<u32> {
    find(&Services, Destination { address, port: dial.port(), protocol: dial.protocol()? })
}

/// The services and their addresses.
struct Services;

impl VipTable for Services {
    #[inline(always)]
    fn cell(&self, position: u32) -> Option<VipCell> {
        let cell: *const VipCell = DIALLED.get_ptr(position)?;
        // SAFETY: a live map value, which changes at any time, hence one volatile load.
        Some(VipCell::from_word(unsafe { cell.cast::<u64>().read_volatile() }))
    }

    #[inline(always)]
    fn serves(&self, service: u32, destination: Destination) -> bool {
        let service: *const Service = match SERVICES.get_ptr(service) {
            Some(service) => service,
            None => return false,
        };
        // SAFETY: a live map value; a service's address stays while its cell refers to it.
        let (address, port, protocol) = unsafe { ((*service).address, (*service).port, (*service).protocol) };
        destination == Destination { address, port, protocol }
    }
}

/// Picks a backend for a call to a service, records the flow, and counts the one outcome.
#[inline(always)]
fn balance<I: Instructions>(dial: &Dial, service: Option<u32>) -> Verdict {
    let is_tcp = dial.protocol() == Some(TCP);
    let Some(index) = service else {
        // A socket that failed to reach a service and now dials elsewhere is no flow any more.
        if is_tcp || dial.protocol() == Some(UDP) {
            record::leave::<I>(dial.cookie());
        }
        count(NOT_A_SERVICE, |outcomes| &raw mut outcomes.not_a_service);
        return Verdict::Proceed;
    };
    let opener = if is_tcp { dial.opener() } else { Opener::Process };
    if opener == Opener::Kernel {
        count(NOT_A_SERVICE, |outcomes| &raw mut outcomes.not_a_service);
        return Verdict::Proceed;
    }
    let Some(question) = Question::of(index) else {
        count(index, |outcomes| &raw mut outcomes.passed);
        return Verdict::Proceed;
    };
    let choice = question.choose_here::<I>();
    let Some(backend) = choice.backend() else {
        // A datagram socket whose connect is refused stays connected to where it was.
        if is_tcp {
            record::leave::<I>(dial.cookie());
        }
        return choice.refuse(dial);
    };
    if is_tcp {
        dial.set_syn_retries(choice.syn_retries);
    }
    // Counted before it is open, as an end is counted before it is not: what is open is always part of what was chosen.
    tally::chosen(choice.slot);
    let flow = |namespace: Option<u64>| {
        let namespace = match namespace {
            Some(namespace) => namespace,
            None => dial.namespace(),
        };
        choice.flow(dial, backend, namespace)
    };
    // The flow table may be full, or the end of the flow be invisible.
    let recorded = if opener == Opener::Mptcp {
        Recorded::Nowhere
    } else {
        record::begin::<I>(dial.cookie(), choice.slot, flow)
    };
    choice.count(!matches!(recorded, Recorded::Nowhere));
    // Last, because it is the one line of memory that nobody has used lately: whatever is atomic waits for it.
    if let Recorded::Table(record) = recorded {
        // SAFETY: a live map value that belongs to the socket.
        unsafe { record.write(flow(None)) };
    }
    Verdict::Forward(endpoint_of(backend))
}

/// What a policy chose for a call. All of it is written whatever it chose: what one path alone has written must not be
/// copied on another, which the verifier refuses to those without CAP_PERFMON.
pub struct Choice {
    index: u32,
    service: *const Service,
    how: How,
    /// Past the end of all maps if it is nobody's.
    pub slot: u32,
    sample: u32,
    table_generation: u16,
    policy: u8,
    syn_retries: u8,
    now_ns: u64,
}

/// What a choice is made from: read once, so that choice and record agree.
pub struct Question {
    index: u32,
    service: *const Service,
    table: TableRef,
    policy: u8,
    syn_retries: u8,
    now_ns: u64,
}

impl Question {
    /// Of a service. `None` if there is no such service.
    #[inline(always)]
    pub fn of(index: u32) -> Option<Self> {
        let service: *const Service = SERVICES.get_ptr(index)?;
        // SAFETY: a live map value. The table is one word and is loaded in one piece.
        let table =
            TableRef::from_word(unsafe { (&raw const (*service).table).cast::<u64>().read_volatile() });
        // One look at the clock serves the choice and the flow.
        let now_ns = clock::now_ns();
        // SAFETY: as above. The daemon stores each rule by itself, at any time.
        let (policy, syn_retries) = unsafe {
            let rules = &raw const (*service).rules;
            ((&raw const (*rules).policy).read_volatile(), (&raw const (*rules).syn_retries).read_volatile())
        };
        Some(Self { index, service, table, policy, syn_retries, now_ns })
    }

    /// Chooses where it stands, see [`choose_here`].
    #[inline(always)]
    pub fn choose_here<I: Instructions>(self) -> Choice {
        let chosen = choose_here::<I>(self.index, self.table, self.policy, tick(self.now_ns));
        self.answered(chosen)
    }

    /// Chooses by a function of its own, see [`Chooser`].
    #[inline(always)]
    pub fn choose<I: Chooser>(self) -> Choice {
        let chosen = I::choose(self.index, self.table, self.policy, tick(self.now_ns));
        self.answered(chosen)
    }

    #[inline(always)]
    fn answered(self, chosen: Chosen) -> Choice {
        Choice {
            index: self.index,
            service: self.service,
            how: chosen.how(),
            slot: chosen.slot(),
            sample: chosen.sample(),
            table_generation: self.table.generation,
            policy: self.policy,
            syn_retries: self.syn_retries,
            now_ns: self.now_ns,
        }
    }
}

impl Choice {
    /// The backend that was chosen, if one was. Nobody's slot is past the end of the map.
    #[inline(always)]
    pub fn backend(&self) -> Option<*const Backend> {
        let backend: *const Backend = BACKENDS.get_ptr(self.slot)?;
        Some(backend)
    }

    #[inline(always)]
    fn reason(&self) -> Reason {
        match self.how {
            How::Overflowed => Reason::Overflow,
            How::Fallback => Reason::Fallback,
            How::Picked | How::Limited | How::Refused | How::Broken => Reason::Picked,
        }
    }

    /// The flow that begins with it.
    #[inline(always)]
    pub fn flow(&self, dial: &Dial, backend: *const Backend, namespace: u64) -> Flow {
        // SAFETY: a live map value.
        let (share, generation) =
            unsafe { ((&raw const (*backend).share).read_volatile(), (*endpoint_of(backend)).generation) };
        Flow {
            start_ns: self.now_ns,
            namespace,
            slot: self.slot,
            generation,
            process: dial.process(),
            draw: self.sample,
            table_generation: self.table_generation,
            share: if share > 0xffff { 0xffff } else { share as u16 },
            service: self.index as u16,
            why: self.policy | (self.reason() as u8) << 4,
            phase: if dial.protocol() == Some(TCP) { Phase::Chosen } else { Phase::Datagrams } as u8,
        }
    }

    /// Counts the one outcome of the call.
    #[inline(always)]
    pub fn count(&self, tracked: bool) {
        // One call per field: a field that is chosen before the addition makes it arithmetic with another offset on each
        // path, which the verifier allows with CAP_PERFMON only.
        if !tracked {
            tally::count(self.slot, |counts| &raw mut counts.untracked);
            count(self.index, |outcomes| &raw mut outcomes.untracked);
            return;
        }
        match self.reason() {
            Reason::Picked => count(self.index, |outcomes| &raw mut outcomes.forwarded),
            Reason::Overflow => count(self.index, |outcomes| &raw mut outcomes.overflowed),
            Reason::Fallback => count(self.index, |outcomes| &raw mut outcomes.fallback),
        }
    }

    /// Ends a call for which nobody was chosen.
    #[inline(always)]
    pub fn refuse(&self, dial: &Dial) -> Verdict {
        match self.how {
            How::Limited => count(self.index, |outcomes| &raw mut outcomes.limited),
            How::Refused => count(self.index, |outcomes| &raw mut outcomes.refused),
            How::Picked | How::Overflowed | How::Fallback | How::Broken => {
                count(self.index, |outcomes| &raw mut outcomes.passed);
                return Verdict::Proceed;
            }
        }
        if HAS_SET_RETVAL.load() != 0 {
            // SAFETY: a live map value.
            dial.set_errno(unsafe { (&raw const (*self.service).errno).read_volatile() });
        }
        Verdict::Refuse
    }
}

/// Counts the one outcome of a call.
#[inline(always)]
pub fn count(row: u32, field: impl FnOnce(&mut Outcomes) -> *mut u64) {
    if let Some(outcomes) = OUTCOMES.get_ptr_mut(row) {
        // SAFETY: this CPU's map value; the closure only takes a field's address.
        unsafe { atomic::add(field(&mut *outcomes), 1) };
    }
}
