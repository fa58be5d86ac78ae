//! Other balancers on the same machine, as Debian packages them: nftables in its own network
//! namespace, and HAProxy in the benchmark's namespace. Both end with the benchmark, even if it is
//! killed.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use stage::daemon::ChildGuard;
use stage::eventually;
use stage::probe::die_with_us;

use crate::place::process::start;

/// The address of the service of nftables. It is in the loopback range, because a DNAT rule of the
/// output hook applies only if there is a route. No process listens at this address, so a connect
/// that is not rewritten is refused.
pub const NFT_SERVICE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(127, 96, 0, 9), 80);
/// The address at which HAProxy listens.
pub const HAPROXY_SERVICE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 18080);

/// Finds a program of a Debian package.
fn find(name: &str, package: &str) -> Result<PathBuf> {
    let path = Path::new("/usr/sbin").join(name);
    if !path.exists() {
        bail!(
            "{} is missing: `cargo xtask setup` installs the Debian package {package}; \
             `--group` selects groups that do not need it",
            path.display()
        );
    }
    Ok(path)
}

/// A network namespace in which nftables sends one service to backends.
pub struct Nft {
    pub network: File,
}

impl Nft {
    pub fn start(backends: &[SocketAddr]) -> Result<Self> {
        let nft = find("nft", "nftables")?;
        let rules = rules(backends)?;
        let mut outcome = Ok(());
        let network = stage::namespace::another_network(|| outcome = load(&nft, &rules));
        outcome?;
        Ok(Self { network })
    }

    /// A path of the namespace. It is valid as long as this value exists.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.network.as_raw_fd()).into()
    }
}

/// Writes rules in the form of kube-proxy's: a verdict map of services, one chain per service that
/// selects a random endpoint, and one chain per endpoint.
fn rules(backends: &[SocketAddr]) -> Result<String> {
    let mut text = String::from("table ip bench {\n");
    let mut numbers = Vec::new();
    for (number, backend) in backends.iter().enumerate() {
        writeln!(text, "  chain endpoint-{number} {{ meta l4proto tcp dnat to {backend}; }}")?;
        numbers.push(format!("{number} : goto endpoint-{number}"));
    }
    let (count, numbers) = (numbers.len(), numbers.join(", "));
    let (address, port) = (NFT_SERVICE.ip(), NFT_SERVICE.port());
    write!(
        text,
        "  chain service {{ numgen random mod {count} vmap {{ {numbers} }}; }}\n  \
           map services {{ type ipv4_addr . inet_proto . inet_service : verdict; \
           elements = {{ {address} . tcp . {port} : goto service }}; }}\n  \
           chain output {{ type nat hook output priority -100; ip daddr . meta l4proto . th dport vmap @services; }}\n}}\n"
    )?;
    Ok(text)
}

fn load(nft: &Path, rules: &str) -> Result<()> {
    let mut child = Command::new(nft).args(["-f", "-"]).stdin(Stdio::piped()).spawn()?;
    child.stdin.take().context("piped")?.write_all(rules.as_bytes())?;
    let status = child.wait()?;
    if !status.success() {
        bail!("nft rejects the rules: {status}\n{rules}");
    }
    Ok(())
}

/// HAProxy in front of backends.
pub struct Haproxy(ChildGuard);

impl Haproxy {
    /// Starts HAProxy and waits until it accepts connections.
    pub fn start(folder: &Path, backends: &[SocketAddr]) -> Result<Self> {
        let haproxy = find("haproxy", "haproxy")?;
        let mut text = format!(
            "global\n  nbthread 2\n  maxconn 4096\n  log /dev/null local0\n\
             defaults\n  mode tcp\n  balance roundrobin\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n\
             listen bench\n  bind {HAPROXY_SERVICE}\n"
        );
        for (number, backend) in backends.iter().enumerate() {
            writeln!(text, "  server b{number} {backend}")?;
        }
        let path = folder.join("haproxy.cfg");
        std::fs::write(&path, text)?;
        let mut command = Command::new(haproxy);
        // HAProxy runs in the foreground and without a master, so that a single process ends with
        // the benchmark.
        command.args(["-q", "-db", "-f"]).arg(&path).stdin(Stdio::null()).stdout(Stdio::null());
        die_with_us(&mut command);
        let started = Self(start(&mut command)?);
        eventually("HAProxy answers", || TcpStream::connect(HAPROXY_SERVICE).is_ok(), |answers| *answers);
        Ok(started)
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_has_a_chain_for_each_endpoint() {
        let backends = [([127, 0, 0, 1], 1).into(), ([127, 0, 0, 1], 2).into()];
        let text = rules(&backends).unwrap();
        assert!(text.contains("chain endpoint-1 { meta l4proto tcp dnat to 127.0.0.1:2; }"), "{text}");
        assert!(
            text.contains("numgen random mod 2 vmap { 0 : goto endpoint-0, 1 : goto endpoint-1 }; }"),
            "{text}"
        );
        assert!(text.contains("127.96.0.9 . tcp . 80 : goto service"), "{text}");
    }
}
