//! From what the operator asked for to the numbers by which the kernel programs pick.
//!
//! The only place that knows both. Times become ticks of the programs' clock, and seconds of a connect the number of times
//! that the kernel repeats itself.

use std::time::Duration;

use lb_common::abi::{self, OVERFLOW_LEAST_LOADED, OVERFLOW_REFUSE, Rules};
use lb_common::ticks::TICK_LOG2;

use crate::service::{Overflow, Policy, Service};

/// The rules of a service.
pub fn of(service: &Service) -> Rules {
    Rules {
        policy: policy(service.policy) as u8,
        overflow: match service.overflow {
            Overflow::LeastLoaded => OVERFLOW_LEAST_LOADED,
            Overflow::Refuse => OVERFLOW_REFUSE,
        },
        syn_retries: service.connect_timeout.map_or(0, syn_retries),
        active_limit: service.active_limit.unwrap_or(0),
        error_half_life: service.error_decay.map_or(0, ticks),
        rebind: service.rebind.map_or(0, ticks),
        unanswered_after: ticks(service.unanswered_after),
        ..Rules::default()
    }
}

fn policy(policy: Policy) -> abi::Policy {
    match policy {
        Policy::RoundRobin => abi::Policy::RoundRobin,
        Policy::WeightedRoundRobin => abi::Policy::WeightedRoundRobin,
        Policy::LeastLoaded => abi::Policy::LeastLoaded,
        Policy::P2c => abi::Policy::P2c,
        Policy::Random => abi::Policy::Random,
    }
}

/// At least one: 0 has another meaning.
fn ticks(time: Duration) -> u32 {
    u32::try_from(time.as_nanos() >> TICK_LOG2).unwrap_or(u32::MAX).max(1)
}

/// How often a SYN is sent again in a connect that may take this long: the fewest with which the kernel waits at least as
/// long. It waits a second for the first answer and then twice as long each time, which makes 3, 7, 15 seconds and so on.
fn syn_retries(time: Duration) -> u8 {
    // Bound: what the kernel itself does where nobody asks.
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
        assert_eq!(ticks(Duration::from_secs(10)), 9_536, "of 1.05 ms");
        assert_eq!(ticks(Duration::from_nanos(1)), 1, "never the number that means none");
        assert_eq!(ticks(Duration::from_hours(24 * 365)), u32::MAX);
    }

    #[test]
    fn policies_have_the_same_names_on_both_sides() {
        for ours in Policy::ALL {
            let theirs = policy(ours);
            assert_eq!(theirs.name(), ours.name());
            assert_eq!(abi::Policy::from_u8(theirs as u8), Some(theirs));
        }
    }
}
