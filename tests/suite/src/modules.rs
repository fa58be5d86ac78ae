//! The table of the local tests' modules, `tests/local/modules.toml`: the subject of each module,
//! and the kernels on which it runs.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::ARGUMENTS;

/// The subject of a test. The head of the table names the kernels on which each class runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub enum Class {
    /// The verifier and the loader.
    A,
    /// The behavior of the hooks.
    B,
    /// Facilities of the kernel that the daemon uses.
    C,
    /// Rules inside the programs.
    D,
    /// The daemon.
    E,
    /// Files and commands.
    F,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Module {
    class: Class,
    #[serde(default)]
    tests: BTreeMap<String, Class>,
    #[serde(default)]
    smoke: Vec<String>,
    #[serde(default)]
    two_cpus: Vec<String>,
    #[serde(default)]
    serial: Vec<String>,
    #[serde(default)]
    alone: bool,
    #[serde(default)]
    strict: bool,
}

/// The modules, keyed by their paths, such as `daemon::faults`.
#[derive(Debug)]
pub struct Modules(BTreeMap<String, Module>);

/// Tests of one program that run at the same time, by their full names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    pub tests: Vec<String>,
    /// The number of tests that run at the same time.
    pub threads: usize,
}

impl Phase {
    /// Formats the phase as one line without its end: the threads, then the names.
    pub fn line(&self) -> String {
        format!("{} {}", self.threads, self.tests.join(" "))
    }

    /// Reads a line that [`Phase::line`] wrote; `None` if it has no number or no test.
    pub fn of_line(line: &str) -> Option<Self> {
        let (threads, tests) = line.split_once(' ')?;
        let tests: Vec<String> = tests.split_whitespace().map(str::to_owned).collect();
        (!tests.is_empty()).then_some(Self { tests, threads: threads.parse().ok()? })
    }

    /// Arguments that make the test program run exactly these tests and print events.
    pub fn arguments(&self) -> Vec<String> {
        let threads = self.threads.to_string();
        let first = ["--exact", "--test-threads", &threads].into_iter().chain(ARGUMENTS);
        first.map(str::to_owned).chain(self.tests.iter().cloned()).collect()
    }
}

impl Modules {
    /// Reads the table.
    ///
    /// # Errors
    /// If it does not parse, or has an unknown key.
    pub fn parse(text: &str) -> Result<Self> {
        let folders: BTreeMap<String, BTreeMap<String, Module>> =
            toml::from_str(text).context("read tests/local/modules.toml")?;
        let path = |(folder, modules): (String, BTreeMap<String, Module>)| {
            modules.into_iter().map(move |(name, module)| (format!("{folder}::{name}"), module))
        };
        Ok(Self(folders.into_iter().flat_map(path).collect()))
    }

    /// The module of a test, and the test's name in it. `None` if the table has no such module.
    fn module<'t>(&self, test: &'t str) -> Option<(&Module, &'t str)> {
        let (module, name) = test.rsplit_once("::")?;
        Some((self.0.get(module)?, name))
    }

    /// The class of a test; `None` if the table does not have its module.
    pub fn class(&self, test: &str) -> Option<Class> {
        let (module, name) = self.module(test)?;
        Some(module.tests.get(name).copied().unwrap_or(module.class))
    }

    /// Whether a test of class B or C also runs on guest kernels other than the oldest.
    pub fn is_smoke(&self, test: &str) -> bool {
        self.module(test).is_some_and(|(module, name)| module.smoke.iter().any(|smoke| smoke == name))
    }

    pub fn needs_two_cpus(&self, test: &str) -> bool {
        self.module(test).is_some_and(|(module, name)| module.two_cpus.iter().any(|two| two == name))
    }

    /// Whether a run fails even if this test passes at its second try, because the test guards
    /// accounting, adoption or upgrades.
    pub fn is_strict(&self, test: &str) -> bool {
        self.module(test).is_some_and(|(module, _)| module.strict)
    }

    /// The paths of the modules without a test in any guest of a normal run.
    pub fn host_only(&self) -> Vec<String> {
        let is_host = |class: &Class| *class >= Class::E;
        let modules =
            self.0.iter().filter(|(_, module)| is_host(&module.class) && module.tests.values().all(is_host));
        modules.map(|(name, _)| name.clone()).collect()
    }

    /// Splits tests into those that run in parallel, on `threads` threads, and those that run one
    /// at a time.
    pub fn phases(&self, tests: &[String], threads: usize) -> Vec<Phase> {
        let order = |test: &String| match self.module(test) {
            Some((module, _)) if module.alone => 2,
            Some((module, name)) if module.serial.iter().any(|serial| serial == name) => 1,
            _ => 0,
        };
        let phase = |wanted| Phase {
            tests: tests.iter().filter(|test| order(test) == wanted).cloned().collect(),
            threads: if wanted == 0 { threads } else { 1 },
        };
        (0..3).map(phase).filter(|phase| !phase.tests.is_empty()).collect()
    }

    /// Lists entries of the table without a test, and tests without a module in the table.
    pub fn faults(&self, tests: &[String]) -> Vec<String> {
        let mut faults = Vec::new();
        for test in tests {
            if self.class(test).is_none() {
                faults.push(format!("tests/local/modules.toml has no module for the test {test}"));
            }
        }
        for (name, module) in &self.0 {
            let is_there = |test: &&String| tests.contains(&format!("{name}::{test}"));
            let lists = [&module.smoke, &module.two_cpus, &module.serial];
            let named = lists.into_iter().flatten().chain(module.tests.keys());
            faults.extend(named.filter(|test| !is_there(test)).map(|test| {
                format!("tests/local/modules.toml names the test {name}::{test}, which does not exist")
            }));
            if !tests.iter().any(|test| test.starts_with(&format!("{name}::"))) {
                faults.push(format!("tests/local/modules.toml has a module {name} without a test"));
            }
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = r#"
        [daemon.faults]
        class = "E"
        serial = ["a_small_memory_lock", "a_configuration"]
        smoke = ["two_capabilities"]
        tests = { two_capabilities = "C" }

        [daemon.many]
        class = "E"
        alone = true

        [accounting.active]
        class = "B"
        strict = true
        two_cpus = ["outcomes"]
    "#;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_test_has_the_class_of_its_module_or_its_own() {
        let table = Modules::parse(TABLE).unwrap();
        let classes = [
            "daemon::faults::two_capabilities",
            "daemon::faults::a_configuration",
            "accounting::active::a",
            "daemon::other::a",
        ];
        let expected = [Some(Class::C), Some(Class::E), Some(Class::B), None];
        assert_eq!(classes.map(|test| table.class(test)), expected);
        assert!(
            table.is_smoke("daemon::faults::two_capabilities")
                && !table.is_smoke("daemon::faults::a_configuration")
        );
        assert!(
            table.is_strict("accounting::active::a") && !table.is_strict("daemon::faults::a_configuration")
        );
        assert!(
            table.needs_two_cpus("accounting::active::outcomes")
                && !table.needs_two_cpus("accounting::active::a")
        );
    }

    #[test]
    fn a_module_with_a_test_for_guests_is_not_host_only() {
        assert_eq!(Modules::parse(TABLE).unwrap().host_only(), ["daemon::many"]);
    }

    #[test]
    fn tests_that_change_the_machine_run_after_the_others_one_at_a_time() {
        let table = Modules::parse(TABLE).unwrap();
        let tests = names(&[
            "daemon::many::a",
            "daemon::faults::a_small_memory_lock",
            "accounting::active::a",
            "daemon::faults::b",
        ]);
        let phase = |tests: &[&str], threads| Phase { tests: names(tests), threads };
        let expected = [
            phase(&["accounting::active::a", "daemon::faults::b"], 4),
            phase(&["daemon::faults::a_small_memory_lock"], 1),
            phase(&["daemon::many::a"], 1),
        ];
        assert_eq!(table.phases(&tests, 4), expected);
    }

    #[test]
    fn a_phase_is_read_as_it_was_written() {
        let phase = Phase { tests: names(&["a::b", "a::c"]), threads: 4 };
        assert_eq!(phase.line(), "4 a::b a::c");
        assert_eq!(Phase::of_line(&phase.line()), Some(phase.clone()));
        assert_eq!(["", "4", "4 ", "a::b a::c"].map(Phase::of_line), [None, None, None, None]);
        let arguments = phase.arguments().join(" ");
        assert!(arguments.starts_with("--exact --test-threads 4 -Z"), "{arguments}");
        assert!(arguments.ends_with(" --report-time a::b a::c"), "{arguments}");
    }

    #[test]
    fn a_name_without_a_test_is_a_fault() {
        let table = Modules::parse(TABLE).unwrap();
        let tests = names(&[
            "daemon::faults::two_capabilities",
            "daemon::faults::a_small_memory_lock",
            "accounting::active::outcomes",
            "daemon::other::a",
        ]);
        let expected = [
            "tests/local/modules.toml has no module for the test daemon::other::a",
            "tests/local/modules.toml names the test daemon::faults::a_configuration, which does not exist",
            "tests/local/modules.toml has a module daemon::many without a test",
        ];
        assert_eq!(table.faults(&tests), expected);
    }
}
