//! Drives the VM tests: boots each given kernel with the local tests inside and evaluates the
//! results.
//!
//! The command line states where kernels and programs are, because xtask fetches and builds them.
//! This program depends on the tests only through the table of their modules.

mod cpio;

mod initramfs;

mod guest;

mod selection;

mod report;

mod driver;

mod record;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use clap::Parser;
use lb_suite::{Class, Failed, LIST, Modules, Ran, Summary};

use crate::driver::{Driver, Tested};
use crate::selection::{Boot, Selection};

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
    #[command(flatten)]
    which: Which,
    /// File with the names of new and changed tests, one per line: they get no second try
    #[arg(long)]
    changed: Option<PathBuf>,
    /// Write the results of each kernel to this file, as JSON
    #[arg(long)]
    results: Option<PathBuf>,
    /// Folders of the kernels, the oldest kernel first. Each has the kernel's name and contains
    /// `vmlinuz` and `modules/`
    #[arg(required = true)]
    kernels: Vec<PathBuf>,
}

/// Without any of these options: classes A to D on the oldest kernel, class A and smoke tests on
/// all other kernels.
#[derive(Debug, clap::Args)]
#[group(multiple = false)]
struct Which {
    /// Run classes A to E on the oldest kernel, and A to C on all other kernels
    #[arg(long)]
    all: bool,
    /// Run one class of tests, on every kernel
    #[arg(long, value_parser = parse_class)]
    class: Option<Class>,
    /// Run only tests with a name that contains this text
    #[arg(long)]
    filter: Option<String>,
    /// Write the verifier's counts to this file, instead of comparing with it
    #[arg(long)]
    record: Option<PathBuf>,
}

impl Which {
    fn selection(&self) -> Selection {
        match self {
            Self { record: Some(_), .. } => Selection::Named(record::TEST.to_owned()),
            Self { filter: Some(text), .. } => Selection::Named(text.clone()),
            Self { class: Some(class), .. } => Selection::Class(*class),
            Self { all: true, .. } => Selection::All,
            Self { all: false, .. } => Selection::Usual,
        }
    }
}

fn parse_class(text: &str) -> Result<Class, String> {
    let class = serde_json::from_value(text.into());
    class.map_err(|_| "the table of test modules has classes A to F".to_owned())
}

/// The subject of each module of tests, and the kernels on which it runs.
const TABLE: &str = include_str!("../local/modules.toml");

fn main() -> ExitCode {
    match run(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<()> {
    let Options { programs, tests, scratch, which, changed, results, kernels } = options;
    fs::create_dir_all(&scratch).with_context(|| format!("make {}", scratch.display()))?;
    let modules = Modules::parse(TABLE)?;
    let names = list(&tests)?;
    let selection = which.selection();
    let boots = selection.boots(&modules, &names, kernels.len());
    if boots.is_empty() {
        bail!("no test is selected: {}", selection.describe(0));
    }
    let changed = changed.as_deref().map(lines_of).transpose()?.unwrap_or_default();
    let recording = which.record.is_some();
    let driver = Driver { programs, tests, scratch, kernels, modules, changed, recording };
    for kernel in 0..driver.kernels.len() {
        let of_kernel = |cpus| boots.iter().find(move |boot| (boot.kernel, boot.cpus) == (kernel, cpus));
        let [one, two] = [1, 2].map(|cpus| of_kernel(cpus).map_or(0, |boot| boot.tests.len()));
        let (name, what, left) = (driver.name(kernel), selection.describe(kernel), names.len() - one - two);
        println!("vm {name}: {what}: {one} tests, {two} more with two CPUs; {left} are left to the host");
    }
    let mut tested = test(&driver, &boots);
    let lost: usize = tested.iter().filter_map(|(_, tested)| Some(tested.as_ref().ok()?.lost)).sum();
    if let Some(path) = &which.record {
        let reports = tested.iter().filter_map(|(_, tested)| Some(&tested.as_ref().ok()?.report));
        record::write(path, reports.flat_map(|report| report.counts.clone()), &driver.tests)?;
    }
    let mut summaries = Vec::new();
    for kernel in 0..driver.kernels.len() {
        let (here, others) = tested.into_iter().partition(|(at, _)| *at == kernel);
        tested = others;
        summaries.push(summary(&driver.name(kernel), here.into_iter().map(|(_, tested)| tested)));
    }
    if let Some(path) = results {
        fs::write(&path, serde_json::to_vec(&summaries)?)
            .with_context(|| format!("write {}", path.display()))?;
    }
    println!("\nvm: {lost} guests were booted once more because the emulator lost them");
    let faults = summaries.iter().map(|summary| print(&driver.modules, summary)).sum::<usize>();
    if faults > 0 {
        bail!("{faults} faults; the whole logs are in {}", driver.scratch.display());
    }
    Ok(())
}

/// Lists the names of all tests in the test program.
fn list(tests: &Path) -> Result<Vec<String>> {
    let output = Command::new(tests).args(LIST).output();
    let output = output.with_context(|| format!("start {}", tests.display()))?;
    if !output.status.success() {
        bail!("{} --list: {}", tests.display(), output.status);
    }
    Ok(lb_suite::names(&String::from_utf8(output.stdout).context("names of tests")?))
}

fn lines_of(path: &Path) -> Result<BTreeSet<String>> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// Runs every boot, as many at a time as the host has CPUs, because each guest occupies one CPU.
/// Returns each result with the position of its kernel in the list of kernels.
fn test(driver: &Driver, boots: &[Boot]) -> Vec<(usize, Result<Tested>)> {
    let (pending, tested) = (Mutex::new(boots.iter()), Mutex::new(Vec::new()));
    let next = || pending.lock().ok()?.next();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(boot) = next() {
                    let result = (boot.kernel, driver.test(boot));
                    tested.lock().expect("no thread panics while it holds the lock").push(result);
                }
            });
        }
    });
    tested.into_inner().expect("no thread panics while it holds the lock")
}

/// Sums the results of a kernel's boots. A fault of the guest itself counts as a failed test.
fn summary(kernel: &str, boots: impl Iterator<Item = Result<Tested>>) -> Summary {
    let mut summary = Summary { name: format!("vm {kernel}"), ..Summary::default() };
    for boot in boots {
        let faults = match boot {
            Ok(tested) => {
                summary.ran.extend(tested.report.run.ran);
                summary.skipped.extend(tested.report.run.skipped);
                summary.unsteady.extend(tested.retried.unsteady);
                summary.failed.extend(tested.retried.failed);
                summary.seconds += tested.seconds;
                tested.report.faults
            }
            Err(error) => vec![format!("{error:#}")],
        };
        for output in faults {
            let name = "the guest itself".to_owned();
            summary.ran.push(Ran { name: name.clone(), seconds: 0.0, passed: false });
            summary.failed.push(Failed { name, output });
        }
    }
    summary
}

/// Prints a kernel's results. Returns the number of tests that make the run fail.
fn print(modules: &Modules, summary: &Summary) -> usize {
    let Summary { name, skipped, unsteady, failed, seconds, .. } = summary;
    println!(
        "{name}: {} passed, {} of them unsteady, {} skipped; {} failed; {seconds:.0} s",
        summary.passed(),
        unsteady.len(),
        skipped.len(),
        failed.len(),
    );
    for skip in skipped {
        println!("  skipped: {skip}");
    }
    for (what, tests) in [("unsteady", unsteady), ("failed", failed)] {
        for Failed { name: test, output } in tests {
            println!("{what}: {test} ({name})");
            output.lines().for_each(|line| println!("    {line}"));
        }
    }
    let strict = strict(modules, unsteady);
    for test in &strict {
        println!("failed: {test} ({name}): a test of accounting, adoption or upgrades must not be unsteady");
    }
    failed.len() + strict.len()
}

/// The unsteady tests that make the run fail despite a passed second try.
fn strict<'t>(modules: &Modules, unsteady: &'t [Failed]) -> Vec<&'t str> {
    unsteady.iter().map(|test| test.name.as_str()).filter(|test| modules.is_strict(test)).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use lb_suite::Retried;

    use super::*;
    use crate::report::Report;

    fn failed(name: &str, output: &str) -> Failed {
        Failed { name: name.to_owned(), output: output.to_owned() }
    }

    fn selection(arguments: &[&str]) -> Option<Selection> {
        let all = ["vm", "--programs", "p", "--tests", "t", "--scratch", "s", "5.10"].iter().chain(arguments);
        Options::try_parse_from(all).ok().map(|options| options.which.selection())
    }

    #[test]
    fn the_command_line_selects_the_tests() {
        Options::command().debug_assert();
        let named = |text: &str| Some(Selection::Named(text.to_owned()));
        assert_eq!(selection(&[]), Some(Selection::Usual));
        assert_eq!(selection(&["--all"]), Some(Selection::All));
        assert_eq!(selection(&["--class", "A"]), Some(Selection::Class(Class::A)));
        assert_eq!(selection(&["--filter", "udp"]), named("udp"));
        assert_eq!(selection(&["--record", "r.toml"]), named("verifier::"));
        assert_eq!(selection(&["--class", "G"]), None);
        assert_eq!(selection(&["--all", "--filter", "udp"]), None);
    }

    #[test]
    fn boots_of_a_kernel_add_up_and_their_faults_are_failures() {
        let ran = |name: &str, passed| Ran { name: name.to_owned(), seconds: 0.0, passed };
        let mut report = Report { faults: vec!["the kernel reports: BUG: ".to_owned()], ..Report::default() };
        report.run.ran = vec![ran("a::b", false), ran("a::c", false), ran("a::d", true)];
        report.run.skipped = vec!["a::d: needs Linux 9.0 (x)".to_owned()];
        let retried = Retried { unsteady: vec![failed("a::b", "1")], failed: vec![failed("a::c", "2")] };
        let boots = [
            Ok(Tested { report, retried, seconds: 2.0, lost: 0 }),
            Err(anyhow::anyhow!("start qemu-system-x86_64: not found")),
        ];
        let summary = summary("5.10", boots.into_iter());
        let guest = |output: &str| failed("the guest itself", output);
        assert_eq!((summary.name.as_str(), summary.passed(), summary.seconds), ("vm 5.10", 2, 2.0));
        assert_eq!(summary.skipped, ["a::d: needs Linux 9.0 (x)"]);
        assert_eq!(summary.unsteady, [failed("a::b", "1")]);
        let missing = "start qemu-system-x86_64: not found";
        assert_eq!(summary.failed, [failed("a::c", "2"), guest("the kernel reports: BUG: "), guest(missing)]);
    }

    #[test]
    fn an_unsteady_test_of_accounting_fails_the_run() {
        let modules = Modules::parse(TABLE).unwrap();
        let unsteady = [failed("accounting::active::a", ""), failed("connects::udp::a", "")];
        assert_eq!(strict(&modules, &unsteady), ["accounting::active::a"]);
    }
}
