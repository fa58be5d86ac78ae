//! Runs test programs, reads their events, and runs failed tests a second time.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lb_suite::{ARGUMENTS, Failed, LIST, Modules, Phase, Run, Summary, VARIABLE, retry};

use super::build::{TestProgram, suite_cargo};
use super::changed::Changed;
use super::tiers::{Tier, Workspace};
use crate::command::{describe, output, target};
use crate::digest;
use crate::toolchain::tools;

/// A test program that prints nothing for this time counts as hung.
const SILENCE: Duration = Duration::from_secs(600);

/// The number of tests of the tiers `product` and `local` that run at the same time for each CPU.
/// Many of these tests wait for other processes or for a point in time, so the number exceeds one.
const WAITING_THREADS_PER_CPU: usize = 2;

/// The number of runs of new and changed tests.
const RUNS_OF_CHANGED: usize = 3;

/// How to run a tier's programs.
pub struct Plan<'a> {
    /// The tier's name.
    pub name: &'a str,
    pub programs: &'a [&'a TestProgram],
    /// Run only tests with names that contain one of these texts; all tests if the list is empty.
    pub filters: &'a [String],
    /// The table of the modules of the local tests.
    pub modules: &'a Modules,
    /// New and changed tests.
    pub changed: &'a Changed,
    /// Environment variables for the programs.
    pub variables: &'a [(&'a str, String)],
}

impl Plan<'_> {
    /// Runs every program to its end. Then runs failed tests again, one at a time
    /// (`lb_suite::retry`).
    pub fn run(&self) -> Result<Summary> {
        let began = Instant::now();
        let mut summary = Summary { name: self.name.to_owned(), ..Summary::default() };
        let mut failed = Vec::new();
        for program in self.programs {
            let run = self.program(program)?;
            let label = |name: &str| format!("{}::{name}", program.target.label());
            summary.ran.extend(run.ran.into_iter().map(|mut ran| {
                ran.name = label(&ran.name);
                ran
            }));
            summary.skipped.extend(run.skipped.iter().map(|skipped| label(skipped)));
            failed.extend(run.failed.into_iter().map(|one| Failed { name: label(&one.name), ..one }));
        }
        let is_changed = |name: &str| {
            let (program, test) = self.find(name).expect("the label belongs to a test of this plan");
            self.changed.contains(&program.target.package, test)
        };
        let retried = retry(failed, is_changed, |names| self.alone(names))?;
        (summary.unsteady, summary.failed) = (retried.unsteady, retried.failed);
        summary.seconds = began.elapsed().as_secs_f64();
        Ok(summary)
    }

    /// Finds the program of a test by the test's label. Also returns the test's name in this
    /// program.
    fn find<'n>(&self, name: &'n str) -> Option<(&TestProgram, &'n str)> {
        self.programs.iter().find_map(|program| {
            let test = name.strip_prefix(&program.target.label())?.strip_prefix("::")?;
            Some((*program, test))
        })
    }

    /// Runs the tests of one program, phase by phase. New and changed tests run three times.
    fn program(&self, program: &TestProgram) -> Result<Run> {
        let mut tests = list(program)?;
        let is_wanted = |test: &String| {
            self.filters.is_empty() || self.filters.iter().any(|filter| test.contains(filter))
        };
        tests.retain(is_wanted);
        let is_local = program.target.name == "local";
        if is_local && self.filters.is_empty() {
            let faults = self.modules.faults(&tests);
            if !faults.is_empty() {
                bail!("{}", faults.join("\n"));
            }
        }
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let waits = [Tier::Product, Tier::Local].map(Tier::name).contains(&self.name);
        let threads = if waits { WAITING_THREADS_PER_CPU * cpus } else { cpus };
        let mut run = Run::default();
        if is_local && cpus < 2 {
            let (two, one): (Vec<_>, Vec<_>) =
                tests.into_iter().partition(|test| self.modules.needs_two_cpus(test));
            run.skipped = two.into_iter().map(|test| format!("{test}: needs two CPUs")).collect();
            tests = one;
        }
        let phases = |tests: &[String]| {
            if is_local {
                self.modules.phases(tests, threads)
            } else {
                vec![Phase { tests: tests.to_vec(), threads }]
            }
        };
        for phase in phases(&tests).iter().filter(|phase| !phase.tests.is_empty()) {
            self.phase(program, phase, &mut run)?;
        }
        tests.retain(|test| self.changed.contains(&program.target.package, test));
        let mut again = Run::default();
        for _ in 1..RUNS_OF_CHANGED {
            for phase in phases(&tests).iter().filter(|phase| !phase.tests.is_empty()) {
                self.phase(program, phase, &mut again)?;
            }
        }
        for failed in again.failed {
            if let Some(ran) = run.ran.iter_mut().find(|ran| ran.name == failed.name && ran.passed) {
                ran.passed = false;
                run.failed.push(failed);
            }
        }
        let (ran, failed) = (run.ran.len(), run.failed.len());
        println!("{}: {}: {} passed, {failed} failed", self.name, program.target.label(), ran - failed);
        if !run.ignored.is_empty() {
            bail!("ignored tests: {}; a test runs or is deleted", run.ignored.join(", "));
        }
        Ok(run)
    }

    /// Runs tests one at a time, each in a separate process. Returns the names of passed tests.
    fn alone(&self, names: &[String]) -> Result<Vec<String>> {
        let mut passed = Vec::new();
        for name in names {
            let (program, test) = self.find(name).expect("the label belongs to a test of this plan");
            let mut run = Run::default();
            self.phase(program, &Phase { tests: vec![test.to_owned()], threads: 1 }, &mut run)?;
            println!(
                "{}: {name} again, alone: {}",
                self.name,
                if run.failed.is_empty() { "passed" } else { "failed" }
            );
            if run.failed.is_empty() {
                passed.push(name.clone());
            }
        }
        Ok(passed)
    }

    /// Runs some tests of a program and adds their events to `run`. If the program dies, the tests
    /// that were running have failed, and the remaining tests run in a new process.
    fn phase(&self, program: &TestProgram, phase: &Phase, run: &mut Run) -> Result<()> {
        let mut rest = phase.tests.clone();
        // The loop is bounded, because each iteration ends at least one test, or fails.
        while !rest.is_empty() {
            let mut turn = Run::default();
            let ended = self.turn(program, &rest, phase.threads, &mut turn)?;
            for failed in &turn.failed {
                println!(
                    "{}: {}::{} FAILED\n{}",
                    self.name,
                    program.target.label(),
                    failed.name,
                    failed.output
                );
            }
            let before = rest.len();
            rest.retain(|test| !turn.ran.iter().any(|ran| ran.name == *test) && !turn.ignored.contains(test));
            if rest.len() == before || (turn.failed.is_empty() && !rest.is_empty()) {
                bail!("{} did not run {}: {ended}", program.path.display(), rest.join(", "));
            }
            run.ran.extend(turn.ran);
            run.failed.extend(turn.failed);
            run.ignored.extend(turn.ignored);
            run.skipped.extend(turn.skipped);
        }
        Ok(())
    }

    /// Starts a program once to run these tests. Returns a text with its exit status and its last
    /// lines.
    fn turn(&self, program: &TestProgram, tests: &[String], threads: usize, run: &mut Run) -> Result<String> {
        let mut command = command(program);
        command.args(["--test-threads", &threads.to_string(), "--exact"]).args(ARGUMENTS).args(tests);
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.env("SOCKLB_TEST_TOOLS", tools().join("bin"));
        let mut log = self.log()?;
        let mut last = Vec::new();
        let ended = lines(&mut command, SILENCE, |line| {
            run.line(line);
            last.push(line.to_owned());
            // If the program dies, at most its last 30 lines are shown.
            last.drain(..last.len().saturating_sub(30));
            writeln!(log, "{line}").context("write the log")
        })?;
        let ended = format!("{ended}; its last lines:\n{}", last.join("\n"));
        run.end(&ended);
        Ok(ended)
    }

    fn log(&self) -> Result<File> {
        let folder = target().join("test");
        std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        let path = folder.join(format!("{}.log", self.name));
        File::options()
            .create(true)
            .append(true)
            .open(&path)
            .with_context(|| format!("open {}", path.display()))
    }
}

/// The command that runs a test program with cargo's working directory and variables.
fn command(program: &TestProgram) -> Command {
    let mut command = Command::new(&program.path);
    command
        .current_dir(&program.folder)
        .env("CARGO_MANIFEST_DIR", &program.folder)
        .env(VARIABLE.0, VARIABLE.1);
    command
}

/// The names of a program's tests.
pub fn list(program: &TestProgram) -> Result<Vec<String>> {
    Ok(lb_suite::names(&output(command(program).args(LIST))?))
}

/// Runs a command, and calls `line` with each line of its standard output and standard error. Kills
/// the command if it prints nothing for `silence`. Returns a description of the command's end.
fn lines(
    command: &mut Command,
    silence: Duration,
    mut line: impl FnMut(&str) -> Result<()>,
) -> Result<String> {
    let (reader, writer) = std::io::pipe().context("make a pipe")?;
    command.stdin(Stdio::null()).stdout(writer.try_clone().context("copy a pipe")?).stderr(writer);
    let mut child =
        command.spawn().with_context(|| format!("start {}", command.get_program().to_string_lossy()))?;
    // `command` still contains the writing ends of the pipe. They are closed here, so that reading
    // from the pipe ends.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut bytes = Vec::new();
        while reader.read_until(b'\n', &mut bytes).is_ok_and(|length| length > 0) {
            let text = String::from_utf8_lossy(&bytes).trim_end_matches('\n').to_owned();
            if sender.send(text).is_err() {
                return;
            }
            bytes.clear();
        }
    });
    loop {
        match receiver.recv_timeout(silence) {
            Ok(text) => line(&text)?,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                child.kill().context("kill a test program that hangs")?;
                child.wait().context("reap a test program")?;
                return Ok(format!("killed after {} s without a line", silence.as_secs()));
            }
        }
    }
    Ok(child.wait().context("reap a test program")?.to_string())
}

/// Runs the tests in the documentation of a tier's libraries, if there are any. Adds them to the
/// tier's summary.
pub fn documentation(workspace: &Workspace, tier: Tier, summary: &mut Summary) -> Result<()> {
    for (package, source) in &workspace.libraries {
        let folder = source.parent().context("the library's source has no folder")?;
        let in_tier =
            workspace.targets.iter().any(|target| target.package == *package && target.tier() == Some(tier));
        if !in_tier || !has_examples(folder)? {
            continue;
        }
        let mut command = suite_cargo("test")?;
        command
            .args(["--doc", "--quiet", "--package", package, "--"])
            .args(ARGUMENTS)
            .env(VARIABLE.0, VARIABLE.1);
        let mut run = Run::default();
        let ended = lines(&mut command, SILENCE, |line| {
            run.line(line);
            Ok(())
        })?;
        if run.failed.is_empty() && (ended != "exit status: 0" || !run.is_complete()) {
            bail!("{}: {ended}", describe(&command));
        }
        summary.ran.extend(run.ran);
        summary.failed.extend(run.failed);
    }
    Ok(())
}

/// Whether documentation comments below a folder contain a block of code.
fn has_examples(folder: &Path) -> Result<bool> {
    let sources = digest::files(folder, &["."])?;
    let is_fence = |line: &str| {
        let line = line.trim_start();
        (line.starts_with("//!") || line.starts_with("///")) && line.contains("```")
    };
    Ok(sources
        .iter()
        .any(|(name, text)| name.ends_with(".rs") && String::from_utf8_lossy(text).lines().any(is_fence)))
}
