//! Selects the tests that each kernel runs: by their class in the table of test modules, or by the
//! options on the command line.
//!
//! A kernel is identified by its position in the list, which begins with the oldest kernel. This
//! file boots no kernel.

use lb_suite::{Class, Modules};

/// The selection on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// Tests that are likely to depend on the kernel.
    Usual,
    /// Tests that can depend on the kernel.
    All,
    /// The tests of one class.
    Class(Class),
    /// Tests with a full name that contains this text.
    Named(String),
}

/// One boot of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The kernel's position in the list.
    pub kernel: usize,
    /// The number of the guest's CPUs.
    pub cpus: u32,
    /// The names of its tests.
    pub tests: Vec<String>,
}

impl Selection {
    /// Every boot. Boots with one CPU come first, because they take longest.
    ///
    /// With two CPUs, the emulator's two threads wait for each other, so tests take a quarter more
    /// CPU time on a busy host. Only tests that need two CPUs get them, on the oldest kernel or if
    /// the command line names these tests.
    pub fn boots(&self, modules: &Modules, tests: &[String], kernels: usize) -> Vec<Boot> {
        let boot = |cpus: u32, kernel: usize| {
            let is_here = |test: &&String| {
                let needs_two = modules.needs_two_cpus(test);
                let may_have_two = kernel == 0 || matches!(self, Self::Named(_));
                self.has(modules, test, kernel) && needs_two == (cpus == 2) && (!needs_two || may_have_two)
            };
            Boot { kernel, cpus, tests: tests.iter().filter(is_here).cloned().collect() }
        };
        let all = [1, 2].into_iter().flat_map(|cpus| (0..kernels).map(move |kernel| boot(cpus, kernel)));
        all.filter(|boot| !boot.tests.is_empty()).collect()
    }

    /// Whether a kernel runs a test, on any number of CPUs.
    fn has(&self, modules: &Modules, test: &str, kernel: usize) -> bool {
        let class = modules.class(test);
        let is_up_to = |last| class.is_some_and(|class| class <= last);
        match (self, kernel) {
            (Self::Usual, 0) => is_up_to(Class::D),
            (Self::Usual, _) => is_up_to(Class::A) || modules.is_smoke(test),
            (Self::All, 0) => is_up_to(Class::E),
            (Self::All, _) => is_up_to(Class::C),
            (Self::Class(wanted), _) => class == Some(*wanted),
            (Self::Named(text), _) => test.contains(text),
        }
    }

    /// Describes the tests of a kernel.
    pub fn describe(&self, kernel: usize) -> String {
        match (self, kernel) {
            (Self::Usual, 0) => "classes A to D".to_owned(),
            (Self::Usual, _) => "class A and smoke tests".to_owned(),
            (Self::All, 0) => "classes A to E".to_owned(),
            (Self::All, _) => "classes A to C".to_owned(),
            (Self::Class(class), _) => format!("class {class:?}"),
            (Self::Named(text), _) => format!("tests whose name contains \"{text}\""),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use stage::kernel::Version;

    use super::*;
    use crate::TABLE;

    const SMALL: &str = r#"
        [x]
        a = { class = "A" }
        b = { class = "B", smoke = ["smoke"], two_cpus = ["two"] }
        c = { class = "C" }
        d = { class = "D" }
        e = { class = "E", tests = { of_the_kernel = "C" } }
        other_e = { class = "F" }
    "#;

    const TESTS: [&str; 8] = [
        "x::a::a",
        "x::b::plain",
        "x::b::smoke",
        "x::b::two",
        "x::c::c",
        "x::e::daemon",
        "x::e::of_the_kernel",
        "x::other_e::f",
    ];

    /// `expected`: kernel, number of CPUs and tests of each boot, for two kernels.
    #[track_caller]
    fn check(selection: &Selection, expected: &[(usize, u32, &str)]) {
        let boots = selection.boots(&Modules::parse(SMALL).unwrap(), &TESTS.map(str::to_owned), 2);
        let boots: Vec<_> = boots.iter().map(|boot| (boot.kernel, boot.cpus, boot.tests.join(" "))).collect();
        let expected: Vec<_> =
            expected.iter().map(|(kernel, cpus, tests)| (*kernel, *cpus, (*tests).to_owned())).collect();
        assert_eq!(boots, expected);
    }

    #[test]
    fn only_the_oldest_kernel_runs_all_classes_up_to_d() {
        let oldest = "x::a::a x::b::plain x::b::smoke x::c::c x::e::of_the_kernel";
        check(&Selection::Usual, &[(0, 1, oldest), (1, 1, "x::a::a x::b::smoke"), (0, 2, "x::b::two")]);
    }

    #[test]
    fn all_adds_class_e_on_the_oldest_kernel_and_classes_b_and_c_on_others() {
        let oldest = "x::a::a x::b::plain x::b::smoke x::c::c x::e::daemon x::e::of_the_kernel";
        let other = "x::a::a x::b::plain x::b::smoke x::c::c x::e::of_the_kernel";
        check(&Selection::All, &[(0, 1, oldest), (1, 1, other), (0, 2, "x::b::two")]);
    }

    #[test]
    fn a_class_or_a_name_selects_tests_on_every_kernel() {
        check(&Selection::Class(Class::A), &[(0, 1, "x::a::a"), (1, 1, "x::a::a")]);
        let named = |text: &str| Selection::Named(text.to_owned());
        check(
            &named("e::"),
            &[
                (0, 1, "x::e::daemon x::e::of_the_kernel x::other_e::f"),
                (1, 1, "x::e::daemon x::e::of_the_kernel x::other_e::f"),
            ],
        );
        check(&named("two"), &[(0, 2, "x::b::two"), (1, 2, "x::b::two")]);
        check(&named("nothing"), &[]);
    }

    fn source(path: &str) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
    }

    /// Every local test with its source.
    fn local_tests() -> Vec<(String, String)> {
        let local = Path::new(env!("CARGO_MANIFEST_DIR")).join("local");
        let entries = |folder: &Path| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let folders = entries(&local).filter(|path| path.is_dir());
        let tests = |path: PathBuf| {
            let module = path.strip_prefix(&local).unwrap().with_extension("");
            let module = module.to_string_lossy().replace('/', "::");
            let text = fs::read_to_string(&path).unwrap();
            let bodies: Vec<String> = text.split("#[test]\n").skip(1).map(str::to_owned).collect();
            bodies.into_iter().map(move |rest| {
                let body = rest.split("\n}\n").next().unwrap().to_owned();
                let (_, name) = body.split_once("fn ").unwrap();
                (format!("{module}::{}", name.split('(').next().unwrap()), body)
            })
        };
        folders.flat_map(|folder| entries(&folder)).flat_map(tests).collect()
    }

    #[test]
    fn the_table_matches_the_existing_tests() {
        let tests: Vec<String> = local_tests().into_iter().map(|(name, _)| name).collect();
        let faults = Modules::parse(TABLE).unwrap().faults(&tests);
        assert_eq!(faults, Vec::<String>::new());
    }

    /// The constants in `tests/stage/kernel.rs` of features that some kernel other than the oldest
    /// lacks.
    fn features_that_differ() -> Vec<String> {
        let kernels: toml::Table = source("vm/kernels.toml").parse().unwrap();
        let second = Version::parse(kernels["kernel"][1]["name"].as_str().unwrap()).unwrap();
        let constant = |text: &str| {
            let (name, rest) = text.split_once(": Feature = ")?;
            let (_, since) = rest.split_once("since: Version(")?;
            let since = Version::parse(&since.split_once(')')?.0.replace(", ", "."))?;
            (since > second).then(|| format!("kernel::{name}"))
        };
        source("stage/kernel.rs").split("pub const ").filter_map(constant).collect()
    }

    #[test]
    fn a_test_that_depends_on_a_feature_runs_on_every_kernel_that_may_lack_it() {
        let modules = Modules::parse(TABLE).unwrap();
        let features = features_that_differ();
        assert!(features.contains(&"kernel::SPECULATION_BARRIERS".to_owned()), "{features:?}");
        assert!(!features.contains(&"kernel::SET_RETVAL".to_owned()), "{features:?}");
        let requires = |body: &str| features.iter().any(|feature| body.contains(feature));
        let missing: Vec<String> = local_tests()
            .into_iter()
            .filter(|(test, body)| requires(body) && !Selection::Usual.has(&modules, test, 1))
            .map(|(test, _)| test)
            .collect();
        assert_eq!(missing, Vec::<String>::new(), "add them to `smoke` in tests/local/modules.toml");
    }
}
