//! Waits until a point of time, exact to the microsecond: with the kernel's default slack of 50 us,
//! a sleep would distort the measurement. This module also occupies processors.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::thread::{ClockId, NanosleepRelativeResult, Timespec, clock_nanosleep_relative};

/// Makes the kernel wake the calling thread at the requested time, not up to 50 us later.
pub fn without_slack() -> Result<()> {
    Ok(rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?)
}

/// Runs `work` on a thread that runs before all threads of ordinary priority, and that the kernel
/// wakes without slack.
pub fn in_front<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let work = || {
        without_slack()?;
        before_all_others()?;
        work()
    };
    // The thread is a separate one, because its priority ends with it.
    std::thread::scope(|scope| scope.spawn(work).join().expect("the measurement does not panic"))
}

/// Makes the calling thread run before all threads of ordinary priority.
fn before_all_others() -> Result<()> {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameters outlive the call, which only reads them.
    let result = unsafe {
        libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const priority)
    };
    anyhow::ensure!(result == 0, "raise the priority: {}", std::io::Error::last_os_error());
    Ok(())
}

pub fn pause(time: Duration) {
    until(Instant::now() + time);
}

pub fn until(moment: Instant) {
    while let Some(left) = moment.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        let left = Timespec::try_from(left).expect("the time fits into a timespec");
        // It does not matter whether the sleep was interrupted, because the loop checks the time.
        let _: NanosleepRelativeResult = clock_nanosleep_relative(ClockId::Monotonic, &left);
    }
}

/// Runs `work` while a thread of ordinary priority occupies each processor. Also returns the number
/// of processors.
pub fn while_busy<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let ends = AtomicBool::new(false);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let done = std::thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let done = work();
        ends.store(true, Ordering::Relaxed);
        done
    });
    (done, processors)
}
