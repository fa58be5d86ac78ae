//! What a connect() costs through the programs.
//!
//! Each arm is a process in a cgroup of its own. A round lets every arm dial some hundred times, in a new random order;
//! the ratio to the first arm is taken within each round, so that whatever disturbs the machine disturbs both. The
//! second arm is a copy of the first: its ratio is the noise. Connections end with a reset, so that no port waits; the
//! backends poll on another CPU, so that no wake-up is measured.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, SocketAddrV4, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use aya::Ebpf;
use aya::maps::{Array, HashMap};
use aya::programs::{CgroupAttachMode, CgroupSockAddr};
use lb_common::abi::{Backend, ServiceIndex, ServiceKey4};
use lb_common::net::{Address, Be16, Be32};
use rustix::net::{AddressFamily, SocketType};
use stage::maps::Raw;
use stage::probe::die_with_us;
use stage::{Cgroup, Daemon, Setup, Stage};

use crate::statistics::{median, percentile};

/// `bench connect`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The object with the empty and the floor program
    #[arg(long)]
    floor: PathBuf,
    /// Rounds; every arm has its turn in each
    #[arg(long, default_value_t = 150)]
    rounds: u32,
    /// Connects per turn
    #[arg(long, default_value_t = 300)]
    chunk: u32,
}

/// The backends of a benchmark.
#[derive(Debug, clap::Args)]
pub struct ServeOptions {
    /// The first of so many consecutive ports on loopback
    port: u16,
    /// How many
    count: u16,
}

/// One arm.
#[derive(Debug, clap::Args)]
pub struct WorkOptions {
    /// Its cgroup
    cgroup: PathBuf,
    /// What it dials: one address, or several in turn
    addresses: Vec<SocketAddr>,
    /// Datagram sockets: one socket, connected again and again
    #[arg(long)]
    udp: bool,
}

const BACKENDS: u16 = 8;
const PORT: u16 = 19000;
/// Of the loopback range: should it ever not be rewritten, the connect is refused on this host.
const SERVICE: SocketAddrV4 = SocketAddrV4::new(std::net::Ipv4Addr::new(127, 96, 0, 10), 80);

/// An arm and what it has measured.
struct Arm {
    name: &'static str,
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    p50: Vec<f64>,
    p99: Vec<f64>,
    rate: Vec<f64>,
}

impl Arm {
    fn start(name: &'static str, cgroup: &Cgroup, addresses: &[SocketAddr], udp: bool) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("work").arg(cgroup.path()).args(addresses.iter().map(ToString::to_string));
        if udp {
            command.arg("--udp");
        }
        die_with_us(&mut command);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let requests = child.stdin.take().context("piped")?;
        let answers = BufReader::new(child.stdout.take().context("piped")?);
        Ok(Self { name, child, requests, answers, p50: Vec::new(), p99: Vec::new(), rate: Vec::new() })
    }

    fn turn(&mut self, count: u32, keep: bool) -> Result<()> {
        writeln!(self.requests, "{count}")?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        let numbers: Vec<f64> = answer.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let [p50, p99, rate] = numbers.as_slice() else { bail!("arm {} answers {answer:?}", self.name) };
        if keep {
            self.p50.push(*p50);
            self.p99.push(*p99);
            self.rate.push(*rate);
        }
        Ok(())
    }
}

impl Drop for Arm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `bench connect`.
pub fn run(options: &Options) -> Result<()> {
    let stage = Stage::on_host_network();
    let mut server = Command::new(std::env::current_exe()?);
    die_with_us(server.args(["serve", &PORT.to_string(), &BACKENDS.to_string()]));
    let mut server = server.stdout(Stdio::piped()).spawn()?;
    BufReader::new(server.stdout.take().context("piped")?).read_line(&mut String::new())?;
    let outcome = measure(&stage, options);
    server.kill()?;
    server.wait()?;
    outcome
}

fn measure(stage: &Stage, options: &Options) -> Result<()> {
    let cgroups: Vec<Cgroup> = (0..7).map(|_| Cgroup::new()).collect();
    let [direct, again, one, empty, floor, ours, direct_udp] = cgroups.as_slice() else {
        bail!("seven cgroups")
    };
    let _attached = [attach(&options.floor, "empty4", empty)?, attach(&options.floor, "floor4", floor)?];
    let before = program_ids();
    let _daemon = start_daemon(stage, ours);
    let backends: Vec<SocketAddr> = (0..BACKENDS).map(|i| ([127, 0, 0, 1], PORT + i).into()).collect();
    let service: [SocketAddr; 1] = [SERVICE.into()];
    let mut arms = vec![
        Arm::start("direct", direct, &backends, false)?,
        Arm::start("direct again (A/A)", again, &backends, false)?,
        Arm::start("empty program", empty, &backends, false)?,
        // The floor program knows one backend: this is what it is to be compared with.
        Arm::start("direct, one backend", one, &backends[..1], false)?,
        Arm::start("floor program, one backend", floor, &service, false)?,
        Arm::start("socklb", ours, &service, false)?,
        Arm::start("socklb, not a service", ours, &backends, false)?,
    ];
    println!(
        "TCP connect() on loopback, {BACKENDS} backends, {} rounds x {} connects",
        options.rounds, options.chunk
    );
    play(&mut arms, options.rounds, options.chunk)?;
    report(&arms);
    let mut udp = vec![
        Arm::start("direct", direct_udp, &backends, true)?,
        Arm::start("direct again (A/A)", direct, &backends, true)?,
        Arm::start("empty program", empty, &backends, true)?,
        Arm::start("socklb, not a service", ours, &backends, true)?,
    ];
    println!("\nUDP connect() of one socket again and again: the miss path without a handshake around it");
    play(&mut udp, options.rounds, options.chunk * 10)?;
    report(&udp);
    programs(&mut arms, &before)
}

/// Rounds in which every arm has its turn, in a new order each time.
fn play(arms: &mut [Arm], rounds: u32, chunk: u32) -> Result<()> {
    let mut order: Vec<usize> = (0..arms.len()).collect();
    // Any generator will do that is not in step with the machine; the seed is fixed so that runs are alike.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..rounds + 3 {
        for i in (1..order.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let j = usize::try_from(state >> 33)? % (i + 1);
            order.swap(i, j);
        }
        for &arm in &order {
            // The first rounds warm caches and are not kept.
            arms[arm].turn(chunk, round >= 3)?;
        }
    }
    Ok(())
}

fn report(arms: &[Arm]) {
    println!(
        "{:<28} {:>9} {:>28} {:>10} {:>10}",
        "arm", "p50 ns", "p50 / direct [95 % CI]", "p99 ratio", "rate ratio"
    );
    let first = &arms[0];
    for arm in arms {
        let ratio = |of: fn(&Arm) -> &Vec<f64>| -> Vec<f64> {
            of(arm).iter().zip(of(first)).map(|(value, base)| value / base).collect()
        };
        let p50 = median(&ratio(|arm| &arm.p50));
        println!(
            "{:<28} {:>9.0} {:>10.4} [{:.4}, {:.4}] {:>10.3} {:>10.3}",
            arm.name,
            median(&arm.p50).value,
            p50.value,
            p50.low,
            p50.high,
            median(&ratio(|arm| &arm.p99)).value,
            median(&ratio(|arm| &arm.rate)).value,
        );
    }
}

/// Time per run of our programs from the kernel's own statistics, in a pass of its own: counting costs time as well.
fn programs(arms: &mut [Arm], before: &[u32]) -> Result<()> {
    let _statistics =
        aya::sys::enable_stats(aya::sys::Stats::RunTime).context("switch the kernel's statistics on")?;
    let ours = || -> Vec<(String, u64, u128)> {
        let programs = aya::programs::loaded_programs().filter_map(Result::ok);
        let ours = programs.filter(|program| !before.contains(&program.id()) || is_arm(program));
        ours.map(|program| {
            let name = program.name_as_str().unwrap_or("?").to_owned();
            (name, program.run_count(), program.run_time().as_nanos())
        })
        .collect()
    };
    let mut runs: std::collections::BTreeMap<String, Vec<f64>> = std::collections::BTreeMap::new();
    for _ in 0..7 {
        let earlier = ours();
        for arm in &mut *arms {
            arm.turn(2000, false)?;
        }
        for ((name, count, time), (_, count0, time0)) in ours().into_iter().zip(earlier) {
            if count > count0 {
                #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a few thousand runs")]
                runs.entry(name).or_default().push((time - time0) as f64 / (count - count0) as f64);
            }
        }
    }
    println!(
        "\nns per run by the kernel's statistics, its own clock reads included (an empty program shows them)"
    );
    for (name, times) in runs {
        let time = median(&times);
        println!("{name:<28} {:>9.0} [{:.0}, {:.0}]", time.value, time.low, time.high);
    }
    Ok(())
}

fn is_arm(program: &aya::programs::ProgramInfo) -> bool {
    matches!(program.name_as_str(), Some("empty4" | "floor4"))
}

fn program_ids() -> Vec<u32> {
    aya::programs::loaded_programs().filter_map(Result::ok).map(|program| program.id()).collect()
}

fn start_daemon(stage: &Stage, cgroup: &Cgroup) -> Daemon {
    let setup = Setup::new(stage, "bench");
    let list: Vec<String> = (0..BACKENDS).map(|i| format!("\"127.0.0.1:{}\"", PORT + i)).collect();
    let text = format!(
        "[[client]]\njob = \"bench\"\ncgroup = \"{}\"\n[[service]]\nname = \"bench\"\naddress = \"{SERVICE}\"\n\
         backends = {{ static = [{}] }}\n",
        cgroup.relative().display(),
        list.join(", ")
    );
    Daemon::start(&setup, &text)
}

/// Loads one program of the benchmark's object and attaches it. What is returned keeps it attached.
fn attach(object: &Path, program: &str, cgroup: &Cgroup) -> Result<Ebpf> {
    let mut ebpf = Ebpf::load_file(object).with_context(|| format!("load {}", object.display()))?;
    let mut services: HashMap<_, Raw<ServiceKey4>, Raw<ServiceIndex>> =
        HashMap::try_from(ebpf.map_mut("floor_services").context("a map")?)?;
    let key = ServiceKey4 {
        address: Be32::from_host(SERVICE.ip().to_bits()),
        port: Be16::from_host(SERVICE.port()),
        protocol: 6,
        _reserved: 0,
    };
    services.insert(Raw(key), Raw(ServiceIndex { service: 0 }), 0)?;
    let mut backends: Array<_, Raw<Backend>> =
        Array::try_from(ebpf.map_mut("floor_backends").context("a map")?)?;
    let backend = Backend {
        address: Address::from(std::net::Ipv4Addr::LOCALHOST),
        port: Be16::from_host(PORT),
        service: 0,
        _reserved: 0,
        generation: 0,
        weight: 1,
    };
    backends.set(0, Raw(backend), 0)?;
    let loaded: &mut CgroupSockAddr = ebpf.program_mut(program).context("a program")?.try_into()?;
    loaded.load()?;
    loaded.attach(std::fs::File::open(cgroup.path())?, CgroupAttachMode::Single)?;
    Ok(ebpf)
}

fn pin_to(cpu: usize) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// The backends: accept in a loop without sleeping, close late.
pub fn serve(options: &ServeOptions) -> Result<()> {
    pin_to(1)?;
    let mut listeners = Vec::new();
    for i in 0..options.count {
        let listener = TcpListener::bind(("127.0.0.1", options.port + i))?;
        listener.set_nonblocking(true)?;
        listeners.push(listener);
    }
    println!("ready");
    let mut kept = std::collections::VecDeque::new();
    // Ends with the benchmark, which kills it; the deadline is for the case that nobody does.
    let end = Instant::now() + Duration::from_secs(1800);
    while Instant::now() < end {
        for listener in &listeners {
            if let Ok((stream, _)) = listener.accept() {
                kept.push_back(stream);
            }
        }
        while kept.len() > 64 {
            kept.pop_front();
        }
    }
    Ok(())
}

/// An arm: dials as often as it is told, and says how long that took.
pub fn work(options: &WorkOptions) -> Result<()> {
    std::fs::write(options.cgroup.join("cgroup.procs"), std::process::id().to_string())?;
    pin_to(0)?;
    let mut next = options.addresses.iter().cycle();
    let datagram = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    for line in std::io::stdin().lock().lines() {
        let count: usize = line?.trim().parse()?;
        let mut times = Vec::with_capacity(count);
        let started = Instant::now();
        for _ in 0..count {
            let address = next.next().context("an address")?;
            let time = if options.udp { timed(&datagram, address)? } else { dial(address)? };
            times.push(u64::try_from(time.as_nanos())?);
        }
        let seconds = started.elapsed().as_secs_f64();
        times.sort_unstable();
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let rate = count as f64 / seconds;
        println!("{} {} {rate}", percentile(&times, 0.5), percentile(&times, 0.99));
    }
    Ok(())
}

fn dial(address: &SocketAddr) -> Result<Duration> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    timed(&socket, address)
}

fn timed(socket: &rustix::fd::OwnedFd, address: &SocketAddr) -> Result<Duration> {
    let started = Instant::now();
    rustix::net::connect(socket, address)?;
    Ok(started.elapsed())
}
