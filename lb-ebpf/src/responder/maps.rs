//! The maps that the agent and the program share, and the program's access to them.

use aya_ebpf::btf_maps::{HashMap, LruHashMap, PerCpuArray};
use aya_ebpf::macros::btf_map;
use lb_common::abi::host::SenderName;
use lb_common::abi::responder::{
    Counts, MAX_ADDRESSES, MAX_ANSWERED, MAX_STATIONS, MAX_SUBSCRIBERS, PreparedAnswer, Station, Subscriber,
    SubscriberName,
};
use lb_common::net::Address;
use lb_report::respond::{Found, Maps, Response, Workspace};
use lb_report::wire::{Cookies, Key};

use crate::atomic::add;
use crate::{SECRET_DRAWN_NS, SECRET_HIGH, SECRET_LOW};

/// `BPF_F_NO_PREALLOC`: memory is allocated with each entry, because most hosts have far fewer
/// entries than the maximum.
const ON_DEMAND: usize = 1;

#[btf_map(name = "answers")]
pub static ANSWERS: HashMap<SenderName, PreparedAnswer, { MAX_ANSWERED as usize }, ON_DEMAND> =
    HashMap::new();

#[btf_map(name = "addresses")]
pub static ADDRESSES: HashMap<Address, u8, { MAX_ADDRESSES as usize }, ON_DEMAND> = HashMap::new();

#[btf_map(name = "stations")]
pub static STATIONS: HashMap<Station, u8, { MAX_STATIONS as usize }, ON_DEMAND> = HashMap::new();

#[btf_map(name = "subscribers")]
pub static SUBSCRIBERS: LruHashMap<SubscriberName, Subscriber, { MAX_SUBSCRIBERS as usize }> =
    LruHashMap::new();

#[btf_map(name = "counts")]
pub static COUNTS: PerCpuArray<Counts, 1> = PerCpuArray::new();

#[btf_map(name = "workspaces")]
static WORKSPACES: PerCpuArray<Workspace, 1> = PerCpuArray::new();

/// This CPU's workspace, in which the program makes an answer. The kernel processes packets with
/// softirqs off, so each CPU processes one packet after the other. (With PREEMPT_RT, a CPU may
/// process two packets at the same time. Two clients may then receive each other's answers, which
/// they reject.)
#[inline(always)]
pub fn workspace() -> Option<&'static mut Workspace> {
    let workspace = WORKSPACES.get_ptr_mut(0)?;
    // SAFETY: a live value of this CPU, which no other code uses while the program runs.
    Some(unsafe { &mut *workspace })
}

/// Counts the result of a request.
#[inline(always)]
pub fn count(response: Response) {
    let Some(counts) = COUNTS.get_ptr_mut(0) else { return };
    let number = match response {
        Response::Answered => 0,
        Response::Refused(why) => 1 + why.number(),
    };
    // SAFETY: a live value of this CPU, which has a word for each result.
    unsafe { add(counts.cast::<u64>().add(number), 1) };
}

pub struct AgentMaps;

impl Maps for AgentMaps {
    #[inline(always)]
    fn is_served_at(&self, address: Address) -> bool {
        ADDRESSES.get_ptr(address).is_some()
    }

    #[inline(always)]
    fn is_own(&self, station: Station) -> bool {
        STATIONS.get_ptr(station).is_some()
    }

    #[inline(always)]
    fn prepared(&self, name: &SenderName, into: &mut PreparedAnswer) -> Found {
        let Some(prepared) = ANSWERS.get_ptr(name) else { return Found::UnknownName };
        let words = prepared.cast::<u64>();
        // SAFETY: the value has this many words. Its memory belongs to the map as long as the
        // program runs. Meanwhile the kernel may reuse it for another value (Linux 6.1 and later).
        // The checksum detects a mixture of two values, and the name detects another backend's
        // value.
        let is_whole = PreparedAnswer::copy(into, |at| unsafe { words.add(at).read_volatile() });
        if is_whole { Found::Prepared } else { Found::BeingWritten }
    }

    #[inline(always)]
    fn subscribe(&self, name: &SubscriberName, subscriber: &Subscriber) {
        // This may fail if all CPUs allocate entries at this moment. The client is then recorded at
        // its next request, which follows soon.
        let _ = SUBSCRIBERS.insert(name, subscriber, 0);
    }

    #[inline(always)]
    fn cookies(&self, now_ns: u64) -> Cookies {
        let secret = Key::from_words([SECRET_LOW.load(), SECRET_HIGH.load()]);
        Cookies::new(secret, now_ns.saturating_sub(SECRET_DRAWN_NS.load()))
    }
}
