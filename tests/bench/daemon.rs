//! The cost of the daemon: when it starts, while it is idle, and when it reloads its configuration.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::Signal;
use stage::{Cgroup, Daemon, Setup, Stage};

use crate::results::statistics::median;

/// How long the benchmark measures the idle daemon.
const IDLE: Duration = Duration::from_secs(30);

/// `bench daemon`.
pub fn run() -> Result<()> {
    let stage = Stage::new();
    let cgroup = Cgroup::new();
    let setup = Setup::new(&stage, "bench");
    let text = format!(
        "[[client]]\njob = \"bench\"\ncgroup = \"{}\"\n[[service]]\nname = \"bench\"\naddress = \"10.96.0.10:80\"\n\
         backends = {{ file = \"list.toml\" }}\n",
        cgroup.relative().display()
    );
    let list: String = (1..=8).map(|i| format!("[[endpoint]]\naddress = \"127.0.0.1:{i}\"\n")).collect();
    setup.write("list.toml", &list);
    let mut first = Vec::new();
    let mut again = Vec::new();
    for _ in 0..7 {
        for times in [&mut first, &mut again] {
            let started = Instant::now();
            let daemon = Daemon::start(&setup, &text);
            times.push(started.elapsed().as_secs_f64() * 1000.0);
            daemon.stop();
        }
        setup.run(&["detach", "--all"]);
    }
    println!("from start to the first answer with attached programs, median of 7:");
    println!("  first start            {:>8.1} ms", median(&first).value);
    println!("  start over pinned maps {:>8.1} ms", median(&again).value);
    let daemon = Daemon::start(&setup, &text);
    let ticks = idle(&daemon)?;
    println!("idle for {} s: {ticks} ticks of CPU time (10 ms each)", IDLE.as_secs());
    drop(daemon);
    setup.run(&["detach", "--all"]);
    many(&setup)
}

/// Measures a host with the maximum number of client tasks: the cost of adding one client, and the
/// cost of all clients while the daemon is idle.
fn many(setup: &Setup) -> Result<()> {
    const CLIENTS: usize = 64;
    let cgroups: Vec<Cgroup> = (0..CLIENTS).map(|_| Cgroup::new()).collect();
    let text = |clients: usize| {
        let mut text = "[limits]\nflow_records = 8192\nslots = 1024\nschedule_entries = 32768\n".to_owned();
        for (number, cgroup) in cgroups[..clients].iter().enumerate() {
            text += &format!(
                "[[client]]\njob = \"job-{number}\"\ncgroup = \"{}\"\n",
                cgroup.relative().display()
            );
        }
        text + "[[service]]\nname = \"bench\"\naddress = \"10.96.0.10:80\"\nbackends = { file = \"list.toml\" }\n"
    };
    let (mut one, mut all) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        for (times, clients) in [(&mut one, 1), (&mut all, CLIENTS)] {
            let started = Instant::now();
            let daemon = Daemon::start(setup, &text(clients));
            times.push(started.elapsed().as_secs_f64() * 1000.0);
            daemon.stop();
            setup.run(&["detach", "--all"]);
        }
    }
    let (one, all) = (median(&one).value, median(&all).value);
    println!("first start with {CLIENTS} clients, median of 3: {all:.1} ms; with 1 client: {one:.1} ms");
    println!("  each further client    {:>8.1} ms", (all - one) / (CLIENTS - 1) as f64);
    let daemon = Daemon::start(setup, &text(CLIENTS));
    let ticks = idle(&daemon)?;
    println!("idle with {CLIENTS} clients for {} s: {ticks} ticks of CPU time", IDLE.as_secs());
    drop(daemon);
    setup.run(&["detach", "--all"]);
    reloads(setup, &cgroups)
}

/// Measures the cost of unchanged clients when the configuration is reloaded, with default limits
/// and with long lists.
fn reloads(setup: &Setup, cgroups: &[Cgroup]) -> Result<()> {
    const TIMES: u32 = 20;
    const ADDED: u32 = 5;
    let list: String =
        (0..100).map(|i| format!("[[endpoint]]\naddress = \"127.0.0.1:{}\"\n", 8000 + i)).collect();
    setup.write("list.toml", &list);
    let text = |clients: usize| {
        let client = |(number, cgroup): (usize, &Cgroup)| {
            format!("[[client]]\njob = \"job-{number}\"\ncgroup = \"{}\"\n", cgroup.relative().display())
        };
        cgroups[..clients].iter().enumerate().map(client).collect::<String>()
            + "[[service]]\nname = \"bench\"\naddress = \"10.96.0.10:80\"\nbackends = { file = \"list.toml\" }\n"
    };
    let fewer = cgroups.len() - 1;
    let started = Instant::now();
    let daemon = Daemon::start(setup, &text(fewer));
    let took = started.elapsed().as_secs_f64();
    println!(
        "first start with {fewer} clients with default limits: {took:.2} s, {} ms of CPU time",
        10 * cpu_ticks(daemon.pid())?
    );
    let taken_on = |act: &dyn Fn()| {
        let count = || daemon.log().matches("configuration applied").count();
        let before = count();
        act();
        stage::eventually("the configuration is in force", count, |count| *count > before);
    };
    let before = cpu_ticks(daemon.pid())?;
    for _ in 0..TIMES {
        taken_on(&|| daemon.signal(Signal::HUP));
    }
    let ticks = cpu_ticks(daemon.pid())? - before;
    println!("  a SIGHUP that changes nothing, mean of {TIMES}: {:.1} ms of CPU time", per(ticks, TIMES));
    let mut ticks = 0;
    for _ in 0..ADDED {
        let before = cpu_ticks(daemon.pid())?;
        taken_on(&|| stage::replace(&setup.folder.join("socklb.toml"), &text(cgroups.len())));
        ticks += cpu_ticks(daemon.pid())? - before;
        taken_on(&|| stage::replace(&setup.folder.join("socklb.toml"), &text(fewer)));
    }
    println!("  one more client, mean of {ADDED}:               {:.1} ms of CPU time", per(ticks, ADDED));
    drop(daemon);
    setup.run(&["detach", "--all"]);
    Ok(())
}

/// The CPU time of one repetition, in milliseconds. `ticks` is the CPU time of all `times`
/// repetitions.
fn per(ticks: u64, times: u32) -> f64 {
    Duration::from_millis(10 * ticks).as_secs_f64() * 1000.0 / f64::from(times)
}

/// The CPU time that an idle daemon uses within [`IDLE`], in ticks.
fn idle(daemon: &Daemon) -> Result<u64> {
    let before = cpu_ticks(daemon.pid())?;
    let until = Instant::now() + IDLE;
    while let Some(left) = until.checked_duration_since(Instant::now()) {
        std::thread::park_timeout(left);
    }
    Ok(cpu_ticks(daemon.pid())? - before)
}

/// The user and system time of a process, in ticks (proc_pid_stat(5), fields 14 and 15).
pub fn cpu_ticks(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the name of the process in parentheses, which may contain blanks.
    let fields: Vec<&str> =
        stat.rsplit_once(')').context("the stat line has no name")?.1.split_whitespace().collect();
    Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?)
}
