//! The contents of the log of a boot: the tests' events, skipped tests with the reason, the
//! kernel's messages, the verifier's counts, and faults that make the boot fail even if all tests
//! passed.

use lb_suite::Run;
use stage::kernel::Version;
use stage::record::Count;

use crate::guest::{Booted, Ended};

/// Init's code if all tests passed.
const PASSED: u8 = 0x10;
/// Init's code if tests failed.
const FAILED: u8 = 0x11;
/// Init's code if the guest could not be prepared for the tests.
const UNFIT: u8 = 0x12;

/// Kernel messages about a fault of the kernel. After such a message, the results of the boot are
/// not valid.
const ALARMS: [&str; 6] = [
    "Kernel panic",
    "BUG: ",
    "Oops: ",
    "WARNING: CPU",
    "general protection fault",
    "Unable to handle kernel",
];
/// Kernel messages about waiting for a CPU that the host did not provide. The report shows them
/// because they explain slow tests.
const STALLS: [&str; 4] = ["rcu: INFO: rcu_", "soft lockup", "blocked for more than", "self-detected stall"];

#[derive(Default)]
pub struct Report {
    /// The kernel's release. Empty if the guest did not print a release.
    pub release: String,
    /// The results of the tests. A test that started and did not end has failed.
    pub run: Run,
    /// Messages that the kernel prints when the host is busy.
    pub stalls: Vec<String>,
    /// The verifier's counts.
    pub counts: Vec<Count>,
    /// Faults other than failed tests. With any fault, no result of this boot is valid.
    pub faults: Vec<String>,
}

impl Report {
    /// Reads the log of a boot for these tests.
    pub fn read(booted: &Booted, planned: &[String]) -> Self {
        let mut report = Self::default();
        let (mut unfit, mut alarms) = (String::new(), Vec::new());
        for line in &booted.lines {
            report.run.line(line);
            // The rest of the line is an event with the output of a failed test, which does not
            // come from the kernel.
            let line = line.split_once("{ \"type\"").map_or(line.as_str(), |(before, _)| before);
            if let Some((_, release)) = line.split_once("guest: Linux ") {
                report.release = release.to_owned();
            } else if let Some((_, why)) = line.split_once("guest: unfit: ") {
                unfit = why.to_owned();
            } else if let Some(count) = Count::of_line(line) {
                report.counts.push(count);
            } else if ALARMS.iter().any(|alarm| line.contains(alarm)) {
                alarms.push(format!("the kernel reports: {line}"));
            } else if STALLS.iter().any(|stall| line.contains(stall)) {
                report.stalls.push(line.to_owned());
            }
        }
        report.run.end("the test started and did not end");
        report.faults.extend(report.fault_of_the_end(&booted.ended, &unfit));
        report.faults.extend(alarms);
        report.faults.extend(report.faults_of_tests(planned));
        report
    }

    fn fault_of_the_end(&self, ended: &Ended, unfit: &str) -> Option<String> {
        match ended {
            Ended::Code(PASSED) => None,
            Ended::Code(FAILED) if !self.run.failed.is_empty() => None,
            Ended::Code(FAILED) => Some("the tests failed without naming one".to_owned()),
            Ended::Code(UNFIT) => Some(format!("the guest is unfit: {unfit}")),
            lost => Some(format!("no result: {lost}")),
        }
    }

    /// Faults about tests that did not run, or that were skipped without a valid reason.
    fn faults_of_tests(&self, planned: &[String]) -> Vec<String> {
        let mut faults = Vec::new();
        let Run { ran, ignored, skipped, .. } = &self.run;
        let has_run = |test: &&String| ran.iter().any(|ran| ran.name == **test) || ignored.contains(test);
        let missing: Vec<_> = planned.iter().filter(|test| !has_run(test)).collect();
        if let [first, ..] = missing[..] {
            faults.push(format!("{} tests did not run, the first is {first}", missing.len()));
        }
        faults.extend(ignored.iter().map(|test| format!("{test} is ignored; a test runs or is deleted")));
        let running = Version::parse(&self.release);
        for skip in skipped {
            match parse_skip(skip) {
                None => faults.push(format!("not a reason to skip: {skip}")),
                Some((_, since, _)) if running.is_some_and(|running| running < since) => {}
                Some((test, since, feature)) => {
                    faults.push(format!("{test} skipped itself for {feature}, which Linux {since} has"));
                }
            }
        }
        faults
    }

    /// The tests that passed; empty if there is any fault.
    pub fn passed(&self) -> Vec<String> {
        let passed = self.run.ran.iter().filter(|ran| ran.passed && self.faults.is_empty());
        passed.map(|ran| ran.name.clone()).collect()
    }

    /// Whether the emulator, not a test, ended the guest: it died, or no test had started.
    pub fn is_lost(&self, ended: &Ended) -> bool {
        match ended {
            Ended::Code(_) => false,
            Ended::Died(_) => true,
            Ended::Silent(_) | Ended::Late(_) => self.run.programs.0 == 0,
        }
    }
}

/// Test, version and feature of `TEST: needs Linux 5.18 (FEATURE)`.
fn parse_skip(text: &str) -> Option<(&str, Version, &str)> {
    let (test, reason) = text.split_once(": needs Linux ")?;
    let (since, feature) = reason.split_once(' ')?;
    Some((test, Version::parse(since)?, feature.strip_prefix('(')?.strip_suffix(')')?))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LINUX: &str = "guest: Linux 6.1.0-56-cloud-amd64";
    const START: &str = r#"{ "type": "test", "event": "started", "name": "a::b" }"#;
    const OK: &str = r#"{ "type": "test", "name": "a::b", "event": "ok", "exec_time": 0.12 }"#;
    const SKIP: &str = "skipped: a::b: needs Linux 6.4 (something)";

    fn report(ended: &Ended, lines: &[&str]) -> Report {
        let lines = lines.iter().map(|line| (*line).to_owned()).collect();
        Report::read(&Booted { ended: ended.clone(), lines }, &["a::b".to_owned()])
    }

    /// Checks the failed tests and the faults in a log.
    #[track_caller]
    fn check(ended: &Ended, lines: &[&str], failed: &[&str], faults: &[&str]) {
        let report = report(ended, lines);
        let names: Vec<_> = report.run.failed.iter().map(|failed| failed.name.as_str()).collect();
        assert_eq!(
            (names.as_slice(), report.faults),
            (failed, faults.iter().map(|fault| (*fault).to_owned()).collect())
        );
    }

    #[test]
    fn a_run_that_passed_has_no_fault() {
        check(&Ended::Code(PASSED), &[LINUX, START, SKIP, OK], &[], &[]);
        let report = report(&Ended::Code(PASSED), &[LINUX, START, "verifier: 6.1 default socklb_tcp 7", OK]);
        assert_eq!((report.release.as_str(), report.counts[0].instructions), ("6.1.0-56-cloud-amd64", 7));
    }

    #[test]
    fn the_output_of_a_failed_test_is_no_alarm() {
        let failed = r#"{ "type": "test", "name": "a::b", "event": "failed", "stdout": "BUG: skipped: x" }"#;
        check(&Ended::Code(FAILED), &[LINUX, START, failed], &["a::b"], &[]);
    }

    #[test]
    fn a_test_that_does_not_end_has_failed() {
        check(&Ended::Code(FAILED), &[LINUX, START], &["a::b"], &[]);
        let silent = Ended::Silent(Duration::from_secs(60));
        check(&silent, &[LINUX, START], &["a::b"], &["no result: killed after 60 s of silence"]);
        let started = r#"{ "type": "suite", "event": "started", "test_count": 1 }"#;
        assert!(!report(&silent, &[LINUX, started, START]).is_lost(&silent));
        assert!(report(&silent, &[LINUX]).is_lost(&silent));
        let died = Ended::Died("signal: 9".to_owned());
        assert!(report(&died, &[LINUX, started, START]).is_lost(&died));
    }

    #[test]
    fn a_skip_needs_an_older_kernel_and_a_reason() {
        let skip = |line: &'static str| [LINUX, START, line, OK];
        let skipped = |line, fault: &str| check(&Ended::Code(PASSED), &skip(line), &[], &[fault]);
        skipped(
            "skipped: a::b: needs Linux 5.18 (bpf_set_retval)",
            "a::b skipped itself for bpf_set_retval, which Linux 5.18 has",
        );
        skipped("skipped: a::b: needs Linux 6.1 (x)", "a::b skipped itself for x, which Linux 6.1 has");
        skipped("skipped: a::b: no time", "not a reason to skip: a::b: no time");
        // Without the kernel's release, no skip is justified.
        let fault = "a::b skipped itself for something, which Linux 6.4 has";
        check(&Ended::Code(PASSED), &[START, SKIP, OK], &[], &[fault]);
    }

    #[test]
    fn a_run_without_a_result_has_a_fault() {
        let missing = "1 tests did not run, the first is a::b";
        check(&Ended::Code(PASSED), &[LINUX], &[], &[missing]);
        check(&Ended::Code(FAILED), &[LINUX, OK], &[], &["the tests failed without naming one"]);
        let ignored = r#"{ "type": "test", "name": "a::b", "event": "ignored" }"#;
        check(&Ended::Code(PASSED), &[LINUX, ignored], &[], &["a::b is ignored; a test runs or is deleted"]);
        let unfit = "guest: unfit: load /modules/00-inet_diag.ko: Exec format error";
        let fault = "the guest is unfit: load /modules/00-inet_diag.ko: Exec format error";
        check(&Ended::Code(UNFIT), &[unfit], &[], &[fault, missing]);
    }

    #[test]
    fn a_kernel_error_message_is_a_fault() {
        let bug = "[   12.3] BUG: unable to handle page fault";
        let fault = "the kernel reports: [   12.3] BUG: unable to handle page fault";
        check(&Ended::Code(PASSED), &[LINUX, bug, START, OK], &[], &[fault]);
        let stall = "[   60.1] rcu: INFO: rcu_preempt self-detected stall on CPU";
        check(&Ended::Code(PASSED), &[LINUX, stall, START, OK], &[], &[]);
    }
}
