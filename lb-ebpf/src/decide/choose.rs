//! The choice: where it stands in the hooks of connect, and as a function of its own, visible from outside, for those of
//! sendmsg, whose programs are long: so the verifier follows it once, for any arguments.

use lb_common::abi::{NO_SLOT, TableRef};
use lb_common::pick::{How, Pick, pick};

use crate::decide::tables::{Kernel, KernelCursor, rules};
use crate::kernel::atomic::{Instructions, Linux5_10, Linux5_12};
use crate::maps::{SERVICES, WALKS};

/// Chooses with one set of atomic instructions.
pub trait Chooser: Instructions {
    /// Chooses a backend of a service from one of its tables, at a tick.
    fn choose(service: u32, table: TableRef, policy: u8, now: u32) -> Chosen;
}

impl Chooser for Linux5_12 {
    #[inline(always)]
    fn choose(service: u32, table: TableRef, policy: u8, now: u32) -> Chosen {
        Chosen { word: choose_backend(service, table.to_word(), u32::from(policy), now) }
    }
}

impl Chooser for Linux5_10 {
    #[inline(always)]
    fn choose(service: u32, table: TableRef, policy: u8, now: u32) -> Chosen {
        Chosen { word: choose_backend_5_10(service, table.to_word(), u32::from(policy), now) }
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn choose_backend(service: u32, table: u64, policy: u32, now: u32) -> u64 {
    choose_here::<Linux5_12>(service, TableRef::from_word(table), policy as u8, now).word
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn choose_backend_5_10(service: u32, table: u64, policy: u32, now: u32) -> u64 {
    choose_here::<Linux5_10>(service, TableRef::from_word(table), policy as u8, now).word
}

/// Chooses where it stands: saves the call, some ten nanoseconds.
#[inline(always)]
pub fn choose_here<I: Instructions>(service: u32, table: TableRef, policy: u8, now: u32) -> Chosen {
    let Some(row) = SERVICES.get_ptr(service) else { return Chosen::BROKEN };
    let Some(cursor) = WALKS.get_ptr_mut(service) else { return Chosen::BROKEN };
    let tables = Kernel { index: service, service: row };
    let (pick, sample) = pick(&tables, &KernelCursor::<I>::new(cursor), table, rules(row, policy), now);
    Chosen::new(pick, sample)
}

/// A pick and its sample in one word, which is what a function can return.
#[derive(Clone, Copy)]
pub struct Chosen {
    word: u64,
}

const HOW_BIT: u32 = 16;
const SAMPLE_BIT: u32 = 32;

impl Chosen {
    const BROKEN: Self = Self { word: (How::Broken as u64) << HOW_BIT | NO_SLOT as u64 };

    #[inline(always)]
    fn new(pick: Pick, sample: u32) -> Self {
        Self {
            word: u64::from(sample) << SAMPLE_BIT
                | (pick.how as u64) << HOW_BIT
                | u64::from(pick.slot & NO_SLOT),
        }
    }

    /// The slot, or [`NO_SLOT`].
    #[inline(always)]
    pub fn slot(self) -> u32 {
        self.word as u32 & NO_SLOT
    }

    /// The sample of the policy.
    #[inline(always)]
    pub fn sample(self) -> u32 {
        (self.word >> SAMPLE_BIT) as u32
    }

    /// How the pick ended.
    #[inline(always)]
    pub fn how(self) -> How {
        const PICKED: u16 = How::Picked as u16;
        const OVERFLOWED: u16 = How::Overflowed as u16;
        const FALLBACK: u16 = How::Fallback as u16;
        const LIMITED: u16 = How::Limited as u16;
        const REFUSED: u16 = How::Refused as u16;
        match (self.word >> HOW_BIT) as u16 {
            PICKED => How::Picked,
            OVERFLOWED => How::Overflowed,
            FALLBACK => How::Fallback,
            LIMITED => How::Limited,
            REFUSED => How::Refused,
            _ => How::Broken,
        }
    }
}
