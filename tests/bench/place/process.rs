//! The processes of a benchmark: parts of this program, in cgroups and networks.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, LinkNameSpaceType, move_into_link_name_space, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use stage::daemon::ChildGuard;
use stage::probe::die_with_us;

/// A command that runs a part of this program, until this process ends.
pub fn part(name: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(name).stdin(Stdio::null()).stdout(Stdio::null());
    die_with_us(&mut command);
    Ok(command)
}

/// Starts a command. Its process is killed on drop.
pub fn start(command: &mut Command) -> Result<ChildGuard> {
    Ok(ChildGuard::of(command.spawn().with_context(|| format!("start {command:?}"))?))
}

/// Makes a command run in a network namespace.
pub fn place_in(network: &File, command: &mut Command) {
    let network = network.try_clone().expect("clone the descriptor");
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(move || Ok(enter(&network)?)) };
}

/// Moves the calling thread into a network namespace.
pub fn enter(network: &File) -> rustix::io::Result<()> {
    move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))
}

/// Pins this process to one CPU.
pub fn pin_to(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// Raises the limit of file descriptors to its maximum.
pub fn raise_descriptors() -> Result<()> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

/// The CPU time of this process.
pub fn own_cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

/// The CPU time of all threads of a process, in nanoseconds (the first field of their `schedstat`).
/// It is exact while the threads sleep.
pub fn cpu_time(pid: u32) -> Result<u64> {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        sum += text.split(' ').next().context("schedstat has no first field")?.parse::<u64>()?;
    }
    Ok(sum)
}

/// The user and system time of a process, in ticks of 10 ms (proc_pid_stat(5), fields 14 and 15).
pub fn cpu_ticks(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the name of the process in parentheses, which may contain blanks.
    let fields: Vec<&str> =
        stat.rsplit_once(')').context("the stat line has no name")?.1.split_whitespace().collect();
    Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?)
}
