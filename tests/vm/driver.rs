//! Runs the tests of one boot: a guest for all of them, and another for each round of a second try.
//!
//! The driver gets the locations of programs and kernels. It does not decide which tests a kernel
//! runs, or whether the results are a failure.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lb_suite::{Modules, Phase, Retried};

use crate::guest::Guest;
use crate::initramfs;
use crate::report::Report;
use crate::selection::Boot;

/// The number of tests that run at the same time in a guest. It exceeds the number of CPUs, because
/// tests wait more than they compute.
const THREADS: usize = 4;
/// A guest that prints nothing for this long counts as hung. On a busy machine, a test may take
/// half of this time under emulation.
const SILENCE: Duration = Duration::from_secs(300);
/// The time limit for an expected result in a guest, in seconds. Only a failing test waits this
/// long.
const PATIENCE_S: u32 = 120;
/// A guest that runs this long counts as lost, even if it still prints.
const TOTAL: Duration = Duration::from_secs(40 * 60);

/// The data that all boots share.
pub struct Driver {
    /// Folder of the programs for the guest.
    pub programs: PathBuf,
    /// The program with the local tests.
    pub tests: PathBuf,
    /// Folder for images and logs.
    pub scratch: PathBuf,
    /// Folders of the kernels.
    pub kernels: Vec<PathBuf>,
    /// The table of test modules.
    pub modules: Modules,
    /// New and changed tests.
    pub changed: BTreeSet<String>,
    /// Whether the tests print the verifier's counts instead of comparing them.
    pub recording: bool,
}

/// The results of a boot.
pub struct Tested {
    /// The results of the first try of all tests. The failed tests are in `retried`.
    pub report: Report,
    /// The failed tests, after the second try of those tests that get one.
    pub retried: Retried,
    /// Wall time.
    pub seconds: f64,
    /// The number of guests that the emulator lost.
    pub lost: usize,
}

impl Driver {
    /// Boots a guest for the tests, and others for a second try.
    pub fn test(&self, boot: &Boot) -> Result<Tested> {
        let began = Instant::now();
        let mut lost = 0;
        let phases = self.modules.phases(&boot.tests, THREADS);
        let mut report = self.boot(boot, "", &phases, &mut lost)?;
        let failed = std::mem::take(&mut report.run.failed);
        let retried = if report.faults.is_empty() {
            let alone = |tests: &[String]| {
                let phase = Phase { tests: tests.to_vec(), threads: 1 };
                Ok(self.boot(boot, "-alone", &[phase], &mut lost)?.passed())
            };
            lb_suite::retry(failed, |test| self.changed.contains(test), alone)?
        } else {
            Retried { failed, ..Retried::default() }
        };
        Ok(Tested { report, retried, seconds: began.elapsed().as_secs_f64(), lost })
    }

    /// Boots a guest. If the emulator loses the guest, boots it once more.
    fn boot(&self, boot: &Boot, suffix: &str, phases: &[Phase], lost: &mut usize) -> Result<Report> {
        let guest = self.guest(boot, suffix, phases)?;
        let planned: Vec<String> = phases.iter().flat_map(|phase| phase.tests.clone()).collect();
        let mut booted = guest.run()?;
        let mut report = Report::read(&booted, &planned);
        if report.is_lost(&booted.ended) {
            println!("[{}] the emulator lost the guest ({}); booting it once more", guest.name, booted.ended);
            print_tail(&booted.lines);
            let saved = guest.log.with_extension("lost.log");
            fs::rename(&guest.log, &saved)
                .with_context(|| format!("rename the log to {}", saved.display()))?;
            *lost += 1;
            booted = guest.run()?;
            report = Report::read(&booted, &planned);
        }
        println!(
            "[{}] Linux {}: {} of {} tests passed",
            guest.name,
            report.release,
            report.passed().len(),
            planned.len()
        );
        for line in &report.stalls {
            println!("[{}] stalled: {line}", guest.name);
        }
        if !report.faults.is_empty() {
            print_tail(&booted.lines);
        }
        Ok(report)
    }

    /// Writes the image of a guest with its plan.
    fn guest(&self, boot: &Boot, suffix: &str, phases: &[Phase]) -> Result<Guest> {
        let kernel = &self.kernels[boot.kernel];
        let cpus = if boot.cpus == 1 { "" } else { "-two-cpus" };
        let name = format!("{}{cpus}{suffix}", self.name(boot.kernel));
        let plan: String = phases.iter().map(|phase| phase.line() + "\n").collect();
        let image = self.scratch.join(format!("{name}.cpio"));
        let content = initramfs::build(&self.programs, &self.tests, &kernel.join("modules"), &plan)?;
        fs::write(&image, content).with_context(|| format!("write {}", image.display()))?;
        let mut variables = vec![format!("{}={PATIENCE_S}", stage::PATIENCE_S)];
        variables.extend(self.recording.then(|| format!("{}=1", stage::record::RECORDING)));
        Ok(Guest {
            kernel: kernel.join("vmlinuz"),
            initramfs: image,
            cpus: boot.cpus,
            variables,
            log: self.scratch.join(format!("{name}.log")),
            silence: SILENCE,
            total: TOTAL,
            live: self.kernels.len() == 1,
            name,
        })
    }

    /// The name of a kernel, which is the name of its folder.
    pub fn name(&self, kernel: usize) -> String {
        let name = self.kernels[kernel].file_name();
        name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }
}

/// Prints the end of a log.
fn print_tail(lines: &[String]) {
    for line in &lines[lines.len().saturating_sub(30)..] {
        println!("  {line}");
    }
}
