//! Builds the benchmarks, and the programs that they compare, with the release profile. Then runs
//! the benchmarks.

use std::path::PathBuf;

use anyhow::{Result, bail};

use super::demo;
use crate::command::{cargo, root, run as run_command};
use crate::object;

/// `cargo xtask bench`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The benchmark to run; default: all
    what: Option<What>,
    /// lame-duck and load: run only these parts: `restart`, `shutdown`, `answered`, `pushes`,
    /// `stored`, `many`, `flood`, `hostile` of lame-duck, or `fleet`, `publication` of load
    parts: Vec<String>,
    /// connect and load: number of rounds; in each round every arm has a turn; default: 300 for
    /// connect, 1 for load
    #[arg(long)]
    rounds: Option<u32>,
    /// connect: number of connects in each turn of an arm
    #[arg(long, default_value_t = 300)]
    chunk: u32,
    /// connect: run only this group of arms; may be given several times
    #[arg(long = "group")]
    groups: Vec<String>,
    /// connect: compare three arms: this build, this build again, and another build of socklb (the
    /// path of its program)
    #[arg(long, value_name = "PROGRAM", conflicts_with = "report")]
    other: Option<PathBuf>,
    /// connect: compare three arms: this build, this build again, and this build while backends
    /// report to an interface every second
    #[arg(long, conflicts_with_all = ["other", "report"])]
    reports: bool,
    /// connect: number of repetitions; each has new processes, programs and maps
    #[arg(long, conflicts_with = "report")]
    runs: Option<u32>,
    /// connect: write the results into docs/design/performance.md, with a picture
    #[arg(long, conflicts_with = "groups")]
    report: bool,
    /// failover: run only this policy; may be given several times
    #[arg(long = "policy")]
    policies: Vec<String>,
    /// failover: run only this fault: `refuse`, `blackhole`, `reset` or `slow-accept`
    #[arg(long)]
    fault: Option<String>,
    /// failover: run every fault in every fleet under every policy
    #[arg(long)]
    all: bool,
    /// failover: test that healthy backends are not ejected
    #[arg(long = "false")]
    mistakes: bool,
    /// failover --false: number of connects, one in a thousand of which fails; runs with packet
    /// loss make a tenth of this number
    #[arg(long)]
    connects: Option<u64>,
    /// failover: measure the time until a recovered backend gets its full share of connects
    #[arg(long)]
    recovery: bool,
    /// failover: write the results as JSON to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// load: run only this arm, such as `feedback`; may be given several times
    #[arg(long = "arm")]
    arms: Vec<String>,
    /// load: use only connections of this kind: `fresh` or `kept`
    #[arg(long)]
    mode: Option<String>,
    /// load: seconds before the measurement
    #[arg(long)]
    settle: Option<u32>,
    /// load: seconds of the measurement
    #[arg(long)]
    measure: Option<u32>,
    /// load: seconds of the measurement after a quota has changed
    #[arg(long)]
    change: Option<u32>,
    /// load: how much the cost of requests varies: the standard deviation of its logarithm
    #[arg(long)]
    sigma: Option<f64>,
    /// failover, lame-duck, load and close: fail if a requirement is missed
    #[arg(long)]
    check: bool,
}

/// A benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum What {
    /// The time of connect() and of the rest of a connection with socklb's programs, compared with
    /// a direct connection, with a program that does nothing, with a minimal balancer (the floor
    /// program), with nftables and with HAProxy
    Connect,
    /// The time from a plan in memory to the first connect that uses the whole new table
    Publish,
    /// The time that the demo's daemon takes to start, and the CPU time of an idle daemon
    Daemon,
    /// The cost of a dead backend for a client, with and without ejection
    Failover,
    /// The benefits and costs of backends' reports: restarts without a failed request, pushes,
    /// probes, hostile datagrams
    LameDuck,
    /// The unevenness of load on backends with different capacities, under each policy and under
    /// weights that follow load; and the cost of these weights
    Load,
    /// The cost to connects if `socklb close` closes 10,000 flows at the same time
    Close,
}

/// `cargo xtask bench`.
pub fn run(options: &Options) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("benchmarks need root: they create cgroups and load kernel programs");
    }
    if !options.parts.is_empty() && !matches!(options.what, Some(What::LameDuck | What::Load)) {
        bail!("only lame-duck and load have parts; not applicable: {}", options.parts.join(", "));
    }
    let wanted = |what| options.what.is_none_or(|only| only == what);
    run_command(cargo().args(demo::BUILD))?;
    if wanted(What::Connect) {
        let floor = object::build("floor")?;
        let mut bench = kernel_bench("connect");
        bench.arg("--floor").arg(floor);
        let rounds = options.rounds.unwrap_or(300).to_string();
        bench.arg("--rounds").arg(rounds).arg("--chunk").arg(options.chunk.to_string());
        for group in &options.groups {
            bench.args(["--group", group]);
        }
        if let Some(program) = &options.other {
            bench.arg("--other").arg(std::path::absolute(program)?);
        }
        if options.reports {
            bench.arg("--reports");
        }
        if let Some(runs) = options.runs {
            bench.arg("--runs").arg(runs.to_string());
        }
        if options.report {
            bench.arg("--report").arg(root().join("docs/design"));
        }
        run_command(&mut bench)?;
    }
    if wanted(What::Publish) {
        run_command(cargo().args(["bench", "--package", "lb-user", "--bench", "publish", "--locked"]))?;
    }
    if wanted(What::Daemon) {
        run_command(&mut kernel_bench("daemon"))?;
    }
    if wanted(What::Failover) {
        run_command(&mut failover(options)?)?;
    }
    if wanted(What::LameDuck) {
        let mut bench = kernel_bench("lame-duck");
        bench.args(&options.parts).args(options.check.then_some("--check"));
        run_command(&mut bench)?;
    }
    if wanted(What::Load) {
        // The benchmark runs the planner (`lb-sim`) on the same fleet, and compares the results.
        run_command(cargo().args(["build", "--release", "--package", "lb-sim", "--locked"]))?;
        run_command(&mut load(options))?;
    }
    if wanted(What::Close) {
        run_command(kernel_bench("close").args(options.check.then_some("--check")))?;
    }
    Ok(())
}

fn load(options: &Options) -> std::process::Command {
    let mut bench = kernel_bench("load");
    bench.args(&options.parts).args(options.check.then_some("--check"));
    for arm in &options.arms {
        bench.args(["--arm", arm]);
    }
    let values = [
        ("--mode", options.mode.clone()),
        ("--rounds", options.rounds.map(|rounds| rounds.to_string())),
        ("--settle", options.settle.map(|seconds| seconds.to_string())),
        ("--measure", options.measure.map(|seconds| seconds.to_string())),
        ("--change", options.change.map(|seconds| seconds.to_string())),
        ("--sigma", options.sigma.map(|sigma| sigma.to_string())),
    ];
    for (name, value) in values {
        if let Some(value) = value {
            bench.args([name, &value]);
        }
    }
    bench
}

fn failover(options: &Options) -> Result<std::process::Command> {
    let mut bench = kernel_bench("failover");
    for policy in &options.policies {
        bench.args(["--policy", policy]);
    }
    if let Some(fault) = &options.fault {
        bench.args(["--fault", fault]);
    }
    if let Some(connects) = options.connects {
        bench.args(["--connects", &connects.to_string()]);
    }
    if let Some(file) = &options.json {
        bench.arg("--json").arg(std::path::absolute(file)?);
    }
    let flags = [
        ("--all", options.all),
        ("--false", options.mistakes),
        ("--recovery", options.recovery),
        ("--check", options.check),
    ];
    bench.args(flags.iter().filter(|(_, is_wanted)| *is_wanted).map(|(flag, _)| flag));
    Ok(bench)
}

/// The command that runs a benchmark of `lb-bench`.
fn kernel_bench(what: &str) -> std::process::Command {
    let mut bench = cargo();
    bench.args(["run", "--release", "--locked", "--package", "lb-bench", "--bin", "bench", "--", what]);
    bench
}
