//! Fetches kernels for the VM tests from the mirrors in this machine's apt sources. A separate apt
//! state leaves these sources unchanged. All clones of a user share the cache, and every use checks
//! the hashes of the files.
//!
//! For each kernel, the cache contains the image, the few modules that tests need, and a record of
//! the package that contained them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::apt::{Apt, Package};
use crate::command::{cached, output, root, run as run_command};
use crate::object::hex;

/// `cargo xtask kernels`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Write the newest package of every pinned series to tests/vm/kernels.toml, instead of
    /// fetching the pinned packages
    #[arg(long)]
    record: bool,
}

/// The modules that tests need: two to list sockets, one for sockets that the kernel opens, and one
/// for a router. Their dependencies are added.
const MODULES: [&str; 4] = ["tcp_diag", "udp_diag", "cifs", "veth"];
/// The time between two searches for a newer kernel.
const FRESH: Duration = Duration::from_secs(24 * 3600);

/// The entry of a kernel in `tests/vm/kernels.toml`.
#[derive(Clone, Debug, Deserialize)]
struct Kernel {
    name: String,
    suite: String,
    /// The name patterns of the kernel's packages, the image's package first. Each pattern has one
    /// `*`, which stands for the part that changes with a version.
    packages: Vec<String>,
    #[serde(flatten)]
    pin: Option<Pin>,
}

/// The exact version of the image's package, and the hash of its archive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Pin {
    version: String,
    sha256: String,
}

#[derive(Debug, Deserialize)]
struct Kernels {
    kernel: Vec<Kernel>,
}

/// The record of a cached kernel, stored in the kernel's folder.
#[derive(Debug, Serialize, Deserialize)]
struct CachedKernel {
    package: String,
    version: String,
    sha256: String,
    /// The modules that were requested.
    modules: Vec<String>,
    /// The SHA-256 of each cached file, by its name.
    files: BTreeMap<String, String>,
}

/// `cargo xtask kernels`.
pub fn run(options: &Options) -> Result<()> {
    if options.record { record() } else { all(None).map(drop) }
}

/// The folders of all kernels, or of the kernel with this name. Fetches kernels that are not
/// cached. If the kernel without a pin cannot be fetched, prints the error and leaves this kernel
/// out.
pub fn all(name: Option<&str>) -> Result<Vec<PathBuf>> {
    let mut kernels = listed()?;
    if let Some(name) = name {
        let names: Vec<String> = kernels.iter().map(|kernel| kernel.name.clone()).collect();
        kernels.retain(|kernel| kernel.name == name);
        if kernels.is_empty() {
            bail!("there is no kernel {name}; the kernels are {}", names.join(", "));
        }
    }
    let mut folders = Vec::new();
    for kernel in kernels {
        let folder = folder(&kernel);
        match obtain(&kernel, &folder) {
            Ok(()) => folders.push(folder),
            // Only the newest kernel has no pin. It may be missing, because a mirror may be
            // unreachable.
            Err(error) if kernel.pin.is_none() => {
                println!("kernels: {} is NOT TESTED: {error:#}", kernel.name);
            }
            Err(error) => return Err(error.context(format!("kernel {}", kernel.name))),
        }
    }
    if folders.is_empty() {
        bail!("no kernel to test");
    }
    Ok(folders)
}

/// The folder of the oldest kernel, which is the first of the list.
pub fn oldest() -> Result<PathBuf> {
    let first = listed()?.into_iter().next().context("tests/vm/kernels.toml lists no kernel")?;
    all(Some(&first.name))?.pop().context("the oldest kernel has no folder")
}

fn path() -> PathBuf {
    root().join("tests/vm/kernels.toml")
}

fn listed() -> Result<Vec<Kernel>> {
    let text = fs::read_to_string(path()).context("read tests/vm/kernels.toml")?;
    let kernels: Kernels = toml::from_str(&text).context("read tests/vm/kernels.toml")?;
    Ok(kernels.kernel)
}

fn cache() -> PathBuf {
    cached("kernels")
}

fn folder(kernel: &Kernel) -> PathBuf {
    cache().join(&kernel.name)
}

/// Ensures that a kernel is in the cache.
fn obtain(kernel: &Kernel, folder: &Path) -> Result<()> {
    let cached_kernel = match cached_kernel(folder) {
        Ok(cached_kernel) => cached_kernel,
        Err(error) => {
            println!("kernels: {error:#}; fetching {}", kernel.name);
            return fetch(kernel, folder, &reach(kernel)?);
        }
    };
    let Some(pin) = &kernel.pin else {
        let age = fs::metadata(folder.join(RECORD_FILE))?.modified()?.elapsed().unwrap_or_default();
        return if age > FRESH { renew(kernel, folder, &cached_kernel) } else { Ok(()) };
    };
    if cached_kernel.version != pin.version {
        // Either the pin has changed after the fetch, or the mirror had only a newer package than
        // the pinned package.
        return renew(kernel, folder, &cached_kernel);
    }
    if cached_kernel.sha256 != pin.sha256 {
        bail!(
            "the hash of the cached {} {} differs from the recorded hash; remove {}",
            cached_kernel.package,
            cached_kernel.version,
            folder.display()
        );
    }
    Ok(())
}

/// Fetches the kernel again, and replaces the cached one. If no mirror can be reached, the cached
/// kernel remains in use.
fn renew(kernel: &Kernel, folder: &Path, cached_kernel: &CachedKernel) -> Result<()> {
    match reach(kernel) {
        Ok(apt) => fetch(kernel, folder, &apt),
        Err(error) => {
            println!(
                "kernels: {}: no mirror can be reached; using the cached {}: {error:#}",
                kernel.name, cached_kernel.version
            );
            Ok(())
        }
    }
}

fn reach(kernel: &Kernel) -> Result<Apt> {
    Apt::of_suite(&kernel.suite, "amd64", &cache().join("apt").join(&kernel.suite))
}

const RECORD_FILE: &str = "kept.toml";

/// Reads the record of a cached kernel, if all its files are unchanged.
fn cached_kernel(folder: &Path) -> Result<CachedKernel> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let text =
        fs::read_to_string(folder.join(RECORD_FILE)).map_err(|_| anyhow::anyhow!("{name} is not cached"))?;
    let cached_kernel: CachedKernel =
        toml::from_str(&text).with_context(|| format!("{name} is cached without a valid description"))?;
    if cached_kernel.modules != MODULES {
        bail!("{name}: the modules {MODULES:?} are needed, {:?} are cached", cached_kernel.modules);
    }
    for (file, sha256) in &cached_kernel.files {
        let bytes =
            fs::read(folder.join(file)).with_context(|| format!("{name}: {file} is missing in the cache"))?;
        if hex(&bytes) != *sha256 {
            bail!("{name}: {file} has changed in the cache");
        }
    }
    Ok(cached_kernel)
}

/// Downloads a kernel and extracts the needed files.
fn fetch(kernel: &Kernel, folder: &Path, apt: &Apt) -> Result<()> {
    let (package, pinned) = choose(kernel, apt.packages(&kernel.packages[0])?)?;
    if !pinned && kernel.pin.is_some() {
        println!(
            "kernels: {}: the mirror no longer has the recorded version; using {} {}, which apt has verified. \
             `cargo xtask kernels --record` updates tests/vm/kernels.toml",
            kernel.name, package.name, package.version
        );
        if cached_kernel(folder).is_ok_and(|cached_kernel| cached_kernel.sha256 == package.sha256) {
            return Ok(());
        }
    }
    if kernel.pin.is_none()
        && cached_kernel(folder).is_ok_and(|cached_kernel| cached_kernel.sha256 == package.sha256)
    {
        // The cached kernel is still the newest, so its record gets the present time, which
        // postpones the next check by a day.
        let touched = File::options().append(true).open(folder.join(RECORD_FILE));
        return touched
            .and_then(|file| file.set_modified(SystemTime::now()))
            .context("store the time of this check");
    }
    let new = cache().join(format!("{}.new", kernel.name));
    let _ = fs::remove_dir_all(&new);
    let unpacked = new.join("unpacked");
    fs::create_dir_all(&unpacked).with_context(|| format!("make {}", unpacked.display()))?;
    // The `*` stands for the same text in the names of all packages of a kernel.
    let version = between(&kernel.packages[0], &package.name)
        .context("a package does not match the pattern of its series")?
        .to_owned();
    for pattern in &kernel.packages {
        let name = pattern.replace('*', &version);
        let archive = apt.download(&name, &package.version, &new)?;
        let bytes = fs::read(&archive)?;
        if name == package.name && hex(&bytes) != package.sha256 {
            bail!("{name}: the download has hash {}, and not {}", hex(&bytes), package.sha256);
        }
        run_command(Command::new("dpkg").arg("-x").arg(&archive).arg(&unpacked))?;
        fs::remove_file(&archive)?;
    }
    store(&new, &unpacked, &package)?;
    fs::remove_dir_all(&unpacked)?;
    let _ = fs::remove_dir_all(folder);
    fs::rename(&new, folder).with_context(|| format!("move {} into place", folder.display()))?;
    println!("kernels: {} is {} {}", kernel.name, package.name, package.version);
    Ok(())
}

/// Chooses the pinned package. If there is no pin, or if the suite no longer has the pinned
/// version, chooses the newest package of the series. Also returns whether the package is the
/// pinned one.
fn choose(kernel: &Kernel, packages: Vec<Package>) -> Result<(Package, bool)> {
    if let Some(pin) = &kernel.pin
        && let Some(package) = packages.iter().find(|package| package.version == pin.version)
    {
        if package.sha256 != pin.sha256 {
            bail!(
                "{} {} on the mirror has hash {}, and {} is recorded: the package or the record was changed",
                package.name,
                package.version,
                package.sha256,
                pin.sha256
            );
        }
        return Ok((package.clone(), true));
    }
    let newest = packages
        .into_iter()
        .reduce(|one, other| if is_newer(&other.version, &one.version) { other } else { one });
    let newest =
        newest.with_context(|| format!("no package {} in suite {}", kernel.packages[0], kernel.suite))?;
    Ok((newest, false))
}

/// Compares versions by Debian's rules, which `dpkg` implements.
fn is_newer(version: &str, than: &str) -> bool {
    output(Command::new("dpkg").args(["--compare-versions", version, "gt", than])).is_ok()
}

/// The part of a name that the `*` of its pattern matches.
fn between<'a>(pattern: &str, name: &'a str) -> Option<&'a str> {
    let (before, after) = pattern.split_once('*')?;
    name.strip_prefix(before)?.strip_suffix(after)
}

/// Copies image and modules from unpacked packages into the cache, and records their hashes.
fn store(folder: &Path, unpacked: &Path, package: &Package) -> Result<()> {
    let files = files(unpacked)?;
    let named = |wanted: &str| -> Option<&PathBuf> {
        files
            .iter()
            .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(wanted)))
    };
    let image = named("vmlinuz").with_context(|| format!("no kernel image in {}", package.name))?;
    fs::rename(image, folder.join("vmlinuz"))?;
    fs::create_dir(folder.join("modules"))?;
    let mut loaded: Vec<String> = Vec::new();
    let mut pending: Vec<String> = MODULES.iter().rev().map(|module| (*module).to_owned()).collect();
    // The loop is bounded: a module is read at most twice, before and after its dependencies are
    // stored.
    while let Some(module) = pending.pop() {
        if loaded.contains(&module) {
            continue;
        }
        // A module without a file is built into the kernel.
        let Some(path) = named(&format!("{module}.ko")) else { continue };
        let bytes = decompressed(path)?;
        let missing: Vec<String> = needs(&bytes).into_iter().filter(|need| !loaded.contains(need)).collect();
        let missing: Vec<String> =
            missing.into_iter().filter(|need| named(&format!("{need}.ko")).is_some()).collect();
        if missing.is_empty() {
            // The number in the file's name is the position of the module in the load order.
            fs::write(folder.join(format!("modules/{:02}-{module}.ko", loaded.len())), bytes)?;
            loaded.push(module);
        } else {
            pending.push(module);
            pending.extend(missing);
        }
    }
    let mut hashes = BTreeMap::new();
    for path in self::files(folder)?.iter().filter(|path| !path.starts_with(unpacked)) {
        let name = path.strip_prefix(folder)?.to_string_lossy().into_owned();
        hashes.insert(name, hex(&fs::read(path)?));
    }
    let Package { name, version, sha256 } = package.clone();
    let modules = MODULES.map(str::to_owned).to_vec();
    let cached_kernel = CachedKernel { package: name, version, sha256, modules, files: hashes };
    let mut text = format!(
        "package = \"{}\"\nversion = \"{}\"\nsha256 = \"{}\"\nmodules = {MODULES:?}\n\n[files]\n",
        cached_kernel.package, cached_kernel.version, cached_kernel.sha256
    );
    for (file, sha256) in &cached_kernel.files {
        text += &format!("\"{file}\" = \"{sha256}\"\n");
    }
    fs::write(folder.join(RECORD_FILE), text).context("write the description of a cached kernel")
}

fn decompressed(module: &Path) -> Result<Vec<u8>> {
    if module.extension().is_some_and(|extension| extension == "ko") {
        return fs::read(module).with_context(|| format!("read {}", module.display()));
    }
    let xz = Command::new("xz").arg("-dc").arg(module).output().context("start xz")?;
    if !xz.status.success() {
        bail!("xz -dc {}: {}", module.display(), xz.status);
    }
    Ok(xz.stdout)
}

/// The modules that a module depends on. They are read from the module itself, because packages
/// have no index of them.
fn needs(module: &[u8]) -> Vec<String> {
    let mark = b"depends=";
    let Some(at) = module.windows(mark.len()).position(|window| window == mark) else { return Vec::new() };
    let value = &module[at + mark.len()..];
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    let names = String::from_utf8_lossy(&value[..end]).into_owned();
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut pending = vec![folder.to_owned()];
    // The loop is bounded by the number of folders below `folder`. Each is read once, because links
    // are not followed.
    while let Some(path) = pending.pop() {
        for entry in fs::read_dir(&path).with_context(|| format!("read {}", path.display()))? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                pending.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Records, for every pinned series, the version and the hash of its newest package.
fn record() -> Result<()> {
    let mut text = fs::read_to_string(path()).context("read tests/vm/kernels.toml")?;
    for kernel in listed()? {
        let Some(pin) = kernel.pin.clone() else { continue };
        let apt = reach(&kernel)?;
        let (newest, _) =
            choose(&Kernel { pin: None, ..kernel.clone() }, apt.packages(&kernel.packages[0])?)?;
        println!("kernels: {}: {} is the newest, {} was recorded", kernel.name, newest.version, pin.version);
        text = text.replace(&pin.version, &newest.version).replace(&pin.sha256, &newest.sha256);
    }
    fs::write(path(), text).context("write tests/vm/kernels.toml")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(version: &str, sha256: &str) -> Package {
        Package { name: format!("linux-{version}"), version: version.to_owned(), sha256: sha256.to_owned() }
    }

    fn pinned(version: &str, sha256: &str) -> Kernel {
        let pin = Pin { version: version.to_owned(), sha256: sha256.to_owned() };
        let packages = vec!["linux-*".to_owned()];
        Kernel { name: "6.1".to_owned(), suite: "sid".to_owned(), packages, pin: Some(pin) }
    }

    #[test]
    fn the_recorded_kernels_can_be_read() {
        let kernels = listed().unwrap();
        let names: Vec<&str> = kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        assert_eq!(names, ["5.10", "6.1", "6.12", "newest"]);
        assert!(kernels.iter().all(|kernel| kernel.pin.is_some() == (kernel.name != "newest")));
    }

    #[test]
    fn the_recorded_version_is_chosen_while_the_mirror_has_it() {
        let there = vec![package("6.1.9-1", "aa"), package("6.1.10-1", "bb")];
        assert_eq!(choose(&pinned("6.1.9-1", "aa"), there.clone()).unwrap(), (there[0].clone(), true));
        let error = choose(&pinned("6.1.9-1", "cc"), there).unwrap_err().to_string();
        assert!(error.contains("has hash aa, and cc is recorded"), "{error}");
    }

    #[test]
    fn the_newest_version_replaces_a_vanished_one() {
        let there = vec![package("6.1.10-1", "bb"), package("6.1.9-1", "aa")];
        assert_eq!(choose(&pinned("6.1.8-1", "cc"), there.clone()).unwrap(), (there[0].clone(), false));
        assert!(choose(&pinned("6.1.8-1", "cc"), Vec::new()).is_err());
    }

    #[test]
    fn a_changed_file_in_the_cache_is_rejected() {
        let folder = std::env::temp_dir().join(format!("socklb-kernels-{}", std::process::id()));
        let unpacked = folder.join("unpacked");
        fs::create_dir_all(unpacked.join("boot")).unwrap();
        fs::write(unpacked.join("boot/vmlinuz-6.1"), "kernel").unwrap();
        fs::write(unpacked.join("tcp_diag.ko"), "\0depends=inet_diag\0").unwrap();
        fs::write(unpacked.join("inet_diag.ko"), "\0depends=\0").unwrap();
        store(&folder, &unpacked, &package("6.1.9-1", "aa")).unwrap();
        let good = cached_kernel(&folder).unwrap();
        let names: Vec<&str> = good.files.keys().map(String::as_str).collect();
        assert_eq!(names, ["modules/00-inet_diag.ko", "modules/01-tcp_diag.ko", "vmlinuz"]);
        fs::write(folder.join("vmlinuz"), "other").unwrap();
        let error = cached_kernel(&folder).unwrap_err().to_string();
        assert!(error.contains("vmlinuz has changed in the cache"), "{error}");
        fs::remove_dir_all(&folder).unwrap();
    }
}
