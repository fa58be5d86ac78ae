//! What a guest's log says: which tests ran, what was skipped and why, what the kernel complained of, what the verifier
//! counted. And what of it is a fault, although all tests passed.

use std::time::Duration;

use stage::kernel::Version;
use stage::record::Count;

use crate::guest::{Ended, Run};

/// Init's code for tests that passed.
pub const PASSED: u8 = 0x10;
/// For tests that failed.
const FAILED: u8 = 0x11;
/// For a guest that could not be made fit to run them.
const UNFIT: u8 = 0x12;

/// What the kernel says when something is wrong with it, or with what it was made to do. With it nothing can be said of
/// the tests.
const ALARMS: [&str; 6] = [
    "Kernel panic",
    "BUG: ",
    "Oops: ",
    "WARNING: CPU",
    "general protection fault",
    "Unable to handle kernel",
];
/// What it says when it waits for a CPU that the host did not give it. Told, because it explains slow tests.
const STALLS: [&str; 4] = ["rcu: INFO: rcu_", "soft lockup", "blocked for more than", "self-detected stall"];

/// A test that did not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip {
    /// Its name.
    pub test: String,
    /// The version that has the feature.
    pub since: Version,
    /// The feature.
    pub feature: String,
}

/// What is known of one kernel's run.
pub struct Report {
    /// The kernel's name with us.
    pub name: String,
    /// How the run ended.
    pub ended: Ended,
    release: Option<String>,
    passed: u32,
    failed: Vec<String>,
    ignored: u32,
    finished: bool,
    skips: Vec<Skip>,
    odd_skips: Vec<String>,
    alarms: Vec<String>,
    stalls: Vec<String>,
    /// What the verifier counted.
    pub counts: Vec<Count>,
    lines: Vec<String>,
    took: Duration,
    again: bool,
}

impl Report {
    /// Reads a log. `again`: it is that of a second boot, the first gave no result.
    pub fn new(name: String, run: Run, took: Duration, again: bool) -> Self {
        let mut report = Self {
            name,
            ended: run.ended,
            release: None,
            passed: 0,
            failed: Vec::new(),
            ignored: 0,
            finished: false,
            skips: Vec::new(),
            odd_skips: Vec::new(),
            alarms: Vec::new(),
            stalls: Vec::new(),
            counts: Vec::new(),
            lines: Vec::new(),
            took,
            again,
        };
        for line in &run.lines {
            report.line(line);
        }
        report.lines = run.lines;
        report
    }

    fn line(&mut self, line: &str) {
        if let Some((_, release)) = line.split_once("guest: Linux ") {
            self.release = Some(release.to_owned());
        } else if let Some((_, result)) = line.split_once("test result: ") {
            self.finished = true;
            self.passed = number_before(result, " passed");
            self.ignored = number_before(result, " ignored");
        } else if let Some((_, skip)) = line.split_once("skipped: ") {
            match parse_skip(skip) {
                Some(skip) => self.skips.push(skip),
                None => self.odd_skips.push(skip.to_owned()),
            }
        } else if let Some(count) = Count::of_line(line) {
            self.counts.push(count);
        } else if let Some((name, _)) =
            line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... FAILED"))
        {
            self.failed.push(name.to_owned());
        } else if ALARMS.iter().any(|alarm| line.contains(alarm)) {
            self.alarms.push(line.to_owned());
        } else if STALLS.iter().any(|stall| line.contains(stall)) {
            self.stalls.push(line.to_owned());
        }
    }

    /// One line for people.
    pub fn summary(&self) -> String {
        let skipped: Vec<String> =
            self.skips.iter().map(|skip| format!("{} ({})", skip.test, skip.feature)).collect();
        let mut text = format!(
            "[{}] Linux {}: {} passed, {} failed, {} skipped{}{}, {} s",
            self.name,
            self.release.as_deref().unwrap_or("?"),
            self.passed,
            self.failed.len(),
            skipped.len(),
            if skipped.is_empty() { "" } else { ": " },
            skipped.join(", "),
            self.took.as_secs(),
        );
        if self.again {
            text += ", in a second boot";
        }
        for stall in &self.stalls {
            text += &format!("\n  stalled: {stall}");
        }
        text
    }

    /// What must not be.
    pub fn faults(&self, filtered: bool) -> Vec<String> {
        let mut faults = Vec::new();
        match &self.ended {
            Ended::Code(PASSED) if !self.finished => faults.push("passed, but printed no result".to_owned()),
            Ended::Code(PASSED) if self.passed == 0 => faults.push(if filtered {
                "no test's name contains the filter".to_owned()
            } else {
                "no test ran".to_owned()
            }),
            Ended::Code(PASSED) => {}
            Ended::Code(FAILED) if self.failed.is_empty() => {
                faults.push("the tests failed without naming one".to_owned());
            }
            Ended::Code(FAILED) => faults.extend(self.failed.iter().map(|test| format!("{test} failed"))),
            Ended::Code(UNFIT) => {
                let why = self.lines.iter().find_map(|line| line.split_once("guest: unfit: "));
                faults.push(format!("the guest is unfit: {}", why.map_or("?", |(_, why)| why)));
            }
            lost => faults.push(format!("no result: {lost}")),
        }
        faults.extend(self.alarms.iter().map(|alarm| format!("the kernel says: {alarm}")));
        if self.ignored > 0 {
            faults.push(format!("{} tests are ignored; a test runs or is deleted", self.ignored));
        }
        faults.extend(self.odd_skips.iter().map(|skip| format!("not a reason to skip: {skip}")));
        let running = self.release.as_deref().and_then(Version::parse);
        for Skip { test, since, feature } in &self.skips {
            match running {
                Some(running) if running < *since => {}
                _ => faults.push(format!("{test} skipped itself for {feature}, which Linux {since} has")),
            }
        }
        faults
    }

    /// What explains a failure: the kernel's complaints and what the failed tests printed, or the end of the log.
    pub fn print_failures(&self) {
        for line in self.alarms.iter().chain(&self.stalls) {
            println!("[{}] {line}", self.name);
        }
        match self.lines.iter().position(|line| line == "failures:") {
            Some(from) => {
                for line in &self.lines[from..] {
                    println!("[{}] {line}", self.name);
                }
            }
            None => print_tail(&self.lines),
        }
    }
}

/// Prints the end of a log.
pub fn print_tail(lines: &[String]) {
    for line in &lines[lines.len().saturating_sub(30)..] {
        println!("  {line}");
    }
}

/// `TEST: needs Linux 5.18 (FEATURE)`
fn parse_skip(text: &str) -> Option<Skip> {
    let (test, reason) = text.split_once(": needs Linux ")?;
    let (since, feature) = reason.split_once(' ')?;
    let feature = feature.strip_prefix('(')?.strip_suffix(')')?;
    Some(Skip { test: test.to_owned(), since: Version::parse(since)?, feature: feature.to_owned() })
}

fn number_before(text: &str, word: &str) -> u32 {
    let number = text.split_once(word).and_then(|(before, _)| before.rsplit(' ').next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: [&str; 4] = [
        "guest: Linux 6.1.0-56-cloud-amd64",
        "test shares::weighted ... ok <0.120s>",
        "skipped: active::new: needs Linux 6.4 (something)",
        "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s",
    ];

    #[track_caller]
    fn check(ended: Ended, lines: &[&str], expected: &[&str]) {
        let lines = lines.iter().map(|line| (*line).to_owned()).collect();
        let report = Report::new("6.1".to_owned(), Run { ended, lines }, Duration::from_secs(1), false);
        assert_eq!(report.faults(false), expected);
    }

    #[test]
    fn a_run_that_passed_has_no_fault() {
        check(Ended::Code(PASSED), &GOOD, &[]);
    }

    #[test]
    fn a_test_that_fails_is_named() {
        let lines = ["test a::b ... FAILED <1.002s>", "test result: FAILED. 1 passed; 1 failed; 0 ignored"];
        check(Ended::Code(FAILED), &lines, &["a::b failed"]);
        check(Ended::Code(FAILED), &[], &["the tests failed without naming one"]);
    }

    #[test]
    fn a_skip_needs_an_older_kernel_and_a_reason() {
        let skip = |line: &'static str| [GOOD[0], line, GOOD[3]];
        check(
            Ended::Code(PASSED),
            &skip("skipped: a::b: needs Linux 5.18 (bpf_set_retval)"),
            &["a::b skipped itself for bpf_set_retval, which Linux 5.18 has"],
        );
        check(
            Ended::Code(PASSED),
            &skip("skipped: a::b: needs Linux 6.1 (x)"),
            &["a::b skipped itself for x, which Linux 6.1 has"],
        );
        check(Ended::Code(PASSED), &skip("skipped: a::b: no time"), &["not a reason to skip: a::b: no time"]);
        // Without a version nobody can say that the kernel is older.
        let lines = ["skipped: a::b: needs Linux 9.0 (x)", GOOD[3]];
        check(Ended::Code(PASSED), &lines, &["a::b skipped itself for x, which Linux 9.0 has"]);
    }

    #[test]
    fn a_run_without_a_result_is_no_pass() {
        check(Ended::Code(PASSED), &[GOOD[0]], &["passed, but printed no result"]);
        let none = "test result: ok. 0 passed; 0 failed; 0 ignored";
        check(Ended::Code(PASSED), &[GOOD[0], none], &["no test ran"]);
        let ignored = "test result: ok. 1 passed; 0 failed; 2 ignored";
        check(Ended::Code(PASSED), &[GOOD[0], ignored], &["2 tests are ignored; a test runs or is deleted"]);
        check(Ended::Silent(Duration::from_secs(60)), &GOOD, &["no result: killed after 60 s of silence"]);
        let unfit = "guest: unfit: load /modules/00-inet_diag.ko: Exec format error";
        check(
            Ended::Code(UNFIT),
            &[unfit],
            &["the guest is unfit: load /modules/00-inet_diag.ko: Exec format error"],
        );
    }

    #[test]
    fn a_kernel_that_complains_is_a_fault() {
        let lines = [GOOD[0], "[   12.3] BUG: unable to handle page fault", GOOD[3]];
        check(Ended::Code(PASSED), &lines, &["the kernel says: [   12.3] BUG: unable to handle page fault"]);
        let stall = "[   60.1] rcu: INFO: rcu_preempt self-detected stall on CPU";
        check(Ended::Code(PASSED), &[GOOD[0], stall, GOOD[3]], &[]);
    }
}
