//! `least-loaded`: round robin among the members with the least load ("Site Reliability Engineering", chapter 20), and the
//! look at everybody when those that another policy has looked at are at the limit.
//!
//! One loop finds the smallest of one number per member, in which stand, from high to low: may it not be chosen, is it at
//! the limit, its load, how far it is from where the round robin stands, its slot. Arithmetic in place of branches: the
//! verifier follows every way through each of the 256 turns.

use super::Tables;
use super::view::at_limit;
use crate::abi::{MAX_SUBSET, NO_SLOT};
use crate::load::{self, HalfLife, smaller};

/// What a scan must know besides the tables: plain numbers, as many as a function of a kernel program can be given.
#[derive(Clone, Copy)]
pub struct Scan {
    /// Where the round robin stands.
    pub sample: u32,
    /// The tick.
    pub now: u32,
    /// As in the rules.
    pub active_limit: u32,
    /// As in the rules.
    pub error_half_life: u32,
}

const SLOT_BITS: u32 = 16;
const DISTANCE_BITS: u32 = 8;
const AT_LIMIT_BIT: u32 = 61;
const UNUSABLE_BIT: u32 = 62;
/// More than any.
const NO_MEMBER: u64 = u64::MAX >> 1;
/// The tables contradict each other.
const CORRUPT: u64 = u64::MAX;
const _: () = assert!(NO_SLOT < 1 << SLOT_BITS && MAX_SUBSET == 1 << DISTANCE_BITS);

/// Members that are looked at together, so that the verifier follows the loop for as many, and not for all.
const PART: u32 = 64;

/// The smallest number of all members, as a word of `Least`. `count`: how many there are. `part` gives what [`least_of_part`] does.
#[inline(always)]
pub fn least(count: u32, sample: u32, part: impl Fn(u32) -> u64) -> u64 {
    const { assert!(MAX_SUBSET == 4 * PART) };
    if count == 0 || count > MAX_SUBSET {
        return CORRUPT;
    }
    let more = |number: u64, index: u32| {
        if number == CORRUPT || index * PART >= count {
            return number;
        }
        let theirs = part(index);
        if theirs == CORRUPT { CORRUPT } else { smaller(number, theirs) }
    };
    // Without a loop: the verifier finds none to end that has a call in it, without CAP_PERFMON.
    let number = more(more(more(more(NO_MEMBER, 0), 1), 2), 3);
    if number >= NO_MEMBER {
        return number;
    }
    // Beyond MAX_SUBSET the way went around: from the last member to the first it is one step, not what is left of MAX_SUBSET.
    let distance = Least::from_word(number).distance();
    let around = if sample % count + distance >= MAX_SUBSET { MAX_SUBSET - count } else { 0 };
    number - (u64::from(around) << SLOT_BITS)
}

/// The smallest number of a part of the members.
#[inline(always)]
pub fn least_of_part<T: Tables>(tables: &T, members: T::Members, part: u32, scan: Scan) -> u64 {
    let Some((count, ..)) = tables.list(members) else { return CORRUPT };
    let begin = (part & (MAX_SUBSET / PART - 1)) * PART;
    let Some(mut position) = tables.position(members, begin) else { return CORRUPT };
    if count == 0 || count > MAX_SUBSET {
        return CORRUPT;
    }
    let start = scan.sample % count;
    let half_life = HalfLife::new(scan.error_half_life);
    let mut number = NO_MEMBER;
    // Bound: PART members.
    for offset in 0..PART {
        let index = begin + offset;
        if index >= count {
            break;
        }
        let (slot, next) = tables.member(position);
        position = next;
        let Some(backend) = tables.backend(slot) else { return CORRUPT };
        let errors = load::decayed(tables.errors(backend), scan.now, half_life);
        let load = u64::from(tables.flows(backend)) + u64::from(errors);
        // Whoever stands before it comes after everybody behind it.
        let distance = index.wrapping_sub(start) & (MAX_SUBSET - 1);
        let theirs = u64::from(tables.state(backend).may_be_chosen() ^ 1) << UNUSABLE_BIT
            | at_limit(tables, backend, scan.active_limit) << AT_LIMIT_BIT
            | load << (DISTANCE_BITS + SLOT_BITS)
            | u64::from(distance) << SLOT_BITS
            | u64::from(slot);
        number = smaller(number, theirs);
    }
    number
}

/// How the least loaded member stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It may be chosen.
    BelowLimit,
    /// Everybody who may be chosen is at the limit.
    AtLimit,
    /// Nobody may be chosen.
    NoneUsable,
    /// The tables contradict each other.
    Corrupt,
}

/// The least loaded member, with the steps to it in place of its distance.
#[derive(Clone, Copy)]
pub struct Least {
    number: u64,
}

impl Least {
    /// From the word that [`least`] returns.
    #[inline(always)]
    pub fn from_word(number: u64) -> Self {
        Self { number }
    }

    /// How it stands.
    #[inline(always)]
    pub fn standing(self) -> Standing {
        if self.number > NO_MEMBER {
            Standing::Corrupt
        } else if self.number >> UNUSABLE_BIT != 0 {
            Standing::NoneUsable
        } else if self.number >> AT_LIMIT_BIT != 0 {
            Standing::AtLimit
        } else {
            Standing::BelowLimit
        }
    }

    /// Its slot.
    #[inline(always)]
    pub fn slot(self) -> u32 {
        self.bits(0, SLOT_BITS)
    }

    /// By how many members the round robin moves on, so that it stands behind this one.
    #[inline(always)]
    pub fn steps(self) -> u32 {
        self.distance() + 1
    }

    #[inline(always)]
    fn distance(self) -> u32 {
        self.bits(SLOT_BITS, DISTANCE_BITS)
    }

    #[inline(always)]
    fn bits(self, from: u32, count: u32) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "at most 16 bits")]
        let low = (self.number >> from) as u32;
        low & ((1 << count) - 1)
    }
}
