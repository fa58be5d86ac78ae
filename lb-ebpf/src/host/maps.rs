//! The maps of the host, and the receiver's access to them.

use core::marker::PhantomData;

use aya_ebpf::btf_maps::{Array, HashMap, PerCpuArray};
use aya_ebpf::macros::btf_map;
use lb_common::abi::host::{
    LastReport, Listener, MAX_LISTENERS, MAX_SENDERS, REPORT_IDS, Receptions, ReportBase, Sender, SenderName,
    Verdict,
};
use lb_common::net::Address;
use lb_report::receive::{Maps, Reception, Words};
use lb_report::wire::Key;

use crate::atomic::{Instructions, add};

/// `BPF_F_MMAPABLE`: the daemon reads and writes these arrays through a mapping.
const MAPPED: usize = 1 << 10;
/// `BPF_F_NO_PREALLOC`: memory is allocated with each entry, because most hosts receive reports
/// from few backends.
const ON_DEMAND: usize = 1;

#[btf_map(name = "verdicts")]
pub static VERDICTS: Array<Verdict, { REPORT_IDS as usize }, MAPPED> = Array::new();

#[btf_map(name = "senders")]
pub static SENDERS: HashMap<SenderName, Sender, { MAX_SENDERS as usize }, ON_DEMAND> = HashMap::new();

#[btf_map(name = "last_reports")]
pub static LAST_REPORTS: Array<LastReport, { REPORT_IDS as usize }, MAPPED> = Array::new();

#[btf_map(name = "listeners")]
pub static LISTENERS: HashMap<Address, Listener, { MAX_LISTENERS as usize }, ON_DEMAND> = HashMap::new();

#[btf_map(name = "receptions")]
pub static RECEPTIONS: PerCpuArray<Receptions, 1> = PerCpuArray::new();

/// Counts the result of processing a datagram.
#[inline(always)]
pub fn count(reception: Reception) {
    let Some(receptions) = RECEPTIONS.get_ptr_mut(0) else { return };
    // SAFETY: a live value of this CPU, which has a word for each reception.
    unsafe { add((&raw mut (*receptions).counts).cast::<u64>().add(reception.number() as usize), 1) };
}

/// Access to the maps with the set of atomic instructions `I`.
pub struct HostMaps<I>(PhantomData<I>);

impl<I> HostMaps<I> {
    #[inline(always)]
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<I: Instructions> Maps for HostMaps<I> {
    type Sender = *const Sender;

    #[inline(always)]
    fn listener(&self, address: Address) -> Option<Listener> {
        // SAFETY: the word of an entry, which is written with a single store.
        LISTENERS.get_ptr(address).map(|listener| unsafe { listener.read_volatile() })
    }

    #[inline(always)]
    fn sender(&self, name: &SenderName) -> Option<*const Sender> {
        SENDERS.get_ptr(name)
    }

    #[inline(always)]
    fn id(&self, sender: *const Sender) -> u32 {
        // SAFETY: the memory of an entry belongs to the map as long as the program runs. Meanwhile
        // the kernel may reuse it for another entry (Linux 6.1 and later). Therefore the receiver
        // reads the id before and after it uses the entry.
        unsafe { (&raw const (*sender).id).read_volatile() }
    }

    #[inline(always)]
    fn key(&self, sender: *const Sender, number: u16) -> Option<Key> {
        // SAFETY: the memory of the entry belongs to the map, see `id`.
        let keys = unsafe { [&raw const (*sender).keys[0], &raw const (*sender).keys[1]] };
        for key in keys {
            // SAFETY: the memory of the entry belongs to the map, see `id`. The values of a map,
            // and so these words, are aligned.
            unsafe {
                if number != 0 && (&raw const (*key).id).read_volatile() == number {
                    let words = (&raw const (*key).key).cast::<u64>();
                    return Some(Key::from_words([words.read_volatile(), words.add(1).read_volatile()]));
                }
            }
        }
        None
    }

    #[inline(always)]
    fn last(&self, id: u32) -> Option<LastReport> {
        let last = LAST_REPORTS.get_ptr(id)?.cast::<u64>();
        // SAFETY: the words of an element.
        unsafe {
            Some(LastReport {
                base: ReportBase::from_word(last.read_volatile()),
                highest: ReportBase::from_word(last.add(1).read_volatile()),
                nonce: last.add(2).read_volatile(),
                repeated_ns: last.add(3).read_volatile(),
            })
        }
    }

    #[inline(always)]
    fn believe(&self, id: u32, before: LastReport, after: LastReport) -> bool {
        let Some(last) = LAST_REPORTS.get_ptr_mut(id) else { return false };
        let last = last.cast::<u64>();
        // SAFETY: the words of an element.
        unsafe {
            if before.base != after.base && !I::update(last, before.base.to_word(), after.base.to_word()) {
                return false;
            }
            if before.highest != after.highest {
                I::update(last.add(1), before.highest.to_word(), after.highest.to_word());
            }
            // Do not clear a nonce that the daemon has drawn meanwhile.
            if before.nonce != 0 {
                I::update(last.add(2), before.nonce, after.nonce);
            }
        }
        true
    }

    #[inline(always)]
    fn set_repeated_ns(&self, id: u32, now_ns: u64) {
        if let Some(last) = LAST_REPORTS.get_ptr_mut(id) {
            // SAFETY: a word of the element.
            unsafe { last.cast::<u64>().add(3).write_volatile(now_ns) };
        }
    }
}

impl<I: Instructions> Words for HostMaps<I> {
    #[inline(always)]
    fn base(&self, id: u32) -> ReportBase {
        let last = LAST_REPORTS.get_ptr(id);
        // SAFETY: the first word of an element.
        last.map_or_else(ReportBase::default, |last| unsafe {
            ReportBase::from_word(last.cast::<u64>().read_volatile())
        })
    }

    #[inline(always)]
    fn lame_until_ns(&self, id: u32) -> u64 {
        // SAFETY: the word of an element.
        VERDICTS.get_ptr(id).map_or(0, |verdict| unsafe { verdict.cast::<u64>().read_volatile() })
    }

    #[inline(always)]
    fn replace_lame_until_ns(&self, id: u32, before: u64, after: u64) -> bool {
        let Some(verdict) = VERDICTS.get_ptr_mut(id) else { return true };
        // SAFETY: the word of an element.
        unsafe { I::update(verdict.cast::<u64>(), before, after) }
    }
}
