//! Drives the VM tests: boots each kernel that it is given with the local tests inside and judges what comes back.
//!
//! It is told where kernels and programs lie, because fetching and building are the workshop's, and it knows nothing of
//! what the tests are about: it counts them, cross-checks what they skip, and keeps the record of the verifier's work.

mod cpio;

mod initramfs;

mod guest;

mod report;

mod record;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Parser;
use tokio::sync::Semaphore;

use crate::guest::{Ended, Guest};
use crate::report::{PASSED, Report};

/// Drives the VM tests; `cargo xtask test vm` fetches kernels, builds programs and calls this.
#[derive(Debug, Parser)]
struct Options {
    /// Folder of the programs for the guest: init, socklb, probe
    #[arg(long)]
    programs: PathBuf,
    /// The local tests, linked statically
    #[arg(long)]
    tests: PathBuf,
    /// Folder for initramfs images and logs
    #[arg(long)]
    scratch: PathBuf,
    /// Only tests whose name contains this
    #[arg(long)]
    filter: Option<String>,
    /// Write what the verifier counted to this file, instead of comparing with it
    #[arg(long, conflicts_with = "filter")]
    record: Option<PathBuf>,
    /// Kernels, the oldest first: folders with `vmlinuz` and `modules/`, named like the kernel
    #[arg(required = true)]
    kernels: Vec<PathBuf>,
}

/// Each guest has two CPUs and keeps them busy. More guests than the host has pairs of CPUs are slower than one after the
/// other: one CPU of a guest waits for another that is not running, with a lock held or a call to answer.
fn guests_at_a_time() -> usize {
    (std::thread::available_parallelism().map_or(1, usize::from) / 2).max(1)
}

/// A guest that prints nothing for so long hangs. A test may take half of it under emulation on a busy machine.
const SILENCE: Duration = Duration::from_secs(300);
/// How long a fact may take to come true in a guest, in seconds. Only a test that fails waits so long.
const PATIENCE_S: u32 = 120;
/// However much it prints, a guest that runs so long is lost.
const TOTAL: Duration = Duration::from_secs(40 * 60);

/// Tests that run in a guest only if they are named: what they use up, or what the daemon computes and says, is a process's own
/// on every kernel, and under emulation they take minutes. The host runs them.
const HOST_ONLY: [&str; 10] = [
    "exhaustion::",
    // What follows from reports is the daemon's; that tables are read and reports heard is tested beside it.
    "follow_load::",
    // How files are read and what commands print. A guest may stand still in the middle of a write, too, for longer than a file takes to
    // count as settled.
    "endpoints::",
    "commands::",
    "comparison::",
    "reload_faults::",
    "notify::",
    "questions::",
    "subsets::",
    // And guests have no pseudo-terminals.
    "watch::",
];

/// Tests of what depends on the features that a kernel has, and of each hook. The oldest kernel runs everything, as the host does on
/// its own: these two run both variants of the programs. Any other runs these.
const BY_KERNEL: [&str; 22] = [
    "active::",
    "callbacks::",
    "counts::",
    "doctor::a_healthy_host_is_said_to_be_one",
    "ejection::a_connect_of_an_mptcp_socket_is_never_a_trial",
    "endings::",
    "families::",
    "faults::",
    "flows::",
    "frames::",
    "links::",
    "many::a_client_task_takes_the_kernel_memory_that_is_documented",
    "odd::",
    "peers_flows::",
    "reclaim::",
    "refusal::",
    "responder",
    "udp::",
    "udp_flows::",
    "unanswered::",
    "verifier::",
    "xdp::",
];

/// Which tests a guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tests<'a> {
    /// Those whose names contain this.
    Named(&'a str),
    /// All but [`HOST_ONLY`].
    All,
    /// [`BY_KERNEL`].
    ByKernel,
}

impl<'a> Tests<'a> {
    /// Of the kernel at a position, the oldest being the first.
    fn of(filter: Option<&'a str>, position: usize) -> Self {
        match filter {
            Some(filter) => Self::Named(filter),
            None if position == 0 => Self::All,
            None => Self::ByKernel,
        }
    }

    /// What chooses them, as arguments of the tests.
    fn arguments(self) -> Vec<String> {
        match self {
            Self::Named(filter) => vec![filter.to_owned()],
            Self::All => HOST_ONLY.iter().flat_map(|name| ["--skip", name]).map(str::to_owned).collect(),
            Self::ByKernel => BY_KERNEL.map(str::to_owned).into(),
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Options::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result<()> {
    fs::create_dir_all(&options.scratch).with_context(|| format!("make {}", options.scratch.display()))?;
    let options = Arc::new(options);
    let places = Arc::new(Semaphore::new(guests_at_a_time()));
    let mut guests = Vec::new();
    for (position, kernel) in options.kernels.clone().into_iter().enumerate() {
        let (options, places) = (Arc::clone(&options), Arc::clone(&places));
        guests.push(tokio::spawn(async move {
            let place = places.acquire().await.context("wait for a place")?;
            let tests = Tests::of(options.filter.as_deref(), position);
            let tested = test_kernel(&options, &kernel, tests).await;
            drop(place);
            tested.with_context(|| format!("kernel {}", name(&kernel)))
        }));
    }
    if options.filter.is_none() {
        println!("vm: left to the host: {}", HOST_ONLY.join(", "));
        println!("vm: all others on the first kernel; on others: {}", BY_KERNEL.join(", "));
    }
    let mut reports = Vec::new();
    for guest in guests {
        reports.push(guest.await.context("a guest's task")??);
    }
    if let Some(path) = &options.record {
        record::write(path, &reports, &options.tests)?;
    }
    let mut faults = 0;
    println!();
    for report in &reports {
        println!("{}", report.summary());
        for fault in report.faults(options.filter.is_some()) {
            println!("  FAULT: {fault}");
            faults += 1;
        }
    }
    if faults > 0 {
        bail!("{faults} faults; the whole logs are in {}", options.scratch.display());
    }
    Ok(())
}

/// A kernel's name is that of its folder.
fn name(kernel: &Path) -> String {
    kernel.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

async fn test_kernel(options: &Options, kernel: &Path, tests: Tests<'_>) -> Result<Report> {
    let name = name(kernel);
    let image = options.scratch.join(format!("{name}.cpio"));
    let content = initramfs::build(&options.programs, &options.tests, &kernel.join("modules"))?;
    fs::write(&image, content).with_context(|| format!("write {}", image.display()))?;
    // The log tells how long each test took, which the stable test harness does where this variable is set.
    let mut arguments: Vec<String> =
        ["--test-threads", "4", "-Zunstable-options", "--report-time"].map(str::to_owned).into();
    let mut variables = vec![format!("{}={PATIENCE_S}", stage::PATIENCE_S), "RUSTC_BOOTSTRAP=1".to_owned()];
    if options.record.is_some() {
        arguments.push(record::TEST.to_owned());
        variables.push(format!("{}=1", stage::record::RECORDING));
    } else {
        arguments.extend(tests.arguments());
    }
    let guest = Guest {
        name: name.clone(),
        kernel: kernel.join("vmlinuz"),
        initramfs: image,
        arguments,
        variables,
        log: options.scratch.join(format!("{name}.log")),
        silence: SILENCE,
        total: TOTAL,
        live: options.kernels.len() == 1,
    };
    let began = Instant::now();
    let mut run = guest.run().await?;
    // One boot in a hundred dies early under emulation, without a word. A result is never asked for twice.
    let again = !matches!(run.ended, Ended::Code(_));
    if again {
        println!("[{name}] no result ({}), once more; the end of its log:", run.ended);
        report::print_tail(&run.lines);
        run = guest.run().await?;
    }
    let report = Report::new(name, run, began.elapsed(), again);
    println!("{}", report.summary());
    if report.ended != Ended::Code(PASSED) {
        report.print_failures();
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_kernel_runs_everything() {
        assert_eq!([0, 1, 3].map(|at| Tests::of(None, at)), [Tests::All, Tests::ByKernel, Tests::ByKernel]);
        assert_eq!(Tests::of(Some("udp"), 1), Tests::Named("udp"));
    }

    /// What a test expects of a kernel by its features, it has to show on those that have some of them.
    #[test]
    fn whoever_asks_for_a_feature_runs_on_every_kernel_and_lists_name_what_there_is() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("local");
        let mut modules = Vec::new();
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let text = fs::read_to_string(&path).unwrap();
            let module = path.file_stem().unwrap().to_string_lossy().into_owned();
            let asks =
                text.split("kernel::").skip(1).any(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()));
            let runs = BY_KERNEL.iter().any(|name| name.split("::").next() == Some(&module));
            assert!(runs || !asks, "{module} asks for a feature of the kernel: name it in BY_KERNEL");
            modules.push((module, text));
        }
        for name in HOST_ONLY.iter().chain(&BY_KERNEL) {
            let (module, test) = name.split_once("::").unwrap_or((name, ""));
            let is_there =
                |(known, text): &(String, String)| known == module && text.contains(&format!("fn {test}"));
            assert!(modules.iter().any(is_there), "there is no test {name}");
        }
    }
}
