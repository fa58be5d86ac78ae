//! Every tier of tests, cheapest first, after what they need is installed and the tree is checked.

use anyhow::{Result, bail};

use crate::command::{cargo, run as run_command, target};
use crate::{check, object, others, package, setup, tidy, vm};

/// `cargo xtask test`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Only one tier: nothing is installed or checked before it
    tier: Option<Tier>,
    /// Only tests whose name contains this; for tier vm a kernel first, as in `vm 6.1 connect`
    #[arg(requires = "tier", num_args = 0..=2, value_name = "FILTER")]
    which: Vec<String>,
    /// Tier vm: record what the verifier counts on each kernel, instead of testing
    #[arg(long, requires = "tier")]
    record: bool,
}

/// A tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Tier {
    /// Pure code: the contract, the decisions, the planner, the house rules. No root, any platform
    Pure,
    /// The daemon's own tests, and what it reads from outside. No root
    Product,
    /// The committed kernel object against its sources
    Object,
    /// The program on this kernel, with real cgroups and sockets. Root
    Local,
    /// What an operator must be able to rely on, under load: restarts, upgrades, kills, by the dozen. Root
    Proof,
    /// The Debian package: built, installed on this machine, used, and removed. Root
    Package,
    /// The same on the oldest kernel, and what depends on a kernel's features on others, by emulation. Of Debian; `vm KERNEL FILTER` for one
    Vm,
}

/// `cargo xtask test`.
pub fn run(options: &Options) -> Result<()> {
    if let Some(tier) = options.tier {
        let which: Vec<&str> = options.which.iter().map(String::as_str).collect();
        return match (tier, which.as_slice(), options.record) {
            (Tier::Vm, which, record) => vm::run(&of_guests(which, record)?),
            (_, _, true) => bail!("only tier vm records: `cargo xtask test vm --record`"),
            (_, [], false) => run_tier(tier, None),
            (_, [filter], false) => run_tier(tier, Some(filter)),
            (_, more, false) => bail!("one filter, not {}", more.join(" and ")),
        };
    }
    setup::run(&setup::Options::install())?;
    check::run()?;
    tidy::run()?;
    for tier in [Tier::Pure, Tier::Product, Tier::Object, Tier::Local, Tier::Vm, Tier::Proof, Tier::Package] {
        run_tier(tier, None)?;
    }
    println!("test: every tier passed");
    Ok(())
}

/// What follows `vm`: a kernel, then a filter.
fn of_guests(which: &[&str], record: bool) -> Result<vm::Options> {
    let word = |at: usize| which.get(at).map(|word| (*word).to_owned());
    let options = vm::Options { kernel: word(0), filter: word(1), record };
    if record && options.filter.is_some() {
        bail!("what the verifier counts is recorded whole, without a filter");
    }
    Ok(options)
}

fn run_tier(tier: Tier, filter: Option<&str>) -> Result<()> {
    let what: &[&str] = match tier {
        Tier::Pure => &[
            "-p",
            "lb-common",
            "-p",
            "lb-core",
            "-p",
            "lb-sim",
            "-p",
            "lb-svg",
            "-p",
            "lb-view",
            "-p",
            "xtask",
        ],
        // With the readers of text from outside, fed with what fuzzers have found.
        Tier::Product => &[
            "--package",
            "lb-agent",
            "--package",
            "lb-diag",
            "--package",
            "lb-kernel",
            "--package",
            "lb-user",
            "--package",
            "lb-fuzz",
        ],
        Tier::Object => return object::rebuild_and_compare(),
        // With the tests of the tests' own parts.
        Tier::Local => &["--package", "lb-tests", "--lib", "--bins", "--test", "local", "--test", "metrics"],
        Tier::Proof => &["--package", "lb-tests", "--test", "proof"],
        Tier::Package => &["--package", "lb-tests", "--test", "package"],
        Tier::Vm => return vm::run(&vm::Options::default()),
    };
    let root = rustix::process::geteuid().is_root();
    if matches!(tier, Tier::Local | Tier::Proof) {
        if !root {
            bail!("this tier needs root: it makes cgroups and network namespaces and loads kernel programs");
        }
        run_command(cargo().args(["build", "--package", "lb-user", "--locked"]))?;
    }
    if tier == Tier::Local {
        object::build_logging_for_tests(&target().join("debug"))?;
    }
    if tier == Tier::Proof {
        others::build()?;
    }
    if tier == Tier::Package {
        if !root {
            bail!("tier package needs root: it installs the package on this machine, and removes it");
        }
        package::build()?;
    }
    let mut test = cargo();
    test.args(["test", "--locked"]).args(what).args(filter);
    run_command(&mut test)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_named_before_its_filter() {
        let options = |kernel: Option<&str>, filter: Option<&str>, record| vm::Options {
            kernel: kernel.map(str::to_owned),
            filter: filter.map(str::to_owned),
            record,
        };
        assert_eq!(of_guests(&[], false).unwrap(), options(None, None, false));
        assert_eq!(of_guests(&["6.1"], true).unwrap(), options(Some("6.1"), None, true));
        assert_eq!(
            of_guests(&["6.1", "connect"], false).unwrap(),
            options(Some("6.1"), Some("connect"), false)
        );
        assert!(of_guests(&["6.1", "connect"], true).is_err());
    }
}
