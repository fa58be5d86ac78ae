//! The policy `least-loaded`: round robin among the members with the least load ("Site Reliability
//! Engineering", chapter 20). Other policies use the same scan of all members if the backends that
//! they have examined are at the limit.
//!
//! A scan computes one number per member and finds the smallest. The number contains, from high to
//! low bits: 1 if the member may not be chosen, 1 if it is at the limit, its load, its distance
//! from the position of the round robin, and its slot. Arithmetic replaces branches, because the
//! verifier follows every path through each of the 256 iterations.

use super::Tables;
use super::view::at_limit;
use crate::abi::{MAX_SUBSET, NO_SLOT};
use crate::load::{self, HalfLife, smaller};

/// The input of a scan besides the tables, as numbers that can be passed to a function of a kernel
/// program.
#[derive(Clone, Copy)]
pub struct Scan {
    /// The position of the round robin, modulo the number of members.
    pub sample: u32,
    /// The tick of the choice.
    pub now: u32,
    /// [`Rules::active_limit`](crate::abi::Rules::active_limit).
    pub active_limit: u32,
    /// [`Rules::error_half_life`](crate::abi::Rules::error_half_life).
    pub error_half_life: u32,
}

const SLOT_BITS: u32 = 16;
const DISTANCE_BITS: u32 = 8;
const AT_LIMIT_BIT: u32 = 61;
const UNUSABLE_BIT: u32 = 62;
/// A number that is larger than that of any member.
const NO_MEMBER: u64 = u64::MAX >> 1;
/// A result in place of a member's number: the tables contradict each other.
const CORRUPT: u64 = u64::MAX;
const _: () = assert!(NO_SLOT < 1 << SLOT_BITS && MAX_SUBSET == 1 << DISTANCE_BITS);

/// Number of members that one part of the scan examines. The verifier follows a loop over this
/// number of members more quickly than a loop over all members.
const PART: u32 = 64;

/// The smallest number of all `count` members, with a corrected distance; `Least` interprets it.
/// `part(index)` must return the result of [`least_of_part`].
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
    // The calls are not in a loop, because without CAP_PERFMON the verifier cannot prove that a
    // loop with a call in it ends.
    let number = more(more(more(more(NO_MEMBER, 0), 1), 2), 3);
    if number >= NO_MEMBER {
        return number;
    }
    // For members before the start, the distance was computed modulo MAX_SUBSET, as if the list had
    // MAX_SUBSET members. In fact the first member follows the last one, so the difference is
    // subtracted.
    let distance = Least::from_word(number).distance();
    let around = if sample % count + distance >= MAX_SUBSET { MAX_SUBSET - count } else { 0 };
    number - (u64::from(around) << SLOT_BITS)
}

/// The smallest number of one part of the members.
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
        // Modulo MAX_SUBSET, so that members before the start come after all members that follow
        // the start.
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

/// The state of the least loaded member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The member may be chosen, and is below the limit.
    BelowLimit,
    /// Every member that may be chosen is at the limit.
    AtLimit,
    /// No member may be chosen.
    NoneUsable,
    /// The tables contradict each other.
    Corrupt,
}

/// The least loaded member, from the number that [`least`] has returned.
#[derive(Clone, Copy)]
pub struct Least {
    number: u64,
}

impl Least {
    /// Interprets a number that [`least`] has returned.
    #[inline(always)]
    pub fn from_word(number: u64) -> Self {
        Self { number }
    }

    /// The state of the least loaded member.
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

    /// The slot of the member.
    #[inline(always)]
    pub fn slot(self) -> u32 {
        self.bits(0, SLOT_BITS)
    }

    /// Number of members by which the round robin must advance to reach the position after this
    /// member.
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
