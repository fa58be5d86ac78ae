//! Runs apt with a separate state for one suite of Debian. The state uses the mirror that the
//! machine's apt sources name, but does not change these sources. apt itself checks signatures and
//! hashes, with Debian's own keys.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{output, run as run_command};

/// A separate apt state for one suite: its configuration, package lists and cache.
pub struct Apt {
    config: PathBuf,
}

/// A package, as described in a signed package list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    pub name: String,
    pub version: String,
    /// SHA-256 of the archive.
    pub sha256: String,
}

/// Debian's keys, from the package `debian-archive-keyring`.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Debian's suites. A line of the machine's apt sources with another suite does not name a Debian
/// mirror.
const SUITES: [&str; 9] =
    ["bullseye", "bookworm", "trixie", "forky", "sid", "oldstable", "stable", "testing", "unstable"];
const SECURITY: &str = "-security";

impl Apt {
    /// Fetches the package lists of a suite into a separate state. `architecture` is Debian's name
    /// of the architecture, such as `amd64`.
    pub fn of_suite(suite: &str, architecture: &str, folder: &Path) -> Result<Self> {
        let mirror = mirror(suite)?;
        for part in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(folder.join(part)).with_context(|| format!("make {}", folder.display()))?;
        }
        fs::write(folder.join("status"), "").context("write apt's status")?;
        let source = format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n");
        fs::write(folder.join("sources.list"), source).context("write apt's sources")?;
        let config = folder.join("apt.conf");
        fs::write(&config, configuration(folder, architecture)).context("write apt's configuration")?;
        let apt = Self { config };
        run_command(apt.command("apt-get").args(["--quiet=2", "update"]))
            .with_context(|| format!("reach suite {suite} on {mirror}"))?;
        Ok(apt)
    }

    /// The packages whose names match a pattern. The pattern has one `*`, which stands for a text
    /// that begins with a digit.
    pub fn packages(&self, pattern: &str) -> Result<Vec<Package>> {
        let (before, after) = pattern.split_once('*').context("a package pattern must have one `*`")?;
        let expression = format!("^{}[0-9].*{}$", before.replace('.', r"\."), after.replace('.', r"\."));
        let names = output(self.command("apt-cache").args(["search", "--names-only", &expression]))?;
        let names: Vec<&str> = names.lines().filter_map(|line| line.split(' ').next()).collect();
        if names.is_empty() {
            return Ok(Vec::new());
        }
        Ok(parse(&output(self.command("apt-cache").arg("show").args(names))?))
    }

    /// The newest version of a package.
    pub fn newest(&self, name: &str) -> Result<Package> {
        // The first version in the output of `show` is the version that apt installs.
        let shown = parse(&output(self.command("apt-cache").args(["show", name]))?);
        shown.into_iter().next().with_context(|| format!("there is no package {name}"))
    }

    /// Downloads one package into a folder; returns its path.
    pub fn download(&self, name: &str, version: &str, folder: &Path) -> Result<PathBuf> {
        let mut download = self.command("apt-get");
        download.args(["--quiet=2", "download", &format!("{name}={version}")]).current_dir(folder);
        run_command(&mut download)?;
        let is_archive = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "deb");
        let mut paths = fs::read_dir(folder)?.filter_map(|entry| entry.ok().map(|entry| entry.path()));
        paths.find(is_archive).with_context(|| format!("{name} was downloaded, but its archive is missing"))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("--config-file").arg(&self.config);
        command
    }
}

/// The configuration of the separate state. apt reads the machine's configuration first, because
/// the mirror may be reachable only with the machine's settings, such as a proxy.
fn configuration(folder: &Path, architecture: &str) -> String {
    let folder = folder.display();
    format!(
        "Dir::Etc::SourceList \"{folder}/sources.list\";\nDir::Etc::SourceParts \"/dev/null\";\n\
         Dir::Etc::Preferences \"/dev/null\";\nDir::Etc::PreferencesParts \"/dev/null\";\n\
         Dir::State \"{folder}\";\nDir::State::Lists \"{folder}/lists\";\nDir::State::Status \"{folder}/status\";\n\
         Dir::Cache \"{folder}/cache\";\n\
         APT::Architecture \"{architecture}\";\n#clear APT::Architectures;\nAPT::Architectures {{ \"{architecture}\"; }};\n\
         Acquire::Languages \"none\";\nAcquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n\
         APT::Sandbox::User \"root\";\nAPT::Update::Error-Mode \"any\";\n\
         #clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n"
    )
}

/// The mirror that the machine's sources name for this kind of suite. There are two kinds: security
/// updates, and all others.
fn mirror(suite: &str) -> Result<String> {
    if !Path::new(KEYRING).exists() {
        bail!("{KEYRING} is missing: install debian-archive-keyring");
    }
    let mut targets = Command::new("apt-get");
    targets.args(["indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"]);
    let targets = output(&mut targets).context("list apt's sources")?;
    choose_mirror(&targets, suite).with_context(|| {
        format!(
            "apt's sources name no Debian mirror that may have {suite}: add one to /etc/apt/sources.list.d"
        )
    })
}

/// Chooses the mirror of a suite. Security updates have a separate mirror.
fn choose_mirror(targets: &str, suite: &str) -> Option<String> {
    let is_debian = |release: &str| SUITES.contains(&release.split('-').next().unwrap_or(release));
    let fits = |line: &&str| {
        let release = line.split(' ').nth(1).unwrap_or_default();
        is_debian(release) && release.ends_with(SECURITY) == suite.ends_with(SECURITY)
    };
    Some(targets.lines().find(fits)?.split(' ').next()?.to_owned())
}

/// Parses stanzas of `Field: value`, separated by empty lines.
fn parse(text: &str) -> Vec<Package> {
    let field = |stanza: &str, name: &str| {
        let line = stanza.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        line.map(str::to_owned)
    };
    let package = |stanza: &str| {
        Some(Package {
            name: field(stanza, "Package")?,
            version: field(stanza, "Version")?,
            sha256: field(stanza, "SHA256")?,
        })
    };
    text.split("\n\n").filter_map(package).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn security_updates_come_from_the_security_mirror() {
        let targets = "http://other.example/ubuntu/ noble\nhttp://a.example/debian/ bookworm\n\
                       http://a.example/debian/ bookworm-updates\nhttp://b.example/security/ bookworm-security\n";
        assert_eq!(choose_mirror(targets, "sid").as_deref(), Some("http://a.example/debian/"));
        let security = choose_mirror(targets, "bullseye-security");
        assert_eq!(security.as_deref(), Some("http://b.example/security/"));
        assert_eq!(choose_mirror("http://other.example/ubuntu/ noble\n", "sid"), None);
    }

    #[test]
    fn packages_are_read_from_stanzas() {
        let text =
            "Package: a\nVersion: 1-1\nDescription: b\n c\nSHA256: ff\n\nPackage: no-hash\nVersion: 2\n";
        let a = Package { name: "a".to_owned(), version: "1-1".to_owned(), sha256: "ff".to_owned() };
        assert_eq!(parse(text), [a]);
    }
}
