//! Every tier of tests, cheapest first, after what they need is installed and the tree is checked.

use anyhow::{Result, bail};

use crate::command::{cargo, run as run_command};
use crate::{check, object, others, package, setup, tidy};

/// `cargo xtask test`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Only one tier: nothing is installed or checked before it
    tier: Option<Tier>,
    /// Only tests whose name contains this
    #[arg(requires = "tier")]
    filter: Option<String>,
}

/// A tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Tier {
    /// Pure code: the contract, the decisions, the house rules. No root, any platform
    Pure,
    /// The daemon's own tests. No root
    Product,
    /// The committed kernel object against its sources
    Object,
    /// The program on this kernel, with real cgroups and sockets. Root
    Local,
    /// What an operator must be able to rely on, under load: restarts, upgrades, kills, by the dozen. Root
    Proof,
    /// The Debian package: built, installed on this machine, used, and removed. Root
    Package,
}

/// `cargo xtask test`.
pub fn run(options: &Options) -> Result<()> {
    if let Some(tier) = options.tier {
        return run_tier(tier, options.filter.as_deref());
    }
    setup::run(&setup::Options::install())?;
    check::run()?;
    tidy::run()?;
    for tier in [Tier::Pure, Tier::Product, Tier::Object, Tier::Local, Tier::Proof, Tier::Package] {
        run_tier(tier, None)?;
    }
    println!("test: every tier passed");
    Ok(())
}

fn run_tier(tier: Tier, filter: Option<&str>) -> Result<()> {
    let what: &[&str] = match tier {
        Tier::Pure => &["--package", "lb-common", "--package", "lb-core", "--package", "xtask"],
        Tier::Product => &["--package", "lb-user"],
        Tier::Object => return object::rebuild_and_compare(),
        Tier::Local => &["--package", "lb-tests", "--test", "local"],
        Tier::Proof => &["--package", "lb-tests", "--test", "proof"],
        Tier::Package => &["--package", "lb-tests", "--test", "package"],
    };
    let root = rustix::process::geteuid().is_root();
    if matches!(tier, Tier::Local | Tier::Proof) {
        if !root {
            bail!("this tier needs root: it makes cgroups and network namespaces and loads kernel programs");
        }
        run_command(cargo().args(["build", "--package", "lb-user", "--locked"]))?;
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
