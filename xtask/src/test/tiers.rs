//! Assigns each test target to the tier that runs it. If a target belongs to no tier, `cargo xtask
//! tidy` fails.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::command::{cargo, output};

/// The tiers, the cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Tier {
    /// Pure code: the contract, the decisions, the planner and the house rules. Needs no root, runs
    /// on any platform
    Pure,
    /// The daemon's own tests, and the readers of text and datagrams. Needs no root
    Product,
    /// Checks the committed kernel objects against their sources
    Object,
    /// The program on this kernel, with real cgroups and sockets, and its metrics. Needs root
    Local,
    /// The local tests on Debian's kernels, under emulation: `vm`, `vm KERNEL`, `vm KERNEL FILTER`
    Vm,
    /// Restarts, upgrades, kills and faults under load. Needs root
    Proof,
    /// The Debian package: built, installed, used, upgraded, removed. Needs root
    Package,
}

impl Tier {
    /// All tiers, in the order in which they run.
    pub const ALL: [Self; 7] =
        [Self::Pure, Self::Product, Self::Object, Self::Local, Self::Vm, Self::Proof, Self::Package];

    /// The tier's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pure => "pure",
            Self::Product => "product",
            Self::Object => "object",
            Self::Local => "local",
            Self::Vm => "vm",
            Self::Proof => "proof",
            Self::Package => "package",
        }
    }

    /// The reason why the tier needs root; `None` if the tier does not need root.
    pub fn needs_root(self) -> Option<&'static str> {
        match self {
            Self::Local | Self::Proof => {
                Some("makes cgroups and network namespaces and loads kernel programs")
            }
            Self::Package => Some("installs the package on machines in namespaces"),
            Self::Pure | Self::Product | Self::Object | Self::Vm => None,
        }
    }

    pub fn packages(self) -> impl Iterator<Item = &'static str> {
        PACKAGES.into_iter().filter(move |(_, tier)| *tier == self).map(|(package, _)| package)
    }
}

/// Packages, each with the tier of its targets.
const PACKAGES: [(&str, Tier); 23] = [
    ("lb-common", Tier::Pure),
    ("lb-core", Tier::Pure),
    ("lb-report", Tier::Pure),
    ("lb-document", Tier::Pure),
    ("lb-config", Tier::Pure),
    ("lb-sim", Tier::Pure),
    ("lb-svg", Tier::Pure),
    ("lb-view", Tier::Pure),
    ("lb-suite", Tier::Pure),
    ("xtask", Tier::Pure),
    ("lb-agent", Tier::Product),
    ("lb-contract", Tier::Product),
    ("lb-diag", Tier::Product),
    ("lb-discovery", Tier::Product),
    ("lb-fake", Tier::Product),
    ("lb-host", Tier::Product),
    ("lb-http", Tier::Product),
    ("lb-kernel", Tier::Product),
    ("lb-user", Tier::Product),
    // The tests run the readers of text and datagrams on the corpora.
    ("lb-fuzz", Tier::Product),
    ("lb-bench", Tier::Product),
    ("lb-inject", Tier::Product),
    // `KERNEL_TIERS` lists the integration tests of this package that are in other tiers.
    (KERNEL_TESTS, Tier::Local),
];

/// The package with the tests that run the program `socklb`.
pub const KERNEL_TESTS: &str = "lb-tests";

/// The integration tests of [`KERNEL_TESTS`] that are not in tier `local`.
const KERNEL_TIERS: [(&str, Tier); 2] = [("proof", Tier::Proof), ("package", Tier::Package)];

/// A target from which cargo builds a test program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// The package's name.
    pub package: String,
    /// `lib`, `bin` or `test`.
    pub kind: String,
    /// The target's name.
    pub name: String,
}

impl Target {
    /// The tier that runs the target; `None` if no tier does.
    pub fn tier(&self) -> Option<Tier> {
        let special = KERNEL_TIERS.iter().find(|(name, _)| {
            (self.package.as_str(), self.kind.as_str()) == (KERNEL_TESTS, "test") && self.name == *name
        });
        let of_package = || PACKAGES.iter().find(|(package, _)| *package == self.package);
        special.map(|(_, tier)| *tier).or_else(|| of_package().map(|(_, tier)| *tier))
    }

    /// A unique name for output: `lb-core`, `lb-core/steps`, `lb-tests/bin/vm`.
    pub fn label(&self) -> String {
        match self.kind.as_str() {
            "lib" => self.package.clone(),
            "test" => format!("{}/{}", self.package, self.name),
            kind => format!("{}/{kind}/{}", self.package, self.name),
        }
    }
}

/// The targets, libraries, folders and dependencies in cargo's metadata of the workspace.
pub struct Workspace {
    /// All targets with tests.
    pub targets: Vec<Target>,
    /// All packages with a library, because the documentation of a library may contain tests.
    pub libraries: Vec<(String, PathBuf)>,
    /// The folder of each package.
    pub folders: Vec<(String, PathBuf)>,
    /// For each package, the workspace packages that it or its tests use.
    pub edges: Vec<(String, Vec<String>)>,
}

impl Workspace {
    /// Reads the metadata from cargo.
    pub fn read() -> Result<Self> {
        let text = output(cargo().args(["metadata", "--format-version", "1", "--no-deps", "--locked"]))?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Result<Self> {
        let metadata: Value = serde_json::from_str(text).context("read the output of cargo metadata")?;
        let packages = metadata["packages"].as_array().context("cargo metadata has no packages")?;
        let mut found =
            Self { targets: Vec::new(), libraries: Vec::new(), folders: Vec::new(), edges: Vec::new() };
        for package in packages {
            let name = package["name"].as_str().context("a package has no name")?.to_owned();
            let manifest = package["manifest_path"].as_str().context("a package has no manifest")?;
            let folder = PathBuf::from(manifest).parent().context("the manifest has no folder")?.to_owned();
            for target in package["targets"].as_array().into_iter().flatten() {
                let text = |key: &str| target[key].as_str().unwrap_or_default().to_owned();
                let kind = target["kind"][0].as_str().unwrap_or_default().to_owned();
                if target["test"] == true {
                    found.targets.push(Target { package: name.clone(), kind, name: text("name") });
                }
                if target["doctest"] == true {
                    found.libraries.push((name.clone(), PathBuf::from(text("src_path"))));
                }
            }
            let used = package["dependencies"].as_array().into_iter().flatten();
            let used = used.filter_map(|used| used["name"].as_str().map(str::to_owned)).collect();
            found.edges.push((name.clone(), used));
            found.folders.push((name, folder));
        }
        Ok(found)
    }

    /// The changed packages, and all packages that use them. The kernel tests and the fault
    /// injection start the program `socklb`, so they use `lb-user`.
    pub fn affected<'p>(&self, changed: impl Iterator<Item = &'p str>) -> BTreeSet<String> {
        let mut affected: BTreeSet<String> = changed.map(str::to_owned).collect();
        let starts = |package: &str| [KERNEL_TESTS, "lb-inject"].contains(&package);
        // The loop is bounded, because each iteration adds a package.
        loop {
            let uses = |(package, used): &&(String, Vec<String>)| {
                let is_new = !affected.contains(package);
                let by_start = starts(package) && affected.contains("lb-user");
                is_new && (by_start || used.iter().any(|used| affected.contains(used)))
            };
            let Some((package, _)) = self.edges.iter().find(uses) else { return affected };
            affected.insert(package.clone());
        }
    }

    /// One message for each test target without a tier, and for each package or target in the
    /// tables of this file that does not exist.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for target in self.targets.iter().filter(|target| target.tier().is_none()) {
            faults.push(format!(
                "the tests of {} {} in package {} belong to no tier and never run: add the package to PACKAGES in xtask/src/test/tiers.rs",
                target.kind, target.name, target.package
            ));
        }
        for (at, (package, _)) in PACKAGES.iter().enumerate() {
            if !self.targets.iter().any(|target| target.package == *package) {
                faults.push(format!("xtask/src/test/tiers.rs names {package}, which has no tests"));
            }
            if PACKAGES[..at].iter().any(|(other, _)| other == package) {
                faults.push(format!("xtask/src/test/tiers.rs names {package} twice"));
            }
        }
        for (test, _) in KERNEL_TIERS {
            let is_it =
                |target: &Target| (target.package.as_str(), target.name.as_str()) == (KERNEL_TESTS, test);
            if !self.targets.iter().any(is_it) {
                faults.push(format!("xtask/src/test/tiers.rs names the test {test}, which does not exist"));
            }
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_test_target_of_this_tree_is_in_one_tier() {
        let workspace = Workspace::read().unwrap();
        assert_eq!(workspace.faults(), Vec::<String>::new());
        let labels: BTreeSet<String> = workspace.targets.iter().map(Target::label).collect();
        assert_eq!(labels.len(), workspace.targets.len());
    }

    #[test]
    fn a_target_without_a_tier_is_a_fault() {
        let mut workspace = Workspace::read().unwrap();
        let target = |package: &str, kind: &str, name: &str| Target {
            package: package.to_owned(),
            kind: kind.to_owned(),
            name: name.to_owned(),
        };
        workspace.targets.retain(|target| target.package != "lb-svg" && target.name != "proof");
        workspace.targets.push(target("lb-new", "lib", "lb_new"));
        let expected = [
            "the tests of lib lb_new in package lb-new belong to no tier and never run: add the package to PACKAGES in xtask/src/test/tiers.rs",
            "xtask/src/test/tiers.rs names lb-svg, which has no tests",
            "xtask/src/test/tiers.rs names the test proof, which does not exist",
        ];
        assert_eq!(workspace.faults(), expected);
    }

    #[test]
    fn a_change_affects_all_that_use_it_or_start_it() {
        let affected = |package| Workspace::read().unwrap().affected([package].into_iter());
        let names =
            |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<String>>();
        assert_eq!(affected("lb-bench"), names(&["lb-bench"]));
        assert_eq!(affected("lb-user"), names(&["lb-bench", "lb-fuzz", "lb-inject", "lb-tests", "lb-user"]));
        assert!(affected("lb-common").contains("lb-sim") && !affected("lb-sim").contains("lb-core"));
    }

    #[test]
    fn integration_tests_of_the_kernel_have_tiers_of_their_own() {
        let tier = |kind: &str, name: &str| {
            let (package, kind, name) = (KERNEL_TESTS.to_owned(), kind.to_owned(), name.to_owned());
            Target { package, kind, name }.tier()
        };
        let tiers =
            [tier("lib", "stage"), tier("test", "metrics"), tier("test", "proof"), tier("test", "package")];
        let expected = [Tier::Local, Tier::Local, Tier::Proof, Tier::Package].map(Some);
        assert_eq!(tiers, expected);
    }
}
