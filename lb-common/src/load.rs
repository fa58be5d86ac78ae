//! The load of a backend, as the policies compare it: open flows plus recent errors. Errors count
//! like open flows, so that a backend that fails fast does not look idle ("Site Reliability
//! Engineering", chapter 20: errors count as active requests). The module reads no clock.

use core::hint::black_box;
use core::num::{NonZeroU32, NonZeroU64};

use crate::abi::{Policy, RecentErrors};

/// A half-life, stored with its reciprocal, so that a scan divides only once to compute the
/// remaining errors of up to 256 backends.
#[derive(Clone, Copy)]
pub struct HalfLife {
    ticks: u32,
    /// 2^32 / ticks, rounded down. The rounding may lengthen a half-life by up to a thousandth, and
    /// never shortens it.
    reciprocal: u64,
}

impl HalfLife {
    /// A half-life of this number of ticks. With 0, the programs count no new errors, and existing
    /// errors are gone within 32 ticks.
    #[inline(always)]
    pub fn new(ticks: u32) -> Self {
        // An odd number of ticks is never 0, so the division needs no check.
        let ticks = NonZeroU32::MIN | ticks;
        Self { ticks: ticks.get(), reciprocal: (1 << 32) / NonZeroU64::from(ticks) }
    }

    /// The number of half-lives that have passed since the errors were counted.
    #[inline(always)]
    fn halvings(self, errors: RecentErrors, now: u32) -> u64 {
        (u64::from(now.wrapping_sub(errors.since)) * self.reciprocal) >> 32
    }
}

/// The number of `errors` that remain at the tick `now`: the number halves with each half-life, and
/// is rounded down.
#[inline(always)]
pub fn decayed(errors: RecentErrors, now: u32, half_life: HalfLife) -> u32 {
    let halvings = half_life.halvings(errors, now);
    // After 64 halvings nothing is left; a shift by 64 would leave the number unchanged.
    let left = u64::from(errors.count) >> (halvings & 63) & sign_mask(halvings.wrapping_sub(64));
    #[expect(clippy::cast_possible_truncation, reason = "never more than the count")]
    let left = left as u32;
    left
}

/// `errors` after one more error at the tick `now`. The backend has `flows` open flows, including
/// the failed one. The number of added errors is at least one, and large enough that the other open
/// flows and the errors together exceed `peak`. If only one error were added while other backends
/// have many open flows, errors would halve faster than they accumulate, and a backend that fails
/// each connect would get most connects.
#[inline(always)]
pub fn with_another(
    errors: RecentErrors,
    flows: u32,
    peak: u32,
    now: u32,
    half_life: HalfLife,
) -> RecentErrors {
    let left = decayed(errors, now, half_life);
    let more = peak.saturating_sub(flows.wrapping_sub(1).saturating_add(left)).saturating_add(1);
    added(errors, left, more, now, half_life)
}

/// The number of flows that corresponds to the load `peak_flows` per share
/// ([`Service::peak_flows`](crate::abi::Service::peak_flows)), for a backend with `entries` entries
/// in a table of 2^`length_log2` entries. `policy` is the number of a [`Policy`].
#[inline(always)]
pub fn peak_of(policy: u8, peak_flows: u64, entries: u32, length_log2: u8) -> u32 {
    let (share, log2) = if policy == Policy::LeastLoaded as u8 { (1, 0) } else { (entries, length_log2) };
    #[expect(clippy::cast_possible_truncation, reason = "the daemon bounds the peak")]
    let flows = (peak_flows.wrapping_mul(share.into()) >> (PEAK_FRACTION_BITS + u32::from(log2 & 31))) as u32;
    flows
}

/// Number of fractional bits of [`Service::peak_flows`](crate::abi::Service::peak_flows).
pub const PEAK_FRACTION_BITS: u32 = 16;

/// `errors` with `more` added at the tick `now`.
#[inline(always)]
pub fn with_more(errors: RecentErrors, more: u32, now: u32, half_life: HalfLife) -> RecentErrors {
    added(errors, decayed(errors, now, half_life), more, now, half_life)
}

/// `errors`, of which `left` remain at the tick `now`, with `more` added.
#[inline(always)]
fn added(errors: RecentErrors, left: u32, more: u32, now: u32, half_life: HalfLife) -> RecentErrors {
    match left {
        0 => RecentErrors { count: more, since: now },
        // A new error does not move the times of halving: if each error began a new half-life, the
        // number of frequent errors would never halve.
        count => {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "errors remain, so there were fewer than 32 halvings"
            )]
            let halvings = half_life.halvings(errors, now) as u32;
            let since = errors.since.wrapping_add(halvings.wrapping_mul(half_life.ticks));
            RecentErrors { count: count.saturating_add(more), since }
        }
    }
}

/// Whether `errors` are so old that they have decayed completely with any possible half-life. The
/// daemon must then clear them: ticks wrap around, so 52 days after the errors were counted they
/// would count as load again for a while.
pub fn are_stale(errors: RecentErrors, now: u32) -> bool {
    /// 13 days. After 32 half-lives of at most an hour, none of the largest possible number of
    /// errors remains.
    const LONG: u32 = 1 << 30;
    // Larger distances mean a time in the future: the clock may be a tick behind the clock of the
    // previous programs.
    errors.count != 0 && (LONG..=u32::MAX - LONG).contains(&now.wrapping_sub(errors.since))
}

/// A mask with all bits set if `difference` is negative as a signed number, else 0. The mask
/// replaces a comparison, which would be a branch: the verifier follows both sides of each branch
/// in each iteration. `black_box` prevents the compiler from turning the mask into a branch.
#[inline(always)]
pub fn sign_mask(difference: u64) -> u64 {
    black_box((difference.cast_signed() >> 63).cast_unsigned())
}

/// Like [`sign_mask`], but computed in a register, because `black_box` goes through memory in a
/// kernel program. ([`decayed`] does not use this function, because the scan for the least loaded
/// member would need more stack: functions that call each other share 512 bytes.)
#[cfg(not(target_arch = "bpf"))]
#[inline(always)]
pub fn sign_mask_in_register(difference: u64) -> u64 {
    sign_mask(difference)
}

/// The version for kernel programs; it has the same result as the version for the host.
#[cfg(target_arch = "bpf")]
#[inline(always)]
pub fn sign_mask_in_register(difference: u64) -> u64 {
    let mut mask = difference;
    // SAFETY: the instruction only shifts a register.
    unsafe {
        core::arch::asm!("{0} s>>= 63", inout(reg) mask, options(pure, nomem, nostack, preserves_flags));
    }
    mask
}

/// 1 if a number is not 0, else 0, without a branch: the highest bit of a number or of its negative
/// is set unless the number is 0.
#[inline(always)]
pub const fn is_not_zero(number: u64) -> u32 {
    ((number | number.wrapping_neg()) >> 63) as u32
}

/// The smaller of two numbers below 2^63, without a branch.
#[inline(always)]
pub fn smaller(one: u64, other: u64) -> u64 {
    one ^ ((one ^ other) & sign_mask_in_register(other.wrapping_sub(one)))
}

/// Returns the same value, and forces the compiler to assemble it in one register here. Without
/// this function, the compiler may store the parts of the value separately on the stack.
#[inline(always)]
pub fn in_one_register(value: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    {
        let mut value = value;
        // SAFETY: the instruction changes nothing. (The assembly is not empty, because the line
        // information of the program needs an instruction for this line.)
        unsafe {
            core::arch::asm!("{0} |= 0", inout(reg) value, options(pure, nomem, nostack, preserves_flags))
        };
        value
    }
    #[cfg(not(target_arch = "bpf"))]
    value
}

/// Returns the same value, but the verifier knows no bounds of the result. `any` is a value that
/// was read from a map; a kernel program XORs it into the value twice. This is for sums that grow
/// in a loop and therefore have different bounds in each iteration. If the verifier knew these
/// bounds, it would never recognize an iteration as already verified without CAP_PERFMON.
#[cfg(not(target_arch = "bpf"))]
#[inline(always)]
pub fn without_bounds(value: u64, any: u64) -> u64 {
    let _ = any;
    value
}

/// The version for kernel programs; it has the same result as the version for the host.
#[cfg(target_arch = "bpf")]
#[inline(always)]
pub fn without_bounds(value: u64, any: u64) -> u64 {
    let mut value = value;
    // SAFETY: the first instruction changes a register, and the second one restores it.
    unsafe {
        core::arch::asm!("{0} ^= {1}", "{0} ^= {1}", inout(reg) value, in(reg) any, options(pure, nomem, nostack, preserves_flags));
    }
    value
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TICKS: u32 = 1001;
    const NONE: RecentErrors = RecentErrors { count: 0, since: 0 };

    #[track_caller]
    fn check(errors: RecentErrors, now: u32, expected: u32) {
        assert_eq!(decayed(errors, now, HalfLife::new(TICKS)), expected);
    }

    #[test]
    fn errors_halve_every_half_life() {
        let errors = RecentErrors { count: 9, since: 5_000 };
        check(errors, 5_000, 9);
        check(errors, 6_000, 9);
        // A halving is late by at most a thousandth of the half-life, and never early.
        check(errors, 6_002, 4);
        check(errors, 7_004, 2);
        check(errors, 8_006, 1);
        check(errors, 9_008, 0);
        check(errors, 4_999, 0);
        check(errors, 5_000 + 70 * TICKS, 0);
        assert_eq!(
            decayed(errors, 5_032, HalfLife::new(0)),
            0,
            "errors that were counted before the half-life became 0"
        );
    }

    #[test]
    fn decay_works_when_ticks_wrap() {
        check(RecentErrors { count: 4, since: u32::MAX - 400 }, 400, 4);
        check(RecentErrors { count: 4, since: u32::MAX - 400 }, 700, 2);
    }

    #[test]
    fn errors_become_stale_only_after_days() {
        const DAY: u32 = 82_397_460;
        let errors = RecentErrors { count: 5, since: u32::MAX - 9 };
        let after = |ticks: u32| are_stale(errors, errors.since.wrapping_add(ticks));
        assert!(!after(0));
        assert!(!after(DAY + DAY / 3), "32 half-lives of an hour");
        assert!(after(14 * DAY));
        assert!(after(38 * DAY));
        assert!(!after(u32::MAX), "the clock is a tick behind");
        assert!(!are_stale(NONE, 14 * DAY), "there are no errors to clear");
    }

    /// If two errors occur in each half-life, their number stays bounded for any length of time,
    /// and is 0 soon after the last error.
    #[test]
    fn a_steady_error_rate_has_a_bounded_weight() {
        let mut errors = NONE;
        let mut now = 7;
        for _ in 0..1000 {
            errors = with_more(errors, 1, now, HalfLife::new(TICKS));
            assert!(decayed(errors, now, HalfLife::new(TICKS)) <= 4, "{errors:?} at {now}");
            now += TICKS / 2;
        }
        check(errors, now + 3 * TICKS, 0);
    }

    proptest! {
        #[test]
        fn one_more_error_adds_one(count in 0u32..1_000_000, since: u32, later in 0u32..100_000, half_life in 1u32..10_000) {
            let errors = RecentErrors { count, since };
            let now = since.wrapping_add(later);
            let half_life = HalfLife::new(half_life);
            let before = decayed(errors, now, half_life);
            prop_assert_eq!(decayed(with_more(errors, 1, now, half_life), now, half_life), before + 1);
        }

        #[test]
        fn an_error_makes_its_backend_more_loaded_than_the_peak(
            count in 0u32..1_000, later in 0u32..5_000, flows in 1u32..1_000, mean in 0u32..1_000,
        ) {
            let errors = RecentErrors { count, since: 7 };
            let (now, half_life) = (7 + later, HalfLife::new(TICKS));
            let before = flows - 1 + decayed(errors, now, half_life);
            let after = flows - 1 + decayed(with_another(errors, flows, mean, now, half_life), now, half_life);
            prop_assert_eq!(after, before.max(mean) + 1);
        }
    }
}
