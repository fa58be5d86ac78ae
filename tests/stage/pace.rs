//! The pace of this machine (how much slower it is than an idle host), and configured times that
//! grow with it.
//!
//! Some steps of a test must fit into a time that the test configures: five failures within the
//! longest ejection, or a connect before a lame duck's hold is over. A busy host and an emulated
//! guest take longer for the steps, so the time grows with the pace.

use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::{in_a_guest, program};

/// A configured time such as `200ms` or `3s`, multiplied by the pace.
///
/// # Panics
/// If the text is not a number and a unit.
#[track_caller]
pub fn window(time: &str) -> String {
    times(time, pace())
}

/// The factor by which this machine is slower than an idle host. Measured once per process.
pub fn pace() -> u32 {
    static PACE: OnceLock<u32> = OnceLock::new();
    *PACE.get_or_init(|| {
        let mut starts = [(); 3].map(|()| time_of_a_start());
        starts.sort();
        let pace = pace_of(starts[1], in_a_guest());
        eprintln!("socklb starts and ends in {:?}: time windows are {pace} times longer", starts[1]);
        pace
    })
}

/// Measures the time from the start of a process to its end.
fn time_of_a_start() -> Duration {
    let begun = Instant::now();
    let mut version = Command::new(program("socklb"));
    let done = version.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).status();
    assert!(done.expect("start socklb").success(), "socklb --version");
    begun.elapsed()
}

/// At most 5 on a host and 20 in a guest: a window of 3 s then ends within the patience of the
/// tests.
fn pace_of(start: Duration, in_a_guest: bool) -> u32 {
    /// An upper bound for idle hosts, which take 3 to 8 ms.
    const IDLE: Duration = Duration::from_millis(20);
    let (least, most) = if in_a_guest { (10, 20) } else { (1, 5) };
    let pace = start.as_nanos().div_ceil(IDLE.as_nanos());
    u32::try_from(pace).unwrap_or(u32::MAX).clamp(least, most)
}

#[track_caller]
fn times(time: &str, pace: u32) -> String {
    let (number, unit) =
        time.split_at(time.find(|letter: char| !letter.is_ascii_digit()).expect("the time has a unit"));
    format!("{}{unit}", number.parse::<u32>().expect("the text is a number") * pace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_grows_with_the_time_that_a_start_takes() {
        let pace = |milliseconds, in_a_guest| pace_of(Duration::from_millis(milliseconds), in_a_guest);
        assert_eq!([0, 5, 20, 21, 90, 1_000].map(|start| pace(start, false)), [1, 1, 1, 2, 5, 5]);
        assert_eq!([0, 20, 230, 9_000].map(|start| pace(start, true)), [10, 10, 12, 20]);
        assert_eq!([("200ms", 1), ("3s", 10)].map(|(time, pace)| times(time, pace)), ["200ms", "30s"]);
    }
}
