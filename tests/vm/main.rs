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
    /// Kernels: folders with `vmlinuz` and `modules/`, named like the kernel
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
    for kernel in options.kernels.clone() {
        let (options, places) = (Arc::clone(&options), Arc::clone(&places));
        guests.push(tokio::spawn(async move {
            let place = places.acquire().await.context("wait for a place")?;
            let tested = test_kernel(&options, &kernel).await;
            drop(place);
            tested.with_context(|| format!("kernel {}", name(&kernel)))
        }));
    }
    if options.filter.is_none() {
        println!("vm: left to the host: {}", HOST_ONLY.join(", "));
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

async fn test_kernel(options: &Options, kernel: &Path) -> Result<Report> {
    let name = name(kernel);
    let image = options.scratch.join(format!("{name}.cpio"));
    let content = initramfs::build(&options.programs, &options.tests, &kernel.join("modules"))?;
    fs::write(&image, content).with_context(|| format!("write {}", image.display()))?;
    let mut arguments = vec!["--test-threads".to_owned(), "4".to_owned()];
    let mut variables = vec![format!("{}={PATIENCE_S}", stage::PATIENCE_S)];
    if options.record.is_some() {
        arguments.push(record::TEST.to_owned());
        variables.push(format!("{}=1", stage::record::RECORDING));
    }
    match &options.filter {
        Some(filter) => arguments.push(filter.clone()),
        None => arguments.extend(HOST_ONLY.iter().flat_map(|name| ["--skip".to_owned(), (*name).to_owned()])),
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
