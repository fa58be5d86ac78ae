//! Reads the files of a cgroup that show its use of processors, in both versions of cgroups.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use super::{Mounts, Usage};

/// The use of processors by a cgroup, or the reason why it cannot be read.
pub type Measured = Result<Usage, String>;

/// Reads the use of processors by a cgroup. `cores` is the configured number of processors that the
/// cgroup can use, in thousandths; `None` if none is configured.
///
/// # Errors
/// A text, if the cgroup does not exist or its files do not show its use of processors.
pub fn measure(mounts: &Mounts, cgroup: &Path, cores: Option<u32>, now: Instant) -> Measured {
    // If the `cpu` controller belongs to version 1, the limits are in the files of version 1, even
    // if version 2 measures the use.
    let first = mounts.cpu.as_ref().map(|cpu| (cpu, mounts.cpuacct.as_ref().unwrap_or(cpu)));
    match (first, &mounts.unified) {
        (Some((cpu, cpuacct)), _) if cpu.join(cgroup).is_dir() => {
            version_1(cpu, &cpuacct.join(cgroup), cgroup, cores, now)
        }
        (_, Some(unified)) => version_2(unified, cgroup, cores, now),
        (Some(_), None) => Err(format!("there is no cgroup {}", cgroup.display())),
        (None, None) => Err("no cgroups are mounted".to_owned()),
    }
}

fn version_2(mount: &Path, cgroup: &Path, cores: Option<u32>, now: Instant) -> Measured {
    let directory = mount.join(cgroup);
    let stat = read(&directory.join("cpu.stat"))?;
    let used = field(&stat, "usage_usec").ok_or("cpu.stat has no usage_usec")?;
    // Without pressure stall information (psi=0), the time of throttling is still known.
    let pressure = fs::read_to_string(directory.join("cpu.pressure")).ok();
    let waited = pressure.as_deref().and_then(some_total).or_else(|| field(&stat, "throttled_usec"));
    let limit = || least(mount, cgroup, |directory| quota_2(&read(&directory.join("cpu.max")).ok()?));
    Ok(Usage {
        at: now,
        used: Duration::from_micros(used),
        waited: waited.map(Duration::from_micros),
        cores: cores.or_else(limit).unwrap_or_else(host),
    })
}

fn version_1(cpu: &Path, acct: &Path, cgroup: &Path, cores: Option<u32>, now: Instant) -> Measured {
    let usage = read(&acct.join("cpuacct.usage"))?;
    let used = usage.trim().parse().map_err(|_| "cpuacct.usage has no number".to_owned())?;
    let stat = read(&cpu.join(cgroup).join("cpu.stat"))?;
    let limit = || {
        least(cpu, cgroup, |directory| {
            let number = |file: &str| read(&directory.join(file)).ok()?.trim().parse::<u64>().ok();
            // "No limit" is written as -1, which does not parse as an unsigned number.
            ratio(number("cpu.cfs_quota_us")?, number("cpu.cfs_period_us")?)
        })
    };
    Ok(Usage {
        at: now,
        used: Duration::from_nanos(used),
        waited: field(&stat, "throttled_time").map(Duration::from_nanos),
        cores: cores.or_else(limit).unwrap_or_else(host),
    })
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => format!("there is no {}", path.display()),
        _ => format!("read {}: {error}", path.display()),
    })
}

/// The smallest limit of a cgroup and of the cgroups above it, up to the mount.
fn least(mount: &Path, cgroup: &Path, limit: impl Fn(&Path) -> Option<u32>) -> Option<u32> {
    let levels = cgroup.ancestors().take_while(|level| !level.as_os_str().is_empty());
    let directories = levels.map(|level| -> PathBuf { mount.join(level) });
    directories.filter_map(|directory| limit(&directory)).min()
}

/// The number after `name` in a text that has one name and one number per line.
fn field(text: &str, name: &str) -> Option<u64> {
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.filter(|(word, _)| *word == name).find_map(|(_, number)| number.trim().parse().ok())
}

/// Microseconds in which at least one task waited, from a pressure file.
fn some_total(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("some "))?;
    line.split(' ').find_map(|word| word.strip_prefix("total="))?.parse().ok()
}

/// The limit in `cpu.max`, in thousandths of a processor.
fn quota_2(text: &str) -> Option<u32> {
    let (quota, period) = text.trim().split_once(' ')?;
    ratio(quota.parse().ok()?, period.parse().ok()?)
}

/// Returns thousandths of a processor.
fn ratio(quota: u64, period: u64) -> Option<u32> {
    let thousandths = quota.checked_mul(1000)?.checked_div(period)?;
    u32::try_from(thousandths.max(1)).ok()
}

/// The processors of this host that this process may use, in thousandths.
fn host() -> u32 {
    let processors = available_parallelism().map_or(1, usize::from);
    u32::try_from(processors).unwrap_or(1).saturating_mul(1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    fn usage(mounts: &Mounts, cores: Option<u32>) -> Result<(u64, Option<u64>, u32), String> {
        let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap();
        let usage = measure(mounts, Path::new("a/b"), cores, Instant::now())?;
        Ok((micros(usage.used), usage.waited.map(micros), usage.cores))
    }

    #[test]
    fn version_2_is_read_with_limits_and_pressure() {
        let pressure = "some avg10=0.00 avg60=0.00 avg300=0.00 total=77\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=5\n";
        let stat = "usage_usec 1234\nuser_usec 1000\nnr_throttled 1\nthrottled_usec 55\n";
        let folder = tree(&[
            ("a/cpu.max", "150000 100000\n"),
            ("a/b/cpu.max", "max 100000\n"),
            ("a/b/cpu.stat", stat),
            ("a/b/cpu.pressure", pressure),
        ]);
        let mounts = Mounts { unified: Some(folder.path().to_owned()), ..Mounts::default() };
        assert_eq!(usage(&mounts, None), Ok((1234, Some(77), 1500)));
        assert_eq!(usage(&mounts, Some(250)), Ok((1234, Some(77), 250)));
        fs::remove_file(folder.path().join("a/b/cpu.pressure")).unwrap();
        fs::write(folder.path().join("a/cpu.max"), "max 100000\n").unwrap();
        assert_eq!(usage(&mounts, None), Ok((1234, Some(55), host())));
        fs::write(folder.path().join("a/b/cpu.stat"), "nonsense").unwrap();
        assert_eq!(usage(&mounts, None), Err("cpu.stat has no usage_usec".to_owned()));
        fs::remove_dir_all(folder.path().join("a")).unwrap();
        assert!(usage(&mounts, None).unwrap_err().starts_with("there is no "));
        assert_eq!(usage(&Mounts::default(), None), Err("no cgroups are mounted".to_owned()));
    }

    #[test]
    fn version_1_is_read_with_its_quota() {
        let folder = tree(&[
            ("cpu/a/b/cpu.cfs_quota_us", "50000\n"),
            ("cpu/a/b/cpu.cfs_period_us", "100000\n"),
            ("cpu/a/cpu.cfs_quota_us", "-1\n"),
            ("cpu/a/cpu.cfs_period_us", "100000\n"),
            ("cpu/a/b/cpu.stat", "nr_periods 5\nthrottled_time 9000\n"),
            ("acct/a/b/cpuacct.usage", "1234000\n"),
        ]);
        let at = |name: &str| Some(folder.path().join(name));
        let mounts = Mounts { cpu: at("cpu"), cpuacct: at("acct"), unified: at("none") };
        assert_eq!(usage(&mounts, None), Ok((1234, Some(9), 500)));
    }
}
