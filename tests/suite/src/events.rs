//! The events that a test program prints, one JSON object per line (`libtest`, `--format json`),
//! between other lines.

use serde::Deserialize;

use crate::{Failed, Ran};

/// Arguments that make a test program print events. They are unstable in libtest, so the
/// environment needs [`VARIABLE`].
pub const ARGUMENTS: [&str; 4] = ["-Zunstable-options", "--format", "json", "--report-time"];

/// Arguments that make a test program print the names of its tests.
pub const LIST: [&str; 3] = ["--list", "--format", "terse"];

/// Makes a test program of the stable compiler accept unstable options.
pub const VARIABLE: (&str, &str) = ("RUSTC_BOOTSTRAP", "1");

/// The names of tests in the output of a test program for [`LIST`].
pub fn names(listing: &str) -> Vec<String> {
    listing.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

/// One event. Other kinds are ignored.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Event {
    /// The event of the test program: `started`, `ok` or `failed`.
    Suite { event: String },
    /// The event of a test: `started`, `ok`, `failed` or `ignored`.
    Test {
        event: String,
        /// The test's path.
        name: String,
        /// The duration of the test in seconds.
        #[serde(default)]
        exec_time: f64,
        /// The output of a failed test.
        #[serde(default)]
        stdout: String,
    },
}

impl Event {
    /// Reads a line; `None` if it is not an event.
    pub fn of_line(line: &str) -> Option<Self> {
        // Kernel messages may precede an event on a serial line.
        let start = line.find("{ \"type\"").or_else(|| line.find("{\"type\""))?;
        serde_json::from_str(&line[start..]).ok()
    }
}

/// The sum of the events of one or more runs of a test program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// Tests that have ended.
    pub ran: Vec<Ran>,
    /// Tests that have failed, with their output.
    pub failed: Vec<Failed>,
    pub ignored: Vec<String>,
    /// Lines `skipped: TEST: REASON`, without their first word.
    pub skipped: Vec<String>,
    /// Tests that have started and not ended.
    pub running: Vec<String>,
    /// The number of started programs, and of ended programs.
    pub programs: (u32, u32),
}

impl Run {
    /// Adds a line of output.
    pub fn line(&mut self, line: &str) {
        if let Some((_, skipped)) = line.split_once("skipped: ")
            && !line.contains("\"type\"")
        {
            self.skipped.push(skipped.trim_end().to_owned());
        }
        match Event::of_line(line) {
            Some(Event::Suite { event }) if event == "started" => self.programs.0 += 1,
            Some(Event::Suite { .. }) => self.programs.1 += 1,
            Some(Event::Test { event, name, exec_time, stdout }) => {
                self.test(&event, name, exec_time, stdout);
            }
            None => {}
        }
    }

    fn test(&mut self, event: &str, name: String, seconds: f64, output: String) {
        if event == "started" {
            self.running.push(name);
            return;
        }
        self.running.retain(|running| *running != name);
        match event {
            "ok" => self.ran.push(Ran { name, seconds, passed: true }),
            "failed" => {
                self.ran.push(Ran { name: name.clone(), seconds, passed: false });
                self.failed.push(Failed { name, output });
            }
            "ignored" => self.ignored.push(name),
            _ => {}
        }
    }

    /// Ends the run: running tests count as failed, with this output.
    pub fn end(&mut self, output: &str) {
        for name in std::mem::take(&mut self.running) {
            self.ran.push(Ran { name: name.clone(), seconds: 0.0, passed: false });
            self.failed.push(Failed { name, output: output.to_owned() });
        }
    }

    /// Whether at least one program has started, and every program that has started has ended.
    pub fn is_complete(&self) -> bool {
        self.programs.0 > 0 && self.programs.0 == self.programs.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_summed_between_other_lines() {
        let mut run = Run::default();
        for line in [
            r#"{ "type": "suite", "event": "started", "test_count": 3 }"#,
            r#"{ "type": "test", "event": "started", "name": "a::b" }"#,
            r#"{ "type": "test", "event": "started", "name": "a::c" }"#,
            "skipped: a::c: needs Linux 5.18 (bpf_set_retval)",
            r#"[   12.0] eth0: up { "type": "test", "name": "a::c", "event": "ok", "exec_time": 0.25 }"#,
            r#"{ "type": "test", "name": "a::b", "event": "failed", "exec_time": 1.5, "stdout": "skipped: no\n" }"#,
        ] {
            run.line(line);
        }
        assert!(!run.is_complete());
        run.line(r#"{ "type": "suite", "event": "failed", "passed": 1, "failed": 1 }"#);
        let ran = |name: &str, seconds, passed| Ran { name: name.to_owned(), seconds, passed };
        let expected = Run {
            ran: vec![ran("a::c", 0.25, true), ran("a::b", 1.5, false)],
            failed: vec![Failed { name: "a::b".to_owned(), output: "skipped: no\n".to_owned() }],
            skipped: vec!["a::c: needs Linux 5.18 (bpf_set_retval)".to_owned()],
            programs: (1, 1),
            ..Run::default()
        };
        assert_eq!(run, expected);
        assert!(run.is_complete());
    }

    #[test]
    fn a_test_that_was_running_when_its_program_ended_has_failed() {
        let mut run = Run::default();
        run.line(r#"{ "type": "suite", "event": "started", "test_count": 1 }"#);
        run.line(r#"{ "type": "test", "event": "started", "name": "a::aborts" }"#);
        run.end("signal: 6");
        let (name, output) = ("a::aborts".to_owned(), "signal: 6".to_owned());
        let expected = Run {
            ran: vec![Ran { name: name.clone(), seconds: 0.0, passed: false }],
            failed: vec![Failed { name, output }],
            programs: (1, 0),
            ..Run::default()
        };
        assert_eq!((run.is_complete(), run), (false, expected));
    }

    #[test]
    fn a_listing_has_the_names_of_tests() {
        assert_eq!(names("a::b: test\na::c: benchmark\na::d: test\n\n2 tests\n"), ["a::b", "a::d"]);
    }
}
