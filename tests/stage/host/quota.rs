//! Cgroups that limit the processor time of their processes. If the controller `cpu` is mounted as
//! version 1, the cgroups have version 1, else version 2. The kernel itself counts the used time.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::cgroup::{enter, mount, name, remove, remove_leftovers};

/// A cgroup with a quota. On drop, the processes are killed and the cgroup is removed.
#[derive(Debug)]
pub struct Quota {
    name: String,
    version: Version,
}

/// The directories of the cgroup.
#[derive(Debug)]
enum Version {
    /// Two hierarchies may contain the limit (`cpu`) and the used time (`cpuacct`).
    One {
        cpu: PathBuf,
        cpuacct: PathBuf,
    },
    Two {
        unified: PathBuf,
    },
}

/// The kernel's counts for a cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Time on processors.
    pub used: Duration,
    /// Time in which processes waited for a new period because the quota was used up, summed over
    /// processors.
    pub throttled: Duration,
}

impl Quota {
    /// A cgroup without a limit yet.
    ///
    /// # Errors
    /// If neither version has the controller `cpu`.
    pub fn new() -> Result<Self> {
        let name = name();
        let version = if let Some(cpu) = mount_1("cpu")? {
            let cpuacct = mount_1("cpuacct")?.context("the controller cpu is mounted, but cpuacct is not")?;
            for mount in [&cpu, &cpuacct] {
                remove_leftovers(mount);
                // Both controllers may have one directory.
                fs::create_dir_all(mount.join(&name)).with_context(|| mount.display().to_string())?;
            }
            Version::One { cpu: cpu.join(&name), cpuacct: cpuacct.join(&name) }
        } else {
            let mount = mount();
            remove_leftovers(&mount);
            fs::write(mount.join("cgroup.subtree_control"), "+cpu")
                .context("enable the controller cpu for children")?;
            fs::create_dir(mount.join(&name))?;
            Version::Two { unified: mount.join(&name) }
        };
        Ok(Self { name, version })
    }

    /// The path relative to the mount, as in configurations.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version of cgroups.
    pub fn version(&self) -> u8 {
        match self.version {
            Version::One { .. } => 1,
            Version::Two { .. } => 2,
        }
    }

    /// Limits the processor time in each period.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn limit(&self, quota: Duration, period: Duration) -> Result<()> {
        let write = |directory: &Path, file: &str, text: String| {
            fs::write(directory.join(file), &text).with_context(|| format!("write {text} to {file}"))
        };
        let (quota, period) = (quota.as_micros(), period.as_micros());
        match &self.version {
            Version::One { cpu, .. } => {
                write(cpu, "cpu.cfs_period_us", period.to_string())?;
                write(cpu, "cpu.cfs_quota_us", quota.to_string())
            }
            Version::Two { unified } => write(unified, "cpu.max", format!("{quota} {period}")),
        }
    }

    /// The processor time that the cgroup has used.
    ///
    /// # Errors
    /// If its files cannot be read.
    pub fn used(&self) -> Result<Used> {
        let field = |directory: &Path, name: &str| -> Result<u64> {
            let text = fs::read_to_string(directory.join("cpu.stat"))?;
            let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
            text.lines().find_map(value).with_context(|| format!("cpu.stat has no {name}"))
        };
        Ok(match &self.version {
            Version::One { cpu, cpuacct } => Used {
                used: Duration::from_nanos(
                    fs::read_to_string(cpuacct.join("cpuacct.usage"))?.trim().parse()?,
                ),
                throttled: Duration::from_nanos(field(cpu, "throttled_time")?),
            },
            Version::Two { unified } => Used {
                used: Duration::from_micros(field(unified, "usage_usec")?),
                throttled: Duration::from_micros(field(unified, "throttled_usec")?),
            },
        })
    }

    pub fn enter(&self, command: &mut Command) {
        for directory in self.directories() {
            enter(directory, command);
        }
    }

    fn directories(&self) -> Vec<&Path> {
        match &self.version {
            Version::One { cpu, cpuacct } => vec![cpu, cpuacct],
            Version::Two { unified } => vec![unified],
        }
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        for directory in self.directories() {
            remove(directory);
        }
    }
}

/// The mount point of a version 1 controller, found by file system type; `None` if it is not
/// mounted.
fn mount_1(controller: &str) -> Result<Option<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read the mount table")?;
    let line = table.lines().find(|line| {
        let kind = line.split_once(" - ").map(|(_, rest)| rest.split(' ').collect::<Vec<_>>());
        kind.is_some_and(|kind| {
            kind[0] == "cgroup"
                && kind.last().is_some_and(|options| options.split(',').any(|word| word == controller))
        })
    });
    let at = line.map(|line| line.split(' ').nth(4).context("the line has no mount point")).transpose()?;
    if let Some(at) = at {
        ensure!(Path::new(at).is_dir(), "{at} is not a directory");
    }
    Ok(at.map(PathBuf::from))
}
