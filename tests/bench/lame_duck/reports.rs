//! How reports are sent, received, stored and refused: the parts of the benchmark that need no
//! shutdown of an application.

pub mod pushes;

pub mod stored;

pub mod answered;

pub mod many;

pub mod hostile;

pub mod flood;

use std::time::Duration;

use anyhow::Result;

use crate::pause;
use crate::results::{Finding, Times};

/// The agent and the host of a client, and whether datagrams reach a socket or the kernel.
struct Arm {
    name: &'static str,
    /// The address of the agent and of the backend.
    agent: &'static str,
    host: &'static str,
    /// The interface on which the kernel processes the measured datagrams.
    xdp: Option<&'static str>,
}

impl Arm {
    const fn on_loopback(name: &'static str, xdp: Option<&'static str>) -> Self {
        Self { name, agent: "127.0.0.1", host: "127.0.0.1", xdp }
    }

    const fn over_veth(name: &'static str, xdp: Option<&'static str>) -> Self {
        Self { name, agent: "10.77.0.2", host: "10.77.0.1", xdp }
    }
}

/// The maximum that is required of a quantile: its share, the maximum, and both in words.
type Needed = (f64, Duration, &'static str);

/// The maximum that is required of the kernel on a busy host.
const NEEDED_OF_KERNEL: Needed = (0.999, Duration::from_millis(1), "p99.9 <= 1 ms");
/// The number of datagrams of each measurement.
const DATAGRAMS: u32 = 10_000;
/// The time between two datagrams.
const APART: Duration = Duration::from_millis(1);
/// A datagram without an effect after this time is considered lost.
const LOST: Duration = Duration::from_secs(5);

/// Measures times on an idle host, and then on a host with busy processors. The observer is in
/// front of all other threads, so that busy processors delay only what is observed.
fn idle_and_busy(
    what: &str,
    needed: [Option<Needed>; 2],
    mut once: impl FnMut(u32) -> Result<Duration> + Send,
) -> Result<[Finding; 2]> {
    let mut measure = || {
        pause::in_front(|| {
            let next = |number| {
                pause::pause(APART);
                once(number)
            };
            Ok(Times::new((0..DATAGRAMS).map(next).collect::<Result<Vec<_>>>()?))
        })
    };
    let idle = measure()?;
    let (busy, processors) = pause::while_busy(measure);
    let finding = |what: String, times: &Times, needed| match needed {
        Some((share, most, words)) => {
            Finding::judged(what, times.to_string(), words, times.at(share) <= most)
        }
        None => Finding::shown(what, times.to_string()),
    };
    Ok([
        finding(format!("{what}, idle host"), &idle, needed[0]),
        finding(format!("{what}, {processors} processors busy"), &busy?, needed[1]),
    ])
}
