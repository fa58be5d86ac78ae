//! `cargo xtask test`: installs tools, checks the code, builds everything once, and then runs every
//! tier of tests, beginning with the cheapest.
//!
//! A part is skipped if `tests/passed.toml` records that it has passed with the same inputs. The
//! run prints the names of skipped parts. `--all` skips nothing. A run ends with a line per tier,
//! the slowest tests, and the total time.

mod build;
mod changed;
mod machine;
mod passed;
mod programs;
mod tiers;

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use lb_suite::{Modules, Summary};

use crate::command::{cargo, output, root, run as run_command, target};
use crate::downloads::kernels;
use crate::runs::vm;
use crate::{check, object, others, package, setup, tidy};

pub use build::{Built, PROFILE, suite_cargo, triple};
pub use passed::Part;
pub use tiers::Workspace;

use build::What;
use changed::Changed;
use passed::Passed;
use programs::Plan;
use tiers::Tier;

/// `cargo xtask test`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Run only this tier, without installing or checking anything before it
    tier: Option<Tier>,
    /// Run only tests with names that contain this; for tier vm, a kernel comes first, as in `vm
    /// 6.1 connect`
    #[arg(requires = "tier", num_args = 0..=2, value_name = "FILTER")]
    which: Vec<String>,
    /// Run everything, including parts that have passed before: every kernel, the release build,
    /// and the long forms of tests
    #[arg(long)]
    all: bool,
    /// Run only the tiers and tests that the changes since the base commit can break
    #[arg(long, conflicts_with_all = ["tier", "all"])]
    changed: bool,
    /// The commit to compare with; default: the commit at which this branch left the main branch,
    /// or else the commit in tests/passed.toml
    #[arg(long, value_name = "COMMIT")]
    base: Option<String>,
    /// Tier vm: record the verifier's counts on each kernel, instead of testing
    #[arg(long, requires = "tier")]
    record: bool,
}

/// The variable that selects the long form of tests.
const LONG: &str = "SOCKLB_TEST_LONG";

/// Number of listed slowest tests.
const SLOWEST: usize = 20;

/// The package tests that run if the package's inputs are unchanged. They install, use, upgrade and
/// purge a package of the suite's build.
const SHORT_PACKAGE: [&str; 2] = [
    "service::an_upgrade_restarts_the_daemon_and_retains_the_programs",
    "contents::removal_and_purge_leave_only_the_user",
];

/// `cargo xtask test`.
pub fn run(options: &Options) -> Result<()> {
    if options.record && options.tier != Some(Tier::Vm) {
        bail!("--record needs tier vm: `cargo xtask test vm --record`");
    }
    machine::prepare()?;
    let mut suite = Suite::new(options)?;
    let result = match options.tier {
        Some(tier) => suite.one_tier(tier, &options.which, options.record),
        None if options.changed => suite.changed_tiers(),
        None => suite.every_tier(),
    };
    suite.print()?;
    result?;
    if suite.is_whole() {
        let head = output(std::process::Command::new("git").current_dir(root()).args(["rev-parse", "HEAD"]))?;
        suite.passed.note_commit(head)?;
    }
    Ok(())
}

/// The table of the modules of the local tests.
fn modules() -> Result<Modules> {
    let path = root().join("tests/local/modules.toml");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    Modules::parse(&text)
}

/// Records that parts have passed outside a run of the suite, so that the next run skips them.
pub fn note_passed(parts: &[Part]) -> Result<()> {
    let mut passed = Passed::read(modules()?.host_only())?;
    parts.iter().try_for_each(|part| passed.note(*part))
}

/// One run of `cargo xtask test`.
struct Suite<'o> {
    options: &'o Options,
    workspace: Workspace,
    modules: Modules,
    passed: Passed,
    /// The commit with which the tree is compared.
    base: Option<String>,
    changed: Changed,
    /// The steps before the tests, with their duration in seconds.
    steps: Vec<(&'static str, f64)>,
    summaries: Vec<Summary>,
    /// The parts that the run has skipped, because `tests/passed.toml` records that they have
    /// passed.
    relied: Vec<String>,
    /// Whether the other versions of socklb are built (`others`).
    others_built: bool,
    began: Instant,
}

impl<'o> Suite<'o> {
    fn new(options: &'o Options) -> Result<Self> {
        let modules = modules()?;
        let workspace = Workspace::read()?;
        let passed = Passed::read(modules.host_only())?;
        let base = options.base.clone().or_else(|| changed::base(passed.commit.as_deref()));
        let changed = match &base {
            Some(base) => Changed::since(base, &workspace)?,
            None => Changed::default(),
        };
        match &base {
            Some(base) => println!("test: {} new and changed tests since {base}", changed.len()),
            None => println!("test: no base commit is known: no test counts as new or changed"),
        }
        let (steps, summaries, relied) = (Vec::new(), Vec::new(), Vec::new());
        let others_built = false;
        Ok(Self {
            options,
            workspace,
            modules,
            passed,
            base,
            changed,
            steps,
            summaries,
            relied,
            others_built,
            began: Instant::now(),
        })
    }

    fn every_tier(&mut self) -> Result<()> {
        let built = self.prepare()?;
        for tier in Tier::ALL {
            self.tier(tier, &built, &[])?;
        }
        Ok(())
    }

    /// Runs set-up, and at the same time checks and builds the code that needs only the stable
    /// toolchain. On a new machine, set-up takes minutes, which it mostly spends waiting for disks
    /// and the network.
    fn prepare(&mut self) -> Result<Built> {
        setup::install_components()?;
        let lints = !self.relies_on(Part::Lints)?;
        let (licences, guests) = (!self.skips(Part::Licences)?, !self.skips(Part::Guests)?);
        let built = std::thread::scope(|scope| {
            let set_up = scope.spawn(move || {
                let began = Instant::now();
                set_up(licences, guests)
                    .and_then(|()| if lints { check::kernel() } else { Ok(()) })
                    .inspect_err(|error| eprintln!("set-up: {error:#}; the run fails after the build"))?;
                anyhow::Ok(began.elapsed().as_secs_f64())
            });
            let built = self.check_and_build(lints)?;
            let seconds = set_up.join().expect("the set-up thread does not panic")?;
            self.steps.push(("at the same time, set-up and check of kernel programs", seconds));
            anyhow::Ok(built)
        })?;
        if lints {
            self.passed.note(Part::Lints)?;
        }
        if !self.relies_on(Part::Licences)? {
            check::licences()?;
            self.passed.note(Part::Licences)?;
        }
        Ok(built)
    }

    fn check_and_build(&mut self, lints: bool) -> Result<Built> {
        if lints {
            self.step("check", |_| check::host().and_then(|()| check::docs()))?;
        }
        self.step("tidy", |_| tidy::run())?;
        self.step("build", |_| build::build(What::Everything))
    }

    /// Whether the run may skip a part, because the part has passed with its current inputs.
    fn skips(&self, part: Part) -> Result<bool> {
        Ok(!self.options.all && self.passed.has(part)?)
    }

    /// Whether the run skips a part because of the record. If it does, adds the part to `relied`.
    fn relies_on(&mut self, part: Part) -> Result<bool> {
        let relies = self.skips(part)?;
        if relies {
            self.relied
                .push(format!("{part:?}: unchanged since it passed (tests/passed.toml)").to_lowercase());
        }
        Ok(relies)
    }

    fn one_tier(&mut self, tier: Tier, which: &[String], record: bool) -> Result<()> {
        if tier == Tier::Object {
            return object::rebuild_and_compare();
        }
        let (kernel, filters) = match (tier, which) {
            (Tier::Vm, [kernel, filters @ ..]) => (Some(kernel.as_str()), filters),
            (_, filters) => (None, filters),
        };
        if record && !filters.is_empty() {
            bail!("--record records the counts of all programs: leave the filter out");
        }
        if filters.len() > 1 {
            bail!("only one filter is possible, not {}", filters.join(" and "));
        }
        let filtered = !filters.is_empty();
        let built = self.step("build", |_| build::build(What::Tier { tier, filtered }))?;
        if tier == Tier::Vm {
            let options = vm::Options {
                kernel,
                filter: filters.first().map(String::as_str),
                tests: vm::Tests::of(self.options.all),
                record,
            };
            object::build_logging_for_tests(&built.folder)?;
            self.guests(&built, &options)?;
            let is_all = kernel.is_none() && !record;
            return if is_all { self.passed.note(Part::Guests) } else { Ok(()) };
        }
        self.tier(tier, &built, filters)
    }

    /// Runs the tiers of the changed packages and of the packages that depend on them.
    fn changed_tiers(&mut self) -> Result<()> {
        let base = self.base.as_ref().context("no base commit is known: name one with --base COMMIT")?;
        let files = changed::files(base)?;
        let affected =
            self.workspace.affected(files.iter().filter_map(|file| changed::package(&self.workspace, file)));
        self.step("tidy", |_| tidy::run())?;
        let mut tiers: Vec<Tier> = self
            .workspace
            .targets
            .iter()
            .filter(|target| affected.contains(&target.package))
            .filter_map(tiers::Target::tier)
            .collect();
        tiers.sort_unstable();
        tiers.dedup();
        let kernel = files.iter().any(|file| {
            ["lb-ebpf/", "lb-common/", "crates/lb-report/"].iter().any(|folder| file.starts_with(folder))
        });
        if kernel {
            tiers.insert(0, Tier::Object);
        }
        // If all changed sources are modules of the local tests, only these modules run.
        let modules: Option<Vec<String>> = files
            .iter()
            .filter(|file| file.ends_with(".rs"))
            .map(|file| {
                let module = file.strip_prefix("tests/local/")?.strip_suffix(".rs")?;
                Some(module.replace('/', "::") + "::")
            })
            .collect();
        if modules.as_ref().is_some_and(|modules| !modules.is_empty()) {
            tiers = vec![Tier::Local];
        }
        for tier in tiers {
            let filters = modules.clone().filter(|_| tier == Tier::Local).unwrap_or_default();
            println!("test: {} {}", tier.name(), filters.join(" "));
            let built =
                self.step("build", |_| build::build(What::Tier { tier, filtered: !filters.is_empty() }))?;
            self.tier(tier, &built, &filters)?;
        }
        println!("test: guests run only with `cargo xtask test vm`");
        Ok(())
    }

    /// Runs one tier. Returns an error if one of its tests fails.
    fn tier(&mut self, tier: Tier, built: &Built, filters: &[String]) -> Result<()> {
        if let Some(what) = tier.needs_root()
            && !rustix::process::geteuid().is_root()
        {
            bail!("tier {} needs root: it {what}", tier.name());
        }
        match tier {
            Tier::Object => return self.step("object", |_| object::rebuild_and_compare()),
            Tier::Vm => return self.every_guest(built),
            Tier::Local => object::build_logging_for_tests(&built.folder)?,
            Tier::Proof if self.others_built => {}
            Tier::Proof => self.step("other builds", |_| others::build(&built.folder))?,
            Tier::Package if filters.is_empty() => return self.package(built),
            Tier::Package => package::build(package::From::Release).map(drop)?,
            Tier::Pure | Tier::Product => {}
        }
        self.programs(tier, built, filters)
    }

    /// Runs all tests of the package, on a package of the release build. If the package's inputs
    /// are unchanged, runs only [`SHORT_PACKAGE`], on a package of the suite's build.
    fn package(&mut self, built: &Built) -> Result<()> {
        if self.relies_on(Part::Package)? {
            self.step("package's build", |_| package::build(package::From::Suite).map(drop))?;
            return self.programs(Tier::Package, built, &SHORT_PACKAGE.map(str::to_owned));
        }
        self.step("package's build", |_| package::build(package::From::Release).map(drop))?;
        self.programs(Tier::Package, built, &[])?;
        self.passed.note(Part::Package)
    }

    /// Runs the tests on every kernel. If the inputs of these tests are unchanged, runs only a
    /// smoke test on the oldest kernel.
    fn every_guest(&mut self, built: &Built) -> Result<()> {
        object::build_logging_for_tests(&built.folder)?;
        if !self.relies_on(Part::Guests)? {
            let tests = vm::Tests::of(self.options.all);
            self.guests(built, &vm::Options { tests, ..vm::Options::default() })?;
            return self.passed.note(Part::Guests);
        }
        // The guest occupies one CPU, so the other versions of socklb, which tier `proof` needs,
        // are built at the same time.
        let options = vm::Options { tests: vm::Tests::Smoke, ..vm::Options::default() };
        std::thread::scope(|scope| {
            let others = scope.spawn(|| others::build(&built.folder));
            let guests = self.guests(built, &options);
            others.join().expect("the build thread does not panic").and(guests)
        })?;
        self.others_built = true;
        Ok(())
    }

    /// Runs tests in guests, which use the logging variants of the programs.
    fn guests(&mut self, built: &Built, options: &vm::Options<'_>) -> Result<()> {
        let local = built.kernel_test("local")?;
        let mut names = programs::list(local)?;
        names.retain(|test| self.changed.contains(tiers::KERNEL_TESTS, test));
        let (summaries, result) = vm::run(built, &local.path, options, &names)?;
        self.summaries.extend(summaries);
        result
    }

    fn programs(&mut self, tier: Tier, built: &Built, filters: &[String]) -> Result<()> {
        let programs: Vec<_> = built.tests.iter().filter(|test| test.target.tier() == Some(tier)).collect();
        let long = self.options.all.then(|| (LONG, "1".to_owned()));
        let variables: Vec<_> = long.into_iter().collect();
        let plan = Plan {
            name: tier.name(),
            programs: &programs,
            filters,
            modules: &self.modules,
            changed: &self.changed,
            variables: &variables,
        };
        let mut summary = plan.run()?;
        if filters.is_empty() {
            programs::documentation(&self.workspace, tier, &mut summary)?;
        }
        if summary.ran.is_empty() && !filters.is_empty() {
            bail!("no test of tier {} has a name with {}", tier.name(), filters.join(" or "));
        }
        let strict: Vec<String> = summary
            .unsteady
            .iter()
            .filter(|test| tier == Tier::Proof || self.is_strict(&test.name))
            .map(|test| test.name.clone())
            .collect();
        let failed = summary.failed.len();
        self.summaries.push(summary);
        if failed > 0 {
            bail!("tier {}: {failed} tests failed", tier.name());
        }
        if !strict.is_empty() {
            bail!(
                "tier {}: unsteady tests of accounting, adoption or upgrades: {}; they pass when they run alone, but a race may be the reason",
                tier.name(),
                strict.join(", ")
            );
        }
        Ok(())
    }

    /// Whether `label` is the label of a test in tier local that guards accounting, adoption or
    /// upgrades.
    fn is_strict(&self, label: &str) -> bool {
        label.strip_prefix("lb-tests/local::").is_some_and(|test| self.modules.is_strict(test))
    }

    /// Runs a step that is not a test, and records its duration.
    fn step<T>(&mut self, name: &'static str, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let began = Instant::now();
        let done = work(self);
        self.steps.push((name, began.elapsed().as_secs_f64()));
        done
    }

    /// Whether the run covered all parts of a normal run.
    fn is_whole(&self) -> bool {
        self.options.tier.is_none() && !self.options.changed
    }

    /// Prints a line per tier, the parts that were skipped because of the record, the slowest
    /// tests, and unsteady tests. Also writes the unsteady tests to a file.
    fn print(&self) -> Result<()> {
        println!();
        let steps: Vec<String> =
            self.steps.iter().map(|(name, seconds)| format!("{name} {seconds:.0} s")).collect();
        println!("test: {}", steps.join(", "));
        for summary in &self.summaries {
            let Summary { name, skipped, unsteady, failed, seconds, .. } = summary;
            let (passed, failed) = (summary.passed(), failed.len());
            println!(
                "{name}: {passed} passed, {failed} failed, {} skipped, {} unsteady, {seconds:.0} s",
                skipped.len(),
                unsteady.len()
            );
            for skipped in skipped {
                println!("  skipped: {skipped}");
            }
        }
        for relied in &self.relied {
            println!("relied on: {relied}");
        }
        let mut ran: Vec<_> = self
            .summaries
            .iter()
            .flat_map(|summary| summary.ran.iter().map(|ran| (ran, &summary.name)))
            .collect();
        ran.sort_by(|(one, _), (other, _)| other.seconds.total_cmp(&one.seconds));
        println!("the {SLOWEST} slowest tests:");
        for (ran, tier) in ran.iter().take(SLOWEST) {
            println!("  {:6.1} s  {tier}  {}", ran.seconds, ran.name);
        }
        let mut unsteady = Vec::new();
        for summary in &self.summaries {
            for test in &summary.unsteady {
                println!("unsteady: {} ({})\n{}", test.name, summary.name, test.output);
                unsteady.push(
                    serde_json::json!({ "tier": summary.name, "test": test.name, "output": test.output }),
                );
            }
        }
        let path = target().join("unsteady.json");
        let text = serde_json::to_string_pretty(&unsteady).context("write unsteady tests as JSON")?;
        fs::write(&path, text + "\n").with_context(|| format!("write {}", path.display()))?;
        let sum = |count: fn(&Summary) -> usize| self.summaries.iter().map(count).sum::<usize>();
        let (passed, failed) = (sum(Summary::passed), sum(|summary| summary.failed.len()));
        let (skipped, seconds) = (sum(|summary| summary.skipped.len()), self.began.elapsed().as_secs());
        println!("{passed} passed, {failed} failed, {skipped} skipped, in {seconds} s");
        Ok(())
    }
}

/// Installs tools, and downloads the crates and kernels that the run needs. After this, the tiers
/// need no network.
fn set_up(licences: bool, guests: bool) -> Result<()> {
    setup::run(&setup::Options::install(licences))?;
    for manifest in ["Cargo.toml", "lb-ebpf/Cargo.toml"] {
        run_command(cargo().args(["fetch", "--locked", "--manifest-path", manifest]))?;
    }
    if guests { kernels::all(None).map(drop) } else { kernels::oldest().map(drop) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tests_of_the_short_form_of_the_package_exist() {
        for name in SHORT_PACKAGE {
            let (module, function) = name.split_once("::").unwrap();
            let text = fs::read_to_string(root().join(format!("tests/package/{module}.rs"))).unwrap();
            assert!(text.contains(&format!("#[test]\nfn {function}()")), "{name}");
        }
    }
}
