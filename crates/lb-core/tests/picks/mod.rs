//! Tests of how policies pick from schedules that the planner makes from weights: statistics of
//! many picks, and bugs of other balancers.

#[path = "../../../../lb-common/tests/policies/host.rs"]
#[expect(dead_code, reason = "the tests of single picks use all of it")]
mod host;
mod public_bugs;
mod statistics;

use host::Host;
use lb_core::schedule::{apportion, interleave, length_log2};

/// A host with the schedule that the daemon would publish for backends with these weights.
fn weighted(weights: &[u64]) -> Host {
    let backends = u32::try_from(weights.len()).expect("the number is small");
    Host::new(interleave(&apportion(weights, 1 << length_log2(backends))), weights.len())
}
