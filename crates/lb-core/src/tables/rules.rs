//! Converts the operator's configuration to the numbers that the kernel programs use.
//!
//! Times become ticks of the programs' clock, and a connect timeout becomes the number of times
//! that the kernel repeats the SYN.

use std::time::Duration;

use lb_common::abi::{EjectionRules, Rules};
use lb_common::ticks::TICK_LOG2;

use crate::service::Service;

/// The rules of a service.
pub fn of(service: &Service) -> Rules {
    Rules {
        policy: service.policy as u8,
        overflow: service.overflow as u8,
        syn_retries: service.connect_timeout.map_or(0, syn_retries),
        active_limit: service.active_limit.unwrap_or(0),
        error_half_life: service.error_decay.map_or(0, ticks),
        rebind: service.rebind.map_or(0, ticks),
        unanswered_after: ticks(service.unanswered_after),
        ..Rules::default()
    }
}

/// The rules by which backends of a service are ejected.
pub fn of_ejection(service: &Service) -> EjectionRules {
    service.ejection.map_or_else(EjectionRules::default, |ejection| EjectionRules {
        base: ticks(ejection.base),
        max: ticks(ejection.max),
        failures: ejection.failures,
        hangs: u8::from(ejection.hangs),
        _reserved: [0; 2],
    })
}

/// A time in ticks, at least 1, because the programs read 0 as "none".
fn ticks(time: Duration) -> u32 {
    u32::try_from(time.as_nanos() >> TICK_LOG2).unwrap_or(u32::MAX).max(1)
}

/// The number of repeated SYNs for this connect timeout: the smallest number with which the kernel
/// waits at least that long. The kernel waits one second after the first SYN and twice as long
/// after each repetition, so that the total is 3, 7, 15 seconds and so on.
fn syn_retries(time: Duration) -> u8 {
    // Bound: the kernel's default.
    const MOST: u8 = 6;
    (1..MOST).find(|retries| time <= Duration::from_secs((2 << retries) - 1)).unwrap_or(MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_become_ticks_and_retries() {
        for (seconds, retries) in
            [(1, 1), (3, 1), (4, 2), (7, 2), (8, 3), (15, 3), (63, 5), (64, 6), (127, 6)]
        {
            assert_eq!(syn_retries(Duration::from_secs(seconds)), retries, "{seconds} s");
        }
        assert_eq!(ticks(Duration::from_secs(10)), 9_536, "ticks of 1.05 ms");
        assert_eq!(ticks(Duration::from_nanos(1)), 1, "never 0, because 0 ticks mean that no time is set");
        assert_eq!(ticks(Duration::from_hours(24 * 365)), u32::MAX);
    }
}
